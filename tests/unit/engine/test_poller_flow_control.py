"""How many records a worker fetches of each queue, partition and key: one backlog starves nobody.

The workers run in this process, their slow handlers wait for an event.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
import uuid

import pytest

from kjo_django import job
from kjo_django.conf import get_settings
from kjo_django.engine.attempt import RefusedRecord
from kjo_django.engine.poller import plan_fetch
from kjo_django.engine.scheduler import GroupScheduler
from kjo_django.exceptions import MessageError
from kjo_django.messages import headers as names
from kjo_django.outbox.relay import Relay
from kjo_django.round_trips import GroupBudget
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord, Record, TopicPartition
from tests.unit.deliveries import Silent
from tests.unit.workers import Configure, Noting, Turns
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.medium,  # threads and waits of a worker, in real time
    pytest.mark.usefixtures("forgotten_definitions"),
]

PROMISED = 1.0
"""Seconds until a job of an idle queue begins, whatever others do."""
BACKLOG = 5_000


REDIS_STREAMS = pytest.param("redis_streams", marks=pytest.mark.redis)


@pytest.fixture(
    params=["memory", "database", pytest.param("kafka", marks=pytest.mark.kafka), REDIS_STREAMS]
)
def transport(request):
    return request.param


@pytest.fixture
def configure(request, settings, sqlite_file):
    """Use a transport with two queues, whose topics have two partitions where there are any."""

    def configure(transport: str, limit: int | None = 1, **options: object) -> None:
        queues = {"slow": {"concurrency": limit}, "quick": {}}
        Configure(request, settings)(transport, queues, **options)

    return configure


class Working(Noting):
    """A worker whose jobs may last until ``release``."""

    def __init__(self, **options: object) -> None:
        super().__init__(["slow", "quick"], relay=False, **options)

    def delay_of_other(self, name: str) -> float:
        """Return after how many seconds a job of the other queue begins that is published now."""
        return self.delay_of(name, lambda: publish("quick", f'{{"name": "{name}"}}'))

    def slow_begun(self) -> int:
        """How many jobs that wait for ``release`` have begun."""
        return sum(not name.startswith("other") for name in self.begun)

    def waits_for_slow(self, count: int) -> None:
        assert self.begins(lambda begun: self.slow_begun() >= count), "nothing begins"

    def fills(self) -> None:
        """Wait until it fetches no more, which a second without a fetch tells."""
        # Not always the first: of two partitions either may be read before the other one.
        self.waits_for_slow(1)
        last, since = -1, time.monotonic()

        def rests() -> bool:
            nonlocal last, since
            if (held := self.worker.scheduler.outstanding) != last:
                last, since = held, time.monotonic()
            return time.monotonic() > since + 1.0

        wait_until(rests, "it fetches without an end")


def publish(queue: str, *values: str, key: bytes | None = None) -> None:
    """Put messages of others on a queue's topic."""
    topic = get_settings().queue(queue).topic
    records = [
        OutgoingRecord(
            topic,
            value.encode(),
            key,
            {names.ID: uuid.uuid4().hex.encode(), names.TYPE: f"work.{queue}".encode()},
        )
        for value in values
    ]
    assert all(answer.error is None for answer in get_transport().publish(records))


FIRST = '{"name": "first", "waits": 60}'
MORE = '{"name": "more", "waits": 60}'
OTHER = '{"name": "other"}'


def test_a_job_of_an_idle_queue_begins_at_once_beside_a_backlog_of_slow_ones(configure, transport):
    # Given
    configure(transport)
    publish("slow", FIRST, *[MORE] * BACKLOG)
    with Working() as working:
        working.fills()
        # When
        for number in range(3):
            working.delay_of_other(f"other {number}")
        # Then each has begun, though the slow one goes on
        assert working.slow_begun() == 1


@pytest.mark.large("unknown")
@pytest.mark.parametrize("transport", ["database", REDIS_STREAMS], indirect=True)
@pytest.mark.parametrize("kind", ["known", "unknown"])
def test_a_worker_with_long_jobs_leaves_the_others_to_those_with_free_lanes(
    configure, transport, kind
):
    # Given a worker with a long job in each lane, which knows its other jobs for quick ones, or not
    configure(transport, limit=None, CONCURRENCY=3)
    with Working() as busy:
        if kind == "known":
            publish("quick", *[OTHER] * 300)
            assert busy.begins(lambda begun: len(begun) == 300)
        publish("slow", *[FIRST] * 3)
        busy.waits_for_slow(3)
        # When there is much to do
        publish("quick", *[OTHER] * 500)
        busy.fills()
        # Then another worker does all of it, though it comes later
        with Working() as second:
            assert second.begins(lambda begun: len(begun) == 500)
            assert busy.slow_begun() == 3


@pytest.mark.parametrize("transport", ["database", REDIS_STREAMS], indirect=True)
def test_a_topic_of_two_queues_is_read_past_the_jobs_of_the_one_that_is_full(
    request, settings, sqlite_file, transport
):
    # Given a long job of a queue that may run one, and others behind it
    queues = {"slow": {"concurrency": 1, "topic": "both"}, "quick": {"topic": "both"}}
    Configure(request, settings)(transport, queues, CONCURRENCY=3)
    publish("slow", FIRST, *[MORE] * 200)
    with Working() as working:
        working.fills()
        # When
        publish("quick", OTHER)
        # Then
        assert working.begins(lambda begun: "other" in begun)
        assert working.slow_begun() == 1


@pytest.mark.parametrize("transport", ["database", REDIS_STREAMS], indirect=True)
def test_jobs_in_a_thread_begin_beside_coroutines_at_their_limit(configure, transport):
    # Given a queue whose coroutines wait for one another
    configure(transport, limit=2, CONCURRENCY=3)
    release = threading.Event()
    begun: list[int] = []

    async def wait(number: int) -> None:
        begun.append(number)
        while not release.is_set():
            await asyncio.sleep(0.01)  # sleep: until the event of another thread is set

    waiting = job(name="work.waiting", queue="slow", atomic=False)(wait)
    with Working() as working:
        waiting.enqueue_many([{"number": number} for number in range(50)])
        Relay(["slow"]).publish_due()
        wait_until(lambda: len(begun) == 2)
        # When
        publish("slow", FIRST)
        # Then
        working.waits_for_slow(1)
        assert len(begun) == 2
        release.set()


@pytest.mark.large("memory", "redis_streams")
@pytest.mark.parametrize("limit", [100_000, 1_000])
def test_a_worker_holds_a_limit_of_bytes_and_one_record_of_any_size(configure, transport, limit):
    # Given records of 20 kB
    configure(transport, MAX_OUTSTANDING_BYTES=limit)
    publish("slow", *[FIRST + " " * 20_000] * 15)
    with Working() as working:
        # When it holds all it may
        working.fills()
        # Then that is no more than one record too many
        assert 1 <= working.worker.scheduler.outstanding <= limit // 20_000 + 1
        # And all run in the end
        working.release.set()
        working.waits_for_slow(15)
        assert working.slow_begun() == 15


@pytest.mark.long
def test_a_job_of_an_idle_queue_is_next_where_slow_ones_have_all_lanes(configure, transport):
    # Given
    configure(transport, limit=None, CONCURRENCY=4)
    draw = random.Random(1)
    lasting = [draw.uniform(0.2, 1) for _ in range(BACKLOG)]
    publish("slow", *[f'{{"name": "slow", "waits": {seconds}}}' for seconds in lasting])
    with Working() as working:
        working.waits_for_slow(13)
        # When
        delays = [working.delay_of_other(f"other {number}") for number in range(5)]
        # Then
        print(f"begun after {delays} s")
        assert statistics.median(delays) < PROMISED


@pytest.mark.parametrize("transport", ["memory", "database"])
def test_an_idle_queue_waits_for_one_handler_whatever_the_weight_of_the_busy_one(
    configure, transport
):
    # Given one lane, and a backlog whose queue has a hundred times the weight
    configure(transport, limit=None, CONCURRENCY=1, GROUP_SIZE=1)
    publish("slow", *['{"name": "slow", "waits": 60}'] * 200)
    with Working(weights={"slow": 100}, release=Turns()) as working:
        working.waits_for_slow(1)
        for number in range(5):
            # When
            publish("quick", f'{{"name": "other {number}"}}')
            working.wait_until_it_holds(f"other {number}")
            # Then
            assert working.turns_until(f"other {number}") <= 1


def two_keys_apart() -> tuple[bytes, bytes]:
    """Two keys of different partitions of the topic."""
    topic = get_settings().queue("slow").topic
    found: dict[int | None, bytes] = {}
    for number in range(100):
        key = b"key %d" % number
        answers = get_transport().publish([OutgoingRecord(topic, b"{}", key)])
        found.setdefault(answers[0].partition, key)
        if len(found) == 2:
            break
    one, other = found.values()
    return one, other


@pytest.mark.parametrize(
    "transport", ["memory", "database", pytest.param("kafka", marks=pytest.mark.kafka)]
)
def test_a_hot_key_leaves_room_for_others(configure, transport):
    """On a log, for those of other partitions: what lies behind it in its own is not seen."""
    # Given
    configure(transport, MAX_OUTSTANDING=160)
    hot, other = (b"hot", b"other") if transport == "database" else two_keys_apart()
    publish("quick", FIRST, key=hot)
    publish("quick", *[MORE] * 600, key=hot)
    with Working() as working:
        working.fills()
        # When
        publish("quick", OTHER, key=other)
        # Then
        assert working.begins(lambda begun: "other" in begun)
        assert working.slow_begun() == 1


# --- The limits -----------------------------------------------------------------------------------

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)


NO_PARTITIONS = frozenset[TopicPartition]()


def plan(held: dict, *, free: int, most: int = 800, room=(), uncommitted=(), paused=(), lanes=8):
    """What may be fetched, and the full partitions, of a worker that reads two topics."""
    return plan_fetch(
        most,
        [A0, A1, B0],
        held,
        free,
        room=dict(room),
        uncommitted=dict(uncommitted),
        paused=paused,
        is_alone=False,
        lanes=lanes,
    )


@pytest.mark.parametrize(("held", "planned"), [(700, (100, NO_PARTITIONS)), (800, (0, {A0}))])
def test_the_only_topic_may_have_all_the_room(held, planned):
    alone = {"room": {}, "uncommitted": {}, "paused": (), "is_alone": True, "lanes": 8}
    assert plan_fetch(800, [A0], {A0: held}, 800 - held, **alone) == planned


@pytest.mark.parametrize(
    ("most", "free", "planned"), [(800, 800, 100), (80, 80, 16), (80, 12, 6), (8, 8, 4), (1, 1, 1)]
)
def test_a_poll_fetches_an_eighth_of_the_room_or_two_records_for_each_lane(most, free, planned):
    """Of what is free, half for each of two topics."""
    assert plan({}, free=free, most=most)[0] == planned


@pytest.mark.parametrize(("most", "unsettled"), [(16, 14), (60, 53), (100, 88), (800, 700)])
@pytest.mark.parametrize("lanes", [1, 8, 64])
def test_a_log_is_read_no_further_whatever_partition_the_records_come_from(most, unsettled, lanes):
    """Another partition has more room; the broker says whose records come."""
    count, full = plan({}, free=most, most=most, uncommitted={A0: unsettled, B0: 0}, lanes=lanes)
    assert A0 in full or unsettled + count <= most


def test_a_topic_holds_no_more_than_it_leaves_free():
    assert plan({A0: 199, A1: 199}, free=402) == (100, NO_PARTITIONS)
    assert plan({A0: 199, A1: 199}, free=398) == (100, {A0, A1})


def test_a_full_topic_is_read_again_when_it_holds_much_less():
    paused = {A0, A1}
    assert plan({A0: 80, A1: 81}, free=639, paused=paused) == (100, {A0, A1})
    assert plan({A0: 79, A1: 79}, free=642, paused=paused) == (100, NO_PARTITIONS)


def test_one_partition_leaves_half_of_its_topics_room_to_the_others():
    assert plan({A0: 200}, free=600) == (100, {A0})


def test_a_poll_fetches_an_eighth_of_the_room_at_most():
    assert plan({}, free=800)[0] == 100
    assert plan({}, free=2, most=2)[0] == 1


def test_of_a_topic_no_more_is_fetched_than_could_start_soon():
    assert plan({}, free=800, room={"a": 3, "b": 0}) == (3, {B0})
    assert plan({}, free=800, room={"a": 3}) == (100, NO_PARTITIONS)
    assert plan({}, free=800, room={"a": 0, "b": 0}) == (0, {A0, A1, B0})
    held = {A0: 100, A1: 99}
    assert plan(held, free=601, room={"a": 3}, paused={A0, A1})[1] == set(), "it has room again"


def test_however_little_room_there_is_a_topic_that_holds_nothing_is_read():
    assert plan({A0: 4}, free=0, most=4) == (1, {A0, A1})


def test_a_key_of_large_values_counts_by_its_bytes():
    # Given a scheduler for which 100 bytes count as one record
    scheduler = GroupScheduler(1, group_size=10, budget=GroupBudget(1.0), record_bytes=100)
    queue, subscription = get_settings().queue("default"), Silent()
    for number, (key, size) in enumerate([(b"k", 250), (b"k", 250), (b"other", 90)]):
        record = Record("a", 0, number, key, b"x" * size, {})
        unread = MessageError("invalid", "no")
        scheduler.put([RefusedRecord(record, subscription, queue, "tests", unread)])
    # Then
    assert scheduler.load_of(subscription) == ({A0: 7}, 7, set())
    assert scheduler.keys_waiting(subscription, 6) == {("a", b"k")}
    assert scheduler.keys_waiting(subscription, 7) == set()
    # When the first has run
    group = scheduler.take(0)
    scheduler.finish(group)
    assert scheduler.load_of(subscription)[1] == 7 - sum(d.weight for d in group.deliveries)
    # And the rest is another's
    scheduler.discard([A0], subscription)
    assert scheduler.load_of(subscription) == ({}, 0, set())


def test_a_log_is_read_no_further_than_a_crash_may_repeat():
    assert A0 not in plan({A0: 1}, free=799, uncommitted={A0: 700})[1]
    assert A0 in plan({A0: 1}, free=799, uncommitted={A0: 701})[1]
    assert A0 in plan({A0: 1}, free=799, uncommitted={A0: 401}, paused={A0})[1]
    assert A0 not in plan({A0: 1}, free=799, uncommitted={A0: 400}, paused={A0})[1]
