"""One call of one handler: payload in, result or exception out."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from django.utils import timezone

from kjo_django import tracing
from kjo_django.engine.attempt import Delivery, Mode
from kjo_django.engine.handler.context import Abort, BatchContext, BatchItem, JobContext
from kjo_django.engine.handler.middleware import chain, project_middleware
from kjo_django.engine.handler.timeouts import ENDINGS as ENDINGS
from kjo_django.engine.handler.timeouts import RunAbandoned, TimeoutWatch
from kjo_django.exceptions import PayloadError, PermanentError
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import dump_result, load_value, serializer_for
from kjo_django.store.rows import JobRow


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


Ran = CallResult
"""The old name, until nobody uses it."""
C = TypeVar("C", bound=JobContext)


def make_context(
    delivery: Delivery, attempt: int, max_attempts: int, row: JobRow | None
) -> JobContext:
    """Return the context of a run."""
    return describe(JobContext, delivery, attempt, max_attempts, row)


def describe(
    kind: type[C],
    delivery: Delivery,
    attempt: int,
    max_attempts: int,
    row: JobRow | None,
) -> C:
    """Return the context of a run, as an object of this class."""
    message, handler = delivery.message, delivery.handler
    assert message is not None
    assert handler is not None
    # Reading headers takes its time, and mostly nobody is going to see them.
    is_seen = handler.options.takes_context or kind is not JobContext or project_middleware()
    limit = handler.options.timeout or delivery.queue.timeout
    return kind(  # by place: made for every job, and by name takes half as long again
        message.job_id or message.id,
        attempt,
        max_attempts,
        message.id,
        delivery.queue.name,
        names.texts(delivery.record.headers) if is_seen else {},
        row.created_at if row is not None else message.timestamp,
        _unique_id(delivery, row),
        message.generation,
        None,
        delivery.lease,
        delivery.mode is Mode.ATOMIC,
        None,
        delivery,
        limit.total_seconds() if limit is not None else None,
    )


def _unique_id(delivery: Delivery, row: JobRow | None) -> str | None:
    """Return the id the job was enqueued under; of one that replays the dead letter of another
    job, that job's."""
    if told := delivery.record.headers.get(names.UNIQUE_ID):
        return told.decode("utf-8", "replace")
    return row.unique_id if row is not None else None


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
    return wrapped(delivery, chain(handler, watch, tracing.tracer, False)(context))


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


def call_batch(items: Sequence[BatchItem], watch: TimeoutWatch) -> Any:
    """Call a batch handler from this thread; return what it returns."""
    return _batch_call(items, watch, False)


async def acall_batch(items: Sequence[BatchItem], watch: TimeoutWatch) -> Any:
    """Call an asynchronous batch handler on the loop this is awaited on; return what it returns."""
    return await _batch_call(items, watch, True)


def _batch_call(items: Sequence[BatchItem], watch: TimeoutWatch, on_loop: bool) -> Any:
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
