"""Other job queues on PostgreSQL alone, measured as ours is by `rates`, `crowd` and `enqueue`.

A peer's job is over when its handler runs; ours when its outcome is committed.
"""

from __future__ import annotations

import time

from tests.benchmarks.measures import latency
from tests.benchmarks.measures.rates import SETTLE, WARM_UP, Figures, Spent, servers
from tests.benchmarks.peers.timed import running


def rate(peer: str, rate: float, seconds: float) -> Figures:
    """Enqueue at an even rate while the peer's worker runs the jobs."""
    with running(peer) as side:
        assert side.worker is not None
        side.save(WARM_UP, rate)
        side.wait_for(WARM_UP)
        time.sleep(SETTLE)
        spent = Spent({"worker": side.worker.pid, "saver": side.saver.pid, **servers()})
        count = int(rate * seconds)
        side.save(count, rate)
        delays = [1000 * delay for delay, _ in side.wait_for(WARM_UP + count)[WARM_UP:]]
        return spent.figures(count) | latency.percentiles(delays)


def crowd(peer: str, count: int) -> Figures:
    """Enqueue one by one, as fast as it can, while the peer's worker runs the jobs."""
    with running(peer) as side:
        side.save(WARM_UP)
        side.wait_for(WARM_UP)
        began = time.monotonic()
        seconds = side.save(count)
        ended = max(at for _, at in side.wait_for(WARM_UP + count))
    return {
        "jobs_per_second": count / seconds,
        "ended_per_second": count / max(ended - began, seconds),
    }


def enqueue(peer: str, count: int) -> Figures:
    """Enqueue one by one, as fast as it can, with no worker."""
    with running(peer, has_worker=False) as side:
        side.save(WARM_UP)
        return {"jobs_per_second": count / side.save(count)}
