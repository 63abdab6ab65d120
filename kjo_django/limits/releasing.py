"""Keeps jobs of each limit on their way to workers, as those before them start, end or get in line.

Lanes only tell what has started and what has to wait: to release the next jobs takes a dozen round
trips, for which no lane has to wait. One thread of the worker's takes the steps.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol
from uuid import UUID

from kjo_django import registry
from kjo_django.coordination.base import slot_name
from kjo_django.exceptions import CoordinationError
from kjo_django.limits import lines
from kjo_django.limits.permits import Permits
from kjo_django.limits.rules import Limit, limits_of
from kjo_django.models import HeldJob, Job
from kjo_django.registry import Handler
from kjo_django.runtime import Runtime
from kjo_django.values import LONGEST

FILLED_FOR = 1 / 4
"""Of the time for which jobs of a rate are released ahead, the part after which more are."""
LEFT_WITHIN = 0.1
"""Seconds after which jobs that have started leave the line, as many as have started by then."""
ENDS_WITHIN = 1.0
"""Seconds for which a worker that stops goes on to release jobs."""
MOST_LINES = 10_000
"""Limits for which a worker remembers when it released jobs."""
LOOKED_AFTER = 500
"""Limits for which jobs wait, looked after at a time."""


class SlotLeases(Protocol):
    """What is asked of a worker's leases."""

    runtime: Runtime
    freed: Counter[str]

    def take_freed(self) -> Counter[str]: ...
    def note_freed(self, freed: Counter[str]) -> None: ...
    def release_abandoned(self, names: Sequence[str]) -> set[str]: ...


class Releaser:
    """Releases jobs that wait in line for the limits of one worker's jobs.

    Another worker does so for one that dies: see ``look_after``.

    :param leases: this worker's, among them those that are slots.
    """

    def __init__(self, leases: SlotLeases, permits: Permits) -> None:
        self._leases = leases
        self._permits = permits
        self._runtime = leases.runtime
        self.awake = threading.Event()
        """Is set when there is something to do earlier than ``step`` said."""
        self._stepping = threading.Lock()
        """The thread that releases has it."""
        self._leaving = threading.Lock()
        """A thread that takes jobs that have started out of the line has it."""
        self._lock = threading.Lock()
        """Guards what lanes tell."""
        self._started: dict[UUID, int] = {}
        """Jobs that have started and are still in line, and their generations."""
        self._leave_at = math.inf
        """When (monotonic) these are to leave it."""
        self._advanced: dict[str, Limit] = {}
        """Limits whose lines have advanced since jobs of theirs were released, by their names."""
        self._waiting: dict[Limit, float] = {}
        """Limits for which jobs have got in line, and when (monotonic) the first of them may start
        at the earliest."""
        self._filled_at: dict[str, float] = {}
        """When (monotonic) jobs of these limits were released last, while more wait than may be on
        their way."""
        self._looked_after = ""
        self._ends_at = math.inf
        """When (monotonic) it ends at the latest, though there is more to release."""

    # --- What lanes tell --------------------------------------------------------------------------

    def note(
        self,
        started: Mapping[UUID, int],
        advanced: Collection[Limit],
        waiting: Mapping[Limit, float],
    ) -> None:
        """Note what has become of a group; thread-safe.

        :param started: released jobs that start now, and their generations.
        :param advanced: limits whose lines have advanced by that.
        :param waiting: limits for which jobs have got in line, or left it for another line, and
            when (monotonic) the first in line may start at the earliest.
        """
        if not (started or advanced or waiting):
            return
        with self._lock:
            if started and not self._started:
                self._leave_at = self._runtime.clock.monotonic() + LEFT_WITHIN
            self._started |= started
            self._advanced.update((limit.name, limit) for limit in advanced)
            for limit, moment in waiting.items():
                self._waiting[limit] = min(moment, self._waiting.get(limit, math.inf))
        self.awake.set()

    def keep(self, jobs: Iterable[UUID]) -> None:
        """Leave jobs in line that have started before: they wait again."""
        with self._lock:
            for id in jobs:
                self._started.pop(id, None)

    def leave_within(self, jobs: Mapping[UUID, int]) -> None:
        """Take jobs that have failed out of the line, those of them that are still in it since they
        have started, in the transaction of the caller's that records that: until they run again
        they would keep others of their key, and of a slow rate, waiting if this worker died.

        :param jobs: their generations.
        """
        with self._lock:
            left = {id: generation for id, generation in jobs.items() if id in self._started}
        lines.leave(self._runtime, left)

    @property
    def is_busy(self) -> bool:
        """Whether jobs may be released that could start at once."""
        is_called = self.awake.is_set() or self._stepping.locked()
        return is_called or bool(self._waiting) or bool(self._leases.freed)

    def is_filling(self, limit: Limit) -> bool:
        """Return whether more jobs of a limit wait than may be on their way, as far as known."""
        return limit.name in self._filled_at

    # --- Steps ------------------------------------------------------------------------------------

    def step(self) -> float:
        """Do what is due; return the seconds until something else will be, unless ``awake`` is set
        before.

        :raises DatabaseError: what was refused is left to the next step.
        """
        with self._stepping:
            self.awake.clear()
            due = self._take_due()
            if due or self._runtime.clock.monotonic() >= self._leave_at:
                self._leave(due)
            self._fill_all(due)
        return self._seconds_left()

    def stop(self) -> None:
        """Let a step end soon; thread-safe."""
        self._ends_at = self._runtime.clock.monotonic() + ENDS_WITHIN
        self.awake.set()

    def close(self) -> None:
        """Do what is due, as far as there is time for it.

        :raises DatabaseError: it was refused.
        """
        try:
            self.step()
        finally:
            self.settle_starts()

    def settle_starts(self) -> None:
        """Let jobs that have started leave the line now, for somebody who gives one of them another
        place. Not to be called in a transaction, for which a step may wait.

        :raises DatabaseError: they are still in line.
        """
        self._leave({})

    def _take_due(self) -> dict[Limit, float]:
        """Return the limits of which jobs are to be released now, and when (monotonic) the first of
        each may start at the earliest."""
        now = self._runtime.clock.monotonic()
        with self._lock:
            due, self._waiting = self._waiting, {}
            for name, limit in list(self._advanced.items()):
                if now >= self._fill_at(limit):
                    del self._advanced[name]
                    due[limit] = 0.0
        return due

    def _fill_at(self, limit: Limit) -> float:
        """Return when (monotonic) more jobs of a limit whose line has advanced are released."""
        return self._filled_at.get(limit.name, -math.inf) + FILLED_FOR * lines.covered(limit)

    def _seconds_left(self) -> float:
        with self._lock:
            moments = [self._leave_at, *map(self._fill_at, self._advanced.values())]
            if self._waiting:
                return 0.0
        left = min(moments) - self._runtime.clock.monotonic()
        return min(max(0.0, left), LONGEST.total_seconds())

    def _leave(self, due: Mapping[Limit, float]) -> None:
        """Let jobs that have started leave the line.

        :param due: is done after that, and put back should it fail.
        """
        with self._leaving:
            with self._lock:
                started = dict(self._started)
            try:
                lines.leave(self._runtime, started, only_released=True)
            except Exception:
                self._put_back(due)
                raise
            with self._lock:
                for id in started:
                    self._started.pop(id, None)
                later = self._runtime.clock.monotonic() + LEFT_WITHIN
                self._leave_at = later if self._started else math.inf

    def _put_back(self, due: Mapping[Limit, float]) -> None:
        with self._lock:
            for limit, moment in due.items():
                self._waiting[limit] = min(moment, self._waiting.get(limit, math.inf))
        self.awake.set()

    def _fill_all(self, due: Mapping[Limit, float]) -> None:
        """Release a job for each slot that was given back, and fill lines one after the other. What
        fails keeps none of the others from that; the first error is raised at the end."""
        refused, first = dict[Limit, float](), None
        try:
            self._release_freed()
        except Exception as error:
            first = error
        for limit, moment in due.items():
            try:
                self._fill(limit, max(0.0, moment - self._runtime.clock.monotonic()))
                # Each takes a dozen round trips, and there may be many.
                self._release_freed()
                if self._runtime.clock.monotonic() >= self._leave_at:
                    self._leave({})
            except Exception as error:
                refused[limit] = moment
                first = first or error
            if self._runtime.clock.monotonic() >= self._ends_at:
                break
        if first is not None:
            self._put_back(refused)
            raise first

    def _fill(self, limit: Limit, wait: float) -> None:
        """Release so many jobs that wait for a limit as may start soon, less those that are on
        their way.

        :param wait: seconds until the first of them may start, at least.
        """
        while len(self._filled_at) >= MOST_LINES:
            self._filled_at.pop(next(iter(self._filled_at)), None)
        self._filled_at[limit.name] = self._runtime.clock.monotonic()
        is_filled = False
        try:
            is_filled = self._release_next(limit, wait)
        finally:
            if not is_filled:
                self._filled_at.pop(limit.name, None)

    def _release_next(self, limit: Limit, wait: float) -> bool:
        """See ``_fill``; return whether others may be left in line."""
        most, interval = lines.most_released(limit), 0.0
        if limit.rate is not None:
            waiting = self._permits.waiting_for(limit.pace)
            most -= sum(1 for state in waiting if not state.is_released)
            wait = max(wait, self._permits.end_of_line(limit.pace))
            interval = limit.pace.interval
        else:
            names = [slot_name(limit.name, number) for number in range(1, limit.slots + 1)]
            try:
                most -= len(self._runtime.coordination.holders(names))
            except CoordinationError:
                return True
        if lines.released_count(self._runtime, limit.name) >= most:
            return True
        return lines.fill(self._runtime, limit.name, most, wait, interval)

    def _release_freed(self) -> None:
        """Release a job for each slot that was given back."""
        if not self._leases.freed:
            return
        freed = self._leases.take_freed()
        try:
            for name in lines.lines_to_release(self._runtime, list(freed)):
                lines.release(self._runtime, name, freed[name], 0.0)
                del freed[name]
        except Exception:
            self._leases.note_freed(freed)
            raise

    # --- What a worker has left -------------------------------------------------------------------

    def has_waiting(self) -> bool:
        """Return whether any job waits in line."""
        return lines.rows(self._runtime).exists()

    def look_after(self) -> None:
        """Release jobs that nobody has released: a worker died before it did, a released job was
        cancelled, slots have expired, or the limit is gone."""
        runtime = self._runtime
        heads = lines.stalled(runtime, LOOKED_AFTER, self._looked_after)
        self._looked_after = heads[-1].limit if len(heads) == LOOKED_AFTER else ""
        jobs = Job.objects.using(runtime.database)
        rows = {job.pk: job for job in jobs.filter(pk__in=[head.job_id for head in heads])}
        limits = {
            head.limit: self._limit_of(head, job, handler)
            for head in heads
            if (job := rows.get(head.job_id)) is not None
            # Of a job whose handler is another worker's, nobody here knows the limits.
            and (handler := registry.find(job.handler)) is not None
        }
        in_force = [limit for limit in limits.values() if limit is not None]
        if slots := [slot_name(each.name, n + 1) for each in in_force for n in range(each.slots)]:
            self._leases.release_abandoned(slots)
        self.settle_starts()
        for limit in in_force:
            with self._stepping:
                self._fill(limit, 0.0)
        for name in {name for name, limit in limits.items() if limit is None}:
            lines.release(runtime, name, lines.MOST_RELEASED, 0.0)
        for name in {head.limit for head in heads if head.job_id not in rows}:
            lines.release(runtime, name, 1, 0.0)

    def _limit_of(self, head: HeldJob, job: Job, handler: Handler) -> Limit | None:
        """Return the limit that a job waits for; None where nothing limits it so any more."""
        queue = self._runtime.settings.queue(job.queue)
        payload = bytes(job.payload)
        limits = limits_of(self._runtime, handler, queue, payload, job.content_type)
        return next((limit for limit in limits if limit.name == head.limit), None)
