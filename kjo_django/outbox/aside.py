"""Calls that are made beside what their caller does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from django.db import DatabaseError, InterfaceError, connections

_T = TypeVar("_T")


class Aside:
    """A thread, with database connections of its own, that makes one call after the other.

    A daemon: one that hangs in a database that is frozen must not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Have it called after those before; what it raises is raised by the future."""
        future: Future[Any] = Future()
        self._calls.put((future, function))
        return future

    def close(self) -> None:
        """End the thread, and its connections, after the last call; does not wait."""
        self._calls.put(None)

    def _run(self) -> None:
        while (next_call := self._calls.get()) is not None:
            future, function = next_call
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                # Whatever is wrong with its connection, the next call has a new one.
                _close_connections()
        _close_connections()


def _close_connections() -> None:
    # One that cannot even be closed is not worth a thread that others wait for.
    with suppress(DatabaseError, InterfaceError):
        connections.close_all()
