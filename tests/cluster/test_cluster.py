"""Servers, workers and networks fail, and everything goes on by itself: what was acknowledged takes
effect, once, and in the order of its key."""

from __future__ import annotations

import json
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.network import obstacle
from tests.cluster.options import MINUTES, SEED
from tests.services.fixtures import require
from tests.services.process import GuardedProcess
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
AT_THE_ENDS = 420.0
"""Seconds that a run may take besides its faults, on a machine that has other things to do."""

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.redis,
    pytest.mark.postgres,
    pytest.mark.timeout(func_only=True, timeout=0),  # `survive` has a limit of its own
]


def survive(folder: Path, *arguments: str, seconds: float) -> tuple[str, dict[str, Any]]:
    """Run a cluster in namespaces of its own until it ends; return what it has printed, and its
    summary."""
    require(kafka=True, redis=True, postgres=True, network=True)
    if reason := obstacle():
        pytest.skip(reason)
    home, log, summary = folder / "home", folder / "cluster.log", folder / "summary.json"
    home.mkdir()
    files = ["--logs", str(folder / "logs"), "--summary", str(summary)]
    process = GuardedProcess(
        ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.cluster", *arguments, *files],
        directory=home,
        log=log,
        last_signal=signal.SIGKILL,
    )
    try:
        has_ended = process.wait(seconds)
        printed = log.read_text(errors="replace")
        assert has_ended, f"It still runs after {seconds:.0f} s\n{printed}"
    finally:
        process.signal(signal.SIGKILL)  # its namespaces, and all that runs in them, end with it
        process.wait(PATIENCE)
    assert process.exit_code == 0, printed
    return printed, json.loads(summary.read_text())


def test_a_few_faults(tmp_path: Path) -> None:
    # When a broker, the primary and a worker are disturbed, each in another way
    _, summary = survive(tmp_path, "--seed", "1", "--short", seconds=AT_THE_ENDS)
    # Then each is survived, and what was acknowledged took effect once, in order
    assert len(summary["faults"]) == 3
    assert summary["saves"]["ok"] > 0
    assert summary["complaints"] == []


@pytest.mark.cluster
@pytest.mark.parametrize("rounds", [[], ["--two-at-once"]], ids=["one at a time", "two at once"])
def test_faults_of_every_kind(
    rounds: list[str], tmp_path: Path, request: pytest.FixtureRequest, record_property: Any
) -> None:
    # Given a seed, which a failure names
    minutes = request.config.getoption(MINUTES)
    seed = request.config.getoption(SEED) or secrets.randbelow(1_000_000)
    # When faults come and go as long as was asked
    arguments = ("--seed", str(seed), "--minutes", str(minutes), *rounds)
    printed, summary = survive(tmp_path, *arguments, seconds=minutes * 60 + AT_THE_ENDS)
    record_property("told", printed)
    # Then each is survived, and what was acknowledged took effect once, in order
    assert summary["faults"]
    assert summary["complaints"] == []
