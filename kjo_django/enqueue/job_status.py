"""What open jobs show: their status, the limits they wait for, and their progress, by marks.

The row of a running atomic handler is locked, so coordination has the lease and the progress.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kjo_django import registry, states
from kjo_django.clock import CLOCK
from kjo_django.conf import get_settings
from kjo_django.coordination.base import alive_name, lease_name
from kjo_django.exceptions import CoordinationError, PublishError
from kjo_django.logs import get_logger
from kjo_django.models import NEVER, HeldJob, Job, LimitControl
from kjo_django.runtime import get_coordination, get_transport, jobs_database, transport_class
from kjo_django.states import JobStatus

logger = get_logger("kjo_django")

# --- Status ---------------------------------------------------------------------------------------


def shown_states(jobs: Sequence[Job]) -> dict[Any, JobStatus]:
    """Return the state of each job that people are shown, by the job's key."""
    leased = leased_jobs(jobs)
    return {job.pk: job.status_with(leased=job.pk in leased) for job in jobs}


def leased_jobs(jobs: Iterable[Job]) -> dict[Any, str]:
    """Return the keys of the open jobs that a living worker has begun, each with the worker's
    token.

    Nothing else shows that an atomic handler runs. All are asked for at once. None is returned
    while coordination, which knows who lives, or the transport is away.
    """
    open_jobs = [job for job in jobs if job.state in states.OPEN]
    try:
        return owners_of(open_jobs)
    except (CoordinationError, PublishError) as error:
        logger.warning("It is not known which jobs run, the rows decide: %s", error)
        return {}


def owners_of(jobs: Sequence[Job]) -> dict[Any, str]:
    """Return the keys of the jobs that a living worker has begun, each with the worker's token.

    :raises CoordinationError: coordination cannot be reached.
    :raises PublishError: the transport that counts deliveries cannot be reached.
    """
    if not jobs:
        return {}
    conf, owners = get_settings(), dict[Any, str]()
    messages: dict[str, dict[str, Any]] = {}
    for job in jobs:
        messages.setdefault(conf.queue(job.queue).transport, {})[job.message_id] = job.pk
    for alias, keys in messages.items():
        if _counts_deliveries(alias):  # others are not even made here
            running = get_transport(alias).running(keys)
            owners.update((keys[id], token) for id, token in running.items())
    leases = {
        lease_name(conf.queue(job.queue), job.message_id): job.pk
        for job in jobs
        if job.pk not in owners and _may_have_lease(job, conf.queue(job.queue).transport)
    }
    if leases:
        held = get_coordination().holders(list(leases))
        owners.update((leases[name], token) for name, token in held.items())
    return living(owners)


def living(owners: Mapping[Any, str]) -> dict[Any, str]:
    """Return what belongs to workers that show signs of life.

    :raises CoordinationError: coordination cannot be reached.
    """
    names = sorted({alive_name(token) for token in owners.values()})
    alive = get_coordination().holders(names) if names else {}
    return {key: token for key, token in owners.items() if alive_name(token) in alive}


def _may_have_lease(job: Job, transport: str) -> bool:
    """Return whether it may run under a lease of coordination: steps of workflows do, which come to
    a worker past the transport."""
    return job.stage_id is not None or not _counts_deliveries(transport)


def _counts_deliveries(alias: str) -> bool:
    return transport_class(alias).capabilities.counts_deliveries


# --- Limits ---------------------------------------------------------------------------------------


def limits_awaited(jobs: Iterable[Job]) -> dict[Any, str]:
    """Return for each job in line the limit that it waits for, as text; others are missing.

    Jobs that are not due later cost no query, others one, and those in line another one.

    Keys of limits are not part of it: they come from payloads.
    """
    now = CLOCK.now()
    later = {job.pk: job for job in jobs if job.available_at > now and job.state in states.OPEN}
    if not later:
        return {}
    rows = HeldJob.objects.using(jobs_database()).filter(job_id__in=list(later))
    limits = {
        row.job_id: row.limit for row in rows if row.generation == later[row.job_id].generation
    }
    waiting = {key: job for key, job in later.items() if key in limits or job.available_at == NEVER}
    if not waiting:
        return {}
    names = {key: _limit_name(job, limits.get(key, "")) for key, job in waiting.items()}
    controls = LimitControl.objects.using(jobs_database()).in_bulk(sorted({*names.values()}))
    return {
        key: _limit_text(job, limits.get(key, ""), names[key], controls.get(names[key]))
        for key, job in waiting.items()
    }


def _limit_name(job: Job, limit: str) -> str:
    return f"queue:{job.queue}" if limit.startswith("RATE:queue:") else f"job:{job.handler}"


def _limit_text(job: Job, limit: str, name: str, asked: LimitControl | None) -> str:
    if not limit:
        return f"a limit of {name}"  # it was released this moment
    declared: Any = get_settings().queue(job.queue)
    if not name.startswith("queue:"):
        handler = registry.find(job.handler)
        declared = handler.options if handler is not None else None
    what = "rate" if limit.startswith("RATE:") else "concurrency"
    value = getattr(asked, what, None) or getattr(declared, what, None)
    return f"{what} {value} of {name}" if value else f"{what} of {name}"


# --- Progress -------------------------------------------------------------------------------------


class Progress(NamedTuple):
    """The progress that a job has reported."""

    percent: float | None
    """From 0 to 100; None if there is only a text."""
    text: str
    """A description of the present work; can be empty."""


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
