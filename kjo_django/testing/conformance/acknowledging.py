"""What is acknowledged is done with; all else is delivered again."""

from __future__ import annotations

import threading

import pytest

from kjo_django.testing.conformance.suite import Suite, values
from kjo_django.transports.base import Record, Transport


class Acknowledging(Suite):
    """Redelivery, out-of-order acknowledgements, threads and crashes."""

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
        if not first.hands_back:
            pytest.skip("its consumers keep what they were given until they close")
        self.publish_values(transport, topic, b"1", b"2", b"3", key=None)
        held = self.read(first, 3)
        # When it gives up some of it
        first.hand_back(held[1:])
        # Then the other one gets that
        second = self.subscribe(transport, topic, group)
        assert set(values(self.read(second, 2))) == set(values(held[1:]))
        # And what it kept is its own to settle
        self.settle(first, held[:1])
        first.close()
        self.read_nothing(second)

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
