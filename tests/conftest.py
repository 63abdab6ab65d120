"""Fixtures of every test."""

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import Phase, settings

# Not Phase.explain: it traces what fails, and under a trace Python 3.11 has hung in an endless loop
# that no time limit ended.
settings.register_profile("default", phases=[p for p in Phase if p is not Phase.explain])

pytest_plugins = ["tests.services.fixtures"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Spell out what no encoding knows: a report that has it, in a line of the log say, cannot be
    sent to the process that collects them, and ends the whole run."""
    report = yield
    report.sections = [(name, sendable(text)) for name, text in report.sections]
    if report.failed and sendable(text := str(report.longrepr)) != text:
        report.longrepr = sendable(text)
    return report


def sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
