"""A transport that is away is tried again, and a pause may outlive its partition."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kjo_django.engine.poller import Poller
from kjo_django.engine.scheduler import GroupScheduler
from kjo_django.round_trips import GroupBudget
from kjo_django.runtime import current_runtime
from kjo_django.transports.base import TopicPartition
from tests.clocks import SetClock
from tests.unit.deliveries import Silent


class Subscription(Silent):
    """Notes pauses the way a transport does: for good, until resumed."""

    def __init__(self) -> None:
        self.assigned: list[TopicPartition] = []
        self.paused: set[TopicPartition] = set()

    def assignment(self):
        return self.assigned

    def pause(self, partitions):
        self.paused.update(partitions)

    def resume(self, partitions):
        self.paused.difference_update(partitions)


def test_a_pause_that_ends_while_somebody_else_has_the_partition():
    """KJO-76: when the partition comes back it is not paused for ever."""
    clock = SetClock()
    lanes = GroupScheduler(1, group_size=1, budget=GroupBudget(1.0), clock=clock)
    poller = Poller(current_runtime(), None, "group", [], lanes, max_outstanding=1)
    subscription, partition = Subscription(), TopicPartition("emails", 3)
    subscription.assigned = [partition]
    lanes.pause_partition(partition, 0.05)
    poller._pause_and_plan(subscription)
    assert subscription.paused == {partition}
    # Revoked; the pause ends; assigned again
    subscription.assigned = []
    clock.advance(0.06)
    poller._pause_and_plan(subscription)
    subscription.assigned = [partition]
    poller._pause_and_plan(subscription)
    assert subscription.paused == set()


# --- KJO-53: the connection is tried again, later each time, and for ever -------------------------


class Away:
    """A transport nobody can subscribe to."""

    def subscribe(self, *args, **kwargs):
        raise ConnectionError("the broker is away")


@pytest.fixture
def time_passes():
    return SetClock()


@pytest.fixture
def poller(time_passes):
    lanes = GroupScheduler(1, group_size=1, budget=GroupBudget(1.0))
    told: list[str | None] = []
    runtime = replace(current_runtime(), clock=time_passes)
    made = Poller(runtime, Away(), "group", [], lanes, max_outstanding=1, on_error=told.append)
    made.told = told
    return made


def test_the_poller_starts_over_after_1_s_doubling_to_30_s(poller, time_passes):
    """KJO-53: 1000 ms at first, twice as long each time, 30000 ms at most; 10 times and more."""
    pauses = []
    for _ in range(12):
        pauses.append(poller.step())
        time_passes.seconds += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30, 30, 30, 30, 30]
    assert poller.told == ["the broker is away"] * 12


def test_it_does_not_start_over_before_its_time(poller, time_passes):
    assert poller.step() == 1
    time_passes.seconds += 0.4
    assert poller.step() == pytest.approx(0.6)
    assert poller.told == ["the broker is away"]


def test_an_outage_after_good_times_begins_with_1_s_again(poller, time_passes, monkeypatch):
    """KJO-53."""
    for pause in (1, 2):
        assert poller.step() == pause
        time_passes.seconds += pause
    # Given: it works for longer than the longest pause

    class Working(Subscription):
        def poll(self, max_records, timeout, max_bytes):
            if time_passes.seconds > 1100:
                raise ConnectionError("away again")
            return []

    monkeypatch.setattr(poller._transport, "subscribe", lambda *a, **k: Working(), raising=False)
    assert poller.step() == 0
    # When it fails again
    time_passes.seconds += 200
    # Then
    assert poller.step() == 1
