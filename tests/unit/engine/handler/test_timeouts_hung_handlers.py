"""Handlers that hang in a call into C, which no timeout can interrupt: the worker goes on."""

from __future__ import annotations

import logging
import re
import threading
from datetime import timedelta

import pytest

from kjo_django import BatchItem
from kjo_django.engine.handler import timeouts
from kjo_django.models import DeadLetter, Job, JobFailure
from tests.ledger.jobs import write
from tests.ledger.models import Entry
from tests.unit.deliveries import KJO, MEMORY, as_job, entries
from tests.unit.workers import Running
from tests.waiting import PATIENCE, wait_until

pytestmark = [
    pytest.mark.medium,
    pytest.mark.usefixtures("real_database"),
]  # threads and waits of a worker, in real time


@pytest.fixture(autouse=True)
def _configured(settings, real_database, forgotten_definitions, monkeypatch):
    settings.KJO = {
        **KJO,
        **MEMORY,
        "POLL_INTERVAL": 0.2,
        "HEARTBEAT_INTERVAL": 0.2,
        "BACKOFF_BASE": 0.05,
        "SHUTDOWN_GRACE": 5,
    }
    monkeypatch.setattr(timeouts, "HUNG_AFTER", 0.5)


logger = logging.getLogger("shop.payments")


class Hanging:
    """Handlers that write, and hang when they are called first, until ``release``."""

    def __init__(self) -> None:
        self.calls = 0
        self.thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def work(self, job: str) -> None:
        self.calls += 1
        Entry.objects.create(job=f"{job} {self.calls}")
        if self.calls == 1:
            self.thread = threading.current_thread()
            self._lock.acquire()  # waits in C: no exception is raised in it

    def release(self) -> None:
        self._lock.release()


@pytest.fixture
def hanging():
    hanging = Hanging()
    yield hanging
    if hanging.thread is not None and hanging.thread.is_alive():
        hanging.release()
        hanging.thread.join(PATIENCE)


@pytest.mark.promise("hung-handler")
@pytest.mark.parametrize("kind", ["atomic", "outside", "batch", "coroutine"])
def test_a_hung_handler_costs_an_attempt_and_not_its_lane(hanging, kind):
    # Given the only lane in a handler that does not return
    def work(job: str) -> None:
        hanging.work(job)

    def work_batch(batch: list[BatchItem]) -> None:
        for item in batch:
            hanging.work(item.payload["job"])

    async def work_async(job: str) -> None:
        from asgiref.sync import sync_to_async

        await sync_to_async(hanging.work)(job)

    function = {"batch": work_batch, "coroutine": work_async}.get(kind, work)
    options = {"batch": 5} if kind == "batch" else {"atomic": kind != "outside"}
    definition = as_job(function, timeout=timedelta(seconds=0.2), max_attempts=3, **options)
    id = definition.enqueue(job="hangs").job_id
    with Running(concurrency=1) as running:
        wait_until(lambda: hanging.calls == 1)
        write.enqueue(job="another")
        # When it has been waited for long enough, then its job and all others go on
        wait_until(lambda: not Job.objects.open().exists())
        job = Job.objects.get(pk=id)
        assert (job.state, job.attempts) == ("completed", 2)
        failure = JobFailure.objects.get()
        assert failure.attempt == 1
        assert "could not be interrupted" in failure.error
        expected = {"hangs 2": 1, "another": 1}
        if kind == "outside":
            expected["hangs 1"] = 1
        assert entries() == expected
        # And when it returns after all, that changes nothing
        hanging.release()
        hanging.thread.join(PATIENCE)
        assert not hanging.thread.is_alive()
        assert entries() == expected
        assert Job.objects.get(pk=id).finished_at == job.finished_at
        assert JobFailure.objects.count() == 1
        assert running.worker.scheduler.outstanding == 0
        # And the worker works on
        write.enqueue(job="later")
        wait_until(lambda: entries()["later"])


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "outside"])
def test_the_attempt_that_hung_keeps_its_own_lines_and_the_next_one_its_own(
    hanging, atomic, monkeypatch
):
    """Those that its thread logs later, when it is given up, are in neither."""
    # Given a handler that logs, hangs, and goes on to log when it returns
    monkeypatch.setattr(logger, "level", logging.INFO)

    def work(job: str) -> None:
        number = hanging.calls + 1
        logger.info("begins %d", number)
        hanging.work(job)
        logger.info("goes on %d", number)
        if number == 2:
            raise ValueError("refused")

    as_job(work, timeout=timedelta(seconds=0.2), max_attempts=2, atomic=atomic).enqueue(job="hangs")
    with Running(concurrency=1):
        # When
        wait_until(lambda: not Job.objects.open().exists())
        hanging.release()
        hanging.thread.join(PATIENCE)
        assert not hanging.thread.is_alive()
    # Then
    logs = JobFailure.objects.order_by("attempt").values_list("log", flat=True)
    assert [re.findall(r"payments: (.+)", log) for log in logs] == [
        ["begins 1"],
        ["begins 2", "goes on 2"],
    ]


@pytest.mark.promise("hung-handler")
def test_the_others_of_its_group_are_run_by_the_next_lane(hanging):
    # Given a group in one transaction, one of which hangs
    def work(job: str) -> None:
        if job == "hangs":
            hanging.work(job)
        else:
            Entry.objects.create(job=job)

    definition = as_job(work, timeout=timedelta(seconds=0.2), max_attempts=1)
    with Running(concurrency=1) as running:
        running.worker.scheduler.measure("bench.work", 0.0001)
        definition.enqueue_many({"job": name} for name in ("before", "hangs", "after"))
        # When, then
        wait_until(lambda: not Job.objects.open().exists())
    assert entries() == {"before": 1, "after": 1}
    assert DeadLetter.objects.get().reason == "exhausted"
    assert Job.objects.filter(state="completed").count() == 2
