"""Worlds: a SQLite file or PostgreSQL, the memory transport or the database's."""

from __future__ import annotations

import functools
import shutil
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections

from kjo_django.transports.database.transport import forget_groups
from tests.faults.building import TASKS, built, kjo
from tests.faults.sessions import Sessions
from tests.faults.world import World

MICROSECOND = 1e-6
ENGINES = ["sqlite-database", "sqlite-memory", "postgres-database", "postgres-memory"]


@pytest.fixture
def world(request: Any, settings: Any, monkeypatch: Any) -> Iterator[World]:
    """The world of the engine that the test's parameter names."""
    vendor, transport = request.param.split("-")
    settings.KJO = kjo(transport)
    settings.TASKS = TASKS
    if vendor == "sqlite":
        path = request.getfixturevalue("sqlite_file")
        session = sqlite3.connect(path, timeout=0, isolation_level=None)
        request.addfinalizer(session.close)
        session.execute("PRAGMA synchronous=OFF")
        options = connections["default"].settings_dict["OPTIONS"]
        # No case's process is killed, and none needs a file for what it may have to undo.
        commands = f"{options['init_command']}; PRAGMA journal_mode=MEMORY"
        monkeypatch.setitem(options, "init_command", commands)
        connections["default"].close()
        empty = functools.partial(_delete_all_of_file, session)
    else:
        request.getfixturevalue("postgres")
        connections["default"].close()
        options = connections["default"].settings_dict["OPTIONS"]
        # Nobody may wait for ever for what a struck call has left locked, and no commit for a disk.
        monkeypatch.setitem(options, "options", "-c lock_timeout=3000 -c synchronous_commit=off")
        sessions = Sessions()
        request.addfinalizer(sessions.close)
        sessions.install(monkeypatch)
        empty = _delete_all
    stands, tick = getattr(request.module, "TIME_STANDS", False), 0.0
    if "scenario" in request.fixturenames:
        stands, tick = request.getfixturevalue("scenario").stands, MICROSECOND
    with built(monkeypatch, empty, stands=stands, tick=tick) as made:
        yield made


def _file_of(path: Any, template: Any) -> Any:
    """Return what gives every schedule of a simulation a fresh file."""

    def empty() -> None:
        connections["default"].close()
        del connections["default"]
        shutil.copyfile(template, path)
        forget_groups()

    return empty


def _delete_all_of_file(session: sqlite3.Connection) -> None:
    """Delete all rows in a session of the harness: the next case's process goes on with the last
    one's, which has its statements prepared, unless that is in the midst of something."""
    forget_groups()
    connection = connections["default"]
    script = f"BEGIN EXCLUSIVE; {_deletions()}; COMMIT"
    if connection.in_atomic_block or not connection.get_autocommit():
        _drop_session()
    try:
        session.executescript(script)
    except sqlite3.OperationalError:  # a cursor that was left open keeps it locked
        session.rollback()
        _drop_session()
        session.executescript(script)


def _drop_session() -> None:
    connections["default"].close()
    del connections["default"]


def _delete_all() -> None:
    forget_groups()
    with connections["default"].cursor() as cursor:
        cursor.execute(f"BEGIN; {_deletions()}; COMMIT")


@functools.cache
def _deletions() -> str:
    tables = [
        name
        for name in connections["default"].introspection.table_names()
        if name.startswith(("kjo_", "ledger_", "processed_", "items_"))
    ]
    return "; ".join(f'DELETE FROM "{name}"' for name in tables)
