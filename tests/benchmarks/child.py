"""Running one step in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tests.benchmarks.errors import BenchmarkError

TIMEOUT = 1800
"""Seconds; a measurement checks its own, shorter limits."""


def command(function: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return the command line that runs a step."""
    return [sys.executable, "-m", "tests.benchmarks.measure", function, json.dumps(arguments)]


def run(function: str, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """Run a step and return what it answered.

    :raises BenchmarkError: with what it wrote to stderr.
    """
    try:
        done = subprocess.run(
            command(function, arguments),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{function} did not end within {TIMEOUT} s") from error
    return answer_of(function, done.returncode, done.stdout, done.stderr)


def answer_of(function: str, code: int, output: str, errors: str) -> Any:
    """Return the JSON in the last line of a step's output."""
    lines = output.strip().splitlines()
    if code != 0 or not lines:
        tail = "\n".join(errors.strip().splitlines()[-30:])
        raise BenchmarkError(f"{function} failed with exit code {code}:\n{tail}")
    return json.loads(lines[-1])
