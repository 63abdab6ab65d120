"""Jobs enqueued one by one, each in a transaction of its own, as fast as one process can while a
worker on the same machine runs them."""

from __future__ import annotations

import time

from tests.benchmarks.measures import latency
from tests.ledger.jobs import no_op

WARM_UP = 50


def run(count: int) -> dict[str, float]:
    """Enqueue so many; the rate is that of who enqueues."""
    with latency.worker() as (_, answers):
        for _ in range(WARM_UP):
            no_op.enqueue()
        answers.wait_for(WARM_UP)
        began = time.monotonic()
        for _ in range(count):
            no_op.enqueue()
        saved = time.monotonic()
        ended = max(answers.wait_for(WARM_UP + count).values())
    return {
        "jobs_per_second": count / (saved - began),
        "ended_per_second": count / (max(ended, saved) - began),
    }
