"""What a worker did and how it is: totals for its status, minute buckets for the screens, outages,
memory."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from django.db.models import Count, QuerySet

from kjo_django.clock import CLOCK
from kjo_django.conf import QueueConf
from kjo_django.engine.attempt import Attempt, Delivery, Ending
from kjo_django.engine.failures import failure_of
from kjo_django.logs import get_logger
from kjo_django.models import BOUNDS, UPPER_MILLISECONDS, MetricBucket, MetricRollup
from kjo_django.runtime import Runtime
from kjo_django.worker.duties import LeasedDuty, PeriodicDuty

logger = get_logger("kjo_django")

_COUNTERS: dict[Ending | None, str] = {
    Ending.COMPLETED: "completed_count",
    Ending.RETRIED: "retried_count",
    Ending.DEAD: "failed_count",
    Ending.DUPLICATE: "duplicate_count",
    Ending.SKIPPED: "skipped_count",
}
_RAN = (Ending.COMPLETED, Ending.RETRIED, Ending.DEAD)
_EMPTY = [0] * BOUNDS
_Buckets = defaultdict[tuple[datetime, str, str], "_Bucket"]


@dataclass(slots=True)
class _Bucket:
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    runs: list[int] = field(default_factory=lambda: [0] * BOUNDS)
    waits: list[int] = field(default_factory=lambda: [0] * BOUNDS)
    run_seconds: float = 0.0
    wait_seconds: float = 0.0

    def add(self, other: _Bucket) -> None:
        for name, count in other.counts.items():
            self.counts[name] += count
        self.runs, self.waits = _sum(self.runs, other.runs), _sum(self.waits, other.waits)
        self.run_seconds += other.run_seconds
        self.wait_seconds += other.wait_seconds


class Statistics(PeriodicDuty):
    """Counts what a worker did, and adds it to the worker's rows once a heartbeat. Thread-safe."""

    def __init__(self, runtime: Runtime, worker_id: UUID) -> None:
        super().__init__(runtime, runtime.settings.heartbeat_interval.total_seconds())
        self._worker_id = worker_id
        self._lock = threading.Lock()
        self._buckets: _Buckets = defaultdict(_Bucket)
        """What has come since the last flush, by minute, queue and handler."""
        self._started = self._clock.monotonic()
        self.started_at = self._clock.now()
        self.processed = 0
        self.failed = 0
        self.retried = 0
        self.last_error = ""
        self.last_error_at: datetime | None = None

    def add(self, attempts: Sequence[Attempt]) -> None:
        """Count attempts that are durable."""
        now = self._clock.now()
        minute = now.replace(second=0, microsecond=0)
        with self._lock:
            for attempt in attempts:
                delivery, ending = attempt.delivery, attempt.ending
                counter = _COUNTERS.get(ending)
                if counter is None:
                    continue
                bucket = self._buckets[minute, delivery.queue.name, delivery.kind]
                bucket.counts[counter] += 1
                self.processed += ending in _RAN
                self.failed += ending is Ending.DEAD
                self.retried += ending is Ending.RETRIED
                if attempt.error is not None:
                    self.last_error = failure_of(attempt).shown_text
                    self.last_error_at = now
                if attempt.started_at is None:
                    continue
                bucket.runs[bisect_right(UPPER_MILLISECONDS, attempt.seconds * 1000)] += 1
                bucket.run_seconds += attempt.seconds
                due = attempt.row.available_at if attempt.row else delivery.record.timestamp
                if due is not None:
                    # A clock that stepped back counts as no time: a sum never falls.
                    waited = max(0.0, (attempt.started_at - due).total_seconds())
                    bucket.waits[bisect_right(UPPER_MILLISECONDS, waited * 1000)] += 1
                    bucket.wait_seconds += waited

    def totals(self) -> tuple[int, int, int]:
        """Return how many attempts have run, how many of them died, and how many are retried."""
        with self._lock:
            return self.processed, self.failed, self.retried

    def skip(self, queue: QueueConf) -> None:
        """Count a record that was meant for others."""
        minute = self._clock.now().replace(second=0, microsecond=0)
        with self._lock:
            self._buckets[minute, queue.name, ""].counts[_COUNTERS[Ending.SKIPPED]] += 1

    def note_unused_permit(self, delivery: Delivery) -> None:
        """Count a permit of a rate with which a delivery did not start in time."""
        minute = self._clock.now().replace(second=0, microsecond=0)
        with self._lock:
            bucket = self._buckets[minute, delivery.queue.name, delivery.kind]
            bucket.counts["unused_permit_count"] += 1

    @property
    def uptime(self) -> float:
        """Seconds since the worker started."""
        return self._clock.monotonic() - self._started

    def flush(self) -> None:
        """Add what has come since the last flush to this worker's rows."""
        with self._lock:
            buckets, self._buckets = self._buckets, defaultdict(_Bucket)
        if not buckets:
            return
        try:
            with self._runtime.store.writing():
                for key, bucket in buckets.items():
                    self._write(key, bucket)
        except Exception:
            with self._lock:
                for key, bucket in buckets.items():
                    self._buckets[key].add(bucket)
            raise

    work = close = flush

    def _write(self, key: tuple[datetime, str, str], bucket: _Bucket) -> None:
        minute, queue, handler = key
        using = self._runtime.database
        which = {"queue": queue, "handler": handler, "worker_id": self._worker_id}
        _add_to_row(MetricBucket.objects.using(using), bucket, minute=minute, **which)
        for minutes in MetricRollup.LENGTHS:
            start = minute.replace(minute=minute.minute // minutes * minutes)
            rows = MetricRollup.objects.using(using).filter(minutes=minutes)
            _add_to_row(rows, bucket, minutes=minutes, minute=start, **which)


def _add_to_row(rows: QuerySet[Any], bucket: _Bucket, **which: Any) -> None:
    # Nobody else writes rows of this worker.
    row = rows.filter(**which).first() or rows.model(**which)
    for name, count in bucket.counts.items():
        setattr(row, name, getattr(row, name) + count)
    row.run_histogram = _sum(row.run_histogram or _EMPTY, bucket.runs)
    row.wait_histogram = _sum(row.wait_histogram or _EMPTY, bucket.waits)
    row.run_seconds_sum += bucket.run_seconds
    row.wait_seconds_sum += bucket.wait_seconds
    # One that was merged meanwhile is not made again: the next flush makes another.
    row.save(using=rows.db, force_update=not row._state.adding)


def _sum(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]


class RollupMerger(LeasedDuty):
    """Makes one row of the roll-ups of several workers, of each time that is over: what screens of
    days read does not depend on how many workers there are, nor on how often they are replaced.
    """

    leases = ("METRICS",)
    PAUSE = 300.0
    AFTER = timedelta(minutes=10)
    """How long after the end of its time a roll-up is merged: its worker has added what it counted.
    One that has been cut off for longer adds it to a new row, which is merged in its turn."""
    MOST = 500
    """Rows that a round makes of each length at most, in a transaction each."""
    WORKER = UUID(int=0)
    """Stands for all workers."""

    def __init__(self, runtime: Runtime, token: str) -> None:
        super().__init__(runtime, token, self.PAUSE)

    def work_on(self, leases: list[str]) -> None:
        """Merge."""
        for minutes in MetricRollup.LENGTHS:
            until = self._clock.now() - self.AFTER - timedelta(minutes=minutes)
            table = MetricRollup.objects.using(self._runtime.database)
            rows = table.filter(minutes=minutes, minute__lt=until)
            counted = rows.order_by().values_list(*_SPAN).annotate(Count("pk"))
            for *span, _ in counted.filter(pk__count__gt=1)[: self.MOST]:
                if self._is_stopping:
                    return
                which = dict(zip(_SPAN, span, strict=True)) | {"minutes": minutes}
                with self._runtime.store.writing():
                    alike = rows.filter(**which).order_by("pk").select_for_update()
                    self._merge(list(alike), which)

    def _merge(self, rows: Sequence[MetricRollup], which: Mapping[str, Any]) -> None:
        """Put a row with the sums of some in place of these. It is never one of them: whoever has
        read that adds to what is gone, and notices."""
        using = self._runtime.database
        total = MetricRollup(worker_id=self.WORKER, **which)
        for row in rows:
            for name in _SUMS:
                setattr(total, name, getattr(total, name) + getattr(row, name))
            for name in _HISTOGRAMS:
                counts = getattr(row, name) or _EMPTY
                setattr(total, name, _sum(getattr(total, name) or _EMPTY, counts))
            if row.lag is not None:
                total.lag = (total.lag or 0) + row.lag
        table = MetricRollup.objects.using(using).order_by()
        table.filter(pk__in=[row.pk for row in rows])._raw_delete(using)
        if rows:
            total.save(using=using, force_insert=True)


_SPAN = ("minute", "queue", "handler")
_SUMS = (*_COUNTERS.values(), "unused_permit_count", "run_seconds_sum", "wait_seconds_sum")
_HISTOGRAMS = ("run_histogram", "wait_histogram")


class OutageLog:
    """The outages of a worker's parts: each is logged once, and kept until its part says that it is
    over. Thread-safe, since each part notes its own from its own thread.

    :param on_error: called with each new one: the part, and its error.
    """

    def __init__(self, on_error: Callable[[str, str], None]) -> None:
        self._on_error = on_error
        self._errors: dict[str, tuple[str, datetime]] = {}

    def note(self, source: str, error: str | None, *, is_first: bool = False) -> None:
        """Note what a part has met, or with None that it works again.

        :param is_first: show it before those that were met before.
        """
        if error is None:
            self._errors.pop(source, None)
        elif self._errors.get(source, ("",))[0] != error:
            logger.error("%s: %s", source, error)
            met = {source: (error, CLOCK.now())}
            self._errors = met | self._errors if is_first else self._errors | met
            self._on_error(source, error)

    @property
    def error(self) -> str:
        """The error of the part that has had one for longest; empty where all work."""
        return next((error for error, _ in list(self._errors.values())), "")

    @property
    def began_at(self) -> datetime | None:
        """When that error was first met."""
        return next((began_at for _, began_at in list(self._errors.values())), None)


# --- Memory ---------------------------------------------------------------------------------------

_CGROUP_V2 = Path("/sys/fs/cgroup/memory.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes() -> int | None:
    """Return this process' resident memory, None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_limit(places: tuple[Path, ...] = (_CGROUP_V2, _CGROUP_V1)) -> int | None:
    """Return the container's limit in bytes, else the machine's memory; None: neither is known."""
    try:
        total: int | None = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        total = None
    for place in places:
        try:
            found = place.read_text().strip()
        except OSError:
            continue
        # Without a limit one says "max", the other a number beyond every machine.
        if found.isdigit() and (total is None or int(found) < total):
            return int(found)
    return total
