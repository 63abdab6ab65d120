"""What became of a job known by its queue and unique id."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.utils import timezone

from kjo_django import states
from kjo_django.conf import get_settings
from kjo_django.engine.leases import lease_name
from kjo_django.enqueue.storing import milliseconds, result_of
from kjo_django.exceptions import JobFailedError
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import storable_text
from kjo_django.models import Job, JobFailure, JobQuerySet
from kjo_django.operations.jobs import live_leases
from kjo_django.operations.progress import Progress, progress_of
from kjo_django.states import JobState, JobStatus
from kjo_django.store.transactions import jobs_database


class NoResult(enum.Enum):
    """The type of ``NO_RESULT``; falsy."""

    NO_RESULT = "no result"

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "NO_RESULT"


NO_RESULT: Final = NoResult.NO_RESULT
"""There is no result: the job is unknown, has not completed, or its result has expired. A job that
returned None has a result, which is None (PJQ-06, PJQ-F16)."""


EXPIRED = "expired"
"""The state of a job whose result or error is no longer kept."""


class UpdateTtlResult(enum.StrEnum):
    """What changing a result's lifetime ended with (O-02)."""

    UPDATED = "updated"
    NOT_FOUND = "not_found"
    NOT_TERMINAL = "not_terminal"
    MISSING_PAYLOAD = "missing_payload"
    """It has ended, but no result or error is kept: expired, or cancelled."""


@dataclass(frozen=True, slots=True)
class MessageStatus:
    """What is known of a job (PJQ-07)."""

    id: str
    state: str
    """queued, processing, failing, completed, failed, cancelled, or expired: it had completed or
    failed, and its result or error is no longer kept."""
    created_at: datetime
    attempts: int
    """Attempts whose outcome is recorded."""
    max_attempts: int
    result_ttl: int
    """Milliseconds."""
    correlation_id: str | None = None
    result: Any = NO_RESULT
    """Of a completed one, while it lives."""
    error: str | None = None
    """Text of the latest error, of a failing or failed one; of the latter while it lives."""
    error_type: str | None = None
    """Import path of that error's class."""
    error_code: str | None = None
    """That error's ``code``, if it has one."""
    error_details: Any = None
    """What that error's ``to_dict()`` returned, or its ``details``; None where JSON cannot hold
    them in 10,000 bytes."""
    progress: Progress | None = None
    job_id: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it with the names it has on the wire (PJQ-23); times in milliseconds."""
        known: dict[str, Any] = {
            "id": self.id,
            "state": self.state,
            "createdAt": int(self.created_at.timestamp() * 1000),
            "attempts": self.attempts,
            "maxAttempts": self.max_attempts,
            "resultTTL": self.result_ttl,
        }
        if self.correlation_id is not None:
            known["correlationId"] = self.correlation_id
        if self.result is not NO_RESULT:
            known["result"] = self.result
        if self.error is not None:
            known["error"] = self.error
        if self.error_type is not None:
            known["errorType"] = self.error_type
        if self.error_code is not None:
            known["errorCode"] = self.error_code
        if self.error_details is not None:
            known["errorDetails"] = self.error_details
        if self.progress is not None:
            known["progress"] = {"percent": self.progress.percent, "text": self.progress.text}
        return known


def named(queue: str, *unique_ids: str) -> JobQuerySet:
    """Return the jobs of this queue and these unique ids. An id may come from anywhere: one that no
    database keeps is nobody's, and PostgreSQL cannot even be asked for it.

    :raises TypeError: an id is no text.
    """
    for id in unique_ids:
        if not isinstance(id, str):
            raise TypeError(f"id must be text, not {id!r}")
    jobs: JobQuerySet = Job.objects.using(jobs_database())
    known = [id for id in unique_ids if storable_text(id) == id]
    return jobs.filter(queue=queue, unique_id__in=known) if known else jobs.none()


def find(queue: str, unique_id: str) -> Job | None:
    """Return the job of this queue and unique id."""
    return named(queue, unique_id).defer("payload").first()


def status_of(queue: str, unique_id: str) -> MessageStatus | None:
    """Return what is known of a job, None for one that is not."""
    job = find(queue, unique_id)
    if job is None:
        return None
    is_open = job.state in states.OPEN
    is_kept = _is_kept(job)
    error = (job.error or None) if is_open or is_kept else None
    failure = last_failure(job) if error is not None else None
    return MessageStatus(
        id=unique_id,
        state=EXPIRED if is_expired(job) else states.to_queue(_status(job)),
        created_at=job.created_at,
        attempts=job.attempts,
        max_attempts=job.max_attempts,
        result_ttl=job.result_ttl,
        correlation_id=(job.headers or {}).get(names.CORRELATION_ID),
        result=result_of(job) if job.state == JobState.COMPLETED and is_kept else NO_RESULT,
        error=error,
        error_type=(failure and failure.error_type) or None,
        error_code=(failure and failure.code) or None,
        error_details=failure and failure.details,
        progress=progress_of([job.pk]).get(str(job.pk)) if is_open else None,
        job_id=str(job.pk),
    )


def states_of(queue: str, unique_ids: Collection[str]) -> dict[str, str | None]:
    """Return the state of each job, None for an unknown id, in two round trips (PJQ-57)."""
    rows = list(named(queue, *unique_ids).defer("payload", "result"))
    conf = get_settings().queue(queue)
    names = {row.pk: lease_name(conf, row.message_id) for row in rows if row.state in states.OPEN}
    leased = live_leases(list(names.values()))
    found = {
        row.unique_id: EXPIRED
        if is_expired(row)
        else states.to_queue(row.status_with(leased=names.get(row.pk) in leased))
        for row in rows
    }
    return {id: found.get(id) for id in unique_ids}


def _status(job: Job) -> JobStatus:
    """A running atomic handler shows by the lease its worker holds in coordination."""
    if job.state not in states.OPEN:
        return JobStatus(job.state)
    name = lease_name(get_settings().queue(job.queue), job.message_id)
    return job.status_with(leased=name in live_leases([name]))


def is_expired(job: Job) -> bool:
    """Whether the job has completed or failed and its result or error is no longer kept: its id is
    free, and its row is history."""
    has_ended = job.state in (JobState.COMPLETED, JobState.FAILED)
    return has_ended and job.result_expires_at is not None and not _is_kept(job)


def last_failure(job: Job) -> JobFailure | None:
    """Return the latest failed attempt of the job's present generation."""
    rows = JobFailure.objects.using(jobs_database()).defer("traceback")
    return rows.filter(job=job.pk, generation=job.generation).order_by("-attempt", "-pk").first()


def failure_of(id: str, job: Job) -> JobFailedError:
    """Return what is raised to those who wait for a failed job.

    :param id: as they know it.
    """
    failure = last_failure(job)
    return JobFailedError(
        f"Job {id!r} failed: {job.error}",
        original_error=job.error,
        job_id=id,
        attempts=job.attempts,
        error_type=(failure and failure.error_type) or None,
        error_code=(failure and failure.code) or None,
        error_details=failure and failure.details,
    )


def _is_kept(job: Job) -> bool:
    return job.result_expires_at is not None and job.result_expires_at > timezone.now()


def result_for(queue: str, unique_id: str) -> Any:
    """Return a completed job's living result, or ``NO_RESULT``."""
    job = find(queue, unique_id)
    if job is None or job.state != JobState.COMPLETED or not _is_kept(job):
        return NO_RESULT
    return result_of(job)


def update_result_ttl(queue: str, unique_id: str, ttl: timedelta | int) -> UpdateTtlResult:
    """Keep a finished job's result or error for ``ttl`` from now on, in one conditional UPDATE.

    :param ttl: a timedelta, or whole milliseconds; refused before anything is written.
    """
    lasts = milliseconds(ttl, timedelta(1))
    now = timezone.now()
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
