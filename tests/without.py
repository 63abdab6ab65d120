"""Skipping the tests that need an extra which is not installed; see ``tests/absence.py``."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from tests.absence import absent, is_missing

WHY = "needs an extra that is not installed"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Skip a module of tests that imports what is not installed."""
    report = yield
    if report.failed and is_missing(report.call.excinfo.value):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, WHY)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    """Skip a test that needs what is not installed."""
    report = yield
    if call.excinfo is not None and is_missing(call.excinfo.value):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, WHY)
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that are marked as needing a server whose client is not installed."""
    missing = absent()
    for item in items:
        if any(item.get_closest_marker(name) for name in missing):
            item.add_marker(pytest.mark.skip(WHY))
