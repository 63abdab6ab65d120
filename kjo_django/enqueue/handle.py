"""Handles: objects by which callers follow what they have enqueued.

A handle is an id. It reads nothing until it is asked, and then the present state of the database.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from kjo_django import states
from kjo_django.enqueue.coroutines import awaited_as, from_coroutine
from kjo_django.enqueue.job_status import Progress, limits_awaited, progress_of, shown_states
from kjo_django.enqueue.waiting import (
    DEFAULT_TIMEOUT,
    NO_RESULT,
    Awaited,
    NoResult,
    Waiter,
    is_expired,
    is_kept,
    refuse_in_transaction,
    result_of,
)
from kjo_django.exceptions import JobNotFoundError
from kjo_django.models import NEVER, Job
from kjo_django.runtime import databases, jobs_database, use_database
from kjo_django.states import JobState, JobStatus

P = ParamSpec("P")
"""The arguments of a handler, without the context."""
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
"""What a handler returns, and what the handle of its job therefore gives."""


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The state of a job at one moment, from one read."""

    id: str
    """The job's id."""
    status: JobStatus
    """The state that people see."""
    created_at: datetime
    """When it was enqueued."""
    available_at: datetime | None
    """When it is due; None: when its limit permits the start."""
    finished_at: datetime | None = None
    """When it ended; None: it is still open."""
    progress: Progress | None = None
    """The latest report of an open job."""
    result: Any = NO_RESULT
    """The result of a completed job, while it is kept."""
    error: str = ""
    """The text of the latest error of an open or failed job."""
    waits_for: str = ""
    """The limit that it waits for, such as ``rate 5/s of job:shop.call_partner``; otherwise
    empty."""

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return str(self.status) in states.FINAL


look_awaited = awaited_as("handle.asnapshot(), astatus(), aprogress() or aresult()")

_COLUMNS = (
    *(
        "state",
        "queue",
        "handler",
        "unique_id",
        "generation",
        "attempts",
        "error",
        "content_type",
        "headers",
        "result",
        "stage",
    ),
    *("available_at", "lease_expires_at", "created_at", "finished_at", "result_expires_at"),
)


def snapshots(ids: Iterable[uuid.UUID]) -> dict[uuid.UUID, JobSnapshot]:
    """Return what is known of each of these jobs; an unknown one is missing.

    For any number of jobs: one query to each database that holds jobs, and of coordination the
    leases and the progress of those that are open.
    """
    return read_everywhere(ids, _snapshots)


def read_everywhere(
    ids: Iterable[uuid.UUID], read: Callable[[Collection[uuid.UUID]], Mapping[uuid.UUID, R]]
) -> dict[uuid.UUID, R]:
    """Return what ``read`` finds of jobs, in one database after the other until none is missing."""
    found: dict[uuid.UUID, R] = {}
    missing = set(ids)
    for database in databases():
        if missing:
            with use_database(database):
                found.update(read(missing))
            missing.difference_update(found)
    return found


def database_of_job(id: uuid.UUID) -> str | None:
    """Return the alias of the database that has a job; the only one there is, without a query."""
    known = databases()
    if len(known) == 1:
        return known[0]
    for alias in known:
        if Job.objects.using(alias).filter(pk=id).exists():
            return alias
    return None


def _snapshots(ids: Iterable[uuid.UUID]) -> dict[uuid.UUID, JobSnapshot]:
    """Return what is known of those of these jobs that are in this thread's database."""
    rows = Job.objects.using(jobs_database()).filter(pk__in=ids).only(*_COLUMNS)
    jobs = {job.pk: job for job in rows}
    shown = shown_states(list(jobs.values()))
    progress = progress_of([job.pk for job in jobs.values() if job.state in states.OPEN])
    limits = limits_awaited(jobs.values())
    return {
        key: _snapshot(job, shown[key], progress.get(str(key)), limits.get(key, ""))
        for key, job in jobs.items()
    }


def _snapshot(
    job: Job, status: JobStatus, progress: Progress | None, waits_for: str
) -> JobSnapshot:
    return JobSnapshot(
        id=str(job.pk),
        status=status,
        created_at=job.created_at,
        available_at=None if job.available_at == NEVER else job.available_at,
        finished_at=job.finished_at,
        progress=progress,
        result=result_of(job) if job.state == JobState.COMPLETED and is_kept(job) else NO_RESULT,
        error=job.error if job.state in states.OPEN or is_kept(job) else "",
        waits_for=waits_for,
    )


@dataclass(slots=True, eq=False, repr=False)
class JobHandle(Generic[R_co]):
    """The answer to an enqueue, with which you can follow the job. If the job existed already, the
    enqueue returns its handle; only with ``on_conflict="raise"`` this is an error.

    ``JobHandle.of(id)`` makes a handle from the job's id. A handle is pickled as this id. Each
    attribute is read from the database each time. For type checkers, the result has the annotated
    return type of the handler; the value is the result after serialization.
    """

    job_id: uuid.UUID
    """The job's id."""
    answer: Literal["queued", "replaced", "duplicate", "completed"] | None = None
    """What the enqueue did: ``queued``, the job is new; ``replaced``, a waiting job got the new
    payload; ``duplicate``, there is such a job already; ``completed``, that job has completed. None
    for a handle made by ``of``."""
    existing_state: str | None = None
    """The state of a duplicate (queued, processing, failing, completed or failed), or the state of
    a replaced job before."""
    cached_result: Any = NO_RESULT
    """The result that the enqueue has found, if the job had completed."""
    database: str | None = None
    """The alias of the job's database. None for a handle made by ``of``: all are searched."""

    @classmethod
    def of(cls, id: uuid.UUID | str) -> JobHandle[Any]:
        """Return the handle of the job with this id, whether there is such a job or not.

        :param id: the job's id, also as text.
        :raises ValueError: the id is not a UUID.
        """
        try:
            return cls(id if isinstance(id, uuid.UUID) else uuid.UUID(id))
        except (ValueError, TypeError, AttributeError):
            raise ValueError(f"A job's id is a UUID, not {id!r:.80}") from None

    @property
    def id(self) -> str:
        """The job's id as text."""
        return str(self.job_id)

    @property
    def is_new(self) -> bool:
        """Whether the enqueue that returned this handle stored a job."""
        return self.answer == "queued"

    @look_awaited
    def snapshot(self) -> JobSnapshot | None:
        """Return all attributes of the job by one read, or None if there is no such job: its
        transaction was rolled back, or its row was pruned."""
        with use_database(self._database()):
            return _snapshots([self.job_id]).get(self.job_id)

    @property
    def status(self) -> JobStatus | None:
        """The state that people see, or None if there is no such job."""
        found = self.snapshot()
        return None if found is None else found.status

    @property
    def progress(self) -> Progress | None:
        """The latest report of an open job, or None if there is none."""
        found = self.snapshot()
        return None if found is None else found.progress

    @property
    def result(self) -> R_co | NoResult:
        """The result of a completed job while it is kept, otherwise ``NO_RESULT``."""
        if self.cached_result is not NO_RESULT:
            return self.cached_result  # type: ignore[no-any-return]
        found = self.snapshot()
        return NO_RESULT if found is None else found.result  # type: ignore[no-any-return]

    @awaited_as("handle.await_()")
    def wait(self, timeout: float = DEFAULT_TIMEOUT) -> R_co:
        """Return the job's result as soon as it has completed. The end is found by polling.

        :param timeout: the longest wait, in seconds.
        :raises JobTimeoutError: the time is over; the job may still complete.
        :raises JobFailedError: the job failed for good.
        :raises JobCancelledError: the job was cancelled, or enqueued again meanwhile.
        :raises JobNotFoundError: there is no such job, or its result or error is no longer kept.
        :raises UncommittedJobError: called inside a transaction, and the job has not ended.
        """
        waiter = Waiter(timeout)
        with use_database(self._database()):
            return waiter.wait(self._awaited())  # type: ignore[no-any-return]

    async def await_(self, timeout: float = DEFAULT_TIMEOUT) -> R_co:
        """``wait`` from asynchronous code; it occupies no thread and no database session during the
        wait.

        :param timeout: the longest wait, in seconds.
        """
        waiter = Waiter(timeout, releases=True)
        with use_database(await from_coroutine(self._database)()):
            found: R_co = await waiter.await_(await from_coroutine(self._awaited)())
        return found

    def _database(self) -> str:
        """Return the alias of the job's database, the default one if no database has the job."""
        if self.database is None:
            self.database = database_of_job(self.job_id)
        return self.database or databases()[0]

    def _awaited(self) -> Awaited:
        rows = Job.objects.using(jobs_database()).filter(pk=self.job_id)
        job = rows.only("state", "result_expires_at").first()
        if job is None or is_expired(job):
            what = "no job" if job is None else "no result any more of job"
            raise JobNotFoundError(f"There is {what} {self.id}")
        if job.state in states.OPEN:
            refuse_in_transaction(self.id)
        return Awaited(self.job_id, self.id)

    async def asnapshot(self) -> JobSnapshot | None:
        """``snapshot`` from asynchronous code."""
        return await from_coroutine(self.snapshot)()

    async def astatus(self) -> JobStatus | None:
        """``status`` from asynchronous code."""
        return await from_coroutine(lambda: self.status)()

    async def aprogress(self) -> Progress | None:
        """``progress`` from asynchronous code."""
        return await from_coroutine(lambda: self.progress)()

    async def aresult(self) -> R_co | NoResult:
        """``result`` from asynchronous code."""
        return await from_coroutine(lambda: self.result)()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobHandle) and self.job_id == other.job_id

    def __hash__(self) -> int:
        return hash(self.job_id)

    def __reduce__(self) -> tuple[type[JobHandle[Any]], tuple[uuid.UUID]]:
        return JobHandle, (self.job_id,)

    def __repr__(self) -> str:
        return f"<JobHandle {self.job_id}{f' {self.answer}' if self.answer else ''}>"
