"""Judging failures and writing them down. An acknowledgement follows only what is durable here."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import Any

from django.db import OperationalError, connections, transaction
from django.utils import timezone

from kjo_django import states
from kjo_django.backends import get_transport
from kjo_django.conf import get_settings
from kjo_django.engine import queue_policies
from kjo_django.engine.admission import spent_and_limit
from kjo_django.engine.attempt import Delivery, Outcome, Result
from kjo_django.engine.completion import publication
from kjo_django.engine.dead_lettering import (
    dead_letter_of,
    error_facts,
    error_text,
    origin_headers,
    reason_of,
    record_for_topic,
    source_id,
    traceback_text,
)
from kjo_django.engine.handler.call import ENDINGS, is_interrupt
from kjo_django.engine.handler.connections import is_unusable
from kjo_django.engine.handler.context import facts_of
from kjo_django.engine.job_rows import load_rows, row_id
from kjo_django.enqueue import dispatch
from kjo_django.enqueue.storing import only_in_rows, row_key
from kjo_django.exceptions import MessageError, PublishError, StalledError
from kjo_django.ids import uuid7
from kjo_django.messages import headers as names
from kjo_django.messages.envelope import Message
from kjo_django.messages.serializers import storable_text
from kjo_django.models import DeadLetter, DeadLetterReason, Job, JobFailure, transition
from kjo_django.models.job import ORIGIN_ID
from kjo_django.registry import Handler
from kjo_django.retries import Backoff, Decision, RetryPolicy
from kjo_django.retries.classification import import_path
from kjo_django.store import store_for
from kjo_django.store.transactions import jobs_database
from kjo_django.transports.base import Record

logger = logging.getLogger("kjo_django")


def policy(handler: Handler | None = None, queue: str = "") -> RetryPolicy:
    """Return the retry policy: the handler's own back-off if it has one, else what an operator
    asked of the queue, else the settings'."""
    conf = get_settings()
    own = handler.options.backoff if handler is not None else None
    base = queue_policies.policy_of(queue).backoff_base or conf.backoff_base
    return RetryPolicy(
        own or Backoff(base, max(base, conf.backoff_max), conf.backoff_jitter),
        conf.error_recovery_delays,
        conf.pausable_errors,
    )


def judge_failure(outcome: Outcome, max_attempts: int) -> None:
    """Turn a failed attempt into a retry or a death, in place."""
    error = outcome.error
    assert error is not None
    queue = outcome.delivery.queue.name
    try:
        # Asked again: an operator may have changed it since the attempt began.
        limit = queue_policies.limit_of(queue, max_attempts, outcome.attempt - 1)
        decision = policy(outcome.delivery.handler, queue).decide(error, outcome.attempt, limit)
    except Exception:
        # A back-off of somebody's own, or an error that raises when it is looked at. Were the
        # attempt not counted, the job would run for ever.
        logger.exception("An error could not be judged, it is retried", extra=_facts(outcome))
        decision = _undisturbed(outcome.attempt, max_attempts)
    if decision.pause is not None:
        outcome.pause_seconds = decision.pause.total_seconds()
    if decision.retry:
        outcome.result = Result.RETRIED
        outcome.retry_at = timezone.now() + decision.delay
    else:
        outcome.result = Result.DEAD
        outcome.reason = decision.reason
        if isinstance(error, MessageError) and error.reason in DeadLetterReason.values:
            outcome.reason = error.reason


def _undisturbed(attempt: int, max_attempts: int) -> Decision:
    """Decide by the number of attempts and the settings alone."""
    if attempt >= max_attempts:
        return Decision(False, timedelta(0), None, "exhausted")
    conf = get_settings()
    backoff = Backoff(conf.backoff_base, conf.backoff_max, conf.backoff_jitter)
    return Decision(True, backoff.delay(attempt), None, "retry")


def publish_dead(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Send the dead to their dead-letter topics and wait for the reports; first of the two steps of
    dead-lettering, so that a crash between them repeats a record, never loses one (KII-F3). What
    has its row already was delivered again after a crash: it is not published again.

    Transports without replay keep nothing to read there: the row alone is their dead letter.

    :returns: those whose record was refused; they must not be acknowledged.
    """
    refused = []
    by_transport: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        transport = get_transport(outcome.delivery.queue.transport)
        if transport.capabilities.replay and not outcome.notes.get("is_published"):
            by_transport.setdefault(outcome.delivery.queue.transport, []).append(outcome)
    _note_published([outcome for dead in by_transport.values() for outcome in dead])
    for alias, dead in by_transport.items():
        dead = [outcome for outcome in dead if not outcome.notes.get("is_published")]
        try:
            answers = dispatch.publish(
                get_transport(alias), [record_for_topic(outcome) for outcome in dead]
            )
        except PublishError as error:
            logger.error("Dead letters not published, trying again: %s", error)
            refused.extend(dead)
            continue
        for outcome, answer in zip(dead, answers, strict=True):
            # One the topic can never take must not hold up what comes behind it: the row has all.
            outcome.notes["is_published"] = answer.error is None or answer.is_final
            if answer.is_final:
                why = "A dead letter is kept in the table alone: %s"
                logger.error(why, answer.error, extra=_facts(outcome))
            elif answer.error is not None:
                why = "A dead letter was not published, trying again: %s"
                logger.error(why, answer.error, extra=_facts(outcome))
                refused.append(outcome)
    return refused


def _note_published(dead: Sequence[Outcome]) -> None:
    """Note which of the dead have a dead letter's row: that is written after its record."""
    sources = {_source_of(outcome): outcome for outcome in dead}
    letters = DeadLetter.objects.using(jobs_database()).filter(source_id__in=sources)
    for source in letters.values_list("source_id", flat=True) if sources else ():
        sources[source].notes["is_published"] = True


def _source_of(outcome: Outcome) -> str:
    message, job = outcome.delivery.message, outcome.job
    job_id = None if job is None else job.id
    return source_id(outcome.delivery, job_id, message.generation if message else 1)


def record_lost_attempts(using: str, delivery: Delivery) -> None:
    """Write a failure for each attempt that was begun and has no outcome: its worker died."""
    row = load_rows(using, [delivery], lock=False).get(
        row_id(delivery, get_settings().service_name)
    )
    if row is None or row.state not in states.OPEN:
        return
    spent, limit = spent_and_limit(delivery, row)
    # That of the last attempt is written with the dead letter.
    lost = range(spent + 1, min(spent + delivery.deliveries, limit))
    failures = JobFailure.objects.using(using)
    known = set(
        failures.filter(job_id=row.id, generation=row.generation, attempt__in=lost).values_list(
            "attempt", flat=True
        )
    )
    failures.bulk_create(
        JobFailure(
            job_id=row.id,
            generation=row.generation,
            attempt=attempt,
            error_type=import_path(StalledError),
            error="Its worker died or froze during this attempt, or could not record its outcome",
        )
        for attempt in lost
        if attempt not in known
    )


def record_failures(using: str, outcomes: Sequence[Outcome], worker: str) -> None:
    """Write retries, deaths and cancellations in the caller's transaction: the failure, the job,
    the dead letter, and on a transactional transport the retry's message."""
    # A transaction that has read would be refused its first write on a busy SQLite.
    store_for(using).take_write_lock()
    now = timezone.now()
    failures, letters = [], []
    for outcome in outcomes:
        if _was_recorded(using, outcome):
            continue
        job_id, is_current = _record_job(using, outcome, now)
        if not is_current:
            # Cancelled or requeued meanwhile: the row tells, nothing is to be added.
            outcome.result, outcome.reason = Result.SKIPPED, "changed"
            continue
        if job_id is not None and outcome.result in (Result.RETRIED, Result.DEAD):
            failures.append(_failure(outcome, job_id, now, worker))
        _tell_handler(using, outcome)
        if is_unusable(connections[using]):
            # What comes now would be committed without what was before it.
            raise OperationalError("The transaction was lost while a handler was told of a failure")
        if outcome.result is Result.DEAD:
            letter = dead_letter_of(outcome, job_id, now)
            outcome.notes["dead_letter_id"] = str(letter.pk)
            letters.append(letter)
    JobFailure.objects.using(using).bulk_create(failures)
    DeadLetter.objects.using(using).bulk_create(letters, ignore_conflicts=True)
    for outcome in outcomes:
        if outcome.result is Result.DEAD:
            logger.error("Dead-lettered %s", reason_of(outcome), extra=_facts(outcome))


def _was_recorded(using: str, outcome: Outcome) -> bool:
    """Return whether a transaction that wrote this failure was committed, although its COMMIT was
    not answered: it is to be announced like any other."""
    job = outcome.job
    if outcome.delivery.ending is not outcome:
        return False  # it is written for the first time
    if job is None:
        born = outcome.notes.get("born")
        # Not the row that sent the message, whose id the new one takes.
        rows = Job.objects.using(using).filter(destination="")
        return born is not None and rows.filter(pk=born).exists()
    rows = Job.objects.using(using).at(job.id, job.generation)
    state = rows.filter(attempts=outcome.attempt).values_list("state", flat=True).first()
    if outcome.result is Result.RETRIED:
        return state in states.OPEN
    return state == states.RESULT_OF[_ACTIONS[outcome.result]]


def _facts(outcome: Outcome) -> dict[str, Any]:
    return facts_of(outcome.delivery, outcome.attempt)


def _tell_handler(using: str, outcome: Outcome) -> None:
    handler = outcome.delivery.handler
    if handler is None or not handler.observes:
        return
    try:
        with transaction.atomic(using=using):
            handler.on_failure(outcome)
    except ENDINGS as error:
        if is_interrupt(error):
            raise
        logger.exception("The failure hook of %s failed", handler.name, extra=_facts(outcome))


_ACTIONS = {Result.RETRIED: "retry", Result.DEAD: "fail", Result.CANCELLED: "cancel"}


def _record_job(using: str, outcome: Outcome, now: datetime) -> tuple[Any, bool]:
    """Bring the job's row to the outcome; return its id and whether the row was still ours."""
    job, delivery = outcome.job, outcome.delivery
    action = _ACTIONS[outcome.result]
    is_retry = action == "retry"
    changes: dict[str, Any] = {
        "attempts": outcome.attempt,
        "error": error_text(outcome.error),
        "started_at": outcome.started_at,
        "lease_token": "",
        "lease_expires_at": None,
    }
    if is_retry:
        changes["available_at"] = outcome.retry_at
    else:
        changes["finished_at"] = now
    if job is None:
        if delivery.message is None:
            return None, True
        row = _birth(using, outcome, changes, now)
        if row is None:
            return None, True
        outcome.notes["born"] = row.pk
        rows = Job.objects.using(using)
        rows.bulk_create([row], ignore_conflicts=True)
        if not rows.filter(pk=row.pk).exists():
            # Another worker had the message meanwhile, and its row was born first.
            return None, False
        if is_retry:
            _send_retry(using, row)
        return row.pk, True
    if not is_retry:
        changes["result_ttl"] = outcome.notes.get("result_ttl", job.result_ttl)
        changes["result_expires_at"] = now + timedelta(milliseconds=changes["result_ttl"])
    changes.update(publication(outcome))
    if names.TRACE_FOLLOWS in delivery.record.headers:
        # Left there for the next attempt, whoever makes its message.
        own = delivery.record.headers.items()
        kept = {name: value for name, value in own if name not in names.OF_A_MESSAGE}
        changes["headers"] = _headers_for_row(kept, delivery.record)
    rows = Job.objects.using(using).at(job.id, job.generation).filter(attempts=job.attempts)
    if "lease_token" in outcome.notes:
        # "" of one that was given back, while its dead letter was refused.
        rows = rows.filter(lease_token__in=("", outcome.notes["lease_token"]))
    changed = transition(action, rows, **changes)
    if changed and is_retry:
        _send_retry(using, Job.objects.using(using).get(pk=job.id))
    return job.id, bool(changed)


def _send_retry(using: str, job: Job) -> None:
    """Hand a retry over: published for its time where the transport can, else left to the relay,
    which finds it by ``available_at``."""
    queue = get_settings().queue(job.queue)
    if dispatch.is_transactional(queue):
        dispatch.hand_over([job], queue)


def _birth(using: str, outcome: Outcome, changes: dict[str, Any], now: datetime) -> Job | None:
    """Return the row of a foreign message's first failure; None where a dead letter says it all.

    Where a row of this service sent the message, as a stream's producer does, this one takes its
    place and id: people see one row for one task, and its state is the task's.
    """
    delivery, message, record = outcome.delivery, outcome.delivery.message, outcome.delivery.record
    handler = delivery.handler
    assert message is not None
    if handler is None:
        return None
    id = _id_for(using, message, record)
    was_sent_here = False
    if str(id) == message.id:
        rows = Job.objects.using(using).filter(pk=id, destination=record.topic)
        was_sent_here = bool(rows.delete()[0])
    is_retry = outcome.result is Result.RETRIED
    if not is_retry and not was_sent_here:
        return None
    queue = delivery.queue
    # Its headers travel on with the retry, whoever set them, but for what only rows say. And where
    # it was read: its dead letter is to name where it came from, not where its last retry was.
    not_theirs = {ORIGIN_ID, names.ORIGIN_ENVELOPE, *names.OF_A_ROW}
    theirs = {name: value for name, value in record.headers.items() if name not in not_theirs}
    headers = _headers_for_row({**origin_headers(record), **theirs}, record)
    if str(id) != message.id:
        headers[ORIGIN_ID] = message.id
    ttl = handler.result_ttl(queue) // timedelta(milliseconds=1)
    if not is_retry:
        changes["result_expires_at"] = now + timedelta(milliseconds=ttl)
    if message.lease_id:
        # The item is the key: the retry goes to the item's own partition.
        headers.pop(names.RAW_KEY, None)
        headers.pop(names.NO_KEY, None)
    row = Job(
        id=id,
        queue=queue.retries,
        handler=message.type,
        unique_id=message.row_name,
        key=storable_text(message.lease_id, 255) if message.lease_id else row_key(record.key),
        state=states.RESULT_OF[_ACTIONS[outcome.result]],
        max_attempts=handler.max_attempts(queue),
        payload=message.payload,
        content_type=storable_text(message.content_type, 50),
        headers=headers or None,
        created_at=message.timestamp or now,
        result_ttl=ttl,
        topic=delivery.record.topic,
        partition=delivery.record.partition,
        offset=delivery.record.offset,
        **changes,
    )
    sent = dispatch.record_of(row, get_settings().queue(row.queue)).headers
    if envelope := names.origin_envelope(theirs, sent):
        row.headers = {**(row.headers or {}), **names.for_row(envelope)}
    return row


def _headers_for_row(headers: Mapping[str, bytes], record: Record) -> dict[str, Any]:
    """Return what a row keeps of a message's headers, and of its key and value what the columns do
    not."""
    return names.for_row({**names.in_order(headers), **only_in_rows(record.key, record.value)})


def _id_for(using: str, message: Message, record: Record) -> uuid.UUID:
    """Return the message's id for its row, or a fresh one: others name their messages as they like,
    also by the id of a job that exists. Not counting the row that sent this very message."""
    if not message.unique_id:
        try:
            id = uuid.UUID(message.id)
        except ValueError:
            return uuid7()
        others = Job.objects.using(using).filter(pk=id).exclude(destination=record.topic)
        if not others.exists():
            return id
    return uuid7()


def _failure(outcome: Outcome, job_id: Any, now: datetime, worker: str) -> JobFailure:
    error = outcome.error
    message = outcome.delivery.message
    code, details = error_facts(error)
    return JobFailure(
        job_id=job_id,
        generation=message.generation if message else 1,
        attempt=outcome.attempt,
        worker=worker[:255],
        error_type=storable_text(import_path(type(error)), 255) if error else "",
        error=error_text(error),
        code=code,
        details=details,
        traceback=traceback_text(error),
        started_at=outcome.started_at,
        failed_at=now,
        retry_at=outcome.retry_at,
    )


def in_transaction(using: str) -> AbstractContextManager[None]:
    """Return the transaction outcomes are written in.

    A worker's is always the outermost. Within a test's own, a savepoint keeps a failure from
    breaking that one.
    """
    return store_for(using).transaction()
