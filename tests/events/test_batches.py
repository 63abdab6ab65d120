"""Manual commit on batches (KII-24 … 28, F3, F5, F11); the topics of the seed (KII-04 … 06)."""

from __future__ import annotations

import json
import uuid

import pytest

from kjo_django import BaseEvent, EventIdempotencyService, event_handler
from kjo_django.conf import get_settings
from kjo_django.models import ProcessedEvent
from kjo_django.operations.maintenance import topics
from kjo_django.runtime import get_transport
from kjo_django.transports.base import TopicSpec
from kjo_django.transports.kafka import KafkaTransport
from kjo_django.transports.memory import MemoryTransport
from tests.events.bench import EVENTS, MEMORY, TOPIC, Service, send
from tests.ledger.models import Entry
from tests.unit.deliveries import kafka_at

pytestmark = pytest.mark.django_db(transaction=True)
FIVE = ["user-events", "user-profile-events", "interview-events"]
FIVE += ["interview-session-events", "notification-events"]


def batch_loop(transport, topic: str, group: str, seen: list[int]) -> None:
    """The seed's eachBatch, as somebody with a poll loop of their own writes it.

    An acknowledgement is the seed's resolveOffset; leaving commits what was acknowledged, and not
    a record past the first that was not.
    """
    idempotency = EventIdempotencyService("batches")
    subscription = transport.subscribe([topic], group)
    try:
        for _ in range(60):
            batch = subscription.poll(5, 0.5)
            for record in batch:
                event = BaseEvent.from_wire(json.loads(record.value))
                seen.append(event.data["n"])

                def handle(event: BaseEvent = event) -> None:
                    Entry.objects.create(job=str(event.data["n"]))
                    if event.data["n"] == 3 and not works:
                        raise RuntimeError("the third fails")

                idempotency.process_event_safely(event.id, event.type, handle)
                subscription.acknowledge([record])
            if batch and seen[-1] == 5:
                return
    finally:
        subscription.flush()
        subscription.close()


works: list[bool] = []


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.kafka)])
def five_events(request, settings):
    """Five events of one user in one partition; where they are, and how to get there."""
    works.clear()
    settings.KJO = EVENTS
    topic = f"it-batch-{uuid.uuid4().hex[:8]}"
    if request.param == "kafka":
        server = request.getfixturevalue("kafka_server")
        made = KafkaTransport("t", {"bootstrap.servers": server.bootstrap_servers})
        made.ensure_topics([TopicSpec(topic, 1)])
    else:
        made = MemoryTransport("t", {})
    from kjo_django.transports.base import OutgoingRecord

    events = [BaseEvent(type="T", data={"userId": "u", "n": n}) for n in range(1, 6)]
    records = [OutgoingRecord(topic, e.to_bytes(), e.key.encode()) for e in events]
    assert not [answer for answer in made.publish(records) if answer.error]
    yield made, topic
    made.close()


@pytest.mark.large("kafka")
def test_a_failing_third_message_and_a_restart(five_events) -> None:
    """Issue 5, item 3; KII-26: 3, 4 and 5 are delivered again, nothing of 1 and 2 is repeated."""
    transport, topic = five_events
    seen: list[int] = []
    with pytest.raises(RuntimeError, match="the third fails"):
        batch_loop(transport, topic, "batches", seen)
    assert seen == [1, 2, 3]
    assert sorted(Entry.objects.values_list("job", flat=True)) == ["1", "2"]
    # When it starts again, and the third works
    works.append(True)
    seen.clear()
    batch_loop(transport, topic, "batches", seen)
    # Then
    assert seen == [3, 4, 5]
    assert sorted(Entry.objects.values_list("job", flat=True)) == ["1", "2", "3", "4", "5"]
    # And the commit was real: a third start finds nothing (KII-F5)
    assert transport.lag([topic], "batches") == dict.fromkeys(transport.lag([topic], "batches"), 0)


def test_the_seeds_five_topics_and_their_dead_letter_topics(settings) -> None:
    """KII-04, KII-05, KII-06: from the settings; dead letters keep their partition (KII-F12)."""
    settings.KJO = {
        **EVENTS,
        "TRANSPORTS": MEMORY["TRANSPORTS"],
        "TOPIC_OPTIONS": {"partitions": 3, "replication_factor": 1},
        "QUEUES": {name: {"consume": False} for name in FIVE},
    }
    found = {w.spec.name: w.spec.partitions for w in topics.wanted(FIVE)}
    assert found == dict.fromkeys([*FIVE, *(f"{name}-dlq" for name in FIVE)], 3)


@pytest.mark.kafka
def test_they_are_created_on_kafka_and_creating_again_changes_nothing(
    settings, kafka_server
) -> None:
    """KII-06: kjo_topics create, idempotent, the retry topic of a group included."""
    suffix = uuid.uuid4().hex[:8]
    settings.KJO = {
        **EVENTS,
        **kafka_at(kafka_server.bootstrap_servers),
        "TOPIC_OPTIONS": {"partitions": 3, "replication_factor": 1},
        "QUEUES": {f"it-{name}-{suffix}": {} for name in FIVE},
    }
    topic = f"it-user-events-{suffix}"

    @event_handler("T", topic=topic)
    def handle(event: BaseEvent) -> None: ...

    names = [*get_settings().queues, f"{topic}-retry"]
    created = topics.create(names)
    assert len(created) == 11
    assert topics.create(names) == []
    described = get_transport().describe_topics([topic, f"{topic}-dlq"])
    assert [each.partitions for each in described] == [3, 3]


def test_a_stopping_worker_resolves_nothing_it_has_not_done(settings) -> None:
    """KII-25: what was polled and not handled is delivered again."""
    settings.KJO = {**EVENTS, **MEMORY}

    @event_handler("T", topic=TOPIC)
    def handle(event: BaseEvent) -> None:
        Entry.objects.create(job=event.id)

    service = Service()
    for _ in range(5):
        send(BaseEvent(type="T", data={"userId": "u"}).to_bytes())
    deliveries = service.main.poll()
    service.main.run(deliveries[:2])
    service.close()
    again = Service()
    assert again.main.lag() == 3
    again.run()
    again.close()
    assert Entry.objects.count() == ProcessedEvent.objects.count() == 5
