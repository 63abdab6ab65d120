"""The envelope: what our headers say around the payload's bytes.

Nothing is parsed out of delimited strings; each field has its header. The payload is decoded
apart, with the serializer its content type names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kjo_django.exceptions import MessageError
from kjo_django.messages import headers as names

MAX_ID_LENGTH = 200
"""Characters of a message id; with a generation appended it fits ``processed_events.event_id``."""
MAX_TYPE_LENGTH = 100


@dataclass(slots=True)
class Message:
    """A message as it came from a transport, with its envelope read."""

    id: str
    """Identity of its effects, unique per generation of a job."""
    type: str
    """Name of the handler."""
    payload: bytes
    content_type: str
    job_id: str | None = None
    """None for a message that no enqueue created."""
    service: str = ""
    """The service whose database holds the job; empty when none does."""
    generation: int = 1
    attempt: int = 1
    """The attempt this message asks for, from 1. A row that has seen it makes the message stale."""
    replay_count: int = 0
    timestamp: datetime | None = None
    lease_id: str = ""
    """What is leased while it runs; its id unless several messages concern one item."""
    unique_id: str = ""
    """Of a message nobody enqueued here, what the row of its retries is known by; its id if not
    given. Needed where an id alone does not tell two messages apart."""

    @property
    def row_name(self) -> str:
        """The unique id of the row a first failure leaves."""
        return self.unique_id or self.id


def job_headers(
    *,
    id: str,
    type: str,
    job_id: str,
    service: str,
    generation: int,
    attempt: int,
    content_type: str,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """Return the headers of a job's message; ours win over ``extra``."""
    result = names.from_row(extra)
    result[names.ID] = id.encode()
    result[names.TYPE] = type.encode()
    result[names.JOB_ID] = job_id.encode()
    result[names.SERVICE] = service.encode()
    result[names.GENERATION] = b"%d" % generation
    result[names.ATTEMPT] = b"%d" % attempt
    result[names.CONTENT_TYPE] = content_type.encode()
    return result


def read(
    value: bytes | None,
    headers: Mapping[str, bytes],
    *,
    max_bytes: int,
    timestamp: datetime | None = None,
) -> Message:
    """Read the envelope of a record.

    :param max_bytes: the longest value accepted.
    :raises MessageError: with a reason of ``DeadLetterReason``, when no retry could make it
        readable: no value, too large, no or an absurd id or type.
    """
    if value is None:
        raise MessageError("invalid", "The message has no value (a tombstone)")
    if len(value) > max_bytes:
        raise MessageError(
            "too_large", f"The message has {len(value)} bytes; the limit is {max_bytes}"
        )
    if not value:
        raise MessageError("invalid", "The message is empty")
    job_id = names.text(headers, names.JOB_ID)
    if "\x00" in job_id or len(job_id) > MAX_ID_LENGTH:
        raise MessageError("invalid", f"The {names.JOB_ID!r} header is not a usable identifier")
    return Message(
        id=_identifier(headers, names.ID, MAX_ID_LENGTH),
        type=_identifier(headers, names.TYPE, MAX_TYPE_LENGTH),
        payload=value,
        content_type=names.text(headers, names.CONTENT_TYPE, "application/json"),
        job_id=job_id or None,
        service=names.text(headers, names.SERVICE),
        generation=names.number(headers, names.GENERATION, 1),
        attempt=names.number(headers, names.ATTEMPT, 1),
        replay_count=names.number(headers, names.REPLAY_COUNT, 0),
        timestamp=timestamp,
    )


def _identifier(headers: Mapping[str, bytes], name: str, limit: int) -> str:
    raw = headers.get(name)
    if not raw:
        raise MessageError("invalid", f"The message has no {name!r} header")
    try:
        value = raw.decode()
    except UnicodeDecodeError:
        raise MessageError("invalid", f"The {name!r} header is not valid UTF-8") from None
    if len(value) > limit or "\x00" in value:
        raise MessageError("invalid", f"The {name!r} header is not a usable identifier")
    return value
