"""Spans of OpenTelemetry, from a web request to the handler and an operator's replay (KII-36)."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError
from opentelemetry import baggage, trace
from opentelemetry import context as contexts
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from kjo_django import BaseEvent, PermanentError, event_handler, publish_event, registry, tracing
from kjo_django.contrib import opentelemetry as contrib
from kjo_django.contrib.opentelemetry import tracer as module
from kjo_django.engine.attempt import Ending
from kjo_django.models import DeadLetter, Job
from kjo_django.operations import dead_letters
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.outbox.relay import Relay
from kjo_django.testing import drain
from kjo_django.worker import Worker
from tests.events.bench import EVENTS, TOPIC, Service
from tests.events.conftest import _forget_declarations as forget_declarations  # noqa: F401
from tests.ledger import jobs as ledger
from tests.ledger.models import Entry
from tests.unit.deliveries import KJO, MEMORY, Bench, as_job, kafka_at
from tests.waiting import PATIENCE

pytestmark = pytest.mark.medium

SECRET = "ada@example.com"
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Spans(InMemorySpanExporter):
    """What was exported, and the tracer of the tests' own spans."""

    def __init__(self) -> None:
        super().__init__()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self))
        self.tracer = self.provider.get_tracer("tests")

    def request(self, name: str = "POST /orders") -> Any:
        """A web request's span, made current."""
        return self.tracer.start_as_current_span(name, kind=SpanKind.SERVER)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.named(name)
        return found


@contextmanager
def traced(provider: trace.TracerProvider) -> Iterator[None]:
    contrib.instrument(provider)
    try:
        yield
    finally:
        contrib.uninstrument()


@pytest.fixture
def spans() -> Iterator[Spans]:
    spans = Spans()
    with traced(spans.provider):
        yield spans


def work(messages: int) -> None:
    """Run a worker in a thread until it has carried out so many."""
    worker = Worker(["ledger"], max_messages=messages)
    thread = threading.Thread(target=worker.run)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.fixture(params=["memory", "database"])
def transport(request, settings, sqlite_file):
    settings.KJO = KJO | (MEMORY if request.param == "memory" else {})
    return request.param


@pytest.fixture
def bench(transport, forgotten_definitions):
    bench = Bench()
    yield bench
    bench.close()


def trace_of(span: ReadableSpan) -> int:
    return span.context.trace_id


def is_child(span: ReadableSpan, of: ReadableSpan) -> bool:
    is_below = span.parent is not None and span.parent.span_id == of.context.span_id
    return is_below and trace_of(span) == trace_of(of)


def linked(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


def outcomes(spans: Spans, name: str) -> list[object]:
    return [span.attributes["kjo.outcome"] for span in spans.named(name)]


# --- One trace ------------------------------------------------------------------------------------


def test_a_request_its_job_and_the_handler_are_one_trace(bench, spans, transport):
    """KII-36: web request → enqueue → handler, through the row and the message."""
    # Given
    with spans.request() as request:
        answer = ledger.write.enqueue(job="a", note=SECRET)
    # When
    bench.run_until_done()
    # Then
    made, run = spans.one("enqueue ledger.write"), spans.one("process ledger.write")
    assert is_child(made, request)
    assert is_child(run, made)
    assert (made.kind, run.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert dict(made.attributes) == {
        "messaging.system": transport,
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "create",
        "messaging.destination.name": "ledger",
        "kjo.handler": "ledger.write",
        "kjo.queue": "ledger",
        "kjo.job_id": str(answer.job_id),
    }
    facts = dict(run.attributes)
    assert isinstance(facts.pop("kjo.offset"), int)
    assert facts == {
        "messaging.system": transport,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "ledger",
        "messaging.destination.partition.id": "0",
        "messaging.consumer.group.name": bench.queue.consumer_group,
        "messaging.message.id": str(answer.job_id),
        "kjo.handler": "ledger.write",
        "kjo.queue": "ledger",
        "kjo.job_id": str(answer.job_id),
        "kjo.attempt": 1,
        "kjo.outcome": "completed",
    }
    assert run.status.status_code is StatusCode.UNSET
    assert run.links == ()


def test_the_trace_is_stored_with_the_job(bench, spans):
    """So it outlives the outbox, retries, a rescue and a requeue."""
    with spans.request():
        ledger.write.using(headers={"correlation-id": "c-1"}).enqueue(job="a")
    made = spans.one("enqueue ledger.write").context
    stored = Job.objects.get().headers
    assert stored["correlation-id"] == "c-1"
    assert stored["traceparent"].startswith(f"00-{made.trace_id:032x}-{made.span_id:016x}-")


def test_without_a_request_the_enqueue_begins_a_trace(bench, spans):
    ledger.write.enqueue(job="a")
    bench.run_until_done()
    made, run = spans.one("enqueue ledger.write"), spans.one("process ledger.write")
    assert made.parent is None
    assert is_child(run, made)


def test_a_trace_the_caller_gave_is_left_alone(bench, spans):
    """The conventions: no creation span for a message that brings its context."""
    ledger.write.using(headers={"traceparent": CALLER, "tracestate": "v=1"}).enqueue(job="a")
    bench.run_until_done()
    run = spans.one("process ledger.write")
    assert f"{run.context.trace_id:032x}" in CALLER
    assert f"{run.parent.span_id:016x}" in CALLER
    assert run.context.trace_state.get("v") == "1"
    assert spans.named("enqueue ledger.write") == []


@pytest.mark.parametrize("odd", ["", "00-1", "zz" * 40, "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_trace_nobody_can_read_begins_a_new_one(bench, spans, odd):
    ledger.write.using(headers={"traceparent": odd}).enqueue(job="a")
    bench.run_until_done()
    assert spans.one("process ledger.write").parent is None
    assert Entry.objects.count() == 1


def test_what_a_handler_enqueues_is_a_child_of_its_run(bench, spans):
    """Not only of the same trace, as the inherited header alone would have it."""

    def parent() -> None:
        ledger.write.enqueue(job="child")

    as_job(parent).enqueue()
    bench.run_until_done()
    assert is_child(spans.one("enqueue ledger.write"), spans.one("process bench.parent"))
    assert is_child(spans.one("process ledger.write"), spans.one("enqueue ledger.write"))


def test_the_handlers_own_spans_are_children_of_its_run(bench, spans):
    def handler() -> None:
        with spans.tracer.start_as_current_span("SELECT"):
            pass

    as_job(handler).enqueue()
    bench.run_until_done()
    assert is_child(spans.one("SELECT"), spans.one("process bench.handler"))


@pytest.mark.parametrize("atomic", [True, False])
def test_asynchronous_handlers_run_within_their_span(bench, spans, atomic):
    """On an event loop several share, each in its own; a thread of the handler's has it too."""

    def look(job: str) -> None:
        with spans.tracer.start_as_current_span(f"thread of {job}"):
            pass

    async def handler(job: str) -> None:
        await asyncio.sleep(0.01)
        with spans.tracer.start_as_current_span(f"inner of {job}"):
            await asyncio.sleep(0.01)
        await sync_to_async(look)(job)

    definition = as_job(handler, atomic=atomic)
    for name in "abc":
        with spans.request(f"request {name}"):
            definition.enqueue(job=name)
    bench.run()
    for name in "abc":
        inner, thread = spans.one(f"inner of {name}"), spans.one(f"thread of {name}")
        request = spans.one(f"request {name}")
        assert trace_of(inner) == trace_of(thread) == trace_of(request)
        assert inner.parent == thread.parent
    assert outcomes(spans, "process bench.handler") == ["completed"] * 3


@pytest.mark.parametrize("atomic", [True, False])
def test_nothing_stays_current_after_a_job(bench, spans, atomic):
    """Of a group in one thread, neither the next job nor the lane itself is in the job's trace."""
    seen = []

    def handler(job: str) -> None:
        seen.append(trace.get_current_span().get_span_context().trace_id)
        if job == "b":
            raise PermanentError("b")

    definition = as_job(handler, atomic=atomic)
    for name in "abc":
        definition.enqueue(job=name)
    bench.run()
    assert not trace.get_current_span().get_span_context().is_valid
    assert len(set(seen)) == 3
    traces = {trace_of(span) for span in spans.named("process bench.handler")}
    assert traces == set(seen)


def test_lanes_in_threads_do_not_mix_their_traces(settings, sqlite_file, spans):
    """Several jobs at once in one worker."""
    settings.KJO = KJO | {"CONCURRENCY": 4, "POLL_INTERVAL": 0.1}
    for number in range(20):
        with spans.request(f"request {number}"):
            ledger.write_slowly.enqueue(job=str(number), milliseconds=10)
    work(20)
    runs = spans.named("process ledger.write_slowly")
    assert len(runs) == 20
    assert {trace_of(run) for run in runs} == {
        trace_of(spans.one(f"request {number}")) for number in range(20)
    }


def test_a_worker_that_stops_exports_what_is_held_back(settings, sqlite_file):
    """Supervised ones leave by os._exit, where nothing else would."""
    settings.KJO = KJO | {"POLL_INTERVAL": 0.1}
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    with traced(provider):
        ledger.write.enqueue(job="a")
        work(1)
        told = {span.name for span in exporter.get_finished_spans()}
    provider.shutdown()
    assert told == {"enqueue ledger.write", "process ledger.write"}


# --- Many at once ---------------------------------------------------------------------------------


def test_enqueue_many_is_one_span_all_its_jobs_carry(bench, spans):
    with spans.request():
        ledger.write.enqueue_many([{"job": str(n)} for n in range(5)])
    made = spans.one("enqueue ledger.write")
    assert made.attributes["messaging.batch.message_count"] == 5
    assert "kjo.job_id" not in made.attributes
    bench.run_until_done()
    assert all(is_child(run, made) for run in spans.named("process ledger.write"))
    assert len(spans.named("process ledger.write")) == 5


@pytest.fixture
def memory(settings, sqlite_file):
    settings.KJO = KJO | MEMORY


def test_a_batch_of_the_relay_is_a_span_with_links(memory, spans):
    """In a trace of its own: its jobs come from many."""
    made = []
    for name in "ab":
        with spans.request():
            ledger.write.enqueue(job=name)
    made = spans.named("enqueue ledger.write")
    Relay(["ledger"]).publish_due()
    batch = spans.one("publish ledger")
    assert linked(batch) == {span.context.span_id for span in made}
    assert batch.parent is None
    assert batch.kind is SpanKind.CLIENT  # the conventions': another span created the messages
    assert dict(batch.attributes) == {
        "messaging.system": "memory",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "ledger",
        "messaging.batch.message_count": 2,
    }


def test_the_links_of_a_batch_are_bounded(memory, spans):
    for number in range(module.MAX_LINKS + 10):
        ledger.write.enqueue(job=str(number))
    Relay(["ledger"]).publish_due()
    assert len(spans.one("publish ledger").links) == module.MAX_LINKS


def test_jobs_of_before_tracing_are_given_the_relays_trace(memory, spans):
    """Enqueued by a process without a tracer: the handler's span is no orphan."""
    contrib.uninstrument()
    ledger.write.enqueue(job="a")
    assert Job.objects.get().headers is None
    contrib.instrument(spans.provider)
    bench = Bench()
    bench.run_until_done()
    bench.close()
    batch = spans.one("publish ledger")
    assert batch.kind is SpanKind.PRODUCER
    assert is_child(spans.one("process ledger.write"), batch)


def test_each_job_of_a_group_has_a_span_of_its_own(bench, spans):
    for name in "ab":
        ledger.write.enqueue(job=name)
    ledger.refuse.enqueue(job="c")
    bench.run()
    runs = spans.named("process ledger.write")
    assert len({run.context.trace_id for run in runs}) == 2
    assert outcomes(spans, "process ledger.write") == ["completed"] * 2
    assert outcomes(spans, "process ledger.refuse") == ["dead"]


def test_a_group_that_was_rolled_back_says_so_and_then_how_it_ended(bench, spans, monkeypatch):
    """One bad commit: the jobs run again one by one, and no span is lost or lies."""
    from kjo_django.engine import recorder

    complete, failed = recorder.complete, []

    def refuse_the_group(using, done, *arguments, **options):
        if len(done) > 1 and not failed:
            failed.append(True)
            raise OperationalError("deadlock")
        return complete(using, done, *arguments, **options)

    monkeypatch.setattr(recorder, "complete", refuse_the_group)
    for name in "ab":
        ledger.write.enqueue(job=name)
    bench.run()
    assert outcomes(spans, "process ledger.write") == [
        *("rolled_back", "completed"),
        *("rolled_back", "completed"),
    ]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("atomic", [True, False])
def test_a_batch_is_one_span_that_links_to_its_jobs_traces(bench, spans, atomic, is_async):
    """A span has one parent, and these jobs are of several requests."""

    def index(batch) -> None:
        with spans.tracer.start_as_current_span("bulk insert"):
            batch[1].fail(ValueError("only this one"))

    async def aindex(batch) -> None:
        index(batch)

    definition = as_job(aindex if is_async else index, "bench.index", batch=10, atomic=atomic)
    for name in "abc":
        with spans.request():
            definition.enqueue(job=name)
    bench.run()
    made = spans.named("enqueue bench.index")
    batch = spans.one("process bench.index")
    assert linked(batch) == {span.context.span_id for span in made}
    assert batch.parent is None
    assert is_child(spans.one("bulk insert"), batch)
    assert batch.attributes["messaging.batch.message_count"] == 3
    assert batch.attributes["kjo.attempt"] == 1
    assert batch.attributes["kjo.outcome"] == "mixed"
    assert "messaging.message.id" not in batch.attributes
    assert [event.attributes["exception.message"] for event in batch.events] == ["only this one"]
    # And the one that failed is tried again alone, in its own trace
    bench.run_until_done()
    again = spans.named("process bench.index")[1]
    assert is_child(again, made[1])
    assert linked(again) == {batch.context.span_id}


def test_a_batch_that_raises_says_so_and_its_items_runs_follow(bench, spans):
    def index(batch) -> None:
        if any(item.payload["job"] == "b" for item in batch):
            raise PermanentError("b")

    definition = as_job(index, "bench.index", batch=10)
    for name in "abc":
        definition.enqueue(job=name)
    bench.run()
    made = spans.named("enqueue bench.index")
    batch, *alone = spans.named("process bench.index")
    assert batch.attributes["kjo.outcome"] == "rolled_back"
    assert batch.status.status_code is StatusCode.ERROR
    found = {
        run.parent.span_id: run.attributes["kjo.outcome"]
        for run in sorted(alone, key=lambda span: span.start_time)
    }
    ids = [span.context.span_id for span in made]
    assert found == {ids[0]: "completed", ids[1]: "dead", ids[2]: "completed"}


# --- Failures -------------------------------------------------------------------------------------


def test_retries_are_children_of_the_enqueue_and_link_to_the_attempt_before(bench, spans):
    with spans.request():
        ledger.write_attempt.enqueue(job="a", fail_times=2)
    bench.run_until_done()
    made = spans.one("enqueue ledger.write_attempt")
    first, second, third = spans.named("process ledger.write_attempt")
    assert all(is_child(run, made) for run in (first, second, third))
    assert [run.attributes["kjo.attempt"] for run in (first, second, third)] == [1, 2, 3]
    assert outcomes(spans, first.name) == ["retried", "retried", "completed"]
    assert (linked(first), linked(second), linked(third)) == (
        set(),
        {first.context.span_id},
        {second.context.span_id},
    )


def test_a_failed_attempt_records_its_exception_and_has_the_status_of_an_error(bench, spans):
    ledger.always_fails.enqueue(job="a", message="no such order")
    bench.run()
    run = spans.one("process ledger.always_fails")
    assert run.status.status_code is StatusCode.ERROR
    assert run.status.description == "RuntimeError"
    assert run.attributes["error.type"] == "RuntimeError"
    (event,) = run.events
    assert event.name == "exception"
    assert event.attributes["exception.message"] == "no such order"
    assert "always_fails" in event.attributes["exception.stacktrace"]


def test_an_exception_without_a_text_takes_no_others_trace(bench, spans):
    class Mute(Exception):
        def __str__(self):
            raise AttributeError("customer")

    def index(batch) -> None:
        for item in batch:
            item.fail(Mute() if item.payload["job"] == "a" else ValueError("told"))

    definition = as_job(index, "bench.index", batch=10)
    for name in "ab":
        definition.enqueue(job=name)
    bench.run()
    batch = spans.one("process bench.index")
    assert batch.status.status_code is StatusCode.ERROR
    assert [event.attributes["exception.message"] for event in batch.events] == ["told"]


def test_the_text_of_exceptions_can_be_kept_out(bench, spans):
    contrib.instrument(spans.provider, record_exceptions=False)
    ledger.always_fails.enqueue(job="a", message=SECRET)
    bench.run()
    run = spans.one("process ledger.always_fails")
    assert (run.events, run.attributes["error.type"]) == ((), "RuntimeError")
    assert SECRET not in run.to_json()


def test_a_handler_that_cannot_take_its_payload_fails_within_its_span(bench, spans):
    bench.publish(b"no json", kjo_id="m-1", kjo_type="ledger.write", traceparent=CALLER)
    bench.run()
    run = spans.one("process ledger.write")
    assert f"{run.context.trace_id:032x}" in CALLER
    assert run.attributes["kjo.outcome"] == "dead"


@pytest.mark.parametrize("kind", ["job", "message"])
def test_a_replayed_dead_letter_goes_on_in_its_trace_and_links_to_its_death(bench, spans, kind):
    """KII-30, KII-36."""
    # Given a death
    if kind == "job":
        with spans.request():
            ledger.refuse.enqueue(job="a")
    else:
        value = json.dumps({"job": "a"}).encode()
        bench.publish(value, kjo_id=str(uuid.uuid4()), kjo_type="ledger.refuse", traceparent=CALLER)
    bench.run_until_done()
    (died,) = spans.named("process ledger.refuse")
    assert died.attributes["kjo.outcome"] == "dead"
    # When an operator replays it
    assert dead_letters.replay(DeadLetterFilter()).replayed == 1
    bench.run_until_done()
    # Then
    _, again = spans.named("process ledger.refuse")
    assert (trace_of(again), again.parent) == (trace_of(died), died.parent)
    assert linked(again) == {died.context.span_id}
    assert DeadLetter.objects.count() == 2


def test_what_an_operator_runs_links_to_the_operators_request(memory, spans):
    """Run within a request, as a test's drain does: its trace goes on, and leads to who asked."""
    bench = Bench()
    ledger.refuse.enqueue(job="a")
    bench.run_until_done()
    with spans.request("POST /admin") as request:
        dead_letters.replay(DeadLetterFilter())
        drain(raise_errors=False)
    died, again = spans.named("process ledger.refuse")
    assert trace_of(again) == trace_of(died) != trace_of(request)
    assert linked(again) == {died.context.span_id, request.get_span_context().span_id}
    bench.close()


def test_what_dies_without_a_run_has_a_span_too(bench, spans):
    """No handler of that name; and the name somebody wrote into a header names no span."""
    bench.publish(b"{}", kjo_id="m-1", kjo_type=f"of {SECRET}", traceparent=CALLER)
    bench.run()
    died = spans.one("process unknown")
    assert f"{died.context.trace_id:032x}" in CALLER
    assert died.attributes["kjo.outcome"] == "dead"
    assert died.attributes["kjo.reason"] == "unknown_type"
    assert died.status.status_code is StatusCode.ERROR


def test_an_interrupted_run_is_told_as_given_back(memory, spans):
    from kjo_django.engine.handler.context import Abort
    from kjo_django.exceptions import JobCancelledError

    bench = Bench()

    def handler(context) -> None:
        context.abort(Abort.SHUTDOWN)
        raise JobCancelledError("the worker stops")

    as_job(handler, "bench.interrupted", takes_context=True).enqueue()
    bench.run()
    bench.close()
    registry.unregister("bench.interrupted")
    assert outcomes(spans, "process bench.interrupted") == ["deferred"]


# --- Events and templates -------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_an_event_is_handled_in_its_publishers_trace(settings, sqlite_file, spans, direct):
    settings.KJO = EVENTS | MEMORY
    done = []

    @event_handler("T", topic=TOPIC)
    def handle(event: BaseEvent) -> None:
        done.append(trace.get_current_span().get_span_context().trace_id)

    with spans.request() as request:
        publish_event(TOPIC, BaseEvent(type="T", data={"who": SECRET}), direct=direct)
    service = Service()
    service.run()
    service.close()
    assert done == [request.get_span_context().trace_id]
    made = [span for span in spans.get_finished_spans() if span.kind is SpanKind.PRODUCER]
    (processed,) = (s for s in spans.get_finished_spans() if s.name.startswith("process"))
    assert processed.parent.span_id in {span.context.span_id for span in made} or direct
    assert SECRET not in "".join(span.to_json() for span in spans.get_finished_spans())


# --- What never goes into a span ------------------------------------------------------------------


def test_no_payload_key_or_id_of_a_person_is_in_any_span(bench, spans):
    """Nor baggage in any header: it may name a person, and rows keep headers."""
    token = contexts.attach(baggage.set_baggage("user", SECRET))
    try:
        with spans.request():
            ledger.write_keyed.using(id=SECRET, headers={"x-user": SECRET}).enqueue(
                job=SECRET, key=SECRET
            )
    finally:
        contexts.detach(token)
    value = json.dumps({"job": SECRET}).encode()
    bench.publish(value, kjo_id=f"user-{SECRET}", kjo_type="ledger.write")
    assert "baggage" not in Job.objects.get().headers
    bench.run_until_done()
    told = "".join(span.to_json() for span in spans.get_finished_spans())
    assert "process ledger.write_keyed" in told
    assert "process ledger.write" in told
    assert SECRET not in told


# --- Telemetry that fails, or is not there --------------------------------------------------------


class Broken(SpanExporter, SpanProcessor):
    """Telemetry that raises wherever it is called."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.raised = 0

    def _fail(self, where: str) -> None:
        if where == self.where:
            self.raised += 1
            raise RuntimeError("telemetry is down")

    def export(self, spans: Any) -> SpanExportResult:
        self._fail("export")
        return SpanExportResult.SUCCESS

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._fail("start")

    def on_end(self, span: ReadableSpan) -> None:
        self._fail("end")

    def shutdown(self) -> None: ...

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


@pytest.mark.parametrize("where", ["start", "end", "export"])
def test_telemetry_that_fails_fails_no_job(bench, caplog, monkeypatch, where):
    monkeypatch.setattr(module, "_complained", -module.COMPLAIN_EVERY)
    provider, broken = TracerProvider(), Broken(where)
    provider.add_span_processor(SimpleSpanProcessor(broken) if where == "export" else broken)
    with traced(provider):
        ledger.write.enqueue(job="a")
        ledger.write_attempt.enqueue(job="b", fail_times=1)
        bench.run_until_done()
    assert broken.raised >= 4
    assert bench.results == [Ending.COMPLETED, Ending.RETRIED, Ending.COMPLETED]
    assert not trace.get_current_span().get_span_context().is_valid
    if where != "export":  # the SDK's own processor tells of that
        complaints = [r for r in caplog.records if r.message.startswith("Tracing failed")]
        assert len(complaints) == 1  # once a minute, however many


def test_an_error_of_the_job_is_still_raised_when_telemetry_fails(bench):
    provider, broken = TracerProvider(), Broken("end")
    provider.add_span_processor(broken)
    with traced(provider), pytest.raises(RuntimeError, match="always fails"):
        ledger.always_fails.enqueue(job="a")
        drain("ledger")


class EarlyTracer(trace.NoOpTracer):
    """As that of early versions of the API: its spans are in no trace, whatever their parent."""

    def start_span(self, *args, **kwargs):
        return trace.INVALID_SPAN


class EarlyProvider(trace.NoOpTracerProvider):
    def get_tracer(self, *args, **kwargs):
        return EarlyTracer()


@pytest.mark.parametrize("provider", [trace.NoOpTracerProvider, EarlyProvider])
def test_without_an_sdk_what_callers_gave_is_passed_through(bench, provider):
    """The API alone makes no spans and loses none of others."""
    seen = []

    def handler() -> None:
        seen.append(trace.get_current_span().get_span_context().trace_id)
        ledger.write.enqueue(job="child")

    with traced(provider()):
        as_job(handler).using(headers={"traceparent": CALLER}).enqueue()
        bench.run_until_done()
    assert f"{seen[0]:032x}" in CALLER
    assert Job.objects.get(handler="ledger.write").headers["traceparent"] == CALLER


def test_what_is_not_sampled_is_carried_as_not_sampled(bench):
    spans = Spans()
    spans.provider.sampler = ALWAYS_OFF
    with traced(spans.provider):
        ledger.write.enqueue(job="a")
        flags = Job.objects.get().headers["traceparent"].rpartition("-")[2]
        assert int(flags, 16) & 1 == 0
        bench.run_until_done()
    assert spans.get_finished_spans() == ()


def test_switched_off_there_are_no_spans_and_no_headers(bench, spans):
    contrib.uninstrument()
    with spans.request():
        ledger.write.enqueue(job="a")
    assert Job.objects.get().headers is None
    bench.run_until_done()
    assert [span.name for span in spans.get_finished_spans()] == ["POST /orders"]


def python(source: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


APPS = """
import sys, django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "kjo_django", {app}],
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}},
)
{before}
django.setup()
from kjo_django import tracing
import kjo_django.engine.group, kjo_django.outbox.relay, kjo_django.worker
{after}
"""


def test_nothing_is_imported_that_nobody_asked_for():
    source = APPS.format(
        app="",
        before="",
        after="import kjo_django.contrib.opentelemetry\n"
        "print(tracing.tracer, any(n.split('.')[0] == 'opentelemetry' for n in sys.modules))",
    )
    assert python(source) == "None False"


def test_the_app_switches_it_on():
    source = APPS.format(
        app="'kjo_django.contrib.opentelemetry'", before="", after="print(tracing.tracer)"
    )
    assert "OpenTelemetryTracer" in python(source)


def test_the_extra_that_is_missing_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "kjo_django.contrib.opentelemetry.tracer", raising=False)
    monkeypatch.delattr(contrib, "tracer", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ImproperlyConfigured, match=r"kjo-django\[tracing\]"):
        contrib.instrument()
    assert tracing.tracer is None


# --- On a real Kafka ------------------------------------------------------------------------------


@pytest.mark.kafka
def test_the_trace_goes_through_kafka(settings, sqlite_file, kafka_server, spans, caplog):
    """Web request, outbox, relay, broker, worker, a retry: one trace."""
    caplog.set_level(logging.ERROR)
    topic = f"it-trace-{uuid.uuid4().hex[:8]}"
    settings.KJO = {
        **KJO,
        "QUEUES": {"ledger": {"topic": topic}},
        **kafka_at(kafka_server.bootstrap_servers),
        "BACKOFF_BASE": 0.1,
        "POLL_INTERVAL": 0.1,
        "CONCURRENCY": 1,
    }
    with spans.request() as request:
        ledger.write_attempt.enqueue(job="a", fail_times=1)
    work(2)
    made = spans.one("enqueue ledger.write_attempt")
    first, second = spans.named("process ledger.write_attempt")
    assert is_child(made, request)
    assert is_child(first, made)
    assert is_child(second, made)
    assert linked(second) == {first.context.span_id}
    assert outcomes(spans, first.name) == ["retried", "completed"]
    assert first.attributes["messaging.system"] == "kafka"
    assert first.attributes["messaging.destination.name"] == topic
    offsets = [run.attributes["messaging.kafka.offset"] for run in (first, second)]
    assert offsets == sorted(offsets)
    for batch in spans.named(f"publish {topic}"):
        assert linked(batch) == {made.context.span_id}
    assert [s for s in spans.named(f"publish {topic}") if s.kind is SpanKind.CLIENT]
