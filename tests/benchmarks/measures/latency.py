"""How long a job takes from the call that saves it to its durable end, at a steady rate."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, Any

import psutil
from django.db import connection

from kjo_django import signals
from kjo_django.worker.process import Worker
from tests.benchmarks import child
from tests.benchmarks.errors import BenchmarkError
from tests.ledger.jobs import write

WARM_UP = 30
PATIENCE = 30.0
MOST_PER_THREAD = 250
"""Jobs a second one thread saves; more would have it late."""
FEW = 50
"""Jobs a second that no machine is busy with."""
FLOOD_SECONDS = 10
"""About as long takes what is saved at once, to find what is sustained."""


def run(
    rate: float, seconds: float, idle_seconds: float, concurrency: int | None = None
) -> dict[str, float]:
    """Save ``rate`` jobs a second here while a worker process runs them.

    Both sides read the same monotonic clock of the system.
    """
    with worker(concurrency) as (process, answers):
        save(WARM_UP, rate)
        answers.wait_for(WARM_UP)
        idle = _idle(psutil.Process(process.pid), idle_seconds)
        saved, saving = save(int(rate * seconds), rate)
        done = answers.wait_for(WARM_UP + len(saved))
    delays = [(done[id] - moment) * 1000 for id, moment in saved.items()]
    return {**percentiles(delays), **saving, **idle}


def half(seconds: float) -> dict[str, float]:
    """Find the rate that is sustained while a worker runs beside, then measure at half of it, and
    at ``FEW`` a second."""
    with worker() as (_, answers):
        save(WARM_UP, FEW)
        done = WARM_UP
        answers.wait_for(done)
        count = int(FLOOD_SECONDS * MOST_PER_THREAD)
        flood, _ = save(count, math.inf)
        ended = answers.wait_for(done + count)
        done += count
        sustained = count / (max(ended[id] for id in flood) - min(flood.values()))
        figures = {"sustained_per_second": sustained}
        for name, rate in (("", sustained / 2), ("few_", FEW)):
            saved, _ = save(int(rate * seconds), rate)
            done += len(saved)
            ended = answers.wait_for(done)
            delays = [(ended[id] - moment) * 1000 for id, moment in saved.items()]
            figures |= {f"{name}{key}": value for key, value in percentiles(delays).items()}
    return {**figures, "p50_by_few": figures["p50_ms"] / figures["few_p50_ms"]}


@contextmanager
def worker(
    concurrency: int | None = None,
    variables: Mapping[str, str] | None = None,
    *,
    tells_ends: bool = True,
) -> Iterator[tuple[subprocess.Popen[str], Answers]]:
    """Yield a worker process that is ready, and what it reports; it is stopped afterwards.

    :param variables: of its environment, instead of those of this process.
    :param tells_ends: whether it reports each job's end; to hear of them costs this process time.
    """
    arguments = {"concurrency": concurrency, "tells_ends": tells_ends}
    command = child.command("measures.latency.work", arguments)
    environment = {**os.environ, **(variables or {})}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            answers = Answers(process.stdout)
            answers.expect("ready")
            yield process, answers
            process.stdin.close()
            process.wait(PATIENCE)
        finally:
            process.kill()


def work(concurrency: int | None = None, tells_ends: bool = True) -> None:
    """The worker process: reports each job's end on stdout, stops when stdin is closed."""
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()

    def tell(job_id: str, **kwargs: Any) -> None:
        # Sent after the commit of the outcome.
        _say({"id": job_id, "at": time.monotonic()})

    if tells_ends:
        signals.job_completed.connect(tell, weak=False)
    worker = Worker(["ledger"], concurrency=concurrency)
    is_told = False

    def may_stop() -> bool:
        nonlocal is_told
        if not is_told and any(poller.partitions for poller in worker.pollers):
            _say({"ready": True})
            is_told = True
        return is_over.is_set()

    worker.run(until=may_stop)


def _say(answer: dict[str, Any]) -> None:
    # One write: lanes tell at the same time.
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


class Answers:
    """What the worker process tells."""

    def __init__(self, stream: IO[str]) -> None:
        self._done: dict[str, float] = {}
        self._seen: set[str] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            answer = json.loads(line) or {}
            with self._changed:
                if "id" in answer:
                    self._done[answer["id"]] = answer["at"]
                self._seen.update(answer)
                self._changed.notify_all()

    @property
    def cpu_seconds(self) -> float:
        """Processor seconds of the thread that reads, which a process that only saves has not."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def expect(self, word: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: word in self._seen, PATIENCE):
                raise BenchmarkError(f"The worker was not {word} within {PATIENCE:g} s")

    def wait_for(self, count: int) -> dict[str, float]:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._done) >= count, PATIENCE):
                raise BenchmarkError(f"{len(self._done)} of {count} jobs ended")
            return dict(self._done)


def _write(number: int) -> Any:
    return write.enqueue(job=f"job-{number}")


def save(
    count: int, rate: float, job: Callable[[int], Any] = _write
) -> tuple[dict[str, float], dict[str, float]]:
    """Enqueue at an even rate; return the moment before each call, and how long calls took.

    :param job: enqueues the job of this number.
    """
    threads = 1 if rate == math.inf else math.ceil(rate / MOST_PER_THREAD)
    saved: dict[str, float] = {}
    took: list[float] = []
    start = time.monotonic()

    def save_from(first: int) -> None:
        for number in range(first, count, threads):
            time.sleep(max(0.0, start + number / rate - time.monotonic()))
            before = time.monotonic()
            answer = job(number)
            took.append((time.monotonic() - before) * 1000)
            saved[str(answer.job_id)] = before
        connection.close()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(save_from, range(threads)))
    seconds = time.monotonic() - start
    return saved, {"enqueue_p50_ms": statistics.median(took), "saved_per_second": count / seconds}


def _idle(process: psutil.Process, seconds: float) -> dict[str, float]:
    if not seconds:
        return {}
    process.cpu_percent()
    time.sleep(seconds)
    return {"idle_cpu_percent": float(process.cpu_percent())}


def percentiles(delays: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(delays, n=100, method="inclusive")
    return {
        "p50_ms": cuts[49],
        "p95_ms": cuts[94],
        "p99_ms": cuts[98],
        "max_ms": max(delays),
        "jobs": float(len(delays)),
    }
