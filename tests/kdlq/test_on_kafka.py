"""KDLQ's own scenario on a real Kafka, read back byte for byte (issue 5, item 1)."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from kjo_django.patterns.kdlq import DlqConfig, KDLQMessageConsumer, ProcessingStatus, Status
from kjo_django.transports.base import TopicSpec
from kjo_django.transports.kafka import KafkaTransport
from tests.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def topics(kafka_server) -> tuple[str, str]:
    suffix = uuid.uuid4().hex[:8]
    names = (f"it-TQ-{suffix}", f"it-DLQ-{suffix}")
    transport = KafkaTransport("t", {"bootstrap.servers": kafka_server.bootstrap_servers})
    transport.ensure_topics([TopicSpec(name, 1) for name in names])
    return names


def consumer_of(server, group: str | None = None) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": server.bootstrap_servers,
            "group.id": group or uuid.uuid4().hex,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )


def read(server, topic: str, count: int) -> list:
    """The raw messages of a topic: at least ``count``, and a moment longer for more."""
    consumer = consumer_of(server)
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list = []
    wait_until(
        lambda: found.extend(consumer.consume(100, 0.5)) or len(found) >= count,
        f"{count} messages on {topic}",
    )
    found += consumer.consume(100, 0.5)
    consumer.close()
    return found


@pytest.fixture
def producer(kafka_server) -> Iterator[Producer]:
    made = Producer({"bootstrap.servers": kafka_server.bootstrap_servers})
    yield made
    made.flush(10)


def key(number: int) -> bytes:
    """As Java's IntegerSerializer writes it."""
    return struct.pack(">i", number)


def test_nine_keys(kafka_server, topics, producer) -> None:
    """KDLQ-06, 12 … 18: by the key modulo 3 a message is processed, redelivered or killed."""
    source, dlq = topics
    for number in range(9):
        producer.produce(source, key=key(number), value=str(number).encode())
    producer.flush(10)
    answers = list(ProcessingStatus)  # OK, MUST_BE_REDELIVERED, ERROR
    config = DlqConfig(dlq, servers=[kafka_server.bootstrap_servers])
    statuses = []
    with KDLQMessageConsumer(
        "test", config, lambda record: answers[struct.unpack(">i", record.key)[0] % 3]
    ) as consumer:
        for message in read(kafka_server, source, 9):
            statuses.append(consumer.accept(message))
    # Then
    assert statuses == [Status.OK, Status.REDELIVERED, Status.ROUTED_TO_DLQ] * 3
    dead = read(kafka_server, dlq, 3)
    assert [(m.key(), m.value()) for m in dead] == [(key(n), str(n).encode()) for n in (2, 5, 8)]
    everything = read(kafka_server, source, 12)
    assert len(everything) == 12
    again = everything[9:]
    assert [(m.key(), m.value()) for m in again] == [(key(n), str(n).encode()) for n in (1, 4, 7)]
    for message in again:
        assert sorted(message.headers()) == [
            ("KDLQ_OrigTopic", source.encode()),
            ("KDLQ_PrcMarker", b"test"),
            ("KDLQ_Redelivered", b"\x00\x00\x00\x01"),
        ]
    for message in dead:
        found = message.headers()
        assert len(found) == len(dict(found)) == 5
        assert dict(found)["KDLQ_Kills"] == b"\x00\x00\x00\x01"
        assert dict(found)["KDLQ_PrcMarker"] == b"test"
        assert dict(found)["KDLQ_OrigTopic"] == source.encode()
        assert len(dict(found)["KDLQ_FailedAt"]) == 8


def test_a_thousand_redeliveries_keep_each_header_once(kafka_server, topics, producer) -> None:
    """Issue 5, item 5, on the broker: counter 1,000, the offset and topic of the first record."""
    source, dlq = topics
    producer.produce(source, key=b"other", value=b"before")
    producer.produce(source, key=b"k", value=b"v", headers=[("theirs", b"x")])
    producer.flush(10)
    reader = consumer_of(kafka_server)
    reader.assign([TopicPartition(source, 0, 1)])
    config = DlqConfig(
        dlq,
        servers=[kafka_server.bootstrap_servers],
        informational_headers=True,
        producer_properties={"linger.ms": 0},
    )
    message = reader.poll(30)
    with KDLQMessageConsumer(
        "test", config, lambda record: ProcessingStatus.MUST_BE_REDELIVERED
    ) as consumer:
        for _ in range(1000):
            assert consumer.accept(message) is Status.REDELIVERED
            message = reader.poll(30)
    reader.close()
    found = message.headers()
    assert sorted(name for name, _ in found) == [
        "KDLQ_OrigOffset",
        "KDLQ_OrigPartition",
        "KDLQ_OrigTopic",
        "KDLQ_OrigTs",
        "KDLQ_PrcMarker",
        "KDLQ_Redelivered",
        "theirs",
    ]
    values = dict(found)
    assert values["KDLQ_Redelivered"] == struct.pack(">i", 1000)
    assert values["KDLQ_OrigOffset"] == struct.pack(">q", 1)
    assert values["KDLQ_OrigTopic"] == source.encode()
