"""The permits of one worker: whom it asks for, when, and what becomes of what it got.

Tier: the quick one. Coordination is the rules themselves, and the clock is set.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from kjo_django.coordination.starts import Ask, Pace, Permit, Starts, Used, paces_of, permit
from kjo_django.exceptions import CoordinationError
from kjo_django.limits.permits import (
    FORGOTTEN_AFTER,
    LONGEST_CALL,
    LONGEST_LIFE,
    MOST_ASKED,
    TO_THE_CALL,
    LimitState,
    Permits,
)
from kjo_django.limits.rules import Limit
from kjo_django.values import Rate, rate
from tests.clocks import BEGINS_AT, SetClock
from tests.waiting import PATIENCE, wait_until


def pace_of(text: str, name: str = "rate") -> Pace:
    each = rate(text)
    return Pace(name, each.count, each.seconds, each.interval, each.ahead)


@dataclass(eq=False)
class Waiting:
    """A delivery that wants to start."""

    limit_state: LimitState
    is_in_transaction: bool = False
    shard: object = field(default_factory=object)


@dataclass
class Coordination:
    """Keeps the rules of rates, by a clock that is set."""

    clock: SetClock = field(default_factory=SetClock)
    calls: list[tuple[Sequence[Ask], Sequence[Used]]] = field(default_factory=list)
    known: dict[str, Starts] = field(default_factory=dict)
    is_away: bool = False
    has_effect: bool = False
    seconds: float = 0.0
    """How long it takes to answer."""

    def permit(self, asks: Sequence[Ask], used: Sequence[Used]) -> list[Permit]:
        if self.is_away:
            error = CoordinationError("away")
            error.may_have_effect = self.has_effect
            raise error
        self.calls.append((asks, used))
        self.clock.advance(self.seconds)
        known = {name: self.known.setdefault(name, Starts()) for name in paces_of(asks, used)}
        return permit(asks, known, round(self.clock.monotonic() * 1e6), used)

    def permits(self, **options: Any) -> Permits:
        return Permits(self.permit, self.clock, **options)


@pytest.fixture
def coordination() -> Coordination:
    return Coordination()


def several(count: int, text: str = "1/s") -> list[Waiting]:
    return [Waiting(LimitState([pace_of(text)])) for _ in range(count)]


def test_all_that_wait_are_asked_for_together_and_in_order(coordination: Coordination) -> None:
    permits, (first, second, third) = coordination.permits(), several(3)
    permits.ask([first])
    permits.ask([second])
    permits.ask([third])
    # Of three only those without a permit are asked for, each time.
    assert [len(asks) for asks, _ in coordination.calls] == [1, 1, 2]
    assert (
        first.limit_state.permit_from
        <= second.limit_state.permit_from
        < third.limit_state.permit_from
    )


def test_one_that_comes_up_again_waits_before_the_next_one_of_its_key(
    coordination: Coordination,
) -> None:
    """The next one would get each permit, and start only after it: neither ever did."""
    # Given three that wait, and the first of a key, which has started and comes up again
    permits, (first, other, second, third) = coordination.permits(), several(4)
    first.shard = second.shard = third.shard = "key"
    permits.ask([first])
    assert permits.use(first)
    permits.note_start(first)
    permits.ask([second])
    permits.ask([other, third])
    # When it asks together with those that have to start after it
    permits.ask([first, second, third])
    # Then it is before them, and they have kept the places of their key
    moments = [each.limit_state.permit_from for each in (first, other, second, third)]
    assert moments == sorted(moments)


def test_whoever_waits_for_an_answer_asks_nothing_if_another_call_gets_it(
    coordination: Coordination,
) -> None:
    # Given a call that goes on
    permits, (first, second, third) = coordination.permits(), several(3, "5/s")
    asks, goes_on, ends = coordination.permit, threading.Event(), threading.Event()

    def slow(*asked: Any) -> list[Permit]:
        goes_on.set()
        assert ends.wait(PATIENCE)
        return asks(*asked)

    permits._permit = slow
    threads = [threading.Thread(target=permits.ask, args=([each],)) for each in (first, second)]
    threads[0].start()
    assert goes_on.wait(PATIENCE)
    # When two others ask meanwhile
    threads.append(threading.Thread(target=permits.ask, args=([third],)))
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: len(permits._line) == 3)
    coordination.clock.advance(0.001)
    ends.set()
    for thread in threads:
        thread.join(PATIENCE)
    # Then one call answers both
    assert [len(asks) for asks, _ in coordination.calls] == [1, 2]
    assert all(permits.has_permit(each) for each in (first, second, third))


def test_a_start_is_told_with_the_next_call(coordination: Coordination) -> None:
    permits, (first, second) = coordination.permits(), several(2, "1/m")
    permits.ask([first])
    coordination.clock.advance(0.2)
    assert permits.use(first)
    permits.note_start(first)
    coordination.clock.advance(0.1)
    permits.ask([second])
    ((used,),) = [used for _, used in coordination.calls[1:]]
    assert used.ago == pytest.approx(0.1)


def test_a_permit_that_became_old_is_replaced_without_a_wait(coordination: Coordination) -> None:
    permits, (first, second) = coordination.permits(), several(2, "1/m")
    permits.ask([first])
    coordination.clock.advance(0.8)
    assert not permits.use(first)
    permits.ask([second])
    permits.ask([first])
    assert permits.use(first)
    assert sum(coordination.known["rate"]._counts.values()) == 1


@pytest.mark.parametrize("fate", ["used", "became old", "was given back", "nobody came for it"])
def test_permits_that_are_not_used_are_counted(coordination: Coordination, fate: str) -> None:
    unused: list[Any] = []
    permits, (delivery,) = coordination.permits(on_unused=unused.append), several(1, "1/m")
    permits.ask([delivery])
    if fate == "used":
        assert permits.use(delivery)
        permits.note_start(delivery)
    elif fate == "became old":
        coordination.clock.advance(0.8)
        permits.ask([delivery])
    elif fate == "was given back":
        permits.give_back([delivery])
    else:
        coordination.clock.advance(20)
    permits.report()
    assert unused == ([] if fate == "used" else [delivery])


def test_no_start_comes_before_the_moment_of_its_permit(coordination: Coordination) -> None:
    permits, deliveries = coordination.permits(), several(20, "30/s")
    permits.ask(deliveries)
    now = coordination.clock.monotonic()
    late = next(each for each in deliveries if each.limit_state.permit_from > now)
    assert late.limit_state.permit is not None
    assert not permits.use(late)
    coordination.clock.advance(late.limit_state.permit_from - now)
    assert permits.use(late)


def test_one_that_may_start_earlier_than_it_was_told_comes_up_earlier(
    coordination: Coordination,
) -> None:
    earlier: dict[Any, float] = {}
    permits = coordination.permits(on_earlier=earlier.update)
    first, second, third, fourth = several(4)
    permits.ask([first, second, third, fourth])
    told = fourth.limit_state.permit_from
    # When one before it does not start
    permits.give_back([third])
    permits.ask([fourth])
    assert fourth.limit_state.permit_from < told - 0.5
    assert earlier[fourth] <= fourth.limit_state.permit_from


def test_the_permit_of_one_that_does_not_start_is_given_back(coordination: Coordination) -> None:
    permits, (first, second) = coordination.permits(), several(2, "1/m")
    permits.ask([first])
    permits.give_back([first])
    permits.ask([second])
    assert permits.has_permit(second)


def test_the_permit_of_one_that_nobody_comes_for_is_given_back(coordination: Coordination) -> None:
    """Its job was cancelled, or its partition is another worker's by now."""
    permits, (first, second) = coordination.permits(), several(2, "1/m")
    permits.ask([first])
    coordination.clock.advance(FORGOTTEN_AFTER + 1)
    permits.ask([second])
    assert permits.has_permit(second)
    assert permits.waiting_for(second.limit_state.paces[0]) == [second.limit_state]


def test_deliveries_that_nobody_comes_for_do_not_keep_others_from_starting(
    coordination: Coordination,
) -> None:
    """However often the worker asks for others meanwhile."""
    permits, lost = coordination.permits(), several(5, "5/s")
    permits.ask(lost)
    coordination.clock.advance(0.01)
    permits.ask(lost)
    started = 0
    for delivery in several(600, "5/s"):
        while not permits.has_permit(delivery):
            permits.ask([delivery])
            if not permits.has_permit(delivery):
                coordination.clock.advance(0.05)
        coordination.clock.advance(
            max(0.0, delivery.limit_state.permit_from - coordination.clock.seconds)
        )
        started += permits.use(delivery)
        permits.note_start(delivery)
        if coordination.clock.seconds >= BEGINS_AT + 60:
            break
    assert started >= 0.9 * 5 * 60
    assert len(permits._line) <= 1


@pytest.mark.parametrize("seconds", [0.11, 0.3, 1.0, 3.0])
def test_where_a_call_takes_long_a_permit_is_good_for_longer(
    coordination: Coordination, seconds: float
) -> None:
    """Else it would be old before anybody knows that it was given, each time."""
    asks = coordination.permit

    def slow(*asked: Any) -> list[Permit]:
        answers = asks(*asked)
        coordination.clock.advance(seconds)
        return answers

    permits = Permits(slow, coordination.clock)
    started = 0
    for delivery in several(20, "5/s"):
        for _ in range(20):
            if not permits.has_permit(delivery):
                permits.ask([delivery])
        coordination.clock.advance(
            max(0.0, delivery.limit_state.permit_from - coordination.clock.seconds)
        )
        started += permits.use(delivery)
        permits.note_start(delivery)
    assert started >= 18


def test_the_longest_permits_count_until_their_end(coordination: Coordination) -> None:
    """On a machine where all is slow, they were forgotten before, and a second one was given."""
    # Given a worker whose calls take as long as any, and whose starts are as late as any
    permits, coordination.seconds = coordination.permits(), LONGEST_CALL
    (late,) = several(1, "4/s")
    for _ in range(20):
        permits.ask([late])
        coordination.clock.advance(10 * LONGEST_LIFE)
        permits.note_prepared(late)
    coordination.clock.advance(100.0)
    # When it takes permits that last as long as any, and uses them as late as it may
    longest = several(4, "4/s")
    permits.ask(longest)
    assert coordination.calls[-1][0][0].lasts == pytest.approx(
        LONGEST_LIFE + TO_THE_CALL + 1.5 * LONGEST_CALL
    )
    given = [each for each in longest if each.limit_state.permit is not None]
    assert given
    end = min(each.limit_state.permit.end for each in given if each.limit_state.permit is not None)
    # And another one asks at once, and starts what it may in the second before
    coordination.seconds, starts = 0.0, 0
    others = coordination.permits()
    others.ask(several(1, "4/s"))
    coordination.clock.advance(end - 0.9 - coordination.clock.seconds)
    for delivery in several(8, "4/s"):
        others.ask([delivery])
        starts += others.use(delivery)
        others.note_start(delivery)
        coordination.clock.advance(0.1)
    coordination.clock.advance(end - coordination.clock.seconds)
    starts += sum(permits.use(each) for each in given)
    # Then no more than four have started
    assert starts <= 4


def test_a_permit_of_another_rate_is_given_back(coordination: Coordination) -> None:
    """An operator has changed it meanwhile."""
    permits, (delivery,) = coordination.permits(), several(1, "5/s")
    permits.ask([delivery])
    delivery.limit_state.paces = [pace_of("1/m")]
    assert not permits.has_permit(delivery)
    permits.ask([delivery])
    assert permits.has_permit(delivery)
    assert [used.ago for used in coordination.calls[-1][1]] == [None]
    assert sum(coordination.known["rate"]._counts.values()) == 1


def test_what_was_not_told_is_told_later(coordination: Coordination) -> None:
    permits, (first, second) = coordination.permits(), several(2, "1/d")
    permits.ask([first])
    permits.give_back([first])
    # Given a call that did nothing
    coordination.is_away = True
    with pytest.raises(CoordinationError):
        permits.report()
    coordination.is_away = False
    permits.report()
    permits.ask([second])
    assert permits.has_permit(second)


def test_what_may_have_been_told_is_not_told_twice(coordination: Coordination) -> None:
    """What another has counted since would count no longer."""
    permits, (first,) = coordination.permits(), several(1, "1/d")
    permits.ask([first])
    permits.give_back([first])
    coordination.is_away = coordination.has_effect = True
    with pytest.raises(CoordinationError):
        permits.report()
    coordination.is_away = False
    permits.report()
    assert len(coordination.calls) == 1


def test_a_worker_that_ends_gives_back_all(coordination: Coordination) -> None:
    permits, (first, second) = coordination.permits(), several(2, "1/m")
    permits.ask([first])
    permits.give_back_all()
    permits.report()
    other = coordination.permits()
    other.ask([second])
    assert other.has_permit(second)


def test_what_is_given_to_one_that_was_held_meanwhile_is_given_back(
    coordination: Coordination,
) -> None:
    permits, (first, second) = coordination.permits(), several(2, "1/m")
    asks = coordination.permit

    def hold_first(*asked: Any) -> list[Permit]:
        permits.give_back([first])
        return asks(*asked)

    permits._permit = hold_first
    permits.ask([first])
    permits._permit = asks
    assert not permits.has_permit(first)
    permits.ask([second])
    assert permits.has_permit(second)


def test_of_very_many_the_first_are_asked_for_and_the_others_wait_for_these(
    coordination: Coordination,
) -> None:
    permits, deliveries = coordination.permits(), several(MOST_ASKED + 10)
    permits.ask(deliveries)
    assert [len(asks) for asks, _ in coordination.calls] == [MOST_ASKED]
    interval, now = deliveries[0].limit_state.paces[0].interval, coordination.clock.monotonic()
    assert [each.limit_state.permit_from for each in deliveries[MOST_ASKED:]] == pytest.approx(
        [now + (MOST_ASKED + number) * interval for number in range(10)]
    )


def test_of_a_large_burst_all_that_may_start_get_a_permit(coordination: Coordination) -> None:
    pace = Limit("rate", Rate(100, 60.0, burst=2 * MOST_ASKED)).pace
    deliveries = [Waiting(LimitState([pace])) for _ in range(3 * MOST_ASKED)]
    coordination.permits().ask(deliveries)
    assert sum(each.limit_state.permit is not None for each in deliveries) == 2 * MOST_ASKED


def test_rates_that_nobody_asks_about_are_not_asked_for(coordination: Coordination) -> None:
    permits, other = coordination.permits(), Waiting(LimitState([pace_of("1/s", "other")]))
    permits.ask([other])
    permits.use(other)
    permits.note_start(other)
    permits.ask([Waiting(LimitState([pace_of("1/s", "other")])) for _ in range(3)])
    permits.ask(several(1))
    assert [ask.paces[0].name for ask in coordination.calls[-1][0]] == ["rate"]


@pytest.mark.promise("limit-without-coordination")
def test_while_coordination_is_away_nothing_has_a_permit(coordination: Coordination) -> None:
    permits, (delivery,) = coordination.permits(), several(1)
    coordination.is_away = True
    with pytest.raises(CoordinationError):
        permits.ask([delivery])
    assert not permits.use(delivery)
    coordination.is_away = False
    permits.ask([delivery])
    assert permits.use(delivery)


def test_no_lane_waits_in_a_transaction_that_keeps_others_from_writing(
    coordination: Coordination,
) -> None:
    permits, (delivery,) = coordination.permits(waits_in_transactions=False), several(1)
    assert permits.soon(delivery) > 0
    delivery.is_in_transaction = True
    assert permits.soon(delivery) == 0


def test_where_lanes_must_not_wait_they_begin_as_late_as_the_preparation_takes_at_least(
    coordination: Coordination,
) -> None:
    permits, deliveries = coordination.permits(waits_in_transactions=False), several(40)
    for delivery in deliveries:
        delivery.is_in_transaction = True
        delivery.limit_state.prepared_from = coordination.clock.monotonic()
        coordination.clock.advance(0.1)
        permits.note_prepared(delivery)
    assert permits.soon(deliveries[0]) == pytest.approx(0.1, abs=0.01)


def test_what_takes_long_to_prepare_is_asked_for_longer_ahead(coordination: Coordination) -> None:
    permits, deliveries = coordination.permits(), several(20, "1/m")
    least = permits.soon(deliveries[0])
    for delivery in deliveries:
        delivery.limit_state.prepared_from = coordination.clock.monotonic()
        coordination.clock.advance(0.2)
        permits.note_prepared(delivery)
    assert permits.soon(deliveries[0]) > max(0.19, least)
    permits.ask(several(1, "1/m"))
    assert coordination.calls[-1][0][0].within > 0.3


def test_a_lane_comes_earlier_where_a_permit_has_to_be_asked_for(
    coordination: Coordination,
) -> None:
    """By as long as the call takes: the permit is there when the start is prepared."""
    # Given calls that take 80 milliseconds
    permits, (first, second) = coordination.permits(), several(2, "1/m")
    coordination.seconds = 0.08
    permits.ask([first])
    permits.ask([second])
    # Then
    assert permits.has_permit(first)
    assert not permits.has_permit(second)
    assert permits.soon(second) == pytest.approx(permits.soon(first) + 0.08)


def test_what_has_its_permit_is_not_told_to_come_as_early_as_to_ask_for_one(
    coordination: Coordination,
) -> None:
    # Given one that waits, and calls that take 80 milliseconds
    told: dict[Any, float] = {}
    permits, (first, second) = coordination.permits(on_earlier=told.update), several(2, "1/m")
    coordination.seconds = 0.08
    permits.ask([first])
    permits.ask([second])
    assert not permits.has_permit(second)
    # When the first one gives its permit back, and the next call gets it for the second one
    permits.give_back([first])
    permits.ask([second])
    # Then
    assert permits.has_permit(second)
    assert told == {second: second.limit_state.permit_from - permits.soon(second)}


@pytest.mark.parametrize("way", ["answered", "refused"])
def test_a_permit_that_is_replaced_just_then_is_returned_once(
    coordination: Coordination, way: str
) -> None:
    """Returned twice, it took another start of the same moment from the count."""
    # Given one whose permit became old, and a call that asks for another one
    permits, (first, second) = coordination.permits(), several(2, "1/m")
    permits.ask([first])
    old = first.limit_state.permit
    assert old is not None
    coordination.clock.advance(0.8)
    asks = coordination.permit

    def meanwhile(*asked: Any) -> list[Permit]:
        permits.give_back([first])
        coordination.is_away = way == "refused"
        return asks(*asked)

    # When it is given back during that call
    permits._permit = meanwhile
    with nullcontext() if way == "answered" else pytest.raises(CoordinationError):
        permits.ask([first])
    permits._permit, coordination.is_away = asks, False
    # Then coordination is told of it once: as what another one is to replace, or as unused
    permits.ask([second])
    told = [used.stamp for _, each in coordination.calls for used in each]
    replaced = [ask.replaces for each, _ in coordination.calls for ask in each]
    assert [*told, *replaced].count(old.stamp) == 1
    assert permits.has_permit(second)


@pytest.mark.parametrize("has_effect", [True, False, None], ids=["unknown", "none", "a bug"])
def test_a_permit_that_a_call_has_not_replaced_is_replaced_by_the_next_one(
    coordination: Coordination, has_effect: bool | None
) -> None:
    """One call without an answer cost an hourly job an hour."""
    # Given
    unused: list[Any] = []
    permits, (first,) = coordination.permits(on_unused=unused.append), several(1, "1/h")
    permits.ask([first])
    coordination.clock.advance(1.0)
    asks = coordination.permit

    def fail(*asked: Any) -> list[Permit]:
        if has_effect is None:
            raise RuntimeError("a bug")
        coordination.is_away, coordination.has_effect = True, has_effect
        return asks(*asked)

    # When
    permits._permit = fail
    with pytest.raises((CoordinationError, RuntimeError)):
        permits.ask([first])
    permits._permit, coordination.is_away = asks, False
    coordination.clock.advance(1.0)
    permits.ask([first])
    # Then
    assert permits.has_permit(first)
    assert first.limit_state.permit_from <= coordination.clock.monotonic()
    assert unused == [first]
