"""What only a real Apache Kafka can show: topics, lag, and a broker that dies."""

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient

from kjo_django.exceptions import PublishError
from kjo_django.testing.conformance import eventually
from kjo_django.transports.base import GroupOffsets, OutgoingRecord, TopicPartition, TopicSpec
from kjo_django.transports.kafka import KafkaTransport
from tests.services import KafkaServer
from tests.services.fixtures import require
from tests.waiting import PATIENCE

pytestmark = pytest.mark.kafka


@pytest.fixture
def transport(kafka_server):
    transport = KafkaTransport("test", {"bootstrap.servers": kafka_server.bootstrap_servers})
    yield transport
    transport.close()


@pytest.fixture
def name():
    return f"kjo-{uuid.uuid4().hex[:12]}"


def publish(transport, topic, *contents, **fields):
    outcomes = transport.publish([OutgoingRecord(topic, value, **fields) for value in contents])
    assert [outcome.error for outcome in outcomes] == [None] * len(contents)


# --- Topics ---------------------------------------------------------------------------------------


def test_a_topic_is_created_as_specified_and_once(transport, name):
    config = {"retention.ms": 604_800_000, "cleanup.policy": "delete", "preallocate": False}
    spec = TopicSpec(name, partitions=4, config=config)
    assert transport.describe_topics([name])[0].partitions is None

    assert transport.ensure_topics([spec]) == [f"created {name} with 4 partitions"]
    assert transport.ensure_topics([spec]) == []

    (topic,) = transport.describe_topics([name])
    assert (topic.name, topic.partitions, topic.replication_factor) == (name, 4, 1)
    assert topic.config["retention.ms"] == "604800000"
    publish(transport, name, b"at once", partition=3)


def test_a_topic_grows_and_never_shrinks(transport, name):
    transport.ensure_topics([TopicSpec(name, partitions=2)])

    grown = transport.ensure_topics([TopicSpec(name, partitions=5)])
    assert grown == [f"grew {name} from 2 to 5 partitions"]
    assert transport.ensure_topics([TopicSpec(name, partitions=1)]) == []

    assert transport.describe_topics([name])[0].partitions == 5
    publish(transport, name, b"at once", partition=4)


def test_processes_that_start_together_create_a_topic_once(kafka_server, name):
    transports = [
        KafkaTransport("test", {"bootstrap.servers": kafka_server.bootstrap_servers})
        for _ in range(4)
    ]
    specs = [TopicSpec(name, partitions=count) for count in (1, 2, 3, 6)]

    with ThreadPoolExecutor(4) as pool:
        work = [
            pool.submit(transport.ensure_topics, [spec])
            for transport, spec in zip(transports, specs, strict=True)
        ]
        changes = [line for each in work for line in each.result(PATIENCE)]

    assert len([line for line in changes if line.startswith("created")]) == 1
    assert transports[0].describe_topics([name])[0].partitions == 6
    for transport in transports:
        transport.close()


def test_what_the_broker_refuses_is_said(transport, name):
    with pytest.raises(PublishError, match=f"{name}.*INVALID_REPLICATION_FACTOR"):
        transport.ensure_topics([TopicSpec(name, replication_factor=3)])
    with pytest.raises(PublishError, match=f"{name}.*INVALID_CONFIG"):
        transport.ensure_topics([TopicSpec(name, config={"retention.ms": "soon"})])


@pytest.mark.large
def test_a_topic_that_does_not_exist_is_an_error_of_its_record(kafka_server, transport, name):
    transport.ensure_topics([TopicSpec(name)])
    transport = KafkaTransport(
        "test",
        {
            "bootstrap.servers": kafka_server.bootstrap_servers,
            "topic.metadata.propagation.max.ms": 1000,
        },
    )

    unknown, known = transport.publish(
        [OutgoingRecord(f"{name}-unknown", b"1"), OutgoingRecord(name, b"2")]
    )

    assert "UNKNOWN_TOPIC" in unknown.error
    assert unknown.is_topics
    assert known.error is None
    assert transport.describe_topics([f"{name}-unknown"])[0].partitions is None
    transport.close()


def test_a_record_over_the_topics_limit_is_refused_alone(transport, name):
    # Given a topic that takes less than a batch of ours may be
    transport.ensure_topics([TopicSpec(name, config={"max.message.bytes": 5000})])
    values = [b"%04d" % number * 25 for number in range(300)]
    too_large = uuid.uuid4().bytes * 1000
    # When many go out at once, one of them too large by itself
    outcomes = transport.publish(
        [
            OutgoingRecord(name, value, key=b"1")
            for value in [*values[:150], too_large, *values[150:]]
        ]
    )
    # Then the others arrive
    refused = outcomes.pop(150)
    assert refused.is_final
    assert "MSG_SIZE_TOO_LARGE" in refused.error
    assert [outcome.error for outcome in outcomes] == [None] * len(values)


@pytest.mark.parametrize("limit", [200_000, 500_000])
def test_a_key_keeps_its_order_though_the_topic_takes_smaller_batches_than_we_send(
    transport, name, limit
):
    # Given a topic whose limit is below the client's batch of a megabyte
    transport.ensure_topics([TopicSpec(name, config={"max.message.bytes": limit})])
    # When a backlog of one key goes out, and again by a client that knows the topic
    for batch in range(2):
        publish(
            transport,
            name,
            *[b"%d" % (260 * batch + number) + b" " * 5000 for number in range(260)],
            key=b"k",
        )
    # Then
    subscription = transport.subscribe([name], name)
    found = [int(record.value) for record in read(subscription, 520)]
    subscription.close()
    assert found == list(range(520))


def test_a_topic_created_late_is_found_soon(transport, name):
    subscription = transport.subscribe([name], name)

    def complains():
        assert subscription.poll(10, 0.05) == []
        return name in (subscription.last_error or "")

    eventually(complains, 10, "the missing topic is named")
    transport.ensure_topics([TopicSpec(name)])
    publish(transport, name, b"1")

    assert eventually(lambda: subscription.poll(10, 0.05), 20)[0].value == b"1"
    eventually(
        lambda: subscription.poll(0, 0.05) == [] and subscription.last_error is None, 5, "healthy"
    )
    subscription.close()


def test_partitions_added_later_are_read(kafka_server, name):
    transport = KafkaTransport(
        "test",
        {
            "bootstrap.servers": kafka_server.bootstrap_servers,
            "topic.metadata.refresh.interval.ms": 500,
        },
    )
    transport.ensure_topics([TopicSpec(name, partitions=1)])
    subscription = transport.subscribe([name], name)
    eventually(lambda: subscription.poll(0, 0.05) == [] and subscription.assignment(), 20)

    transport.ensure_topics([TopicSpec(name, partitions=3)])
    publish(transport, name, b"new", partition=2)

    (record,) = eventually(lambda: subscription.poll(10, 0.05), 20)
    assert (record.partition, record.value) == (2, b"new")
    subscription.close()
    transport.close()


# --- Committing -----------------------------------------------------------------------------------


def committed(kafka_server, topic, group, partition):
    """Ask the broker, as an outsider."""
    consumer = Consumer({"bootstrap.servers": kafka_server.bootstrap_servers, "group.id": group})
    try:
        (found,) = consumer.committed([KafkaPartition(topic, partition)], timeout=10)
        return found.offset
    finally:
        consumer.close()


def read(subscription, count):
    records = []

    def enough():
        records.extend(subscription.poll(500, 0.05))
        return len(records) >= count

    eventually(enough, 30, f"{count} records")
    return records


def test_a_rebalance_commits_only_the_contiguous_watermark(transport, kafka_server, name):
    transport.ensure_topics([TopicSpec(name, partitions=2)])
    for partition in range(2):
        publish(transport, name, *(b"%d" % n for n in range(4)), partition=partition)
    taken = []

    def finish(partitions, lost):
        # All but offset 1 of each partition end while we wait.
        first.acknowledge(record for record in taken if record.offset != 1)

    first = transport.subscribe([name], name, on_revoked=finish)
    taken += read(first, 8)
    second = transport.subscribe([name], name)

    def joined():
        assert first.poll(0, 0.02) == second.poll(0, 0.02) == []
        return first.assignment() and second.assignment()

    eventually(joined, 30, "a partition each")
    (moved,) = second.assignment()

    assert committed(kafka_server, name, name, moved.partition) == 1
    assert [record.offset for record in read(second, 3)] == [1, 2, 3]
    first.close()
    second.close()
    assert [committed(kafka_server, name, name, number) for number in range(2)] == [1, 1]


# --- Lag ------------------------------------------------------------------------------------------


def test_lag_is_known_without_joining(transport, name):
    transport.ensure_topics([TopicSpec(name, partitions=2)])
    first, second = TopicPartition(name, 0), TopicPartition(name, 1)
    publish(transport, name, b"1", b"2", b"3", partition=0)
    assert transport.lag([name, f"{name}-unknown"], "nobody") == {first: 3, second: 0}

    subscription = transport.subscribe([name], name)
    records = eventually(lambda: subscription.poll(10, 0.05), 20)
    subscription.acknowledge(records[:2])
    subscription.flush()

    assert transport.lag([name], name) == {first: 1, second: 0}
    subscription.close()


def test_what_retention_has_passed_is_no_lag(transport, kafka_server, name):
    """Or an alert would tell of messages nobody can read, and no rescue look for their jobs."""
    # Given a group that has read two of nine
    transport.ensure_topics([TopicSpec(name)])
    place = TopicPartition(name, 0)
    publish(transport, name, *(b"%d" % n for n in range(9)))
    subscription = transport.subscribe([name], name)
    subscription.acknowledge(read(subscription, 9)[:2])
    subscription.close()
    assert transport.offsets([name], name) == {place: GroupOffsets(lag=7, committed=2, end=9)}
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap_servers})

    def keep_from(offset):
        for each in admin.delete_records([KafkaPartition(name, 0, offset)]).values():
            each.result(PATIENCE)

    # When the oldest are deleted, and then all
    keep_from(6)
    assert transport.offsets([name], name) == {place: GroupOffsets(lag=3, committed=6, end=9)}
    keep_from(9)
    # Then
    assert transport.offsets([name], name) == {place: GroupOffsets(lag=0, committed=9, end=9)}
    assert transport.offsets([name], "nobody") == {place: GroupOffsets(lag=0, end=9)}


# --- Topics that are made again -------------------------------------------------------------------


def test_a_topic_deleted_and_made_again_is_read_from_its_beginning(transport, kafka_server, name):
    """Promise 1: a worker that runs meanwhile has read the offsets that its new records get."""
    # Given
    transport.ensure_topics([TopicSpec(name)])
    publish(transport, name, *(b"old %d" % n for n in range(9)))
    subscription = transport.subscribe([name], name)
    subscription.acknowledge(read(subscription, 9))
    subscription.flush()
    # When
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap_servers})
    admin.delete_topics([name])[name].result(PATIENCE)
    eventually(lambda: transport.ensure_topics([TopicSpec(name)]), 30, "the topic again")
    fresh = KafkaTransport("test", {"bootstrap.servers": kafka_server.bootstrap_servers})
    publish(fresh, name, b"new 0", b"new 1", b"new 2")
    # Then
    assert [record.value for record in read(subscription, 3)] == [b"new 0", b"new 1", b"new 2"]
    subscription.close()
    fresh.close()


# --- Outages --------------------------------------------------------------------------------------


def test_a_probe_says_why_nothing_answers():
    transport = KafkaTransport("test", {"bootstrap.servers": "127.0.0.1:1"})
    with pytest.raises(PublishError, match="does not answer"):
        transport.probe(0.5)
    transport.close()


@pytest.mark.large  # an outage of the broker is in tests/acceptance/test_pauses.py
def test_a_killed_broker_that_comes_back_loses_nothing():
    require(kafka=True)
    with KafkaServer() as server:
        transport = KafkaTransport("test", {"bootstrap.servers": server.bootstrap_servers})
        transport.ensure_topics([TopicSpec("orders", partitions=3)])
        subscription = transport.subscribe(["orders"], "group")
        accepted, seen, stop = set(), set(), threading.Event()
        errors = []

        def publish_on_and_on():
            number = 0
            while not stop.is_set():
                keys = [b"%d" % each for each in range(number, number + 20)]
                outcomes = transport.publish([OutgoingRecord("orders", key, key) for key in keys])
                accepted.update(
                    key for key, each in zip(keys, outcomes, strict=True) if each.error is None
                )
                number += 20
                stop.wait(0.02)

        def consume():
            records = subscription.poll(100, 0.05)
            seen.update(record.value for record in records)
            subscription.acknowledge(records)
            if subscription.last_error:
                errors.append(subscription.last_error)

        publisher = threading.Thread(target=publish_on_and_on)
        publisher.start()
        try:
            eventually(lambda: (consume(), len(seen) > 100)[1], 30, "a hundred records")
            restart = threading.Thread(target=server.restart, kwargs={"kill": True})
            restart.start()
            while restart.is_alive():
                consume()
            before = len(seen)
            eventually(lambda: (consume(), len(seen) > before + 100)[1], 60, "a hundred more")
        finally:
            stop.set()
            publisher.join(PATIENCE)

        eventually(lambda: (consume(), seen >= accepted)[1], 60, "everything that was accepted")
        assert errors, "the outage was not reported"
        eventually(lambda: (consume(), subscription.last_error is None)[1], 20, "healthy again")
        subscription.close()
        lags = transport.lag(["orders"], "group")
        assert set(lags.values()) == {0}
        transport.close()


@pytest.mark.large
def test_everything_ends_in_bounded_time_while_the_broker_is_gone():
    require(kafka=True)
    with KafkaServer() as server:
        options = {"bootstrap.servers": server.bootstrap_servers, "delivery.timeout.ms": 2000}
        transport = KafkaTransport("test", options)
        transport.ensure_topics([TopicSpec("orders")])
        publish(transport, "orders", b"1")
        subscription = transport.subscribe(["orders"], "group")
        subscription.acknowledge(eventually(lambda: subscription.poll(10, 0.05), 20))
        server.kill()

        def lag():
            with pytest.raises(PublishError):
                transport.lag(["orders"], "group")

        durations = {}
        for name, action in {
            "publish": lambda: transport.publish([OutgoingRecord("orders", b"2")]),
            "poll": lambda: subscription.poll(10, 1),
            "lag": lag,
            "flush": subscription.flush,
            "close": subscription.close,
            "close transport": transport.close,
        }.items():
            started = time.monotonic()
            action()
            durations[name] = round(time.monotonic() - started, 2)

        assert max(durations.values()) < 10, durations
