"""Handlers that leave their lane a database session that nobody can use: a role without rights,
another search path, a session that only reads."""

from __future__ import annotations

import pytest

from kjo_django.models import DeadLetter, Job, JobFailure, ProcessedEvent
from tests.adversaries import SPOILS
from tests.databases import every_way
from tests.ledger.jobs import write
from tests.unit.deliveries import as_job, entries
from tests.unit.workers import Running
from tests.waiting import wait_until

# a worker's threads, on the databases that have sessions
pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("one_lane")]


def ended(count):
    return lambda: Job.objects.filter(state__in=["completed", "failed"]).count() == count


def run_before_others(guilty):
    """Let one lane run a job to its end, and then five others."""
    with Running():
        guilty.enqueue(job="guilty")
        wait_until(ended(1), "the end of the guilty one", states)
        for number in range(5):
            write.enqueue(job=f"innocent {number}")
        wait_until(ended(6), "the ends of those that come after it", states)


@every_way(SPOILS, "spoil")
def test_an_outside_job_that_leaves_a_spoilt_session_completes_and_costs_others_nothing(spoil):
    """It stayed queued with 0 attempts, and its lane ran nothing any more."""

    # Given
    def leave_spoilt(job: str) -> None:
        spoil()

    guilty = as_job(leave_spoilt, "sessions.guilty", atomic=False)
    # When
    run_before_others(guilty)
    # Then
    assert states() == {("sessions.guilty", "completed", 1): 1, ("ledger.write", "completed", 1): 5}
    assert entries() == {f"innocent {number}": 1 for number in range(5)}
    assert not JobFailure.objects.exists()
    assert ProcessedEvent.objects.count() == 6


def states():
    """How many jobs of a handler are in which state after how many attempts."""
    found = {}
    for each in Job.objects.values_list("handler", "state", "attempts"):
        found[each] = found.get(each, 0) + 1
    return found


@every_way(SPOILS, "spoil")
def test_the_attempts_of_an_atomic_job_that_spoils_its_session_count(spoil):
    """Its group was refused again and again."""

    # Given
    def leave_spoilt(job: str) -> None:
        spoil()

    guilty = as_job(leave_spoilt, "sessions.guilty", max_attempts=2)
    # When
    run_before_others(guilty)
    # Then
    assert states().pop(("ledger.write", "completed", 1)) == 5
    assert entries() == {f"innocent {number}": 1 for number in range(5)}
    job = Job.objects.get(handler="sessions.guilty")
    assert (job.state == "failed") == DeadLetter.objects.exists()
    assert job.attempts == max(1, JobFailure.objects.count())
