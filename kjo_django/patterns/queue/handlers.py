"""From a queue's message to the call of its handler."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from kjo_django import registry
from kjo_django.conf import QueueConf, get_settings
from kjo_django.engine.handler.context import JobContext
from kjo_django.enqueue.storing import milliseconds
from kjo_django.logs import get_logger
from kjo_django.values import signature_of

logger = get_logger("kjo_django")

CALLBACK_LOOK = 0.1
"""Seconds between looks at the abort flag while a handler's callback is awaited."""


@dataclass(frozen=True, slots=True)
class QueueJob:
    """The argument of a queue's handler."""

    payload: Any
    """What was enqueued, as its serializer gives it back."""
    context: JobContext
    """The context of this execution."""

    @property
    def id(self) -> str:
        """The id it was enqueued with; for a message from another service, the message's id."""
        return self.context.unique_id or self.context.job_id

    @property
    def attempts(self) -> int:
        """The number of this execution, from 1."""
        return self.context.attempt

    @property
    def max_attempts(self) -> int:
        """Most executions of the job."""
        return self.context.max_attempts

    @property
    def created_at(self) -> datetime | None:
        """The time of its enqueue."""
        return self.context.created_at

    @property
    def signal(self) -> threading.Event:
        """Set when the run is aborted: timeout, shutdown, cancellation, lost lease."""
        return self.context.cancel_event

    cancel_event = signal
    """``signal`` by another name."""

    @property
    def aborted(self) -> bool:
        """Whether the handler should end soon."""
        return self.context.aborted

    @property
    def correlation_id(self) -> str | None:
        """The correlation id of the request it belongs to."""
        return self.context.correlation_id

    @property
    def idempotency_key(self) -> str:
        """An id that is the same for all attempts; pass it to systems outside the database."""
        return self.context.idempotency_key

    def raise_if_aborted(self) -> None:
        """End the run if it was aborted.

        :raises JobCancelledError: it was.
        """
        self.context.raise_if_aborted()

    def progress(self, percent: float | None = None, text: str = "") -> None:
        """Report the run's progress; see ``JobContext.progress``.

        :param percent: 0 to 100; None: not known.
        :param text: what is being done now.
        """
        self.context.progress(percent, text)


@dataclass(slots=True)
class AfterExecution:
    """A finished run, which ``after_execution`` may change before the outcome is stored."""

    job: QueueJob
    """The job, as its handler was given it."""
    result: Any = None
    """What the handler returned."""
    error: Exception | None = None
    """The error. Set it to None to complete a failed run, or to an exception to fail a completed
    one.
    """
    result_ttl: timedelta | int | None = None
    """Lifetime of its result or error, if it is to differ from the enqueue's."""


Hook = Callable[[AfterExecution], None]
Complain = Callable[[Exception], None]


class QueueHandler(registry.Handler):
    """A queue's function. Any value is a payload, not only an object."""

    def arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the value unchanged."""
        return (value,), {}

    def max_attempts(self, queue: QueueConf) -> int:
        """Return how often a job of this function runs at most: what the queue was made with, or
        what the settings say for it now."""
        return attempts_in(queue.name, self.options.max_attempts)


def adapt(
    function: Callable[..., Any], after: Hook | None, complain: Complain
) -> Callable[..., Any]:
    """Return what the consumer calls: ``(context, payload)``, sync or async as the function is."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(context: JobContext, payload: Any) -> Any:
            job, result, error = QueueJob(payload, context), None, None
            try:
                result = await function(job)
            except Exception as raised:
                error = raised
            return _ended(job, result, error, after, complain)

        return run_async
    call = _with_callback(function) if _takes_callback(function) else function

    @functools.wraps(function)
    def run(context: JobContext, payload: Any) -> Any:
        job, result, error = QueueJob(payload, context), None, None
        try:
            result = call(job)
        except Exception as raised:
            error = raised
        return _ended(job, result, error, after, complain)

    return run


def _ended(
    job: QueueJob, result: Any, error: Exception | None, after: Hook | None, complain: Complain
) -> Any:
    if after is not None:
        ended = AfterExecution(job, result, error)
        try:
            after(ended)
            if ended.result_ttl is not None:
                job.context.result_ttl = milliseconds(ended.result_ttl)
            result, error = ended.result, ended.error
        except Exception as problem:
            # The outcome stays what it was: a hook adds to a run, it does not decide its fate.
            logger.exception("The after_execution hook failed for job %s", job.id)
            complain(problem)
    if error is not None:
        raise _as_error(error)
    return result


def _as_error(told: Any) -> BaseException:
    """Return an exception for a callback's error, which may be a text."""
    return told if isinstance(told, BaseException) else RuntimeError(str(told))


def _takes_callback(function: Callable[..., Any]) -> bool:
    """Return whether the function is called as ``handler(job, callback)``."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature_of(function).parameters.values()
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(needed) == 2


def _with_callback(function: Callable[..., Any]) -> Callable[[QueueJob], Any]:
    def call(job: QueueJob) -> Any:
        is_done = threading.Event()
        answers: list[tuple[Exception | None, Any]] = []

        def callback(error: Exception | None = None, result: Any = None) -> None:
            answers.append((error, result))
            is_done.set()

        function(job, callback)
        while not is_done.wait(CALLBACK_LOOK):
            job.raise_if_aborted()
        error, result = answers[0]  # what is said later is not heard
        if error is not None:
            raise _as_error(error)
        return result

    return call


DEFAULT_MAX_ATTEMPTS = 3
"""Executions of a job: "3 retries" are three."""


def attempts_in(queue: str, own: int | None) -> int:
    """Return how many attempts a queue's jobs get: its own number, the settings' or 3."""
    declared = get_settings().queues.get(queue, {}).get("max_attempts")
    return own or declared or DEFAULT_MAX_ATTEMPTS
