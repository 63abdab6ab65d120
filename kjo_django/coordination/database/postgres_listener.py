"""Wake-up calls through PostgreSQL's NOTIFY. Imported only where psycopg 3 is in use.

A pooler in transaction mode lends a session for one transaction: what is listened for outlives it
only in somebody else's hands.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import psycopg

from kjo_django.coordination.base import ReconnectingListener
from kjo_django.exceptions import CoordinationError
from kjo_django.store.postgres import (
    NOTIFY_CHANNEL,
    backend_pid,
    lends_sessions,
    plain_connection,
)
from kjo_django.store.servers import reports_read_only

_ALIVE_EVERY = 60.0


class SessionLentError(CoordinationError):
    """LISTEN would be swallowed: a pooler in transaction mode stands before the server."""

    def __init__(self, alias: str) -> None:
        super().__init__(
            f"Database {alias!r} (KJO['COORDINATION']) is reached through a pooler in transaction "
            "mode, where nobody can listen; work is found by polling (POLL_INTERVAL). Name a "
            "direct connection in KJO['COORDINATION']['OPTIONS']['LISTEN_DATABASE'], or use Redis"
        )


class PostgresListener(ReconnectingListener):
    """Listens outside Django's connections: those are closed and pooled.

    :raises SessionLentError: a pooler would give the session that listens to another client, which
        would hear our calls without end, while we would hear nothing.
    """

    outages = (psycopg.Error, SessionLentError, OSError, ValueError)
    longest_sleep = _ALIVE_EVERY

    def __init__(self, alias: str, channels: Sequence[str]) -> None:
        self._alias = alias
        self._alive_at = 0.0
        self._backend = 0
        try:
            super().__init__(f"database {alias!r}", channels)
        except psycopg.Error as error:
            raise CoordinationError(
                f"Database {alias!r} (KJO['COORDINATION']) cannot be listened to: {error}"
            ) from error

    def _connect(self) -> psycopg.Connection[Any]:
        connection = plain_connection(self._alias)
        try:
            if lends_sessions(connection, partial(plain_connection, self._alias)):
                raise SessionLentError(self._alias)
            self._backend = backend_pid(connection)
            connection.execute(f"LISTEN {NOTIFY_CHANNEL}")
        except BaseException:
            connection.close()
            raise
        self._alive_at = time.monotonic() + _ALIVE_EVERY
        return connection

    def _descriptor(self, connection: psycopg.Connection[Any]) -> int:
        return connection.fileno()

    def _heard(self, connection: psycopg.Connection[Any]) -> set[str]:
        if time.monotonic() >= self._alive_at:
            # A connection cut without a word looks silent for ever; asking finds out.
            # Also that the session is another's by now: a pooler that was too busy to be seen.
            if backend_pid(connection) != self._backend:
                raise SessionLentError(self._alias)
            if reports_read_only(connection):
                raise psycopg.OperationalError("No NOTIFY comes: the server takes no writes")
            self._alive_at = time.monotonic() + _ALIVE_EVERY
        calls = {notice.payload for notice in connection.notifies(timeout=0)}
        return calls & self._channels

    def _disconnect(self, connection: psycopg.Connection[Any]) -> None:
        connection.close()
