"""The figures of the first screen, in a handful of bounded queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone

from kjo_django.models import DeadLetter, DeadLetterState, Job, Worker
from kjo_django.operations import metrics, status
from kjo_django.operations.counting import bounded_counts, many_grouped_counts, seconds_since
from kjo_django.states import JobState, JobStatus
from kjo_django.store.transactions import jobs_database

WAITING = (JobState.PENDING, JobState.QUEUED)
"""Stored states of which some are shown as scheduled."""
OTHERS = (JobState.FAILING, JobState.FAILED, JobState.CANCELLED)
SHOWN = (*WAITING, JobStatus.SCHEDULED, *OTHERS)
"""Of the completed no index knows how many there are; the minute buckets tell how many come."""


def state_counts() -> dict[str, int]:
    """Return how many jobs people are shown in each state an index knows, up to 100,000 rows of
    each stored one."""
    return _shown(bounded_counts(_others()), timezone.now())


def _others() -> dict[str, QuerySet[Any]]:
    jobs = Job.objects.using(jobs_database())
    return {str(state): jobs.filter(state=state).order_by("pk") for state in OTHERS}


def _shown(others: Mapping[str, int], now: datetime) -> dict[str, int]:
    jobs = status.with_shown_state(Job.objects.using(jobs_database()).all(), now)
    rows = {str(state): jobs.filter(state=state).order_by("pk") for state in WAITING}
    counts = Counter(others)
    for groups, _ in many_grouped_counts(rows, ("shown_state",)).values():
        for (state,), (count, _) in groups.items():
            counts[state] += count
    return {str(state): counts[state] for state in SHOWN}


def overview() -> dict[str, Any]:
    """Return what the first screen shows; counts are lower bounds from 100,000 on."""
    now = timezone.now()
    jobs = Job.objects.using(jobs_database())
    unpublished = status.backlog(now)
    letters = DeadLetter.objects.using(jobs_database()).filter(state=DeadLetterState.OPEN)
    counts = bounded_counts(
        {**_others(), "letters": letters.order_by("pk"), "backlog": unpublished.jobs}
    )
    letters_count, backlog_count = counts["letters"], counts["backlog"]
    oldest = oldest_backlog = _first(status.waiting_jobs(now))
    if backlog_count and not unpublished.is_all_that_waits:
        oldest_backlog = _first(unpublished.jobs)
    queued = jobs.filter(state=JobState.QUEUED, available_at__lte=now).order_by("pk")
    totals = metrics.totals(timedelta(hours=1))
    living = _living(now)
    return {
        "states": _shown(counts, now),
        "open_dead_letters": letters_count,
        "backlog": backlog_count,
        "oldest_backlog_seconds": seconds_since(oldest_backlog, now) if backlog_count else None,
        "oldest_waiting_seconds": seconds_since(_least(oldest, _first(queued)), now),
        "in_flight": sum(living),
        "living_workers": len(living),
        "failed_last_hour": totals.failed,
        "done_per_minute": totals.per_minute,
        "lag": totals.lag,
    }


def _first(rows: Any) -> datetime | None:
    found: datetime | None = rows.values_list("available_at", flat=True).first()
    return found


def _least(*moments: datetime | None) -> datetime | None:
    return min((moment for moment in moments if moment is not None), default=None)


def _living(now: datetime) -> list[int]:
    rows = Worker.objects.using(jobs_database()).exclude(state=Worker.State.STOPPED)
    alive = rows.filter(heartbeat_at__gte=now - status.alive_within())
    return list(alive.order_by().values_list("in_flight_count", flat=True)[:5000])
