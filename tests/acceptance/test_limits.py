"""Limits over four real workers, of which one is killed or frozen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kjo_django import registry
from tests.acceptance.engine import Engine
from tests.acceptance.program import Program

pytestmark = pytest.mark.timeout(240)
SECONDS = 10.0
"""How long a rate is watched."""
every_engine = pytest.mark.parametrize(
    "engine_name",
    [
        "embedded",
        pytest.param("postgres", marks=pytest.mark.postgres),
        pytest.param("real", marks=[pytest.mark.kafka, pytest.mark.redis, pytest.mark.postgres]),
    ],
)


class Moment(NamedTuple):
    at: float
    pid: int
    what: str


@pytest.fixture
def limited() -> Iterator[Any]:
    from tests.ledger import limited

    # This process plays a web application: it asks for no limit.
    for name in [name for name in registry.limited if name.startswith("ledger.")]:
        del registry.limited[name]
    return limited


@pytest.fixture
def limiting(engine_name: str, request: Any) -> Engine:
    engine: Engine = request.getfixturevalue(engine_name)
    engine.variables["KJO_TEST_LIMITS"] = "1"
    engine.configure(HEARTBEAT_INTERVAL=0.5, PROCESSING_TTL=5)
    return engine


def moments_in(path: Path) -> list[Moment]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        at, pid, what = line.split(" ", 2)
        found.append(Moment(float(at), int(pid), what))
    return sorted(found)


def most_within(moments: list[float], seconds: float) -> int:
    return max(sum(1 for m in moments if first <= m < first + seconds) for first in moments)


@every_engine
@pytest.mark.parametrize("name", ["start_rated", "start_rated_in_transaction"])
def test_a_rate_holds_over_four_workers_one_of_which_is_killed(
    limiting: Engine, limited: Any, name: str, tmp_path: Path
) -> None:
    # Given
    path = tmp_path / "starts"
    workers = [limiting.ready_worker("--concurrency", "2") for _ in range(4)]
    getattr(limited, name).enqueue_many([{"path": str(path)}] * 200)
    limiting.wait_until(lambda: moments_in(path), "Nothing started")
    # When
    limiting.wait_for_moment(SECONDS / 2)
    workers[0].kill()
    limiting.wait_for_moment(SECONDS / 2)
    for worker in workers[1:]:
        assert worker.stop() == 0, worker.log_tail()
    # Then
    starts = [moment.at for moment in moments_in(path)]
    assert most_within(starts, 1.0) <= 5
    # However slow the machine is. An idle one reaches 4.7 a second.
    assert len(starts) >= 1.5 * SECONDS
    print(f"{len(starts)} starts within {starts[-1] - starts[0]:.1f} s")


def runs_of(path: Path, lost: dict[int, float]) -> list[tuple[float, float]]:
    """Return when the runs began and ended; those that a lost worker had begun ended with that."""
    begun: dict[int, list[float]] = {}
    runs = []
    for moment in moments_in(path):
        if moment.what.endswith("start"):
            begun.setdefault(moment.pid, []).append(moment.at)
            continue
        start, end = begun[moment.pid].pop(0), moment.at
        runs.append((start, lost[moment.pid] if start < lost.get(moment.pid, 0.0) else end))
    for pid, left in begun.items():
        runs += [(start, lost.get(pid, time.time())) for start in left]
    return runs


def most_at_once(runs: list[tuple[float, float]]) -> int:
    return max(sum(1 for start, end in runs if start <= moment < end) for moment, _ in runs)


@every_engine
@pytest.mark.parametrize("fate", ["killed", "frozen"])
def test_slots_hold_over_four_workers_one_of_which_is_lost(
    limiting: Engine, limited: Any, fate: str, tmp_path: Path
) -> None:
    # Given three slots, all of them taken
    path = tmp_path / "runs"
    workers = {w.pid: w for w in [limiting.ready_worker("--concurrency", "4") for _ in range(4)]}
    jobs = [{"tenant": "acme", "path": str(path), "seconds": 1.0}] * 24
    limited.occupy_slot.enqueue_many(jobs)
    limiting.wait_until(lambda: len(moments_in(path)) >= 3, "The slots were not taken")
    # When a worker that has one is lost
    pid = moments_in(path)[-1].pid
    lose(limiting, workers[pid], fate)
    lost = {pid: time.time()}
    # Then all three are taken again before long, and never four
    limiting.wait_for_moment(8)
    later = [start for start, _ in runs_of(path, lost) if start > lost[pid]]
    assert sum(1 for start in later if start > lost[pid] + 4) >= 6, later
    assert most_at_once(runs_of(path, lost)) <= 3
    if fate == "frozen":
        workers[pid].thaw()
    limiting.settle()
    assert most_at_once(runs_of(path, lost)) <= 3


def lose(engine: Engine, worker: Program, fate: str) -> None:
    if fate == "killed":
        worker.kill()
    else:
        engine.freeze(worker)
