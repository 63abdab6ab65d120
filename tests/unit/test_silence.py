"""A server that does not answer is waited for by one, not by everybody in turn."""

from __future__ import annotations

import pytest

from kjo_django.coordination import circuit_breaker
from kjo_django.coordination.circuit_breaker import LONGEST, Silence


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(circuit_breaker, "time", found)
    return found


def fail(quiet: Silence, clock: Clock, seconds: float) -> None:
    """Ask, and wait so long in vain."""
    assert not quiet.lasts()
    began = clock.now
    clock.now += seconds
    quiet.failed(began)


def test_all_are_asked_until_one_waits_in_vain(clock):
    quiet = Silence()
    assert not quiet.lasts()
    assert not quiet.answered()
    fail(quiet, clock, 1.0)
    assert quiet.lasts()
    assert quiet.lasts()


def test_after_a_rest_one_asks_for_all(clock):
    # Given
    quiet = Silence()
    fail(quiet, clock, 1.0)
    # When twice the time has passed that it took
    clock.now += 1.99
    assert quiet.lasts()
    clock.now += 0.02
    # Then one asks, and the others go on without
    assert not quiet.lasts()
    assert quiet.lasts()
    # And its answer is everybody's
    assert quiet.answered()
    assert not quiet.lasts()
    assert not quiet.answered()


def test_the_rests_become_longer_up_to_a_limit(clock):
    quiet = Silence()
    for rest in (2.0, 4.0, 8.0, 16.0, LONGEST, LONGEST):
        fail(quiet, clock, 1.0)
        clock.now += rest - 0.01
        assert quiet.lasts(), rest
        clock.now += 0.02
    fail(quiet, clock, 1.0)
    quiet.answered()
    # And begin anew
    fail(quiet, clock, 1.0)
    clock.now += 2.01
    assert not quiet.lasts()


def test_those_who_asked_at_the_same_time_count_as_one(clock):
    quiet = Silence()
    began = clock.now
    clock.now += 1.0
    for _ in range(4):
        quiet.failed(began)
    clock.now += 2.01
    assert not quiet.lasts()


def test_one_who_asks_for_all_and_never_tells_is_not_waited_for(clock):
    quiet = Silence()
    fail(quiet, clock, 1.0)
    clock.now += 2.01
    assert not quiet.lasts()
    clock.now += LONGEST + 0.01
    assert not quiet.lasts()


def test_a_quick_refusal_is_asked_each_time(clock):
    quiet = Silence()
    fail(quiet, clock, 0.001)
    assert not quiet.lasts()
    # Also where it had been silent before
    fail(quiet, clock, 1.0)
    clock.now += 2.01
    fail(quiet, clock, 0.001)
    assert not quiet.lasts()
