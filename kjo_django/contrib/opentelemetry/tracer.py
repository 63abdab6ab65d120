"""The tracer: which spans there are, what they are children of and what they link to.

docs/decisions/0059 says why an attempt is a child of the enqueue and not only linked to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanContext, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kjo_django import __version__
from kjo_django.conf import get_settings
from kjo_django.contrib.opentelemetry import attributes as told
from kjo_django.contrib.opentelemetry.scopes import (
    Open,
    OpenEnded,
    Scope,
    end,
    enter,
    note_error,
    quiet,
)
from kjo_django.engine.attempt import Delivery, Outcome, Result
from kjo_django.engine.handler.context import JobContext
from kjo_django.messages import headers as names
from kjo_django.models import Job
from kjo_django.transports.base import OutgoingRecord, Record

MAX_LINKS = 64
"""Of a batch, however large; the SDK keeps 128 by default."""
FLUSH_MILLISECONDS = 5_000
ROLLED_BACK = "rolled_back"
"""The outcome of a run whose group's transaction failed: it runs again by itself."""

MIXED = "mixed"
"""The outcome of a batch whose items ended differently."""

_W3C = TraceContextTextMapPropagator()
_TRACE = (names.TRACEPARENT, names.TRACESTATE)


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
        """Export what is held back. A worker that stops calls it: a supervised one leaves its
        process without the clean-up in which the SDK does so itself."""
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
        """One span for the call, whose context all its jobs carry; those that were given a trace of
        their own keep it."""
        return Scope(lambda: self._begin_enqueue(jobs), with_text=self._with_text)

    @quiet
    def _begin_enqueue(self, jobs: Sequence[Job]) -> Open | None:
        inherited = self.headers().get(names.TRACEPARENT)
        mine = [job for job in jobs if (job.headers or {}).get(names.TRACEPARENT) == inherited]
        if not mine:
            return None
        queues = [get_settings().queue(name) for name in {job.queue for job in mine}]
        topics = {job.destination for job in mine if job.destination}
        if any(not job.destination for job in mine):
            topics |= {queue.topic for queue in queues}
        systems = {told.system_of(queue.transport) for queue in queues}
        told_of_them = told.of_jobs(mine, topics, systems)
        handler = told_of_them.get(told.HANDLER)
        if len(mine) == 1 and not mine[0].destination:
            told_of_them[told.JOB_ID] = str(mine[0].pk)
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
        """One span for the batch, with links to the traces of its records; a record without one is
        given the batch's own."""
        return _Publishing(self._tracer, transport, records, with_text=self._with_text)

    # --- Handling ---------------------------------------------------------------------------------

    def running(
        self, deliveries: Sequence[Delivery], runs: Sequence[JobContext]
    ) -> AbstractContextManager[object]:
        """A span for the attempt, child of what its message carries; for a batch one that links to
        what its messages carry."""
        return OpenEnded(lambda: self._begin_run(deliveries, runs), with_text=self._with_text)

    @quiet
    def _begin_run(self, deliveries: Sequence[Delivery], runs: Sequence[JobContext]) -> Open | None:
        for delivery in deliveries:
            _finish(delivery, ROLLED_BACK)
        span, under = self._start_process(deliveries, told.of_run(deliveries, runs))
        opened = enter(span, under)
        opened.shared = len(deliveries)
        for delivery in deliveries:
            delivery.trace = opened
        return opened

    def _start_process(
        self, deliveries: Sequence[Delivery], attributes: told.Attributes
    ) -> tuple[Span, contexts.Context]:
        under = contexts.get_current()
        around = trace.get_current_span().get_span_context()
        wanted = [_read(_of(delivery.record, names.TRACE_FOLLOWS)) for delivery in deliveries]
        if len(deliveries) == 1:
            carried = told.text_headers(deliveries[0].record.headers, _TRACE)
            under = _W3C.extract(carried, under)
        else:
            wanted = [_read(_of(each.record, names.TRACEPARENT)) for each in deliveries] + wanted
        if around != trace.get_current_span(under).get_span_context():
            # Run within something else: an operator's request, a test.
            wanted.insert(0, around)
        span = self._tracer.start_span(
            f"process {told.handler_of(deliveries[0])}",
            context=under,
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=_links(wanted),
        )
        return span, under

    @quiet
    def failing(self, outcomes: Sequence[Outcome]) -> None:
        """Leave the attempt's span with the record: in the row of the next attempt, in the dead
        letter and its topic, it is what they link to."""
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
    def settled(self, outcomes: Sequence[Outcome]) -> None:
        """End the spans of runs. What died without a run (unreadable, expired, its worker killed)
        gets one too: no trace ends without a word."""
        for outcome in outcomes:
            if outcome.delivery.trace is None and outcome.result is Result.DEAD:
                self._tell_death(outcome)
            _finish(outcome.delivery, outcome.result.value, str(outcome.reason))

    def _tell_death(self, outcome: Outcome) -> None:
        attributes = told.of_delivery(outcome.delivery) | {told.ATTEMPT: outcome.attempt}
        span, _ = self._start_process([outcome.delivery], attributes)
        outcome.delivery.trace = opened = Open(span, None)
        if outcome.error is not None:
            note_error(opened, outcome.error, with_text=False)

    @quiet
    def given_back(self, deliveries: Sequence[Delivery]) -> None:
        """End the spans of runs that count for nothing."""
        for delivery in deliveries:
            _finish(delivery, Result.DEFERRED.value)


class _Publishing(Scope):
    """A batch on its way; gives the records to publish."""

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
        attributes: told.Attributes = told.operation("publish", "send")
        attributes[told.SYSTEM] = told.system_of(self._transport)
        attributes[told.MESSAGE_COUNT] = len(records)
        if len(topics) == 1:
            attributes[told.DESTINATION] = min(topics)
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
    return told.text_headers(record.headers, (name,)).get(name, "")


def _read(traceparent: str) -> SpanContext:
    """Return the span a traceparent names; an invalid context where it names none."""
    if not traceparent:
        return trace.INVALID_SPAN_CONTEXT
    carrier = {names.TRACEPARENT: traceparent}
    under = _W3C.extract(carrier, contexts.Context())
    return trace.get_current_span(under).get_span_context()


def _links(found: Iterable[SpanContext]) -> list[Link]:
    """Link to each valid one once, to the first of many."""
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
        opened.span.set_attribute(told.REASON, reason)
    opened.shared -= 1
    if opened.shared <= 0:
        (one, *others) = sorted(opened.outcomes)
        opened.span.set_attribute(told.OUTCOME, MIXED if others else one)
        end(opened)
