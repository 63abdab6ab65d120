"""Each promise is kept by tests that everybody runs: the table in contributing.md names them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "contributing.md"
PROMISES = ROOT / "docs" / "explanation" / "guarantees.md"

NOT_PROMISED = {
    "Effects outside the database are at-least-once",
    "A second database is outside too",
    "`atomic=False` gives the transaction up",
    "Once, for as long as the marker is kept",
    "Nothing is lost that the database and Kafka keep",
    "Without coordination, a job may kill more workers than its attempts allow",
}
"""What the page says of the limits of promises, which no test can break."""

pytestmark = pytest.mark.medium  # collects the tests of a dozen files


def table() -> dict[str, list[str]]:
    """Return the tests of each promise, as the table has them."""
    rows = re.findall(r"^\| ([^|]+) \| (`\w[^|]+) \|$", PAGE.read_text(), re.M)
    return {promise: re.findall(r"`([\w/.:]+)`", tests) for promise, tests in rows}


def test_every_promise_has_its_tests() -> None:
    said = re.findall(r"^(?:\d\.|-) \*\*([^*]+?)[.,]?\*\*", PROMISES.read_text(), re.M)
    promises = {re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each) for each in said}
    promises = {each.partition(", and a failed job")[0] for each in promises}
    promises = {each.partition(", and interrupts nothing")[0] for each in promises}
    assert len(promises) > 15
    assert set(table()) == promises - NOT_PROMISED
    assert promises > NOT_PROMISED


def test_those_tests_run_in_the_default_tiers() -> None:
    named = {f"tests/{test}" for tests in table().values() for test in tests}
    files = sorted({test.partition("::")[0] for test in named})
    command = [sys.executable, "-m", "pytest", "--tier=medium", "--collect-only", "-q", *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    collected = {line.partition("[")[0] for line in run.stdout.splitlines()}
    collected |= {line.partition("::")[0] for line in collected}
    assert named - collected == set()
