"""Running atomic handlers in their group's transaction, each behind a savepoint of its own where
there are others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from django.db import DatabaseError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone

from kjo_django.engine import admission, failures
from kjo_django.engine.attempt import Attempt, Ending
from kjo_django.engine.handler.call import ENDINGS, CallResult, call, is_interrupt, make_context
from kjo_django.engine.handler.connections import (
    freshen_connections,
    is_broken,
    is_unusable,
    keeping_transaction,
    open_blocks,
)
from kjo_django.engine.handler.context import JobContext
from kjo_django.engine.handler.savepoint import CAUGHT, LazySavepoint
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.runners.batch import UNWANTED, Batch, in_steps, run_batch
from kjo_django.models import EventKey
from kjo_django.runtime import Runtime

OVERRUN = 100
"""Times its budget a group may run before it ends with the handler that runs: what has completed is
committed, and what has not begun comes up again."""
_NOTHING = nullcontext()
_RAN = (Ending.COMPLETED, Ending.RETRIED, Ending.DEAD, Ending.CANCELLED)


class ConnectionLost(DatabaseError):
    """The database connection broke while a handler ran.

    :param attempt: of that handler, had it been alone.
    """

    def __init__(self, attempt: Attempt) -> None:
        text = failures.error_text(attempt.error)
        super().__init__(f"The connection broke during {attempt.delivery.kind}: {text}")
        self.attempt = attempt


class RolledBack(Exception):
    """A handler failed that has no savepoint of its own, so its transaction is to be rolled back.

    :param ended: attempts that were asked to end, and did: they are not to run again.
    """

    def __init__(self, ended: Sequence[Attempt]) -> None:
        super().__init__()
        self.ended = ended


class TransactionRunner:
    """Calls a group's handlers one after the other, in the transaction that their caller is in.

    :param on_measure: is called with a handler's name and the seconds that its call took.
    """

    def __init__(
        self, runtime: Runtime, watch: TimeoutWatch, on_measure: Callable[[str, float], None]
    ) -> None:
        self._runtime = runtime
        self._watch = watch
        self._on_measure = on_measure

    def run(self, attempts: Sequence[Attempt], savepoint: LazySavepoint | None = None) -> None:
        """Call the handlers of the attempts that have no ending; each has one then.

        :param savepoint: what stands behind each handler; None: a handler that fails undoes the
            whole transaction.
        :raises RolledBack: one has failed that has no savepoint.
        :raises DatabaseError: the transaction failed as a whole.
        """
        using = self._runtime.database
        connection = connections[using]
        # Only where there are others.
        outer = open_blocks() if len(connections.settings) > 1 else None
        budget = self._runtime.settings.group_budget.total_seconds()
        until = time.monotonic() + OVERRUN * budget
        ended: dict[EventKey, Attempt] = {}
        held_back = admission.HeldBack()
        steps = in_steps(attempts) if len(attempts) > 1 else [attempts]
        for number, step in enumerate(steps):
            is_late = number > 0 and time.monotonic() >= until
            calls = []
            for attempt in step:
                if attempt.key in ended:
                    # Two records of one message in a group, as a crashed relay leaves them. The row
                    # says nothing of what the first has just ended with.
                    has_completed = ended[attempt.key].ending is Ending.COMPLETED
                    attempt.ending = Ending.DUPLICATE if has_completed else Ending.SKIPPED
                    attempt.reason, attempt.error = "" if has_completed else "attempt", None
                elif is_late and attempt.ending is None:
                    attempt.ending, attempt.reason = Ending.DEFERRED, "budget"
                elif held_back and attempt.ending is None and held_back.covers(attempt.delivery):
                    attempt.ending, attempt.reason = Ending.DEFERRED, "paused"
                elif attempt.ending is None:
                    if number > 0:
                        admission.end_expired(attempt, timezone.now())
                    if attempt.ending is None:
                        calls.append(attempt)
            if calls:
                self._call(connection, savepoint, calls)
            if len(steps) > 1:
                held_back.after(step)
                ended.update((a.key, a) for a in step if a.ending in _RAN)
        if outer is not None and (left := freshen_connections(outer=outer, but=using)):
            raise left

    def _call(
        self,
        connection: BaseDatabaseWrapper,
        savepoint: LazySavepoint | None,
        attempts: Sequence[Attempt],
    ) -> None:
        """Call one handler behind its savepoint, if there is one, and judge how it ended."""
        first = attempts[0]
        if first.delivery.batch is not None:
            self._call_batch(connection, savepoint, attempts)
            return
        context = make_context(JobContext, first)
        error: BaseException | None = None
        first.started_at = timezone.now()
        clock = time.perf_counter()
        try:
            with savepoint or _NOTHING, keeping_transaction(connection):
                first.result = call(first.delivery, context, self._watch)
        except ENDINGS as met:
            if is_interrupt(met):
                raise
            error = met
        first.seconds, first.result_ttl = time.perf_counter() - clock, context.result_ttl
        self._on_measure(first.delivery.kind, first.seconds)
        if error is None and is_unusable(connection):
            error = transaction.TransactionManagementError(CAUGHT)
        if error is None:
            first.ending = Ending.COMPLETED
            return
        failures.judge_error(self._runtime, first, error, context.abort_reason)
        if savepoint is None:
            raise RolledBack([first] if context.abort_reason in UNWANTED else []) from error
        if is_broken(connection):
            # Gone, and with it the group's transaction; the error is the job's only if it was alone
            # in it.
            raise ConnectionLost(first) from error

    def _call_batch(
        self,
        connection: BaseDatabaseWrapper,
        savepoint: LazySavepoint | None,
        attempts: Sequence[Attempt],
    ) -> None:
        def run(batch: Batch) -> list[CallResult]:
            try:
                with savepoint or _NOTHING, keeping_transaction(connection):
                    endings = batch.call(self._watch)
                if savepoint is not None and is_unusable(connection):
                    raise transaction.TransactionManagementError(CAUGHT)
            except ENDINGS as error:
                if is_interrupt(error):
                    raise
                if savepoint is None:
                    aborted = batch.aborted(error)
                    for attempt, called in aborted.items():
                        failures.judge(self._runtime, attempt, called)
                    raise RolledBack(list(aborted)) from error
                if is_broken(connection):
                    lost = failures.judge_error(self._runtime, batch.attempts[0], error)
                    raise ConnectionLost(lost) from error
                raise
            if savepoint is None and is_unusable(connection):
                raise RolledBack([])
            return endings

        endings = run_batch(Batch(attempts), run, passing=(ConnectionLost, RolledBack))
        self._on_measure(attempts[0].delivery.kind, sum(e.seconds for e in endings) / len(endings))
        for attempt, called in zip(attempts, endings, strict=True):
            failures.judge(self._runtime, attempt, called)
