"""One call of one handler, behind its middleware: payload in, result or exception out.

    log context → inherited headers → tracing → time limit → KJO["MIDDLEWARE"] → the handler

A lane calls a chain of functions. An event loop calls a chain of coroutine functions. An ``async
def`` handler in a transaction is called by a lane: it runs, with the middleware next to it that is
asynchronous too, on an event loop of its own, whose database calls come back to the lane's thread.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured, MiddlewareNotUsed
from django.core.signals import setting_changed
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone
from django.utils.module_loading import import_string

from kjo_django import tracing
from kjo_django.conf import get_settings
from kjo_django.engine.attempt import Attempt, Delivery, Mode
from kjo_django.engine.handler.context import (
    Abort,
    BatchContext,
    BatchItem,
    JobContext,
)
from kjo_django.engine.handler.timeouts import ENDINGS as ENDINGS
from kjo_django.engine.handler.timeouts import (
    RunAbandoned,
    RunningCall,
    TimeoutWatch,
    with_limit,
)
from kjo_django.exceptions import PayloadError, PermanentError
from kjo_django.messages import headers as names
from kjo_django.messages.headers import inheritable, inheriting
from kjo_django.messages.serializers import dump_result, load_value, serializer_for
from kjo_django.registry import Handler, handlers
from kjo_django.running_job import running
from kjo_django.tracing import Tracer

Context = JobContext | BatchContext
Call = Callable[[Any], Any]
"""Takes a context; returns the handler's result, or a coroutine that does."""
Middleware = Callable[[Call], Call]
C = TypeVar("C", bound=JobContext)

logger = logging.getLogger("kjo_django")


def is_interrupt(error: BaseException) -> bool:
    """Return whether this is not the handler's: its thread was given up, or somebody pressed Ctrl-C
    to end the command that runs the handler. Python raises that in the main thread; in any other
    the handler raised it itself."""
    if isinstance(error, RunAbandoned):
        return True
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
    )


@contextmanager
def leaving_no_blocks(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """End with this block the blocks of ``atomic()`` that handlers have entered within it and not
    left: the transaction around it would take itself for one of them, and never be committed.

    What their ``on_commit`` callbacks raise is logged from then on: the commit stands, and the
    callbacks of others in the group come after it.
    """
    savepoints, blocks = len(connection.savepoint_ids), len(connection.atomic_blocks)
    try:
        yield
        callbacks: list[Any] = connection.run_on_commit
        callbacks[:] = [(sids, partial(_call_isolated, call), False) for sids, call, _ in callbacks]
    finally:
        del connection.savepoint_ids[savepoints:]
        del connection.atomic_blocks[blocks:]


def _call_isolated(callback: Callable[[], Any]) -> None:
    """Log what a callback raises. Django's own robust callbacks fail when they log one without a
    ``__qualname__``, such as a partial."""
    try:
        callback()
    except ENDINGS as error:
        if is_interrupt(error):
            raise
        # Also what would end the process.
        logger.exception("An on_commit callback failed: %r", callback)


@dataclass(slots=True)
class CallResult:
    """How one call of a handler ended."""

    started_at: datetime
    seconds: float
    value: bytes | None = None
    """The wrapped result; None when the handler returned None."""
    error: BaseException | None = None
    abort_reason: Abort | None = None
    """Why the run was asked to end early, if it was."""
    result_ttl: int | None = None
    """Milliseconds its outcome is kept, where the run changed that."""


# --- The call -------------------------------------------------------------------------------------


def make_context(kind: type[C], attempt: Attempt) -> C:
    """Return the context of a run, as an object of this class."""
    delivery, row = attempt.delivery, attempt.row
    message, handler = delivery.message, delivery.handler
    assert message is not None
    assert handler is not None
    headers = delivery.record.headers
    # Reading headers takes its time, and mostly nobody is going to see them.
    is_seen = handler.options.takes_context or kind is not JobContext or project_middleware()
    unique_id = row.unique_id if row is not None else None
    if original := headers.get(names.UNIQUE_ID):
        # It replays the dead letter of another job, which was enqueued under this id.
        unique_id = original.decode("utf-8", "replace")
    limit = handler.options.timeout or delivery.queue.timeout
    return kind(  # by place: made for every job, and by name takes half as long again
        message.job_id or message.id,
        attempt.number,
        attempt.limit,
        message.id,
        delivery.queue.name,
        names.texts(headers) if is_seen else {},
        row.created_at if row is not None else message.timestamp,
        unique_id,
        message.generation,
        None,
        delivery.lease,
        delivery.mode is Mode.ATOMIC,
        None,
        delivery,
        limit.total_seconds() if limit is not None else None,
    )


def call(delivery: Delivery, context: JobContext, watch: TimeoutWatch) -> bytes | None:
    """Call the handler from this thread and return its wrapped result.

    An ``async def`` handler runs on an event loop whose database calls come back to this thread,
    so they are part of its transaction.

    :raises MessageError: the payload cannot be decoded.
    :raises PermanentError: the handler does not take it, or its result cannot be stored.
    """
    message, handler = delivery.message, delivery.handler
    assert message is not None
    assert handler is not None
    context.payload = load_value(message.payload, message.content_type)
    value = chain(handler, watch, tracing.tracer, False)(context)
    return None if value is None else wrapped(delivery, value)


async def acall(delivery: Delivery, context: JobContext, watch: TimeoutWatch) -> CallResult:
    """Call an asynchronous handler on the loop this is awaited on, outside any transaction."""
    message, handler = delivery.message, delivery.handler
    assert message is not None
    assert handler is not None
    result, start = CallResult(timezone.now(), 0.0), time.perf_counter()
    try:
        context.payload = load_value(message.payload, message.content_type)
        value = await chain(handler, watch, tracing.tracer, True)(context)
        result.value = wrapped(delivery, value)
    except ENDINGS as error:
        result.error, result.abort_reason = error, context.abort_reason
    result.seconds, result.result_ttl = time.perf_counter() - start, context.result_ttl
    return result


def call_batch(items: Sequence[BatchItem], watch: TimeoutWatch, *, on_loop: bool = False) -> Any:
    """Call a batch handler from this thread, and return what it returns.

    :param on_loop: whether it is called by an event loop: then a coroutine is returned.
    """
    first = items[0]
    assert first.delivery is not None
    assert first.delivery.handler is not None
    context = BatchContext(items, first.time_limit)
    return chain(first.delivery.handler, watch, tracing.tracer, on_loop)(context)


def wrapped(delivery: Delivery, value: Any) -> bytes | None:
    """Wrap and serialize a handler's result.

    :raises PermanentError: it cannot be stored.
    """
    if value is None:
        return None
    assert delivery.message is not None
    assert delivery.handler is not None
    # A result travels as its payload does: whoever reads the row knows how to read both.
    payloads = serializer_for(delivery.message.content_type)
    results = delivery.handler.options.result_serializer or payloads
    try:
        return dump_result(value, payloads, results)
    except PayloadError as error:
        raise PermanentError(f"The handler's result cannot be stored: {error}") from error


# --- The chain ------------------------------------------------------------------------------------


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
    behind, interrupts = _behind_project_middleware(handler, on_loop), not handler.is_async

    def run(context: Context) -> Any:
        call = RunningCall(watch, context, context.time_limit, interrupts=interrupts)
        with _surroundings(context, tracer):
            try:
                with call:
                    return behind(context)
            finally:
                watch.calls.discard(call)

    async def run_on_loop(context: Context) -> Any:
        with _surroundings(context, tracer), RunningCall(watch, context, None):
            return await with_limit(behind(context), context, context.time_limit)

    return run_on_loop if on_loop else run


@contextmanager
def _surroundings(context: Context, tracer: Tracer | None) -> Iterator[None]:
    """Let log records know the run, see ``contrib.logging``; let what is published during the run
    inherit headers of its message, of a batch those that all its messages have in common; and have
    the run traced."""
    runs = context.items if isinstance(context, BatchContext) else (context,)
    inherited = inheritable([run.delivery.record.headers for run in runs if run.delivery])
    span: AbstractContextManager[object] = nullcontext()
    if tracer is not None:
        span = tracer.running([run.delivery for run in runs], runs)
    log_token, inherited_token = running.set(context), inheriting.set(inherited)
    try:
        with span:
            yield
    finally:
        inheriting.reset(inherited_token)
        running.reset(log_token)


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting == "KJO":
        project_middleware.cache_clear()
        chain.cache_clear()


setting_changed.connect(_forget, dispatch_uid="kjo_django.engine.handler.call")


# --- The project's middleware ---------------------------------------------------------------------


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
