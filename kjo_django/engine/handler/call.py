"""Calling a handler: payload in, result or exception out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from asgiref.sync import async_to_sync
from django.utils import timezone

from kjo_django.engine.attempt import Delivery, Mode
from kjo_django.engine.handler.context import Abort, Abortable, JobContext
from kjo_django.engine.handler.inheritance import Running
from kjo_django.engine.handler.timeouts import RunAbandoned, TimeoutWatch
from kjo_django.exceptions import HandlerTimeout, JobTimeoutError, PayloadError, PermanentError
from kjo_django.messages import headers as names
from kjo_django.messages.carried import inheritable
from kjo_django.messages.serializers import dump_result, load_value, serializer_for
from kjo_django.store.rows import JobRow

ENDINGS = BaseException
"""What ends an attempt: ``sys.exit()``, a cancelled task or a panic of a library in Rust must not
end the lane with it. All but ``is_interrupt``."""


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


@dataclass(slots=True)
class Ran:
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


C = TypeVar("C", bound=JobContext)


def make_context(
    delivery: Delivery, attempt: int, max_attempts: int, row: JobRow | None
) -> JobContext:
    """Describe the run to the handler."""
    return describe(JobContext, delivery, attempt, max_attempts, row)


def describe(
    kind: type[C],
    delivery: Delivery,
    attempt: int,
    max_attempts: int,
    row: JobRow | None,
) -> C:
    """Describe the run by a context of this class."""
    message = delivery.message
    assert message is not None
    return kind(  # by place: made for every job, and by name takes half as long again
        message.job_id or message.id,
        attempt,
        max_attempts,
        message.id,
        delivery.queue.name,
        names.texts(delivery.record.headers) if _is_seen(kind, delivery) else {},
        row.created_at if row is not None else message.timestamp,
        _unique_id(delivery, row),
        message.generation,
        None,
        delivery.lease,
        delivery.mode is Mode.ATOMIC,
    )


def _unique_id(delivery: Delivery, row: JobRow | None) -> str | None:
    """Return the id the job was enqueued under; of one that replays the dead letter of another
    job, that job's."""
    if told := delivery.record.headers.get(names.UNIQUE_ID):
        return told.decode("utf-8", "replace")
    return row.unique_id if row is not None else None


def _is_seen(kind: type[JobContext], delivery: Delivery) -> bool:
    """Return whether anybody is going to see the context; reading headers takes its time."""
    if kind is not JobContext or delivery.handler is None:
        return True
    return delivery.handler.options.takes_context


def arguments_of(delivery: Delivery, context: JobContext) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Decode the payload into the handler's arguments.

    :raises MessageError: it cannot be decoded.
    :raises PermanentError: the handler does not take it.
    """
    message, handler = delivery.message, delivery.handler
    assert message is not None
    assert handler is not None
    value = load_value(message.payload, message.content_type)
    positional, named = handler.arguments(value)
    if handler.options.takes_context:
        positional = (context, *positional)
    return positional, named


def time_limit(delivery: Delivery) -> float | None:
    """Return the seconds one attempt may take, or None."""
    assert delivery.handler is not None
    limit = delivery.handler.options.timeout or delivery.queue.timeout
    return limit.total_seconds() if limit is not None else None


def call(delivery: Delivery, context: JobContext, watch: TimeoutWatch) -> bytes | None:
    """Run the handler in this thread and return its wrapped result.

    An ``async def`` handler runs on an event loop whose database calls come back to this thread,
    so they are part of its transaction.
    """
    handler = delivery.handler
    assert handler is not None
    limit = time_limit(delivery)
    watch.running.enter(context, delivery)
    try:
        with Running((delivery,), (context,), inheritable(delivery.record.headers)):
            positional, named = arguments_of(delivery, context)
            if handler.is_async:
                coroutine = handler.function(*positional, **named)
                with watch.limit(context, limit, interrupts=False):
                    value, error = async_to_sync(contained)(coroutine, context, limit)
                if error is not None:
                    raise error
            else:
                with watch.limit(context, limit):
                    value = handler.function(*positional, **named)
    finally:
        watch.running.leave(context)
    return wrapped(delivery, value)


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


async def contained(
    coroutine: Coroutine[Any, Any, Any], context: Abortable, seconds: float | None
) -> tuple[Any, BaseException | None]:
    """Keep from the event loop what would end it instead of the attempt."""
    try:
        return await with_limit(coroutine, context, seconds), None
    except ENDINGS as error:
        return None, error


async def with_limit(
    coroutine: Coroutine[Any, Any, Any], context: Abortable, seconds: float | None
) -> Any:
    """Await a coroutine, ending it after so many seconds.

    :raises HandlerTimeout: it took longer.
    """
    if seconds is None:
        return await coroutine
    try:
        async with asyncio.timeout(seconds) as scope:
            return await coroutine
    except TimeoutError as error:
        if not scope.expired() or isinstance(error, JobTimeoutError):
            raise
        context.abort(Abort.TIMEOUT)
        told = f"The handler exceeded its timeout of {seconds:g} s"
        raise HandlerTimeout(told, timeout=seconds) from None


async def acall(delivery: Delivery, context: JobContext, watch: TimeoutWatch) -> Ran:
    """Run an asynchronous handler on the loop this is awaited on, outside any transaction."""
    started_at, start = timezone.now(), time.perf_counter()
    handler = delivery.handler
    assert handler is not None
    watch.running.enter(context, delivery)
    try:
        with Running((delivery,), (context,), inheritable(delivery.record.headers)):
            positional, named = arguments_of(delivery, context)
            coroutine = handler.function(*positional, **named)
            value = wrapped(delivery, await with_limit(coroutine, context, time_limit(delivery)))
    except ENDINGS as error:
        ran = Ran(started_at, time.perf_counter() - start, error=error)
        ran.abort_reason, ran.result_ttl = context.abort_reason, context.result_ttl
        return ran
    finally:
        watch.running.leave(context)
    ran = Ran(started_at, time.perf_counter() - start, value)
    ran.result_ttl = context.result_ttl
    return ran
