"""Following a workflow: the handle that its enqueue answers with."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Literal

from kjo_django import models
from kjo_django.enqueue.coroutines import awaited_as, from_coroutine
from kjo_django.enqueue.handle import look_awaited
from kjo_django.enqueue.job_status import Progress
from kjo_django.enqueue.waiting import (
    DEFAULT_TIMEOUT,
    NO_RESULT,
    Awaited,
    Waiter,
    refuse_in_transaction,
    result_of,
    workflow_channel,
)
from kjo_django.exceptions import JobCancelledError, JobFailedError, JobNotFoundError
from kjo_django.models import Job
from kjo_django.runtime import databases, jobs_database, use_database
from kjo_django.states import OPEN_WORKFLOWS, JobState, WorkflowState
from kjo_django.workflows.snapshots import WorkflowSnapshot, snapshot

RESULTS = 10_000
"""Most results of last steps that a handle returns; ``context.workflow`` reads any number."""


@dataclass(slots=True, eq=False, repr=False)
class WorkflowHandle:
    """The answer to the enqueue of a workflow, with which you can follow it.

    ``WorkflowHandle.of(id)`` makes a handle from the workflow's id. Each attribute is read from the
    database each time.
    """

    workflow_id: uuid.UUID
    """The workflow's id."""
    answer: Literal["queued", "duplicate"] | None = None
    """What the enqueue did: ``queued``, the workflow is stored; ``duplicate``, there is one with
    its name and unique id. None for a handle made by ``of``."""
    database: str | None = None
    """The alias of its database. None for a handle made by ``of``: all are searched."""

    @classmethod
    def of(cls, id: uuid.UUID | str) -> WorkflowHandle:
        """Return the handle of the workflow with this id, whether there is such a workflow or not.

        :param id: the workflow's id, also as text.
        :raises ValueError: the id is not a UUID.
        """
        try:
            return cls(id if isinstance(id, uuid.UUID) else uuid.UUID(id))
        except (ValueError, TypeError, AttributeError):
            raise ValueError(f"A workflow's id is a UUID, not {id!r:.80}") from None

    @property
    def id(self) -> str:
        """The workflow's id as text."""
        return str(self.workflow_id)

    @property
    def is_new(self) -> bool:
        """Whether the enqueue that returned this handle stored a workflow."""
        return self.answer == "queued"

    @look_awaited
    def snapshot(self) -> WorkflowSnapshot | None:
        """Return all attributes of the workflow by one read, or None if there is no such
        workflow."""
        with use_database(self._database()):
            return snapshot(self.workflow_id)

    @property
    @look_awaited
    def status(self) -> WorkflowState | None:
        """The workflow's state, or None if there is no such workflow."""
        with use_database(self._database()):
            found = self._row("state")
        return None if found is None else WorkflowState(found.state)

    @property
    def progress(self) -> Progress | None:
        """How many of its steps have ended, or None if there is no such workflow."""
        found = self.snapshot()
        if found is None:
            return None
        steps = found.steps
        ended = steps.total - steps.open
        return Progress(round(steps.percent, 1), f"{ended} of {steps.total} steps")

    @property
    @look_awaited
    def result(self) -> Any:
        """The result of the last step of a completed workflow, or a list if there are several last
        steps; ``NO_RESULT`` if the workflow has not completed."""
        with use_database(self._database()):
            row = self._row("state")
            return NO_RESULT if row is None else self._result_of(row)

    @awaited_as("handle.await_()")
    def wait(self, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """Return the workflow's result as soon as it has completed. The process that commits the
        end notifies waiting ones; if coordination cannot notify, the call polls.

        :param timeout: the longest wait, in seconds.
        :raises JobTimeoutError: the time is over; the workflow may still complete.
        :raises JobFailedError: the workflow failed.
        :raises JobCancelledError: the workflow was cancelled.
        :raises JobNotFoundError: there is no such workflow.
        :raises UncommittedJobError: called inside a transaction, and the workflow has not ended.
        """
        waiter = Waiter(timeout, shared=workflow_channel(self.workflow_id))
        awaited = _AwaitedWorkflow(self.workflow_id, self.id, is_called=True)
        with use_database(self._database()):
            has_ended, result, _ = awaited.look()
            if has_ended:
                return result
            with waiter:
                return waiter.wait(awaited)

    async def await_(self, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """``wait`` from asynchronous code; it occupies no thread and no database session during the
        wait.

        :param timeout: the longest wait, in seconds.
        """
        waiter = Waiter(timeout, shared=workflow_channel(self.workflow_id), releases=True)
        awaited = _AwaitedWorkflow(self.workflow_id, self.id, is_called=True)
        with use_database(await from_coroutine(self._database)()):
            has_ended, result, _ = await from_coroutine(awaited.look)()
            if has_ended:
                return result
            await from_coroutine(waiter.__enter__)()
            try:
                return await waiter.await_(awaited)
            finally:
                waiter.__exit__()

    async def asnapshot(self) -> WorkflowSnapshot | None:
        """``snapshot`` from asynchronous code."""
        return await from_coroutine(self.snapshot)()

    async def astatus(self) -> WorkflowState | None:
        """``status`` from asynchronous code."""
        return await from_coroutine(lambda: self.status)()

    async def aprogress(self) -> Progress | None:
        """``progress`` from asynchronous code."""
        return await from_coroutine(lambda: self.progress)()

    async def aresult(self) -> Any:
        """``result`` from asynchronous code."""
        return await from_coroutine(lambda: self.result)()

    def _database(self) -> str:
        if self.database is None:
            known = databases()
            for alias in known if len(known) > 1 else ():
                if models.Workflow.objects.using(alias).filter(pk=self.workflow_id).exists():
                    self.database = alias
                    break
            else:
                return known[0]
        return self.database

    def _row(self, *columns: str) -> models.Workflow | None:
        rows = models.Workflow.objects.using(jobs_database()).filter(pk=self.workflow_id)
        return rows.only(*columns).first()

    def _result_of(self, row: models.Workflow) -> Any:
        if row.state != WorkflowState.COMPLETED:
            return NO_RESULT
        last = Job.objects.using(jobs_database()).filter(
            stage__workflow=row.pk, stage__followers=None, state=JobState.COMPLETED
        )
        jobs = last.only("result", "content_type").order_by("pk")[:RESULTS]
        results = [result_of(job) for job in jobs]
        return results[0] if len(results) == 1 else results

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkflowHandle) and self.workflow_id == other.workflow_id

    def __hash__(self) -> int:
        return hash(self.workflow_id)

    def __reduce__(self) -> tuple[type[WorkflowHandle], tuple[uuid.UUID]]:
        return WorkflowHandle, (self.workflow_id,)

    def __repr__(self) -> str:
        return f"<WorkflowHandle {self.workflow_id}{f' {self.answer}' if self.answer else ''}>"


class _AwaitedWorkflow(Awaited):
    """Which workflow is waited for."""

    __slots__ = ()
    what = "Workflow"

    def look(self) -> tuple[bool, Any, Awaited]:
        """Read the workflow's row."""
        handle = WorkflowHandle(self.job_id)
        row = handle._row("state", "name", "reason")
        if row is None:
            raise JobNotFoundError(f"There is no workflow {self.name}")
        if row.state in OPEN_WORKFLOWS:
            refuse_in_transaction(self.name)
            return False, None, self
        if row.state == WorkflowState.FAILED:
            why = f"The workflow {row.name} failed: {row.reason}"
            raise JobFailedError(why, original_error=row.reason, job_id=self.name)
        if row.state == WorkflowState.CANCELLED:
            raise JobCancelledError(f"The workflow {row.name} was cancelled: {row.reason}")
        return True, handle._result_of(row), self
