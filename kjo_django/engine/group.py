"""A group's way: claim, admit, run, record, acknowledge, announce, release.

    claim        leases of coordination for all, in one round trip
    admit        rows and markers are read; who is a duplicate, cancelled, expired … ends here
    run          a runner calls the handlers
    record       what is durable: completions with their effects, failures in a transaction after it
    acknowledge  once, for all whose ending is durable
    announce     hooks, signals, waiters, statistics
    release      the leases

Where the kinds of handlers differ:

- Atomic ones are admitted, run and recorded in the group's transaction. Should that fail as a
  whole, its deliveries run again one by one, so one bad job never takes others with it.
- Those outside a transaction are admitted under leases in their jobs' rows. What has ended waits in
  a queue, and is settled together by the lane that ran it, or by the recorder while that is busy.
- Coroutines leave their lane when they start. The recorder settles what has ended since its last
  look.

Each attempt says how far it has come, so what is raised in one step is resumed at that step: no
handler runs again whose effects are committed, and nothing that is committed goes unannounced.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any

from django.db import DatabaseError, InterfaceError, OperationalError, connections
from django.dispatch import Signal

from kjo_django import registry, signals, tracing
from kjo_django.clock import CLOCK
from kjo_django.coordination.base import FIRST_CLAIM, Claim
from kjo_django.engine import admission, failures, recorder
from kjo_django.engine.admission import HeldBack, MarkedAheadError
from kjo_django.engine.attempt import (
    FAILURES,
    Attempt,
    Delivery,
    Departed,
    Ending,
    Mode,
    Reason,
    RefusedRecord,
)
from kjo_django.engine.committed import keep_committed
from kjo_django.engine.direct_steps import DirectSteps, JoinedSteps
from kjo_django.engine.handler.call import call_isolated, call_watched, recording
from kjo_django.engine.handler.connections import (
    TransactionGuard,
    answers,
    begin_new_session,
    drop_broken_connections,
    freshen_connections,
    is_repeatable,
    watching,
)
from kjo_django.engine.handler.context import JobContext, facts_of
from kjo_django.engine.handler.log_lines import log_end, logs_all
from kjo_django.engine.handler.savepoint import LazySavepoint
from kjo_django.engine.handler.timeouts import RunAbandoned, TimeoutWatch
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.recorder import OUTAGES, EndedQueue, Next, OutageRetry, Recorder, Unwritten
from kjo_django.engine.runners.lane import LaneRunner, RolledBack
from kjo_django.engine.runners.loop import LoopRunner
from kjo_django.enqueue import storing
from kjo_django.exceptions import HandlerTimeout, TransactionEndedError
from kjo_django.limits.limiter import Limiter, Sorted
from kjo_django.limits.lines import Line
from kjo_django.limits.rules import Limit, computes_key
from kjo_django.logs import contain_others, get_logger
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import load_result, one_line, serializer_for
from kjo_django.models import EventKey
from kjo_django.states import JobState
from kjo_django.store.rows import JobRow
from kjo_django.store.session_changes import changed, note_new_sessions
from kjo_django.transports.base import Subscription
from kjo_django.workflows.countdown import Receiver

logger = get_logger("kjo_django")

HELD_ELSEWHERE_DELAY = 1.0
"""Seconds until a delivery that another worker holds is tried again."""
SETTLED_TOGETHER = 1000
"""Most coroutines that are settled in one transaction."""
REPEATS = 5
"""Times a transaction is repeated in one attempt that the database has ended for others' sake."""
_OF_GROUP = (Ending.COMPLETED, Ending.DUPLICATE, Ending.SKIPPED)
"""Endings that the group's own transaction makes durable."""

_step_of = attrgetter("step")
_attempt_of = attrgetter("attempt")
_has_own_lease = attrgetter("has_own_lease")
_joins_transactions = attrgetter("subscription.joins_transactions")

Listener = Callable[[Sequence[Attempt]], None]
"""Is called with attempts whose endings are durable."""


class Pipeline:
    """Runs groups. Called by every lane's thread; keeps no state between groups but what is on
    their deliveries.

    :param listeners: are called with every group's attempts once their endings are durable; what
        one raises is logged and keeps nothing from the others.
    :param on_share: is called with a handler's name, how many of its deliveries in a group its
        limits let run, and how many there were.
    :param on_earlier: is called with the moments (monotonic) at which deliveries that are deferred
        are to come up, where those are earlier than before.
    :param on_put_off: is called with the moments (monotonic) at which deliveries that are about to
        be deferred are to come up.
    :param on_unused_permit: is called with a delivery for each permit of a rate with which it did
        not start in time.
    :param on_pause: is called with each attempt whose partition is to be paused for its
        ``pause_seconds``, before its message may be run again.
    :param stopping: set when the worker stops. Without it ``run`` raises outages and bugs; with it,
        outages are waited out, and what has run is kept.
    :param on_settled: where given, coroutines outside a transaction run on an event loop of their
        own: ``run`` returns while they do. It is called with the deliveries whose coroutines have
        ended, and those of them that are deferred.
    :param receiver: runs steps that completions release, where it has room for them.
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
        on_share: Callable[[str, int, int], None] = lambda kind, ran, taken: None,
        on_earlier: Callable[[Mapping[Delivery, float]], None] = lambda moments: None,
        on_put_off: Callable[[Mapping[Delivery, float]], None] = lambda moments: None,
        on_unused_permit: Callable[[Delivery], None] = lambda delivery: None,
        on_pause: Callable[[Attempt], None] = lambda attempt: None,
        stopping: threading.Event | None = None,
        on_settled: Callable[[Sequence[Delivery], Collection[Delivery]], None] | None = None,
        receiver: DirectSteps | None = None,
        on_thread: Callable[[], None] = lambda: None,
    ) -> None:
        contain_others()
        note_new_sessions()
        self._leases = leases
        self._receiver = receiver
        self._runtime = runtime = leases.runtime
        self._worker = worker
        self._watch = watch
        self._listeners = listeners
        self._on_share = on_share
        self._on_pause = on_pause
        self._stopping = stopping or threading.Event()
        self._is_workers = stopping is not None
        self._stops_waiting = stopping
        """Ends the wait for servers that are away; None: nobody waits for them."""
        self.limiter = Limiter(leases, on_earlier, on_put_off, on_unused_permit)
        watch.on_start = self.limiter.note_start
        self._guards: set[TransactionGuard] = set()
        """Of the transactions in which handlers are called."""
        self._ended: dict[EndedQueue, tuple[Sequence[Delivery], Departed]] = {}
        """Queues of groups whose handlers are called outside a transaction, these groups, and what
        has left them."""
        self._recorder = Recorder(on_thread)
        self._lane = LaneRunner(
            runtime,
            watch,
            on_measure,
            self._stopping,
            is_own=self._is_workers,
            take_permits=self.limiter.take_permits,
        )
        self._loop: LoopRunner | None = None
        if on_settled is not None:
            ended = EndedQueue(partial(self._settle_coroutines, on_settled), 0.0, self._recorder)
            self._loop = LoopRunner(
                runtime,
                watch,
                ended,
                self._recorder,
                on_thread,
                use_permits=self.limiter.use_permits,
            )

    @property
    def threads(self) -> list[threading.Thread]:
        """Those it has started."""
        loop = () if self._loop is None else self._loop.threads
        return [*self._recorder.threads, *loop]

    def close(self, timeout: float) -> None:
        """End the threads it started, waiting so many seconds for them."""
        if self._loop is not None:
            self._loop.close(timeout)
        self._recorder.close(timeout)

    # --- A group ----------------------------------------------------------------------------------

    def run(
        self, deliveries: Sequence[Delivery], running: Departed | None = None
    ) -> list[Delivery]:
        """Run a group to its durable end; returns the deferred, which stay unacknowledged.

        Outages of the database are waited out here: nothing is acknowledged, no attempt is spent.

        :param deliveries: of one mode.
        :param running: those are added to it whose coroutines run on after the return; free lanes
            may take others through it.
        """
        left, retry, is_ours = deliveries, None, True
        try:
            while True:
                try:
                    return self._run_once(left, running)
                except OUTAGES as error:
                    retry = retry or OutageRetry(self._stops_waiting)
                    using = self._runtime.database
                    following = retry.after(error, using, "The group cannot be settled", 1)
                    self._watch.check()
                    # Of all of the group: of a COMMIT without an answer, steps that had joined it,
                    # too.
                    left = _unsettled(deliveries, running)
                    # What a database that is there refuses again and again must not keep a lane.
                    if following is not Next.AGAIN:
                        return self._defer(left)
                    self._leases.give_back_rows(left)  # it is admitted anew
        except RunAbandoned:
            is_ours = False  # whoever gave this thread up has taken the group from it
            raise
        except Exception:
            if not self._is_workers:
                raise
            # A bug. It counts as an attempt, or it would go on for ever.
            left = self._defer(_unsettled(left, running), is_spent=True)
            begin_new_session(self._runtime.database)
            logger.exception("A group of %d failed", len(left))
            return left
        except BaseException:
            # What ends a run like this would do so for ever.
            self._spend(_unsettled(deliveries, running))
            raise
        finally:
            if is_ours and self._leases.owned:
                self._give_back_left(deliveries, running)

    def _give_back_left(self, deliveries: Sequence[Delivery], running: Departed | None) -> None:
        """Give back what deliveries of a group that has ended still own, but for those that run on
        an event loop."""
        owned = self._leases.owned
        mine = [d for d in deliveries if d in owned and not (running and d in running)]
        if mine and not self._watch.is_abandoned:
            self._give_back(mine)

    def give_back_taken(self, deliveries: Sequence[Delivery]) -> None:
        """Give back what deliveries still own that have left their group and have not begun: they
        are claimed anew, in the same attempt."""
        freshen_connections(is_own=self._is_workers)
        self.limiter.keep_places(deliveries)
        self._give_back(deliveries)

    def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Give back all that deliveries still own."""
        self._leases.give_back(deliveries)
        if self._leases.freed:
            self.limiter.releaser.awake.set()

    def _spend(self, deliveries: Iterable[Delivery]) -> None:
        """Let attempts count that end here without an ending, unless another thread has them."""
        if not self._watch.is_abandoned:
            self._leases.spend(deliveries)

    def _run_once(self, deliveries: Sequence[Delivery], running: Departed | None) -> list[Delivery]:
        freshen_connections(is_own=self._is_workers)
        left, deferred, held_back = list(deliveries), list[Delivery](), HeldBack()
        if any(map(_attempt_of, deliveries)):
            left, deferred = self._settle_known(deliveries, held_back)
        if not left:
            return deferred
        if left[0].mode is Mode.POISON:
            return deferred + self._refuse(left)
        is_orphan = left[0].is_orphan and len(left) == 1
        left[0].is_orphan = False  # deferred once more, it waits as others do
        for delivery in left:
            if delivery.limit_state is not None:
                self.limiter.note_prepared_from(delivery, is_first=delivery is left[0])
        claims = self._leases.claim(left, left[0].queue.processing_ttl)
        if claims.count(FIRST_CLAIM) == len(claims):
            for delivery in left:
                delivery.deliveries = 1
            waiting = self._run_claimed(left, running)
        elif is_orphan and claims[0] == Claim(True, left[0].deliveries):
            # It may have killed a worker. It takes no other orphan with it, so each death costs an
            # innocent one an attempt only the first time they meet.
            waiting = self._run_claimed(left, None)
        else:
            waiting = self._run_sorted(left, claims, held_back, running)
        if waiting:
            self.limiter.keep_places(waiting)
        return deferred + waiting

    def _settle_known(
        self, deliveries: Sequence[Delivery], held_back: HeldBack
    ) -> tuple[list[Delivery], list[Delivery]]:
        """Settle attempts that had ended when their group began; return what is to run, and the
        deferred."""
        known = [d.attempt for d in deliveries if d.attempt is not None]
        ended = [attempt for attempt in known if attempt.must_not_run]
        deferred = held_back.defer(self._settle(ended)) if ended else []
        left = [d for d in deliveries if not d.is_settled and d not in deferred]
        left, behind = held_back.split(left)
        return left, deferred + behind

    def _refuse(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Settle records that no handler here can run; returns the deferred."""
        refused = [delivery for delivery in deliveries if isinstance(delivery, RefusedRecord)]
        attempts = admission.refuse(self._leases, refused)
        if self._is_workers:  # others may know what this one does not
            failures.wait_for_handlers(self._runtime, attempts)
        return self._settle(attempts)

    def abandon(
        self,
        deliveries: Sequence[Delivery],
        hung: Sequence[tuple[JobContext, float, Delivery]],
    ) -> list[Delivery]:
        """Judge handlers that have hung as failed, and take their group from the thread that ran
        it; returns what is to come up again: that settles the failures, and runs the others.

        What had ended before them is settled here, or by the recorder, which is waited for: it
        would run again.

        :param deliveries: the group, whose thread has no database session any more.
        :param hung: the runs that did not end, and for how many seconds they have lasted.
        """
        try:
            for ended, (group, departed) in list(self._ended.items()):
                if not set(departed.remaining(group)).isdisjoint(deliveries):
                    self._ended.pop(ended, None)
                    self._recorder.forget(ended)
                    ended.settle()
            left = self._judge_hung(deliveries, hung)
            self._leases.give_back_rows(left)
            self.limiter.keep_places([each for each in left if each.attempt is None])
            return self._defer(left)
        except BaseException:
            self._leases.spend([delivery for _, _, delivery in hung])
            raise
        finally:
            self._give_back(deliveries)

    def _judge_hung(
        self,
        deliveries: Sequence[Delivery],
        hung: Sequence[tuple[JobContext, float, Delivery]],
    ) -> list[Delivery]:
        """Judge handlers that have hung; return what of their group is not settled."""
        runtime = self._runtime
        left = _unsettled(deliveries, None)
        guilty = {delivery for _, _, delivery in hung}
        guards = list(self._guards)  # other lanes begin and end transactions meanwhile
        guard = next((g for g in guards if guilty & {a.delivery for a in g.calls}), None)
        ran = None
        if guard is not None:
            self._guards.discard(guard)
            ran = keep_committed(runtime, guard, guard.calls, self._until_answered)
        for attempt in ran or ():
            attempt.delivery.attempt = attempt
        _, rows = admission.load_rows(runtime, deliveries)
        for context, seconds, delivery in hung:
            row = rows.get(delivery)
            if row is not None and row.state == JobState.WAITING:
                continue  # it had joined its group's transaction, and its release is undone
            attempt = Attempt(
                delivery,
                row=row,
                number=context.attempt,
                limit=context.max_attempts,
                started_at=CLOCK.now() - timedelta(seconds=seconds),
                seconds=seconds,
                log_lines=context.log_lines,
            )
            error: Exception = HandlerTimeout(
                "The handler exceeded its timeout and could not be interrupted; its thread was "
                f"given up after {seconds:.0f} s"
            )
            if guard is not None and ran is not None:
                error = guard.error()
            delivery.attempt = failures.judge_error(runtime, attempt, error)
        return left

    # --- Claim ------------------------------------------------------------------------------------

    def _run_sorted(
        self,
        deliveries: Sequence[Delivery],
        claims: Sequence[Claim],
        held_back: HeldBack,
        running: Departed | None,
    ) -> list[Delivery]:
        """Run what is ours; returns the deferred: what others hold; orphans, which were being run
        when a worker died and run in groups of their own; and what comes after these with its key.
        """
        each = zip(deliveries, claims, strict=True)
        refused = [delivery.lease for delivery, claim in each if not claim.acquired]
        abandoned = self._leases.release_abandoned(refused)
        mine: list[Delivery] = []
        orphans: list[Delivery] = []
        deferred: list[Delivery] = []
        for delivery, claim in zip(deliveries, claims, strict=True):
            delivery.deliveries = max(1, claim.deliveries)
            if held_back.covers(delivery):
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
        if orphans:
            self._leases.give_back(deferred)  # or a crash of the others would count for them
            for delivery in orphans:
                delivery.is_orphan = True
                # As many as there are once it is claimed for its own run.
                delivery.deliveries += delivery.lease in abandoned
            self._record_lost_attempts(orphans)
        if mine:
            deferred += held_back.defer(self._run_claimed(mine, running))
        return deferred

    def _record_lost_attempts(self, orphans: Sequence[Delivery]) -> None:
        try:
            failures.record_lost_attempts(self._runtime, orphans)
        except DatabaseError as error:
            # They count all the same, and that is what matters.
            logger.warning("Lost attempts of %d jobs are not noted: %s", len(orphans), error)
            drop_broken_connections()

    # --- Admit, run and record, in the group's transaction ----------------------------------------

    def _run_limited(self, deliveries: list[Delivery], running: Departed | None) -> list[Delivery]:
        """Run what the limits permit now; settle what has to wait in line for them, and release
        what comes next there. Returns the deferred."""
        if computed := [
            each for each in deliveries if computes_key(each.handler, each.message.content_type)
        ]:
            self._leases.begin(computed)  # that may end the worker, as a handler may
        limited = self.limiter.limits_of(deliveries) if self._is_workers else {}
        if not limited:
            return self._run_claimed(deliveries, running, is_permitted=True)
        ready = {each for each, limits in limited.items() if self.limiter.is_ready(each, limits)}
        line, rows = self._read_line(limited, [each for each in limited if each not in ready])
        new = [delivery for delivery in limited if not delivery.asks_again]
        found = self.limiter.sort(deliveries, limited, rows, line, ready)
        running_kinds = Counter(d.kind for d in {*new}.intersection(found.may_run))
        for kind, count in Counter(delivery.kind for delivery in new).items():
            self._on_share(kind, running_kinds[kind], count)
        deferred = list(found.deferred)
        if found.settled:
            deferred += self._settle_in_line(found)
        self.limiter.start(found)
        if found.may_run:
            deferred += self._run_claimed(found.may_run, running, is_permitted=True)
        return deferred

    def _read_line(
        self, limited: dict[Delivery, list[Limit]], asking: Sequence[Delivery]
    ) -> tuple[Line, dict[Delivery, JobRow]]:
        """Read the rows of deliveries that are to ask for limits, and the line with them. Those
        that end without a run have no limit any more.

        :param limited: the limits of the group's deliveries.
        """
        runtime = self._runtime
        line = Line(runtime, {limit.name for each in asking for limit in limited[each]})
        rows = admission.load_rows(runtime, asking, read=line.job_rows)[1] if asking else {}
        for delivery in asking:
            if admission.ends_without_run(runtime, delivery, rows.get(delivery)):
                self.limiter.give_back([delivery])
                del limited[delivery]
        return line, rows

    def _settle_in_line(self, found: Sorted[Delivery]) -> list[Delivery]:
        """Settle the messages of jobs that wait in line for a limit; returns the deferred."""
        attempts = [
            Attempt(delivery, Ending.IN_LINE, Reason.LIMITED, row, row.attempts, is_announced=True)
            for delivery, row in found.settled
        ]
        database = self._runtime.database
        with self._runtime.store.writing(calls_handlers=False):
            self.limiter.enter_line(found)
            recorder.acknowledge_within(attempts)
            given_up = self._leases.settle_within(database, [each.delivery for each in attempts])
        self._leases.forget(given_up)
        return self._finish(attempts)

    def _run_claimed(
        self,
        deliveries: list[Delivery],
        running: Departed | None,
        *,
        is_permitted: bool = False,
    ) -> list[Delivery]:
        """Admit, run and settle what nobody else holds; returns the deferred.

        :param is_permitted: no limit stands against it.
        """
        if not is_permitted and (
            registry.limited or self._runtime.limit_controls or self.limiter.has_limited_queues
        ):
            return self._run_limited(deliveries, running)
        if any(map(_has_own_lease, deliveries)):
            deliveries, others = self._begin(deliveries)
            if others and deliveries:
                return others + self._run_claimed(deliveries, running, is_permitted=True)
            if others:
                return others
        if deliveries[0].mode is not Mode.ATOMIC:
            return self._run_leased(deliveries, running)
        if len(deliveries) == 1:
            return self._settle(self._run_alone(deliveries[0]))
        return self._run_together(deliveries)

    def _run_together(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Admit, run and settle deliveries in one transaction, or one by one if that fails; returns
        the deferred."""
        try:
            attempts = self._run_in_transaction(deliveries)
        except Exception as error:
            if isinstance(error, OUTAGES) and not isinstance(error, DatabaseError):
                raise
            logger.warning(
                "A group of %d failed and runs again one by one: %s",
                len(deliveries),
                error,
                exc_info=not isinstance(error, DatabaseError | RolledBack | MarkedAheadError),
            )
            self._leave_session()
            kept = self._kept_after(error)
        else:
            return self._settle(attempts)
        return self._run_one_by_one(deliveries, kept)

    def _begin(self, deliveries: list[Delivery]) -> tuple[list[Delivery], list[Delivery]]:
        """Note durably that deliveries run, so that the death of this worker counts for them.
        Return those that may run, and those that others have by now, with what comes after these.
        """
        begun, held_back = self._leases.begin(deliveries), HeldBack()
        held_back.defer(each for each in deliveries if each not in begun)
        return held_back.split(deliveries)

    def _run_one_by_one(
        self, deliveries: Sequence[Delivery], ended: Sequence[Attempt]
    ) -> list[Delivery]:
        """Admit, run and settle each delivery of a group by itself; returns the deferred.

        :param ended: attempts that have ended, and are only to be settled.
        """
        held_back = HeldBack()
        have_ended, deferred = self._settle_ended(deliveries, ended, held_back)
        refused: DatabaseError | None = None
        for delivery in deliveries:
            if delivery in have_ended:
                continue
            if held_back.covers(delivery):
                deferred.append(delivery)
                continue
            try:
                waiting = self._run_next(delivery, held_back)
            except DatabaseError as error:
                if not answers(self._runtime.database):
                    raise
                # One that can never be settled must not keep those behind it from their end.
                refused, waiting = error, [delivery]
                self._leave_session()
            deferred += held_back.defer(waiting)
        if refused is not None:
            raise refused
        return deferred

    def _settle_ended(
        self, deliveries: Sequence[Delivery], ended: Sequence[Attempt], held_back: HeldBack
    ) -> tuple[set[Delivery], list[Delivery]]:
        """Settle attempts of a group that have ended, and other records of those that have failed;
        return the deliveries of all of these, and the deferred."""
        have_ended = {attempt.delivery for attempt in ended}
        have_failed = {attempt.key for attempt in ended if attempt.ending in FAILURES}
        # Other records of these messages, as a crashed relay leaves them.
        copies = [d for d in deliveries if d.key in have_failed and d not in have_ended]
        have_ended.update(copies)
        held_back.after(ended)
        skipped = [Attempt(copy, Ending.SKIPPED, Reason.ATTEMPT) for copy in copies]
        return have_ended, held_back.defer(self._settle([*ended, *skipped]))

    def _run_next(self, delivery: Delivery, held_back: HeldBack) -> list[Delivery]:
        if delivery.limit_state is not None and delivery.limit_state.has_started:
            self.limiter.permit_again(delivery)
        alone = self._run_alone(delivery)
        held_back.after(alone)
        return self._settle(alone)

    def _run_in_transaction(self, deliveries: Sequence[Delivery]) -> list[Attempt]:
        """Admit, run and record a group in one transaction.

        Without savepoints where every handler of the group has no effect that a roll-back does not
        undo: the first that fails undoes all, and all run again, each behind its own.

        :raises DatabaseError: the transaction failed as a whole; nothing has taken effect.
        """
        attempts: list[Attempt] = []
        ended: Sequence[Attempt] = ()
        if all(delivery.handler.options.database_only for delivery in deliveries):
            try:
                self._transact(deliveries, attempts)
                return attempts
            except RolledBack as rolled_back:
                if rolled_back.guard.ended_by:
                    raise
                ended = rolled_back.guard.unwanted
                attempts.clear()
        self._transact(deliveries, attempts, ended, savepoints=True)
        return attempts

    def _run_alone(self, delivery: Delivery, repeats: int = REPEATS) -> list[Attempt]:
        """Admit, run and record a delivery in its own transaction, and steps that join it. What its
        commit raises is its own failure, and so is any error of ours.

        :param repeats: how often it is run again, without an attempt, where the database says that
            this may be done.
        :raises DatabaseError: the database is away.
        """
        attempts: list[Attempt] = []
        try:
            self._transact([delivery], attempts)
        except RolledBack as rolled_back:
            return self._rolled_back(delivery, attempts, rolled_back, repeats)
        except OUTAGES as error:
            self._leave_session()
            if repeats and is_repeatable(error):
                return self._repeat(delivery, repeats)
            # A database that answers again at once was not down: the job broke its commit, and
            # would do so for ever if that did not count as an attempt.
            if (
                not attempts
                or attempts[0].ending is not Ending.COMPLETED
                or not isinstance(error, DatabaseError)
                or not answers(self._runtime.database)
            ):
                raise
            self._judge_commit(attempts[0], error)
        except MarkedAheadError as error:
            logger.warning("%s: they are deleted, a handler has committed them", error)
            admission.delete_markers_ahead(self._runtime, error.deliveries)
            return self._run_alone(delivery)
        except Exception as error:
            logger.exception("An attempt of %s could not be judged; it counts", delivery.kind)
            self._leave_session()
            row = admission.load_rows(self._runtime, [delivery])[1].get(delivery)
            attempt = admission.attempt_of(self._runtime, delivery, row)
            attempt.started_at = CLOCK.now()
            return [failures.judge_error(self._runtime, attempt, error)]
        return attempts

    def _rolled_back(
        self, delivery: Delivery, attempts: list[Attempt], error: RolledBack, repeats: int
    ) -> list[Attempt]:
        """Return what a delivery has ended with whose own transaction was rolled back. Where that
        is not to count, it runs again first.

        :param attempts: were in it.
        :raises OperationalError: the database is away.
        :raises TransactionEndedError: it was that of a test, which is over.
        """
        guard = error.guard
        guard.refuse_in_test()
        # Was that the handler's doing, or the database's, which is away?
        is_away = not answers(self._runtime.database)
        if guard.ended_by and (kept := self._keep_committed(guard)):
            return kept
        if is_away:
            raise OperationalError("The database went away") from error
        is_aborted = any(attempt.abort_reason is not None for attempt in guard.calls)
        if repeats and not is_aborted and is_repeatable(error.__cause__):
            return self._repeat(delivery, repeats)
        return attempts

    def _repeat(self, delivery: Delivery, repeats: int) -> list[Attempt]:
        self.limiter.permit_again(delivery)
        return self._run_alone(delivery, repeats - 1)

    def _leave_session(self) -> None:
        """After an error: let what comes next find a session like new. What handlers have set in
        this one, as with SET ROLE or SET search_path, may be what it failed for."""
        freshen_connections(is_own=self._is_workers)
        if self._is_workers:
            begin_new_session(self._runtime.database)

    def _kept_after(self, error: Exception) -> list[Attempt]:
        """Return the attempts of a group that have ended although its transaction has failed."""
        if isinstance(error, MarkedAheadError):
            admission.delete_markers_ahead(self._runtime, error.deliveries)
        if not isinstance(error, RolledBack):
            return []
        kept = self._keep_committed(error.guard)
        return [*kept, *(attempt for attempt in error.guard.unwanted if attempt not in kept)]

    def _keep_committed(self, guard: TransactionGuard) -> list[Attempt]:
        """Return the attempts that have ended with a transaction that one of their handlers has
        committed: those that had run before, and the one that did it, which has failed.

        :raises TransactionEndedError: it was that of a test, which is over.
        """
        guard.refuse_in_test()
        if not (guilty := guard.ended_by):
            return []
        begin_new_session(self._runtime.database)
        ran = keep_committed(self._runtime, guard, guilty, self._until_answered)
        if ran is None:
            return []
        for attempt in guilty:
            error = guard.error()
            error.__cause__ = attempt.error
            failures.judge_error(self._runtime, attempt, error)
        return [*ran, *guilty]

    def _until_answered(self, ask: Callable[[], Any]) -> Any:
        """Return what the database answers, waiting for it where it is away."""
        retry = OutageRetry(self._stops_waiting, has_run=True)
        while True:
            try:
                return ask()
            except Exception as error:
                using, what = self._runtime.database, "What a handler has committed is not known"
                if retry.after(error, using, what, 1) is not Next.AGAIN:
                    raise

    def _judge_commit(self, attempt: Attempt, error: DatabaseError) -> None:
        """Find out whether the COMMIT of a completion that was not answered has taken effect; if
        not, it is a failed attempt."""
        is_of_another = attempt.delivery.handler.judges_itself and not attempt.is_marked
        if (
            attempt.is_in_doubt
            and not is_of_another  # its marker is of an earlier message
            and attempt.key in self._runtime.store.known_markers([attempt.key])
        ):
            attempt.is_recorded = attempt.is_confirmed = True
        else:
            failures.judge_error(self._runtime, attempt, error)

    def _transact(
        self,
        deliveries: Sequence[Delivery],
        attempts: list[Attempt],
        ended: Sequence[Attempt] = (),
        *,
        savepoints: bool = False,
    ) -> None:
        """Admit, run and record a group in one transaction, and steps of workflows that it releases
        and that may join it. The markers are the first write of each part, the update of the jobs'
        rows its last: what a handler wrote is committed together with the record that it has run,
        or not at all.

        :param attempts: one of each delivery is added to it, and of each step that joins.
        :param ended: those that ended in an earlier transaction, and are not to run again.
        :param savepoints: whether each handler runs behind one.
        :raises RolledBack: a handler has failed that has no savepoint, or has ended the
            transaction.
        :raises MarkedAheadError: nothing has run; markers are there that must not be.
        :raises InterfaceError: steps had joined it, and it failed as a whole or its COMMIT was not
            answered. The group runs again without them.
        """
        self._watch.check()
        store, connection = self._runtime.store, connections[self._runtime.database]
        guard = TransactionGuard(connection, store)
        guard.is_shared = len(deliveries) > 1
        self._guards.add(guard)
        savepoint = LazySavepoint(connection, store, guard) if savepoints else None
        joined: JoinedSteps | None = None
        try:
            with (
                recording(store, calls_handlers=True) as recorded,
                ExitStack() as around,
            ):
                around.enter_context(savepoint.group() if savepoint else nullcontext())
                completed, given_up = self._transact_part(
                    deliveries, attempts, guard, savepoint, ended
                )
                recorded += completed
                if self._receiver is not None and any(map(_step_of, completed)):
                    joined = self._receiver.joined(deliveries, guard)
                receiver: Receiver | None = joined or self._receiver
                recorder.complete(self._runtime, completed, receiver=receiver, is_last=True)
                if joined is not None:
                    self._transact_joined(joined, attempts, guard, savepoint, recorded)
        except Exception as error:
            self._watch.check()
            self._guards.discard(guard)
            if joined is not None and joined.has_run:
                # If it was committed, each that was in it is found to be a duplicate.
                raise InterfaceError(f"A transaction with steps failed: {error}") from error
            if guard.ended_by and not isinstance(error, RolledBack):
                raise RolledBack(guard) from error
            raise
        self._guards.discard(guard)
        self._leases.forget(given_up)

    def _transact_part(
        self,
        part: Sequence[Delivery],
        attempts: list[Attempt],
        guard: TransactionGuard,
        savepoint: LazySavepoint | None,
        ended: Sequence[Attempt] = (),
    ) -> tuple[list[Attempt], list[Delivery]]:
        """Admit and run one part of a transaction, and write what is known of it but completions;
        return these attempts, and the deliveries whose leases are given up with the transaction."""
        guard.marked_at = CLOCK.now()
        admitted = admission.admit_group(self._leases, part, guard.marked_at)
        if ended:
            admitted = _ended_earlier(admitted, ended)
        attempts += admitted
        guard.attempts, guard.ran = admitted, []
        self._lane.run_in_transaction(admitted, guard, savepoint)
        self._watch.check()
        completed = [attempt for attempt in admitted if attempt.ending is Ending.COMPLETED]
        if len(completed) < len(admitted):
            # A marker left behind would make every later attempt look like a duplicate.
            marked = {attempt.key for attempt in admitted if attempt.is_marked}
            self._runtime.store.delete_markers(marked - {attempt.key for attempt in completed})
        durable = [attempt for attempt in admitted if attempt.ending in _OF_GROUP]
        if any(map(_joins_transactions, part)):
            recorder.acknowledge_within(durable)
        # But for those that have a hook to be called under their leases.
        settled = [a.delivery for a in durable if not a.delivery.handler.observes]
        return completed, self._leases.settle_within(self._runtime.database, settled)

    def _transact_joined(
        self,
        joined: JoinedSteps,
        attempts: list[Attempt],
        guard: TransactionGuard,
        savepoint: LazySavepoint | None,
        recorded: list[Attempt],
    ) -> None:
        """Run steps that a transaction has released in it, and the steps that these release, until
        there are no more. Once a handler has changed the session, no step joins any more.

        :param recorded: their completions are added to it.
        """
        part = joined.take()
        with ExitStack() as around:
            if part and savepoint is None:
                savepoint = LazySavepoint(guard.connection, self._runtime.store, guard)
                around.enter_context(savepoint.group())
            while part:
                guard.is_shared = True
                # Nobody has claimed them, so they have no leases to give up.
                completed, _ = self._transact_part(part, attempts, guard, savepoint)
                recorded += completed
                recorder.complete(self._runtime, completed, receiver=joined, is_last=True)
                part = joined.take()

    # --- Admit and run outside a transaction ------------------------------------------------------

    def _run_leased(self, deliveries: list[Delivery], running: Departed | None) -> list[Delivery]:
        """Run a group under leases in rows until each of its attempts is settled, or its coroutine
        runs; returns the deferred.

        An admission is good for the groups' budget: what has not begun by then is judged again
        first. When the worker stops, nothing begins any more but the first of a group.
        """
        is_concurrent = deliveries[0].mode is Mode.CONCURRENT
        if is_concurrent and self._loop is not None and running is not None:
            return self._start_coroutines(self._loop, deliveries, running)
        ended = EndedQueue(
            self._settle,
            self._runtime.settings.group_budget.total_seconds(),
            self._recorder if self._is_workers else None,
        )
        departed = Departed() if running is None else running
        self._ended[ended] = deliveries, departed
        try:
            left = self._run_parts(deliveries, ended, departed)
        finally:
            if not self._watch.is_abandoned:  # else ``abandon`` looks for it
                self._ended.pop(ended, None)
        return ended.deferred + left

    def _run_parts(
        self, deliveries: list[Delivery], ended: EndedQueue, departed: Departed
    ) -> list[Delivery]:
        """Admit, run and settle one part of a group after the other; returns what was not run.

        :param ended: takes what has ended, and the deferred among it.
        :param departed: what has left the group.
        """
        budget = self._runtime.group_budget.seconds
        left, size, has_begun = deliveries, len(deliveries), False
        while left and not (has_begun and self._stopping.is_set()):
            left, behind = ended.held_back.split(left)
            ended.deferred += behind
            part = _first_distinct(left[:size])
            attempts, following = self._admit_part(part) if part else ([], None)
            if following is Next.STOPPED:
                break
            if following is Next.SPLIT:
                size = 1
                continue
            if following is Next.REFUSED:
                # It must not keep those behind it, nor the lane.
                ended.deferred += ended.held_back.defer(part)
                left = left[len(part) :]
                continue
            admitted_at = time.monotonic()
            behind = left[len(part) :]
            not_begun = self._run_admitted(attempts, ended, departed, behind)
            has_begun = has_begun or any(a.started_at is not None for a in attempts)
            # As many as fit into the budget: each that does not is admitted twice.
            size = max(1, len(part) - len(not_begun))
            if time.monotonic() - admitted_at < budget / 2:
                size *= 2
            left = departed.remaining(not_begun + behind)
        return left

    def _admit_part(self, part: Sequence[Delivery]) -> tuple[list[Attempt], Next | None]:
        """Admit deliveries outside a transaction, waiting out the outages of the database; return
        their attempts, or what is to be done since they cannot be admitted."""
        retry = OutageRetry(self._stops_waiting)
        while True:
            try:
                return self._admit_leased(part), None
            except OUTAGES as error:
                using = self._runtime.database
                following = retry.after(error, using, "Jobs cannot be admitted", len(part))
                if following is not Next.AGAIN:
                    return [], following

    def _run_admitted(
        self,
        attempts: Sequence[Attempt],
        ended: EndedQueue,
        departed: Departed,
        behind: Sequence[Delivery],
    ) -> list[Delivery]:
        """Run and settle what may run outside a transaction; returns what has not begun.

        :param departed: what has left the group.
        :param behind: comes after these attempts in the group.
        """
        try:
            self._lane.run_leased(attempts, ended, departed, behind)
        finally:
            self._recorder.forget(ended)
            ended.settle()
        not_begun = [attempt.delivery for attempt in attempts if attempt.ending is None]
        self._leases.give_back_rows(departed.remaining(not_begun))
        return not_begun

    def _start_coroutines(
        self, loop: LoopRunner, deliveries: Sequence[Delivery], running: Departed
    ) -> list[Delivery]:
        """Admit coroutines and start those that may; returns the deferred."""
        attempts = self._admit_leased(deliveries)
        admission.defer_limited(attempts, self.limiter.await_permits)
        if admitted := [attempt for attempt in attempts if attempt.ending is None]:
            running.update(attempt.delivery for attempt in admitted)
            try:
                loop.run(admitted)
            except BaseException:
                running.difference_update(attempt.delivery for attempt in admitted)
                raise
        return self._settle([a for a in attempts if a.delivery not in running])

    def _admit_leased(self, deliveries: Sequence[Delivery]) -> list[Attempt]:
        """Decide what may run, and lease its rows. Of two records of one job one is deferred."""
        self._leases.show_alive_if_late()
        attempts = admission.admit_group(self._leases, deliveries)
        judged = {a.delivery: a.row for a in attempts if a.ending is None and a.row is not None}
        leased = self._leases.lease_rows(judged)
        for attempt in attempts:
            if attempt.ending is not None:
                continue
            if attempt.row is None or attempt.delivery in leased:
                attempt.row_lease = self._leases.token
            else:
                attempt.ending, attempt.reason = Ending.DEFERRED, Reason.LEASED
        return attempts

    def _settle_coroutines(
        self,
        on_settled: Callable[[Sequence[Delivery], Collection[Delivery]], None],
        attempts: list[Attempt],
    ) -> list[Delivery]:
        """Settle coroutines that have ended, in the recorder's thread."""
        loop = self._loop
        for start in range(0, len(attempts), SETTLED_TOGETHER):
            if loop is None or loop.is_closed:
                break
            self._settle_some_coroutines(on_settled, attempts[start : start + SETTLED_TOGETHER])
        return []

    def _settle_some_coroutines(
        self,
        on_settled: Callable[[Sequence[Delivery], Collection[Delivery]], None],
        attempts: Sequence[Attempt],
    ) -> None:
        deliveries = [attempt.delivery for attempt in attempts]
        back = set(deliveries)
        try:
            # Not on the loop: a back-off of somebody's own may take its time.
            for attempt in attempts:
                attempt.delivery.took = None
                if attempt.ending is None:
                    failures.judge(self._runtime, attempt)
                    attempt.delivery.took = attempt.seconds if attempt.error is None else None
            back = set(self._settle(attempts))
            self.limiter.keep_places(back)
        except BaseException as error:
            # Nothing was acknowledged: they run again, and so it is seen.
            self._leases.spend(deliveries)
            if not isinstance(error, Exception):
                raise
            logger.exception("%d coroutines could not be settled", len(deliveries))
        finally:
            try:
                self._give_back(deliveries)
            finally:
                on_settled(deliveries, back)

    # --- Record -----------------------------------------------------------------------------------

    def _settle(self, attempts: Sequence[Attempt]) -> list[Delivery]:
        """Take attempts that have ended through the rest of their way; returns the deferred.

        What is durable already is announced first: nothing that is raised while failures are
        recorded takes anything from it.
        """
        self._watch.check()
        if changed:  # hooks are not to find it either
            freshen_connections(is_own=self._is_workers)
        durable: list[Attempt] = []
        completed: list[Attempt] = []
        failed: list[Attempt] = []
        waiting: list[Attempt] = []
        for attempt in attempts:
            if attempt.delivery.attempt is not None or attempt.pause_seconds is not None:
                attempt = self._resolve_and_pause(attempt)
            if attempt.ending is Ending.DEFERRED:
                waiting.append(attempt)
            elif attempt.is_recorded:
                durable.append(attempt)
            elif attempt.ending is Ending.COMPLETED:
                completed.append(attempt)
            elif admission.is_to_be_recorded(attempt):
                failed.append(attempt)
            else:
                durable.append(attempt)
        deferred = self._finish(durable) if durable else []
        if completed:
            deferred += self._record_completions(completed)
        if failed:
            deferred += self._record_failures(failed)
        if waiting:
            deferred += self._put_off(waiting)
        return deferred

    def _resolve_and_pause(self, attempt: Attempt) -> Attempt:
        """Return what a delivery ended with, which may have been in a transaction whose COMMIT was
        not answered; pause its partition where its error asks for that."""
        earlier = attempt.delivery.attempt
        if earlier is not None and earlier is not attempt:
            attempt = _resolved(attempt, earlier)
        is_judged_now = attempt is not attempt.delivery.attempt
        if attempt.pause_seconds is not None and self._is_workers and is_judged_now:
            self._pause(attempt)
        return attempt

    def _put_off(self, attempts: Sequence[Attempt]) -> list[Delivery]:
        """Run those alone that have failed in a transaction with others, and defer the rest; return
        the deferred."""
        for attempt in attempts:
            if attempt.reason is Reason.LEASE_LOST:
                attempt.delivery.attempt = None  # it is judged anew
                _log_without_effect("Deferred", attempt)
        alone = [a.delivery for a in attempts if a.reason is Reason.ALONE]
        others = [a.delivery for a in attempts if a.reason is not Reason.ALONE]
        for delivery in alone:
            self.limiter.permit_again(delivery)
            delivery.was_joined = True  # alone it stays, without the steps that it releases
        deferred = self._defer(others) if others else []
        return deferred + (self._run_one_by_one(alone, []) if alone else [])

    def _pause(self, attempt: Attempt) -> None:
        """Leave the message of an attempt that met an error that pauses in its place, if its time
        allows, and pause its partition."""
        if failures.keeps_place(self._runtime, attempt):
            attempt.ending, attempt.reason = Ending.DEFERRED, Reason.PAUSED
        if attempt.pause_seconds:
            self._on_pause(attempt)

    def _record_completions(self, attempts: Sequence[Attempt]) -> list[Delivery]:
        """Make completions outside a transaction durable, and finish them. One that the database
        refuses again and again is a failure of its attempt. Returns the deferred: they run again.
        """
        write, what = partial(self._write_completions, attempts), "Endings cannot be recorded"
        unwritten = self._persist(write, what, len(attempts))
        if unwritten is None:
            return self._settle(attempts)
        if unwritten.following is Next.SPLIT:
            return [d for one in attempts for d in self._record_completions([one])]
        if unwritten.following is Next.STOPPED:
            return self._defer([attempt.delivery for attempt in attempts])
        for attempt in attempts:
            # Tried again, what is committed would be done twice.
            is_done, error = attempt.is_committed, unwritten.error
            final = TransactionEndedError(f"It cannot be recorded: {error}")
            failures.judge_error(self._runtime, attempt, final if is_done else error)
        return self._settle(attempts)

    def _write_completions(self, attempts: Sequence[Attempt]) -> None:
        freshen_connections(is_own=self._is_workers)
        self._watch.check()
        token, receiver = self._leases.token, self._receiver
        recorder.record_completions(self._runtime, attempts, token, receiver)

    def _persist(self, write: Callable[[], None], what: str, count: int) -> Unwritten | None:
        """Write what has run, waiting out the outages of the database; return why it could not be
        written, if so.

        :param what: could not be done, for the log.
        :param count: number of attempts that are written together.
        """
        retry = None
        while True:
            try:
                write()
            except Exception as error:
                retry = retry or OutageRetry(self._stops_waiting, has_run=True)
                following = retry.after(error, self._runtime.database, what, count)
                if following is not Next.AGAIN:
                    return Unwritten(following, error)
            else:
                return None

    def _record_failures(self, attempts: Sequence[Attempt]) -> list[Delivery]:
        """Make failures durable, and finish them; returns the deferred. These keep their attempt,
        which is recorded when they come up here again."""
        if tracing.tracer is not None:
            tracing.tracer.failing([a for a in attempts if a.ending in FAILURES])
        write, what = partial(self._write_failures, attempts), "Failures cannot be recorded"
        unwritten = self._persist(write, what, len(attempts))
        if unwritten is None:
            return self._finish_failures(attempts)
        if unwritten.following is Next.SPLIT:
            return [d for one in attempts for d in self._record_failures([one])]
        is_refused = unwritten.following is Next.REFUSED
        if is_refused:
            # It runs again, so that the attempt counts and there is an end to it.
            for attempt in attempts:
                attempt.delivery.attempt = None
        return self._defer([attempt.delivery for attempt in attempts], is_spent=is_refused)

    def _finish_failures(self, attempts: Sequence[Attempt]) -> list[Delivery]:
        """Finish what is recorded; return the deferred: those whose dead letter was refused by its
        topic, and what is to run again."""
        recorded: list[Attempt] = []
        lost: list[Attempt] = []
        refused: list[Delivery] = []
        for attempt in attempts:
            if attempt.is_recorded:
                recorded.append(attempt)
            elif attempt.ending is Ending.DEFERRED:
                lost.append(attempt)
            else:
                attempt.delivery.attempt = attempt
                refused.append(attempt.delivery)
        deferred = self._defer(refused) if refused else []
        if lost:
            deferred += self._put_off(lost)
        return deferred + (self._finish(recorded) if recorded else [])

    def _write_failures(self, attempts: Sequence[Attempt]) -> None:
        """Publish the dead letters, then commit everything about these attempts but those whose
        dead letter was refused by its topic. Where that fails, they stay with their deliveries."""
        runtime = self._runtime
        try:
            failures.publish_dead_letters(runtime, [a for a in attempts if a.ending is Ending.DEAD])
            writable = [a for a in attempts if a.is_published or a.ending is not Ending.DEAD]
            with recording(runtime.store, calls_handlers=True) as recorded:
                recorded += writable
                if duplicates := [a for a in writable if a.ending is Ending.DUPLICATE]:
                    recorder.complete_open_rows(runtime.database, duplicates)
                failed = [attempt for attempt in writable if attempt.ending in FAILURES]
                failures.record_failures(runtime, failed, self._worker)
                if limited := [a for a in failed if a.delivery.limit_state is not None]:
                    self._leave_line(limited)
                recorded[:] = [a for a in writable if a.ending is not Ending.DEFERRED]
                recorder.acknowledge_within(recorded)
        except Exception:
            for attempt in attempts:
                attempt.delivery.attempt = attempt
            raise

    def _leave_line(self, attempts: Sequence[Attempt]) -> None:
        rows = [attempt.row for attempt in attempts if attempt.row is not None]
        if rows:
            self.limiter.releaser.leave_within({row.id: row.generation for row in rows})

    # --- Acknowledge, announce, release -----------------------------------------------------------

    def _finish(self, attempts: Sequence[Attempt]) -> list[Delivery]:
        """Acknowledge, announce and release what is durable. Nothing that is raised here undoes
        that; returns what could not be acknowledged, which is to be done when it comes up again."""
        deferred: list[Delivery] = []
        groups: defaultdict[Subscription, list[Attempt]] = defaultdict(list)
        for attempt in attempts:
            if attempt.ending is None:
                # A bug. Were its message acknowledged, the job would be lost.
                raise RuntimeError(f"{attempt.delivery.lease} was not judged")
            groups[attempt.delivery.subscription].append(attempt)
            if attempt.delivery.limit_state is not None:  # cancelled, or done, before it started
                self.limiter.give_back([attempt.delivery])
        for subscription, group in groups.items():
            deferred += self._acknowledge(subscription, group)
        # Before anybody hears of a failure, since a retry may come to another worker at once.
        if failed := [a.delivery for a in attempts if a.ending in FAILURES]:
            self._leases.settle(failed)
        try:
            self._announce(attempts)
        finally:
            if self._leases.owned:
                self._leases.settle([attempt.delivery for attempt in attempts])
            if self._leases.freed:
                self.limiter.releaser.awake.set()
        return deferred

    def _acknowledge(
        self, subscription: Subscription, attempts: Sequence[Attempt]
    ) -> list[Delivery]:
        """Acknowledge what is durable; returns the deferred: all, where that is not possible."""
        records = [each.delivery.record for each in attempts if not each.is_acknowledged]
        try:
            subscription.acknowledge(records)
        except Exception:
            logger.exception("%d records could not be acknowledged, trying again", len(attempts))
            for attempt in attempts:
                attempt.delivery.attempt = attempt
            return [attempt.delivery for attempt in attempts]
        for attempt in attempts:
            attempt.is_acknowledged = attempt.is_recorded = True
            attempt.delivery.attempt = None
            attempt.delivery.is_settled = True
        return []

    def _announce(self, attempts: Sequence[Attempt]) -> None:
        """Call hooks and listeners, once for each attempt."""
        attempts = [attempt for attempt in attempts if not attempt.is_announced]
        for attempt in attempts:
            attempt.is_announced = True
        if not attempts:
            return
        if tracing.tracer is not None:
            tracing.tracer.settled(attempts)
        is_logged = logs_all()
        for attempt in attempts:
            is_quiet = attempt.ending is Ending.COMPLETED and not is_logged
            if attempt.delivery.handler.observes or not is_quiet:
                _report(attempt)
        # Those who wait for a job; of duplicates too, since the worker before may have died between
        # its commit and its call.
        if channels := {
            names.text(headers, names.REPLY_TO)
            for attempt in attempts
            if attempt.ending is not Ending.RETRIED
            and names.REPLY_TO in (headers := attempt.delivery.record.headers)
        }:
            call_isolated(partial(storing.notify_waiters, channels), "Waiters were not called", {})
        for listener in self._listeners:
            what = f"A listener failed, called with {len(attempts)} attempts"
            call_isolated(partial(listener, attempts), what, {})
        for attempt in attempts:
            for send in attempt.announcements:
                call_watched(send, "Signals of what a step has ended were not sent", {})

    def _defer(self, deliveries: list[Delivery], *, is_spent: bool = False) -> list[Delivery]:
        """Give back what comes up again, and return it.

        :param is_spent: their attempts count, though they have no ending.
        """
        if is_spent:
            self._spend(deliveries)
        if not self._watch.is_abandoned:
            self._give_back(deliveries)
        if tracing.tracer is not None:
            tracing.tracer.given_back(deliveries)
        return deliveries


def _unsettled(deliveries: Sequence[Delivery], running: Departed | None) -> list[Delivery]:
    """Return those that are neither settled nor run on an event loop."""
    return [d for d in deliveries if not d.is_settled and not (running and d in running)]


def _ended_earlier(admitted: Sequence[Attempt], ended: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts of a group, in place of those that may run the ones with which their
    deliveries have ended earlier."""
    earlier = {attempt.delivery: attempt for attempt in ended}
    return [each if each.ending else earlier.get(each.delivery, each) for each in admitted]


def _first_distinct(deliveries: Sequence[Delivery]) -> list[Delivery]:
    """Return the first deliveries up to one of a message that is among them: its second record is
    judged when the ending of the first is recorded."""
    first: dict[EventKey, Delivery] = {}
    for delivery in deliveries:
        if first.setdefault(delivery.key, delivery) is not delivery:
            break
    return [*first.values()]


def _resolved(attempt: Attempt, earlier: Attempt) -> Attempt:
    """Return what a delivery ended with, given how it was judged after a COMMIT that was not
    answered: its completion, where that had taken effect.

    :param earlier: the attempt that was in that transaction.
    """
    attempt.delivery.attempt = None
    if earlier.ending is not Ending.COMPLETED or earlier.is_announced:
        return attempt
    # A handler that judges itself is refused by its row, not by its marker.
    if attempt.ending is Ending.DUPLICATE or attempt.reason is Reason.COMPLETED:
        earlier.is_confirmed = earlier.is_recorded = True
        return earlier
    attempt.is_confirmed = attempt.ending is Ending.COMPLETED
    return attempt


# --- What is announced ----------------------------------------------------------------------------


_WHY_SKIPPED: dict[str, str] = {
    Reason.HAS_ROW: "its retries are its row's",
    Reason.GENERATION: "its job has been requeued since",
    Reason.ATTEMPT: "this attempt has an outcome already",
    Reason.CHANGED: "its job was changed meanwhile",
    Reason.LEASE_LOST: "its run outlived its lease, another worker has taken the job over since",
}
"""Where the reason of an ending is no text for people, as a job's state is."""


def _report(attempt: Attempt) -> None:
    """Call the hook of an attempt whose ending is durable, and log what has not completed."""
    handler = attempt.delivery.handler
    if handler.observes:
        # The state is committed; a hook cannot take it back.
        facts = facts_of(attempt.delivery, attempt.number)
        call = partial(handler.on_settled, attempt)
        call_watched(call, f"A hook failed: {handler.name}", facts)
    if attempt.ending is Ending.SKIPPED or attempt.reason is Reason.LEASE_LOST:
        _log_without_effect("Skipped", attempt)
    else:
        log_end(attempt)


def _log_without_effect(what: str, attempt: Attempt) -> None:
    """Leave a line in the log for a message that was acknowledged without a run, or for a result
    that came too late.

    :param what: has become of it.
    """
    is_late = attempt.reason is Reason.LEASE_LOST
    delivery, why = attempt.delivery, str(attempt.reason)
    which = delivery.message.id or delivery.record.position
    line = f"{what} {which}: {_WHY_SKIPPED.get(attempt.reason, why)}"
    # What such a handler did outside the database has been done twice.
    level = logging.WARNING if is_late else logging.INFO
    logger.log(level, one_line(line), extra=facts_of(delivery, attempt.number))


def result_of(attempt: Attempt) -> Any:
    """Return what the handler returned, as a waiter would get it."""
    if attempt.result is None:
        return None
    return load_result(attempt.result, serializer_for(attempt.delivery.message.content_type))


_SIGNALS: dict[Ending | None, Signal] = {
    Ending.COMPLETED: signals.job_completed,
    Ending.RETRIED: signals.job_retried,
    Ending.CANCELLED: signals.job_cancelled,
    Ending.DEAD: signals.job_failed,
}
_LISTENED = (*_SIGNALS.values(), signals.job_stalled, signals.message_dead_lettered)


def send_signals(attempts: Sequence[Attempt]) -> None:
    """Send the signals of durable attempts."""
    if not any(signal.receivers for signal in _LISTENED):
        return
    with watching():
        for attempt in attempts:
            delivery, message, ending = attempt.delivery, attempt.delivery.message, attempt.ending
            handler, number = message.type, {"attempt": attempt.number}
            facts: dict[str, Any] = {
                "job_id": message.job_id or message.id or None,
                "unique_id": attempt.row and attempt.row.unique_id,
                "queue": delivery.queue.name,
                "handler": handler,
            }
            if delivery.deliveries > 1:
                signals.job_stalled.send_robust(sender=handler, **number, **facts)
            if ending is Ending.COMPLETED:
                result = attempt.result and result_of(attempt)
                facts |= {**number, "result": result, "seconds": attempt.seconds}
            elif ending is Ending.RETRIED:
                facts |= {**number, "error": attempt.error, "retry_at": attempt.retry_at}
                facts["seconds"] = attempt.seconds
            elif ending is Ending.DEAD:
                facts |= {**number, "error": attempt.error, "reason": str(attempt.reason)}
            if ending in _SIGNALS:
                _SIGNALS[ending].send_robust(sender=handler, **facts)
            if ending is Ending.DEAD:
                signals.message_dead_lettered.send_robust(
                    sender=handler,
                    dead_letter_id=attempt.dead_letter_id or None,
                    queue=facts["queue"],
                    handler=handler,
                    reason=facts["reason"],
                    error=attempt.error,
                )
