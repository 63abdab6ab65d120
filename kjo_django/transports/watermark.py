"""What a consumer of a log may commit: the contiguous watermark of each assigned partition.

Records are settled in any order, the log stores one number per partition. That number is the
lowest offset handed out and not settled; when everything is settled, the one after the highest
handed out. Offsets a poll skipped (compaction, transaction markers) were never handed out, so they
hold nothing back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from kjo_django.transports.base import Record, TopicPartition


@dataclass(slots=True, eq=False)
class Assignment:
    """One partition under one epoch. Only the `Watermark` that made it changes its fields."""

    partition: TopicPartition
    epoch: int
    alive: bool = True
    next_offset: int | None = None
    in_order: bool = True
    """Whether the first key of ``unsettled`` is the lowest one."""
    delivered_count: int = 0
    unsettled: dict[int, int] = field(default_factory=dict)
    """Offsets in the order of delivery, each with the number of records delivered before it."""


class Watermark:
    """The assignments of one subscription, which may be its base class. Every method is thread-safe
    and free of I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._assignments: dict[TopicPartition, Assignment] = {}
        self._epochs = count(1)

    def assign(self, partition: TopicPartition) -> Assignment:
        """Start a new epoch of ``partition``; results of an older epoch are dropped."""
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

    def _retire(self, partition: TopicPartition) -> None:
        assignment = self._assignments.pop(partition, None)
        if assignment is not None:
            assignment.alive = False

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions assigned now."""
        with self._lock:
            return list(self._assignments)

    def deliver(self, assignment: Assignment, offsets: Sequence[int]) -> None:
        """Note ascending ``offsets`` as handed out and not settled."""
        if not offsets:
            return
        with self._lock:
            following = assignment.next_offset
            if following is not None and offsets[0] < following:
                # A seek went back: the first key need no longer be the lowest.
                assignment.in_order = False
            assignment.unsettled.update(
                zip(offsets, count(assignment.delivered_count), strict=False)
            )
            assignment.delivered_count += len(offsets)
            assignment.next_offset = max(offsets[-1] + 1, following or 0)

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
        """Return whether the assignment under which the record was handed out is still live."""
        assignment = record.token
        return bool(assignment.alive and assignment.epoch == record.epoch)

    def positions(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, int]:
        """Return the offset to commit for each partition from which anything was handed out.

        :param partitions: only these; those not assigned are left out.
        """
        with self._lock:
            found = {}
            for partition in self._assignments if partitions is None else partitions:
                assignment = self._assignments.get(partition)
                if assignment is None or assignment.next_offset is None:
                    continue
                if not assignment.unsettled:
                    assignment.in_order = True
                    found[partition] = assignment.next_offset
                elif assignment.in_order:
                    found[partition] = next(iter(assignment.unsettled))
                else:
                    found[partition] = min(assignment.unsettled)
            return found

    def uncommitted(self) -> dict[TopicPartition, int]:
        """Return how many records of each partition a crash would deliver again."""
        with self._lock:
            return {
                partition: each.delivered_count - next(iter(each.unsettled.values()))
                if each.unsettled
                else 0
                for partition, each in self._assignments.items()
            }
