"""Database connections of a lane's thread, which no request cycle looks after."""

from __future__ import annotations

import time

from django.db import DatabaseError, InterfaceError, connections
from django.db.backends.base.base import BaseDatabaseWrapper


def freshen_connections() -> None:
    """Close this thread's connections that are broken, left without autocommit or past their
    CONN_MAX_AGE, as Django does between requests; a CONN_MAX_AGE of 0 is not taken as a wish to
    reconnect for every group."""
    for connection in connections.all(initialized_only=True):
        # With DEBUG on, Django keeps the latest queries; a worker's are large, and nobody asks.
        connection.queries_log.clear()
        if connection.connection is None or connection.in_atomic_block:
            continue
        is_left_open = connection.autocommit != connection.settings_dict["AUTOCOMMIT"]
        if is_left_open or (connection.errors_occurred and not connection.is_usable()):
            connection.close()
            continue
        connection.errors_occurred = False
        max_age = connection.settings_dict["CONN_MAX_AGE"]
        if max_age and connection.close_at is not None and time.monotonic() >= connection.close_at:
            connection.close()


def drop_broken_connections() -> None:
    """Close what no longer answers; the next query connects anew."""
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block and not connection.is_usable():
            connection.close()


def is_broken(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the connection can no longer carry its transaction."""
    # closed_in_transaction: by the handler itself; SQLite's is_usable() would not tell.
    if connection.connection is None or connection.closed_in_transaction:
        return True
    if connection.needs_rollback:  # its savepoint was not there any more
        return True
    return bool(connection.errors_occurred and not connection.is_usable())


def answers(using: str) -> bool:
    """Return whether the database can be used now, on a new connection where the old one broke."""
    connection = connections[using]
    try:
        if connection.connection is not None and not connection.is_usable():
            connection.close()
        connection.ensure_connection()
        return connection.is_usable()
    except (DatabaseError, InterfaceError, OSError):
        return False


def is_busy(error: BaseException) -> bool:
    """Whether a database says that somebody else is in the way: locks waited for in vain, deadlocks
    and conflicts it resolved. That passes, whatever it was asked for."""
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) in _BUSY_STATES or "is locked" in str(error)


_BUSY_STATES = frozenset({"40001", "40P01", "55P03", "57014"})
"""Serialization failure, deadlock, lock not available, statement ended by its time limit."""
