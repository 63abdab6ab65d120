"""What a record of a dead-letter topic tells of its death, whoever put it there."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kjo_django.conf import get_settings
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import storable_text
from kjo_django.models import DeadLetter, DeadLetterState, Job, source_of_job
from kjo_django.operations import republishing
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.patterns.kdlq import headers as kdlq
from kjo_django.patterns.kdlq import letters
from kjo_django.states import JobState
from kjo_django.store.transactions import jobs_database
from kjo_django.transports.base import Record

ORIGINAL_TOPIC_HEADERS = (
    names.DLQ_ORIGINAL_TOPIC,
    "kafka_dlt-original-topic",  # Spring
    "dlq-original-topic",  # seed 5
    "__dlq.errors.topic",  # Kafka 4.4
    "KDLQ_OrigTopic",  # seed 3
)


@dataclass(frozen=True, slots=True)
class DeadRecord:
    """A record and all that decides about it."""

    record: Record
    id: str
    handler: str
    target: str | None
    job: Job | None
    replay_count: int
    is_processed: bool
    kdlq_letter: DeadLetter | None = None
    """The row of what KDLQ killed, whatever its state; None where it is not here."""

    @classmethod
    def of(cls, record: Record, target: str | None) -> DeadRecord:
        id, handler = message_id_of(record), handler_of(record)
        return cls(
            record=record,
            id=id or "{}[{}]@{}".format(*record.position),
            handler=handler,
            target=target,
            job=republishing.find_job(record.headers),
            replay_count=names.number(record.headers, names.REPLAY_COUNT, 0),
            is_processed=bool(republishing.processed({id: handler})),
            kdlq_letter=letters.letter_of(record, names.text(record.headers, kdlq.MARKER)),
        )

    @property
    def is_of_present_generation(self) -> bool:
        """Whether its job has begun no other generation since; another one may have another
        payload."""
        generation = republishing.generation_of(self.record.headers)
        return self.job is not None and self.job.generation == generation

    @property
    def is_jobs_death(self) -> bool:
        """Whether its job still is as this record left it."""
        return (
            self.is_of_present_generation
            and self.job is not None
            and self.job.state == JobState.FAILED
        )

    def open_letter(self) -> DeadLetter | None:
        """Return the open dead letter of the same death in the table, if its job was ours."""
        if self.job is None:
            return None
        source = source_of_job(self.job.pk, republishing.generation_of(self.record.headers))
        rows = DeadLetter.objects.using(jobs_database()).filter(state=DeadLetterState.OPEN)
        return rows.filter(source_id=source).defer("traceback").first()


def message_id_of(record: Record) -> str:
    """Return the id of the message, "" where it has none."""
    found = names.text(record.headers, names.DLQ_MESSAGE_ID)
    # The database is asked for it, and others wrote it.
    return storable_text(found or names.text(record.headers, names.ID))


def handler_of(record: Record) -> str:
    """Return the name of the handler it was for, "" where it is not said."""
    found = names.text(record.headers, names.DLQ_HANDLER)
    return found or names.text(record.headers, names.TYPE)


def origin_of(record: Record) -> str:
    """Return the topic it died on, as its headers say; "" where they do not."""
    origins = (names.text(record.headers, name) for name in ORIGINAL_TOPIC_HEADERS)
    return next(filter(None, origins), "")


def matches(record: Record, selection: DeadLetterFilter) -> bool:
    """Whether a record's headers pass the filter; what they do not say does not match."""
    text = functools.partial(names.text, record.headers)
    if selection.ids is not None and message_id_of(record) not in map(str, selection.ids):
        return False
    if selection.queue is not None:
        topic = get_settings().queue(selection.queue).topic
        if topic not in (text(name) for name in ORIGINAL_TOPIC_HEADERS):
            return False
    if selection.handler is not None and handler_of(record) != selection.handler:
        return False
    if selection.reason is not None and text(names.DLQ_REASON) != selection.reason:
        return False
    if selection.error:
        told = text(names.DLQ_EXCEPTION_TYPE) + "\n" + text(names.DLQ_EXCEPTION_MESSAGE)
        if selection.error.lower() not in told.lower():
            return False
    return _is_in_time(record, selection)


def _is_in_time(record: Record, selection: DeadLetterFilter) -> bool:
    if selection.since is None and selection.until is None:
        return True
    failed_at = names.moment(record.headers, names.DLQ_LAST_FAILED_AT) or record.timestamp
    if failed_at is None:
        return False
    if selection.since is not None and failed_at < selection.since:
        return False
    return selection.until is None or failed_at < selection.until
