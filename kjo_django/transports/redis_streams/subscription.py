"""A consumer of Redis streams: reads, claims from the silent, acknowledges what is its own.

An entry's fields are ``kjo:h`` (headers as JSON, values in base64), ``kjo:v`` (value) and ``kjo:k``
(key); the last two are absent for None. An entry without ``kjo:h`` was written by another program:
its value is its fields as a JSON object. What is no UTF-8 is ``{"base64": …}`` there, and in a
field's name ``base64:…``.
"""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from redis.exceptions import RedisError, ResponseError

from kjo_django.ids import uuid7
from kjo_django.messages.headers import from_json, to_json
from kjo_django.transports.base import (
    AssignedCallback,
    OutgoingRecord,
    Record,
    RevokedCallback,
    Subscription,
    TopicPartition,
    timestamp_of,
)

logger = logging.getLogger("kjo_django")

SLICE = 0.1
"""Longest wait at once for an entry, and so the longest until ``wake`` is seen."""
RELEASED = "kjo-released"
"""The consumer that holds what was handed back, marked as silent for long: anybody may claim it."""
LONG_SILENT = 10**9
START = "0-0"
"""Where a look at what others hold begins; answered when it has come to the end."""
LONGEST_BACKOFF = 5.0
TRIM_INTERVAL = 30.0

# KEYS: the stream. ARGV: group, consumer, ids. An entry another consumer has claimed meanwhile is
# left alone: its new owner may yet fail, and nobody else would run it then.
_ACKNOWLEDGE = """
local count = 0
for i = 3, #ARGV do
    local found = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)[1]
    if found and found[2] == ARGV[2] then
        count = count + redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
    end
end
return count
"""

# KEYS: the stream. ARGV: group, consumer, new consumer, idle ms, ids. Renews (new consumer = own,
# idle 0) or hands back, but only what is still the consumer's own.
_TRANSFER = """
local count = 0
for i = 5, #ARGV do
    local found = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)[1]
    if found and found[2] == ARGV[2] then
        redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, ARGV[i], 'IDLE', ARGV[4], 'JUSTID')
        count = count + 1
    end
end
return count
"""


class RedisStreamsSubscription(Subscription):
    """See the contract. ``client`` gives the raw client; streams are given by topic."""

    def __init__(
        self,
        client: Callable[[], Any],
        streams: Mapping[str, str],
        group: str,
        *,
        lease: timedelta,
        retention: timedelta,
        on_revoked: RevokedCallback | None,
        on_assigned: AssignedCallback | None,
    ) -> None:
        self._client = client
        self._streams = dict(streams)
        self._topics = {stream: topic for topic, stream in streams.items()}
        self._group = group
        self._name = f"kjo-{uuid7().hex}"
        self._lease = lease.total_seconds()
        self._retention = retention
        self._on_revoked = on_revoked
        self._on_assigned = on_assigned
        self._paused: set[TopicPartition] = set()
        self._held: dict[str, dict[bytes, None]] = {stream: {} for stream in self._topics}
        self._settled: dict[str, list[bytes]] = {}
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._is_open = False
        self._is_closed = False
        self._backoff = 0.0
        self._read_count = 0
        self._looked_at: dict[str, str] = {}
        self._claim_at = self._renew_at = self._trim_at = 0.0

    # --- Polling ----------------------------------------------------------------------------------

    def poll(self, max_records: int, timeout: float) -> list[Record]:
        """See the contract; a lost group is made again, from the beginning."""
        deadline = time.monotonic() + timeout
        while not self._is_closed:
            records = self._attempt(max_records, deadline)
            if records or self._woken.is_set() or time.monotonic() >= deadline:
                self._woken.clear()
                return records
        return []

    def _attempt(self, max_records: int, deadline: float) -> list[Record]:
        try:
            client = self._client()
            self._open(client)
            self._keep(client)
            records = self._read(client, max_records, deadline)
        except ResponseError as error:
            self._is_open = self._is_open and not str(error).startswith("NOGROUP")
            self._wait_after_error(str(error), deadline)
            return []
        except RedisError as error:
            self._wait_after_error(str(error), deadline)
            return []
        self.last_error, self._backoff = None, 0.0
        return records

    def _wait_after_error(self, error: str, deadline: float) -> None:
        """Wait before the next try, ever longer; a poll of no length does not wait."""
        self.last_error = f"Redis: {error}"
        self._backoff = min(max(0.1, self._backoff * 2), LONGEST_BACKOFF)
        self._woken.wait(max(0.0, min(self._backoff, deadline - time.monotonic())))

    def _open(self, client: Any) -> None:
        if self._is_open:
            return
        for stream in self._topics:
            try:
                client.xgroup_create(stream, self._group, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise
        self._is_open = True
        if self._on_assigned is not None:
            self._on_assigned(self.assignment())
            self._on_assigned = None

    def _read(self, client: Any, max_records: int, deadline: float) -> list[Record]:
        active = [s for s, t in self._topics.items() if TopicPartition(t, 0) not in self._paused]
        if max_records <= 0 or not active:
            self._woken.wait(max(0.0, min(SLICE, deadline - time.monotonic())))
            return []
        if len(active) > 1:  # each is the first at times: there may be room for no other
            self._read_count += 1
            start = self._read_count % len(active)
            active = active[start:] + active[:start]
        records = self._claim(client, active, max_records)
        if not records:
            wait = int(1000 * max(0.0, min(SLICE, deadline - time.monotonic())))
            records = self._fetch(client, active, max_records, wait)
        return records

    def _fetch(self, client: Any, active: Sequence[str], limit: int, wait: int) -> list[Record]:
        # COUNT is for each stream: divided, so that together they keep to the limit.
        count = max(1, limit // len(active))
        asked = active[:limit]
        replies = client.xreadgroup(
            self._group, self._name, dict.fromkeys(asked, ">"), count=count, block=wait or None
        )
        if isinstance(replies, dict):  # RESP3
            replies = [(stream, entries[0]) for stream, entries in replies.items()]
        records: list[Record] = []
        for stream, entries in replies or ():
            records += self._take(text_of(stream), entries)
        return records

    def _claim(self, client: Any, active: Sequence[str], limit: int) -> list[Record]:
        """Claim the entries of consumers that have been silent for the lease.

        One call looks at ten entries for each that is wanted, the next one at those behind them.
        """
        if time.monotonic() < self._claim_at:
            return []
        records: list[Record] = []
        for stream in active:
            if len(records) >= limit:
                return records
            try:
                reply = client.xautoclaim(
                    stream,
                    self._group,
                    self._name,
                    int(self._lease * 1000),
                    start_id=self._looked_at.get(stream, START),
                    count=limit - len(records),
                )
            except RedisError:
                if records:
                    # These are held and renewed: if they were dropped here, nobody would get them.
                    return records
                raise
            self._looked_at[stream] = text_of(reply[0])
            records += self._take(stream, reply[1])
        if not records and all(self._looked_at[stream] == START for stream in active):
            self._claim_at = time.monotonic() + min(self._lease / 4, 1.0)
        return records

    def _take(self, stream: str, entries: Iterable[Any]) -> list[Record]:
        topic, held = self._topics[stream], self._held[stream]
        found = [(id, fields) for id, fields in entries if fields is not None and id not in held]
        records = [record_of(topic, id, fields, self._name) for id, fields in found]
        with self._lock:
            held.update(dict.fromkeys(id for id, _ in found))
        return records

    # --- Keeping ----------------------------------------------------------------------------------

    def _keep(self, client: Any) -> None:
        """Send acknowledgements, renew what is held, trim: as far as each is due."""
        self._send_acknowledgements(client)
        now = time.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + self._lease / 3
            with self._lock:
                held = {stream: list(ids) for stream, ids in self._held.items() if ids}
            for stream, ids in held.items():
                self._run(client, _TRANSFER, stream, [self._name, self._name, 0], ids)
        if now >= self._trim_at:
            self._trim_at = now + TRIM_INTERVAL
            for stream in self._topics:
                trim(client, stream, self._retention)

    def _send_acknowledgements(self, client: Any) -> None:
        with self._lock:
            settled, self._settled = self._settled, {}
        try:
            for stream in list(settled):
                self._run(client, _ACKNOWLEDGE, stream, [self._name], settled[stream])
                del settled[stream]
        except RedisError:
            with self._lock:
                for stream, ids in settled.items():
                    self._settled[stream] = ids + self._settled.get(stream, [])
            raise

    def _run(self, client: Any, script: str, stream: str, first: list[Any], ids: Any) -> None:
        for start in range(0, len(ids), 500):
            arguments = [self._group, *first, *ids[start : start + 500]]
            client.eval(script, 1, stream, *arguments)

    # --- Acknowledging and pausing ----------------------------------------------------------------

    def acknowledge(self, records: Iterable[Record]) -> None:
        """Note settled entries; the next poll, ``flush`` or ``close`` sends them at once."""
        with self._lock:
            if self._is_closed:
                return
            for record in records:
                name, stream, id = record.token[0], self._streams.get(record.topic), record.token[1]
                if stream is None or name != self._name or id not in self._held[stream]:
                    continue
                del self._held[stream][id]
                self._settled.setdefault(stream, []).append(id)

    def flush(self) -> None:
        """Send the acknowledgements to Redis now."""
        try:
            self._send_acknowledgements(self._client())
        except RedisError as error:
            self.last_error = f"Redis: {error}"

    supports_release = True

    def release(self, records: Iterable[Record]) -> None:
        """Let others claim these entries; while Redis is away, once their lease is over."""
        given: dict[str, list[bytes]] = {}
        with self._lock:
            for record in records:
                stream, id = self._streams.get(record.topic), record.token[1]
                if stream is not None and self._held[stream].pop(id, ...) is None:
                    given.setdefault(stream, []).append(id)
        try:
            for stream, ids in given.items():
                first = [self._name, RELEASED, LONG_SILENT]
                self._run(self._client(), _TRANSFER, stream, first, ids)
        except RedisError as error:
            self.last_error = f"Redis: {error}"

    def holds(self, record: Record) -> bool:
        """Whether the entry is this consumer's by all it knows."""
        name, id = record.token[0], record.token[1]
        with self._lock:
            held = self._held.get(self._streams.get(record.topic, ""), {})
            return not self._is_closed and name == self._name and id in held

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Read nothing of these streams; what is held stays held."""
        self._paused.update(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Read them again."""
        self._paused.difference_update(partitions)

    def assignment(self) -> list[TopicPartition]:
        """All streams: a group shares entries, not partitions."""
        return [] if self._is_closed else [TopicPartition(topic, 0) for topic in self._streams]

    def wake(self) -> None:
        """Make ``poll`` return within a slice."""
        self._woken.set()

    def lag(self) -> dict[TopicPartition, int] | None:
        """Return what the group has not acknowledged, None while Redis is away."""
        try:
            client = self._client()
            return {
                TopicPartition(topic, 0): lag_of(client, stream, self._group)
                for topic, stream in self._streams.items()
            }
        except RedisError:
            return None

    def close(self) -> None:
        """See the contract."""
        if self._is_closed:
            return
        if self._on_revoked is not None and self._is_open:
            try:
                self._on_revoked(self.assignment(), False)
            except Exception:
                logger.exception("Consumer group %s: a callback failed", self._group)
        try:
            client = self._client()
            self._send_acknowledgements(client)
            for stream, ids in self._held.items():
                if ids:
                    first = [self._name, RELEASED, LONG_SILENT]
                    self._run(client, _TRANSFER, stream, first, list(ids))
                if self._is_open:
                    self._leave(client, stream)
        except RedisError as error:
            logger.warning(
                "Consumer group %s: its entries return when their lease ends: %s",
                self._group,
                error,
            )
        with self._lock:
            self._is_closed = True

    def _leave(self, client: Any, stream: str) -> None:
        """Delete the consumer from the group, unless it has pending entries: they would be lost."""
        try:
            if not client.xpending_range(stream, self._group, "-", "+", 1, self._name):
                client.xgroup_delconsumer(stream, self._group, self._name)
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise


# --- Entries -------------------------------------------------------------------------------------

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
    stored = fields.get(HEADERS)
    value: bytes | None
    if stored is None:  # written by somebody else
        plain = {_name(name): _content(value) for name, value in fields.items()}
        key, value, headers = None, json.dumps(plain, ensure_ascii=False).encode(), {}
    else:
        key, value = fields.get(KEY), fields.get(VALUE)
        try:
            headers = from_json(json.loads(stored))
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
    """Remove entries older than ``retention`` that every group has acknowledged."""
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
