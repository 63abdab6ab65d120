"""Asking what may hang: connecting to a server can take minutes, and nothing ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from django.db import connections

T = TypeVar("T")


def answer_within(timeout: float, ask: Callable[[], T]) -> T:
    """Return what ``ask`` returns, from a thread of its own; its database connections are closed.

    The thread is left to itself when it takes longer: it keeps nobody from exiting.

    :param timeout: seconds.
    :raises TimeoutError: it did not answer in time.
    :raises Exception: what ``ask`` raises.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def answer() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=answer, name="kjo-probe", daemon=True)
    thread.start()
    thread.join(timeout)
    if answers:
        return answers[0]
    raise errors[0] if errors else TimeoutError(f"no answer within {timeout:g} s")
