"""The chain of middleware around each call of a handler.

    log context → inherited headers → tracing → time limit → KJO["MIDDLEWARE"] → the handler

A lane calls a chain of functions. An event loop calls a chain of coroutine functions. An ``async
def`` handler in a transaction is called by a lane: it runs, with the middleware next to it that is
asynchronous too, on an event loop of its own, whose database calls come back to the lane's thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import Token
from typing import Any

from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured, MiddlewareNotUsed
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from kjo_django.conf import get_settings
from kjo_django.engine.handler.context import BatchContext, JobContext, runs_of
from kjo_django.engine.handler.timeouts import ENDINGS, TimeoutWatch, with_limit
from kjo_django.messages.headers import INHERITED, carrying, inheritable
from kjo_django.registry import Handler, handlers
from kjo_django.running_job import Run, running
from kjo_django.tracing import Tracer

Context = JobContext | BatchContext
Call = Callable[[Any], Any]
"""Takes a context; returns the handler's result, or a coroutine that does."""
Middleware = Callable[[Call], Call]


@functools.cache
def project_middleware() -> tuple[tuple[str, Middleware], ...]:
    """Return what ``KJO["MIDDLEWARE"]`` names, with its path, outermost first.

    :raises ImproperlyConfigured: a path leads to nothing that can be called.
    """
    found = []
    for path in get_settings().middleware:
        try:
            middleware = import_string(path)
        except ImportError as error:
            raise ImproperlyConfigured(
                f"KJO['MIDDLEWARE'] names {path!r}, which cannot be imported: {error}"
            ) from error
        if not callable(middleware):
            raise ImproperlyConfigured(f"KJO['MIDDLEWARE'] names {path!r}, which is no function.")
        found.append((path, middleware))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def chain(handler: Handler, watch: TimeoutWatch, tracer: Tracer | None, on_loop: bool) -> Call:
    """Return what calls a handler, behind all middleware; made once for each handler.

    :param on_loop: whether an event loop calls it, and not a lane.
    :raises ImproperlyConfigured: a middleware cannot stand around this handler.
    """
    call = _behind_project_middleware(handler, on_loop)
    call = _time_limit(call, watch, on_loop, interrupts=not handler.is_async)
    if tracer is not None:
        call = _within(functools.partial(_span, tracer), call, on_loop)
    call = _within(_inheriting, call, on_loop)
    return _within(LogContext, call, on_loop)


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting == "KJO":
        project_middleware.cache_clear()
        chain.cache_clear()


setting_changed.connect(_forget, dispatch_uid="kjo_django.engine.handler.middleware")


# --- The project's --------------------------------------------------------------------------------


def refusals() -> Iterator[str]:
    """Yield why the middleware of the project cannot stand around a handler of the project's, for
    the system checks.

    :raises ImproperlyConfigured: a path leads to nothing that can be called.
    """
    names = project_middleware()
    for handler in handlers():
        is_async, on_loop = handler.is_async, handler.is_async and not handler.options.atomic
        for path, middleware in reversed(names):
            if refused := _refusal(handler, path, middleware, is_async, on_loop):
                yield refused
                break
            is_async = is_async and getattr(middleware, "async_capable", False)


def _refusal(
    handler: Handler, path: str, middleware: Middleware, is_async: bool, on_loop: bool
) -> str:
    """Return why a middleware cannot stand around what is, or is not, asynchronous; "" if it can.

    Both could be made to fit by threads, at a price nobody would find: coroutines that run one at a
    time, or a time limit that cannot interrupt.
    """
    if on_loop and not getattr(middleware, "async_capable", False):
        return (
            f"KJO['MIDDLEWARE'] names {path!r}, which is not asynchronous, and the job "
            f"{handler.name!r} is an async function outside a transaction: all its coroutines run "
            "on one event loop, which this middleware would block."
        )
    if not is_async and not getattr(middleware, "sync_capable", True):
        return (
            f"KJO['MIDDLEWARE'] names {path!r}, which is only asynchronous, and what it surrounds "
            f"in the job {handler.name!r} is not."
        )
    return ""


def _behind_project_middleware(handler: Handler, on_loop: bool) -> Call:
    call, is_async = _invocation(handler), handler.is_async
    names = project_middleware() if handler.runs_middleware else ()
    for path, middleware in reversed(names):
        if refused := _refusal(handler, path, middleware, is_async, on_loop):
            raise ImproperlyConfigured(refused)
        if is_async and not getattr(middleware, "async_capable", False):
            call, is_async = _on_loop_of_its_own(call), False
        try:
            call = middleware(call)
        except MiddlewareNotUsed:
            continue
        if not callable(call):
            raise ImproperlyConfigured(f"The middleware {path} must return a function, not {call}.")
    return _on_loop_of_its_own(call) if is_async and not on_loop else call


def _invocation(handler: Handler) -> Call:
    """Return what calls the handler itself."""
    function, takes_context = handler.function, handler.options.takes_context

    def invoke(context: Any) -> Any:
        if isinstance(context, BatchContext):
            return function(list(context.items))
        positional, named = handler.arguments(context.payload)
        if takes_context:
            return function(context, *positional, **named)
        return function(*positional, **named)

    async def await_invoked(context: Any) -> Any:
        return await invoke(context)

    return await_invoked if handler.is_async else invoke


def _on_loop_of_its_own(call: Call) -> Call:
    """Return a function that runs a coroutine function to its end."""

    async def contained(context: Context) -> tuple[Any, BaseException | None]:
        # What would end the event loop instead of the attempt is kept from it.
        try:
            return await with_limit(call(context), context, context.time_limit), None
        except ENDINGS as error:
            return None, error

    def run(context: Context) -> Any:
        value, error = async_to_sync(contained)(context)
        if error is not None:
            raise error
        return value

    return run


# --- Built in -------------------------------------------------------------------------------------


def _time_limit(call: Call, watch: TimeoutWatch, on_loop: bool, *, interrupts: bool) -> Call:
    """Let the run be seen by those who may end it, and end it when its time is over.

    :param interrupts: False: an event loop interrupts the run, its thread is only watched.
    """

    def limit(context: Context) -> Any:
        watch.running.enter(context)
        try:
            with watch.limit(context, context.time_limit, interrupts=interrupts):
                return call(context)
        finally:
            watch.running.leave(context)

    async def limit_on_loop(context: Context) -> Any:
        watch.running.enter(context)
        try:
            return await with_limit(call(context), context, context.time_limit)
        finally:
            watch.running.leave(context)

    return limit_on_loop if on_loop else limit


def _within(
    scope: Callable[[Any], AbstractContextManager[object]], call: Call, on_loop: bool
) -> Call:
    """Return what enters a scope around each call."""

    def within(context: Context) -> Any:
        with scope(context):
            return call(context)

    async def within_on_loop(context: Context) -> Any:
        with scope(context):
            return await call(context)

    return within_on_loop if on_loop else within


class LogContext:
    """Lets log records know the run, see ``contrib.logging``."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token: Token[Run | None] = running.set(self._context)

    def __exit__(self, *error: object) -> None:
        running.reset(self._token)


def _inheriting(context: Context) -> carrying:
    """Let what is published during the run inherit headers of its message; of a batch, those that
    all its messages have in common."""
    found: Sequence[Mapping[str, str]] = [
        inheritable(run.delivery.record.headers) for run in runs_of(context) if run.delivery
    ]
    first, *others = found
    if others:
        wanted = [name for name in INHERITED if name in first]
        first = {n: first[n] for n in wanted if all(o.get(n) == first[n] for o in others)}
    return carrying(first)


def _span(tracer: Tracer, context: Context) -> AbstractContextManager[object]:
    runs = runs_of(context)
    return tracer.running([run.delivery for run in runs], runs)
