"""The one pipeline: a group of deliveries in, durable outcomes out.

For a whole group: one lease call, one transaction with one insert of markers, one query for rows,
the handlers (each behind its own lazy savepoint) and one update; then failures, if there are any;
then acknowledgement, leases and signals. When a group's transaction fails as a whole, its
deliveries run again one by one, so one bad job never takes others with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from django.db import DatabaseError, InterfaceError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone

from kjo_django.conf import get_settings
from kjo_django.consumer import attempts, settlement
from kjo_django.consumer.connections import (
    answers,
    drop_broken_connections,
    freshen_connections,
    is_broken,
)
from kjo_django.consumer.deadletters import error_text
from kjo_django.consumer.execution import ENDINGS, Ran, call, make_context
from kjo_django.consumer.gate import Gate
from kjo_django.consumer.leases import LeaseBook
from kjo_django.consumer.outcomes import (
    Resting,
    acknowledge,
    is_dead,
    is_settled_by_group,
    outcome_of,
)
from kjo_django.consumer.plain import PlainRunner
from kjo_django.consumer.rows import load_rows, row_id
from kjo_django.consumer.savepoint import Chain, LazySavepoint
from kjo_django.consumer.timeouts import TimeoutWatch
from kjo_django.consumer.work import Delivery, Mode, Outcome, Result
from kjo_django.exceptions import MessageError, PublishError
from kjo_django.models import EventKey, ProcessedEvent
from kjo_django.producer.dispatch import jobs_database

logger = logging.getLogger("kjo_django")

HELD_ELSEWHERE_DELAY = 1.0
"""Seconds until a delivery somebody else holds is looked at again."""
OUTAGE_DELAY_MIN = 0.2
OUTAGE_DELAY_MAX = 30.0
_NOT_DONE = (Result.RETRIED, Result.DEAD, Result.CANCELLED)
_RAN = (Result.COMPLETED, *_NOT_DONE)


class ConnectionLost(DatabaseError):
    """The database connection broke while a handler ran.

    :param outcome: of that handler, had it been alone.
    """

    def __init__(self, outcome: Outcome) -> None:
        text = error_text(outcome.error)
        super().__init__(f"The connection broke during {outcome.delivery.kind}: {text}")
        self.outcome = outcome


class KeyOrder:
    """Keeps the keys of a group in order: what comes after a delivery that waits, waits; what comes
    after one that runs apart from the group, runs after it."""

    def __init__(self) -> None:
        self._waiting: set[object] = set()
        self._apart: set[object] = set()

    def put_off(self, delivery: Delivery) -> Delivery:
        """Note that it waits."""
        self._waiting.add(delivery.shard)
        return delivery

    def waits(self, delivery: Delivery) -> bool:
        """Whether an earlier one of its key waits."""
        return delivery.shard in self._waiting

    def apart(self, delivery: Delivery) -> Delivery:
        """Note that it runs apart."""
        self._apart.add(delivery.shard)
        return delivery

    def is_apart(self, delivery: Delivery) -> bool:
        """Whether an earlier one of its key runs apart."""
        return delivery.shard in self._apart


class Pipeline:
    """Runs groups. Called by every lane's thread; keeps no state between groups.

    :param on_outcomes: told of every group's outcomes once they are durable.
    :param sleep: waits, returning early when the worker stops.
    """

    def __init__(
        self,
        leases: LeaseBook,
        watch: TimeoutWatch,
        *,
        worker: str,
        on_outcomes: Callable[[Sequence[Outcome]], None],
        on_measure: Callable[[str, float], None] = lambda kind, seconds: None,
        stopping: threading.Event | None = None,
    ) -> None:
        self._leases = leases
        self._watch = watch
        self._worker = worker
        self._on_outcomes = on_outcomes
        self._on_measure = on_measure
        self._stopping = stopping or threading.Event()
        self._alone = Gate()
        self._plain = PlainRunner(leases, watch, on_measure)

    def run(self, deliveries: Sequence[Delivery], mode: Mode) -> list[Delivery]:
        """Run a group to its durable end; returns those deferred, which stay unacknowledged.

        Outages of the database are waited out here: nothing is acknowledged, no attempt is spent.
        """
        delay = OUTAGE_DELAY_MIN
        while True:
            try:
                return self.run_once(deliveries, mode)
            except (DatabaseError, InterfaceError, OSError, PublishError) as error:
                logger.error(
                    "The group cannot be settled, trying again in %.1f s: %s", delay, error
                )
                drop_broken_connections()
                if self._stopping.wait(delay):
                    self._give_back(deliveries)
                    return list(deliveries)
                delay = min(delay * 2, OUTAGE_DELAY_MAX)

    def run_once(self, deliveries: Sequence[Delivery], mode: Mode) -> list[Delivery]:
        """The same without patience: an outage is raised."""
        freshen_connections()
        if mode is Mode.POISON:
            return self._settle([_poison_outcome(d) for d in deliveries])
        names = [delivery.lease for delivery in deliveries]
        claims = self._leases.claim(names, deliveries[0].queue.processing_ttl)
        abandoned = self._leases.abandoned(
            {name for name, claim in zip(names, claims, strict=True) if not claim.acquired}
        )
        mine, apart, deferred = [], [], []
        suspects: set[Delivery] = set()
        order = KeyOrder()
        for delivery, claim in zip(deliveries, claims, strict=True):
            delivery.deliveries = max(1, claim.deliveries)
            if order.waits(delivery):
                deferred.append(delivery)
            elif delivery.lease in abandoned or (claim.acquired and claim.deliveries > 1):
                suspects.add(delivery)
                apart.append(order.apart(delivery))
            elif not claim.acquired:
                logger.debug("Already processing %s, it waits here", delivery.lease)
                deferred.append(order.put_off(delivery))
            elif order.is_apart(delivery):
                apart.append(delivery)
            else:
                mine.append(delivery)
        if mine:
            with self._alone.shared():
                deferred += self._run_together(mine, mode)
        for delivery in apart:
            if order.waits(delivery):
                deferred.append(delivery)
            elif delivery in suspects:
                # It was being run when a worker died. Alone, it takes nobody with it a second time.
                with self._alone.exclusive(timeout=60.0):
                    deferred += map(order.put_off, self._run_suspect(delivery, mode))
            else:
                with self._alone.shared():
                    deferred += map(order.put_off, self._run_together([delivery], mode))
        if deferred:
            # Not begun: others may have them. A no-op for what others hold.
            self._leases.release([delivery.lease for delivery in deferred])
        return deferred

    def _run_suspect(self, delivery: Delivery, mode: Mode) -> list[Delivery]:
        claim = self._leases.take_over(delivery.lease, delivery.queue.processing_ttl)
        if not claim.acquired:
            return [delivery]
        delivery.deliveries = max(1, claim.deliveries)
        return self._run_together([delivery], mode)

    def _run_together(self, deliveries: list[Delivery], mode: Mode) -> list[Delivery]:
        if mode is not Mode.ATOMIC:
            return self._settle(self._plain.run(deliveries, concurrently=mode is Mode.CONCURRENT))
        if len(deliveries) > 1:
            try:
                return self._settle(self._run_atomic(deliveries))
            except DatabaseError as error:
                logger.warning(
                    "A group of %d failed and runs again one by one: %s", len(deliveries), error
                )
                freshen_connections()
        deferred = []
        for delivery in deliveries:
            deferred += self._settle(self._run_one_atomic(delivery))
        return deferred

    # --- The group's transaction ------------------------------------------------------------------

    def _run_one_atomic(self, delivery: Delivery) -> list[Outcome]:
        """Run a delivery in its own transaction; what its commit raises is its own failure."""
        attempted: list[Outcome] = []
        try:
            return self._run_atomic([delivery], attempted)
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

    def _run_atomic(
        self, deliveries: list[Delivery], attempted: list[Outcome] | None = None
    ) -> list[Outcome]:
        using, service = jobs_database(), get_settings().service_name
        connection = connections[using]
        keys = {delivery: delivery.event_key(service) for delivery in deliveries}
        outcomes: list[Outcome] = [] if attempted is None else attempted
        with settlement.in_transaction(using):
            # A write first: SQLite takes its write lock at once instead of failing half-way.
            fresh = ProcessedEvent.objects.using(using).mark(list(keys.values()))
            rows = load_rows(using, deliveries, lock=True)
            ended: dict[EventKey, Outcome] = {}
            resting, chain = Resting(), Chain()
            for delivery in deliveries:
                key, row = keys[delivery], rows.get(row_id(delivery))
                if delivery in resting:
                    outcomes.append(Outcome(delivery, Result.DEFERRED, job=row, reason="paused"))
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
                    outcome = start
                else:
                    outcome = self._attempt(connection, chain, delivery, start, row)
                outcomes += resting.noting([outcome])
                if outcome.result in _RAN:
                    ended[key] = outcome
            chain.close(connection)
            _take_markers_back(using, outcomes, keys, fresh)
            settlement.complete(using, [o for o in outcomes if o.result is Result.COMPLETED])
            acknowledge([o for o in outcomes if is_settled_by_group(o)], in_transaction=True)
            _make_callbacks_robust(connection)
        return outcomes

    def _attempt(
        self,
        connection: BaseDatabaseWrapper,
        chain: Chain,
        delivery: Delivery,
        start: attempts.Start,
        row: dict[str, Any] | None,
    ) -> Outcome:
        """Call one handler behind its savepoint."""
        context = make_context(delivery, start.attempt, start.max_attempts, row)
        ran = Ran(timezone.now(), 0.0)
        clock = time.perf_counter()
        try:
            with LazySavepoint(connection, chain):
                ran.value = call(delivery, context, self._watch)
        except ENDINGS as error:
            ran.error, ran.abort_reason = error, context.abort_reason
        ran.seconds, ran.result_ttl = time.perf_counter() - clock, context.result_ttl
        if ran.error is not None and is_broken(connection):
            # Gone, and with it the group's transaction; the error is the job's only if it was
            # alone in it, see above.
            raise ConnectionLost(outcome_of(delivery, ran, start, row)) from ran.error
        self._on_measure(delivery.kind, ran.seconds)
        return outcome_of(delivery, ran, start, row)

    # --- Afterwards -------------------------------------------------------------------------------

    def _settle(self, outcomes: list[Outcome]) -> list[Delivery]:
        """Write failures, then acknowledge, release and tell; returns what is deferred."""
        failed = [o for o in outcomes if o.result in _NOT_DONE]
        stuck: set[int] = set()
        if failed:
            stuck = {id(o) for o in settlement.publish_dead(o for o in failed if is_dead(o))}
            using = jobs_database()
            durable = [outcome for outcome in failed if id(outcome) not in stuck]
            with settlement.in_transaction(using):
                settlement.record_failures(using, durable, self._worker)
                acknowledge(durable, in_transaction=True)
        settled = [o for o in outcomes if o.result is not Result.DEFERRED and id(o) not in stuck]
        acknowledge(settled, in_transaction=False)
        deferred = [o.delivery for o in outcomes if o.result is Result.DEFERRED or id(o) in stuck]
        self._leases.release([o.delivery.lease for o in outcomes if o.delivery.message is not None])
        self._tell_handlers(settled)
        self._on_outcomes(settled)
        return deferred

    def _tell_handlers(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            handler = outcome.delivery.handler
            if handler is not None and handler.observes:
                try:
                    handler.on_settled(outcome)
                except Exception:
                    # The state is committed; a hook cannot take it back (KJO-F12).
                    logger.exception("The hook of %s failed", handler.name)

    def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Release what an outage kept from settling; the attempt is not spent."""
        self._leases.release([d.lease for d in deliveries if d.message is not None])


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


def _poison_outcome(delivery: Delivery) -> Outcome:
    """Judge a record nobody can handle, and its job where it has one."""
    problem = delivery.problem
    message = delivery.message
    if problem is None:
        assert message is not None
        problem = MessageError("unknown_type", f"No handler is registered for {message.type!r}")
    row = None
    if message is not None and message.job_id is not None:
        using = jobs_database()
        row = load_rows(using, [delivery], lock=False).get(message.job_id)
        if row is not None and attempts.why_skip(delivery, row):
            return Outcome(delivery, Result.SKIPPED, job=row)
    attempt = row["attempts"] if row else 0
    return Outcome(
        delivery, Result.DEAD, attempt=attempt, job=row, error=problem, reason=problem.reason
    )
