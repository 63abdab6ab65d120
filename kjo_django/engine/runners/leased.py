"""Running ``atomic=False`` handlers: outside any transaction, under a lease in the job's row.

The lease is durable, so of two workers one runs the job even when coordination has vanished. The
ending is recorded with the marker in one transaction afterwards, and only by whoever still holds
the lease: a worker that was frozen past it loses.

The jobs of a group are admitted together, run one by one, and recorded together. What has run and
is not recorded yet would run again after a crash, so it is recorded before another starts as soon
as it has taken a small part of the groups' budget; of handlers that take longer than that, each is.
Where one keeps its lane although those before it were quick, the recorder records these meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from uuid import UUID

from django.utils import timezone

from kjo_django.engine import admission, completion, failures
from kjo_django.engine.admission import HeldBack
from kjo_django.engine.attempt import Attempt, Delivery, Ending
from kjo_django.engine.handler.call import ENDINGS, Ran, call, is_interrupt, make_context
from kjo_django.engine.handler.connections import (
    drop_broken_connections,
    freshen_connections,
    open_blocks,
)
from kjo_django.engine.handler.context import JobContext
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.job_rows import load_rows, row_id
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.outage_retry import OUTAGES, Next, OutageRetry
from kjo_django.engine.recorder import EndedQueue, Recorder
from kjo_django.engine.runners.batch import Batch, in_steps, run_batch
from kjo_django.models import EventKey

logger = logging.getLogger("kjo_django")

UNRECORDED = 0.1
"""Part of the groups' budget for which what has run may stay unrecorded when another starts."""

Settle = Callable[[list[Attempt], Collection[str]], list[Delivery]]
"""Settles attempts, without releasing the leases of these names; returns the deferred."""


class LeasedRunner:
    """Runs groups; called by every lane's thread.

    :param settle: settles what has ended.
    :param stopping: set when the worker stops; None: outages are raised, and the threads that call
        handlers are not a worker's own.
    """

    def __init__(
        self,
        leases: LeaseBook,
        watch: TimeoutWatch,
        on_measure: Callable[[str, float], None],
        settle: Settle,
        recorder: Recorder,
        stopping: threading.Event | None,
    ) -> None:
        self._leases = leases
        self._runtime = leases.runtime
        self._watch = watch
        self._on_measure = on_measure
        self._settle = settle
        self._recorder = recorder
        self._stopping = stopping

    def run(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Run a group until each of its attempts is settled; returns the deferred. Outages are
        waited out.

        An admission is good for the groups' budget: what has not begun by then is judged again
        first. When the worker stops, nothing begins any more but the first of a group.
        """
        runtime = self._runtime
        keys = {delivery: delivery.event_key(runtime.service) for delivery in deliveries}
        left = deque(in_steps(deliveries, keys))
        # One that comes up twice keeps its lease until the last has been.
        names = Counter(delivery.lease for delivery in deliveries)
        twice = {name for name, count in names.items() if count > 1}
        group = _Group(self._settle, twice, runtime.settings.group_budget.total_seconds())
        count, retry = len(left), OutageRetry(self._stopping)
        while left and not (self._is_stopping and group.has_begun):
            steps = _without_repeats(left, count, keys)
            awake = [d for step in steps for d in step if d not in group.held_back]
            try:
                attempts = self.admit(awake) if awake else []
            except OUTAGES as error:
                left.extendleft(reversed(steps))
                following = retry.after(error, "Jobs cannot be admitted", len(steps))
                if following is Next.STOPPED:
                    break
                if following is Next.SPLIT:
                    count = 1
                elif following is Next.REFUSED:
                    # It must not keep those behind it, nor the lane.
                    group.deferred += group.held_back.defer(left.popleft())
                    retry = OutageRetry(self._stopping)
                continue
            retry = OutageRetry(self._stopping)
            done = self._run_admitted(group, steps, attempts)
            left.extendleft(reversed(steps[done:]))
            # It took longer than was thought when the group was formed.
            count = 2 * done
        if twice:
            self._leases.release(list(twice))
        return group.deferred + [delivery for step in left for delivery in step]

    @property
    def _is_stopping(self) -> bool:
        return self._stopping is not None and self._stopping.is_set()

    def _run_admitted(
        self, group: _Group, steps: Sequence[list[Delivery]], attempts: Sequence[Attempt]
    ) -> int:
        """Run what was admitted as long as that is good; return how many steps that were."""
        attempt_of = {attempt.delivery: attempt for attempt in attempts}
        begun: set[Attempt] = set()
        done, until = 0, time.monotonic() + group.budget
        try:
            for step in steps:
                done += 1
                calls = []
                for delivery in step:
                    if delivery in group.held_back:
                        group.end([Attempt(delivery, Ending.DEFERRED, "paused")])
                    elif attempt_of[delivery].ending is None:
                        calls.append(attempt_of[delivery])
                    else:
                        group.end([attempt_of[delivery]])
                if calls:
                    begun.update(calls)
                    self._run_step(group, calls)
                if self._is_stopping or time.monotonic() >= until:
                    break
        finally:
            self._recorder.forget(group.queue)
            try:
                group.settle_all()
            finally:
                admitted = [attempt for attempt in attempts if attempt.row_lease is not None]
                self.stop_renewing(admitted)
                back = set(group.deferred)
                self.give_back([a for a in admitted if a not in begun or a.delivery in back])
        return done

    def _run_step(self, group: _Group, calls: Sequence[Attempt]) -> None:
        now, queue = time.monotonic(), group.queue
        if queue.has_any_from_before(now - UNRECORDED * group.budget):
            group.settle_all()
            now = time.monotonic()
        elif self._stopping is not None and queue.has_any_from_before(now):
            self._recorder.watch(queue)
        group.has_begun = True
        self.call(calls)
        group.held_back.after([attempt for attempt in calls if attempt.error is not None])
        queue.put(now, calls)

    # --- The leases in the rows -------------------------------------------------------------------

    def admit(self, deliveries: Sequence[Delivery]) -> list[Attempt]:
        """Decide what may run and lease its rows, which is renewed until ``stop_renewing``.

        Of two records of one job one is deferred.
        """
        store, service = self._runtime.store, self._runtime.service
        now = timezone.now()
        keys = {delivery: delivery.event_key(service) for delivery in deliveries}
        rows = load_rows(self._runtime, deliveries, lock=False)
        known = store.known_markers(keys.values())
        attempts = [
            admission.admit(
                delivery,
                rows.get(row_id(delivery, service)),
                is_fresh=keys[delivery] not in known,
                leases=self._leases,
                now=now,
            )
            for delivery in deliveries
        ]
        judged = {a.row.id: a.row for a in attempts if a.ending is None and a.row is not None}
        # Another record of a job may be with another lane, and its lease is this worker's too.
        free = self._leases.hold_rows(judged)
        won: set[UUID] = set()
        try:
            # Whoever else changed a row since, and be it by leasing it, has it.
            won = store.take_row_leases(
                [row for id, row in judged.items() if id in free],
                self._leases.token,
                now,
                now + self._leases.ttl,
            )
        finally:
            self._leases.let_rows_go(free - won)
        for attempt in attempts:
            if attempt.ending is not None:
                continue
            if attempt.row is None or attempt.row.id in won:
                attempt.row_lease = self._leases.token
                if attempt.row is not None:
                    won.discard(attempt.row.id)  # a second record of the job waits for the first
            else:
                attempt.ending, attempt.reason = Ending.DEFERRED, "leased"
        return attempts

    def stop_renewing(self, attempts: Sequence[Attempt]) -> None:
        """Stop renewing the row leases."""
        if not self._watch.is_abandoned:  # else they may be another thread's by now
            self._leases.let_rows_go(_row_ids(attempts))

    def give_back(self, attempts: Sequence[Attempt]) -> None:
        """Let others have at once what was admitted and has no ending that was recorded; its lease
        would expire by itself."""
        if not attempts or self._watch.is_abandoned:
            return
        try:
            store = self._runtime.store
            store.release_row_leases(_row_ids(attempts), self._leases.token)
        except OUTAGES as error:
            logger.warning("Leases of %d jobs are not given back: %s", len(attempts), error)
            drop_broken_connections()

    # --- Calling and recording --------------------------------------------------------------------

    def call(self, step: Sequence[Attempt]) -> None:
        """Make one call, of a delivery or of a batch handler's several, and judge how it ended."""
        first = step[0]
        is_own = self._stopping is not None
        # The blocks of atomic() a call is made in: none, in a thread of a worker's own.
        outer = None if is_own else open_blocks()
        if first.delivery.batch is not None:
            endings = run_batch(Batch(step), lambda batch: self._call_batch(batch, outer))
            seconds = sum(one.seconds for one in endings) / len(endings)
            self._on_measure(first.delivery.kind, seconds)
            for attempt, ran in zip(step, endings, strict=True):
                failures.judge(attempt, ran)
            return
        context = make_context(JobContext, first)
        ran, clock = Ran(timezone.now(), 0.0), time.perf_counter()
        try:
            ran.value = call(first.delivery, context, self._watch)
        except ENDINGS as error:
            if is_interrupt(error):
                raise
            ran.error, ran.abort_reason = error, context.abort_reason
        ran.seconds, ran.result_ttl = time.perf_counter() - clock, context.result_ttl
        self._on_measure(first.delivery.kind, ran.seconds)
        # Nor is what it has left of its connection the next one's fault.
        left = freshen_connections(is_own=is_own, outer=outer)
        if left is not None and ran.error is None:
            ran.error, ran.value = left, None
        failures.judge(first, ran)

    def _call_batch(self, batch: Batch, outer: Mapping[str, int] | None) -> list[Ran]:
        left: Exception | None = None
        try:
            endings = batch.call(self._watch)
        finally:
            left = freshen_connections(is_own=self._stopping is not None, outer=outer)
        if left is not None:
            raise left
        return endings

    def record(self, completed: Sequence[Attempt]) -> None:
        """Commit completions with their markers; those that have lost their lease are no more."""
        self._watch.check()
        store, service = self._runtime.store, self._runtime.service
        keys = {attempt: attempt.delivery.event_key(service) for attempt in completed}
        for attempt in completed:  # as before an earlier try, which was undone
            attempt.ending, attempt.reason = Ending.COMPLETED, ""
        with completion.recording(store) as recorded:
            fresh = store.insert_markers(keys.values())
            winners = []
            for attempt in completed:
                if keys[attempt] in fresh:
                    winners.append(attempt)
                elif attempt.is_in_doubt and attempt.is_marked:
                    attempt.is_confirmed = True
                elif _judges_itself(attempt):
                    winners.append(attempt)
                else:
                    attempt.ending, attempt.reason = Ending.DUPLICATE, "lease lost"
                attempt.is_marked = attempt.is_marked or keys[attempt] in fresh
            written = completion.complete(store, winners, self._leases.token)
            lost = [a for a in winners if a.row is not None and a.row.id not in written]
            for attempt in lost:
                attempt.ending, attempt.reason = Ending.SKIPPED, "lease lost"
            store.delete_markers([keys[attempt] for attempt in lost if keys[attempt] in fresh])
            completion.acknowledge_within(completed)
            recorded += [a for a in completed if a.ending is Ending.COMPLETED]


class _Group:
    """What of a group has ended. Its lane adds and settles; so does the recorder."""

    def __init__(self, settle: Settle, keep: set[str], budget: float) -> None:
        self.budget = budget
        self.held_back = HeldBack()
        self.deferred: list[Delivery] = []
        self.has_begun = False
        self.queue = EndedQueue(self._settle_ended, budget)
        self._settle = settle
        self._keep = keep
        self._not_run: list[Attempt] = []

    def end(self, attempts: list[Attempt]) -> None:
        """Add attempts that ended without a run; the lane's thread only."""
        self._not_run += self.held_back.after(attempts)

    def settle_all(self) -> None:
        """Settle all that has ended; the lane's thread only."""
        not_run, self._not_run = self._not_run, []
        self.queue.settle(not_run)

    def _settle_ended(self, attempts: list[Attempt]) -> None:
        self.deferred += self.held_back.defer(self._settle(attempts, self._keep))


def _row_ids(attempts: Collection[Attempt]) -> list[UUID]:
    return [attempt.row.id for attempt in attempts if attempt.row is not None]


def _judges_itself(attempt: Attempt) -> bool:
    handler = attempt.delivery.handler
    return handler is not None and handler.judges_itself


def _without_repeats(
    left: deque[list[Delivery]], count: int, keys: Mapping[Delivery, EventKey]
) -> list[list[Delivery]]:
    """Take up to so many steps from the left, and no message twice: its second record is judged
    when what the first ended with is recorded."""
    steps: list[list[Delivery]] = []
    seen: set[EventKey] = set()
    while left and len(steps) < count:
        mine = {keys[delivery] for delivery in left[0]}
        if not seen.isdisjoint(mine):
            break
        seen |= mine
        steps.append(left.popleft())
    return steps
