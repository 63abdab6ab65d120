"""Asking what may hang: connecting to a server can take minutes, and nothing ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from django.db import connections

T = TypeVar("T")


class _Question:
    """A question that is being asked in a thread of its own."""

    def __init__(self, ask: Callable[[], Any], share: Hashable) -> None:
        self._ask = ask
        self._share = share
        self.answers: list[Any] = []
        self.errors: list[Exception] = []
        self.thread = threading.Thread(target=self._run, name="kjo-probe", daemon=True)

    def _run(self) -> None:
        try:
            self.answers.append(self._ask())
        except Exception as error:
            self.errors.append(error)
        finally:
            connections.close_all()
            with _lock:
                if _open.get(self._share) is self:
                    del _open[self._share]


_lock = threading.Lock()
_open: dict[Hashable, _Question] = {}


def answer_within(timeout: float, ask: Callable[[], T], *, share: Hashable = None) -> T:
    """Return what ``ask`` returns, from a thread of its own; its database connections are closed.

    The thread is left to itself when it takes longer: it keeps nobody from exiting.

    :param timeout: seconds.
    :param share: names the question; while somebody's thread still asks it, the answer is that
        one's. For what is asked again and again: threads that wait for a server that is away would
        become more and more.
    :raises TimeoutError: it did not answer in time.
    :raises Exception: what ``ask`` raises.
    """
    with _lock:
        question = _open.get(share) if share is not None else None
        # One that was open when this process was forked has no thread here.
        if question is None or not question.thread.is_alive():
            question = _Question(ask, share)
            if share is not None:
                _open[share] = question
            question.thread.start()
    question.thread.join(timeout)
    if question.answers:
        return cast(T, question.answers[0])
    raise question.errors[0] if question.errors else TimeoutError(f"no answer within {timeout:g} s")
