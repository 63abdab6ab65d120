"""Every group sees every record; its subscriptions share them."""

from __future__ import annotations

import uuid

import pytest

from kjo_django.testing.conformance.suite import Suite, values
from kjo_django.testing.conformance.waiting import eventually
from kjo_django.transports.base import OutgoingRecord, Record, Transport


class Groups(Suite):
    """Where a group begins, and how it is shared."""

    def test_a_new_group_starts_at_the_earliest_record(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"before")
        subscription = self.subscribe(transport, topic, group)
        self.publish_values(transport, topic, b"after")

        assert values(self.read(subscription, 2)) == [b"before", b"after"]

    def test_every_group_sees_every_record(self, transport: Transport, topic: str) -> None:
        subscriptions = [self.subscribe(transport, topic, f"group-{uuid.uuid4()}") for _ in "ab"]
        self.join(*subscriptions)

        self.publish_values(transport, topic, b"1", b"2")

        for subscription in subscriptions:
            records = self.read(subscription, 2)
            assert values(records) == [b"1", b"2"]
            self.settle(subscription, records)

    def test_a_group_that_comes_later_replays(self, transport: Transport, topic: str) -> None:
        if not transport.capabilities.replay:
            pytest.skip("keeps no acknowledged records")
        self.publish_values(transport, topic, b"1", b"2")
        first = self.subscribe(transport, topic, f"group-{uuid.uuid4()}")
        self.settle(first, self.read(first, 2))
        first.close()

        second = self.subscribe(transport, topic, f"group-{uuid.uuid4()}")

        assert values(self.read(second, 2)) == [b"1", b"2"]

    def test_records_are_held_until_the_subscription_ends(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"1", b"2")
        subscription = self.subscribe(transport, topic, group)
        records = self.read(subscription, 2)
        assert [subscription.holds(record) for record in records] == [True, True]

        subscription.close()

        assert [subscription.holds(record) for record in records] == [False, False]

    def test_subscriptions_of_a_group_share_without_overlap(
        self, transport: Transport, group: str
    ) -> None:
        topic = self.make_topic(transport, partitions=4)
        pair = [self.subscribe(transport, topic, group) for _ in "ab"]
        self.join(*pair, partitions=4 if self.rebalances else None)

        self.publish(
            transport, [OutgoingRecord(topic, b"%d" % each, b"%d" % each) for each in range(200)]
        )

        shares: list[list[Record]] = [[], []]

        def all_read() -> bool:
            for share, subscription in zip(shares, pair, strict=True):
                records = subscription.poll(20, 0.05)
                subscription.acknowledge(records)
                share.extend(records)
            return len(shares[0]) + len(shares[1]) >= 200

        eventually(all_read, self.within, "all 200 records were read")
        positions = [record.position for share in shares for record in share]
        assert len(set(positions)) == len(positions) == 200
        if self.rebalances:
            assert all(shares), "one subscription got everything"
