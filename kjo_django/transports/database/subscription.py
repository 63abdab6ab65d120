"""A consumer group's view of the message table.

Many processes share a group: each claims rows under its own token, for as long as it shows signs of
life. Clocks are the hosts' own, so they must agree to well within the lease.

A key is at one consumer at a time: claims of one topic and group follow one another, each sees the
leases of those before it, and a claim that meets an owner come back to life takes nothing at all.
"""

from __future__ import annotations

import hashlib
import math
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from django.db import InterfaceError, InternalError, OperationalError, connections, transaction
from django.db.models import Count, Exists, QuerySet

from kjo_django.clock import Clock
from kjo_django.logs import get_logger
from kjo_django.messages import headers as names
from kjo_django.messages.headers import from_any_json
from kjo_django.models import TransportMessage, TransportSubscription
from kjo_django.retries import Backoff
from kjo_django.store import store_for
from kjo_django.store.cursors import array_text
from kjo_django.store.servers import leave_retired, mend_connection
from kjo_django.transports.base import (
    AssignedCallback,
    Record,
    RevokedCallback,
    TopicKey,
    TopicPartition,
)
from kjo_django.transports.database import claims, runs
from kjo_django.transports.database.due_rows import DueRow, DueRows
from kjo_django.transports.database.plans import ClaimOrder, LookPlan
from kjo_django.transports.leased_records import LeasedSubscription
from kjo_django.values import ANY_SIZE, count_within

if TYPE_CHECKING:
    from kjo_django.store.postgres import PostgresStore

logger = get_logger("kjo_django.transports.database")

OUTAGES = (OperationalError, InterfaceError, InternalError)
"""What a database raises when it is away, restarting, locked, when it broke a deadlock, or refuses
to write since another server has taken its place."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.1
"""Seconds between two looks at SQLite's counter. The look is a few microseconds, waking up for it a
hundred: an idle worker does that ten times a second."""
_BETWEEN_WRITES = Backoff(timedelta(milliseconds=20), timedelta(milliseconds=500), jitter=0.5)
_MOST_WRITES = 5
_HOUSEKEEPING = 5.0
"""Seconds between two looks at what the group is registered for."""
_LOCKED = ("database is locked", "database table is locked", "database schema is locked")
_BATCH = 5_000
URGENT_INTERVAL = 0.2
"""Seconds between looks for records that are more urgent than what a consumer is full of."""


class _Claim(NamedTuple):
    """What a claim has come to.

    :ivar topics: those that nobody else was claiming.
    :ivar is_full: whether there may be more.
    :ivar is_begun: whether the records have begun along with it.
    :ivar ahead: see ``claims.Claimed``.
    """

    topics: Sequence[str]
    records: list[Record]
    is_full: bool
    is_begun: bool
    ahead: float | None = None


class _Choice:
    """What a claim is going to take of its topics: each round gives them even shares of what is
    left, and the next one is for who may have more.

    :param topics: in the order of the claim. Where they are more than the rows that are left, the
        first ones come first.
    :param most: how many rows of a topic it may take, where not as many as in all.
    :param ranks: of topics that begin with a lower priority: with the rows after this rank.
    :param limit: how many rows in all.
    :param max_bytes: of values in all; the last row is the one that reaches it.
    """

    def __init__(
        self,
        topics: Sequence[str],
        most: Mapping[str, int],
        ranks: Mapping[str, int],
        limit: int,
        max_bytes: int,
    ) -> None:
        self.ranks = ranks
        self._left = {topic: most.get(topic, limit) for topic in topics}
        self._waiting = [topic for topic in topics if self._left[topic] > 0]
        self._limit, self._max_bytes = limit, max_bytes
        self.rows: list[DueRow] = []
        self._ids = set[int]()
        self.counts: Counter[str] = Counter()
        """How many of them are of each topic that was asked."""

    @property
    def is_full(self) -> bool:
        """Whether it has as much as it may."""
        return len(self.rows) >= self._limit or self._max_bytes <= 0

    def next_shares(self) -> dict[str, int]:
        """Begin a round: return how many rows each topic may have in it; empty if it is over."""
        count = 0 if self.is_full else self._limit - len(self.rows)
        asked, self._waiting = self._waiting[:count], self._waiting[count:]
        each, more = divmod(count, max(1, len(asked)))
        shares = {topic: each + (number < more) for number, topic in enumerate(asked)}
        return {topic: min(share, self._left[topic]) for topic, share in shares.items()}

    def add(self, topic: str, found: Sequence[DueRow], share: int) -> list[DueRow]:
        """Take of a topic's rows its share, as far as the bytes allow; return what is its share."""
        before = self.ranks.get(topic, math.inf)
        new = [row for row in found if row.id not in self._ids]
        new.sort(key=lambda row: (row.rank <= before, row.rank, row.id))
        rows = new[:share]
        sizes = [row.size or 0 for row in rows]
        allowed = count_within(sizes, self._max_bytes)
        self.rows.extend(rows[:allowed])
        self._ids.update(row.id for row in rows[:allowed])
        self.counts[topic] += allowed
        self._left[topic] -= allowed
        self._max_bytes -= sum(sizes[:allowed])
        if len(rows) == share and self._left[topic] > 0:
            self._waiting.append(topic)
        return rows


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
    counts_deliveries = True

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
        self._token = uuid.uuid4().hex
        store = store_for(alias)
        self._statements: claims.ClaimStatements | None = None
        """For databases on which a claim is one round trip."""
        if store.sends_several:
            of_postgres = cast("PostgresStore", store)
            self._statements = claims.ClaimStatements(of_postgres, group, self._token)
        self._on_registered = on_registered
        locks_rows = connections[alias].features.has_select_for_update
        self._due_rows = DueRows(alias, group, self._token)
        self._plan = LookPlan(poll_interval, clock, locks_rows=locks_rows)
        self._sees_commits = connections[alias].vendor == "sqlite"
        self._order = ClaimOrder()
        self._commits = CommitWatcher(alias, clock)
        self._skipped: dict[str, set[int]] = {}
        self._most: Mapping[str, int] = {}
        """Most records of a claim, by topic."""
        self._urgent_at = 0.0
        self._may_have_strays = False
        """Whether there may be rows of this consumer that were never handed out, since the answer
        to the commit of their claim was lost."""
        self._renew_at = 0.0
        self._renewed_at = clock.monotonic()
        """Until so long after it as a lease lasts, leases have not run out (monotonic)."""
        self._runs = runs.Runs(alias, self._token, clock)
        self._taken_over: set[int] = set()
        """Ids of rows owned here that others had when they were looked at last."""
        self._died: Callable[[Collection[str]], Collection[str]] = lambda workers: workers
        self._worker, self._count_starts = "", _no_starts
        self._most_fit = sys.maxsize
        """Rows that a claim of several steps reads at most: after one whose values were too large,
        twice as many as it took."""
        self._housekeep_at = -math.inf
        self._attempt(0, 0, 0.0)

    # --- Polling ----------------------------------------------------------------------------------

    def _wait(self, longest: float) -> bool:
        """Wait to be woken, for a commit, or until the next look; return whether it was woken."""
        seconds = self._plan.next_wait(longest)
        try:
            if self._plan.is_put_off:
                is_woken = self._clock.wait(self._woken, seconds)
            else:
                is_woken = self._commits.wait(self._woken, seconds)
                if self._commits.has_seen_one:
                    self._plan.end_idleness()
        except OUTAGES as error:
            self._note_outage(error)
            return False
        if is_woken:
            self._plan.note_wake_up()
        return is_woken

    def _attempt(self, max_records: int, max_bytes: int, deadline: float) -> list[Record]:
        """Write acknowledgements, renew leases, claim rows that are due.

        Looking is a plain SELECT, every ``POLL_INTERVAL`` at least, and on SQLite soon after
        somebody has committed: an idle consumer writes nothing. A database that is away or locked
        makes the next look come later, see ``last_error``.
        """
        self._plan.hears_publishers = self.hears_publishers or self._sees_commits
        if self._plan.is_put_off:
            return []
        try:
            leave_retired(self._alias)
            self._housekeep()
            self._free_strays()
            if deadline <= self._clock.monotonic():
                self._plan.ask_now()
            self._write_settled()
            self._runs.end_waiting()
            if (now := self._clock.monotonic()) >= self._renew_at:
                if self._owned:
                    self._renew()
                else:
                    self._renewed_at = now
                self._renew_at = now + self._lease.total_seconds() / 3
            claimed = self._claim(max_records, max_bytes)
        except OUTAGES as error:
            self._note_outage(error)
            return []
        except Collision:
            self._plan.note_collision()
            return []
        self._plan.note_answer()
        self.last_error = None
        return self._new(claimed)

    def _renew(self) -> None:
        """Renew the leases. A row that somebody has locked is left out: a transaction that settles
        it may last, and has others locked that this one would wait for."""
        rows, expires_at = self._leased_rows(), self._clock.now() + self._lease
        with self._lock:
            owned = set(self._owned)
        began = self._clock.monotonic()
        if not connections[self._alias].features.has_select_for_update_skip_locked:
            count = rows.update(lease_expires_at=expires_at)
        else:
            moment = connections[self._alias].ops.adapt_datetimefield_value(expires_at)
            with store_for(self._alias).transaction(waits_for_disk=False):
                free = rows.order_by("id").select_for_update(skip_locked=True)
                ids = free.values_list("id", flat=True)
                count = _change(self._alias, _RENEW, [moment, self._token], ids)
        if count > len(owned):
            # A claim that was not answered has taken effect after strays were looked for.
            self._may_have_strays = True
        elif count < len(owned):
            present = set(rows.values_list("id", flat=True))
            self._look_at({id for _, id in owned} - present)
        self._renewed_at = began

    def _new(self, claimed: Sequence[Record]) -> list[Record]:
        """Own these records, and return them without those that are owned already: one that another
        consumer took over and gave back is here, and to acknowledge a second copy would delete the
        row of the first."""
        self._taken_over.difference_update(record.offset for record in claimed)
        records = [record for record in claimed if record.token not in self._owned]
        self._hold(records)
        return records

    def poll_urgent(
        self, above: Mapping[str, int], max_records: int, max_bytes: int = ANY_SIZE
    ) -> list[Record]:
        """Claim rows of a higher priority, where there are any."""
        if self._is_closed or self._plan.is_put_off or self._clock.monotonic() < self._urgent_at:
            return []
        self._urgent_at = self._clock.monotonic() + URGENT_INTERVAL
        try:
            below = self._urgent_topics({topic: -priority for topic, priority in above.items()})
            return self._new(self._claim(max_records, max_bytes, below)) if below else []
        except OUTAGES as error:
            self._note_outage(error)
        except Collision:
            self._urgent_at = 0.0
        return []

    def _urgent_topics(self, below: Mapping[str, int]) -> dict[str, int]:
        """Return those of the topics of which a row of a lower rank than this may be claimed."""
        now = self._clock.now()
        asked = [claims.Asked(topic, 1, below=rank) for topic, rank in below.items()]
        if self._statements is None:
            due = self._due_rows.due_topics(asked, self._skipped, now)
        else:
            due = set(self._statements.due_topics(asked, self._skipped, now)[0] if asked else ())
        return {topic: rank for topic, rank in below.items() if topic in due}

    def _note_outage(self, error: Exception) -> None:
        is_locked = any(text in str(error) for text in _LOCKED)
        is_news = self._plan.note_refusal(is_locked=is_locked)
        if not is_locked:
            self._may_have_strays = True
            mend_connection(self._alias)
        elif not is_news:
            return
        if self.last_error is None:
            logger.warning("Database %r cannot be polled, trying again: %s", self._alias, error)
        self.last_error = str(error)

    # --- Claiming ---------------------------------------------------------------------------------

    def _claim(
        self, limit: int, max_bytes: int, below: Mapping[str, int] | None = None
    ) -> list[Record]:
        """Lease up to so many rows; empty where nothing is due, or others claim all of it just now.

        :param below: only rows of these topics, and of a lower rank than this.
        :raises Collision: a row chosen was not free any more. Nothing was leased.
        """
        if limit <= 0:
            return []
        due = list(below or ()) or self._due_topics()
        if not due:
            self._plan.note_nothing_due()
            return []
        claim = self._claim_step_by_step if self._statements is None else self._claim_at_once
        begins = self._what_begins()
        try:
            topics, records, is_full, is_begun, ahead = claim(due, limit, max_bytes, below, begins)
        except BaseException:
            self._doubt(begins)
            raise
        self._note_begun(begins, records if is_begun else [])
        has_others = len(topics) < len(due)
        if below is not None:
            self._plan.note_urgent_claim(has_rows=bool(records), has_others=has_others)
        else:
            self._plan.note_claim(
                has_rows=bool(records), is_full=is_full, has_others=has_others, ahead=ahead
            )
        return records

    def _claim_at_once(
        self,
        due: list[str],
        limit: int,
        max_bytes: int,
        below: Mapping[str, int] | None,
        begins: claims.Begins,
    ) -> _Claim:
        """Claim and commit in one round trip; see ``_claim_step_by_step``.

        :raises Collision: also where the answer took so long that the leases may be over soon.
        """
        statements, asked = self._statements, self._asked(due, limit, below)
        assert statements is not None
        began, now = self._clock.monotonic(), self._clock.now()
        claimed = statements.claim(
            asked,
            self._skipped,
            now,
            now + self._lease,
            limit=limit,
            max_bytes=max_bytes,
            begins=begins,
            asks_ahead=below is None and self._plan.asks_ahead,
        )
        if claimed.is_refused:
            raise Collision
        if self._clock.monotonic() - began > self._lease.total_seconds() / 2:
            # A pooler, or a lock on the whole table, was waited for. They are given back.
            self._may_have_strays = True
            raise Collision
        size = sum(len(row.value or b"") for row in claimed.rows)
        is_cut = len(claimed.rows) >= limit or size >= max_bytes
        left = claimed.left()
        if below is None:
            self._note_order(claimed, left, is_cut=is_cut)
        records = [self._leased(row) for row in claimed.rows]
        self._count_dead({row.id: row.owner for row in claimed.rows}, records)
        is_full = is_cut or any(left.values())
        return _Claim(claimed.topics, records, is_full, claimed.is_begun, claimed.ahead)

    def _asked(
        self, due: Sequence[str], limit: int, below: Mapping[str, int] | None
    ) -> list[claims.Asked]:
        """Return what a claim asks for, in its order. Of a backlog one of a few begins with a lower
        priority."""
        return [
            one
            for topic in self._order.next(due)
            for one in _asked_of(
                topic,
                limit if below else min(limit, self._most.get(topic, limit)),
                below,
                self._order.rank_before(topic),
            )
        ]

    def _note_order(
        self, claimed: claims.Claimed, left: Mapping[str, bool], *, is_cut: bool
    ) -> None:
        """Note of each topic whether it has a backlog, and whether a lower priority was found.

        :param left: of topics that have rows in the claim, whether they have more.
        :param is_cut: whether it ended by a limit: of topics without a row nothing is known then.
        """
        ranks: dict[str, list[int]] = {topic: [] for topic in claimed.topics}
        for row in claimed.rows:
            ranks[row.topic].append(row.rank)
        for topic, found in ranks.items():
            if is_cut and not found:
                continue
            first = self._order.rank_before(topic)
            has_lower = first is not None and any(rank > first for rank in found)
            backlog = found[-1] if left.get(topic) else None
            self._order.note(topic, backlog, is_fair=first is not None, has_lower=has_lower)

    def _leased(self, row: claims.Row) -> Record:
        return Record(
            topic=row.topic,
            partition=0,
            offset=row.id,
            key=row.key,
            value=row.value,
            headers=from_any_json(row.headers),
            timestamp=row.published_at,
            token=(self._token, row.id),
            priority=-row.rank,
            deliveries=row.deliveries,
        )

    def _claim_step_by_step(
        self,
        due: list[str],
        limit: int,
        max_bytes: int,
        below: Mapping[str, int] | None,
        begins: claims.Begins,
    ) -> _Claim:
        """Claim in a transaction.

        Values above an even share of the limit are read by themselves, once it is known how many
        of these rows it allows.
        """
        # A lease lost in a crash of the server is taken anew, as if it had expired: no need to wait
        # for the server's disk.
        with store_for(self._alias).transaction(waits_for_disk=False):
            topics = self._lock_topics(due)
            # Not before the locks: waiting for them takes time.
            now = self._clock.now()
            limit = min(limit, self._most_fit)
            small = max_bytes // limit
            rows = self._choose(topics, limit, max_bytes, now, below)
            is_cut = sum(row.size or 0 for row in rows) >= max_bytes
            self._most_fit = 2 * len(rows) if is_cut else sys.maxsize
            is_large = [row.id for row in rows if (row.size or 0) > small]
            large = self._values_of(is_large) if is_large else {}
            self._take(rows, now)
            records = [self._record_of(row, large) for row in rows]
            if is_begun := _may_begin(rows, records, begins):
                self._runs.store(begins.number, _ids_of(records))
        is_full = self._is_full(rows, limit, max_bytes)
        self._count_dead({row.id: row.lease_token for row in rows}, records)
        return _Claim(topics, records, is_full, is_begun)

    def _take(self, rows: Sequence[DueRow], now: datetime) -> None:
        """Lease all of these rows, or none: an owner whose lease had run out may renew or settle at
        this very moment, and taking what is left would let a row overtake an earlier one of its
        key."""
        adapt = connections[self._alias].ops.adapt_datetimefield_value
        until, since = adapt(now + self._lease), adapt(now)
        ids = [row.id for row in rows]
        if _change(self._alias, _TAKE, [self._token, until, since], ids) != len(ids):
            raise Collision

    def _is_full(self, rows: Sequence[DueRow], limit: int, max_bytes: int) -> bool:
        """Return whether a claim has taken as much as it may, of all topics or of one of them."""
        counts = Counter(row.topic for row in rows)
        return (
            len(rows) >= limit
            or sum(row.size or 0 for row in rows) >= max_bytes
            or any(0 < most <= counts[topic] for topic, most in self._most.items())
        )

    def _record_of(self, row: DueRow, large: Mapping[int, bytes]) -> Record:
        value = None
        if row.size is not None:
            value = large[row.id] if row.small_value is None else bytes(row.small_value)
        return Record(
            topic=row.topic,
            partition=0,
            offset=row.id,
            key=None if row.key is None else bytes(row.key),
            value=value,
            headers=from_any_json(row.headers),
            timestamp=row.published_at,
            token=(self._token, row.id),
            priority=-row.rank,
            deliveries=row.deliveries,
        )

    def _values_of(self, ids: Iterable[int]) -> dict[int, bytes]:
        """Return the values of rows that are about to be leased. Who settles one of them meanwhile
        keeps all of them from being leased."""
        rows = TransportMessage.objects.using(self._alias).values_list("id", "value")
        chunks = _batches(self._alias, ids)
        return {
            id: bytes(value or b"") for part in chunks for id, value in rows.filter(id__in=part)
        }

    def _due_topics(self) -> list[str]:
        """Return the topics with something to claim, without taking a lock."""
        topics = self._wanted_topics()
        if self._plan.may_have_more or not topics:
            return topics
        if self._plan.has_all or self._plan.is_idle:
            return []
        started = self._clock.monotonic()
        due = self._topics_with_rows(topics)
        self._plan.note_look(self._clock.monotonic() - started)
        return due

    def _topics_with_rows(self, topics: Sequence[str]) -> list[str]:
        """Return those of the topics of which a row may be claimed, in their order."""
        now = self._clock.now()
        asked = [claims.Asked(topic, 1) for topic in topics]
        if self._statements is not None:
            due, ahead = self._statements.due_topics(asked, self._skipped, now)
            if not due and self._plan.hears_publishers:
                self._note_ahead(ahead, topics, now)
            return [topic for topic in topics if topic in due]
        if self._is_due_later(topics, now):
            return []
        # Some of it may belong to keys in flight elsewhere, so ask precisely before locking.
        found = self._due_rows.due_topics(asked, self._skipped, now)
        return [topic for topic in topics if topic in found]

    def _note_ahead(self, ahead: float | None, topics: Sequence[str], now: datetime) -> None:
        """Note when the next row of these topics is due, where none is.

        :param ahead: see ``claims.Claimed``.
        """
        if ahead is not None:
            self._plan.note_ahead(ahead)
        elif not self._plan.is_idle_again():
            self._is_due_later(topics, now)

    def _is_due_later(self, topics: Sequence[str], now: datetime) -> bool:
        """Return whether all that waits in these topics is due later, if anything waits, and note
        when."""
        connection: Any = connections[self._alias]
        adapted = connection.ops.adapt_datetimefield_value(now)
        with connection.cursor() as cursor:
            places = ", ".join(["%s"] * len(topics))
            free = [self._group, *topics, adapted]
            cursor.execute(_NEXT.format(topics=places), [*free, adapted, *free])
            (at,) = cursor.fetchone()
        seconds = math.inf
        if at is not None:
            at = datetime.fromisoformat(at) if isinstance(at, str) else at  # SQLite has texts
            at = at if at.tzinfo is not None else at.replace(tzinfo=connection.timezone)
            seconds = (at - now).total_seconds()
        if seconds <= 0:
            return False
        self._plan.note_idle(seconds)
        return True

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
        skips = " SKIP LOCKED" if features.has_select_for_update_skip_locked else ""
        with connections[self._alias].cursor() as cursor:
            places = ", ".join(["%s"] * len(topics))
            cursor.execute(_LOCK.format(places) + skips, [*topics, self._group])
            return [topic for (topic,) in cursor.fetchall()]

    def _choose(
        self,
        topics: list[str],
        limit: int,
        max_bytes: int,
        now: datetime,
        below: Mapping[str, int] | None,
    ) -> list[DueRow]:
        """Return the first due rows, giving each topic its share and what is left to who has more.
        The values of an even share come along with their rows.

        :param below: only rows of a lower rank than this, by topic.
        """
        ordered = self._order.next(topics)
        ranks = {} if below else self._order.ranks_before(topics)
        choice = _Choice(ordered, {} if below else self._most, ranks, limit, max_bytes)
        while shares := choice.next_shares():
            asked = self._asked_in_round(choice, shares, below)
            found = self._due_rows.read(asked, self._skipped, now, max_bytes // limit)
            for topic, rows in found:
                if choice.is_full:
                    break
                is_first = topic not in choice.counts
                taken = choice.add(topic, rows, shares[topic])
                if is_first and not below:
                    self._note_first(topic, taken, ranks.get(topic), shares[topic])
        return choice.rows

    def _asked_in_round(
        self, choice: _Choice, shares: Mapping[str, int], below: Mapping[str, int] | None
    ) -> dict[str, list[claims.Asked]]:
        """Return what a round reads of each topic: its rows that are due, from the first one on,
        whatever a round before has read of them: another consumer may have given back one that
        comes before those."""
        return {
            topic: _asked_of(topic, share + choice.counts[topic], below, choice.ranks.get(topic))
            for topic, share in shares.items()
        }

    def _note_first(
        self, topic: str, rows: Sequence[DueRow], before: int | None, share: int
    ) -> None:
        """Note what the first round of a claim has found of a topic; see ``ClaimOrder.note``."""
        has_lower = before is not None and any(row.rank > before for row in rows)
        backlog = rows[-1].rank if len(rows) == share else None
        self._order.note(topic, backlog, is_fair=before is not None, has_lower=has_lower)

    # --- Membership -------------------------------------------------------------------------------

    def _housekeep(self) -> None:
        """Keep the group registered, and adopt what was published before anybody subscribed.

        Again and again, since a publisher that saw no group may commit after we registered, and
        since the tables may be emptied under a running worker.
        """
        late = self._clock.monotonic() - self._housekeep_at
        # A consumer that was woken claims first.
        if late < 0 or (late < _HOUSEKEEPING and self._plan.may_have_more):
            return
        subscriptions = TransportSubscription.objects.using(self._alias)
        ours = subscriptions.filter(topic__in=self._topics, consumer_group=self._group)
        orphans = group_rows(self._alias, "").filter(topic__in=self._topics)
        known = dict(ours.values_list("topic", Exists(orphans)))
        for topic in self._topics:
            if topic not in known:
                subscriptions.get_or_create(topic=topic, consumer_group=self._group)
        if len(known) < len(self._topics):
            self._on_registered()
        may_adopt = any(known.values()) or len(known) < len(self._topics)
        if may_adopt and orphans.update(consumer_group=self._group):
            self._plan.expect_more()
        self._runs.prune()
        self._housekeep_at = self._clock.monotonic() + _HOUSEKEEPING

    # --- Rows begun -------------------------------------------------------------------------------

    def begin_at_once(self, worker: str, count_starts: Callable[[], int]) -> None:
        """See ``runs``: it saves a round trip and a transaction."""
        self._worker, self._count_starts = worker, count_starts

    def _what_begins(self) -> claims.Begins:
        """Return what of a claim begins along with it."""
        most = self._count_starts()
        number = self._runs.reserve(self._worker) if most > 0 else None
        if number is None:
            return claims.BEGINS_NOTHING
        return claims.Begins(number, self._worker, most, 0 if self._owned else 1)

    def _note_begun(self, begins: claims.Begins, records: Sequence[Record]) -> None:
        """Note which records have begun along with their claim. What others had taken over and have
        given back is here already, and begins when its turn comes."""
        if any(each.token in self._owned for each in records):
            self._doubt(begins)
        elif begins.most:
            self._runs.note_claimed(begins.number, _ids_of(records))

    def _doubt(self, begins: claims.Begins) -> None:
        if begins.most:
            self._runs.doubt(begins.number)
            self._may_have_strays = True

    def count_deliveries(self, records: Sequence[Record]) -> list[int]:
        """See ``runs``."""
        mine = self._still_mine(records)
        return [each.deliveries + 1 if each.token in mine else 0 for each in records]

    def begin(self, records: Sequence[Record], worker: str) -> list[int]:
        """See ``runs``."""
        mine = self._still_mine(records)
        new = _ids_of(
            each for each in records if each.token in mine and each.offset not in self._runs
        )
        if new:
            self._runs.begin(new, worker)
            if self._is_closed:  # meanwhile: others may have been given these
                self._runs.end(new)
                self._free(new)
                mine.difference_update((self._token, id) for id in new)
        return [each.deliveries + 1 if each.token in mine else 0 for each in records]

    def _still_mine(self, records: Sequence[Record]) -> set[Any]:
        """Return the tokens of those of the records that are leased to this consumer. It looks at
        those that others may have by now: all of them in a process that was frozen."""
        asked = {each.offset for each in records}
        if self._clock.monotonic() - self._renewed_at <= self._lease.total_seconds():
            asked &= self._taken_over
        if asked:
            self._look_at(asked)
        if self._is_closed:
            return set()
        return {token for token in self._mine(records) if token[1] not in self._taken_over}

    def _look_at(self, ids: Collection[int]) -> None:
        """Look at rows whose leases may be others' by now. Those that are settled are forgotten.
        Those that others have are kept here: what is behind them with their keys has to wait until
        they are settled, or this consumer has them again."""
        owners: dict[int, str] = {}
        rows = TransportMessage.objects.using(self._alias)
        for part in _batches(self._alias, ids):
            owners.update(rows.filter(id__in=part).values_list("id", "lease_token"))
        theirs = {id for id, owner in owners.items() if owner != self._token}
        with self._lock:
            self._taken_over.difference_update(ids)
            self._taken_over.update(theirs)
        self._forget((self._token, id) for id in ids if id not in owners)

    def has_lost(self, record: Record) -> bool:
        """Return whether another consumer has it, as of the last renewal."""
        return record.offset in self._taken_over or not self.holds(record)

    def end(self, records: Sequence[Record], deliveries: Sequence[int]) -> None:
        """See ``runs``. Once it is closed, they go to others."""
        each_count = zip(records, deliveries, strict=True)
        self._store_counts([each for each in each_count if each[0].deliveries != each[1]])
        ids = [each.offset for each in records if self._runs.names(each.offset)]
        self._runs.end(ids)
        if self._is_closed:
            self._free(ids)
            self._runs.close()

    def _store_counts(self, counts: Sequence[tuple[Record, int]]) -> None:
        """Store how often records were begun without an outcome."""
        by_count: dict[int, list[Record]] = {}
        for record, count in counts:
            by_count.setdefault(count, []).append(record)
        for count, records in by_count.items():
            ids = [each.offset for each in records]
            _change(self._alias, _COUNT, [count, self._token], ids)
            for each in records:
                each.deliveries = count

    def _count_dead(self, claimed: Mapping[int, str], records: Sequence[Record]) -> None:
        """Count once more what consumers had begun that were silent for too long, and have died.

        :param claimed: whose each of the records was.
        """
        consumers = {token for token in claimed.values() if token}
        if not consumers:
            return
        begun = runs.begun_by(self._alias, consumers)
        workers = {each.offset: begun.get((claimed[each.offset], each.offset)) for each in records}
        silent = {worker for worker in workers.values() if worker is not None}
        died = self._died(silent) if silent else ()
        counted = [each for each in records if workers[each.offset] in died]
        self._store_counts([(each, each.deliveries + 1) for each in counted])

    def ask_who_died(self, died: Callable[[Collection[str]], Collection[str]]) -> None:
        """Without this, whoever was silent for too long counts as dead."""
        self._died = died

    # --- Rows leased ------------------------------------------------------------------------------

    def _leased_rows(self) -> QuerySet[TransportMessage]:
        """Return the rows leased to this consumer, whether or not the lease is still live."""
        rows = TransportMessage.objects.using(self._alias).filter(lease_token=self._token)
        return rows.exclude(lease_token="")  # the partial index again

    def _free_strays(self) -> None:
        """Free rows that were never handed out: they would be renewed with the others, and run by
        nobody."""
        if self._may_have_strays:
            with self._lock:
                known = {id for _, id in self._owned}
            leased = self._leased_rows().values_list("id", flat=True)
            self._free([id for id in leased if id not in known])
            self._runs.end_doubt()
            self._may_have_strays = False

    def _forget(self, tokens: Iterable[Any]) -> None:
        tokens = list(tokens)
        super()._forget(tokens)
        ids = [id for _, id in tokens]
        self._runs.forget(ids)
        self._taken_over.difference_update(ids)

    def _free(self, ids: Iterable[int]) -> None:
        _change(self._alias, _FREE, [self._token], ids)

    def _delete(self, tokens: Sequence[Any]) -> None:
        _change(self._alias, _DELETE, [self._token], [id for _, id in tokens])

    def acknowledge_in_transaction(self, records: Iterable[Record]) -> None:
        """Delete the records now, or along with the next statement, on this thread's connection.

        Inside ``atomic`` the acknowledgement commits or rolls back with everything else there;
        after a roll-back the records are this consumer's still, to settle in another way.
        """
        mine = self._mine(records)
        ids, store = [id for _, id in mine], store_for(self._alias)
        # Also of what still ran when this was closed; the rest has no lease of this one any more.
        for statement in _changes(self._alias, _DELETE, [self._token], ids):
            store.execute_with_next(*statement)
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
        """Free these rows; while the database is away they stay leased, until it is asked again."""
        mine = self._mine(records)
        ids = [id for _, id in mine]

        def free() -> None:
            self._runs.end_claimed(ids)
            self._free(ids)

        if not self._insist(free):
            self._may_have_strays = True
        self._forget(mine)
        self._plan.end_idleness()

    def limit(self, records: Mapping[str, int]) -> None:
        """Claim no more than so many rows of each of these topics at once."""
        self._most = records

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Claim from these topics again, at the next poll."""
        super().resume(partitions)
        self._plan.expect_more()

    def skip_keys(self, keys: Collection[TopicKey]) -> None:
        """Claim no row of these keys; what is leased of them stays leased."""
        skipped: dict[str, set[int]] = {}
        for topic, key in keys:
            skipped.setdefault(topic, set()).add(key_hash(key))
        for topic, hashes in self._skipped.items():
            if hashes - skipped.get(topic, set()):
                self._plan.expect_more()
        self._skipped = skipped

    def _leave(self) -> None:
        """Write acknowledgements, hand back the rest at once and close this thread's connection."""
        rows = self._leased_rows()
        with self._lock:
            begun = [id for _, id in self._owned if id in self._runs]
        if not (
            self._insist(self._write_settled)
            # What still runs is given back when it ends.
            and self._insist(lambda: rows.exclude(id__in=begun).update(**_FREED))
            and self._insist(self._runs.close)
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
        self.has_seen_one = False
        """Whether the last wait has ended by a commit."""

    def wait(self, woken: threading.Event, timeout: float) -> bool:
        """Wait for ``woken``, for a commit or for so many seconds; return whether it was woken.

        A commit that came since the last wait ends this one at once.
        """
        clock, self.has_seen_one = self._clock, False
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
        self._changed_at, self.has_seen_one = clock.monotonic(), True
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


def _asked_of(
    topic: str, most: int, below: Mapping[str, int] | None, before: int | None
) -> list[claims.Asked]:
    """Return what is asked of a topic. Where it begins with a lower priority, the rows of that are
    a part of its own.

    :param below: see ``DatabaseSubscription._claim``.
    :param before: the rank after which it begins, see ``ClaimOrder.rank_before``.
    """
    if below is not None:
        return [claims.Asked(topic, most, below=below[topic])]
    if before is None:
        return [claims.Asked(topic, most)]
    return [claims.Asked(topic, most, above=before), claims.Asked(topic, most, below=before + 1)]


def _may_begin(rows: Sequence[DueRow], records: Sequence[Record], begins: claims.Begins) -> bool:
    """Return whether these rows begin along with their claim; see ``claims.Begins``."""
    keyed = (
        each.key is not None and each.key != each.headers.get(names.JOB_ID) for each in records
    )
    return (
        0 < len(rows) <= begins.most
        and sum(keyed) <= begins.most_keyed
        and not any(row.deliveries or row.lease_token for row in rows)
    )


def _ids_of(records: Iterable[Record]) -> dict[int, bytes]:
    """Return the ids of messages, by those of their rows."""
    return {each.offset: each.headers.get(names.ID, b"") for each in records}


def _no_starts() -> int:
    return 0


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


_FREE_ROWS = """
FROM kjo_transport_message WHERE consumer_group = %s AND topic IN ({topics})
    AND (lease_expires_at IS NULL OR lease_expires_at <= %s)"""
"""Rows that nobody holds."""
_NEXT = f"""
SELECT COALESCE(
    (SELECT available_at {_FREE_ROWS} AND available_at <= %s LIMIT 1),
    (SELECT MIN(available_at) {_FREE_ROWS})
)"""
"""When one of these rows was due, and otherwise when the first of them will be. The first that is
due ends the search: only where none is are all of them read."""
_LOCK = """
SELECT topic FROM kjo_transport_subscription
WHERE topic IN ({}) AND consumer_group = %s ORDER BY id FOR UPDATE"""
_DELETE = "{delete} WHERE lease_token = %s"
_TAKE = """
{update} SET lease_token = %s, lease_expires_at = %s
WHERE (lease_expires_at IS NULL OR lease_expires_at <= %s)
"""
_RENEW = "{update} SET lease_expires_at = %s WHERE lease_token = %s"
_FREE = "{update} SET lease_token = '', lease_expires_at = NULL WHERE lease_token = %s"
_FREED: Mapping[str, Any] = {"lease_token": "", "lease_expires_at": None}
_COUNT = "{update} SET deliveries = %s WHERE lease_token = %s"

_VERBS = {"delete": "DELETE FROM kjo_transport_message", "update": "UPDATE kjo_transport_message"}
# MySQL and MariaDB would read the whole table for half of its rows, and wait for each of them that
# a transaction has locked.
_VERBS_BY_ID = {
    "delete": "DELETE m FROM kjo_transport_message m FORCE INDEX (PRIMARY)",
    "update": "UPDATE kjo_transport_message FORCE INDEX (PRIMARY)",
}


def _change(alias: str, statement: str, values: list[Any], ids: Iterable[int]) -> int:
    """Execute it for rows with these ids; return how many rows changed."""
    changed = 0
    with connections[alias].cursor() as cursor:
        for sql, parameters in _changes(alias, statement, values, ids):
            cursor.execute(sql, parameters)
            changed += cursor.rowcount
    return changed


def _changes(
    alias: str, statement: str, values: list[Any], ids: Iterable[int]
) -> Iterator[tuple[str, list[Any]]]:
    """Yield it for rows with these ids, which Django would prepare one by one, with its parameters.
    No other row is read, so nobody waits for who has locked another one."""
    is_mysql, takes_array = connections[alias].vendor == "mysql", store_for(alias).sends_several
    begin = statement.format_map(_VERBS_BY_ID if is_mysql else _VERBS)
    for chunk in _batches(alias, ids):
        if takes_array:  # one text for any number: psycopg keeps what it has found out about it
            yield f"{begin} AND id = ANY(%s::bigint[])", [*values, array_text(chunk)]
        else:
            yield f"{begin} AND id IN ({', '.join(['%s'] * len(chunk))})", [*values, *chunk]


def _batches(alias: str, ids: Iterable[int]) -> Iterator[list[int]]:
    """Split ids by what one statement of this database may carry."""
    everything = list(ids)
    limit = connections[alias].features.max_query_params
    size = _BATCH if limit is None else max(1, min(_BATCH, limit - 20))
    for start in range(0, len(everything), size):
        yield everything[start : start + size]
