"""A simulation on a SQLite file; the test's parameter names the transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.building import TASKS, built, kjo
from tests.faults.conftest import _file_of
from tests.simulation.running import Simulation
from tests.unit.conftest import _migrated_file, sqlite_file  # noqa: F401


@pytest.fixture
def simulation(request: Any, settings: Any, monkeypatch: Any) -> Iterator[Simulation]:
    settings.KJO = kjo(request.param)
    settings.TASKS = TASKS
    path = request.getfixturevalue("sqlite_file")
    empty = _file_of(path, request.getfixturevalue("_migrated_file"))
    with built(monkeypatch, empty, Simulation, stands=True) as made:
        yield made
