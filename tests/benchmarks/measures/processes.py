"""``kjo_consume --processes N`` as it is started in production.

The queue is paused until every process is a member of the group and has partitions: what joining
costs is another question. The rate is that of the jobs between the first third and the last tenth
of the drain: before, one process may not have heard yet that the queue goes on; after, one may have
emptied its partitions.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import datetime

import psutil

from kjo_django.models import Worker
from kjo_django.operations import queues
from kjo_django.operations.workers import assignments
from tests.benchmarks import completions
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.workloads import WORKLOADS

PATIENCE = 60.0
FROM, TO = 1 / 3, 0.9


def run(count: int, processes: int) -> dict[str, float]:
    """Drain the topic with so many worker processes."""
    command = [sys.executable, "-m", "django", "kjo_consume", "ledger", "--no-relay"]
    command += ["--processes", str(processes), "--verbosity", "0"]
    queues.pause("ledger")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ) as process:
        try:
            _await_members(processes, process)
            psutil.cpu_percent()
            queues.resume("ledger")
            _await(count, process)
            machine = psutil.cpu_percent()
            cpu_seconds = sum(map(_cpu_seconds, _family(process.pid)))
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)
        finally:
            for member in _family(process.pid):
                member.kill()
    completions.check(count, WORKLOADS["no_op"])
    low, high = int(count * FROM), int(count * TO) - 1
    ends = completions.measured_jobs().order_by("finished_at").values_list("finished_at", flat=True)
    seconds = _between(ends[low], ends[high])
    return {
        "jobs_per_second": (high - low) / seconds,
        "cpu_us_per_job": cpu_seconds / count * 1e6,
        "machine_cpu_percent": machine,
    }


def _await_members(processes: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until so many workers share all partitions of the topic."""
    begun = time.monotonic()
    while True:
        rows = Worker.objects.values_list("partitions", flat=True)
        shares = [[(each.topic, each.partition) for each in assignments(row)] for row in rows]
        held = {partition for share in shares for partition in share}
        if len(shares) == processes and all(shares) and len(held) == sum(map(len, shares)):
            return
        if process.poll() is not None or time.monotonic() - begun > PATIENCE:
            raise BenchmarkError(f"The workers never shared the partitions: {shares}")
        time.sleep(0.2)


def _await(count: int, process: subprocess.Popen[bytes]) -> None:
    left, moved_at = count, time.monotonic()
    while left:
        time.sleep(0.5)
        now_left = completions.measured_jobs("queued").count()
        if now_left != left:
            left, moved_at = now_left, time.monotonic()
        if process.poll() is not None or time.monotonic() - moved_at > PATIENCE:
            raise BenchmarkError(f"{left} of {count} jobs were left by the workers")


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _between(first: datetime, last: datetime) -> float:
    seconds = (last - first).total_seconds()
    if seconds <= 0:
        raise BenchmarkError("the drain was too short to measure a rate")
    return seconds
