"""What running jobs report of themselves, and what others ask of them: as marks of coordination.

The row of a running job cannot carry either while its handler runs in a transaction: the row is
locked. A mark may be lost without harm. Then a job runs to its end although it was cancelled, or
the progress that is shown is a second old.
"""

from __future__ import annotations

import json
from datetime import timedelta

from kjo_django.engine.admission import load_rows
from kjo_django.engine.handler.context import Abort
from kjo_django.engine.handler.timeouts import RunningJob, TimeoutWatch
from kjo_django.enqueue.job_status import progress_name
from kjo_django.exceptions import CoordinationError
from kjo_django.logs import get_logger
from kjo_django.messages.serializers import storable_text
from kjo_django.runtime import Runtime

logger = get_logger("kjo_django")

SETTLED_AFTER = 0.5
"""Seconds a handler runs before anybody asks about it: the quick ones cost nothing."""
ABORT_TTL = timedelta(minutes=10)
PROGRESS_TTL = timedelta(hours=1)
MAX_TEXT = 150


def abort_name(job_id: str) -> str:
    """Return the mark that asks a running job to end; its value is the generation meant."""
    return f"ABORT:{job_id}"


def dump_progress(percent: float | None, text: str) -> str:
    """Write progress as a mark holds it: at most 255 characters."""
    text = storable_text(text.replace("\0", ""), MAX_TEXT)
    while True:
        value = json.dumps([percent, text], ensure_ascii=False, separators=(",", ":"))
        if len(value) <= 250:
            return value
        text = text[:-10]  # quotes and control characters grow when they are escaped


def look_after(watch: TimeoutWatch, runtime: Runtime, token: str) -> None:
    """Store the progress of running jobs, and abort those whose cancellation is asked for or whose
    lease is another worker's by now.

    :param token: this worker's.
    """
    jobs = [job for job in watch.jobs() if job.seconds >= SETTLED_AFTER]
    if not jobs:
        return
    try:
        _store_progress(jobs, runtime)
        _abort_unwanted(jobs, runtime, token)
    except CoordinationError as error:
        logger.warning("Running jobs cannot be asked after: %s", error)


def _store_progress(jobs: list[RunningJob], runtime: Runtime) -> None:
    coordination = runtime.coordination
    marks = {}
    for context, _, _ in jobs:
        noted = context.noted_progress
        if noted is not None and (coordination.writes_concurrently or not context.is_atomic):
            context.noted_progress = None
            marks[progress_name(context.job_id)] = dump_progress(*noted)
    if marks:
        coordination.set_marks(marks, PROGRESS_TTL)


def _abort_unwanted(jobs: list[RunningJob], runtime: Runtime, token: str) -> None:
    jobs = [job for job in jobs if not job.context.aborted]
    if not jobs:
        return
    asked = runtime.coordination.get_marks([abort_name(job.context.job_id) for job in jobs])
    leases = [job.context.lease for job in jobs if not job.delivery.has_own_lease]
    holders = runtime.coordination.holders(leases)
    unheld: list[RunningJob] = []
    for job in jobs:
        context = job.context
        if asked.get(abort_name(context.job_id)) == str(context.generation):
            context.abort(Abort.CANCELLED)
        elif context.lease in holders:
            if holders[context.lease] != token:
                context.abort(Abort.LOST)
        elif _may_run_elsewhere(job):
            unheld.append(job)
    if unheld:
        _abort_overtaken(unheld, runtime, token)


def _may_run_elsewhere(job: RunningJob) -> bool:
    """Return whether another worker may run a job that has no lease of coordination. None does
    while its row is locked by this one's transaction, or its record is leased to this one."""
    if job.context.is_atomic:
        return False
    delivery = job.delivery
    return not delivery.has_own_lease or delivery.subscription.has_lost(delivery.record)


def _abort_overtaken(unheld: list[RunningJob], runtime: Runtime, token: str) -> None:
    """Abort those of the jobs that another worker has run, as their rows say. Nobody holds a lease
    either that coordination never had, having been away, or has forgotten."""
    known = runtime.store.known_markers([job.delivery.key for job in unheld])
    _, rows = load_rows(runtime, [job.delivery for job in unheld])
    for job in unheld:
        row, judges_itself = rows.get(job.delivery), job.delivery.handler.judges_itself
        if (job.delivery.key in known and not judges_itself) or (
            row is not None and row.lease_token != token
        ):
            job.context.abort(Abort.LOST)
