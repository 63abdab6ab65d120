"""What the memory transport does beyond the contract of every transport."""

from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured

from kjo_django.exceptions import PublishError
from kjo_django.testing.conformance import eventually
from kjo_django.transports.base import OutgoingRecord, TopicPartition, TopicSpec
from kjo_django.transports.memory import MemoryTransport


@pytest.fixture
def transport():
    return MemoryTransport("test", {})


def test_a_silent_member_loses_its_partitions_when_its_lease_ends(transport):
    transport.publish([OutgoingRecord("orders", b"1")])
    lost = []
    first = transport.subscribe(
        ["orders"],
        "group",
        lease=timedelta(milliseconds=50),
        on_revoked=lambda tps, was_lost: lost.append((list(tps), was_lost)),
    )
    (stale,) = first.poll(10, 1)
    second = transport.subscribe(["orders"], "group")

    (record,) = eventually(lambda: second.poll(10, 1), 5)

    first.acknowledge([stale])
    assert record.position == stale.position
    assert transport.lag(["orders"], "group") == {TopicPartition("orders", 0): 1}
    assert first.poll(10, 0) == []
    assert lost == [([TopicPartition("orders", 0)], True)]


def test_a_member_that_waits_in_poll_keeps_its_lease(transport):
    first = transport.subscribe(["orders"], "group", lease=timedelta(milliseconds=20))
    second = transport.subscribe(["orders"], "group")
    first.poll(1, 0.1)

    assert first.assignment() == [TopicPartition("orders", 0)]
    second.poll(1, 0)
    assert second.assignment() == []


def test_records_shows_what_was_published(transport):
    transport.publish([OutgoingRecord("orders", b"1", headers={"a": b"b"})])

    (record,) = transport.records("orders")

    assert (record.value, record.headers) == (b"1", {"a": b"b"})
    assert transport.records("unknown") == []


def test_clear_forgets_everything(transport):
    transport.publish([OutgoingRecord("orders", b"1")])
    transport.fail("down")

    transport.clear()

    assert transport.records("orders") == []
    assert transport.probe(1) == "in process"


def test_an_outage_refuses_records_and_is_reported(transport):
    subscription = transport.subscribe(["orders"], "group")
    transport.fail("broker on fire")

    assert [each.error for each in transport.publish([OutgoingRecord("orders", b"1")])] == [
        "broker on fire"
    ]
    assert subscription.poll(10, 0) == []
    assert subscription.last_error == "broker on fire"
    with pytest.raises(PublishError, match="on fire"):
        transport.probe(1)
    transport.fail(None)
    subscription.poll(10, 0)
    assert subscription.last_error is None


def test_topics_are_created_and_grown_and_never_shrunk(transport):
    assert transport.describe_topics(["orders"])[0].partitions is None

    spec = TopicSpec("orders", partitions=2, config={"retention.ms": "1"})
    assert transport.ensure_topics([spec]) == ["created orders with 2 partitions"]
    assert transport.ensure_topics([spec]) == []
    grown = transport.ensure_topics([TopicSpec("orders", partitions=3)])
    assert grown == ["grew orders from 2 to 3 partitions"]
    assert transport.ensure_topics([TopicSpec("orders", partitions=1)]) == []

    (topic,) = transport.describe_topics(["orders"])
    assert (topic.partitions, topic.config) == (3, {"retention.ms": "1"})


def test_a_partition_that_does_not_exist_is_refused(transport):
    (outcome,) = transport.publish([OutgoingRecord("orders", b"1", partition=7)])

    assert "no partition 7" in outcome.error


def test_lag_is_known_without_joining(transport):
    transport.publish([OutgoingRecord("orders", b"1"), OutgoingRecord("orders", b"2")])
    subscription = transport.subscribe(["orders"], "group")
    subscription.acknowledge(subscription.poll(1, 0))

    assert transport.lag(["orders", "unknown"], "group") == {TopicPartition("orders", 0): 1}
    assert transport.lag(["orders"], "another") == {TopicPartition("orders", 0): 2}


@pytest.mark.parametrize("options", [{"partitions": 0}, {"partitions": "2"}, {"partition": 2}])
def test_wrong_options_are_refused_by_name(options):
    with pytest.raises(ImproperlyConfigured, match=r"'test'.*partitions"):
        MemoryTransport("test", options)
