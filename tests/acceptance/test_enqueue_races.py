"""Enqueue belongs to the caller's transaction, and to one id belongs one job (issue 2, item 6)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import connections, transaction
from django.db.models.signals import post_save

from kjo_django import enqueue_on_save
from kjo_django.operations.jobs import cancel_one
from tests.acceptance.engine import ALIAS, Engine
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def group_saves_enqueue() -> Iterator[None]:
    receivers, save_base = post_save.receivers, Group.save_base
    post_save.receivers = list(receivers)
    post_save.sender_receivers_cache.clear()
    enqueue_on_save(Group, jobs.write, payload=lambda group: {"job": group.name}, created=True)
    yield
    post_save.receivers, Group.save_base = receivers, save_base
    post_save.sender_receivers_cache.clear()


@pytest.mark.promise("rolled-back")
@pytest.mark.medium("embedded")
@pytest.mark.usefixtures("group_saves_enqueue")
def test_a_rolled_back_save_leaves_nothing(engine: Engine) -> None:
    # Given saves that enqueue, by hook and by hand, in a transaction
    class Undone(Exception):
        pass

    # When it is rolled back
    with pytest.raises(Undone), transaction.atomic(using=ALIAS):
        Group(name="by hook").save(using=ALIAS)
        jobs.write.enqueue(job="by hand")
        jobs.write.using(id="unique").enqueue(job="by id")
        raise Undone
    # And an inner one alone
    with transaction.atomic(using=ALIAS):
        Group(name="kept").save(using=ALIAS)
        with pytest.raises(Undone), transaction.atomic(using=ALIAS):
            Group(name="undone").save(using=ALIAS)
            raise Undone
    # Then only what was kept is there, and runs
    assert list(Group.objects.using(ALIAS).values_list("name", flat=True)) == ["kept"]
    assert engine.jobs.count() == 1
    engine.drain()
    engine.assert_each_ran_once(["kept"])


@pytest.mark.medium("embedded", "mariadb", "real")
@pytest.mark.usefixtures("group_saves_enqueue")
def test_nothing_runs_before_its_transaction_commits(any_engine: Engine) -> None:
    # Given a worker that waits for work
    worker = any_engine.ready_worker()
    # When a transaction stays open
    with transaction.atomic(using=ALIAS):
        Group(name="open").save(using=ALIAS)
        if not any_engine.is_sqlite:  # there nobody else writes meanwhile
            with ThreadPoolExecutor(1) as pool:
                pool.submit(enqueue_elsewhere, "other").result()
            any_engine.wait_until(lambda: any_engine.ledger()["other"], "The other never ran")
        # Then the job of the open one has not run
        assert "open" not in any_engine.ledger()
    any_engine.settle()
    assert worker.stop() == 0
    assert any_engine.ledger()["open"] == 1


def enqueue_elsewhere(name: str, **options: Any) -> Any:
    """Enqueue on a connection of this thread's own."""
    try:
        return jobs.write.using(**options).enqueue(job=name)
    finally:
        connections.close_all()


@pytest.mark.promise("job-is-run")
@pytest.mark.medium("embedded")
def test_a_save_is_killed_on_its_way(engine: Engine) -> None:
    """An autocommitted save and its job are committed together or not at all."""
    # When processes save, and are killed between the row and the job, before the commit, or not
    for point, code in (("before", -9), ("after", -9), ("never", 0)):
        process = engine.run("tests.acceptance.save_and_die", point, point)
        assert process.wait() == code, process.log_tail()
    # Then there are both or neither
    assert [group.name for group in Group.objects.using(ALIAS).all()] == ["never"]
    assert engine.jobs.count() == 1
    engine.drain()
    engine.assert_each_ran_once(["never"])


@pytest.mark.medium("embedded", "real")
def test_fifty_threads_enqueue_one_id(any_engine: Engine) -> None:
    # Given fifty threads that start together
    barrier = threading.Barrier(50)

    def enqueue(number: int) -> str:
        barrier.wait()
        return str(enqueue_elsewhere("one", id="one").answer)

    # When each enqueues the same id
    with ThreadPoolExecutor(50) as pool:
        answers = Counter(pool.map(enqueue, range(50)))
    # Then one has stored the job and all others are told so
    assert answers == {"queued": 1, "duplicate": 49}
    assert any_engine.jobs.count() == 1
    any_engine.drain()
    any_engine.assert_each_ran_once(["one"])
    # And a later one is given the result
    assert enqueue_elsewhere("one", id="one").answer == "completed"


@pytest.mark.medium("real")
def test_fifty_threads_revive_one_id(engine: Engine) -> None:
    """Of fifty who find a cancelled job, one begins its next generation."""
    first = jobs.write.using(id="one").enqueue(job="first")
    cancel_one(first.job_id)
    barrier = threading.Barrier(50)

    def enqueue(number: int) -> str:
        barrier.wait()
        return str(enqueue_elsewhere(f"thread-{number}", id="one").answer)

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(enqueue, range(50)))
    assert Counter(answers) == {"queued": 1, "duplicate": 49}
    assert engine.jobs.get().generation == 2
    engine.drain()
    engine.assert_each_ran_once([f"thread-{answers.index('queued')}"])


@pytest.mark.promise("stale-message")
@pytest.mark.medium("embedded")
def test_enqueue_cancel_enqueue(engine: Engine) -> None:
    enqueue_cancel_enqueue(engine, is_published=False)


@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.postgres
def test_enqueue_publish_cancel_enqueue(real: Engine) -> None:
    """The messages of the cancelled ones are in the topic already."""
    enqueue_cancel_enqueue(real, is_published=True)


def enqueue_cancel_enqueue(engine: Engine, *, is_published: bool) -> None:
    # Given a job that was cancelled, and was again
    engine.create_topics()
    results = []
    for payload in ("first", "second", "last"):
        results.append(jobs.write.using(id="one").enqueue(job=payload))
        if is_published:
            relay = engine.relay("--once")
            assert relay.wait() == 0, relay.log_tail()
        if payload != "last":
            assert cancel_one(results[-1].job_id) == "cancelled"
    # When it is enqueued again, and runs
    engine.drain()
    # Then it is the same job in another generation, and only the last payload has run
    assert [result.answer for result in results] == ["queued"] * 3
    job = engine.jobs.get()
    assert {result.job_id for result in results} == {job.pk}
    assert (job.generation, job.state) == (3, "completed")
    engine.settle()
    engine.assert_each_ran_once(["last"])
