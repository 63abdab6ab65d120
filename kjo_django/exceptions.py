"""Every error of kjo_django, in one visible tree.

KjoError
├── JobQueueError                 has a stable ``code`` and ``to_dict()``
│   ├── JobTimeoutError           TIMEOUT         (also a builtin TimeoutError)
│   │   └── HandlerTimeout        raised inside a handler that exceeds its timeout
│   ├── MaxRetriesError           MAX_RETRIES
│   ├── JobFailedError            JOB_FAILED
│   ├── JobNotFoundError          JOB_NOT_FOUND
│   ├── JobCancelledError         JOB_CANCELLED
│   ├── JobExistsError            JOB_EXISTS      a job of this id or window is there
│   ├── JobStateError             JOB_STATE       an operation the job's state does not allow
│   ├── UncommittedJobError       UNCOMMITTED     waiting for a job of an open transaction
│   ├── StalledError              STALLED         the worker died or froze during the attempt
│   └── StorageError              STORAGE_ERROR
├── PayloadError                  also a ValueError: refused before anything is written
├── MessageError                  a message that can never be handled (poison)
├── PublishError                  the transport did not accept a record
├── CoordinationError             the coordination backend cannot be reached
│   └── CoordinationForgotError   it answers, but has lost its data
├── PermanentError                raised by a handler: no retry, a dead letter
│   ├── TransactionEndedError     the handler has committed the transaction of its group
│   └── MustBeKilled              of KDLQ: to the dead letters
├── Retry                         raised by a handler: try again, optionally after ``delay``
│   └── MustBeRedelivered         of KDLQ: redeliver
├── KDLQException                 a KDLQ message could not be routed: do not commit its offset
│   ├── KDLQConfigurationException   also a ValueError
│   └── KDLQLifecycleException    the consumer is closed
└── PausableError                 the attempt met an outage: pause, recover, resume
    ├── DatabaseConnectionError
    ├── ServiceUnavailableError
    ├── RateLimitExceededError
    └── CircuitBreakerOpenError

Configuration mistakes raise Django's own ``ImproperlyConfigured``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


class KjoError(Exception):
    """Root of everything this package raises on its own account."""


class JobQueueError(KjoError):
    """An error with a stable code that an API may show."""

    code: ClassVar[str] = "JOB_QUEUE_ERROR"

    facts: ClassVar[tuple[str, ...]] = ()
    """The attributes that the class takes as keyword arguments; ``to_dict`` adds those known."""

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(message)
        if unknown := facts.keys() - set(self.facts):
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        for name in self.facts:
            setattr(self, name, facts.get(name))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready description: ``code``, ``type``, ``message`` and the facts known."""
        found = {"code": self.code, "type": type(self).__name__, "message": str(self)}
        known = {name: getattr(self, name, None) for name in self.facts}
        return found | {name: value for name, value in known.items() if value is not None}


class JobTimeoutError(JobQueueError, TimeoutError):
    """A handler exceeded its timeout, or the time of a wait is over; the job may still complete.

    :param job_id: as the caller knows the job: its unique id where it has one.
    :param timeout: seconds.
    :param attempts: number of attempts with a recorded outcome; in a handler, the number of the
        interrupted one.
    """

    code = "TIMEOUT"
    facts = ("job_id", "timeout", "attempts")
    job_id: str | None
    timeout: float | None
    attempts: int | None


class HandlerTimeout(JobTimeoutError):
    """Raised inside a handler that exceeds its timeout, by another thread: without arguments."""

    def __init__(self, message: str = "The handler exceeded its timeout", **facts: Any) -> None:
        super().__init__(message, **facts)


class JobFailedError(JobQueueError):
    """The awaited job failed for good.

    :param original_error: the text of its last error.
    :param job_id: as the caller knows the job: its unique id where it has one.
    :param attempts: number of attempts that were made.
    :param error_type: import path of the error's class.
    :param error_code: the error's ``code``, if it had one.
    :param error_details: the return value of its ``to_dict()``, or its ``details``.
    """

    code = "JOB_FAILED"
    facts = ("job_id", "attempts", "original_error", "error_type", "error_code", "error_details")

    original_error: str | None
    job_id: str | None
    attempts: int | None
    error_type: str | None
    error_code: str | None
    error_details: Any

    def __init__(self, message: str, original_error: str | None = None, **facts: Any) -> None:
        super().__init__(message, original_error=original_error, **facts)


class MaxRetriesError(JobQueueError):
    """All attempts are spent."""

    code = "MAX_RETRIES"

    def __init__(self, job_id: str, attempts: int, last_error: str, payload: Any = None) -> None:
        super().__init__(f"Job {job_id} failed after {attempts} attempts: {last_error}")
        self.job_id = job_id
        self.attempts = attempts
        self.last_error = last_error
        self.payload = payload


class JobNotFoundError(JobQueueError, LookupError):
    """No job has this id."""

    code = "JOB_NOT_FOUND"


class JobCancelledError(JobQueueError):
    """The job was cancelled; raised to waiters and by ``context.raise_if_aborted()``."""

    code = "JOB_CANCELLED"


class JobExistsError(JobQueueError):
    """An enqueue with ``on_conflict="raise"`` has found an existing job; nothing was written.

    :param job_id: the id of the existing job.
    :param existing_state: queued, processing, failing, completed or failed.
    """

    code = "JOB_EXISTS"
    facts = ("job_id", "existing_state")
    job_id: str | None
    existing_state: str | None


class JobStateError(JobQueueError):
    """The job's present state does not allow the operation; nothing was changed."""

    code = "JOB_STATE"


class UncommittedJobError(JobQueueError):
    """Waiting inside the transaction that has not committed the job would never end."""

    code = "UNCOMMITTED"


class StalledError(JobQueueError):
    """The worker died or froze while it ran the attempt; the attempt counts."""

    code = "STALLED"


class StorageError(JobQueueError):
    """The state store refused an operation."""

    code = "STORAGE_ERROR"


class PayloadError(KjoError, ValueError):
    """A payload cannot be serialized or breaks a limit; raised before anything is written."""


class MessageError(KjoError):
    """A message that no retry can make readable; it becomes a dead letter.

    ``reason`` is a value of ``DeadLetterReason``, and so is ``code``.
    """

    reason: str = "invalid"
    code: str = "invalid"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.code = reason


class PublishError(KjoError):
    """The transport did not accept a record; its job stays pending."""


class CoordinationError(KjoError):
    """The coordination backend cannot be reached; correctness never depends on it."""

    may_have_effect = True
    """Whether the operation may have been done in spite of the error."""


class CoordinationForgotError(CoordinationError):
    """The coordination backend answers, but has lost its data: it cannot count limits until the
    workers have reported their slots again."""

    may_have_effect = False


class PermanentError(KjoError):
    """Raise it in a handler if another attempt cannot help: the job becomes a dead letter
    immediately."""


class TransactionEndedError(PermanentError):
    """An atomic handler has ended the transaction in which its job is recorded, and so has
    committed its writes. Another attempt would commit them once more."""


Delay = timedelta | float
"""A timedelta, or a number of seconds."""


class Retry(KjoError):
    """Raise it in a handler to ask for another attempt.

    :param delay: time until the next attempt, a timedelta or seconds; by default the job's
        back-off.
    """

    delay: timedelta | None = None

    def __init__(self, message: str = "retry requested", *, delay: Delay | None = None) -> None:
        if isinstance(delay, (int, float)) and not isinstance(delay, bool):
            with suppress(OverflowError, ValueError):
                delay = timedelta(seconds=delay)
        if delay is not None and not isinstance(delay, timedelta):
            raise TypeError(f"Retry: delay must be a timedelta or number of seconds, not {delay!r}")
        super().__init__(message)
        self.delay = delay


class MustBeKilled(PermanentError):
    """Raise it in a KDLQ processor to send the message to the dead-letter topic."""


class MustBeRedelivered(Retry):
    """Raise it in a KDLQ processor to have the message redelivered."""


KDLQMessageMustBeRedeliveredException = MustBeRedelivered
"""Its name in the Java library."""


class KDLQException(KjoError):
    """A message could neither be redelivered nor sent to the dead-letter topic: the broker or the
    database is away. Its offset must not be committed."""


class KDLQConfigurationException(KDLQException, ValueError):
    """A KDLQ configuration that cannot work."""


class KDLQLifecycleException(KDLQException):
    """The consumer was closed."""


class PausableError(KjoError):
    """An outage that would also affect other messages of the partition."""


class DatabaseConnectionError(PausableError):
    """A database cannot be reached."""


class ServiceUnavailableError(PausableError):
    """A service the handler needs is down."""


class RateLimitExceededError(PausableError):
    """A service the handler needs refuses more requests for now.

    :param retry_after: the time to wait: a timedelta, seconds, or the text of a ``Retry-After``
        header. The partition is paused for that time, an hour at most.
    """

    def __init__(
        self, *arguments: object, retry_after: timedelta | float | str | None = None
    ) -> None:
        super().__init__(*arguments)
        self.retry_after = retry_after


class CircuitBreakerOpenError(PausableError):
    """A circuit breaker keeps the handler from calling a failing service."""


def is_ctrl_c(error: BaseException) -> bool:
    """Return whether somebody pressed Ctrl-C: Python raises that in the main thread only."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and isinstance(error, KeyboardInterrupt)


def answer_of(ask: Callable[[], T], otherwise: T) -> T:
    """Return what an error of somebody else answers; ``otherwise`` where it raises, even what would
    end the process: code that judges or reports an error must not fail because of it."""
    try:
        return ask()
    except BaseException as raised:
        if is_ctrl_c(raised):
            raise
        return otherwise


def text_of(error: BaseException) -> str:
    """Return an error's text; its type's name where it has none, or raises when it is asked."""
    return answer_of(lambda: str(error), "") or type(error).__name__


def import_path(kind: type[BaseException]) -> str:
    """Return ``module.QualName``; builtins without their module."""
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"
