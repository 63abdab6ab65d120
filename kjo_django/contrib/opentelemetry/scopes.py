"""Blocks under a span. Whatever telemetry raises is logged and goes no further."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextvars import Token
from dataclasses import dataclass, field
from types import TracebackType
from typing import ParamSpec, TypeVar

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode

from kjo_django.contrib.opentelemetry.attributes import ERROR_TYPE, error_type

logger = logging.getLogger("kjo_django")

COMPLAIN_EVERY = 60.0
"""Seconds between two complaints about telemetry that fails."""

P = ParamSpec("P")
R = TypeVar("R")
_complained = -COMPLAIN_EVERY


def quiet(function: Callable[P, R]) -> Callable[P, R | None]:
    """Log what the function raises, and return None then: no job fails of its trace."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        global _complained
        try:
            return function(*args, **kwargs)
        except Exception:
            now = time.monotonic()
            if now - _complained >= COMPLAIN_EVERY:
                _complained = now
                logger.exception("Tracing failed; jobs go on without it")
            return None

    return call


@dataclass(slots=True)
class Open:
    """A span that is current, or was and waits for its outcome."""

    span: Span
    token: Token[Context] | None
    """What makes current again what was before, in the same thread or task."""
    ended_at: int | None = None
    """Nanoseconds since the epoch."""
    shared: int = 1
    """Deliveries that are run under it and have no outcome yet: those of a batch."""
    outcomes: set[str] = field(default_factory=set)
    has_error: bool = False


def enter(span: Span, under: Context | None = None) -> Open:
    """Make a span current.

    :param under: what else is current with it; what is now if not given.
    """
    return Open(span, contexts.attach(trace.set_span_in_context(span, under)))


@quiet
def leave(opened: Open, error: BaseException | None, *, with_text: bool) -> None:
    """Make current again what was before; the span stays open.

    :param with_text: keep the error's message and traceback, not its type alone.
    """
    if opened.token is not None:
        contexts.detach(opened.token)
    opened.ended_at = time.time_ns()
    if error is not None:
        note_error(opened, error, with_text=with_text)


def note_error(opened: Open, error: BaseException, *, with_text: bool) -> None:
    """Give the span an error's status."""
    opened.has_error = True
    opened.span.set_attribute(ERROR_TYPE, error_type(error))
    opened.span.set_status(Status(StatusCode.ERROR, error_type(error)))
    if with_text:
        # Its text may be what cannot be made; what comes after is not about that.
        quiet(opened.span.record_exception)(error)


@quiet
def end(opened: Open) -> None:
    """End the span at the moment it was left."""
    opened.span.end(opened.ended_at)


class Scope:
    """A block under a span that ends with it.

    :param begin: starts the span, or returns None where there shall be none.
    """

    __slots__ = ("_begin", "_opened", "_with_text")

    def __init__(self, begin: Callable[[], Open | None], *, with_text: bool) -> None:
        self._begin = begin
        self._with_text = with_text
        self._opened: Open | None = None

    def __enter__(self) -> object:
        self._opened = self._begin()
        return self._opened

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._opened is not None:
            leave(self._opened, error, with_text=self._with_text)
            self._finish(self._opened)

    def _finish(self, opened: Open) -> None:
        end(opened)


class OpenEnded(Scope):
    """A block whose span is ended later, by whoever learns the outcome."""

    __slots__ = ()

    def _finish(self, opened: Open) -> None:
        return
