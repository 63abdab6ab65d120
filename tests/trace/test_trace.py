"""The way of one job through the code stays short enough to be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"files": 30, "functions": 121, "changes": 100}
"""Of one job that completes. What makes them larger needs a decision that says what it buys."""


@pytest.mark.timeout(600)
def test_one_job_walks_through_no_more_code_than_is_allowed() -> None:
    # When a worker of its own process runs jobs on the memory transport and SQLite
    command = [sys.executable, "-m", "tests.trace", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    walks = json.loads(done.stdout)

    # Then one job's walk is within the limits, and the others were measured as well
    assert not {name for name, limit in LIMITS.items() if walks["completed"][name] > limit}, walks
    assert walks["failed"]["calls"] > walks["completed"]["calls"]
    assert walks["replayed"]["calls"] > 0
