"""Handlers by name: what ``@job`` declares and workers look up."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured

from kjo_django.messages.envelope import MAX_TYPE_LENGTH
from kjo_django.messages.serializers import JSON, Serializer


@dataclass(frozen=True, slots=True)
class HandlerOptions:
    """How a handler's jobs are run. None means: as the queue or the settings say."""

    name: str
    queue: str = "default"
    key: str | Callable[..., Any] | None = None
    """The payload field, or a function of the payload, that gives the ordering key."""
    max_attempts: int | None = None
    timeout: timedelta | None = None
    result_ttl: timedelta | None = None
    atomic: bool = True
    """Run in the transaction that records the outcome. False: outside, under a renewed lease."""
    takes_context: bool = False
    serializer: Serializer = JSON


class Handler:
    """A registered function and its options."""

    def __init__(self, function: Callable[..., Any], options: HandlerOptions) -> None:
        self.function = function
        self.options = options
        self.is_async = inspect.iscoroutinefunction(function)
        self._signature = inspect.signature(function)

    def __repr__(self) -> str:
        return f"<Handler {self.options.name}>"

    @property
    def name(self) -> str:
        """Its registered name, ``<app>.<function>`` by default."""
        return self.options.name

    def check_arguments(self, payload: dict[str, Any]) -> str | None:
        """Return why the handler cannot take this payload as keyword arguments, or None."""
        try:
            if self.options.takes_context:
                self._signature.bind(None, **payload)
            else:
                self._signature.bind(**payload)
        except TypeError as error:
            return str(error)
        return None

    def key_of(self, payload: dict[str, Any]) -> str:
        """Return the ordering key of a payload, or "" for none."""
        declared = self.options.key
        if declared is None:
            return ""
        value = payload.get(declared) if isinstance(declared, str) else declared(**payload)
        return "" if value is None else str(value)


_handlers: dict[str, Handler] = {}
_lock = threading.Lock()


def register(handler: Handler) -> None:
    """Make a handler known.

    :raises ImproperlyConfigured: when its name is taken by another function, or is too long.
    """
    name = handler.name
    if not name or len(name) > MAX_TYPE_LENGTH:
        raise ImproperlyConfigured(
            f"The job name {name!r} must have 1 to {MAX_TYPE_LENGTH} characters."
        )
    with _lock:
        present = _handlers.get(name)
        if present is not None and _place(present.function) != _place(handler.function):
            raise ImproperlyConfigured(
                f"Two jobs are named {name!r}: {_place(present.function)} and "
                f"{_place(handler.function)}. Give one of them a name=…"
            )
        _handlers[name] = handler


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def unregister(name: str) -> None:
    """Forget a handler; for tests."""
    with _lock:
        _handlers.pop(name, None)


def find(name: str) -> Handler | None:
    """Return the handler of this name, or None."""
    return _handlers.get(name)


def handlers() -> list[Handler]:
    """Return every handler, by name."""
    return [_handlers[name] for name in sorted(_handlers)]


def queue_names() -> list[str]:
    """Return every queue that is declared in the settings or used by a handler, sorted."""
    from kjo_django.conf import get_settings

    return sorted({handler.options.queue for handler in handlers()} | set(get_settings().queues))


def default_name(function: Callable[..., Any]) -> str:
    """Return ``<app label>.<function>``; the module stands in where no app contains it."""
    config = apps.get_containing_app_config(function.__module__) if apps.apps_ready else None
    owner = config.label if config else function.__module__
    return f"{owner}.{function.__name__}"
