"""Entries of Redis streams: their form, their ids, and which of them are still needed.

An entry's fields are ``kjo:h`` (headers as JSON, values in base64), ``kjo:v`` (value) and ``kjo:k``
(key); the last two are absent for None. An entry without ``kjo:h`` was written by somebody else:
its value is its fields as a JSON object. What is no UTF-8 is ``{"base64": …}`` there, and in a
field's name ``base64:…``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from redis.exceptions import ResponseError

from kjo_django.messages.headers import from_json, to_json
from kjo_django.transports.base import OutgoingRecord, Record, timestamp_of

HEADERS, VALUE, KEY = b"kjo:h", b"kjo:v", b"kjo:k"
PAGE, MOST_COUNTED = 1_000, 10_000
"""Entries read at once, and in all, where Redis does not say how many there are."""


def fields_of(record: OutgoingRecord) -> dict[bytes, bytes]:
    """Return a record as the fields of an entry."""
    fields = {HEADERS: json.dumps(to_json(record.headers)).encode()}
    if record.value is not None:
        fields[VALUE] = record.value
    if record.key is not None:
        fields[KEY] = record.key
    return fields


def record_of(topic: str, id: bytes, fields: Mapping[bytes, bytes], name: str) -> Record:
    """Return an entry as a record, handed out to the consumer of that name."""
    told = fields.get(HEADERS)
    value: bytes | None
    if told is None:  # written by somebody else
        plain = {_name(name): _content(value) for name, value in fields.items()}
        key, value, headers = None, json.dumps(plain, ensure_ascii=False).encode(), {}
    else:
        key, value = fields.get(KEY), fields.get(VALUE)
        try:
            headers = from_json(json.loads(told))
        except (ValueError, TypeError, AttributeError, RecursionError):
            headers = {}  # unreadable: the record is judged as one without headers
    return Record(
        topic=topic,
        partition=0,
        offset=offset_of(id),
        key=key,
        value=value,
        headers=headers,
        timestamp=timestamp_of(_pair(id)[0]),
        token=(name, id),
    )


def _name(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(name).decode()}"


def _content(value: bytes) -> str | dict[str, str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def offset_of(id: Any) -> int:
    """Return an entry's id as one growing number below 2**63: milliseconds in the high bits.

    An id somebody chose beyond that, of the year 2248 say, is the highest.
    """
    milliseconds, sequence = _pair(id)
    return min(milliseconds, (1 << 43) - 1) << 20 | min(sequence, (1 << 20) - 1)


def _pair(id: Any) -> tuple[int, int]:
    milliseconds, _, sequence = text_of(id).partition("-")
    return int(milliseconds), int(sequence or 0)


def text_of(value: Any) -> str:
    """Return a name or an id, which the client gives as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def trim(client: Any, stream: str, retention: timedelta) -> None:
    """Remove entries older than ``retention`` that every group has acknowledged (RST-F2)."""
    seconds, micros = client.time()
    oldest = (int((seconds - retention.total_seconds()) * 1000) + micros // 1000, 0)
    for group in client.xinfo_groups(stream):
        delivered = _pair(group["last-delivered-id"])
        pending = client.xpending(stream, text_of(group["name"]))
        # The first one that must stay: the oldest in flight, or the one after the last delivered.
        first = _pair(pending["min"]) if pending["pending"] else (delivered[0], delivered[1] + 1)
        oldest = min(oldest, first)
    if oldest > (0, 0):
        client.xtrim(stream, minid=f"{oldest[0]}-{oldest[1]}", approximate=True)


def lag_of(client: Any, stream: str, group: str) -> int:
    """Return the group's entries that wait or are in flight; all of them before it exists."""
    try:
        groups = client.xinfo_groups(stream)
    except ResponseError:
        return 0  # no such stream: nothing was ever published
    for found in groups:
        if text_of(found["name"]) != group:
            continue
        waiting = found.get("lag")
        if waiting is None:  # Redis lost count, as when an entry was deleted
            waiting = _count_after(client, stream, text_of(found["last-delivered-id"]))
        return int(waiting) + int(found["pending"])
    return int(client.xlen(stream))


def _count_after(client: Any, stream: str, id: str) -> int:
    """Count entries by reading them, a lower bound from ``MOST_COUNTED`` on: a backlog may be
    larger than what this process, and the patience of its users, can take."""
    count = 0
    while count < MOST_COUNTED:
        page = client.xrange(stream, min=f"({id}", count=PAGE)
        count += len(page)
        if len(page) < PAGE:
            break
        id = text_of(page[-1][0])
    return count
