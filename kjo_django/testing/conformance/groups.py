"""Promises of groups: each sees every record, and its subscriptions share them, also when they come
and go.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import pytest

from kjo_django.testing.conformance.suite import Suite, eventually, values
from kjo_django.transports.base import OutgoingRecord, Record, TopicPartition, Transport


class Groups(Suite):
    """The start of a group, its sharing, and moving partitions."""

    # --- Sharing ----------------------------------------------------------------------------------

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

    # --- Levels of priority -----------------------------------------------------------------------

    def test_members_of_a_group_may_read_topics_of_their_own(
        self, transport: Transport, group: str
    ) -> None:
        """As a worker does with the levels of a queue: each has a topic and a subscription."""
        low, high = self.make_topic(transport, 2), self.make_topic(transport, 2)
        of_low, of_high = (self.subscribe(transport, topic, group) for topic in (low, high))
        self.join(of_low, of_high, partitions=4 if self.rebalances else None)

        self.publish_values(transport, low, *(b"low %d" % number for number in range(200)))
        self.publish_values(transport, high, b"high")

        # The one does not wait until the other has been read
        records = self.read(of_high, 1)
        assert values(records) == [b"high"]
        assert {each.topic for each in of_high.assignment()} == {high}
        self.settle(of_high, records)
        of_high.close()
        found = self.read(of_low, 200)
        assert {record.topic for record in found} == {low}
        self.settle(of_low, found)
        again = self.subscribe(transport, high, group)
        self.publish_values(transport, high, b"last")
        assert self.read_until([of_low, again], b"last") == []

    def test_records_of_a_higher_priority_come_first_and_none_starves(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        if not transport.capabilities.priority:
            pytest.skip("makes no promise of priorities")
        priorities = [0, -100, 7, 0, 100, -1, 7]
        self.publish(
            transport,
            [
                OutgoingRecord(topic, b"%d" % number, b"%d" % number, priority=priority)
                for number, priority in enumerate(priorities)
            ],
        )
        subscription = self.subscribe(transport, topic, group)

        records = self.read(subscription, len(priorities))

        assert [(each.priority, each.value) for each in records] == [
            *[(100, b"4"), (7, b"2"), (7, b"6"), (0, b"0"), (0, b"3"), (-1, b"5"), (-100, b"1")]
        ]
        self.publish(transport, [OutgoingRecord(topic, b"low", priority=-100)])
        for _ in range(100):
            self.publish(transport, [OutgoingRecord(topic, b"u", priority=9) for _ in range(2)])
            found = subscription.poll(1, 1.0)
            subscription.acknowledge(found)
            if values(found) == [b"low"]:
                return
        pytest.fail("the lowest priority starved")

    # --- Rebalancing ------------------------------------------------------------------------------

    def test_a_rebalance_tells_both_sides(self, transport: Transport, group: str) -> None:
        if not self.rebalances:
            pytest.skip("does not move partitions")
        topic = self.make_topic(transport, partitions=4)
        revoked: list[tuple[set[TopicPartition], bool]] = []
        assigned: list[TopicPartition] = []
        first = self.subscribe(
            transport, topic, group, on_revoked=lambda tps, lost: revoked.append((set(tps), lost))
        )
        self.join(first, partitions=4)
        second = self.subscribe(transport, topic, group, on_assigned=assigned.extend)

        self.join(first, second, partitions=4)

        assert all(not lost for _, lost in revoked)
        taken = set().union(*(partitions for partitions, _ in revoked))
        assert taken >= set(second.assignment()), "partitions left without on_revoked"
        assert set(assigned) >= set(second.assignment())

    def test_what_on_revoked_waited_for_is_committed(
        self, transport: Transport, group: str
    ) -> None:
        if not self.rebalances:
            pytest.skip("does not move partitions")
        topic = self.make_topic(transport, partitions=2)
        self.publish(transport, [OutgoingRecord(topic, b"%d" % n, partition=n) for n in range(2)])
        taken: list[Record] = []

        def finish(partitions: Sequence[TopicPartition], lost: bool) -> None:
            first.acknowledge(r for r in taken if (r.topic, r.partition) in set(partitions))

        first = self.subscribe(transport, topic, group, on_revoked=finish)
        taken += self.read(first, 2)
        second = self.subscribe(transport, topic, group)
        self.join(first, second, partitions=2)
        (moved,) = second.assignment()
        self.publish(transport, [OutgoingRecord(topic, b"last", partition=moved.partition)])

        assert self.read_until([second], b"last") == []

    def test_an_acknowledgement_of_an_older_epoch_has_no_effect(
        self, transport: Transport, group: str
    ) -> None:
        if not self.rebalances:
            pytest.skip("does not move partitions")
        topic = self.make_topic(transport, partitions=2)
        self.publish(transport, [OutgoingRecord(topic, b"%d" % n, partition=n) for n in range(2)])
        first = self.subscribe(transport, topic, group)
        stale = {record.partition: record for record in self.read(first, 2)}
        second = self.subscribe(transport, topic, group)
        self.join(first, second, partitions=2)
        (moved,) = second.assignment()

        first.acknowledge([stale[moved.partition]])
        second.close()
        self.join(first, partitions=2)
        # Ours again, under a new epoch: the old record must not settle the new delivery.
        again = self.read(first, lambda found: moved.partition in {r.partition for r in found})
        (fresh,) = [record for record in again if record.partition == moved.partition]
        assert fresh.position == stale[moved.partition].position
        assert fresh.epoch > stale[moved.partition].epoch
        first.acknowledge([stale[moved.partition]])
        first.close()

        third = self.subscribe(transport, topic, group)
        assert sorted(filter(None, values(self.read(third, 2)))) == [b"0", b"1"]

    def test_close_tells_what_it_hands_back(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        if not self.rebalances:
            pytest.skip("does not move partitions")
        revoked: list[TopicPartition] = []
        subscription = self.subscribe(
            transport, topic, group, on_revoked=lambda tps, lost: revoked.extend(tps)
        )
        self.join(subscription)
        before = subscription.assignment()

        subscription.close()

        assert revoked == before
        assert subscription.assignment() == []

    def test_a_raising_callback_loses_nothing(self, transport: Transport, group: str) -> None:
        if not self.rebalances:
            pytest.skip("does not move partitions")
        topic = self.make_topic(transport, partitions=4)

        def fail(*_: object) -> None:
            raise RuntimeError("a callback that fails")

        first = self.subscribe(transport, topic, group, on_revoked=fail, on_assigned=fail)
        self.publish(
            transport, [OutgoingRecord(topic, b"%d" % each, b"%d" % each) for each in range(40)]
        )
        seen = self.read(first, 40)
        second = self.subscribe(transport, topic, group, on_revoked=fail, on_assigned=fail)
        moved = self.read([first, second], lambda _: second.assignment())
        seen += moved

        assert {int(value or b"") for value in values(seen)} == set(range(40))
        first.close()
        again = self.read(second, lambda found: len({r.position for r in moved + found}) >= 40)
        assert {int(value or b"") for value in values(moved + again)} == set(range(40))
