"""Fields nobody is shown: passwords, tokens, and what a job names itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kjo_django.conf import get_settings

REDACTED = "[redacted]"
DEEPEST = 100
"""Levels looked into; what lies deeper is not shown at all."""


def redacted(value: Any, *, also: Iterable[str] = ()) -> Any:
    """Return a decoded payload or result with the values of secret fields replaced.

    A field is secret if its name contains, in any case, one of ``KJO['REDACT']`` or of ``also``.
    """
    return _redacted(value, [each.lower() for each in (*get_settings().redact, *also)], 0)


def is_redacted(field: str, *, also: Iterable[str] = ()) -> bool:
    """Whether nobody is shown a field of this name."""
    return _is_secret(field, [each.lower() for each in (*get_settings().redact, *also)])


def _redacted(value: Any, names: list[str], depth: int) -> Any:
    if depth > DEEPEST:
        return REDACTED
    if isinstance(value, dict):
        return {
            key: REDACTED if _is_secret(key, names) else _redacted(each, names, depth + 1)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_redacted(each, names, depth + 1) for each in value]
    return value


def _is_secret(key: Any, names: list[str]) -> bool:
    lowered = str(key).lower()
    return any(name in lowered for name in names)
