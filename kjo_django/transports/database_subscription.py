"""A consumer group's view of the message table.

Many processes share a group: each claims rows under its own token, for as long as it shows signs of
life. Clocks are the hosts' own, so they must agree to well within the lease.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta

from django.db import connections, transaction
from django.utils import timezone

from kjo_django.models import TransportMessage, TransportSubscription
from kjo_django.transports.base import (
    AssignedCallback,
    Record,
    RevokedCallback,
    Subscription,
    TopicPartition,
)
from kjo_django.transports.database_rows import (
    COLUMNS,
    OUTAGES,
    Backoff,
    batches,
    commit_lazily,
    count_lag,
    delete_held,
    due_rows,
    group_rows,
    held_rows,
    is_locked,
    mend_connection,
    take_write_lock,
    to_record,
    unleased,
)

logger = logging.getLogger("kjo_django.transports.database")

_SHORTEST_WAIT = 0.005
_HOUSEKEEPING = 2.0
_TRIES_OF_FLUSH = 5
_PATIENCE_WITH_LOCKS = 3
"""Lock errors in a row before they are reported: each has waited for SQLite's own timeout."""


class _Collision(Exception):
    """A row chosen was renewed or settled by its late owner before it could be taken."""


class DatabaseSubscription(Subscription):
    """See ``Subscription``. Each topic is one partition; there is no rebalancing.

    :param on_registered: told when the group's interest in its topics is committed.
    """

    joins_transactions = True

    def __init__(
        self,
        alias: str,
        topics: Sequence[str],
        group: str,
        *,
        lease: timedelta,
        poll_interval: float,
        on_registered: Callable[[], None],
        on_revoked: RevokedCallback | None = None,
        on_assigned: AssignedCallback | None = None,
    ) -> None:
        self._alias = alias
        self._topics = list(dict.fromkeys(topics))
        self._group = group
        self._lease = lease
        self._token = uuid.uuid4().hex
        self._on_registered = on_registered
        self._on_revoked = on_revoked
        self._on_assigned = on_assigned
        self._paused: set[TopicPartition] = set()
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self._settled: set[int] = set()
        self._wake = threading.Event()
        self._backoff = Backoff()
        self._longest_wait = poll_interval
        self._wait = _SHORTEST_WAIT
        self._turn = 0
        self._more = True
        self._renew_at = 0.0
        self._housekeep_at = 0.0
        self._closed = False
        self._attempt(0)

    # --- Polling ----------------------------------------------------------------------------------

    def poll(self, max_records: int, timeout: float) -> list[Record]:
        """Claim rows that are due. While it waits it renews leases and writes acknowledgements.

        Every wait is a plain SELECT, at most ``POLL_INTERVAL`` apart: an idle consumer writes
        nothing. A database that is away or locked makes it wait longer, see ``last_error``.
        """
        if self._closed:
            return []
        deadline = time.monotonic() + timeout
        self._announce()
        while True:
            records = self._attempt(max_records)
            remaining = deadline - time.monotonic()
            if records or remaining <= 0:
                return records
            if self._wake.wait(min(self._next_wait(), remaining)):
                self._wake.clear()
                self._wait = _SHORTEST_WAIT
                return []

    def _announce(self) -> None:
        callback, self._on_assigned = self._on_assigned, None
        if callback is not None:
            callback(self.assignment())

    def _next_wait(self) -> float:
        """Short after activity, doubling up to POLL_INTERVAL; longer while the database is away."""
        wait = self._wait
        self._wait = min(self._longest_wait, wait * 2)
        return max(wait * random.uniform(0.75, 1.0), self._backoff.remaining)  # noqa: S311

    def _attempt(self, max_records: int) -> list[Record]:
        """One round of everything that needs the database; an outage ends it, empty."""
        if self._backoff.remaining:
            return []
        try:
            self._housekeep()
            self._write_settled()
            self._renew()
            records = self._claim(max_records)
        except OUTAGES as error:
            self._note_outage(error)
            return []
        except _Collision:
            self._wait = _SHORTEST_WAIT
            return []
        self._backoff.succeeded()
        self.last_error = None
        return records

    def _note_outage(self, error: Exception) -> None:
        self._backoff.failed()
        if is_locked(error):
            if self._backoff.failures < _PATIENCE_WITH_LOCKS:
                return
        else:
            mend_connection(self._alias)
        if self.last_error is None:
            logger.warning("Database %r cannot be polled, trying again: %s", self._alias, error)
        self.last_error = str(error)

    # --- Membership -------------------------------------------------------------------------------

    def _housekeep(self) -> None:
        """Keep the group registered, and adopt what was published before anybody subscribed.

        Again and again, since a publisher that saw no group may commit after we registered, and
        since the tables may be emptied under a running worker.
        """
        if time.monotonic() < self._housekeep_at:
            return
        subscriptions = TransportSubscription.objects.using(self._alias)
        known = set(
            subscriptions.filter(topic__in=self._topics, consumer_group=self._group).values_list(
                "topic", flat=True
            )
        )
        for topic in self._topics:
            if topic not in known:
                subscriptions.get_or_create(topic=topic, consumer_group=self._group)
        if len(known) < len(self._topics):
            self._on_registered()
        orphans = group_rows(self._alias, "").filter(topic__in=self._topics)
        if orphans.exists():
            orphans.update(consumer_group=self._group)
        self._housekeep_at = time.monotonic() + _HOUSEKEEPING

    def _renew(self) -> None:
        if time.monotonic() < self._renew_at:
            return
        if self._held:
            held_rows(self._alias, self._token).update(
                lease_expires_at=timezone.now() + self._lease
            )
        self._renew_at = time.monotonic() + self._lease.total_seconds() / 3

    # --- Claiming ---------------------------------------------------------------------------------

    def _claim(self, limit: int) -> list[Record]:
        due = self._due_topics() if limit > 0 else []
        if not due:
            self._more = False
            return []
        is_nested = connections[self._alias].in_atomic_block
        with transaction.atomic(using=self._alias):
            if not is_nested:
                commit_lazily(self._alias)
            topics = self._lock_topics(due)
            # Not before the locks: waiting for them takes time.
            now = timezone.now()
            rows = self._choose(topics, limit, now)
            self._take([row[0] for row in rows], now)
        self._more = len(rows) >= limit
        if rows or len(topics) < len(due):
            # Something happens here, or another consumer claims just now: come back soon.
            self._wait = _SHORTEST_WAIT
        with self._lock:
            self._held.update(row[0] for row in rows)
        return [to_record(row, self._token) for row in rows]

    def _due_topics(self) -> list[str]:
        """Return the topics with something to claim, without taking a lock."""
        topics = [t for t in self._topics if TopicPartition(t, 0) not in self._paused]
        if self._more or not topics:
            return topics
        started = time.monotonic()
        now = timezone.now()
        waiting = group_rows(self._alias, self._group).filter(
            unleased(now), topic__in=topics, available_at__lte=now
        )
        if waiting.exists():
            # Some of it may belong to keys in flight elsewhere, so ask precisely before locking.
            topics = [
                topic
                for topic in topics
                if due_rows(self._alias, topic, self._group, self._token, now).exists()
            ]
        else:
            topics = []
        # Walking past a backlog of delayed or busy rows takes time: no more than a tenth of it.
        self._wait = max(self._wait, 9 * (time.monotonic() - started))
        return topics

    def _lock_topics(self, topics: list[str]) -> list[str]:
        """Become the only claimer of these topics in this group until the transaction ends.

        Returns those nobody else is claiming just now. With every claim of a topic and group in
        turn, each sees the leases of the one before: that is what keeps a key at one consumer.
        """
        features = connections[self._alias].features
        if not features.has_select_for_update:
            take_write_lock(self._alias)
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
        """Return the first due rows, giving each topic its share and the rest to who has more."""
        self._turn += 1
        start = self._turn % max(1, len(topics))
        waiting = topics[start:] + topics[:start]
        last = dict.fromkeys(topics, 0)
        chosen: list[tuple[int, ...]] = []
        while waiting and len(chosen) < limit:
            topic = waiting.pop(0)
            share = math.ceil((limit - len(chosen)) / (len(waiting) + 1))
            due = due_rows(self._alias, topic, self._group, self._token, now)
            rows = list(due.filter(id__gt=last[topic]).values_list(*COLUMNS)[:share])
            chosen.extend(rows)
            if len(rows) == share:
                last[topic] = rows[-1][0]
                waiting.append(topic)
        return chosen

    def _take(self, ids: list[int], now: datetime) -> None:
        """Lease the rows, all or none.

        An owner whose lease had run out may renew or settle at this very moment. Taking what is
        left would let a row overtake an earlier one of its key, so the claim is undone instead.
        """
        rows = TransportMessage.objects.using(self._alias).filter(unleased(now))
        taken = sum(
            rows.filter(id__in=chunk).update(
                lease_token=self._token, lease_expires_at=now + self._lease
            )
            for chunk in batches(self._alias, ids)
        )
        if taken != len(ids):
            raise _Collision

    # --- Acknowledging ----------------------------------------------------------------------------

    def acknowledge(self, records: Iterable[Record]) -> None:
        """Note settled records; they are deleted in one statement by the next poll or flush."""
        ids = self._mine(records)
        with self._lock:
            self._settled.update(ids)

    def acknowledge_in_transaction(self, records: Iterable[Record]) -> None:
        """Delete the records now, on this thread's connection.

        Inside ``atomic`` the acknowledgement commits or rolls back with everything else there;
        after a roll-back the records are this consumer's still, to settle in another way.
        """
        ids = self._mine(records)
        delete_held(self._alias, ids, self._token)
        transaction.on_commit(lambda: self._forget(ids), using=self._alias)

    def _mine(self, records: Iterable[Record]) -> list[int]:
        if self._closed:
            return []
        return [record.offset for record in records if record.token == self._token]

    def _forget(self, ids: Iterable[int]) -> None:
        with self._lock:
            self._held.difference_update(ids)

    def _write_settled(self) -> None:
        with self._lock:
            ids = sorted(self._settled)
        if not ids:
            return
        delete_held(self._alias, ids, self._token)
        # Only now: what a failing statement did not delete is tried again.
        with self._lock:
            self._settled.difference_update(ids)
            self._held.difference_update(ids)

    def flush(self) -> None:
        """Write acknowledgements now; while the database is away they stay noted."""
        self._insist(self._write_settled)

    def _insist(self, action: Callable[[], object]) -> bool:
        """Run ``action``, again after short waits while the database refuses."""
        backoff = Backoff(first=0.02, longest=0.5)
        for _ in range(_TRIES_OF_FLUSH):
            try:
                action()
            except OUTAGES as error:
                mend_connection(self._alias)
                self.last_error = str(error)
                backoff.failed()
                time.sleep(backoff.remaining)
            else:
                return True
        return False

    # --- The rest ---------------------------------------------------------------------------------

    hands_back = True

    def hand_back(self, records: Iterable[Record]) -> None:
        """Free these rows; while the database is away they stay held, until it is asked again."""
        ids = self._mine(records)
        rows = held_rows(self._alias, self._token)

        def free() -> None:
            for chunk in batches(self._alias, ids):
                rows.filter(id__in=chunk).update(lease_token="", lease_expires_at=None)

        self._insist(free)
        self._forget(ids)  # not renewed any more, so at worst they come back by the lease

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Leave these topics alone; rows already handed out stay this consumer's."""
        self._paused.update(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Claim from these topics again, at the next poll."""
        self._paused.difference_update(partitions)
        self._more = True

    def assignment(self) -> list[TopicPartition]:
        """Return all topics: a group shares rows, not partitions."""
        return [] if self._closed else [TopicPartition(topic, 0) for topic in self._topics]

    def wake(self) -> None:
        """Make a waiting ``poll`` return; the next one returns early if none waits."""
        self._wake.set()

    def lag(self) -> dict[TopicPartition, int]:
        """Count the rows not acknowledged, in flight and delayed ones included."""
        return count_lag(self._alias, self._topics, self._group)

    def close(self) -> None:
        """Write acknowledgements, hand back the rest at once and close this thread's connection.

        If the database is away the rows come back when the lease ends.
        """
        if self._closed:
            return
        if self._on_revoked is not None:
            self._on_revoked(self.assignment(), False)
        self._closed = True
        if not (self._insist(self._write_settled) and self._insist(self._hand_back)):
            logger.warning("Leases of %s were left to expire: %s", self._group, self.last_error)
        connection = connections[self._alias]
        if not connection.in_atomic_block:
            connection.close()

    def _hand_back(self) -> None:
        held_rows(self._alias, self._token).update(lease_token="", lease_expires_at=None)
