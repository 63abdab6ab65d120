"""``event_handler``: each event once, in this group alone; what is for others is passed over."""

from __future__ import annotations

import json
import uuid

import pytest
from django.core.exceptions import ImproperlyConfigured

from kjo_django import BaseEvent, PermanentError, event_handler, publish_event, signals
from kjo_django.conf import get_settings
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, EventKey, Job, MetricBucket, ProcessedEvent
from kjo_django.operations import dead_letters, jobs
from kjo_django.patterns.events.handlers import event_route, retry_topic
from kjo_django.runtime import get_transport
from kjo_django.states import JobState
from kjo_django.worker import Worker
from tests.events.bench import EVENTS, MEMORY, TOPIC, Service, read_all, send
from tests.ledger.models import Entry
from tests.unit.deliveries import as_job

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=["memory", "database"])
def transport(request, settings) -> str:
    settings.KJO = {**EVENTS, **(MEMORY if request.param == "memory" else {})}
    return request.param


HUGE_VERSION = (
    b'{"id": "1", "type": "USER_PROFILE_UPDATED", "source": "s", "timestamp": 1, "data": {}, '
    b'"version": 1' + 400 * b"0" + b"}"
)


def event(type: str = "USER_PROFILE_UPDATED", **fields) -> BaseEvent:
    return BaseEvent(type=type, **{"source": "user-service", "data": {"userId": "u1"}, **fields})


@pytest.fixture
def service(transport):
    """Handles USER_PROFILE_UPDATED, failing as often as told."""

    @event_handler("USER_PROFILE_UPDATED", topic=TOPIC, max_attempts=3)
    def update(event: BaseEvent) -> None:
        Entry.objects.create(job=event.id[:100], note=event.source)
        if event.data.get("fail"):
            raise RuntimeError("not now")

    made = Service()
    yield made
    made.close()


def test_an_event_takes_effect_once(service) -> None:
    """KII-18, KII-22: the marker is the triple, and a second copy is a duplicate."""
    told = event()
    for _ in range(3):
        send(told.to_bytes())
    service.run()
    assert Entry.objects.count() == 1
    assert ProcessedEvent.objects.get().event_key == EventKey(
        told.id, "interview-service", "USER_PROFILE_UPDATED"
    )
    assert service.results == ["completed", "duplicate", "duplicate"]


def test_the_group_is_the_services(service) -> None:
    """KII-14, KII-28: ``{service}-group``; ``{topic}-dlq``, for the retries too."""
    conf = get_settings()
    queue, retries = conf.queue(TOPIC), conf.queue(conf.queue(TOPIC).retries)
    assert queue.consumer_group == retries.consumer_group == "interview-service-group"
    assert queue.dead_letter_topic == retries.dead_letter_topic == "user-events-dlq"
    assert retries.topic == "user-events-retry-interview-service-group"


def test_types_of_others_are_passed_over_and_counted(service) -> None:
    """Unknown types are skipped on event topics: no dead letter, no lag, a count and a signal."""
    heard = []
    signals.event_skipped.connect(lambda **told: heard.append(told["event_type"]), weak=False)
    send(event("SOMETHING_ELSE").to_bytes())
    send(b'{"type": "EVEN_WITHOUT_AN_ID"}')
    service.run()
    assert (Entry.objects.count(), DeadLetter.objects.count(), service.main.lag()) == (0, 0, 0)
    assert event_route(TOPIC).skipped == {"SOMETHING_ELSE": 1, "EVEN_WITHOUT_AN_ID": 1}
    assert heard == ["SOMETHING_ELSE", "EVEN_WITHOUT_AN_ID"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"not json", "deserialization"),
        (b"[]", "invalid"),
        (b"{}", "invalid"),
        (None, "invalid"),
        (b'{"type": "USER_PROFILE_UPDATED"}', "invalid"),
        (HUGE_VERSION, "invalid"),
        (b"x" * 900_001, "too_large"),
    ],
)
def test_an_invalid_event_becomes_a_dead_letter(service, value, reason) -> None:
    """KII-29: raw bytes, and why."""
    send(value, traceparent=b"00-trace")
    service.run()
    letter = DeadLetter.objects.get()
    assert letter.reason == reason
    assert (letter.value and bytes(letter.value)) == value
    assert names.from_json(letter.headers)["traceparent"] == b"00-trace"


def test_a_failed_event_is_retried_by_this_group_alone(service, transport) -> None:
    """The shared topic never sees a retry; the handler's writes are undone each time."""
    told = event(data={"userId": "u1", "fail": True})
    send(told.to_bytes(), traceparent=b"00-trace", strange=b"\xff\x00")
    service.run()
    letter = DeadLetter.objects.get()
    assert (letter.attempts, letter.reason, Entry.objects.count()) == (3, "exhausted", 0)
    assert Job.objects.get().queue == "user-events-retry"
    # Headers travelled with the retries, bytes that are no text included
    headers = names.from_json(letter.headers)
    assert (headers["traceparent"], headers["strange"]) == (b"00-trace", b"\xff\x00")
    assert names.text(headers, names.DLQ_ORIGINAL_TOPIC) == TOPIC
    assert not ProcessedEvent.objects.exists()
    if transport == "memory":
        assert len(read_all(TOPIC)) == 1
        dead = read_all("user-events-dlq")
        assert [record.value for record in dead] == [told.to_bytes()]
        assert dead[0].headers["strange"] == b"\xff\x00"
        assert names.text(dead[0].headers, names.DLQ_ORIGINAL_TOPIC) == TOPIC


def test_a_replayed_event_runs_in_this_group_alone_and_once(service, transport) -> None:
    """A replay is a new generation; a late copy of the event is still a duplicate after it."""
    told = event(data={"userId": "u1", "fail": True})
    send(told.to_bytes())
    service.run()
    Job.objects.update(payload=event(id=told.id).to_bytes())  # repaired
    # When
    report = dead_letters.replay(dead_letters.DeadLetterFilter())
    service.run()
    Job.objects.all().delete()  # as pruning does, long after
    send(told.to_bytes())
    service.run()
    # Then
    assert report.replayed == 1
    assert Entry.objects.count() == 1
    assert ProcessedEvent.objects.filter(event_id=told.id).exists()
    if transport == "memory":
        assert len(read_all(TOPIC)) == 2


@pytest.mark.promise("generation")
@pytest.mark.parametrize("id", ["e1", "e" * 255])
def test_each_generation_takes_effect_whatever_the_length_of_its_id(service, id) -> None:
    # Given an event that failed
    send(event(id=id, data={"userId": "u1", "fail": True}).to_bytes())
    service.run()
    Job.objects.update(payload=event(id=id).to_bytes())  # repaired
    # When an operator has it run, and later once more
    for _ in range(2):
        (job,) = Job.objects.all()
        jobs.requeue([job.pk])
        service.run()
    # Then
    assert Entry.objects.count() == 2


def test_an_event_that_died_at_once_is_replayed_to_this_group_alone(settings) -> None:
    settings.KJO = {**EVENTS, **MEMORY}
    works = []

    @event_handler("T", topic=TOPIC)
    def refuse(event: BaseEvent) -> None:
        if not works:
            raise PermanentError("never")
        Entry.objects.create(job=event.id)

    service = Service()
    send(event("T").to_bytes())
    service.run()
    works.append(True)
    assert dead_letters.replay(dead_letters.DeadLetterFilter()).replayed == 1
    service.run()
    service.close()
    assert Entry.objects.count() == 1
    assert len(read_all(TOPIC)) == 1


def test_one_id_with_two_types_may_fail_twice(transport) -> None:
    """KII-23, KII-F8: the triple tells them apart, in the rows of their retries too."""
    for type in ("A", "B"):

        @event_handler(type, topic=TOPIC, max_attempts=2)
        def fail_once(event: BaseEvent) -> None:
            Entry.objects.create(job=f"{event.type} {event.id}")
            if Job.objects.filter(handler=event.type).count() == 0:
                raise RuntimeError("once")

    service = Service()
    id = str(uuid.uuid4())
    for type in ("A", "B"):
        send(event(type, id=id).to_bytes())
    service.run()
    service.close()
    assert sorted(Entry.objects.values_list("job", flat=True)) == [f"A {id}", f"B {id}"]
    assert ProcessedEvent.objects.filter(event_id=id).count() == 2


def test_two_groups_of_one_project_both_act(settings) -> None:
    settings.KJO = {**EVENTS, **MEMORY}

    @event_handler("T", topic=TOPIC)
    def one(event: BaseEvent) -> None:
        Entry.objects.create(job="one")

    @event_handler("T", topic=TOPIC, group="statistics")
    def two(event: BaseEvent) -> None:
        Entry.objects.create(job="two")

    services = [Service(), Service("user-events@statistics")]
    send(event("T").to_bytes())
    for service in services:
        service.run()
        service.close()
    assert sorted(Entry.objects.values_list("job", flat=True)) == ["one", "two"]
    owners = ProcessedEvent.objects.values_list("service_name", flat=True)
    assert sorted(owners) == ["interview-service", "statistics"]


def test_a_group_that_no_marker_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="group must have at most 100 characters"):
        event_handler("T", topic=TOPIC, group="g" * 101)


def test_two_handlers_of_one_type_in_one_group_are_refused(transport) -> None:
    @event_handler("T", topic=TOPIC)
    def one(event: BaseEvent) -> None: ...

    with pytest.raises(ImproperlyConfigured, match="Two functions handle 'T'"):

        @event_handler("T", topic=TOPIC)
        def two(event: BaseEvent) -> None: ...


def test_a_version_nobody_understands_is_a_dead_letter(transport) -> None:
    """KII-36: contracts are versioned."""

    @event_handler("T", topic=TOPIC, versions=["1.0", "2"])
    def handle(event: BaseEvent) -> None:
        Entry.objects.create(job=event.version)

    service = Service()
    for version in ("1", "2.0", "3"):
        send(event("T", version=version).to_bytes())
    service.run()
    service.close()
    assert sorted(Entry.objects.values_list("job", flat=True)) == ["1", "2"]
    assert "Version '3'" in DeadLetter.objects.get().error


def test_the_context_and_what_a_handler_publishes(transport) -> None:
    """KII-36: trace and correlation go on, into events and jobs alike; the cause is named."""

    @as_job
    def child() -> None: ...

    @event_handler("T", topic=TOPIC, takes_context=True)
    async def handle(context, event: BaseEvent) -> None:
        from asgiref.sync import sync_to_async

        await sync_to_async(publish_event)("interview-events", BaseEvent(type="NEXT"))
        await child.aenqueue()
        await Entry.objects.acreate(
            job=context.idempotency_key, note=context.headers["traceparent"]
        )

    service = Service()
    told = event("T", metadata={"correlationId": "req-9"})
    send(told.to_bytes(), traceparent=b"00-trace")
    service.run()
    service.close()
    assert Entry.objects.get().note == "00-trace"
    published = Job.objects.get(handler="NEXT")
    sent = json.loads(bytes(published.payload))
    assert sent["metadata"] == {"correlationId": "req-9", "causationId": told.id}
    assert published.headers["traceparent"] == "00-trace"
    enqueued = Job.objects.get(handler="bench.child")
    assert enqueued.headers == {"traceparent": "00-trace", "correlation-id": "req-9"}


def test_handlers_outside_a_transaction(transport) -> None:
    """atomic=False: the marker is written after it, the id is what others are to be given."""

    @event_handler("T", topic=TOPIC, atomic=False)
    def handle(event: BaseEvent) -> None:
        Entry.objects.create(job=event.id)

    service = Service()
    told = event("T")
    for _ in range(2):
        send(told.to_bytes())
    service.run()
    service.close()
    assert Entry.objects.count() == 1


def test_long_ids_and_types_fail_and_retry(service) -> None:
    """KII-03: an id of 255 characters has retries like any other."""
    told = event(id="i" * 255, data={"fail": True})
    send(told.to_bytes())
    service.run()
    assert DeadLetter.objects.get().attempts == 3
    assert Job.objects.get().state == JobState.FAILED


def test_the_name_of_a_retry_topic_is_one() -> None:
    assert retry_topic("a", "b c") == "a-retry-b-c"
    long = retry_topic("t" * 240, "g" * 240)
    assert len(long) <= 249
    assert long != retry_topic("t" * 240, "g" * 241)


def test_a_handler_of_a_topic_that_is_only_published_to_is_refused(settings) -> None:
    """It would never be called, and nobody would know why."""
    settings.KJO = {**EVENTS, "QUEUES": {TOPIC: {"consume": False}}}
    with pytest.raises(ImproperlyConfigured, match="'consume': False"):

        @event_handler("T", topic=TOPIC)
        def handle(event: BaseEvent) -> None: ...


@pytest.mark.promise("skipped-is-counted")
def test_a_worker_counts_what_it_passes_over(transport) -> None:
    """Nothing is silent: the minute's row shows it."""

    @event_handler("T", topic=TOPIC)
    def handle(event: BaseEvent) -> None: ...

    worker = Worker([TOPIC], concurrency=1)
    (poller,), (queue,) = worker.pollers, worker.queues
    subscription = get_transport().subscribe([TOPIC], queue.consumer_group)
    send(event("ANOTHER").to_bytes())
    (found,) = subscription.poll(10, 1.0)
    assert poller.read(found, subscription) is None
    subscription.close()
    worker.statistics.flush()
    assert MetricBucket.objects.get().skipped_count == 1
