"""Groups of ``atomic=False`` handlers: claimed together, run one by one, recorded together.

Each runs outside any transaction. What has run and is not recorded yet would run again after a
crash, so it is recorded before another starts as soon as it has taken a small part of the groups'
budget; of handlers that take longer than that, each is. Where one keeps its lane although those
before it were quick, somebody else records these meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from django.db import DatabaseError, connections

from kjo_django.conf import get_settings
from kjo_django.engine.attempt import Delivery, Outcome, Result
from kjo_django.engine.handler.call import Ran
from kjo_django.engine.handler.connections import answers, drop_broken_connections
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.outage_retry import OUTAGES, REFUSALS, Patience
from kjo_django.engine.outcomes import Resting, outcome_of
from kjo_django.engine.recorder import Recorder
from kjo_django.engine.runners.batch import Started, in_steps
from kjo_django.engine.runners.leased import PlainRunner
from kjo_django.models import EventKey
from kjo_django.store.transactions import jobs_database

logger = logging.getLogger("kjo_django")

UNRECORDED = 0.1
"""Part of the groups' budget for which what has run may stay unrecorded when another starts."""


class Turns:
    """Runs groups; called by every lane's thread.

    :param stopping: set when the worker stops; None: outages are raised.
    :param on_thread: called first in the thread this may start.
    """

    def __init__(
        self,
        plain: PlainRunner,
        leases: LeaseBook,
        recorder: Recorder,
        stopping: threading.Event | None,
        *,
        on_thread: Callable[[], None],
    ) -> None:
        self._plain = plain
        self._leases = leases
        self._recorder = recorder
        self._stopping = stopping
        self._overdue = _Overdue(on_thread)

    def close(self, timeout: float) -> None:
        """End the thread it started, waiting so many seconds for it."""
        self._overdue.close(timeout)

    def run(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Run a group to its durable end; returns the deferred. Outages are waited out.

        A claim is good for the groups' budget: what has not begun by then is judged again first.
        When the worker stops, nothing begins any more but the first of a group.
        """
        conf = get_settings()
        keys = {delivery: delivery.event_key(conf.service_name) for delivery in deliveries}
        left = deque(in_steps(deliveries, keys))
        # One that comes up twice keeps its lease until the last has been.
        names = Counter(delivery.lease for delivery in deliveries)
        twice = {name for name, count in names.items() if count > 1}
        group = _Group(self._recorder, twice, conf.group_budget.total_seconds())
        count, patience, refusals = len(left), self._patience(), 0
        while left and not (self._is_stopping and group.has_begun):
            steps = _without_repeats(left, count, keys)
            awake = [d for step in steps for d in step if d not in group.resting]
            try:
                started, ended = self._plain.claim(awake) if awake else ([], [])
            except OUTAGES as error:
                if patience is None:
                    raise
                left.extendleft(reversed(steps))
                drop_broken_connections()
                is_refused = isinstance(error, DatabaseError) and answers(jobs_database())
                if is_refused and len(steps) > 1:
                    logger.warning("%d jobs are claimed one by one: %s", len(awake), error)
                    count = 1
                elif is_refused and refusals >= REFUSALS:
                    # It must not keep those behind it, nor the lane.
                    group.put_off(left.popleft())
                    refusals = 0
                elif not patience.goes_on("The group cannot be claimed", error):
                    break
                else:
                    refusals += is_refused
                continue
            patience, refusals = self._patience(), 0
            done = self._run_claimed(group, steps, started, ended)
            left.extendleft(reversed(steps[done:]))
            # It took longer than was thought when the group was formed.
            count = 2 * done
        if twice:
            self._leases.release(list(twice))
        return group.deferred + [delivery for step in left for delivery in step]

    def _patience(self) -> Patience | None:
        return None if self._stopping is None else Patience(self._stopping)

    @property
    def _is_stopping(self) -> bool:
        return self._stopping is not None and self._stopping.is_set()

    def _run_claimed(
        self,
        group: _Group,
        steps: Sequence[list[Delivery]],
        started: Sequence[Started],
        ended: Sequence[Outcome],
    ) -> int:
        """Run what was claimed as long as the claim is good; return how many steps that were."""
        begun = {one[0]: one for one in started}
        judged = {outcome.delivery: outcome for outcome in ended}
        done, until = 0, time.monotonic() + group.budget
        try:
            for step in steps:
                done += 1
                calls, outcomes = [], []
                for delivery in step:
                    if delivery in group.resting:
                        outcomes.append(Outcome(delivery, Result.DEFERRED, reason="paused"))
                    elif delivery in judged:
                        outcomes.append(judged[delivery])
                    else:
                        calls.append(begun.pop(delivery))
                group.end(outcomes)
                if calls:
                    self._call(group, calls)
                if self._is_stopping or time.monotonic() >= until:
                    break
        finally:
            self._overdue.forget(group)
            try:
                group.record()
            finally:
                self._plain.let_go(started)
                back = set(group.deferred)
                self._give_back([one for one in started if one[0] in begun or one[0] in back])
        return done

    def _call(self, group: _Group, calls: Sequence[Started]) -> None:
        now = time.monotonic()
        if group.has_unrecorded(now - UNRECORDED * group.budget):
            group.record()
            now = time.monotonic()
        elif self._stopping is not None and group.has_unrecorded(now):
            self._overdue.look_after(group)
        group.has_begun = True
        group.add(now, calls, self._plain.call(calls))

    def _give_back(self, started: Sequence[Started]) -> None:
        if not started:
            return
        try:
            self._plain.give_back(started)
        except OUTAGES as error:
            # Ours may be taken again here, and by others once they expire.
            logger.warning("Leases of %d jobs are not given back: %s", len(started), error)
            drop_broken_connections()


class _Group:
    """What of a group has ended. Its lane adds, and records; so does who looks after it."""

    def __init__(self, recorder: Recorder, keep: set[str], budget: float) -> None:
        self.budget = budget
        self.resting = Resting()
        self.deferred: list[Delivery] = []
        self.has_begun = False
        self._recorder = recorder
        self._keep = keep
        self._ended: list[Outcome] = []
        self._ran: deque[tuple[float, Sequence[Started], list[Ran]]] = deque()
        self._recording = threading.Lock()

    def end(self, outcomes: list[Outcome]) -> None:
        """Add outcomes of what is not to run; the lane's thread only."""
        if outcomes:
            self._ended += self.resting.noting(outcomes)

    def put_off(self, step: Sequence[Delivery]) -> None:
        """Defer what cannot be claimed; the lane's thread only."""
        self.resting.noting([Outcome(delivery, Result.DEFERRED) for delivery in step])
        self.deferred += step

    def add(self, began: float, calls: Sequence[Started], ran: list[Ran]) -> None:
        """Add a call that began then (monotonic) and has ended; the lane's thread only."""
        for (delivery, start, row), one in zip(calls, ran, strict=True):
            if one.error is not None:
                self.resting.noting([outcome_of(delivery, one, start, row)])
        self._ran.append((began, calls, ran))

    def has_unrecorded(self, since: float) -> bool:
        """Whether something is not recorded that began before then."""
        try:
            return self._ran[0][0] < since
        except IndexError:
            return False

    def record(self, *, all: bool = True) -> None:
        """Make durable what has ended.

        :param all: of those that were not to run too.
        """
        with self._recording:
            taken = [self._ran.popleft() for _ in range(len(self._ran))]
            started = [one for _, calls, _ in taken for one in calls]
            ran = [ending for _, _, endings in taken for ending in endings]
            ended: list[Outcome] = []
            if all:
                ended, self._ended = self._ended, []
            if not started and not ended:
                return
            try:
                deferred = self._recorder.record(started, ran, ended, self._keep)
            except BaseException:
                if not all:  # its lane tries, and fails if it must: nobody else knows of them
                    self._ran.extendleft(reversed(taken))
                raise
            self.resting.noting([Outcome(d, Result.DEFERRED) for d in deferred])
            self.deferred += deferred


class _Overdue:
    """Records what a group's lane cannot, since a handler keeps it longer than was thought.

    One thread, started with the first group of several.
    """

    def __init__(self, on_thread: Callable[[], None]) -> None:
        self._on_thread = on_thread
        self._groups: set[_Group] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def look_after(self, group: _Group) -> None:
        """Record what of this group is unrecorded for longer than its budget."""
        if group in self._groups:
            return
        with self._changed:
            self._groups.add(group)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="kjo-recording", daemon=True
                )
                self._thread.start()
            if len(self._groups) == 1:
                self._changed.notify()

    def forget(self, group: _Group) -> None:
        """Its lane does."""
        if group in self._groups:
            with self._changed:
                self._groups.discard(group)

    def close(self, timeout: float) -> None:
        """End its thread, waiting so many seconds for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout)

    def _watch(self) -> None:
        self._on_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._groups or self._is_closed)
                if self._is_closed:
                    return
                budget = min(group.budget for group in self._groups)
                self._changed.wait(budget)
                now = time.monotonic()
                late = [g for g in self._groups if g.has_unrecorded(now - g.budget)]
                # Until its lane has something new there is nothing more to record.
                self._groups.difference_update(late)
            for group in late:
                self._record(group)

    @staticmethod
    def _record(group: _Group) -> None:
        try:
            group.record(all=False)
        except Exception:
            logger.exception("Endings could not be recorded while their lane was busy")
        finally:
            # It is seldom asked; a connection kept for it would be one more for each worker.
            connections.close_all()


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
