"""The present state of queues, workers and the relay's backlog. Every query is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db.models import Case, F, QuerySet, Value, When

from kjo_django.clock import CLOCK
from kjo_django.conf import get_settings
from kjo_django.enqueue.storing import is_transactional
from kjo_django.exceptions import PublishError
from kjo_django.ids import ago
from kjo_django.models import (
    UNKNOWN_HANDLER,
    DeadLetter,
    DeadLetterState,
    Job,
    Worker,
    is_scheduled,
)
from kjo_django.operations import queues as queue_operations
from kjo_django.operations.monitoring import metrics
from kjo_django.operations.monitoring.metrics import add_rates
from kjo_django.operations.search import running_counts
from kjo_django.operations.workers import alive_within, assignments, rebalanced_at
from kjo_django.runtime import get_transport, jobs_database
from kjo_django.states import AWAITING_PUBLISH, JobState, JobStatus
from kjo_django.store.counting import (
    COUNT_LIMIT,
    bounded_count,
    bounded_counts,
    first_moments,
    grouped_counts,
    many_grouped_counts,
    seconds_since,
)

WAITING = (JobState.PENDING, JobState.QUEUED)
"""Stored states whose jobs are shown as scheduled while they are due later."""
OTHERS = (JobState.WAITING, JobState.FAILING, JobState.FAILED, JobState.CANCELLED)
SHOWN = (*WAITING, JobStatus.SCHEDULED, *OTHERS)
"""States that an index can count. The minute buckets hold how many jobs complete."""


SPLIT_LIMIT = 20_000
"""Rows of each state of ``WAITING`` that are counted for a screen. An index counts those of other
states; these are read from the table, as it says when they are due."""


def state_counts() -> tuple[dict[str, int], set[str]]:
    """Return how many jobs people are shown in each state of ``SHOWN``, and which of these numbers
    are lower bounds: of a stored state 100,000 rows are counted, or ``SPLIT_LIMIT``."""
    jobs = Job.objects.using(jobs_database()).order_by("pk")
    waiting = with_shown_state(jobs, CLOCK.now())
    rows = {str(state): waiting.filter(state=state)[:SPLIT_LIMIT] for state in WAITING}
    others = jobs.annotate(shown_state=F("state"))
    rows |= {str(state): others.filter(state=state) for state in OTHERS}
    counts: Counter[str] = Counter()
    lower_bounds: set[str] = set()
    for state, (groups, is_capped) in many_grouped_counts(rows, ("shown_state",)).items():
        found = {shown: count for (shown,), (count, _) in groups.items()}
        counts.update(found)
        if is_capped or (state in WAITING and sum(found.values()) >= SPLIT_LIMIT):
            lower_bounds.update((state, *found))
    return {str(state): counts[state] for state in SHOWN}, lower_bounds


def overview() -> dict[str, Any]:
    """Return the figures of the first screen. A count of 100,000 is a lower bound; ``lower_bounds``
    are the states whose counts are. ``in_flight`` is the number of messages that living workers
    have fetched and not settled: those that run, and those that wait for one of ``lanes``."""
    now = CLOCK.now()
    unpublished, needs_relay = backlog(now)
    letters = DeadLetter.objects.using(jobs_database()).filter(state=DeadLetterState.OPEN)
    counts = bounded_counts({"letters": letters.order_by("pk"), "backlog": unpublished})
    queued = Job.objects.using(jobs_database()).filter(state=JobState.QUEUED)
    ready = queued.filter(available_at__lte=now).order_by("pk")
    oldest = first_moments(
        {"backlog": unpublished, "waiting": waiting_jobs(now), "ready": ready}, "available_at"
    )
    since = min(filter(None, (oldest["waiting"], oldest["ready"])), default=None)
    workers = Worker.objects.using(jobs_database()).exclude(state=Worker.State.STOPPED)
    living = workers.filter(heartbeat_at__gte=now - alive_within()).order_by()
    loads = list(living.values_list("in_flight_count", "concurrency")[:5000])
    totals = metrics.totals(timedelta(hours=1), with_lag=False)
    states, lower_bounds = state_counts()
    return {
        "states": states,
        "lower_bounds": lower_bounds,
        "open_dead_letters": counts["letters"],
        "backlog": counts["backlog"],
        "needs_relay": needs_relay,
        "oldest_backlog_seconds": seconds_since(oldest["backlog"], now),
        "oldest_waiting_seconds": seconds_since(since, now),
        "in_flight": sum(count for count, _lanes in loads),
        "lanes": sum(lanes for _count, lanes in loads),
        "living_workers": len(loads),
        "failed_last_hour": totals.failed,
        "done_per_minute": totals.per_minute,
    }


def status(queues: Iterable[str] | None = None) -> dict[str, Any]:
    """Return everything ``kjo_status`` shows, ready for JSON.

    Counts are exact up to 100,000 rows of a state, and lower bounds beyond: ``is_capped`` is true
    then. ``completed`` counts among the newest 100,000 jobs. ``running_count`` of a queue, which is
    among its other counts, is of at most 2,000 running jobs of all queues; None while coordination
    cannot be reached.

    :param queues: names of queues; None: all known ones.
    """
    now = CLOCK.now()
    rows, is_capped = queue_rows(queues, now)
    running = running_counts()
    for row in rows:
        row["running_count"] = None if running is None else running.get(row["queue"], 0)
    add_rates(rows)
    return {
        "now": now.isoformat(),
        "queues": rows,
        "is_capped": is_capped,
        "count_limit": COUNT_LIMIT,
        "relay": relay(now),
        "workers": workers(now),
    }


def queue_rows(
    queues: Iterable[str] | None = None,
    now: datetime | None = None,
    *,
    limit: int = COUNT_LIMIT,
    with_lags: bool = True,
) -> tuple[list[dict[str, Any]], bool]:
    """Return each queue with its settings and its counts, and whether any count is a lower bound.

    :param limit: rows of each state that are counted.
    :param with_lags: ask the transports how far the consumers are behind.
    """
    now = now or CLOCK.now()
    rows = queue_operations.overview()
    if queues is not None:
        wanted = set(queues)
        rows = [row for row in rows if row["queue"] in wanted]
    counts, is_capped = count_by_state(now, limit)
    waiting = due(now)
    letters, letters_capped = open_dead_letters(limit)
    for row in rows:
        name = row["queue"]
        row["states"] = {state: counts.get((name, state), 0) for state in COUNTED}
        _, due_since = waiting.get(name, (0, None))
        row["oldest_waiting_seconds"] = seconds_since(due_since, now)
        row["open_dead_letters"], failed_at = letters.get(name, (0, None))
        row["oldest_dead_letter_seconds"] = seconds_since(failed_at, now)
    if with_lags:
        add_lags(rows)
    return rows, is_capped or letters_capped


COUNTED = tuple(state for state in JobStatus.values if state != JobStatus.PROCESSING)
"""The states that people are shown, without processing, which only leases show."""


def count_by_state(
    now: datetime, limit: int = COUNT_LIMIT
) -> tuple[dict[tuple[str, str], int], bool]:
    """Return how many jobs of each queue are in each state of ``COUNTED``, and whether any count
    is a lower bound."""
    jobs = with_shown_state(Job.objects.using(jobs_database()).all(), now)
    rows = {state: jobs.filter(state=state).order_by("pk") for state in JobState.values}
    # No index knows the completed jobs; of all jobs the newest are counted.
    rows[JobState.COMPLETED] = jobs.order_by("-pk")
    found = many_grouped_counts(rows, ("queue", "state", "shown_state"), limit=limit)
    counts: Counter[tuple[str, str]] = Counter()
    for name, (groups, _) in found.items():
        for (queue, state, shown), (count, _) in groups.items():
            counts[queue, shown] += count if state == name else 0
    return counts, any(is_capped for _, is_capped in found.values())


def with_shown_state(jobs: QuerySet[Job], now: datetime) -> QuerySet[Job]:
    """Return the jobs with ``shown_state``: the stored state, or scheduled."""
    scheduled = When(is_scheduled(now), then=Value(str(JobStatus.SCHEDULED)))
    return jobs.annotate(shown_state=Case(scheduled, default=F("state")))


def due(now: datetime) -> dict[str, tuple[int, datetime]]:
    """Return for each queue how many due jobs are not done, and since when the oldest is due.

    Running jobs are among them. Past 100,000 rows of a state, counts are lower bounds.
    """
    queued = Job.objects.using(jobs_database()).filter(state=JobState.QUEUED)
    rows = {
        "due": waiting_jobs(now),
        "queued": queued.filter(available_at__lte=now).order_by("pk"),
    }
    found: dict[str, tuple[int, datetime]] = {}
    for groups, _ in many_grouped_counts(rows, ("queue",), oldest="available_at").values():
        for (queue,), (count, oldest) in groups.items():
            if oldest is not None:
                known, since = found.get(queue, (0, oldest))
                found[queue] = known + count, min(since, oldest)
    return found


def published_anew(now: datetime) -> dict[str, tuple[int, UUID]]:
    """Return for each queue how many jobs wait for a worker though they were published long after
    they were due, and the first of them. After an outage of the relay there are such jobs; those
    that were rescued twice stay.

    Looks at the thousand that were stored first.
    """
    patience = 2 * (now - ago(now, get_settings().rescue_after))
    queued = Job.objects.using(jobs_database()).filter(
        state=JobState.QUEUED, available_at__lte=ago(now, patience)
    )
    found: dict[str, tuple[int, UUID]] = {}
    first = queued.order_by("pk").values_list("queue", "pk", "available_at", "queued_at")[:1000]
    for queue, job, available_at, queued_at in first:
        if queued_at is not None and queued_at >= available_at + patience:
            count, example = found.get(queue, (0, job))
            found[queue] = count + 1, example
    return found


def unknown_handlers() -> dict[str, tuple[int, datetime]]:
    """Return for each handler for which jobs wait, since a worker has not known it, how many do and
    since when the first does. Past 100,000 of them, counts are lower bounds."""
    waits = Job.objects.using(jobs_database()).filter(
        state=JobState.FAILING,
        failures__generation=F("generation"),
        failures__attempt=F("attempts"),
        **{f"failures__{column}": value for column, value in UNKNOWN_HANDLER.items()},
    )
    rows = waits.annotate(since=F("failures__failed_at")).order_by("pk")
    groups, _ = grouped_counts(rows, ("handler",), oldest="since")
    return {name: (count, since) for (name,), (count, since) in groups.items() if since is not None}


def open_dead_letters(
    limit: int = COUNT_LIMIT,
) -> tuple[dict[str, tuple[int, datetime | None]], bool]:
    """Return for each queue how many dead letters are open and when the oldest of them failed, and
    whether counts are lower bounds."""
    rows = DeadLetter.objects.using(jobs_database()).filter(state=DeadLetterState.OPEN)
    groups, is_capped = grouped_counts(
        rows.order_by("pk"), ("queue",), oldest="failed_at", limit=limit
    )
    return {queue: found for (queue,), found in groups.items()}, is_capped


def waiting_jobs(now: datetime) -> QuerySet[Job]:
    """Return the due jobs that are not published yet, longest due first."""
    jobs = Job.objects.using(jobs_database())
    return jobs.filter(state__in=AWAITING_PUBLISH, available_at__lte=now).order_by("available_at")


def backlog(now: datetime) -> tuple[QuerySet[Job], bool]:
    """Return a query of the due jobs that the relay has to publish, longest due first, and whether
    any queue needs a relay."""
    conf = get_settings()
    names = [row["queue"] for row in queue_operations.overview()]
    direct = [name for name in names if is_transactional(conf.queue(name))]
    return waiting_jobs(now).exclude(queue__in=direct), len(direct) < len(names)


def relay(now: datetime | None = None) -> dict[str, Any]:
    """Return how many due jobs the relay has to publish, and the age of the oldest."""
    now = now or CLOCK.now()
    unpublished, is_needed = backlog(now)
    return {
        "backlog": bounded_count(unpublished),
        "oldest_seconds": seconds_since(first_moments({"": unpublished}, "available_at")[""], now),
        "is_needed": is_needed,
    }


def workers(now: datetime | None = None) -> list[dict[str, Any]]:
    """Return the workers whose rows are not stopped, the living ones first."""
    now = now or CLOCK.now()
    rows = Worker.objects.using(jobs_database()).exclude(state=Worker.State.STOPPED)
    found = [_worker(worker, now) for worker in rows.order_by("-heartbeat_at")[:500]]
    return sorted(found, key=lambda worker: not worker["is_alive"])


def _worker(worker: Worker, now: datetime) -> dict[str, Any]:
    assigned = assignments(worker.partitions)
    return {
        "id": str(worker.pk),
        "name": worker.name,
        "host": worker.hostname,
        "pid": worker.pid,
        "state": worker.state,
        "asked_to": worker.asked_to or None,
        "release": worker.release or None,
        "is_alive": worker.heartbeat_at >= now - alive_within(),
        "heartbeat_age_seconds": seconds_since(worker.heartbeat_at, now),
        "clock_ahead_seconds": worker.clock_ahead,
        "queues": [str(each) for each in worker.queues] if isinstance(worker.queues, list) else [],
        "is_relaying": worker.is_relaying,
        "concurrency": worker.concurrency,
        "in_flight": worker.in_flight_count,
        "processed": worker.processed_count,
        "failed": worker.failed_count,
        "partitions": [each.as_dict() for each in assigned],
        "rebalanced_at": (at := rebalanced_at(assigned)) and at.isoformat(),
        "memory_bytes": worker.rss_bytes,
        "last_error": worker.last_error or None,
        "started_at": worker.started_at.isoformat(),
        "uptime_seconds": seconds_since(worker.started_at, worker.heartbeat_at),
    }


def add_lags(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each queue the offsets of its consumer group and its lag, or the reason why the lag is
    not known.

    Each group is asked for once. A transport that refuses is not asked again.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["transport"], row["consumer_group"]), []).append(row)
    refusals: dict[str, str] = {}
    for (transport, group), members in groups.items():
        places: dict[str, list[dict[str, Any]]] = {}
        if transport not in refusals:
            topics = {topic for row in members for topic in row["topics"]}
            try:
                places = _places_of(transport, group, topics)
            except PublishError as error:
                refusals[transport] = str(error)
        for row in members:
            _add_lag(row, places, refusals.get(transport))


def _places_of(
    transport: str, group: str, topics: Collection[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return the partitions of each topic in order, with the offsets of a consumer group.

    :raises PublishError: the transport does not tell.
    """
    places: dict[str, list[dict[str, Any]]] = {topic: [] for topic in topics}
    answers = get_transport(transport).offsets(sorted(topics), group)
    for place, offsets in sorted(answers.items()):
        places[place.topic].append({**place._asdict(), **offsets._asdict()})
    return places


def _add_lag(
    row: dict[str, Any], places: Mapping[str, list[dict[str, Any]]], error_text: str | None
) -> None:
    """Add to one queue the partitions of its topics and its lag.

    :param error_text: why they are not known, if they are not.
    """
    found = [place for topic in row["topics"] for place in places.get(topic, ())]
    by_partition = {_label(row, place): place["lag"] for place in found}
    row["partitions"] = found
    row["lag"] = sum(by_partition.values()) if error_text is None else None
    row["lag_by_partition"] = by_partition
    row["lag_error"] = error_text


def _label(row: dict[str, Any], place: dict[str, Any]) -> str:
    """Return what a partition is called among those of its queue: its number, and where the queue
    has levels of priority the topic of any but the normal one before it."""
    number = str(place["partition"])
    return number if place["topic"] == row["topic"] else f"{place['topic']}/{number}"
