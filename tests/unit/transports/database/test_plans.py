"""When the database transport looks at its table, and what its claims begin with."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from kjo_django.transports.database.plans import (
    FAIR_EVERY,
    IDLE_INTERVAL,
    SELDOM_FAIR_EVERY,
    SHORTEST_WAIT,
    WAIT_TO_BE_WOKEN,
    ClaimOrder,
    LookPlan,
)
from tests.clocks import SetClock

INTERVAL = 2.0


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def plan(clock: SetClock) -> LookPlan:
    return LookPlan(INTERVAL, clock, locks_rows=True)


def claim(plan: LookPlan, *, rows: bool = True, full: bool = False, others: bool = False) -> None:
    plan.note_claim(has_rows=rows, is_full=full, has_others=others)


def test_an_idle_table_is_looked_at_ever_more_seldom(plan: LookPlan) -> None:
    waits = [plan.next_wait(60.0) for _ in range(12)]
    for number, wait in enumerate(waits):
        longest = min(INTERVAL, SHORTEST_WAIT * 2**number)
        assert 0.75 * longest <= wait <= longest
    assert plan.next_wait(0.1) == 0.1, "no longer than whoever polls"


@pytest.mark.parametrize("what", ["rows", "others"])
def test_where_something_happens_the_next_look_is_soon(plan: LookPlan, what: str) -> None:
    for _ in range(12):
        plan.next_wait(60.0)
    claim(plan, rows=what == "rows", others=what == "others")
    assert plan.next_wait(60.0) <= SHORTEST_WAIT


def test_a_full_claim_is_followed_by_another_and_a_look_in_vain_by_none(plan: LookPlan) -> None:
    assert plan.may_have_more, "at first nobody has looked"
    claim(plan, full=True)
    assert plan.may_have_more
    claim(plan)
    assert not plan.may_have_more
    plan.expect_more()
    plan.note_nothing_due()
    assert not plan.may_have_more


def test_a_slow_look_is_no_more_than_a_tenth_of_the_time(plan: LookPlan) -> None:
    plan.note_look(0.1)
    assert plan.next_wait(60.0) >= 0.75 * 0.9


def test_whoever_was_woken_claims_at_once_and_then_waits_to_be_woken(
    plan: LookPlan, clock: SetClock
) -> None:
    plan.note_nothing_due()
    clock.advance(1)
    plan.note_wake_up()
    assert plan.may_have_more
    claim(plan)
    assert plan.has_all
    assert plan.next_wait(60.0) >= 0.75 * WAIT_TO_BE_WOKEN
    assert not plan.has_all, "the wait is over"


def test_a_claim_that_knows_what_is_ahead_is_followed_by_no_look(
    plan: LookPlan, clock: SetClock
) -> None:
    plan.hears_publishers = True
    clock.advance(1)
    plan.note_wake_up()
    assert plan.asks_ahead
    plan.note_claim(has_rows=True, is_full=False, has_others=False, ahead=0.3)
    assert plan.is_idle
    assert not plan.has_all, "the wait is over when the next row is due"
    assert plan.next_wait(60.0) == pytest.approx(0.3)


def test_a_claim_that_leaves_what_waits_for_its_key_is_followed_by_a_look(
    plan: LookPlan, clock: SetClock
) -> None:
    plan.hears_publishers = True
    clock.advance(1)
    plan.note_wake_up()
    plan.note_claim(has_rows=True, is_full=False, has_others=False, ahead=-0.3)
    assert not plan.is_idle
    assert plan.has_all


@pytest.mark.parametrize("why", ["polls", "was not woken", "is woken again before its look"])
def test_what_is_ahead_is_not_asked_where_no_look_is_saved(
    plan: LookPlan, clock: SetClock, why: str
) -> None:
    plan.hears_publishers = why != "polls"
    claim(plan)
    clock.advance(WAIT_TO_BE_WOKEN / 2 if why == "is woken again before its look" else 1)
    if why != "was not woken":
        plan.note_wake_up()
    assert not plan.asks_ahead


@pytest.mark.parametrize("why", ["full", "others"])
def test_what_a_wake_up_has_left_is_looked_for(plan: LookPlan, clock: SetClock, why: str) -> None:
    clock.advance(1)
    plan.note_wake_up()
    claim(plan, full=why == "full", others=why == "others")
    assert not plan.has_all


def test_whoever_will_not_wait_is_answered_by_a_look(plan: LookPlan, clock: SetClock) -> None:
    clock.advance(1)
    plan.note_wake_up()
    claim(plan)
    plan.ask_now()
    assert not plan.has_all


@pytest.mark.parametrize("locks_rows", [True, False])
def test_where_one_writer_is_waited_for_a_look_comes_before_the_claim_of_the_woken(
    clock: SetClock, locks_rows: bool
) -> None:
    """A claim of a stream of jobs waits for no look either: it is one round trip, as a look is."""
    plan = LookPlan(INTERVAL, clock, locks_rows=locks_rows)
    clock.advance(1)
    claim(plan)
    plan.note_wake_up()
    assert plan.may_have_more == locks_rows
    assert plan.next_wait(60.0) <= SHORTEST_WAIT


def test_an_urgent_claim_says_nothing_of_what_is_left(plan: LookPlan) -> None:
    claim(plan, full=True)
    plan.note_urgent_claim(has_rows=False, has_others=False)
    assert plan.may_have_more


def test_a_database_that_refuses_is_left_alone_for_a_while(plan: LookPlan, clock: SetClock) -> None:
    waits = []
    for _ in range(8):
        assert plan.note_refusal(is_locked=False)
        assert plan.is_put_off
        waits.append(plan.next_wait(60.0))
        clock.advance(waits[-1])
        assert not plan.is_put_off
    assert waits[-1] > 10 * waits[0]
    plan.note_refusal(is_locked=False)
    plan.note_answer()
    assert not plan.is_put_off


def test_a_lock_is_told_when_it_lasts(plan: LookPlan) -> None:
    assert [plan.note_refusal(is_locked=True) for _ in range(4)] == [False, False, True, True]


# --- Idle consumers -------------------------------------------------------------------------------


@pytest.mark.parametrize("interval, longest", [(0.2, IDLE_INTERVAL), (INTERVAL, INTERVAL)])
def test_an_idle_consumer_that_hears_of_publications_looks_once_a_second(
    clock: SetClock, interval: float, longest: float
) -> None:
    plan = LookPlan(interval, clock, locks_rows=True)
    plan.hears_publishers = True
    plan.note_nothing_due()
    plan.note_idle(math.inf)
    assert plan.is_idle
    assert plan.next_wait(60.0) == longest
    clock.advance(longest)
    assert not plan.is_idle
    assert plan.is_idle_again(), "nothing was heard since"
    assert plan.next_wait(60.0) == longest


def test_an_idle_consumer_looks_when_the_next_row_is_due(plan: LookPlan, clock: SetClock) -> None:
    plan.hears_publishers = True
    plan.note_idle(0.3)
    assert plan.next_wait(60.0) == pytest.approx(0.3)
    clock.advance(0.3)
    assert not plan.is_idle
    assert not plan.is_idle_again(), "it is due"


def test_a_consumer_that_hears_of_nothing_goes_on_looking(plan: LookPlan) -> None:
    plan.note_idle(math.inf)
    assert not plan.is_idle
    assert plan.next_wait(60.0) <= SHORTEST_WAIT


@pytest.mark.parametrize(
    "happens",
    [
        LookPlan.note_wake_up,
        LookPlan.end_idleness,
        LookPlan.expect_more,
        LookPlan.note_collision,
        lambda plan: plan.note_refusal(is_locked=True),
        claim,
    ],
)
def test_whatever_happens_ends_idleness(
    plan: LookPlan, happens: Callable[[LookPlan], object]
) -> None:
    plan.hears_publishers = True
    plan.note_idle(math.inf)
    happens(plan)
    assert not plan.is_idle
    assert not plan.is_idle_again(), "another row may be due sooner now"


def test_whoever_will_not_wait_is_answered_though_the_consumer_is_idle(plan: LookPlan) -> None:
    plan.hears_publishers = True
    plan.note_idle(math.inf)
    plan.ask_now()
    assert not plan.is_idle
    assert plan.is_idle_again(), "when the next row is due is known still"


def test_a_slow_look_of_an_idle_consumer_is_no_more_than_a_tenth_of_the_time(
    plan: LookPlan,
) -> None:
    """Of a million delayed rows, one of which is due every moment."""
    plan.hears_publishers = True
    plan.note_idle(0.01)
    plan.note_look(0.1)
    assert plan.next_wait(60.0) == pytest.approx(0.9)


# --- The order of claims --------------------------------------------------------------------------


def begin(order: ClaimOrder, *, backlog: int | None, lower: bool = True) -> int | None:
    """Make a claim of the topic "t"; return the rank it begins after."""
    order.next(["t"])
    before = order.rank_before("t")
    is_fair = before is not None
    order.note("t", backlog, is_fair=is_fair, has_lower=is_fair and lower)
    return before


def test_each_claim_begins_with_another_topic() -> None:
    order = ClaimOrder()
    assert [order.next(["a", "b", "c"]) for _ in range(4)] == [
        ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"], ["b", "c", "a"],
    ]  # fmt: skip
    assert order.next([]) == []


def fair(order: ClaimOrder, count: int, *, lower: bool) -> list[int]:
    """Make so many claims of a backlog; return which of them, from 0, begin with a lower one."""
    begins = [begin(order, backlog=3, lower=lower) for _ in range(count)]
    assert {*begins} <= {None, 3}
    return [number for number, before in enumerate(begins) if before is not None]


def test_of_a_backlog_one_claim_of_a_few_begins_with_the_next_lower_priority() -> None:
    every = FAIR_EVERY
    assert fair(ClaimOrder(), 3 * every + 1, lower=True) == [every, 2 * every, 3 * every]


def test_without_a_lower_priority_it_is_looked_for_seldom() -> None:
    found = fair(ClaimOrder(), 3 * SELDOM_FAIR_EVERY, lower=False)
    assert found == [FAIR_EVERY + number * SELDOM_FAIR_EVERY for number in range(3)]


def test_without_a_backlog_claims_are_in_the_usual_order() -> None:
    order = ClaimOrder()
    for _ in range(FAIR_EVERY):
        begin(order, backlog=3)
    begin(order, backlog=None)
    assert [begin(order, backlog=None) for _ in range(20)] == [None] * 20
