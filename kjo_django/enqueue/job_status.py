"""What open jobs show: their status, by rows and leases, and their progress, by marks.

The row of a running atomic handler is locked, so coordination has the lease and the progress.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kjo_django import states
from kjo_django.conf import get_settings
from kjo_django.coordination.base import alive_name, lease_name
from kjo_django.exceptions import CoordinationError
from kjo_django.models import Job
from kjo_django.runtime import get_coordination
from kjo_django.states import JobStatus

logger = logging.getLogger("kjo_django")

# --- Status ---------------------------------------------------------------------------------------


def shown_states(jobs: Sequence[Job]) -> dict[Any, JobStatus]:
    """Return the state of each job that people are shown, by the job's key."""
    leased = leased_jobs(jobs)
    return {job.pk: job.status_with(leased=job.pk in leased) for job in jobs}


def leased_jobs(jobs: Iterable[Job]) -> set[Any]:
    """Return the keys of the open jobs on which a living worker holds a lease of coordination.

    Nothing else shows that an atomic handler runs. All leases are asked for at once.
    """
    conf = get_settings()
    leases = {
        job.pk: lease_name(conf.queue(job.queue), job.message_id)
        for job in jobs
        if job.state in states.OPEN
    }
    live = live_leases(list(leases.values()))
    return {key for key, name in leases.items() if name in live}


def live_leases(leases: Sequence[str]) -> set[str]:
    """Return the lease names that a living worker holds; none while coordination is away."""
    if not leases:
        return set()
    coordination = get_coordination()
    try:
        owners = coordination.holders(leases)
        living = coordination.holders(sorted({alive_name(token) for token in owners.values()}))
    except CoordinationError as error:
        logger.warning("Leases cannot be asked for, the rows decide: %s", error)
        return set()
    return {name for name, token in owners.items() if alive_name(token) in living}


# --- Progress -------------------------------------------------------------------------------------


class Progress(NamedTuple):
    """How far a job reports it has got."""

    percent: float | None
    text: str


def progress_name(job_id: str) -> str:
    """Return the mark that holds a running job's progress."""
    return f"PROGRESS:{job_id}"


def load_progress(value: str) -> Progress | None:
    """Return the progress that a mark holds; None for what ``dump_progress`` never wrote."""
    try:
        percent, text = json.loads(value)
    except (TypeError, ValueError):
        return None
    return Progress(percent, str(text))


def progress_of(job_ids: Sequence[object]) -> dict[str, Progress]:
    """Return the latest report of each job that has made one within the hour, by its id as text.

    While coordination cannot be reached, the answer is empty.
    """
    if not job_ids:
        return {}
    names = {progress_name(str(id)): str(id) for id in job_ids}
    try:
        marks = get_coordination().get_marks(list(names))
    except CoordinationError:
        return {}
    found = {names[name]: load_progress(value) for name, value in marks.items()}
    return {id: progress for id, progress in found.items() if progress is not None}
