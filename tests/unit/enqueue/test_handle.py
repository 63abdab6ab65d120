"""The handle that an enqueue answers with follows the job, and costs nothing until it is asked."""

from __future__ import annotations

import pickle
import threading
import time
import uuid
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from kjo_django import JobHandle, chain
from kjo_django.engine.handler.running import dump_progress
from kjo_django.enqueue.job_status import progress_name
from kjo_django.exceptions import (
    JobCancelledError,
    JobFailedError,
    JobNotFoundError,
    JobTimeoutError,
    UncommittedJobError,
)
from kjo_django.messages.serializers import dump_result
from kjo_django.models import Job
from kjo_django.operations.jobs import cancel_one
from kjo_django.queue import NO_RESULT
from kjo_django.runtime import get_coordination
from kjo_django.testing import drain
from kjo_django.workflows.workflow_handle import WorkflowHandle
from tests.factories import JobFactory
from tests.ledger.jobs import give, refuse

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("transport")]

HOUR = timedelta(hours=1)


def completed(value: object, **columns) -> JobHandle:
    kept = {"result_expires_at": timezone.now() + HOUR, **columns}
    return JobHandle(JobFactory(completed=True, result=dump_result(value), **kept).pk)


def test_it_follows_a_job_from_its_enqueue_to_its_end():
    handle = give.enqueue(value=[1, "a"])
    assert handle.is_new
    assert handle.status in ("pending", "queued")
    assert (handle.progress, handle.result) == (None, NO_RESULT)
    drain()
    assert (handle.status, handle.result) == ("completed", [1, "a"])
    assert handle.wait(timeout=1) == [1, "a"]


def test_none_is_a_result():
    handle = completed(None)
    assert handle.result is None
    assert handle.wait() is None


def test_a_handle_costs_no_query_until_it_is_asked():
    give.enqueue(value=1)  # the first one also makes what the queue needs
    with CaptureQueriesContext(connections["default"]) as queries:
        give.enqueue(value=1)
    alone = len(queries)
    with CaptureQueriesContext(connections["default"]) as queries:
        handle = give.enqueue(value=1)
        assert handle.id == str(handle.job_id)
        assert repr(handle) == f"<JobHandle {handle.id} queued>"
        assert pickle.loads(pickle.dumps(handle)) == handle
    assert len(queries) == alone


def test_it_can_be_made_again_from_its_id():
    handle = give.enqueue(value=7)
    for again in (
        JobHandle.of(handle.id),
        JobHandle.of(handle.job_id),
        pickle.loads(pickle.dumps(handle)),
    ):
        assert again == handle
        assert hash(again) == hash(handle)
        assert (again.answer, again.is_new) == (None, False)
        assert again.status == handle.status
    assert handle != give.enqueue(value=7)


@pytest.mark.parametrize("id", ["", "x", "1" * 33, None, 7, b"0" * 16, "\0"])
def test_what_is_no_id_is_refused(id):
    with pytest.raises(ValueError, match="A job's id is a UUID"):
        JobHandle.of(id)


def test_a_job_that_is_not_there_has_no_status():
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        handle = give.enqueue(value=1)
        raise ZeroDivisionError
    assert (handle.status, handle.progress, handle.snapshot()) == (None, None, None)
    assert handle.result is NO_RESULT
    with pytest.raises(JobNotFoundError):
        handle.wait(timeout=1)


def test_the_progress_of_an_open_job_is_known():
    handle = give.enqueue(value=1)
    mark = {progress_name(handle.id): dump_progress(42, "resizing")}
    get_coordination().set_marks(mark, HOUR)
    assert handle.progress == (42, "resizing")
    drain()
    assert handle.progress is None


def test_one_look_finds_everything():
    handle = completed({"a": 1})
    found = handle.snapshot()
    assert (found.id, found.status, found.is_final) == (handle.id, "completed", True)
    assert (found.result, found.error) == ({"a": 1}, "")
    failing = JobFactory(state="failing", attempts=1, error="no route")
    found = JobHandle(failing.pk).snapshot()
    assert (found.status, found.is_final, found.error) == ("failing", False, "no route")


def test_an_expired_result_is_none_that_can_be_had():
    handle = completed(1, result_expires_at=timezone.now() - HOUR)
    assert (handle.status, handle.result) == ("completed", NO_RESULT)
    with pytest.raises(JobNotFoundError, match="no result any more"):
        handle.wait(timeout=1)


@pytest.mark.django_db(transaction=True)
def test_waiting_says_how_the_job_has_ended():
    failed, cancelled = refuse.enqueue(job="a"), give.enqueue(value=1)
    cancel_one(cancelled.job_id)
    drain(raise_errors=False)
    with pytest.raises(JobFailedError, match="never work") as raised:
        failed.wait(timeout=1)
    assert raised.value.job_id == failed.id
    with pytest.raises(JobCancelledError):
        cancelled.wait(timeout=1)
    with pytest.raises(JobTimeoutError, match="may still complete"):
        give.enqueue(value=1).wait(timeout=0.05)


@pytest.mark.django_db(transaction=True)
def test_waiting_inside_a_transaction_is_refused():
    with transaction.atomic():
        handle = give.enqueue(value=1)
        with pytest.raises(UncommittedJobError):
            handle.wait(timeout=1)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "30", None, True])
def test_a_timeout_that_means_nothing_is_refused(timeout):
    with pytest.raises((ValueError, TypeError), match="timeout must be"):
        JobHandle(uuid.uuid4()).wait(timeout=timeout)


def test_waiting_ends_with_the_job(real_database):
    handle = give.enqueue(value="done")

    def end() -> None:
        try:
            time.sleep(0.2)  # sleep: so that the other one waits by then
            ended = {"state": "completed", "result": dump_result("done")}
            Job.objects.filter(pk=handle.job_id).update(
                **ended, finished_at=timezone.now(), result_expires_at=timezone.now() + HOUR
            )
        finally:
            connections.close_all()

    thread = threading.Thread(target=end)
    thread.start()
    try:
        assert handle.wait(timeout=30) == "done"
    finally:
        thread.join()
    assert async_to_sync(handle.await_)(timeout=30) == "done"


def test_coroutines_ask_the_same_questions(real_database):
    async def ask() -> list[object]:
        handle = await give.aenqueue(value=1)
        found = [await handle.astatus(), await handle.aprogress(), await handle.aresult()]
        with pytest.raises(JobTimeoutError):
            await handle.await_(timeout=0.3)
        return [*found, (await handle.asnapshot()).id == handle.id]

    status, *others = async_to_sync(ask)()
    assert status in ("pending", "queued")
    assert others == [None, NO_RESULT, True]


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda handle: give.enqueue(value=1), "await aenqueue(value=…)"),
        (lambda handle: give.enqueue_many([{"value": 1}]), "await sync_to_async(job.enqueue_many)"),
        (lambda handle: chain(give.step(value=1)).enqueue(), "await workflow.aenqueue()"),
        (lambda handle: handle.status, "astatus()"),
        (lambda handle: handle.snapshot(), "await handle.asnapshot()"),
        (lambda handle: handle.wait(), "await handle.await_()"),
        (lambda handle: WorkflowHandle(handle.job_id).status, "astatus()"),
        (lambda handle: WorkflowHandle(handle.job_id).wait(), "await handle.await_()"),
    ],
)
def test_in_a_coroutine_it_says_what_to_write(call, line):
    """Django's error does not name it."""
    handle = give.enqueue(value=1)

    async def ask() -> None:
        call(handle)

    with pytest.raises(SynchronousOnlyOperation) as raised:
        async_to_sync(ask)()
    assert line in str(raised.value)
    assert Job.objects.count() == 1


def test_a_router_that_reads_from_a_replica_is_not_asked(settings, django_assert_num_queries):
    """A column that was not loaded was read from the replica, which did not have the job yet."""
    handle = give.enqueue(value=1)
    Job.objects.update(state="queued")
    settings.DATABASE_ROUTERS = [Replica()]
    assert handle.status == "queued"
    with django_assert_num_queries(3):  # the job, leases and progress of coordination
        handle.snapshot()
    # Nor is it where a column is read later on purpose
    job = Job.objects.using("default").defer("payload").get()
    assert job.arguments == {"value": 1}
    job.refresh_from_db()


class Replica:
    """Django's own example of a router."""

    def db_for_read(self, model, **hints):
        raise AssertionError(f"{model.__name__} is read from where a router says")


def test_a_queue_leads_to_the_handle():
    from kjo_django.patterns.queue import EnqueueResult

    id = uuid.uuid4()
    assert EnqueueResult("queued", id).handle == JobHandle(id)
