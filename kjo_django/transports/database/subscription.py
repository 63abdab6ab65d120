"""A consumer group's view of the message table.

Many processes share a group: each claims rows under its own token, for as long as it shows signs of
life. Clocks are the hosts' own, so they must agree to well within the lease.

A key is at one consumer at a time: claims of one topic and group follow one another, each sees the
leases of those before it, and a claim that meets an owner come back to life takes nothing at all.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import InterfaceError, InternalError, OperationalError, connections, transaction
from django.db.models import Case, Count, Q, QuerySet, Value, When
from django.db.models.functions import Coalesce, Length

from kjo_django.clock import Clock
from kjo_django.logs import get_logger
from kjo_django.messages.headers import from_json
from kjo_django.models import TransportMessage, TransportSubscription
from kjo_django.retries import Backoff
from kjo_django.store import store_for
from kjo_django.store.servers import leave_retired, mend_connection
from kjo_django.transports.base import (
    AssignedCallback,
    Record,
    RevokedCallback,
    TopicKey,
    TopicPartition,
)
from kjo_django.transports.leased_records import LeasedSubscription
from kjo_django.values import ANY_SIZE, count_within

logger = get_logger("kjo_django.transports.database")

OUTAGES = (OperationalError, InterfaceError, InternalError)
"""What a database raises when it is away, restarting, locked, when it broke a deadlock, or refuses
to write since another server has taken its place."""
SHORTEST_WAIT = 0.005
"""Seconds until the table is looked at again after activity; each wait is twice the one before."""
WAIT_TO_BE_WOKEN = 0.1
"""Seconds until the table is looked at again after a claim on a publisher's wake-up: the next
publisher wakes this consumer, too, and nobody does for a row whose time has come."""
CLOSE_TOGETHER = 0.025
"""Seconds between two claims of a stream of jobs."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.1
"""Seconds between two looks at SQLite's counter. The look is a few microseconds, waking up for it a
hundred: an idle worker does that ten times a second."""
_AFTER_OUTAGE = Backoff(timedelta(seconds=0.1), timedelta(seconds=5), jitter=0.5)
_BETWEEN_WRITES = Backoff(timedelta(milliseconds=20), timedelta(milliseconds=500), jitter=0.5)
_MOST_WRITES = 5
_HOUSEKEEPING = 2.0
_MOST_LOCK_ERRORS = 2
"""Lock errors in a row that are not reported: each has waited for SQLite's own timeout."""
_LOCKED = ("database is locked", "database table is locked", "database schema is locked")
_BATCH = 5_000
_COLUMNS = ("id", "topic", "key", "small_value", "headers", "published_at", "rank", "size")
_RANK = _COLUMNS.index("rank")
FAIR_EVERY, SELDOM_FAIR_EVERY = 4, 16
"""Of so many claims of a backlog one begins with the next lower priority there is, so that none
starves; the second number holds while no lower one is found."""
URGENT_INTERVAL = 0.2
"""Seconds between looks for records that are more urgent than what a consumer is full of."""


class Collision(Exception):
    """A row chosen was renewed or settled by its late owner before it could be taken."""


class DatabaseSubscription(LeasedSubscription):
    """See ``Subscription``. A record's token is the consumer's, and the id of its row.

    :param joins_transactions: whether the jobs are in the same database. In another one an
        acknowledgement would be durable before the outcome is.
    :param poll_interval: seconds; an idle table is looked at so often.
    :param on_registered: called when the group's interest in its topics is committed.
    """

    release_keeps_order = True

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
        super().__init__(topics, group, on_revoked=on_revoked, on_assigned=on_assigned, clock=clock)
        self._alias = alias
        self.joins_transactions = joins_transactions
        self._lease = lease
        self._poll_interval = poll_interval
        self._token = uuid.uuid4().hex
        self._on_registered = on_registered
        self._next_wait = SHORTEST_WAIT
        self._outage_count = 0
        self._retry_at = 0.0
        self._commits = CommitWatcher(alias, clock)
        self._skipped: dict[str, set[int]] = {}
        self._most: Mapping[str, int] = {}
        """Most records of a claim, by topic."""
        self._claim_count = 0
        self._fair: dict[str, tuple[int, int]] = {}
        """Of topics with a backlog: the claim that next begins with a lower priority, and after
        which rank."""
        self._urgent_at = 0.0
        self._may_have_more = True
        """Whether something may be due: then it is claimed without being looked for first."""
        self._claimed_at = 0.0
        self._is_woken = False
        """Whether a publisher's wake-up is why it claims next."""
        self._has_all = False
        """Whether the last claim, on a wake-up, took all there was: then it waits before it looks
        again."""
        self._may_have_strays = False
        """Whether there may be rows of this consumer that were never handed out, since the answer
        to the commit of their claim was lost."""
        self._renew_at = 0.0
        self._housekeep_at = 0.0
        self._attempt(0, 0, 0.0)

    # --- Polling ----------------------------------------------------------------------------------

    def _wait(self, longest: float) -> bool:
        """Wait to be woken, for a commit, or until the next look; return whether it was woken."""
        # Jittered, so that consumers do not look all at once.
        seconds = self._next_wait * random.uniform(0.75, 1.0)  # noqa: S311
        self._next_wait = min(self._poll_interval, self._next_wait * 2)
        self._has_all = False
        outage = self._retry_at - self._clock.monotonic()
        try:
            if outage > 0:
                is_woken = self._clock.wait(self._woken, min(max(seconds, outage), longest))
            else:
                is_woken = self._commits.wait(self._woken, min(seconds, longest))
        except OUTAGES as error:
            self._note_outage(error)
            return False
        if is_woken:
            self._next_wait = SHORTEST_WAIT
            locks_rows = connections[self._alias].features.has_select_for_update
            if locks_rows and self._clock.monotonic() - self._claimed_at > CLOSE_TOGETHER:
                # Else it looks first: what is published meanwhile is claimed along, and nobody else
                # waits for SQLite's one writer in vain.
                self._may_have_more = self._is_woken = True
        return is_woken

    def _attempt(self, max_records: int, max_bytes: int, deadline: float) -> list[Record]:
        """Write acknowledgements, renew leases, claim rows that are due.

        Looking is a plain SELECT, every ``POLL_INTERVAL`` at least, and on SQLite soon after
        somebody has committed: an idle consumer writes nothing. A database that is away or locked
        makes the next look come later, see ``last_error``.
        """
        if self._clock.monotonic() < self._retry_at:
            return []
        try:
            leave_retired(self._alias)
            self._housekeep()
            self._free_strays()
            if deadline <= self._clock.monotonic():
                self._has_all = False  # whoever will not wait asks what is there now
            self._write_settled()
            if (now := self._clock.monotonic()) >= self._renew_at:
                if self._held:
                    self._renew()
                self._renew_at = now + self._lease.total_seconds() / 3
            claimed = self._claim(max_records, max_bytes)
        except OUTAGES as error:
            self._note_outage(error)
            return []
        except Collision:
            self._next_wait = SHORTEST_WAIT
            return []
        self._outage_count, self._retry_at, self.last_error = 0, 0.0, None
        return self._new(claimed)

    def _renew(self) -> None:
        """Renew the leases. A row that somebody has locked is left out: a transaction that settles
        it may last, and has others locked that this one would wait for."""
        rows, expires_at = self._held_rows(), self._clock.now() + self._lease
        if not connections[self._alias].features.has_select_for_update_skip_locked:
            rows.update(lease_expires_at=expires_at)
            return
        moment = connections[self._alias].ops.adapt_datetimefield_value(expires_at)
        with store_for(self._alias).transaction(waits_for_disk=False):
            free = rows.order_by("id").select_for_update(skip_locked=True)
            ids = free.values_list("id", flat=True)
            _change(self._alias, _RENEW, [moment, self._token], ids)

    def _new(self, claimed: Sequence[Record]) -> list[Record]:
        """Hold these records, and return them without those that are held already: one that another
        consumer took over and gave back is here, and to acknowledge a second copy would delete the
        row of the first."""
        records = [record for record in claimed if record.token not in self._held]
        self._hold(records)
        return records

    def poll_urgent(
        self, above: Mapping[str, int], max_records: int, max_bytes: int = ANY_SIZE
    ) -> list[Record]:
        """Claim rows of a higher priority, where there are any."""
        if self._is_closed or self._clock.monotonic() < max(self._urgent_at, self._retry_at):
            return []
        self._urgent_at = self._clock.monotonic() + URGENT_INTERVAL
        now = self._clock.now()
        try:
            below = {
                topic: -priority
                for topic, priority in above.items()
                if self._due_rows(topic, now).filter(rank__lt=-priority).exists()
            }
            return self._new(self._claim(max_records, max_bytes, below)) if below else []
        except OUTAGES as error:
            self._note_outage(error)
        except Collision:
            self._urgent_at = 0.0
        return []

    def _note_outage(self, error: Exception) -> None:
        self._outage_count += 1
        delay = _AFTER_OUTAGE.delay(self._outage_count)
        self._retry_at = self._clock.monotonic() + delay.total_seconds()
        if any(text in str(error) for text in _LOCKED):
            # SQLite: some other process writes just now, and what was to be looked at is there
            # still: come back soon.
            self._next_wait = SHORTEST_WAIT
            if self._outage_count <= _MOST_LOCK_ERRORS:
                return
        else:
            self._may_have_strays = True
            mend_connection(self._alias)
        if self.last_error is None:
            logger.warning("Database %r cannot be polled, trying again: %s", self._alias, error)
        self.last_error = str(error)

    # --- Claiming ---------------------------------------------------------------------------------

    def _claim(
        self, limit: int, max_bytes: int, below: Mapping[str, int] | None = None
    ) -> list[Record]:
        """Lease up to so many rows; empty where nothing is due, or others claim all of it just now.

        Values above an even share of the limit are read by themselves, once it is known how many
        of these rows it allows.

        :param below: only rows of these topics, and of a lower rank than this.
        :raises Collision: a row chosen was not free any more. Nothing was leased.
        """
        if limit <= 0:
            return []
        due = list(below or ()) or self._due_topics()
        is_woken, self._is_woken = self._is_woken, False
        if not due:
            self._may_have_more = False
            return []
        # A lease lost in a crash of the server is taken anew, as if it had expired: no need to wait
        # for the server's disk.
        with store_for(self._alias).transaction(waits_for_disk=False):
            topics = self._lock_topics(due)
            # Not before the locks: waiting for them takes time.
            now = self._clock.now()
            small = max_bytes // limit
            rows = self._choose(topics, limit, max_bytes, small, now, below)
            times = (now + self._lease, now)
            moments = map(connections[self._alias].ops.adapt_datetimefield_value, times)
            taken = _change(self._alias, _TAKE, [self._token, *moments], [row[0] for row in rows])
            # All or none. An owner whose lease had run out may renew or settle at this very moment:
            # taking what is left would let a row overtake an earlier one of its key.
            if taken != len(rows):
                raise Collision
            large = self._values_of(id for id, *_, size in rows if (size or 0) > small)
        size = sum(row[-1] or 0 for row in rows)
        self._claimed_at = self._clock.monotonic()
        if below is None:
            counts = Counter(topic for _, topic, *_ in rows)
            is_limited = any(0 < most <= counts[topic] for topic, most in self._most.items())
            self._may_have_more = len(rows) >= limit or size >= max_bytes or is_limited
        if rows or len(topics) < len(due):
            # Something happens here, or another consumer claims just now: come back soon.
            self._next_wait = SHORTEST_WAIT
        if is_woken and len(topics) == len(due) and not self._may_have_more:
            self._next_wait, self._has_all = min(WAIT_TO_BE_WOKEN, self._poll_interval), True
        return [
            Record(
                topic=topic,
                partition=0,
                offset=id,
                key=None if key is None else bytes(key),
                value=None if size is None else large[id] if size > small else bytes(value),
                headers=from_json(headers),
                timestamp=published_at,
                token=(self._token, id),
                priority=-rank,
            )
            for id, topic, key, value, headers, published_at, rank, size in rows
        ]

    def _values_of(self, ids: Iterable[int]) -> dict[int, bytes]:
        """Return the values of rows that were leased just now."""
        rows = TransportMessage.objects.using(self._alias).values_list("id", "value")
        chunks = _batches(self._alias, ids)
        return {
            id: bytes(value or b"") for part in chunks for id, value in rows.filter(id__in=part)
        }

    def _due_topics(self) -> list[str]:
        """Return the topics with something to claim, without taking a lock."""
        topics = self._wanted_topics()
        if self._may_have_more or not topics:
            return topics
        if self._has_all:
            return []
        started = self._clock.monotonic()
        now = self._clock.now()
        waiting = group_rows(self._alias, self._group).filter(
            _unleased(now), topic__in=topics, available_at__lte=now
        )
        # Some of it may belong to keys in flight elsewhere, so ask precisely before locking.
        is_waiting = waiting.exists()
        due = [topic for topic in topics if is_waiting and self._due_rows(topic, now).exists()]
        # Walking past a backlog of delayed or busy rows takes time: no more than a tenth of it.
        looked_for = self._clock.monotonic() - started
        self._next_wait = max(self._next_wait, 9 * looked_for)
        return due

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

    def _choose(
        self,
        topics: list[str],
        limit: int,
        max_bytes: int,
        small: int,
        now: datetime,
        below: Mapping[str, int] | None,
    ) -> list[tuple[Any, ...]]:
        """Return the first due rows, giving each topic its share and what is left to who has more.

        Each claim begins with the topic after the one the claim before began with. Of a backlog,
        one claim of a few begins with a lower priority.

        :param small: the longest value that comes along with its row, in bytes.
        :param below: only rows of a lower rank than this, by topic.
        """
        self._claim_count += 1
        start = self._claim_count % max(1, len(topics))
        waiting = topics[start:] + topics[:start]
        last: dict[str, Q] = {}
        chosen: list[tuple[Any, ...]] = []
        read = Case(When(size__lte=small, then="value"))
        left = {} if below else dict(self._most)
        while waiting and len(chosen) < limit and max_bytes > 0:
            topic = waiting.pop(0)
            share = math.ceil((limit - len(chosen)) / (len(waiting) + 1))
            share = min(share, left.get(topic, share))
            if share <= 0:
                continue
            due = self._due_rows(topic, now)
            if topic in last:
                due = due.filter(last[topic])
            if below is not None:
                due = due.filter(rank__lt=below[topic])
            sized = due.annotate(size=Length("value")).annotate(small_value=read)
            columns = sized.values_list(*_COLUMNS)
            is_whole = topic not in last and below is None
            begin = self._fair_begin(topic) if is_whole else None
            rows = list((columns if begin is None else columns.filter(rank__gt=begin))[:share])
            has_lower = begin is not None and bool(rows)
            if begin is not None and len(rows) < share:
                rows += columns.filter(rank__lte=begin)[: share - len(rows)]
            if is_whole:
                self._note_backlog(topic, rows, len(rows) == share, begin, has_lower)
            allowed = count_within((row[-1] or 0 for row in rows), max_bytes)
            chosen.extend(rows[:allowed])
            if topic in left:
                left[topic] -= allowed
            max_bytes -= sum(row[-1] or 0 for row in rows[:allowed])
            if len(rows) == share and begin is None:
                rank = rows[-1][_RANK]
                last[topic] = Q(rank__gt=rank) | Q(rank=rank, id__gt=rows[-1][0])
                waiting.append(topic)
        return chosen

    def _fair_begin(self, topic: str) -> int | None:
        """Return the rank after which this claim of a topic begins, so that no lower priority
        starves; None for the usual order."""
        due_at, rank = self._fair.get(topic, (math.inf, 0))
        return rank if due_at <= self._claim_count else None

    def _note_backlog(
        self,
        topic: str,
        rows: Sequence[tuple[Any, ...]],
        is_full: bool,
        begin: int | None,
        has_lower: bool,
    ) -> None:
        """Decide when a claim of a topic next begins with a lower priority, and with which."""
        if not is_full:
            self._fair.pop(topic, None)
        elif begin is not None:
            pause = FAIR_EVERY if has_lower else SELDOM_FAIR_EVERY
            self._fair[topic] = self._claim_count + pause, rows[-1][_RANK]
        else:
            self._fair.setdefault(topic, (self._claim_count + FAIR_EVERY, rows[-1][_RANK]))

    def _due_rows(self, topic: str, now: datetime) -> QuerySet[TransportMessage]:
        """Return the rows this consumer may claim now, in order: of the highest priority first.

        A key in flight at another consumer is left alone entirely, so a key is at one consumer at a
        time; rows of that key wait, rows of others pass. The busy keys are an uncorrelated subquery
        on purpose: their number is bounded by the rows in flight, and databases hash it once,
        whereas a correlated one tempts PostgreSQL to sort the whole backlog.
        """
        rows = group_rows(self._alias, self._group)
        busy = (
            # The topic is hidden in an expression: SQLite would walk the backlog by its index on
            # topic and group, where the partial index leads to the rows in flight.
            rows.alias(same_topic=Coalesce("topic", Value("")))
            .filter(same_topic=topic, lease_expires_at__gt=now, key_hash__isnull=False)
            # Spelled like the condition of the partial index, or it is not used.
            .exclude(lease_token="")
            .exclude(lease_token=self._token)
            .values("key_hash")
        )
        due = (
            rows.filter(_unleased(now), topic=topic, available_at__lte=now)
            .exclude(lease_token=self._token)
            .exclude(key_hash__in=busy)
            .order_by("rank", "id")
        )
        skipped = self._skipped.get(topic)
        return due.exclude(key_hash__in=skipped) if skipped else due

    # --- Membership -------------------------------------------------------------------------------

    def _housekeep(self) -> None:
        """Keep the group registered, and adopt what was published before anybody subscribed.

        Again and again, since a publisher that saw no group may commit after we registered, and
        since the tables may be emptied under a running worker.
        """
        if self._clock.monotonic() < self._housekeep_at:
            return
        subscriptions = TransportSubscription.objects.using(self._alias)
        ours = subscriptions.filter(topic__in=self._topics, consumer_group=self._group)
        known = set(ours.values_list("topic", flat=True))
        for topic in self._topics:
            if topic not in known:
                subscriptions.get_or_create(topic=topic, consumer_group=self._group)
        if len(known) < len(self._topics):
            self._on_registered()
        orphans = group_rows(self._alias, "").filter(topic__in=self._topics)
        if orphans.exists():
            orphans.update(consumer_group=self._group)
        self._housekeep_at = self._clock.monotonic() + _HOUSEKEEPING

    # --- Rows held --------------------------------------------------------------------------------

    def _held_rows(self) -> QuerySet[TransportMessage]:
        """Return the rows leased to this consumer, whether or not the lease is still live."""
        rows = TransportMessage.objects.using(self._alias).filter(lease_token=self._token)
        return rows.exclude(lease_token="")  # the partial index again

    def _free_strays(self) -> None:
        """Free rows that were never handed out: they would be renewed with the others, and run by
        nobody."""
        if self._may_have_strays:
            with self._lock:
                known = {id for _, id in self._held}
            leased = self._held_rows().values_list("id", flat=True)
            self._free([id for id in leased if id not in known])
            self._may_have_strays = False

    def _free(self, ids: Iterable[int]) -> None:
        _change(self._alias, _FREE, [self._token], ids)

    def _delete(self, tokens: Sequence[Any]) -> None:
        _change(self._alias, _DELETE, [self._token], [id for _, id in tokens])

    def acknowledge_in_transaction(self, records: Iterable[Record]) -> None:
        """Delete the records now, on this thread's connection.

        Inside ``atomic`` the acknowledgement commits or rolls back with everything else there;
        after a roll-back the records are this consumer's still, to settle in another way.
        """
        if not self._is_closed:
            mine = self._mine(records)
            self._delete(mine)
            transaction.on_commit(lambda: self._forget(mine), using=self._alias)

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

    def release(self, records: Iterable[Record]) -> None:
        """Free these rows; while the database is away they stay held, until it is asked again."""
        mine = self._mine(records)
        if not self._insist(lambda: self._free(id for _, id in mine)):
            self._may_have_strays = True
        self._forget(mine)

    def limit(self, records: Mapping[str, int]) -> None:
        """Claim no more than so many rows of each of these topics at once."""
        self._most = records

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Claim from these topics again, at the next poll."""
        super().resume(partitions)
        self._may_have_more = True

    def skip_keys(self, keys: Collection[TopicKey]) -> None:
        """Claim no row of these keys; what is held of them stays held."""
        skipped: dict[str, set[int]] = {}
        for topic, key in keys:
            skipped.setdefault(topic, set()).add(key_hash(key))
        for topic, hashes in self._skipped.items():
            if hashes - skipped.get(topic, set()):
                self._may_have_more = True
        self._skipped = skipped

    def _leave(self) -> None:
        """Write acknowledgements, hand back the rest at once and close this thread's connection."""
        rows = self._held_rows()
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
        """Return whether the counter is another than at the last look. Each connection has its own,
        which its own commits leave alone."""
        connection: Any = connections[self._alias]
        with connection.wrap_database_errors:
            connection.ensure_connection()
            # Past Django's cursors, which take longer than the look.
            (version,) = connection.connection.execute("PRAGMA data_version").fetchone()
        before, self._seen = self._seen, (connection.connection, version)
        return before != self._seen


# --- The table ------------------------------------------------------------------------------------


def key_hash(key: bytes) -> int:
    """Return what rows with this key are compared by: 64 bits, signed as databases store them.

    Two keys of one hash are merely treated as one key: they keep a common order.
    """
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big", signed=True)


def group_rows(alias: str, group: str) -> QuerySet[TransportMessage]:
    """Return every row of a group that is not acknowledged."""
    return TransportMessage.objects.using(alias).filter(consumer_group=group)


def _unleased(now: datetime) -> Q:
    """Rows nobody holds: never handed out, handed back, or left by somebody who is gone."""
    return Q(lease_expires_at__isnull=True) | Q(lease_expires_at__lte=now)


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


_DELETE = "{delete} WHERE lease_token = %s"
_TAKE = """
{update} SET lease_token = %s, lease_expires_at = %s
WHERE (lease_expires_at IS NULL OR lease_expires_at <= %s)
"""
_RENEW = "{update} SET lease_expires_at = %s WHERE lease_token = %s"
_FREE = "{update} SET lease_token = '', lease_expires_at = NULL WHERE lease_token = %s"

_VERBS = {"delete": "DELETE FROM kjo_transport_message", "update": "UPDATE kjo_transport_message"}
# MySQL and MariaDB would read the whole table for half of its rows, and wait for each of them that
# a transaction has locked.
_VERBS_BY_ID = {
    "delete": "DELETE m FROM kjo_transport_message m FORCE INDEX (PRIMARY)",
    "update": "UPDATE kjo_transport_message FORCE INDEX (PRIMARY)",
}


def _change(alias: str, statement: str, values: list[Any], ids: Iterable[int]) -> int:
    """Execute it for rows with these ids, which Django would prepare one by one; return how many
    rows changed. No other row is read, so nobody waits for who has locked another one."""
    changed = 0
    connection = connections[alias]
    begin = statement.format_map(_VERBS_BY_ID if connection.vendor == "mysql" else _VERBS)
    with connection.cursor() as cursor:
        for chunk in _batches(alias, ids):
            places = ", ".join(["%s"] * len(chunk))
            cursor.execute(f"{begin} AND id IN ({places})", [*values, *chunk])
            changed += cursor.rowcount
    return changed


def _batches(alias: str, ids: Iterable[int]) -> Iterator[list[int]]:
    """Split ids by what one statement of this database may carry."""
    everything = list(ids)
    limit = connections[alias].features.max_query_params
    size = _BATCH if limit is None else max(1, min(_BATCH, limit - 20))
    for start in range(0, len(everything), size):
        yield everything[start : start + size]
