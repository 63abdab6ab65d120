"""Runs again, with nothing beside it, what failed among other tests, and judges by both.

A test that fails beside others and passes alone tells less of the product than of the load, or of
a test before it in the same process. A repeat in the same process would have both again, so each
round is a process of its own, without parallel workers.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.outcomes import Outcomes

ROUNDS = 2
"""Times that a failed test is run again at most."""

MOST_UNSTEADY = 5
"""Unsteady tests with which a run may still pass."""

MOST_REPEATED = 20
"""Failed tests that are repeated at most: of more, the first failures tell enough, and repeats of
tests that hang until their time limit would take hours."""

GRACE = 30
"""Seconds in which an interrupted round must have stopped its servers."""

LINES = 12
"""Lines of a failure that are printed again at the end of the run."""


@dataclass
class Verdict:
    """What became of each test after all rounds."""

    first: Outcomes
    unsteady: dict[str, int] = field(default_factory=dict)
    """Tests that failed and then passed alone, with the round in which they did."""

    @property
    def failed(self) -> list[str]:
        return [test for test in self.first.failed if test not in self.unsteady]

    @property
    def exit_code(self) -> int:
        return int(bool(self.failed) or len(self.unsteady) > MOST_UNSTEADY)

    def note(self, number: int, outcomes: Outcomes) -> None:
        """Count the tests that passed in a repeat."""
        for test in self.failed:
            if test in outcomes.completed:
                self.unsteady[test] = number

    def as_json(self) -> str:
        """Return the unsteady tests and those that failed again, each with its first failure."""
        told = [
            {"test": test, "passed_in_round": self.unsteady.get(test), "failure": failure}
            for test, failure in self.first.failed.items()
        ]
        return json.dumps(
            {
                "seed": self.first.seed,
                "unsteady": [each for each in told if each["passed_in_round"]],
                "failed": [each for each in told if not each["passed_in_round"]],
            },
            indent=2,
        )

    def summary(self, seconds: float) -> str:
        """Return the last lines of the run; the very last is of the shape of pytest's own."""
        lines = []
        if self.unsteady:
            lines += [_ruled("unsteady: failed among others, passed alone")]
            for test, number in self.unsteady.items():
                lines += [f"{test} (passed in repeat {number})", *_end_of(self.first.failed[test])]
            lines += [f"in the order of --randomly-seed={self.first.seed}"]
        if len(self.unsteady) > MOST_UNSTEADY:
            lines += [f"more than {MOST_UNSTEADY} unsteady tests: the run has failed"]
        lines += [f"FAILED {test}" for test in self.failed]
        completed = self.first.completed
        counts = {
            "failed": len(self.failed),
            # Not of a set: some tests share an id, as those of Schemathesis do.
            "passed": sum(test in completed for test in self.first.passed) + len(self.unsteady),
            "skipped": len(self.first.skipped),
            "unsteady": len(self.unsteady),
        }
        told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        minutes, rest = divmod(int(seconds), 60)
        lines += [_ruled(f"{told} in {seconds:.2f}s ({minutes // 60}:{minutes % 60:02}:{rest:02})")]
        return "\n".join(lines)


def repeat(verdict: Verdict, options: list[str], directory: Path) -> None:
    """Run what failed once more by itself, and what failed then again.

    Args:
        verdict: learns of what passed.
        options: pytest's of the first round.
        directory: for files of the rounds.
    """
    if len(verdict.failed) > MOST_REPEATED:
        print(f"{len(verdict.failed)} tests failed, more than {MOST_REPEATED}: not repeated")
        return
    for number in range(1, ROUNDS + 1):
        if not verdict.failed:
            return
        told = f"repeat {number} of {len(verdict.failed)} that failed, alone"
        print(f"\n{_ruled(told)}", flush=True)
        file, ids = directory / f"round-{number}.json", directory / "ids.json"
        ids.write_text(json.dumps(verdict.failed))
        # A file of results that was asked for is the first round's.
        arguments = [str(file), str(ids), *options, "-n0", "--junit-xml="]
        code = run([sys.executable, "-m", "tests.outcomes", *arguments])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not file.exists():
            print(f"repeat {number} broke off, with exit code {code}")
        if file.exists():
            verdict.note(number, Outcomes.read(file))


def run(command: list[str]) -> int:
    """Run a command in a process group of its own and return its exit code; pass an interrupt on,
    and raise it again when the command has ended.

    Ctrl-C reaches every process of a group. In a group of its own the command is interrupted once:
    at a second interrupt pytest would end without stopping its servers.
    """
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def _end_of(failure: str) -> list[str]:
    lines = failure.splitlines()
    errors = [line for line in lines if line.startswith("E ")] or lines[-LINES:]
    return [f"    {line}" for line in errors[:LINES]]


def _ruled(text: str) -> str:
    return f" {text} ".center(shutil.get_terminal_size().columns, "=")
