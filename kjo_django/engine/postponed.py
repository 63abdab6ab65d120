"""What must not start before a moment: keys put off, and partitions that are held."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator

from kjo_django.engine.key_queue import Shard
from kjo_django.transports.base import TopicPartition


class Later:
    """Moments are of the monotonic clock. Not thread-safe: it is a part of the lanes."""

    def __init__(self) -> None:
        self._shards: list[tuple[float, int, Shard]] = []
        # Shards cannot be compared, and those of one moment keep their order.
        self._tickets = itertools.count()
        self._held: dict[TopicPartition, float] = {}

    def put(self, shard: Shard, due: float) -> None:
        """Keep a shard until then."""
        heapq.heappush(self._shards, (due, next(self._tickets), shard))

    def take_due(self) -> Iterator[Shard]:
        """Yield, and keep no longer, the shards whose moment has come."""
        if not self._shards:
            return
        now = time.monotonic()
        while self._shards and self._shards[0][0] <= now:
            yield heapq.heappop(self._shards)[2]

    @property
    def next_due(self) -> float | None:
        """When the first of them may start."""
        return self._shards[0][0] if self._shards else None

    def hold(self, partition: TopicPartition, until: float) -> None:
        """Let nothing of a partition start before then."""
        self._held[partition] = until

    @property
    def holds(self) -> bool:
        """Whether a partition is held, as far as anybody has looked."""
        return bool(self._held)

    def held_until(self, partition: TopicPartition) -> float | None:
        """Return until when a partition is held, None where it is not."""
        until = self._held.get(partition)
        if until is not None and until <= time.monotonic():
            del self._held[partition]
            return None
        return until
