"""A server that does not answer is waited for by one, not by everybody in turn."""

from __future__ import annotations

import pytest

from kjo_django.coordination.base import LONGEST_PAUSE, CircuitBreaker
from tests.unit.deliveries import SetClock


@pytest.fixture
def clock():
    return SetClock()


def fail(breaker: CircuitBreaker, clock: SetClock, seconds: float) -> None:
    """Ask, and wait so long in vain."""
    assert not breaker.is_open()
    began = clock.seconds
    clock.seconds += seconds
    breaker.record_failure(began)


def test_all_are_asked_until_one_waits_in_vain(clock):
    breaker = CircuitBreaker(clock)
    assert not breaker.is_open()
    assert not breaker.record_success()
    fail(breaker, clock, 1.0)
    assert breaker.is_open()
    assert breaker.is_open()


def test_after_a_rest_one_asks_for_all(clock):
    # Given
    breaker = CircuitBreaker(clock)
    fail(breaker, clock, 1.0)
    # When twice the time has passed that it took
    clock.seconds += 1.99
    assert breaker.is_open()
    clock.seconds += 0.02
    # Then one asks, and the others go on without
    assert not breaker.is_open()
    assert breaker.is_open()
    # And its answer is everybody's
    assert breaker.record_success()
    assert not breaker.is_open()
    assert not breaker.record_success()


def test_the_rests_become_longer_up_to_a_limit(clock):
    breaker = CircuitBreaker(clock)
    for rest in (2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE, LONGEST_PAUSE):
        fail(breaker, clock, 1.0)
        clock.seconds += rest - 0.01
        assert breaker.is_open(), rest
        clock.seconds += 0.02
    fail(breaker, clock, 1.0)
    breaker.record_success()
    # And begin anew
    fail(breaker, clock, 1.0)
    clock.seconds += 2.01
    assert not breaker.is_open()


def test_those_who_asked_at_the_same_time_count_as_one(clock):
    breaker = CircuitBreaker(clock)
    began = clock.seconds
    clock.seconds += 1.0
    for _ in range(4):
        breaker.record_failure(began)
    clock.seconds += 2.01
    assert not breaker.is_open()


def test_one_who_asks_for_all_and_never_tells_is_not_waited_for(clock):
    breaker = CircuitBreaker(clock)
    fail(breaker, clock, 1.0)
    clock.seconds += 2.01
    assert not breaker.is_open()
    clock.seconds += LONGEST_PAUSE + 0.01
    assert not breaker.is_open()


def test_a_quick_refusal_is_asked_each_time(clock):
    breaker = CircuitBreaker(clock)
    fail(breaker, clock, 0.001)
    assert not breaker.is_open()
    # Also where it had been silent before
    fail(breaker, clock, 1.0)
    clock.seconds += 2.01
    fail(breaker, clock, 0.001)
    assert not breaker.is_open()
