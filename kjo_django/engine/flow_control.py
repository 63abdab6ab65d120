"""How many records a poller may fetch, and of which topics and partitions. Pure.

A worker holds ``MAX_OUTSTANDING`` records at most, and all its queues share that room. A backlog of
slow jobs would fill it and keep every other queue waiting, so:

- A topic holds at most as many records as are left free. One busy topic gets half of the room, two
  get a third each, and there is always room for one that was idle so far.
- A partition holds at most half of what its topic may hold alone: a hot key fills its own
  partition's share, and the keys of other partitions go on.
- A partition of a log is read no further than ``MAX_OUTSTANDING`` records past its oldest
  unsettled one: so many are delivered again after a crash.
- One poll fetches at most an eighth of the room, so that these limits are looked at in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kjo_django.transports.base import TopicPartition

CHUNKS = 8
"""Polls that fill the room at least."""


class FetchPlan(NamedTuple):
    """What the next poll may fetch."""

    max_records: int
    """0: nothing; no partition has room."""
    full: frozenset[TopicPartition]
    """Partitions to fetch nothing from until they hold less."""


class FlowControl:
    """The limits of one poller.

    :param max_outstanding: records its worker holds at most.
    :param is_alone: whether its worker reads one topic only: that one needs to leave nothing free.
    """

    def __init__(self, max_outstanding: int, *, is_alone: bool) -> None:
        self._most = max_outstanding
        self._is_alone = is_alone
        self.chunk = max(1, max_outstanding // CHUNKS)
        """Records one poll fetches at most; a key holds at most as many when that can be helped."""

    def plan(
        self,
        assigned: Sequence[TopicPartition],
        held: Mapping[TopicPartition, int],
        free: int,
        uncommitted: Mapping[TopicPartition, int],
        paused: Collection[TopicPartition],
    ) -> FetchPlan:
        """Return what to fetch next.

        :param assigned: the partitions to choose from.
        :param held: records of each partition that wait or run in this worker.
        :param free: records the worker has room for, whatever their topic.
        :param uncommitted: records of each partition a crash would deliver again.
        :param paused: partitions that were full: they have room again when they hold much less, not
            with every record that ends.
        """
        if not assigned:
            # Its partitions are yet to come, within the poll.
            return FetchPlan(max(0, min(free, self.chunk)), frozenset())
        topics: Counter[str] = Counter()
        partitions = Counter(each.topic for each in assigned)
        for partition, count in held.items():
            topics[partition.topic] += count
        full = frozenset(
            each
            for each in assigned
            if self._is_topic_full(topics[each.topic], free, each in paused)
            or (
                partitions[each.topic] > 1
                and self._is_partition_full(held.get(each, 0), each in paused)
            )
            or self._is_too_far(uncommitted.get(each, 0), each in paused)
        )
        room = 0
        for each in assigned:
            if each not in full:
                left = self._most - uncommitted.get(each, 0)
                if not self._is_alone:
                    # Half of the difference makes what it holds and what is free equal.
                    free_for_it = max(1, (free - topics[each.topic]) // 2)
                else:
                    free_for_it = free
                room = max(room, min(left, free_for_it))
        return FetchPlan(max(0, min(room, self.chunk)), full)

    def _is_topic_full(self, held: int, free: int, was_full: bool) -> bool:
        if self._is_alone:
            return free <= 0
        return held >= max(1, free // 4 if was_full else free)

    def _is_partition_full(self, held: int, was_full: bool) -> bool:
        limit = max(CHUNKS, self._most // (2 if self._is_alone else 4))
        return held >= (limit // 2 if was_full else limit)

    def _is_too_far(self, uncommitted: int, was_full: bool) -> bool:
        return uncommitted > (self._most // 2 if was_full else self._most - self.chunk)
