"""The base of the suite: what a transport's author provides, and the helpers of the tests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import pytest

from kjo_django.transports.base import OutgoingRecord, Record, Subscription, TopicSpec, Transport

T = TypeVar("T")


def eventually(condition: Callable[[], T], within: float = 20.0, what: str = "") -> T:
    """Return the first truthy result of ``condition``; fail after ``within`` seconds.

    :param what: the expectation in words, for the failure message.
    """
    deadline = time.monotonic() + within
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() >= deadline:
            expected = what or getattr(condition, "__name__", "the condition")
            pytest.fail(f"not within {within:g} s: {expected}; last result: {result!r}")
        time.sleep(0.005)


def values(records: Iterable[Record]) -> list[bytes | None]:
    """Return the values of ``records``, in order."""
    return [record.value for record in records]


class Suite:
    """The attributes and methods to adjust, the fixtures, and the helpers."""

    within: ClassVar[float] = 20.0
    """Seconds until an expected event counts as missing; only failures wait so long."""
    quiet: ClassVar[float] = 0.5
    """Seconds of polling after which a record counts as not delivered."""
    lease: ClassVar[timedelta] = timedelta(seconds=30)
    """Seconds given to ``subscribe``; after `abandon`, delivered records must come again within
    ``within``.
    """
    rebalances: ClassVar[bool] = True
    """Whether partitions move between the subscriptions of a group while they are open."""
    publishers: ClassVar[int] = 4
    """Threads of the test of concurrent publishers."""
    many: ClassVar[int] = 5000
    """Records of the large batch."""

    # --- What a subclass provides -----------------------------------------------------------------

    def make_transport(self) -> Transport:
        """Return a new transport. All transports made in one test reach the same records."""
        raise NotImplementedError

    def make_topic(self, transport: Transport, partitions: int = 1) -> str:
        """Return the name of a new, empty topic."""
        name = f"kjo-conformance-{uuid.uuid4().hex[:12]}"
        transport.ensure_topics([TopicSpec(name, partitions=partitions)])
        return name

    def abandon(self, subscription: Subscription) -> None:
        """End ``subscription`` as a crash of its process would, without a flush or a leave request.

        By default it is polled no longer, and `lease` has to end; set `lease` short then.
        """

    def atomic(self) -> AbstractContextManager[Any]:
        """Return the caller's transaction; used where ``capabilities.transactional``."""
        from django.db import transaction

        return transaction.atomic()

    def end_thread(self) -> None:
        """Called at the end of each thread a test starts: close its connections."""

    # --- Fixtures and tools -----------------------------------------------------------------------

    @pytest.fixture
    def transport(self) -> Iterator[Transport]:
        transport = self.make_transport()
        self._opened: list[Subscription] = []
        yield transport
        for subscription in self._opened:
            subscription.close()
        transport.close()

    @pytest.fixture
    def topic(self, transport: Transport) -> str:
        return self.make_topic(transport)

    @pytest.fixture
    def group(self) -> str:
        return f"group-{uuid.uuid4().hex[:12]}"

    def subscribe(
        self, transport: Transport, topic: str | Sequence[str], group: str, **callbacks: Any
    ) -> Subscription:
        """Open a subscription that is closed after the test."""
        topics = [topic] if isinstance(topic, str) else topic
        subscription = transport.subscribe(topics, group, lease=self.lease, **callbacks)
        self._opened.append(subscription)
        return subscription

    def publish(self, transport: Transport, records: Iterable[OutgoingRecord]) -> None:
        """Publish, and assert that every record was accepted."""
        records = list(records)
        outcomes = transport.publish(records)
        assert [outcome.error for outcome in outcomes] == [None] * len(records)

    def publish_values(
        self, transport: Transport, topic: str, *contents: bytes, key: bytes | None = b"k"
    ) -> None:
        self.publish(transport, [OutgoingRecord(topic, value, key) for value in contents])

    def read(
        self,
        subscriptions: Subscription | Sequence[Subscription],
        done: int | Callable[[list[Record]], object],
        *,
        within: float | None = None,
        max_records: int = 500,
    ) -> list[Record]:
        """Poll the subscriptions until ``done`` records came, or ``done(records)`` is true."""
        if isinstance(subscriptions, Subscription):
            subscriptions = [subscriptions]
        enough = (lambda found: len(found) >= done) if isinstance(done, int) else done
        records: list[Record] = []

        def poll_once() -> object:
            for subscription in subscriptions:
                records.extend(subscription.poll(max_records, 0.05))
            return enough(records)

        deadline = time.monotonic() + (within or self.within)
        while not poll_once():
            if time.monotonic() > deadline:
                errors = [each.last_error for each in subscriptions]
                pytest.fail(f"waited for {done}, got {len(records)} records; errors: {errors}")
        return records

    def read_until(
        self, subscriptions: Subscription | Sequence[Subscription], last: bytes
    ) -> list[Record]:
        """Read until a record of value ``last`` came, and return the records before it.

        To test that a record is not delivered, publish a later one and read up to that.
        """
        records = self.read(subscriptions, lambda found: last in values(found))
        return [record for record in records if record.value != last]

    def read_nothing(self, *subscriptions: Subscription) -> None:
        """Poll for ``quiet`` seconds and assert that no record comes."""
        deadline = time.monotonic() + self.quiet
        while time.monotonic() < deadline:
            for subscription in subscriptions:
                assert values(subscription.poll(100, 0.05)) == []

    def settle(self, subscription: Subscription, records: Iterable[Record]) -> None:
        """Acknowledge and flush."""
        subscription.acknowledge(records)
        subscription.flush()

    def join(self, *subscriptions: Subscription, partitions: int | None = None) -> None:
        """Poll until each has an assignment, together ``partitions`` without overlap."""
        polled: list[Record] = []

        def everyone_has_some() -> bool:
            for subscription in subscriptions:
                polled.extend(subscription.poll(0, 0.05))
            shares = [subscription.assignment() for subscription in subscriptions]
            flat = [partition for share in shares for partition in share]
            whole = partitions is None or (len(flat) == len(set(flat)) == partitions)
            return all(shares) and whole

        eventually(everyone_has_some, self.within, "every subscription has its share")
        assert polled == []
