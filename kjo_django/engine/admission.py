"""Which deliveries of a group may run, judged by their jobs' rows and by the markers of effects."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from uuid import UUID

from kjo_django import states
from kjo_django.clock import CLOCK
from kjo_django.conf import QueueConf
from kjo_django.engine.attempt import (
    FAILURES,
    Attempt,
    Delivery,
    Ending,
    Reason,
    RefusedRecord,
)
from kjo_django.engine.leases import LeaseBook
from kjo_django.exceptions import KjoError, MessageError, StalledError
from kjo_django.messages.headers import Message, message_id
from kjo_django.models import DeadLetterReason, EventKey
from kjo_django.runtime import Runtime
from kjo_django.store.base import Store
from kjo_django.store.rows import NAMED_BY_OTHERS, JobRow
from kjo_django.workflows.step_context import contexts

_OPEN = frozenset(state.value for state in states.OPEN)


class MarkedAheadError(KjoError):
    """Jobs that have not ended have a marker: a handler has committed the transaction of their
    group, and its worker died before it had deleted the markers of the others.

    :param deliveries: theirs.
    """

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        super().__init__(f"{len(deliveries)} jobs that have not ended have a marker")
        self.deliveries = deliveries


class ExpiredError(KjoError):
    """The job was not started by its ``expires_at``."""


def admit_group(
    leases: LeaseBook, deliveries: Sequence[Delivery], marks_at: datetime | None = None
) -> list[Attempt]:
    """Return the attempt of each delivery: without an ending where it may run.

    :param leases: this worker's.
    :param marks_at: the moment with which the markers are inserted, and the rows locked, in the
        transaction of the caller; None: they are only read.
    :raises MarkedAheadError: a marker is there that must not be.
    """
    runtime, now = leases.runtime, marks_at or CLOCK.now()
    keys = [delivery.key for delivery in deliveries]
    if marks_at is None:
        fresh, rows = _load_unmarked(runtime, deliveries)
    else:
        fresh, rows = load_rows(runtime, deliveries, keys, marks_at)
        if len(fresh) < len(keys):
            _refuse_marked_ahead(fresh, rows)
    attempts, steps = [], []
    for delivery, key in zip(deliveries, keys, strict=True):
        row, is_fresh = rows.get(delivery), key in fresh
        attempt = admit(delivery, row, is_fresh=is_fresh, leases=leases, now=now)
        attempt.key, attempt.is_marked = key, marks_at is not None and is_fresh
        attempts.append(attempt)
        if row is not None and row.stage_id is not None and attempt.ending is None:
            steps.append((attempt, row.id, row.stage_id))
    if steps:
        _load_steps(runtime, steps)
    return attempts


def _load_steps(runtime: Runtime, steps: Sequence[tuple[Attempt, UUID, UUID]]) -> None:
    """Give attempts of steps of workflows what they may ask of these.

    :param steps: with the ids of their jobs and of their stages.
    """
    found = contexts(runtime, [(id, stage) for _, id, stage in steps])
    for attempt, id, _ in steps:
        attempt.step = found.get(id)


def _load_unmarked(
    runtime: Runtime, deliveries: Sequence[Delivery]
) -> tuple[set[EventKey], dict[Delivery, JobRow]]:
    """Return which deliveries have no marker, and the rows; of the next attempt of a job no marker
    is asked for."""
    _, rows = load_rows(runtime, deliveries)
    asked = [d.key for d in deliveries if d not in rows or not is_next_attempt(d, rows[d])]
    known = runtime.store.known_markers(asked)
    return {delivery.key for delivery in deliveries} - known, rows


def _refuse_marked_ahead(fresh: Collection[EventKey], rows: Mapping[Delivery, JobRow]) -> None:
    ahead = [
        delivery
        for delivery, row in rows.items()
        if delivery.key not in fresh
        and is_next_attempt(delivery, row)
        and not delivery.handler.judges_itself
    ]
    if ahead:
        raise MarkedAheadError(ahead)


def delete_markers_ahead(runtime: Runtime, deliveries: Sequence[Delivery]) -> None:
    """Delete the markers of deliveries that have not taken effect, but of those whose rows say that
    another worker has run them since.

    In a transaction of its own: in that of their group they would come back with a roll-back, and
    say that it was committed.
    """
    with runtime.store.writing():
        read = load_rows(runtime, deliveries)[1]
        rows = runtime.store.job_rows([row.id_text for row in read.values()], lock=True)
        runtime.store.delete_markers(
            {
                delivery.key
                for delivery in deliveries
                if delivery not in read
                or ((row := rows.get(read[delivery].id_text)) and not why_skip(delivery, row))
            }
        )


def admit(
    delivery: Delivery, row: JobRow | None, *, is_fresh: bool, leases: LeaseBook, now: datetime
) -> Attempt:
    """Return the attempt to run a delivery: without an ending where it may run.

    :param row: its job's row, None when there is no row.
    :param is_fresh: whether its effects are not committed yet.
    :param leases: this worker's.
    """
    message, handler, runtime = delivery.message, delivery.handler, leases.runtime
    if not is_fresh and not handler.judges_itself:
        return Attempt(delivery, Ending.DUPLICATE, row=row)
    if row is None and message.job_id is not None and message.service == runtime.service:
        # Its row was here and was deleted by somebody who meant it.
        return Attempt(delivery, Ending.SKIPPED, Reason.DELETED)
    if row is not None and row.generation == NAMED_BY_OTHERS:
        # If it ran, its marker would mean that our job is completed.
        text = f"Its id is that of the job {row.id} of this service, which has not ended"
        error: KjoError = MessageError("invalid", text)
        return Attempt(delivery, Ending.DEAD, DeadLetterReason.INVALID, error=error)
    skipped = why_skip(delivery, row) if row is not None else None
    if skipped:
        return Attempt(delivery, Ending.SKIPPED, skipped, row)
    if row is not None and row.lease_token and _is_leased_elsewhere(row, leases, now):
        return Attempt(delivery, Ending.DEFERRED, Reason.LEASED, row)
    refusal = handler.refusal(message, row) if handler.refusal is not None else None
    if refusal is not None:
        # The job whose name it bears has not failed, and goes on.
        return Attempt(delivery, Ending.DEAD, refusal.reason, error=refusal)
    attempt = attempt_of(runtime, delivery, row)
    if row is not None and row.expires_at is not None:
        end_expired(attempt, now)
    # One that has expired has spent nothing, so it is within the limit.
    if attempt.number > (limit := attempt.limit):
        attempt.ending, attempt.reason = Ending.DEAD, DeadLetterReason.STALLED
        attempt.number = limit
        attempt.error = StalledError(
            f"Its worker died or froze during attempt {limit} of {limit}, or could not record how "
            "that ended; it was not tried again"
        )
    return attempt


def _is_leased_elsewhere(row: JobRow, leases: LeaseBook, now: datetime) -> bool:
    """Return whether a leased job is run outside a transaction by another worker, which lives."""
    holder, until = row.lease_token, row.lease_expires_at
    is_leased = holder != leases.token and until is not None and until > now
    return is_leased and not leases.is_vanished(holder)


def attempt_of(runtime: Runtime, delivery: Delivery, row: JobRow | None) -> Attempt:
    """Return the next attempt of a delivery, with its number and the limit of its job."""
    spent, own = 0, 0
    if row is not None:
        spent, own = row.attempts, row.max_attempts
    else:
        own = delivery.handler.max_attempts(delivery.queue)
    limit = limit_of(runtime, delivery.queue.name, own, spent)
    return Attempt(delivery, row=row, number=spent + delivery.deliveries, limit=limit)


def end_expired(attempt: Attempt, now: datetime | None = None) -> None:
    """End an attempt that has not begun by its job's ``expires_at``, without spending it."""
    row = attempt.row
    if row is None or row.expires_at is None:
        return
    if row.expires_at <= (now or CLOCK.now()):
        attempt.ending, attempt.reason = Ending.DEAD, DeadLetterReason.EXPIRED
        attempt.error = ExpiredError(f"Not started by {row.expires_at.isoformat()}")
        attempt.number = row.attempts


def defer_limited(
    attempts: Sequence[Attempt], may_start: Callable[[Sequence[Delivery]], Sequence[Delivery]]
) -> list[Attempt]:
    """Defer the attempts that their limits do not let start; return them.

    :param attempts: those that have ended are left out.
    :param may_start: returns which of deliveries with a limit may start.
    """
    limited = [each for each in attempts if each.ending is None and each.delivery.is_limited]
    if not limited:
        return []
    starting = {*may_start([attempt.delivery for attempt in limited])}
    refused = [attempt for attempt in limited if attempt.delivery not in starting]
    for attempt in refused:
        attempt.ending, attempt.reason = Ending.DEFERRED, Reason.LIMITED
    return refused


def limit_of(runtime: Runtime, queue: str, own: int, spent: int) -> int:
    """Return after how many attempts a job is dead-lettered.

    :param own: the limit it was enqueued with.
    :param spent: attempts whose outcome is recorded. One more has been promised: a limit lowered
        below them ends the job with its next failure, and never without a run.
    """
    control = runtime.queue_controls.get(queue)
    asked = control.max_attempts if control is not None else None
    return max(own if asked is None else asked, spent + 1)


def why_skip(delivery: Delivery, row: JobRow) -> Reason | None:
    """Return why the row forbids the run; None when it does not."""
    message = delivery.message
    if row.state not in _OPEN:
        return Reason(row.state)
    if message.job_id is None:
        # A second copy of a foreign message whose retries are in the hands of its row.
        return Reason.HAS_ROW
    if message.generation != row.generation:
        return Reason.GENERATION
    return Reason.ATTEMPT if message.attempt <= row.attempts else None


def refuse(leases: LeaseBook, deliveries: Sequence[RefusedRecord]) -> list[Attempt]:
    """Return how records end that no handler here can run.

    :param leases: this worker's.
    """
    named = [delivery for delivery in deliveries if delivery.message.job_id is not None]
    rows = load_rows(leases.runtime, named)[1] if named else {}
    now = CLOCK.now()
    return [_refused(delivery, rows.get(delivery), leases, now) for delivery in deliveries]


def _refused(
    delivery: RefusedRecord, row: JobRow | None, leases: LeaseBook, now: datetime
) -> Attempt:
    problem = delivery.problem
    if row is not None and row.generation == NAMED_BY_OTHERS:
        row = None
    if row is None:
        return Attempt(delivery, Ending.DEAD, problem.reason, error=problem)
    if skipped := why_skip(delivery, row):
        return Attempt(delivery, Ending.SKIPPED, skipped, row)
    if row.lease_token and _is_leased_elsewhere(row, leases, now):
        return Attempt(delivery, Ending.DEFERRED, Reason.LEASED, row)
    attempt = Attempt(delivery, Ending.DEAD, problem.reason, row, row.attempts, error=problem)
    end_expired(attempt, now)
    return attempt


def ends_without_run(runtime: Runtime, delivery: Delivery, row: JobRow | None) -> bool:
    """Return whether a job's row, or that it has none any more, forbids the run."""
    message = delivery.message
    if row is None:
        return message.job_id is not None and message.service == runtime.service
    if row.generation == NAMED_BY_OTHERS or why_skip(delivery, row) is not None:
        return True
    return row.expires_at is not None and row.expires_at <= CLOCK.now()


def is_to_be_recorded(attempt: Attempt) -> bool:
    """Return whether the rows do not know yet how an attempt without effects has ended, and are to
    know it: it has failed, or its job's row is left open."""
    return attempt.ending in FAILURES or _is_left_open(attempt)


def _is_left_open(attempt: Attempt) -> bool:
    """Return whether the row of a duplicate of a message that nobody enqueued here waited for the
    very attempt it asks for.

    Of a job of ours the marker and the row's state are one transaction. Should the one be there
    without the other, somebody has used the job's name, and it is not done for that.
    """
    message, row = attempt.delivery.message, attempt.row
    if row is None or message.job_id != str(row.id):
        return False
    return not _is_born_here(message, row) and not why_skip(attempt.delivery, row)


def is_next_attempt(delivery: Delivery, row: JobRow) -> bool:
    """Return whether a delivery asks for the attempt that the row of a job of ours waits for.

    Then there is no marker of its message: the marker and the end of the row are one transaction.
    """
    return _is_born_here(delivery.message, row) and why_skip(delivery, row) is None


def is_awaited(attempt: Attempt) -> bool:
    """Return whether an attempt is the one that the row of a job of ours waited for when it
    began."""
    return attempt.row is not None and is_next_attempt(attempt.delivery, attempt.row)


def _is_born_here(message: Message, row: JobRow) -> bool:
    """Return whether a message is that of a job that was enqueued here, under the job's own id."""
    own_name = message_id(row.id_text, row.generation)
    return message.id == own_name and row.unique_id != message.id


class HeldBack(set[object]):
    """Of which keys and partitions nothing more of a group is to run: of a key whose earlier
    delivery is deferred, so that the key's order is kept; of a partition where an attempt met an
    error that pauses it, so that none spends an attempt on the same error."""

    def covers(self, delivery: Delivery) -> bool:
        """Return whether a delivery is not to run."""
        return delivery.shard in self or delivery.place in self

    def split(self, deliveries: Iterable[Delivery]) -> tuple[list[Delivery], list[Delivery]]:
        """Return those of the deliveries that are to run, and those that are not."""
        runs: list[Delivery] = []
        kept: list[Delivery] = []
        for delivery in deliveries:
            (kept if self.covers(delivery) else runs).append(delivery)
        return runs, kept

    def defer(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Hold back what comes after these deliveries, and return them."""
        deferred = list(deliveries)
        self.update(delivery.shard for delivery in deferred)
        return deferred

    def after(self, attempts: Iterable[Attempt]) -> None:
        """Hold back what comes after these attempts, as far as their endings ask for it."""
        for attempt in attempts:
            if attempt.pause_seconds:
                self.add(attempt.delivery.place)
            if attempt.ending is Ending.DEFERRED:
                self.add(attempt.delivery.shard)


# --- The rows of a group --------------------------------------------------------------------------

_ID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_is_id = re.compile(_ID).fullmatch
"""As we write them; whoever writes them otherwise has no row here."""
_is_id_with_generation = re.compile(rf"({_ID})(?::\d+)?").fullmatch
"""As the messages of our jobs are named."""


def load_rows(
    runtime: Runtime,
    deliveries: Sequence[Delivery],
    marking: Sequence[EventKey] = (),
    at: datetime | None = None,
    read: Callable[[Sequence[str]], dict[str, JobRow]] | None = None,
) -> tuple[set[EventKey], dict[Delivery, JobRow]]:
    """Return the job rows of a group, read in one query, or in two when messages that nobody
    enqueued here are among them.

    :param marking: markers to insert first; then the rows are locked.
    :param at: the moment with which they are inserted.
    :param read: returns the rows of jobs, by their ids, in place of ``Store.job_rows``.
    :returns: which of the markers were new, and the rows.
    """
    store, service = runtime.store, runtime.service
    ours: dict[Delivery, str] = {}
    # Another service's job has no row here, but for the one its first failure bore.
    foreign: dict[Delivery, str] = {}
    named: dict[Delivery, str] = {}
    for delivery in deliveries:
        message = delivery.message
        if message.job_id is None or message.service != service:
            foreign[delivery] = message.row_name
            if not message.unique_id and (match := _is_id_with_generation(message.id)):
                named[delivery] = match[1]
        elif _is_id(message.job_id):
            ours[delivery] = message.job_id
    fresh: set[EventKey] = set()
    found: dict[str, JobRow] = {}
    if marking:
        fresh, found = store.insert_markers_and_lock(marking, list(ours.values()), at)
    elif ours:
        read = read or partial(store.job_rows, lock=False)
        found = read(list(ours.values()))
    rows = {delivery: found[id] for delivery, id in ours.items() if id in found}
    if foreign:
        rows |= _rows_of_foreign(store, deliveries[0].queue, foreign, named)
    return fresh, rows


def _rows_of_foreign(
    store: Store,
    queue: QueueConf,
    foreign: Mapping[Delivery, str],
    named: Mapping[Delivery, str],
) -> dict[Delivery, JobRow]:
    """Return the rows that failures of messages of others have left, or open jobs of ours that have
    their names.

    :param foreign: the names of the rows.
    :param named: the ids of jobs that some of them have as names.
    """
    of_failures, open_jobs = store.rows_of_foreign(
        queue.retries, set(foreign.values()), set(named.values())
    )
    rows: dict[Delivery, JobRow] = {}
    for delivery, name in foreign.items():
        row = of_failures.get(name) or open_jobs.get(named.get(delivery, ""))
        if row is not None:
            rows[delivery] = row
    return rows
