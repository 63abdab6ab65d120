"""Jobs whose worker is some milliseconds away from its database, as in production: a lone job from
stored to finished, and many that write a row. Who stores them is near.

What a lone job takes longer for each millisecond more is the number of round trips that it waits
for one after the other.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psycopg

from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.measures import latency
from tests.ledger.jobs import no_op, write
from tests.services.delay import farther

WARM_UP = 5
APART = 0.3
"""Seconds between the end of a lone job and the next one."""
ADAPTED = 8.0
"""Seconds after which a worker has noticed how far its database is away."""


def run(each_way: float, lone: int, together: int) -> dict[str, float]:
    """Run lone jobs, then jobs that write a row and were stored at once.

    :param each_way: milliseconds of delay in each direction.
    """
    with (
        _away(each_way / 1000) as (url, round_trip),
        latency.worker(variables={"DATABASE_URL": url}) as (_, answers),
    ):
        _alone(WARM_UP, answers, 0)
        time.sleep(ADAPTED)
        took = _alone(lone, answers, WARM_UP)
        done = WARM_UP + lone
        write.enqueue_many([{"job": f"job-{number}"} for number in range(together)])
        stored = time.monotonic()
        ended = max(answers.wait_for(done + together).values())
    figures = latency.percentiles([seconds * 1000 for seconds in took])
    return {
        **figures,
        "round_trip_ms": round_trip * 1000,
        "together_seconds": ended - stored,
        "jobs_per_second": together / (ended - stored),
    }


def _alone(count: int, answers: latency.Answers, before: int) -> list[float]:
    """Run jobs one after the other; return the seconds of each from stored to its durable end."""
    took = []
    for number in range(1, count + 1):
        id = str(no_op.enqueue().job_id)
        stored = time.monotonic()
        took.append(answers.wait_for(before + number)[id] - stored)
        time.sleep(APART)
    return took


@contextmanager
def _away(seconds: float) -> Iterator[tuple[str, float]]:
    """Yield the URL of the database so far away, and the seconds of a round trip as measured."""
    url = urlsplit(os.environ["DATABASE_URL"])
    if not url.hostname or not url.port:
        raise BenchmarkError("DATABASE_URL names no host and port, so nothing can be put between")
    with farther(url.hostname, url.port, seconds) as port:
        far = url._replace(netloc=url.netloc.replace(f":{url.port}", f":{port}")).geturl()
        yield far, _round_trip(far)


def _round_trip(url: str) -> float:
    took = []
    with psycopg.connect(url, autocommit=True) as connection:
        for _ in range(20):
            began = time.perf_counter()
            connection.execute("SELECT 1")
            took.append(time.perf_counter() - began)
    return statistics.median(took)
