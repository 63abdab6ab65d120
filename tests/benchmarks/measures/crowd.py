"""Jobs enqueued one by one, each in a transaction of its own, as fast as one process can while a
worker on the same machine runs them."""

from __future__ import annotations

import time
from datetime import datetime

from django.db.models import Max
from django.utils import timezone

from tests.benchmarks.completions import measured_jobs
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.measures import latency
from tests.ledger.jobs import no_op

WARM_UP = 50


def run(count: int) -> dict[str, float]:
    """Enqueue so many; the rate is that of who enqueues."""
    with latency.worker(tells_ends=False):
        _enqueue(WARM_UP)
        _last_end(WARM_UP)
        began = timezone.now()
        seconds = _enqueue(count)
        ended = _last_end(WARM_UP + count)
    return {
        "jobs_per_second": count / seconds,
        "ended_per_second": count / max((ended - began).total_seconds(), seconds),
    }


def _enqueue(count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        no_op.enqueue()
    return time.perf_counter() - began


def _last_end(count: int) -> datetime:
    """Wait until so many jobs have ended; return when the last one has."""
    deadline = time.monotonic() + latency.PATIENCE
    while (ended := measured_jobs().count()) < count:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{ended} of {count} jobs ended")
        time.sleep(0.05)
    last: datetime = measured_jobs().aggregate(last=Max("finished_at"))["last"]
    return last
