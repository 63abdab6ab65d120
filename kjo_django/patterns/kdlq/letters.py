"""Rows of killed and skipped messages, which are shown, searched and replayed like every dead
letter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from django.db.models import F, QuerySet

from kjo_django.clock import CLOCK
from kjo_django.conf import get_settings
from kjo_django.failure_facts import FailureFacts
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import storable_text
from kjo_django.models import DeadLetter, DeadLetterReason, DeadLetterState
from kjo_django.operations.dead_letters import DeadLetterFormat, register_format
from kjo_django.patterns.kdlq import headers
from kjo_django.runtime import current_runtime, jobs_database
from kjo_django.transports.base import Record

DECIDED = "Not processed, its dead letter has been replayed or discarded: %s"
MAX_NAME = 240
MAX_ROW = 64
"""Characters of a row's id and its generation."""


def place_of(record: Record) -> str:
    """Return a record's id, made of its position and time: the offsets of a topic that is created
    again begin again.
    """
    time = round(record.timestamp.timestamp() * 1000) if record.timestamp else ""
    name = f"{record.topic}[{record.partition}]@{record.offset}:{time}"
    if len(name) <= MAX_NAME:
        return name
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()


def redelivery_of(record: Record) -> str:
    """Return the id of a message that was redelivered from here, made of its row; "" if it was not.

    The counters are part of it: another consumer that redelivers or kills the message copies our
    header, and counts.
    """
    row = names.identifier(record.headers, names.REDELIVERY, MAX_ROW)
    counters = (headers.REDELIVERED, headers.KILLS)
    told = [str(headers.counter(record.headers, name)) for name in counters]
    return ":".join([row, *told]) if row else ""


def record_letter(
    record: Record,
    consumer: str,
    error: BaseException | None,
    *,
    headers: Mapping[str, bytes],
    queue: str = "",
    group: str = "",
    is_skipped: bool = False,
    is_exhausted: bool = False,
) -> None:
    """Write the row of a killed message (open) or of a skipped one (discarded), once.

    :param headers: as the message went to the dead-letter topic.
    """
    now, facts = CLOCK.now(), FailureFacts.of(error)
    place = place_of(record)
    identity = f"kdlq\0{consumer}\0{group}\0{place}"
    letter = DeadLetter(
        state=DeadLetterState.DISCARDED if is_skipped else DeadLetterState.OPEN,
        reason=DeadLetterReason.EXHAUSTED if is_exhausted else DeadLetterReason.FATAL,
        source_id=hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest(),
        message_id=place,
        queue=queue,
        handler=storable_text(consumer, 100),
        key=record.key,
        value=record.value,
        headers=names.to_json(names.in_order(headers)),
        consumer_group=storable_text(group, 255),
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        release=get_settings().release,
        **facts.columns(),
        fingerprint=facts.fingerprint(consumer),
        replay_count=names.number(record.headers, names.REPLAY_COUNT, 0, names.MAX_REPLAYS),
        failed_at=now,
        closed_at=now if is_skipped else None,
        note="killed as often as max_kills allows" if is_skipped else "",
    )
    current_runtime().store.insert_missing([letter])


def _letters(record: Record, consumer: str) -> QuerySet[DeadLetter]:
    rows = DeadLetter.objects.using(jobs_database())
    place = storable_text(names.text(record.headers, names.DLQ_MESSAGE_ID))
    if not place or not headers.counter(record.headers, headers.KILLS):
        return rows.none()
    return rows.filter(message_id=place, handler=storable_text(consumer, 100))


def letter_of(record: Record, consumer: str) -> DeadLetter | None:
    """Return the row of a record that this consumer has killed before, if there is one."""
    return _letters(record, consumer).defer("traceback").first()


def is_decided(record: Record, consumer: str) -> bool:
    """Return whether a killed record is not to be processed: its row has been replayed or
    discarded.

    A replay publishes a message with one replay more than the record in the dead-letter topic. That
    message is processed.
    """
    letter = letter_of(record, consumer)
    return letter is not None and _is_decided(record, letter)


def _is_decided(record: Record, letter: DeadLetter) -> bool:
    if letter.state == DeadLetterState.OPEN:
        return False
    count = names.number(record.headers, names.REPLAY_COUNT, 0, names.MAX_REPLAYS)
    return letter.state == DeadLetterState.DISCARDED or count < letter.replay_count


def close_letter(record: Record, consumer: str) -> None:
    """Close the row of a killed message that was processed after its kill."""
    _letters(record, consumer).filter(state=DeadLetterState.OPEN).update(
        state=DeadLetterState.REPLAYED,
        closed_at=CLOCK.now(),
        replay_count=F("replay_count") + 1,
        note="processed from the dead-letter topic",
    )


register_format(
    DeadLetterFormat(
        marker=headers.MARKER,
        counter=headers.REDELIVERED,
        origin=headers.ORIGINAL_TOPIC,
        letter_of=lambda record: letter_of(record, names.text(record.headers, headers.MARKER)),
        is_decided=_is_decided,
    )
)
