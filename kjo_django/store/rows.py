"""Rows as the hot path reads them: a model instance of each would cost more than its query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

if TYPE_CHECKING:
    from kjo_django.models import Job

NAMED_BY_OTHERS = 0
"""The generation given to the row of an open job of this service whose id a foreign message
bears."""


@dataclass(slots=True, eq=False)
class JobRow:
    """What is read of a job's row before the job runs; the columns stand in the SELECT's order."""

    id: UUID
    state: str
    generation: int
    attempts: int
    max_attempts: int
    available_at: datetime
    expires_at: datetime | None
    lease_token: str
    lease_expires_at: datetime | None
    result_ttl: int
    created_at: datetime
    unique_id: str | None
    stage_id: UUID | None
    """Of a workflow's step."""
    id_text: str
    """The id as messages write it."""

    @classmethod
    def of(cls, job: Job) -> JobRow:
        """Return what would be read of this job."""
        return cls.read([getattr(job, name) for name in COLUMNS])

    @classmethod
    def read(cls, values: Sequence[Any]) -> JobRow:
        """Return a row of the values of ``COLUMNS``."""
        complete = [*values, str(values[0])]
        return cls(*complete)

    def columns(self) -> dict[str, Any]:
        """Return the columns' values by name."""
        return {name: getattr(self, name) for name in COLUMNS}


COLUMNS = tuple(name for name in JobRow.__slots__ if name != "id_text")
"""The columns of ``kjo_job`` that a ``JobRow`` holds."""


class Place(NamedTuple):
    """Where a job's message was published, and since when."""

    topic: str
    partition: int | None
    offset: int | None
    queued_at: datetime


@dataclass(slots=True, eq=False)
class Completion:
    """A completed job, as it is to be written into the job's row."""

    row: JobRow
    attempt: int
    started_at: datetime | None
    result: bytes | None
    place: Place | None = None
    """Where the message was, when the relay has not recorded it yet."""
    result_ttl: int | None = None
    """Milliseconds the result is kept, when the handler's hook has changed that."""


class DueJob(NamedTuple):
    """What is read of a row that is due, to publish its message: without results and errors. What
    is kept of it once it is published has no payload any more."""

    id: UUID
    queue: str
    handler: str
    key: str
    generation: int
    attempts: int
    payload: bytes
    content_type: str
    destination: str
    headers: dict[str, Any] | None
    priority: int | None = None
    available_at: datetime | None = None

    @property
    def log_facts(self) -> dict[str, Any]:
        """What a log record about the job says in its ``extra``."""
        return {"job_id": str(self.id), "handler": self.handler, "queue": self.queue}


class Publication(NamedTuple):
    """Where the message of a job went."""

    job: Job | DueJob
    topic: str
    partition: int | None
    offset: int | None


class StepCounts(NamedTuple):
    """How many steps of a stage are open, have failed for good, and are cancelled; or by how many
    each of these numbers changes."""

    open: int
    failed: int = 0
    cancelled: int = 0
