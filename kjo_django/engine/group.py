"""A group's way: claim, admit, run, record, acknowledge, announce, release.

    claim        leases of coordination for all, in one round trip
    admit        rows and markers are read; who is a duplicate, cancelled, expired … ends here
    run          a runner calls the handlers
    record       what is durable: completions with their effects, failures in a transaction after it
    acknowledge  once, for all whose ending is durable
    announce     hooks, signals, waiters, statistics
    release      the leases

A runner takes the claimed through the steps in the middle: ``TransactionRunner`` admits, runs and
records completions in one transaction, ``LeasedRunner`` and ``LoopRunner`` outside of one. Failures
are always recorded here. When a group's transaction fails as a whole, its deliveries run again one
by one, so one bad job never takes others with it.

Each attempt says how far it has come, so what is raised in one step is resumed at that step: no
handler runs again whose effects are committed, and nothing that is committed goes unannounced.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

from django.db import DatabaseError
from django.utils import timezone

from kjo_django import signals, tracing
from kjo_django.coordination.base import FIRST_CLAIM, Claim
from kjo_django.engine import admission, completion, failures
from kjo_django.engine.admission import HeldBack
from kjo_django.engine.attempt import FAILURES, Attempt, Delivery, Ending, Mode
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
from kjo_django.engine.outage_retry import OUTAGES, Next, OutageRetry
from kjo_django.engine.recorder import Recorder
from kjo_django.engine.runners.leased import LeasedRunner
from kjo_django.engine.runners.loop import LoopRunner
from kjo_django.engine.runners.transaction import TransactionRunner
from kjo_django.enqueue import storing
from kjo_django.exceptions import HandlerTimeout
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import load_result, one_line, serializer_for

logger = logging.getLogger("kjo_django")

HELD_ELSEWHERE_DELAY = 1.0
"""Seconds until a delivery somebody else holds is looked at again."""

Listener = Callable[[Sequence[Attempt]], None]
"""Is called with attempts whose endings are durable."""


class Pipeline:
    """Runs groups. Called by every lane's thread; keeps no state between groups but what is on
    their deliveries.

    :param listeners: are called with every group's attempts once their endings are durable; what
        one raises is logged and keeps nothing from the others.
    :param on_pause: is called with each attempt whose partition is to be paused for its
        ``pause_seconds``, before its message may be run again.
    :param stopping: set when the worker stops. Without it ``run_once`` raises all outages; with it,
        those that ``atomic=False`` handlers meet are waited out, their endings in hand.
    :param on_settled: where given, coroutines outside a transaction run on an event loop of their
        own: ``run`` returns while they do. It is called with the deliveries whose coroutines have
        ended, and those of them that are deferred.
    :param on_thread: is called first in each thread that is started here.
    """

    def __init__(
        self,
        leases: LeaseBook,
        watch: TimeoutWatch,
        *,
        worker: str,
        listeners: Sequence[Listener] = (),
        on_measure: Callable[[str, float], None] = lambda kind, seconds: None,
        on_pause: Callable[[Attempt], None] = lambda attempt: None,
        stopping: threading.Event | None = None,
        on_settled: Callable[[Sequence[Delivery], Collection[Delivery]], None] | None = None,
        on_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._leases = leases
        self._runtime = leases.runtime
        self._worker = worker
        self._watch = watch
        self._listeners = listeners
        self._on_pause = on_pause
        self._stopping = stopping or threading.Event()
        self._is_workers = stopping is not None
        self._recorder = Recorder(on_thread)
        self._transaction = TransactionRunner(leases, watch, on_measure)
        self._leased = LeasedRunner(
            leases, watch, on_measure, self._settle, self._recorder, stopping
        )
        self._loop: LoopRunner | None = None
        if on_settled is not None:
            self._loop = LoopRunner(
                self._leased,
                leases,
                watch,
                self._settle,
                self._recorder,
                on_settled=on_settled,
                on_thread=on_thread,
            )

    def close(self, timeout: float) -> None:
        """End the threads it started, waiting so many seconds for them."""
        if self._loop is not None:
            self._loop.close(timeout)
        self._recorder.close(timeout)

    # --- A group ----------------------------------------------------------------------------------

    def run(
        self, deliveries: Sequence[Delivery], mode: Mode, running: set[Delivery] | None = None
    ) -> list[Delivery]:
        """Run a group to its durable end; returns the deferred, which stay unacknowledged.

        Outages of the database are waited out here: nothing is acknowledged, no attempt is spent.

        :param running: those whose coroutines run on after the return are added to it.
        """
        left, retry = list(deliveries), OutageRetry(self._stopping)
        while True:
            try:
                return self.run_once(left, mode, running)
            except OUTAGES as error:
                following = retry.after(error, "The group cannot be settled", 1)
                left = _unsettled(left, running)
                # What a database that is there refuses again and again must not keep a lane.
                if following is not Next.AGAIN:
                    return self._defer(left, ())
            except Exception:
                # A bug. Leases that are held are renewed, and would be so for ever should the
                # records come up elsewhere. It counts as an attempt, or it would go on for ever.
                left = self._defer(_unsettled(left, running), (), count_delivery=True)
                if not self._is_workers:
                    raise
                logger.exception("A group of %d failed", len(left))
                return left

    def run_once(
        self, deliveries: Sequence[Delivery], mode: Mode, running: set[Delivery] | None = None
    ) -> list[Delivery]:
        """Run a group to its durable end; an outage is raised. Returns the deferred."""
        freshen_connections(is_own=self._is_workers)
        held_back = HeldBack()
        deferred, left = self._resume(deliveries, held_back)
        if not left:
            return deferred
        if mode is Mode.POISON:
            return deferred + self._settle(
                [admission.refuse(self._runtime, delivery) for delivery in left]
            )
        is_orphan = len(left) == 1 and (left[0].is_orphan or not self._is_workers)
        left[0].is_orphan = False  # deferred once more, it waits as others do
        names = [delivery.lease for delivery in left]
        claims = self._leases.claim(names, left[0].queue.processing_ttl)
        if claims.count(FIRST_CLAIM) == len(claims):
            for delivery in left:
                delivery.deliveries = 1
            waiting = self._run_claimed(left, mode, running)
        elif is_orphan:
            left[0].deliveries = max(1, claims[0].deliveries)
            waiting = self._run_orphan(left[0], mode)
        else:
            waiting = self._run_sorted(left, claims, held_back, mode, running)
        if waiting:
            # Not begun: others may have them. A no-op for what others hold.
            self._leases.release([delivery.lease for delivery in waiting])
        return deferred + waiting

    def _resume(
        self, deliveries: Sequence[Delivery], held_back: HeldBack
    ) -> tuple[list[Delivery], list[Delivery]]:
        """Settle the attempts that are in hand; return the deferred, and what is to be run."""
        in_hand = [d.attempt for d in deliveries if d.attempt is not None and d.attempt.is_in_hand]
        if not in_hand:
            return [], list(deliveries)
        deferred = held_back.defer(self._settle(in_hand))
        others = [d for d in deliveries if not d.is_settled and d not in deferred]
        deferred += [delivery for delivery in others if delivery in held_back]
        return deferred, [delivery for delivery in others if delivery not in held_back]

    # --- Claim ------------------------------------------------------------------------------------

    def _run_sorted(
        self,
        deliveries: Sequence[Delivery],
        claims: Sequence[Claim],
        held_back: HeldBack,
        mode: Mode,
        running: set[Delivery] | None,
    ) -> list[Delivery]:
        """Run what is ours; returns the deferred: what others hold; orphans, which were being run
        when a worker died and run in groups of their own; and what comes after these with its key.
        """
        names = [delivery.lease for delivery in deliveries]
        abandoned = self._leases.abandoned(
            {name for name, claim in zip(names, claims, strict=True) if not claim.acquired}
        )
        mine: list[Delivery] = []
        orphans: list[Delivery] = []
        deferred: list[Delivery] = []
        for delivery, claim in zip(deliveries, claims, strict=True):
            delivery.deliveries = max(1, claim.deliveries)
            if delivery in held_back:
                deferred.append(delivery)
            elif delivery.lease in abandoned or (claim.acquired and claim.deliveries > 1):
                orphans.append(delivery)
                deferred += held_back.defer([delivery])
            elif claim.acquired:
                mine.append(delivery)
            else:
                why = "Already processing %s, it waits here"
                logger.debug(why, delivery.lease, extra=facts_of(delivery))
                deferred += held_back.defer([delivery])
        # Claimed and not begun. What dead workers began stays counted.
        again = [delivery.lease for delivery in orphans if delivery.deliveries > 1]
        self._leases.release(again, undo_claim=True)
        if mine:
            deferred += held_back.defer(self._run_claimed(mine, mode, running))
        for delivery in orphans:
            delivery.is_orphan = True
        return deferred

    def _run_orphan(self, delivery: Delivery, mode: Mode) -> list[Delivery]:
        """Run what was being run when a worker died; returns it if it is deferred.

        It may have killed that worker. It takes no other orphan with it, so each death costs an
        innocent one an attempt only the first time they meet.
        """
        left = [delivery]
        if self._takes_over(delivery):
            left = self._run_claimed([delivery], mode, None)
        if left and delivery.deliveries > 1:
            # Claimed and not begun. What dead workers began stays counted.
            self._leases.release([delivery.lease], undo_claim=True)
        return left

    def _takes_over(self, delivery: Delivery) -> bool:
        """Begin what a dead worker had begun, which counts as a delivery; False: somebody else
        has."""
        ttl = delivery.queue.processing_ttl
        (claim,) = self._leases.take_over([delivery.lease], ttl)
        delivery.deliveries = max(1, claim.deliveries)
        if claim.acquired and delivery.deliveries > 1:
            try:
                failures.record_lost_attempts(self._runtime, delivery)
            except DatabaseError as error:
                # They count all the same, and that is what matters.
                logger.warning("Lost attempts of %s are not noted: %s", delivery.lease, error)
                drop_broken_connections()
        return claim.acquired

    # --- Admit and run ----------------------------------------------------------------------------

    def _run_claimed(
        self, deliveries: list[Delivery], mode: Mode, running: set[Delivery] | None
    ) -> list[Delivery]:
        """Run what nobody else holds; returns the deferred."""
        if mode is Mode.ATOMIC:
            return self._run_in_transaction(deliveries)
        if mode is Mode.PLAIN or self._loop is None or running is None:
            return self._leased.run(deliveries)
        attempts = self._leased.admit(deliveries)
        if admitted := [attempt for attempt in attempts if attempt.ending is None]:
            running.update(attempt.delivery for attempt in admitted)
            self._loop.run(admitted)
        return self._settle([a for a in attempts if a.delivery not in running])

    def _run_in_transaction(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Run a group in its transaction and, should that fail, each delivery in its own."""
        if len(deliveries) > 1:
            attempts: list[Attempt] = []
            try:
                self._transaction.run(deliveries, attempts)
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
                return self._settle(attempts)
        deferred: list[Delivery] = []
        held_back = HeldBack()
        refused: DatabaseError | None = None
        for delivery in deliveries:
            if delivery in held_back:
                deferred.append(delivery)
                continue
            try:
                waiting = self._settle(held_back.after([self._transaction.run_alone(delivery)]))
            except DatabaseError as error:
                if not answers(self._runtime.database):
                    raise
                # One that can never be settled must not keep those behind it from their end.
                refused, waiting = error, [delivery]
                freshen_connections(is_own=self._is_workers)
            deferred += held_back.defer(waiting)
        if refused is not None:
            raise refused
        return deferred

    def abandon(
        self,
        deliveries: Sequence[Delivery],
        hung: Sequence[tuple[JobContext, float, Delivery]],
    ) -> list[Delivery]:
        """Judge handlers that have hung as failed, and take their group from the thread that ran
        it; returns what is to come up again: that settles the failures, and runs the others.

        :param deliveries: the group, whose thread has no database session any more.
        :param hung: the runs that did not end, and for how many seconds they have lasted.
        """
        runtime = self._runtime
        left = _unsettled(deliveries, None)
        rows = load_rows(runtime, left, lock=False)
        ids = [row.id for row in rows.values() if row.lease_token == self._leases.token]
        self._leases.let_rows_go(ids)
        runtime.store.release_row_leases(ids, self._leases.token)
        for context, seconds, delivery in hung:
            attempt = Attempt(
                delivery,
                row=rows.get(row_id(delivery, runtime.service)),
                number=context.attempt,
                limit=context.max_attempts,
                started_at=timezone.now() - timedelta(seconds=seconds),
                seconds=seconds,
            )
            error = HandlerTimeout(
                "The handler exceeded its timeout and could not be interrupted; its thread was "
                f"given up after {seconds:.0f} s"
            )
            delivery.attempt = failures.judge_error(attempt, error)
        return self._defer(left, ())

    # --- Record -----------------------------------------------------------------------------------

    def _settle(self, attempts: Sequence[Attempt], keep: Collection[str] = ()) -> list[Delivery]:
        """Take attempts that have ended through the rest of their way; returns the deferred.

        What is durable already is announced first: nothing that is raised while failures are
        recorded takes anything from it.

        :param keep: names of leases that are not released.
        """
        self._watch.check()
        durable: list[Attempt] = []
        completed: list[Attempt] = []
        failed: list[Attempt] = []
        waiting: list[Delivery] = []
        for attempt in map(_resolved, attempts):
            is_in_hand = attempt is attempt.delivery.attempt
            if attempt.pause_seconds is not None and self._is_workers and not is_in_hand:
                self._pause(attempt)
            if attempt.ending is Ending.DEFERRED:
                waiting.append(attempt.delivery)
            elif attempt.is_recorded:
                durable.append(attempt)
            elif attempt.ending is Ending.COMPLETED:
                completed.append(attempt)
            elif attempt.ending in FAILURES or admission.is_left_open(attempt):
                failed.append(attempt)
            else:
                durable.append(attempt)
        deferred = self._finish(durable, keep) if durable else []
        if waiting:
            deferred += self._defer(waiting, keep)
        if completed:
            deferred += self._record_completions(completed, keep)
        if failed:
            deferred += self._record_failures(failed, keep)
        return deferred

    def _pause(self, attempt: Attempt) -> None:
        """Pause its partition, and leave the message in its place there if its time allows."""
        if failures.keeps_place(attempt):
            attempt.ending, attempt.reason = Ending.DEFERRED, "paused"
        if attempt.pause_seconds:
            self._on_pause(attempt)

    def _record_completions(
        self, attempts: Sequence[Attempt], keep: Collection[str]
    ) -> list[Delivery]:
        """Make completions outside a transaction durable, and finish them. One that the database
        refuses again and again is a failure of its attempt. Returns the deferred: they run again.
        """
        retry = OutageRetry(self._stopping if self._is_workers else None, has_run=True)
        while True:
            try:
                freshen_connections(is_own=self._is_workers)
                self._leased.record(attempts)
                break
            except Exception as error:
                following = retry.after(error, "Endings cannot be recorded", len(attempts))
                if following is Next.SPLIT:
                    return [d for one in attempts for d in self._record_completions([one], keep)]
                if following is Next.REFUSED:
                    for attempt in attempts:
                        failures.judge_error(attempt, error)
                    break
                if following is Next.STOPPED:
                    return self._defer([attempt.delivery for attempt in attempts], keep)
        return self._settle(attempts, keep)

    def _record_failures(
        self, attempts: Sequence[Attempt], keep: Collection[str]
    ) -> list[Delivery]:
        """Make failures durable, and finish them; returns the deferred: with their attempt in hand,
        which is recorded should they come up here again."""
        retry = OutageRetry(self._stopping if self._is_workers else None, has_run=True)
        if tracing.tracer is not None:
            tracing.tracer.failing([a for a in attempts if a.ending in FAILURES])
        while True:
            try:
                self._write_failures(attempts)
                break
            except Exception as error:
                for attempt in attempts:
                    attempt.delivery.attempt = attempt
                following = retry.after(error, "Failures cannot be recorded", len(attempts))
                if following is Next.SPLIT:
                    return [d for one in attempts for d in self._record_failures([one], keep)]
                if following is Next.REFUSED:
                    # It runs again, so that the attempt counts and there is an end to it.
                    for attempt in attempts:
                        attempt.delivery.attempt = None
                if following is not Next.AGAIN:
                    return self._defer(
                        [attempt.delivery for attempt in attempts],
                        keep,
                        count_delivery=following is Next.REFUSED,
                    )
        recorded = [attempt for attempt in attempts if attempt.is_recorded]
        refused = [attempt for attempt in attempts if not attempt.is_recorded]
        for attempt in refused:
            attempt.delivery.attempt = attempt
        deferred = self._defer([a.delivery for a in refused], keep) if refused else []
        return deferred + (self._finish(recorded, keep) if recorded else [])

    def _write_failures(self, attempts: Sequence[Attempt]) -> None:
        """Publish the dead letters, then commit everything about these attempts but those whose
        dead letter was refused by its topic."""
        failures.publish_dead_letters([a for a in attempts if a.ending is Ending.DEAD])
        writable = [a for a in attempts if a.is_published or a.ending is not Ending.DEAD]
        using, store = self._runtime.database, self._runtime.store
        with completion.recording(store, calls_handlers=True) as recorded:
            recorded += writable
            completion.close_known(using, [a for a in writable if a.ending is Ending.DUPLICATE])
            failed = [attempt for attempt in writable if attempt.ending in FAILURES]
            failures.record_failures(using, failed, self._worker)
            completion.acknowledge_within(writable)

    # --- Acknowledge, announce, release -----------------------------------------------------------

    def _finish(self, attempts: Sequence[Attempt], keep: Collection[str]) -> list[Delivery]:
        """Acknowledge, announce and release what is durable. Nothing that is raised here undoes
        that; returns what could not be acknowledged, which is to be done when it comes up again."""
        deferred = self._acknowledge(attempts)
        # Before anybody hears of a failure, since a retry may come to another worker at once.
        self._release([a for a in attempts if a.ending in FAILURES], keep)
        try:
            self._announce([attempt for attempt in attempts if not attempt.is_announced])
        finally:
            self._release(attempts, keep)
        return deferred

    def _acknowledge(self, attempts: Sequence[Attempt]) -> list[Delivery]:
        """Acknowledge, by subscription; returns what could not be."""
        deferred: list[Delivery] = []
        for subscription, group in completion.by_subscription(attempts):
            try:
                subscription.acknowledge(
                    [a.delivery.record for a in group if not a.is_acknowledged]
                )
            except Exception:
                logger.exception("%d records could not be acknowledged, trying again", len(group))
                for attempt in group:
                    attempt.delivery.attempt = attempt
                    deferred.append(attempt.delivery)
            else:
                for attempt in group:
                    attempt.is_acknowledged = attempt.is_recorded = True
                    attempt.delivery.attempt = None
                    attempt.delivery.is_settled = True
        return deferred

    def _announce(self, attempts: Sequence[Attempt]) -> None:
        """Call hooks and listeners, once for each attempt."""
        for attempt in attempts:
            attempt.is_announced = True
        if not attempts:
            return
        if tracing.tracer is not None:
            tracing.tracer.settled(attempts)
        for attempt in attempts:
            handler = attempt.delivery.handler
            if handler is not None and handler.observes:
                # The state is committed; a hook cannot take it back.
                facts = facts_of(attempt.delivery, attempt.number)
                _call_isolated(handler.on_settled, attempt, handler.name, facts)
        log_skipped(attempts)
        for listener in self._listeners:
            _call_isolated(listener, attempts, f"{len(attempts)} attempts", {})

    def _release(self, attempts: Sequence[Attempt], keep: Collection[str]) -> None:
        """Release the leases that have not been released yet."""
        held = [a for a in attempts if a.delivery.message is not None and not a.is_released]
        if keep:
            held = [attempt for attempt in held if attempt.delivery.lease not in keep]
        for attempt in held:
            attempt.is_released = True
        if held:
            self._leases.release([attempt.delivery.lease for attempt in held])

    def _defer(
        self, deliveries: list[Delivery], keep: Collection[str], *, count_delivery: bool = False
    ) -> list[Delivery]:
        """Release what comes up again, and return it.

        :param count_delivery: their attempts count, though they have no ending.
        """
        names = [d.lease for d in deliveries if d.message is not None]
        names = [name for name in names if name not in keep]
        self._leases.release(names, count_delivery=count_delivery)
        if tracing.tracer is not None:
            tracing.tracer.given_back(deliveries)
        return deliveries


def _unsettled(deliveries: Sequence[Delivery], running: set[Delivery] | None) -> list[Delivery]:
    """Return those that are neither settled nor run on an event loop."""
    return [d for d in deliveries if not d.is_settled and not (running and d in running)]


def _resolved(attempt: Attempt) -> Attempt:
    """Return what a delivery ended with, given how it was judged after a COMMIT that was not
    answered: its completion, where that had taken effect."""
    delivery, earlier = attempt.delivery, attempt.delivery.attempt
    if earlier is None or earlier is attempt:
        return attempt
    delivery.attempt = None
    if earlier.ending is not Ending.COMPLETED or earlier.is_announced:
        return attempt
    if attempt.ending is Ending.DUPLICATE:
        earlier.is_confirmed = earlier.is_recorded = True
        return earlier
    attempt.is_confirmed = attempt.ending is Ending.COMPLETED
    return attempt


# --- What is announced ----------------------------------------------------------------------------


def _call_isolated(
    function: Callable[[Any], object], argument: Any, what: str, facts: dict[str, Any]
) -> None:
    try:
        function(argument)
    except ENDINGS as error:
        if is_interrupt(error):
            raise
        logger.exception("A hook failed: %s", what, extra=facts)


_WHY_SKIPPED = {
    "has_row": "its retries are its row's",
    "generation": "its job has been requeued since",
    "attempt": "this attempt has an outcome already",
    "changed": "its job was changed meanwhile",
    "lease lost": "its run outlived its lease, another worker has taken the job over since",
}
"""Where the reason of an ending is no word for people, as a job's state is."""


def log_skipped(attempts: Sequence[Attempt]) -> None:
    """Leave a line in the log for each message that was acknowledged without a run, and for each
    result that came too late."""
    for attempt in attempts:
        is_late = attempt.reason == "lease lost"
        if attempt.ending is Ending.SKIPPED or is_late:
            delivery, why = attempt.delivery, attempt.reason
            which = delivery.message.id if delivery.message else delivery.record.position
            line = f"Skipped {which}: {_WHY_SKIPPED.get(why, why)}"
            # What such a handler did outside the database has been done twice.
            level = logging.WARNING if is_late else logging.INFO
            logger.log(level, one_line(line), extra=facts_of(delivery, attempt.number))


def notify_waiters(attempts: Sequence[Attempt]) -> None:
    """Call those who wait for a job that has ended; duplicates too, since the worker before may
    have died between its commit and its call. Costs nothing where nobody waits."""
    ended = (o.delivery.record.headers for o in attempts if o.ending is not Ending.RETRIED)
    channels = {
        names.text(headers, names.REPLY_TO) for headers in ended if names.REPLY_TO in headers
    }
    if channels:
        storing.notify_waiters(channels)


def send_signals(attempts: Sequence[Attempt]) -> None:
    """Send the signals of durable attempts."""
    wanted = (
        signals.job_completed,
        signals.job_retried,
        signals.job_failed,
        signals.job_stalled,
        signals.job_cancelled,
        signals.message_dead_lettered,
    )
    if not any(one.receivers for one in wanted):
        return
    for attempt in attempts:
        _send_signals_of(attempt)


def result_of(attempt: Attempt) -> Any:
    """Return what the handler returned, as a waiter would get it."""
    message = attempt.delivery.message
    if attempt.result is None or message is None:
        return None
    return load_result(attempt.result, serializer_for(message.content_type))


def _send_signals_of(attempt: Attempt) -> None:
    delivery, message = attempt.delivery, attempt.delivery.message
    facts: dict[str, Any] = {
        "job_id": (message.job_id or message.id) if message else None,
        "unique_id": attempt.row.unique_id if attempt.row else None,
        "queue": delivery.queue.name,
        "handler": message.type if message else "",
    }
    sender = facts["handler"]
    if attempt.delivery.deliveries > 1:
        signals.send(signals.job_stalled, sender=sender, attempt=attempt.number, **facts)
    if attempt.ending is Ending.COMPLETED:
        signals.send(
            signals.job_completed,
            sender=sender,
            result=result_of(attempt),
            attempt=attempt.number,
            seconds=attempt.seconds,
            **facts,
        )
    elif attempt.ending is Ending.RETRIED:
        signals.send(
            signals.job_retried,
            sender=sender,
            error=attempt.error,
            attempt=attempt.number,
            retry_at=attempt.retry_at,
            **facts,
        )
    elif attempt.ending is Ending.CANCELLED:
        signals.send(signals.job_cancelled, sender=sender, **facts)
    elif attempt.ending is Ending.DEAD:
        signals.send(
            signals.job_failed,
            sender=sender,
            error=attempt.error,
            attempt=attempt.number,
            reason=str(attempt.reason),
            **facts,
        )
        signals.send(
            signals.message_dead_lettered,
            sender=sender,
            dead_letter_id=attempt.dead_letter_id or None,
            queue=facts["queue"],
            handler=facts["handler"],
            reason=str(attempt.reason),
            error=attempt.error,
        )
