"""Running atomic handlers: a group's transaction, with each handler behind a savepoint of its own.

The markers are its first write, the update of the jobs' rows its last, so what a handler wrote is
committed with the word that it has run, or not at all.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone

from kjo_django.conf import get_settings
from kjo_django.consumer import attempts, settlement
from kjo_django.consumer.batches import UNWANTED, Batch, Started, in_steps, run_batch
from kjo_django.consumer.connections import answers, is_broken
from kjo_django.consumer.deadletters import error_text
from kjo_django.consumer.execution import ENDINGS, Ran, call, make_context
from kjo_django.consumer.leases import LeaseBook
from kjo_django.consumer.outcomes import Resting, acknowledge, is_settled_by_group, outcome_of
from kjo_django.consumer.rows import load_rows, row_id
from kjo_django.consumer.savepoint import Chain, LazySavepoint
from kjo_django.consumer.timeouts import TimeoutWatch
from kjo_django.consumer.work import Delivery, Outcome, Result
from kjo_django.models import EventKey, ProcessedEvent
from kjo_django.producer.dispatch import jobs_database

logger = logging.getLogger("kjo_django")

Behind = Callable[[], AbstractContextManager[Any]]
"""Makes what separates one handler's writes from those of its group."""
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
    """A handler failed that shares a transaction with others, without a savepoint between them.

    :param ended: those that were asked to end, and did: they are not to run again.
    """

    def __init__(self, ended: dict[Delivery, Ran]) -> None:
        super().__init__()
        self.ended = ended


class AtomicRunner:
    """Runs groups in one transaction each. Keeps no state between them."""

    def __init__(
        self, leases: LeaseBook, watch: TimeoutWatch, on_measure: Callable[[str, float], None]
    ) -> None:
        self._leases = leases
        self._watch = watch
        self._on_measure = on_measure

    def run_one(self, delivery: Delivery) -> list[Outcome]:
        """Run a delivery in its own transaction; what its commit raises is its own failure."""
        attempted: list[Outcome] = []
        try:
            return self.run([delivery], attempted)
        except DatabaseError as error:
            outcome = error.outcome if isinstance(error, ConnectionLost) else None
            if outcome is None and attempted and attempted[0].result is Result.COMPLETED:
                outcome = attempted[0]
            # A database that answers again at once was not down: the job broke its connection or
            # its commit, and would do so for ever if that did not count as an attempt.
            if outcome is None or not answers(jobs_database()):
                raise
            outcome.error, outcome.value = outcome.error or error, None
            settlement.judge_failure(outcome, outcome.notes["max_attempts"])
            return [outcome]

    def run(
        self, deliveries: list[Delivery], attempted: list[Outcome] | None = None
    ) -> list[Outcome]:
        """Run a group in one transaction.

        Without savepoints where every handler of it has no effect that a roll-back does not undo:
        the first that fails undoes all, and all run again, each behind its own.

        :param attempted: outcomes are added to it one by one.
        :raises DatabaseError: the transaction failed as a whole; nothing has taken effect.
        """
        ended: dict[Delivery, Ran] = {}
        if len(deliveries) > 1 and all(map(_is_database_only, deliveries)):
            try:
                return self._run([], deliveries, None)
            except _Spoiled as spoiled:
                ended = spoiled.ended
        return self._run([] if attempted is None else attempted, deliveries, ended)

    def _run(
        self,
        outcomes: list[Outcome],
        deliveries: list[Delivery],
        known: dict[Delivery, Ran] | None,
    ) -> list[Outcome]:
        """:param known: how some have ended already; None: run without savepoints."""
        using, service = jobs_database(), get_settings().service_name
        connection = connections[using]
        keys = {delivery: delivery.event_key(service) for delivery in deliveries}
        with settlement.in_transaction(using):
            # A write first: SQLite takes its write lock at once instead of failing half-way.
            fresh = ProcessedEvent.objects.using(using).mark(list(keys.values()))
            rows = load_rows(using, deliveries, lock=True)
            ended: dict[EventKey, Outcome] = {}
            resting = Resting()
            behind: Behind = nullcontext
            chain = Chain()
            if known is not None:
                behind = functools.partial(LazySavepoint, connection, chain)
            for step in in_steps(deliveries, keys):
                started: list[Started] = []
                new: list[Outcome] = []
                for delivery in step:
                    key, row = keys[delivery], rows.get(row_id(delivery))
                    if delivery in resting:
                        new.append(Outcome(delivery, Result.DEFERRED, job=row, reason="paused"))
                        continue
                    earlier = ended.get(key)
                    if earlier is not None:
                        # Two records of one message in a group, as a crashed relay leaves them: the
                        # row read above tells nothing of what the first just ended with.
                        outcomes.append(_repeated(delivery, row, earlier))
                        continue
                    start = attempts.judge(
                        delivery,
                        row,
                        is_fresh=key in fresh,
                        leases=self._leases,
                        now=timezone.now(),
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
                for outcome in new:
                    if outcome.result in _RAN:
                        ended[keys[outcome.delivery]] = outcome
            chain.close(connection)
            _take_markers_back(using, outcomes, keys, fresh)
            settlement.complete(using, [o for o in outcomes if o.result is Result.COMPLETED])
            acknowledge([o for o in outcomes if is_settled_by_group(o)], in_transaction=True)
            _make_callbacks_robust(connection)
        return outcomes

    def _attempt(
        self,
        connection: BaseDatabaseWrapper,
        behind: Behind,
        started: Sequence[Started],
        known: dict[Delivery, Ran] | None,
    ) -> list[Outcome]:
        """Call one handler behind its savepoint, if there is one."""
        delivery, start, row = started[0]
        if delivery.batch is not None:
            return self._attempt_batch(connection, behind, started, known)
        context = make_context(delivery, start.attempt, start.max_attempts, row)
        ran = Ran(timezone.now(), 0.0)
        clock = time.perf_counter()
        try:
            with behind():
                ran.value = call(delivery, context, self._watch)
        except ENDINGS as error:
            ran.error, ran.abort_reason = error, context.abort_reason
        ran.seconds, ran.result_ttl = time.perf_counter() - clock, context.result_ttl
        if known is None and (ran.error is not None or connection.needs_rollback):
            raise _Spoiled({delivery: ran} if ran.abort_reason in UNWANTED else {}) from ran.error
        if ran.error is not None and is_broken(connection):
            # Gone, and with it the group's transaction; the error is the job's only if it was
            # alone in it, see above.
            raise ConnectionLost(outcome_of(delivery, ran, start, row)) from ran.error
        self._on_measure(delivery.kind, ran.seconds)
        return [outcome_of(delivery, ran, start, row)]

    def _attempt_batch(
        self,
        connection: BaseDatabaseWrapper,
        behind: Behind,
        started: Sequence[Started],
        known: dict[Delivery, Ran] | None,
    ) -> list[Outcome]:
        def attempt(batch: Batch) -> list[Ran]:
            try:
                with behind():
                    endings = batch.call(self._watch)
            except ENDINGS as error:
                if known is None:
                    raise _Spoiled(batch.aborted(error)) from error
                if is_broken(connection):
                    delivery, start, row = batch.started[0]
                    ran = Ran(timezone.now(), 0.0, error=error)
                    raise ConnectionLost(outcome_of(delivery, ran, start, row)) from error
                raise
            if known is None and connection.needs_rollback:
                raise _Spoiled({})
            return endings

        ran = run_batch(Batch(started), attempt, passing=(ConnectionLost, _Spoiled))
        self._on_measure(started[0][0].kind, sum(one.seconds for one in ran) / len(ran))
        return [
            outcome_of(delivery, one, start, row)
            for (delivery, start, row), one in zip(started, ran, strict=True)
        ]


def _is_database_only(delivery: Delivery) -> bool:
    handler = delivery.handler
    return handler is not None and handler.options.database_only


def _repeated(delivery: Delivery, row: dict[str, Any] | None, earlier: Outcome) -> Outcome:
    """Judge another record of a message that has just been run."""
    if earlier.result is Result.COMPLETED:
        return Outcome(delivery, Result.DUPLICATE, job=row)
    return Outcome(delivery, Result.SKIPPED, job=row, reason="attempt")


def _take_markers_back(
    using: str,
    outcomes: Sequence[Outcome],
    keys: dict[Delivery, EventKey],
    fresh: Collection[EventKey],
) -> None:
    """Remove those markers of this transaction whose messages did not take effect.

    One that is left behind would make every later attempt look like a duplicate.
    """
    effective = {keys[o.delivery] for o in outcomes if o.result is Result.COMPLETED}
    unused = set(fresh) - effective
    if unused:
        ProcessedEvent.objects.using(using).unmark(unused)


def _make_callbacks_robust(connection: BaseDatabaseWrapper) -> None:
    """A handler's ``on_commit`` callback that raises is logged: the commit stands (KJO-F12)."""
    callbacks: list[Any] = connection.run_on_commit
    callbacks[:] = [(sids, _isolated(function), False) for sids, function, _robust in callbacks]


def _isolated(function: Callable[[], Any]) -> Callable[[], None]:
    # Django's own robust callbacks fail when it logs one without a __qualname__, such as a partial.
    def call() -> None:
        try:
            function()
        except Exception:
            logger.exception("An on_commit callback failed: %r", function)

    return call
