"""What operators asked of a worker, of queues and of limits, as each database tells it.

Tier: medium, each real engine once: a UNION has one type and one collation for each of its columns.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from kjo_django.conf import get_settings
from kjo_django.models import LimitControl, QueueControl
from kjo_django.models import Worker as WorkerRow
from kjo_django.runtime import Runtime, current_runtime
from kjo_django.worker.heartbeat import Controls
from tests.factories import WorkerFactory


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.postgres),
        pytest.param("mariadb", marks=pytest.mark.mariadb),
    ],
)
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    alias = request.getfixturevalue(f"{request.param}_alias")
    yield replace(current_runtime(), database=alias, queue_controls={}, limit_controls={})
    for model in (QueueControl, LimitControl, WorkerRow):
        model.objects.using(alias).all().delete()


def test_all_that_operators_ask_is_read_by_one_statement(runtime: Runtime) -> None:
    # Given
    alias, own = runtime.database, uuid.uuid4()
    controls = Controls(runtime, own, [get_settings().queue("ledger")], 4)
    WorkerFactory.build(pk=own, asked_to="quiet").save(using=alias)
    WorkerFactory.build(asked_to="stop").save(using=alias)
    for queue in (
        QueueControl("ledger", is_paused=True, concurrency=2, max_attempts=9, backoff_base=60),
        QueueControl("mails"),
    ):
        queue.save(using=alias)
    for limit in (
        LimitControl("job:a", rate="5/s", burst=7, concurrency=3),
        LimitControl("queue:ledger"),
    ):
        limit.save(using=alias)
    # When
    with CaptureQueriesContext(connections[alias]) as queries:
        has_changed = controls.read()
    # Then
    assert has_changed
    assert len(queries) == 1
    assert (controls.is_quiet, controls.is_stopped) == (True, False)
    assert controls.paused_queues == {"ledger"}
    assert controls.limits["ledger"].groups == 2
    of_queue, other = (runtime.queue_controls[name] for name in ("ledger", "mails"))
    assert (of_queue.max_attempts, of_queue.backoff_base) == (9, 60)
    assert (other.is_paused, other.concurrency, other.max_attempts) == (False, None, None)
    limit, empty = (runtime.limit_controls[name] for name in ("job:a", "queue:ledger"))
    assert (limit.rate, limit.burst, limit.concurrency) == ("5/s", 7, 3)
    assert (empty.rate, empty.burst, empty.concurrency) == ("", None, None)
    # And nothing has changed when it is read again
    assert not controls.read()


def test_what_operators_ask_no_more_is_forgotten(runtime: Runtime) -> None:
    alias = runtime.database
    controls = Controls(runtime, uuid.uuid4(), [get_settings().queue("ledger")], 4)
    QueueControl.objects.using(alias).create(queue="ledger", is_paused=True)
    LimitControl.objects.using(alias).create(name="job:a", rate="5/s")
    assert controls.read()
    for model in (QueueControl, LimitControl, WorkerRow):
        model.objects.using(alias).all().delete()
    assert controls.read()
    assert (controls.paused_queues, runtime.queue_controls, runtime.limit_controls) == (
        frozenset(),
        {},
        {},
    )
