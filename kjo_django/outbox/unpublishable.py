"""Rows whose message no transport will ever take: they end as dead letters.

Published again and again they would say "pending" for ever, and nobody would look. As a dead letter
each is counted, shown with its error, and replayed once the limit has been raised.
"""

from __future__ import annotations

import logging
import traceback as tracebacks
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from django.db import DatabaseError, connections, transaction

from kjo_django import signals, states
from kjo_django.conf import QueueConf
from kjo_django.enqueue.storing import notify_waiters
from kjo_django.exceptions import PublishError, text_of
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import MAX_ERROR_LENGTH, storable_text
from kjo_django.models import (
    DeadLetter,
    DeadLetterReason,
    Job,
    JobFailure,
    fingerprint_of,
    source_of_job,
    transition,
)
from kjo_django.retries import import_path
from kjo_django.runtime import Runtime
from kjo_django.store.rows import DueJob
from kjo_django.transports.base import OutgoingRecord, Published

logger = logging.getLogger("kjo_django")


class Unpublishable(NamedTuple):
    """A row whose message was refused for good, or cannot be made."""

    job: DueJob
    record: OutgoingRecord | None
    """None where it cannot be made."""
    error: Exception
    reason: DeadLetterReason


def refusal_of(error: Exception) -> Published:
    """Return the answer for a record that cannot be made."""
    return Published(error=f"{type(error).__name__}: {text_of(error)}", is_final=True)


def fail(
    runtime: Runtime,
    queue: QueueConf,
    jobs: Sequence[DueJob],
    made: Sequence[OutgoingRecord | Exception],
    answers: Sequence[Published],
) -> None:
    """Fail the jobs that were refused for good and keep their messages as dead letters, unless a
    job has moved on meanwhile.

    :param made: the record of each job, or why it cannot be made.
    :param answers: what the transport answered to each.
    :raises DatabaseError: it could not be written; what was not is refused again another time.
    """
    using = runtime.database
    for job, record, answer in zip(jobs, made, answers, strict=True):
        if not answer.is_final:
            continue
        reason = DeadLetterReason.TOO_LARGE if answer.is_too_large else DeadLetterReason.FATAL
        one = (
            Unpublishable(job, record, PublishError(answer.error), reason)
            if isinstance(record, OutgoingRecord)
            else Unpublishable(job, None, record, reason)
        )
        failed: _Failed | None = None
        try:
            with transaction.atomic(using=using):
                failed = _fail(runtime, queue, one)
        except DatabaseError:
            # A COMMIT whose answer was lost may have taken effect, and is announced all the same.
            letters = DeadLetter.objects.using(using)
            if failed is None or not letters.filter(pk=failed.dead_letter_id).exists():
                raise
        if failed is not None:
            announce = partial(_announce, one, failed)
            transaction.on_commit(announce, using=using, robust=True)


class _Failed(NamedTuple):
    unique_id: str | None
    dead_letter_id: str


def _fail(runtime: Runtime, queue: QueueConf, refused: Unpublishable) -> _Failed | None:
    """Write that a job has failed; None: it has moved on."""
    job, using, now = refused.job, runtime.database, runtime.clock.now()
    rows = Job.objects.using(using).at(job.id, job.generation)
    rows = rows.filter(attempts=job.attempts, state__in=states.AWAITING_PUBLISH)
    locked = rows.only("unique_id", "result_ttl")
    if connections[using].features.has_select_for_update_skip_locked:
        # Another copy of its message may run just now, and the relay waits for no handler.
        locked = locked.select_for_update(skip_locked=True)
    row = locked.first()
    if row is None:
        return None
    transition(
        "fail",
        rows,
        error=_text(refused.error),
        finished_at=now,
        result_expires_at=now + timedelta(milliseconds=row.result_ttl),
    )
    JobFailure.objects.using(using).create(
        job_id=job.id,
        generation=job.generation,
        attempt=job.attempts + 1,
        error_type=storable_text(import_path(type(refused.error)), 255),
        error=_text(refused.error),
        traceback=_traceback(refused.error),
        failed_at=now,
    )
    letter = _letter_of(refused, queue, row.unique_id, now)
    letter.release = runtime.settings.release
    DeadLetter.objects.using(using).bulk_create([letter], ignore_conflicts=True)
    message = "The message of job %s can never be published and is a dead letter: %s"
    logger.error(message, job.id, _text(refused.error), extra=job.log_facts)
    return _Failed(row.unique_id, str(letter.pk))


def _letter_of(
    refused: Unpublishable, queue: QueueConf, unique_id: str | None, now: datetime
) -> DeadLetter:
    """Return the unsaved dead letter: the message as it was to be published."""
    job, record, error = refused.job, refused.record, refused.error
    headers = dict(record.headers) if record is not None else {}
    if unique_id and not job.destination:
        # As in every dead letter of a job: its row may be given to another payload.
        headers[names.UNIQUE_ID] = unique_id.encode()
    error_type = import_path(type(error))
    return DeadLetter(
        reason=refused.reason,
        source_id=source_of_job(job.id, job.generation),
        job_id=job.id,
        message_id=storable_text(names.text(headers, names.ID), 255),
        queue=job.queue,
        handler=job.handler,
        key=record.key if record is not None else job.key.encode() or None,
        value=record.value if record is not None else bytes(job.payload),
        headers=names.to_json(headers),
        content_type=job.content_type,
        consumer_group="" if job.destination else queue.consumer_group,
        topic=job.destination or queue.topic,
        error_type=storable_text(error_type, 255),
        error=_text(error),
        traceback=_traceback(error),
        fingerprint=fingerprint_of(job.handler, error_type, refused.reason),
        attempts=job.attempts,
        replay_count=names.number(headers, names.REPLAY_COUNT, 0, names.MAX_REPLAYS),
        failed_at=now,
    )


def _text(error: Exception) -> str:
    return storable_text(f"Not published: {text_of(error)}", MAX_ERROR_LENGTH)


def _traceback(error: Exception) -> str:
    if error.__traceback__ is None:
        return ""
    return storable_text("".join(tracebacks.format_exception(error)))


def _announce(refused: Unpublishable, failed: _Failed) -> None:
    """Call those who wait for the job, and send its signals."""
    job, record = refused.job, refused.record
    if record is not None and names.REPLY_TO in record.headers:
        notify_waiters({names.text(record.headers, names.REPLY_TO)})
    facts: dict[str, Any] = {"queue": job.queue, "handler": job.handler}
    facts |= {"error": refused.error, "reason": str(refused.reason)}
    signals.send(
        signals.job_failed,
        sender=job.handler,
        job_id=str(job.id),
        unique_id=failed.unique_id,
        attempt=job.attempts + 1,
        **facts,
    )
    signals.send(
        signals.message_dead_lettered,
        sender=job.handler,
        dead_letter_id=failed.dead_letter_id,
        **facts,
    )
