"""What became of each test of a run of pytest, for whoever started it.

Run as a program (`python -m tests.outcomes FILE IDS [PYTEST ARGUMENTS]`), it runs the tests whose
ids are in the file IDS, a list in JSON, and writes to FILE what became of them, so that one process
can learn of the run of another one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(eq=False)  # pytest keeps plugins in sets
class Outcomes:
    """A plugin that keeps what became of each test, by its id."""

    seed: int = 0
    """Of the random order of the tests."""
    collected: int = 0
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """What is known of the first failure of each test that failed in any phase."""
    is_whole: bool = True
    """False where files could not be collected, or the run was ended before the last test."""

    @classmethod
    def read(cls, path: Path) -> Outcomes:
        """Read what `write` wrote."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @property
    def completed(self) -> set[str]:
        """The tests that passed in every phase."""
        return set(self.passed) - set(self.failed)

    def pytest_configure(self, config: pytest.Config) -> None:
        self.seed = int(getattr(config.option, "randomly_seed", 0) or 0)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.collected = len(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.is_whole = self.is_whole and not report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, report.longreprtext)
        elif report.skipped:
            self.skipped.append(report.nodeid)
        elif report.when == "call":
            self.passed.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.is_whole = self.is_whole and not (session.shouldfail or session.shouldstop)

    def pytest_keyboard_interrupt(self) -> None:
        self.is_whole = False

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.is_whole:
            ran = len({*self.passed, *self.skipped, *self.failed})
            terminalreporter.write_line(f"ended after {ran} of {self.collected} tests")


@dataclass(eq=False)
class Selection:
    """A plugin that runs only the tests with these ids: all of them, where some share one.

    pytest's own `--last-failed` forgets a failure when another test of the same id passes, as
    those of Schemathesis do.
    """

    ids: frozenset[str]

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None, None, None]:
        yield  # the other plugins want to see every test
        config.hook.pytest_deselected(items=[each for each in items if each.nodeid not in self.ids])
        items[:] = [each for each in items if each.nodeid in self.ids]


def main(file: str, ids: str, *arguments: str) -> int:
    outcomes = Outcomes()
    selection = Selection(frozenset(json.loads(Path(ids).read_text())))
    code = int(pytest.main([*arguments], plugins=[outcomes, selection]))
    outcomes.write(Path(file))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
