"""Long runs beside others of their group: what a lane has not begun is run by those that are free.

In the small tier: the scheduler alone, its clock goes on when a test says so. Workers are in
``test_relieved_lanes``.
"""

from __future__ import annotations

import math
import queue
import random
import threading
from collections import Counter, defaultdict

import pytest

from kjo_django.engine import scheduler as scheduler_module
from kjo_django.engine.attempt import Attempt, Delivery, Departed, Ending, Mode
from kjo_django.engine.handler.timeouts import LONG_RUN
from kjo_django.engine.scheduler import MOST_ALONE, WORTH_A_LANE, Group, GroupScheduler
from tests.clocks import SetClock
from tests.unit.engine.test_scheduler import delivery, handler, lanes_of, take
from tests.waiting import PATIENCE, wait_until

PLAIN = handler("plain", mode=Mode.PLAIN)
KNOWN = {"plain": 0.0001, "fast": 0.0001}


def scheduler(count: int = 2) -> tuple[GroupScheduler, SetClock, list[Group]]:
    """Lanes, their clock, and the groups that were found to be late."""
    clock, late = SetClock(), []
    lanes = lanes_of(count, known=KNOWN, clock=clock)
    lanes.on_late = late.append
    return lanes, clock, late


def group_of(lanes: GroupScheduler, keys: str = "abc") -> Group:
    """A group that a lane runs."""
    lanes.put([delivery(key, handler=PLAIN) for key in keys])
    group = take(lanes)
    assert len(group.deliveries) == len(keys)
    return group


def steps(group: Group) -> list[list[Attempt]]:
    return [[Attempt(each)] for each in group.deliveries]


# --- Who notices ----------------------------------------------------------------------------------


def test_a_free_lane_is_told_of_a_group_that_has_run_for_long():
    lanes, clock, late = scheduler()
    group = group_of(lanes)
    clock.advance(LONG_RUN * 0.9)
    assert lanes.take(timeout=0) is None
    assert late == []
    clock.advance(LONG_RUN * 0.2)
    assert lanes.take(timeout=0) is None
    assert late == [group]


def test_it_is_told_again_as_long_as_the_group_runs():
    """Its lane may have been between two handlers."""
    lanes, clock, late = scheduler()
    group = group_of(lanes)
    for _ in range(3):
        clock.advance(LONG_RUN)
        assert lanes.take(timeout=0) is None
    assert late == [group] * 3
    lanes.finish(group)
    clock.advance(LONG_RUN)
    assert lanes.take(timeout=0) is None
    assert late == [group] * 3


def test_a_lane_with_something_to_start_starts_that():
    lanes, clock, late = scheduler()
    group_of(lanes)
    clock.advance(LONG_RUN)
    lanes.put([delivery("z", handler=PLAIN)])
    assert take(lanes).deliveries[0].record.key == b"z"
    assert late == []


@pytest.mark.parametrize("kind", ["one of its own", "in a transaction"])
def test_nobody_is_told_of_a_group_of_which_nothing_can_be_taken(kind):
    lanes, clock, late = scheduler()
    if kind == "one of its own":
        group_of(lanes, "a")
    else:
        lanes.put([delivery(key) for key in "abc"])
        assert len(take(lanes).deliveries) == 3
    clock.advance(10 * LONG_RUN)
    assert lanes.take(timeout=0) is None
    assert late == []


def test_a_lane_that_sleeps_wakes_up_for_it():
    """In real time: nothing but the group's own moment wakes it."""
    lanes = lanes_of(2, known=KNOWN)
    is_late = threading.Event()
    lanes.on_late = lambda group: is_late.set()
    sleeper = threading.Thread(target=lanes.take)
    sleeper.start()
    wait_until(lambda: lanes.sleeping)
    ready = [delivery(key, handler=PLAIN) for key in "abc"]
    with lanes._lock:
        own, lanes.sleeping = lanes.sleeping, []
    lanes.put(ready)  # it goes to this thread
    lanes.sleeping = own
    group = take(lanes)
    assert len(group.deliveries) == 3
    assert is_late.wait(PATIENCE)
    lanes.stop()
    sleeper.join(PATIENCE)
    assert not sleeper.is_alive()


def test_another_lane_watches_where_the_one_that_did_has_something_to_run():
    """The lane that sleeps last is woken for new work, and that one watches."""
    # Given a lane that sleeps, and one that watches
    lanes, found = lanes_of(3, known=KNOWN), queue.SimpleQueue[Group]()
    is_late = threading.Event()
    lanes.on_late = lambda group: is_late.set()
    sleepers = [threading.Thread(target=lambda: found.put(lanes.take())) for _ in range(2)]
    for count, sleeper in enumerate(sleepers, start=1):
        sleeper.start()
        wait_until(lambda count=count: len(lanes.sleeping) == count)
    with lanes._lock:
        own, lanes.sleeping = lanes.sleeping, []
    lanes.put([delivery(key, handler=PLAIN) for key in "abc"])  # it goes to this thread
    lanes.sleeping = own
    assert len(take(lanes).deliveries) == 3
    wait_until(lambda: lanes._watched_until < math.inf)
    # When it takes a delivery that has a group of its own
    lanes.put([delivery("z", handler=PLAIN)])
    assert len(found.get(timeout=PATIENCE).deliveries) == 1
    # Then the other one notices the group that is late
    assert is_late.wait(PATIENCE)
    lanes.stop()
    for sleeper in sleepers:
        sleeper.join(PATIENCE)


# --- What is taken --------------------------------------------------------------------------------


def test_what_has_not_begun_leaves_its_group():
    lanes, _, _ = scheduler()
    group = group_of(lanes)
    departed = Departed()
    departed.offer(steps(group)[1:2], group.deliveries[2:])
    assert departed.take(group.deliveries) == group.deliveries[1:]
    assert departed == set(group.deliveries[1:])
    assert departed.take(group.deliveries) == []


def test_what_has_an_ending_stays():
    lanes, _, _ = scheduler()
    group = group_of(lanes)
    departed, rest = Departed(), steps(group)[1:]
    rest[0][0].ending = Ending.DUPLICATE
    departed.offer(rest, ())
    assert departed.take(group.deliveries) == group.deliveries[2:]


def test_nothing_leaves_while_no_handler_runs():
    lanes, _, _ = scheduler()
    group = group_of(lanes)
    departed = Departed()
    assert departed.take(group.deliveries) == []
    departed.offer(steps(group)[1:], ())
    departed.keep()
    assert departed.take(group.deliveries) == []


def test_a_key_of_which_anything_stays_stays():
    """Two lanes would have it at once, and its order would be lost."""
    lanes, _, _ = scheduler()
    group = group_of(lanes, "abacb")  # those of one key follow one another
    assert [each.record.key for each in group.deliveries] == [b"a", b"a", b"b", b"b", b"c"]
    departed = Departed()
    departed.offer(steps(group)[1:], ())
    assert departed.take(group.deliveries) == group.deliveries[2:]


def test_another_record_of_a_message_of_which_one_stays_stays():
    """As a crashed relay leaves them: they share a lease."""
    lanes, _, _ = scheduler()
    group = group_of(lanes)
    group.deliveries[0].lease = group.deliveries[2].lease = "PROC:q:a"
    departed = Departed()
    departed.offer(steps(group)[1:], ())
    assert departed.take(group.deliveries) == group.deliveries[1:2]


def test_what_was_taken_starts_on_free_lanes_before_its_group_has_ended():
    # Given
    lanes, _, _ = scheduler(3)
    group = group_of(lanes)
    departed = Departed()
    departed.offer(steps(group)[1:], ())
    taken = departed.take(group.deliveries)
    assert lanes.take(timeout=0) is None, "not before it is given back"
    # When
    lanes.finish_departed(taken, taken)
    # Then
    again = take(lanes)
    assert again.deliveries == taken
    lanes.finish(group, departed=departed)
    assert (lanes.waiting, lanes.running, lanes.outstanding) == (0, 1, 2)
    lanes.finish(again)
    assert (lanes.waiting, lanes.running, lanes.outstanding) == (0, 0, 0)


def test_a_group_may_end_before_what_was_taken_of_it_is_given_back():
    lanes, _, _ = scheduler()
    group = group_of(lanes)
    departed = Departed()
    departed.offer(steps(group)[1:], ())
    taken = departed.take(group.deliveries)
    lanes.finish(group, group.deliveries, departed=departed)
    lanes.finish_departed(taken, taken)
    assert sorted(map(id, take(lanes).deliveries)) == sorted(map(id, group.deliveries))


# --- Handlers that have had a long run ------------------------------------------------------------


def sizes(lanes: GroupScheduler, deliveries: list[Delivery]) -> list[int]:
    """The sizes of the groups that these make."""
    lanes.put(deliveries)
    found = []
    while (group := lanes.take(timeout=0)) is not None:
        found.append(len(group.deliveries))
        lanes.finish(group)
    return found


def quick_again(lanes: GroupScheduler, kind: str = "fast", runs: int = 100) -> None:
    """Let as many quick runs pass as its average needs to forget a long one."""
    for _ in range(runs):
        lanes.measure(kind, 0.0001)


def test_after_a_long_run_of_a_handler_its_jobs_have_transactions_of_their_own():
    lanes, _, _ = scheduler(1)
    assert sizes(lanes, [delivery() for _ in range(3)]) == [3]
    lanes.measure("fast", 10.0)
    quick_again(lanes)
    assert sizes(lanes, [delivery() for _ in range(3)]) == [1, 1, 1]
    others = [delivery(handler=handler("other")), delivery(), delivery(handler=handler("other"))]
    for _ in range(100):
        lanes.measure("other", 0.0001)
    assert sizes(lanes, others) == [1, 1, 1], "nor do others wait behind it"


def test_as_many_as_cost_a_lane_what_the_long_run_took():
    lanes, _, _ = scheduler(1)
    lanes.measure("fast", 2.0)
    quick_again(lanes, runs=int(2.0 / WORTH_A_LANE) - 1)
    assert sizes(lanes, [delivery() for _ in range(3)]) == [1, 1, 1]
    quick_again(lanes, runs=1)
    assert sizes(lanes, [delivery() for _ in range(3)]) == [3]


def test_of_a_run_of_hours_no_more_than_a_bound():
    lanes, _, _ = scheduler(1)
    lanes.measure("fast", 36_000.0)
    quick_again(lanes, runs=MOST_ALONE)
    assert sizes(lanes, [delivery() for _ in range(3)]) == [3]


def test_far_from_the_database_fewer_since_each_costs_more():
    lanes, _, _ = scheduler(1)
    for _ in range(2):
        lanes._budget.note_round_trip(0.02)
    lanes.measure("fast", 10.0)
    quick_again(lanes, runs=int(10.0 / 0.16) + 1)
    assert sizes(lanes, [delivery() for _ in range(3)]) == [3]


def test_a_run_that_lasts_counts_before_it_ends():
    lanes, _, _ = scheduler(1)
    lanes.note_long("fast", LONG_RUN)
    assert sizes(lanes, [delivery() for _ in range(3)]) == [1, 1, 1]


def test_outside_a_transaction_jobs_share_a_group_all_the_same():
    """Free lanes take what does not begin."""
    lanes, _, _ = scheduler(1)
    lanes.measure("plain", 10.0)
    quick_again(lanes, "plain")
    assert sizes(lanes, [delivery(handler=PLAIN) for _ in range(3)]) == [3]


# --- Lanes that go on while others take -----------------------------------------------------------


class Race:
    """Lanes in threads that run groups as ``LaneRunner.run_leased`` does, and take from one
    another as ``Lanes`` does."""

    def __init__(self, lanes: GroupScheduler, expected: int) -> None:
        self._lanes, self._expected = lanes, expected
        self._departed: dict[Group, Departed] = {}
        self._of_key: defaultdict[object, threading.Lock] = defaultdict(threading.Lock)
        self.ran: list[Delivery] = []
        self.faults: list[str] = []
        self.taken = 0
        lanes.on_late = self._relieve

    def run(self, count: int) -> None:
        threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(count)]
        for thread in threads:
            thread.start()
        threads[0].join(PATIENCE)
        self._lanes.stop()
        for thread in threads:
            thread.join(PATIENCE)

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        while (group := self._lanes.take()) is not None:
            departed = self._departed[group] = Departed()
            ended = [each for each in group.deliveries if rng.random() < 0.8]
            for number, each in enumerate(ended, start=1):
                if each in departed:
                    continue
                departed.offer([[Attempt(other)] for other in ended[number:]], ())
                self._call(each, rng)
                departed.keep()
            left = set(departed.remaining(group.deliveries)) - set(ended)
            del self._departed[group]
            # Those of a key that come after one that is deferred have run: here it has no order.
            self._lanes.finish(group, left, departed=departed)

    def _call(self, delivery: Delivery, rng: random.Random) -> None:
        key = self._of_key[delivery.shard]
        if not key.acquire(blocking=False):
            self.faults.append(f"{delivery.shard} is in two lanes")
            self._lanes.stop()
            return
        threading.Event().wait(rng.choice([0.0, 0.0, 0.0, 0.002]))
        self.ran.append(delivery)
        key.release()
        if len(self.ran) >= self._expected:
            self._lanes.stop()

    def _relieve(self, group: Group) -> None:
        departed = self._departed.get(group)
        if departed is not None and (taken := departed.take(group.deliveries)):
            self.taken += len(taken)
            self._lanes.finish_departed(taken, taken)


def test_each_runs_once_whatever_lanes_take_from_one_another(monkeypatch):
    """In real time, at random: a lane may go on, or end its group, at any moment of a take."""
    monkeypatch.setattr(scheduler_module, "LONG_RUN", 0.0005)
    lanes = lanes_of(4, known=KNOWN)
    deliveries = [delivery(f"{number % 97}", handler=PLAIN) for number in range(1500)]
    race = Race(lanes, len(deliveries))
    lanes.put(deliveries)
    race.run(4)
    assert race.faults == []
    assert race.taken > 0
    assert Counter(race.ran) == Counter(deliveries)
    wait_until(lambda: (lanes.outstanding, lanes.running) == (0, 0))
