"""Sessions of PostgreSQL that go on, for another one's connection, when theirs is closed.

A server's process that has just begun knows no table yet: a new session costs ten times what its
statements do, and most cases lose two or three. Whatever the end of a session undoes is undone
here, and whoever had the connection finds it closed.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg.pq import ConnStatus, PGconn, PipelineStatus, TransactionStatus

IN_ORDER = (TransactionStatus.IDLE, TransactionStatus.INTRANS, TransactionStatus.INERROR)
"""What a session is not in the midst of a statement in."""


class Sessions:
    """Those nobody has, by what they were asked for with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = False
        self._idle: dict[str, list[PGconn]] = defaultdict(list)
        self._cursors: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]]
        self._cursors = weakref.WeakKeyDictionary()
        self._closed = PGconn.connect_start(b"hostaddr=none")
        self._closed.finish()

    def install(self, monkeypatch: Any) -> None:
        """Give new connections the sessions of closed ones."""
        connect = psycopg.Connection._connect_gen.__func__  # type: ignore[attr-defined]
        close, cursor = psycopg.Connection.close, psycopg.Connection.cursor

        def connecting(cls: Any, conninfo: str = "") -> Iterator[Any]:
            with self._lock:
                idle = self._idle[conninfo]
                session = idle.pop() if idle else None
            if session is not None:
                connection = cls(session)
            else:
                connection = yield from connect(cls, conninfo)
            connection._asked_for = conninfo
            return connection

        def making_cursor(connection: Any, *arguments: Any, **options: Any) -> Any:
            made = cursor(connection, *arguments, **options)
            self._cursors.setdefault(connection, weakref.WeakSet()).add(made)
            return made

        def closing(connection: Any) -> None:
            if not self._keep(connection):
                close(connection)

        monkeypatch.setattr(psycopg.Connection, "_connect_gen", classmethod(connecting))
        monkeypatch.setattr(psycopg.Connection, "cursor", making_cursor)
        monkeypatch.setattr(psycopg.Connection, "close", closing)

    def close(self) -> None:
        """End those nobody has; none goes on any more."""
        self._is_over = True
        for sessions in self._idle.values():
            while sessions:
                sessions.pop().finish()

    def _keep(self, connection: Any) -> bool:
        """Take the session of a connection that is closed; False where it cannot go on."""
        session, asked_for = connection.pgconn, getattr(connection, "_asked_for", None)
        if (
            self._is_over
            or asked_for is None
            or session.status != ConnStatus.OK
            or session.pipeline_status != PipelineStatus.OFF
            or session.transaction_status not in IN_ORDER
        ):
            return False
        connection.pgconn, connection._closed = self._closed, True
        for cursor in self._cursors.pop(connection, ()):
            cursor._pgconn = self._closed
        if session.transaction_status != TransactionStatus.IDLE:
            session.exec_(b"ROLLBACK")
        session.exec_(b"DISCARD ALL")
        while session.notifies() is not None:
            pass  # it does not listen any more
        if session.transaction_status != TransactionStatus.IDLE:
            session.finish()  # the server has ended it
            return True
        with self._lock:
            self._idle[asked_for].append(session)
        return True
