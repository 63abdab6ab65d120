"""The handle of a workflow: it follows the protocol of a job's handle."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connections

from kjo_django import Workflow, chain, group
from kjo_django.enqueue import waiting
from kjo_django.enqueue.waiting import NO_RESULT
from kjo_django.exceptions import (
    JobCancelledError,
    JobFailedError,
    JobNotFoundError,
    JobTimeoutError,
    UncommittedJobError,
)
from kjo_django.operations import workflows
from kjo_django.workflows.workflow_handle import WorkflowHandle
from tests.unit.steps import Steps
from tests.waiting import PATIENCE


@pytest.mark.django_db
def test_a_handle_says_where_the_workflow_is_and_what_came_of_it(steps: Steps) -> None:
    handle = chain(steps.double.step(value=1), steps.double.step()).enqueue()
    assert (handle.status, handle.progress.percent, handle.result) == ("running", 0.0, NO_RESULT)
    with pytest.raises(UncommittedJobError):
        handle.wait(1)
    steps.run()
    assert (handle.status, handle.progress.text) == ("completed", "2 of 2 steps")
    assert (handle.result, handle.wait(PATIENCE)) == (4, 4)


@pytest.mark.django_db
def test_of_several_last_steps_the_result_is_a_list(steps: Steps) -> None:
    handle = group(steps.double.step(value=number) for number in range(3)).enqueue()
    steps.run()
    assert handle.result == [0, 2, 4]


@pytest.mark.django_db
def test_waiting_for_a_workflow_that_will_not_complete_says_why(steps: Steps) -> None:
    steps.failing = {"a"}
    failed = chain(steps.note.step(name="a")).enqueue()
    steps.run()
    with pytest.raises(JobFailedError, match="note has failed"):
        failed.wait(PATIENCE)
    cancelled = chain(steps.note.step(name="b")).enqueue()
    workflows.cancel([cancelled.id], actor="ann")
    with pytest.raises(JobCancelledError, match="by ann"):
        cancelled.wait(PATIENCE)
    with pytest.raises(JobNotFoundError):
        WorkflowHandle.of("0198f0d5-0000-7000-8000-000000000000").wait(PATIENCE)
    with pytest.raises(ValueError, match="UUID"):
        WorkflowHandle.of("42")


@pytest.mark.django_db
def test_a_handle_is_made_again_from_its_id_and_from_a_pickle(steps: Steps) -> None:
    with Workflow("kept") as w:
        w.add(steps.note, name="a")
    assert w.handle is not None
    again: Any = pickle.loads(pickle.dumps(w.handle))
    assert again == w.handle == WorkflowHandle.of(w.handle.id)
    assert (again.is_new, again.status) == (False, "running")


@pytest.mark.usefixtures("sqlite_file")
def test_waiting_ends_with_the_workflow_and_with_its_time(steps: Steps) -> None:
    handle = chain(steps.double.step(value=1), steps.double.step()).enqueue()
    with pytest.raises(JobTimeoutError):
        handle.wait(0.05)

    def run() -> None:
        steps.run()
        connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    assert async_to_sync(handle.await_)(30) == 4
    thread.join()
    assert async_to_sync(handle.aresult)() == 4
    assert async_to_sync(handle.astatus)() == "completed"


@pytest.mark.parametrize("engine", ["postgres-database"], indirect=True)
@pytest.mark.postgres
def test_a_notification_ends_the_wait_long_before_the_next_poll(
    engine: str, steps: Steps, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    looked = threading.Event()

    def long_pauses(waiter: Any, awaited: Any) -> Iterator[float]:
        while True:
            looked.set()
            yield 20.0

    monkeypatch.setattr(waiting.Waiter, "_pauses", long_pauses)
    request.addfinalizer(lambda: waiting._current_listener().close())
    with ThreadPoolExecutor(1) as pool:
        for wait in (WorkflowHandle.wait, async_to_sync(WorkflowHandle.await_)):
            for end in ("completed", "cancelled"):
                # Given: a workflow that somebody waits for
                looked.clear()
                handle = chain(steps.double.step(value=1), steps.double.step()).enqueue()
                answer = pool.submit(closing(wait), handle, 30)
                assert looked.wait(PATIENCE)
                # When it ends, then the waiter learns that at once
                if end == "completed":
                    steps.run()
                    assert answer.result(PATIENCE) == 4
                else:
                    workflows.cancel([handle.id])
                    with pytest.raises(JobCancelledError):
                        answer.result(PATIENCE)


def closing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that closes its thread's connections."""

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        finally:
            connections.close_all()

    return call
