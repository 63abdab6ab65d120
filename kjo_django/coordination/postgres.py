"""Wake-up calls through PostgreSQL's NOTIFY. Imported only where psycopg 3 is in use."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import psycopg
from django.db import connections

from kjo_django.coordination.reconnecting import ReconnectingListener
from kjo_django.exceptions import CoordinationError

CHANNEL = "kjo"
"""The one channel of the server; ours are the payload, so that their names need no quoting."""
_ALIVE_EVERY = 60.0


def send(alias: str, channels: Collection[str]) -> None:
    """Notify on Django's own connection: heard when its transaction commits."""
    with connections[alias].cursor() as cursor:
        statement = "SELECT pg_notify(%s, channel) FROM unnest(%s::text[]) AS channel"
        cursor.execute(statement, [CHANNEL, list(channels)])


class PostgresListener(ReconnectingListener["psycopg.Connection[Any]"]):
    """Listens outside Django's connections: those are closed and pooled."""

    outages = (psycopg.Error, OSError, ValueError)
    longest_sleep = _ALIVE_EVERY

    def __init__(self, alias: str, channels: Sequence[str]) -> None:
        self._alias = alias
        self._alive_at = 0.0
        try:
            super().__init__(f"database {alias!r}", channels)
        except psycopg.Error as error:
            raise CoordinationError(
                f"Database {alias!r} (KJO['COORDINATION']) cannot be listened to: {error}"
            ) from error

    def _connect(self) -> psycopg.Connection[Any]:
        parameters = connections[self._alias].get_connection_params()
        # Ours is plain: no adapters of Django's, no cursors, and no answer is waited for long.
        # prepare_threshold stays: what is prepared is lost, or met by others, behind a pooler.
        for name in ("context", "cursor_factory"):
            parameters.pop(name, None)
        parameters.setdefault("connect_timeout", 5)
        connection = psycopg.connect(**parameters, autocommit=True)
        try:
            connection.execute(f"LISTEN {CHANNEL}")
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
            connection.execute("SELECT 1")
            self._alive_at = time.monotonic() + _ALIVE_EVERY
        calls = {notice.payload for notice in connection.notifies(timeout=0)}
        return calls & self._channels

    def _disconnect(self, connection: psycopg.Connection[Any]) -> None:
        connection.close()
