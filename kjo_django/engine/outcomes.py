"""From how a handler ended to an outcome, and from a durable outcome to its acknowledgement."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from django.db import transaction
from django.utils import timezone

from kjo_django.conf import get_settings
from kjo_django.engine.admission import Start, spent_and_limit
from kjo_django.engine.attempt import Delivery, Outcome, Result
from kjo_django.engine.failures import judge_failure
from kjo_django.engine.handler.call import Ran
from kjo_django.engine.handler.context import Abort, facts_of
from kjo_django.engine.job_rows import load_rows, row_id
from kjo_django.engine.leases import LeaseBook
from kjo_django.exceptions import JobCancelledError
from kjo_django.messages.serializers import one_line
from kjo_django.store.rows import JobRow
from kjo_django.store.transactions import jobs_database
from kjo_django.transports.base import TopicPartition

logger = logging.getLogger("kjo_django")

_HANDED_BACK = (Abort.SHUTDOWN, Abort.LOST)


def outcome_of(delivery: Delivery, ran: Ran, start: Start, row: JobRow | None) -> Outcome:
    """Turn how a handler ended into an outcome."""
    outcome = Outcome(
        delivery,
        Result.COMPLETED,
        attempt=start.attempt,
        job=row,
        value=ran.value,
        error=ran.error,
        started_at=ran.started_at,
        seconds=ran.seconds,
        max_attempts=start.max_attempts,
    )
    if ran.result_ttl is not None:
        outcome.notes["result_ttl"] = ran.result_ttl
    if ran.error is None:
        return outcome
    if ran.abort_reason is Abort.CANCELLED:
        outcome.result, outcome.reason = Result.CANCELLED, "aborted"
    elif isinstance(ran.error, JobCancelledError) and ran.abort_reason in _HANDED_BACK:
        # It obeyed: what it did is undone, and the attempt is not spent.
        outcome.result, outcome.reason = Result.DEFERRED, "interrupted"
    else:
        judge_failure(outcome, start.max_attempts)
    return outcome


def failure_of(delivery: Delivery, error: BaseException) -> Outcome:
    """Return the failed attempt of a delivery that met an error outside its handler."""
    row = load_rows(jobs_database(), [delivery], lock=False).get(
        row_id(delivery, get_settings().service_name)
    )
    spent, limit = spent_and_limit(delivery, row)
    outcome = Outcome(
        delivery,
        Result.RETRIED,
        attempt=spent + delivery.deliveries,
        job=row,
        error=error,
        started_at=timezone.now(),
        max_attempts=limit,
    )
    judge_failure(outcome, limit)
    return outcome


class Resting:
    """What of a group waits too, instead of running into the same wall and spending an attempt on
    it: partitions that met a pausable error (KJO-76), and keys whose earlier delivery waits."""

    def __init__(self) -> None:
        self._places: set[TopicPartition] = set()
        self._shards: set[object] = set()

    def __contains__(self, delivery: Delivery) -> bool:
        return bool(self._places or self._shards) and (
            delivery.place in self._places or delivery.shard in self._shards
        )

    def noting(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Return the outcomes, having noted which of them make others wait."""
        for outcome in outcomes:
            if outcome.pause_seconds:
                self._places.add(outcome.delivery.place)
            if outcome.result is Result.DEFERRED:
                self._shards.add(outcome.delivery.shard)
        return outcomes


def is_dead(outcome: Outcome) -> bool:
    """Whether it ends as a dead letter."""
    return outcome.result is Result.DEAD


_WHY_SKIPPED = {
    "has_row": "its retries are its row's",
    "generation": "its job has been requeued since",
    "attempt": "this attempt has an outcome already",
    "changed": "its job was changed meanwhile",
    "lease lost": "its run outlived its lease, another worker has taken the job over since",
}
"""Where the reason of an outcome is no word for people, as a job's state is."""


def log_skipped(outcomes: Sequence[Outcome]) -> None:
    """Leave a line in the log for each message that was acknowledged without a run, and for each
    result that came too late."""
    for outcome in outcomes:
        is_late = outcome.reason == "lease lost"
        if outcome.result is Result.SKIPPED or is_late:
            delivery, why = outcome.delivery, outcome.reason
            which = delivery.message.id if delivery.message else delivery.record.position
            told = f"Skipped {which}: {_WHY_SKIPPED.get(why, why)}"
            # What such a handler did outside the database has been done twice.
            level = logging.WARNING if is_late else logging.INFO
            logger.log(level, one_line(told), extra=facts_of(delivery, outcome.attempt))


def is_settled_by_group(outcome: Outcome) -> bool:
    """Whether the group's own transaction makes it durable."""
    return outcome.result in (Result.COMPLETED, Result.DUPLICATE, Result.SKIPPED)


@contextmanager
def noting_doubt() -> Iterator[list[Outcome]]:
    """Yield a list for the completions that are about to be committed: should that raise, the
    deliveries keep them, since nobody knows whether the COMMIT took effect."""
    completed: list[Outcome] = []
    try:
        yield completed
    except Exception:
        for outcome in completed:
            outcome.delivery.ending = outcome
        raise


def release_leases(leases: LeaseBook, using: str, outcomes: Sequence[Outcome]) -> None:
    """Give back, with the transaction that makes the outcomes durable, the leases of those that
    have no hook to be called under them; where coordination cannot, it is done afterwards.

    :raises OperationalError: the transaction is not to be committed.
    """
    if not leases.can_release_within(using):
        return
    ended = [o for o in outcomes if o.delivery.handler and not o.delivery.handler.observes]
    if not ended:
        return

    def note() -> None:
        for outcome in ended:
            outcome.notes["is_released"] = True

    leases.release_within(using, [o.delivery.lease for o in ended])
    # Not before: an outcome whose commit fails is judged anew, and its lease is held still.
    transaction.on_commit(note, using=using)


def acknowledge(outcomes: Sequence[Outcome], *, in_transaction: bool) -> None:
    """Acknowledge, by subscription.

    Inside the transaction that makes the outcomes durable only where the transport can join it;
    after it everywhere, which those that have joined take as a no-op.
    """
    if in_transaction and not any(o.delivery.subscription.joins_transactions for o in outcomes):
        return
    by_subscription: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        by_subscription.setdefault(id(outcome.delivery.subscription), []).append(outcome)
    for group in by_subscription.values():
        subscription = group[0].delivery.subscription
        records = [outcome.delivery.record for outcome in group]
        if subscription.joins_transactions:
            if in_transaction:
                subscription.acknowledge_in_transaction(records)
                for outcome in group:
                    outcome.notes["is_acknowledged"] = True
            else:
                subscription.acknowledge(
                    [o.delivery.record for o in group if not o.notes.get("is_acknowledged")]
                )
        elif not in_transaction:
            subscription.acknowledge(records)
