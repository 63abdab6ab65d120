"""Claiming rows of the message table: which of those due, under which locks, all or none of them.

What keeps a key at one consumer is here: claims of one topic and group come in turn, each sees the
leases of those before it, and a claim that meets an owner come back to life takes nothing at all.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta

from django.db import connections
from django.db.models import QuerySet
from django.utils import timezone

from kjo_django.models import TransportMessage, TransportSubscription
from kjo_django.store import store_for
from kjo_django.transports.base import Record, TopicKey, TopicPartition
from kjo_django.transports.database.rows import (
    COLUMNS,
    commit_lazily,
    due_rows,
    group_rows,
    hash_of,
    take_unleased,
    to_record,
    unleased,
)

_SHORTEST_WAIT = 0.005


class Collision(Exception):
    """A row chosen was renewed or settled by its late owner before it could be taken."""


class Pace:
    """How long to wait until the table is looked at again: short after activity, then doubling.

    :param longest: seconds; an idle table is looked at so often.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._wait = _SHORTEST_WAIT

    def quicken(self) -> None:
        """Come back soon."""
        self._wait = _SHORTEST_WAIT

    def rest(self, seconds: float) -> None:
        """Wait for at least so long next time."""
        self._wait = max(self._wait, seconds)

    def next_wait(self) -> float:
        """Return the seconds to wait now; jittered, so that consumers do not look as a herd."""
        wait = self._wait
        self._wait = min(self._longest, wait * 2)
        return wait * random.uniform(0.75, 1.0)  # noqa: S311


class Claimer:
    """Claims for one consumer, which its token names. Belongs to the thread that polls."""

    def __init__(
        self,
        alias: str,
        topics: Sequence[str],
        group: str,
        token: str,
        lease: timedelta,
        pace: Pace,
    ) -> None:
        self._alias = alias
        self._topics = list(topics)
        self._group = group
        self._token = token
        self._lease = lease
        self._pace = pace
        self._paused: set[TopicPartition] = set()
        self._skipped: dict[str, set[int]] = {}
        self._turn = 0
        self._more = True
        """Whether something may be due: then it is claimed without being looked for first."""

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Leave these topics alone."""
        self._paused.update(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Claim from these topics again."""
        self._paused.difference_update(partitions)
        self._more = True

    def skip_keys(self, keys: Collection[TopicKey]) -> None:
        """Leave these keys alone, and no others."""
        skipped: dict[str, set[int]] = {}
        for topic, key in keys:
            skipped.setdefault(topic, set()).add(hash_of(key))
        self._more = self._more or skipped != self._skipped
        self._skipped = skipped

    def claim(self, limit: int) -> list[Record]:
        """Lease up to so many rows; empty where nothing is due, or others claim all of it just now.

        :raises Collision: a row chosen was not free any more. Nothing was leased.
        """
        due = self._due_topics() if limit > 0 else []
        if not due:
            self._more = False
            return []
        is_nested = connections[self._alias].in_atomic_block
        with store_for(self._alias).transaction():
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
            self._pace.quicken()
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
            topics = [topic for topic in topics if self._due_rows(topic, now).exists()]
        else:
            topics = []
        # Walking past a backlog of delayed or busy rows takes time: no more than a tenth of it.
        self._pace.rest(9 * (time.monotonic() - started))
        return topics

    def _lock_topics(self, topics: list[str]) -> list[str]:
        """Become the only claimer of these topics in this group until the transaction ends.

        Returns those nobody else is claiming just now. With every claim of a topic and group in
        turn, each sees the leases of the one before: that is what keeps a key at one consumer.
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
        """Return the first due rows, giving each topic its share and the rest to who has more."""
        self._turn += 1
        start = self._turn % max(1, len(topics))
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

    def _take(self, ids: list[int], now: datetime) -> None:
        """Lease the rows, all or none.

        An owner whose lease had run out may renew or settle at this very moment. Taking what is
        left would let a row overtake an earlier one of its key, so the claim is undone instead.
        """
        if take_unleased(self._alias, ids, self._token, now, now + self._lease) != len(ids):
            raise Collision
