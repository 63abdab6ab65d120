"""A savepoint that is opened by the first query, so a handler that needs none pays for none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from django.db import Error, transaction
from django.db.backends.base.base import BaseDatabaseWrapper


class Chain:
    """The savepoints of one group: at most one is left open, behind a handler that succeeded, and
    is released in one round trip with the opening of the next. PostgreSQL only."""

    __slots__ = ("left_open",)

    def __init__(self) -> None:
        self.left_open: str | None = None

    def close(self, connection: BaseDatabaseWrapper) -> None:
        """Release what is left open: what follows belongs to the group, not to its last handler."""
        if self.left_open is not None:
            sid, self.left_open = self.left_open, None
            with connection.cursor() as cursor:
                cursor.execute(f"RELEASE SAVEPOINT {sid}")


class LazySavepoint:
    """Separates one handler's writes from those of its group, inside the group's transaction.

    On success its writes join the group's; on an exception they and the ``on_commit`` callbacks it
    registered are undone, and the exception goes on. Stands below any ``atomic()`` the handler
    opens itself.

    :raises TransactionManagementError: on leaving, when the handler swallowed an error that left
        the transaction unusable; its writes are undone.
    """

    def __init__(self, connection: BaseDatabaseWrapper, chain: Chain | None = None) -> None:
        self._connection = connection
        self._chain = chain if connection.vendor == "postgresql" else None
        self._sid: str | None = None
        self._is_opening = False

    def __enter__(self) -> LazySavepoint:
        connection = self._connection
        self._depth = len(connection.savepoint_ids)
        self._callbacks = len(connection.run_on_commit)
        connection.execute_wrappers.append(self._before_query)
        return self

    def _before_query(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        if self._sid is None and not self._is_opening:
            self._is_opening = True
            sid = self._open()
            self._is_opening = False
            # Below what the handler's own atomic blocks have pushed meanwhile.
            self._connection.savepoint_ids.insert(self._depth, sid)  # type: ignore[arg-type]
            self._sid = sid
        return execute(sql, params, many, context)

    def _open(self) -> str | None:
        connection, chain = self._connection, self._chain
        if chain is None or chain.left_open is None:
            return connection.savepoint()
        connection.savepoint_state += 1
        sid = f"s{threading.get_ident()}_x{connection.savepoint_state}"
        previous, chain.left_open = chain.left_open, None
        with connection.cursor() as cursor:
            cursor.execute(f"RELEASE SAVEPOINT {previous}; SAVEPOINT {sid}")
        return sid

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        connection = self._connection
        connection.execute_wrappers.remove(self._before_query)
        if error is None and connection.needs_rollback:
            self._undo()
            raise transaction.TransactionManagementError(
                "The handler caught a database error without an atomic() block around it; its "
                "writes were undone."
            )
        if error is not None:
            try:
                self._undo()
            except Error:
                # The connection is broken: the original error says why, and the transaction is
                # lost as a whole.
                connection.errors_occurred = True
        elif self._sid is not None and self._chain is not None:
            # Releasing it costs a round trip; the next one's opening or the commit does it.
            self._chain.left_open = self._sid
            self._forget()
        elif self._sid is not None:
            try:
                connection.savepoint_commit(self._sid)
            except Exception:
                self._undo()
                raise
            self._forget()

    def _undo(self) -> None:
        connection = self._connection
        connection.needs_rollback = False
        if self._sid is not None:
            try:
                connection.savepoint_rollback(self._sid)
                connection.savepoint_commit(self._sid)
            finally:
                # Left behind on a broken connection, it would pass for a block that is still open.
                self._forget()
        del connection.run_on_commit[self._callbacks :]

    def _forget(self) -> None:
        del self._connection.savepoint_ids[self._depth :]
        self._sid = None
