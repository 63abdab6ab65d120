"""UUIDv7: ordered by the moment they were made."""

from __future__ import annotations

import threading
import time
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kjo_django import ids
from kjo_django.ids import uuid7, uuid7_floor, uuid7s

moments = st.datetimes(
    min_value=datetime(1970, 1, 1), max_value=datetime(9999, 12, 31), timezones=st.just(UTC)
)


@pytest.fixture
def fresh_clock(monkeypatch):
    """No id was made before; the clock is set by hand."""
    monkeypatch.setattr(ids, "_last_tick", 0)

    def stand_at(nanoseconds: int) -> None:
        monkeypatch.setattr(time, "time_ns", lambda: nanoseconds)

    return stand_at


def test_it_is_a_version_7_uuid_of_the_rfc_variant():
    for made in (uuid7() for _ in range(1000)):
        assert made.version == 7
        assert made.variant == uuid.RFC_4122


def test_it_carries_the_milliseconds_of_its_making(fresh_clock):
    # Given
    fresh_clock(1_700_000_000_123_456_789)
    # When
    made = uuid7()
    # Then
    assert made.int >> 80 == 1_700_000_000_123


def test_each_is_greater_than_the_one_before():
    made = [uuid7() for _ in range(20_000)]
    assert made == sorted(set(made))


def test_they_keep_growing_while_the_clock_stands_still_or_steps_back(fresh_clock):
    # Given
    fresh_clock(1_700_000_000_000_000_000)
    made = [uuid7() for _ in range(5000)]
    # When
    fresh_clock(1_600_000_000_000_000_000)
    made += [uuid7() for _ in range(5000)]
    # Then
    assert made == sorted(set(made))
    assert {one.version for one in made} == {7}


def test_many_made_at_once_are_like_those_made_one_by_one():
    # When
    made = [uuid7(), *uuid7s(1), *uuid7s(5000), uuid7(), *uuid7s(0), *uuid7s(5000), uuid7()]
    # Then
    assert len(made) == 10_004
    assert made == sorted(set(made))
    assert {(one.version, one.variant) for one in made} == {(7, uuid.RFC_4122)}
    # No two share their random bits by being made in one call
    assert len({one.int & (1 << 62) - 1 for one in made}) == len(made)


def test_many_made_at_once_go_on_from_the_clock(fresh_clock):
    # Given
    fresh_clock(1_700_000_000_123_000_000)
    # When
    made = uuid7s(2 * 4096 + 1)
    # Then
    assert made[0].int >> 80 == made[4095].int >> 80 == 1_700_000_000_123
    assert made[4096].int >> 80 == 1_700_000_000_124
    assert made[-1].int >> 80 == 1_700_000_000_125
    assert made[-1] < uuid7()


def test_threads_never_make_the_same_one():
    # Given
    made: list[list[uuid.UUID]] = [[] for _ in range(8)]
    barrier = threading.Barrier(8)

    def make(into: list[uuid.UUID]) -> None:
        barrier.wait()
        for _ in range(20):
            into.extend(uuid7() for _ in range(50))
            into.extend(uuid7s(50))

    threads = [threading.Thread(target=make, args=(into,)) for into in made]
    # When
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Then
    assert all(own == sorted(own) for own in made)
    assert len({one for own in made for one in own}) == 16_000


@given(moments)
@example(datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC))
def test_the_floor_of_a_moment_is_a_version_7_uuid_of_that_very_millisecond(moment):
    floor = uuid7_floor(moment)
    assert (floor.version, floor.variant) == (7, uuid.RFC_4122)
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert floor.int >> 80 == (moment - epoch) // timedelta(milliseconds=1)


@given(moments, st.integers(min_value=0, max_value=10_000_000))
def test_the_floor_is_below_every_id_made_at_or_after_the_moment(moment, later):
    # Given
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    nanoseconds = ((moment - epoch) // timedelta(microseconds=1) + later) * 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids, "_last_tick", 0)
        patch.setattr(time, "time_ns", lambda: nanoseconds)
        # When, then
        assert uuid7_floor(moment) <= uuid7()


@given(moments, moments)
def test_floors_are_ordered_as_their_moments(one, other):
    assert (uuid7_floor(one) <= uuid7_floor(other)) or one > other


def test_digits_are_those_of_ids_in_order_with_all_others():
    before = uuid7().hex
    found = [f"{value:032x}" for value in ids.uuid7_values(3000)]
    after = uuid7().hex
    assert [before, *found, after] == sorted({before, *found, after})
    assert {uuid.UUID(digits).hex for digits in found} == set(found)
    assert {uuid.UUID(digits).version for digits in found} == {7}
    assert ids.uuid7_values(0) == []
