"""Running atomic handlers: a group's transaction, with each handler behind a savepoint of its own.

The markers are its first write, the update of the jobs' rows its last, so what a handler wrote is
committed with the word that it has run, or not at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from django.db import DatabaseError, Error, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone

from kjo_django.conf import get_settings
from kjo_django.engine import admission, completion, failures
from kjo_django.engine.attempt import Delivery, Outcome, Result
from kjo_django.engine.dead_lettering import error_text
from kjo_django.engine.handler.call import ENDINGS, Ran, call, is_interrupt, make_context
from kjo_django.engine.handler.connections import (
    answers,
    is_broken,
    is_unusable,
    leaving_no_blocks,
    left_elsewhere,
    open_blocks,
    refusal_of,
)
from kjo_django.engine.handler.savepoint import CAUGHT, LazySavepoint
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.job_rows import mark_and_load, row_id
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.outage_retry import OUTAGES
from kjo_django.engine.outcomes import (
    Resting,
    acknowledge,
    failure_of,
    is_settled_by_group,
    noting_doubt,
    outcome_of,
    release_leases,
)
from kjo_django.engine.runners.batch import UNWANTED, Batch, Started, in_steps, run_batch
from kjo_django.models import EventKey
from kjo_django.store import store_for
from kjo_django.store.rows import JobRow
from kjo_django.store.transactions import jobs_database

logger = logging.getLogger("kjo_django")

OVERRUN = 100
"""Times its budget a group may run before it ends with the handler that runs: what has completed is
committed, and what has not begun comes up again."""
_NOTHING = nullcontext()
_RAN = (Result.COMPLETED, Result.RETRIED, Result.DEAD, Result.CANCELLED)


class ConnectionLost(DatabaseError):
    """The database connection broke while a handler ran.

    :param outcome: of that handler, had it been alone.
    """

    def __init__(self, outcome: Outcome) -> None:
        text = error_text(outcome.error)
        super().__init__(f"The connection broke during {outcome.delivery.kind}: {text}")
        self.outcome = outcome


class _Spoiled(Exception):
    """A handler failed that has no savepoint of its own, so its transaction is to be rolled back.

    :param ended: those that were asked to end, and did: they are not to run again.
    :param failed: how it ended, by its delivery; not told of batches.
    """

    def __init__(self, ended: dict[Delivery, Ran], failed: dict[Delivery, Ran]) -> None:
        super().__init__()
        self.ended = ended
        self.failed = failed


class AtomicRunner:
    """Runs groups in one transaction each. Keeps no state between them."""

    def __init__(
        self, leases: LeaseBook, watch: TimeoutWatch, on_measure: Callable[[str, float], None]
    ) -> None:
        self._leases = leases
        self._watch = watch
        self._on_measure = on_measure

    def run_one(self, delivery: Delivery) -> list[Outcome]:
        """Run a delivery in its own transaction; what its commit raises is its own failure, and so
        is any error of ours."""
        attempted: list[Outcome] = []
        try:
            return self.run([delivery], attempted)
        except OUTAGES as error:
            if not isinstance(error, DatabaseError):
                raise
            outcome = error.outcome if isinstance(error, ConnectionLost) else None
            if outcome is None and attempted and attempted[0].result is Result.COMPLETED:
                outcome = attempted[0]
            # A database that answers again at once was not down: the job broke its connection or
            # its commit, and would do so for ever if that did not count as an attempt.
            if outcome is None or not answers(jobs_database()):
                raise
            if outcome is delivery.ending and _is_committed(delivery):
                outcome.is_confirmed = True
                return [outcome]
            outcome.error, outcome.value = outcome.error or error, None
            failures.judge_failure(outcome, outcome.max_attempts)
            return [outcome]
        except Exception as error:
            logger.exception("An attempt of %s could not be judged; it counts", delivery.kind)
            return [failure_of(delivery, error)]

    def run(
        self, deliveries: list[Delivery], attempted: list[Outcome] | None = None
    ) -> list[Outcome]:
        """Run a group in one transaction.

        Without savepoints where there is one delivery only: when it fails, the whole transaction is
        rolled back. Without them, too, where every handler of the group has no effect that a
        roll-back does not undo: the first that fails undoes all, and all run again, each behind its
        own.

        :param attempted: outcomes are added to it one by one.
        :raises DatabaseError: the transaction failed as a whole; nothing has taken effect.
        """
        attempted = [] if attempted is None else attempted
        known: dict[Delivery, Ran] = {}
        is_alone = len(deliveries) == 1 and deliveries[0].batch is None
        if is_alone or (len(deliveries) > 1 and all(map(_is_database_only, deliveries))):
            try:
                return self._run(attempted, deliveries, None)
            except _Spoiled as spoiled:
                attempted.clear()
                known = spoiled.failed if is_alone else spoiled.ended
        return self._run(attempted, deliveries, known)

    def _run(
        self,
        outcomes: list[Outcome],
        deliveries: list[Delivery],
        known: dict[Delivery, Ran] | None,
    ) -> list[Outcome]:
        """:param known: how some have ended already; None: run without savepoints."""
        self._watch.check()
        using, service = jobs_database(), get_settings().service_name
        connection = connections[using]
        keys = {delivery: delivery.event_key(service) for delivery in deliveries}
        # Two records of one message in a group, as a crashed relay leaves them.
        has_repeats = len(set(keys.values())) < len(keys)
        ended: dict[EventKey, Outcome] = {}
        resting = Resting()
        savepoint = LazySavepoint(connection)
        behind = _NOTHING if known is None else savepoint
        watching = _NOTHING if known is None else savepoint.group()
        # Only where there are others.
        outer = open_blocks() if len(connections.settings) > 1 else None
        until = time.monotonic() + OVERRUN * get_settings().group_budget.total_seconds()
        with (
            noting_doubt() as in_doubt,
            failures.in_transaction(using),
            leaving_no_blocks(connection),
            watching,
        ):
            fresh, rows = mark_and_load(using, list(keys.values()), deliveries)
            for step in in_steps(deliveries, keys):
                started: list[Started] = []
                new: list[Outcome] = []
                if outcomes and time.monotonic() >= until:
                    outcomes += [Outcome(d, Result.DEFERRED, reason="budget") for d in step]
                    continue
                for delivery in step:
                    key, row = keys[delivery], rows.get(row_id(delivery, service))
                    if delivery in resting:
                        new.append(Outcome(delivery, Result.DEFERRED, job=row, reason="paused"))
                        continue
                    if has_repeats and key in ended:
                        # The row read above tells nothing of what the first just ended with.
                        outcomes.append(_repeated(delivery, row, ended[key]))
                        continue
                    start = admission.judge(
                        delivery, row, is_fresh=key in fresh, leases=self._leases
                    )
                    if isinstance(start, Outcome):
                        new.append(start)
                    elif known and delivery in known:
                        new.append(outcome_of(delivery, known[delivery], start, row))
                    else:
                        started.append((delivery, start, row))
                if started:
                    new += self._attempt(connection, behind, started, known)
                outcomes += resting.noting(new)
                if has_repeats:
                    ended |= {keys[o.delivery]: o for o in new if o.result in _RAN}
            self._watch.check()
            completed = [o for o in outcomes if o.result is Result.COMPLETED]
            if len(completed) == 1:
                completed[0].notes["is_fresh"] = keys[completed[0].delivery] in fresh
            if outer is not None and (left := left_elsewhere(using, outer)):
                raise left
            if len(completed) < len(fresh) or len(fresh) < len(keys):
                _take_markers_back(using, completed, keys, fresh)
            settled = [o for o in outcomes if is_settled_by_group(o)]
            acknowledge(settled, in_transaction=True)
            release_leases(self._leases, using, settled)
            _make_callbacks_robust(connection)
            in_doubt += completed
            completion.complete(using, completed, is_last=True)
        return outcomes

    def _attempt(
        self,
        connection: BaseDatabaseWrapper,
        behind: AbstractContextManager[Any],
        started: Sequence[Started],
        known: dict[Delivery, Ran] | None,
    ) -> list[Outcome]:
        """Call one handler behind its savepoint, if there is one."""
        delivery, start, row = started[0]
        if delivery.batch is not None:
            return self._attempt_batch(connection, behind, started, known)
        context = make_context(delivery, start.attempt, start.max_attempts, row)
        ran = Ran(timezone.now(), 0.0)
        blocks, clock = len(connection.atomic_blocks), time.perf_counter()
        try:
            with behind:
                ran.value = call(delivery, context, self._watch)
                if connection.closed_in_transaction or len(connection.atomic_blocks) > blocks:
                    raise refusal_of(connection, blocks)
        except ENDINGS as error:
            if is_interrupt(error):
                raise
            ran.error, ran.abort_reason = _as_told(error, connection, blocks), context.abort_reason
        ran.seconds, ran.result_ttl = time.perf_counter() - clock, context.result_ttl
        self._on_measure(delivery.kind, ran.seconds)
        if ran.error is None and is_unusable(connection):
            ran.error = transaction.TransactionManagementError(CAUGHT)
        if known is None and ran.error is not None:
            failed = {delivery: ran}
            raise _Spoiled(failed if ran.abort_reason in UNWANTED else {}, failed) from ran.error
        if ran.error is not None and is_broken(connection):
            # Gone, and with it the group's transaction; the error is the job's only if it was
            # alone in it, see above.
            raise ConnectionLost(outcome_of(delivery, ran, start, row)) from ran.error
        return [outcome_of(delivery, ran, start, row)]

    def _attempt_batch(
        self,
        connection: BaseDatabaseWrapper,
        behind: AbstractContextManager[Any],
        started: Sequence[Started],
        known: dict[Delivery, Ran] | None,
    ) -> list[Outcome]:
        def attempt(batch: Batch) -> list[Ran]:
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
                    raise _Spoiled(batch.aborted(error), {}) from error
                if is_broken(connection):
                    delivery, start, row = batch.started[0]
                    ran = Ran(timezone.now(), 0.0, error=_as_told(error, connection, blocks))
                    raise ConnectionLost(outcome_of(delivery, ran, start, row)) from error
                raise
            if known is None and is_unusable(connection):
                raise _Spoiled({}, {})
            return endings

        ran = run_batch(Batch(started), attempt, passing=(ConnectionLost, _Spoiled))
        self._on_measure(started[0][0].kind, sum(one.seconds for one in ran) / len(ran))
        return [
            outcome_of(delivery, one, start, row)
            for (delivery, start, row), one in zip(started, ran, strict=True)
        ]


def _is_committed(delivery: Delivery) -> bool:
    """Return whether the COMMIT that was not answered has taken effect."""
    handler = delivery.handler
    if handler is None or delivery.ending is None:
        return False
    if handler.judges_itself and not delivery.ending.notes.get("is_fresh"):
        return False  # its marker is of an earlier message
    key = delivery.event_key(get_settings().service_name)
    return key in store_for(jobs_database()).known_markers([key])


def _is_database_only(delivery: Delivery) -> bool:
    handler = delivery.handler
    return handler is not None and handler.options.database_only


def _as_told(error: BaseException, connection: BaseDatabaseWrapper, blocks: int) -> BaseException:
    """Return what to record of a handler: after it has closed the connection, what it met with that
    says less than that it did."""
    if not (connection.closed_in_transaction and isinstance(error, Error)):
        return error
    refusal = refusal_of(connection, blocks)
    refusal.__cause__ = error
    return refusal


def _repeated(delivery: Delivery, row: JobRow | None, earlier: Outcome) -> Outcome:
    """Judge another record of a message that has just been run."""
    if earlier.result is Result.COMPLETED:
        return Outcome(delivery, Result.DUPLICATE, job=row)
    return Outcome(delivery, Result.SKIPPED, job=row, reason="attempt")


def _take_markers_back(
    using: str,
    completed: Sequence[Outcome],
    keys: dict[Delivery, EventKey],
    fresh: Collection[EventKey],
) -> None:
    """Remove those markers of this transaction whose messages did not take effect.

    One that is left behind would make every later attempt look like a duplicate.
    """
    effective = {keys[outcome.delivery] for outcome in completed}
    unused = set(fresh) - effective
    if unused:
        store_for(using).delete_markers(unused)


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
