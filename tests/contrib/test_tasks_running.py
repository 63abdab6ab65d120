"""What a result says of a run that goes on or has succeeded: since when, and on which worker.

The row of a running atomic task is locked, and says nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest

pytest.importorskip(
    "kjo_django.contrib.tasks.compat",
    reason="neither Django's tasks nor the backport django-tasks is installed",
    exc_type=ImportError,
)

from django.utils import timezone

from kjo_django.conf import default_worker_name
from kjo_django.contrib.tasks.compat import task_finished, task_started
from kjo_django.models import Job, JobFailure
from kjo_django.models import Worker as WorkerRow
from kjo_django.operations.workers import Assignment, RunningJob
from kjo_django.running_job import worker_name
from kjo_django.worker.process import Worker
from tests.factories import WorkerFactory
from tests.running_jobs import let_run
from tests.unit.deliveries import Bench
from tests.waiting import PATIENCE, wait_until

MINUTE = timedelta(minutes=1)


def leased_by(token: str) -> None:
    """Let the only job be in the hands of a living worker."""
    let_run(Job.objects.get(), worker=token)


def run_by(worker: WorkerRow, *since: datetime) -> None:
    """Let a worker run the only job, as its last heartbeat says where that knows since when."""
    leased_by(worker.pk.hex)
    job = Job.objects.get()
    other = RunningJob(str(worker.pk), job.handler, timezone.now())
    runs = (other, *(RunningJob(str(job.pk), job.handler, each) for each in since))
    worker.partitions = [Assignment(job.queue, 0, running=runs).stored()]
    worker.save()


@contextmanager
def named(worker: str) -> Iterator[None]:
    """Meanwhile this thread is that worker's."""
    before = worker_name.set(worker)
    try:
        yield
    finally:
        worker_name.reset(before)


# --- While it runs --------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_running_task_says_since_when_and_on_which_worker(tasks: Any) -> None:
    # Given
    result, since = tasks.add.enqueue(1), timezone.now()
    # When
    run_by(WorkerFactory(name="berlin"), since)
    # Then
    result.refresh()
    assert (result.status, result.worker_ids) == ("RUNNING", ["berlin"])
    assert (result.started_at, result.last_attempted_at) == (since, since)


@pytest.mark.django_db
def test_until_its_worker_has_told_since_when_only_the_worker_is_known(tasks: Any) -> None:
    result = tasks.add.enqueue(1)
    run_by(WorkerFactory(name="berlin"))
    result.refresh()
    assert (result.status, result.worker_ids) == ("RUNNING", ["berlin"])
    assert (result.started_at, result.last_attempted_at) == (None, None)


@pytest.mark.django_db
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not yet told"])
def test_a_second_attempt_is_not_taken_for_the_first(tasks: Any, work: Any, is_told: bool) -> None:
    # Given
    result = tasks.look.enqueue(fail_until=2)
    bench = Bench("default")
    bench.run()
    bench.close()
    Job.objects.update(available_at=timezone.now())
    first = JobFailure.objects.get()
    assert first.started_at is not None
    # When
    second = first.failed_at + MINUTE
    run_by(WorkerFactory(name="berlin"), second if is_told else first.failed_at)
    # Then
    result.refresh()
    assert (result.status, result.worker_ids) == ("RUNNING", ["bench", "berlin"])
    last = second if is_told else first.started_at
    assert (result.started_at, result.last_attempted_at) == (first.started_at, last)


@pytest.mark.django_db
@pytest.mark.parametrize("token", ["no id", "01890a5d-ac96-774b-bcce-b302099a8057"])
def test_a_worker_without_a_row_is_unknown(tasks: Any, token: str) -> None:
    result = tasks.add.enqueue(1)
    leased_by(token)
    result.refresh()
    assert (result.status, result.worker_ids, result.started_at) == ("RUNNING", [""], None)


# --- Once it has succeeded ------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["add", "write_async", "note"], ids=["atomic", "async", "plain"])
@pytest.mark.parametrize("worker", ["berlin", "b" * 256], ids=["short", "too long"])
def test_of_a_success_the_worker_is_kept(
    tasks: Any, work: Any, name: str, worker: str, django_assert_num_queries: Any
) -> None:
    # Given
    result = getattr(tasks, name).enqueue(1)
    # When
    with named(worker):
        work()
    # Then
    with django_assert_num_queries(1):
        result.refresh()
    assert (result.status, result.worker_ids) == ("SUCCESSFUL", [worker[:255]])
    assert result.started_at == result.last_attempted_at <= result.finished_at


@pytest.mark.django_db
def test_signals_name_the_worker_as_the_result_does(tasks: Any, work: Any) -> None:
    told: list[Any] = []

    def receive(task_result: Any, **facts: Any) -> None:
        told.append((str(task_result.status), task_result.worker_ids))

    for signal in (task_started, task_finished):
        signal.connect(receive)
    try:
        tasks.look.enqueue(fail_until=2)
        with named("bench"):
            work()
    finally:
        for signal in (task_started, task_finished):
            signal.disconnect(receive)
    assert told == [
        ("RUNNING", ["bench"]),
        ("RUNNING", ["", "bench"]),
        ("SUCCESSFUL", ["bench", "bench"]),
    ]


@pytest.mark.django_db
def test_a_new_run_of_the_job_forgets_the_worker(tasks: Any, work: Any) -> None:
    from kjo_django.operations.jobs import requeue

    result = tasks.add.enqueue(1)
    work()
    before = Job.objects.get()
    requeue([result.id])
    result.refresh()
    assert (result.status, result.worker_ids, result.started_at) == ("READY", [], None)
    assert (before.worker, Job.objects.get().worker) == (default_worker_name(), "")


@pytest.mark.django_db
def test_an_ordinary_job_does_not_ask_for_it(tasks: Any) -> None:
    from tests.ledger.jobs import write

    write.enqueue(job="a")
    with named("berlin"):
        bench = Bench("ledger")
        bench.run()
        bench.close()
    assert Job.objects.values_list("state", "worker").get() == ("completed", "")


# --- With a worker --------------------------------------------------------------------------------


@pytest.fixture
def berlin(tasks: Any, settings: Any) -> Iterator[Worker]:
    """A worker that tells soon what it runs."""
    settings.KJO = {**settings.KJO, "HEARTBEAT_INTERVAL": timedelta(seconds=0.2)}
    worker = Worker(["default"], name="berlin", owns_process=False)
    thread = threading.Thread(target=worker.run)
    thread.start()
    yield worker
    tasks.may_end.set()
    worker.stop()
    thread.join(PATIENCE)
    tasks.may_end.clear()


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "plain"])
def test_of_a_task_that_a_worker_runs_both_are_known(
    any_database: str, tasks: Any, request: pytest.FixtureRequest, atomic: bool
) -> None:
    # Given
    result = tasks.wait.using(atomic=atomic).enqueue()
    request.getfixturevalue("berlin")
    # Of SQLite's one writer nobody is told anything while it is in a transaction
    is_told = not (atomic and any_database == "sqlite")

    def seen(status: str) -> bool:
        result.refresh()
        return bool(result.status == status and (result.started_at or not is_told))

    # When
    wait_until(lambda: seen("RUNNING"), state=lambda: result)
    # Then
    since = result.started_at
    assert result.worker_ids == ["berlin"]
    assert (since is not None, result.last_attempted_at) == (is_told, since)
    # And afterwards
    tasks.may_end.set()
    wait_until(lambda: seen("SUCCESSFUL"), state=lambda: result)
    assert result.worker_ids == ["berlin"]
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert since is None or since <= result.finished_at
