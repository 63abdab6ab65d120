"""The way of one job through the code stays short enough to be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {
    "completed": {"files": 30, "functions": 124, "changes": 100},
    "failed": {"files": 41, "functions": 194, "changes": 168},
    "replayed": {"files": 39, "functions": 168, "changes": 152},
}
"""Of one job that completes, one that dies, and the replay of its dead letter. What makes them
larger needs a decision that says what it buys."""


@pytest.mark.timeout(600)
def test_one_job_walks_through_no_more_code_than_is_allowed() -> None:
    # When a worker of its own process runs jobs on the memory transport and SQLite
    command = [sys.executable, "-m", "tests.trace", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    walks = json.loads(done.stdout)

    # Then each walk is within its limits
    assert walks.keys() == LIMITS.keys()
    for name, limits in LIMITS.items():
        assert not {what for what, most in limits.items() if walks[name][what] > most}, walks
    assert walks["failed"]["calls"] > walks["completed"]["calls"]
