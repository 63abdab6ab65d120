"""The relay emptying the set of pending rows."""

from __future__ import annotations

import time

from kjo_django.outbox.relay import Relay
from kjo_django.runtime import close_backends
from tests.benchmarks.completions import measured_jobs
from tests.benchmarks.counters import Queries, Redis
from tests.benchmarks.errors import BenchmarkError


def run(count: int) -> dict[str, float]:
    """Publish ``count`` rows. The first batch, which connects, is left out."""
    queries, redis = Queries(), Redis()
    relay = Relay(["ledger"])
    cpu = time.process_time()
    first = relay.publish_due()
    start = time.perf_counter()
    while relay.publish_due():
        pass
    seconds = time.perf_counter() - start
    cpu_seconds, asked = time.process_time() - cpu, queries.count
    redis_figures = redis.figures(count)
    close_backends()
    queued = measured_jobs("queued").filter(partition__isnull=False).count()
    if relay.published_count != count or queued != count:
        raise BenchmarkError(f"{relay.published_count} published, {queued} queued, not {count}")
    if count <= first:
        raise BenchmarkError(f"{count} jobs fit one batch: too few to measure a rate")
    return {
        "jobs_per_second": (count - first) / seconds,
        "cpu_us_per_job": cpu_seconds / count * 1e6,
        "queries_per_job": asked / count,
        **redis_figures,
    }
