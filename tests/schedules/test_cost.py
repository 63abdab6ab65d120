"""What many schedules cost (issue 16, point 2)."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from kjo_django.models import Job, Schedule
from kjo_django.runtime import current_runtime
from kjo_django.schedules.ticker import LOOK_EVERY, Ticker
from tests.schedules.conftest import now, step

MANY = 10_000


def store_many(count: int, **columns: object) -> None:
    tick = now() + timedelta(hours=1)
    Schedule.objects.bulk_create(
        [
            Schedule(name=f"s{number}", job="shop.report", every=3600, next_at=tick, **columns)
            for number in range(count)
        ]
    )


@pytest.mark.large
def test_a_look_at_ten_thousand_schedules_costs_an_idle_worker_next_to_nothing(real_database):
    store_many(MANY)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE TABLE kjo_schedule" if connection.vendor == "mysql" else "ANALYZE")
    ticker = step()
    with CaptureQueriesContext(
        connection,
    ) as queries:
        assert ticker.step() == LOOK_EVERY
    assert len(queries) == 1
    looks = 200
    began = time.process_time()
    step(ticker, looks)
    seconds = (time.process_time() - began) / looks
    print(
        f"{1000 * seconds:.2f} ms of CPU for a look, {100 * seconds / LOOK_EVERY:.2f} % of a core"
    )
    # The database's own share is bounded by the index: one entry is read.
    assert seconds / LOOK_EVERY < 0.02
    with connection.cursor() as cursor:
        explain = "EXPLAIN QUERY PLAN " if connection.vendor == "sqlite" else "EXPLAIN "
        cursor.execute(explain + queries[0]["sql"])
        plan = " ".join(str(row) for row in cursor.fetchall())
    assert "kjo_schedule_due_idx" in plan


@pytest.mark.django_db
def test_five_hundred_ticks_take_few_statements(clock):
    store_many(500)
    ticker = Ticker(current_runtime())
    ticker.step()
    clock.advance(3601)
    with CaptureQueriesContext(connection) as queries:
        while ticker.step() == 0.0:
            pass
    assert Job.objects.count() == 500
    print(f"{len(queries)} statements")
    assert len(queries) < 100
