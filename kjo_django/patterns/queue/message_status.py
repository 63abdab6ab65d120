"""The status of a job, by its queue and the id that its caller gave."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from kjo_django import states
from kjo_django.clock import CLOCK
from kjo_django.enqueue.job_status import Progress, progress_of, shown_states
from kjo_django.enqueue.storing import milliseconds
from kjo_django.enqueue.waiting import (
    NO_RESULT,
    facts_of_failure,
    is_expired,
    is_kept,
    result_of,
)
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import storable_text
from kjo_django.models import Job, JobQuerySet
from kjo_django.runtime import jobs_database
from kjo_django.states import JobState, JobStatus

EXPIRED = "expired"
"""The state of a job whose result or error is no longer kept."""


class UpdateTtlResult(enum.StrEnum):
    """The result of changing a result's lifetime."""

    UPDATED = "updated"
    """The result or error is kept for the new lifetime, from now on."""
    NOT_FOUND = "not_found"
    """There is no job of this id."""
    NOT_TERMINAL = "not_terminal"
    """The job has not ended."""
    MISSING_PAYLOAD = "missing_payload"
    """The job has ended without a result or error that is kept: it expired or was cancelled."""


@dataclass(frozen=True, slots=True)
class MessageStatus:
    """The status of a job."""

    id: str
    """The id it was enqueued with."""
    state: str
    """queued, processing, failing, completed, failed, cancelled, or expired: the result or error of
    the completed or failed job is no longer kept."""
    created_at: datetime
    """The time of its enqueue, aware."""
    attempts: int
    """Attempts whose outcome is recorded."""
    max_attempts: int
    """Most executions of the job."""
    result_ttl: int
    """How long its result or error is kept, in milliseconds."""
    correlation_id: str | None = None
    """The correlation id of the request it belongs to."""
    result: Any = NO_RESULT
    """The result of a completed job, while it is kept."""
    error: str | None = None
    """The text of the latest error of a failing job, or of a failed one while it is kept."""
    error_type: str | None = None
    """Import path of that error's class."""
    error_code: str | None = None
    """That error's ``code``, if it has one."""
    error_details: Any = None
    """The error's ``to_dict()`` or ``details``; None if they are no JSON of 10,000 bytes."""
    progress: Progress | None = None
    """What its running handler has reported last."""
    job_id: str = ""
    """The key of the job, a UUID."""

    def to_dict(self) -> dict[str, Any]:
        """Return the status with the names of the protocol; times in milliseconds."""
        progress = self.progress
        known: dict[str, Any] = {
            "id": self.id,
            "state": self.state,
            "createdAt": int(self.created_at.timestamp() * 1000),
            "attempts": self.attempts,
            "maxAttempts": self.max_attempts,
            "resultTTL": self.result_ttl,
            "correlationId": self.correlation_id,
            "error": self.error,
            "errorType": self.error_type,
            "errorCode": self.error_code,
            "errorDetails": self.error_details,
            "progress": progress and {"percent": progress.percent, "text": progress.text},
        }
        known = {name: value for name, value in known.items() if value is not None}
        return known if self.result is NO_RESULT else {**known, "result": self.result}


def named(queue: str, *unique_ids: str) -> JobQuerySet:
    """Return the jobs of this queue with these unique ids.

    No job has an id that no database can store, and PostgreSQL refuses a query for it.

    :raises TypeError: an id is no text.
    """
    for id in unique_ids:
        if not isinstance(id, str):
            raise TypeError(f"id must be text, not {id!r}")
    jobs: JobQuerySet = Job.objects.using(jobs_database())
    known = [id for id in unique_ids if storable_text(id) == id]
    return jobs.filter(queue=queue, unique_id__in=known) if known else jobs.none()


def find(queue: str, unique_id: str) -> Job | None:
    """Return the job of this queue and unique id, or None."""
    return named(queue, unique_id).defer("payload").first()


def status_of(queue: str, unique_id: str) -> MessageStatus | None:
    """Return the status of a job, or None if there is no such job."""
    job = find(queue, unique_id)
    if job is None:
        return None
    is_open, has_outcome = job.state in states.OPEN, is_kept(job)
    error = (job.error or None) if is_open or has_outcome else None
    return MessageStatus(
        id=unique_id,
        state=_state(job, shown_states([job])[job.pk]),
        created_at=job.created_at,
        attempts=job.attempts,
        max_attempts=job.max_attempts,
        result_ttl=job.result_ttl,
        correlation_id=(job.headers or {}).get(names.CORRELATION_ID),
        result=result_of(job) if job.state == JobState.COMPLETED and has_outcome else NO_RESULT,
        error=error,
        progress=progress_of([job.pk]).get(str(job.pk)) if is_open else None,
        job_id=str(job.pk),
        **(facts_of_failure(job) if error is not None else {}),
    )


def states_of(queue: str, unique_ids: Collection[str]) -> dict[str, str | None]:
    """Return the state of each job, None for an unknown id, in two round trips."""
    rows = list(named(queue, *unique_ids).defer("payload", "result"))
    shown = shown_states(rows)
    found = {row.unique_id: _state(row, shown[row.pk]) for row in rows}
    return {id: found.get(id) for id in unique_ids}


def _state(job: Job, shown: JobStatus) -> str:
    return EXPIRED if is_expired(job) else states.to_queue(shown)


def result_for(queue: str, unique_id: str) -> Any:
    """Return a completed job's result while it is kept, else ``NO_RESULT``."""
    job = find(queue, unique_id)
    if job is None or job.state != JobState.COMPLETED or not is_kept(job):
        return NO_RESULT
    return result_of(job)


def update_result_ttl(queue: str, unique_id: str, ttl: timedelta | int) -> UpdateTtlResult:
    """Keep a finished job's result or error for ``ttl`` from now on, in one conditional UPDATE.

    :param ttl: a timedelta, or whole milliseconds.
    """
    lasts = milliseconds(ttl)
    now = CLOCK.now()
    jobs = named(queue, unique_id)
    changed = jobs.filter(
        state__in=(JobState.COMPLETED, JobState.FAILED), result_expires_at__gt=now
    ).update(result_ttl=lasts, result_expires_at=now + timedelta(milliseconds=lasts))
    if changed:
        return UpdateTtlResult.UPDATED
    state = jobs.values_list("state", flat=True).first()
    if state is None:
        return UpdateTtlResult.NOT_FOUND
    if state in states.OPEN:
        return UpdateTtlResult.NOT_TERMINAL
    return UpdateTtlResult.MISSING_PAYLOAD
