"""Wake-up calls through PostgreSQL's NOTIFY. Imported only where psycopg 3 is in use.

A pooler in transaction mode lends a session for one transaction: what is listened for outlives it
only in somebody else's hands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import psycopg
from django.db import connections

from kjo_django.coordination.reconnecting import ReconnectingListener
from kjo_django.exceptions import CoordinationError

CHANNEL = "kjo"
"""The one channel of the server; ours are the payload, so that their names need no quoting."""
_ALIVE_EVERY = 60.0
_TURNS = 3


class SessionLentError(CoordinationError):
    """LISTEN would be swallowed: a pooler in transaction mode stands before the server."""

    def __init__(self, alias: str) -> None:
        super().__init__(
            f"Database {alias!r} (KJO['COORDINATION']) is reached through a pooler in transaction "
            "mode, where nobody can listen; work is found by polling (POLL_INTERVAL). Name a "
            "direct connection in KJO['COORDINATION']['OPTIONS']['LISTEN_DATABASE'], or use Redis"
        )


def plain_connection(alias: str) -> psycopg.Connection[Any]:
    """Connect as Django would, outside its care: no adapters of Django's, no cursors, in
    autocommit, and no answer is waited for long."""
    parameters = connections[alias].get_connection_params()
    # prepare_threshold stays: what is prepared is lost, or met by others, behind a pooler.
    for name in ("context", "cursor_factory"):
        parameters.pop(name, None)
    parameters.setdefault("connect_timeout", 5)
    return psycopg.connect(**parameters, autocommit=True)


def backend_pid(connection: psycopg.Connection[Any]) -> int:
    """Ask which process of the server serves the connection now."""
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None
    return int(row[0])


def lends_sessions(
    connection: psycopg.Connection[Any], connect: Callable[[], psycopg.Connection[Any]]
) -> bool:
    """Return whether a pooler in transaction mode stands before the server.

    A direct connection costs one query: the server says at the login which process it has. A pooler
    says something of its own, and then two connections take turns: in transaction mode they soon
    meet the same session, where a session of one's own stays. A pool that is so busy that they do
    not is taken for one in session mode.

    :param connection: in autocommit, and without prepared statements.
    :param connect: makes another like it; used, and closed, only behind a pooler.
    """
    own = backend_pid(connection)
    if own == connection.info.backend_pid:
        return False
    with connect() as other:
        for _ in range(_TURNS):
            # In turns, never at once: a pool of one session has none for a second transaction.
            if backend_pid(other) == own or backend_pid(connection) != own:
                return True
    return False


def send(alias: str, channels: Collection[str]) -> None:
    """Notify on Django's own connection: heard when its transaction commits."""
    with connections[alias].cursor() as cursor:
        statement = "SELECT pg_notify(%s, channel) FROM unnest(%s::text[]) AS channel"
        cursor.execute(statement, [CHANNEL, list(channels)])


class PostgresListener(ReconnectingListener["psycopg.Connection[Any]"]):
    """Listens outside Django's connections: those are closed and pooled.

    :raises SessionLentError: a pooler would give the LISTEN to somebody else, who then hears our
        calls, without end, while we hear nothing.
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
            # Also that the session is another's by now: a pooler that was too busy to be seen.
            if backend_pid(connection) != self._backend:
                raise SessionLentError(self._alias)
            self._alive_at = time.monotonic() + _ALIVE_EVERY
        calls = {notice.payload for notice in connection.notifies(timeout=0)}
        return calls & self._channels

    def _disconnect(self, connection: psycopg.Connection[Any]) -> None:
        connection.close()
