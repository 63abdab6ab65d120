"""Rows as the hot path reads them: a model instance of each would cost more than its query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

if TYPE_CHECKING:
    from kjo_django.models import Job, Workflow

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
    def read(cls, values: Sequence[Any]) -> JobRow:
        """Return a row of the values of ``COLUMNS``."""
        complete = [*values, str(values[0])]
        return cls(*complete)

    def columns(self) -> dict[str, Any]:
        """Return the columns' values by name."""
        return {name: getattr(self, name) for name in COLUMNS}


def row_of(job: Job) -> JobRow:
    """Return what would be read of this job."""
    return JobRow.read([getattr(job, name) for name in COLUMNS])


COLUMNS = tuple(name for name in JobRow.__slots__ if name != "id_text")
"""The columns of ``kjo_job`` that a ``JobRow`` holds."""


LineRow = tuple[UUID | None, str, bool]
"""What is read of the line of a limit: a job, the limit, and whether the job is released; without a
job, that others stand in line for the limit."""


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
    worker: str = ""
    """The name of the one that ran it, where that is to be kept."""


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


class FollowerRow(NamedTuple):
    """A stage that waits for another one, as that one's end finds it."""

    edge_id: int
    id: UUID
    queue: str
    handler: str
    on_failure: str
    finished_at: datetime | None
    argument: str
    source_id: UUID | None
    step_count: int
    unmet_count: int
    """For how many stages it waits; exact where it waits only for stages read together."""
    counts: Sequence[int] = ()
    """The keys of its rows of counts, where they were read."""


Completing = tuple[Sequence[Completion], datetime] | None
"""Completions, and when they ended."""


@dataclass(slots=True, eq=False)
class StageRow:
    """A stage of a workflow, and what waits for it."""

    id: UUID
    workflow_id: UUID
    handler: str
    finished_at: datetime | None
    open: int
    """How many of its steps have not ended."""
    bad: int
    """How many of its steps have failed for good or were cancelled."""
    followers: list[FollowerRow] = field(default_factory=list)
    """Those with an unmet edge, in the order of the edges; none where no step has failed or was
    cancelled and some are open."""


@dataclass(slots=True, eq=False)
class Advance:
    """What follows from steps that have ended, as it is to be written."""

    now: datetime
    ended: list[UUID]
    """Stages whose last step has ended."""
    met: list[int]
    """Edges that are met."""
    released: list[UUID]
    """Stages whose steps wait no longer; the relay publishes those that are not reserved."""
    workflows: Sequence[Workflow] = ()
    """Workflows whose state and numbers are written."""
    reserved: list[UUID] = field(default_factory=list)
    """Those of the released stages whose steps are leased with their release, but for steps that
    have a key or a priority, or are due later."""
    lease: tuple[str, datetime] | None = None
    """The token of the worker that runs them, and until when no relay publishes them."""
