"""Promises of publishing: records are read complete, in order, and not before they are due."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import pytest

from kjo_django.messages.headers import folded
from kjo_django.testing.conformance.suite import Suite, values
from kjo_django.transports.base import OutgoingRecord, Transport

EVERY_BYTE = bytes(range(256))


def name_bytes(value: bytes | None) -> str:
    """Return a parameter's name without its bytes."""
    return "None" if value is None else f"{len(value)}-bytes"


class Publishing(Suite):
    """Values, outcomes and topics; delays and transactions where they are declared."""

    @pytest.mark.parametrize("value", [None, b"", b"text", EVERY_BYTE], ids=name_bytes)
    @pytest.mark.parametrize("key", [None, b"key", EVERY_BYTE], ids=name_bytes)
    def test_what_is_published_is_read_byte_for_byte(
        self, transport: Transport, topic: str, group: str, key: bytes | None, value: bytes | None
    ) -> None:
        headers = {"kjo-id": b"1", "empty": b"", "binary": EVERY_BYTE, "naïve ключ": b"x"}
        started = datetime.now(UTC)

        self.publish(transport, [OutgoingRecord(topic, value, key, headers)])

        (record,) = self.read(self.subscribe(transport, topic, group), 1)
        assert (record.topic, record.key, record.value) == (topic, key, value)
        assert record.headers == headers
        if record.timestamp is not None:
            assert abs(record.timestamp - started) < timedelta(minutes=1)

    def test_headers_of_one_name_and_without_a_value_are_read_as_they_were(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        headers = [("z", b"1"), ("twice", b"1"), ("none", None), ("twice", b"2"), ("a", b"")]

        self.publish(transport, [OutgoingRecord(topic, b"v", None, folded(headers))])

        (record,) = self.read(self.subscribe(transport, topic, group), 1)
        assert record.header_list == headers
        assert record.headers.get("twice") == b"2"

    def test_a_record_without_headers_has_none(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish(transport, [OutgoingRecord(topic, b"bare")])

        (record,) = self.read(self.subscribe(transport, topic, group), 1)
        assert record.headers == {}

    def test_each_record_has_an_outcome_and_its_position(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        contents = [f"{number}".encode() for number in range(20)]

        outcomes = transport.publish([OutgoingRecord(topic, each, each) for each in contents])

        assert [outcome.error for outcome in outcomes] == [None] * 20
        records = self.read(self.subscribe(transport, topic, group), 20)
        positions = {record.value: (record.partition, record.offset) for record in records}
        for value, outcome in zip(contents, outcomes, strict=True):
            if outcome.offset is not None:
                assert (outcome.partition, outcome.offset) == positions[value]

    def test_publishing_nothing_is_fine(self, transport: Transport) -> None:
        assert transport.publish([]) == []

    def test_a_chosen_partition_is_used(self, transport: Transport, group: str) -> None:
        topic = self.make_topic(transport, partitions=3)
        subscription = self.subscribe(transport, topic, group)
        self.join(subscription)
        if len(subscription.assignment()) != 3:
            pytest.skip("topics have no partitions here")

        outcomes = transport.publish(
            [OutgoingRecord(topic, b"%d" % number, b"k", partition=number) for number in range(3)]
        )

        assert [outcome.partition for outcome in outcomes] == [0, 1, 2]
        records = self.read(subscription, 3)
        assert {(record.partition, record.value) for record in records} == {
            (0, b"0"),
            (1, b"1"),
            (2, b"2"),
        }

    def test_concurrent_publishers_lose_nothing(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        failures: list[BaseException] = []

        def publish(name: int) -> None:
            try:
                for batch in range(10):
                    keys = [f"{name}-{batch}-{number}".encode() for number in range(10)]
                    self.publish(transport, [OutgoingRecord(topic, key, key) for key in keys])
            except BaseException as error:  # a thread has nobody to raise it to
                failures.append(error)
            finally:
                self.end_thread()

        threads = [threading.Thread(target=publish, args=(n,)) for n in range(self.publishers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

        assert failures == []
        expected = {
            f"{name}-{batch}-{number}".encode()
            for name, batch, number in itertools.product(
                range(self.publishers), range(10), range(10)
            )
        }
        records = self.read(self.subscribe(transport, topic, group), len(expected))
        assert sorted(map(bytes, filter(None, values(records)))) == sorted(expected)

    def test_the_order_of_a_key_is_kept(self, transport: Transport, group: str) -> None:
        if not transport.capabilities.ordering:
            pytest.skip("makes no promise of order")
        topic = self.make_topic(transport, partitions=4)
        records = [
            OutgoingRecord(topic, b"%d" % number, b"key-%d" % (number % 7)) for number in range(210)
        ]

        for start in range(0, 210, 30):
            self.publish(transport, records[start : start + 30])

        by_key: dict[bytes | None, list[int]] = defaultdict(list)
        for record in self.read(self.subscribe(transport, topic, group), 210, max_records=17):
            by_key[record.key].append(int(record.value or b""))
        assert by_key == {b"key-%d" % key: list(range(key, 210, 7)) for key in range(7)}

    def test_one_subscription_reads_several_topics(self, transport: Transport, group: str) -> None:
        topics = [self.make_topic(transport) for _ in range(3)]
        for topic in topics:
            self.publish_values(transport, topic, topic.encode())

        records = self.read(self.subscribe(transport, topics, group), 3)

        assert {record.topic: record.value for record in records} == {
            topic: topic.encode() for topic in topics
        }

    def test_a_large_batch_arrives_once_and_whole(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        contents = [b"%d" % number for number in range(self.many)]
        self.publish_values(transport, topic, *contents, key=None)
        subscription = self.subscribe(transport, topic, group)

        records = self.read(subscription, self.many, within=3 * self.within, max_records=1000)
        self.settle(subscription, records)

        assert sorted(values(records), key=lambda value: int(value or b"")) == contents
        subscription.close()
        self.publish_values(transport, topic, b"last")
        assert self.read_until(self.subscribe(transport, topic, group), b"last") == []

    def test_a_delayed_record_is_not_early(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        if not transport.capabilities.delay:
            pytest.skip("delays nothing")
        subscription = self.subscribe(transport, topic, group)
        self.join(subscription)
        due = datetime.now(UTC) + timedelta(seconds=1)

        self.publish(transport, [OutgoingRecord(topic, b"later", b"a", available_at=due)])
        self.publish(transport, [OutgoingRecord(topic, b"now", b"b")])

        assert self.read_until(subscription, b"now") == []
        (record,) = self.read(subscription, 1)
        assert record.value == b"later"
        assert datetime.now(UTC) >= due

    def test_a_rolled_back_transaction_publishes_nothing(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        if not transport.capabilities.transactional:
            pytest.skip("does not join transactions")
        with pytest.raises(ZeroDivisionError), self.atomic():
            self.publish_values(transport, topic, b"undone")
            raise ZeroDivisionError
        with self.atomic():
            self.publish_values(transport, topic, b"done")

        subscription = self.subscribe(transport, topic, group)

        assert self.read_until(subscription, b"done") == []
