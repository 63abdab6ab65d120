"""A request that waits for its job: ``enqueue_and_wait`` of a no-op, beside Celery's ``get()``.

Both sides have one caller and a worker process of their own on this machine, and take turns. The
promises differ: ours commits the job to PostgreSQL, sends it through Kafka and commits its outcome
with the marker; Celery's goes through Redis alone and is gone if that is.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kjo_django.worker.process import Worker
from tests.benchmarks import child
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.peers import environments
from tests.benchmarks.peers.catalogue import CELERY
from tests.benchmarks.peers.running import SIDES
from tests.queueing.jobs import ledger

BLOCK = 20
"""Calls of one side before it is the other's turn."""
WARM_UP = 20
SIDE = SIDES / "celery_side.py"

Sides = dict[str, dict[str, float]]


def run(count: int, has_celery: bool) -> Sides | dict[str, float]:
    """Make so many calls on each side, in turns."""
    return in_turns(_call, "call", count, has_celery)


def in_turns(
    ours: Callable[[int, str], list[float]], kind: str, count: int, has_celery: bool
) -> Sides | dict[str, float]:
    """Make so many calls on each side, in turns, and return the figures.

    :param ours: makes so many calls, given their name; returns the seconds that each took.
    :param kind: what Celery's side calls: "call" a task, or "chain" one of five.
    """
    with _ours():
        if not has_celery:
            ours(WARM_UP, "warm")
            return _figures(ours(count, "call"))
        with _celery(kind) as celery:
            ours(WARM_UP, "warm")
            celery(WARM_UP)
            took: dict[str, list[float]] = {"ours": [], "limit": []}
            for number in range(0, count, BLOCK):
                took["ours"] += ours(BLOCK, f"call-{number}")
                took["limit"] += celery(BLOCK)
    figures = {side: _figures(times) for side, times in took.items()}
    figures["ours"]["celery_p50_ms"] = figures["limit"]["p50_ms"]
    return figures


def work() -> None:
    """Our worker process, until stdin is closed."""
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    Worker(["ledger"]).run(until=is_over.is_set)


def _call(count: int, name: str) -> list[float]:
    took = []
    for number in range(count):
        began = time.perf_counter()
        ledger.enqueue_and_wait(f"{name}-{number}", None, timeout=60)
        took.append(time.perf_counter() - began)
    return took


@contextmanager
def _ours() -> Iterator[None]:
    command = child.command("measures.wait.work", {})
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            finally:
                process.kill()


@contextmanager
def _celery(kind: str) -> Iterator[Any]:
    python = str(environments.python_of("celery", CELERY))
    environment = {name: os.environ[name] for name in ("REDIS_URL", "KJO_BENCHMARK_TOPIC", "PATH")}
    worker = subprocess.Popen(
        [python, str(SIDE), "answer"], env=environment, stderr=subprocess.DEVNULL
    )
    client = subprocess.Popen(
        [python, str(SIDE), kind],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def call(count: int) -> list[float]:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(f"{count}\n")
        client.stdin.flush()
        line = client.stdout.readline()
        if not line:
            raise BenchmarkError("Celery's side gave no answer")
        return [float(seconds) for seconds in json.loads(line)]

    try:
        yield call
    finally:
        client.kill()
        worker.terminate()
        try:
            worker.wait(15)
        except subprocess.TimeoutExpired:
            worker.kill()
        client.wait()


def _figures(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles([seconds * 1000 for seconds in times], n=100, method="inclusive")
    return {
        "jobs_per_second": len(times) / sum(times),
        "p50_ms": cuts[49],
        "p95_ms": cuts[94],
        "p99_ms": cuts[98],
    }
