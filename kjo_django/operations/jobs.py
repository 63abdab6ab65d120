"""Requeue and cancel, and the steps that every operator's change of jobs takes.

A change refuses a job that is being processed. Three facts show that: its row is locked (a running
atomic handler), its row's lease is live (``atomic=False``), or a living worker holds its lease in
coordination. Without coordination the first two, and in the end the conditional UPDATE, decide.
"""

from __future__ import annotations

import enum
import functools
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from django.db import transaction
from django.db.models import Case, F, QuerySet, Value, When

from kjo_django import signals, states
from kjo_django.clock import CLOCK
from kjo_django.conf import QueueConf, get_settings
from kjo_django.engine.handler.running import ABORT_TTL, abort_name
from kjo_django.enqueue import storing
from kjo_django.enqueue.job_status import leased_jobs
from kjo_django.enqueue.storing import fresh_run, notify_waiters
from kjo_django.logs import get_logger
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, DeadLetterState, Job, source_of_job, transition
from kjo_django.operations import internal
from kjo_django.operations.audit import send_after_commit
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
from kjo_django.runtime import current_runtime, get_coordination, jobs_database
from kjo_django.states import JobState
from kjo_django.workflows.countdown import (
    await_again,
    cancel_steps,
    count_ended,
    count_reopened,
    were_cancelled_waiting,
)

logger = get_logger("kjo_django")

Selection = QuerySet[Job] | Iterable[Job | uuid.UUID | str]
LOCKED_RETRIES = (0.02, 0.1)
"""Seconds before a locked row is looked at again: a relay holds one for a moment only."""
PUBLISH_BATCH = 50
"""Payloads kept in memory at once."""


class CancelResult(enum.StrEnum):
    """The result of cancelling one job."""

    CANCELLED = "cancelled"
    """The job will not run; it may have been cancelled before."""
    NOT_FOUND = "not_found"
    """There is no such job."""
    PROCESSING = "processing"
    """The job is running. With ``abort``, it has been asked to end."""
    COMPLETED = "completed"
    """The job had completed already."""
    FAILED = "failed"
    """The job had failed for good already; its record stays."""


class RequeueResult(enum.StrEnum):
    """The result of requeueing one job."""

    REQUEUED = "requeued"
    """The job has a new run, with all its attempts."""
    NOT_FOUND = "not_found"
    """There is no such job."""
    PROCESSING = "processing"
    """The job is running; nothing was changed."""
    WAITING = "waiting"
    """The job waits for other steps of its workflow, which alone release it."""
    FORBIDDEN = "forbidden"
    """The job is an internal one, and the user may not do what it does."""


class ChangeResult(enum.StrEnum):
    """The result of any other change of one row. A final job's state is its result."""

    DUE = "due"
    """The job was due later and is due now."""
    MOVED = "moved"
    CHANGED = "changed"
    ASKED = "asked"
    """The worker was asked."""
    UNCHANGED = "unchanged"
    """The row was so already: a due job, a worker that was asked before."""
    TAKEN = "taken"
    """Another job of the queue has the job's unique id."""
    OTHER_KIND = "other_kind"
    """The job is a record for other services, which no worker here starts, or the queues have
    different routes: messages of other services stay where the topics of their kind are."""
    FORBIDDEN = "forbidden"
    """The job is an internal one, and the user may not do what it does."""
    WAITING = "waiting"
    """The job waits for other steps of its workflow, which alone release it."""
    LIMITED = "limited"
    """The job waits for a limit, which alone releases it."""
    STOPPING = "stopping"
    """The worker has been asked to stop, which nothing undoes."""
    GONE = "gone"
    """The worker has stopped, or its heartbeat is old."""
    NOT_FOUND = "not_found"
    PROCESSING = "processing"


@dataclass(slots=True)
class Outcomes:
    """How many rows ended with which result."""

    counts: dict[str, int] = field(default_factory=dict)
    changed_count: int = 0
    """Rows that this call has changed. A job that was cancelled before is counted, not changed."""

    def add(self, result: str, count: int = 1) -> None:
        """Count more rows with this result."""
        if count:
            self.counts[str(result)] = self.counts.get(str(result), 0) + count

    def add_changed(self, result: str, count: int) -> None:
        """Count more rows that this call has changed."""
        self.add(result, count)
        self.changed_count += count


# --- Cancel ---------------------------------------------------------------------------------------


def cancel(jobs: Selection, *, abort: bool = False, **options: Unpack[ChangeOptions]) -> Outcomes:
    """Cancel open jobs. A final or running job stays as it is and is counted with its state.

    A message that the broker has already cannot be withdrawn: its consumer finds the row cancelled
    and drops the message.

    :param abort: ask running jobs to end. They are still counted as processing. Within two seconds
        ``context.aborted`` is true in the handler. A handler that then fails ends as cancelled,
        with its writes undone; a handler that completes has completed.
    :raises CoordinationError: running jobs cannot be asked; the others are cancelled.
    """
    busy: set[Any] = set()

    def change(open_jobs: list[Job], outcomes: Outcomes) -> list[Job]:
        rows = Job.objects.using(jobs_database()).filter(pk__in=[job.pk for job in open_jobs])
        ended = {"finished_at": CLOCK.now(), "lease_token": "", "lease_expires_at": None}
        transition("cancel", rows, **ended)
        _count_steps(open_jobs, count_ended, JobState.CANCELLED)
        channels = {str((job.headers or {}).get(names.REPLY_TO, "")) for job in open_jobs}
        on_commit(jobs_database(), functools.partial(notify_waiters, channels))
        send_after_commit(signals.job_cancelled, open_jobs)
        return open_jobs

    result, waiting = CancelResult.CANCELLED, list[Job]()
    outcomes = change_open_jobs(
        jobs, change, result, verb="Cancelled", busy=busy, waiting=waiting, **options
    )
    if waiting and (released := _cancel_waiting(waiting, outcomes, **options)):
        others = cancel(released, abort=abort, **options)
        outcomes.changed_count += others.changed_count
        for name, count in others.counts.items():
            outcomes.add(name, count)
    if abort and busy:
        rows = Job.objects.using(jobs_database()).filter(pk__in=busy)
        generations = rows.values_list("pk", "generation")
        marks = {abort_name(str(id)): str(generation) for id, generation in generations}
        get_coordination().set_marks(marks, ABORT_TTL)
    return outcomes


def _cancel_waiting(
    waiting: Sequence[Job], outcomes: Outcomes, **options: Unpack[ChangeOptions]
) -> list[Any]:
    """Cancel steps that wait for others, in transactions that lock their workflows first; return
    the keys of those that wait no longer."""
    released: list[Any] = []

    def change(keys: Sequence[Any], outcomes: Outcomes) -> None:
        ended = cancel_steps(current_runtime(), keys)
        released.extend(key for key in keys if key not in ended)
        cancelled = [job for job in waiting if job.pk in ended]
        if (on_changed := options.get("on_changed")) is not None and cancelled:
            on_changed(cancelled)
        outcomes.add_changed(CancelResult.CANCELLED, len(cancelled))
        send_after_commit(signals.job_cancelled, cancelled)

    actor, progress = options.get("actor", ""), options.get("progress", no_progress)
    found = change_in_chunks(waiting, change, "Cancelled", actor, progress)
    outcomes.add_changed(CancelResult.CANCELLED, found.changed_count)
    return released


def cancel_one(id: uuid.UUID | str, *, abort: bool = False, actor: str = "") -> CancelResult:
    """Cancel one job and return the result."""
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

    The jobs may be failed or cancelled, completed, or open and stuck or not due yet. The open dead
    letters of their present generation are closed as replayed. An ``expires_at`` in the past is
    removed, since the job is to run.

    :param jobs: rows or keys. A queryset that is not sliced is asked again once its jobs are
        locked: a job that somebody else has requeued meanwhile counts as not found.
    :param actor: who asked, for the log and the dead letters' notes. An internal job runs again in
        their name; a ``UserActor`` needs the permission of what the job does.
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

    :param still: the jobs that may be requeued, asked once they are locked; the others count as
        not found.
    :param payload: the new payload; None: the jobs keep theirs. An internal job never gets another
        one.
    """
    using = jobs_database()
    keys, waiting = without_waiting(keys)
    outcomes.add(RequeueResult.WAITING, len(waiting))
    kept, busy, missing_count = lock_jobs(keys)
    if still is not None and kept:
        wanted = still.using(using).filter(pk__in=[job.pk for job in kept]).order_by()
        pks = set(wanted.values_list("pk", flat=True))
        missing_count += len(kept) - len(pks)
        kept = [job for job in kept if job.pk in pks]
    done = [
        job
        for job in kept
        if internal.may_run_again(job, actor)
        and (payload is None or not internal.is_internal(job.handler))
    ]
    outcomes.add(RequeueResult.NOT_FOUND, missing_count)
    outcomes.add(RequeueResult.PROCESSING, len(busy))
    outcomes.add(RequeueResult.FORBIDDEN, len(kept) - len(done))
    if done:
        requeue_locked(done, payload=payload, actor=actor)
        if on_changed is not None:
            on_changed(done)
        outcomes.add_changed(RequeueResult.REQUEUED, len(done))


def requeue_locked(
    jobs: Sequence[Job],
    *,
    payload: bytes | None = None,
    actor: str = "",
    letters: Sequence[DeadLetter] | None = None,
) -> None:
    """Requeue jobs that the caller's transaction has locked, and that may run again.

    :param payload: the new payload; None: the jobs keep theirs.
    :param letters: the open dead letters of their present generations, locked; None: they are
        looked up.
    """
    using = jobs_database()
    for job in jobs:
        if internal.reassign(job, actor):
            Job.objects.using(using).filter(pk=job.pk).update(payload=job.payload)
    if letters is None:
        letters = _open_dead_letters(using, jobs)
    if letters:
        keys = [letter.pk for letter in letters]
        close_as_replayed(DeadLetter.objects.using(using).filter(pk__in=keys), actor)
    # Steps that were cancelled while they waited for others wait for them again. They come last:
    # locks are taken in one order.
    runtime = current_runtime()
    waited = were_cancelled_waiting(runtime, [job for job in jobs if job.stage_id is not None])
    counts = _note_replays(using, jobs, letters, waited)
    _run_again([job for job in jobs if job.pk not in waited], payload, counts)
    if waited:
        again = await_again(runtime, Job.objects.filter(pk__in=waited))
        _run_again([job for job in jobs if job.pk in waited - again], payload, {})
    send_after_commit(signals.job_requeued, jobs)
    send_after_commit(signals.message_replayed, letters)


def _run_again(jobs: Sequence[Job], payload: bytes | None, counts: Mapping[Any, str]) -> None:
    """Begin a new generation of locked jobs.

    :param payload: their new payload; None: they keep theirs.
    :param counts: of jobs without a header of their own, how often they were replayed.
    """
    using, now = jobs_database(), CLOCK.now()
    unexpired = Case(When(expires_at__lte=now, then=Value(None)), default=F("expires_at"))
    alike: defaultdict[tuple[str, str], list[Any]] = defaultdict(list)
    for job in jobs:
        alike[job.queue, counts.get(job.pk, "")].append(job.pk)
    for (name, count), ids in sorted(alike.items()):
        changes = fresh_run(name) if payload is None else {**fresh_run(name), "payload": payload}
        if count:
            changes["headers"] = {names.REPLAY_COUNT: count}
        rows = Job.objects.using(using).filter(pk__in=ids)
        transition("requeue", rows, available_at=now, expires_at=unexpired, **changes)
        send(ids, get_settings().queue(name))
    _count_steps(jobs, count_reopened)


def _open_dead_letters(using: str, jobs: Sequence[Job]) -> list[DeadLetter]:
    """Return the open dead letters of the jobs' present generations.

    The dead letter of an earlier generation holds another payload, which does not run now.
    """
    rows = DeadLetter.objects.using(using).filter(
        source_id__in=[source_of_job(job.pk, job.generation) for job in jobs],
        state=DeadLetterState.OPEN,
    )
    return list(rows.only("pk", "queue", "handler", "job_id", "replay_count"))


def _note_replays(
    using: str, jobs: Sequence[Job], letters: Iterable[DeadLetter], waited: Collection[Any]
) -> dict[Any, str]:
    """Note in the headers of jobs how often they have been replayed: if they die again, their next
    dead letter has the count from there.

    :param waited: jobs that may wait for other steps again, and begin no generation then.
    :returns: the count of each other job that has no further header. It is written with the job's
        new generation, by one UPDATE for all that were replayed as often.
    """
    replays: dict[Any, int] = {}
    for letter in letters:
        replays[letter.job_id] = max(replays.get(letter.job_id, 0), letter.replay_count + 1)
    counts: dict[Any, str] = {}
    others: list[Job] = []
    for job in jobs:
        if job.pk not in replays:
            continue
        count, headers = str(replays[job.pk]), job.headers or {}
        job.headers = {**headers, names.REPLAY_COUNT: count}
        if headers.keys() <= {names.REPLAY_COUNT} and job.pk not in waited:
            counts[job.pk] = count
        else:
            others.append(job)
    Job.objects.using(using).bulk_update(others, ["headers"])
    return counts


def close_as_replayed(letters: QuerySet[DeadLetter], actor: str) -> int:
    """Mark open dead letters as replayed, in one conditional UPDATE; return how many they were."""
    changes: dict[str, Any] = {"note": f"replayed by {actor}"[:500]} if actor else {}
    return letters.filter(state=DeadLetterState.OPEN).update(
        state=DeadLetterState.REPLAYED,
        closed_at=CLOCK.now(),
        replay_count=F("replay_count") + 1,
        **changes,
    )


# --- The steps of every change --------------------------------------------------------------------


def change_in_chunks(
    jobs: Selection,
    change: Callable[[Sequence[Any], Outcomes], None],
    verb: str,
    actor: str,
    progress: Progress,
) -> Outcomes:
    """Change jobs chunk by chunk, each chunk in a transaction of its own, and log how many.

    :param change: called with the keys of a chunk; counts the result of each.
    """
    outcomes = Outcomes()
    for keys in chunks(jobs):
        with transaction.atomic(using=jobs_database()):
            change(keys, outcomes)
        progress(sum(outcomes.counts.values()), None)
    if outcomes.changed_count:
        by = f" for {actor}" if actor else ""
        logger.info("%s %d jobs%s", verb, outcomes.changed_count, by)
    return outcomes


def change_open_jobs(
    jobs: Selection,
    change: Callable[[list[Job], Outcomes], list[Job]],
    result: str,
    *,
    verb: str,
    actor: str = "",
    on_changed: Observer | None = None,
    progress: Progress = no_progress,
    busy: set[Any] | None = None,
    waiting: list[Job] | None = None,
) -> Outcomes:
    """Change the open jobs that nobody is processing, and count the others.

    :param change: called with locked jobs; counts those that it leaves as they are, and returns
        those that it has changed. It also arranges that receivers learn of these after the commit.
    :param result: the result that changed jobs are counted with.
    :param busy: a set that the keys of the jobs in processing are added to.
    :param waiting: a list that the jobs are added to that wait for other steps of their workflow;
        None: they are counted. They stay as they are.
    """

    def change_chunk(keys: Sequence[Any], outcomes: Outcomes) -> None:
        keys, steps = without_waiting(keys)
        if waiting is None:
            outcomes.add(ChangeResult.WAITING, len(steps))
        else:
            waiting.extend(steps)
        free, processing, missing_count = lock_jobs(keys)
        outcomes.add(ChangeResult.NOT_FOUND, missing_count)
        outcomes.add(ChangeResult.PROCESSING, len(processing))
        if busy is not None:
            busy.update(processing)
        open_jobs = []
        for job in free:
            if job.state in states.FINAL:
                outcomes.add(job.state)
            elif job.state in states.OPEN:
                open_jobs.append(job)
        changed = change(open_jobs, outcomes)
        if changed and on_changed is not None:
            on_changed(changed)
        outcomes.add_changed(result, len(changed))

    return change_in_chunks(jobs, change_chunk, verb, actor, progress)


def _count_steps(jobs: Iterable[Job], count: Callable[..., None], state: str = "") -> None:
    """Count those of the jobs that are steps of workflows, by a state or by their own."""
    steps = [(job.stage_id, job.pk, state or job.state) for job in jobs if job.stage_id is not None]
    if steps:
        count(current_runtime(), steps)


def without_waiting(keys: Sequence[Any]) -> tuple[list[Any], list[Job]]:
    """Return the keys without those of jobs that wait for other steps, and these jobs, not locked:
    whoever changes them locks their workflows first."""
    current_runtime().store.take_write_lock()
    given = [(key_of(key), key) for key in keys]
    rows = Job.objects.using(jobs_database()).filter(
        pk__in={id for id, _ in given if id is not None}, state=JobState.WAITING
    )
    waiting = list(rows.defer("payload", "result"))
    ids = {job.pk for job in waiting}
    return [key for id, key in given if id not in ids], waiting


def send(keys: Sequence[Any], queue: QueueConf) -> None:
    """Give stored jobs to the transport or the relay, inside the caller's transaction.

    Few payloads are in memory at once.
    """
    if not storing.is_transactional(queue):
        storing.dispatch_jobs([], queue)
        return
    for batch in batched(keys, PUBLISH_BATCH):
        rows = Job.objects.using(jobs_database()).filter(pk__in=batch).order_by("pk")
        storing.dispatch_jobs(list(rows.defer("result")), queue)


def lock_jobs(keys: Sequence[Any]) -> tuple[list[Job], set[Any], int]:
    """Lock the jobs that nobody is processing, inside the caller's transaction.

    Return them, the keys of the jobs that somebody is processing, and how many keys have no job.
    """
    given = list(map(key_of, keys))
    wanted = {key for key in given if key is not None}
    rows = Job.objects.using(jobs_database()).defer("payload", "result")
    locked = lock(rows, sorted(wanted))
    present = {job.pk for job in locked}
    if len(locked) < len(wanted):
        present |= set(rows.filter(pk__in=wanted - present).values_list("pk", flat=True))
        # Other transactions hold these rows. One that stays locked after a moment is processed.
        for delay in LOCKED_RETRIES if len(locked) < len(present) else ():
            time.sleep(delay)
            locked += lock(rows, sorted(present - {job.pk for job in locked}))
    now = CLOCK.now()
    leased_by_row = {
        job.pk
        for job in locked
        if job.state in states.OPEN and job.lease_expires_at and job.lease_expires_at > now
    }
    busy = leased_by_row.union(leased_jobs([job for job in locked if job.pk not in leased_by_row]))
    return (
        [job for job in locked if job.pk not in busy],
        present - {job.pk for job in locked} | busy,
        len(wanted) - len(present) + given.count(None),
    )
