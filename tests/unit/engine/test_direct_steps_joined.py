"""Steps that run in the transaction that has released them, and steps that must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from kjo_django import chain, group, job, signals
from kjo_django.engine.handler.context import JobContext
from kjo_django.models import DeadLetter, Job, ProcessedEvent
from kjo_django.runtime import get_coordination, get_transport
from kjo_django.states import JobState
from kjo_django.store.rows import DueJob
from tests.ledger.models import Entry
from tests.unit.engine.test_direct_steps import Stepped, stepped
from tests.unit.steps import KJO, MEMORY, Steps


@pytest.fixture(
    params=["sqlite_file", pytest.param("postgres", marks=pytest.mark.postgres)], autouse=True
)
def _store_and_relay(request: pytest.FixtureRequest, settings: Any) -> None:
    """Each store, with a transport that needs the relay."""
    request.getfixturevalue(request.param)
    # However slow the machine is.
    settings.KJO = KJO | MEMORY | {"GROUP_BUDGET": timedelta(seconds=60)}
    transport: Any = get_transport()
    transport.clear()


@pytest.fixture
def quick(steps: Steps) -> Any:
    """A job whose steps may join: it writes an entry, and promises that it does nothing else."""

    def write(name: str) -> str:
        Entry.objects.create(job=name)
        return str(steps.take(name))

    options: dict[str, Any] = {"queue": "flows", "max_attempts": 1}
    return job(name="flows.quick", database_only=True, **options)(write)


def states() -> list[str]:
    return list(Job.objects.order_by("pk").values_list("state", flat=True))


def entries() -> list[str]:
    return list(Entry.objects.order_by("pk").values_list("job", flat=True))


@contextmanager
def commits() -> Iterator[list[int]]:
    """Yield a list that has how many steps had completed at each commit a worker announced."""
    seen: list[int] = []

    def look(**facts: Any) -> None:
        seen.append(Job.objects.filter(state=JobState.COMPLETED).count())

    signals.job_completed.connect(look)
    try:
        yield seen
    finally:
        signals.job_completed.disconnect(look)


def is_idle(worker: Stepped) -> bool:
    scheduler = worker.worker.scheduler
    return not (scheduler._keys or scheduler._running or +scheduler._loads or scheduler.running)


# --- Joined ---------------------------------------------------------------------------------------


def test_quick_steps_without_other_effects_run_in_one_transaction(steps: Steps, quick: Any) -> None:
    # Given a chain of steps whose only effects are in the job's database
    handle = chain(*(quick.step(name=f"s{n}") for n in range(4))).enqueue()
    with stepped() as worker, commits() as seen:
        # When a worker runs the first one
        worker.run()
        # Then all have run in that group, and are announced one by one after its commit
        assert steps.calls == entries() == ["s0", "s1", "s2", "s3"]
        assert seen == [4, 4, 4, 4]
        assert is_idle(worker)
    # And each has its own state, attempt, marker and result
    assert handle.status == "completed"
    assert [(row.state, row.attempts) for row in Job.objects.all()] == [("completed", 1)] * 4
    assert ProcessedEvent.objects.count() == 4
    assert handle.result == "s3"


def test_a_step_that_joins_is_given_the_result_of_the_one_before(steps: Steps) -> None:
    # Given steps that take what the one before returns
    options: dict[str, Any] = {"queue": "flows", "database_only": True}
    double = job(name="flows.doubled", **options)(lambda value: 2 * value)
    handle = chain(double.step(value=5), double.step(), double.step()).enqueue()
    # When they run in one transaction
    with stepped() as worker:
        worker.run()
    # Then each has had it
    assert handle.result == 40


def test_a_callback_joins_the_last_member_of_its_group(steps: Steps, quick: Any) -> None:
    # Given two members of a group, which share a transaction, and their callback
    members = [quick.step(name=f"m{n}") for n in range(2)]
    handle = chain(group(members), quick.step(name="end")).enqueue()
    with stepped(lanes=1) as worker:
        worker.worker.scheduler.measure("flows.quick", 0.0)
        # When they run
        worker.run()
        # Then the callback has run with them
        assert sorted(steps.calls) == ["end", "m0", "m1"]
        assert is_idle(worker)
    assert handle.status == "completed"


def test_the_failure_of_a_joined_step_leaves_those_before_it(steps: Steps, quick: Any) -> None:
    # Given a chain whose third step fails for good
    steps.failing = {"s2"}
    handle = chain(*(quick.step(name=f"s{n}") for n in range(4))).enqueue()
    # When a worker runs its first step
    with stepped() as worker, commits() as seen:
        worker.run()
        assert is_idle(worker)
    # Then the two before have run once and stand, and its own effects are undone
    assert steps.calls == entries() == ["s0", "s1"]
    assert seen == [2, 2]
    assert states() == ["completed", "completed", "failed", "cancelled"]
    # And its failure has a dead letter, and no marker
    assert DeadLetter.objects.get().job_id == Job.objects.order_by("pk")[2].pk
    assert ProcessedEvent.objects.count() == 2
    assert handle.status == "failed"


def test_a_step_that_spoils_the_transaction_costs_others_nothing_but_a_run(
    steps: Steps, quick: Any
) -> None:
    # Given a step whose first run ends the transaction it was called in
    def spoil() -> None:
        steps.calls.append("spoil")
        if steps.calls.count("spoil") == 1:
            with connection.cursor() as cursor:
                cursor.execute("ROLLBACK")

    spoiling = job(name="flows.spoiling", queue="flows", database_only=True)(spoil)
    handle = chain(quick.step(name="s0"), spoiling.step(), quick.step(name="s2")).enqueue()
    with stepped() as worker:
        worker.worker.scheduler.measure("flows.spoiling", 0.0)
        # When it has joined the one before
        worker.run()
        # Then that one has run again without it, and it is released
        assert steps.calls == ["s0", "spoil", "s0"]
        assert states() == ["completed", "pending", "waiting"]
        # And runs as a step that was handed over
        assert worker.lane()
        assert is_idle(worker)
    assert steps.calls == ["s0", "spoil", "s0", "spoil", "s2"]
    assert entries() == ["s0", "s2"]
    assert handle.status == "completed"


def test_a_joined_step_that_commits_takes_nothing_from_those_before_it(
    steps: Steps, quick: Any
) -> None:
    # Given a step that ends the transaction it is called in
    def commit() -> None:
        steps.calls.append("commit")
        with connection.cursor() as cursor:
            cursor.execute("COMMIT")

    committing = job(name="flows.committing", queue="flows", database_only=True)(commit)
    handle = chain(quick.step(name="s0"), committing.step(), quick.step(name="s2")).enqueue()
    with stepped() as worker, commits() as seen:
        worker.worker.scheduler.measure("flows.committing", 0.0)
        # When it has joined the one before
        worker.run()
        assert is_idle(worker)
    # Then that one has run once, and the step has failed in a transaction of its own
    assert steps.calls == ["s0", "commit", "commit"]
    assert entries() == ["s0"]
    assert seen == [1]
    assert "has ended the transaction" in DeadLetter.objects.get().error
    assert states() == ["completed", "failed", "cancelled"]
    # And its marker, which it had committed, is gone
    assert ProcessedEvent.objects.count() == 1
    assert handle.status == "failed"


# --- Not joined -----------------------------------------------------------------------------------


def test_a_step_with_other_effects_runs_after_the_commit_of_those_before_it(
    steps: Steps, quick: Any
) -> None:
    # Given a step that promises nothing behind one that does
    chain(quick.step(name="s0"), steps.note.step(name="s1")).enqueue()
    with stepped() as worker, commits() as seen:
        worker.worker.scheduler.measure("flows.note", 0.0)
        # When the first has run
        worker.run()
        # Then it is committed before the second begins
        assert steps.calls == ["s0"]
        assert seen == [1]
        assert len(worker.waiting) == 1


@pytest.mark.parametrize("seconds", [None, 100.0])
def test_a_step_joins_only_if_its_handler_is_known_to_be_quick(
    steps: Steps, quick: Any, seconds: float | None
) -> None:
    # Given a step whose handler has not run here, or takes long
    chain(steps.note.step(name="s0"), quick.step(name="s1")).enqueue()
    with stepped() as worker:
        if seconds is not None:
            worker.worker.scheduler.measure("flows.quick", seconds)
        # When the one before has run
        worker.run()
        # Then it waits for a lane
        assert steps.calls == ["s0"]
        assert len(worker.waiting) == 1


def test_a_step_of_another_queue_does_not_join(steps: Steps) -> None:
    # Given a step of another queue, which may have a limit of its own
    options: dict[str, Any] = {"queue": "other", "database_only": True}
    other = job(name="flows.quick_other", **options)(steps.take)
    chain(steps.note.step(name="s0"), other.step(name="s1")).enqueue()
    with stepped("flows", "other") as worker:
        worker.worker.scheduler.measure("flows.quick_other", 0.0)
        worker.run()
        assert steps.calls == ["s0"]


def test_nothing_joins_a_job_that_was_running_when_its_worker_died(
    steps: Steps, quick: Any
) -> None:
    # Given a first step that is leased to a worker without a sign of life
    again = quick.using(max_attempts=3)
    chain(again.step(name="s0"), again.step(name="s1")).enqueue()
    with stepped() as worker:
        worker.worker.scheduler.measure("flows.quick", 0.0)
        worker.worker.leases.show_alive()
        worker.relay()
        worker.poll()
        get_coordination().claim([worker.waiting[0].lease], "dead", timedelta(minutes=5))
        # When another one runs that step
        while not steps.calls:
            assert worker.lane()
        # Then it runs alone: what joined it may have been the reason
        assert steps.calls == ["s0"]


def test_a_thread_that_was_given_up_adds_nothing_to_its_group(steps: Steps, quick: Any) -> None:
    with stepped() as worker:
        scheduler = worker.worker.scheduler
        # Given a thread that runs no group
        assert not scheduler.join([])
        # And one whose group another thread has ended
        quick.enqueue(name="s0")
        worker.relay()
        worker.poll()
        group = scheduler.take(0.0)
        assert scheduler.join([])
        scheduler.finish(group, group.deliveries)
        # Then nothing joins it
        assert not scheduler.join([])


def test_a_joined_step_that_hangs_is_released_again_and_no_failure(
    steps: Steps, quick: Any
) -> None:
    # Given a step that hangs in the transaction of the one before it
    handle = chain(quick.step(name="s0"), quick.step(name="s1")).enqueue()
    with stepped() as worker:
        worker.relay()
        worker.poll()
        scheduler, pipeline = worker.worker.scheduler, worker.worker._pipeline
        group = scheduler.take(0.0)
        assert group is not None
        row = Job.objects.get(state=JobState.WAITING)
        due = DueJob(*(getattr(row, name) for name in DueJob._fields))
        (joined,) = worker.worker._direct_steps.read([due])
        assert scheduler.join([joined])
        context = JobContext(str(row.pk), 1, 1, str(row.pk), "flows")
        # When its thread is given up, and the transaction is undone
        deferred = pipeline.abandon(group.deliveries, [(context, 9.0, joined)])
        scheduler.finish(group, deferred)
        while worker.lane():
            pass
        # Then both run, each once
        assert steps.calls == ["s0", "s1"]
        assert is_idle(worker)
    assert handle.status == "completed"
    assert not DeadLetter.objects.exists()
