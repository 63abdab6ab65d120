"""Whether a delivery may run, given its job's row and the deliveries before it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from django.utils import timezone

from kjo_django import states
from kjo_django.engine import queue_policies
from kjo_django.engine.attempt import Attempt, Delivery, Ending
from kjo_django.engine.job_rows import load_rows, row_id
from kjo_django.engine.leases import LeaseBook
from kjo_django.exceptions import KjoError, MessageError, StalledError
from kjo_django.messages.headers import message_id
from kjo_django.models import DeadLetterReason
from kjo_django.runtime import Runtime
from kjo_django.store.rows import NAMED_BY_OTHERS, JobRow
from kjo_django.transports.base import TopicPartition

_OPEN = frozenset(state.value for state in states.OPEN)


class ExpiredError(KjoError):
    """The job was not started by its ``expires_at``."""


def admit(
    delivery: Delivery,
    row: JobRow | None,
    *,
    is_fresh: bool,
    leases: LeaseBook,
    now: datetime | None = None,
) -> Attempt:
    """Return the attempt to run a delivery: without an ending where it may run.

    :param row: its job's row, None when there is no row.
    :param is_fresh: whether its effects are not committed yet.
    :param leases: this worker's.
    :param now: the moment it is judged at; when it is asked, if not given.
    """
    message, handler = delivery.message, delivery.handler
    assert message is not None
    assert handler is not None
    if not is_fresh and not handler.judges_itself:
        return Attempt(delivery, Ending.DUPLICATE, row=row)
    if row is not None and row.generation == NAMED_BY_OTHERS:
        return _dead(delivery, None, 0, named_like_ours(row), DeadLetterReason.INVALID)
    if row is None:
        if message.job_id is not None and message.service == leases.runtime.service:
            # Its row was here and was deleted by somebody who meant it.
            return Attempt(delivery, Ending.SKIPPED, "deleted")
    else:
        skipped = why_skip(delivery, row)
        if skipped:
            return Attempt(delivery, Ending.SKIPPED, skipped, row)
        if row.lease_token and _is_held_by_another(row, leases, now or timezone.now()):
            return Attempt(delivery, Ending.DEFERRED, "leased", row)
    refusal = handler.refusal(message, row) if handler.refusal is not None else None
    if refusal is not None:
        # Not the end of the job whose name it bears: that one is none the worse for it.
        return Attempt(delivery, Ending.DEAD, refusal.reason, error=refusal)
    spent, limit = spent_and_limit(delivery, row)
    number = spent + delivery.deliveries
    expires_at = row.expires_at if row is not None else None
    if expires_at is not None and expires_at <= (now or timezone.now()):
        error: KjoError = ExpiredError(f"Not started by {expires_at.isoformat()}")
        return _dead(delivery, row, spent, error, DeadLetterReason.EXPIRED)
    if number > limit:
        error = StalledError(
            f"Its worker died or froze during attempt {limit} of {limit}, or could not record how "
            "that ended; it was not tried again"
        )
        return _dead(delivery, row, limit, error, DeadLetterReason.STALLED)
    return Attempt(delivery, row=row, number=number, limit=limit)


def refuse(runtime: Runtime, delivery: Delivery) -> Attempt:
    """Return how a record ends that nobody can handle: it cannot be read, or no handler is
    registered for it."""
    problem, message = delivery.problem, delivery.message
    if problem is None:
        assert message is not None
        problem = MessageError("unknown_type", f"No handler is registered for {message.type!r}")
    row = None
    if message is not None and message.job_id is not None:
        rows = load_rows(runtime, [delivery], lock=False)
        row = rows.get(row_id(delivery, runtime.service))
        if row is not None and row.generation == NAMED_BY_OTHERS:
            row = None
        if row is not None and (skipped := why_skip(delivery, row)):
            return Attempt(delivery, Ending.SKIPPED, skipped, row)
    return _dead(delivery, row, row.attempts if row else 0, problem, problem.reason)


def failed_outside(runtime: Runtime, delivery: Delivery, error: BaseException) -> Attempt:
    """Return the attempt of a delivery that met an error outside its handler."""
    row = load_rows(runtime, [delivery], lock=False).get(row_id(delivery, runtime.service))
    spent, limit = spent_and_limit(delivery, row)
    number = spent + delivery.deliveries
    return Attempt(
        delivery, row=row, number=number, limit=limit, error=error, started_at=timezone.now()
    )


def named_like_ours(row: JobRow) -> MessageError:
    """Return why a message of others that bears the id of an open job of ours is not run: its
    marker would say that the job is done."""
    text = f"Its id is that of the job {row.id} of this service, which has not ended"
    return MessageError("invalid", text)


def spent_and_limit(delivery: Delivery, row: JobRow | None) -> tuple[int, int]:
    """Return how many attempts have an outcome that is recorded, and after how many it ends."""
    if row is not None:
        spent, own = row.attempts, row.max_attempts
    else:
        handler = delivery.handler
        spent = 0
        own = handler.max_attempts(delivery.queue) if handler else delivery.queue.max_attempts
    return spent, queue_policies.limit_of(delivery.queue.name, own, spent)


def why_skip(delivery: Delivery, row: JobRow) -> str:
    """Return why the row forbids the run, or "" when it does not."""
    message = delivery.message
    assert message is not None
    if row.state not in _OPEN:
        return str(row.state)
    if message.job_id is None:
        # A second copy of a foreign message whose retries are in the hands of its row.
        return "has_row"
    if message.generation != row.generation:
        return "generation"
    return "attempt" if message.attempt <= row.attempts else ""


def is_left_open(attempt: Attempt) -> bool:
    """Whether the row of a duplicate of a message nobody enqueued here waited for the very attempt
    it asks for.

    Of a job of ours the marker and the row's state are one transaction. Should the one be there
    without the other, somebody has used the job's name, and it is not done for that.
    """
    message, row = attempt.delivery.message, attempt.row
    if row is None or message is None or message.job_id != str(row.id):
        return False
    own_name = message_id(message.job_id, row.generation)
    is_born_here = message.id == own_name and row.unique_id != message.id
    return not is_born_here and not why_skip(attempt.delivery, row)


def _is_held_by_another(row: JobRow, leases: LeaseBook, now: datetime) -> bool:
    holder, expires_at = row.lease_token, row.lease_expires_at
    if not holder or holder == leases.token or expires_at is None or expires_at <= now:
        return False
    return not leases.is_vanished(holder)


def _dead(
    delivery: Delivery, row: JobRow | None, number: int, error: KjoError, reason: str
) -> Attempt:
    return Attempt(delivery, Ending.DEAD, reason, row, number, error=error)


class HeldBack:
    """What of a group is not to run because of an earlier delivery of it: that of a key whose
    earlier delivery is deferred, so that the key's order is kept; that of a partition where an
    attempt met an error that pauses it, so that none spends an attempt on the same error."""

    def __init__(self) -> None:
        self._keys: set[object] = set()
        self._partitions: set[TopicPartition] = set()

    def __contains__(self, delivery: Delivery) -> bool:
        return bool(self._keys or self._partitions) and (
            delivery.shard in self._keys or delivery.place in self._partitions
        )

    def defer(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Hold back what comes after these deliveries, and return them."""
        deferred = list(deliveries)
        self._keys.update(delivery.shard for delivery in deferred)
        return deferred

    def after(self, attempts: list[Attempt]) -> list[Attempt]:
        """Hold back what comes after these attempts, as far as their endings ask for it, and
        return them."""
        for attempt in attempts:
            if attempt.pause_seconds:
                self._partitions.add(attempt.delivery.place)
            if attempt.ending is Ending.DEFERRED:
                self._keys.add(attempt.delivery.shard)
        return attempts
