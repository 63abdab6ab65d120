"""Asking what may hang: connecting to a server can take minutes, and nothing ends it."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

from django.db import connections
from django.utils import translation

T = TypeVar("T")

_lock = threading.Lock()
_shared: dict[Hashable, tuple[threading.Thread, Future[Any]]] = {}
"""The latest thread for each shared question, and its answer."""


def answer_within(timeout: float, ask: Callable[[], T], *, share: Hashable = None) -> T:
    """Return what ``ask`` returns, from a thread of its own; its database connections are closed.

    A thread that takes longer is left alone; it does not keep the process from exiting.

    :param timeout: seconds.
    :param share: names the question. While one thread asks it, further callers wait for the answer
        of that thread: otherwise threads would pile up while a server is away.
    :raises TimeoutError: no answer came in time.
    :raises Exception: what ``ask`` raises.
    """
    with _lock:
        asked = _shared.get(share)
        # A thread that was asking when this process was forked does not live here.
        if asked is None or not asked[0].is_alive():
            answer: Future[T] = Future()
            # It works with the database of this thread, and in its language.
            language = translation.get_language()
            run = functools.partial(contextvars.copy_context().run, _answer, answer, ask, language)
            asked = threading.Thread(target=run, name="kjo-probe", daemon=True), answer
            if share is not None:
                _shared[share] = asked
            asked[0].start()
    thread, answer = asked
    thread.join(timeout)
    if not answer.done():
        raise TimeoutError(f"no answer within {timeout:.3g} s")
    return answer.result()


def is_timeout(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, is that no answer came in time.

    Clients of servers have classes of their own for it, so it is known by its name.
    """
    while error is not None:
        if "Timeout" in type(error).__name__:
            return True
        error = error.__cause__ or error.__context__
    return False


def _answer(answer: Future[Any], ask: Callable[[], Any], language: str | None) -> None:
    try:
        with translation.override(language):
            answer.set_result(ask())
    except Exception as error:
        answer.set_exception(error)
    finally:
        connections.close_all()
