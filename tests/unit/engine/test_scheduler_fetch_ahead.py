"""How much a worker fetches ahead of its lanes, and what it gives back: nothing that another worker
could start waits for long behind its long jobs.

In the small tier: the scheduler alone, its clock goes on when a test says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kjo_django.engine.attempt import Delivery, Mode
from kjo_django.engine.scheduler import (
    AHEAD,
    GROUPS_AHEAD,
    LEAST_OF_A_KEY,
    STUCK_AFTER,
    Group,
    GroupScheduler,
    QueueLimit,
)
from kjo_django.limits.permits import LimitState
from kjo_django.transports.base import TopicPartition
from tests.clocks import SetClock
from tests.unit.deliveries import Silent
from tests.unit.engine.test_scheduler import delivery, handler, lanes_of, offsets, take

COROUTINE = handler("coroutine", mode=Mode.CONCURRENT)


class Ours(Silent):
    """A subscription whose records others can have."""

    release_keeps_order = True


OURS = Ours()


def deliveries(count: int, key: str | None = None, **options) -> list[Delivery]:
    return [delivery(key, subscription=OURS, **options) for _ in range(count)]


QUEUES = ["q", "r", "long"]


def room(lanes: GroupScheduler, queue: str = "q") -> int:
    return lanes.room_of(OURS, QUEUES)[queue]


def scheduler(count: int = 3, **options) -> tuple[GroupScheduler, SetClock]:
    clock = SetClock()
    return lanes_of(count, size=10, clock=clock, **options), clock


def busy(lanes: GroupScheduler, count: int = 3, **options) -> list[Group]:
    """Let each lane take one delivery."""
    groups = []
    for _ in range(count):
        lanes.put(deliveries(1, **options))
        groups.append(take(lanes))
    return groups


# --- Fetching -------------------------------------------------------------------------------------


def test_a_worker_with_free_lanes_has_room_for_two_groups_of_each():
    lanes, _ = scheduler(3)
    assert room(lanes) == 3 * GROUPS_AHEAD, "of a handler that it does not know, one each"
    lanes.put(deliveries(1))
    lanes.finish(take(lanes))
    assert room(lanes) == 3 * GROUPS_AHEAD * 10, "of a quick one as many as a group may have"


def test_as_many_start_at_once_as_lanes_are_free():
    lanes, clock = scheduler(3)
    assert lanes.count_starts(QUEUES) == 3
    (group,) = busy(lanes, 1)
    assert lanes.count_starts(QUEUES) == 2
    # None while another one waits
    lanes.put(deliveries(1))
    assert lanes.count_starts(QUEUES) == 0
    lanes.finish(take(lanes))
    # Nor while what comes might be of a partition that is paused
    lanes.finish(group, group.deliveries, delay=60)
    assert lanes.count_starts(QUEUES) == 0
    clock.advance(60)
    lanes.finish(take(lanes))
    lanes.pause_partition(TopicPartition("q", 0), 60)
    assert lanes.count_starts(QUEUES) == 0


def test_no_more_start_at_once_than_the_limits_of_a_queue_let_run():
    lanes, _ = scheduler(3)
    lanes.set_limits({"q": QueueLimit(1, 1)})
    assert lanes.count_starts(QUEUES) == 1
    busy(lanes, 1)
    assert lanes.count_starts(QUEUES) == 0
    assert lanes.count_starts(["r"]) == 2
    # Of a queue that is paused nothing is fetched
    lanes.set_paused(["q"])
    assert lanes.count_starts(QUEUES) == 2


def test_coroutines_start_at_once_as_far_as_they_are_started_together():
    lanes, clock = scheduler(3, ramp_up=10)
    busy(lanes, 1, handler=COROUTINE)
    assert lanes.count_starts(["q"]) == 0
    clock.advance(0.1)
    assert lanes.count_starts(["q"]) == 1


def test_what_waits_takes_room_until_half_of_it_has_started():
    lanes, _ = scheduler(3)
    lanes.put(deliveries(3, "a"))
    assert room(lanes) == 3
    lanes.put(deliveries(1, "a"))
    assert room(lanes) == 0, "so few are not fetched by themselves"


def test_a_worker_whose_lanes_are_busy_for_long_has_no_room_for_any_queue():
    lanes, clock = scheduler(3)
    groups = busy(lanes)
    assert room(lanes) > 0
    clock.advance(AHEAD)
    assert room(lanes) == room(lanes, "r") == 0
    # When one lane is free
    lanes.finish(groups[0])
    # Then there is room for what that one could start
    assert room(lanes) == GROUPS_AHEAD * 10
    assert room(lanes, "r") == GROUPS_AHEAD


def test_as_many_may_wait_as_lanes_have_taken_within_a_second():
    # Given a handler of which no two fit into a group
    lanes, clock = scheduler(1, known={"fast": 2.0})
    for _ in range(20):
        lanes.put(deliveries(1))
        lanes.finish(take(lanes))
        clock.advance(0.04)
    assert room(lanes) == 20
    # When nothing more starts, these are forgotten
    clock.advance(AHEAD / 2)
    assert 5 <= room(lanes) <= 15
    clock.advance(AHEAD)
    assert room(lanes) == GROUPS_AHEAD


def test_a_backlog_leaves_room_for_a_queue_that_was_idle():
    # Given lanes that go from one group to the next
    lanes, clock = scheduler(3)
    lanes.put(deliveries(1000))
    groups = [take(lanes) for _ in range(3)]
    for _ in range(20):
        clock.advance(0.1)
        lanes.finish(groups.pop(0))
        groups.append(take(lanes))
    # Then
    assert room(lanes) == 0
    assert room(lanes, "r") == 3 * GROUPS_AHEAD


def test_a_queue_at_its_limit_has_no_room():
    lanes, clock = scheduler(3)
    lanes.set_limits({"q": QueueLimit(1, 100)})
    busy(lanes, 1)
    clock.advance(AHEAD)
    assert room(lanes) == 0
    assert room(lanes, "r") == 2 * GROUPS_AHEAD, "the other lanes are free"


def test_what_another_subscription_brought_takes_no_room():
    lanes, _ = scheduler(3)
    lanes.put(delivery(None) for _ in range(50))
    assert room(lanes) == 3 * GROUPS_AHEAD


def test_keys_that_run_and_orphans_take_no_room():
    lanes, _ = scheduler(3)
    lanes.put(deliveries(50, "a", handler=handler("slow")))
    take(lanes)
    orphans = deliveries(50)
    for one in orphans:
        one.is_orphan = True
    lanes.put(deliveries(1))
    group = take(lanes)
    group.deliveries[0].is_orphan = True
    lanes.finish(group, deferred=group.deliveries)
    assert lanes.waiting == 50
    assert room(lanes) > 0


def test_a_queue_with_coroutines_has_no_bound():
    """They leave their lane, and their number has a limit of its own."""
    lanes, _ = scheduler(1)
    lanes.set_limits({"q": QueueLimit(10, 2)})
    lanes.put(deliveries(50, handler=COROUTINE))
    lanes.finish(group := take(lanes), departed=set(group.deliveries))
    assert "q" not in lanes.room_of(OURS, QUEUES)
    assert lanes.take_stuck(OURS, QUEUES) == []


def test_there_is_room_for_whole_batches():
    # Given calls that take long for a few jobs as for many
    lanes, _ = scheduler(1, known={"batch": 2.0})
    some = deliveries(1, handler=handler("batch"))
    some[0].batch = 100
    lanes.put(some)
    lanes.finish(take(lanes))
    assert room(lanes) == GROUPS_AHEAD * 100


# --- Giving back ----------------------------------------------------------------------------------


def stuck(*waiting: Iterable[Delivery], after: float = STUCK_AFTER) -> GroupScheduler:
    """A worker of one lane that is busy for long, with this behind it."""
    lanes, clock = scheduler(1)
    busy(lanes, 1, queue="long")
    for some in waiting:
        lanes.put(some)
    clock.advance(after)
    return lanes


def test_what_no_lane_can_start_soon_goes_back_when_it_has_waited_for_long():
    waiting = deliveries(5)
    assert stuck(waiting, after=STUCK_AFTER - 0.01).take_stuck(OURS, QUEUES) == []
    lanes = stuck(waiting)
    given: list[Delivery] = []
    lanes.on_discarded = given.extend
    assert set(lanes.take_stuck(OURS, QUEUES)) == set(waiting) == set(given)
    assert lanes.waiting == 0
    assert not lanes.least_priorities(), "it would fetch what is more urgent"
    assert lanes.load_of(OURS)[0] == {TopicPartition("long", 0): 1}, "the one that runs"


def test_what_lanes_could_start_soon_stays_and_the_last_goes():
    # Given lanes that take some, if fewer than they took before
    lanes, clock = scheduler(1, known={"fast": 2.0})
    waiting = deliveries(20)
    lanes.put(waiting)
    clock.advance(STUCK_AFTER)
    # Then
    gone = lanes.take_stuck(OURS, QUEUES)
    assert offsets(gone) == offsets(reversed(waiting[GROUPS_AHEAD:]))
    # And the rest starts
    assert take(lanes).deliveries == waiting[:1]


def test_those_of_a_key_go_together_and_stay_behind_one_that_runs():
    lanes, clock = scheduler(1)
    first, *others = deliveries(3, "a", handler=handler("slow"))
    lanes.put([first, *others])
    take(lanes)
    whole = deliveries(3, "b")
    lanes.put(whole)
    clock.advance(STUCK_AFTER)
    assert lanes.take_stuck(OURS, QUEUES) == whole
    assert lanes.waiting == len(others)


def test_some_stay_whatever_waits_before_them():
    has_slot, was_begun, of_others = deliveries(1)[0], deliveries(1)[0], delivery(None)
    has_slot.limit_state = LimitState(slot_until=1e9)
    was_begun.attempt = object()  # type: ignore[assignment]
    waiting = deliveries(1)
    lanes = stuck([has_slot, was_begun, of_others], waiting)
    assert lanes.take_stuck(OURS, QUEUES) == waiting


def test_jobs_of_a_paused_queue_stay():
    lanes = stuck(deliveries(3))
    lanes.set_paused(["q"])
    assert lanes.take_stuck(OURS, QUEUES) == []


def test_lower_levels_go_first():
    low, high = deliveries(2, level=-1), deliveries(2, level=1)
    lanes, clock = scheduler(1, known={"fast": 2.0})
    lanes.put([*low, *high])
    clock.advance(STUCK_AFTER)
    assert set(lanes.take_stuck(OURS, QUEUES)) == set(low)


def test_records_with_a_key_stay_where_others_would_get_them_behind_later_ones(monkeypatch):
    monkeypatch.setattr(Ours, "release_keeps_order", False)
    keyed, keyless = deliveries(2, "a"), deliveries(2)
    assert set(stuck(keyed, keyless).take_stuck(OURS, QUEUES)) == set(keyless)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 4), st.integers(1, 6)),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
        st.tuples(st.just("finish"), st.integers(0, 5), st.integers(0, 3)),
        st.tuples(st.just("wait"), st.integers(1, 20), st.just(0)),
        st.tuples(st.just("give back"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(steps)
@pytest.mark.django_db
def test_whatever_goes_back_no_key_is_overtaken_and_nothing_is_lost(steps):
    """What goes back comes again behind nothing of its key that is later."""
    lanes, clock = scheduler(2)
    back: list[Delivery] = []
    started: list[Delivery] = []
    running: list[Group] = []
    put: list[Delivery] = []
    for what, number, count in steps:
        if what == "put":
            some = deliveries(count, f"key {number}" if number else None)
            if any(each.shard in {one.shard for one in back} for each in some):
                continue  # the database hands out the earlier ones first
            put += some
            lanes.put(some)
        elif what == "take" and (group := lanes.take(timeout=0)) is not None:
            started += group.deliveries
            running.append(group)
        elif what == "finish" and number < len(running):
            group = running.pop(number)
            deferred = group.deliveries[len(group.deliveries) - count :] if count else []
            started = [one for one in started if one not in deferred]
            lanes.finish(group, deferred, 0.2)
        elif what == "wait":
            clock.advance(number / 10)
        elif what == "give back":
            gone = lanes.take_stuck(OURS, QUEUES)
            in_lanes = {one.shard for group in running for one in group.deliveries}
            assert not in_lanes & {one.shard for one in gone}
            back += gone
    for group in running:
        lanes.finish(group)
    while (group := take_later(lanes, clock)) is not None:
        started += group.deliveries
        lanes.finish(group)
    lanes.put(sorted(back, key=lambda one: one.record.offset))
    while (group := take_later(lanes, clock)) is not None:
        started += group.deliveries
        lanes.finish(group)
    assert sorted(offsets(started)) == offsets(put)
    assert lanes.waiting == 0
    assert lanes.load_of(OURS)[0] == {}
    for key in {one.record.key for one in started if one.record.key}:
        numbers = offsets(one for one in started if one.record.key == key)
        assert numbers == sorted(numbers), key


def take_later(lanes: GroupScheduler, clock: SetClock) -> Group | None:
    clock.advance(1.0)
    return lanes.take(timeout=0)


# --- One key --------------------------------------------------------------------------------------


def test_no_more_of_a_key_is_fetched_than_its_queue_could_start_soon():
    # Given a key with much behind its running job
    lanes, clock = scheduler(3)
    hot = ("q", b"hot")
    lanes.put(deliveries(1 + LEAST_OF_A_KEY, "hot", handler=handler("slow")))
    running = take(lanes)
    assert len(running.deliveries) == 1
    # Then it has enough if lanes are busy for long, or with slow jobs
    assert lanes.keys_with_enough(OURS, QUEUES, ()) == {hot}
    clock.advance(AHEAD)
    assert lanes.keys_with_enough(OURS, QUEUES, ()) == {hot}
    assert lanes.keys_with_enough(OURS, ["r"], ()) == set()
    # And until half of it is left
    lanes.finish(running)
    for left, enough in ((7, set()), (6, set()), (5, set()), (4, set())):
        lanes.finish(take(lanes))
        assert lanes.keys_with_enough(OURS, QUEUES, ()) == enough, left
    lanes.put(deliveries(1, "hot"))
    assert lanes.keys_with_enough(OURS, QUEUES, {hot}) == {hot}


def test_what_is_more_urgent_is_fetched_only_beside_what_could_start():
    lanes, _ = scheduler(1)
    lanes.set_limits({"q": QueueLimit(1, 1)})
    busy(lanes, 1)
    assert lanes.least_priorities() == {}
    lanes.put(deliveries(1))
    assert lanes.least_priorities() == {"q": 0}, "the lanes of its queue are all busy"
    low, other = deliveries(1), deliveries(1, queue="r")
    low[0].record = replace(low[0].record, priority=-5)
    lanes.put(low + other)
    assert lanes.least_priorities() == {"q": -5, "r": 0}
    lanes.set_paused(["q"])
    assert lanes.least_priorities() == {"r": 0}
