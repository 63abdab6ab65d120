"""What a consumer of a log may commit: the contiguous watermark of each assigned partition.

Records are settled in any order, the log stores one number per partition. That number is the
lowest offset handed out and not settled; when everything is settled, the one after the highest
handed out. Offsets a poll skipped (compaction, transaction markers) were never handed out, so they
hold nothing back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import count

from kjo_django.transports.base import Record, TopicPartition


class Assignment:
    """One partition under one epoch. Its fields belong to the `Watermark` that made it."""

    __slots__ = (
        "alive",
        "delivered_count",
        "epoch",
        "in_order",
        "next_offset",
        "partition",
        "unsettled",
    )

    def __init__(self, partition: TopicPartition, epoch: int) -> None:
        self.partition = partition
        self.epoch = epoch
        self.alive = True
        self.next_offset: int | None = None
        self.in_order = True
        self.delivered_count = 0
        # A dict for its order: offsets enter ascending, so the first key is the lowest. Each has
        # the number of records handed out before it.
        self.unsettled: dict[int, int] = {}

    def track(self, offsets: Sequence[int]) -> None:
        """Note offsets handed out, in the order of the log."""
        if self.next_offset is not None and offsets[0] < self.next_offset:
            # Handed out again after a seek: the first key need no longer be the lowest.
            self.in_order = False
        self.unsettled.update(zip(offsets, count(self.delivered_count), strict=False))
        self.delivered_count += len(offsets)
        last = offsets[-1] + 1
        if self.next_offset is None or last > self.next_offset:
            self.next_offset = last

    def position(self) -> int | None:
        """Return the offset to commit, None before anything was handed out."""
        if not self.unsettled:
            self.in_order = True
            return self.next_offset
        return next(iter(self.unsettled)) if self.in_order else min(self.unsettled)

    def uncommitted(self) -> int:
        """Return how many were handed out from the lowest unsettled one on."""
        if not self.unsettled:
            return 0
        return self.delivered_count - next(iter(self.unsettled.values()))


class Watermark:
    """The assignments of one subscription. Every method is thread-safe and free of I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._assignments: dict[TopicPartition, Assignment] = {}
        self._epochs = count(1)

    def assign(self, partition: TopicPartition) -> Assignment:
        """Start a new epoch of ``partition``; what was tracked under an older one is dropped."""
        with self._lock:
            self._retire(partition)
            assignment = Assignment(partition, next(self._epochs))
            self._assignments[partition] = assignment
            return assignment

    def revoke(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget these partitions: results that still arrive for them have no effect."""
        with self._lock:
            for partition in partitions:
                self._retire(partition)

    def get(self, partition: TopicPartition) -> Assignment | None:
        """Return the live assignment of ``partition``, None when it is not assigned."""
        return self._assignments.get(partition)

    def assigned(self) -> list[TopicPartition]:
        """Return the partitions assigned now."""
        with self._lock:
            return list(self._assignments)

    def rotate(self, partition: TopicPartition) -> None:
        """Move ``partition`` to the end of ``assigned()``."""
        with self._lock:
            if partition in self._assignments:
                self._assignments[partition] = self._assignments.pop(partition)

    def deliver(self, assignment: Assignment, offsets: Sequence[int]) -> None:
        """Note ascending ``offsets`` as handed out and not settled."""
        if not offsets:
            return
        with self._lock:
            assignment.track(offsets)

    def settle(self, records: Iterable[Record]) -> None:
        """Note records as settled. Those of a stale epoch, unknown or settled before, are ignored.

        ``record.token`` is the `Assignment` under which the record was handed out.
        """
        with self._lock:
            for record in records:
                assignment = record.token
                if assignment.alive and assignment.epoch == record.epoch:
                    assignment.unsettled.pop(record.offset, None)

    def holds(self, record: Record) -> bool:
        """Return whether the record's partition is assigned as it was when it was handed out."""
        assignment = record.token
        return bool(assignment.alive and assignment.epoch == record.epoch)

    def positions(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, int]:
        """Return the offset to commit for each partition from which anything was handed out.

        :param partitions: only these; those not assigned are left out.
        """
        with self._lock:
            wanted = self._assignments if partitions is None else partitions
            found = {}
            for partition in wanted:
                assignment = self._assignments.get(partition)
                position = assignment.position() if assignment else None
                if position is not None:
                    found[partition] = position
            return found

    def outstanding(self, partition: TopicPartition | None = None) -> int:
        """Count what is handed out and not settled, in one partition or in all."""
        with self._lock:
            if partition is None:
                return sum(len(each.unsettled) for each in self._assignments.values())
            assignment = self._assignments.get(partition)
            return len(assignment.unsettled) if assignment else 0

    def uncommitted(self) -> dict[TopicPartition, int]:
        """Return how many records of each partition would be handed out again after a crash."""
        with self._lock:
            return {where: each.uncommitted() for where, each in self._assignments.items()}

    def _retire(self, partition: TopicPartition) -> None:
        assignment = self._assignments.pop(partition, None)
        if assignment is not None:
            assignment.alive = False
