"""What seed 1 asks of Kafka's clients."""

from __future__ import annotations

import pytest

from kjo_django.transports.kafka.clients import KafkaOptions

OPTIONS = KafkaOptions("default", {"bootstrap.servers": "nowhere:1"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("acks", "all"),  # KJO-24
        ("delivery.timeout.ms", 30_000),  # KJO-25
        ("enable.idempotence", True),  # KJO-26, X-3
        ("partitioner", "murmur2_random"),  # KJO-101
    ],
)
def test_producers(key, value):
    assert OPTIONS.producer()[key] == value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("group.id", "email-processors"),  # KJO-49
        ("session.timeout.ms", 30_000),  # KJO-50
        ("heartbeat.interval.ms", 3_000),  # KJO-51
        ("max.partition.fetch.bytes", 1_048_576),  # KJO-52
        ("enable.auto.commit", False),  # KJO-F14
        ("allow.auto.create.topics", False),
    ],
)
def test_consumers(key, value):
    assert OPTIONS.consumer("email-processors")[key] == value


def test_the_clients_own_reconnecting_is_passed_through():
    """KJO-53: to every kind of client, untouched; librdkafka's own unless given."""
    given = {"reconnect.backoff.ms": 1000, "reconnect.backoff.max.ms": 30_000}
    options = KafkaOptions(
        "default", {"bootstrap.servers": "nowhere:1", **given, "retries": 10, "retry.backoff.ms": 1}
    )
    for config in (options.producer(), options.consumer("group"), options.admin()):
        assert given.items() <= config.items()
        assert config["retry.backoff.ms"] == 1
    assert options.producer()["retries"] == 10
    assert "retries" not in options.consumer("group")
    assert not given.keys() & OPTIONS.consumer("group").keys()
