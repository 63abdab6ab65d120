"""Writing completions down, inside the transaction that carries the effects."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.utils import timezone

from kjo_django import states
from kjo_django.engine.attempt import Outcome
from kjo_django.models import Job, transition
from kjo_django.store import store_for
from kjo_django.store.rows import Completion, Place


def complete(
    using: str, outcomes: Sequence[Outcome], token: str | None = None, *, is_last: bool = False
) -> set[Any]:
    """Record completions of jobs in one statement, inside the caller's transaction.

    :param token: of a row lease that must still be held; those who lost it are refused.
    :param is_last: the caller does nothing more but commit, and what it would do about a refusal is
        nothing either: the commit may go along with the statement.
    :returns: the ids of the jobs recorded.
    """
    completions = [
        Completion(
            outcome.job,
            outcome.attempt,
            outcome.started_at,
            outcome.value,
            place_of(outcome),
            outcome.notes.get("result_ttl"),
        )
        for outcome in outcomes
        if outcome.job is not None
    ]
    return store_for(using).complete(completions, timezone.now(), token=token, is_last=is_last)


def close_known(using: str, outcomes: Sequence[Outcome]) -> None:
    """Complete the open rows of messages that have taken effect without them: another copy of a
    foreign message has, while this one failed and left a row for its retries.

    Nothing else would ever end such a row: each of its attempts is a duplicate.
    """
    now = timezone.now()
    for outcome in outcomes:
        job, message = outcome.job, outcome.delivery.message
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
            **publication(outcome),
        )


_AWAITING = frozenset(state.value for state in states.AWAITING_PUBLISH)


def place_of(outcome: Outcome) -> Place | None:
    """Return where the message was and since when, if the relay has not recorded that yet.

    The message at hand is the one the row speaks of: an earlier one would not have run.
    """
    job, record = outcome.job, outcome.delivery.record
    if job is None or job.state not in _AWAITING:
        return None
    # Some clocks are read to the millisecond only: nothing is published before it is there.
    since = max(record.timestamp or job.created_at, job.created_at)
    return Place(record.topic, record.partition, record.offset, since)


def publication(outcome: Outcome) -> dict[str, Any]:
    """Return the columns that say where the message was, if the relay has not written them yet."""
    place = place_of(outcome)
    return {} if place is None else place._asdict()
