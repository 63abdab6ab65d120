"""Connections to PostgreSQL outside Django's care, and whether a pooler answers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.db import connections

if TYPE_CHECKING:
    import psycopg

_ROUNDS = 3


def plain_connection(alias: str) -> psycopg.Connection[Any]:
    """Connect as Django would, outside its care: no adapters of Django's, no cursors, in
    autocommit, and no answer is waited for long."""
    import psycopg

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
        for _ in range(_ROUNDS):
            # In turns, never at once: a pool of one session has none for a second transaction.
            if backend_pid(other) == own or backend_pid(connection) != own:
                return True
    return False
