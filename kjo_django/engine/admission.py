"""Whether a delivery may run, given its job's row. Pure, but for what a handler itself refuses."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.utils import timezone

from kjo_django import states
from kjo_django.conf import get_settings
from kjo_django.engine import queue_policies
from kjo_django.engine.attempt import Delivery, Outcome, Result
from kjo_django.engine.leases import LeaseBook
from kjo_django.exceptions import KjoError, MessageError, StalledError
from kjo_django.models import DeadLetterReason
from kjo_django.models.job import message_id
from kjo_django.store.rows import NAMED_BY_OTHERS, JobRow

_OPEN = frozenset(state.value for state in states.OPEN)


class ExpiredError(KjoError):
    """The job was not started by its ``expires_at``."""


@dataclass(slots=True)
class Start:
    """The delivery may run."""

    attempt: int
    max_attempts: int


def judge(
    delivery: Delivery,
    row: JobRow | None,
    *,
    is_fresh: bool,
    leases: LeaseBook,
    now: datetime | None = None,
) -> Start | Outcome:
    """Return how the delivery starts, or what it ends with instead.

    :param row: its job's columns, None when there is no row.
    :param is_fresh: whether its effects are not committed yet.
    :param leases: this worker's.
    :param now: the moment it is judged at; when it is asked, if not given.
    """
    message, handler = delivery.message, delivery.handler
    assert message is not None
    assert handler is not None
    if not is_fresh and not handler.judges_itself:
        return Outcome(delivery, Result.DUPLICATE, job=row)
    if row is not None and row.generation == NAMED_BY_OTHERS:
        return _dead(delivery, None, 0, named_like_ours(row), DeadLetterReason.INVALID)
    if row is None:
        if message.job_id is not None and message.service == get_settings().service_name:
            # Its row was here and was deleted by somebody who meant it.
            return Outcome(delivery, Result.SKIPPED, reason="deleted")
    else:
        skipped = why_skip(delivery, row)
        if skipped:
            return Outcome(delivery, Result.SKIPPED, job=row, reason=skipped)
        if row.lease_token and _is_held_by_another(row, leases, now or timezone.now()):
            return Outcome(delivery, Result.DEFERRED, job=row, reason="leased")
    refusal = handler.refusal(message, row)
    if refusal is not None:
        # Not the end of the job whose name it bears: that one is none the worse for it.
        return Outcome(delivery, Result.DEAD, error=refusal, reason=refusal.reason)
    attempts, limit = spent_and_limit(delivery, row)
    attempt = attempts + delivery.deliveries
    expires_at = row.expires_at if row is not None else None
    if expires_at is not None and expires_at <= (now or timezone.now()):
        error: KjoError = ExpiredError(f"Not started by {expires_at.isoformat()}")
        return _dead(delivery, row, attempts, error, DeadLetterReason.EXPIRED)
    if attempt > limit:
        error = StalledError(
            f"Its worker died or froze during attempt {limit} of {limit}, or could not record how "
            "that ended; it was not tried again"
        )
        return _dead(delivery, row, limit, error, DeadLetterReason.STALLED)
    return Start(attempt, limit)


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


def is_left_open(outcome: Outcome) -> bool:
    """Whether the row of a message nobody enqueued here waited for the very attempt it asks for.

    Of a job of ours the marker and the row's state are one transaction. Should the one be there
    without the other, somebody has used the job's name, and it is not done for that.
    """
    message, row = outcome.delivery.message, outcome.job
    if row is None or message is None or message.job_id != str(row.id):
        return False
    own_name = message_id(message.job_id, row.generation)
    is_born_here = message.id == own_name and row.unique_id != message.id
    return not is_born_here and not why_skip(outcome.delivery, row)


def _is_held_by_another(row: JobRow, leases: LeaseBook, now: datetime) -> bool:
    holder, expires_at = row.lease_token, row.lease_expires_at
    if not holder or holder == leases.token or expires_at is None or expires_at <= now:
        return False
    return not leases.is_vanished(holder)


def _dead(
    delivery: Delivery,
    row: JobRow | None,
    attempt: int,
    error: KjoError,
    reason: DeadLetterReason,
) -> Outcome:
    return Outcome(delivery, Result.DEAD, attempt=attempt, job=row, error=error, reason=reason)
