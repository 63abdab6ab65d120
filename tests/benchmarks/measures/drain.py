"""One worker process emptying its topic."""

from __future__ import annotations

import time
from typing import Any

from kjo_django.worker.process import Worker
from tests.benchmarks import completions
from tests.benchmarks.counters import Clock, Queries, Redis, resident_megabytes
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.jobs import Flight

PATIENCE = 60.0
"""Seconds without a completion after which the worker is given up."""


class Watch:
    """Asked by the worker's main thread a few times a second whether it may stop."""

    def __init__(self, worker: Worker, count: int) -> None:
        self._worker = worker
        self._count = count
        self._moved_at = time.monotonic()
        self._seen = 0
        self.memory: list[tuple[int, float]] = []

    @property
    def processed(self) -> int:
        """Jobs whose outcome is durable."""
        return self._worker.statistics.processed

    def is_done(self) -> bool:
        """Whether all jobs are through; looks at the memory too."""
        processed, now = self.processed, time.monotonic()
        self.memory.append((processed, resident_megabytes()))
        if processed != self._seen:
            self._seen, self._moved_at = processed, now
        if now - self._moved_at > PATIENCE:
            raise BenchmarkError(
                f"The worker stood still at {processed} of {self._count} jobs: "
                f"{self._worker.last_error or 'no error was reported'}"
            )
        return processed >= self._count


def run(workload: str, count: int, concurrency: int | None = None) -> dict[str, Any]:
    """Drain ``count`` jobs whose messages are on the topic already."""
    queries, redis = Queries(), Redis()
    before = resident_megabytes()
    worker = Worker(["ledger"], concurrency=concurrency, relay=False)
    watch = Watch(worker, count)
    clock = Clock()
    code = worker.run(until=watch.is_done)
    asked, redis_figures = queries.count, redis.figures(count)
    if code != 0 or watch.processed < count:
        raise BenchmarkError(f"The worker ended with {code} after {watch.processed} jobs")
    return {
        **completions.figures(count, workload, clock),
        "queries_per_job": asked / count,
        **redis_figures,
        **_memory(before, watch.memory, count),
        **({"in_flight_peak": Flight.peak} if Flight.peak else {}),
        "series": {"memory_mb": _thinned(watch.memory)},
    }


def _memory(before: float, samples: list[tuple[int, float]], count: int) -> dict[str, float]:
    warm = next((size for done, size in samples if done >= count / 5), samples[-1][1])
    return {
        "rss_before_mb": before,
        "rss_at_a_fifth_mb": warm,
        "rss_after_mb": samples[-1][1],
        "rss_peak_mb": max(size for _, size in samples),
    }


def _thinned(samples: list[tuple[int, float]], most: int = 60) -> list[list[float]]:
    """Return so few of the samples that a picture can show each."""
    step = max(1, len(samples) // most)
    return [[done, round(size, 1)] for done, size in samples[::step]]
