"""The metrics and their text format. Every query is bounded: rows of this hour, or counts that
stop at a limit."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import Count, Max, Min, Q, QuerySet, Sum
from django.utils import timezone

from kjo_django import registry
from kjo_django.ids import uuid7_floor
from kjo_django.logs import get_logger
from kjo_django.models import (
    BOUNDS,
    DeadLetter,
    DeadLetterReason,
    DeadLetterState,
    HeldJob,
    Job,
    Schedule,
)
from kjo_django.operations.monitoring import metrics, status
from kjo_django.operations.monitoring.health import lag_by_partition
from kjo_django.operations.queues import overview
from kjo_django.runtime import current_runtime, get_coordination, jobs_database
from kjo_django.store.counting import COUNT_LIMIT, grouped_counts, seconds_since
from kjo_django.worker.sessions import PREFIX
from kjo_django.workflows import lists

logger = get_logger("kjo_django")

PRODUCTION_WINDOW = timedelta(seconds=60)
"""Seconds over which the production rate is measured."""
MOST_NAMES = 200
"""Most names of workflows, with their states, and most names of schedules that are labels."""
PRODUCTION_ROWS = 10_000
"""Most jobs that are measured for the rate. With more, the time they took is shorter than the
window.
"""

LE = tuple(0.001 * 2**n for n in range(BOUNDS - 1))
"""Upper bounds of the histograms in seconds; the last of the stored counts is open."""

_COUNTERS = {
    "completed": ("kjo_jobs_completed_total", "Jobs completed"),
    "retried": ("kjo_jobs_retried_total", "Attempts that failed and are tried again"),
    "failed": ("kjo_jobs_failed_total", "Jobs that failed for good"),
    "duplicate": ("kjo_jobs_duplicate_total", "Deliveries without effect: done before"),
    "skipped": ("kjo_jobs_skipped_total", "Records meant for others, or not to be run"),
    "unused_permit": ("kjo_permits_unused_total", "Permits of a rate not used in time"),
}
_SINCE = "this hour (UTC), all workers together"


def collect(timeout: float) -> list[Family]:
    """Measure everything.

    :param timeout: seconds that servers other than the database have in all. Without an answer
        their metrics are left out, and ``kjo_collected`` is 0.
    """
    deadline = time.monotonic() + timeout
    now = timezone.now()
    queues = overview()
    names = [row["queue"] for row in queues]
    lag, has_lag = _lag(deadline)
    memory, has_memory = _redis_memory(deadline)
    collected = Family("kjo_collected", "gauge", "1 where it answered this time, 0 where not.")
    collected.add(has_lag, part="lag")
    collected.add(has_memory, part="redis")
    return [
        *_executions(now),
        _production(now, names),
        lag,
        *_queues(now, queues),
        *_deaths(now, names),
        *_relay(now),
        *_workers(now),
        *_workflows(now),
        *_schedules(now),
        *_held(now, names),
        memory,
        _sessions(),
        collected,
    ]


# --- What workers did: the minute aggregates of this hour ---------------------------------------


def _executions(now: datetime) -> Iterable[Family]:
    """Yield the counters of this hour.

    They begin at 0 with each hour, which Prometheus takes for a restart. So 60 rows at most are
    read for each handler and worker, and pruning does not lower a counter. Every handler is listed
    from the start, or the first failure of an hour would be missed.
    """
    done = metrics.by_queue_and_handler(_hour(now))
    holds = current_runtime().holds
    for handler in (each for each in registry.handlers() if holds(each.options.queue)):
        done.setdefault((handler.options.queue, handler.name), metrics.Figures())
    found = sorted(done.items(), key=lambda item: item[0])
    for counter, (name, meaning) in _COUNTERS.items():
        family = Family(name, "counter", f"{meaning}, {_SINCE}.")
        for (queue, handler_name), figures in found:
            family.add(getattr(figures, counter), queue=queue, handler=handler_name)
        yield family
    run = Family("kjo_job_run_seconds", "histogram", f"Run times of attempts, {_SINCE}.")
    wait = Family("kjo_job_wait_seconds", "histogram", f"Times from due to started, {_SINCE}.")
    for (queue, handler_name), figures in found:
        labels = {"queue": queue, "handler": handler_name}
        run.add_histogram(LE, figures.runs, figures.run_seconds, **labels)
        wait.add_histogram(LE, figures.waits, figures.wait_seconds, **labels)
    yield run
    yield wait


def _hour(now: datetime) -> datetime:
    return now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


# --- What is there now --------------------------------------------------------------------------


def _production(now: datetime, names: Sequence[str]) -> Family:
    family = Family("kjo_production_rate", "gauge", "Jobs stored a second, of the last minute.")
    since = now - PRODUCTION_WINDOW
    rows = Job.objects.using(jobs_database()).filter(pk__gte=uuid7_floor(since)).order_by("-pk")
    groups, is_capped = grouped_counts(rows, ("queue",), oldest="created_at", limit=PRODUCTION_ROWS)
    if is_capped:
        since = min(oldest for _, oldest in groups.values() if oldest is not None)
    # Jobs may be stored while this is counted: never divide by next to nothing.
    seconds = max((now - since).total_seconds(), 0.1)
    rates = {queue: round(count / seconds, 3) for (queue,), (count, _) in groups.items()}
    for queue in sorted({*names, *rates}):
        family.add(rates.get(queue, 0.0), queue=queue)
    return family


def _lag(deadline: float) -> tuple[Family, bool]:
    family = Family("kjo_consumer_lag", "gauge", "Messages a queue's consumer group is behind.")
    found = lag_by_partition(_left(deadline))
    for queue, partitions in (found or {}).items():
        for partition, count in partitions.items():
            family.add(count, queue=queue, partition=partition)
    return family, found is not None


def _queues(now: datetime, queues: Sequence[dict[str, Any]]) -> Iterable[Family]:
    waiting = status.due(now)
    letters, _ = status.open_dead_letters()
    since = Family("kjo_oldest_waiting_seconds", "gauge", "Since when the oldest due job waits.")
    dead = Family("kjo_dead_letters_open", "gauge", f"Open dead letters, at most {COUNT_LIMIT}.")
    dead_since = Family(
        "kjo_dead_letters_oldest_seconds", "gauge", "Age of the oldest open dead letter."
    )
    due = Family(
        "kjo_jobs_due", "gauge", "Due jobs that are not done, the running ones among them."
    )
    paused = Family("kjo_queue_paused", "gauge", "1 while an operator paused the queue.")
    for queue in sorted({*(row["queue"] for row in queues), *letters}):
        count, due_since = waiting.get(queue, (0, None))
        since.add(seconds_since(due_since, now) or 0.0, queue=queue)
        due.add(count, queue=queue)
        count, failed_at = letters.get(queue, (0, None))
        dead.add(count, queue=queue)
        dead_since.add(seconds_since(failed_at, now) or 0.0, queue=queue)
    for row in queues:
        paused.add(int(row["is_paused"]), queue=row["queue"])
    return since, due, dead, dead_since, paused


def _deaths(now: datetime, names: Sequence[str]) -> Iterable[Family]:
    """Yield the counters of the dead letters of this hour, newest first, up to a limit."""
    rows = DeadLetter.objects.using(jobs_database()).filter(pk__gte=uuid7_floor(_hour(now)))
    groups, _ = grouped_counts(rows.order_by("-pk"), ("queue", "reason", "state"))
    written = Family(
        "kjo_dead_letters_total", "counter", "Dead letters written this hour (UTC), by reason."
    )
    discarded = Family(
        "kjo_dead_letters_discarded_total",
        "counter",
        "Those of them that were discarded, by somebody or by max_kills.",
    )
    by_reason: dict[tuple[str, str], int] = defaultdict(int)
    by_queue: dict[str, int] = dict.fromkeys(names, 0)
    for (queue, reason, state), (count, _) in groups.items():
        by_reason[queue, reason] += count
        by_queue.setdefault(queue, 0)
        by_queue[queue] += count if state == DeadLetterState.DISCARDED else 0
    for queue in sorted(by_queue):
        discarded.add(by_queue[queue], queue=queue)
        for reason in DeadLetterReason.values:
            written.add(by_reason[queue, reason], queue=queue, reason=reason)
    return written, discarded


def _sessions() -> Family:
    """Yield the number of connections, on PostgreSQL only."""
    family = Family(
        "kjo_database_connections", "gauge", "Sessions of the jobs' PostgreSQL database."
    )
    counts = current_runtime().store.session_counts(PREFIX)
    if counts is not None:
        workers, others = counts
        family.add(workers, client="worker")
        family.add(others, client="other")
    return family


def _relay(now: datetime) -> Iterable[Family]:
    found = status.relay(now)
    backlog = Family(
        "kjo_outbox_backlog", "gauge", f"Due jobs not relayed yet, at most {COUNT_LIMIT}."
    )
    backlog.add(found["backlog"])
    age = Family("kjo_outbox_oldest_seconds", "gauge", "For how long the oldest of them is due.")
    age.add(found["oldest_seconds"] or 0.0)
    return backlog, age


def _workers(now: datetime) -> Iterable[Family]:
    alive = [worker for worker in status.workers(now) if worker["is_alive"]]
    count = Family("kjo_workers_alive", "gauge", "Worker processes with a fresh heartbeat.")
    count.add(len(alive))
    running = Family("kjo_jobs_running", "gauge", "Jobs that the live workers have in flight.")
    running.add(sum(worker["in_flight"] for worker in alive))
    lanes = Family("kjo_worker_lanes", "gauge", "Jobs the living workers can run at once.")
    lanes.add(sum(worker["concurrency"] for worker in alive))
    memory = Family("kjo_workers_memory_bytes", "gauge", "Memory of the living workers.")
    memory.add(sum(worker["memory_bytes"] or 0 for worker in alive))
    return count, running, lanes, memory


def _workflows(now: datetime) -> Iterable[Family]:
    """Yield the workflows that have not ended; those that await a replay wait for a person."""
    groups, _ = lists.open_by_name()
    count = Family(
        "kjo_workflows_open", "gauge", f"Workflows that have not ended, at most {COUNT_LIMIT}."
    )
    age = Family("kjo_workflows_oldest_seconds", "gauge", "Age of the oldest of them.")
    for (name, state), (number, created_at) in sorted(groups.items())[:MOST_NAMES]:
        count.add(number, workflow=name, state=state)
        age.add(seconds_since(created_at, now) or 0.0, workflow=name, state=state)
    return count, age


def _schedules(now: datetime) -> Iterable[Family]:
    rows = Schedule.objects.using(jobs_database())
    active = Q(is_enabled=True, is_paused=False, next_at__isnull=False)
    found = rows.aggregate(
        active=Count("pk", filter=active & Q(problem="")),
        paused=Count("pk", filter=Q(is_enabled=True, is_paused=True)),
        broken=Count("pk", filter=active & ~Q(problem="")),
        disabled=Count("pk", filter=Q(is_enabled=False)),
        due_at=Min("next_at", filter=active),
        last_at=Max("last_at"),
    )
    count = Family("kjo_schedules", "gauge", "Schedules by state.")
    for state in ("active", "paused", "broken", "disabled"):
        count.add(found[state], state=state)
    late = Family(
        "kjo_schedule_late_seconds", "gauge", "For how long the oldest tick that is due waits."
    )
    late.add(max(0.0, (now - found["due_at"]).total_seconds()) if found["due_at"] else 0.0)
    last = Family(
        "kjo_schedule_last_tick_timestamp_seconds", "gauge", "When the latest tick was stored."
    )
    last.add(found["last_at"].timestamp() if found["last_at"] else 0.0)
    return count, late, last, *_ticks(rows)


_TICKS = {
    "stored_count": ("kjo_schedule_ticks_total", "Ticks that have a job"),
    "late_count": (
        "kjo_schedule_ticks_late_total",
        "Ticks whose job was stored more than a second after them",
    ),
    "skipped_count": ("kjo_schedule_ticks_skipped_total", "Ticks that got no job"),
}


def _ticks(rows: QuerySet[Schedule]) -> Iterable[Family]:
    """Yield the counters of ticks by schedule. Of very many schedules, the last by name are counted
    together, under the name ""."""
    listed = list(rows.order_by("name").values("name", *_TICKS)[:MOST_NAMES])
    if len(listed) == MOST_NAMES:
        others = rows.filter(name__gt=listed[-1]["name"])
        sums = others.aggregate(**{column: Sum(column, default=0) for column in _TICKS})
        listed.append({"name": "", **sums})
    for column, (name, meaning) in _TICKS.items():
        family = Family(name, "counter", f"{meaning}, by schedule.")
        for row in listed:
            family.add(row[column], schedule=row["name"])
        yield family


def _held(now: datetime, names: Sequence[str]) -> Iterable[Family]:
    """Yield the jobs that wait for a rate or a slot."""
    rows = HeldJob.objects.using(jobs_database()).order_by("pk")
    groups, _ = grouped_counts(rows, ("queue",), oldest="waiting_since")
    count = Family("kjo_jobs_held", "gauge", f"Jobs that wait for a limit, at most {COUNT_LIMIT}.")
    since = Family("kjo_jobs_held_oldest_seconds", "gauge", "For how long the first has waited.")
    for queue in sorted({*names, *(name for (name,) in groups)}):
        number, waiting_since = groups.get((queue,), (0, None))
        count.add(number, queue=queue)
        since.add(seconds_since(waiting_since, now) or 0.0, queue=queue)
    return count, since


def _redis_memory(deadline: float) -> tuple[Family, bool]:
    """Yield the memory of Redis, if it coordinates; without Redis there is no metric and no
    failure.
    """
    family = Family("kjo_redis_memory_bytes", "gauge", "Memory in use of the coordination's Redis.")
    memory_bytes = getattr(get_coordination(), "memory_bytes", None)
    if memory_bytes is None:
        return family, True
    try:
        family.add(memory_bytes(_left(deadline)))
    except Exception as error:
        logger.warning("The memory of Redis cannot be asked for: %s", error)
        return family, False
    return family, True


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


# --- The text format of Prometheus, version 0.0.4 -------------------------------------------------


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class Family:
    """A metric: name, kind, help text and samples."""

    name: str
    kind: str
    """``counter``, ``gauge`` or ``histogram``."""
    help: str
    samples: list[tuple[str, dict[str, str], float]] = field(default_factory=list)
    """Of each the suffix of its name, its labels and its value."""

    def add(self, value: float, suffix: str = "", **labels: str) -> None:
        """Add a sample."""
        self.samples.append((suffix, labels, value))

    def add_histogram(
        self, bounds: Sequence[float], counts: Sequence[int], summed: float, **labels: str
    ) -> None:
        """Add the samples of a histogram.

        :param counts: by bucket, not cumulated; one more than there are bounds, the last one open.
        :param summed: the sum of all observations.
        """
        total = 0
        for bound, count in zip((*bounds, None), counts, strict=True):
            total += count
            le = "+Inf" if bound is None else repr(bound)
            self.add(total, "_bucket", **labels, le=le)
        self.add(summed, "_sum", **labels)
        self.add(total, "_count", **labels)


def render(families: Iterable[Family]) -> str:
    """Return the page."""
    return "".join(line + "\n" for family in families for line in _lines(family))


def _lines(family: Family) -> Iterable[str]:
    yield f"# HELP {family.name} {_escape(family.help)}"
    yield f"# TYPE {family.name} {family.kind}"
    for suffix, labels, value in family.samples:
        pairs = ",".join(f'{name}="{_escape(text, quote=True)}"' for name, text in labels.items())
        name = f"{family.name}{suffix}"
        # True is 1 here.
        yield f"{name}{{{pairs}}} {+value!r}" if pairs else f"{name} {+value!r}"


def _escape(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
