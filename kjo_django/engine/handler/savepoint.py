"""A savepoint that is opened by the first query, so a handler that needs none pays for none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from kjo_django.engine.attempt import Attempt
from kjo_django.engine.handler.connections import TransactionGuard, is_pristine, not_pristine
from kjo_django.exceptions import JobTimeoutError
from kjo_django.store import Store
from kjo_django.store.cursors import pass_over, takes_several

# The server has one of ours at a time. Two names in turn: to go back to one that was never opened
# must fail, and not find its predecessor. No more than two: psycopg, which keeps what it has found
# out about a text, is to meet the same texts again.
_NAMES = ("kjo_handler_a", "kjo_handler_b")
_numbers = itertools.count(1)


_Query = tuple[Callable[..., Any], Any, Any, bool, Any]
"""What a wrapper of queries is given: who executes it, text, parameters, whether many, context."""


class LazySavepoint:
    """Separates one handler's writes from those of its group, inside the group's transaction.

    On success its writes join the group's; on an exception they and the ``on_commit`` callbacks it
    registered are undone, and the exception is raised on. Stands below any ``atomic()`` the handler
    opens itself. To be entered by one handler after the other, all within ``group``.

    On PostgreSQL it costs no round trip: the first query carries it along, together with the
    release of the one before, which is left open behind a handler that succeeded; the group's own
    next query closes the last. (A query with a syntax error is refused before any of that is done.
    So it costs the group its transaction, and the handler fails when it runs alone.)

    :param guard: is told when the savepoint of a handler is gone at its release: the handler has
        ended the transaction.
    :raises TransactionManagementError: on leaving, when the handler did not leave the transaction
        as it found it; its writes are undone.
    """

    def __init__(
        self, connection: BaseDatabaseWrapper, store: Store, guard: TransactionGuard | None = None
    ) -> None:
        self._connection = connection
        self._guard = guard or TransactionGuard(connection, store)
        self._sends_several = store.sends_several
        self._left_open = ""
        # Whose it is; and the calls since then that have sent nothing through Django.
        self._left_open_by: Sequence[Attempt] = ()
        self._unseen: list[Attempt] = []
        self._name = ""
        self._sid: str | None = None
        # Only between a handler's beginning and its first query is there something to open.
        self._opens = False

    @contextmanager
    def group(self) -> Iterator[None]:
        """Look at every query of the connection, of the handlers' and of those between and after
        them."""
        self._connection.execute_wrappers.append(self._before_query)
        try:
            yield
        finally:
            self._connection.execute_wrappers.remove(self._before_query)

    def __enter__(self) -> LazySavepoint:
        self._sid = None
        self._opens = True
        self._depth = len(self._connection.savepoint_ids)
        self._blocks = len(self._connection.atomic_blocks)
        registered: list[Any] = self._connection.run_on_commit
        self._callbacks = len(registered)
        self._guard.callbacks.append((self._guard.calls, registered, self._callbacks))
        self._connection.execute_wrappers.insert(0, self._guard.execute)
        return self

    def _before_query(
        self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any
    ) -> Any:
        if not self._opens and (self._sid is not None or not self._left_open):
            return execute(sql, params, many, context)
        left_open = self._left_open
        query = execute, sql, params, many, context
        try:
            return self._open_with(query) if self._opens else self._release_with(query)
        except Error as error:
            if left_open and f'"{left_open}"' in str(error):
                # By the driver's own connection, most likely.
                self._guard.note(self._unseen or self._left_open_by)
            raise

    def _release_with(self, query: _Query) -> Any:
        """Release the savepoint of the last handler with a query that is no handler's."""
        left_open, self._left_open = self._left_open, ""
        send = self._ahead if _goes_alone(*query) else _along
        return send(_releasing(left_open), *query)

    def _open_with(self, query: _Query) -> Any:
        """Open the savepoint with the first query of a handler, or before it."""
        self._opens = False
        if self._sends_several:
            return self._open_along(query)
        sid = self._connection.savepoint()
        if sid is not None:
            self._note(sid)
        execute, *arguments = query
        return execute(*arguments)

    def _note(self, sid: str) -> None:
        # Below what the handler's own atomic blocks have pushed meanwhile. Callbacks registered
        # from now on share its fate, not that of the handler's before.
        self._connection.savepoint_ids.insert(self._depth, sid)
        self._sid = sid

    def _open_along(self, query: _Query) -> Any:
        """Open it with the query itself, or with one of its own before one that must go alone."""
        left_open, self._left_open = self._left_open, ""
        self._name = _NAMES[left_open == _NAMES[0]]
        opening = f"{_releasing(left_open)}SAVEPOINT {self._name}; "
        self._note(f"{self._name}_{next(_numbers)}")
        if _goes_alone(*query):
            return self._ahead(opening, *query)
        try:
            return _along(opening, *query)
        except JobTimeoutError:
            # Raised from outside, mostly while the answer was waited for: it was sent. If it was
            # not, going back fails, which costs the group its transaction.
            raise
        except Exception:
            if self._sid is not None and is_pristine(self._connection):
                # Refused before it was sent, for wrong parameters for example.
                self._connection.savepoint_ids.remove(self._sid)
                self._sid, self._left_open, self._opens = None, left_open, True
            raise

    def _ahead(self, opening: str, execute: Callable[..., Any], *query: Any) -> Any:
        """Send statements, then a query that must go alone."""
        with self._connection.cursor() as own:
            own.execute(opening)
        return execute(*query)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        connection = self._connection
        self._opens = False
        connection.execute_wrappers.remove(self._guard.execute)
        if error is not None:
            self._guard.look()
            try:
                self._undo()
            except Error:
                pass  # the original error is the one to report
        elif not is_pristine(connection, self._blocks, has_begun=True):
            self._guard.look()
            self._undo()
            raise not_pristine(connection)
        elif self._sid is not None:
            try:
                if self._sends_several:
                    self._left_open, self._left_open_by = self._name, self._guard.calls
                    self._unseen = []
                else:
                    connection.savepoint_commit(self._sid)
            except Exception as error:
                if isinstance(error, Error) and self._sid in str(error):
                    self._guard.note(self._guard.calls)
                self._undo()
                raise
            self._sid = None
            del connection.savepoint_ids[self._depth :]
        else:
            self._unseen += self._guard.calls

    def is_transaction_pristine(self) -> bool:
        """Return whether the transaction around the last handler can go on with others."""
        return is_pristine(self._connection, self._blocks)

    def _undo(self) -> None:
        connection, sid = self._connection, self._sid
        self._sid = None
        connection.needs_rollback = False
        # Left behind on a broken connection, they would pass for blocks that are still open.
        del connection.savepoint_ids[self._depth :]
        try:
            if sid is None:
                return
            if self._sends_several:
                with connection.cursor() as cursor:
                    cursor.execute(f"ROLLBACK TO SAVEPOINT {self._name}; {_releasing(self._name)}")
            else:
                connection.savepoint_rollback(sid)
                connection.savepoint_commit(sid)
        except Error:
            # The connection is broken or the transaction lost as a whole, as SQLite loses it when
            # its disk is full: with it what the handlers before have written.
            connection.errors_occurred = connection.needs_rollback = True
            raise
        finally:
            del connection.run_on_commit[self._callbacks :]


def _goes_alone(
    execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any
) -> bool:
    return many or not isinstance(sql, str) or not takes_several(context["cursor"].cursor)


def _along(
    opening: str, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
) -> Any:
    """Send statements with a query, in one go."""
    result = execute(f"{opening}{sql}", params, many, context)
    pass_over(context["cursor"].cursor, opening.count(";"))
    return result


def _releasing(name: str) -> str:
    return f"RELEASE SAVEPOINT {name}; " if name else ""
