"""Writing completions down, inside the transaction that carries the effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from django.utils import timezone

from kjo_django import states
from kjo_django.engine.attempt import Attempt
from kjo_django.models import Job, transition
from kjo_django.store import Store
from kjo_django.store.rows import Completion, Place
from kjo_django.transports.base import Subscription


@contextmanager
def recording(store: Store, *, calls_handlers: bool = False) -> Iterator[list[Attempt]]:
    """A transaction that makes endings durable. A worker's is always the outermost; within a test's
    own, a savepoint keeps a failure from breaking that one.

    Yields a list for the attempts it records: recorded with its commit; should it raise, in doubt,
    since nobody knows whether the COMMIT took effect.

    :param calls_handlers: whether handlers, or hooks of theirs, are called in it.
    """
    attempts: list[Attempt] = []
    try:
        with store.transaction(calls_handlers=calls_handlers):
            yield attempts
    except Exception:
        for attempt in attempts:
            attempt.is_in_doubt = True
            attempt.delivery.attempt = attempt
        raise
    for attempt in attempts:
        attempt.is_recorded = True


def acknowledge_within(attempts: Sequence[Attempt]) -> None:
    """Acknowledge in the transaction that makes the endings durable, where the transport can join
    it."""
    for subscription, group in by_subscription(attempts):
        if subscription.joins_transactions:
            subscription.acknowledge_in_transaction([a.delivery.record for a in group])
            for attempt in group:
                attempt.is_acknowledged = True


def by_subscription(attempts: Sequence[Attempt]) -> list[tuple[Subscription, list[Attempt]]]:
    """Return the attempts of each subscription."""
    groups: dict[int, list[Attempt]] = {}
    for attempt in attempts:
        groups.setdefault(id(attempt.delivery.subscription), []).append(attempt)
    return [(group[0].delivery.subscription, group) for group in groups.values()]


def complete(
    store: Store, attempts: Sequence[Attempt], token: str | None = None, *, is_last: bool = False
) -> set[Any]:
    """Record completions of jobs in one statement, inside the caller's transaction.

    :param token: of a row lease that must still be held; those who lost it are refused.
    :param is_last: the caller does nothing more but commit, and what it would do about a refusal is
        nothing either: the commit may go along with the statement.
    :returns: the ids of the jobs recorded.
    """
    completions = [
        Completion(
            attempt.row,
            attempt.number,
            attempt.started_at,
            attempt.result,
            place_of(attempt),
            attempt.result_ttl,
        )
        for attempt in attempts
        if attempt.row is not None
    ]
    return store.complete(completions, timezone.now(), token=token, is_last=is_last)


def close_known(using: str, attempts: Sequence[Attempt]) -> None:
    """Complete the open rows of messages that have taken effect without them: another copy of a
    foreign message has, while this one failed and left a row for its retries.

    Nothing else would ever end such a row: each of its attempts is a duplicate.
    """
    now = timezone.now()
    for attempt in attempts:
        job, message = attempt.row, attempt.delivery.message
        assert job is not None
        assert message is not None
        transition(
            "complete",
            Job.objects.using(using).at(job.id, job.generation).filter(attempts=job.attempts),
            finished_at=now,
            error="",
            lease_token="",
            lease_expires_at=None,
            result_expires_at=now + timedelta(milliseconds=job.result_ttl),
            **publication(attempt),
        )


_AWAITING = frozenset(state.value for state in states.AWAITING_PUBLISH)


def place_of(attempt: Attempt) -> Place | None:
    """Return where the message was and since when, if the relay has not recorded that yet.

    The message at hand is the one the row speaks of: an earlier one would not have run.
    """
    job, record = attempt.row, attempt.delivery.record
    if job is None or job.state not in _AWAITING:
        return None
    # Some clocks are read to the millisecond only: nothing is published before it is there.
    since = max(record.timestamp or job.created_at, job.created_at)
    return Place(record.topic, record.partition, record.offset, since)


def publication(attempt: Attempt) -> dict[str, Any]:
    """Return the columns that say where the message was, if the relay has not written them yet."""
    place = place_of(attempt)
    return {} if place is None else place._asdict()
