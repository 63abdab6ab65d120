"""Measuring a peer whose jobs are enqueued while its worker runs."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.peers import environments
from tests.benchmarks.peers.catalogue import TIMED_PEERS, Peer
from tests.benchmarks.peers.running import SIDES, end

PATIENCE = 60.0


def peer_named(name: str) -> Peer:
    """Return a peer that is timed."""
    return next(peer for peer in TIMED_PEERS if peer.name == name)


def python_for(peer: Peer) -> Path:
    """Return the Python of a peer's environment, which is made where it is not there.

    :raises BenchmarkError: it cannot be made.
    """
    name = peer.side.removesuffix("_side.py")
    return environments.python_of(name, peer.requirements, peer.least_python)


def prepared(peers: Sequence[Peer], tell: Callable[[str], None]) -> dict[str, Any]:
    """Make the environments; return by name what readers are told of each, ready for JSON."""
    facts: dict[str, Any] = {}
    for peer in peers:
        tell(f"peers: preparing {peer.name}")
        facts[peer.name] = told = {
            "leaves": peer.leaves,
            "setup": peer.setup,
            "options": dict(peer.options),
            "versions": {},
        }
        try:
            told["versions"] = environments.versions_of(python_for(peer), peer.requirements)
        except (BenchmarkError, OSError) as error:
            told["missing"] = str(error)[-500:]
            tell(f"peers {peer.name}: not measured: {error}")
    return facts


@dataclass
class Running:
    """A peer's two processes and what its jobs tell."""

    saver: subprocess.Popen[str]
    worker: subprocess.Popen[bytes] | None
    times: Path

    def save(self, count: int, rate: float = 0) -> float:
        """Enqueue so many, at a rate or as fast as it can; return the seconds that took."""
        assert self.saver.stdin is not None
        assert self.saver.stdout is not None
        self.saver.stdin.write(f"{json.dumps([count, rate])}\n")
        self.saver.stdin.flush()
        line = self.saver.stdout.readline()
        if not line:
            raise BenchmarkError(f"its side that saves ended with {self.saver.wait(10)}")
        return float(json.loads(line))

    def wait_for(self, count: int) -> list[tuple[float, float]]:
        """Return of each job the seconds until it ran, and when that was, in their order."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.times.read_text()).count("\n") < count:
            if self.worker is not None and self.worker.poll() is not None:
                raise BenchmarkError(f"its worker ended with {self.worker.returncode}")
            if time.monotonic() > deadline:
                raise BenchmarkError(f"its worker ran {found.count(chr(10))} of {count} jobs")
            time.sleep(0.1)
        pairs = (line.split() for line in found.splitlines())
        return [(float(delay), float(at)) for delay, at in pairs]


@contextmanager
def running(name: str, *, has_worker: bool = True) -> Iterator[Running]:
    """Yield a peer that is ready, on the database that the environment names.

    :raises BenchmarkError: it is missing, or a side of it fails; says what it wrote.
    """
    peer = peer_named(name)
    command = [str(python_for(peer)), str(SIDES / peer.side)]
    with tempfile.TemporaryDirectory(prefix="kjo-peer-") as folder:
        directory = Path(folder)
        times, log = directory / "times", directory / "log"
        times.touch()
        given = {key: os.environ[key] for key in ("DATABASE_URL", "PATH")}
        variables = {**given, **peer.options, "PYTHONPATH": str(SIDES), "TIMES": str(times)}
        with log.open("w") as output:
            try:
                yield from _processes(command, directory, variables, output, times, has_worker)
            except BenchmarkError as error:
                raise BenchmarkError(f"{name}: {error}: {log.read_text()[-400:]}") from error


def _processes(
    command: Sequence[str],
    directory: Path,
    variables: Mapping[str, str],
    output: Any,
    times: Path,
    has_worker: bool,
) -> Iterator[Running]:
    common: dict[str, Any] = {"env": dict(variables), "cwd": directory, "stderr": output}
    if subprocess.run([*command, "install"], stdout=output, **common).returncode:
        raise BenchmarkError("its tables could not be made")
    saver = subprocess.Popen(
        [*command, "save"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **common,
    )
    worker = None
    try:
        if has_worker:
            # The group is the worker's own; what it starts is ended with it.
            worker = subprocess.Popen(
                [*command, "work"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                start_new_session=True,
                **common,
            )
        yield Running(saver, worker, times)
    finally:
        saver.kill()
        saver.wait()
        if worker is not None:
            end(worker)
