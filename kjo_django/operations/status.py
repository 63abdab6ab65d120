"""What is going on: queues, workers, the relay's backlog. Bounded queries only."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.utils import timezone

from kjo_django.backends import get_transport
from kjo_django.conf import Settings, get_settings
from kjo_django.exceptions import PublishError
from kjo_django.models import DeadLetter, DeadLetterState, Job, Worker
from kjo_django.operations import queues as queue_operations
from kjo_django.operations.counting import (
    COUNT_LIMIT,
    bounded_count,
    grouped_counts,
    seconds_since,
)
from kjo_django.producer.dispatch import is_transactional, jobs_database
from kjo_django.states import AWAITING_PUBLISH, JobState

ALIVE_HEARTBEATS = 6
"""Heartbeats a worker may miss before it counts as gone."""


def alive_within(conf: Settings | None = None) -> timedelta:
    """Return how old the last sign of life of a living worker may be."""
    return ALIVE_HEARTBEATS * (conf or get_settings()).heartbeat_interval


def status(queues: Iterable[str] | None = None) -> dict[str, Any]:
    """Return everything ``kjo_status`` shows, ready for JSON.

    Counts are exact up to 100,000 rows of a state and lower bounds beyond, see ``is_capped``;
    ``completed`` counts among the newest 100,000 jobs.

    :param queues: restrict to these; all known ones otherwise.
    """
    now = timezone.now()
    rows = queue_operations.overview()
    if queues is not None:
        wanted = set(queues)
        rows = [row for row in rows if row["queue"] in wanted]
    counts, capped = count_by_state()
    waiting = oldest_waiting(now)
    letters, letters_capped = open_dead_letters()
    lags: dict[str, Any] = {}
    for row in rows:
        name = row["queue"]
        row["states"] = {state: counts.get((name, state), 0) for state in JobState.values}
        row["oldest_waiting_seconds"] = seconds_since(waiting.get(name), now)
        row["open_dead_letters"] = letters.get(name, 0)
        row.update(_lag_of(row, lags))
    return {
        "now": now.isoformat(),
        "queues": rows,
        "is_capped": capped or letters_capped,
        "count_limit": COUNT_LIMIT,
        "relay": relay(now),
        "workers": workers(now),
    }


def count_by_state() -> tuple[dict[tuple[str, str], int], bool]:
    """Return ``{(queue, state): count}`` and whether any count is a lower bound."""
    jobs = Job.objects.using(jobs_database())
    counts: dict[tuple[str, str], int] = {}
    is_capped = False
    for state in JobState.values:
        if state == JobState.COMPLETED:
            # No index knows the completed ones; the newest rows tell what matters.
            newest, capped = grouped_counts(jobs.order_by("-pk"), ("queue", "state"))
            groups = {key: group for key, group in newest.items() if key[1] == state}
        else:
            groups, capped = grouped_counts(
                jobs.filter(state=state).order_by("pk"), ("queue", "state")
            )
        is_capped |= capped
        counts.update({(key[0], key[1]): count for key, (count, _) in groups.items()})
    return counts, is_capped


class Due(NamedTuple):
    """The due jobs of a queue that are not done; those that run are among them."""

    jobs: int
    oldest: datetime
    """Since when the longest-waiting one has been due."""


def due(now: datetime) -> dict[str, Due]:
    """Return the due jobs by queue; counts are lower bounds past 100,000 rows of a state."""
    jobs = Job.objects.using(jobs_database()).filter(available_at__lte=now)
    found: dict[str, Due] = {}
    for state, order in ((AWAITING_PUBLISH, "available_at"), ((JobState.QUEUED,), "pk")):
        groups, _ = grouped_counts(
            jobs.filter(state__in=state).order_by(order), ("queue",), oldest="available_at"
        )
        for (queue,), (count, oldest) in groups.items():
            if oldest is not None:
                known = found.get(queue, Due(0, oldest))
                found[queue] = Due(known.jobs + count, min(known.oldest, oldest))
    return found


def oldest_waiting(now: datetime) -> dict[str, datetime]:
    """Return since when the longest-waiting due job of each queue has been due."""
    return {queue: each.oldest for queue, each in due(now).items()}


def open_dead_letters() -> tuple[dict[str, int], bool]:
    """Return the number of open dead letters by queue, and whether it is a lower bound."""
    rows = DeadLetter.objects.using(jobs_database()).filter(state=DeadLetterState.OPEN)
    groups, is_capped = grouped_counts(rows.order_by("pk"), ("queue",))
    return {queue: count for (queue,), (count, _) in groups.items()}, is_capped


def relay(now: datetime | None = None) -> dict[str, Any]:
    """Return what the relay still has to publish: due rows of queues that need one."""
    now = now or timezone.now()
    conf = get_settings()
    names = [row["queue"] for row in queue_operations.overview()]
    direct = [name for name in names if is_transactional(conf.queue(name))]
    due = (
        Job.objects.using(jobs_database())
        .filter(state__in=AWAITING_PUBLISH, available_at__lte=now)
        .exclude(queue__in=direct)
    )
    oldest = due.order_by("available_at").values_list("available_at", flat=True).first()
    return {
        "backlog": bounded_count(due),
        "oldest_seconds": seconds_since(oldest, now),
        "is_needed": len(direct) < len(names),
    }


def workers(now: datetime | None = None) -> list[dict[str, Any]]:
    """Return the workers that have not said goodbye, the living ones first."""
    now = now or timezone.now()
    within = alive_within()
    rows = Worker.objects.using(jobs_database()).exclude(state=Worker.State.STOPPED)
    found = [
        {
            "name": worker.name,
            "host": worker.hostname,
            "pid": worker.pid,
            "state": worker.state,
            "is_alive": worker.heartbeat_at >= now - within,
            "heartbeat_age_seconds": seconds_since(worker.heartbeat_at, now),
            "queues": worker.queues,
            "is_relaying": worker.is_relaying,
            "concurrency": worker.concurrency,
            "in_flight": worker.in_flight_count,
            "processed": worker.processed_count,
            "failed": worker.failed_count,
            "partitions": worker.partitions,
            "memory_bytes": worker.rss_bytes,
            "last_error": worker.last_error or None,
            "started_at": worker.started_at.isoformat(),
        }
        for worker in rows.order_by("-heartbeat_at")[:500]
    ]
    return sorted(found, key=lambda worker: not worker["is_alive"])


def _lag_of(row: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return the lag of a queue's group, or why it is not known."""
    broken = known.get(row["transport"])
    if broken is not None:
        return broken  # type: ignore[no-any-return] # one answer is enough of a transport that is away
    try:
        lag = get_transport(row["transport"]).lag([row["topic"]], row["consumer_group"])
    except PublishError as error:
        known[row["transport"]] = {"lag": None, "lag_by_partition": {}, "lag_error": str(error)}
        return known[row["transport"]]  # type: ignore[no-any-return]
    return {
        "lag": sum(lag.values()) if lag else 0,
        "lag_by_partition": {str(tp.partition): count for tp, count in sorted(lag.items())},
        "lag_error": None,
    }
