"""Figures over time, from the aggregates that workers write. Jobs are never counted for them.

A time of two hours is shown by the minute, a day by the quarter of an hour, a longer time by the
hour. So a chart reads some thousand rows at most, however many jobs ran.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from django.db.models import F, Min, Q, QuerySet, Sum

from kjo_django import registry
from kjo_django.clock import CLOCK
from kjo_django.conf import get_settings
from kjo_django.ids import ago
from kjo_django.models import BOUNDS, MetricBucket, MetricRollup, Worker
from kjo_django.operations.rows import streamed
from kjo_django.runtime import current_runtime, jobs_database

MINUTES = 5
"""The last whole minutes that a queue's rates are measured over."""
STEADY = 1.0
"""Records a minute. A lag that changes by less is steady."""
MOST = 10_000
_MINUTE = timedelta(minutes=1)
SETTLED = ("completed", "retried", "failed", "duplicate", "skipped")
SETTLED_ATTEMPTS = F("completed_count") + F("retried_count") + F("failed_count")
"""Attempts of jobs that have ended."""
COUNTERS = (*SETTLED, "unused_permit")
_SETTLED = functools.reduce(operator.add, (F(f"{name}_count") for name in SETTLED))


class Trend(enum.StrEnum):
    """How a lag changes."""

    GROWING = "growing"
    SHRINKING = "shrinking"
    STEADY = "steady"


def add_rates(rows: Iterable[dict[str, Any]]) -> None:
    """Add to each queue the records settled a minute, the lag's change a minute, and its trend.

    Settled are records that completed, will be retried, failed, were dropped or skipped. The change
    is None where the lag of fewer than two minutes is known. One query serves all queues.
    """
    whole = CLOCK.now().replace(second=0, microsecond=0)
    minutes = (
        MetricBucket.objects.using(jobs_database())
        .filter(minute__gte=whole - MINUTES * _MINUTE)
        .order_by("minute", "queue")
        .values_list("queue", "minute")
        .annotate(seen=Sum("lag"), done=Sum(_SETTLED))
    )
    settled: Counter[str] = Counter()
    lags: dict[str, list[tuple[datetime, int]]] = {}
    for queue, minute, lag, done in minutes[:MOST]:
        if minute < whole:
            settled[queue] += done or 0
        if lag is not None:
            lags.setdefault(queue, []).append((minute, lag))
    for row in rows:
        change, trend = None, None
        seen = lags.get(row["queue"], [])
        if len(seen) > 1:
            (since, first), (until, last) = seen[0], seen[-1]
            change = (last - first) / ((until - since) / _MINUTE)
            trend = Trend.GROWING if change > 0 else Trend.SHRINKING
            if abs(change) < STEADY:
                trend = Trend.STEADY
        row["per_minute"] = settled[row["queue"]] / MINUTES
        row["lag_per_minute"] = change
        row["lag_trend"] = trend


RATE_MINUTES = 2
"""The last whole minutes that the present rate is measured over."""
LAG_AGE = timedelta(minutes=3)
"""An older lag is not the present one, unless workers measure it more seldom."""


def _percentile_of(histogram: str, share: float) -> Any:
    return property(lambda figures: percentile(getattr(figures, histogram), share))


def _per_minute(counter: str) -> Any:
    return property(lambda point: getattr(point, counter) / point.minutes)


@dataclass(slots=True)
class Figures:
    """The jobs and records of some time. Times are in seconds, None where nothing was measured."""

    completed: int = 0
    retried: int = 0
    failed: int = 0
    duplicate: int = 0
    """Records dropped because they had taken effect before."""
    skipped: int = 0
    """Records for other services, and records that are not to run any more."""
    unused_permit: int = 0
    """Permits of a rate whose job did not start in time."""
    runs: list[int] = field(default_factory=lambda: [0] * BOUNDS, repr=False)
    waits: list[int] = field(default_factory=lambda: [0] * BOUNDS, repr=False)
    run_seconds: float = 0.0
    wait_seconds: float = 0.0

    run_p50 = _percentile_of("runs", 0.5)
    run_p95 = _percentile_of("runs", 0.95)
    run_p99 = _percentile_of("runs", 0.99)
    wait_p50 = _percentile_of("waits", 0.5)
    wait_p95 = _percentile_of("waits", 0.95)
    wait_p99 = _percentile_of("waits", 0.99)
    """The longest run time, or wait from due to started, of 50, 95 or 99 of 100 attempts."""

    def add(self, row: Any) -> None:
        """Add a row of the aggregates."""
        for name in COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(row, f"{name}_count"))
        # A row with the lag alone has no histograms. One of another length cannot be added.
        if len(row.run_histogram) == BOUNDS:
            self.runs = list(map(operator.add, self.runs, row.run_histogram))
        if len(row.wait_histogram) == BOUNDS:
            self.waits = list(map(operator.add, self.waits, row.wait_histogram))
        self.run_seconds += row.run_seconds_sum
        self.wait_seconds += row.wait_seconds_sum


@dataclass(slots=True)
class Point(Figures):
    """The figures of one interval of a series."""

    time: datetime = datetime.min
    """When it begins."""
    minutes: float = 1.0
    """Its length; the present interval is shorter."""
    lag: int | None = None

    completed_per_minute = _per_minute("completed")
    retried_per_minute = _per_minute("retried")
    """Attempts a minute that failed and will be repeated."""
    failed_per_minute = _per_minute("failed")
    """Jobs a minute that ended as dead letters."""


class Series(NamedTuple):
    """Evenly spaced points, the oldest first."""

    width: timedelta
    points: list[Point]


@dataclass(slots=True)
class Totals(Figures):
    """The figures of a time that ends now."""

    per_minute: float = 0.0
    """Jobs completed a minute, over the last whole minutes."""
    lag: int | None = None
    """As `present_lag` returns it."""


@dataclass(slots=True)
class Summary(Figures):
    """The figures of a queue or a handler."""

    sparkline: list[int] = field(default_factory=list)
    """Jobs completed in each minute, the oldest first."""


def series(length: timedelta, *, queue: str | None = None, handler: str | None = None) -> Series:
    """Return the figures of the time up to now, by interval. The last one has the present lag.

    :param queue: only this queue.
    :param handler: only this handler.
    """
    now = CLOCK.now()
    rows, width = _table(length)
    end = _floor(now, width) + width
    count = max(1, -(-length // width))
    start = end - count * width
    begins = [start + index * width for index in range(count)]
    # The present point is shorter than the others.
    points = [
        Point(time=begin, minutes=min(width, max(_MINUTE, now - begin)) / _MINUTE)
        for begin in begins
    ]
    if queue is not None:
        rows = rows.filter(queue=queue)
    if handler is not None:
        rows = rows.filter(handler=handler)
    for row in _rows(rows, start):
        index = (row.minute - start) // width
        if 0 <= index < count:
            point = points[index]
            point.add(row)
            if row.lag is not None:
                point.lag = (point.lag or 0) + row.lag
    if handler is None:
        # Not of every queue it has been measured in this interval yet.
        points[-1].lag = present_lag(queue)
    return Series(width, points)


def present_lag(queue: str | None = None) -> int | None:
    """Return the lag as workers measured it in the last three minutes, or in the last six
    heartbeats where these are longer. None: it is not known, or not of every queue that workers of
    this project subscribe to.

    :param queue: of this queue alone.
    """
    since = ago(CLOCK.now(), max(LAG_AGE, 6 * get_settings().heartbeat_interval))
    rows = MetricBucket.objects.using(jobs_database()).filter(lag__isnull=False, minute__gte=since)
    wanted = set(filter(current_runtime().holds, registry.consumed_queue_names()))
    if queue is not None:
        rows, wanted = rows.filter(queue=queue), {queue}
    lags = rows.order_by("minute").values_list("queue", "worker_id", "lag")[:MOST]
    latest = {(name, worker): lag or 0 for name, worker, lag in lags}
    return sum(latest.values()) if wanted <= {name for name, _ in latest} else None


def totals(length: timedelta, *, with_lag: bool = True) -> Totals:
    """Return the counts of the time up to now, and the present rate and lag; no percentiles.

    :param with_lag: whether to look for the lag, for which another query is needed.
    """
    now = CLOCK.now()
    rows, width = _table(length)
    whole = _floor(now, _MINUTE)
    since = whole - timedelta(minutes=RATE_MINUTES)
    present = Q(minute__gte=since, minute__lt=whole)
    wanted: dict[str, Any] = {name: Sum(f"{name}_count") for name in COUNTERS}
    is_by_minute = rows.model is MetricBucket and length >= timedelta(minutes=RATE_MINUTES + 1)
    if is_by_minute:
        wanted["present"] = Sum("completed_count", filter=present)
    sums = rows.filter(minute__gte=_floor(now - length, width)).aggregate(**wanted)
    if not is_by_minute:
        minutes = MetricBucket.objects.using(jobs_database()).filter(present)
        sums |= minutes.aggregate(present=Sum("completed_count"))
    rate = (sums["present"] or 0) / RATE_MINUTES
    found = Totals(per_minute=rate, lag=present_lag() if with_lag else None)
    for name in COUNTERS:
        setattr(found, name, sums[name] or 0)
    return found


def by_queue(length: timedelta = timedelta(hours=1)) -> dict[str, Summary]:
    """Return the figures of each queue over the time up to now, at most two hours."""
    return _summaries(length, "queue")


def by_handler(length: timedelta = timedelta(hours=1)) -> dict[str, Summary]:
    """Return the figures of each handler over the time up to now, at most two hours."""
    return {name: each for name, each in _summaries(length, "handler").items() if name}


def by_queue_and_handler(start: datetime) -> dict[tuple[str, str], Figures]:
    """Return the figures since a time for each queue and handler; read by the minute."""
    found: dict[tuple[str, str], Figures] = defaultdict(Figures)
    for row in _rows(MetricBucket.objects.using(jobs_database()).order_by(), start):
        found[row.queue, row.handler].add(row)
    return found


def deploys(length: timedelta) -> list[dict[str, Any]]:
    """Return the ``release`` and the ``time`` of its first start, for each release whose first
    worker started in the time up to now, the oldest first."""
    rows = Worker.objects.using(jobs_database()).exclude(release="").order_by()
    starts = rows.values("release").annotate(time=Min("started_at"))
    found = starts.filter(time__gte=CLOCK.now() - length).order_by("time")[:50]
    return [{**row} for row in found]


def percentile(histogram: Sequence[int], share: float) -> float | None:
    """Return the seconds below which a share of the measurements lies, estimated within its bound.

    What lies beyond the last bound counts as that bound.
    """
    total = sum(histogram)
    if not total:
        return None
    wanted = share * total
    below = 0
    for index, count in enumerate(histogram):
        if count and below + count >= wanted:
            upper = 0.001 * 2**index
            lower = upper / 2 if index else 0.0
            return (
                lower if index == BOUNDS - 1 else lower + (upper - lower) * (wanted - below) / count
            )
        below += count
    return None


# --- Details --------------------------------------------------------------------------------------

_COLUMNS = (
    *("minute", "queue", "handler", "lag", "run_histogram", "wait_histogram"),
    *("run_seconds_sum", "wait_seconds_sum"),
    *(f"{name}_count" for name in COUNTERS),
)


def _table(length: timedelta) -> tuple[QuerySet[Any], timedelta]:
    """Return the aggregates fine enough for a time, and how long each is."""
    using = jobs_database()
    if length <= timedelta(hours=2):
        return MetricBucket.objects.using(using).order_by(), timedelta(minutes=1)
    minutes = MetricRollup.QUARTER if length <= timedelta(days=1) else MetricRollup.HOUR
    rows = MetricRollup.objects.using(using).filter(minutes=minutes).order_by()
    return rows, timedelta(minutes=minutes)


def _rows(rows: QuerySet[Any], start: datetime) -> Iterable[Any]:
    found = rows.filter(minute__gte=start).values_list(*_COLUMNS, named=True)
    # Of the minutes of many workers there may be a lot. Roll-ups are merged.
    return found if rows.model is MetricRollup else streamed(found, chunk_size=5000)


def _summaries(length: timedelta, by: str) -> dict[str, Summary]:
    minute, count = _MINUTE, min(120, max(1, -(-length // _MINUTE)))
    start = _floor(CLOCK.now(), minute) + minute - count * minute
    found: dict[str, Summary] = defaultdict(lambda: Summary(sparkline=[0] * count))
    rows = MetricBucket.objects.using(jobs_database()).order_by()
    for row in _rows(rows, start):
        summary = found[getattr(row, by)]
        summary.add(row)
        index = (row.minute - start) // minute
        if 0 <= index < count:
            summary.sparkline[index] += row.completed_count
    return dict(found)  # a screen's cache pickles it


def _floor(moment: datetime, width: timedelta) -> datetime:
    seconds = int(width.total_seconds())
    return datetime.fromtimestamp(int(moment.timestamp()) // seconds * seconds, UTC)
