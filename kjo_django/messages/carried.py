"""What a handler's own publications inherit of the message it is handling.

The trace and the correlation of a request follow it through jobs and events without anybody
passing them on: whatever is enqueued or published while a handler runs carries them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token

from kjo_django import tracing
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import storable_text

MAX_CORRELATION = 255
"""Characters of a correlation id that are inherited: an event's metadata takes no more."""
CAUSATION_ID = "causation-id"
INHERITED = (names.TRACEPARENT, names.TRACESTATE, names.CORRELATION_ID)

_carried: ContextVar[Mapping[str, str] | None] = ContextVar("kjo_carried", default=None)


def inheritable(headers: Mapping[str, bytes]) -> dict[str, str]:
    """Return what of a record's headers is inherited."""
    return {name: names.text(headers, name) for name in INHERITED if headers.get(name)}


def carry(found: Mapping[str, str]) -> Token[Mapping[str, str] | None]:
    """Let what is published from now on inherit this, until ``drop``; see ``carrying``."""
    return _carried.set(_usable(found) if found else found)


def _usable(found: Mapping[str, str]) -> dict[str, str]:
    """Return what a row, and an event's metadata, can hold of it: others wrote it, and what they
    wrote must not fail the publications of a handler."""
    usable = {}
    for name, text in found.items():
        text = storable_text(text, MAX_CORRELATION if name == names.CORRELATION_ID else None)
        if text and not text.isspace():
            usable[name] = text
    return usable


def drop(token: Token[Mapping[str, str] | None]) -> None:
    """Inherit what was inherited before."""
    _carried.reset(token)


class carrying:
    """Let what is published within the block inherit from these headers.

    :param others: further values, by ``inherited``'s names with underscores.
    """

    __slots__ = ("_found", "_token")

    def __init__(self, headers: Mapping[str, str], **others: str) -> None:
        self._found = {name: headers[name] for name in INHERITED if headers.get(name)}
        for name, value in others.items():
            if value:
                self._found[name.replace("_", "-")] = value

    def __enter__(self) -> None:
        self._token = carry(self._found)

    def __exit__(self, *error: object) -> None:
        _carried.reset(self._token)


def inherited() -> dict[str, str]:
    """Return the headers a message published now inherits; none outside a handler, but for the
    current trace where there is a tracer."""
    held = _carried.get() or {}
    found = {name: value for name, value in held.items() if name != CAUSATION_ID}
    if tracing.tracer is None:
        return found
    current = tracing.tracer.headers()
    if current:
        # The state belongs to its trace, and the message's may be another.
        found.pop(names.TRACESTATE, None)
    return found | current


def cause() -> str | None:
    """Return the id of the event being handled, or None."""
    return (_carried.get() or {}).get(CAUSATION_ID)
