"""What becomes of failures: judging them, writing them down, and their dead letters.

An acknowledgement follows only what is durable here. A dead letter holds the message as it was, and
why it died.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from django.db import IntegrityError, OperationalError, connections, transaction

from kjo_django import states
from kjo_django.clock import CLOCK
from kjo_django.conf import priority_of
from kjo_django.engine.admission import limit_of, load_rows
from kjo_django.engine.attempt import (
    UNWANTED,
    Abort,
    Attempt,
    Delivery,
    Ending,
    Reason,
    RefusedRecord,
)
from kjo_django.engine.handler.call import call_watched
from kjo_django.engine.handler.connections import is_pristine
from kjo_django.engine.handler.context import facts_of
from kjo_django.engine.handler.job_log import log_of
from kjo_django.engine.recorder import end_lost, publication
from kjo_django.enqueue import storing
from kjo_django.enqueue.storing import only_in_rows, row_key
from kjo_django.exceptions import (
    CoordinationError,
    JobCancelledError,
    MessageError,
    PublishError,
    StalledError,
    TransactionEndedError,
    import_path,
    is_ctrl_c,
)
from kjo_django.failure_facts import FailureFacts
from kjo_django.ids import uuid7
from kjo_django.limits import lines
from kjo_django.logs import get_logger
from kjo_django.messages import headers as names
from kjo_django.messages.headers import Message
from kjo_django.messages.serializers import storable_text
from kjo_django.models import (
    ORIGIN_ID,
    UNKNOWN_HANDLER,
    DeadLetter,
    DeadLetterReason,
    Job,
    JobFailure,
    source_of_job,
    transition,
)
from kjo_django.registry import Handler
from kjo_django.retries import Backoff, Decision, RetryPolicy
from kjo_django.runtime import Runtime, get_transport
from kjo_django.store.rows import JobRow
from kjo_django.transports.base import OutgoingRecord, Record, Transport
from kjo_django.workflows.countdown import count_ended

logger = get_logger("kjo_django")

MAX_TOPIC = 249
MAX_HEADER_MESSAGE = 1_000
MAX_HEADER_STACKTRACE = 4_000


def policy(runtime: Runtime, handler: Handler, queue: str) -> RetryPolicy:
    """Return the retry policy: the handler's own back-off if it has one, else what an operator
    asked of the queue, else the settings'."""
    conf, control = runtime.settings, runtime.queue_controls.get(queue)
    base = conf.backoff_base
    if control is not None and control.backoff_base:
        base = timedelta(seconds=control.backoff_base)
    own = handler.options
    return RetryPolicy(
        Backoff(base, max(base, conf.backoff_max), conf.backoff_jitter),
        conf.error_recovery_delays,
        conf.pausable_errors,
        own=own.backoff,
        retry_on=own.retry_on,
        give_up_on=own.give_up_on,
    )


def judge(runtime: Runtime, attempt: Attempt) -> Attempt:
    """Decide what an attempt ends with, given how the call of its handler ended: whether a failed
    one is followed by another, or by the job's death."""
    error = attempt.error
    if error is None:
        attempt.ending = Ending.COMPLETED
        return attempt
    attempt.result = None
    if attempt.abort_reason is Abort.CANCELLED:
        attempt.ending, attempt.reason = Ending.CANCELLED, "aborted"
        return attempt
    if isinstance(error, JobCancelledError) and attempt.abort_reason in UNWANTED:
        # It obeyed: what it did is undone, and the attempt is not spent.
        attempt.ending, attempt.reason = Ending.DEFERRED, Reason.INTERRUPTED
        return attempt
    decision = _decide(runtime, attempt, error)
    if decision.pause is not None:
        attempt.pause_seconds = decision.pause.total_seconds()
    if decision.retry:
        attempt.ending = Ending.RETRIED
        attempt.retry_at = CLOCK.now() + decision.delay
    else:
        attempt.ending = Ending.DEAD
        attempt.reason = decision.reason
        if isinstance(error, MessageError) and error.reason in DeadLetterReason.values:
            attempt.reason = error.reason
    return attempt


def _decide(runtime: Runtime, attempt: Attempt, error: BaseException) -> Decision:
    """Decide what follows a failed attempt."""
    conf, queue = runtime.settings, attempt.delivery.queue.name
    try:
        # Asked again: an operator may have changed it since the attempt began.
        limit = limit_of(runtime, queue, attempt.limit, attempt.number - 1)
        rules = policy(runtime, attempt.delivery.handler, queue)
        return rules.decide(error, attempt.number, limit, runtime.clock.now())
    except BaseException as raised:
        if is_ctrl_c(raised):
            raise
        # The error has raised when it was looked at. If the attempt did not count, the job would
        # run for ever.
        facts = facts_of(attempt.delivery, attempt.number)
        logger.exception("An error could not be judged, it is retried", extra=facts)
        if attempt.number >= attempt.limit:
            return Decision(False, timedelta(0), None, "exhausted")
        backoff = Backoff(conf.backoff_base, conf.backoff_max, conf.backoff_jitter)
        return Decision(True, backoff.delay(attempt.number), None, "retry")


def judge_error(runtime: Runtime, attempt: Attempt, error: BaseException) -> Attempt:
    """Decide what an attempt ends with that met an error outside of its handler."""
    attempt.error = error
    return judge(runtime, attempt)


PAUSE_KEPT_BEYOND = timedelta(days=7)
"""How long the moment is remembered after the budget is used up: time for the attempts left."""


def keeps_place(runtime: Runtime, attempt: Attempt) -> bool:
    """Return whether a failed attempt that pauses its partition leaves its message where it is, its
    attempt unspent: for ``KJO["PAUSE_BUDGET"]`` from the message's first pause on.

    That moment is a mark in coordination, which foreign messages can have as well as jobs with a
    row, and which outlives the worker. Where it is lost the time begins anew.
    """
    delivery, message = attempt.delivery, attempt.delivery.message
    if attempt.pause_seconds is None:
        return False
    conf, now, coordination = runtime.settings, CLOCK.now(), runtime.coordination
    if delivery.paused_since is None:
        name = f"PAUSED:{delivery.queue.key_prefix}:{message.id}"
        delivery.paused_since = now
        try:
            found = coordination.get_marks([name]).get(name)
            if found is None:
                ttl = conf.pause_budget + PAUSE_KEPT_BEYOND
                coordination.set_marks({name: now.isoformat()}, ttl)
            else:
                delivery.paused_since = datetime.fromisoformat(found)
        except (CoordinationError, ValueError) as error:
            logger.warning("When %s was paused first is known to this worker only: %s", name, error)
    if now - delivery.paused_since >= conf.pause_budget:
        return False
    # An error of no class in particular has no delay of its own.
    attempt.pause_seconds = attempt.pause_seconds or conf.backoff_base.total_seconds()
    return True


FIRST_WAIT, LONGEST_WAIT = timedelta(seconds=5), timedelta(minutes=1)
"""Between two looks whether a worker knows a handler now."""


def wait_for_handlers(runtime: Runtime, refused: Iterable[Attempt]) -> None:
    """Let jobs whose handler is not known here wait for a worker that knows it, for
    ``KJO["UNKNOWN_HANDLER_WAIT"]``: other processes may run the next release, which enqueues them.

    No attempt is spent. A wait is noted, announced and counted when it begins, as a failure of the
    attempt before, and not each time that the job comes up again.
    """
    wait = runtime.settings.unknown_handler_wait
    waiting = [
        (attempt, attempt.row)
        for attempt in refused
        if attempt.row is not None and attempt.reason == DeadLetterReason.UNKNOWN_TYPE
    ]
    if wait is None or not waiting:
        return
    ids = [row.id for _, row in waiting]
    waits = JobFailure.objects.using(runtime.database).filter(job_id__in=ids, **UNKNOWN_HANDLER)
    since: dict[tuple[Any, ...], datetime] = {}
    for *name, at in waits.values_list("job_id", "generation", "attempt", "failed_at"):
        since.setdefault(tuple(name), at)
    # Jobs of handlers that are known here must not stand in line behind them.
    lines.leave(runtime, {row.id: row.generation for _, row in waiting})
    now = CLOCK.now()
    for attempt, row in waiting:
        known = since.get((row.id, row.generation, row.attempts))
        until = (known or now) + wait
        if now >= until:
            continue
        attempt.ending, attempt.is_announced = Ending.RETRIED, known is not None
        pause = min(max(FIRST_WAIT, now - (known or now)), LONGEST_WAIT)
        attempt.retry_at = min(now + pause, until)
        text = f"{attempt.error}. It waits until {until:%F %T} UTC for a worker that knows it"
        attempt.error = MessageError(DeadLetterReason.UNKNOWN_TYPE, text)


# --- Recording ------------------------------------------------------------------------------------


def publish_dead_letters(runtime: Runtime, attempts: Iterable[Attempt]) -> None:
    """Send the dead to their dead-letter topics and wait for the reports; first of the two steps of
    dead-lettering, so that a crash between them repeats a record and never loses one. An attempt
    whose record is refused is left unpublished: it must not be acknowledged.

    What has its row already was delivered again after a crash: it is not published again. For
    transports without replay the row alone is the dead letter.
    """
    sources: dict[Attempt, str] = {}
    by_transport: dict[Transport, list[Attempt]] = {}
    for attempt in attempts:
        transport = get_transport(attempt.delivery.queue.transport)
        if attempt.is_published or not transport.capabilities.replay:
            attempt.is_published = True
            continue
        row_id = None if attempt.row is None else attempt.row.id
        sources[attempt] = source_id(attempt.delivery, row_id)
        by_transport.setdefault(transport, []).append(attempt)
    if not sources:
        return
    letters = DeadLetter.objects.using(runtime.database).filter(source_id__in=sources.values())
    known = set(letters.values_list("source_id", flat=True))
    for attempt, source in sources.items():
        attempt.is_published = source in known
    for transport, dead in by_transport.items():
        if unpublished := [each for each in dead if not each.is_published]:
            _publish_to(runtime, transport, unpublished)


def _publish_to(runtime: Runtime, transport: Transport, attempts: Sequence[Attempt]) -> None:
    """See ``publish_dead_letters``."""
    try:
        records = [record_for_topic(runtime, attempt) for attempt in attempts]
        answers = storing.publish(transport, records)
    except PublishError as error:
        logger.error("Dead letters not published, trying again: %s", error)
        return
    for attempt, answer in zip(attempts, answers, strict=True):
        # One the topic can never take must not hold up what comes behind it: the row has all.
        attempt.is_published = answer.error is None or answer.is_final
        if answer.error is not None:
            what = "in the table alone" if answer.is_final else "not published, trying again"
            facts = facts_of(attempt.delivery, attempt.number)
            logger.error("A dead letter is %s: %s", what, answer.error, extra=facts)


def record_lost_attempts(runtime: Runtime, orphans: Sequence[Delivery]) -> None:
    """Write a failure for each attempt that was begun and has no outcome: its worker died."""
    why = "Its worker died or froze during this attempt, or could not record its outcome"
    lost: dict[tuple[UUID, int, int], JobFailure] = {}
    for delivery, row in load_rows(runtime, orphans)[1].items():
        if row.state not in states.OPEN:
            continue
        limit = limit_of(runtime, delivery.queue.name, row.max_attempts, row.attempts)
        # That of the last attempt is written with the dead letter.
        for attempt in range(row.attempts + 1, min(row.attempts + delivery.deliveries, limit)):
            lost[row.id, row.generation, attempt] = JobFailure(
                job_id=row.id,
                generation=row.generation,
                attempt=attempt,
                error_type=import_path(StalledError),
                error=why,
            )
    failures = JobFailure.objects.using(runtime.database)
    known = failures.filter(job_id__in={id for id, _, _ in lost})
    for key in known.values_list("job_id", "generation", "attempt"):
        lost.pop(key, None)
    failures.bulk_create(lost.values())


def record_failures(runtime: Runtime, attempts: Sequence[Attempt], worker: str) -> None:
    """Write retries, deaths and cancellations in the caller's transaction: the failure, the job,
    the dead letter, and on a transactional transport the retry's message.

    What its row does not wait for any more is skipped, or deferred: see ``recorder.end_lost``.
    """
    using = runtime.database
    # A transaction that has read would be refused its first write on a busy SQLite.
    runtime.store.take_write_lock()
    now = CLOCK.now()
    failures: list[JobFailure] = []
    letters: list[DeadLetter] = []
    changed: list[Attempt] = []
    steps: list[tuple[Attempt, tuple[UUID, UUID, str]]] = []
    for attempt in attempts:
        if attempt.is_in_doubt and _was_recorded(using, attempt):
            continue
        attempt.announcements = ()
        job_id, is_current = _record_job(runtime, attempt, now)
        if not is_current:
            # Cancelled or requeued meanwhile: its row says so, nothing is to be added.
            attempt.ending, attempt.reason = Ending.SKIPPED, Reason.CHANGED
            changed.append(attempt)
            continue
        if (step := _ended_step(attempt)) is not None:
            steps.append((attempt, step))
        failures += _failed_attempt(attempt, job_id, now, worker)
        _call_failure_hook(using, attempt)
        if attempt.ending is Ending.DEAD:
            letter = dead_letter_of(runtime, attempt, job_id, now)
            attempt.dead_letter_id = str(letter.pk)
            letters.append(letter)
    if changed:
        end_lost(runtime.store, changed)
    JobFailure.objects.using(using).bulk_create(failures)
    if letters:
        runtime.store.insert_missing(letters)
    if steps:
        _count_ended_steps(runtime, steps)


def _count_ended_steps(
    runtime: Runtime, steps: Sequence[tuple[Attempt, tuple[UUID, UUID, str]]]
) -> None:
    announcements: list[Callable[[], object]] = []
    # One attempt announces what all of them have ended: they are committed together.
    steps[0][0].announcements = announcements
    count_ended(runtime, [step for _, step in steps], announce=announcements.append)


def _ended_step(attempt: Attempt) -> tuple[UUID, UUID, str] | None:
    """Return the step of a workflow that an attempt has ended: its stage, its job and the state
    that this has now."""
    job = attempt.row
    if attempt.ending is Ending.RETRIED or job is None or job.stage_id is None:
        return None
    return job.stage_id, job.id, states.RESULT_OF[_ACTIONS[attempt.ending]]


def _call_failure_hook(using: str, attempt: Attempt) -> None:
    """Call what the handler has for failed attempts, in the caller's transaction.

    :raises OperationalError: the transaction is not the same any more.
    """
    handler = attempt.delivery.handler
    if not handler.observes:
        return
    hook = transaction.atomic(using=using)(partial(handler.on_failure, attempt))
    facts = facts_of(attempt.delivery, attempt.number)
    call_watched(hook, f"The failure hook of {handler.name} failed", facts)
    if not is_pristine(connections[using]):
        # What comes now would be committed without what was before it.
        raise OperationalError("The transaction was lost while a failure hook was called")


def _was_recorded(using: str, attempt: Attempt) -> bool:
    """Return whether a transaction that wrote this failure was committed, although its COMMIT was
    not answered: it is to be announced like any other."""
    job = attempt.row
    if job is None:
        born = attempt.born_id
        # Not the row that sent the message, whose id the new one takes.
        rows = Job.objects.using(using).filter(destination="")
        return born is not None and rows.filter(pk=born).exists()
    rows = Job.objects.using(using).at(job.id, job.generation)
    rows = rows.filter(attempts=attempt.number)
    if attempt.number == job.attempts and attempt.retry_at is not None:
        rows = rows.filter(available_at=attempt.retry_at)  # it waits, and has spent no attempt
    state = rows.values_list("state", flat=True).first()
    if attempt.ending is Ending.RETRIED:
        return state in states.OPEN
    return state == states.RESULT_OF[_ACTIONS[attempt.ending]]


def failure_of(attempt: Attempt) -> FailureFacts:
    """Return what is kept of the error that an attempt has ended with."""
    known = attempt.failure
    if known is None or known.error is not attempt.error:
        known = attempt.failure = FailureFacts.of(attempt.error)
    return known


_ACTIONS: dict[Ending | None, str] = {
    Ending.RETRIED: "retry",
    Ending.DEAD: "fail",
    Ending.CANCELLED: "cancel",
}


def _record_job(runtime: Runtime, attempt: Attempt, now: datetime) -> tuple[Any, bool]:
    """Write the attempt's ending into its row; return its id and whether the row was still ours."""
    changes: dict[str, Any] = {
        "attempts": attempt.number,
        "error": failure_of(attempt).shown_text,
        "started_at": attempt.started_at,
        "lease_token": "",
        "lease_expires_at": None,
    }
    if attempt.ending is not Ending.RETRIED:
        changes["finished_at"] = now
    else:
        changes["available_at"] = attempt.retry_at
        if attempt.started_at is None:  # it waits, and that of the attempt before holds
            del changes["started_at"]
    if attempt.row is None:
        return _record_birth(runtime, attempt, changes, now)
    return attempt.row.id, _record_row(runtime, attempt, attempt.row, changes, now)


def _record_birth(
    runtime: Runtime, attempt: Attempt, changes: dict[str, Any], now: datetime
) -> tuple[Any, bool]:
    """Write the row of a foreign message's first failure; see ``_record_job``."""
    using = runtime.database
    row = _birth(runtime, attempt, changes, now)
    if row is None:
        return None, not _is_born(using, attempt.delivery)
    try:
        with transaction.atomic(using=using):
            Job.objects.using(using).bulk_create([row])
    except IntegrityError:
        # Another worker had the message meanwhile, and its row was born first.
        return None, False
    attempt.born_id = row.pk
    if attempt.ending is Ending.RETRIED:
        _send_retry(runtime, row)
    return row.pk, True


def _is_born(using: str, delivery: Delivery) -> bool:
    """Return whether another worker has recorded a failure of the same foreign message meanwhile,
    in the row that this one would have."""
    if isinstance(delivery, RefusedRecord):
        return False  # it has no row
    name = delivery.message.row_name
    rows = Job.objects.using(using).filter(queue=delivery.queue.retries, unique_id=name)
    return bool(name) and rows.exists()


def _record_row(
    runtime: Runtime, attempt: Attempt, job: JobRow, changes: dict[str, Any], now: datetime
) -> bool:
    """Write the attempt's ending into the row it has; see ``_record_job``."""
    using, delivery = runtime.database, attempt.delivery
    is_retry = attempt.ending is Ending.RETRIED
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
    changed = transition(_ACTIONS[attempt.ending], rows, **changes)
    if changed and is_retry:
        _send_retry(runtime, Job.objects.using(using).get(pk=job.id))
    if changed and attempt.is_marked and isinstance(attempt.error, TransactionEndedError):
        # Its handler commits the marker. This worker has deleted its own, but not that of another
        # one that had the job since, and has died.
        runtime.store.delete_markers([attempt.key])
    return bool(changed)


def _send_retry(runtime: Runtime, job: Job) -> None:
    """Publish a retry for its time where the transport can; else the relay finds it by its
    ``available_at``."""
    queue = runtime.settings.queue(job.queue)
    if storing.is_transactional(queue):
        storing.dispatch_jobs([job], queue)


def _birth(
    runtime: Runtime, attempt: Attempt, changes: dict[str, Any], now: datetime
) -> Job | None:
    """Return the row of a foreign message's first failure; None where a dead letter says it all.

    Where a row of this service sent the message, as a stream's producer does, this one takes its
    place and id: people see one row for one task, and its state is the task's.
    """
    delivery, message, record = attempt.delivery, attempt.delivery.message, attempt.delivery.record
    using, handler, queue = runtime.database, delivery.handler, delivery.queue
    if isinstance(delivery, RefusedRecord):
        return None
    id = _id_for(using, message, record)
    was_sent_here = False
    if str(id) == message.id:
        rows = Job.objects.using(using).filter(pk=id, destination=record.topic)
        # One conditional DELETE: delete() reads first, and would then delete the row of another
        # worker that has recorded the failure meanwhile, and unlink its dead letter.
        was_sent_here = bool(rows._raw_delete(using))
    is_retry = attempt.ending is Ending.RETRIED
    if not is_retry and not was_sent_here:
        return None
    # Its headers travel on with the retry, whoever set them, but for what only rows say. And where
    # it was read: its dead letter is to name where it came from, not where its last retry was.
    not_theirs = {ORIGIN_ID, names.ORIGIN_ENVELOPE, *names.OF_A_ROW}
    theirs = {name: value for name, value in record.headers.items() if name not in not_theirs}
    headers = _headers_for_row({**names.encode(origin_headers(record)), **theirs}, record)
    if str(id) != message.id:
        headers[ORIGIN_ID] = message.id
    ttl = handler.result_ttl(queue) // timedelta(milliseconds=1)
    if not is_retry:
        changes["result_expires_at"] = now + timedelta(milliseconds=ttl)
    if message.lease_id:
        # The item is the key: the retry goes to the item's own partition.
        headers.pop(names.RAW_KEY, None)
        headers.pop(names.NO_KEY, None)
    level = delivery.level
    row = Job(
        id=id,
        queue=queue.retries,
        priority=record.priority or priority_of(level) or None,
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
    sent = storing.record_of(row, runtime.settings.queue(row.queue)).headers
    if envelope := names.origin_envelope(theirs, sent):
        row.headers = {**(row.headers or {}), **names.for_row(envelope)}
    return row


def _headers_for_row(headers: Mapping[str, bytes], record: Record) -> dict[str, Any]:
    """Return what a row keeps of a message's headers, and of its key and value what the columns do
    not."""
    return names.for_row({**names.in_order(headers), **only_in_rows(record.key, record.value)})


def _id_for(using: str, message: Message, record: Record) -> UUID:
    """Return the message's id for its row, or a fresh one: others name their messages as they like,
    also by the id of a job that exists. Not counting the row that sent this very message."""
    if not message.unique_id:
        try:
            id = UUID(message.id)
        except ValueError:
            return uuid7()
        others = Job.objects.using(using).filter(pk=id).exclude(destination=record.topic)
        if not others.exists():
            return id
    return uuid7()


def _failed_attempt(attempt: Attempt, job_id: Any, now: datetime, worker: str) -> list[JobFailure]:
    """Return the unsaved row of an attempt that has failed; none of one that was cancelled, that
    was noted before, or that has no job."""
    is_new = attempt.ending in (Ending.RETRIED, Ending.DEAD) and not attempt.is_announced
    if job_id is None or not is_new:
        return []
    facts, message = failure_of(attempt), attempt.delivery.message
    failure = JobFailure(
        job_id=job_id,
        generation=message.generation,
        attempt=attempt.number,
        worker=worker[:255],
        code=facts.code,
        details=facts.details,
        started_at=attempt.started_at,
        failed_at=now,
        retry_at=attempt.retry_at,
        log=log_of(attempt.log_lines) if attempt.log_lines else "",
        **facts.columns(),
    )
    return [failure]


# --- Dead letters ---------------------------------------------------------------------------------


def source_id(delivery: Delivery, job_id: UUID | None) -> str:
    """Return the digest that makes recording this death twice impossible.

    For a job it is made from its generation. For a foreign record it is made from its place and
    time in its topic: the time differs when a topic was deleted and created again.
    """
    message, record = delivery.message, delivery.record
    if job_id is not None:
        return source_of_job(job_id, message.generation)
    time = record.timestamp.isoformat() if record.timestamp else ""
    identity = "\0".join([delivery.queue.consumer_group, *map(str, record.position), time])
    return hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()


def dead_letter_of(
    runtime: Runtime, attempt: Attempt, job_id: UUID | None, now: datetime
) -> DeadLetter:
    """Return the unsaved row of a delivery that died."""
    delivery, record, facts = attempt.delivery, attempt.delivery.record, failure_of(attempt)
    message = delivery.message
    # Those of a record that cannot be read are what its headers say.
    handler = message.type or names.text(record.headers, names.TYPE)
    message_id = message.id or names.text(record.headers, names.ID)
    content_type = names.text(record.headers, names.CONTENT_TYPE)
    headers = names.to_json(names.in_order({**record.headers, **_unique_id(attempt)}))
    topic, partition, offset = first_place(record)
    return DeadLetter(
        reason=attempt.reason,
        source_id=source_id(delivery, job_id),
        job_id=job_id,
        message_id=storable_text(message_id, 255),
        queue=delivery.queue.name,
        handler=storable_text(handler, 100),
        key=record.key,
        value=record.value,
        headers=headers,
        content_type=storable_text(content_type, 50),
        consumer_group=delivery.queue.consumer_group,
        topic=topic,
        partition=partition,
        offset=offset,
        fingerprint=facts.fingerprint(handler),
        release=runtime.settings.release,
        attempts=attempt.number,
        replay_count=names.number(record.headers, names.REPLAY_COUNT, 0, names.MAX_REPLAYS),
        failed_at=now,
        **facts.columns(),
    )


def _unique_id(attempt: Attempt) -> dict[str, bytes]:
    """Return the header that keeps the id a job was enqueued under: only its row knows it, and
    that may be given to another payload, or pruned, before the dead letter is replayed."""
    message, row = attempt.delivery.message, attempt.row
    if row is None or not row.unique_id:
        return {}
    if row.unique_id == message.row_name:
        return {}  # a message nobody enqueued here: its own id
    return names.encode({names.UNIQUE_ID: row.unique_id})


def first_place(record: Record) -> tuple[str, int | None, int | None]:
    """Return topic, partition and offset of where a record was read before its retries and replays.

    This is what its headers claim. It is shown to people and nothing is decided by it.
    """
    headers = record.headers
    topic = names.identifier(headers, names.DLQ_ORIGINAL_TOPIC, MAX_TOPIC)
    if not topic:
        return record.place
    return (
        topic,
        names.number(headers, names.DLQ_ORIGINAL_PARTITION, record.partition),
        names.number(headers, names.DLQ_ORIGINAL_OFFSET, record.offset, most=names.MAX_OFFSET),
    )


def origin_headers(record: Record) -> dict[str, object]:
    """Return the values of the headers that say where a record was read first."""
    topic, partition, offset = record.place
    return {
        names.DLQ_ORIGINAL_TOPIC: topic,
        names.DLQ_ORIGINAL_PARTITION: partition,
        names.DLQ_ORIGINAL_OFFSET: offset,
        names.DLQ_ORIGINAL_TIMESTAMP: record.timestamp and record.timestamp.isoformat(),
    }


def record_for_topic(runtime: Runtime, attempt: Attempt) -> OutgoingRecord:
    """Return the record for the dead-letter topic: key, value and every header as they were, with
    ours added or replaced, never appended, and the first origin kept."""
    delivery, record, facts = attempt.delivery, attempt.delivery.record, failure_of(attempt)
    now = CLOCK.now().isoformat()
    message = delivery.message
    added = names.encode(
        {
            **origin_headers(record),
            names.DLQ_GROUP: delivery.queue.consumer_group,
            names.DLQ_HANDLER: message.type or None,
            names.DLQ_MESSAGE_ID: message.id or None,
            names.DLQ_JOB_ID: message.job_id,
            names.DLQ_ATTEMPTS: attempt.number,
            names.DLQ_FIRST_FAILED_AT: now,
            names.DLQ_LAST_FAILED_AT: now,
            names.DLQ_REASON: str(attempt.reason),
            names.DLQ_EXCEPTION_TYPE: facts.type or None,
            names.DLQ_EXCEPTION_MESSAGE: facts.text[:MAX_HEADER_MESSAGE] or None,
            names.DLQ_EXCEPTION_STACKTRACE: facts.traceback[-MAX_HEADER_STACKTRACE:] or None,
        }
    )
    kept = {name: record.headers[name] for name in names.FIRST_WINS if name in record.headers}
    headers = {**record.headers, **_unique_id(attempt), **added, **kept}
    if not runtime.settings.dead_letter_exception_headers:
        # Nor those of an earlier death, which travel with the message.
        for name in (names.DLQ_EXCEPTION_MESSAGE, names.DLQ_EXCEPTION_STACKTRACE):
            headers.pop(name, None)
    return OutgoingRecord(
        topic=delivery.queue.dead_letter_topic, key=record.key, value=record.value, headers=headers
    )
