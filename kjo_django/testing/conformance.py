"""The suite every transport passes; run it against your own.

    class TestMyTransport(TransportConformance):
        def make_transport(self):
            return MyTransport("test", {...})

Declared capabilities choose the cases. Needs pytest, and no server of its own.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, TypeVar

import pytest

from kjo_django.transports.base import (
    OutgoingRecord,
    Record,
    Subscription,
    TopicPartition,
    TopicSpec,
    Transport,
)

T = TypeVar("T")

EVERY_BYTE = bytes(range(256))


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


def name_bytes(value: bytes | None) -> str:
    """Name a parameter without its bytes."""
    return "None" if value is None else f"{len(value)}-bytes"


class TransportConformance:
    """Subclass it, implement ``make_transport`` and adjust the attributes that do not fit."""

    within: ClassVar[float] = 20.0
    """Seconds until something expected counts as missing; only failures wait so long."""
    quiet: ClassVar[float] = 0.5
    """Seconds of polling after which a record counts as not handed out."""
    lease: ClassVar[timedelta] = timedelta(seconds=30)
    """Given to ``subscribe``; after `abandon`, what was handed out must come back within
    ``within``."""
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
        """End ``subscription`` as a crash of its process would: no flush, no goodbye.

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
        """Publish, and insist that every record was accepted."""
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
        """Poll in turn until ``done`` records came, or ``done(records)`` is true."""
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
        """Read until a record of value ``last`` came, and return what came before it.

        The sentence "X is not delivered" is tested by publishing a later record and meeting that.
        """
        records = self.read(subscriptions, lambda found: last in values(found))
        return [record for record in records if record.value != last]

    def read_nothing(self, *subscriptions: Subscription) -> None:
        """Poll for ``quiet`` seconds and insist on nothing."""
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
        held: list[Record] = []

        def everyone_has_some() -> bool:
            for subscription in subscriptions:
                held.extend(subscription.poll(0, 0.05))
            shares = [subscription.assignment() for subscription in subscriptions]
            flat = [partition for share in shares for partition in share]
            whole = partitions is None or (len(flat) == len(set(flat)) == partitions)
            return all(shares) and whole

        eventually(everyone_has_some, self.within, "every subscription has its share")
        assert held == []

    # --- Publishing and reading -------------------------------------------------------------------

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

    # --- Groups -----------------------------------------------------------------------------------

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

    # --- Closing, lag and the rest ----------------------------------------------------------------

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

    def test_lag_falls_as_records_are_acknowledged(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"1", b"2", b"3")
        subscription = self.subscribe(transport, topic, group)
        records = self.read(subscription, 3)
        if subscription.lag() is None:
            pytest.skip("does not know its lag")

        def lag() -> int:
            assert subscription.poll(0, 0.02) == []
            return sum((subscription.lag() or {}).values())

        eventually(lambda: lag() == 3, self.within, "a lag of 3")
        self.settle(subscription, records[:2])
        eventually(lambda: lag() == 1, self.within, "a lag of 1")
        self.settle(subscription, records[2:])
        eventually(lambda: lag() == 0, self.within, "no lag")

    def test_a_healthy_subscription_reports_no_error(
        self, transport: Transport, topic: str, group: str
    ) -> None:
        self.publish_values(transport, topic, b"1")
        subscription = self.subscribe(transport, topic, group)
        self.read(subscription, 1)

        assert subscription.last_error is None

    def test_a_reachable_transport_answers_a_probe(self, transport: Transport) -> None:
        assert transport.probe(10.0)

    # --- Capabilities -----------------------------------------------------------------------------

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
