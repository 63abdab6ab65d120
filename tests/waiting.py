"""Waiting for what happens elsewhere: in another thread, another process, a server."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 120.0
"""Seconds until what is waited for counts as never coming, the same everywhere. Only a failure
waits so long."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 0.05
MOST_TEXT = 300


def wait_until(
    condition: Callable[[], T],
    what: str = "",
    state: Callable[[], object] | None = None,
    *,
    unless: tuple[type[Exception], ...] = (),
    patience: float = PATIENCE,
) -> T:
    """Return the first true answer of a condition.

    :param what: what is waited for, in words; the condition's own text if not given.
    :param state: returns what to show where that never comes, beside the last answer.
    :param unless: errors of the condition that mean not yet.
    :param patience: for what takes longer than anything else, in tests marked ``long``.
    :raises AssertionError: it never came.
    """
    deadline, pause = time.monotonic() + patience, SHORTEST_PAUSE
    while True:  # timed loop: the one that all tests wait in
        try:
            answer: object = condition()
            if answer:
                return answer  # type: ignore[return-value]
        except unless as error:
            answer = error
        if time.monotonic() >= deadline:
            break
        time.sleep(pause)  # sleep: until the next look
        pause = min(LONGEST_PAUSE, 1.5 * pause)
    told = [f"Not within {patience:g} s: {what or _text(condition)}"]
    told += [f"last answer: {_short(answer)}", *_seen_by(inspect.unwrap(condition))]
    if state is not None:
        told.append(f"state: {_short(state())}")
    raise AssertionError("\n".join(told))


def _text(condition: Callable[[], object]) -> str:
    """Return the lines that a condition is written in, or its name."""
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)


def _seen_by(condition: Callable[[], object]) -> list[str]:
    """Return the variables of the test that a condition looks at, with their values."""
    names = getattr(getattr(condition, "__code__", None), "co_freevars", ())
    cells = getattr(condition, "__closure__", None) or ()
    return [f"{name}: {_short(_content(cell))}" for name, cell in zip(names, cells, strict=True)]


def _content(cell: object) -> object:
    return getattr(cell, "cell_contents", "not set yet")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}…"
