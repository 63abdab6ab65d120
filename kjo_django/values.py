"""Types of the values people give: each converts, or raises ValueError saying what it wants.

``option`` declares the fields of settings with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from datetime import timedelta
from typing import Any


def duration(value: Any) -> timedelta:
    """A positive timedelta, or a positive number of seconds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            value = timedelta(seconds=value)
        except (OverflowError, ValueError):
            raise ValueError("a duration that fits a timedelta") from None
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ValueError("a positive timedelta or number of seconds")
    return value


def optional_duration(value: Any) -> timedelta | None:
    """A duration, or None for no limit."""
    return None if value is None else duration(value)


def whole(minimum: int) -> Callable[[Any], int]:
    """A whole number, at least ``minimum``."""

    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"a whole number, at least {minimum}")
        return value

    return convert


def number(minimum: float, maximum: float) -> Callable[[Any], float]:
    """A number from ``minimum`` to ``maximum``."""

    def convert(value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not minimum <= value <= maximum:
            raise ValueError(f"a number from {minimum} to {maximum}")
        return float(value)

    return convert


def flag(value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


def text(value: Any) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("text that is not empty")
    return value


def short_text(value: Any) -> str:
    """Text of at most 100 characters."""
    if not isinstance(value, str) or len(value) > 100:
        raise ValueError("text of at most 100 characters")
    return value


def optional_text(value: Any) -> str | None:
    """Text that is not empty, or None."""
    return None if value is None else text(value)


def mapping(value: Any) -> dict[str, Any]:
    """A dict whose keys are text."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("a dict whose keys are text")
    return dict(value)


def texts(value: Any) -> tuple[str, ...]:
    """A list of texts."""
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ValueError("a list of texts")
    return tuple(text(item) for item in value)


def option(
    convert: Callable[[Any], Any], default: Any, help: str, *, is_secret: bool = False
) -> Any:
    """Declare a setting: its type, its default and a line for the reference.

    :param is_secret: its value is never shown.
    """
    metadata = {"convert": convert, "help": help, "is_secret": is_secret}
    kwargs: dict[str, Any] = {"metadata": metadata, "repr": not is_secret}
    if isinstance(default, (dict, list)):
        kwargs["default_factory"] = lambda: type(default)(default)
    else:
        kwargs["default"] = default
    return field(**kwargs)
