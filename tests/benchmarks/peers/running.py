"""Measuring a peer: fill its queue, start its worker, count."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.engines import RealEngine, unique_name
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.peers import environments
from tests.benchmarks.peers.catalogue import Peer
from tests.benchmarks.peers.sides.tally import SHAPE
from tests.benchmarks.rounds import Figures, medians, rounded, spread_percent

SIDES = Path(__file__).resolve().parent / "sides"
PATIENCE = 60.0


@dataclass
class MeasuredPeer:
    """A peer and its rounds so far, or why it could not be measured."""

    peer: Peer
    jobs: int
    python: Path | None = None
    versions: dict[str, str] = field(default_factory=dict)
    rounds: list[Figures] = field(default_factory=list)
    missing: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        told = {
            "leaves": self.peer.leaves,
            "setup": self.peer.setup,
            "options": dict(self.peer.options),
            "versions": self.versions,
            "jobs": self.jobs,
        }
        if self.missing or not self.rounds:
            return {**told, "missing": self.missing or "there was no time for it"}
        each = [rounded(figures["jobs_per_second"]) for figures in self.rounds]
        return {
            **told,
            "rounds": len(each),
            "ours": medians(self.rounds),
            "each": each,
            "spread_percent": spread_percent(each),
        }


class Peers:
    """Some peers, measured round by round.

    :param engine: gives those that need one a fresh database.
    :param jobs: of each, instead of as many as suit its speed.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        engine: RealEngine,
        *,
        jobs: int | None,
        tell: Callable[[str], None],
    ) -> None:
        self.measured = [MeasuredPeer(peer, min(jobs or peer.jobs, peer.jobs)) for peer in peers]
        self._engine = engine
        self._tell = tell

    def prepare(self) -> None:
        """Make their environments."""
        for measured in self.measured:
            self._tell(f"peers: preparing {measured.peer.name}")
            requirements = measured.peer.requirements
            try:
                measured.python = environments.python_of(measured.peer.side[:-8], requirements)
                measured.versions = environments.versions_of(measured.python, requirements)
            except (BenchmarkError, OSError) as error:
                self._miss(measured, error)

    def run_round(self, number: int) -> None:
        """Measure each once."""
        for measured in self.measured:
            if measured.missing:
                continue
            try:
                figures = self._run(measured)
            except BenchmarkError as error:
                self._miss(measured, error)
                continue
            measured.rounds.append(figures)
            rate = figures["jobs_per_second"]
            self._tell(f"peers {measured.peer.name} ({number + 1}): {rate:,.0f}/s")

    def as_dict(self) -> dict[str, Any]:
        """Return them ready for JSON."""
        return {measured.peer.name: measured.as_dict() for measured in self.measured}

    def _miss(self, measured: MeasuredPeer, error: Exception) -> None:
        # Only a first failure is told of a peer; it never ends the run of the others.
        measured.missing = str(error)[-500:]
        self._tell(f"peers {measured.peer.name}: not measured: {error}")

    def _run(self, measured: MeasuredPeer) -> Figures:
        peer = measured.peer
        with tempfile.TemporaryDirectory(prefix="kjo-peer-") as directory:
            variables = {
                **self._engine.servers,
                **peer.options,
                "PATH": os.environ["PATH"],
                "KJO_BENCHMARK_TOPIC": unique_name("peer"),
                "TALLY_DIRECTORY": directory,
                "PYTHONPATH": str(SIDES),
            }
            if not peer.has_database:
                return drain(measured, Path(directory), variables)
            with self._engine.empty() as database:
                return drain(measured, Path(directory), {**variables, "DATABASE_URL": database})


def drain(measured: MeasuredPeer, tallies: Path, variables: Mapping[str, str]) -> Figures:
    """Fill the queue, then run the worker until all jobs have run.

    :raises BenchmarkError: a side failed, or the worker stood still.
    """
    command = [str(measured.python), str(SIDES / measured.peer.side)]
    began = time.perf_counter()
    _fill([*command, "fill", str(measured.jobs)], variables, tallies)
    filled = time.perf_counter() - began
    with tempfile.TemporaryFile("w+") as log:
        worker = subprocess.Popen(
            [*command, "work"],
            env=dict(variables),
            cwd=tallies,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            cpu_seconds = _await(measured.jobs, tallies, worker)
        except BenchmarkError as error:
            log.seek(0)
            raise BenchmarkError(f"{error}: {log.read()[-400:]}") from error
        finally:
            end(worker)
    count, first, last = read_tallies(tallies)
    if count != measured.jobs:
        raise BenchmarkError(f"{count} runs of {measured.jobs} jobs")
    return {
        "jobs_per_second": (count - 1) / (last - first) * 1e9,
        "cpu_us_per_job": cpu_seconds / count * 1e6,
        "filled_per_second": count / filled,
    }


def _fill(command: Sequence[str], variables: Mapping[str, str], directory: Path) -> None:
    try:
        done = subprocess.run(
            command,
            env=dict(variables),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError("its queue could not be filled within 10 minutes") from error
    if done.returncode:
        raise BenchmarkError(f"its queue could not be filled: {done.stderr.strip()[-400:]}")


def _await(count: int, tallies: Path, worker: subprocess.Popen[bytes]) -> float:
    """Wait until all jobs have run; return the processor seconds of the worker's processes."""
    seen, moved_at = 0, time.monotonic()
    while True:
        now = read_tallies(tallies)[0]
        if now >= count:
            return sum(map(_cpu_seconds, _family(worker.pid)))
        if now != seen:
            seen, moved_at = now, time.monotonic()
        if time.monotonic() - moved_at > PATIENCE:
            raise BenchmarkError(f"its worker stood still at {now} of {count} jobs")
        if worker.poll() is not None:
            raise BenchmarkError(f"its worker ended with {worker.returncode}")
        time.sleep(0.1)


def read_tallies(directory: Path) -> tuple[int, int, int]:
    """Return the runs of all processes, and the moments of the first and the last."""
    whole = (file.read_bytes() for file in directory.iterdir() if file.name.isdigit())
    read = [SHAPE.unpack(data) for data in whole if len(data) == SHAPE.size]
    read = [tally for tally in read if tally[0]]
    if not read:
        return 0, 0, 0
    return sum(t[0] for t in read), min(t[1] for t in read), max(t[2] for t in read)


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def end(worker: subprocess.Popen[bytes]) -> None:
    """End a worker and what it has started."""
    # The group is the worker's own; what it started may outlive it.
    family = _family(worker.pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(worker.pid, number)
        except ProcessLookupError:
            break
        _, family = psutil.wait_procs(family, timeout=5)
        if not family:
            break
    worker.wait(10)
