"""A consumer of Redis streams: reads, claims from the silent, acknowledges what is its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from redis.exceptions import RedisError, ResponseError

from kjo_django.ids import uuid7
from kjo_django.transports.base import (
    AssignedCallback,
    Record,
    RevokedCallback,
    Subscription,
    TopicPartition,
)
from kjo_django.transports.redis_streams.entries import lag_of, record_of, text_of, trim

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
        self._turn = 0
        self._looked_at: dict[str, str] = {}
        self._claim_at = self._renew_at = self._trim_at = 0.0

    # --- Polling ----------------------------------------------------------------------------------

    def poll(self, max_records: int, timeout: float) -> list[Record]:
        """See the contract; a lost group is made again, from the beginning (RST-F9, F10)."""
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
            self._rest(str(error), deadline)
            return []
        except RedisError as error:
            self._rest(str(error), deadline)
            return []
        self.last_error, self._backoff = None, 0.0
        return records

    def _rest(self, error: str, deadline: float) -> None:
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
        if len(active) > 1:  # each is the first in its turn: there may be room for no other
            self._turn += 1
            start = self._turn % len(active)
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
        """Take over what others were handed and have been silent about for the lease (RST-F1).

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
                    # Those of the streams before are held and renewed: lost, nobody gets them.
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

    # --- The rest of the contract -----------------------------------------------------------------

    def acknowledge(self, records: Iterable[Record]) -> None:
        """Note them; the next poll, ``flush`` or ``close`` tells Redis, all in one round trip."""
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
        """Tell Redis now."""
        try:
            self._send_acknowledgements(self._client())
        except RedisError as error:
            self.last_error = f"Redis: {error}"

    hands_back = True

    def hand_back(self, records: Iterable[Record]) -> None:
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
                logger.exception("A callback of consumer group %s failed", self._group)
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
            logger.warning("Leaving group %s late, by its lease: %s", self._group, error)
        with self._lock:
            self._is_closed = True

    def _leave(self, client: Any, stream: str) -> None:
        """Forget the consumer's name, unless entries still hang on it: they would be lost."""
        try:
            if not client.xpending_range(stream, self._group, "-", "+", 1, self._name):
                client.xgroup_delconsumer(stream, self._group, self._name)
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
