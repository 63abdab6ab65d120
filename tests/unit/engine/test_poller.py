"""The poller: it reads envelopes, fills the lanes, pauses, and survives."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.engine.attempt import Mode
from kjo_django.engine.poller import Poller
from kjo_django.engine.scheduler import GroupScheduler
from kjo_django.messages import headers as names
from kjo_django.registry import Handler, HandlerOptions
from kjo_django.round_trips import GroupBudget
from kjo_django.runtime import current_runtime, get_transport
from kjo_django.transports.base import OutgoingRecord, Record, Subscription, TopicPartition
from kjo_django.worker.duties import DutyThread
from tests.unit.deliveries import Silent
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.medium  # threads and waits of a worker, in real time

MEMORY = {
    "BACKEND": "kjo_django.transports.memory.MemoryTransport",
    "OPTIONS": {"partitions": 2},
}


@pytest.fixture(autouse=True)
def _configured(settings, forgotten_definitions):
    settings.KJO = {
        "TRANSPORTS": {"default": MEMORY},
        "QUEUES": {
            "ledger": {},
            "mails": {"topic": "shared"},
            "images": {"topic": "shared"},
        },
        "MAX_PAYLOAD_BYTES": 100,
    }
    get_transport().clear()


class Watched(GroupScheduler):
    """Tells when something has come."""

    def __init__(self) -> None:
        super().__init__(4, group_size=1, budget=GroupBudget(1))
        self.filled = threading.Event()

    def put(self, deliveries):
        super().put(deliveries)
        self.filled.set()


class Polling(Poller):
    """A poller whose steps a thread takes."""

    _thread: DutyThread | None = None

    def start(self) -> None:
        self._thread = DutyThread(current_runtime(), "poller", [self])
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            self._thread.join(PATIENCE)
            assert not self._thread.is_alive()


@pytest.fixture
def lanes():
    return Watched()


@pytest.fixture
def make(lanes):
    """Make pollers and end their threads."""
    made: list[Polling] = []

    def make(*queues: str, group: str = "g", **options) -> Polling:
        conf = [get_settings().queue(queue) for queue in queues or ("ledger",)]
        options = {"max_outstanding": 100, **options}
        made.append(Polling(current_runtime(), get_transport(), group, conf, lanes, **options))
        return made[-1]

    yield make
    lanes.stop()
    for poller in made:
        poller.stop()


def record(
    value: bytes | None = b"{}", type: str = "ledger.write", topic: str = "ledger"
) -> Record:
    headers = {names.ID: b"1", names.TYPE: type.encode()}
    return Record(topic, 0, 0, b"k", value, headers)


def publish(*values: bytes, topic: str = "ledger", partition: int | None = None) -> None:
    headers = {names.ID: b"1", names.TYPE: b"ledger.write"}
    records = [OutgoingRecord(topic, value, b"k", headers, None, partition) for value in values]
    assert all(answer.error is None for answer in get_transport().publish(records))


def take(lanes: Watched) -> bytes:
    """Take the next delivery; a thread may have to poll it first."""
    group = lanes.take(timeout=PATIENCE)
    assert group is not None, "nothing came"
    delivery = group.deliveries[0]
    delivery.subscription.acknowledge([delivery.record])
    lanes.finish(group)
    return delivery.record.value


# --- Reading --------------------------------------------------------------------------------------


def test_a_readable_record_has_its_message_handler_and_queue(make):
    delivery = make().read(record(), Silent())
    assert (delivery.message.id, delivery.message.type) == ("1", "ledger.write")
    assert delivery.handler is registry.find("ledger.write")
    assert (delivery.queue.name, delivery.mode) == ("ledger", Mode.ATOMIC)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (record(None), "invalid"),
        (record(b""), "invalid"),
        (record(b"x" * 101), "too_large"),
        (Record("ledger", 0, 0, None, b"{}", {}), "invalid"),
    ],
)
def test_an_unreadable_record_is_poison_and_no_error(make, bad, reason):
    delivery = make().read(bad, Silent())
    assert delivery.problem.reason == reason
    assert (delivery.message.id, delivery.lease, delivery.mode) == ("", "", Mode.POISON)


class Hopeless(Exception):
    """Not even its text can be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("error", [KeyError("a bug"), RecursionError("too deep"), Hopeless()])
def test_what_a_route_chokes_on_is_poison_and_what_follows_is_read(make, lanes, error):
    class Route(registry.Route):
        def read(self, record, *, max_bytes):
            if record.value == b"bad":
                raise error
            return super().read(record, max_bytes=max_bytes)

    registry.bind("ledger", Route())
    publish(b"bad", b"{}", partition=0)
    make().start()
    first = lanes.take(timeout=PATIENCE)
    assert first is not None, "nothing came"
    assert (first.mode, first.deliveries[0].problem.reason) == (Mode.POISON, "invalid")
    lanes.finish(first)
    assert take(lanes) == b"{}"


def test_a_record_without_a_handler_is_poison_with_its_message_read(make):
    delivery = make().read(record(type="nobody.knows"), Silent())
    assert delivery.message.type == "nobody.knows"
    assert delivery.problem.reason == "unknown_type"
    assert delivery.mode is Mode.POISON


def test_queues_that_share_a_topic_are_told_apart_by_the_handler(make):
    for name in ("mails", "images"):
        registry.register(Handler(lambda: None, HandlerOptions(name=f"x.{name}", queue=name)))
    poller = make("mails", "images")
    assert poller.topics == ["shared"]
    for name in ("mails", "images"):
        assert poller.read(record(type=f"x.{name}", topic="shared"), Silent()).queue.name == name
    assert poller.read(record(topic="shared"), Silent()).queue.name == "mails"


# --- The thread -----------------------------------------------------------------------------------


def test_what_is_published_comes_to_the_lanes_in_order(make, lanes):
    make().start()
    publish(b"1", b"2", b"3", partition=0)
    assert [take(lanes) for _ in range(3)] == [b"1", b"2", b"3"]


def test_full_lanes_stop_the_fetching_and_not_the_membership(make, lanes):
    # Given
    poller = make(max_outstanding=2)
    publish(b"1", b"2", b"3", partition=0)
    # When
    poller.start()
    wait_until(lambda: lanes.outstanding == 2)
    group = lanes.take(timeout=PATIENCE)
    # Then
    assert poller.polled_count == 2
    assert len(poller.partitions) == 2
    poller._subscription.acknowledge([group.deliveries[0].record])
    lanes.finish(group)
    wait_until(lambda: poller.polled_count == 3)


@pytest.fixture
def polling(make, monkeypatch):
    """Start a poller; returns it with what its subscription is asked from then on."""

    def start() -> tuple[Polling, list[tuple]]:
        poller = make()
        poller.start()
        wait_until(lambda: len(poller.partitions) == 2)
        asked: list[tuple] = []
        for name in ("poll", "pause", "resume"):
            original = getattr(poller._subscription, name)

            def spy(*arguments, name=name, original=original):
                asked.append((name, arguments[0]))
                return original(*arguments)

            monkeypatch.setattr(poller._subscription, name, spy)
        return poller, asked

    return start


def test_draining_fetches_nothing_more_and_stays_a_member(polling, lanes):
    # Given
    poller, asked = polling()
    publish(b"1", partition=0)
    assert take(lanes) == b"1"
    # When
    poller.drain()
    wait_until(lambda: ("poll", 0) in asked)
    publish(b"2", partition=0)
    before = len(asked)
    wait_until(lambda: len(asked) > before + 1)
    # Then
    assert lanes.waiting == 0
    assert set(asked[before:]) == {("poll", 0)}
    assert len(poller.partitions) == 2


def test_closing_hands_back_what_was_not_settled(make, lanes):
    poller = make()
    poller.start()
    publish(b"1", partition=0)
    wait_until(lambda: lanes.waiting == 1)
    poller.stop()
    assert lanes.waiting == 0
    other = get_transport().subscribe(["ledger"], "g")
    assert [one.value for one in other.poll(10, PATIENCE)] == [b"1"]
    other.close()


BOTH = [TopicPartition("ledger", 0), TopicPartition("ledger", 1)]


def test_a_paused_queue_is_not_fetched_and_misses_nothing(polling, lanes):
    # Given
    poller, asked = polling()
    poller.set_paused(frozenset({"ledger"}))
    poller.wake()
    wait_until(lambda: ("pause", BOTH) in asked)
    publish(b"1", partition=0)
    before = len(asked)
    wait_until(lambda: len(asked) > before + 3)
    assert lanes.waiting == 0
    # When
    poller.set_paused(frozenset())
    poller.wake()
    # Then
    assert take(lanes) == b"1"


def test_the_end_of_a_pause_ends_a_poll_that_would_wait_for_long(polling, lanes, monkeypatch):
    # Given an idle consumer of a paused queue, which hears of publications
    poller, asked = polling()
    monkeypatch.setattr("kjo_django.engine.poller.IDLE_POLL_TIMEOUT", 10 * PATIENCE)
    poller.rely_on_wake_ups(True)
    poller.set_paused(frozenset({"ledger"}))
    wait_until(lambda: ("pause", BOTH) in asked)
    publish(b"1", partition=0)
    # When
    poller.set_paused(frozenset())
    # Then
    assert take(lanes) == b"1"


def test_who_is_woken_for_nothing_any_more_polls_as_often_as_before(polling, monkeypatch):
    # Given an idle consumer that waits for long
    poller, asked = polling()
    monkeypatch.setattr("kjo_django.engine.poller.IDLE_POLL_TIMEOUT", 10 * PATIENCE)
    poller.rely_on_wake_ups(True)
    wait_until(lambda: poller._subscription.hears_publishers)
    # When
    poller.rely_on_wake_ups(False)
    # Then
    wait_until(lambda: not poller._subscription.hears_publishers)
    before = len(asked)
    wait_until(lambda: len(asked) > before + 2)


def test_that_publications_are_heard_is_known_though_it_was_told_while_subscribing(
    make, monkeypatch
):
    # Given
    poller = make()
    monkeypatch.setattr("kjo_django.engine.poller.POLL_TIMEOUT", 0.0)
    monkeypatch.setattr("kjo_django.engine.poller.IDLE_POLL_TIMEOUT", 0.0)
    subscribe = poller._transport.subscribe

    def subscribe_and_hear(*arguments: Any, **options: Any) -> Subscription:
        poller.rely_on_wake_ups(True)  # the listener has its answer just now
        return subscribe(*arguments, **options)

    monkeypatch.setattr(poller._transport, "subscribe", subscribe_and_hear)
    # When
    poller.step()
    # Then
    assert poller._subscription.hears_publishers


def test_what_a_paused_queue_left_waiting_does_not_keep_others_from_being_fetched(make, lanes):
    # Given: the lanes are full of one queue, which an operator pauses
    poller = make("ledger", "mails", max_outstanding=2)
    poller.start()
    publish(b"1", b"2", b"3", partition=0)
    wait_until(lambda: lanes.waiting == 2)
    poller.set_paused(frozenset({"ledger"}))
    lanes.set_paused({"ledger"})
    # When
    publish(b"{}", topic="shared", partition=0)
    # Then
    assert take(lanes) == b"{}"
    # And no more than was there is fetched of the one that is paused
    wait_until(lambda: lanes.running == 0)
    lanes.set_paused(())
    poller.set_paused(frozenset())
    assert [take(lanes), take(lanes), take(lanes)] == [b"1", b"2", b"3"]


def test_a_resting_partition_rests_alone_and_comes_back_by_itself(polling, lanes):
    """KJO-76."""
    poller, asked = polling()
    lanes.pause_partition(BOTH[0], 0.6)
    poller.wake()
    wait_until(lambda: ("pause", BOTH[:1]) in asked)
    publish(b"resting", partition=0)
    publish(b"free", partition=1)
    assert take(lanes) == b"free"
    assert take(lanes) == b"resting"
    assert ("resume", BOTH[:1]) in asked


def test_a_rest_does_not_resume_a_queue_an_operator_paused(polling, lanes):
    poller, asked = polling()
    poller.set_paused(frozenset({"ledger"}))
    lanes.pause_partition(BOTH[0], 0.05)
    poller.wake()
    wait_until(lambda: ("pause", BOTH) in asked)
    publish(b"1", partition=0)
    wait_until(lambda: not lanes.paused_partitions())
    before = len(asked)
    wait_until(lambda: len(asked) > before + 2)
    assert lanes.waiting == 0
    assert "resume" not in {name for name, _ in asked}


def test_it_tells_when_its_partitions_changed_last(make):
    # Given one that has both
    first = make()
    assert first.rebalanced_at is None
    first.start()
    wait_until(lambda: len(first.partitions) == 2 and first.rebalanced_at)
    alone = first.rebalanced_at
    # When a second takes one of them
    second = make()
    second.start()
    wait_until(lambda: len(first.partitions) == 1 and second.rebalanced_at)
    # Then both tell
    assert alone < first.rebalanced_at <= second.rebalanced_at
    # And when it is given back, the first does again
    shared = first.rebalanced_at
    second.stop()
    first.wake()
    wait_until(lambda: len(first.partitions) == 2)
    wait_until(lambda: first.rebalanced_at > shared)


def test_it_tells_which_partitions_rest_and_for_how_long(lanes):
    assert lanes.paused_partitions() == {}
    lanes.pause_partition(BOTH[0], 60)
    lanes.pause_partition(BOTH[1], -1)
    (rest,) = lanes.paused_partitions().items()
    assert rest[0] == BOTH[0]
    assert 59 < rest[1] <= 60


def test_a_poller_that_fails_tells_and_starts_over(make, lanes, failing):
    # Given
    told: list[str | None] = []
    failed = threading.Event()

    def hear(error: str | None) -> None:
        told.append(error)
        if error:
            failed.set()

    failing(get_transport(), "subscribe", RuntimeError("no subscription for you"))
    # When
    make(on_error=hear).start()
    publish(b"1", partition=0)
    # Then
    assert failed.wait(PATIENCE)
    assert told == ["no subscription for you"]
    assert take(lanes) == b"1"
    wait_until(lambda: told[-1] is None)


def test_a_rebalance_waits_for_what_runs_and_forgets_what_waits(make, lanes):
    # Given: one record of each partition runs, another of each waits
    poller = make()
    poller.start()
    for partition in (0, 1):
        publish(b"%d runs" % partition, partition=partition)
        wait_until(lambda: lanes.filled.is_set())
        lanes.filled.clear()
    groups = [lanes.take(timeout=PATIENCE)]
    # When: another member comes, and gets one of the two
    other = get_transport().subscribe(["ledger"], "g")
    taken: list[Record] = []

    def join() -> None:
        while not taken and not done.is_set():
            taken.extend(other.poll(10, 0.05))

    done = threading.Event()
    thread = threading.Thread(target=join)
    thread.start()
    wait_until(lambda: lanes.waiting <= 1)
    for group in groups:
        lanes.finish(group)
    wait_until(lambda: len(poller.partitions) == 1)
    # Then
    wait_until(lambda: len(other.assignment()) == 1)
    mine, theirs = poller.partitions, other.assignment()
    assert {*mine, *theirs} == {TopicPartition("ledger", 0), TopicPartition("ledger", 1)}
    done.set()
    thread.join(PATIENCE)
    other.close()


def test_a_rebalance_of_one_group_leaves_what_another_reads_of_the_same_topic(make, lanes):
    # Given: two groups in one worker, a record of each of two partitions waiting for both
    mails, images = make("mails", group="mails"), make("images", group="images")
    mails.start()
    images.start()
    wait_until(lambda: len(mails.partitions) == len(images.partitions) == 2)
    for partition in (0, 1):
        publish(b"{}", topic="shared", partition=partition)
    wait_until(lambda: lanes.waiting == 4)
    # When: one group gets another member
    other = get_transport().subscribe(["shared"], "mails")
    try:
        wait_until(lambda: bool(other.poll(10, 0.05)) or len(mails.partitions) == 1)
        # Then: that group forgets the partition it gives away, and the other nothing
        left = []
        for _ in range(3):
            group = lanes.take(timeout=PATIENCE)
            left += [delivery.queue.name for delivery in group.deliveries]
            lanes.finish(group)
    finally:
        other.close()
    assert sorted(left) == ["images", "images", "mails"]


def test_a_subscription_that_fails_is_closed_whatever_else_fails(make, monkeypatch):
    # Given: one that can be asked for nothing any more
    closed, failed = threading.Event(), []
    subscribe = get_transport().subscribe
    broken = iter([True])

    def failing(*arguments, **options):
        subscription = subscribe(*arguments, **options)
        if next(broken, False):

            def fail() -> list:
                raise RuntimeError("no assignment for you")

            failed.append(subscription)
            monkeypatch.setattr(subscription, "assignment", fail)
            close = subscription.close
            monkeypatch.setattr(subscription, "close", lambda: (close(), closed.set()))
        return subscription

    monkeypatch.setattr(get_transport(), "subscribe", failing)
    # When
    poller = make()
    poller.start()
    # Then
    assert closed.wait(PATIENCE)
    wait_until(lambda: poller._subscription not in failed and len(poller.partitions) == 2)
