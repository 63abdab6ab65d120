"""Waiting for what is expected, and no longer than it may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


def eventually(condition: Callable[[], T], within: float = 20.0, what: str = "") -> T:
    """Return the first truthy result of ``condition``; fail after ``within`` seconds.

    :param what: the expectation in words, for the failure message.
    """
    deadline = time.monotonic() + within
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() >= deadline:
            expected = what or getattr(condition, "__name__", "the condition")
            pytest.fail(f"not within {within:g} s: {expected}; last result: {result!r}")
        time.sleep(0.005)
