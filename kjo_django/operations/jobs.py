"""Requeue and cancel, and what every change of jobs by an operator has in common.

A change refuses a job that is being processed. Three facts show that: its row is locked (a running
atomic handler), its row's lease is live (``atomic=False``), or a living worker holds its lease in
coordination. Without coordination the first two, and in the end the conditional UPDATE, decide.
"""

from __future__ import annotations

import enum
import functools
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from django.db import transaction
from django.db.models import Case, F, QuerySet, Value, When
from django.utils import timezone

from kjo_django import signals, states
from kjo_django.conf import QueueConf, get_settings
from kjo_django.engine.handler.running import ABORT_TTL, abort_name
from kjo_django.engine.leases import alive_name, lease_name
from kjo_django.enqueue import storing
from kjo_django.enqueue.storing import fresh_run, notify_waiters
from kjo_django.exceptions import CoordinationError
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, DeadLetterState, Job, source_of_job, transition
from kjo_django.operations import internal
from kjo_django.operations.audit import log_change, send_signals
from kjo_django.operations.rows import (
    ChangeOptions,
    Observer,
    Progress,
    batched,
    chunks,
    key_of,
    lock,
    no_progress,
    on_commit,
)
from kjo_django.runtime import get_coordination, jobs_database
from kjo_django.states import JobStatus

logger = logging.getLogger("kjo_django")

Selection = QuerySet[Job] | Iterable[Job | uuid.UUID | str]
LOCKED_RETRIES = (0.02, 0.1)
"""Seconds before a locked row is looked at again: a relay holds one for a moment only."""
PUBLISH_BATCH = 50
"""Payloads held in memory at once."""


class CancelResult(enum.StrEnum):
    """What cancelling one job ended with."""

    CANCELLED = "cancelled"
    NOT_FOUND = "not_found"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"
    """The job had failed for good already; its record stays."""


class RequeueResult(enum.StrEnum):
    """What requeueing one job ended with."""

    REQUEUED = "requeued"
    NOT_FOUND = "not_found"
    PROCESSING = "processing"
    FORBIDDEN = "forbidden"
    """The job is an internal one, and who asked may not do what it does."""


@dataclass(slots=True)
class Outcomes:
    """How many jobs ended with what."""

    counts: dict[str, int] = field(default_factory=dict)
    changed_count: int = 0
    """Jobs this call has changed; one that was cancelled before is counted, not changed."""

    def add(self, result: str, count: int = 1) -> None:
        """Count ``count`` more jobs with this result."""
        if count:
            self.counts[str(result)] = self.counts.get(str(result), 0) + count

    def add_changed(self, result: str, count: int) -> None:
        """Count ``count`` more jobs that this call has changed."""
        self.add(result, count)
        self.changed_count += count

    @property
    def total(self) -> int:
        """Jobs asked for."""
        return sum(self.counts.values())


# --- Cancel ---------------------------------------------------------------------------------------


def cancel(jobs: Selection, *, abort: bool = False, **options: Unpack[ChangeOptions]) -> Outcomes:
    """Cancel open jobs; a final or running one is left as it is and counted as such.

    A message already with the broker cannot be withdrawn: its consumer finds the row cancelled and
    drops it.

    :param abort: ask running ones to end. They are still counted as processing: within two seconds
        ``context.aborted`` is true there; a handler that then fails ends as cancelled, with its
        writes undone, and one that completes has completed.
    :raises CoordinationError: running jobs cannot be asked; the others are cancelled.
    """
    busy: set[Any] = set()

    def change(open_jobs: list[Job], outcomes: Outcomes) -> list[Job]:
        rows = Job.objects.using(jobs_database()).filter(pk__in=[job.pk for job in open_jobs])
        ended = {"finished_at": timezone.now(), "lease_token": "", "lease_expires_at": None}
        transition("cancel", rows, **ended)
        return open_jobs

    def announce(changed: Sequence[Job]) -> None:
        notify_waiters({str((job.headers or {}).get(names.REPLY_TO, "")) for job in changed})
        send_signals(signals.job_cancelled, changed)

    outcomes = change_open_jobs(
        jobs, change, CancelResult.CANCELLED, announce, verb="Cancelled", busy=busy, **options
    )
    if abort and busy:
        rows = Job.objects.using(jobs_database()).filter(pk__in=busy)
        generations = rows.values_list("pk", "generation")
        marks = {abort_name(str(id)): str(generation) for id, generation in generations}
        get_coordination().set_marks(marks, ABORT_TTL)
    return outcomes


def cancel_one(id: uuid.UUID | str, *, abort: bool = False, actor: str = "") -> CancelResult:
    """Cancel one job and return what came of it."""
    return CancelResult(next(iter(cancel([id], abort=abort, actor=actor).counts)))


# --- Requeue --------------------------------------------------------------------------------------


def requeue(
    jobs: Selection,
    *,
    actor: str = "",
    on_changed: Observer | None = None,
    progress: Progress = no_progress,
) -> Outcomes:
    """Give jobs a new run, due now: a new generation with all its attempts.

    For failed and cancelled jobs, for completed ones that must run again, and for open ones that
    are stuck or not due yet. The open dead letters of their present generation are closed as
    replayed. An ``expires_at`` in the past is lifted: who requeues an expired job wants it to run.

    :param jobs: of a queryset that is not sliced, those it still holds once they are locked: what
        somebody else has requeued meanwhile does not run twice. The others count as not found.
    :param actor: who asked, for the log and the dead letters' notes. An internal job runs again in
        their name; a ``UserActor`` needs the permission of what it does.
    :param on_changed: called with the jobs of each chunk inside its transaction.
    """
    still = jobs if isinstance(jobs, QuerySet) and not jobs.query.is_sliced else None

    def change(keys: Sequence[Any], outcomes: Outcomes) -> None:
        requeue_chunk(keys, outcomes, still=still, actor=actor, on_changed=on_changed)

    return change_in_chunks(jobs, change, "Requeued", actor, progress)


def requeue_chunk(
    keys: Sequence[Any],
    outcomes: Outcomes,
    *,
    still: QuerySet[Job] | None = None,
    payload: bytes | None = None,
    actor: str = "",
    on_changed: Observer | None = None,
) -> None:
    """Requeue up to a chunk of jobs inside the caller's transaction.

    :param still: only those in it, asked once they are locked; the others count as not found.
    :param payload: what they run with from now on, if not with what they have; nobody gives an
        internal job another one.
    """
    using = jobs_database()
    locked = lock_jobs(keys)
    kept = locked.free
    if still is not None and kept:
        wanted = still.using(using).filter(pk__in=[job.pk for job in kept]).order_by()
        pks = set(wanted.values_list("pk", flat=True))
        kept = [job for job in kept if job.pk in pks]
    done = [
        job
        for job in kept
        if internal.may_run_again(job, actor)
        and (payload is None or not internal.is_internal(job.handler))
    ]
    missing_count = locked.missing_count + len(locked.free) - len(kept)
    outcomes.add(RequeueResult.NOT_FOUND, missing_count)
    outcomes.add(RequeueResult.PROCESSING, len(locked.busy))
    outcomes.add(RequeueResult.FORBIDDEN, len(kept) - len(done))
    if not done:
        return
    for job in done:
        if internal.reassign(job, actor):
            Job.objects.using(using).filter(pk=job.pk).update(payload=job.payload)
    letters = _close_dead_letters(using, done, actor)
    now = timezone.now()
    unexpired = Case(When(expires_at__lte=now, then=Value(None)), default=F("expires_at"))
    for name in sorted({job.queue for job in done}):
        ids = [job.pk for job in done if job.queue == name]
        rows = Job.objects.using(using).filter(pk__in=ids)
        changes = fresh_run(name) if payload is None else {**fresh_run(name), "payload": payload}
        transition("requeue", rows, available_at=now, expires_at=unexpired, **changes)
        send(ids, get_settings().queue(name))
    if on_changed is not None:
        on_changed(done)
    outcomes.add_changed(RequeueResult.REQUEUED, len(done))

    def announce() -> None:
        send_signals(signals.job_requeued, done)
        send_signals(signals.message_replayed, letters)

    on_commit(using, announce)


def _close_dead_letters(using: str, jobs: Sequence[Job], actor: str) -> list[DeadLetter]:
    """Close the dead letters of the jobs' present generations. That of an earlier one holds another
    payload, which does not run by this."""
    rows = DeadLetter.objects.using(using).filter(
        source_id__in=[source_of_job(job.pk, job.generation) for job in jobs],
        state=DeadLetterState.OPEN,
    )
    letters = list(rows.only("pk", "queue", "handler", "job_id", "replay_count"))
    if not letters:
        return []
    close_as_replayed(rows.filter(pk__in=[letter.pk for letter in letters]), actor)
    # The count goes along: should the job die again, its next dead letter knows its past.
    counts: dict[Any, int] = {}
    for letter in letters:
        counts[letter.job_id] = max(counts.get(letter.job_id, 0), letter.replay_count + 1)
    replayed = [job for job in jobs if job.pk in counts]
    for job in replayed:
        job.headers = {**(job.headers or {}), names.REPLAY_COUNT: str(counts[job.pk])}
    Job.objects.using(using).bulk_update(replayed, ["headers"])
    return letters


def close_as_replayed(letters: QuerySet[DeadLetter], actor: str) -> int:
    """Mark open dead letters as replayed once more, in one conditional UPDATE."""
    changes: dict[str, Any] = {"note": f"replayed by {actor}"[:500]} if actor else {}
    return letters.filter(state=DeadLetterState.OPEN).update(
        state=DeadLetterState.REPLAYED,
        closed_at=timezone.now(),
        replay_count=F("replay_count") + 1,
        **changes,
    )


# --- What every change does -----------------------------------------------------------------------


def change_in_chunks(
    jobs: Selection,
    change: Callable[[Sequence[Any], Outcomes], None],
    verb: str,
    actor: str,
    progress: Progress,
) -> Outcomes:
    """Change jobs chunk by chunk, each chunk in a transaction of its own, and log how many.

    :param change: gets the keys of a chunk, and counts what becomes of them.
    """
    outcomes = Outcomes()
    for keys in chunks(jobs):
        with transaction.atomic(using=jobs_database()):
            change(keys, outcomes)
        progress(outcomes.total, None)
    log_change(verb, outcomes.changed_count, actor)
    return outcomes


def change_open_jobs(
    jobs: Selection,
    change: Callable[[list[Job], Outcomes], list[Job]],
    result: str,
    announce: Callable[[Sequence[Job]], None],
    *,
    verb: str,
    actor: str = "",
    on_changed: Observer | None = None,
    progress: Progress = no_progress,
    busy: set[Any] | None = None,
) -> Outcomes:
    """Change the open jobs that nobody is processing, and count the others.

    :param change: gets jobs that are locked, counts those it leaves as they are, and returns those
        it has changed.
    :param result: what the changed ones are counted as.
    :param announce: called with the changed ones of each chunk once that is committed.
    :param busy: gets the keys of those somebody is processing.
    """

    def change_chunk(keys: Sequence[Any], outcomes: Outcomes) -> None:
        locked = lock_jobs(keys)
        outcomes.add("not_found", locked.missing_count)
        outcomes.add("processing", len(locked.busy))
        if busy is not None:
            busy.update(locked.busy)
        for job in locked.free:
            if job.state in states.FINAL:
                outcomes.add(job.state)
        changed = change([job for job in locked.free if job.state in states.OPEN], outcomes)
        if changed:
            if on_changed is not None:
                on_changed(changed)
            outcomes.add_changed(result, len(changed))
            on_commit(jobs_database(), functools.partial(announce, changed))

    return change_in_chunks(jobs, change_chunk, verb, actor, progress)


def send(keys: Sequence[Any], queue: QueueConf) -> None:
    """Hand stored jobs over inside the caller's transaction, holding few payloads at once."""
    if not storing.is_transactional(queue):
        storing.dispatch_jobs([], queue)
        return
    for batch in batched(keys, PUBLISH_BATCH):
        rows = Job.objects.using(jobs_database()).filter(pk__in=batch).order_by("pk")
        storing.dispatch_jobs(list(rows.defer("result")), queue)


@dataclass(frozen=True, slots=True)
class LockedJobs:
    """Jobs locked for a change, and those that cannot be had."""

    free: list[Job]
    busy: set[Any]
    """Keys of those somebody is processing."""
    missing_count: int


def lock_jobs(keys: Sequence[Any]) -> LockedJobs:
    """Lock the jobs nobody is processing, inside the caller's transaction."""
    given = list(map(key_of, keys))
    wanted = {key for key in given if key is not None}
    rows = Job.objects.using(jobs_database()).defer("payload", "result")
    held = lock(rows, sorted(wanted))
    present = {job.pk for job in held}
    if len(held) < len(wanted):
        present |= set(rows.filter(pk__in=wanted - present).values_list("pk", flat=True))
        # Others hold these rows. Who still holds one after a moment is processing its job.
        for delay in LOCKED_RETRIES if len(held) < len(present) else ():
            time.sleep(delay)
            held += lock(rows, sorted(present - {job.pk for job in held}))
    busy = _being_processed(held)
    return LockedJobs(
        free=[job for job in held if job.pk not in busy],
        busy=present - {job.pk for job in held} | busy,
        missing_count=len(wanted) - len(present) + given.count(None),
    )


def _being_processed(jobs: Sequence[Job]) -> set[Any]:
    """Return the keys of the open jobs with a live lease, their own or a living worker's."""
    now = timezone.now()
    by_row = {
        job.pk
        for job in jobs
        if job.state in states.OPEN and job.lease_expires_at and job.lease_expires_at > now
    }
    return by_row | leased_jobs([job for job in jobs if job.pk not in by_row])


def shown_states(jobs: Sequence[Job]) -> dict[Any, JobStatus]:
    """Return what people are shown as the state of each job, by its key."""
    leased = leased_jobs(jobs)
    return {job.pk: job.status_with(leased=job.pk in leased) for job in jobs}


def leased_jobs(jobs: Iterable[Job]) -> set[Any]:
    """Return the keys of the open jobs on which a living worker holds a lease of coordination, in
    one question: a running atomic handler shows by that only."""
    conf = get_settings()
    leases = {
        job.pk: lease_name(conf.queue(job.queue), job.message_id)
        for job in jobs
        if job.state in states.OPEN
    }
    live = live_leases(list(leases.values()))
    return {key for key, name in leases.items() if name in live}


def live_leases(leases: Sequence[str]) -> set[str]:
    """Return those of the lease names that a living worker holds; none without coordination."""
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
