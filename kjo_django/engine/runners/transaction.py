"""Running atomic handlers: a group's transaction, with each handler behind a savepoint of its own.

The markers are its first write, the update of the jobs' rows its last, so what a handler wrote is
committed together with the record that it has run, or not at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from django.db import DatabaseError, Error, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone

from kjo_django.engine import admission, completion, failures
from kjo_django.engine.attempt import Attempt, Delivery, Ending
from kjo_django.engine.dead_lettering import error_text
from kjo_django.engine.handler.call import ENDINGS, Ran, call, is_interrupt, make_context
from kjo_django.engine.handler.connections import (
    answers,
    freshen_connections,
    is_broken,
    is_unusable,
    leaving_no_blocks,
    open_blocks,
    refusal_of,
)
from kjo_django.engine.handler.context import JobContext
from kjo_django.engine.handler.savepoint import CAUGHT, LazySavepoint
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.job_rows import mark_and_load, row_id
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.outage_retry import OUTAGES
from kjo_django.engine.runners.batch import UNWANTED, Batch, in_steps, run_batch
from kjo_django.models import EventKey
from kjo_django.store.rows import JobRow

logger = logging.getLogger("kjo_django")

OVERRUN = 100
"""Times its budget a group may run before it ends with the handler that runs: what has completed is
committed, and what has not begun comes up again."""
_NOTHING = nullcontext()
_RAN = (Ending.COMPLETED, Ending.RETRIED, Ending.DEAD, Ending.CANCELLED)
_OF_GROUP = (Ending.COMPLETED, Ending.DUPLICATE, Ending.SKIPPED)
"""Endings that the group's own transaction makes durable."""


class ConnectionLost(DatabaseError):
    """The database connection broke while a handler ran.

    :param attempt: of that handler, had it been alone.
    """

    def __init__(self, attempt: Attempt) -> None:
        text = error_text(attempt.error)
        super().__init__(f"The connection broke during {attempt.delivery.kind}: {text}")
        self.attempt = attempt


class _RollBack(Exception):
    """A handler failed that has no savepoint of its own, so its transaction is to be rolled back.

    :param ended: how calls have ended; in a group, of those only that are not to run again.
    :param of_group: whether they are, if the handler was not alone.
    """

    def __init__(self, ended: dict[Delivery, Ran], *, of_group: bool = True) -> None:
        super().__init__()
        self.ended = ended
        self.of_group = of_group


class TransactionRunner:
    """Runs groups in one transaction each. Keeps no state between them."""

    def __init__(
        self, leases: LeaseBook, watch: TimeoutWatch, on_measure: Callable[[str, float], None]
    ) -> None:
        self._leases = leases
        self._runtime = leases.runtime
        self._watch = watch
        self._on_measure = on_measure

    def run_alone(self, delivery: Delivery) -> Attempt:
        """Run a delivery in its own transaction; what its commit raises is its own failure, and so
        is any error of ours."""
        attempts: list[Attempt] = []
        try:
            self.run([delivery], attempts)
            return attempts[0]
        except OUTAGES as error:
            if not isinstance(error, DatabaseError):
                raise
            attempt = error.attempt if isinstance(error, ConnectionLost) else None
            if attempt is None and attempts and attempts[0].ending is Ending.COMPLETED:
                attempt = attempts[0]
            # A database that answers again at once was not down: the job broke its connection or
            # its commit, and would do so for ever if that did not count as an attempt.
            if attempt is None or not answers(self._runtime.database):
                raise
            if attempt.is_in_doubt and self._is_committed(attempt):
                attempt.is_recorded = attempt.is_confirmed = True
                return attempt
            return failures.judge_error(attempt, attempt.error or error)
        except Exception as error:
            logger.exception("An attempt of %s could not be judged; it counts", delivery.kind)
            return failures.judge_error(admission.failed_outside(self._runtime, delivery, error))

    def run(self, deliveries: list[Delivery], attempts: list[Attempt]) -> None:
        """Run a group in one transaction.

        Without savepoints where there is one delivery only: when it fails, the whole transaction is
        rolled back. Without them, too, where every handler of the group has no effect that a
        roll-back does not undo: the first that fails undoes all, and all run again, each behind its
        own.

        :param attempts: one of each delivery is added to it.
        :raises DatabaseError: the transaction failed as a whole; nothing has taken effect.
        """
        known: dict[Delivery, Ran] = {}
        is_alone = len(deliveries) == 1 and deliveries[0].batch is None
        if is_alone or (len(deliveries) > 1 and all(map(_is_database_only, deliveries))):
            try:
                self._run(attempts, deliveries, None)
                return
            except _RollBack as rolled_back:
                attempts.clear()
                if is_alone or rolled_back.of_group:
                    known = rolled_back.ended
        self._run(attempts, deliveries, known)

    def _run(
        self,
        attempts: list[Attempt],
        deliveries: list[Delivery],
        known: dict[Delivery, Ran] | None,
    ) -> None:
        """:param known: how some have ended already; None: run without savepoints."""
        self._watch.check()
        runtime, store = self._runtime, self._runtime.store
        using, service = runtime.database, runtime.service
        connection = connections[using]
        keys = {delivery: delivery.event_key(service) for delivery in deliveries}
        # Two records of one message in a group, as a crashed relay leaves them.
        has_repeats = len(set(keys.values())) < len(keys)
        ended: dict[EventKey, Attempt] = {}
        held_back = admission.HeldBack()
        savepoint = None if known is None else LazySavepoint(connection, store)
        behind = savepoint or _NOTHING
        watching = savepoint.group() if savepoint is not None else _NOTHING
        # Only where there are others.
        outer = open_blocks() if len(connections.settings) > 1 else None
        until = time.monotonic() + OVERRUN * runtime.settings.group_budget.total_seconds()
        with (
            completion.recording(store, calls_handlers=True) as recorded,
            leaving_no_blocks(connection),
            watching,
        ):
            fresh, rows = mark_and_load(runtime, list(keys.values()), deliveries)
            for step in in_steps(deliveries, keys):
                if attempts and time.monotonic() >= until:
                    attempts += [Attempt(d, Ending.DEFERRED, "budget") for d in step]
                    continue
                new: list[Attempt] = []
                for delivery in step:
                    key, row = keys[delivery], rows.get(row_id(delivery, service))
                    if delivery in held_back:
                        new.append(Attempt(delivery, Ending.DEFERRED, "paused", row))
                        continue
                    if has_repeats and key in ended:
                        # The row read above says nothing of what the first just ended with.
                        attempts.append(_repeated(delivery, ended[key], row))
                        continue
                    attempt = admission.admit(
                        delivery, row, is_fresh=key in fresh, leases=self._leases
                    )
                    attempt.is_marked = key in fresh
                    if attempt.ending is None and known and delivery in known:
                        failures.judge(attempt, known[delivery])
                    new.append(attempt)
                if admitted := [attempt for attempt in new if attempt.ending is None]:
                    self._call(connection, behind, admitted, known)
                attempts += held_back.after(new)
                if has_repeats:
                    ended |= {keys[a.delivery]: a for a in new if a.ending in _RAN}
            self._watch.check()
            completed = [a for a in attempts if a.ending is Ending.COMPLETED]
            if outer is not None and (left := freshen_connections(outer=outer, but=using)):
                raise left
            # A marker left behind would make every later attempt look like a duplicate.
            if unused := set(fresh) - {keys[attempt.delivery] for attempt in completed}:
                store.delete_markers(unused)
            settled = [a for a in attempts if a.ending in _OF_GROUP]
            completion.acknowledge_within(settled)
            released = self._release_within(using, settled)
            _make_callbacks_robust(connection)
            recorded += completed
            completion.complete(store, completed, is_last=True)
        for attempt in released:
            attempt.is_released = True

    def _release_within(self, using: str, settled: Sequence[Attempt]) -> list[Attempt]:
        """Give back, with the transaction that makes the endings durable, the leases of those that
        have no hook to be called under them; where coordination cannot, it is done afterwards.

        :raises OperationalError: the transaction is not to be committed.
        """
        if not self._leases.can_release_within(using):
            return []
        ended = [a for a in settled if a.delivery.handler and not a.delivery.handler.observes]
        if ended:
            self._leases.release_within(using, [a.delivery.lease for a in ended])
        return ended

    def _is_committed(self, attempt: Attempt) -> bool:
        """Return whether the COMMIT of a completion that was not answered has taken effect."""
        handler = attempt.delivery.handler
        if handler is None or (handler.judges_itself and not attempt.is_marked):
            return False  # its marker is of an earlier message
        key = attempt.delivery.event_key(self._runtime.service)
        return key in self._runtime.store.known_markers([key])

    def _call(
        self,
        connection: BaseDatabaseWrapper,
        behind: AbstractContextManager[Any],
        attempts: Sequence[Attempt],
        known: dict[Delivery, Ran] | None,
    ) -> None:
        """Call one handler behind its savepoint, if there is one, and judge how it ended."""
        first = attempts[0]
        if first.delivery.batch is not None:
            self._call_batch(connection, behind, attempts, known)
            return
        context = make_context(JobContext, first)
        ran = Ran(timezone.now(), 0.0)
        blocks, clock = len(connection.atomic_blocks), time.perf_counter()
        try:
            with behind:
                ran.value = call(first.delivery, context, self._watch)
                if connection.closed_in_transaction or len(connection.atomic_blocks) > blocks:
                    raise refusal_of(connection, blocks)
        except ENDINGS as error:
            if is_interrupt(error):
                raise
            ran.error, ran.abort_reason = _as_met(error, connection, blocks), context.abort_reason
        ran.seconds, ran.result_ttl = time.perf_counter() - clock, context.result_ttl
        self._on_measure(first.delivery.kind, ran.seconds)
        if ran.error is None and is_unusable(connection):
            ran.error = transaction.TransactionManagementError(CAUGHT)
        if known is None and ran.error is not None:
            # In a group only one that was asked to end, and did, is not to run again.
            is_unwanted = ran.abort_reason in UNWANTED
            raise _RollBack({first.delivery: ran}, of_group=is_unwanted) from ran.error
        failures.judge(first, ran)
        if ran.error is not None and is_broken(connection):
            # Gone, and with it the group's transaction; the error is the job's only if it was
            # alone in it, see above.
            raise ConnectionLost(first) from ran.error

    def _call_batch(
        self,
        connection: BaseDatabaseWrapper,
        behind: AbstractContextManager[Any],
        attempts: Sequence[Attempt],
        known: dict[Delivery, Ran] | None,
    ) -> None:
        def run(batch: Batch) -> list[Ran]:
            blocks = len(connection.atomic_blocks)
            try:
                with behind:
                    endings = batch.call(self._watch)
                    if connection.closed_in_transaction or len(connection.atomic_blocks) > blocks:
                        raise refusal_of(connection, blocks)
                if known is not None and is_unusable(connection):
                    raise transaction.TransactionManagementError(CAUGHT)
            except ENDINGS as error:
                if is_interrupt(error):
                    raise
                if known is None:
                    raise _RollBack(batch.aborted(error)) from error
                if is_broken(connection):
                    ran = Ran(timezone.now(), 0.0, error=_as_met(error, connection, blocks))
                    raise ConnectionLost(failures.judge(batch.attempts[0], ran)) from error
                raise
            if known is None and is_unusable(connection):
                raise _RollBack({})
            return endings

        endings = run_batch(Batch(attempts), run, passing=(ConnectionLost, _RollBack))
        self._on_measure(attempts[0].delivery.kind, sum(e.seconds for e in endings) / len(endings))
        for attempt, ran in zip(attempts, endings, strict=True):
            failures.judge(attempt, ran)


def _is_database_only(delivery: Delivery) -> bool:
    handler = delivery.handler
    return handler is not None and handler.options.database_only


def _as_met(error: BaseException, connection: BaseDatabaseWrapper, blocks: int) -> BaseException:
    """Return what to record of a handler: after it has closed the connection, what it met with that
    says less than that it did."""
    if not (connection.closed_in_transaction and isinstance(error, Error)):
        return error
    refusal = refusal_of(connection, blocks)
    refusal.__cause__ = error
    return refusal


def _repeated(delivery: Delivery, earlier: Attempt, row: JobRow | None) -> Attempt:
    """Judge another record of a message that has just been run."""
    if earlier.ending is Ending.COMPLETED:
        return Attempt(delivery, Ending.DUPLICATE, row=row)
    return Attempt(delivery, Ending.SKIPPED, "attempt", row)


def _make_callbacks_robust(connection: BaseDatabaseWrapper) -> None:
    """A handler's ``on_commit`` callback that raises is logged: the commit stands (KJO-F12)."""
    callbacks: list[Any] = connection.run_on_commit
    callbacks[:] = [(sids, _isolated(function), False) for sids, function, _robust in callbacks]


def _isolated(function: Callable[[], Any]) -> Callable[[], None]:
    # Django's own robust callbacks fail when it logs one without a __qualname__, such as a partial.
    def call() -> None:
        try:
            function()
        except ENDINGS as error:
            if is_interrupt(error):
                raise
            # Also what would end the process: the callbacks of others in the group come after it.
            logger.exception("An on_commit callback failed: %r", function)

    return call
