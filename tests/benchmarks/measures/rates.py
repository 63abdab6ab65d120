"""What a job costs at a rate that people run: milliseconds of processor time, by who spends them.

One worker with its defaults, one ``enqueue()`` at a time at an even rate. After it Celery with a
Redis broker, two processes (prefork) and late acknowledgement, which keeps no row.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.measures import latency
from tests.benchmarks.peers import environments
from tests.benchmarks.peers.catalogue import CELERY
from tests.benchmarks.peers.running import SIDES
from tests.ledger.jobs import no_op

WARM_UP = 50
SETTLE = 1.0
"""Seconds after which servers have ended what the jobs before have left them to do."""

Figures = dict[str, float]


def run(rate: float, seconds: float, has_celery: bool) -> dict[str, Figures] | Figures:
    """Measure ours, and Celery's side after it."""
    ours = _ours(rate, seconds)
    if not has_celery:
        return ours
    theirs = _celery(rate, seconds)
    ours |= {f"celery_{name}": theirs[name] for name in ("p50_ms", "worker_ms", "all_ms")}
    return {"ours": ours, "limit": theirs}


def _ours(rate: float, seconds: float) -> Figures:
    with latency.worker() as (process, answers):
        latency.save(WARM_UP, rate, _no_op)
        answers.wait_for(WARM_UP)
        time.sleep(SETTLE)
        reading = answers.cpu_seconds
        spent = Spent({"worker": process.pid, "saver": os.getpid(), **servers()})
        saved, _ = latency.save(int(rate * seconds), rate, _no_op)
        done = answers.wait_for(WARM_UP + len(saved))
        spent.leave_out("saver", answers.cpu_seconds - reading)
        figures = spent.figures(len(saved))
        figures |= latency.percentiles([(done[id] - at) * 1000 for id, at in saved.items()])
    return figures


def _no_op(number: int) -> Any:
    return no_op.enqueue()


def _celery(rate: float, seconds: float) -> Figures:
    python = str(environments.python_of("celery", CELERY))
    names = ("REDIS_URL", "KJO_BENCHMARK_TOPIC", "PATH")
    environment = {name: os.environ[name] for name in names} | {"CONCURRENCY": "2", "LATE": "1"}
    with tempfile.NamedTemporaryFile() as times:
        environment["TIMES"] = times.name
        return _celery_with(python, environment, rate, seconds)


def _celery_with(
    python: str, environment: Mapping[str, str], rate: float, seconds: float
) -> Figures:
    side = [python, str(SIDES / "celery_side.py")]
    worker = subprocess.Popen([*side, "time"], env=environment, stderr=subprocess.DEVNULL)
    saver = subprocess.Popen(
        [*side, "save"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def save(count: int) -> list[float]:
        assert saver.stdin is not None
        assert saver.stdout is not None
        saver.stdin.write(f"{json.dumps([count, rate])}\n")
        saver.stdin.flush()
        line = saver.stdout.readline()
        if not line:
            raise BenchmarkError("Celery's side gave no answer")
        return list(json.loads(line))

    try:
        save(WARM_UP)
        time.sleep(SETTLE)
        spent = Spent({"worker": worker.pid, "saver": saver.pid, "redis": servers()["redis"]})
        delays = save(int(rate * seconds))
        return spent.figures(len(delays)) | latency.percentiles([1000 * each for each in delays])
    finally:
        saver.kill()
        worker.terminate()
        try:
            worker.wait(15)
        except subprocess.TimeoutExpired:
            worker.kill()
        saver.wait()


def servers() -> dict[str, int]:
    """Return the processes of the servers on this machine, by the ports they listen on."""
    ports = {
        name: urlsplit(f"//{address}" if "//" not in address else address).port
        for name, address in (
            ("kafka", os.environ.get("KAFKA_BOOTSTRAP_SERVERS", "")),
            ("postgres", os.environ.get("DATABASE_URL", "")),
            ("redis", os.environ.get("REDIS_URL", "")),
        )
        if address and not address.startswith("sqlite")
    }
    listening = {
        each.laddr.port: each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.pid
    }
    return {name: listening[port] for name, port in ports.items() if port in listening}


class Spent:
    """The processor time of processes and their children from now on."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._before = {name: _seconds(each) for name, each in self._processes.items()}
        self._switches = self._of_worker()

    def leave_out(self, name: str, seconds: float) -> None:
        """Let what a process has spent on the measurement itself not count."""
        self._before[name] += seconds

    def _of_worker(self) -> int:
        tasks = Path(f"/proc/{self._processes['worker'].pid}/task")
        return sum(
            int(line.split()[1])
            for status in tasks.glob("*/status")
            for line in status.read_text().splitlines()
            if line.startswith("voluntary_ctxt_switches")
        )

    def figures(self, jobs: int) -> Figures:
        """Return milliseconds for each job."""
        spent = {
            f"{name}_ms": (_seconds(process) - self._before[name]) * 1000 / jobs
            for name, process in self._processes.items()
        }
        switches = (self._of_worker() - self._switches) / jobs
        total = sum(spent.values())
        return {
            **spent,
            "all_ms": total,
            "jobs_per_cpu_second": 1000 / total,
            "switches_per_job": switches,
        }


def _seconds(process: psutil.Process) -> float:
    if process.pid == os.getpid():
        return time.process_time()  # its children are measured as others
    with_ended_children = float(sum(process.cpu_times()[:4]))
    return with_ended_children + sum(
        sum(each.cpu_times()[:2]) for each in process.children(recursive=True)
    )
