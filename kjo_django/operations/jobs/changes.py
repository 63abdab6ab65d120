"""Requeue and cancel: an operator's verbs for jobs.

Both refuse a job that is being processed. How that is known: its row is locked (a running atomic
handler), its row's lease is live (``atomic=False``), or a living worker holds its coordination
lease. Without coordination the first two, and in the end the conditional UPDATE, decide.
"""

from __future__ import annotations

import enum
import functools
import logging
import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Case, F, QuerySet, Value, When
from django.utils import timezone

from kjo_django import signals, states
from kjo_django.backends import get_coordination
from kjo_django.conf import QueueConf, get_settings
from kjo_django.engine.handler.running import ABORT_TTL, abort_name
from kjo_django.engine.leases import alive_name, lease_name
from kjo_django.enqueue import dispatch
from kjo_django.enqueue.storing import fresh_run
from kjo_django.enqueue.wakeups import call_waiters
from kjo_django.exceptions import CoordinationError
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, DeadLetterState, Job, source_of_job, transition
from kjo_django.operations import internal
from kjo_django.operations.audit import log_change, tell_of_jobs, tell_of_letters
from kjo_django.operations.rows import (
    Observer,
    Progress,
    batched,
    chunks,
    lock,
    no_progress,
    tell_after_commit,
)
from kjo_django.store.transactions import jobs_database

logger = logging.getLogger("kjo_django")

Selection = QuerySet[Job] | Iterable[Job | uuid.UUID | str]
LOCKED_RETRIES = (0.02, 0.1)
"""Seconds before a locked row is looked at again: a relay holds one for a moment only."""
PUBLISH_BATCH = 50
"""Payloads held in memory at once."""


class CancelResult(enum.StrEnum):
    """What cancelling one job ended with (PJQ-17)."""

    CANCELLED = "cancelled"
    NOT_FOUND = "not_found"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"
    """It had failed for good already; its record stays (PJQ-F5)."""


class RequeueResult(enum.StrEnum):
    """What requeueing one job ended with."""

    REQUEUED = "requeued"
    NOT_FOUND = "not_found"
    PROCESSING = "processing"
    FORBIDDEN = "forbidden"
    """It is an internal job, and who asked may not do what it does."""


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

    @property
    def total(self) -> int:
        """Jobs asked for."""
        return sum(self.counts.values())


@dataclass(slots=True)
class Taken:
    """Jobs locked for a change, and those that cannot be had."""

    free: list[Job] = field(default_factory=list)
    busy: set[Any] = field(default_factory=set)
    """Keys of those somebody is processing."""
    missing_count: int = 0

    @property
    def busy_count(self) -> int:
        """How many somebody is processing."""
        return len(self.busy)


def cancel(
    jobs: Selection,
    *,
    abort: bool = False,
    actor: str = "",
    on_changed: Observer | None = None,
    progress: Progress = no_progress,
) -> Outcomes:
    """Cancel open jobs; a final or running one is left as it is and counted as such.

    A message already with the broker cannot be withdrawn: its consumer finds the row cancelled and
    drops it (X-9).

    :param abort: ask running ones to end. They are still counted as processing: within two seconds
        ``context.aborted`` is true there; a handler that then fails ends as cancelled, with its
        writes undone, and one that completes has completed.
    :param actor: who asked, for the log.
    :param on_changed: told of the jobs of each chunk inside its transaction.
    :raises CoordinationError: running jobs cannot be asked; the others are cancelled.
    """
    outcomes = Outcomes()
    using = jobs_database()
    unasked: CoordinationError | None = None
    for keys in chunks(jobs):
        with transaction.atomic(using=using):
            busy = _cancel_chunk(keys, outcomes, on_changed)
        if abort and busy:
            try:
                _ask_to_abort(using, busy)
            except CoordinationError as error:
                unasked = error  # the other chunks are cancelled all the same
        progress(outcomes.total, None)
    log_change("Cancelled", outcomes.changed_count, actor)
    if unasked is not None:
        raise unasked
    return outcomes


def cancel_one(id: uuid.UUID | str, *, abort: bool = False, actor: str = "") -> CancelResult:
    """Cancel one job and return what came of it (PJQ-52)."""
    return CancelResult(next(iter(cancel([id], abort=abort, actor=actor).counts)))


def _ask_to_abort(using: str, keys: Collection[Any]) -> None:
    rows = Job.objects.using(using).filter(pk__in=keys).values_list("pk", "generation")
    marks = {abort_name(str(id)): str(generation) for id, generation in rows}
    get_coordination().set_marks(marks, ABORT_TTL)


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
    :param on_changed: told of the jobs of each chunk inside its transaction.
    """
    outcomes = Outcomes()
    still = jobs if isinstance(jobs, QuerySet) and not jobs.query.is_sliced else None
    for keys in chunks(jobs):
        with transaction.atomic(using=jobs_database()):
            requeue_chunk(keys, outcomes, still=still, actor=actor, on_changed=on_changed)
        progress(outcomes.total, None)
    log_change("Requeued", outcomes.changed_count, actor)
    return outcomes


def requeue_chunk(
    keys: Sequence[Any],
    outcomes: Outcomes,
    *,
    still: QuerySet[Job] | None = None,
    payload: bytes | None = None,
    actor: str = "",
    on_changed: Observer | None = None,
) -> list[Job]:
    """Requeue up to a chunk of jobs inside the caller's transaction; returns those requeued.

    :param still: only those in it, asked once they are locked; the others count as not found.
    :param payload: what they run with from now on, if not with what they have; nobody gives an
        internal job another one.
    """
    using = jobs_database()
    taken = take(keys)
    done = taken.free
    if still is not None and done:
        wanted = still.using(using).filter(pk__in=[job.pk for job in done]).order_by()
        kept = set(wanted.values_list("pk", flat=True))
        done = [job for job in done if job.pk in kept]
    gone_count = len(taken.free) - len(done)
    outcomes.add(RequeueResult.NOT_FOUND, taken.missing_count + gone_count)
    outcomes.add(RequeueResult.PROCESSING, taken.busy_count)
    forbidden = [job for job in done if not _may_requeue(job, payload, actor)]
    outcomes.add(RequeueResult.FORBIDDEN, len(forbidden))
    done = [job for job in done if job not in forbidden]
    if not done:
        return []
    for job in done:
        if internal.reassign(job, actor):
            Job.objects.using(using).filter(pk=job.pk).update(payload=job.payload)
    letters = _close_dead_letters(using, done, actor)
    for name in sorted({job.queue for job in done}):
        _requeue_in_queue(using, name, [job.pk for job in done if job.queue == name], payload)
    if on_changed is not None:
        on_changed(done)
    outcomes.add(RequeueResult.REQUEUED, len(done))
    outcomes.changed_count += len(done)
    tell_after_commit(using, functools.partial(_tell_requeued, done, letters))
    return done


def _may_requeue(job: Job, payload: bytes | None, actor: str) -> bool:
    if payload is not None and internal.is_internal(job.handler):
        return False
    return internal.may_run_again(job, actor)


def send(using: str, keys: Sequence[Any], queue: QueueConf) -> None:
    """Hand stored jobs over inside the caller's transaction, holding few payloads at once."""
    if not dispatch.is_transactional(queue):
        dispatch.hand_over([], queue)
        return
    for batch in batched(keys, PUBLISH_BATCH):
        rows = Job.objects.using(using).filter(pk__in=batch).order_by("pk").defer("result")
        dispatch.hand_over(list(rows), queue)


def take(keys: Sequence[Any]) -> Taken:
    """Lock the jobs nobody is processing, inside the caller's transaction."""
    using = jobs_database()
    given = list(map(_as_uuid, keys))
    wanted = {key for key in given if key is not None}
    rows = Job.objects.using(using).defer("payload", "result")
    held = lock(rows, sorted(wanted))
    present = {job.pk for job in held}
    if len(held) < len(wanted):
        present |= set(rows.filter(pk__in=wanted - present).values_list("pk", flat=True))
        held += _lock_again(rows, present - {job.pk for job in held})
    busy = _being_processed(held)
    return Taken(
        free=[job for job in held if job.pk not in busy],
        busy=present - {job.pk for job in held} | busy,
        missing_count=len(wanted) - len(present) + given.count(None),
    )


# --- Details --------------------------------------------------------------------------------------


def _as_uuid(value: Any) -> uuid.UUID | None:
    if isinstance(value, uuid.UUID):
        return value
    try:
        return uuid.UUID(str(value))
    except ValueError:
        return None


def _lock_again(rows: QuerySet[Job], keys: set[Any]) -> list[Job]:
    """Wait a moment for rows others hold; who still holds them then is processing them."""
    found: list[Job] = []
    for delay in LOCKED_RETRIES if keys else ():
        time.sleep(delay)
        found += lock(rows, sorted(keys - {job.pk for job in found}))
    return found


def _being_processed(jobs: Sequence[Job]) -> set[Any]:
    """Return the keys of the open jobs with a live lease, their own or a living worker's."""
    now = timezone.now()
    unfinished = [job for job in jobs if job.state in states.OPEN]
    busy = {job.pk for job in unfinished if job.lease_expires_at and job.lease_expires_at > now}
    conf = get_settings()
    leases = {
        lease_name(conf.queue(job.queue), job.message_id): job.pk
        for job in unfinished
        if job.pk not in busy
    }
    return busy | {leases[name] for name in live_leases(list(leases))}


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


def _cancel_chunk(keys: Sequence[Any], outcomes: Outcomes, on_changed: Observer | None) -> set[Any]:
    """Cancel a chunk in the caller's transaction; return the keys of those being processed."""
    using = jobs_database()
    taken = take(keys)
    outcomes.add(CancelResult.NOT_FOUND, taken.missing_count)
    outcomes.add(CancelResult.PROCESSING, taken.busy_count)
    for job in taken.free:
        if job.state in states.FINAL:
            outcomes.add(job.state)
    open_jobs = [job for job in taken.free if job.state in states.OPEN]
    if not open_jobs:
        return taken.busy
    changed = transition(
        "cancel",
        Job.objects.using(using).filter(pk__in=[job.pk for job in open_jobs]),
        finished_at=timezone.now(),
        lease_token="",
        lease_expires_at=None,
    )
    outcomes.add(CancelResult.CANCELLED, changed)
    outcomes.changed_count += changed
    if on_changed is not None:
        on_changed(open_jobs)
    tell_after_commit(using, functools.partial(_tell_cancelled, open_jobs))
    return taken.busy


def _requeue_in_queue(using: str, name: str, keys: Sequence[Any], payload: bytes | None) -> None:
    now = timezone.now()
    changes = fresh_run(name) if payload is None else {**fresh_run(name), "payload": payload}
    transition(
        "requeue",
        Job.objects.using(using).filter(pk__in=keys),
        available_at=now,
        expires_at=Case(When(expires_at__lte=now, then=Value(None)), default=F("expires_at")),
        **changes,
    )
    send(using, keys, get_settings().queue(name))


def _close_dead_letters(using: str, jobs: Sequence[Job], actor: str) -> list[DeadLetter]:
    """Close the dead letters of the jobs' present generations. That of an earlier one holds another
    payload, which does not run by this."""
    rows = DeadLetter.objects.using(using).filter(
        source_id__in=[source_of_job(job.pk, job.generation) for job in jobs],
        state=DeadLetterState.OPEN,
    )
    letters = list(rows.only("pk", "queue", "handler", "job_id", "replay_count"))
    if letters:
        close_as_replayed(rows.filter(pk__in=[letter.pk for letter in letters]), actor)
        _carry_replay_counts(using, jobs, letters)
    return letters


def _carry_replay_counts(using: str, jobs: Sequence[Job], letters: Sequence[DeadLetter]) -> None:
    """Send the count along: should the job die again, its next dead letter knows its past."""
    counts: dict[Any, int] = {}
    for letter in letters:
        counts[letter.job_id] = max(counts.get(letter.job_id, 0), letter.replay_count + 1)
    replayed = [job for job in jobs if job.pk in counts]
    for job in replayed:
        job.headers = {**(job.headers or {}), names.REPLAY_COUNT: str(counts[job.pk])}
    Job.objects.using(using).bulk_update(replayed, ["headers"])


def close_as_replayed(letters: QuerySet[DeadLetter], actor: str) -> int:
    """Mark open dead letters as replayed once more, in one conditional UPDATE."""
    changes: dict[str, Any] = {"note": f"replayed by {actor}"[:500]} if actor else {}
    now: datetime = timezone.now()
    return letters.filter(state=DeadLetterState.OPEN).update(
        state=DeadLetterState.REPLAYED,
        closed_at=now,
        replay_count=F("replay_count") + 1,
        **changes,
    )


def _tell_cancelled(jobs: Sequence[Job]) -> None:
    channels = {str((job.headers or {}).get(names.REPLY_TO, "")) for job in jobs}
    call_waiters(channels)
    tell_of_jobs(signals.job_cancelled, jobs)


def _tell_requeued(jobs: Sequence[Job], letters: Sequence[DeadLetter]) -> None:
    tell_of_jobs(signals.job_requeued, jobs)
    tell_of_letters(signals.message_replayed, letters)
