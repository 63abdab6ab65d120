"""The rows of the database transport: which are due, who holds them, how databases differ."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from django.db import DatabaseError, InterfaceError, OperationalError, connections, router
from django.db.models import Count, Q, QuerySet, Value
from django.db.models.functions import Coalesce
from django.utils import timezone

from kjo_django.conf import get_settings
from kjo_django.messages.headers import from_json
from kjo_django.models import TransportMessage
from kjo_django.transports.base import Record, TopicPartition

OUTAGES = (OperationalError, InterfaceError)
"""What a database raises when it is away, restarting, locked, or when it broke a deadlock."""

_LOCKED = ("database is locked", "database table is locked", "database schema is locked")
_BATCH = 5_000


def choose_alias(option: str | None) -> str:
    """Return the database of the tables: the option, ``KJO["DATABASE"]`` or the router's choice."""
    return option or get_settings().database or router.db_for_write(TransportMessage)


def key_hash(key: bytes | None) -> int | None:
    """Return what keys are compared by: 64 bits, signed as databases store them.

    Two keys of one hash are merely treated as one key: they keep a common order.
    """
    return None if key is None else hash_of(key)


def hash_of(key: bytes) -> int:
    """Return what rows with this key are compared by."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big", signed=True)


def is_locked(error: Exception) -> bool:
    """Whether SQLite only asks for another try, some other process writes just now."""
    return any(text in str(error) for text in _LOCKED)


def commit_lazily(alias: str) -> None:
    """Spare PostgreSQL the wait for its disk at the end of this transaction.

    For leases only: one lost in a crash of the server is taken anew, as if it had expired.
    """
    if connections[alias].vendor == "postgresql":
        with connections[alias].cursor() as cursor:
            cursor.execute("SET LOCAL synchronous_commit TO off")


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


def count_lag(alias: str, topics: Sequence[str], group: str) -> dict[TopicPartition, int]:
    """Count a group's due rows by topic, with those it would adopt by subscribing. Those of delayed
    jobs and retries are not behind before their time."""
    rows = TransportMessage.objects.using(alias).filter(
        topic__in=topics, consumer_group__in=(group, ""), available_at__lte=timezone.now()
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


class Backoff:
    """How long to leave a database alone after outages in a row; jittered, so that consumers which
    met the same outage do not come back as a herd."""

    def __init__(self, first: float = 0.1, longest: float = 5.0) -> None:
        self._first = first
        self._longest = longest
        self._failures = 0
        self._until = 0.0

    @property
    def remaining(self) -> float:
        """Seconds until the next try makes sense; 0 when all is well."""
        return max(0.0, self._until - time.monotonic())

    @property
    def failures(self) -> int:
        """Failures since the last success."""
        return self._failures

    def failed(self) -> None:
        """Wait longer."""
        delay = min(self._longest, self._first * 2.0**self._failures)
        self._failures += 1
        self._until = time.monotonic() + delay * random.uniform(0.5, 1.0)  # noqa: S311

    def succeeded(self) -> None:
        """Start over."""
        self._failures = 0
        self._until = 0.0
