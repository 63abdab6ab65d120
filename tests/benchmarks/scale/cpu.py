"""A group of processes with a share of a processor, by control groups of Linux, version 1 or 2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.benchmarks.errors import BenchmarkError

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 50_000
"""A group that has used up its share rests until the next period. What it does not use of its share
in a period is lost, so a period is longer than processes wait for servers. In one that is longer
still, others would wait long for a server that rests."""
LEAST_US = 1_000
"""The kernel gives no group less in a period; of a small share the period is longer."""


_SPIN = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while True:
    pass
"""


@contextmanager
def awake() -> Iterator[Callable[[], float]]:
    """Keep every processor busy with what gives way to everything else.

    A processor that is idle between two periods is handed back by a virtual machine and comes back
    with cold caches. Where one worker at 15 % was all that ran, a job took it up to twice as long.

    :returns: what returns the processor seconds that nothing else has used so far.
    """
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(os.cpu_count() or 1)]
    watched = [psutil.Process(process.pid) for process in spinning]
    try:
        yield lambda: sum(sum(process.cpu_times()[:2]) for process in watched)
    finally:
        for process in spinning:
            process.kill()
            process.wait()


class CpuGroup:
    """Processes that are counted together, and held to a share of one processor if asked.

    :param name: nobody else has.
    :param root: where control groups are mounted.
    :raises BenchmarkError: this process may make none.
    """

    def __init__(self, name: str, root: Path = ROOT) -> None:
        self._is_one = (root / "cpuacct").is_dir()
        parents = [root / "cpu", root / "cpuacct"] if self._is_one else [root]
        self._folders = [parent / name for parent in parents]
        try:
            if not self._is_one:
                (root / "cgroup.subtree_control").write_text("+cpu")
            for folder in self._folders:
                folder.mkdir()
        except OSError as error:
            raise BenchmarkError(f"No control group for a share of the CPU: {error}") from error

    def add(self, pid: int) -> None:
        """Count a process and its children, and those that they start later."""
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in family:
            for folder in self._folders:
                with suppress(ProcessLookupError):  # a child that has ended meanwhile
                    (folder / "cgroup.procs").write_text(str(process.pid))

    def hold_to(self, share: float) -> None:
        """Give the group so much of one processor, such as 0.2."""
        period = max(PERIOD_US, round(LEAST_US / share))
        quota = round(share * period)
        if self._is_one:
            (self._folders[0] / "cpu.cfs_period_us").write_text(str(period))
            (self._folders[0] / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self._folders[0] / "cpu.max").write_text(f"{quota} {period}")

    def release(self) -> None:
        """Let the group use what is there."""
        if self._is_one:
            (self._folders[0] / "cpu.cfs_quota_us").write_text("-1")
        else:
            (self._folders[0] / "cpu.max").write_text(f"max {PERIOD_US}")

    @property
    def seconds(self) -> float:
        """Processor seconds of all its processes so far, the ended ones included."""
        if self._is_one:
            return int((self._folders[1] / "cpuacct.usage").read_text()) / 1e9
        lines = (self._folders[0] / "cpu.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("usage_usec")) / 1e6

    def close(self) -> None:
        """Remove the group; its processes must have ended."""
        for folder in self._folders:
            with suppress(OSError):
                folder.rmdir()
