"""Worlds: a SQLite file or PostgreSQL, the memory transport or the database's."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections

from kjo_django.transports.database.transport import forget_groups
from tests.faults.building import TASKS, built, kjo
from tests.faults.world import World
from tests.unit.conftest import (  # noqa: F401
    _migrated_file,
    _migrated_postgres,
    postgres,
    sqlite_file,
)

ENGINES = ["sqlite-database", "sqlite-memory", "postgres-database", "postgres-memory"]


@pytest.fixture
def world(request: Any, settings: Any, monkeypatch: Any) -> Iterator[World]:
    """The world of the engine that the test's parameter names."""
    vendor, transport = request.param.split("-")
    settings.KJO = kjo(transport)
    settings.TASKS = TASKS
    if vendor == "sqlite":
        path = request.getfixturevalue("sqlite_file")
        template = request.getfixturevalue("_migrated_file")
        empty = _file_of(path, template)
    else:
        request.getfixturevalue("postgres")
        connections["default"].close()
        options = connections["default"].settings_dict["OPTIONS"]
        # Nobody may wait for ever for what a struck call has left locked.
        monkeypatch.setitem(options, "options", "-c lock_timeout=3000")
        empty = _delete_all
    with built(monkeypatch, empty) as made:
        yield made


def _file_of(path: Any, template: Any) -> Any:
    def empty() -> None:
        connections["default"].close()
        del connections["default"]
        shutil.copyfile(template, path)
        forget_groups()

    return empty


def _delete_all() -> None:
    forget_groups()
    with connections["default"].cursor() as cursor:
        cursor.execute(_deletions())


@functools.cache
def _deletions() -> str:
    tables = [
        name
        for name in connections["default"].introspection.table_names()
        if name.startswith(("kjo_", "ledger_", "processed_", "items_"))
    ]
    return "; ".join(["BEGIN", *(f'DELETE FROM "{name}"' for name in tables), "COMMIT"])
