"""A prune beside other sessions of PostgreSQL: what is requeued meanwhile stays, and it waits for
nobody who claims leases.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.utils import timezone

from kjo_django.ids import uuid7_floor
from kjo_django.models import DeadLetter, DeadLetterState, Job, JobFailure, Lease
from kjo_django.operations.jobs import requeue
from kjo_django.operations.maintenance import prune as module
from kjo_django.operations.maintenance.prune import prune
from tests.factories import JobFactory
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.postgres
LONG_AGO = timezone.now() - timedelta(days=400)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as found:
        yield found


def in_thread(threads: ThreadPoolExecutor, call: Any, *arguments: Any) -> Any:
    """Call a function in another thread, with a connection of its own."""

    def run() -> Any:
        try:
            return call(*arguments)
        finally:
            connections.close_all()

    return threads.submit(run)


def old_failed_job() -> Job:
    job: Job = JobFactory.build(state="failed", finished_at=LONG_AGO, queue="ledger")
    job.pk = uuid7_floor(LONG_AGO)
    job.save(force_insert=True)
    JobFailure.objects.create(job=job, generation=1, attempt=1, failed_at=LONG_AGO)
    return job


def waiting_sessions() -> int:
    """Return how many sessions wait for a row that another one holds."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return int(cursor.fetchone()[0])


def test_a_job_that_is_requeued_while_it_is_found_stays(
    postgres: None, threads: ThreadPoolExecutor
) -> None:
    # Given an old failed job, which somebody is requeueing
    job = old_failed_job()
    with transaction.atomic():
        assert requeue([job]).changed_count == 1
        # When a prune meets it
        pruned = in_thread(threads, prune)
        wait_until(lambda: pruned.done() or waiting_sessions() == 1)
    # Then
    assert pruned.result(PATIENCE)["failed_jobs"] == 0
    found = Job.objects.get()
    assert found.generation == 2
    assert JobFailure.objects.count() == 1


def test_a_job_that_is_being_pruned_is_not_requeued(
    postgres: None, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a prune that has locked an old job
    job = old_failed_job()
    delete, requeued = module._delete, list[Any]()

    def delete_beside(rows: Any, keys: Any) -> int:
        if rows.model is Job:
            # When somebody requeues it
            requeued.append(in_thread(threads, requeue, [job.pk]))
            wait_until(lambda: requeued[0].done() or waiting_sessions() == 1)
        return delete(rows, keys)

    monkeypatch.setattr(module, "_delete", delete_beside)
    assert prune()["failed_jobs"] == 1
    # Then
    assert requeued[0].result(PATIENCE).counts == {"processing": 1}  # its row was locked
    assert not Job.objects.exists()
    assert not DeadLetter.objects.filter(state=DeadLetterState.OPEN).exists()


def test_a_prune_leaves_a_lease_that_somebody_has_locked(
    postgres: None, threads: ThreadPoolExecutor
) -> None:
    # Given two leases that expired long ago, one of which is being claimed
    leases = Lease.objects.all()
    for name in ("b", "a"):
        leases.create(name=name, expires_at=LONG_AGO)
    with transaction.atomic():
        leases.select_for_update().get(name="a")
        # When, then
        pruned = in_thread(threads, prune)
        assert pruned.result(PATIENCE)["leases"] == 1
    assert leases.get().name == "a"
