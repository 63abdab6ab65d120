"""How many of the jobs that wait for a limit are released, on each database.

Tier: medium, each real engine once: what is promised depends on how its locks behave.
"""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
from django.db import connections
from django.utils import timezone

from kjo_django.enqueue.storing import dispatch_jobs
from kjo_django.limits import lines
from kjo_django.models import NEVER, HeldJob, Job
from kjo_django.runtime import get_transport, use_database
from tests.factories import JobFactory
from tests.waiting import PATIENCE

LIMIT, MOST, WORKERS = "RATE:job:tests.released", 10, 4


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.postgres),
        pytest.param("mariadb", marks=pytest.mark.mariadb),
    ],
)
def alias(request: pytest.FixtureRequest, settings: Any) -> str:
    found: str = request.getfixturevalue(f"{request.param}_alias")
    settings.KJO = settings.KJO | {"DATABASE": found}
    Job.objects.using(found).all().delete()
    HeldJob.objects.using(found).all().delete()
    return found


def test_no_more_are_on_their_way_than_may_be_however_many_workers_release_them(
    alias: str,
) -> None:
    """Each of them has read that none is, before the first one has released any."""
    jobs = [
        JobFactory.build(
            id=uuid.uuid4(), handler="tests.released", queue="emails", available_at=NEVER
        )
        for _ in range(100)
    ]
    Job.objects.using(alias).bulk_create(jobs)
    HeldJob.objects.using(alias).bulk_create(
        HeldJob(job_id=job.pk, limit=LIMIT, queue="emails", waiting_since=timezone.now())
        for job in jobs
    )
    errors: list[BaseException] = []
    barrier = threading.Barrier(WORKERS, timeout=PATIENCE)

    def fill() -> None:
        try:
            with use_database(alias) as runtime:
                barrier.wait()
                for _ in range(5):
                    lines.fill(runtime, LIMIT, MOST, 0.0, 0.1)
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=fill) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert errors == []
    assert HeldJob.objects.using(alias).filter(is_released=True).count() == MOST


def test_released_jobs_come_before_a_backlog_but_not_before_others_of_their_key(
    alias: str,
) -> None:
    """Behind it they would come too late for the moments at which they may start."""
    # Given a backlog, and behind it two jobs in line, one of which has a key
    with use_database(alias) as runtime:
        queue = runtime.settings.queue("emails")
        backlog, lone, keyed = (
            JobFactory.build(
                id=uuid.uuid4(), handler="tests.released", queue=queue.name, key=key, state=state
            )
            for key, state in (("", "queued"), ("", "queued"), ("k", "queued"))
        )
        with runtime.store.writing():
            Job.objects.using(alias).bulk_create([backlog, lone, keyed])
            dispatch_jobs([backlog], queue)
        HeldJob.objects.using(alias).bulk_create(
            HeldJob(job_id=job.pk, limit=LIMIT, queue=queue.name, waiting_since=timezone.now())
            for job in (lone, keyed)
        )
        # When they are released
        assert lines.release(runtime, LIMIT, 2, 0.0) == 2
        # Then a worker gets them in this order, and each once
        subscription = get_transport(queue.transport).subscribe([queue.topic], "tests.released")
        try:
            records = [record for _ in range(3) for record in subscription.poll(1, PATIENCE)]
        finally:
            subscription.close()
    found = [record.headers["kjo-job-id"].decode() for record in records]
    assert found == [str(job.pk) for job in (lone, backlog, keyed)]


def test_what_is_read_of_a_line_is_the_same_however_many_jobs_and_limits_are_asked_for(
    alias: str,
) -> None:
    # Given more jobs and limits than one statement may name, and places of some of them
    jobs = [
        JobFactory.build(id=uuid.uuid4(), handler="tests.released", queue="emails")
        for _ in range(lines._NAMES + 50)
    ]
    names = [f"RATE:job:tests.line:{number}" for number in range(lines._NAMES + 50)]
    Job.objects.using(alias).bulk_create(jobs)
    HeldJob.objects.using(alias).bulk_create(
        HeldJob(
            job_id=job.pk,
            limit=names[number],
            queue="emails",
            is_released=number % 20 == 0,
            waiting_since=timezone.now(),
        )
        for number, job in enumerate(jobs)
        if number % 10 == 0
    )
    # When they are read, some along with their rows
    with use_database(alias) as runtime:
        line = lines.Line(runtime, names)
        rows = line.job_rows([str(job.pk) for job in jobs[:-20]])
        line.read([job.pk for job in jobs])
    # Then
    assert set(rows) == {str(job.pk) for job in jobs[:-20]}
    assert line.places == {
        job.pk: lines.Place(names[number], number % 20 == 0)
        for number, job in enumerate(jobs)
        if number % 10 == 0
    }
    assert line.crowded == set(names[::10])
