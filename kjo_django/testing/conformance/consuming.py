"""Promises of one subscription: polling, acknowledging, pausing, closing, reporting."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import Counter

import pytest

from kjo_django.testing.conformance.suite import Suite, eventually, values
from kjo_django.transports.base import (
    OutgoingRecord,
    Record,
    Subscription,
    TopicPartition,
    Transport,
)


class Consuming(Suite):
    """One consumer, from its first poll to its end."""

    # --- Polling ----------------------------------------------------------------------------------

    def test_max_records_is_respected(self, transport: Transport, topic: str, group: str) -> None:
        self.publish_values(transport, topic, *(b"%d" % number for number in range(10)))
        subscription = self.subscribe(transport, topic, group)
        batches: list[list[Record]] = []

        def all_came() -> bool:
            batches.append(subscription.poll(3, 0.1))
            return sum(map(len, batches)) >= 10

        eventually(all_came, self.within, "ten records")

        assert max(map(len, batches)) <= 3
        assert values(itertools.chain(*batches)) == [b"%d" % number for number in range(10)]

    @pytest.mark.parametrize(("max_bytes", "most"), [(2500, 3), (1, 1)])
    def test_no_record_follows_the_one_with_which_the_values_reach_max_bytes(
        self, transport: Transport, topic: str, group: str, max_bytes: int, most: int
    ) -> None:
        """And so one of any size comes."""
        contents = [b"%d" % number * 1000 for number in range(10)]
        self.publish_values(transport, topic, *contents)
        subscription = self.subscribe(transport, topic, group)
        batches: list[list[Record]] = []

        def all_came() -> bool:
            batches.append(subscription.poll(100, 0.1, max_bytes))
            return sum(map(len, batches)) >= 10

        eventually(all_came, self.within, "ten records")

        assert max(map(len, batches)) <= most
        assert values(itertools.chain(*batches)) == contents

    def test_poll_of_none_keeps_alive_and_loses_nothing(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        contents = [b"%d" % number for number in range(50)]
        self.publish_values(transport, topic, *contents)
        subscription = self.subscribe(transport, topic, group)
        self.join(subscription)

        for _ in range(10):
            assert subscription.poll(0, 0.05) == []

        records = self.read(subscription, 50, max_records=7)
        assert values(records) == contents
        for _ in range(3):
            assert subscription.poll(0, 0) == []
        self.publish_values(transport, topic, b"later")
        assert values(self.read(subscription, 1)) == [b"later"]

    def test_poll_waits_no_longer_than_its_timeout(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        """Nothing there is an empty answer, in time."""
        subscription = self.subscribe(transport, topic, group)
        self.join(subscription)

        started = time.monotonic()
        assert subscription.poll(10, 0.2) == []

        assert 0.15 <= time.monotonic() - started < 1.5

    def test_poll_returns_soon_after_a_record_arrives(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        subscription = self.subscribe(transport, topic, group)
        self.join(subscription)

        def publish() -> None:
            self.publish_values(transport, topic, b"1")
            self.end_thread()

        timer = threading.Timer(0.2, publish)
        timer.start()
        started = time.monotonic()
        records = subscription.poll(10, 15)
        timer.join()

        assert values(records) == [b"1"]
        assert time.monotonic() - started < 5

    def test_wake_ends_a_waiting_poll(self, transport: Transport, topic: str, group: str) -> None:
        subscription = self.subscribe(transport, topic, group)
        self.join(subscription)
        timer = threading.Timer(0.2, subscription.wake)
        timer.start()

        started = time.monotonic()
        assert subscription.poll(10, 15) == []
        timer.join()

        assert time.monotonic() - started < 2

    def test_a_wake_just_before_poll_is_not_lost(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        subscription = self.subscribe(transport, topic, group)
        self.join(subscription)

        subscription.wake()
        started = time.monotonic()
        subscription.poll(10, 15)

        assert time.monotonic() - started < 2

    # --- Acknowledging ----------------------------------------------------------------------------

    def test_what_is_not_acknowledged_is_delivered_again_after_close(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"1", b"2", b"3")
        first = self.subscribe(transport, topic, group)
        taken = self.read(first, 3)
        first.close()

        again = self.read(self.subscribe(transport, topic, group), 3)

        assert [record.position for record in again] == [record.position for record in taken]
        assert values(again) == [b"1", b"2", b"3"]

    def test_what_is_handed_back_goes_to_others_and_the_rest_stays(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        """A quiet worker holds up nothing that it has not begun."""
        # Given one consumer that has everything
        first = self.subscribe(transport, topic, group)
        if not first.supports_release:
            pytest.skip("its consumers keep what they were given until they close")
        self.publish_values(transport, topic, b"1", b"2", b"3", key=None)
        owned = self.read(first, 3)
        # When it gives up some of it
        first.release(owned[1:])
        # Then the other one gets that
        second = self.subscribe(transport, topic, group)
        assert set(values(self.read(second, 2))) == set(values(owned[1:]))
        # And what it kept is its own to settle
        self.settle(first, owned[:1])
        first.close()
        self.read_nothing(second)

    def test_what_is_released_of_a_key_comes_before_anything_later_of_that_key(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        # Given one consumer that has some of a key
        first = self.subscribe(transport, topic, group)
        if not first.release_keeps_order:
            pytest.skip("it does not promise that")
        self.publish_values(transport, topic, b"1", b"2", key=b"k")
        owned = self.read(first, 2)
        # When it gives that up, after more of the key came
        self.publish_values(transport, topic, b"3", key=b"k")
        first.release(owned)
        # Then it comes in the order in which it was published
        second = self.subscribe(transport, topic, group)
        assert values(self.read(second, 3)) == [b"1", b"2", b"3"]

    def test_a_poll_hands_out_no_more_of_a_topic_than_its_limit(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        # Given a backlog of two topics
        other = f"{topic}-other"
        first = self.subscribe(transport, [topic, other], group)
        if type(first).limit is Subscription.limit:
            pytest.skip("it has no limit of a topic; what is too much is released")
        for each in (topic, other):
            self.publish_values(transport, each, *(b"%d" % number for number in range(9)))
        # When one of them has a limit
        first.limit({topic: 2})
        polled = first.poll(10, self.within)
        assert Counter(record.topic for record in polled) == {topic: 2, other: 8}
        # Then that is one of each poll, and none if it is 0
        first.limit({topic: 3, other: 0})
        assert Counter(record.topic for record in first.poll(10, self.within)) == {topic: 3}
        # And without it everything comes
        first.limit({})
        assert len(self.read(first, 5)) == 5

    def test_what_is_acknowledged_is_not_delivered_again(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"1", b"2", b"3")
        first = self.subscribe(transport, topic, group)
        first.acknowledge(self.read(first, 3))
        first.close()
        self.publish_values(transport, topic, b"4")

        second = self.subscribe(transport, topic, group)

        assert self.read_until(second, b"4") == []

    def test_out_of_order_acknowledgement_skips_nothing(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, *(b"%d" % number for number in range(10)))
        first = self.subscribe(transport, topic, group)
        records = self.read(first, 10)
        settled = [records[number] for number in (9, 0, 1, 5, 7)]
        self.settle(first, settled)
        first.close()
        self.publish_values(transport, topic, b"last")

        again = values(self.read_until(self.subscribe(transport, topic, group), b"last"))

        assert set(again) >= {b"2", b"3", b"4", b"6", b"8"}, "an unsettled record was skipped"
        assert not set(again) & {b"0", b"1"}, "settled before every other, yet delivered again"

    def test_acknowledging_twice_is_harmless(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"1", b"2")
        first = self.subscribe(transport, topic, group)
        records = self.read(first, 2)
        first.acknowledge(records[:1])
        first.acknowledge(records[:1])
        self.settle(first, records[:1])
        first.close()

        assert values(self.read(self.subscribe(transport, topic, group), 1)) == [b"2"]

    def test_acknowledging_after_close_is_harmless(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"1")
        first = self.subscribe(transport, topic, group)
        records = self.read(first, 1)
        first.close()
        first.acknowledge(records)

        assert values(self.read(self.subscribe(transport, topic, group), 1)) == [b"1"]

    def test_acknowledgement_from_other_threads_counts(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, *(b"%d" % number for number in range(300)))
        first = self.subscribe(transport, topic, group)
        records = self.read(first, 300)

        def settle(share: list[Record]) -> None:
            for record in share:
                first.acknowledge([record])
            self.end_thread()

        threads = [threading.Thread(target=settle, args=(records[n::3],)) for n in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert first.poll(100, 0.02) == []
        first.close()
        self.publish_values(transport, topic, b"last")

        assert self.read_until(self.subscribe(transport, topic, group), b"last") == []

    def test_flushed_acknowledgements_survive_a_crash(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"1", b"2", b"3")
        first = self.subscribe(transport, topic, group)
        self.settle(first, self.read(first, 3)[:2])
        self.abandon(first)

        assert values(self.read(self.subscribe(transport, topic, group), 1)) == [b"3"]

    def test_after_a_crash_a_new_subscription_gets_everything(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        contents = [b"%d" % number for number in range(20)]
        self.publish_values(transport, topic, *contents)
        first = self.subscribe(transport, topic, group)
        self.read(first, 20)
        self.abandon(first)

        second = self.subscribe(transport, topic, group)

        assert values(self.read(second, 20)) == contents

    def test_a_late_acknowledgement_of_a_crashed_owner_has_no_effect(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"1", b"2")
        first = self.subscribe(transport, topic, group)
        stale = self.read(first, 2)
        self.abandon(first)
        second = self.subscribe(transport, topic, group)
        self.read(second, 2)

        first.acknowledge(stale)
        second.close()

        assert values(self.read(self.subscribe(transport, topic, group), 2)) == [b"1", b"2"]

    # --- Pausing ----------------------------------------------------------------------------------

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

    # --- Lag, errors and the probe ----------------------------------------------------------------

    def test_lag_falls_as_records_are_acknowledged(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"1", b"2", b"3")
        subscription = self.subscribe(transport, topic, group)
        records = self.read(subscription, 3)
        if not transport.lag([topic], group):
            pytest.skip("does not know its lag")

        def lag() -> int:
            assert subscription.poll(0, 0.02) == []
            return sum(transport.lag([topic], group).values())

        eventually(lambda: lag() == 3, self.within, "a lag of 3")
        self.settle(subscription, records[:2])
        eventually(lambda: lag() == 1, self.within, "a lag of 1")
        self.settle(subscription, records[2:])
        eventually(lambda: lag() == 0, self.within, "no lag")

    def test_offsets_agree_with_the_lag(self, transport: Transport, topic: str, group: str) -> None:
        self.publish_values(transport, topic, b"1", b"2", b"3")
        subscription = self.subscribe(transport, topic, group)
        self.settle(subscription, self.read(subscription, 3)[:2])

        def agreed() -> bool:
            assert subscription.poll(0, 0.02) == []
            offsets = transport.offsets([topic], group)
            if not offsets:
                pytest.skip("does not know its lag")
            assert all(
                each.committed is None or each.end - each.committed == each.lag
                for each in offsets.values()
                if each.end is not None
            )
            lags = {where: each.lag for where, each in offsets.items()}
            return sum(lags.values()) == 1 and lags == transport.lag([topic], group)

        eventually(agreed, self.within, "a lag of 1, however it is asked for")

    def test_a_healthy_subscription_reports_no_error(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"1")
        subscription = self.subscribe(transport, topic, group)
        self.read(subscription, 1)

        assert subscription.last_error is None

    def test_a_reachable_transport_answers_a_probe(self, transport: Transport) -> None:
        assert transport.probe(10.0)

    # --- Closing ----------------------------------------------------------------------------------

    def test_closing_twice_is_fine_and_the_transport_lives_on(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"1")
        subscription = self.subscribe(transport, topic, group)
        self.join(subscription)
        subscription.close()
        subscription.close()
        transport.close()
        transport.close()

        self.publish_values(transport, topic, b"2")

        assert values(self.read(self.subscribe(transport, topic, group), 2)) == [b"1", b"2"]

    def test_closing_before_the_first_poll_is_fine(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        subscription = self.subscribe(transport, topic, group)
        subscription.flush()
        subscription.close()
        assert subscription.poll(10, 0) == []
