"""The ticks that are due: each is stored as one job.

One transaction locks schedules that are due, stores the jobs, and moves ``next_at`` on. Any number
of workers do so, without a leader: of those that look at one schedule at once, one gets it. A crash
before the commit leaves the tick due. The unique id of a tick's job is a second guard, for clocks
and rows that are set back.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections
from django.db.models import QuerySet

from kjo_django import registry
from kjo_django.enqueue.definition import EnqueueOptions, JobDefinition, unsaved_job
from kjo_django.enqueue.handle import JobHandle
from kjo_django.enqueue.storing import store
from kjo_django.exceptions import StorageError
from kjo_django.logs import get_logger
from kjo_django.messages import headers as names
from kjo_django.models import Job, Schedule
from kjo_django.runtime import Runtime, database_of
from kjo_django.schedules.declarations import in_order, synchronize
from kjo_django.store.servers import mend_connection
from kjo_django.timetables import INSTANT, Timetable

logger = get_logger("kjo_django")

LOOK_EVERY = 1.0
"""Most seconds between two looks: others may add schedules."""
LEAST_PAUSE = 0.05
"""Least seconds between two looks: others may have locked what is due."""
QUICK_RETRIES = 4
"""Looks in a row that may fail and are repeated soon."""
BATCH = 250
"""Schedules of one transaction."""
LATE_AFTER = timedelta(seconds=60)
"""A tick that is older was missed; the schedule says what becomes of it."""
MOST_CAUGHT_UP = 100
"""Jobs stored at once for one schedule's missed ticks."""
SYNCHRONIZE_EVERY = 60.0
"""Seconds between two comparisons of the table with the code. Workers of an older release that are
started meanwhile disable what they do not know."""
BLOCKED_FOR = 30.0
"""Seconds in which a process leaves a schedule alone whose tick it could not store."""
SET_BACK = timedelta(hours=3)
"""A clock that is further behind the last tick was wrong then, or is wrong now. Debian's cron has
the same limit."""
MAX_PROBLEM = 500
ON_TIME = timedelta(seconds=1)
"""A tick whose job is stored later than this is counted as late."""
_COUNTS = ["stored_count", "late_count", "skipped_count"]
_CHANGED = ["next_at", "last_at", "last_job_id", *_COUNTS, "problem"]


class Ticker:
    """A worker's duty: stores the jobs of due ticks.

    :param synchronizes: whether it brings the declared schedules into the table.
    """

    def __init__(self, runtime: Runtime, *, synchronizes: bool = True) -> None:
        self._runtime = runtime
        self._clock = runtime.clock
        self._synchronize_at = self._clock.monotonic() if synchronizes else float("inf")
        self._has_followed_zone = False
        """Whether it has looked if Django's ``TIME_ZONE`` is another one than the ticks are in."""
        self._blocked: dict[UUID, float] = {}
        """The schedules to leave alone, and until when."""
        self._failure_count = 0
        """Looks in a row that have failed."""
        self.stored_count = 0
        """Jobs stored so far."""

    def step(self) -> float:
        """Store what is due, for one batch of schedules; return the seconds until the next look.

        :raises DatabaseError: a few looks in a row have failed. After the first ones it looks
            again soon: a locked row or a lost connection is to make no tick a second late.
        """
        try:
            pause = self._look()
        except (DatabaseError, InterfaceError, StorageError) as error:
            self._failure_count += 1
            if self._failure_count > QUICK_RETRIES:
                raise
            logger.info("Schedules are looked at again soon: %s", error)
            mend_connection(self._runtime.database)
            return LEAST_PAUSE * self._failure_count
        self._failure_count = 0
        return pause

    def _look(self) -> float:
        if self._clock.monotonic() >= self._synchronize_at:
            self._synchronize()
        next_at = self._next()
        if next_at is not None and next_at <= self._clock.now():
            if self._store_due() == BATCH:
                return 0.0
            next_at = self._next()
        if next_at is None:
            return LOOK_EVERY
        left = (next_at - self._clock.now()).total_seconds()
        return min(LOOK_EVERY, max(LEAST_PAUSE, left))

    def wake(self) -> None:
        """Nothing: it waits for nothing within its step."""

    def close(self) -> None:
        """Nothing: it holds nothing."""

    # --- Looking ----------------------------------------------------------------------------------

    def _synchronize(self) -> None:
        synchronize(self._runtime)
        # An error above is met again by the next step.
        self._synchronize_at = self._clock.monotonic() + SYNCHRONIZE_EVERY
        now = self._clock.now()
        if not self._has_followed_zone:
            self._follow_time_zone(now)
            self._has_followed_zone = True
        for row in self._active().filter(last_at__gt=now + SET_BACK):
            try:
                next_at = row.timetable.next_after(now)
            except Exception as error:
                logger.error("The schedule %r cannot begin anew: %r", row.name, error)
                continue
            logger.warning("The clock was set back: the schedule %r begins anew", row.name)
            # Unless a tick was stored meanwhile.
            self._active().filter(pk=row.pk, last_at=row.last_at).update(
                next_at=next_at, last_at=None
            )

    def _follow_time_zone(self, now: datetime) -> None:
        """Move on the schedules in Django's ``TIME_ZONE`` whose next tick is none of that zone: it
        was computed by a process that had another one."""
        for row in self._active().filter(timezone="", next_at__gt=now).exclude(cron=""):
            assert row.next_at is not None
            try:
                table = row.timetable
                if table.next_after(row.next_at - INSTANT) == row.next_at:
                    continue
                next_at = table.next_after(max(now, row.last_at or now))
            except Exception as error:
                logger.error("The schedule %r cannot follow TIME_ZONE: %r", row.name, error)
                continue
            logger.warning("TIME_ZONE has changed: the schedule %r is due %s", row.name, next_at)
            # Unless somebody else has moved it meanwhile.
            self._active().filter(pk=row.pk, next_at=row.next_at).update(next_at=next_at)

    def _active(self) -> QuerySet[Schedule]:
        rows = Schedule.objects.using(self._runtime.database)
        return rows.filter(is_enabled=True, is_paused=False, next_at__isnull=False).order_by()

    def _upcoming(self) -> QuerySet[Schedule]:
        """Return the schedules that this process looks at, the next to be due first."""
        rows = self._active().order_by("next_at")
        if self._blocked:
            now = self._clock.monotonic()
            self._blocked = {id: until for id, until in self._blocked.items() if until > now}
            rows = rows.exclude(pk__in=list(self._blocked))
        return rows

    def _next(self) -> datetime | None:
        return self._upcoming().values_list("next_at", flat=True).first()

    # --- Storing ----------------------------------------------------------------------------------

    def _store_due(self) -> int:
        """Store the ticks of a batch of due schedules; return how many schedules that are."""
        features = connections[self._runtime.database].features
        skips_locked = features.has_select_for_update_skip_locked
        blocked: dict[UUID, str] = {}
        with self._runtime.store.writing():
            now = self._clock.now()
            due = self._upcoming().filter(next_at__lte=now)
            rows = in_order(due.select_for_update(skip_locked=skips_locked), BATCH)
            busy = self._busy(rows)
            jobs: dict[UUID, list[Job]] = {}
            moved: list[Schedule] = []
            for row in rows:
                try:
                    jobs[row.pk] = due_jobs(row, now, is_busy=row.last_job_id in busy)
                except Exception as error:
                    # A handler that is not here, or a function of the project that raises.
                    blocked[row.pk] = f"{error}"[:MAX_PROBLEM] or type(error).__name__
                    self._record_problem(row, blocked[row.pk])
                else:
                    moved.append(row)
            self._store(moved, jobs, now)
        until = self._clock.monotonic() + BLOCKED_FOR
        self._blocked.update(dict.fromkeys(blocked, until))
        return len(rows)

    def _busy(self, rows: Sequence[Schedule]) -> set[UUID]:
        """Return which of the last jobs are open, for schedules whose jobs may not overlap."""
        last = [
            row.last_job_id
            for row in rows
            if row.overlap == Schedule.Overlap.SKIP and row.last_job_id is not None
        ]
        if not last:
            return set()
        jobs = Job.objects.using(self._runtime.database).open().filter(pk__in=last)
        return set(jobs.values_list("pk", flat=True))

    def _store(self, rows: Sequence[Schedule], jobs: dict[UUID, list[Job]], now: datetime) -> None:
        """Store the jobs of some schedules, and move the schedules on."""
        if not rows:
            return
        every = [job for row in rows for job in jobs[row.pk]]
        answers = iter(store(every, runtime=self._runtime))
        for row in rows:
            of_row = [next(answers) for _ in jobs[row.pk]]
            _note_answers(row, of_row)
            self.stored_count += sum(answer.is_new for answer in of_row)
        # Each row is there: it is locked, and where a database locks no rows, all of it is. So this
        # only updates. As one UPDATE, with a CASE for each column, it took five times as long.
        self._runtime.store.insert_or_update(rows, "id", _CHANGED)

    def _record_problem(self, row: Schedule, problem: str) -> None:
        """Write down why a tick could not be stored, once; the tick stays due."""
        if row.problem == problem:
            return
        logger.error("The schedule %r is due, and its job cannot be stored: %s", row.name, problem)
        rows = Schedule.objects.using(self._runtime.database)
        rows.filter(pk=row.pk).update(problem=problem)


def _note_answers(row: Schedule, answers: Sequence[JobHandle[Any]]) -> None:
    for answer in answers:
        row.last_job_id = answer.job_id
        if answer.is_new:
            row.stored_count += 1
        else:
            row.skipped_count += 1
            logger.warning(
                "The schedule %r was set back: a tick has the job %s", row.name, answer.job_id
            )


# --- The ticks of one schedule --------------------------------------------------------------------


def due_jobs(row: Schedule, now: datetime, *, is_busy: bool) -> list[Job]:
    """Return the unsaved jobs of a schedule's due ticks, and move the row on, unsaved.

    :param is_busy: whether the job of its last tick is open, and it may not overlap.
    :raises ValueError: no job is named so here.
    """
    assert row.next_at is not None
    ticks, next_at = due_ticks(row.timetable, row.next_at, now)
    if row.last_at is not None:
        ticks = [tick for tick in ticks if tick > row.last_at]
    chosen = _chosen(row, ticks, now, is_busy=is_busy)
    jobs = [
        tick_job(row, tick, tick_id(row.name, tick), begins_at=_begins_at(row, tick, now))
        for tick in chosen
    ]
    if skipped := len(ticks) - len(chosen):
        row.skipped_count += skipped
        why = "its last job is open" if is_busy else "missed"
        logger.info("The schedule %r skips %d ticks: %s", row.name, skipped, why)
    row.late_count += sum(now - tick > ON_TIME for tick in chosen)
    row.next_at, row.problem = next_at, ""
    row.last_at = ticks[-1] if ticks else row.last_at
    return jobs


def due_ticks(
    table: Timetable, first: datetime, now: datetime
) -> tuple[list[datetime], datetime | None]:
    """Return the ticks that are due, oldest first, and the next one that is not.

    :param first: the first of them. Of more than are ever caught up with, the latest are returned.
    """
    following = table.next_after(first, first)
    if following is None or following > now:
        return [first], following
    return table.latest(first, now, MOST_CAUGHT_UP + 1), table.next_after(now, first)


def _chosen(
    row: Schedule, ticks: Sequence[datetime], now: datetime, *, is_busy: bool
) -> Sequence[datetime]:
    """Return the ticks that get a job."""
    if is_busy:
        return []
    fresh = [tick for tick in ticks if tick >= now - LATE_AFTER]
    if row.catch_up == Schedule.CatchUp.ALL:
        chosen = ticks[-MOST_CAUGHT_UP:]
    elif row.catch_up == Schedule.CatchUp.ONE:
        chosen = fresh or ticks[-1:]
    else:
        chosen = fresh
    if row.expires_after is not None:
        longest = timedelta(seconds=row.expires_after)
        chosen = [tick for tick in chosen if tick + longest > now]
    return chosen[-1:] if row.overlap == Schedule.Overlap.SKIP else chosen


def tick_id(name: str, tick: datetime) -> str:
    """Return the unique id of a tick's job."""
    return f"{id_prefix(name)}{tick.astimezone(UTC).isoformat().replace('+00:00', 'Z')}"


def id_prefix(name: str) -> str:
    """Return what the unique ids of a schedule's jobs begin with."""
    return f"schedule:{name}:"


def _begins_at(row: Schedule, tick: datetime, now: datetime) -> datetime | None:
    """Return when the job of a tick may begin; None: at once."""
    # The same in every process; evenly spread.
    share = zlib.crc32(f"{row.name}:{tick.timestamp()}".encode()) / 2**32
    begins_at = tick + timedelta(seconds=row.jitter * share)
    return begins_at if begins_at > now else None


def tick_job(row: Schedule, tick: datetime, id: str, *, begins_at: datetime | None = None) -> Job:
    """Return the unsaved job of a tick.

    :raises ValueError: no job is named so here, or no queue.
    :raises TypeError: the job does not take the payload.
    """
    handler = registry.enqueueable(row.job)
    if handler is None:
        raise ValueError(f"No job is named {row.job!r} here")
    options = EnqueueOptions(
        id=id,
        queue=row.queue or None,
        run_at=begins_at,
        expires_at=tick + timedelta(seconds=row.expires_after) if row.expires_after else None,
        headers={names.SCHEDULED_FOR: tick.astimezone(UTC).isoformat()},
    )
    job = unsaved_job(JobDefinition(handler, options), row.payload)
    if row._state.db is not None and (jobs := database_of(job.queue)) != row._state.db:
        raise ValueError(
            f"The jobs of the queue {job.queue!r} are in the database {jobs!r}, the schedule is in "
            f"{row._state.db!r}"
        )
    return job
