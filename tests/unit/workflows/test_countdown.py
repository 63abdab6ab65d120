"""Two transactions that count the last members of a group, and what counting costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import DatabaseError, connections, transaction
from django.db.backends.utils import CursorWrapper
from django.utils import timezone

from kjo_django import chain, group
from kjo_django.enqueue.definition import Step
from kjo_django.models import Job, Workflow, WorkflowCount, WorkflowEdge
from kjo_django.runtime import current_runtime
from kjo_django.states import JobState
from kjo_django.store.rows import Completion
from kjo_django.workflows import countdown
from kjo_django.workflows.countdown import count_ended
from kjo_django.workflows.workflow_handle import WorkflowHandle
from tests.unit.deliveries import Bench
from tests.unit.steps import KJO, MEMORY, Steps
from tests.waiting import PATIENCE, wait_until


@pytest.fixture
def _on_postgres(postgres: None, settings: Any) -> None:
    settings.KJO = KJO


def end(jobs: list[Job]) -> None:
    """Complete steps and count them, as a worker does that has run them in one transaction."""
    with transaction.atomic():
        Job.objects.filter(pk__in=[job.pk for job in jobs]).update(state=JobState.COMPLETED)
        count_ended(current_runtime(), [(job.stage_id, job.pk, job.state) for job in jobs])


def with_two_open_members(members: list[Step], end_step: Step) -> tuple[WorkflowHandle, list[Job]]:
    """Enqueue a group, end all its members but two that different rows count; return these."""
    handle = group(members).then(end_step).enqueue()
    rows = list(Job.objects.exclude(state=JobState.WAITING).order_by("pk"))
    counts: dict[Any, list[int]] = {}
    for count in WorkflowCount.objects.order_by("pk"):
        counts.setdefault(count.stage_id, []).append(count.pk)
    by_count: dict[int, Job] = {}
    for job in rows:
        own = counts[job.stage_id]
        by_count[own[job.pk.int % len(own)]] = job
        job.state = JobState.COMPLETED
    last = list(by_count.values())
    assert len(last) == 2
    rest = [job for job in rows if job not in last]
    if rest:
        end(rest)
    return handle, last


@pytest.mark.postgres
@pytest.mark.usefixtures("_on_postgres")
@pytest.mark.parametrize("shape", ["two stages", "two counts of a stage"])
def test_two_that_count_the_last_members_at_once_release_the_callback_once(
    steps: Steps, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a group of which two members are left
    members = [steps.note.step(name=f"m{n}") for n in range(300)]
    if shape == "two stages":
        members = [steps.note.step(name="m0"), steps.outside.step(name="m1")]
    handle, last = with_two_open_members(members, steps.note.step(name="end"))
    released, transit = Counter[str](), countdown.transition

    def releasing(event: str, rows: Any, **changes: Any) -> int:
        changed = transit(event, rows, **changes)
        if event == "release":
            released["end"] += changed
        return changed

    monkeypatch.setattr(countdown, "transition", releasing)

    def end_one(job: Job) -> None:
        try:
            end([job])
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as threads:
        # And somebody who holds the workflow until both are counted, by transactions that see
        # nothing of each other
        with transaction.atomic():
            Workflow.objects.select_for_update().get(pk=handle.workflow_id)
            ends = [threads.submit(end_one, job) for job in last]
            wait_until(lambda: waiting_sessions() == 2 or any(end.done() for end in ends))
            assert open_steps() == 3  # the members and the callback
        # When both end
        for each in ends:
            each.result(PATIENCE)
    monkeypatch.undo()
    # Then one of them has released the callback
    assert released == {"end": 1}
    assert list(WorkflowEdge.objects.values_list("is_met", flat=True).distinct()) == [True]
    assert steps.run() == ["end"]
    assert handle.status == "completed"


def waiting_sessions() -> int:
    """Return how many sessions wait for a lock that another one holds."""
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
            "AND datname = current_database()"
        )
        return int(cursor.fetchone()[0])


def open_steps() -> int:
    return sum(WorkflowCount.objects.values_list("open_count", flat=True))


def statements_of(bench: Bench, count: int) -> tuple[int, list[str]]:
    """Run so many jobs as one group; return how many statements that takes, whatever the thread,
    and the first words of those that are of tables of workflows."""
    deliveries = bench.poll(count)
    assert len(deliveries) == count
    with statements() as taken:
        bench.run(deliveries)
    return len(taken), of_workflows(taken)


@contextmanager
def statements() -> Iterator[list[str]]:
    """Yield a list of the statements that are executed, whatever the thread."""
    taken: list[str] = []
    execute = CursorWrapper._execute_with_wrappers

    def executing(self: Any, sql: str, *arguments: Any, **options: Any) -> Any:
        taken.append(sql.strip())
        return execute(self, sql, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CursorWrapper, "_execute_with_wrappers", executing)
        yield taken


def of_workflows(taken: list[str]) -> list[str]:
    """Return the first words of the statements that are of tables of workflows."""
    return [sql.split()[0] for sql in taken if "kjo_workflow" in sql]


@pytest.mark.postgres
@pytest.mark.usefixtures("standing_clock", "_on_postgres")
def test_members_are_counted_by_one_statement_for_all_that_run_together(steps: Steps) -> None:
    # Given what as many plain jobs take
    bench = Bench("flows")
    try:
        steps.note.enqueue_many([{"name": f"p{n}"} for n in range(111)])
        _first, *plain = [statements_of(bench, count)[0] for count in (1, 10, 100)]
        # When members of a group run, the last ones later
        group(steps.note.step(name=f"m{n}") for n in range(120)).then(
            steps.note.step(name="end")
        ).enqueue()
        taken = [statements_of(bench, count) for count in (1, 10, 100)]
        # Then the first of them read what never changes of their stage, and each group counts once,
        # along with the update of its jobs
        assert [own for _, own in taken] == [["SELECT", "UPDATE"], ["UPDATE"], ["UPDATE"]]
        # So they take no statement more than plain jobs, though the COMMIT is one by itself:
        # whether anything else is to be written depends on the count
        assert [number for number, _ in taken[1:]] == plain
        # And the last pays for what follows, once
        last = statements_of(bench, 9)[1]
        assert len(last) <= 8
        assert not Job.objects.filter(state=JobState.WAITING).exists()
    finally:
        bench.close()


@pytest.mark.postgres
@pytest.mark.usefixtures("_on_postgres")
def test_a_step_of_a_chain_takes_one_round_trip_more_than_a_plain_job(
    steps: Steps, settings: Any
) -> None:
    # Given a chain on a transport that needs the relay
    settings.KJO = KJO | MEMORY
    names = [f"s{number}" for number in range(5)]
    handle = chain(*(steps.note.step(name=name) for name in names)).enqueue()
    # When it runs
    with statements() as taken:
        assert steps.run() == names
    # Then the first step reads what never changes, each counts along with the update of its row,
    # then writes what follows, and the last one asks whether any has failed
    completes, follows = "UPDATE", "UPDATE"
    assert of_workflows(taken) == [
        "SELECT",
        *[completes, follows] * 4,
        *(completes, "SELECT", follows),
    ]
    assert sum("kjo_job SET state = 'completed'" in sql for sql in taken) == 5
    assert handle.status == "completed"


@pytest.mark.postgres
@pytest.mark.usefixtures("_on_postgres")
def test_a_chain_is_stored_and_committed_in_one_round_trip(steps: Steps, settings: Any) -> None:
    # Given a transport that needs the relay
    settings.KJO = KJO | MEMORY
    chain(steps.note.step(name="warm")).enqueue()
    # When
    with statements() as taken:
        handle = chain(*(steps.note.step(name=f"s{number}") for number in range(5))).enqueue()
    # Then the rows of each table are one INSERT, all of them are one text with the commit, and the
    # relay is woken
    text, wake_up = taken
    assert "pg_notify" in wake_up
    tables = ["workflow", "workflow_stage", "workflow_edge", "workflow_count", "job"]
    assert [each.split()[2] for each in text.split("; ")[:-1]] == [f"kjo_{t}" for t in tables]
    assert text.endswith("; COMMIT")
    # And all of it is there
    assert steps.run() == ["warm", *(f"s{number}" for number in range(5))]
    assert handle.status == "completed"


@pytest.mark.postgres
@pytest.mark.usefixtures("_on_postgres")
def test_a_chain_in_a_transaction_is_committed_by_that(steps: Steps, settings: Any) -> None:
    settings.KJO = KJO | MEMORY
    # When a transaction fails in which a chain was enqueued
    with pytest.raises(ZeroDivisionError), transaction.atomic(), statements() as taken:
        chain(*(steps.note.step(name=f"s{number}") for number in range(5))).enqueue()
        raise ZeroDivisionError
    # Then nothing of it is there
    assert len(taken) == 1
    assert not taken[0].endswith("COMMIT")
    assert not Workflow.objects.exists()
    assert not Job.objects.exists()


@pytest.mark.postgres
@pytest.mark.usefixtures("_on_postgres")
def test_many_members_are_stored_by_copy_behind_their_workflow(steps: Steps, settings: Any) -> None:
    settings.KJO = KJO | MEMORY
    # When more members are enqueued than one text is made for
    with statements() as taken:
        handle = (
            group(steps.note.step(name=f"m{number}") for number in range(600))
            .then(steps.note.step(name="end"))
            .enqueue()
        )
    # Then the workflow comes first, its counts and the callback last, and no text holds a member
    *inserts, wake_up = taken
    assert [sql.split()[2] for sql in inserts] == ["kjo_workflow", "kjo_workflow_count"]
    assert "pg_notify" in wake_up
    assert sum("INTO kjo_job" in sql for sql in taken) == 1
    assert Job.objects.filter(stage__workflow=handle.workflow_id).count() == 601


@pytest.mark.usefixtures("engine")
def test_a_step_that_changed_its_own_row_is_not_counted(steps: Steps) -> None:
    # Given a running step whose row is not as it was read
    handle = chain(steps.note.step(name="a"), steps.note.step(name="b")).enqueue()
    store, job = current_runtime().store, Job.objects.exclude(state=JobState.WAITING).get()
    row = store.job_rows([str(job.pk)], lock=False)[str(job.pk)]
    Job.objects.filter(pk=job.pk).update(state=JobState.CANCELLED)
    now = timezone.now()
    completion = Completion(row, 1, now, None, None, None)
    # When it completes
    with pytest.raises(DatabaseError, match="own transaction"), transaction.atomic():
        count_ended(
            current_runtime(),
            [(job.stage_id, job.pk, JobState.COMPLETED)],
            completing=([completion], now),
        )
    # Then nothing follows from that
    assert open_steps() == 2
    assert handle.status == "running"
