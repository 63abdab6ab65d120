"""The databases and transports of workflows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.steps import KJO, MEMORY


@pytest.fixture(
    params=[
        "sqlite_file-memory",
        pytest.param("postgres-database", marks=pytest.mark.postgres),
    ]
)
def engine(request: pytest.FixtureRequest, settings: Any) -> str:
    """Both databases, each with another kind of transport."""
    database, _, transport = request.param.partition("-")
    request.getfixturevalue(database)
    settings.KJO = KJO | (MEMORY if transport == "memory" else {})
    return str(request.param)
