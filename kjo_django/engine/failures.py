"""Judging failures and writing them down. An acknowledgement follows only what is durable here."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import OperationalError, connections, transaction
from django.utils import timezone

from kjo_django import states
from kjo_django.conf import get_settings
from kjo_django.engine import queue_policies
from kjo_django.engine.admission import spent_and_limit
from kjo_django.engine.attempt import Attempt, Delivery, Ending
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
from kjo_django.engine.handler.call import ENDINGS, Ran, is_interrupt
from kjo_django.engine.handler.connections import is_unusable
from kjo_django.engine.handler.context import Abort, facts_of
from kjo_django.engine.job_rows import load_rows, row_id
from kjo_django.enqueue import storing
from kjo_django.enqueue.storing import only_in_rows, row_key
from kjo_django.exceptions import (
    CoordinationError,
    JobCancelledError,
    MessageError,
    PublishError,
    StalledError,
)
from kjo_django.ids import uuid7
from kjo_django.messages import headers as names
from kjo_django.messages.headers import Message
from kjo_django.messages.serializers import storable_text
from kjo_django.models import DeadLetter, DeadLetterReason, Job, JobFailure, transition
from kjo_django.models.job import ORIGIN_ID
from kjo_django.registry import Handler
from kjo_django.retries import Backoff, Decision, RetryPolicy, import_path
from kjo_django.runtime import Runtime, get_coordination, get_transport, jobs_database
from kjo_django.store import store_for
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


def judge(attempt: Attempt, ran: Ran) -> Attempt:
    """Note how the handler's call ended, and decide what the attempt ends with."""
    attempt.started_at, attempt.seconds = ran.started_at, ran.seconds
    attempt.result, attempt.error, attempt.result_ttl = ran.value, ran.error, ran.result_ttl
    if ran.error is None:
        attempt.ending = Ending.COMPLETED
    elif ran.abort_reason is Abort.CANCELLED:
        attempt.ending, attempt.reason = Ending.CANCELLED, "aborted"
    elif isinstance(ran.error, JobCancelledError) and ran.abort_reason in _HANDED_BACK:
        # It obeyed: what it did is undone, and the attempt is not spent.
        attempt.ending, attempt.reason = Ending.DEFERRED, "interrupted"
    else:
        judge_error(attempt)
    return attempt


_HANDED_BACK = (Abort.SHUTDOWN, Abort.LOST)


def judge_error(attempt: Attempt, error: BaseException | None = None) -> Attempt:
    """Decide whether a failed attempt is followed by another one or by the job's death.

    :param error: what it failed with; its own if not given.
    """
    if error is not None:
        attempt.error, attempt.result = error, None
    error = attempt.error
    assert error is not None
    queue = attempt.delivery.queue.name
    try:
        # Asked again: an operator may have changed it since the attempt began.
        limit = queue_policies.limit_of(queue, attempt.limit, attempt.number - 1)
        decision = policy(attempt.delivery.handler, queue).decide(error, attempt.number, limit)
    except Exception:
        # A back-off of somebody's own, or an error that raises when it is looked at. Were the
        # attempt not counted, the job would run for ever.
        logger.exception("An error could not be judged, it is retried", extra=_facts(attempt))
        decision = _by_settings(attempt.number, attempt.limit)
    if decision.pause is not None:
        attempt.pause_seconds = decision.pause.total_seconds()
    if decision.retry:
        attempt.ending = Ending.RETRIED
        attempt.retry_at = timezone.now() + decision.delay
    else:
        attempt.ending = Ending.DEAD
        attempt.reason = decision.reason
        if isinstance(error, MessageError) and error.reason in DeadLetterReason.values:
            attempt.reason = error.reason
    return attempt


def _by_settings(attempt: int, limit: int) -> Decision:
    """Decide by the number of attempts and the settings alone."""
    if attempt >= limit:
        return Decision(False, timedelta(0), None, "exhausted")
    conf = get_settings()
    backoff = Backoff(conf.backoff_base, conf.backoff_max, conf.backoff_jitter)
    return Decision(True, backoff.delay(attempt), None, "retry")


PAUSE_KEPT_BEYOND = timedelta(days=7)
"""How long the moment is remembered after the budget is used up: time for the attempts left."""


def keeps_place(attempt: Attempt) -> bool:
    """Return whether a failed attempt that pauses its partition leaves its message where it is, its
    attempt unspent: for ``KJO["PAUSE_BUDGET"]`` from the message's first pause on."""
    message = attempt.delivery.message
    if attempt.pause_seconds is None or message is None:
        return False
    conf, now = get_settings(), timezone.now()
    began_at = _paused_since(
        attempt.delivery, message.id, now, conf.pause_budget + PAUSE_KEPT_BEYOND
    )
    if now - began_at >= conf.pause_budget:
        return False
    # An error of no class in particular has no delay of its own.
    attempt.pause_seconds = attempt.pause_seconds or conf.backoff_base.total_seconds()
    return True


def _paused_since(delivery: Delivery, message_id: str, now: datetime, ttl: timedelta) -> datetime:
    """Return when the message was paused first: now, if it never was.

    The moment is a mark in coordination, which foreign messages can have as well as jobs with a
    row, and which outlives the worker. Where it is lost the time begins anew.
    """
    if delivery.paused_since is None:
        name = f"PAUSED:{delivery.queue.key_prefix}:{message_id}"
        delivery.paused_since = now
        try:
            found = get_coordination().get_marks([name]).get(name)
            if found is None:
                get_coordination().set_marks({name: now.isoformat()}, ttl)
            else:
                delivery.paused_since = datetime.fromisoformat(found)
        except (CoordinationError, ValueError) as error:
            logger.warning("When %s was paused first is known to this worker only: %s", name, error)
    return delivery.paused_since


def publish_dead_letters(attempts: Iterable[Attempt]) -> None:
    """Send the dead to their dead-letter topics and wait for the reports; first of the two steps of
    dead-lettering, so that a crash between them repeats a record and never loses one. An attempt
    whose record is refused is left unpublished: it must not be acknowledged.

    What has its row already was delivered again after a crash: it is not published again. For
    transports without replay the row alone is the dead letter.
    """
    by_transport: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        if attempt.is_published:
            continue
        if get_transport(attempt.delivery.queue.transport).capabilities.replay:
            by_transport.setdefault(attempt.delivery.queue.transport, []).append(attempt)
        else:
            attempt.is_published = True
    _note_published([attempt for dead in by_transport.values() for attempt in dead])
    for alias, dead in by_transport.items():
        dead = [attempt for attempt in dead if not attempt.is_published]
        try:
            answers = storing.publish(
                get_transport(alias), [record_for_topic(attempt) for attempt in dead]
            )
        except PublishError as error:
            logger.error("Dead letters not published, trying again: %s", error)
            continue
        for attempt, answer in zip(dead, answers, strict=True):
            # One the topic can never take must not hold up what comes behind it: the row has all.
            attempt.is_published = answer.error is None or answer.is_final
            if answer.is_final:
                why = "A dead letter is kept in the table alone: %s"
                logger.error(why, answer.error, extra=_facts(attempt))
            elif answer.error is not None:
                why = "A dead letter was not published, trying again: %s"
                logger.error(why, answer.error, extra=_facts(attempt))


def _note_published(dead: Sequence[Attempt]) -> None:
    """Note which of the dead have a dead letter's row: that is written after its record."""
    sources = {_source_of(attempt): attempt for attempt in dead}
    letters = DeadLetter.objects.using(jobs_database()).filter(source_id__in=sources)
    for source in letters.values_list("source_id", flat=True) if sources else ():
        sources[source].is_published = True


def _source_of(attempt: Attempt) -> str:
    message, job = attempt.delivery.message, attempt.row
    job_id = None if job is None else job.id
    return source_id(attempt.delivery, job_id, message.generation if message else 1)


def record_lost_attempts(runtime: Runtime, delivery: Delivery) -> None:
    """Write a failure for each attempt that was begun and has no outcome: its worker died."""
    using = runtime.database
    row = load_rows(runtime, [delivery], lock=False).get(row_id(delivery, runtime.service))
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


def record_failures(using: str, attempts: Sequence[Attempt], worker: str) -> None:
    """Write retries, deaths and cancellations in the caller's transaction: the failure, the job,
    the dead letter, and on a transactional transport the retry's message."""
    # A transaction that has read would be refused its first write on a busy SQLite.
    store_for(using).take_write_lock()
    now = timezone.now()
    failures, letters = [], []
    for attempt in attempts:
        if _was_recorded(using, attempt):
            continue
        job_id, is_current = _record_job(using, attempt, now)
        if not is_current:
            # Cancelled or requeued meanwhile: the row tells, nothing is to be added.
            attempt.ending, attempt.reason = Ending.SKIPPED, "changed"
            continue
        if job_id is not None and attempt.ending in (Ending.RETRIED, Ending.DEAD):
            failures.append(_failure(attempt, job_id, now, worker))
        _call_hook(using, attempt)
        if is_unusable(connections[using]):
            # What comes now would be committed without what was before it.
            raise OperationalError("The transaction was lost while a handler was told of a failure")
        if attempt.ending is Ending.DEAD:
            letter = dead_letter_of(attempt, job_id, now)
            attempt.dead_letter_id = str(letter.pk)
            letters.append(letter)
    JobFailure.objects.using(using).bulk_create(failures)
    DeadLetter.objects.using(using).bulk_create(letters, ignore_conflicts=True)
    for attempt in attempts:
        if attempt.ending is Ending.DEAD:
            logger.error("Dead-lettered %s", reason_of(attempt), extra=_facts(attempt))


def _was_recorded(using: str, attempt: Attempt) -> bool:
    """Return whether a transaction that wrote this failure was committed, although its COMMIT was
    not answered: it is to be announced like any other."""
    job = attempt.row
    if not attempt.is_in_doubt:
        return False  # it is written for the first time
    if job is None:
        born = attempt.born_id
        # Not the row that sent the message, whose id the new one takes.
        rows = Job.objects.using(using).filter(destination="")
        return born is not None and rows.filter(pk=born).exists()
    rows = Job.objects.using(using).at(job.id, job.generation)
    state = rows.filter(attempts=attempt.number).values_list("state", flat=True).first()
    if attempt.ending is Ending.RETRIED:
        return state in states.OPEN
    return state == states.RESULT_OF[_ACTIONS[attempt.ending]]


def _facts(attempt: Attempt) -> dict[str, Any]:
    return facts_of(attempt.delivery, attempt.number)


def _call_hook(using: str, attempt: Attempt) -> None:
    handler = attempt.delivery.handler
    if handler is None or not handler.observes:
        return
    try:
        with transaction.atomic(using=using):
            handler.on_failure(attempt)
    except ENDINGS as error:
        if is_interrupt(error):
            raise
        logger.exception("The failure hook of %s failed", handler.name, extra=_facts(attempt))


_ACTIONS: dict[Ending | None, str] = {
    Ending.RETRIED: "retry",
    Ending.DEAD: "fail",
    Ending.CANCELLED: "cancel",
}


def _record_job(using: str, attempt: Attempt, now: datetime) -> tuple[Any, bool]:
    """Write the attempt's ending into its row; return its id and whether the row was still ours."""
    job, delivery = attempt.row, attempt.delivery
    action = _ACTIONS[attempt.ending]
    is_retry = action == "retry"
    changes: dict[str, Any] = {
        "attempts": attempt.number,
        "error": error_text(attempt.error),
        "started_at": attempt.started_at,
        "lease_token": "",
        "lease_expires_at": None,
    }
    if is_retry:
        changes["available_at"] = attempt.retry_at
    else:
        changes["finished_at"] = now
    if job is None:
        if delivery.message is None:
            return None, True
        row = _birth(using, attempt, changes, now)
        if row is None:
            return None, True
        attempt.born_id = row.pk
        rows = Job.objects.using(using)
        rows.bulk_create([row], ignore_conflicts=True)
        if not rows.filter(pk=row.pk).exists():
            # Another worker had the message meanwhile, and its row was born first.
            return None, False
        if is_retry:
            _send_retry(using, row)
        return row.pk, True
    if not is_retry:
        changes["result_ttl"] = job.result_ttl if attempt.result_ttl is None else attempt.result_ttl
        changes["result_expires_at"] = now + timedelta(milliseconds=changes["result_ttl"])
    changes.update(publication(attempt))
    if names.TRACE_FOLLOWS in delivery.record.headers:
        # Left there for the next attempt, whoever makes its message.
        own = delivery.record.headers.items()
        kept = {name: value for name, value in own if name not in names.OF_A_MESSAGE}
        changes["headers"] = _headers_for_row(kept, delivery.record)
    rows = Job.objects.using(using).at(job.id, job.generation).filter(attempts=job.attempts)
    if attempt.row_lease is not None:
        # "" of one that was given back, while its dead letter was refused.
        rows = rows.filter(lease_token__in=("", attempt.row_lease))
    changed = transition(action, rows, **changes)
    if changed and is_retry:
        _send_retry(using, Job.objects.using(using).get(pk=job.id))
    return job.id, bool(changed)


def _send_retry(using: str, job: Job) -> None:
    """Hand a retry over: published for its time where the transport can, else left to the relay,
    which finds it by ``available_at``."""
    queue = get_settings().queue(job.queue)
    if storing.is_transactional(queue):
        storing.dispatch_jobs([job], queue)


def _birth(using: str, attempt: Attempt, changes: dict[str, Any], now: datetime) -> Job | None:
    """Return the row of a foreign message's first failure; None where a dead letter says it all.

    Where a row of this service sent the message, as a stream's producer does, this one takes its
    place and id: people see one row for one task, and its state is the task's.
    """
    delivery, message, record = attempt.delivery, attempt.delivery.message, attempt.delivery.record
    handler = delivery.handler
    assert message is not None
    if handler is None:
        return None
    id = _id_for(using, message, record)
    was_sent_here = False
    if str(id) == message.id:
        rows = Job.objects.using(using).filter(pk=id, destination=record.topic)
        was_sent_here = bool(rows.delete()[0])
    is_retry = attempt.ending is Ending.RETRIED
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
        state=states.RESULT_OF[_ACTIONS[attempt.ending]],
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
    sent = storing.record_of(row, get_settings().queue(row.queue)).headers
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


def _failure(attempt: Attempt, job_id: Any, now: datetime, worker: str) -> JobFailure:
    error = attempt.error
    message = attempt.delivery.message
    code, details = error_facts(error)
    return JobFailure(
        job_id=job_id,
        generation=message.generation if message else 1,
        attempt=attempt.number,
        worker=worker[:255],
        error_type=storable_text(import_path(type(error)), 255) if error else "",
        error=error_text(error),
        code=code,
        details=details,
        traceback=traceback_text(error),
        started_at=attempt.started_at,
        failed_at=now,
        retry_at=attempt.retry_at,
    )
