"""What people are shown of a job that waits for a limit, and what they can do to it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from kjo_django import job, registry
from kjo_django.contrib import job_view
from kjo_django.enqueue.handle import JobHandle
from kjo_django.enqueue.job_status import limits_awaited
from kjo_django.limits import lines
from kjo_django.limits.control import overview, set_limit
from kjo_django.models import NEVER, HeldJob, Job
from kjo_django.operations.jobs import cancel, requeue
from kjo_django.operations.monitoring import status
from kjo_django.operations.rescheduling import change_queue, run_now
from kjo_django.runtime import current_runtime
from kjo_django.states import JobState, JobStatus
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db(transaction=True)
RATE = "rate 5/s of job:tests.limited"


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    @job(name="tests.limited", queue="emails", rate="5/s", rate_key="to", concurrency=3)
    def limited(to: str) -> None:
        pass

    yield
    registry.unregister("tests.limited")


def waiting(limit: str = "RATE:job:tests.limited:secret") -> Job:
    found = JobFactory(handler="tests.limited", queue="emails", available_at=NEVER)
    HeldJob.objects.create(job_id=found.pk, limit=limit, queue="emails")
    return found


def test_jobs_wait_for_a_limit_until_they_start_or_end() -> None:
    # Given one in line, one on its way to a worker, and those that are cancelled or run anew
    waiting()
    HeldJob.objects.filter(job_id=waiting("SLOT:job:tests.limited").pk).update(is_released=True)
    assert cancel([waiting()]).changed_count == 1
    HeldJob.objects.filter(job_id=waiting().pk).update(generation=7)
    # When, then
    (found,) = [row for row in overview() if row["name"] == "job:tests.limited"]
    assert found["waiting_count"] == 2


def test_the_limit_is_named_with_its_value_and_without_its_key() -> None:
    rate, slots = waiting(), waiting("SLOT:job:tests.limited")
    queue, released = waiting("RATE:queue:emails"), waiting()
    HeldJob.objects.filter(job_id=released.pk).delete()
    set_limit("queue:emails", rate="2/m")
    plain = JobFactory(available_at=timezone.now() + timedelta(hours=1))
    assert limits_awaited([rate, slots, queue, released, plain]) == {
        rate.pk: RATE,
        slots.pk: "concurrency 3 of job:tests.limited",
        queue.pk: "rate 2/m of queue:emails",
        released.pk: "a limit of job:tests.limited",
    }
    # One that is next in line has a moment too.
    soon = timezone.now() + timedelta(minutes=30)
    Job.objects.filter(pk=rate.pk).update(available_at=soon)
    HeldJob.objects.filter(job_id=rate.pk).update(is_released=True)
    rate.refresh_from_db()
    found = JobHandle.of(rate.pk).snapshot()
    assert found is not None
    assert (found.available_at, found.waits_for) == (soon, RATE)
    assert run_now([rate]).counts == {"limited": 1}
    set_limit("job:tests.limited", rate="1/h")
    assert limits_awaited([rate]) == {rate.pk: "rate 1/h of job:tests.limited"}


def test_jobs_that_are_due_cost_no_query_and_many_that_wait_cost_two() -> None:
    many = [waiting() for _ in range(5)]
    with CaptureQueriesContext(
        connection,
    ) as queries:
        assert limits_awaited([JobFactory.build(), *many]).keys() == {row.pk for row in many}
    assert len(queries) == 2
    Job.objects.filter(pk=many[0].pk).update(state=JobState.CANCELLED)
    ended = Job.objects.get(pk=many[0].pk)
    with CaptureQueriesContext(connection) as queries:
        assert limits_awaited([JobFactory.build(), ended]) == {}
    assert len(queries) == 0


def test_the_handle_says_what_it_waits_for() -> None:
    found = JobHandle.of(waiting().pk).snapshot()
    assert found is not None
    assert (found.status, found.available_at, found.waits_for) == (JobStatus.SCHEDULED, None, RATE)
    plain = JobHandle.of(JobFactory().pk).snapshot()
    assert plain is not None
    assert plain.waits_for == ""
    assert plain.available_at is not None


def test_a_viewer_asks_for_it_as_often_as_for_a_job_that_is_due() -> None:
    row = waiting()
    (shown,) = job_view.read([row.pk], frozenset()).values()
    assert shown.facts["status"] == JobStatus.SCHEDULED
    assert shown.retry_after(row.created_at + timedelta(seconds=5)) == 1
    assert shown.retry_after(row.created_at + timedelta(hours=1)) == 15


def test_it_is_counted_as_scheduled_and_never_as_the_oldest() -> None:
    waiting()
    assert status.state_counts()[0]["scheduled"] == 1
    figures = status.overview()
    assert figures["backlog"] == 0
    assert figures["oldest_backlog_seconds"] is None
    assert figures["oldest_waiting_seconds"] is None
    (row,) = status.queue_rows(["emails"], with_lags=False)[0]
    assert (row["states"]["scheduled"], row["oldest_waiting_seconds"]) == (1, None)


def test_it_is_not_run_past_its_limit() -> None:
    row = waiting()
    assert run_now([row]).counts == {"limited": 1}
    assert Job.objects.get(pk=row.pk).available_at == NEVER
    # One that has lost its place is not lost with it.
    HeldJob.objects.all().delete()
    assert run_now([row]).counts == {"due": 1}


def test_it_is_cancelled_and_released_no_more() -> None:
    row = waiting("RATE:job:tests.limited")
    assert cancel([row]).changed_count == 1
    assert lines.release(current_runtime(), "RATE:job:tests.limited", 1, 0.0) == 0
    assert not HeldJob.objects.exists()


@pytest.mark.parametrize("change", [requeue, lambda rows: change_queue(rows, "ledger")])
def test_requeued_or_moved_it_is_due_at_once(change: Any) -> None:
    row = waiting()
    assert change([row]).changed_count == 1
    again = Job.objects.get(pk=row.pk)
    assert again.available_at <= timezone.now()
    assert again.generation == row.generation + 1
