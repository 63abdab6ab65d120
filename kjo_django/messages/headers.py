"""Headers: their names on the wire, their values, the message they make of a record, and what a
handler's own publications inherit of them.

Our headers stand around the payload's bytes. Nothing is parsed out of delimited strings; each field
has its header. The payload is decoded apart, with the serializer its content type names.
"""

from __future__ import annotations

import base64
import json
from binascii import a2b_base64
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.utils.dateparse import parse_datetime

from kjo_django import tracing
from kjo_django.exceptions import MessageError
from kjo_django.messages.serializers import storable_text

MAX_NUMBER = 2**31 - 1
MAX_OFFSET = 2**63 - 1
MAX_REPLAYS = 1_000_000
"""Most replays that are read of a message of others: there must be room to count on."""

# A job's message.
ID = "kjo-id"
TYPE = "kjo-type"
JOB_ID = "kjo-job-id"
SERVICE = "kjo-service"
GENERATION = "kjo-generation"
ATTEMPT = "kjo-attempt"
CONTENT_TYPE = "content-type"
REPLAY_COUNT = "kjo-replay-count"
UNIQUE_ID = "kjo-unique-id"
"""In dead letters, and in what is replayed of them under an id of its own: the id that the job was
enqueued under. Its handler sees that one."""
REPLY_TO = "kjo-reply-to"
"""The channel to call when the job has ended: another process waits for it."""
SCHEDULED_FOR = "kjo-scheduled-for"
"""The tick of a schedule that the job was stored for."""

# Only in a row, of a record for others or of a message nobody enqueued here: the key's bytes where
# they are no text of 255 characters,
RAW_KEY = "kjo-raw-key"
# that it has no key, which of a job without one would be its id,
NO_KEY = "kjo-no-key"
# and that it has no value (a tombstone), which an empty one is not.
NO_VALUE = "kjo-no-value"
OF_A_ROW = frozenset({RAW_KEY, NO_KEY, NO_VALUE})

HEADER_LIST = "kjo-header-list"
"""Where a mapping does not say all of a record's headers: what it leaves out, see ``folded``. Never
on the wire of a transport that carries a list."""

# A message that waits with others of its key: its place among them, and the row it waits in.
PARKED_PLACE = "kjo-parked-place"
PARKED_ROW = "kjo-parked-row"
# The row a redelivered message was published from: what its copies are known by.
REDELIVERY = "kjo-redelivery"

# Carried through untouched.
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
CORRELATION_ID = "correlation-id"

# Of the attempt before, or the one that died: what the next attempt's trace links to.
TRACE_FOLLOWS = "kjo-trace-follows"

# A dead letter: all original headers stay, these are added or replaced (KAFKA.md 2.3).
DLQ_PREFIX = "kjo-dlq-"
DLQ_ORIGINAL_TOPIC = "kjo-dlq-original-topic"
DLQ_ORIGINAL_PARTITION = "kjo-dlq-original-partition"
DLQ_ORIGINAL_OFFSET = "kjo-dlq-original-offset"
DLQ_ORIGINAL_TIMESTAMP = "kjo-dlq-original-timestamp"
DLQ_GROUP = "kjo-dlq-group"
DLQ_HANDLER = "kjo-dlq-handler"
DLQ_MESSAGE_ID = "kjo-dlq-message-id"
DLQ_JOB_ID = "kjo-dlq-job-id"
DLQ_ATTEMPTS = "kjo-dlq-attempts"
DLQ_FIRST_FAILED_AT = "kjo-dlq-first-failed-at"
DLQ_LAST_FAILED_AT = "kjo-dlq-last-failed-at"
DLQ_REASON = "kjo-dlq-reason"
DLQ_EXCEPTION_TYPE = "kjo-dlq-exception-type"
DLQ_EXCEPTION_MESSAGE = "kjo-dlq-exception-message"
DLQ_EXCEPTION_STACKTRACE = "kjo-dlq-exception-stacktrace"

OF_A_MESSAGE = frozenset({ID, TYPE, JOB_ID, SERVICE, GENERATION, ATTEMPT, CONTENT_TYPE})
"""What a job's message says of itself; all others are in its row's headers."""

ORIGIN_ENVELOPE = "kjo-origin-envelope"
"""Of a retry of a message nobody enqueued here: what the message had under the names above, which
are the retry's own now; JSON, see ``without_envelope``."""

FIRST_WINS = frozenset(
    {
        DLQ_ORIGINAL_TOPIC,
        DLQ_ORIGINAL_PARTITION,
        DLQ_ORIGINAL_OFFSET,
        DLQ_ORIGINAL_TIMESTAMP,
        DLQ_FIRST_FAILED_AT,
    }
)
"""A message that dies again keeps its first origin; everything else is of the last death."""
MAX_ID_LENGTH = 200
"""Characters of a message id; with a generation appended it fits ``processed_events.event_id``."""
MAX_TYPE_LENGTH = 100


def text(headers: Mapping[str, bytes], name: str, default: str = "") -> str:
    """Return a header as text; undecodable bytes are replaced, never an error."""
    value = headers.get(name)
    return default if value is None else value.decode("utf-8", "replace")


def identifier(headers: Mapping[str, bytes], name: str, limit: int) -> str:
    """Return a header as text that any database can be asked for; "" where it is none: missing,
    longer than ``limit`` characters, or with NUL in it."""
    found = text(headers, name)
    return found if len(found) <= limit and "\x00" not in found else ""


def texts(headers: Mapping[str, bytes]) -> dict[str, str]:
    """Return all headers as ``text`` does, without the one that holds their list."""
    found = {name: value.decode("utf-8", "replace") for name, value in headers.items()}
    found.pop(HEADER_LIST, None)
    return found


def number(headers: Mapping[str, bytes], name: str, default: int, most: int = MAX_NUMBER) -> int:
    """Return a header as a non-negative number, or ``default`` when it is missing or is not one.

    :param most: a greater one is none. What no integer column holds could not be stored with its
        dead letter either.
    """
    value = headers.get(name)
    if value is None or len(value) > 19 or not value.isdigit():
        return default
    found = int(value)
    return found if found <= most else default


def moment(headers: Mapping[str, bytes], name: str) -> datetime | None:
    """Return a header as an aware time, or None when it is missing or is not one.

    A time that no time zone or database could hold is none.
    """
    try:
        found = parse_datetime(text(headers, name))
    except ValueError:
        return None
    if found is None or found.tzinfo is None or not 1970 < found.year < 9000:
        return None
    return found


def encode(values: Mapping[str, object]) -> dict[str, bytes]:
    """Write values as UTF-8 text; None is left out."""
    return {
        name: str(value).encode("utf-8", "replace")
        for name, value in values.items()
        if value is not None
    }


def folded(pairs: Sequence[tuple[str, bytes | None]]) -> dict[str, bytes]:
    """Return a list of headers as a mapping: the last of a name counts, no value is an empty one.

    What that leaves out is kept under ``HEADER_LIST``, wherever the mapping goes; ``listed`` undoes
    this, also after headers of the mapping have been replaced, added or removed.
    """
    found = {name: value or b"" for name, value in pairs}
    counts = Counter(name for name, _ in pairs)
    entries = [
        name
        if value is not None and counts[name] == 1 and name != HEADER_LIST
        else [name, None if value is None else base64.b64encode(value).decode()]
        for name, value in pairs
    ]
    if all(isinstance(one, str) for one in entries):
        return found
    return {**found, HEADER_LIST: json.dumps(entries).encode()}


def in_order(headers: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Return headers for a JSON column, which keeps no order, with one that holds it."""
    if len(headers) < 2 or HEADER_LIST in headers:
        return headers
    return {**headers, HEADER_LIST: json.dumps(list(headers)).encode()}


def listed(headers: Mapping[str, bytes]) -> list[tuple[str, bytes | None]]:
    """Return all headers, in order: those of the same name and those without a value, too.

    A header of the mapping that was replaced takes the place of all of its name; one that was added
    comes last.
    """
    left = dict(headers)
    entries = _entries(left.pop(HEADER_LIST, None))
    last = {name: value for name, value, is_given in entries if is_given}
    result: list[tuple[str, bytes | None]] = []
    for name, value, is_given in entries:
        if name == HEADER_LIST:
            result += [(name, value)] if is_given else []
        elif is_given and name in headers and headers[name] == (last[name] or b""):
            result.append((name, value))
            left.pop(name, None)
        elif name in left:
            result.append((name, left.pop(name)))
    return [*result, *left.items()]


def _entries(stored: bytes | None) -> list[tuple[str, bytes | None, bool]]:
    """Return names and values of a ``HEADER_LIST``, and whether a value is given there; [] for a
    header that ``folded`` has not written."""
    entries: list[tuple[str, bytes | None, bool]] = []
    try:
        for one in json.loads(stored or b"[]"):
            is_given = not isinstance(one, str)
            name, value = one if is_given else (one, None)
            if not isinstance(name, str):
                return []
            entries.append((name, None if value is None else base64.b64decode(value), is_given))
    except (ValueError, TypeError, RecursionError):
        return []
    return entries


def for_row(headers: Mapping[str, bytes]) -> dict[str, Any]:
    """Make headers fit ``Job.headers``: text as text, other bytes as ``{"base64": …}``."""
    stored: dict[str, Any] = {}
    for name, value in headers.items():
        try:
            text = (value or b"").decode()
        except UnicodeDecodeError:
            text = "\0"
        is_text = text == storable_text(text)
        kept = text if is_text else {"base64": base64.b64encode(value).decode()}
        stored[storable_text(name)] = kept
    return stored


def from_row(stored: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Undo ``for_row``."""
    found = {}
    for name, value in (stored or {}).items():
        is_text = isinstance(value, str)
        found[name] = value.encode() if is_text else base64.b64decode(value["base64"])
    return _in_their_order(found)


def origin_envelope(headers: Mapping[str, bytes], sent: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the header that keeps those a retry overwrites; none where it overwrites nothing.

    :param headers: of the message nobody enqueued here.
    :param sent: those of its retry.
    """
    own = {name: headers[name] for name in sorted(OF_A_MESSAGE) if name in headers}
    if ID in own and all(sent.get(name) == value for name, value in own.items()):
        return {}
    return {ORIGIN_ENVELOPE: json.dumps(to_json(own)).encode()}


def without_envelope(headers: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the headers of a retry as the message had them that nobody enqueued here."""
    try:
        own: Mapping[str, bytes] = from_json(json.loads(headers[ORIGIN_ENVELOPE]))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        kept = {CONTENT_TYPE} & headers.keys()
        own = {name: headers[name] for name in kept}
    return {
        name: own.get(name, value)
        for name, value in headers.items()
        if (name not in OF_A_MESSAGE or name in own)
        and name != ORIGIN_ENVELOPE
        and not name.startswith(DLQ_PREFIX)
    }


def to_json(headers: Mapping[str, bytes]) -> dict[str, str]:
    """Make headers storable in a JSON column without losing a byte."""
    return {
        storable_text(name): base64.b64encode(value or b"").decode()
        for name, value in headers.items()
    }


def from_json(stored: Mapping[str, str]) -> dict[str, bytes]:
    """Undo ``to_json``.

    :raises ValueError, TypeError, AttributeError: it is not what that writes.
    """
    return _in_their_order({name: a2b_base64(value) for name, value in stored.items()})


def from_any_json(stored: Any) -> dict[str, bytes]:
    """Undo ``to_json``. A value that it has not written is taken as the text that it is: a row that
    somebody else has stored must not keep those behind it from being read."""
    try:
        return from_json(stored)
    except (AttributeError, TypeError, ValueError):
        odd = stored if isinstance(stored, Mapping) else {}
        return _in_their_order({name: _decoded(value) for name, value in odd.items()})


def _decoded(value: Any) -> bytes:
    try:
        return a2b_base64(value)
    except (TypeError, ValueError):
        text = value if isinstance(value, str) else json.dumps(value)
        return text.encode("utf-8", "replace")


def _in_their_order(headers: dict[str, bytes]) -> dict[str, bytes]:
    return folded(listed(headers)) if HEADER_LIST in headers else headers


# --- The message of a record ----------------------------------------------------------------------


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
    """The unique id of the row that holds the retries of a message nobody enqueued here; the
    message's id if not given. Needed where an id alone does not tell two messages apart."""

    @property
    def row_name(self) -> str:
        """The unique id of the row a first failure leaves."""
        return self.unique_id or self.id


def message_id(id: str, generation: int) -> str:
    """Name one generation of a job; the first keeps the job's bare id."""
    return id if generation <= 1 else f"{id}:{generation}"


def read_message(
    value: bytes | None,
    headers: Mapping[str, bytes],
    *,
    max_bytes: int,
    timestamp: datetime | None = None,
) -> Message:
    """Read a record's message.

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
    job_id = headers.get(JOB_ID, b"").decode("utf-8", "replace")
    if "\x00" in job_id or len(job_id) > MAX_ID_LENGTH:
        raise MessageError("invalid", f"The {JOB_ID!r} header is not a usable identifier")
    identifiers = {}
    for name, limit in ((ID, MAX_ID_LENGTH), (TYPE, MAX_TYPE_LENGTH)):
        raw = headers.get(name)
        if not raw:
            raise MessageError("invalid", f"The message has no {name!r} header")
        try:
            identifiers[name] = raw.decode()
        except UnicodeDecodeError:
            raise MessageError("invalid", f"The {name!r} header is not valid UTF-8") from None
        if len(identifiers[name]) > limit or "\x00" in identifiers[name]:
            raise MessageError("invalid", f"The {name!r} header is not a usable identifier")
    return Message(
        id=identifiers[ID],
        type=identifiers[TYPE],
        payload=value,
        content_type=headers.get(CONTENT_TYPE, b"application/json").decode("utf-8", "replace"),
        job_id=job_id or None,
        service=headers.get(SERVICE, b"").decode("utf-8", "replace"),
        generation=number(headers, GENERATION, 1),
        attempt=number(headers, ATTEMPT, 1),
        replay_count=number(headers, REPLAY_COUNT, 0),
        timestamp=timestamp,
    )


# --- What a handler's own publications inherit ----------------------------------------------------
#
# The trace and the correlation of a request follow it through jobs and events without anybody
# passing them on: whatever is enqueued or published while a handler runs carries them too.


MAX_CORRELATION = 255
"""Characters of a correlation id that are inherited: an event's metadata takes no more."""
INHERITED = (TRACEPARENT, TRACESTATE, CORRELATION_ID)

inheriting: ContextVar[Mapping[str, str] | None] = ContextVar("kjo_inheriting", default=None)
"""What a handler's own publications inherit while it runs."""


def usable(given: Mapping[str, str]) -> dict[str, str]:
    """Return the values as a row, and an event's metadata, can hold them: others wrote them, and
    must not be able to fail the publications of a handler."""
    found = {}
    for name, value in given.items():
        usable = storable_text(value, MAX_CORRELATION if name == CORRELATION_ID else None)
        if usable and not usable.isspace():
            found[name] = usable
    return found


@contextmanager
def carrying(headers: Mapping[str, str], *, causation_id: str) -> Iterator[None]:
    """Let what is published within the block inherit from these headers of an event.

    :param causation_id: the event's id.
    """
    given = {name: headers[name] for name in INHERITED if headers.get(name)}
    token = inheriting.set(usable({**given, "causation-id": causation_id}))
    try:
        yield
    finally:
        inheriting.reset(token)


def inherited() -> dict[str, str]:
    """Return the headers a message published now inherits; none outside a handler, but for the
    current trace where there is a tracer."""
    outer = inheriting.get() or {}
    found = {name: value for name, value in outer.items() if name != "causation-id"}
    if tracing.tracer is None:
        return found
    current = tracing.tracer.headers()
    if current:
        # The state belongs to its trace, and the message's may be another.
        found.pop(TRACESTATE, None)
    return found | current


def cause() -> str | None:
    """Return the id of the event being handled, or None."""
    return (inheriting.get() or {}).get("causation-id")
