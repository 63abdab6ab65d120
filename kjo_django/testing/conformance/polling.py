"""A poll is bounded, in records and in time, and can be woken."""

from __future__ import annotations

import itertools
import threading
import time

from kjo_django.testing.conformance.suite import Suite, values
from kjo_django.testing.conformance.waiting import eventually
from kjo_django.transports.base import Record, Transport


class Polling(Suite):
    """How much a poll brings, and how long it waits."""

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
        """PJQ-56: nothing there is an empty answer, in time."""
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
