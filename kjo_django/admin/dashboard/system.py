"""The system: consumer groups, workers and their partitions; processed events; and the health
checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from operator import itemgetter
from typing import Any
from uuid import UUID

from django.http import HttpResponse
from django.utils import timezone
from django.utils.translation import get_language, gettext_lazy, ngettext
from django.utils.translation import gettext as _

from kjo_django.admin.dashboard.figures import number
from kjo_django.admin.dashboard.page import Page, Screen, shared
from kjo_django.admin.display import one_line, short_arguments
from kjo_django.conf import get_settings
from kjo_django.models import Job, ProcessedEvent, Worker
from kjo_django.operations import redaction
from kjo_django.operations.actions import Subject
from kjo_django.operations.monitoring import health, metrics
from kjo_django.operations.monitoring.health import shares_by_partition
from kjo_django.operations.monitoring.metrics import MINUTES, Trend, add_rates
from kjo_django.operations.monitoring.status import add_lags
from kjo_django.operations.monitoring.status import workers as known_workers
from kjo_django.operations.queues import overview
from kjo_django.operations.workers import Assignment, RunningJob, assignments, rebalanced_at
from kjo_django.runtime import jobs_database
from kjo_django.store.counting import seconds_since

SHOWN = 200
PARTITIONS_SHOWN = 500
"""Most partitions of one topic that are shown."""
RUNNING_SHOWN = 3
"""Most running jobs of one worker that are shown: those that have run longest."""
QUEUES_SHOWN = 3
"""Most queues of one worker that are shown at once; the others are behind a click."""
LAG_SECONDS = 5.0
EVENTS_SHOWN = 50
LONGEST_ID = 255
CHECKS_TIMEOUT = 4.0


@dataclass(frozen=True, slots=True)
class Member:
    """A worker of a group, and its partitions there."""

    worker: dict[str, Any]
    assignments: list[Assignment]

    @property
    def rebalanced_at(self) -> datetime | None:
        """When its partitions changed last, as far as its row says."""
        return rebalanced_at(self.assignments)

    def assignments_of(self, topic: str) -> list[Assignment]:
        """Return its partitions of a topic."""
        return [assignment for assignment in self.assignments if assignment.topic == topic]


def show_consumers(page: Page) -> HttpResponse:
    """Return groups and workers."""
    queues = shared("queues of groups", _queues, LAG_SECONDS)
    rows = [Member(row, assignments(row["partitions"])) for row in shared("workers", known_workers)]
    living = [row for row in rows if row.worker["is_alive"]]
    groups = _groups(queues, living)
    return page.show(
        "consumers.html",
        {
            "groups": [group for group in groups if group["is_log"]],
            "shared_topics": [
                topic for group in groups if not group["is_log"] for topic in group["topics"]
            ],
            "workers": [_worker(page, row) for row in sorted(rows, key=_order)[:SHOWN]],
            "shown": SHOWN,
            "minutes": MINUTES,
            "summary": ngettext("%d worker is alive", "%d workers are alive", len(living))
            % len(living),
        },
        title=_("Consumers") if page.has_log else _("Workers"),
    )


def _queues() -> list[dict[str, Any]]:
    rows = overview()
    add_lags(rows)
    add_rates(rows)
    return rows


# --- Workers --------------------------------------------------------------------------------------


def _order(row: Member) -> tuple[bool, str]:
    return not row.worker["is_alive"], row.worker["name"]


def _worker(page: Page, row: Member) -> dict[str, Any]:
    worker = row.worker
    running = sorted(
        (job for each in row.assignments for job in each.running), key=lambda job: job.started_at
    )
    return {
        **worker,
        # Of a job, which may quote its payload.
        "last_error": worker["last_error"] if page.may("view_payload") else None,
        "state_label": Worker.State(worker["state"]).label,
        "queues_shown": worker["queues"][:QUEUES_SHOWN],
        "queues_hidden": worker["queues"][QUEUES_SHOWN:],
        "request_label": Worker.Request(worker["asked_to"] or "").label,
        "buttons": page.buttons(
            Subject.WORKERS, worker["asked_to"] or worker["state"], worker["id"], worker["name"]
        ),
        "running": [_running(page, job) for job in running[:RUNNING_SHOWN]],
    }


def _running(page: Page, job: RunningJob) -> dict[str, Any]:
    try:
        url = page.url("job", UUID(job.id)) if page.may("view_job") else ""
    except ValueError:  # the id of a message that nobody enqueued here
        url = ""
    return {
        "handler": job.handler or job.id,
        "url": url,
        "seconds": seconds_since(job.started_at, timezone.now()),
    }


# --- Groups ---------------------------------------------------------------------------------------


def _groups(queues: Iterable[dict[str, Any]], living: Sequence[Member]) -> list[dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for queue in queues:
        groups.setdefault(queue["consumer_group"], []).append(queue)
    return [_group(name, of_group, living) for name, of_group in sorted(groups.items())]


def _group(name: str, queues: list[dict[str, Any]], living: Sequence[Member]) -> dict[str, Any]:
    by_topic: dict[str, list[dict[str, Any]]] = {}
    for queue in queues:
        for topic in queue["topics"]:
            by_topic.setdefault(topic, []).append(queue)
    names = {queue["queue"] for queue in queues}
    members = [
        Member(row.worker, [each for each in row.assignments if _is_of(each, name, by_topic)])
        for row in living
        if not row.worker["queues"] or names & set(row.worker["queues"])
    ]
    topics = [_topic(topic, sharing, members) for topic, sharing in by_topic.items()]
    lags = [topic["lag"] for topic in topics]
    return {
        "name": name,
        "is_log": any(map(itemgetter("is_log"), topics)),
        "lag": None if None in lags else sum(lags),
        "members": sorted(members, key=_order),
        "rebalanced_at": rebalanced_at([each for member in members for each in member.assignments]),
        "topics": topics,
    }


def _is_of(assignment: Assignment, group: str, topics: Iterable[str]) -> bool:
    """Return whether a row is of the group; rows of an older release do not name it."""
    return assignment.topic in topics and assignment.group in (group, None)


def _topic(topic: str, queues: list[dict[str, Any]], members: Sequence[Member]) -> dict[str, Any]:
    """Return the figures of a group's topic. Queues that share the topic share its partitions and
    its lag.
    """
    first = queues[0]
    holders: dict[int, list[tuple[Assignment, Member]]] = {}
    for member in members:
        for each in member.assignments_of(topic):
            holders.setdefault(each.partition, []).append((each, member))
    is_paused = any(queue["is_paused"] for queue in queues)
    has_one_owner = shares_by_partition(get_settings().queue(first["queue"]))
    known = {each["partition"]: each for each in first["partitions"] if each["topic"] == topic}
    numbers = sorted(known.keys() | holders.keys())
    held = [*chain.from_iterable(holders.values())]
    return {
        "name": topic,
        "is_log": has_one_owner,
        "queues": [queue["queue"] for queue in queues if queue["queue"] != topic],
        # Of a topic without partitions of its workers' own:
        "shown_queues": [queue["queue"] for queue in queues],
        "state": _state(held, is_paused),
        "owners": sorted({*_owners(held)}),
        "lag": None if first["lag"] is None else sum(each["lag"] for each in known.values()),
        "lag_error": first["lag_error"],
        "trend": _trend(first),
        "is_growing": first["lag_trend"] == Trend.GROWING,
        "per_minute": sum(queue["per_minute"] for queue in queues),
        "partitions": [
            _partition(number, known.get(number), holders.get(number, ()), is_paused, has_one_owner)
            for number in numbers[:PARTITIONS_SHOWN]
        ],
        "hidden_count": max(0, len(numbers) - PARTITIONS_SHOWN),
    }


def _partition(
    number: int,
    offsets: dict[str, Any] | None,
    holders: Sequence[tuple[Assignment, Member]],
    is_paused: bool,
    has_one_owner: bool,
) -> dict[str, Any]:
    # The last to be given a partition has it: of one that was killed the row says so for a while.
    holders = sorted(holders, key=_given_at, reverse=True)[: 1 if has_one_owner else None]
    return {
        "number": number,
        **(offsets or {"lag": None, "committed": None, "end": None}),
        "state": _state(holders, is_paused),
        "owners": _owners(holders),
        "rebalanced_at": rebalanced_at([each for each, _member in holders]),
    }


def _owners(holders: Iterable[tuple[Assignment, Member]]) -> list[str]:
    return [member.worker["name"] for _each, member in holders]


def _given_at(holder: tuple[Assignment, Member]) -> float:
    at = holder[0].rebalanced_at
    return at.timestamp() if at is not None else 0.0


def _state(holders: Sequence[tuple[Assignment, Member]], is_paused: bool) -> tuple[str, Any]:
    """Return the kind of the state, which has its colour, and its label."""
    now = timezone.now()
    if is_paused:
        return "paused", _("Paused")
    if any(each.resting_until is not None and each.resting_until > now for each, _m in holders):
        return "paused", _("Paused by an error")
    states = {member.worker["state"] for _each, member in holders}
    if not states:
        return "", ""
    if Worker.State.RUNNING in states:
        return "alive", _("Running")
    state = Worker.State(states.pop())
    return state.value, state.label


def _trend(queue: dict[str, Any]) -> str:
    change = queue["lag_per_minute"]
    if change is None:
        return ""
    if queue["lag_trend"] == Trend.STEADY:
        return _("steady")
    words = (
        _("growing by %s a minute")
        if queue["lag_trend"] == Trend.GROWING
        else _("shrinking by %s a minute")
    )
    return words % number(round(abs(change), 1))


# --- Processed events -----------------------------------------------------------------------------


def show_events(page: Page) -> HttpResponse:
    """Return the newest events, or those of one id."""
    wanted = page.request.GET.get("id", "").strip()[:LONGEST_ID].replace("\0", "")
    day = shared("totals of a day", lambda: metrics.totals(timedelta(days=1), with_lag=False), 5)
    return page.show(
        "events.html",
        {"rows": _events(page, wanted), "wanted": wanted, "totals": day, "shown": EVENTS_SHOWN},
        controls="events_form.html",
        title=_("Events"),
    )


def _events(page: Page, wanted: str) -> list[dict[str, Any]]:
    """Return the newest events, or those of one id, each with the job that it is of."""
    sees_payloads = page.may("view_payload")
    found = ProcessedEvent.objects.using(jobs_database()).order_by("-pk")
    found = found if sees_payloads else found.defer("event_data")
    rows = list((found.filter(event_id=wanted) if wanted else found)[:EVENTS_SHOWN])
    jobs = _jobs_of(rows)
    arguments = short_arguments(list(jobs.values())) if sees_payloads else {}
    return [
        {
            "event_id": row.event_id,
            "event_type": row.event_type,
            "service_name": row.service_name,
            "processed_at": row.processed_at,
            "is_job": row.event_id in jobs,
            "arguments": _arguments(row, jobs, arguments) if sees_payloads else None,
            "url": page.url("job", jobs[row.event_id].pk)
            if row.event_id in jobs and page.may("view_job")
            else "",
        }
        for row in rows
    ]


def _jobs_of(rows: Iterable[ProcessedEvent]) -> dict[str, Job]:
    """Return by the id of an event the job whose effect it was, where that is still known."""
    keys: dict[str, UUID] = {}
    for row in rows:
        with suppress(ValueError):
            keys[row.event_id] = UUID(row.event_id.partition(":")[0])
    columns = ("pk", "handler", "content_type")
    jobs = Job.objects.using(jobs_database()).only(*columns).in_bulk({*keys.values()})
    return {id: jobs[key] for id, key in keys.items() if key in jobs}


def _arguments(row: ProcessedEvent, jobs: dict[str, Job], arguments: dict[Any, str]) -> str | None:
    """Return the arguments of an event's job, or its own data, on one line; None if it has none."""
    if row.event_id in jobs:
        return arguments.get(jobs[row.event_id].pk)
    if row.event_data is None:
        return None
    return one_line(redaction.redacted(row.event_data, also=redaction.hidden_by(row.event_type)))


# --- Status ---------------------------------------------------------------------------------------


def show_status(page: Page) -> HttpResponse:
    """Return every check."""
    checks: list[health.Check] = shared(
        f"status:{get_language()}", lambda: health.health(CHECKS_TIMEOUT), CHECKS_TIMEOUT
    )
    broken = sum(not check.ok and not check.is_unknown for check in checks)
    unknown = sum(check.is_unknown for check in checks)
    summary = _("Every check passes")
    if broken:
        summary = ngettext("%d check fails", "%d checks fail", broken) % broken
    elif unknown:
        text = ngettext("No check fails, %d is unknown", "No check fails, %d are unknown", unknown)
        summary = text % unknown
    return page.show("status.html", {"checks": checks, "summary": summary}, title=_("Status"))


SCREENS = (
    Screen(
        "consumers", "consumers/", show_consumers, title=gettext_lazy("Consumers"), model="worker"
    ),
    Screen(
        "events",
        "events/",
        show_events,
        "view_processedevent",
        title=gettext_lazy("Events"),
        model="processedevent",
    ),
    Screen("status", "status/", show_status, title=gettext_lazy("Status")),
)
