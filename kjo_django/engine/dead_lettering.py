"""What a dead letter holds: the message as it was, and why it died (KAFKA.md's record)."""

from __future__ import annotations

import hashlib
import traceback as tracebacks
from datetime import datetime
from typing import Any
from uuid import UUID

from django.utils import timezone

from kjo_django.conf import get_settings
from kjo_django.engine.attempt import Attempt, Delivery
from kjo_django.exceptions import text_of
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import JSON, MAX_ERROR_LENGTH, one_line, storable_text
from kjo_django.models import DeadLetter, fingerprint_of, source_of_job
from kjo_django.retries import import_path
from kjo_django.transports.base import OutgoingRecord, Record

MAX_TRACEBACK_LENGTH = 20_000
MAX_CODE_LENGTH = 100
MAX_DETAILS = 10_000
"""Bytes of JSON; larger details of an error are not kept."""
MAX_TOPIC = 249
MAX_HEADER_MESSAGE = 1_000
MAX_HEADER_STACKTRACE = 4_000


def error_text(error: BaseException | None, limit: int = MAX_ERROR_LENGTH) -> str:
    """Return what is shown of an error: its text, or its type when it has none."""
    if error is None:
        return ""
    return storable_text(text_of(error), limit)


def error_facts(error: BaseException | None) -> tuple[str, Any]:
    """Return an error's own code and details, as far as a row can hold them: its ``code``, and what
    its ``to_dict()`` returns, or else its ``details``."""
    try:
        described = getattr(error, "to_dict", None)
        told = described() if callable(described) else getattr(error, "details", None)
        details = _storable_json(told)
    except Exception:
        details = None
    try:
        code = getattr(error, "code", None)
        if code is None and isinstance(details, dict):
            code = details.get("code")
        is_code = isinstance(code, (str, int)) and not isinstance(code, bool)
        return (storable_text(str(code), MAX_CODE_LENGTH) if is_code else ""), details
    except Exception:
        return "", details


def _storable_json(value: Any) -> Any:
    """Return a value as JSON gives it back; None where a row cannot hold it."""
    data = JSON.dumps(value)
    is_storable = len(data) <= MAX_DETAILS and storable_text(text := data.decode()) == text
    # Escaped in JSON, but no text of PostgreSQL.
    return JSON.loads(data) if is_storable and "\\u0000" not in text else None


def traceback_text(error: BaseException | None, limit: int = MAX_TRACEBACK_LENGTH) -> str:
    """Return the traceback; a long one loses its beginning, not the line that raised."""
    if error is None or error.__traceback__ is None:
        return ""
    try:
        lines = tracebacks.format_exception(error)
    except Exception:
        # Notes that raise, a SyntaxError of other things than text: where it was is left.
        lines = [*tracebacks.format_tb(error.__traceback__), type(error).__name__]
    return storable_text("".join(lines))[-limit:]


def fingerprint(handler: str, error: BaseException | None) -> str:
    """Return an id shared by failures of one kind: handler, exception type, innermost frame."""
    if error is None:
        return ""
    frames = tracebacks.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].name}" if frames else getattr(error, "reason", "")
    return fingerprint_of(handler, import_path(type(error)), place)


def source_id(delivery: Delivery, job_id: UUID | None, generation: int) -> str:
    """Return the digest that makes recording this death twice impossible.

    Of a job: its generation. Of a foreign record: its place and time in its topic; the time tells
    records of a topic that was deleted and created again apart.
    """
    if job_id is not None:
        return source_of_job(job_id, generation)
    record = delivery.record
    time = record.timestamp.isoformat() if record.timestamp else ""
    identity = "\0".join([delivery.queue.consumer_group, *map(str, record.position), time])
    return hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()


def dead_letter_of(attempt: Attempt, job_id: UUID | None, now: datetime) -> DeadLetter:
    """Return the unsaved row of a delivery that died."""
    delivery, record = attempt.delivery, attempt.delivery.record
    message = delivery.message
    handler = message.type if message is not None else names.text(record.headers, names.TYPE)
    topic, partition, offset = first_place(record)
    return DeadLetter(
        reason=attempt.reason,
        source_id=source_id(delivery, job_id, message.generation if message else 1),
        job_id=job_id,
        message_id=storable_text(
            message.id if message is not None else names.text(record.headers, names.ID), 255
        ),
        queue=delivery.queue.name,
        handler=storable_text(handler, 100),
        key=record.key,
        value=record.value,
        headers=names.to_json(names.in_order({**record.headers, **_unique_id(attempt)})),
        content_type=storable_text(names.text(record.headers, names.CONTENT_TYPE), 50),
        consumer_group=delivery.queue.consumer_group,
        topic=topic,
        partition=partition,
        offset=offset,
        error_type=storable_text(import_path(type(attempt.error)), 255) if attempt.error else "",
        error=error_text(attempt.error),
        traceback=traceback_text(attempt.error),
        fingerprint=fingerprint(handler, attempt.error),
        release=get_settings().release,
        attempts=attempt.number,
        replay_count=names.number(record.headers, names.REPLAY_COUNT, 0, names.MAX_REPLAYS),
        failed_at=now,
    )


def _unique_id(attempt: Attempt) -> dict[str, bytes]:
    """Return the header that keeps the id a job was enqueued under: only its row knows it, and
    that may be given to another payload, or pruned, before the dead letter is replayed."""
    message, row = attempt.delivery.message, attempt.row
    if message is None or row is None or not row.unique_id:
        return {}
    if row.unique_id == message.row_name:
        return {}  # a message nobody enqueued here: its own id
    return names.encode({names.UNIQUE_ID: row.unique_id})


def first_place(record: Record) -> tuple[str, int, int]:
    """Return topic, partition and offset of where a record was read before its retries and replays.

    As far as its headers say: to be shown, not to be believed.
    """
    told = record.headers
    topic = names.identifier(told, names.DLQ_ORIGINAL_TOPIC, MAX_TOPIC)
    if not topic:
        return record.position
    return (
        topic,
        names.number(told, names.DLQ_ORIGINAL_PARTITION, record.partition),
        names.number(told, names.DLQ_ORIGINAL_OFFSET, record.offset, most=names.MAX_OFFSET),
    )


def origin_headers(record: Record) -> dict[str, bytes]:
    """Return the headers that say where a record was read first."""
    return names.encode(
        {
            names.DLQ_ORIGINAL_TOPIC: record.topic,
            names.DLQ_ORIGINAL_PARTITION: record.partition,
            names.DLQ_ORIGINAL_OFFSET: record.offset,
            names.DLQ_ORIGINAL_TIMESTAMP: record.timestamp and record.timestamp.isoformat(),
        }
    )


def record_for_topic(attempt: Attempt) -> OutgoingRecord:
    """Return the record for the dead-letter topic: key, value and every header as they were, with
    ours added or replaced, never appended, and the first origin kept (KDLQ-F2, F3)."""
    delivery, record, error = attempt.delivery, attempt.delivery.record, attempt.error
    now = timezone.now().isoformat()
    message = delivery.message
    told = names.encode(
        {
            names.DLQ_GROUP: delivery.queue.consumer_group,
            names.DLQ_HANDLER: message.type if message else None,
            names.DLQ_MESSAGE_ID: message.id if message else None,
            names.DLQ_JOB_ID: message.job_id if message else None,
            names.DLQ_ATTEMPTS: attempt.number,
            names.DLQ_FIRST_FAILED_AT: now,
            names.DLQ_LAST_FAILED_AT: now,
            names.DLQ_REASON: str(attempt.reason),
            names.DLQ_EXCEPTION_TYPE: import_path(type(error)) if error else None,
            names.DLQ_EXCEPTION_MESSAGE: error_text(error, MAX_HEADER_MESSAGE) if error else None,
            names.DLQ_EXCEPTION_STACKTRACE: traceback_text(error, MAX_HEADER_STACKTRACE) or None,
        }
    )
    kept = {name: record.headers[name] for name in names.FIRST_WINS if name in record.headers}
    headers = {
        **record.headers,
        **_unique_id(attempt),
        **origin_headers(record),
        **told,
        **kept,
    }
    if not get_settings().dead_letter_exception_headers:
        # Nor those of an earlier death, which travel with the message.
        for name in (names.DLQ_EXCEPTION_MESSAGE, names.DLQ_EXCEPTION_STACKTRACE):
            headers.pop(name, None)
    return OutgoingRecord(
        topic=delivery.queue.dead_letter_topic,
        key=record.key,
        value=record.value,
        headers=headers,
    )


def reason_of(attempt: Attempt) -> str:
    """Return a line for the log, and no more than one, whatever others wrote."""
    delivery = attempt.delivery
    which = delivery.message.id if delivery.message else delivery.record.position
    return one_line(f"{which}: {attempt.reason}: {error_text(attempt.error)}")
