"""What a handler sets in its session, its thread or its context, and whether others find it there.

Each job starts as the process did."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from contextlib import suppress

import pytest
from asgiref.sync import sync_to_async
from django.core.cache import caches
from django.db import connection, transaction
from django.db.backends.signals import connection_created
from django.utils import timezone, translation

from kjo_django import BatchItem, signals
from kjo_django.engine import admission
from kjo_django.models import Job
from tests.adversaries import CHANGES, asking, executing
from tests.databases import POSTGRES, SQLITE, every_way
from tests.unit.deliveries import as_job
from tests.unit.workers import Running
from tests.waiting import wait_until

# a worker's threads, on the databases that have sessions
pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("one_lane")]

TENANT: contextvars.ContextVar[str] = contextvars.ContextVar("TENANT", default="")


def run_all(handler, count=6, *, together=True):
    """Enqueue jobs of a handler, and let one lane run them.

    :param together: whether they are all there when the lane begins; else each is enqueued when the
        one before has ended.
    """
    numbers = [str(number) for number in range(count)]
    if together:
        for number in numbers:
            handler.enqueue(job=number)
    with Running():
        for number in numbers if not together else ():
            handler.enqueue(job=number)
            wait_until(have_completed, "its end", states)
        wait_until(have_completed, "their ends", states)


def have_completed():
    return not Job.objects.exclude(state="completed").exists()


def states():
    return list(Job.objects.values_list("handler", "state", "attempts", "error"))


# Atomic without a savepoint, and what coroutines do on PostgreSQL, too.
@pytest.mark.large("database-only", "outside", "coroutine-sqlite", "coroutine-mariadb")
@every_way(CHANGES, "change", "seen_of")
@pytest.mark.parametrize("kind", ["atomic", "database-only", "outside", "coroutine"])
def test_what_a_job_changes_in_its_session_the_next_one_does_not_find(kind, change, seen_of):
    """Later jobs of a group had its tenant, and all later ones of the lane its time zone."""
    # Given
    seen = []

    def work(job: str) -> None:
        seen.append(seen_of())
        change()

    async def work_async(job: str) -> None:
        await sync_to_async(work)(job)

    options = {"database-only": {"database_only": True}, "outside": {"atomic": False}}
    handler = as_job(work, "sessions.changes", **options.get(kind, {}))
    if kind == "coroutine":
        handler = as_job(work_async, "sessions.changes", atomic=False)
    connection.close()
    pristine = seen_of()
    connection.close()
    # When: those that run at the same time share the session of their event loop
    run_all(handler, together=kind != "coroutine")
    # Then
    assert seen == [pristine] * 6
    assert not Job.objects.exclude(attempts=1).exists()


def set_variables():
    translation.activate("fr")
    timezone.activate("Asia/Tokyo")
    TENANT.set("theirs")


def variables():
    return translation.get_language(), timezone.get_current_timezone_name(), TENANT.get()


PRISTINE = ("en", "UTC", "")


@pytest.mark.parametrize(
    "kind", ["atomic", "database-only", "outside", "coroutine", "batch", "raises"]
)
def test_the_language_time_zone_and_variables_of_a_job_are_its_own(kind, settings):
    """All later jobs of the lane had them."""
    # Given
    settings.LANGUAGE_CODE, settings.TIME_ZONE = "en", "UTC"
    seen = []

    def work(job: str) -> None:
        seen.append(variables())
        set_variables()
        assert variables() == ("fr", "Asia/Tokyo", "theirs")
        if kind == "raises" and len(seen) < 4:
            raise ValueError("again")

    async def work_async(job: str) -> None:
        work(job)

    def work_batch(batch: list[BatchItem]) -> None:
        work("")

    functions = {"coroutine": work_async, "batch": work_batch}
    options = {
        "database-only": {"database_only": True},
        "outside": {"atomic": False},
        "coroutine": {"atomic": False},
        "batch": {"batch": 2},
    }
    handler = as_job(functions.get(kind, work), "contexts.sets", **options.get(kind, {}))
    # When
    run_all(handler)
    # Then
    assert set(seen) == {PRISTINE}
    assert len(seen) == {"batch": 3, "raises": 9}.get(kind, 6)


@pytest.mark.parametrize(
    ("_database", "way"),
    [
        pytest.param(*SQLITE.values, "pragma", id="sqlite"),
        pytest.param(*POSTGRES.values, "set", marks=POSTGRES.marks, id="postgres"),
    ],
    indirect=["_database"],
)
def test_what_receivers_and_callbacks_set_is_gone_before_the_next_job(settings, way):
    # Given
    settings.LANGUAGE_CODE, settings.TIME_ZONE = "en", "UTC"
    seen = []

    def work(job: str) -> None:
        seen.append((*variables(), ask()))
        transaction.on_commit(set_variables)
        transaction.on_commit(change)

    def receive(**facts: object) -> None:
        set_variables()
        change()

    change, ask = CHANGES[connection.vendor][way]
    pristine = (*PRISTINE, ask())
    connection.close()
    handler = as_job(work, "contexts.sets")
    signals.job_completed.connect(receive, weak=False)
    try:
        # When
        run_all(handler, together=False)
    finally:
        signals.job_completed.disconnect(receive)
    # Then
    assert seen == [pristine] * 6


@pytest.mark.parametrize("atomic", [True, False])
def test_a_callback_of_a_commit_finds_the_variables_of_its_job(atomic, settings):
    """The callbacks of a group ran with what its last job had left."""
    # Given
    settings.LANGUAGE_CODE = "en"
    seen = []

    def work(job: str) -> None:
        translation.activate("fr" if int(job) % 2 else "de")
        TENANT.set(job)
        with suppress(ValueError), transaction.atomic():
            raise ValueError("makes Django begin another list of callbacks")
        transaction.on_commit(lambda: seen.append((TENANT.get(), translation.get_language())))

    handler = as_job(work, "contexts.sets", atomic=atomic)
    # When
    run_all(handler, 3)
    # Then
    assert seen == [("0", "de"), ("1", "fr"), ("2", "de")]


@pytest.mark.parametrize("_database", [POSTGRES], indirect=True)
@pytest.mark.parametrize("atomic", [True, False])
def test_what_a_project_sets_in_each_new_session_is_no_change(atomic):
    """Such a session would be closed after each job, and the next one begin with the same."""
    # Given a session that the first job closes outside a transaction
    sessions = []

    def set_timeout(connection, **others: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET statement_timeout = 77000")
        sessions.append(connection)

    def work(job: str) -> None:
        if job == "0" and not atomic:
            connection.close()
        assert asking("SHOW statement_timeout")() == "77s"

    handler = as_job(work, "sessions.sets", atomic=atomic, max_attempts=1)
    connection_created.connect(set_timeout)
    try:
        # When
        run_all(handler, together=False)
    finally:
        connection_created.disconnect(set_timeout)
    # Then
    assert not Job.objects.exclude(state="completed").exists()
    lanes = Counter(sessions).most_common(1)[0][1]
    assert lanes == (1 if atomic else 2)


@pytest.mark.parametrize("_database", [POSTGRES], indirect=True)
def test_jobs_that_change_their_session_do_not_share_groups_for_long(monkeypatch):
    """Each of a group would be admitted again and again, and only its first one run."""
    # Given
    admitted = []
    admit = admission.admit_group

    def counting(leases, deliveries, at=None):
        admitted.append(len(deliveries))
        return admit(leases, deliveries, at)

    monkeypatch.setattr(admission, "admit_group", counting)
    handler = as_job(lambda job: executing("SET LOCAL work_mem = '77kB'")(), "sessions.changes")
    # When
    run_all(handler, 120)
    # Then
    assert set(admitted[-60:]) == {1}
    assert sum(admitted) < 2 * 120


def test_the_items_of_a_batch_that_fails_do_not_find_what_another_one_has_changed():
    # Given
    seen = []

    def work(batch: list[BatchItem]) -> None:
        if len(batch) > 1:
            raise ValueError("not together")
        seen.append(asking("PRAGMA cache_size")())
        executing("PRAGMA cache_size = 77")()

    pristine = asking("PRAGMA cache_size")()
    # When
    run_all(as_job(work, "batches.change", batch=3))
    # Then
    assert seen == [pristine] * 6
    assert not Job.objects.exclude(attempts=1).exists()


@pytest.mark.parametrize("_database", [POSTGRES], indirect=True)
def test_coroutines_that_run_at_the_same_time_keep_the_session_they_share():
    """It was closed when any of them ended, with the lock that another one held."""
    # Given
    kept = []

    @sync_to_async
    def ask(query: str) -> object:
        return asking(query)()

    async def work(job: str) -> None:
        if job != "0":
            return
        await ask("SELECT pg_advisory_lock(77)")
        while await Job.objects.exclude(state="completed").acount() > 1:
            await asyncio.sleep(0.05)  # sleep: until the others have ended
        kept.append(await ask("SELECT count(*) FROM pg_locks WHERE objid = 77"))

    # When
    run_all(as_job(work, "coroutines.lock", atomic=False), 3)
    # Then
    assert kept == [1]
    assert asking("SELECT count(*) FROM pg_locks WHERE objid = 77")() == 0


@pytest.mark.parametrize("kind", ["atomic", "outside", "coroutine"])
def test_the_jobs_of_a_lane_share_the_clients_of_caches(kind):
    """Django keeps them in variables of the context: each job would make its own."""
    # Given
    clients = []

    def work(job: str) -> None:
        clients.append(caches["default"])

    async def work_async(job: str) -> None:
        work(job)

    function = work_async if kind == "coroutine" else work
    # When
    run_all(as_job(function, "caches.use", atomic=kind == "atomic"))
    # Then
    assert len(set(map(id, clients))) == 1
