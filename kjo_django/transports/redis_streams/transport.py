"""Redis or Valkey streams as a transport, on the raw connection of a django-redis cache.

A topic is a stream, a consumer group is the stream's own. Entries are shared out one by one, so
there is no order of a key *between* consumers (``capabilities.ordering`` is False); within one
worker the lanes keep it. What a crashed consumer owned is claimed by others once it has been silent
for the lease. An entry is removed only when it is older than ``RETENTION`` *and* every group has
acknowledged it: undelivered work is never trimmed, whatever the length of the stream.

``OPTIONS``:

``CACHE``
    Alias in ``CACHES``, default "default".
``KEY_PREFIX``
    Put before every topic to make the stream's key, default "".
``RETENTION``
    How long acknowledged entries stay readable for another group (timedelta or seconds), default
    one day. They take memory.

An entry's fields are ``kjo:h`` (headers as JSON, values in base64), ``kjo:v`` (value) and ``kjo:k``
(key); the last two are absent for None. An entry without ``kjo:h`` was written by another program:
its value is its fields as a JSON object. What is no UTF-8 is ``{"base64": …}`` there, and in a
field's name ``base64:…``.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from django.core.cache import InvalidCacheBackendError
from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext
from django_redis import get_redis_connection
from redis.exceptions import RedisError, ResponseError

from kjo_django.exceptions import PublishError
from kjo_django.ids import uuid7
from kjo_django.logs import get_logger
from kjo_django.messages.headers import from_json, to_json
from kjo_django.probing import answer_within
from kjo_django.transports.base import (
    AssignedCallback,
    Capabilities,
    OutgoingRecord,
    Published,
    Record,
    RevokedCallback,
    TopicPartition,
    Transport,
    timestamp_of,
)
from kjo_django.transports.leased_records import LeasedSubscription
from kjo_django.values import duration

logger = get_logger("kjo_django")

PIPELINE = 500
"""Entries sent in one round trip."""
AT_ONCE, BYTES_FOR_EACH = 8, 1024**2
"""Redis knows no limit of bytes. Entries read before their size is looked at: one for so many bytes
of the limit, some at most."""
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


# KEYS: the streams. ARGV: group, consumer, entries of each stream at most, bytes at most, entries
# read at once.
_READ = """
local found, size, most = {}, 0, tonumber(ARGV[4])
for _, stream in ipairs(KEYS) do
    local entries, left = {}, tonumber(ARGV[3])
    while left > 0 and size < most do
        local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2],
            'COUNT', math.min(left, tonumber(ARGV[5])), 'STREAMS', stream, '>')
        if not reply then break end
        for _, entry in ipairs(reply[1][2]) do
            entries[#entries + 1] = entry
            left = left - 1
            for _, part in ipairs(entry[2]) do size = size + #part end
        end
    end
    found[#found + 1] = {stream, entries}
end
return found
"""


class RedisStreamsTransport(Transport):
    """See the module."""

    capabilities = Capabilities(ordering=False, delay=False, transactional=False, replay=True)
    known_options = frozenset({"CACHE", "KEY_PREFIX", "RETENTION"})

    def __init__(self, alias: str, options: Mapping[str, Any]) -> None:
        super().__init__(alias, options)
        self._cache = str(self.options.get("CACHE", "default"))
        self._prefix = str(self.options.get("KEY_PREFIX", ""))
        try:
            self._retention = duration(self.options.get("RETENTION", timedelta(days=1)))
        except ValueError as error:
            raise ImproperlyConfigured(f"{self._where('RETENTION')} must be {error}.") from None
        self.client()  # connects to nothing, and refuses a cache that is none of django-redis

    def _where(self, option: str) -> str:
        return f"KJO['TRANSPORTS'][{self.alias!r}]['OPTIONS'][{option!r}]"

    def client(self) -> Any:
        """Return the raw client; its pool is made anew after a fork."""
        try:
            return get_redis_connection(self._cache, write=True)
        except (InvalidCacheBackendError, NotImplementedError) as error:
            raise ImproperlyConfigured(
                f"{self._where('CACHE')} names {self._cache!r}, which is not a cache of "
                f"django-redis: {error}"
            ) from error
        except ValueError:
            # Without the error's text, which may hold part of a password with a / or ?.
            raise ImproperlyConfigured(
                f"The LOCATION of CACHES[{self._cache!r}] is not a redis:// or rediss:// URL. A "
                "password's special characters are %2F (/), %3F (?), %23 (#) and %40 (@)."
            ) from None

    def stream(self, topic: str) -> str:
        """Return the key of a topic's stream."""
        return f"{self._prefix}{topic}"

    # --- Publishing -------------------------------------------------------------------------------

    def publish(self, records: Sequence[OutgoingRecord]) -> list[Published]:
        """XADD every record, ``PIPELINE`` at a time; each answer is its own."""
        answers: list[Published] = []
        for start in range(0, len(records), PIPELINE):
            answers += self._add(records[start : start + PIPELINE])
        return answers

    def _add(self, records: Sequence[OutgoingRecord]) -> list[Published]:
        pipeline = self.client().pipeline(transaction=False)
        for record in records:
            pipeline.xadd(self.stream(record.topic), fields_of(record))
        try:
            replies = pipeline.execute(raise_on_error=False)
        except RedisError as error:
            # Some may be stored: they are published again, and consumers skip the duplicates.
            return [Published(error=f"Redis did not answer: {error}") for _ in records]
        return [
            Published(error=str(reply))
            if isinstance(reply, Exception)
            else Published(partition=0, offset=offset_of(reply))
            for reply in replies
        ]

    # --- Subscribing ------------------------------------------------------------------------------

    def subscribe(
        self,
        topics: Sequence[str],
        group: str,
        *,
        lease: timedelta = timedelta(seconds=30),
        on_revoked: RevokedCallback | None = None,
        on_assigned: AssignedCallback | None = None,
    ) -> RedisStreamsSubscription:
        """Open a view of the streams; each is one partition, shared entry by entry."""
        return RedisStreamsSubscription(
            self.client,
            {topic: self.stream(topic) for topic in topics},
            group,
            lease=lease,
            retention=self._retention,
            on_revoked=on_revoked,
            on_assigned=on_assigned,
        )

    def close(self) -> None:
        """Nothing is kept open: the pool is django-redis' own."""

    def lag(self, topics: Sequence[str], group: str) -> dict[TopicPartition, int]:
        """Count what the group has not acknowledged: waiting and in flight."""
        with self._asking() as client:
            return {
                TopicPartition(topic, 0): lag_of(client, self.stream(topic), group)
                for topic in topics
            }

    def probe(self, timeout: float) -> str:
        """Return the version of what answered."""
        with self._asking() as client:
            try:
                info = answer_within(timeout, lambda: client.info("server"))
            except TimeoutError as error:
                text = f"Redis does not answer by the cache {self._cache!r}: {error}"
                raise PublishError(text) from error
        version = info.get("valkey_version") or info.get("redis_version", "?")
        return gettext("Redis %(version)s by the cache %(cache)r") % {
            "version": version,
            "cache": self._cache,
        }

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        try:
            yield self.client()
        except ResponseError as error:
            raise PublishError(f"Redis refused: {error}") from error
        except RedisError as error:
            raise PublishError(
                f"Redis cannot be reached by the cache {self._cache!r}: {error}"
            ) from error


class RedisStreamsSubscription(LeasedSubscription):
    """See the contract. A record's token names the consumer, the stream and the entry.

    :param client: gives the raw client.
    :param streams: the key of each topic's stream.
    """

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
        super().__init__(streams, group, on_revoked=on_revoked, on_assigned=on_assigned)
        self._client = client
        self._streams = dict(streams)
        self._topics_of = {stream: topic for topic, stream in streams.items()}
        self._name = f"kjo-{uuid7().hex}"
        self._lease = lease.total_seconds()
        self._retention = retention
        self._is_open = False
        self._backoff = 0.0
        self._read_count = 0
        self._may_have_more = True
        """Whether more may wait than is read at once."""
        self._looked_at: dict[str, str] = {}
        self._claim_at = self._renew_at = self._trim_at = 0.0

    # --- Polling ----------------------------------------------------------------------------------

    def _wait(self, longest: float) -> bool:
        """Return whether it was woken: an attempt has waited already."""
        return self._woken.is_set()

    def _attempt(self, max_records: int, max_bytes: int, deadline: float) -> list[Record]:
        """Send what is due and read; a lost group is made again, from the beginning."""
        try:
            client = self._client()
            if not self._is_open:
                self._open(client)
            self._write_settled()
            self._keep(client)
            records = self._read(client, max_records, max_bytes, deadline)
        except RedisError as error:
            # Servers before Redis 7 put the name of a script before its error.
            if isinstance(error, ResponseError) and "NOGROUP" in str(error):
                self._is_open = False
            self.last_error = f"Redis: {error}"
            # Ever longer; a poll of no length does not wait.
            self._backoff = min(max(0.1, self._backoff * 2), LONGEST_BACKOFF)
            self._woken.wait(max(0.0, min(self._backoff, deadline - time.monotonic())))
            return []
        self.last_error, self._backoff = None, 0.0
        return records

    def _open(self, client: Any) -> None:
        for stream in self._topics_of:
            try:
                client.xgroup_create(stream, self._group, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise
        self._is_open = True

    def _read(self, client: Any, max_records: int, max_bytes: int, deadline: float) -> list[Record]:
        """Read a few entries, waiting for the first; of a backlog as many as are wanted."""
        active = [self._streams[topic] for topic in self._wanted_topics()]
        if max_records <= 0 or not active:
            self._woken.wait(max(0.0, min(SLICE, deadline - time.monotonic())))
            return []
        active = self._rotated(active)
        if records := self._claim(client, active, max_records, max_bytes):
            return records
        # COUNT is for each stream: divided, so that together they keep to the limit.
        count = max(1, max_records // len(active))
        few = min(count, _few(max_bytes))
        active = active[:max_records]
        if self._may_have_more:
            given = [self._group, self._name, count, max_bytes, few]
            for stream, entries in client.eval(_READ, len(active), *active, *given):
                pairs = ((id, dict(zip(f[::2], f[1::2], strict=True))) for id, f in entries)
                records += self._take(text_of(stream), pairs)
            self._may_have_more = bool(records)
            if records:
                return records
        return self._wait_for_entries(client, active, few, deadline)

    def _rotated(self, active: list[str]) -> list[str]:
        """Return the streams in the order of this read. Each is the first at times: there may be
        room for no other."""
        self._read_count += 1
        start = self._read_count % len(active)
        return active[start:] + active[:start]

    def _wait_for_entries(
        self, client: Any, active: Sequence[str], few: int, deadline: float
    ) -> list[Record]:
        """Wait for new entries, and return a few of each stream."""
        records: list[Record] = []
        wait = int(1000 * max(0.0, min(SLICE, deadline - time.monotonic())))
        asked = dict.fromkeys(active, ">")
        replies = client.xreadgroup(self._group, self._name, asked, count=few, block=wait or None)
        if isinstance(replies, dict):  # RESP3
            replies = [(stream, entries[0]) for stream, entries in replies.items()]
        for stream, entries in replies or ():
            self._may_have_more |= len(entries) >= few
            records += self._take(text_of(stream), entries)
        return records

    def _claim(
        self, client: Any, active: Sequence[str], limit: int, max_bytes: int
    ) -> list[Record]:
        """Claim the entries of consumers that have been silent for the lease.

        One call looks at ten entries for each that is wanted, the next one at those behind them.
        """
        if time.monotonic() < self._claim_at or max_bytes <= 0:
            return []
        records = self._claim_several(client, active, limit, max_bytes)
        if not records and all(self._looked_at[stream] == START for stream in active):
            self._claim_at = time.monotonic() + min(self._lease / 4, 1.0)
        return records

    def _claim_several(
        self, client: Any, active: Sequence[str], limit: int, max_bytes: int
    ) -> list[Record]:
        records: list[Record] = []
        waiting = list(active)
        while waiting:
            stream, count = waiting[0], min(limit - len(records), _few(max_bytes))
            if count <= 0 or max_bytes <= 0:
                return records
            try:
                claimed = self._claim_of(client, stream, count)
            except RedisError:
                if records:
                    # These are owned and renewed: if they were dropped here, nobody would get them.
                    return records
                raise
            records += claimed
            max_bytes -= sum(len(record.value or b"") for record in claimed)
            if not claimed or self._looked_at[stream] == START:
                waiting.pop(0)
        return records

    def _claim_of(self, client: Any, stream: str, count: int) -> list[Record]:
        """Claim so many entries of a stream, from where the last call has ended."""
        reply = client.xautoclaim(
            stream,
            self._group,
            self._name,
            int(self._lease * 1000),
            start_id=self._looked_at.get(stream, START),
            count=count,
        )
        self._looked_at[stream] = text_of(reply[0])
        return self._take(stream, reply[1])

    def _take(self, stream: str, entries: Iterable[Any]) -> list[Record]:
        topic = self._topics_of[stream]
        records = [
            record_of(topic, id, fields, (self._name, stream, id))
            for id, fields in entries
            if fields is not None and (self._name, stream, id) not in self._owned
        ]
        self._hold(records)
        return records

    # --- Entries owned ----------------------------------------------------------------------------

    def _keep(self, client: Any) -> None:
        """Renew what is owned and trim, as far as each is due."""
        now = time.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + self._lease / 3
            with self._lock:
                owned = list(self._owned)
            self._run(_TRANSFER, owned, self._name, 0)
        if now >= self._trim_at:
            self._trim_at = now + TRIM_INTERVAL
            for stream in self._topics_of:
                trim(client, stream, self._retention)

    def _run(self, script: str, tokens: Iterable[Any], *arguments: Any) -> None:
        """Run a script for these entries, some hundred at a time."""
        ids: dict[str, list[bytes]] = {}
        for _, stream, id in tokens:
            ids.setdefault(stream, []).append(id)
        for stream, each in ids.items():
            for start in range(0, len(each), 500):
                given = [self._group, self._name, *arguments, *each[start : start + 500]]
                self._client().eval(script, 1, stream, *given)

    def _delete(self, tokens: Sequence[Any]) -> None:
        self._run(_ACKNOWLEDGE, tokens)

    def flush(self) -> None:
        """Send the acknowledgements to Redis now."""
        try:
            self._write_settled()
        except RedisError as error:
            self.last_error = f"Redis: {error}"

    def release(self, records: Iterable[Record]) -> None:
        """Let others claim these entries; while Redis is away, once their lease is over."""
        mine = self._mine(records)
        self._forget(mine)
        try:
            self._run(_TRANSFER, mine, RELEASED, LONG_SILENT)
        except RedisError as error:
            self.last_error = f"Redis: {error}"

    def _leave(self) -> None:
        try:
            self._write_settled()
            self._run(_TRANSFER, list(self._owned), RELEASED, LONG_SILENT)
            for stream in self._topics_of if self._is_open else ():
                self._delete_consumer(stream)
        except RedisError as error:
            logger.warning(
                "Consumer group %s: its entries return when their lease ends: %s",
                self._group,
                error,
            )

    def _delete_consumer(self, stream: str) -> None:
        """Delete the consumer from the group, unless it has pending entries: they would be lost."""
        client = self._client()
        try:
            if not client.xpending_range(stream, self._group, "-", "+", 1, self._name):
                client.xgroup_delconsumer(stream, self._group, self._name)
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise


def _few(max_bytes: int) -> int:
    return min(AT_ONCE, max(1, max_bytes // BYTES_FOR_EACH))


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


def record_of(topic: str, id: bytes, fields: Mapping[bytes, bytes], token: Any) -> Record:
    """Return an entry as a record."""
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
        token=token,
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
