"""The tracer: the spans, their parents and their links.

An attempt is a child of the enqueue, and not only linked to it: a tool then shows a request with
its jobs as one trace, while few tools show links.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import Token
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kjo_django import __version__
from kjo_django.conf import get_settings
from kjo_django.engine.attempt import Attempt, Delivery, Ending
from kjo_django.engine.handler.context import JobContext
from kjo_django.logs import get_logger
from kjo_django.messages import headers as names
from kjo_django.models import Job
from kjo_django.runtime import transport_class
from kjo_django.transports.base import OutgoingRecord, Record

MAX_LINKS = 64
"""Most links of a span; the SDK keeps 128 by default."""
FLUSH_MILLISECONDS = 5_000
ROLLED_BACK = "rolled_back"
"""The outcome of a run whose group's transaction failed. The job runs again."""

MIXED = "mixed"
"""The outcome of a batch whose items ended differently."""

_W3C = TraceContextTextMapPropagator()
_TRACE = (names.TRACEPARENT, names.TRACESTATE)


# --- Blocks under a span. Whatever telemetry raises is logged and goes no further -----------------


logger = get_logger("kjo_django")

COMPLAIN_EVERY = 60.0
"""Seconds between two log messages about failing telemetry."""

P = ParamSpec("P")
R = TypeVar("R")
_complained = -COMPLAIN_EVERY


def quiet(function: Callable[P, R]) -> Callable[P, R | None]:
    """Log the function's exceptions and return None then: no job fails because of tracing."""

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
    """A span that is current, or that waits for its outcome."""

    span: Span
    token: Token[Context] | None
    """Restores the context that was current before, in the same thread or task."""
    ended_at: int | None = None
    """Start time in nanoseconds since the epoch."""
    shared: int = 1
    """Deliveries that run under it and have no outcome yet."""
    outcomes: set[str] = field(default_factory=set)
    has_error: bool = False


def enter(span: Span, under: Context | None = None) -> Open:
    """Make a span current, unless it is in no trace: without an SDK, early versions of the API give
    such a span also where there is a trace.

    :param under: the context it is set in; the current one if not given.
    """
    if under is None:
        under = contexts.get_current()
    if span.get_span_context().is_valid:
        under = trace.set_span_in_context(span, under)
    return Open(span, contexts.attach(under))


@quiet
def leave(opened: Open, error: BaseException | None, *, with_text: bool) -> None:
    """Restore the context that was current before; the span stays open.

    :param with_text: record the error's message and traceback, not only its type.
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
    """End the span with the time at which it stopped being current."""
    opened.span.end(opened.ended_at)


class Scope:
    """A block under a span.

    :param begin: starts the span, or returns None for no span.
    :param ends: whether the span ends with the block; else it ends when its outcome is known.
    """

    __slots__ = ("_begin", "_ends", "_opened", "_with_text")

    def __init__(
        self, begin: Callable[[], Open | None], *, with_text: bool, ends: bool = True
    ) -> None:
        self._begin = begin
        self._ends = ends
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
            if self._ends:
                self._finish(self._opened)

    def _finish(self, opened: Open) -> None:
        end(opened)


# --- The tracer -----------------------------------------------------------------------------------


class OpenTelemetryTracer:
    """See ``kjo_django.tracing.Tracer``, and ``instrument`` for the arguments."""

    def __init__(
        self, tracer_provider: trace.TracerProvider | None = None, *, record_exceptions: bool = True
    ) -> None:
        self._tracer = trace.get_tracer("kjo_django", __version__, tracer_provider)
        self._provider = tracer_provider
        self._with_text = record_exceptions

    @quiet
    def flush(self, **kwargs: Any) -> None:
        """Export the spans that are still buffered.

        A stopping worker calls it: a supervised worker leaves its process without the clean-up in
        which the SDK exports.
        """
        flush = getattr(self._provider or trace.get_tracer_provider(), "force_flush", None)
        if flush is not None:
            flush(FLUSH_MILLISECONDS)

    # --- What is current --------------------------------------------------------------------------

    def headers(self) -> dict[str, str]:
        """Return ``traceparent`` and ``tracestate`` of the current span, if there is one."""
        return _current_headers() or {}

    def trace_id(self) -> str:
        """Return the current trace's id."""
        current = trace.get_current_span().get_span_context()
        return trace.format_trace_id(current.trace_id) if current.is_valid else ""

    # --- Producing --------------------------------------------------------------------------------

    def enqueuing(self, jobs: Sequence[Job]) -> AbstractContextManager[object]:
        """Start one span for the call; its context is stored with all its jobs.

        Jobs that were given a trace of their own keep it.
        """
        return Scope(lambda: self._begin_enqueue(jobs), with_text=self._with_text)

    @quiet
    def _begin_enqueue(self, jobs: Sequence[Job]) -> Open | None:
        inherited = self.headers().get(names.TRACEPARENT)
        mine = [job for job in jobs if (job.headers or {}).get(names.TRACEPARENT) == inherited]
        if not mine:
            return None
        told_of_them = _attributes_of(mine)
        handler = told_of_them.get(HANDLER)
        span = self._tracer.start_span(
            f"enqueue {handler}" if handler else "enqueue",
            kind=SpanKind.PRODUCER,
            attributes=told_of_them,
        )
        opened = enter(span)
        carried = self.headers()
        for job in mine:
            job.headers = {**_without_trace(job.headers or {}), **carried} or None
        return opened

    def publishing(
        self, transport: str, records: Sequence[OutgoingRecord]
    ) -> AbstractContextManager[Sequence[OutgoingRecord]]:
        """Start one span for the batch, with links to the traces of its records.

        A record without a trace gets the batch's.
        """
        return _Publishing(self._tracer, transport, records, with_text=self._with_text)

    # --- Handling ---------------------------------------------------------------------------------

    def running(
        self, deliveries: Sequence[Delivery], runs: Sequence[JobContext]
    ) -> AbstractContextManager[object]:
        """Start a span for the attempt, a child of the span in its message; a batch's span links to
        them.
        """
        begin = functools.partial(self._begin_run, deliveries, runs)
        return Scope(begin, with_text=self._with_text, ends=False)

    @quiet
    def _begin_run(self, deliveries: Sequence[Delivery], runs: Sequence[JobContext]) -> Open | None:
        for delivery in deliveries:
            _finish(delivery, ROLLED_BACK)
        span, under = self._start_process(deliveries, of_run(deliveries, runs))
        opened = enter(span, under)
        opened.shared = len(deliveries)
        for delivery in deliveries:
            delivery.trace = opened
        return opened

    def _start_process(
        self, deliveries: Sequence[Delivery], attributes: Attributes
    ) -> tuple[Span, contexts.Context]:
        under = contexts.get_current()
        around = trace.get_current_span().get_span_context()
        wanted = [_read(_of(delivery.record, names.TRACE_FOLLOWS)) for delivery in deliveries]
        if len(deliveries) == 1:
            carried = text_headers(deliveries[0].record.headers, _TRACE)
            under = _W3C.extract(carried, under)
        else:
            wanted = [_read(_of(each.record, names.TRACEPARENT)) for each in deliveries] + wanted
        if around != trace.get_current_span(under).get_span_context():
            # Run within something else: an operator's request, a test.
            wanted.insert(0, around)
        span = self._tracer.start_span(
            f"process {handler_of(deliveries[0])}",
            context=under,
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=_links(wanted),
        )
        return span, under

    @quiet
    def failing(self, outcomes: Sequence[Attempt]) -> None:
        """Write the attempt's span into the record's headers.

        The row of the next attempt, the dead letter and its topic link to it by these.
        """
        for outcome in outcomes:
            opened = outcome.delivery.trace
            if not isinstance(opened, Open) or not opened.span.get_span_context().is_valid:
                continue
            follows = _carried(opened.span).get(names.TRACEPARENT, "")
            outcome.delivery.record.headers[names.TRACE_FOLLOWS] = follows.encode()
            if outcome.error is not None and (opened.shared > 1 or not opened.has_error):
                # Nothing was raised: an item of a batch failed, or the commit did.
                note_error(opened, outcome.error, with_text=self._with_text)

    @quiet
    def settled(self, outcomes: Sequence[Attempt]) -> None:
        """End the spans of settled runs.

        A message that ended without a run (unreadable, expired, its worker killed) gets a span,
        too, so no trace ends without its outcome.
        """
        for outcome in outcomes:
            if outcome.delivery.trace is None and outcome.ending is Ending.DEAD:
                self._trace_death(outcome)
            if outcome.ending is not None:
                _finish(outcome.delivery, outcome.ending.value, str(outcome.reason))

    def _trace_death(self, outcome: Attempt) -> None:
        attributes = of_delivery(outcome.delivery) | {ATTEMPT: outcome.number}
        span, _ = self._start_process([outcome.delivery], attributes)
        outcome.delivery.trace = opened = Open(span, None)
        if outcome.error is not None:
            note_error(opened, outcome.error, with_text=False)

    @quiet
    def given_back(self, deliveries: Sequence[Delivery]) -> None:
        """End the spans of runs that are undone."""
        for delivery in deliveries:
            _finish(delivery, Ending.DEFERRED.value)


class _Publishing(Scope):
    """A batch being published; returns the records to publish."""

    __slots__ = ("_records", "_tracer", "_transport")

    def __init__(
        self,
        tracer: trace.Tracer,
        transport: str,
        records: Sequence[OutgoingRecord],
        *,
        with_text: bool,
    ) -> None:
        super().__init__(self._begin_batch, with_text=with_text)
        self._tracer = tracer
        self._transport = transport
        self._records = records

    def __enter__(self) -> Sequence[OutgoingRecord]:
        super().__enter__()
        return self._records

    @quiet
    def _begin_batch(self) -> Open:
        records = self._records
        bare = [names.TRACEPARENT not in record.headers for record in records]
        topics = {record.topic for record in records}
        attributes: Attributes = operation("publish", "send")
        attributes[SYSTEM] = system_of(self._transport)
        attributes[MESSAGE_COUNT] = len(records)
        if len(topics) == 1:
            attributes[DESTINATION] = min(topics)
        span = self._tracer.start_span(
            f"publish {min(topics)}" if len(topics) == 1 else "publish",
            # By the conventions: the producer is who makes the context that messages carry.
            kind=SpanKind.PRODUCER if any(bare) else SpanKind.CLIENT,
            attributes=attributes,
            links=_links(_read(_of(record, names.TRACEPARENT)) for record in records),
        )
        opened = enter(span)
        own = {name: value.encode() for name, value in (_current_headers() or {}).items()}
        self._records = [
            replace(record, headers={**record.headers, **own}) if is_bare else record
            for record, is_bare in zip(records, bare, strict=True)
        ]
        return opened


# --- Contexts and headers -------------------------------------------------------------------------


def _attributes_of(jobs: Sequence[Job]) -> Attributes:
    """Return the attributes of the span in which jobs are enqueued."""
    queues = [get_settings().queue(name) for name in {job.queue for job in jobs}]
    topics = {job.destination for job in jobs}
    if "" in topics:
        topics |= {topic for queue in queues for topic in queue.topics}
    systems = {system_of(queue.transport) for queue in queues}
    found = of_jobs(jobs, topics - {""}, systems)
    if len(jobs) == 1 and not jobs[0].destination:
        found[JOB_ID] = str(jobs[0].pk)
    return found


def _carried(span: Span) -> dict[str, str]:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, trace.set_span_in_context(span))
    return carrier


@quiet
def _current_headers() -> dict[str, str]:
    return _carried(trace.get_current_span())


def _without_trace(headers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in headers.items() if name not in _TRACE}


def _of(record: Record | OutgoingRecord, name: str) -> str:
    return text_headers(record.headers, (name,)).get(name, "")


def _read(traceparent: str) -> SpanContext:
    """Return the span a traceparent names; an invalid context where it names none."""
    if not traceparent:
        return trace.INVALID_SPAN_CONTEXT
    carrier = {names.TRACEPARENT: traceparent}
    under = _W3C.extract(carrier, contexts.Context())
    return trace.get_current_span(under).get_span_context()


def _links(found: Iterable[SpanContext]) -> list[Link]:
    """Return links to the distinct valid contexts, up to the limit."""
    unique: dict[tuple[int, int], SpanContext] = {}
    for each in found:
        if each.is_valid:
            unique.setdefault((each.trace_id, each.span_id), each)
        if len(unique) == MAX_LINKS:
            break
    return [Link(each) for each in unique.values()]


def _finish(delivery: Delivery, outcome: str, reason: str = "") -> None:
    opened, delivery.trace = delivery.trace, None
    if not isinstance(opened, Open):
        return
    opened.outcomes.add(outcome)
    if reason:
        opened.span.set_attribute(REASON, reason)
    opened.shared -= 1
    if opened.shared <= 0:
        (one, *others) = sorted(opened.outcomes)
        opened.span.set_attribute(OUTCOME, MIXED if others else one)
        end(opened)


# --- What spans say -------------------------------------------------------------------------------


Attributes = dict[str, str | int]

SYSTEM = "messaging.system"
DESTINATION = "messaging.destination.name"
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
MESSAGE_ID = "messaging.message.id"
MESSAGE_COUNT = "messaging.batch.message_count"
PARTITION = "messaging.destination.partition.id"
GROUP = "messaging.consumer.group.name"
KAFKA_OFFSET = "messaging.kafka.offset"
ERROR_TYPE = "error.type"
HANDLER = "kjo.handler"
QUEUE = "kjo.queue"
JOB_ID = "kjo.job_id"
ATTEMPT = "kjo.attempt"
OUTCOME = "kjo.outcome"
REASON = "kjo.reason"
OFFSET = "kjo.offset"

_OPAQUE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(:\d+)?", re.IGNORECASE)


def system_of(alias: str) -> str:
    """Return a transport's name: ``kafka``, ``redis_streams``, ``database``, ``memory``.

    For a class of the project it is the class's name without ``Transport``, with underscores.
    """
    return _system(transport_class(alias).__name__)


@functools.cache
def _system(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Transport")).lower()


def operation(name: str, kind: str) -> Attributes:
    """Return the operation's name and its type in the semantic conventions."""
    return {OPERATION_NAME: name, OPERATION_TYPE: kind}


def of_jobs(jobs: Collection[Job], topics: Collection[str], systems: Collection[str]) -> Attributes:
    """Return the attributes of the jobs that one call stores; values that differ are left out."""
    told: Attributes = operation("enqueue", "create")
    for name, values in (
        (SYSTEM, set(systems)),
        (DESTINATION, set(topics)),
        (HANDLER, {job.handler for job in jobs}),
        (QUEUE, {job.queue for job in jobs}),
    ):
        if len(values) == 1:
            told[name] = values.pop()
    if len(jobs) > 1:
        told[MESSAGE_COUNT] = len(jobs)
    return told


def of_delivery(delivery: Delivery) -> Attributes:
    """Return the attributes of a message that is handled, and of its position."""
    record, message = delivery.record, delivery.message
    system = system_of(delivery.queue.transport)
    told = operation("process", "process") | {
        SYSTEM: system,
        DESTINATION: record.topic,
        GROUP: delivery.queue.consumer_group,
        HANDLER: handler_of(delivery),
        QUEUE: delivery.queue.name,
    }
    if record.partition >= 0:  # else it comes from no topic: an operator runs it again
        told[PARTITION] = str(record.partition)
        told[KAFKA_OFFSET if system == "kafka" else OFFSET] = record.offset
    ids = {MESSAGE_ID: message.id, JOB_ID: message.job_id}
    told.update({name: id for name, id in ids.items() if id and _OPAQUE.fullmatch(id)})
    return told


def of_run(deliveries: Sequence[Delivery], contexts: Sequence[JobContext]) -> Attributes:
    """Return the attributes of an attempt; for a batch those that its items share, and their
    number.
    """
    first, *others = [
        {**of_delivery(delivery), ATTEMPT: context.attempt}
        for delivery, context in zip(deliveries, contexts, strict=True)
    ]
    for other in others:
        first = {name: value for name, value in first.items() if other.get(name) == value}
    return {**first, MESSAGE_COUNT: len(deliveries)} if others else first


def handler_of(delivery: Delivery) -> str:
    """Return the handler's name, or "unknown" if there is none.

    A name in a header of another service must not become a span's name.
    """
    return delivery.kind or "unknown"


def error_type(error: BaseException) -> str:
    """Return the exception's class."""
    kind = type(error)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def text_headers(headers: Mapping[str, Any], wanted: Collection[str]) -> dict[str, str]:
    """Return the headers that exist, as text."""
    found = {name: headers[name] for name in wanted if headers.get(name)}
    return {
        name: value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
        for name, value in found.items()
    }
