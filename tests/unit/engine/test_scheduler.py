"""The scheduler: one delivery of a key at a time, in order; keys in parallel; groups that adapt."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kjo_django.clock import Clock
from kjo_django.conf import get_settings
from kjo_django.engine.attempt import Delivery, Mode, RefusedRecord
from kjo_django.engine.scheduler import CONCURRENT_GROUP, Group, GroupScheduler, QueueLimit
from kjo_django.exceptions import MessageError
from kjo_django.limits.permits import LimitState
from kjo_django.registry import Handler, HandlerOptions
from kjo_django.round_trips import GroupBudget
from kjo_django.transports.base import Record, Subscription, TopicPartition
from tests.clocks import SetClock
from tests.unit.deliveries import NAMELESS, Silent
from tests.waiting import PATIENCE, wait_until

SUBSCRIPTION = Silent()
_offsets = itertools.count()


def handler(name: str = "fast", *, mode: Mode = Mode.ATOMIC) -> Handler:
    async def coroutine() -> None: ...

    def function() -> None: ...

    return Handler(
        coroutine if mode is Mode.CONCURRENT else function,
        HandlerOptions(name=name, atomic=mode is Mode.ATOMIC),
    )


FAST, SLOW = handler("fast"), handler("slow")


def delivery(
    key: str | None = None,
    *,
    handler: Handler = FAST,
    queue: str = "q",
    partition: int = 0,
    problem: MessageError | None = None,
    subscription: Subscription = SUBSCRIPTION,
    level: int = 0,
) -> Delivery:
    offset = next(_offsets)
    record = Record(queue, partition, offset, key.encode() if key else None, b"{}", {})
    conf = get_settings().queue(queue)
    if problem is not None:
        return RefusedRecord(record, subscription, conf, "tests", problem, level=level)
    return Delivery(record, subscription, conf, "tests", NAMELESS, handler, level)


def lanes_of(
    count: int = 1, *, size: int = 100, budget: float = 1.0, known: dict[str, float] | None = None,
    **options,
) -> GroupScheduler:  # fmt: skip
    """It knows how long handlers take: ``slow`` twice the budget, ``fast`` a hundredth."""
    lanes = GroupScheduler(count, group_size=size, budget=GroupBudget(budget), **options)
    for name, seconds in {"fast": 0.01, "slow": 2.0, **(known or {})}.items():
        for _ in range(200):
            lanes.measure(name, seconds)
    return lanes


def take(lanes: GroupScheduler) -> Group:
    group = lanes.take(timeout=0)
    assert group is not None, "nothing to take"
    return group


def offsets(deliveries: Iterable[Delivery]) -> list[int]:
    return [one.record.offset for one in deliveries]


# --- Keys -----------------------------------------------------------------------------------------


def test_a_key_is_in_one_lane_at_a_time():
    # Given
    lanes = lanes_of(2, size=1)
    first, second = delivery("a"), delivery("a")
    lanes.put([first, second])
    # When
    group = take(lanes)
    # Then
    assert group.deliveries == [first]
    assert lanes.take(timeout=0) is None
    lanes.finish(group)
    assert take(lanes).deliveries == [second]


def test_other_keys_go_on_meanwhile():
    lanes = lanes_of(2, size=1)
    lanes.put([delivery("a"), delivery("a"), delivery("b")])
    assert take(lanes).deliveries[0].record.key == b"a"
    assert take(lanes).deliveries[0].record.key == b"b"
    assert lanes.take(timeout=0) is None


def test_the_same_key_of_two_topics_is_two_keys():
    lanes = lanes_of(2, size=1)
    lanes.put([delivery("a", queue="q"), delivery("a", queue="r")])
    assert {take(lanes).queue, take(lanes).queue} == {"q", "r"}


def test_a_record_without_a_key_that_is_handed_out_again_waits_until_its_first_has_ended():
    """After a rebalance that gave its partition back, or on a new subscription: nothing but the
    lanes keeps a worker from running it beside itself."""
    # Given
    lanes = lanes_of(2, size=1)
    first = delivery(None)
    record = replace(first.record, epoch=2)
    again = Delivery(record, Silent(), first.queue, "tests", NAMELESS, FAST)
    lanes.put([first])
    group = take(lanes)
    # When
    lanes.put([again])
    # Then
    assert lanes.take(timeout=0) is None
    lanes.finish(group)
    assert take(lanes).deliveries == [again]


def test_records_without_a_key_ask_for_no_order():
    lanes = lanes_of(2, size=1)
    lanes.put([delivery(None), delivery(None)])
    assert take(lanes) and take(lanes)


def test_a_group_keeps_the_order_of_each_key():
    lanes = lanes_of(1)
    deliveries = [delivery(key) for key in "abcabcaab"]
    lanes.put(deliveries)
    group = take(lanes)
    for key in (b"a", b"b", b"c"):
        of_key = [d for d in deliveries if d.record.key == key]
        assert [d for d in group.deliveries if d.record.key == key] == of_key


# --- Groups ---------------------------------------------------------------------------------------


def test_fast_handlers_share_a_group_up_to_the_budget():
    lanes = lanes_of(1, budget=1.0, known={"fast": 0.1})
    lanes.put(delivery("a") for _ in range(50))
    assert 9 <= len(take(lanes).deliveries) <= 11


def test_fast_handlers_share_a_group_up_to_its_size():
    lanes = lanes_of(1, size=7)
    lanes.put(delivery(str(n)) for n in range(50))
    assert len(take(lanes).deliveries) == 7


@pytest.mark.parametrize("key", ["same", None])
def test_a_slow_handler_runs_alone(key):
    lanes = lanes_of(1)
    lanes.put(delivery(key, handler=SLOW) for _ in range(3))
    assert len(take(lanes).deliveries) == 1


def test_a_slow_one_is_not_added_to_fast_ones():
    lanes = lanes_of(1)
    lanes.put([delivery("a"), delivery("a"), delivery("a", handler=SLOW), delivery("a")])
    group = take(lanes)
    assert len(group.deliveries) == 2
    lanes.finish(group)
    assert [d.kind for d in take(lanes).deliveries] == ["slow"]


def test_an_unknown_handler_runs_alone_and_what_it_took_decides_how_many_follow():
    # Given
    lanes = lanes_of(1)
    unknown = handler("unknown")
    lanes.put(delivery(str(n), handler=unknown) for n in range(20))
    # When
    group = take(lanes)
    assert len(group.deliveries) == 1
    lanes.measure("unknown", 0.001)
    lanes.finish(group)
    # Then
    assert len(take(lanes).deliveries) == 19


def test_a_handler_that_turned_slow_is_believed_at_once_and_one_that_turned_fast_later():
    lanes = lanes_of(1, known={"fast": 0.01})
    lanes.measure("fast", 10.0)
    lanes.put(delivery(str(n)) for n in range(20))
    group = take(lanes)
    assert len(group.deliveries) == 1
    lanes.measure("fast", 0.01)
    lanes.finish(group)
    assert len(take(lanes).deliveries) == 1


def test_a_group_is_of_one_mode():
    # Given
    poison = MessageError("invalid", "x")
    kinds = [
        delivery("a"),
        delivery("a", handler=handler("plain", mode=Mode.PLAIN)),
        delivery("a", handler=handler("async", mode=Mode.CONCURRENT)),
        delivery("a", problem=poison),
        delivery("a", problem=poison),
    ]
    lanes = lanes_of(1)
    lanes.put(kinds)
    # When
    modes = []
    for _ in range(4):
        group = take(lanes)
        assert {d.mode for d in group.deliveries} == {group.mode}
        modes.append((group.mode, len(group.deliveries)))
        lanes.finish(group)
    # Then: in the order of the key
    assert modes == [(Mode.ATOMIC, 1), (Mode.PLAIN, 1), (Mode.CONCURRENT, 1), (Mode.POISON, 2)]


def test_coroutines_run_together_whatever_the_size_but_one_of_each_key():
    lanes = lanes_of(1, size=3)
    concurrent = handler("async", mode=Mode.CONCURRENT)
    lanes.put(delivery(str(n), handler=concurrent) for n in range(50))
    lanes.put(delivery("same", handler=concurrent) for _ in range(5))
    group = take(lanes)
    assert len(group.deliveries) == 51
    lanes.put(delivery(f"more {n}", handler=concurrent) for n in range(CONCURRENT_GROUP + 10))
    assert len(take(lanes_with_the_rest(lanes, group)).deliveries) == CONCURRENT_GROUP


def lanes_with_the_rest(lanes: GroupScheduler, group: Group) -> GroupScheduler:
    lanes.finish(group)
    return lanes


def test_idle_lanes_get_their_share_before_one_takes_more():
    lanes = lanes_of(4)
    lanes.put(delivery(str(n)) for n in range(40))
    assert [len(take(lanes).deliveries) for _ in range(4)] == [10, 10, 10, 10]


def test_quick_jobs_that_are_ready_together_run_in_one_group_whatever_lanes_are_idle():
    lanes = lanes_of(4, known={"fast": 0.0001})
    lanes.put(delivery(str(n)) for n in range(40))
    assert len(take(lanes).deliveries) == 40


def test_more_quick_jobs_than_one_group_holds_are_shared_by_as_many_lanes_as_they_fill():
    lanes = lanes_of(4, size=100, known={"fast": 0.000001})
    lanes.put(delivery(str(n)) for n in range(150))
    assert [len(take(lanes).deliveries) for _ in range(2)] == [75, 75]


def test_a_lane_is_woken_only_while_something_is_left():
    # Given two lanes that wait
    lanes = lanes_of(2, known={"fast": 0.0001})
    groups: list[Group | None] = []
    threads = [threading.Thread(target=lambda: groups.append(lanes.take())) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(lanes.sleeping) == 2)
    # When ten quick jobs come together
    lanes.put(delivery(str(n)) for n in range(10))
    wait_until(lambda: groups)
    # Then the second lane goes on waiting
    assert len(groups[0].deliveries) == 10
    assert len(lanes.sleeping) == 1
    lanes.stop()
    for thread in threads:
        thread.join(PATIENCE)


def test_the_lane_that_ran_last_is_the_one_that_runs_next():
    """Each of sixteen lanes opened a session of its own for one job now and then."""
    # Given three lanes, of which each has begun to wait after the one before
    lanes = lanes_of(3)
    ran: list[int] = []

    def work(number: int) -> None:
        while (group := lanes.take()) is not None:
            ran.append(number)
            lanes.finish(group)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
    for count, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda count=count: len(lanes.sleeping) == count)
    # When jobs come one by one
    for number in range(5):
        lanes.put([delivery(str(number))])
        wait_until(lambda number=number: len(ran) > number and len(lanes.sleeping) == 3)
    # Then
    assert ran == [2] * 5
    lanes.stop()
    for thread in threads:
        thread.join(PATIENCE)


def test_a_share_counts_keys_so_one_busy_key_is_not_split():
    lanes = lanes_of(2)
    lanes.put(delivery("a") for _ in range(10))
    lanes.put([delivery("b")])
    assert sorted(len(take(lanes).deliveries) for _ in range(2)) == [1, 10]


# --- Deferred -------------------------------------------------------------------------------------


def test_deferred_deliveries_come_back_first_and_in_order():
    # Given
    lanes = lanes_of(1)
    deliveries = [delivery("a") for _ in range(4)]
    lanes.put(deliveries)
    group = take(lanes)
    late = delivery("a")
    lanes.put([late])
    # When
    lanes.finish(group, [deliveries[3], deliveries[1]])
    # Then
    assert take(lanes).deliveries == [deliveries[1], deliveries[3], late]


def test_deferred_deliveries_wait_out_their_delay_with_their_key_behind_them():
    # Given
    lanes = lanes_of(2, size=1)
    first, second, other = delivery("a"), delivery("a"), delivery("b")
    lanes.put([first, second, other])
    # When
    started = time.monotonic()
    lanes.finish(take(lanes), [first], delay=0.05)
    # Then
    assert take(lanes).deliveries == [other]
    assert lanes.take(timeout=5).deliveries == [first]
    assert time.monotonic() - started >= 0.05


def test_what_was_done_does_not_come_back():
    lanes = lanes_of(1)
    deliveries = [delivery("a") for _ in range(3)]
    lanes.put(deliveries)
    lanes.finish(take(lanes), deliveries[1:2])
    assert take(lanes).deliveries == deliveries[1:2]


# --- Control --------------------------------------------------------------------------------------


def test_what_waits_of_a_revoked_partition_is_forgotten():
    # Given
    lanes = lanes_of(1)
    lanes.put([delivery("a", partition=0), delivery("a", partition=1), delivery("b", partition=1)])
    # When
    count = len(lanes.discard([TopicPartition("q", 1)], SUBSCRIPTION))
    # Then
    assert (count, lanes.outstanding) == (2, 1)
    group = take(lanes)
    assert [d.record.partition for d in group.deliveries] == [0]
    lanes.finish(group)
    assert lanes.take(timeout=0) is None
    assert lanes.outstanding == 0


def test_what_another_group_reads_of_a_revoked_partition_stays():
    """Two groups in one worker read one topic: nobody would bring the other's records again."""
    # Given
    lanes = lanes_of(1)
    mine, theirs = delivery("a"), delivery("a", subscription=Silent())
    lanes.put([mine, theirs])
    # When
    dropped = lanes.discard([TopicPartition("q", 0)], SUBSCRIPTION)
    # Then
    assert dropped == [mine]
    assert take(lanes).deliveries == [theirs]


def test_a_key_is_usable_again_after_its_partition_was_discarded():
    lanes = lanes_of(2, size=1)
    lanes.put([delivery("a"), delivery("a")])
    running = take(lanes)
    lanes.discard([TopicPartition("q", 0)], SUBSCRIPTION)
    again = delivery("a")
    lanes.put([again])
    assert lanes.take(timeout=0) is None, "the key is still running"
    lanes.finish(running)
    assert take(lanes).deliveries == [again]


def test_one_waits_for_what_runs_of_a_partition_and_no_other():
    lanes = lanes_of(2, size=1)
    lanes.put([delivery("a", partition=0)])
    group = take(lanes)
    assert lanes.wait_for([TopicPartition("q", 1)], timeout=0)
    assert not lanes.wait_for([TopicPartition("q", 0)], timeout=0)
    assert not lanes.wait_for(None, timeout=0)
    lanes.finish(group)
    assert lanes.wait_for([TopicPartition("q", 0)], timeout=0)
    assert lanes.wait_for(None, timeout=0)


def test_a_held_partition_rests_and_the_others_go_on():
    """KJO-76."""
    lanes = lanes_of(2, size=1)
    held, free = delivery("a", partition=0), delivery("b", partition=1)
    lanes.put([held, free])
    started = time.monotonic()
    lanes.pause_partition(TopicPartition("q", 0), 0.05)
    assert take(lanes).deliveries == [free]
    assert lanes.take(timeout=5).deliveries == [held]
    assert time.monotonic() - started >= 0.05


def test_a_shorter_pause_does_not_end_a_longer_one():
    lanes = lanes_of(1, size=1)
    lanes.pause_partition(TopicPartition("q", 0), 60)
    lanes.pause_partition(TopicPartition("q", 0), 1)
    assert lanes.paused_partitions()[TopicPartition("q", 0)] > 50


def test_it_tells_how_long_what_needs_only_a_lane_has_waited_for_one():
    # Given
    clock = SetClock()
    lanes = lanes_of(1, size=1, clock=clock)
    at_once, behind_it = delivery("a"), delivery("a")
    lanes.put([at_once, behind_it, delivery("b"), delivery("c", partition=1)])
    lanes.put([delivery("d", queue="r")])
    lanes.set_paused(["r"])
    group = take(lanes)
    assert group.deliveries == [at_once]
    # When, then: what waits for the end of its key is not among them
    clock.advance(7)
    assert lanes.waits_for_lanes() == {TopicPartition("q", 0): 7, TopicPartition("q", 1): 7}
    # When its key is free, and the other one of its partition has run
    lanes.finish(group)
    other = take(lanes)
    lanes.finish(other)
    clock.advance(1)
    # Then
    assert lanes.waits_for_lanes() == {TopicPartition("q", 0): 1, TopicPartition("q", 1): 8}


def test_a_paused_queue_starts_nothing_until_it_is_resumed():
    lanes = lanes_of(2, size=1)
    lanes.put([delivery("a", queue="q"), delivery("b", queue="r")])
    lanes.set_paused(["q"])
    assert take(lanes).queue == "r"
    assert lanes.take(timeout=0) is None
    lanes.set_paused([])
    assert take(lanes).queue == "q"


def test_what_falls_due_is_taken_although_the_lane_that_put_it_off_runs_on():
    """A lane that began to wait before does not know when to look: somebody has to tell it."""
    # Given: two lanes, of which the second waits for anything to come
    lanes = lanes_of(2, size=1)
    lanes.put([delivery("a")])
    first = take(lanes)
    taken: list[Group | None] = []
    thread = threading.Thread(target=lambda: taken.append(lanes.take()), daemon=True)
    thread.start()
    wait_until(lambda: lanes.sleeping)
    # When: the first puts off what it had, and goes on with something else that never ends
    lanes.finish(first, first.deliveries, delay=0.2)
    other = delivery("b")
    with mock.patch.object(lanes, "sleeping", []):
        lanes.put([other])  # unheard by the second
    assert take(lanes).deliveries == [other]
    # Then
    thread.join(PATIENCE)
    assert [group.deliveries for group in taken if group] == [first.deliveries]


def test_a_resume_wakes_a_lane_that_waits():
    lanes = lanes_of(1)
    lanes.set_paused(["q"])
    lanes.put([delivery("a")])
    taken: list[Group | None] = []
    thread = threading.Thread(target=lambda: taken.append(lanes.take(timeout=10)))
    thread.start()
    lanes.set_paused([])
    thread.join(PATIENCE)
    assert taken[0] is not None


def test_a_queue_runs_no_more_groups_than_its_limit():
    lanes = lanes_of(4, size=1)
    lanes.set_limits({"q": QueueLimit(2, 2), "r": QueueLimit(4, 4)})
    lanes.put(delivery(str(n), queue="q") for n in range(4))
    lanes.put([delivery("x", queue="r")])
    groups = [take(lanes) for _ in range(3)]
    assert Counter(group.queue for group in groups) == {"q": 2, "r": 1}
    assert lanes.take(timeout=0) is None
    lanes.finish(next(group for group in groups if group.queue == "q"))
    assert take(lanes).queue == "q"


def test_queues_take_turns():
    lanes = lanes_of(1, size=1)
    lanes.put(delivery(str(n), queue="q") for n in range(10))
    lanes.put([delivery("x", queue="r")])
    queues = []
    for _ in range(2):
        group = take(lanes)
        queues.append(group.queue)
        lanes.finish(group)
    assert sorted(queues) == ["q", "r"]


def test_after_stop_every_lane_leaves_and_what_waits_stays():
    # Given
    lanes = lanes_of(3)
    taken: list[Group | None] = []
    threads = [threading.Thread(target=lambda: taken.append(lanes.take())) for _ in range(3)]
    for thread in threads:
        thread.start()
    # When
    lanes.stop()
    for thread in threads:
        thread.join(PATIENCE)
    # Then
    assert taken == [None] * 3
    lanes.put([delivery("a")])
    assert lanes.take() is None
    assert lanes.is_stopped
    assert (lanes.waiting, lanes.outstanding) == (1, 1)


def test_counts_tell_what_waits_and_what_runs():
    lanes = lanes_of(2, size=3)
    lanes.put(delivery("a") for _ in range(5))
    assert (lanes.waiting, lanes.running, lanes.outstanding) == (5, 0, 5)
    group = take(lanes)
    assert (lanes.waiting, lanes.running, lanes.outstanding) == (2, 1, 5)
    lanes.finish(group, group.deliveries[:1])
    assert (lanes.waiting, lanes.running, lanes.outstanding) == (3, 0, 3)


# --- Under load -----------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    keys=st.lists(st.sampled_from(["a", "b", "c", None]), max_size=40),
    choices=st.lists(st.integers(0, 5), min_size=1),
    size=st.integers(1, 5),
)
def test_whatever_is_taken_and_deferred_each_ends_once_and_keys_keep_their_order(
    keys, choices, size
):
    # Given
    lanes = lanes_of(3, size=size)
    deliveries = [delivery(key) for key in keys]
    lanes.put(deliveries)
    chosen = itertools.cycle(choices)
    running: list[Group] = []
    ended: list[Delivery] = []
    patience = 20
    # When: a scheduler of whims
    while len(ended) < len(deliveries) or running:
        choice = next(chosen)
        group = lanes.take(timeout=0) if choice < 3 or not running else None
        if group is not None:
            running.append(group)
            continue
        group = running.pop(choice % len(running))
        # Now and then everything behind some point is put off.
        cut = choice % (len(group.deliveries) + 1) if patience > 0 else len(group.deliveries)
        patience -= 1
        ended += group.deliveries[:cut]
        lanes.finish(group, group.deliveries[cut:])
    # Then
    assert sorted(offsets(ended)) == offsets(deliveries)
    for key in (b"a", b"b", b"c"):
        of_key = [d for d in ended if d.record.key == key]
        assert offsets(of_key) == sorted(offsets(of_key))
    assert (lanes.waiting, lanes.running, lanes.outstanding) == (0, 0, 0)


def test_threads_hand_out_everything_once_one_of_a_key_at_a_time_and_in_order():
    # Given
    count, keys = 4000, 17
    lanes = lanes_of(8, size=20)
    deliveries = [delivery(str(n % keys) if n % 5 else None) for n in range(count)]
    busy: set[bytes] = set()
    seen: dict[bytes | None, list[int]] = defaultdict(list)
    overlaps: list[bytes] = []
    guard = threading.Lock()
    all_done = threading.Event()
    ended = 0

    def work(number: int) -> None:
        nonlocal ended
        turn = 0
        while (group := lanes.take()) is not None:
            own = {d.record.key for d in group.deliveries if d.record.key is not None}
            with guard:
                overlaps.extend(own & busy)
                busy.update(own)
            turn += 1
            cut = len(group.deliveries) // 2 if turn % 7 == 0 else len(group.deliveries)
            with guard:
                for one in group.deliveries[:cut]:
                    seen[one.record.key].append(one.record.offset)
                busy.difference_update(own)
                ended += cut
                if ended == count:
                    all_done.set()
            lanes.finish(group, group.deliveries[cut:], 0.001 if turn % 2 else 0.0)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    # When
    for thread in threads:
        thread.start()
    for start in range(0, count, 100):
        lanes.put(deliveries[start : start + 100])
    assert all_done.wait(PATIENCE)
    lanes.stop()
    for thread in threads:
        thread.join(PATIENCE)
    # Then
    assert overlaps == []
    for key, found in seen.items():
        if key is not None:
            assert found == sorted(found)
    assert sorted(itertools.chain(*seen.values())) == offsets(deliveries)
    assert lanes.outstanding == 0


class Elsewhere(Silent):
    """Its partitions have gone to another consumer."""

    def holds(self, record: Record) -> bool:
        return False


@pytest.mark.parametrize("mode", [Mode.ATOMIC, Mode.CONCURRENT])
def test_what_is_deferred_after_its_partition_has_gone_does_not_run_again_here(mode):
    # Given
    lanes = lanes_of(2)
    gone = delivery("a", handler=handler(mode=mode), subscription=Elsewhere())
    lanes.put([gone])
    group = take(lanes)
    # When
    lanes.finish(group, group.deliveries, 0.0)
    # Then
    assert lanes.take(timeout=0) is None
    assert lanes.outstanding == 0
    assert lanes.load_of(gone.subscription)[0] == {}


def test_suspects_run_one_at_a_time_and_back_to_back_while_others_go_on():
    # Given three in whose runs a worker died, found in the groups of three lanes, and another one
    lanes = lanes_of(3, clock=(clock := Clock()))
    clock.monotonic = lambda: 0.0
    found = [delivery() for _ in range(3)]
    lanes.put(found)
    groups = [take(lanes) for _ in range(3)]
    lanes.put([other := delivery()])
    for one in found:
        one.is_orphan = True
    for group in groups:
        lanes.finish(group, group.deliveries, 1.0)
    # When
    beside, first = take(lanes), take(lanes)
    # Then one of them runs, beside what is not one of them
    assert (beside.deliveries, first.deliveries) == ([other], found[:1])
    assert lanes.take(timeout=0) is None
    # And the next when it has ended; one that is deferred waits as others do
    found[0].is_orphan = False
    lanes.finish(first, first.deliveries, 1.0)
    second = take(lanes)
    assert second.deliveries == found[1:2]
    lanes.finish(second)
    assert take(lanes).deliveries == found[2:]
    assert lanes.take(timeout=0) is None


# --- Weights and levels of priority ---------------------------------------------------------------


def run_all(lanes: GroupScheduler, count: int) -> list[Delivery]:
    """Run so many groups of one delivery each, one after the other."""
    ran = []
    for _ in range(count):
        group = take(lanes)
        lanes.finish(group)
        ran += group.deliveries
    return ran


def backlog(lanes: GroupScheduler, count: int = 400, **options) -> None:
    lanes.put([delivery(handler=SLOW, **options) for _ in range(count)])


def test_two_queues_with_a_backlog_share_the_lanes_by_their_weights():
    lanes = lanes_of(1)
    lanes.set_weights({"urgent": 4})
    backlog(lanes, queue="urgent")
    backlog(lanes, queue="bulk")
    counts = Counter(one.queue.name for one in run_all(lanes, 100))
    assert counts == {"urgent": 80, "bulk": 20}


def test_an_idle_queue_is_next_whatever_the_weight_of_the_busy_one():
    """So it waits for one handler at most."""
    lanes = lanes_of(1)
    lanes.set_weights({"busy": 100})
    backlog(lanes, queue="busy")
    for _ in range(5):
        run_all(lanes, 7)
        lanes.put([delivery(queue="idle")])
        assert [one.queue.name for one in run_all(lanes, 1)] == ["idle"]


def test_a_queue_that_was_idle_for_long_has_saved_up_nothing():
    lanes = lanes_of(1)
    lanes.set_weights({"busy": 2})
    backlog(lanes, queue="busy")
    run_all(lanes, 200)
    backlog(lanes, queue="late")
    counts = Counter(one.queue.name for one in run_all(lanes, 30))
    assert 9 <= counts["late"] <= 11


@pytest.mark.promise("no-starvation")
def test_what_is_urgent_starts_before_what_waited_longer_and_the_low_ones_go_on():
    lanes = lanes_of(1)
    for level in (-1, 0, 1, 2):
        backlog(lanes, level=level)
    counts = Counter(one.level for one in run_all(lanes, 340))
    assert counts == {2: 256, 1: 64, 0: 16, -1: 4}
    # And of an idle level the first is next
    quiet = lanes_of(1)
    backlog(quiet, level=-1)
    run_all(quiet, 50)
    quiet.put([delivery(level=2)])
    assert [one.level for one in run_all(quiet, 1)] == [2]


def test_equal_queues_take_turns_as_without_weights():
    lanes = lanes_of(1)
    lanes.set_weights({"a": 1})
    for queue in ("a", "b", "c"):
        backlog(lanes, queue=queue)
    assert [one.queue.name for one in run_all(lanes, 6)] == ["a", "b", "c", "a", "b", "c"]


# --- Limits ---------------------------------------------------------------------------------------


def later(lanes: GroupScheduler, clock: SetClock, moments: Iterable[float]) -> list[Delivery]:
    """Deliveries that are deferred until moments of their own, for their limits."""
    deliveries = [delivery() for _ in moments]
    lanes.put(deliveries)
    group = take(lanes)
    for each in group.deliveries:
        each.limit_state = LimitState(asks_again=True)
    at = [clock.monotonic() + moment for moment in moments]
    lanes.put_off(dict(zip(group.deliveries, at, strict=True)))
    lanes.finish(group, group.deliveries, 1.0)
    return group.deliveries


def test_what_its_limits_let_start_comes_before_what_is_only_met_and_the_first_of_it_first():
    clock = SetClock()
    lanes = lanes_of(clock=clock)
    first, second = later(lanes, clock, [1.0, 2.0])
    lanes.put([delivery()])
    clock.advance(3.0)
    assert take(lanes).deliveries == [first, second]


def test_what_may_start_earlier_comes_up_earlier_and_once():
    clock = SetClock()
    lanes = lanes_of(clock=clock)
    (waiting,) = later(lanes, clock, [10.0])
    lanes.hasten({waiting: clock.monotonic() + 2.0})
    # Never later
    lanes.hasten({waiting: clock.monotonic() + 20.0})
    assert lanes.take(timeout=0) is None
    clock.advance(2.0)
    group = take(lanes)
    assert group.deliveries == [waiting]
    # What runs is not hastened.
    lanes.hasten({waiting: clock.monotonic()})
    lanes.finish(group)
    clock.advance(20.0)
    assert lanes.take(timeout=0) is None
    assert lanes.outstanding == 0


def test_a_lane_that_waits_for_the_first_moment_notices_an_earlier_one():
    lanes = lanes_of()
    (waiting,) = later(lanes, Clock(), [3600.0])
    taken: list[Group | None] = []
    thread = threading.Thread(target=lambda: taken.append(lanes.take(PATIENCE)))
    thread.start()
    wait_until(lambda: lanes._watched_until < float("inf"))
    lanes.hasten({waiting: time.monotonic()})
    thread.join(PATIENCE)
    assert [group.deliveries for group in taken if group] == [[waiting]]
