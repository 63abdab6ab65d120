"""Workers one of whose jobs takes long: no job of another key waits for it while a lane is free,
but those that share its transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from kjo_django import BatchItem, registry
from kjo_django.engine import scheduler
from kjo_django.engine.handler import timeouts
from kjo_django.enqueue.definition import JobDefinition
from kjo_django.models import Job, JobFailure
from kjo_django.worker import Worker
from tests.ledger.models import Entry
from tests.unit.deliveries import KJO, MEMORY, as_job, entries
from tests.unit.workers import Running
from tests.waiting import PATIENCE, wait_until

pytestmark = [
    pytest.mark.medium,
    pytest.mark.usefixtures("_configured"),
]  # threads and waits of a worker, in real time

SOON = 0.05
"""Seconds that count as long here."""


@pytest.fixture(params=["memory", "database"])
def transport(request):
    return request.param


@pytest.fixture
def _configured(settings, real_database, monkeypatch, transport, forgotten_definitions):
    settings.KJO = {
        **KJO,
        **(MEMORY if transport == "memory" else {}),
        "POLL_INTERVAL": 0.2,
        "HEARTBEAT_INTERVAL": 0.2,
        "SHUTDOWN_GRACE": 5,
        "GROUP_BUDGET": 0.05,
    }
    monkeypatch.setattr(scheduler, "LONG_RUN", SOON)


class Work:
    """A handler whose jobs write. One whose name begins with ``long`` waits for ``release``."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.begun: list[str] = []

    def call(self, job: str) -> None:
        self.begun.append(job)
        if job.startswith("long"):
            assert self.release.wait(PATIENCE)
        Entry.objects.create(job=job)


@pytest.fixture
def work():
    work = Work()
    yield work
    work.release.set()


def worker_of(definition: JobDefinition, names: list[str], lanes: int = 2) -> Running:
    """Enqueue jobs, and return a worker that takes them as one group when it starts: it knows their
    handler as a quick one.

    :param names: of the jobs; with their keys, where they have keys.
    """
    each = (name.partition(" of ") for name in names)
    definition.enqueue_many(
        [{"job": name, **({"key": key} if key else {})} for name, _, key in each]
    )
    running = Running(concurrency=lanes)
    lanes_of = running.worker.scheduler
    for _ in range(200):
        lanes_of.measure(definition.name, 0.00001)
    lanes_of._taken_last["ledger"] = definition.name, 1  # so it fetches as many as fit in a group
    return running


def run_beside(
    definition: JobDefinition,
    names: list[str],
    check: Callable[[Worker], Any],
    work: Work,
    lanes: int = 2,
) -> None:
    """Let a worker take jobs as one group; call ``check`` while the long one runs, and let that one
    end. Nothing is owned by anybody then."""
    with worker_of(definition, names, lanes) as running:
        worker = running.worker
        check(worker)
        work.release.set()
        wait_until(lambda: not Job.objects.open().exists())
        wait_until(lambda: worker.scheduler.outstanding == 0)
        assert not worker.leases.owned
        assert not worker.leases.held_rows()


def all_have_ended(*names: str) -> Callable[[Worker], None]:
    """Return a check that these take effect while the long job runs."""

    def check(worker: Worker) -> None:
        wait_until(lambda: set(names) <= set(entries()))
        assert not any(name.startswith("long") for name in entries())

    return check


def attempts() -> set[tuple[str, int]]:
    return set(Job.objects.values_list("state", "attempts"))


def test_what_a_lane_has_not_begun_is_run_by_a_free_one(work):
    definition = as_job(work.call, "long.call", atomic=False)
    others = [f"quick {number}" for number in range(10)]
    run_beside(definition, ["long", *others], all_have_ended(*others), work)
    assert attempts() == {("completed", 1)}
    assert set(entries().values()) == {1}
    assert len(work.begun) == 11
    assert not JobFailure.objects.exists()


def test_jobs_of_its_key_wait_for_it_and_those_of_others_keep_their_order(work):
    def keyed(job: str, key: str) -> None:
        work.call(job)

    definition = as_job(keyed, "long.call", atomic=False, key="key")
    others = ["c1", "c2", "c3"]

    def check(worker: Worker) -> None:
        all_have_ended(*others)(worker)
        assert "b2" not in work.begun

    names = ["a1 of a", "long of b", "a2 of a", "b2 of b", *(f"{name} of c" for name in others)]
    run_beside(definition, names, check, work)
    order = list(Entry.objects.order_by("pk").values_list("job", flat=True))
    for key in (["a1", "a2"], ["long", "b2"], others):
        assert [job for job in order if job in key] == key


def test_the_items_that_no_call_has_are_run_by_a_free_lane(work):
    def batched(batch: list[BatchItem]) -> None:
        for item in batch:
            work.call(item.payload["job"])

    definition = as_job(batched, "long.call", atomic=False, batch=3)
    others = [f"quick {number}" for number in range(6)]
    names = ["long", "with it", "with it, too", *others]
    run_beside(definition, names, all_have_ended(*others), work)
    assert attempts() == {("completed", 1)}
    assert set(entries().values()) == {1}


def test_jobs_with_a_limit_are_run_by_a_free_lane_within_it(work):
    definition = as_job(work.call, "long.call", atomic=False, concurrency=4)
    others = [f"quick {number}" for number in range(3)]
    run_beside(definition, ["long", *others], all_have_ended(*others), work)
    assert attempts() == {("completed", 1)}
    assert set(entries().values()) == {1}


def test_no_attempt_is_lost_where_the_long_job_fails(work):
    def fail(job: str) -> None:
        work.call(job)
        if job == "long" and work.begun.count(job) == 1:
            raise RuntimeError

    definition = as_job(fail, "long.call", atomic=False, backoff=0.05)
    others = [f"quick {number}" for number in range(4)]
    run_beside(definition, ["long", *others], all_have_ended(*others), work)
    assert attempts() == {("completed", 1), ("completed", 2)}
    assert work.begun.count("long") == 2
    assert len(work.begun) == 6


def test_a_thread_that_is_given_up_takes_nothing_that_has_left_its_group(work, monkeypatch):
    """What was taken from it has ended, or runs."""
    monkeypatch.setattr(timeouts, "HUNG_AFTER", 0.3)
    hangs = threading.Lock()
    hangs.acquire()

    def hang(job: str) -> None:
        work.begun.append(job)
        if job == "long" and work.begun.count(job) == 1:
            hangs.acquire()  # waits in C: no exception is raised in it
        Entry.objects.create(job=job)

    # Given a job that hangs, and one of another handler that goes on in the lane that has taken it
    definition = as_job(hang, "long.call", atomic=False, timeout=timedelta(seconds=0.5))
    others = [f"quick {number}" for number in range(4)]
    running = worker_of(definition, ["long", *others])
    other = as_job(work.call, "long.other", atomic=False)
    running.worker.scheduler.measure(other.name, 0.00001)
    id = other.enqueue(job="long, other").job_id
    try:
        with running:
            wait_until(lambda: "long, other" in work.begun)
            # When the thread of the first is given up
            wait_until(lambda: JobFailure.objects.exists())
            # Then it has failed, and nothing else has
            work.release.set()
            wait_until(lambda: Job.objects.get(pk=id).state == "completed")
            assert JobFailure.objects.count() == 1
            assert Job.objects.get(pk=id).attempts == 1
            assert [work.begun.count(name) for name in others] == [1] * 4
    finally:
        hangs.release()
        registry.unregister("long.other")


@pytest.mark.postgres
@pytest.mark.parametrize("real_database", ["postgres"], indirect=True)
def test_in_a_transaction_nothing_waits_for_the_next_long_run_of_a_handler(work, monkeypatch):
    """The first one is found out when others wait for it already: their markers are in its
    transaction. SQLite has one writer, so others wait for any transaction there."""
    definition = as_job(work.call, "long.call")
    others = [f"quick {number}" for number in range(10)]

    def check(worker: Worker) -> None:
        wait_until(lambda: work.begun == ["long"])
        # Noted while it runs.
        wait_until(lambda: "long.call" in worker.scheduler._alone)
        definition.enqueue_many([{"job": name} for name in ["long, too", *others]])
        wait_until(lambda: set(others) <= set(entries()))
        wait_until(lambda: "long, too" in work.begun)
        assert not any(name.startswith("long") for name in entries())

    monkeypatch.setattr(timeouts, "LONG_RUN", SOON)
    run_beside(definition, ["long", "with it"], check, work, lanes=3)
    assert attempts() == {("completed", 1)}
