"""Telling of durable outcomes: those who wait for them first, then by signals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kjo_django import signals
from kjo_django.engine.attempt import Outcome, Result
from kjo_django.enqueue.wakeups import notify_waiters
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import load_result, serializer_for


def tell_waiters(outcomes: Sequence[Outcome]) -> None:
    """Call those who wait for a job that has ended; duplicates too, since the worker before may
    have died between its commit and its call. Costs nothing where nobody waits."""
    ended = (o.delivery.record.headers for o in outcomes if o.result is not Result.RETRIED)
    channels = {
        names.text(headers, names.REPLY_TO) for headers in ended if names.REPLY_TO in headers
    }
    if channels:
        notify_waiters(channels)


def tell(outcomes: Sequence[Outcome]) -> None:
    """Send the signals of durable outcomes."""
    wanted = (
        signals.job_completed,
        signals.job_retried,
        signals.job_failed,
        signals.job_stalled,
        signals.job_cancelled,
        signals.message_dead_lettered,
    )
    if not any(one.receivers for one in wanted):
        return
    for outcome in outcomes:
        _tell_one(outcome)


def value_of(outcome: Outcome) -> Any:
    """Return what the handler returned, as a waiter would get it."""
    message = outcome.delivery.message
    if outcome.value is None or message is None:
        return None
    return load_result(outcome.value, serializer_for(message.content_type))


def _tell_one(outcome: Outcome) -> None:
    delivery, message = outcome.delivery, outcome.delivery.message
    facts: dict[str, Any] = {
        "job_id": (message.job_id or message.id) if message else None,
        "unique_id": outcome.job.unique_id if outcome.job else None,
        "queue": delivery.queue.name,
        "handler": message.type if message else "",
    }
    sender = facts["handler"]
    if outcome.delivery.deliveries > 1:
        signals.send(signals.job_stalled, sender=sender, attempt=outcome.attempt, **facts)
    if outcome.result is Result.COMPLETED:
        signals.send(
            signals.job_completed,
            sender=sender,
            result=value_of(outcome),
            attempt=outcome.attempt,
            seconds=outcome.seconds,
            **facts,
        )
    elif outcome.result is Result.RETRIED:
        signals.send(
            signals.job_retried,
            sender=sender,
            error=outcome.error,
            attempt=outcome.attempt,
            retry_at=outcome.retry_at,
            **facts,
        )
    elif outcome.result is Result.CANCELLED:
        signals.send(signals.job_cancelled, sender=sender, **facts)
    elif outcome.result is Result.DEAD:
        signals.send(
            signals.job_failed,
            sender=sender,
            error=outcome.error,
            attempt=outcome.attempt,
            reason=str(outcome.reason),
            **facts,
        )
        signals.send(
            signals.message_dead_lettered,
            sender=sender,
            dead_letter_id=outcome.notes.get("dead_letter_id"),
            queue=facts["queue"],
            handler=facts["handler"],
            reason=str(outcome.reason),
            error=outcome.error,
        )
