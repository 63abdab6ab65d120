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
from datetime import timedelta

from django.db import DatabaseError
from django.utils import timezone

from kjo_django import tracing
from kjo_django.conf import get_settings
from kjo_django.coordination.base import FIRST_CLAIM, Claim
from kjo_django.engine import admission, completion, failures
from kjo_django.engine.attempt import Delivery, Mode, Outcome, Result
from kjo_django.engine.handler.call import ENDINGS, is_interrupt
from kjo_django.engine.handler.connections import (
    answers,
    drop_broken_connections,
    freshen_connections,
)
from kjo_django.engine.handler.context import JobContext, facts_of
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.job_rows import load_rows, row_id
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.outage_retry import OUTAGES, REFUSALS, Next, OutageRetry, Patience
from kjo_django.engine.outcomes import Resting, acknowledge, is_dead, log_skipped
from kjo_django.engine.pauses import keeps_place
from kjo_django.engine.recorder import Recorder
from kjo_django.engine.runners.leased import PlainRunner
from kjo_django.engine.runners.leased_groups import Turns
from kjo_django.engine.runners.loop import Flight
from kjo_django.engine.runners.transaction import AtomicRunner
from kjo_django.engine.unreadable import poison_outcome
from kjo_django.exceptions import HandlerTimeout
from kjo_django.store import store_for
from kjo_django.store.transactions import jobs_database

logger = logging.getLogger("kjo_django")

HELD_ELSEWHERE_DELAY = 1.0
"""Seconds until a delivery somebody else holds is looked at again."""
_NOT_DONE = (Result.RETRIED, Result.DEAD, Result.CANCELLED)


def _is_in_hand(ending: Outcome) -> bool:
    """Return whether all that is left to do is to settle it; of a completion whose COMMIT was not
    answered, the database has to be asked first."""
    return ending.result is not Result.COMPLETED or ending.is_announced


def _unsettled(deliveries: Sequence[Delivery], flying: set[Delivery] | None) -> list[Delivery]:
    """Return those that are neither settled nor in flight."""
    return [d for d in deliveries if not d.is_settled and not (flying and d in flying)]


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
    """Runs groups. Called by every lane's thread; keeps no state between groups but what is on
    their deliveries.

    :param on_outcomes: told of every group's outcomes once they are durable.
    :param on_pause: told of each outcome whose partition is to rest for its ``pause_seconds``,
        before its message may be run again.
    :param stopping: set when the worker stops. Without it ``run_once`` raises all outages; with it,
        those that ``atomic=False`` handlers meet are waited out, their endings in hand.
    :param on_landed: where given, coroutines outside a transaction fly: ``run`` returns while they
        are in the air. It is told which deliveries have landed, and which of them are deferred.
    :param on_thread: called first in each thread this starts.
    """

    def __init__(
        self,
        leases: LeaseBook,
        watch: TimeoutWatch,
        *,
        worker: str,
        on_outcomes: Callable[[Sequence[Outcome]], None],
        on_measure: Callable[[str, float], None] = lambda kind, seconds: None,
        on_pause: Callable[[Outcome], None] = lambda outcome: None,
        stopping: threading.Event | None = None,
        on_landed: Callable[[Sequence[Delivery], Collection[Delivery]], None] | None = None,
        on_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._leases = leases
        self._worker = worker
        self._watch = watch
        self._on_outcomes = on_outcomes
        self._on_pause = on_pause
        self._stopping = stopping or threading.Event()
        self._is_workers = stopping is not None
        self._one_by_one = threading.Lock()
        self._one_by_one_thread = 0
        """Who has that lock, while it is locked."""
        """Held by the lane that runs what was being run when a worker died."""
        self._atomic = AtomicRunner(leases, watch, on_measure)
        self._plain = PlainRunner(leases, watch, on_measure, is_workers=self._is_workers)
        recorder = Recorder(self._plain, leases, self._settle, stopping)
        self._turns = Turns(self._plain, leases, recorder, stopping, on_thread=on_thread)
        self._flight = on_landed and Flight(
            self._plain, leases, watch, recorder, on_landed=on_landed, on_thread=on_thread
        )

    def close(self, timeout: float) -> None:
        """End the threads it started, waiting so many seconds for them."""
        self._turns.close(timeout)
        if self._flight is not None:
            self._flight.close(timeout)

    def run(self, deliveries: Sequence[Delivery], mode: Mode) -> list[Delivery]:
        """Run a group to its durable end; returns those deferred, which stay unacknowledged.

        Outages of the database are waited out here: nothing is acknowledged, no attempt is spent.
        """
        return self._run_patiently(deliveries, mode, None)

    def launch(self, deliveries: Sequence[Delivery], flying: set[Delivery]) -> list[Delivery]:
        """The same for coroutines outside a transaction, but return while they run.

        :param flying: those that took off are added to it; ``on_landed`` is told of their end.
        """
        return self._run_patiently(deliveries, Mode.CONCURRENT, flying)

    def _run_patiently(
        self, deliveries: Sequence[Delivery], mode: Mode, flying: set[Delivery] | None
    ) -> list[Delivery]:
        left, patience = list(deliveries), Patience(self._stopping)
        while True:
            try:
                return self.run_once(left, mode, flying)
            except OUTAGES as error:
                is_refused = isinstance(error, DatabaseError) and answers(jobs_database())
                drop_broken_connections()
                left = _unsettled(left, flying)
                # What a database that is there refuses again and again must not keep a lane.
                gives_up = is_refused and patience.count >= REFUSALS
                if gives_up or not patience.goes_on("The group cannot be settled", error):
                    return self._defer(left, ())
            except Exception:
                # A bug. Leases that are held are renewed, and would be so for ever should the
                # records come up elsewhere. It counts as an attempt, or it would go on for ever.
                left = self._defer(_unsettled(left, flying), (), count_delivery=True)
                if not self._is_workers:
                    raise
                logger.exception("A group of %d failed", len(left))
                return left

    def abandon(
        self,
        deliveries: Sequence[Delivery],
        hung: Sequence[tuple[JobContext, float, Delivery]],
        thread_id: int,
    ) -> list[Delivery]:
        """Judge handlers that have hung as failed, and take their group from the thread that ran
        it; returns what is to come up again: that settles the failures, and runs the others.

        :param deliveries: the group, whose thread has no database session any more.
        :param hung: the runs that did not end, and for how many seconds they have lasted.
        :param thread_id: the thread's.
        """
        if self._one_by_one.locked() and self._one_by_one_thread == thread_id:
            # It would give it back when its call returns, if ever.
            self._one_by_one = threading.Lock()
        using, service = jobs_database(), get_settings().service_name
        left = _unsettled(deliveries, None)
        rows = load_rows(using, left, lock=False)
        ids = [row.id for row in rows.values() if row.lease_token == self._leases.token]
        self._leases.let_rows_go(ids)
        store_for(using).release_row_leases(ids, self._leases.token)
        for context, seconds, delivery in hung:
            outcome = Outcome(
                delivery,
                Result.RETRIED,
                attempt=context.attempt,
                job=rows.get(row_id(delivery, service)),
                error=HandlerTimeout(
                    "The handler exceeded its timeout and could not be interrupted; its thread was "
                    f"given up after {seconds:.0f} s"
                ),
                started_at=timezone.now() - timedelta(seconds=seconds),
                seconds=seconds,
                max_attempts=context.max_attempts,
            )
            failures.judge_failure(outcome, context.max_attempts)
            delivery.ending = outcome
        return self._defer(left, ())

    def run_once(
        self, deliveries: Sequence[Delivery], mode: Mode, flying: set[Delivery] | None = None
    ) -> list[Delivery]:
        """The same without patience: an outage is raised."""
        freshen_connections(is_own=self._is_workers)
        if not deliveries:
            return []
        if any(d.ending is not None and _is_in_hand(d.ending) for d in deliveries):
            return self._settle_in_hand(deliveries, mode, flying)
        if mode is Mode.POISON:
            return self._settle([poison_outcome(d) for d in deliveries])
        names = [delivery.lease for delivery in deliveries]
        claims = self._leases.claim(names, deliveries[0].queue.processing_ttl)
        if claims.count(FIRST_CLAIM) == len(claims):
            for delivery in deliveries:
                delivery.deliveries = 1
            deferred = self._run_claimed(list(deliveries), mode, flying)
        else:
            deferred = self._run_sorted(deliveries, claims, mode, flying)
        if deferred:
            # Not begun: others may have them. A no-op for what others hold.
            self._leases.release([delivery.lease for delivery in deferred])
        return deferred

    def _settle_in_hand(
        self, deliveries: Sequence[Delivery], mode: Mode, flying: set[Delivery] | None
    ) -> list[Delivery]:
        """Settle those whose outcome is in hand, and run the others."""
        deferred: list[Delivery] = []
        failed: list[Outcome] = []
        for delivery in deliveries:
            ending = delivery.ending
            if ending is None or not _is_in_hand(ending):
                continue
            if ending.is_announced:
                delivery.ending = None
                deferred += self._finish([ending], ())
            else:
                failed.append(ending)
        if failed:
            deferred += self._record_failures(failed, ())
        order = KeyOrder()
        for delivery in deferred:
            order.put_off(delivery)
        others = [d for d in deliveries if not d.is_settled and d not in deferred]
        deferred += [delivery for delivery in others if order.waits(delivery)]
        return deferred + self.run_once([d for d in others if not order.waits(d)], mode, flying)

    def _run_sorted(
        self,
        deliveries: Sequence[Delivery],
        claims: Sequence[Claim],
        mode: Mode,
        flying: set[Delivery] | None,
    ) -> list[Delivery]:
        """Run what is ours, then, one by one, what was being run when a worker died."""
        names = [delivery.lease for delivery in deliveries]
        abandoned = self._leases.abandoned(
            {name for name, claim in zip(names, claims, strict=True) if not claim.acquired}
        )
        mine: list[Delivery] = []
        apart: list[Delivery] = []
        deferred: list[Delivery] = []
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
                waits = "Already processing %s, it waits here"
                logger.debug(waits, delivery.lease, extra=facts_of(delivery))
                deferred.append(order.put_off(delivery))
            elif order.is_apart(delivery):
                apart.append(delivery)
            else:
                mine.append(delivery)
        if mine:
            deferred += map(order.put_off, self._run_claimed(mine, mode, flying))
        if apart:
            left = self._run_one_by_one(apart, suspects, order, mode)
            # Claimed and not begun. What dead workers began stays counted.
            again = [d.lease for d in left if d in suspects and d.deliveries > 1]
            self._leases.release(again, undo_claim=True)
            deferred += left
        return deferred

    def _run_one_by_one(
        self,
        deliveries: Sequence[Delivery],
        suspects: Collection[Delivery],
        order: KeyOrder,
        mode: Mode,
    ) -> list[Delivery]:
        """Run what was being run when a worker died, and what comes after it in its key's order:
        each alone in its group, and one at a time in this worker, on one lane. All other lanes go
        on. Returns what is deferred.

        One of these may have killed the worker. It takes no other of them with it, so each death
        costs an innocent one an attempt only the first time they meet.
        """
        lock = self._one_by_one
        if not lock.acquire(blocking=False):
            return list(deliveries)
        self._one_by_one_thread = threading.get_ident()
        try:
            deferred: list[Delivery] = []
            until = time.monotonic() + get_settings().group_budget.total_seconds()
            for number, delivery in enumerate(deliveries):
                if number and (time.monotonic() >= until or self._stopping.is_set()):
                    # What else this lane has taken is not to wait for all of them.
                    return deferred + list(deliveries[number:])
                if order.waits(delivery):
                    deferred.append(delivery)
                elif delivery in suspects and not self._takes_over(delivery):
                    deferred.append(order.put_off(delivery))
                else:
                    deferred += map(order.put_off, self._run_together([delivery], mode))
            return deferred
        finally:
            lock.release()

    def _takes_over(self, delivery: Delivery) -> bool:
        """Begin what a dead worker had begun, which counts as a delivery; False: somebody else
        has."""
        ttl = delivery.queue.processing_ttl
        (claim,) = self._leases.take_over([delivery.lease], ttl)
        delivery.deliveries = max(1, claim.deliveries)
        if claim.acquired and delivery.deliveries > 1:
            try:
                failures.record_lost_attempts(jobs_database(), delivery)
            except DatabaseError as error:
                # They count all the same, and that is what matters.
                logger.warning("Lost attempts of %s are not noted: %s", delivery.lease, error)
                drop_broken_connections()
        return claim.acquired

    def _run_claimed(
        self, deliveries: list[Delivery], mode: Mode, flying: set[Delivery] | None
    ) -> list[Delivery]:
        """Run what nobody else holds and no crash has left behind; returns those deferred."""
        if mode is Mode.CONCURRENT and self._flight is not None and flying is not None:
            started, ended = self._plain.claim(deliveries)
            if started:
                flying.update(delivery for delivery, _, _ in started)
                self._flight.take_off(started)
            return self._settle(ended) if ended else []
        return self._run_together(deliveries, mode)

    def _run_together(self, deliveries: list[Delivery], mode: Mode) -> list[Delivery]:
        if mode is Mode.PLAIN:
            return self._turns.run(deliveries)
        if mode is Mode.CONCURRENT:
            outcomes = self._plain.run_at_once(deliveries)
            deferred = self._settle(outcomes)
            self._plain.give_back_of([o for o in outcomes if o.attempt and o.delivery in deferred])
            return deferred
        if len(deliveries) > 1:
            try:
                outcomes = self._atomic.run(deliveries)
            except Exception as error:
                if isinstance(error, OUTAGES) and not isinstance(error, DatabaseError):
                    raise
                logger.warning(
                    "A group of %d failed and runs again one by one: %s",
                    len(deliveries),
                    error,
                    exc_info=not isinstance(error, DatabaseError),
                )
                freshen_connections(is_own=self._is_workers)
            else:
                return self._settle(outcomes)
        deferred = []
        resting = Resting()
        refused: DatabaseError | None = None
        for delivery in deliveries:
            if delivery in resting:
                deferred.append(delivery)
                continue
            try:
                waits = self._settle(resting.noting(self._atomic.run_one(delivery)))
            except DatabaseError as error:
                if not answers(jobs_database()):
                    raise
                # One that can never be settled must not keep those behind it from their end.
                refused, waits = error, [delivery]
                freshen_connections(is_own=self._is_workers)
            deferred += waits
            resting.noting([Outcome(one, Result.DEFERRED) for one in waits])
        if refused is not None:
            raise refused
        return deferred

    # --- Afterwards -------------------------------------------------------------------------------

    def _settle(self, outcomes: list[Outcome], keep: Collection[str] = ()) -> list[Delivery]:
        """Acknowledge and announce what its group's transaction has committed, then record, and
        acknowledge and announce, the failures; returns what is deferred.

        What is raised while failures are recorded takes nothing from what was committed before:
        only the recording is made again, with the outcomes in hand.

        :param keep: names of leases that are not released.
        """
        self._watch.check()
        done: list[Outcome] = []
        to_record: list[Outcome] = []
        waiting: list[Delivery] = []
        for outcome in outcomes:
            if outcome.delivery.ending is not None:
                outcome = _confirmed(outcome)
            if outcome.pause_seconds is not None and self._is_workers:
                self._pause(outcome)
            if outcome.result is Result.COMPLETED:
                done.append(outcome)
            elif outcome.result is Result.DEFERRED:
                waiting.append(outcome.delivery)
            elif outcome.result in _NOT_DONE or _is_left_open(outcome):
                to_record.append(outcome)
            else:
                done.append(outcome)
        deferred = self._finish(done, keep) if done else []
        if waiting:
            deferred += self._defer(waiting, keep)
        if to_record:
            deferred += self._record_failures(to_record, keep)
        return deferred

    def _pause(self, outcome: Outcome) -> None:
        """Let its partition rest, and leave the message in its place there if its time allows."""
        if keeps_place(outcome):
            outcome.result, outcome.reason = Result.DEFERRED, "paused"
        if outcome.pause_seconds:
            self._on_pause(outcome)

    def _record_failures(self, outcomes: list[Outcome], keep: Collection[str]) -> list[Delivery]:
        """Make failures durable, then acknowledge and announce them; returns what is deferred: with
        its outcome in hand, which is recorded should it come up here again."""
        retry = OutageRetry(self._stopping if self._is_workers else None)
        if tracing.tracer is not None:
            tracing.tracer.failing([o for o in outcomes if o.result in _NOT_DONE])
        while True:
            try:
                refused = self._write_failures(outcomes)
            except Exception as error:
                for outcome in outcomes:
                    outcome.delivery.ending = outcome
                following = retry.after(error, "Failures cannot be recorded", len(outcomes))
                if following is Next.SPLIT:
                    return [d for one in outcomes for d in self._record_failures([one], keep)]
                if following is Next.REFUSED:
                    # It runs again, so that the attempt counts and there is an end to it.
                    for outcome in outcomes:
                        outcome.delivery.ending = None
                if following is not Next.AGAIN:
                    return self._defer(
                        [outcome.delivery for outcome in outcomes],
                        keep,
                        count_delivery=following is Next.REFUSED,
                    )
            else:
                break
        for outcome in outcomes:
            outcome.delivery.ending = None
        for outcome in refused:
            outcome.delivery.ending = outcome
        deferred = self._defer([o.delivery for o in refused], keep) if refused else []
        recorded = [o for o in outcomes if o.delivery.ending is None]
        return deferred + (self._finish(recorded, keep, is_failed=True) if recorded else [])

    def _write_failures(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Publish the dead letters, then commit everything about those outcomes; returns those
        whose dead letter was refused by its topic, of which nothing is written."""
        refused = failures.publish_dead(o for o in outcomes if is_dead(o))
        stuck = {id(outcome) for outcome in refused}
        durable = [outcome for outcome in outcomes if id(outcome) not in stuck]
        using = jobs_database()
        with failures.in_transaction(using):
            completion.close_known(using, [o for o in durable if o.result is Result.DUPLICATE])
            failed = [o for o in durable if o.result in _NOT_DONE]
            failures.record_failures(using, failed, self._worker)
            acknowledge(durable, in_transaction=True)
        return refused

    def _finish(
        self, outcomes: list[Outcome], keep: Collection[str], *, is_failed: bool = False
    ) -> list[Delivery]:
        """Acknowledge, announce and release what is durable. Nothing that is raised here undoes
        that; returns what could not be acknowledged, which is to be done when it comes up again."""
        deferred: list[Delivery] = []
        try:
            acknowledge(outcomes, in_transaction=False)
        except Exception:
            logger.exception("%d records could not be acknowledged, trying again", len(outcomes))
            for outcome in outcomes:
                outcome.delivery.ending = outcome
                deferred.append(outcome.delivery)
        else:
            for outcome in outcomes:
                outcome.delivery.is_settled = True
        names = _leases_of(outcomes, keep)
        if is_failed:
            # Before anybody hears of it, since a retry may come to another worker at once.
            self._leases.release(names)
            self._announce(outcomes)
        else:
            try:
                self._announce(outcomes)
            finally:
                self._leases.release(names)
        return deferred

    def _announce(self, outcomes: Sequence[Outcome]) -> None:
        """Tell hooks, signals, waiters and statistics, once for each outcome."""
        fresh = [outcome for outcome in outcomes if not outcome.is_announced]
        for outcome in fresh:
            outcome.is_announced = True
        if not fresh:
            return
        if tracing.tracer is not None:
            tracing.tracer.settled(fresh)
        self._tell_handlers(fresh)
        log_skipped(fresh)
        try:
            self._on_outcomes(fresh)
        except ENDINGS as error:
            if is_interrupt(error):
                raise
            logger.exception("%d outcomes could not be announced", len(fresh))

    def _tell_handlers(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            handler = outcome.delivery.handler
            if handler is not None and handler.observes:
                try:
                    handler.on_settled(outcome)
                except ENDINGS as error:
                    if is_interrupt(error):
                        raise
                    # The state is committed; a hook cannot take it back (KJO-F12).
                    facts = facts_of(outcome.delivery, outcome.attempt)
                    logger.exception("The hook of %s failed", handler.name, extra=facts)

    def _defer(
        self, deliveries: list[Delivery], keep: Collection[str], *, count_delivery: bool = False
    ) -> list[Delivery]:
        """Release what comes up again, and return it.

        :param count_delivery: their attempts count, though they have no outcome.
        """
        names = [d.lease for d in deliveries if d.message is not None]
        names = [name for name in names if name not in keep]
        self._leases.release(names, count_delivery=count_delivery)
        if tracing.tracer is not None:
            tracing.tracer.given_back(deliveries)
        return deliveries


def _leases_of(outcomes: Sequence[Outcome], keep: Collection[str]) -> list[str]:
    names = [
        o.delivery.lease
        for o in outcomes
        if o.delivery.message is not None and "is_released" not in o.notes
    ]
    return [name for name in names if name not in keep] if keep else names


def _is_left_open(outcome: Outcome) -> bool:
    return outcome.result is Result.DUPLICATE and admission.is_left_open(outcome)


def _confirmed(outcome: Outcome) -> Outcome:
    """Return what a delivery ended with, given how it was judged after a COMMIT that was not
    answered: its completion, where that had taken effect."""
    delivery, before = outcome.delivery, outcome.delivery.ending
    delivery.ending = None
    if before is None or before.result is not Result.COMPLETED or before.is_announced:
        return outcome
    if outcome.result is Result.DUPLICATE:
        before.is_confirmed = True
        return before
    outcome.is_confirmed = outcome.result is Result.COMPLETED
    return outcome
