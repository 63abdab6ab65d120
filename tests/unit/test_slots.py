"""The slots of limits among a worker's leases."""

from __future__ import annotations

from datetime import timedelta

import pytest

from kjo_django.coordination.base import slot_name
from kjo_django.engine.leases import LeaseBook
from kjo_django.runtime import current_runtime, get_coordination
from tests.faults.clock import Clock

pytestmark = pytest.mark.django_db(transaction=True)
NAME, TTL, ALIVE = "SLOT:job:one", timedelta(seconds=60), timedelta(seconds=15)
SLOT = slot_name(NAME, 1)


def living(worker: str) -> LeaseBook:
    """The leases of a worker that has given its sign of life."""
    leases = LeaseBook(current_runtime(), worker, TTL, ALIVE)
    leases.show_alive()
    return leases


def takes_slot(leases: LeaseBook, delivery: str) -> bool:
    """Whether the only slot is taken for a delivery."""
    (is_taken,) = leases.claim_slots([(delivery, NAME, 1)], TTL)
    return is_taken


def test_a_slot_that_was_lost_and_taken_again_stays_when_the_first_delivery_ends(
    standing_clock: Clock,
) -> None:
    # Given a worker that is frozen while it has a slot, which another one takes and gives back
    frozen = living("frozen")
    assert takes_slot(frozen, "first")
    standing_clock.advance(ALIVE.total_seconds() + 1)
    other = living("other")
    assert other.release_abandoned([SLOT]) == {SLOT}
    assert takes_slot(other, "theirs")
    other.release(["theirs"])
    # When it goes on, takes the slot for the next delivery, and the end of the first is recorded
    assert takes_slot(frozen, "next")
    frozen.release(["first"])
    # Then the slot is that of the next one
    assert get_coordination().holders([SLOT]) == {SLOT: "frozen"}
    assert not takes_slot(other, "theirs")
    # And free when that has ended
    frozen.release(["next"])
    assert takes_slot(other, "theirs")
