"""A paused partition is silent and loses nothing."""

from __future__ import annotations

import uuid

import pytest

from kjo_django.testing.conformance.suite import Suite, values
from kjo_django.transports.base import OutgoingRecord, Record, TopicPartition, Transport


class Pausing(Suite):
    """Pauses, of all and of some, before an assignment and across a rebalance."""

    def test_a_paused_partition_is_silent_and_loses_nothing(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        contents = [b"%d" % number for number in range(30)]
        self.publish_values(transport, topic, *contents[:20])
        subscription = self.subscribe(transport, topic, group)
        taken = self.read(subscription, 1, max_records=5)
        partitions = subscription.assignment()

        subscription.pause(partitions)
        self.publish_values(transport, topic, *contents[20:])
        self.read_nothing(subscription)
        assert subscription.poll(0, 0.05) == []
        subscription.resume(partitions)

        taken += self.read(subscription, 30 - len(taken))
        assert values(taken) == contents

    def test_pausing_again_and_again_keeps_the_order(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        contents = [b"%d" % number for number in range(60)]
        subscription = self.subscribe(transport, topic, group)
        self.join(subscription)
        partitions = subscription.assignment()
        taken: list[Record] = []

        for start in range(0, 60, 10):
            subscription.pause(partitions)
            self.publish_values(transport, topic, *contents[start : start + 10])
            assert subscription.poll(100, 0.02) == []
            subscription.resume(partitions)
            taken += subscription.poll(4, 0.02)
        taken += self.read(subscription, 60 - len(taken))

        assert values(taken) == contents

    def test_pausing_one_partition_leaves_the_others(
        self, transport: Transport, group: str
    ) -> None:
        topic = self.make_topic(transport, partitions=2)
        subscription = self.subscribe(transport, topic, group)
        self.join(subscription)
        if len(subscription.assignment()) != 2:
            pytest.skip("topics have no partitions here")
        subscription.pause([TopicPartition(topic, 0)])

        self.publish(
            transport,
            [OutgoingRecord(topic, b"%d" % number, partition=number % 2) for number in range(20)],
        )

        records = self.read(subscription, 10)
        assert {record.partition for record in records} == {1}
        self.read_nothing(subscription)
        subscription.resume([TopicPartition(topic, 0)])
        rest = self.read(subscription, 10)
        assert values(rest) == [b"%d" % number for number in range(0, 20, 2)]

    def test_a_pause_before_the_assignment_is_remembered(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        probe = self.subscribe(transport, topic, f"group-{uuid.uuid4()}")
        self.join(probe)
        partitions = probe.assignment()
        subscription = self.subscribe(transport, topic, group)
        subscription.pause(partitions)
        # Not before it subscribed: without replay it could belong to the other group alone.
        self.publish_values(transport, topic, b"1")
        self.join(subscription)

        self.read_nothing(subscription)
        subscription.resume(partitions)

        assert values(self.read(subscription, 1)) == [b"1"]

    def test_a_pause_survives_a_rebalance(self, transport: Transport, group: str) -> None:
        if not self.rebalances:
            pytest.skip("does not move partitions")
        topic = self.make_topic(transport, partitions=2)
        first = self.subscribe(transport, topic, group)
        self.join(first, partitions=2)
        partitions = first.assignment()
        first.pause(partitions)
        second = self.subscribe(transport, topic, group)
        self.join(first, second, partitions=2)
        second.close()
        self.join(first, partitions=2)
        self.publish(transport, [OutgoingRecord(topic, b"%d" % n, partition=n) for n in range(2)])

        self.read_nothing(first)
        first.resume(partitions)

        assert sorted(filter(None, values(self.read(first, 2)))) == [b"0", b"1"]
