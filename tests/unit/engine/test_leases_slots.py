"""The slots of limits among a worker's leases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from kjo_django.coordination.base import Claim, slot_name
from kjo_django.engine.handler.context import JobContext
from kjo_django.engine.handler.timeouts import LOOK, RunningCall, TimeoutWatch
from kjo_django.engine.leases import LeaseBook
from kjo_django.exceptions import CoordinationError, JobCancelledError
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


def test_a_slot_that_is_given_back_while_it_is_asked_for_again_is_free(
    standing_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker whose slot is not known any more
    leases, coordination = living("late"), get_coordination()
    assert takes_slot(leases, "delivery")
    coordination.release([SLOT], "late")
    claim = type(coordination).claim

    def claim_late(self: Any, names: Sequence[str], *arguments: Any) -> list[Claim]:
        if SLOT in names:
            leases.release(["delivery"])
        return claim(self, names, *arguments)

    monkeypatch.setattr(type(coordination), "claim", claim_late)
    # When its delivery ends between the answer and the claim
    leases.renew()
    # Then another worker may have it
    assert takes_slot(living("other"), "theirs")


def test_a_slot_cannot_be_taken_anew_while_it_is_released_late(
    standing_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat released it just after a lane had taken it, and others ran beside that lane."""
    # Given a slot that was given back, of which the worker has got no answer
    leases, coordination = living("late"), get_coordination()
    release, taken = coordination.release, list[bool]()
    assert takes_slot(leases, "first")

    def release_unanswered(*arguments: Any, **options: Any) -> None:
        release(*arguments, **options)
        raise CoordinationError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(coordination, "release", release_unanswered)
        leases.release(["first"])

    def release_later(names: Sequence[str], *arguments: Any, **options: Any) -> None:
        if not taken:
            taken.append(takes_slot(leases, "next"))
        release(names, *arguments, **options)

    monkeypatch.setattr(coordination, "release", release_later)
    # When the next delivery asks for it while the heartbeat releases it
    leases.show_alive()
    # Then it is refused, and has the slot with the next heartbeat at the latest
    assert taken == [False]
    leases.show_alive()
    assert takes_slot(leases, "next")
    assert get_coordination().holders([SLOT]) == {SLOT: "late"}


# --- Runs whose slot is another's -----------------------------------------------------------------


class Worker:
    """Leases, and the watch of what runs under them."""

    def __init__(self) -> None:
        self.leases = living("late")
        self.watch = TimeoutWatch(
            frozen_after=ALIVE.total_seconds(),
            has_slot=self.leases.has_slot,
            has_lost_slot=self.leases.has_lost_slot,
        )
        self.watch.step()
        assert takes_slot(self.leases, "delivery")

    def call(self) -> RunningCall:
        """Call the handler of the delivery that has the slot."""
        context = JobContext("id", 1, 5, "id", "q")
        context.lease = "delivery"
        return RunningCall(self.watch, context, 3600.0)

    def looks(self) -> None:
        """Look as the watch's thread does; what that raises is raised here."""
        self.watch.step()
        for _ in range(1000):
            pass


def another_takes_the_slot() -> LeaseBook:
    other = living("other")
    assert other.release_abandoned([SLOT]) == {SLOT}
    assert takes_slot(other, "theirs")
    return other


@pytest.mark.promise("frozen-slot")
def test_a_run_that_begins_after_the_thaw_is_interrupted(standing_clock: Clock) -> None:
    # Given a worker that is frozen between taking a slot and calling the handler
    worker = Worker()
    standing_clock.advance(ALIVE.total_seconds() + 1)
    another_takes_the_slot()
    # When it goes on, and its watch looks before the handler is called
    worker.watch.step()
    with pytest.raises(JobCancelledError, match="has lost its slot"), worker.call():
        worker.leases.show_alive()
        standing_clock.advance(LOOK)
        worker.looks()


def test_a_run_is_interrupted_after_a_freeze_shorter_than_a_sign_of_life(
    standing_clock: Clock,
) -> None:
    worker = Worker()
    with pytest.raises(JobCancelledError, match="has lost its slot"), worker.call():
        # Given a sign that is some seconds old, when the worker is frozen
        standing_clock.advance(4)
        worker.looks()
        standing_clock.advance(ALIVE.total_seconds() - 3)
        another_takes_the_slot()
        # When it goes on
        worker.leases.show_alive()
        worker.looks()


@pytest.mark.parametrize("duty", [LeaseBook.show_alive, LeaseBook.renew])
def test_a_run_is_interrupted_whose_worker_could_not_give_its_sign(
    standing_clock: Clock, duty: Callable[[LeaseBook], None]
) -> None:
    """It waited for others to have written, and was never frozen."""
    worker = Worker()
    with pytest.raises(JobCancelledError, match="has lost its slot"), worker.call():
        while standing_clock.offset < ALIVE.total_seconds() + 1:
            standing_clock.advance(LOOK)
            worker.looks()
        another_takes_the_slot()
        duty(worker.leases)
        worker.looks()


def test_a_run_goes_on_whose_slot_nobody_has_taken(standing_clock: Clock) -> None:
    # Given a worker whose sign was missing for a while
    worker = Worker()
    with worker.call():
        while standing_clock.offset < ALIVE.total_seconds() + 1:
            standing_clock.advance(LOOK)
            worker.looks()
        # When it gives its sign again
        worker.leases.show_alive()
        worker.looks()
    # Then the slot is its own, until the delivery ends
    assert get_coordination().holders([SLOT]) == {SLOT: "late"}
    worker.leases.release(["delivery"])
    assert get_coordination().holders([SLOT]) == {}
