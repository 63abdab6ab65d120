"""Wake-up calls through PostgreSQL's NOTIFY. Imported only where psycopg 3 is in use."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Collection, Sequence
from typing import Any

import psycopg
from django.db import connections

from kjo_django.coordination.base import Listener
from kjo_django.coordination.listeners import Alarm
from kjo_django.exceptions import CoordinationError

logger = logging.getLogger("kjo_django.coordination.postgres")

CHANNEL = "kjo"
"""The one channel of the server; ours are the payload, so that their names need no quoting."""
_LONGEST_PAUSE = 5.0
_ALIVE_EVERY = 60.0


def send(alias: str, channels: Collection[str]) -> None:
    """Notify on Django's own connection: heard when its transaction commits."""
    with connections[alias].cursor() as cursor:
        statement = "SELECT pg_notify(%s, channel) FROM unnest(%s::text[]) AS channel"
        cursor.execute(statement, [CHANNEL, list(channels)])


class PostgresListener(Listener):
    """Listens on a connection of its own, outside Django's: those are closed and pooled."""

    def __init__(self, alias: str, channels: Sequence[str]) -> None:
        self._alias = alias
        self._channels = frozenset(channels)
        self._alarm = Alarm()
        self._failures = 0
        self._retry_at = 0.0
        self._alive_at = 0.0
        self._closed = False
        self._connection: psycopg.Connection[Any] | None = None
        try:
            self._connection = self._connect()
        except psycopg.Error as error:
            self._alarm.close()
            raise CoordinationError(
                f"Database {alias!r} (KJO['COORDINATION']) cannot be listened to: {error}"
            ) from error

    def _connect(self) -> psycopg.Connection[Any]:
        parameters = connections[self._alias].get_connection_params()
        # Ours is plain: no adapters of Django's, no cursors, and no answer is waited for long.
        for name in ("context", "cursor_factory", "prepare_threshold"):
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

    def wait(self, timeout: float) -> set[str]:
        """Wait for calls. After a lost connection all channels count as called, once it is back:
        nobody knows what was missed."""
        deadline = time.monotonic() + timeout
        while not self._closed:
            try:
                called, woken = self._listen(deadline - time.monotonic())
            except (psycopg.Error, OSError, ValueError) as error:
                self._lose(error)
                continue
            if called or woken or time.monotonic() >= deadline:
                return called
        return set()

    def _listen(self, timeout: float) -> tuple[set[str], bool]:
        if self._connection is None:
            pause = self._retry_at - time.monotonic()
            if pause > 0:
                return set(), self._alarm.wait(min(pause, timeout))
            self._connection = self._connect()
            self._failures = 0
            return set(self._channels), False
        connection = self._connection
        called = self._heard(connection)
        if called:
            return called, False
        woken = self._alarm.wait(min(timeout, _ALIVE_EVERY), connection.fileno())
        if time.monotonic() >= self._alive_at:
            # A connection cut without a word looks silent for ever; asking finds out.
            connection.execute("SELECT 1")
            self._alive_at = time.monotonic() + _ALIVE_EVERY
        return self._heard(connection), woken

    def _heard(self, connection: psycopg.Connection[Any]) -> set[str]:
        calls = {notice.payload for notice in connection.notifies(timeout=0)}
        return calls & self._channels

    def _lose(self, error: Exception) -> None:
        if self._failures == 0:
            logger.warning("Lost the listening connection to %r: %s", self._alias, error)
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        pause = min(_LONGEST_PAUSE, 0.1 * 2.0**self._failures)
        self._failures += 1
        self._retry_at = time.monotonic() + pause * random.uniform(0.5, 1.0)  # noqa: S311

    def wake(self) -> None:
        """Make ``wait`` return."""
        self._alarm.ring()

    def close(self) -> None:
        """Close the connection; to be called by the owning thread."""
        if self._closed:
            return
        self._closed = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._alarm.close()
