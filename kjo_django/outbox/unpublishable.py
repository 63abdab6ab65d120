"""Rows whose message no transport will ever take: they end as dead letters.

Published again and again they would say "pending" for ever, and nobody would look. As a dead letter
each is counted, shown with its error, and replayed once the limit has been raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from django.db import DatabaseError, connections, transaction

from kjo_django import signals, states
from kjo_django.conf import QueueConf
from kjo_django.enqueue.storing import notify_waiters
from kjo_django.exceptions import PublishError, text_of
from kjo_django.failure_facts import FailureFacts
from kjo_django.logs import get_logger
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import storable_text
from kjo_django.models import (
    DeadLetter,
    DeadLetterReason,
    Job,
    JobFailure,
    source_of_job,
    transition,
)
from kjo_django.runtime import Runtime
from kjo_django.states import JobState
from kjo_django.store.rows import DueJob
from kjo_django.transports.base import OutgoingRecord, Published
from kjo_django.workflows.countdown import Announce, count_ended

logger = get_logger("kjo_django")


class Refusal(NamedTuple):
    """A row whose message a transport has refused, or which has none."""

    job: DueJob
    record: OutgoingRecord | None
    """The message; None: it cannot be made."""
    answer: Published
    """The answer of the transport."""
    why: Exception | None = None
    """Why the message cannot be made; None: the answer says it."""

    @classmethod
    def of(cls, job: DueJob, error: Exception) -> Refusal:
        """Return the refusal of a row whose message cannot be made."""
        text = f"{type(error).__name__}: {text_of(error)}"
        return cls(job, None, Published(error=text, is_final=True), error)

    @property
    def is_of_topic(self) -> bool:
        """Whether its topic is the reason, or the message itself."""
        return self.answer.is_topics or self.answer.is_final


def fail(runtime: Runtime, queue: QueueConf, refused: Sequence[Refusal]) -> None:
    """Fail the jobs that were refused for good and keep their messages as dead letters, unless a
    job has moved on meanwhile.

    :raises DatabaseError: it could not be written; what was not is refused again another time.
    """
    for job, record, answer, why in refused:
        if answer.is_final:
            error = why or PublishError(answer.error)
            reason = DeadLetterReason.TOO_LARGE if answer.is_too_large else DeadLetterReason.FATAL
            _fail_and_announce(runtime, queue, job, record, error, reason)


def _fail_and_announce(
    runtime: Runtime,
    queue: QueueConf,
    job: DueJob,
    record: OutgoingRecord | None,
    error: Exception,
    reason: DeadLetterReason,
) -> None:
    """Write that a job has failed, see ``_fail``, and tell who waits for it."""
    using = runtime.database
    failed: tuple[DeadLetter, str | None] | None = None
    announcements: list[Callable[[], object]] = []
    try:
        with transaction.atomic(using=using):
            failed = _fail(runtime, queue, job, record, error, reason, announcements.append)
    except DatabaseError:
        # A COMMIT whose answer was lost may have taken effect, and is announced all the same.
        letters = DeadLetter.objects.using(using)
        if failed is None or not letters.filter(pk=failed[0].pk).exists():
            raise
    if failed is not None:
        announcements.insert(0, partial(_announce, job, record, error, *failed))
        for call in announcements:
            transaction.on_commit(call, using=using, robust=True)


def _fail(
    runtime: Runtime,
    queue: QueueConf,
    job: DueJob,
    record: OutgoingRecord | None,
    error: Exception,
    reason: DeadLetterReason,
    announce: Announce,
) -> tuple[DeadLetter, str | None] | None:
    """Write that a job has failed, and return its dead letter and its unique id; None: it has moved
    on.

    :param record: its message as it was to be published; None where it cannot be made.
    :param announce: takes the calls that send the signals of what the end of a workflow's step
        ends.
    """
    using, now = runtime.database, runtime.clock.now()
    rows = Job.objects.using(using).at(job.id, job.generation)
    rows = rows.filter(attempts=job.attempts, state__in=states.AWAITING_PUBLISH)
    locked = rows.only("unique_id", "result_ttl", "stage_id")
    if connections[using].features.has_select_for_update_skip_locked:
        # Another copy of its message may run just now, and the relay waits for no handler.
        locked = locked.select_for_update(skip_locked=True)
    row = locked.first()
    if row is None:
        return None
    facts = FailureFacts.of(error, "Not published: ")
    transition(
        "fail",
        rows,
        error=facts.shown_text,
        finished_at=now,
        result_expires_at=now + timedelta(milliseconds=row.result_ttl),
    )
    if row.stage_id is not None:
        count_ended(runtime, [(row.stage_id, job.id, JobState.FAILED)], announce=announce)
    described = {**facts.columns(), "failed_at": now}
    JobFailure.objects.using(using).create(
        job_id=job.id,
        generation=job.generation,
        attempt=job.attempts + 1,
        code=facts.code,
        details=facts.details,
        **described,
    )
    headers = dict(record.headers) if record is not None else {}
    if row.unique_id and not job.destination:
        # As in every dead letter of a job: its row may be given to another payload.
        headers[names.UNIQUE_ID] = row.unique_id.encode()
    letter = DeadLetter(
        reason=reason,
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
        topic=job.destination or queue.levels[queue.level_of(job.priority)],
        fingerprint=facts.fingerprint(job.handler, place=reason),
        attempts=job.attempts,
        replay_count=names.number(headers, names.REPLAY_COUNT, 0, names.MAX_REPLAYS),
        release=runtime.settings.release,
        **described,
    )
    runtime.store.insert_missing([letter])
    message = "The message of job %s can never be published and is a dead letter: %s"
    logger.error(message, job.id, facts.shown_text, extra=job.log_facts)
    return letter, row.unique_id


def _announce(
    job: DueJob,
    record: OutgoingRecord | None,
    error: Exception,
    letter: DeadLetter,
    unique_id: str | None,
) -> None:
    """Call those who wait for the job, and send its signals."""
    if record is not None and names.REPLY_TO in record.headers:
        notify_waiters({names.text(record.headers, names.REPLY_TO)})
    facts = {"queue": job.queue, "handler": job.handler, "error": error}
    facts["reason"] = str(letter.reason)
    signals.job_failed.send_robust(
        sender=job.handler,
        job_id=str(job.id),
        unique_id=unique_id,
        attempt=job.attempts + 1,
        **facts,
    )
    signals.message_dead_lettered.send_robust(
        sender=job.handler,
        dead_letter_id=str(letter.pk),
        **facts,
    )
