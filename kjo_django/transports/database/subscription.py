"""A consumer group's view of the message table.

Many processes share a group: each claims rows under its own token, for as long as it shows signs of
life. Clocks are the hosts' own, so they must agree to well within the lease.
"""

from __future__ import annotations

import logging
import random
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta

from django.db import connections, transaction

from kjo_django.clock import Clock
from kjo_django.models import TransportSubscription
from kjo_django.retries import Backoff
from kjo_django.transports.base import (
    AssignedCallback,
    Record,
    RevokedCallback,
    Subscription,
    TopicKey,
    TopicPartition,
)
from kjo_django.transports.database.message_table import (
    OUTAGES,
    Claimer,
    Collision,
    CommitWatcher,
    batches,
    count_lag,
    delete_held,
    group_rows,
    held_rows,
    is_locked,
    mend_connection,
)

logger = logging.getLogger("kjo_django.transports.database")

SHORTEST_WAIT = 0.005
"""Seconds until the table is looked at again after activity; each wait is twice the one before."""
_AFTER_OUTAGE = Backoff(timedelta(seconds=0.1), timedelta(seconds=5), jitter=0.5)
_BETWEEN_WRITES = Backoff(timedelta(milliseconds=20), timedelta(milliseconds=500), jitter=0.5)
_MOST_WRITES = 5
_HOUSEKEEPING = 2.0
_MOST_LOCK_ERRORS = 2
"""Lock errors in a row that are not reported: each has waited for SQLite's own timeout."""


class DatabaseSubscription(Subscription):
    """See ``Subscription``. Each topic is one partition; there is no rebalancing.

    :param joins_transactions: whether the jobs are in the same database. In another one an
        acknowledgement would be durable before the outcome is.
    :param poll_interval: seconds; an idle table is looked at so often.
    :param on_registered: called when the group's interest in its topics is committed.
    """

    def __init__(
        self,
        alias: str,
        topics: Sequence[str],
        group: str,
        *,
        joins_transactions: bool,
        lease: timedelta,
        poll_interval: float,
        clock: Clock,
        on_registered: Callable[[], None],
        on_revoked: RevokedCallback | None = None,
        on_assigned: AssignedCallback | None = None,
    ) -> None:
        self._alias = alias
        self.joins_transactions = joins_transactions
        self._topics = list(dict.fromkeys(topics))
        self._group = group
        self._lease = lease
        self._poll_interval = poll_interval
        self._clock = clock
        self._token = uuid.uuid4().hex
        self._on_registered = on_registered
        self._on_revoked = on_revoked
        self._on_assigned = on_assigned
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self._settled: set[int] = set()
        self._woken = threading.Event()
        self._next_wait = SHORTEST_WAIT
        self._outage_count = 0
        self._retry_at = 0.0
        self._commits = CommitWatcher(alias, clock)
        self._claimer = Claimer(alias, self._topics, group, self._token, lease, clock)
        self._may_have_strays = False
        self._renew_at = 0.0
        self._housekeep_at = 0.0
        self._closed = False
        self._attempt(0)

    # --- Polling ----------------------------------------------------------------------------------

    def poll(self, max_records: int, timeout: float) -> list[Record]:
        """Claim rows that are due. While it waits it renews leases and writes acknowledgements.

        It looks by a plain SELECT, every ``POLL_INTERVAL`` at least, and on SQLite soon after
        somebody has committed: an idle consumer writes nothing. A database that is away or locked
        makes it wait longer, see ``last_error``.
        """
        if self._closed:
            return []
        deadline = self._clock.monotonic() + timeout
        callback, self._on_assigned = self._on_assigned, None
        if callback is not None:
            callback(self.assignment())
        while True:
            records = self._attempt(max_records)
            remaining = deadline - self._clock.monotonic()
            if records or remaining <= 0:
                return records
            if self._wait(remaining):
                self._woken.clear()
                self._next_wait = SHORTEST_WAIT
                return []

    def _wait(self, longest: float) -> bool:
        """Wait to be woken, for a commit, or until the next look; return whether it was woken."""
        # Jittered, so that consumers do not look all at once.
        seconds = self._next_wait * random.uniform(0.75, 1.0)  # noqa: S311
        self._next_wait = min(self._poll_interval, self._next_wait * 2)
        outage = self._retry_at - self._clock.monotonic()
        if outage > 0:
            return self._clock.wait(self._woken, min(max(seconds, outage), longest))
        try:
            return self._commits.wait(self._woken, min(seconds, longest))
        except OUTAGES as error:
            self._note_outage(error)
            return False

    def _attempt(self, max_records: int) -> list[Record]:
        """Do once everything that needs the database; an outage ends it, empty."""
        if self._clock.monotonic() < self._retry_at:
            return []
        try:
            self._housekeep()
            self._free_strays()
            self._write_settled()
            self._renew()
            records = self._claimer.claim(max_records)
        except OUTAGES as error:
            self._note_outage(error)
            return []
        except Collision:
            self._next_wait = SHORTEST_WAIT
            return []
        if records or self._claimer.is_contended:
            # Something happens here, or another consumer claims just now: come back soon.
            self._next_wait = SHORTEST_WAIT
        else:
            # Walking past a backlog of delayed or busy rows takes time: no more than a tenth of it.
            self._next_wait = max(self._next_wait, 9 * self._claimer.look_seconds)
        if records:
            with self._lock:
                self._held.update(record.offset for record in records)
        self._outage_count, self._retry_at, self.last_error = 0, 0.0, None
        return records

    def _note_outage(self, error: Exception) -> None:
        self._outage_count += 1
        delay = _AFTER_OUTAGE.delay(self._outage_count)
        self._retry_at = self._clock.monotonic() + delay.total_seconds()
        if is_locked(error):
            # What it was to look at is there still: come back soon.
            self._next_wait = SHORTEST_WAIT
            if self._outage_count <= _MOST_LOCK_ERRORS:
                return
        else:
            self._may_have_strays = True
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
        if self._clock.monotonic() < self._housekeep_at:
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
        self._housekeep_at = self._clock.monotonic() + _HOUSEKEEPING

    def _free_strays(self) -> None:
        """Free rows of this consumer that were never handed out, since the answer to the commit of
        their claim was lost. They would be renewed with the others, and run by nobody."""
        if not self._may_have_strays:
            return
        with self._lock:
            known = self._held | self._settled
        rows = held_rows(self._alias, self._token)
        self._free([id for id in rows.values_list("id", flat=True) if id not in known])
        self._may_have_strays = False

    def _free(self, ids: Iterable[int]) -> None:
        rows = held_rows(self._alias, self._token)
        for chunk in batches(self._alias, ids):
            rows.filter(id__in=chunk).update(lease_token="", lease_expires_at=None)

    def _renew(self) -> None:
        if self._clock.monotonic() < self._renew_at:
            return
        if self._held:
            expires_at = self._clock.now() + self._lease
            held_rows(self._alias, self._token).update(lease_expires_at=expires_at)
        self._renew_at = self._clock.monotonic() + self._lease.total_seconds() / 3

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
        for attempt in range(1, _MOST_WRITES + 1):
            try:
                action()
            except OUTAGES as error:
                mend_connection(self._alias)
                self.last_error = str(error)
                self._clock.wait(threading.Event(), _BETWEEN_WRITES.delay(attempt).total_seconds())
            else:
                return True
        return False

    # --- Rows held --------------------------------------------------------------------------------

    supports_release = True

    def release(self, records: Iterable[Record]) -> None:
        """Free these rows; while the database is away they stay held, until it is asked again."""
        ids = self._mine(records)
        if not self._insist(lambda: self._free(ids)):
            self._may_have_strays = True
        self._forget(ids)

    def holds(self, record: Record) -> bool:
        """Whether the row is this consumer's by all it knows."""
        with self._lock:
            is_held = record.offset in self._held
        return is_held and record.token == self._token and not self._closed

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Leave these topics alone; rows already handed out stay this consumer's."""
        self._claimer.pause(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Claim from these topics again, at the next poll."""
        self._claimer.resume(partitions)

    def skip_keys(self, keys: Collection[TopicKey]) -> None:
        """Claim no row of these keys; what is held of them stays held."""
        self._claimer.skip_keys(keys)

    def assignment(self) -> list[TopicPartition]:
        """Return all topics: a group shares rows, not partitions."""
        return [] if self._closed else [TopicPartition(topic, 0) for topic in self._topics]

    def wake(self) -> None:
        """Make a waiting ``poll`` return; the next one returns early if none waits."""
        self._woken.set()

    def lag(self) -> dict[TopicPartition, int]:
        """Count the rows not acknowledged, those in flight included, delayed ones before their time
        not."""
        return count_lag(self._alias, self._topics, self._group, self._clock.now())

    def close(self) -> None:
        """Write acknowledgements, hand back the rest at once and close this thread's connection.

        If the database is away the rows come back when the lease ends.
        """
        if self._closed:
            return
        if self._on_revoked is not None:
            self._on_revoked(self.assignment(), False)
        self._closed = True
        rows = held_rows(self._alias, self._token)
        if not (
            self._insist(self._write_settled)
            and self._insist(lambda: rows.update(lease_token="", lease_expires_at=None))
        ):
            logger.warning(
                "Consumer group %s: its leases stay until they expire: %s",
                self._group,
                self.last_error,
            )
        connection = connections[self._alias]
        if not connection.in_atomic_block:
            connection.close()
