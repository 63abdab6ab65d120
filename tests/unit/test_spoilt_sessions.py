"""Handlers that leave their lane a database session that nobody can use: a role without rights,
another search path, a session that only reads."""

from __future__ import annotations

import pytest

from kjo_django.models import DeadLetter, Job, JobFailure, ProcessedEvent
from tests.adversaries import SPOILS
from tests.databases import MARIADB, MYSQL
from tests.ledger.jobs import write
from tests.unit.deliveries import KJO, MEMORY, as_job, entries
from tests.unit.workers import Running
from tests.waiting import wait_until

pytestmark = pytest.mark.medium  # a worker's threads, on the databases that have sessions

SQLITE = pytest.param("sqlite_file", id="sqlite")
POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres, id="postgres")
DATABASES = {"sqlite": [SQLITE], "postgresql": [POSTGRES], "mysql": [MARIADB, MYSQL]}


@pytest.fixture
def _database(request):
    request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def _configured(settings, _database, forgotten_definitions):
    settings.KJO = {
        **KJO,
        **MEMORY,
        "CONCURRENCY": 1,
        "POLL_INTERVAL": 0.2,
        "HEARTBEAT_INTERVAL": 0.2,
        "BACKOFF_BASE": 0.05,
        "SHUTDOWN_GRACE": 5,
    }


every_way = pytest.mark.parametrize(
    ("_database", "spoil"),
    [
        pytest.param(*database.values, spoil, marks=database.marks, id=f"{database.id}-{way}")
        for vendor, ways in SPOILS.items()
        for database in DATABASES[vendor]
        for way, spoil in ways.items()
    ],
    indirect=["_database"],
)


def ended(count):
    return lambda: Job.objects.filter(state__in=["completed", "failed"]).count() == count


@every_way
def test_an_outside_job_that_leaves_a_spoilt_session_completes_and_costs_others_nothing(spoil):
    """It stayed queued with 0 attempts, and its lane ran nothing any more."""

    # Given
    def leave_spoilt(job: str) -> None:
        spoil()

    guilty = as_job(leave_spoilt, "sessions.guilty", atomic=False)
    with Running():
        # When
        guilty.enqueue(job="guilty")
        wait_until(ended(1), "the end of the guilty one", lambda: states())
        for number in range(5):
            write.enqueue(job=f"innocent {number}")
        wait_until(ended(6), "the ends of those that come after it", lambda: states())
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


@every_way
def test_the_attempts_of_an_atomic_job_that_spoils_its_session_count(spoil):
    """Its group was refused again and again."""

    # Given
    def leave_spoilt(job: str) -> None:
        spoil()

    guilty = as_job(leave_spoilt, "sessions.guilty", max_attempts=2)
    with Running():
        # When
        guilty.enqueue(job="guilty")
        wait_until(ended(1), "the end of the guilty one", lambda: states())
        for number in range(5):
            write.enqueue(job=f"innocent {number}")
        wait_until(ended(6), "the ends of those that come after it", lambda: states())
    # Then
    assert states().pop(("ledger.write", "completed", 1)) == 5
    assert entries() == {f"innocent {number}": 1 for number in range(5)}
    job = Job.objects.get(handler="sessions.guilty")
    assert (job.state == "failed") == DeadLetter.objects.exists()
    assert job.attempts == max(1, JobFailure.objects.count())
