"""What people are shown of schedules: their next ticks, their last jobs, how late they are."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from kjo_django import registry
from kjo_django.conf import ScheduleOptions, read_schedule
from kjo_django.logs import get_logger
from kjo_django.models import Job, Schedule
from kjo_django.refusals import shown as for_people
from kjo_django.runtime import current_runtime, jobs_database
from kjo_django.schedules.declarations import (
    COLUMNS,
    GIVEN,
    columns_of,
    field_text,
    in_order,
    problem_of,
    problem_shown,
)
from kjo_django.schedules.ticker import id_prefix

logger = get_logger("kjo_django")

FORM_RUNS = 5
"""Ticks that a form shows."""


# --- When it runs ---------------------------------------------------------------------------------


def preview(given: Mapping[str, Any]) -> tuple[list[datetime], dict[str, str]]:
    """Return the next ticks of what a form says about when, and what is wrong with it by field, in
    the active language.

    :param given: some of ``TIMES``; None and "" leave an option at its default.
    """
    kept = {name: value for name, value in given.items() if value not in (None, "")}
    options, problems = read_schedule(kept, GIVEN)
    if problems:
        return [], {one.key: field_text(one, for_people) for one in reversed(problems)}
    return next_runs(options), {}


def next_runs(schedule: Schedule | ScheduleOptions, count: int = FORM_RUNS) -> list[datetime]:
    """Return the next ticks of a schedule, or of options that have been ``checked``, in UTC.

    Those of a paused schedule are what it would have.
    """
    now = current_runtime().clock.now()
    if isinstance(schedule, ScheduleOptions):
        return Schedule(**columns_of(schedule)).timetable.next_ticks(now, count)
    if schedule.next_at is None:
        return []
    try:
        later = schedule.timetable.next_ticks(schedule.next_at, count - 1, schedule.next_at)
    except Exception as error:
        # A zone that this machine does not know (any more), or a row that others have written.
        logger.warning("The ticks of schedule %r cannot be computed: %r", schedule.name, error)
        return [schedule.next_at]
    return [schedule.next_at, *later]


# --- What there is --------------------------------------------------------------------------------


def history(schedule: Schedule, limit: int = 50) -> list[Job]:
    """Return the latest jobs of a schedule in the queue it has now, newest first, without payloads;
    pruned ones are gone."""
    handler = registry.enqueueable(schedule.job)
    # An index has queue and unique id: without the queue, every job is looked at.
    queue = schedule.queue or (handler.options.queue if handler is not None else "default")
    jobs = Job.objects.using(jobs_database()).defer("payload", "result")
    jobs = jobs.filter(queue=queue, unique_id__startswith=id_prefix(schedule.name))
    return list(jobs.order_by("-id")[:limit])


def last_jobs(rows: Sequence[Schedule]) -> dict[UUID, Job]:
    """Return the last job of each schedule by the schedule's id, without payloads; pruned ones are
    left out."""
    ids = {row.last_job_id: row.pk for row in rows if row.last_job_id is not None}
    jobs = Job.objects.using(jobs_database()).defer("payload", "result").filter(pk__in=list(ids))
    return {ids[job.pk]: job for job in jobs}


def late(after: timedelta = timedelta(seconds=60), limit: int = 20) -> list[Schedule]:
    """Return schedules whose tick has been due for longer: no worker stores it."""
    runtime = current_runtime()
    rows = Schedule.objects.using(runtime.database).filter(
        is_enabled=True, is_paused=False, next_at__lt=runtime.clock.now() - after
    )
    return in_order(rows.order_by("next_at"), limit)


def overview(names: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return what commands show of each schedule, by name; its problem in the active language.

    :param names: of the schedules to show; all if none is given.
    """
    runtime = current_runtime()
    rows = Schedule.objects.using(runtime.database).order_by("name")
    wanted = list(names)
    found = in_order(rows.filter(name__in=wanted) if wanted else rows)
    jobs, now = last_jobs(found), runtime.clock.now()
    return [
        described(row, jobs.get(row.pk), now) | {"problem": problem_shown(row)} for row in found
    ]


class ScheduleState(enum.StrEnum):
    """What people are shown of a schedule."""

    ACTIVE = "active"
    PAUSED = "paused"
    BROKEN = "broken"
    """Its next tick cannot be stored."""
    ENDED = "ended"
    """There is no next tick."""
    DISABLED = "disabled"
    """The code does not declare it any more, or declares it as disabled."""


def state_of(row: Schedule) -> ScheduleState:
    """Return the state that people are shown."""
    if not row.is_enabled:
        return ScheduleState.DISABLED
    if row.is_paused:
        return ScheduleState.PAUSED
    if problem_of(row):
        return ScheduleState.BROKEN
    return ScheduleState.ENDED if row.next_at is None else ScheduleState.ACTIVE


def conditions(row: Schedule) -> str:
    """Return what decides which actions there are for a schedule: its state, and more."""
    found = [str(state_of(row))]
    if row.overridden:
        found.append("overridden")
    if row.source == Schedule.Source.ADMIN or not row.is_enabled:
        found.append("deletable")
    return " ".join(found)


def described(row: Schedule, last_job: Job | None, now: datetime) -> dict[str, Any]:
    """Return what is shown of a schedule.

    :param last_job: its last job, if there is one still.
    """
    is_active = row.is_enabled and not row.is_paused and row.next_at is not None
    late_by = (now - row.next_at).total_seconds() if is_active and row.next_at else 0.0
    return {
        "id": str(row.pk),
        "name": row.name,
        **{name: getattr(row, name) for name in COLUMNS},
        "state": str(state_of(row)),
        "source": row.source,
        "is_enabled": row.is_enabled,
        "is_paused": row.is_paused,
        "overridden": row.overridden,
        "next_at": row.next_at if row.is_enabled and not row.is_paused else None,
        "last_at": row.last_at,
        "late_seconds": max(0.0, late_by),
        **{name: getattr(row, name) for name in ("stored_count", "late_count", "skipped_count")},
        "problem": problem_of(row),
        "last_job_id": None if last_job is None else str(last_job.pk),
        "last_status": None if last_job is None else str(last_job.status),
        "last_seconds": None if last_job is None else seconds_of(last_job),
    }


def seconds_of(job: Job) -> float | None:
    """Return how long the last attempt of a job took; None if it has not ended."""
    if job.started_at is None or job.finished_at is None:
        return None
    return (job.finished_at - job.started_at).total_seconds()
