"""Database connections of a lane's thread, which no request cycle looks after."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

from django.db import DatabaseError, Error, InterfaceError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from kjo_django.engine.attempt import Attempt
from kjo_django.exceptions import (
    JobCancelledError,
    JobTimeoutError,
    PausableError,
    PermanentError,
    Retry,
    TransactionEndedError,
)
from kjo_django.logs import get_logger
from kjo_django.store import Store, store_for
from kjo_django.store.servers import drop, is_usable
from kjo_django.store.session_changes import (
    COMMENTS,
    changed,
    finder,
    note_changes,
    notice,
    text_of_query,
)

logger = get_logger("kjo_django")


def freshen_connections(
    *,
    is_own: bool = False,
    outer: Mapping[str, int] | None = None,
    may_close: bool = True,
    among: Iterable[BaseDatabaseWrapper] | None = None,
) -> TransactionManagementError | None:
    """Close this thread's connections that are broken, left without autocommit or past their
    CONN_MAX_AGE, as Django does between requests; a CONN_MAX_AGE of 0 is not taken as a wish to
    reconnect for every group.

    :param is_own: whether the thread is a worker's. A transaction that is open between its jobs is
        nobody's: a handler left it, or was torn out of ``atomic()`` by its timeout. It would take
        with it what the thread commits from now on.
    :param outer: of other threads, the ``open_blocks`` that are somebody's; all, if not given.
    :param may_close: whether a session in which something is changed may be closed: nobody goes on
        who relies on that.
    :returns: what to raise for the handler that ran last, if it has left a transaction that is now
        undone. Whatever the handler believes, that was never committed.
    """
    left: TransactionManagementError | None = None
    for connection in connections.all(initialized_only=True) if among is None else among:
        # With DEBUG on, Django keeps the latest queries; a worker's are large, and nobody asks.
        connection.queries_log.clear()
        blocks: list[Any] = connection.atomic_blocks
        if is_own:
            around = sum(block._from_testcase for block in blocks)
        elif outer is None:
            around = len(blocks)
        else:
            around = outer.get(connection.alias, 0)
        if connection.connection is None or connection.in_atomic_block:
            error = _end_blocks(connection, around)
        else:
            error = _freshen_open(connection, around, is_own=is_own, may_close=may_close)
        left = error or left
    return left


def _freshen_open(
    connection: BaseDatabaseWrapper, around: int, *, is_own: bool, may_close: bool
) -> TransactionManagementError | None:
    """Do what ``freshen_connections`` does for an open connection that is in no block of
    ``atomic()``.

    :param around: how many such blocks are not the handler's.
    """
    raw: Any = connection.connection
    if getattr(raw, "closed", False):
        # It is in no transaction any more, and what was written before it broke is committed.
        connection.close()
        return None
    is_left_open = connection.autocommit != connection.settings_dict["AUTOCOMMIT"]
    if is_own and connection.autocommit and not is_left_open:
        # Django was torn from noting that it had begun one, or the handler did it by hand.
        is_left_open = _transaction_state(connection) in (_OPEN, _UNUSABLE)
    if is_left_open:
        return _abandon(connection, around)
    if changed and may_close and connection in changed:
        changed.discard(connection)
        if is_own:
            drop(connection)
    elif connection.errors_occurred and not is_usable(connection):
        drop(connection)
    else:
        connection.errors_occurred = False
        max_age, close_at = connection.settings_dict["CONN_MAX_AGE"], connection.close_at
        if max_age and close_at is not None and time.monotonic() >= close_at:
            connection.close()
    return None


def _end_blocks(connection: BaseDatabaseWrapper, around: int) -> TransactionManagementError | None:
    """Do what ``freshen_connections`` does for any other connection: undo a transaction that a
    handler has left, or has lost by closing the connection."""
    is_left_open = connection.closed_in_transaction
    if connection.in_atomic_block:
        is_left_open = len(connection.atomic_blocks) > around
    return _abandon(connection, around) if is_left_open else None


@contextmanager
def watching(but: str = "") -> Iterator[None]:
    """Notice what is changed in the sessions of this thread.

    :param but: the database whose queries somebody else looks at.
    """
    watched = [each for each in connections.all() if each.alias != but]
    for connection in watched:
        connection.execute_wrappers.append(notice)
    try:
        yield
    finally:
        for connection in watched:
            connection.execute_wrappers.remove(notice)


class FreshConnections:
    """Leaves to the next call outside a transaction connections like new, and notices what is
    changed in their sessions. Two generators would take half as long again, for each call.

    :param is_own: whether the thread is a worker's own.
    :raises TransactionManagementError: on leaving, when a transaction was left open, and so was
        undone.
    """

    def __init__(self, *, is_own: bool) -> None:
        self._is_own = is_own

    def __enter__(self) -> None:
        # The blocks of atomic() a call is made in: none, in a thread of a worker's own.
        self._outer = None if self._is_own else open_blocks()
        self._watched = connections.all()
        for connection in self._watched:
            connection.execute_wrappers.append(notice)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        for connection in self._watched:
            connection.execute_wrappers.remove(notice)
        # Listed anew: the handler may have deleted one, and got another.
        among = connections.all()
        left = freshen_connections(is_own=self._is_own, outer=self._outer, among=among)
        if left is not None and error is None:
            raise left


def sever(connection: BaseDatabaseWrapper, *, terminates: bool = True) -> None:
    """End the database session of another thread: its transaction is undone, and whatever that
    thread still asks of the connection fails.

    :param terminates: whether a statement in progress on PostgreSQL is ended, too, by a session of
        this thread; else the server undoes the transaction when that has ended.
    """
    raw: Any = connection.connection
    if raw is None:
        return
    try:
        store_for(connection.alias).end_session(connection, terminates=terminates)
    except Exception as error:
        logger.error("A session on %r cannot be ended: %s", connection.alias, error)


def open_blocks() -> dict[str, int]:
    """Return how many blocks of ``atomic()`` this thread is in, by database."""
    return {
        connection.alias: len(connection.atomic_blocks)
        for connection in connections.all(initialized_only=True)
        if connection.in_atomic_block
    }


def is_pristine(
    connection: BaseDatabaseWrapper, blocks: int | None = None, *, has_begun: bool = False
) -> bool:
    """Return whether a transaction can go on. It cannot when its connection was closed, when an
    error was caught that made it unusable, or when the database has undone it by itself, as SQLite
    does when its disk is full: what is written then would be committed at once.

    :param blocks: how many blocks of ``atomic()`` it began with; None: that is not checked.
    :param has_begun: whether a query has been executed in it, so that the server knows of it.
    """
    if connection.needs_rollback or connection.closed_in_transaction:
        return False
    if _transaction_state(connection, has_begun=has_begun) in (_UNUSABLE, _NONE):
        return False
    return blocks is None or len(connection.atomic_blocks) == blocks


def not_pristine(connection: BaseDatabaseWrapper) -> TransactionManagementError:
    """Return the error of a handler that did not leave a transaction as it found it."""
    if connection.closed_in_transaction or connection.connection is None:
        how = (
            "It closed the connection. Leave out close_old_connections() and connection.close(): "
            "the worker looks after its connections, before each job."
        )
    else:
        how = (
            "Leave every atomic() block, end what you begin by hand, restore autocommit, and catch "
            "database errors outside of an atomic() block around their cause."
        )
    return TransactionManagementError(
        f"The handler did not leave its transaction as it found it (database "
        f"{connection.alias!r}); what it wrote there was undone. {how}"
    )


def may_be_left_open(connections: Iterable[BaseDatabaseWrapper]) -> bool:
    """Return whether somebody is in a transaction on one of these connections, or has left one."""
    return any(
        each.in_atomic_block
        or each.closed_in_transaction
        or (each.connection is not None and each.autocommit != each.settings_dict["AUTOCOMMIT"])
        for each in connections
    )


def _abandon(connection: BaseDatabaseWrapper, around: int) -> TransactionManagementError:
    """End all blocks but those ``around`` somebody's own doing, and undo what they did; return what
    to raise for the handler."""
    error = not_pristine(connection)
    logger.error("A transaction on %r was left open by a handler; undone", connection.alias)
    if around:
        why = TransactionManagementError("left open")
        while len(connection.atomic_blocks) > around:
            block: Any = connection.atomic_blocks[-1]
            block.__exit__(TransactionManagementError, why, None)
        return error
    connection.in_atomic_block = connection.needs_rollback = False
    connection.savepoint_ids, connection.atomic_blocks = [], []
    connection.run_on_commit = []
    connection.close()
    # Closed by the handler itself, it is still there as far as Django knows.
    connection.connection = None
    connection.closed_in_transaction = False
    return error


def begin_new_session(using: str) -> None:
    """Close this thread's connection to a database, unless somebody is in a transaction on it: the
    session may be in any state, with tables locked or without autocommit."""
    connection = connections[using]
    if connection.connection is not None and not connection.in_atomic_block:
        drop(connection)


def drop_broken_connections() -> None:
    """Close what no longer answers, or takes no writes; the next query connects anew."""
    for connection in connections.all(initialized_only=True):
        # Of a closed one Django's MySQL backend cannot tell.
        is_idle = connection.connection is not None and not connection.in_atomic_block
        if is_idle and not is_usable(connection):
            drop(connection)


_OPEN, _UNUSABLE, _NONE = "open", "unusable", "none"
_PQ_IDLE, _PQ_ACTIVE, _PQ_IN_TRANSACTION, _PQ_IN_ERROR = 0, 1, 2, 3
"""Of libpq's PGTransactionStatusType."""
_PQ_STATES = {_PQ_ACTIVE: _OPEN, _PQ_IN_TRANSACTION: _OPEN, _PQ_IN_ERROR: _UNUSABLE}
_MYSQL_IN_TRANSACTION, _MYSQL_AUTOCOMMIT = 1, 2
"""Of the flags with which a MariaDB or MySQL server ends each answer; PyMySQL keeps the last."""


def _transaction_state(connection: BaseDatabaseWrapper, *, has_begun: bool = False) -> str | None:
    """Return what the driver knows of the connection's transaction without asking the database:
    whether there is one, and whether an error has made it unusable, as on PostgreSQL. None: the
    driver does not know, or is none of psycopg 3, sqlite3 and PyMySQL.

    :param has_begun: False: it counts as open where the next query begins it, too.
    """
    raw: Any = connection.connection
    # The driver of most workers comes first: this is asked around every query of a handler.
    if (server := getattr(raw, "pgconn", None)) is not None:
        status = server.transaction_status
        begins = not has_begun and status == _PQ_IDLE and not raw.autocommit
        return _OPEN if begins else _PQ_STATES.get(status, _NONE)
    if (flags := getattr(raw, "server_status", None)) is not None:
        begins = not has_begun and not flags & _MYSQL_AUTOCOMMIT
        return _OPEN if flags & _MYSQL_IN_TRANSACTION or begins else _NONE
    try:
        is_open = getattr(raw, "in_transaction", None)
    except Exception:
        return _NONE  # closed past Django
    return is_open if is_open is None else (_NONE, _OPEN)[bool(is_open)]


def answers(using: str) -> bool:
    """Return whether the database can be used now, on a new connection where the old one broke, or
    its server takes no writes any more."""
    connection = connections[using]
    try:
        if connection.connection is not None:
            if is_usable(connection):
                return True
            drop(connection)
        connection.ensure_connection()
        return is_usable(connection)
    except (DatabaseError, InterfaceError, OSError):
        return False


def is_busy(error: BaseException) -> bool:
    """Return whether a statement failed because of other sessions: a lock that was not granted in
    time, a deadlock, a serialization failure. Another try may succeed."""
    cause = error.__cause__
    if error.args and error.args[0] in _BUSY_NUMBERS:
        return True
    return getattr(cause, "sqlstate", None) in _BUSY_STATES or "is locked" in str(error)


def is_repeatable(error: BaseException | None) -> bool:
    """Return whether the database has chosen a transaction to fail for the sake of others, and says
    that it may be repeated: a deadlock, a serialization failure."""
    return any(
        getattr(each, "sqlstate", None) in _REPEATABLE_STATES
        or (isinstance(each, DatabaseError) and each.args[:1] == (_DEADLOCK,))
        for each in _causes(error)
    )


def is_of_database(error: BaseException | None, connection: BaseDatabaseWrapper) -> bool:
    """Return whether a call has failed by an error of the database."""
    driver: Any = connection
    kinds = (Error, driver.Database.Error)
    return any(isinstance(each, kinds) for each in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its causes and contexts, and those of its group; nothing where it is a
    verdict of the handler."""
    seen = set[int]()
    ahead = [] if isinstance(error, VERDICTS) else [error]
    while ahead:
        error = ahead.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        ahead += [error.__cause__, None if error.__suppress_context__ else error.__context__]
        ahead += getattr(error, "exceptions", ())


VERDICTS = (PermanentError, Retry, PausableError, JobCancelledError, JobTimeoutError)
"""By which a handler, or its time limit, says what becomes of the attempt."""
_REPEATABLE_STATES = frozenset({"40001", "40P01"})
"""Serialization failure, deadlock."""
_DEADLOCK = 1213
"""Of MariaDB and MySQL."""
_BUSY_STATES = frozenset({"40001", "40P01", "55P03", "57014"})
"""Serialization failure, deadlock, lock not available, statement ended by its time limit."""
_BUSY_NUMBERS = frozenset({1205, 1213})
"""Of MariaDB and MySQL: lock not available, deadlock."""


# --- Handlers that end the transaction of their group ---------------------------------------------

_GUARD = "kjo_guard"
_CONTROL = r"(?:commit|end|abort|begin|start|rollback(?!\s+(?:(?:work|transaction)\s+)?to\b)"
"""Statements after which the session may be in a transaction again, though not in the same one:
COMMIT AND CHAIN, BEGIN on MariaDB, a COMMIT amid others."""
_FIRST_WORDS = re.compile(rf"{COMMENTS}(\w+(?:\s+\w+)?)")


_ORDINARY = frozenset({"SELECT", "INSERT", "UPDATE", "DELETE", "SAVEPO", "RELEAS"})
"""How nearly all queries begin, so that no pattern is needed to tell what they are."""


@cache
def _control(committing: Sequence[str]) -> Callable[[str], object]:
    """Return what tells whether a query has such a statement.

    :param committing: patterns of others that end a transaction.
    """
    return finder(rf"{'|'.join([_CONTROL, *committing])})\b")


def _may_begin_another(committing: Sequence[str], sql: str) -> bool:
    """Return whether a query has such a statement."""
    return bool(_control(committing)(sql))


@dataclass(eq=False)
class TransactionGuard:
    """Notices that a handler has ended the transaction in which its group is recorded.

    A COMMIT of a handler makes the markers of its whole group durable, also those of jobs that have
    not run. So it has to be known, and by whom it was.

    The driver knows after each query whether the session is in a transaction; it is not asked of
    the server. Around a query that may end one transaction and begin another, a savepoint tells:
    it is gone with its transaction. What is executed past Django's cursors is noticed at the end of
    the handler, or by the next release of a handler's savepoint. Once it has noticed, the handler's
    further queries are refused.

    A connection that was closed or broke says nothing of a COMMIT before, so it counts as an end,
    too. Whether it was a COMMIT the markers tell.
    """

    connection: BaseDatabaseWrapper
    """The connection whose outermost transaction is guarded. It has begun when the first handler is
    called."""
    store: Store
    """The store of its database."""
    attempts: Sequence[Attempt] = ()
    """The attempts that were admitted in the transaction."""
    marked_at: datetime | None = None
    """The moment with which their markers were inserted."""
    is_shared: bool = False
    """Whether the handlers of several deliveries are called in the transaction."""
    calls: Sequence[Attempt] = ()
    """The attempts of the call that is being made, or was made last."""
    ran: list[Attempt] = field(default_factory=list)
    """The attempts whose calls have ended, in their order, but for those of the last one."""
    ended_by: Sequence[Attempt] = ()
    """The attempts of the calls one of which has ended the transaction, or may have; empty as long
    as it is open."""
    unwanted: Sequence[Attempt] = ()
    """The attempts that were asked to end, and did with the call that was made last: they are not
    to run again."""
    query: str = ""
    """The first words of the query that has ended it, where they are known."""
    callbacks: list[tuple[Sequence[Attempt], list[Any], int]] = field(default_factory=list)
    """Of each call the list of ``on_commit`` callbacks as it began, and how many it had then. The
    list is another one after a roll-back or a close."""
    has_changed: bool = False
    """Whether a handler has changed something in the session that others are not to find there."""
    _is_asking: bool = False

    @contextmanager
    def pristine(self) -> Iterator[None]:
        """Look at every query of a call of a handler, and check after it that it left its
        transaction as it found it.

        :raises TransactionManagementError: it did not.
        """
        connection = self.connection
        blocks = len(connection.atomic_blocks)
        connection.execute_wrappers.insert(0, self.execute)
        self.callbacks.append((self.calls, connection.run_on_commit, len(connection.run_on_commit)))
        try:
            yield
        except BaseException as error:
            self.look()
            if isinstance(error, Error) and connection.closed_in_transaction:
                # That the handler has closed the connection explains more.
                raise not_pristine(connection) from error
            raise
        finally:
            connection.execute_wrappers.remove(self.execute)
        if not is_pristine(connection, blocks, has_begun=True):
            self.look()
            raise not_pristine(connection)

    def note(self, calls: Sequence[Attempt], sql: Any = "", cursor: Any = None) -> None:
        """Note that a call has ended the transaction; the first one counts.

        :param sql: the query that did, where it is known.
        :param cursor: the driver's cursor that has executed it.
        """
        if self.ended_by or not calls:
            return
        found = _FIRST_WORDS.match(text_of_query(sql, cursor))
        self.ended_by, self.query = calls, found[1] if found else ""
        self.connection.needs_rollback = True

    def look(self, sql: Any = "", cursor: Any = None) -> None:
        """Look whether the call that is being made has ended the transaction, or may have.

        :param sql: the query that was executed last.
        :param cursor: the driver's cursor that has executed it.
        """
        connection = self.connection
        raw: Any = connection.connection
        state = _transaction_state(connection, has_begun=True)
        # psycopg says "closed", PyMySQL and mysqlclient "open"; of a closed one PyMySQL still knows
        # the last state.
        is_open = getattr(raw, "open", True)
        if is_open and state in (_OPEN, _UNUSABLE):
            return
        is_closed = raw is None or connection.closed_in_transaction or getattr(raw, "closed", False)
        if is_closed or not is_open:
            self.note(self.calls)
        elif state == _NONE:
            self.note(self.calls, sql, cursor)

    def note_changed_sessions(self) -> None:
        """Note whether something is changed in a session of this thread beyond its transaction."""
        mine = connections.all(initialized_only=True)
        self.has_changed |= any(connection in changed for connection in mine)

    def error(self) -> TransactionEndedError:
        """Return the error of the attempts that have ended the transaction by a COMMIT."""
        how = f" by a query that begins with {self.query!r}" if self.query else ""
        return TransactionEndedError(
            f"The handler has ended the transaction that its job is recorded in (database "
            f"{self.connection.alias!r}){how}. What it wrote before is committed, what it wrote "
            "afterwards is undone, and it is not tried again. Let the handler run outside a "
            "transaction (atomic=False), or leave out what commits: COMMIT, ROLLBACK and BEGIN, "
            "DDL on MariaDB and MySQL, executescript() on SQLite."
        )

    def refuse_in_test(self) -> None:
        """To be called once the transaction was rolled back.

        :raises TransactionEndedError: a handler has ended that of a test around it, too.
        """
        connection = self.connection
        is_in_test = connection.in_atomic_block and not connection.closed_in_transaction
        if self.ended_by and is_in_test:
            raise TransactionEndedError(
                "The handler has ended the transaction of the test that runs it. Run it in a "
                "TransactionTestCase (pytest.mark.django_db(transaction=True))."
            )

    def callbacks_before(self, calls: Collection[Attempt]) -> list[Callable[[], object]]:
        """Return the ``on_commit`` callbacks of the calls before these ones."""
        outer = self.callbacks[0][2] if self.callbacks else 0
        for began, registered, count in self.callbacks:
            if any(attempt in calls for attempt in began):
                return [call for _, call, _ in registered[outer:count]]
        return []

    def execute(
        self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any
    ) -> Any:
        """Execute a query of a handler, as a wrapper that stands in front of all others.

        :raises TransactionManagementError: an earlier query has ended the transaction.
        """
        if self._is_asking:
            return execute(sql, params, many, context)
        self.look()
        if self.ended_by:
            raise not_pristine(self.connection)
        cursor, is_asked = context["cursor"].cursor, False
        if not isinstance(sql, str) or sql[:6] not in _ORDINARY or ";" in sql:
            text = text_of_query(sql, cursor)
            is_asked = _may_begin_another(self.store.committing, text)
            self.has_changed |= note_changes(self.connection, text)
        elif self.store.changing:
            lowered = sql.lower()
            if any(map(lowered.__contains__, self.store.changing)):
                self.has_changed |= note_changes(self.connection, sql)
        if is_asked:
            self._ask(f"SAVEPOINT {_GUARD}")
        try:
            return execute(sql, params, many, context)
        finally:
            self.look(sql, cursor)
            if is_asked and not self.ended_by and not self.connection.needs_rollback:
                self._release(sql, cursor)

    def _release(self, sql: Any, cursor: Any) -> None:
        try:
            self._ask(f"RELEASE SAVEPOINT {_GUARD}")
        except Error as error:
            # Refused for another reason, as after a query that has failed on PostgreSQL, the
            # savepoint is still there, and goes with what goes back to the one around it.
            if _GUARD in str(error):
                self.note(self.calls, sql, cursor)

    def _ask(self, question: str) -> None:
        self._is_asking = True
        try:
            with self.connection.cursor() as cursor:
                cursor.execute(question)
        finally:
            self._is_asking = False
