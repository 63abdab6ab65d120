"""Writing completions down, inside the transaction that carries the effects."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import connections
from django.utils import timezone

from kjo_django import states
from kjo_django.engine.attempt import Outcome
from kjo_django.models import Job, transition
from kjo_django.states import JobState
from kjo_django.store.postgres import array_text, execute_last, text_array
from kjo_django.store.rows import JobRow


def complete(
    using: str, outcomes: Sequence[Outcome], token: str | None = None, *, is_last: bool = False
) -> set[Any]:
    """Record completions of jobs in one statement, inside the caller's transaction.

    :param token: of a row lease that must still be held; those who lost it are refused.
    :param is_last: the caller does nothing more but commit, and what it would do about a refusal is
        nothing either: the commit may go along with the statement, and does on PostgreSQL.
    :returns: the ids of the jobs recorded.
    """
    done = [outcome for outcome in outcomes if outcome.job is not None]
    if not done:
        return set()
    now = timezone.now()
    lasting = [outcome for outcome in done if "result_ttl" in outcome.notes]
    if connections[using].vendor == "postgresql":
        recorded = _complete_at_once(using, done, now, token, commits=is_last and not lasting)
    else:
        recorded = _complete_one_by_one(using, done, now, token)
    _change_lifetimes(using, lasting, now)
    return recorded


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


def publication(outcome: Outcome) -> dict[str, Any]:
    """Return what the relay has not noted yet, or put off: where the message was, and since when.

    Nothing where it has noted it. The message in hand is the one it speaks of: an earlier one would
    not have run.
    """
    job, record = outcome.job, outcome.delivery.record
    if job is None or job.state not in _AWAITING:
        return {}
    # Some clocks are read to the millisecond only: nothing is published before it is there.
    since = max(record.timestamp or job.created_at, job.created_at)
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "queued_at": since,
    }


def _change_lifetimes(using: str, outcomes: Sequence[Outcome], now: datetime) -> None:
    """Let results live as long as their handlers' hooks said: seldom, so apart from the rest."""
    for outcome in outcomes:
        job = outcome.job
        assert job is not None
        lasts = outcome.notes["result_ttl"]
        Job.objects.using(using).at(job.id, job.generation).update(
            result_ttl=lasts, result_expires_at=now + timedelta(milliseconds=lasts)
        )


def _complete_one_by_one(
    using: str, done: Sequence[Outcome], now: datetime, token: str | None
) -> set[Any]:
    ids = {outcome.job.id for outcome in done if outcome.job is not None}
    recorded = _recorded(using, ids, _complete_many(using, done, now, token), now)
    for outcome in done:
        job, missing = outcome.job, publication(outcome)
        if job is not None and missing and job.id in recorded:
            Job.objects.using(using).at(job.id, job.generation).update(**missing)
    return recorded


def _complete_many(using: str, done: Sequence[Outcome], now: datetime, token: str | None) -> int:
    """One statement, executed for each; returns how many rows it changed."""
    connection = connections[using]

    def stored(name: str, value: Any) -> Any:
        return _FIELDS[name].get_db_prep_save(value, connection)

    expected = states.expected("complete")
    # What they have in common is prepared once: that takes longer than to write it.
    common = {
        "state": states.RESULT_OF["complete"],
        "finished_at": stored("finished_at", now),
        "error": "",
        "lease_token": "",
        "lease_expires_at": None,
    }
    shared = [*common.values()]
    conditions = [*expected, *([] if token is None else [token])]
    jobs = [(job, outcome) for outcome in done if (job := outcome.job) is not None]
    expiry = {
        ttl: stored("result_expires_at", now + timedelta(milliseconds=ttl))
        for ttl in {job.result_ttl for job, _ in jobs}
    }
    rows = [
        (
            *shared,
            outcome.attempt,
            stored("started_at", outcome.started_at),
            None if outcome.value is None else stored("result", outcome.value),
            expiry[job.result_ttl],
            stored("id", job.id),
            job.generation,
            *conditions,
        )
        for job, outcome in jobs
    ]
    names = (*common, "attempts", "started_at", "result", "result_expires_at")
    assignments = ", ".join(f"{connection.ops.quote_name(name)} = %s" for name in names)
    places = ", ".join(["%s"] * len(expected))
    held = "" if token is None else " AND lease_token = %s"
    with connection.cursor() as cursor:
        cursor.executemany(
            f"UPDATE kjo_job SET {assignments} "  # noqa: S608 - names of ours
            f"WHERE id = %s AND generation = %s AND state IN ({places}){held}",
            rows,
        )
        return int(cursor.rowcount)


_FIELDS = {field.attname: field for field in Job._meta.concrete_fields}


# What is asked of a row is hidden from the planner in a CASE. Statistics that say that hardly a row
# is open, or holds this lease, made it begin with those and compare each with each of the group's.
# The ids stand there twice so that it looks them up, and reads no small table from end to end.
_COMPLETE = """
UPDATE kjo_job SET state = 'completed', attempts = v.attempts, started_at = v.started_at,
    finished_at = %s, result = v.result, error = '', lease_token = '', lease_expires_at = NULL,
    result_expires_at = %s::timestamptz + kjo_job.result_ttl * interval '1 millisecond',
    topic = COALESCE(v.topic, kjo_job.topic), partition = COALESCE(v.partition, kjo_job.partition),
    "offset" = COALESCE(v.position, kjo_job."offset"),
    queued_at = COALESCE(v.queued_at, kjo_job.queued_at)
FROM unnest(%s::uuid[], %s::int[], %s::int[], %s::timestamptz[], %s::bytea[],
            %s::text[], %s::int[], %s::bigint[], %s::timestamptz[])
    AS v (id, generation, attempts, started_at, result, topic, partition, position, queued_at)
WHERE kjo_job.id = ANY(%s::uuid[]) AND kjo_job.id = v.id AND CASE
    WHEN kjo_job.generation = v.generation AND kjo_job.state = ANY(%s)
        AND (%s::text IS NULL OR kjo_job.lease_token = %s) THEN true ELSE false END
"""


def _complete_at_once(
    using: str, done: Sequence[Outcome], now: datetime, token: str | None, *, commits: bool
) -> set[Any]:
    """The same for PostgreSQL, in one round trip however many there are."""
    jobs = [(job, outcome) for outcome in done if (job := outcome.job) is not None]
    values = [outcome.value for _, outcome in jobs]
    columns: list[Any] = [
        text_array([job.id_text for job, _ in jobs]),
        array_text(job.generation for job, _ in jobs),
        array_text(outcome.attempt for _, outcome in jobs),
        array_text(outcome.started_at for _, outcome in jobs),
        # Of arrays that end early, unnest takes NULL for the rest.
        "{}" if values.count(None) == len(values) else values,
        *_publications(jobs),
    ]
    with connections[using].cursor() as cursor:
        open_states = text_array(states.expected("complete"))
        parameters = [now, now, *columns, columns[0], open_states, token, token]
        if commits:
            execute_last(connections[using], cursor, _COMPLETE, parameters)
        else:
            cursor.execute(_COMPLETE, parameters)
        changed = cursor.rowcount
    return _recorded(using, {job.id for job, _ in jobs}, changed, now)


def _publications(jobs: Sequence[tuple[JobRow, Outcome]]) -> Sequence[Any]:
    """Return a column for each field of a publication; empty where all have been noted, as they
    have been in a backlog."""
    if not any(job.state in _AWAITING for job, _ in jobs):
        return ("{}",) * len(_PUBLICATION)
    each = [publication(outcome) for _, outcome in jobs]
    return [[one.get(name) for one in each] for name in _PUBLICATION]


_PUBLICATION = ("topic", "partition", "offset", "queued_at")


def _recorded(using: str, ids: set[Any], changed: int, now: datetime) -> set[Any]:
    """Return which of these were recorded at this moment; nearly always all."""
    if changed == len(ids):
        return ids
    recorded = Job.objects.using(using).filter(pk__in=ids, finished_at=now)
    return set(recorded.filter(state=JobState.COMPLETED).values_list("pk", flat=True))
