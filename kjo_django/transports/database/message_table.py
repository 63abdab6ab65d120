"""The rows of the message table: which are due, who holds them, how databases differ.

What keeps a key at one consumer is in `Claimer`: claims of one topic and group follow one another,
each sees the leases of those before it, and a claim that meets an owner come back to life takes
nothing at all.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import DatabaseError, InterfaceError, OperationalError, connections
from django.db.models import Count, Q, QuerySet, Value
from django.db.models.functions import Coalesce

from kjo_django.clock import Clock
from kjo_django.messages.headers import from_json
from kjo_django.models import TransportMessage, TransportSubscription
from kjo_django.store import store_for
from kjo_django.transports.base import Record, TopicKey, TopicPartition

OUTAGES = (OperationalError, InterfaceError)
"""What a database raises when it is away, restarting, locked, or when it broke a deadlock."""

_LOCKED = ("database is locked", "database table is locked", "database schema is locked")
_BATCH = 5_000


def key_hash(key: bytes) -> int:
    """Return what rows with this key are compared by: 64 bits, signed as databases store them.

    Two keys of one hash are merely treated as one key: they keep a common order.
    """
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big", signed=True)


def is_locked(error: Exception) -> bool:
    """Whether SQLite only asks for another try, some other process writes just now."""
    return any(text in str(error) for text in _LOCKED)


def batches(alias: str, ids: Iterable[int]) -> Iterator[list[int]]:
    """Split ids by what one statement of this database may carry."""
    everything = list(ids)
    limit = connections[alias].features.max_query_params
    size = _BATCH if limit is None else max(1, min(_BATCH, limit - 20))
    for start in range(0, len(everything), size):
        yield everything[start : start + size]


def unleased(now: datetime) -> Q:
    """Rows nobody holds: never handed out, handed back, or left by somebody who is gone."""
    return Q(lease_expires_at__isnull=True) | Q(lease_expires_at__lte=now)


def group_rows(alias: str, group: str) -> QuerySet[TransportMessage]:
    """Every row of a group that is not acknowledged."""
    return TransportMessage.objects.using(alias).filter(consumer_group=group)


def due_rows(
    alias: str,
    topic: str,
    group: str,
    token: str,
    now: datetime,
    skipped: Collection[int] = (),
) -> QuerySet[TransportMessage]:
    """Rows ``token`` may claim now, in order.

    :param skipped: hashes of keys it wants nothing of.

    A key in flight at another consumer is left alone entirely, so a key is at one consumer at a
    time; rows of that key wait, rows of others pass. The busy keys are an uncorrelated subquery on
    purpose: their number is bounded by the rows in flight, and databases hash it once, whereas a
    correlated one tempts PostgreSQL to sort the whole backlog.
    """
    rows = group_rows(alias, group).filter(topic=topic)
    busy = (
        # The topic is hidden in an expression: SQLite would walk the backlog by its index on topic
        # and group, where the partial index leads to the rows in flight.
        group_rows(alias, group)
        .alias(same_topic=Coalesce("topic", Value("")))
        .filter(same_topic=topic, lease_expires_at__gt=now, key_hash__isnull=False)
        # Spelled like the condition of the partial index, or it is not used.
        .exclude(lease_token="")
        .exclude(lease_token=token)
        .values("key_hash")
    )
    due = (
        rows.filter(unleased(now), available_at__lte=now)
        .exclude(lease_token=token)
        .exclude(key_hash__in=busy)
        .order_by("id")
    )
    return due.exclude(key_hash__in=skipped) if skipped else due


def held_rows(alias: str, token: str) -> QuerySet[TransportMessage]:
    """Rows handed out under ``token``, whether or not the lease is still live."""
    rows = TransportMessage.objects.using(alias).filter(lease_token=token)
    return rows.exclude(lease_token="")  # the partial index again


def count_lag(
    alias: str, topics: Sequence[str], group: str, now: datetime
) -> dict[TopicPartition, int]:
    """Count a group's due rows by topic, with those it would adopt by subscribing. Those of delayed
    jobs and retries are not behind before their time."""
    rows = TransportMessage.objects.using(alias).filter(
        topic__in=topics, consumer_group__in=(group, ""), available_at__lte=now
    )
    counts = dict(rows.values_list("topic").annotate(count=Count("id")).order_by())
    return {TopicPartition(topic, 0): counts.get(topic, 0) for topic in topics}


COLUMNS = ("id", "topic", "key", "value", "headers", "published_at")


def to_record(row: Sequence[object], token: str) -> Record:
    """Turn the ``COLUMNS`` of a row into what a consumer sees."""
    number, topic, key, value, stored, published_at = row
    return Record(
        topic=topic,  # type: ignore[arg-type]
        partition=0,
        offset=number,  # type: ignore[arg-type]
        key=None if key is None else bytes(key),  # type: ignore[call-overload]
        value=None if value is None else bytes(value),  # type: ignore[call-overload]
        headers=from_json(stored),  # type: ignore[arg-type]
        timestamp=published_at,  # type: ignore[arg-type]
        token=token,
    )


def delete_held(alias: str, ids: Iterable[int], token: str) -> int:
    """Delete rows that are still held under ``token`` and return how many were.

    A row whose lease was lost belongs to somebody else by now and stays.
    """
    return _change(alias, "DELETE FROM kjo_transport_message WHERE lease_token = %s", [token], ids)


def take_unleased(
    alias: str, ids: Iterable[int], token: str, now: datetime, until: datetime
) -> int:
    """Lease rows nobody holds and return how many were."""
    moment, expiry = map(connections[alias].ops.adapt_datetimefield_value, (now, until))
    return _change(alias, _TAKE, [token, expiry, moment], ids)


_TAKE = """
UPDATE kjo_transport_message SET lease_token = %s, lease_expires_at = %s
WHERE (lease_expires_at IS NULL OR lease_expires_at <= %s)
"""


def _change(alias: str, statement: str, values: list[Any], ids: Iterable[int]) -> int:
    """Execute it for rows with these ids, which Django would prepare one by one."""
    changed = 0
    with connections[alias].cursor() as cursor:
        for chunk in batches(alias, ids):
            places = ", ".join(["%s"] * len(chunk))
            cursor.execute(f"{statement} AND id IN ({places})", [*values, *chunk])
            changed += cursor.rowcount
    return changed


def mend_connection(alias: str) -> None:
    """After an error: drop this thread's connection if it is broken, so the next query reconnects.

    Inside a caller's transaction nothing is touched, its ``atomic`` block cleans up.
    """
    connection = connections[alias]
    if not connection.in_atomic_block:
        try:
            connection.close_if_unusable_or_obsolete()
        except DatabaseError:  # closing a broken connection may itself complain
            connection.connection = None


class Collision(Exception):
    """A row chosen was renewed or settled by its late owner before it could be taken."""


class Claimer:
    """Leases due rows to one consumer, which its token names. Belongs to the thread that polls."""

    def __init__(
        self,
        alias: str,
        topics: Sequence[str],
        group: str,
        token: str,
        lease: timedelta,
        clock: Clock,
    ) -> None:
        self._alias = alias
        self._topics = list(topics)
        self._group = group
        self._token = token
        self._lease = lease
        self._clock = clock
        self._paused: set[TopicPartition] = set()
        self._skipped: dict[str, set[int]] = {}
        self._claim_count = 0
        self._may_have_more = True
        """Whether something may be due: then it is claimed without being looked for first."""
        self.is_contended = False
        """Whether another consumer was claiming at the latest `claim`."""
        self.look_seconds = 0.0
        """How long the latest look for due rows took."""

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Leave these topics alone."""
        self._paused.update(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Claim from these topics again."""
        self._paused.difference_update(partitions)
        self._may_have_more = True

    def skip_keys(self, keys: Collection[TopicKey]) -> None:
        """Leave these keys alone, and no others."""
        skipped: dict[str, set[int]] = {}
        for topic, key in keys:
            skipped.setdefault(topic, set()).add(key_hash(key))
        self._may_have_more = self._may_have_more or skipped != self._skipped
        self._skipped = skipped

    def claim(self, limit: int) -> list[Record]:
        """Lease up to so many rows; empty where nothing is due, or others claim all of it just now.

        :raises Collision: a row chosen was not free any more. Nothing was leased.
        """
        self.is_contended, self.look_seconds = False, 0.0
        due = self._due_topics() if limit > 0 else []
        if not due:
            self._may_have_more = False
            return []
        # A lease lost in a crash of the server is taken anew, as if it had expired: no need to wait
        # for the server's disk.
        with store_for(self._alias).transaction(waits_for_disk=False):
            topics = self._lock_topics(due)
            # Not before the locks: waiting for them takes time.
            now = self._clock.now()
            rows = self._choose(topics, limit, now)
            ids = [row[0] for row in rows]
            # All or none. An owner whose lease had run out may renew or settle at this very moment:
            # taking what is left would let a row overtake an earlier one of its key.
            if take_unleased(self._alias, ids, self._token, now, now + self._lease) != len(ids):
                raise Collision
        self._may_have_more = len(rows) >= limit
        self.is_contended = len(topics) < len(due)
        return [to_record(row, self._token) for row in rows]

    def _due_topics(self) -> list[str]:
        """Return the topics with something to claim, without taking a lock."""
        topics = [t for t in self._topics if TopicPartition(t, 0) not in self._paused]
        if self._may_have_more or not topics:
            return topics
        started = self._clock.monotonic()
        now = self._clock.now()
        waiting = group_rows(self._alias, self._group).filter(
            unleased(now), topic__in=topics, available_at__lte=now
        )
        if waiting.exists():
            # Some of it may belong to keys in flight elsewhere, so ask precisely before locking.
            topics = [topic for topic in topics if self._due_rows(topic, now).exists()]
        else:
            topics = []
        self.look_seconds = self._clock.monotonic() - started
        return topics

    def _lock_topics(self, topics: list[str]) -> list[str]:
        """Become the only claimer of these topics in this group until the transaction ends.

        Returns those nobody else is claiming just now. Since the claims of a topic and group follow
        one another, each sees the leases of the one before: that is what keeps a key at one
        consumer.
        """
        features = connections[self._alias].features
        if not features.has_select_for_update:
            store_for(self._alias).take_write_lock(TransportSubscription)
            return topics
        locked = (
            TransportSubscription.objects.using(self._alias)
            .select_for_update(skip_locked=features.has_select_for_update_skip_locked)
            .filter(topic__in=topics, consumer_group=self._group)
            .order_by("id")
            .values_list("topic", flat=True)
        )
        return list(locked)

    def _choose(self, topics: list[str], limit: int, now: datetime) -> list[tuple[int, ...]]:
        """Return the first due rows, giving each topic its share and what is left to who has more.

        Each claim begins with the topic after the one the claim before began with.
        """
        self._claim_count += 1
        start = self._claim_count % max(1, len(topics))
        waiting = topics[start:] + topics[:start]
        last = dict.fromkeys(topics, 0)
        chosen: list[tuple[int, ...]] = []
        while waiting and len(chosen) < limit:
            topic = waiting.pop(0)
            share = math.ceil((limit - len(chosen)) / (len(waiting) + 1))
            rows = list(
                self._due_rows(topic, now).filter(id__gt=last[topic]).values_list(*COLUMNS)[:share]
            )
            chosen.extend(rows)
            if len(rows) == share:
                last[topic] = rows[-1][0]
                waiting.append(topic)
        return chosen

    def _due_rows(self, topic: str, now: datetime) -> QuerySet[TransportMessage]:
        skipped = self._skipped.get(topic, ())
        return due_rows(self._alias, topic, self._group, self._token, now, skipped)


_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.1
"""Seconds between two looks at SQLite's counter. The look is a few microseconds, waking up for it a
hundred: an idle worker does that ten times a second."""


class CommitWatcher:
    """Waits for a commit of another connection on SQLite, those of this process' other threads
    included. Elsewhere no commit is seen: there, publishers wake listeners.

    Belongs to the thread that polls.
    """

    def __init__(self, alias: str, clock: Clock) -> None:
        self._alias = alias
        self._clock = clock
        self._seen: tuple[Any, Any] = (None, None)
        self._changed_at = 0.0

    def wait(self, woken: threading.Event, timeout: float) -> bool:
        """Wait for ``woken``, for a commit or for so many seconds; return whether it was woken.

        A commit that came since the last wait ends this one at once.
        """
        clock = self._clock
        if connections[self._alias].vendor != "sqlite":
            return clock.wait(woken, timeout)
        deadline = clock.monotonic() + timeout
        while not self._has_changed():
            now = clock.monotonic()
            if now >= deadline:
                return False
            # A tenth of the time without a commit: a later writer was late anyway.
            pause = min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, (now - self._changed_at) / 10))
            if clock.wait(woken, min(pause, deadline - now)):
                return True
        self._changed_at = clock.monotonic()
        return woken.is_set()

    def _has_changed(self) -> bool:
        """Whether the counter is another than at the last look. Each connection has its own, which
        its own commits leave alone."""
        connection: Any = connections[self._alias]
        with connection.wrap_database_errors:
            connection.ensure_connection()
            # Past Django's cursors, which take longer than the look.
            (version,) = connection.connection.execute("PRAGMA data_version").fetchone()
        before, self._seen = self._seen, (connection.connection, version)
        return before != self._seen
