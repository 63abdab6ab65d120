"""A simulation; the test's parameter names the transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.simulation.running import Simulation, simulated


@pytest.fixture
def simulation(request: Any, django_db_blocker: Any) -> Iterator[Simulation]:
    template = request.getfixturevalue("sqlite_template")
    with django_db_blocker.unblock(), simulated(request.param, template) as made:
        yield made
