"""What a handler, middleware and log records may know and ask about a run."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from kjo_django.engine.attempt import Abort as Abort
from kjo_django.engine.attempt import Delivery
from kjo_django.exceptions import Delay, JobCancelledError, Retry
from kjo_django.messages import headers as names
from kjo_django.workflows.step_context import WorkflowContext

_TRACE_ID = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-")


@dataclass(slots=True)
class JobContext:
    """One run of a handler: the first argument of handlers with ``takes_context=True``, and the
    argument of middleware."""

    job_id: str
    """The job's id; for a message that was not enqueued here, the message's id."""
    attempt: int
    """The number of this attempt, from 1."""
    max_attempts: int
    """The number of attempts of the job: if the last one fails, the job becomes a dead letter."""
    idempotency_key: str
    """A text that is equal for all attempts of one job. Pass it to systems outside the database, so
    that a repeated attempt has no second effect there."""
    queue: str
    """The name of the job's queue."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """The headers that the job was enqueued with, and those of its message, by name."""
    created_at: datetime | None = None
    """When the job was enqueued; for a message that was not enqueued here, when it was
    published."""
    unique_id: str | None = None
    """The id given to ``using(id=…)``, if one was."""
    generation: int = 1
    """The generation, from 1: one more with each requeue, replacement or new enqueue of the job's
    id."""
    result_ttl: int | None = None
    """Milliseconds its outcome is kept, where the run decided that it shall differ; for this
    package's own use."""
    lease: str = ""
    """The name of its lease; for this package's own use."""
    is_atomic: bool = True
    """Whether the handler runs in the transaction that records the outcome."""
    abort_reason: Abort | None = None
    """Why the run was aborted: ``CANCELLED``, ``SHUTDOWN``, ``LOST`` or ``TIMEOUT``; None: it was
    not."""
    delivery: Delivery | None = field(default=None, repr=False)
    """The message as the engine knows it; for this package's own use."""
    time_limit: float | None = None
    """The timeout of the attempt in seconds; None: no limit."""
    payload: Any = None
    """The decoded payload: the arguments of the enqueue."""
    noted_progress: tuple[float | None, str] | None = None
    """The progress that was reported last and is not stored yet; for this package's own use."""
    workflow: WorkflowContext | None = None
    """The workflow of which the job is a step; None if it is not a step."""
    worker: str = ""
    """A name that is kept with the completed job, where the run has given one; for this package's
    own use."""
    log_lines: deque[str] | None = None
    """The last lines that were logged in the run; None: there were none. For this package's own
    use."""
    is_shared: bool = False
    """Whether its transaction is that of others, too: where it fails by an error of the database,
    it is called again alone. For this package's own use."""
    _is_aborted: bool = False
    _event: threading.Event | None = None

    @property
    def handler(self) -> str:
        """The handler's name."""
        return self.delivery.kind if self.delivery is not None else ""

    @property
    def log_fields(self) -> dict[str, Any]:
        """The fields of log records of the run: ids, topic and offset, attempt; never the
        payload."""
        return facts_of(self.delivery, self.attempt) if self.delivery is not None else {}

    @property
    def trace_id(self) -> str:
        """The id of the trace that the message carries, or ""."""
        headers = self.delivery.record.headers if self.delivery is not None else {}
        found = _TRACE_ID.match(names.text(headers, names.TRACEPARENT))
        return found[1] if found else ""

    @property
    def scheduled_for(self) -> datetime | None:
        """The tick of the schedule for which the job was stored; None for other jobs."""
        headers = self.delivery.record.headers if self.delivery is not None else {}
        return names.moment(headers, names.SCHEDULED_FOR)

    @property
    def aborted(self) -> bool:
        """Whether the handler should end soon: the job was cancelled, the worker stops, the timeout
        is over, or another worker took over the job. A handler with a long loop should check it."""
        return self._is_aborted

    @property
    def cancel_event(self) -> threading.Event:
        """An event that is set when the run is aborted. Instead of sleeping, let a handler call
        ``context.cancel_event.wait(seconds)``."""
        # Made for those who ask: a lock and a condition for every job cost more than its row.
        if self._event is None:
            self._event = threading.Event()
        if self._is_aborted:
            self._event.set()
        return self._event

    @property
    def correlation_id(self) -> str | None:
        """The id that links this job to the request that caused it."""
        return self.headers.get(names.CORRELATION_ID)

    def raise_if_aborted(self) -> None:
        """Raise ``JobCancelledError`` if the run was aborted. Call it in each round of a long loop.

        If the handler does not catch the error, the run ends according to the abort: a cancelled
        job is cancelled; a job that a shutdown interrupts goes back to its queue and spends no
        attempt.

        :raises JobCancelledError: the run was aborted.
        """
        if self.aborted:
            why = f": {self.abort_reason.value}" if self.abort_reason else ""
            raise JobCancelledError(f"The run of job {self.job_id} was aborted{why}")

    def abort(self, reason: Abort | None = None) -> None:
        """Ask the handler to end; the worker's side of ``aborted``. The first reason stays. For
        this package's own use."""
        if self.abort_reason is None:
            self.abort_reason = reason
        self._is_aborted = True
        if self._event is not None:
            self._event.set()

    def progress(self, percent: float | None = None, text: str = "") -> None:
        """Report the progress of the run. It costs nearly nothing, so you can call it often.

        The worker stores the latest progress once a second, outside the handler's transaction, so
        it is visible before the commit, and a rollback does not undo it. ``JobHandle.progress``
        reads it.

        :param percent: 0 to 100, or None if there is only a text.
        :param text: a description of the present work; 150 characters are kept.
        :raises ValueError: percent is not from 0 to 100.
        """
        if percent is not None:
            if not 0 <= percent <= 100:
                raise ValueError(f"percent must be from 0 to 100, not {percent!r}")
            if type(percent) not in (int, float):
                percent = float(percent)  # JSON does not know a Decimal, for example
        # Here, where it fails the handler alone: the heartbeat that stores it is everybody's.
        self.noted_progress = (percent, str(text))


@dataclass(slots=True)
class BatchItem(JobContext):
    """One job of a batch: its payload, its context, and methods that set its outcome."""

    error: Exception | None = None
    """The error that was passed to ``fail``, or None."""

    def fail(self, error: Exception) -> None:
        """Let this item fail with ``error``, as if the handler of a single job had raised it: then
        follows a retry or the dead letter.

        The other items of the batch are not affected, and the handler's writes so far are kept. To
        undo the writes for a failed item, make them inside ``atomic()``. The last call counts.

        :param error: an exception that the handler of a single job could raise.
        :raises TypeError: the error is not an exception.
        """
        if not isinstance(error, Exception):
            raise TypeError(f"fail() takes an exception, not {type(error).__name__}")
        self.error = error

    def retry(self, reason: str = "retry requested", *, delay: Delay | None = None) -> None:
        """Request another attempt of this item: ``fail`` with ``Retry``.

        :param reason: the error text that is stored with this attempt.
        :param delay: the time until the next attempt, a timedelta or seconds; by default the
            back-off.
        """
        self.fail(Retry(reason, delay=delay))


class BatchContext:
    """One call of a batch handler, as middleware is passed it.

    What its items do not have in common is theirs alone: look at ``items``.
    """

    def __init__(self, items: Sequence[BatchItem], time_limit: float | None = None) -> None:
        self.items = items
        self.time_limit = time_limit
        """Seconds the call may take; None: no limit."""
        self.handler: str = items[0].handler
        """The handler's name."""
        self.queue: str = items[0].queue
        """The queue's name."""
        self.payload: list[Any] = [item.payload for item in items]
        """The payloads of all items."""

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """The headers that all items have, with one value."""
        return common([item.headers for item in self.items])

    @property
    def log_fields(self) -> dict[str, Any]:
        """What the log fields of all items have in common."""
        return common([item.log_fields for item in self.items])

    @property
    def trace_id(self) -> str:
        """The id of the trace that the first item's message carries, or ""."""
        return self.items[0].trace_id

    def abort(self, reason: Abort | None = None) -> None:
        """Ask the run of every item to end."""
        for item in self.items:
            item.abort(reason)


def runs_of(context: JobContext | BatchContext) -> Sequence[JobContext]:
    """Return the context itself, or those of a batch's items."""
    return context.items if isinstance(context, BatchContext) else (context,)


def common(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what several mappings have in common: these names, with one value."""
    if not found:
        return {}
    first, *others = found
    missing = object()
    return {
        name: value
        for name, value in first.items()
        if all(other.get(name, missing) == value for other in others)
    }


def facts_of(delivery: Delivery, attempt: int | None = None) -> dict[str, Any]:
    """Return what a log record that concerns a delivery says in its ``extra``; never a payload."""
    message, record = delivery.message, delivery.record
    topic, partition, offset = record.place
    return {
        "job_id": message.job_id or message.id,
        "handler": delivery.kind or message.type or names.text(record.headers, names.TYPE),
        "queue": delivery.queue.name,
        "attempt": attempt,
        "message_id": message.id,
        "topic": topic,
        "partition": partition,
        "offset": offset,
    }
