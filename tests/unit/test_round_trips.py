"""What follows from how long the database takes to answer: the run time of groups, and lanes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kjo_django.engine.scheduler import GroupScheduler
from kjo_django.round_trips import GroupBudget, lanes_for
from kjo_django.runtime import current_runtime
from kjo_django.worker.duties import ClockCheck
from tests.clocks import SetClock
from tests.unit.engine.test_scheduler import delivery, take


@pytest.mark.parametrize("far", [0.0002, 0.005])
def test_near_a_database_the_setting_holds(far: float) -> None:
    budget = GroupBudget(0.05)
    for _ in range(2):
        budget.note_round_trip(far)
    assert budget.seconds == 0.05


def test_far_from_a_database_it_is_as_long_as_the_round_trips_of_a_group() -> None:
    budget = GroupBudget(0.05)
    for _ in range(2):
        budget.note_round_trip(0.02)
    assert budget.seconds == pytest.approx(0.16)


def test_a_first_answer_that_took_as_long_as_its_session_to_open_changes_nothing() -> None:
    budget = GroupBudget(0.05)
    budget.note_round_trip(0.09)
    assert budget.seconds == 0.05
    budget.note_round_trip(0.005)
    assert budget.seconds == 0.05


@pytest.mark.parametrize(
    ("round_trip", "expected"),
    [(0.0, 4), (0.0009, 4), (0.0025, 6), (0.005, 9), (0.02, 16), (1, 16)],
)
def test_a_worker_has_one_lane_more_for_each_millisecond(round_trip: float, expected: int) -> None:
    assert lanes_for(round_trip) == expected


def test_answers_that_a_busy_process_gets_late_change_nothing_for_long() -> None:
    budget = GroupBudget(0.05)
    for seconds in (0.9, 0.3, 0.001, 0.4):
        budget.note_round_trip(seconds)
    assert budget.seconds == 0.05


def test_a_database_that_moves_away_is_noticed_within_a_minute_of_heartbeats() -> None:
    budget = GroupBudget(0.05)
    budget.note_round_trip(0.001)
    for _ in range(12):
        budget.note_round_trip(0.05)
    assert budget.seconds == pytest.approx(0.4)


def test_jobs_share_as_many_round_trips_as_the_budget_allows() -> None:
    budget = GroupBudget(0.05)
    lanes = GroupScheduler(1, group_size=100, budget=budget)
    for _ in range(200):
        lanes.measure("fast", 0.0199)
    lanes.put(delivery(str(number)) for number in range(50))
    group = take(lanes)
    assert len(group.deliveries) == 2
    lanes.finish(group, [])
    for _ in range(2):
        budget.note_round_trip(0.02)
    assert len(take(lanes).deliveries) == 8


@pytest.mark.django_db
def test_a_heartbeat_measures_how_far_away_the_database_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SetClock()
    runtime = replace(current_runtime(), clock=clock, group_budget=GroupBudget(0.05))
    tell = runtime.store.server_time

    def tell_from_afar(store: object) -> object:
        clock.advance(0.02)
        return tell()

    monkeypatch.setattr(type(runtime.store), "server_time", tell_from_afar)
    for _ in range(2):
        ClockCheck(runtime).work()
    assert runtime.group_budget.seconds == pytest.approx(0.16)
