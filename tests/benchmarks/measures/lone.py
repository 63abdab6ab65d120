"""A job that nothing runs beside: the statements it costs, and what a worker costs that has none.

Statements are read on their way to PostgreSQL, those of the worker and of who enqueues. BEGIN,
COMMIT, savepoints and settings of a transaction are counted apart. All that is sent from one job to
the next, half a second later, is a job's; "own" is what is left without that which an idle worker
sends in the same time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psutil
from django.db import connections

from tests.benchmarks.measures import latency
from tests.benchmarks.wire import Asked, listening
from tests.ledger.jobs import no_op

WARM_UP = 5
APART = 0.5
"""Seconds from one job to the next."""
SETTLED = 5.0
"""Seconds after which a worker has ended what its start and its first jobs have it do."""


def run(count: int, idle_seconds: float) -> dict[str, float]:
    """Watch a worker that is idle, then lone jobs."""
    url = urlsplit(os.environ["DATABASE_URL"])
    address = str(url.hostname), int(url.port or 5432)
    with (
        listening(*address) as (worker_port, of_worker),
        listening(*address) as (saver_port, of_saver),
        _connected_by(saver_port),
    ):
        netloc = url.netloc.replace(f":{url.port}", f":{worker_port}")
        variables = {"DATABASE_URL": url._replace(netloc=netloc).geturl()}
        with latency.worker(variables=variables) as (process, answers):
            _run(WARM_UP, answers, 0)
            time.sleep(SETTLED)
            idle = _idle(psutil.Process(process.pid), of_worker, idle_seconds)
            before, saved, began = of_worker.counts(), of_saver.counts(), time.monotonic()
            delays = _run(count, answers, WARM_UP)
            seconds = time.monotonic() - began
            asked = [now - then for now, then in zip(of_worker.counts(), before, strict=True)]
            enqueued = [now - then for now, then in zip(of_saver.counts(), saved, strict=True)]
    together = (asked[0] + enqueued[0]) / count
    beside = idle["idle_statements_per_second"] * seconds / count
    return {
        **latency.percentiles(delays),
        **idle,
        "statements_per_job": together,
        "own_statements_per_job": together - beside,
        "enqueue_statements_per_job": enqueued[0] / count,
        "transaction_bounds_per_job": (asked[1] + enqueued[1]) / count,
        "enqueue_round_trips_per_job": enqueued[2] / count,
    }


def _idle(process: psutil.Process, asked: Asked, seconds: float) -> dict[str, float]:
    before, spent = asked.counts(), sum(process.cpu_times()[:2])
    began = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - began
    return {
        "idle_statements_per_second": (asked.counts()[0] - before[0]) / passed,
        "idle_cpu_percent": 100 * (sum(process.cpu_times()[:2]) - spent) / passed,
    }


def _run(count: int, answers: latency.Answers, before: int) -> list[float]:
    """Run jobs one after the other; return the milliseconds of each from before its enqueue()."""
    delays = []
    for number in range(1, count + 1):
        began = time.monotonic()
        id = str(no_op.enqueue().job_id)
        delays.append((answers.wait_for(before + number)[id] - began) * 1000)
        time.sleep(max(0.0, began + APART - time.monotonic()))
    return delays


@contextmanager
def _connected_by(port: int) -> Iterator[None]:
    """Have this process reach its database by another port."""
    connection = connections["default"]
    usual = connection.settings_dict["PORT"]
    connection.close()
    connection.settings_dict["PORT"] = str(port)
    try:
        yield
    finally:
        connection.close()
        connection.settings_dict["PORT"] = usual
