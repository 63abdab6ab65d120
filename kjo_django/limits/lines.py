"""The line of jobs that wait for a limit, in the jobs' database.

A job that must wait is queued for its limit: its message is settled, and its row is due never, so
no relay and no worker looks at it. The first ones in line are released: they are due again, at
about the moment when they may start. Each job that starts, or ends, releases the next one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections
from django.db.models import Exists, Max, OuterRef, Q, QuerySet, Subquery

from kjo_django import states
from kjo_django.conf import QueueConf
from kjo_django.enqueue import storing
from kjo_django.limits.rules import Limit
from kjo_django.models import NEVER, HeldJob, Job, transition
from kjo_django.runtime import Runtime
from kjo_django.states import JobState
from kjo_django.store.counting import bounded_counts
from kjo_django.store.rows import JobRow, LineRow

LEAD = 4.0
"""Seconds for which a worker keeps a job that has to wait; after that it gets in line."""
AHEAD = 4.0
"""Seconds of a rate for which jobs are released ahead: a worker gets them in less."""
DUE_BEFORE = 2.0
"""Seconds before its moment that a released job is due, so that a worker has it in time, also where
other jobs of its topic are before it."""
PAUSED = "PAUSED"
"""The limit named in the place of a job that has started and comes up again: it is the next of its
key, and those behind it are not released meanwhile."""
FIRST = -32768
"""The rank of jobs that had started: they are before all others in line."""
MOST_RELEASED = 500
"""Jobs of one limit that are on their way to workers at most."""
_NAMES = 500
"""Names in one query, within what SQLite binds."""
_COUNTED = 100
"""Limits whose jobs are counted in one query: SQLite joins 500 selections at most, and each binds
several values."""
_LOOKED_AT = 10_000
"""Places of one limit whose jobs are looked at for a count: that takes four times as long as to
count the places."""


class Place(NamedTuple):
    """A job's place in line."""

    limit: str
    is_released: bool


class Entry(NamedTuple):
    """A job that is to get in line."""

    row: JobRow
    limit: Limit
    is_first: bool = False
    """Whether it had started before, and comes before all others."""


class Start(NamedTuple):
    """An attempt that was permitted to start."""

    job_id: UUID
    generation: int
    attempt: int


def rows(runtime: Runtime) -> QuerySet[HeldJob]:
    """Return the places of all jobs in line."""
    return HeldJob.objects.using(runtime.database)


class Line:
    """What is read of the line for a group: the places of its jobs, and for which of its limits
    jobs stand in line.

    :param names: of these limits.
    """

    def __init__(self, runtime: Runtime, names: Collection[str]) -> None:
        self._store = runtime.store
        self._names = list(names)
        """Those that are not asked for yet."""
        self._jobs: set[UUID] = set()
        """The jobs whose places were asked for."""
        self.places: dict[UUID, Place] = {}
        """The places of those of the jobs that have one."""
        self.crowded: set[str] = set()
        """The limits for which jobs stand in line."""

    def job_rows(self, ids: Sequence[str]) -> dict[str, JobRow]:
        """Return rows of jobs as ``Store.job_rows`` does; the line is read along with them."""
        rows: dict[str, JobRow] = {}
        for some in _chunks(ids):
            found, line = self._store.job_rows_and_line(some, self._next_names())
            rows |= found
            self._note([row.id for row in found.values()], line)
        return rows

    def read(self, ids: Collection[UUID]) -> None:
        """Read what was not yet read of the line.

        :param ids: jobs whose rows may have been read in another way.
        """
        left = [id for id in ids if id not in self._jobs]
        while left or self._names:
            some, left = left[:_NAMES], left[_NAMES:]
            self._note(some, self._store.read_line(some, self._next_names()))

    def _next_names(self) -> list[str]:
        some, self._names = self._names[:_NAMES], self._names[_NAMES:]
        return some

    def _note(self, ids: Iterable[UUID], line: Iterable[LineRow]) -> None:
        self._jobs.update(ids)
        for job_id, limit, is_released in line:
            if job_id is None:
                self.crowded.add(limit)
            else:
                self.places[job_id] = Place(limit, is_released)


def lines_to_release(runtime: Runtime, names: Collection[str]) -> set[str]:
    """Return the limits for which jobs stand in line that are not released."""
    found: set[str] = set()
    for some in _chunks(names):
        waiting = rows(runtime).filter(limit__in=some, is_released=False).order_by()
        found.update(waiting.values_list("limit", flat=True).distinct())
    return found


def waiting_ids(runtime: Runtime, jobs: Collection[Job]) -> set[UUID]:
    """Return the keys of those of the jobs that stand in line and are not due."""
    found: set[UUID] = set()
    now = runtime.clock.now()
    generations = {job.pk: job.generation for job in jobs if job.available_at > now}
    for some in _chunks(generations):
        places = rows(runtime).filter(job_id__in=some)
        found.update(
            job_id
            for job_id, generation in places.values_list("job_id", "generation")
            if generations[job_id] == generation
        )
    return found


def released_count(runtime: Runtime, name: str) -> int:
    """Return how many jobs of a limit are on their way to a worker, or have started a moment ago:
    their places are deleted a moment later. Those of slots that have ended count no longer, since
    their slots are free."""
    released = rows(runtime).filter(limit=name, is_released=True)
    if name.startswith("SLOT:"):
        jobs = Job.objects.using(runtime.database).filter(state__in=states.OPEN)
        mine = jobs.filter(pk=OuterRef("job_id"), generation=OuterRef("generation"))
        released = released.filter(Exists(mine))
    return released.count()


def waiting_counts(runtime: Runtime, names: Collection[str]) -> dict[str, int]:
    """Return how many jobs wait for the limits of each of these queues or handlers, whatever their
    keys: those in line, and those that are on their way to a worker. A count of 100,000 is a lower
    bound; one above 10,000 has those in it that were cancelled since.

    :param names: as ``queue:<queue>`` or ``job:<registered name>``.
    """
    waiting = Job.objects.using(runtime.database).filter(
        pk=OuterRef("job_id"), generation=OuterRef("generation"), state__in=states.OPEN
    )
    places = rows(runtime).order_by()
    found: dict[str, int] = {}
    for some in _chunks(names, _COUNTED):
        counts = bounded_counts({name: places.filter(_of(name)) for name in some})
        few = [name for name, count in counts.items() if 0 < count <= _LOOKED_AT]
        still = places.filter(Exists(waiting))
        found |= counts | bounded_counts({name: still.filter(_of(name)) for name in few})
    return found


def call_back(runtime: Runtime, name: str) -> None:
    """Let released jobs wait in line again: their limit is another one now."""
    rows(runtime).filter(_of(name), is_released=True).update(is_released=False)


def _of(name: str) -> Q:
    names = Q()
    for kind in ("SLOT", "RATE"):
        names |= Q(limit=f"{kind}:{name}") | Q(limit__startswith=f"{kind}:{name}:")
    return names


def leave(runtime: Runtime, jobs: Mapping[UUID, int], *, only_released: bool = False) -> None:
    """Take jobs out of the line: they start now, or end.

    :param jobs: the generation of each. The place of a later one stays: the job has been replaced,
        or requeued, since the message was sent that is at hand.
    :param only_released: whether one stays that is not released: the job had started, and has
        got in line again since.
    """
    alike: dict[int, list[UUID]] = {}
    for id, generation in jobs.items():
        alike.setdefault(generation, []).append(id)
    for generation, ids in alike.items():
        for some in _chunks(ids):
            left = rows(runtime).filter(job_id__in=some, generation__lte=generation)
            if only_released:
                left = left.filter(is_released=True)
            left._raw_delete(runtime.database)  # one round trip


def first_of_keys(
    runtime: Runtime, ids: Collection[UUID], limits: Collection[str] | None = None
) -> dict[UUID, tuple[UUID, str]]:
    """Return for each of these jobs that has a key which job of this key is the first in line, and
    for which limit; those of whose key none waits are missing.

    :param limits: only the lines for these.
    """
    found: dict[UUID, tuple[UUID, str]] = {}
    jobs = Job.objects.using(runtime.database)
    is_open = jobs.filter(
        pk=OuterRef("job_id"), generation=OuterRef("generation"), state__in=states.OPEN
    )
    line = rows(runtime).filter(Exists(is_open), queue=OuterRef("queue"), key=OuterRef("key"))
    if limits is not None:
        line = line.filter(limit__in=limits)
    first = line.order_by("rank", "id")
    for some in _chunks(ids):
        keyed = (
            jobs.filter(pk__in=some)
            .exclude(key="")
            .annotate(
                first=Subquery(first.values("job_id")[:1]), line=Subquery(first.values("limit")[:1])
            )
        )
        for id, job_id, limit in keyed.values_list("pk", "first", "line"):
            if job_id is not None:
                found[id] = job_id, limit
    return found


def enter(runtime: Runtime, jobs: Sequence[Entry], queue: QueueConf) -> None:
    """Queue jobs of one queue for their limits, inside the caller's transaction. Each keeps the
    place it has, unless it has got another key or priority since; the others come last, in this
    order, but for those that had started.
    """
    using = runtime.database
    known: dict[UUID, tuple[int, str]] = {}
    for some in _chunks([job.row.id for job in jobs]):
        chosen = Job.objects.using(using).filter(pk__in=some)
        for id, priority, key in chosen.values_list("pk", "priority", "key"):
            known[id] = -(priority or 0), key
    places = []
    for job in jobs:
        rank, key = known.get(job.row.id, (0, ""))
        places.append(
            HeldJob(
                job_id=job.row.id,
                generation=job.row.generation,
                limit=job.limit.name,
                queue=queue.name,
                key=key or None,
                rank=FIRST if job.is_first else rank,
                waiting_since=runtime.clock.now(),
            )
        )
    changed = ["limit", "generation", "queue", "is_released"]
    _forget_replaced(runtime, places)
    if places:
        runtime.store.insert_or_update(places, "job_id", changed, _NAMES)
    alike: dict[tuple[int, int], list[UUID]] = {}
    for job in jobs:
        alike.setdefault((job.row.generation, job.row.attempts), []).append(job.row.id)
    for (generation, attempts), ids in alike.items():
        for some in _chunks(ids):
            open_jobs = Job.objects.using(using).filter(
                pk__in=some, generation=generation, attempts=attempts, state__in=states.OPEN
            )
            _queue_rows(open_jobs, queue, has_run=attempts > 0)


def _queue_rows(jobs: QuerySet[Job], queue: QueueConf, *, has_run: bool) -> None:
    """Write that jobs are due when they are released."""
    if storing.is_transactional(queue):
        jobs.update(available_at=NEVER)
        return
    changes: dict[str, Any] = {"available_at": NEVER, "queued_at": None}
    if has_run:
        changes["state"] = JobState.FAILING
    transition("hold", jobs, **changes)


def _forget_replaced(runtime: Runtime, places: Sequence[HeldJob]) -> None:
    """Delete places of jobs that were replaced, or requeued, with another key or priority: among
    jobs of these they come last."""
    wanted = {place.job_id: place for place in places if place.generation > 1}
    for some in _chunks(wanted):
        stale = [
            before.pk
            for before in rows(runtime).filter(job_id__in=some)
            if before.generation != (place := wanted[before.job_id]).generation
            and (before.key, before.rank) != (place.key, place.rank)
        ]
        rows(runtime).filter(pk__in=stale).delete()


def keep_places(runtime: Runtime, starts: Sequence[Start]) -> None:
    """Give a place to jobs that have started, or were about to, and come up again as they are. Each
    is the next of its key for whichever worker its message comes to."""
    wanted = {start.job_id: start for start in starts}
    places = []
    for some in _chunks(wanted):
        jobs = Job.objects.using(runtime.database).filter(pk__in=some, state__in=states.OPEN)
        free = jobs.filter(lease_token="").only("generation", "attempts", "key", "queue")
        places += [
            HeldJob(
                job_id=job.pk,
                generation=job.generation,
                limit=PAUSED,
                queue=job.queue,
                key=job.key or None,
                rank=FIRST,
                is_released=True,
                waiting_since=runtime.clock.now(),
            )
            for job in free
            if Start(job.pk, job.generation, job.attempts + 1) == wanted[job.pk]
        ]
    for some in _chunks(places):
        runtime.store.insert_missing(some)


def fill(runtime: Runtime, name: str, most: int, wait: float, interval: float) -> bool:
    """Release the first jobs in line until so many are on their way, and never more of them,
    however many workers do so at once; return whether others may be left in line.

    :param wait: seconds until the first of them may start, at least.
    :param interval: seconds for which each that is on its way keeps them waiting.
    """
    with runtime.store.writing(calls_handlers=False):
        line = rows(runtime).filter(limit=name, is_released=False).order_by("rank", "id")
        if connections[runtime.database].features.has_select_for_update:
            # Another worker that releases jobs of this line has done so, or waits for this one: not
            # even a more urgent job at the head of the line keeps the two from meeting.
            line = line.select_for_update()
        if most <= 0 or not list(line.values_list("pk", flat=True)[:most]):
            return most <= 0
        on_way = released_count(runtime, name)
        count = most - on_way
        if count <= 0:
            return True
        if on_way and interval:
            # One that came before these, as of its key, would be sent back into line.
            wait = max(wait, on_way * interval, _seconds_until_due(runtime, name) + DUE_BEFORE)
        return release(runtime, name, count, wait) == count


def _seconds_until_due(runtime: Runtime, name: str) -> float:
    """Return in how many seconds the last job of a limit is due that is on its way to a worker."""
    on_way = rows(runtime).filter(limit=name, is_released=True).order_by()
    latest = runtime.clock.now() + timedelta(seconds=AHEAD)
    jobs = Job.objects.using(runtime.database).filter(
        pk__in=on_way.values("job_id"), available_at__lte=latest
    )
    due = jobs.aggregate(due=Max("available_at"))["due"]
    return 0.0 if due is None else float((due - runtime.clock.now()).total_seconds())


def release(runtime: Runtime, name: str, count: int, wait: float) -> int:
    """Release the first jobs in line, but none behind a paused one of its key; return how many.
    They are due together, so that a worker has to do with them once.

    :param wait: seconds until the first of them may start.
    """
    released = 0
    with runtime.store.writing(calls_handlers=False):
        while released < count:
            paused = rows(runtime).filter(
                limit=PAUSED, queue=OuterRef("queue"), key=OuterRef("key")
            )
            waiting = rows(runtime).filter(~Exists(paused), limit=name, is_released=False)
            found = waiting.order_by("rank", "id")
            if connections[runtime.database].features.has_select_for_update_skip_locked:
                found = found.select_for_update(skip_locked=True)
            first = list(found[: min(count - released, MOST_RELEASED)])
            if not first:
                break
            jobs = Job.objects.using(runtime.database).filter(state__in=states.OPEN)
            by_id = {
                job.pk: job
                for job in jobs.filter(pk__in=[row.job_id for row in first]).defer("result")
            }
            gone = [
                row
                for row in first
                if row.job_id not in by_id or by_id[row.job_id].generation != row.generation
            ]
            rows(runtime).filter(pk__in=[row.pk for row in gone]).delete()
            due = [by_id[row.job_id] for row in first if row not in gone]
            _send(runtime, due, wait)
            kept = rows(runtime).filter(job_id__in=[job.pk for job in due])
            kept.update(is_released=True)
            released += len(due)
    return released


def _send(runtime: Runtime, jobs: Sequence[Job], seconds: float) -> None:
    """Make jobs in line due so many seconds from now, less a worker's way, inside the caller's
    transaction."""
    due = runtime.clock.now() + timedelta(seconds=max(0.0, seconds - DUE_BEFORE))
    table = Job.objects.using(runtime.database)
    by_queue: dict[str, list[Job]] = {}
    for job in jobs:
        job.available_at = due
        by_queue.setdefault(job.queue, []).append(job)
    table.filter(pk__in=[job.pk for job in jobs]).update(available_at=due)
    for name, some in by_queue.items():
        queue = runtime.settings.queue(name)
        if not storing.is_transactional(queue):
            # A relay that recorded late has made them queued again.
            late = table.filter(pk__in=[job.pk for job in some], state=JobState.QUEUED)
            late.filter(attempts=0).update(state=JobState.PENDING)
            late.filter(attempts__gt=0).update(state=JobState.FAILING)
        # Behind a backlog they would come too late for the moments at which they may start.
        storing.dispatch_jobs(some, queue, ahead=True)


def most_released(wanted: Limit) -> int:
    """Return how many jobs of a limit are to be on their way to workers at a time: of a rate those
    that start soon at its even pace. What has been saved up of a burst those find that are met."""
    if wanted.rate is None:
        return wanted.slots
    return min(MOST_RELEASED, math.ceil(AHEAD / wanted.rate.interval))


def covered(wanted: Limit) -> float:
    """Return for how many seconds there are starts where as many jobs are on their way."""
    if wanted.rate is None:
        return 0.0
    return min(AHEAD, most_released(wanted) * wanted.rate.interval)


def stalled(runtime: Runtime, count: int, after: str) -> list[HeldJob]:
    """Return the first job in line of each limit for which no released job is on its way; of slots,
    of each limit.

    :param count: at most so many limits, by name.
    :param after: only those whose name comes after this one.
    """
    # One that was given another payload is of a later generation: it is not on its way any more.
    open_jobs = Job.objects.using(runtime.database).filter(
        pk=OuterRef("job_id"), generation=OuterRef("generation"), state__in=states.OPEN
    )
    table = rows(runtime)
    table.filter(~Exists(open_jobs), is_released=True).delete()
    # A job that has failed loses its place.
    table.filter(~Exists(open_jobs.exclude(state=JobState.FAILING)), limit=PAUSED).delete()
    waiting = table.filter(is_released=False, limit__gt=after).order_by("limit")
    moving = table.filter(limit=OuterRef("limit"), is_released=True).order_by()
    names = waiting.filter(Q(limit__startswith="SLOT:") | ~Exists(moving))
    found = []
    for name in names.values_list("limit", flat=True).distinct()[:count]:
        head = table.filter(limit=name, is_released=False).order_by("rank", "id").first()
        if head is not None:
            found.append(head)
    return found


def _chunks(values: Collection[Any], size: int = _NAMES) -> list[list[Any]]:
    listed = list(values)
    return [listed[start : start + size] for start in range(0, len(listed), size)]
