"""The calls a simulated process makes over its boundaries, and what may befall one of them.

Recorded are the statements, commits, roll-backs and connects of the database, and every method of
the contracts of transports, subscriptions and coordination: found by looking at these classes, so a
new one is covered too.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from django.db import OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from kjo_django.coordination.base import Coordination
from kjo_django.exceptions import CoordinationError, PublishError
from kjo_django.transports.base import Published, Subscription, Transport

WITHOUT_IO = {"assignment", "holds", "wake", "close"}
"""Methods of the contracts that only ask what their process knows, or end its use of them."""


class Died(BaseException):
    """The process is dead: nothing it does has an effect any more."""


class Endless(BaseException):
    """A process makes more calls than any schedule needs."""


MOST_CALLS = 20_000


class Fault(enum.Enum):
    RAISES_BEFORE = "raises-before"
    RAISES_AFTER = "raises-after"
    DIES_AFTER = "dies-after"
    TAKES_40_S = "takes-40-s"
    """And meanwhile another worker takes its turn; this one gives no sign of life."""
    RIVAL_DIES = "rival-dies"
    """As before, and the other worker dies in its turn."""
    OVERLAPS = "overlaps"
    """It takes no time to speak of, and yet another worker takes its turn meanwhile."""


TAKES = {Fault.TAKES_40_S: 40.0, Fault.RIVAL_DIES: 40.0, Fault.OVERLAPS: 0.0}
"""Seconds that the struck call takes."""


class Boundary:
    """Of one simulated process.

    :param at: number of the call that is struck.
    :param elapse: lets so many seconds pass, in which another worker takes its turn.
    """

    def __init__(
        self,
        fault: Fault | None = None,
        at: int = -1,
        elapse: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.fault = fault
        self.at = at
        self.calls: list[str] = []
        self.call_count = 0
        self.contract_calls = 0
        """How many calls of transports and coordination have ended."""
        self.mark: Callable[[], Any] | None = None
        """Returns what somebody would find who comes after a death at this moment."""
        self.marks: dict[int, Any] = {}
        """What ``mark`` returned after each call that raised nothing."""
        self.is_open = True
        """Whether calls are recorded, and one is struck."""
        self.is_dead = False
        self.struck = ""
        self.on_thread: Callable[[], None] = lambda: None
        """Called first in each thread that the process starts."""
        self._elapse = elapse
        self._connections: dict[BaseDatabaseWrapper, threading.RLock] = {}
        """And the lock that who is within a call of each holds."""
        self._cursors: weakref.WeakSet[CursorWrapper] = weakref.WeakSet()
        self._lock = threading.RLock()

    def uses(
        self, connection: BaseDatabaseWrapper, cursor: CursorWrapper | None = None
    ) -> threading.RLock:
        """Return the lock to hold while this connection is used."""
        if cursor is not None:
            self._cursors.add(cursor)
        return self._connections.setdefault(connection, threading.RLock())

    def die(self) -> None:
        """End all sessions: first those of this thread, whose locks others may wait for, then each
        of another thread when the call that it is in has ended. A client's library crashes when a
        session is closed under its hands."""
        self.is_dead = True
        me = threading.get_ident()
        for connection, lock in sorted(
            self._connections.items(), key=lambda each: each[0]._thread_ident != me
        ):
            with lock:
                self.end_statements(connection._thread_ident)
                _close_raw(connection)

    def end_statements(self, thread_id: int | None) -> None:
        """End what statements of a thread have to give. SQLite keeps its lock until then, whether
        the connection is closed or not."""
        for cursor in [each for each in self._cursors if each.db._thread_ident == thread_id]:
            with contextlib.suppress(Exception):
                cursor.close()

    def cross(
        self, name: str, effect: Callable[[], Any], fail: Callable[[bool], Any] | None = None
    ) -> Any:
        """:param fail: raises what this call raises, or returns what it then answers; told whether
        that is before its effect."""
        if self.is_dead:
            raise Died
        self.call_count += 1
        if self.call_count > MOST_CALLS:
            raise Endless(f"it goes on for ever, with {name}")
        with self._lock:
            number, is_open = len(self.calls), self.is_open
            is_struck = is_open and number == self.at and self.fault is not None
            if is_open:
                self.calls.append(name)
        if not is_struck:
            answer = effect()
            if self.mark is not None and is_open:
                self.marks[number] = self.mark()
            return answer
        self.struck = name
        if self.fault is Fault.RAISES_BEFORE and fail is not None:
            return fail(True)
        if self.fault in TAKES:
            self._elapse(TAKES[self.fault])
        answer = effect()
        if self.fault is Fault.RAISES_AFTER and fail is not None:
            return fail(False)
        if self.fault is Fault.DIES_AFTER:
            self.die()
            raise Died
        return answer


class _Current(threading.local):
    boundary: Boundary | None = None


_current = _Current()


def current() -> Boundary | None:
    """Return the boundary of the process this thread belongs to."""
    return _current.boundary


@contextlib.contextmanager
def within(boundary: Boundary | None) -> Iterator[None]:
    """Let this thread belong to that process."""
    before, _current.boundary = _current.boundary, boundary
    try:
        yield
    finally:
        _current.boundary = before


# --- Instruments ----------------------------------------------------------------------------------


def install(monkeypatch: Any, classes: list[type]) -> None:
    """Watch the database and these classes of transports, subscriptions and coordination."""
    for name in ("execute", "executemany"):
        monkeypatch.setattr(CursorWrapper, name, _statement(getattr(CursorWrapper, name)))
    for name in ("fetchone", "fetchmany", "fetchall"):
        monkeypatch.setattr(CursorWrapper, name, _fetch(name), raising=False)
    monkeypatch.setattr(CursorWrapper, "close", _close, raising=False)
    monkeypatch.setattr(psycopg.Cursor, "copy", _copy(psycopg.Cursor.copy))
    for name, fail in (("_commit", _fail_commit), ("_rollback", _lose), ("connect", _lose)):
        wrapped = _of_connection(name.strip("_"), getattr(BaseDatabaseWrapper, name), fail)
        monkeypatch.setattr(BaseDatabaseWrapper, name, wrapped)
    for each in classes:
        contract = next(c for c in (Transport, Subscription, Coordination) if issubclass(each, c))
        for name, _ in inspect.getmembers(contract, inspect.isfunction):  # its bases' too
            if name.startswith("_") or name in WITHOUT_IO:
                continue
            label = f"{contract.__name__.lower()}.{name}"
            monkeypatch.setattr(each, name, _method(label, getattr(each, name), contract))
    monkeypatch.setattr(threading.Thread, "start", _start(threading.Thread.start))


def _start(start: Any) -> Any:
    """A thread belongs to the process that starts it, and ends quietly with it."""

    @functools.wraps(start)
    def starting(thread: threading.Thread) -> None:
        boundary, run = current(), thread.run
        if boundary is not None:

            def run_within() -> None:
                with within(boundary), contextlib.suppress(Died):
                    boundary.on_thread()
                    run()

            thread.run = run_within  # type: ignore[method-assign]
        start(thread)

    return starting


def _statement(execute: Any) -> Any:
    @functools.wraps(execute)
    def executing(cursor: Any, sql: Any, *arguments: Any, **options: Any) -> Any:
        boundary = current()
        if boundary is None:
            return execute(cursor, sql, *arguments, **options)
        lock = boundary.uses(cursor.db, cursor)

        def effect() -> Any:
            with lock:
                return execute(cursor, sql, *arguments, **options)

        return boundary.cross(_short(sql), effect, functools.partial(_fail_statement, cursor.db))

    return executing


def _fetch(name: str) -> Any:
    """No call over the boundary, but SQLite's library may not be within one when its session is
    closed: it makes rows as they are fetched."""

    def fetching(cursor: Any, *arguments: Any) -> Any:
        fetch, boundary = CursorWrapper.__getattr__(cursor, name), current()
        if boundary is None:
            return fetch(*arguments)
        with boundary.uses(cursor.db):
            if boundary.is_dead:
                raise Died
            return fetch(*arguments)

    return fetching


def _close(cursor: Any) -> None:
    """Close a cursor while its session is not being closed, which SQLite's library may not meet."""
    close, boundary = CursorWrapper.__getattr__(cursor, "close"), current()
    with contextlib.nullcontext() if boundary is None else boundary.uses(cursor.db):
        close()


def _copy(copy: Any) -> Any:
    @functools.wraps(copy)
    def copying(cursor: Any, statement: Any, *arguments: Any, **options: Any) -> Any:
        boundary = current()
        effect = functools.partial(copy, cursor, statement, *arguments, **options)

        def fail(before: bool) -> Any:
            raise psycopg.OperationalError("as the matrix wants it")

        return effect() if boundary is None else boundary.cross(_short(statement), effect, fail)

    return copying


def _of_connection(label: str, method: Any, fail: Any) -> Any:
    @functools.wraps(method)
    def calling(connection: Any) -> Any:
        boundary = current()
        if boundary is None:
            return method(connection)
        lock = boundary.uses(connection)

        def effect() -> Any:
            with lock:
                return method(connection)

        if boundary.is_dead and label == "rollback":
            return None  # closed by its death, which undid what was open
        return boundary.cross(label, effect, functools.partial(fail, connection))

    return calling


def _method(label: str, method: Any, contract: type) -> Any:
    @functools.wraps(method)
    def calling(self: Any, *arguments: Any, **options: Any) -> Any:
        boundary = current()
        if boundary is None:
            return method(self, *arguments, **options)

        def effect() -> Any:
            try:
                return method(self, *arguments, **options)
            finally:
                boundary.contract_calls += 1

        def fail(before: bool) -> Any:
            text = "as the matrix wants it"
            if contract is Coordination:
                raise CoordinationError(text)
            if label == "transport.publish" and not before and not self.capabilities.transactional:
                # What a broker took, and the client never heard of.
                return [Published(error="timed out") for _ in arguments[0]]
            if label.startswith("subscription.acknowledge"):
                raise OperationalError(text)
            raise PublishError(text)

        return boundary.cross(label, effect, fail)

    return calling


def _fail_statement(connection: Any, before: bool) -> None:
    """Before its effect the statement is refused; after it the connection is lost."""
    connection.errors_occurred = True
    raw = connection.connection
    if before:
        if connection.vendor == "sqlite":
            raise OperationalError("database is locked")
        if raw.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS:
            with contextlib.suppress(psycopg.Error):
                raw.execute("SELECT 1/0")  # as any error: the transaction is good for nothing now
        raise OperationalError("canceling statement as the matrix wants it")
    _lose(connection, before)


def _fail_commit(connection: Any, before: bool) -> None:
    connection.errors_occurred = True
    if before:
        connection.connection.rollback()
        raise OperationalError("could not commit, as the matrix wants it")
    _lose(connection, before)


def _lose(connection: Any, before: bool) -> None:
    connection.errors_occurred = True
    if connection.vendor == "sqlite":
        if connection.connection is not None and connection.connection.in_transaction:
            connection.connection.rollback()
        raise OperationalError("disk I/O error, as the matrix wants it")
    _close_raw(connection)
    raise OperationalError("the connection is lost, as the matrix wants it")


def _close_raw(connection: Any) -> None:
    if connection.connection is not None:
        with contextlib.suppress(Exception):
            connection.connection.close()


@functools.lru_cache(maxsize=4096)
def _short(sql: Any) -> str:
    """Say which statement this is, in a few words."""
    text = re.sub(r' "s\d+_x\d+"', "", " ".join(str(sql).split()))  # names of savepoints
    verb = text.partition(" ")[0].upper()
    tables = re.findall(r'(?:FROM|INTO|UPDATE|COPY)\s+"?(\w+)"?', text)
    # What is prepared: the last of a text, without the part of the name that is drawn.
    tables = re.findall(r"EXECUTE (\w+)_[0-9a-f]{12}\b", text)[-1:] or tables
    # Leases are given up behind it.
    ends = " + COMMIT" if "; COMMIT" in text else ""
    return f"{verb} {tables[0]}{ends}" if tables else text[:40]
