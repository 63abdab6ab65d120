"""How coroutines ask the database: by functions that run in the thread of synchronous code."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections
from django.db.transaction import TransactionManagementError

from kjo_django.runtime import databases

P = ParamSpec("P")
R = TypeVar("R")


def from_coroutine(function: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Return a function that a coroutine awaits, and that runs this one in the thread of
    synchronous code, as ``sync_to_async`` does.

    :raises TransactionManagementError: when awaited by a coroutine that ``asyncio.run`` runs inside
        a transaction: that thread has another connection, and what is done there is no part of
        the transaction. ``async_to_sync`` comes back to the thread that has it.
    """

    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _is_inside_transaction():
            raise TransactionManagementError(
                "This coroutine is run inside a transaction of its thread, as by asyncio.run() in "
                "a handler: its writes to the database would not be part of that transaction. "
                "Run it by asgiref.sync.async_to_sync(function)(…), or call the synchronous method "
                "outside the coroutine."
            )
        return await sync_to_async(function)(*args, **kwargs)

    return run


def _is_inside_transaction() -> bool:
    """Return whether the thread of the running event loop had begun a transaction before the loop,
    on a database that holds jobs.

    While a loop runs, Django shows a thread other connections than before.
    """
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        aliases = databases()
        return any(
            each.in_atomic_block or (each.connection is not None and not each.autocommit)
            for each in connections.all(initialized_only=True)
            if each.alias in aliases
        )
    finally:
        asyncio._set_running_loop(loop)


def coroutine_error(method: str, line: str) -> SynchronousOnlyOperation:
    """Return the error of a method that was called in a coroutine.

    :param line: what to write there instead, behind ``await``.
    """
    return SynchronousOnlyOperation(
        f"{method}() uses the database. In a coroutine write: await {line}"
    )


def awaited_as(line: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a method that is called in a coroutine say what to write there instead."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except SynchronousOnlyOperation:
                raise coroutine_error(method.__name__, line) from None

        return checked

    return decorate
