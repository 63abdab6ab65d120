"""OPTIONS become client configurations, and mistakes are refused by name, never by value."""

from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured

from kjo_django.transports.base import OutgoingRecord
from kjo_django.transports.kafka import KafkaTransport
from kjo_django.transports.kafka.clients import KafkaOptions

SERVERS = {"bootstrap.servers": "localhost:9092"}


def options(**more):
    return KafkaOptions("default", {**SERVERS, **more})


def test_defaults_are_safe():
    producer, consumer = options().producer(), options().consumer("emails")

    assert producer["enable.idempotence"] is True
    assert producer["acks"] == "all"
    assert producer["partitioner"] == "murmur2_random"
    assert consumer["group.id"] == "emails"
    assert consumer["enable.auto.commit"] is consumer["enable.auto.offset.store"] is False
    assert consumer["auto.offset.reset"] == "earliest"
    assert consumer["allow.auto.create.topics"] is False
    assert consumer["partition.assignment.strategy"] == "cooperative-sticky"
    assert (consumer["session.timeout.ms"], consumer["heartbeat.interval.ms"]) == (30_000, 3_000)
    assert consumer["max.partition.fetch.bytes"] == 1_048_576


def test_what_clients_hold_is_bounded_by_the_settings_unless_options_say_otherwise(settings):
    # Given
    settings.KJO = {"MAX_OUTSTANDING_BYTES": 8 * 1024**2, "RELAY_BATCH_BYTES": 4 * 1024**2}
    # Then
    assert options().consumer("g")["queued.max.messages.kbytes"] == 2 * 1024
    assert options().producer()["queue.buffering.max.kbytes"] == 9 * 1024
    # And one record has room, whatever its size
    large = options(**{"message.max.bytes": "50000000"}).producer()
    assert large["queue.buffering.max.kbytes"] * 1024 > 2 * 50_000_000
    # And
    own = {"queue.buffering.max.kbytes": 5, "queued.max.messages.kbytes": 6}
    assert options(**own).producer()["queue.buffering.max.kbytes"] == 5
    assert options(**own).consumer("g")["queued.max.messages.kbytes"] == 6


def test_keys_go_to_the_clients_that_know_them():
    made = options(
        **{"sasl.password": "s3cret", "compression.type": "zstd", "session.timeout.ms": 6000}
    )

    assert made.producer()["compression.type"] == "zstd"
    assert "compression.type" not in made.consumer("g")
    assert made.consumer("g")["session.timeout.ms"] == 6000
    assert "session.timeout.ms" not in made.producer()
    for config in (made.producer(), made.consumer("g"), made.admin()):
        assert config["sasl.password"] == "s3cret"
        assert config["bootstrap.servers"] == "localhost:9092"


def test_nested_options_reach_one_kind_alone():
    made = options(producer={"client.id": "p"}, consumer={"client.id": "c", "fetch.min.bytes": 5})

    assert made.producer()["client.id"] == "p"
    assert made.consumer("g")["client.id"] == "c"
    assert made.consumer("g")["fetch.min.bytes"] == 5
    assert made.admin()["client.id"] == "kjo_django"


@pytest.mark.parametrize(
    ("alias", "default"),
    [
        ("request.required.acks", "acks"),
        ("message.timeout.ms", "delivery.timeout.ms"),
    ],
)
def test_a_default_gives_way_to_the_other_name_of_its_key(alias, default):
    producer = options(**{alias: -1}).producer()

    assert producer[alias] == -1
    assert default not in producer


def test_the_delivery_timeout_is_known_under_both_names():
    assert options().delivery_timeout == 30
    assert options(**{"delivery.timeout.ms": 5000}).delivery_timeout == 5
    assert options(**{"message.timeout.ms": 7000}).delivery_timeout == 7
    assert options(**{"delivery.timeout.ms": 0}).delivery_timeout == 86_400


def test_the_next_generation_protocol_leaves_to_the_broker_what_it_decides():
    consumer = options(**{"group.protocol": "consumer"}).consumer("g")

    assert not consumer.keys() & {"partition.assignment.strategy", "session.timeout.ms"}
    assert "heartbeat.interval.ms" not in consumer


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"acks": 1}, "acks"),
        ({"request.required.acks": "0"}, "request.required.acks"),
        ({"producer": {"acks": "1"}}, "acks"),
        ({"enable.auto.commit": True}, "enable.auto.commit"),
        ({"consumer": {"enable.auto.commit": "true"}}, "enable.auto.commit"),
        ({"group.id": "mine"}, "group.id"),
        ({"transactional.id": "x"}, "transactional.id"),
        ({"delivery.report.only.error": True}, "delivery.report.only.error"),
        ({"producer": "fast"}, "producer"),
        ({"commit_interval": "5"}, "commit_interval"),
        ({"request_timeout": timedelta(0)}, "request_timeout"),
    ],
)
def test_mistakes_are_refused_by_name(wrong, named):
    with pytest.raises(ImproperlyConfigured) as refused:
        KafkaTransport("default", {**SERVERS, "sasl.password": "s3cret", **wrong})

    assert f"KJO['TRANSPORTS']['default']['OPTIONS'][{named!r}]" in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_weaker_acks_are_allowed_without_idempotence():
    producer = options(**{"acks": 1, "enable.idempotence": False}).producer()

    assert (producer["acks"], producer["enable.idempotence"]) == (1, False)


@pytest.mark.parametrize("servers", [{}, {"bootstrap.servers": ""}])
def test_servers_are_required(servers):
    with pytest.raises(ImproperlyConfigured, match=r"bootstrap\.servers"):
        KafkaTransport("default", servers)


@pytest.mark.parametrize("wrong", [{"bogus.key": 1}, {"max.in.flight": 10}, {"batch.size": "x"}])
def test_what_librdkafka_refuses_is_a_configuration_error(wrong):
    transport = KafkaTransport("default", {**SERVERS, "sasl.password": "s3cret", **wrong})

    with pytest.raises(ImproperlyConfigured, match="OPTIONS") as refused:
        transport.publish([OutgoingRecord("orders", b"")])

    assert "s3cret" not in str(refused.value)
