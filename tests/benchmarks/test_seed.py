"""The seeded database of the benchmarks: the same each time, and consistent in itself."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.db.models import Count, Max, Min, Sum

from kjo_django.limits import lines
from kjo_django.models import (
    BOUNDS,
    DeadLetter,
    Job,
    JobFailure,
    MetricBucket,
    MetricRollup,
    ProcessedEvent,
    Workflow,
)
from kjo_django.runtime import current_runtime
from kjo_django.schedules.shown import overview
from kjo_django.workflows import lists
from kjo_django.workflows.snapshots import graph
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.seeding import kinds
from tests.benchmarks.seeding.features import (
    JOBS_APART,
    JOBS_IN_LINE,
    SCHEDULES,
    add_features,
)
from tests.benchmarks.seeding.filling import fill

pytestmark = [pytest.mark.postgres, pytest.mark.large]

NOW = datetime(2026, 1, 8, tzinfo=UTC)
JOBS, LETTERS = 20_000, 400


def digest(table: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT md5(string_agg(t::text, '\n' ORDER BY id)) FROM {table} AS t")
        return str(cursor.fetchone()[0])


def test_a_seeded_database_is_one_of_seven_days_of_work(postgres):
    counts = fill(JOBS, LETTERS, now=NOW)

    assert counts["kjo_job"] == JOBS
    assert counts["kjo_dead_letter"] == LETTERS
    ends = Job.objects.aggregate(first=Min("created_at"), last=Max("created_at"))
    assert ends["last"] <= NOW
    assert ends["first"] - (NOW - timedelta(days=7)) < timedelta(hours=1)
    states = dict(Job.objects.order_by().values_list("state").annotate(Count("pk")))
    assert set(states) == {"completed", "failed", "cancelled", "pending", "queued", "failing"}
    assert states["completed"] > 0.9 * JOBS
    assert set(Job.objects.order_by().values_list("handler", flat=True).distinct()) == {
        kind.handler for kind in kinds.KINDS
    }
    assert DeadLetter.objects.values("fingerprint").distinct().count() > 10


def test_what_came_of_the_jobs_adds_up(postgres):
    fill(JOBS, LETTERS, now=NOW)

    completed = Job.objects.filter(state="completed")
    assert ProcessedEvent.objects.count() == completed.count()
    assert {job.message_id for job in completed[:50]} <= set(
        ProcessedEvent.objects.values_list("event_id", flat=True)
    )
    hours = MetricRollup.objects.filter(minutes=MetricRollup.HOUR)
    for rows in (MetricBucket.objects.all(), hours):
        sums = rows.aggregate(completed=Sum("completed_count"), failed=Sum("failed_count"))
        assert sums["completed"] == completed.count()
        assert sums["failed"] == Job.objects.filter(state="failed").count()
    histogram = hours.exclude(handler="").first().run_histogram
    assert len(histogram) == BOUNDS
    dead = DeadLetter.objects.filter(state="open")
    assert set(dead.values_list("job__state", flat=True)) == {"failed"}
    last_tries = JobFailure.objects.filter(job__state="failed", attempt=3)
    assert last_tries.count() == Job.objects.filter(state="failed").count()


def test_limits_workflows_and_schedules_are_consistent(postgres):
    fill(JOBS, LETTERS, now=NOW)
    add_features(JOBS, LETTERS, NOW)

    counts = lines.waiting_counts(
        current_runtime(), [f"job:{kind.handler}" for kind in kinds.KINDS]
    )
    assert sum(counts.values()) == JOBS // JOBS_IN_LINE
    workflows = list(Workflow.objects.order_by("pk"))
    assert len(workflows) == JOBS // JOBS_APART
    for workflow, facts in lists.facts(workflows).items():
        jobs = Job.objects.filter(stage__workflow=workflow)
        assert facts["steps"] == jobs.count() == 52
        assert facts["completed"] == jobs.filter(state="completed").count()
        assert [len(stage.required) for stage in graph(workflow)] == [0, 1, 1]
    assert len(overview()) == SCHEDULES


def test_nothing_of_it_is_due_and_its_indexes_are_back(postgres):
    fill(JOBS, LETTERS, now=NOW)

    assert not Job.objects.filter(state__in=("pending", "failing"), available_at__lte=NOW).exists()
    with connection.cursor() as cursor:
        found = connection.introspection.get_constraints(cursor, Job._meta.db_table)
    wanted = {index.name for index in Job._meta.indexes}
    assert wanted | {"kjo_job_unique_id"} <= set(found)


def test_the_same_numbers_give_the_same_rows(postgres, django_db_blocker):
    digests = []
    for _ in range(2):
        fill(JOBS, LETTERS, now=NOW)
        digests.append([digest("kjo_job"), digest("kjo_dead_letter"), digest("kjo_job_failure")])
        with connection.cursor() as cursor:
            cursor.execute(
                "TRUNCATE kjo_job, processed_events, kjo_metric_bucket, kjo_metric_rollup, "
                "kjo_worker CASCADE"
            )
    assert digests[0] == digests[1]


def test_it_refuses_tables_that_have_rows(postgres):
    fill(100, 1, now=NOW)
    with pytest.raises(BenchmarkError, match="rows already"):
        fill(100, 1, now=NOW)
