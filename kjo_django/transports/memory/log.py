"""The state of the memory transport: topics, groups and delayed records behind one lock."""

from __future__ import annotations

import heapq
import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING

from kjo_django.transports.base import OutgoingRecord, Published, Record, TopicPartition

if TYPE_CHECKING:
    from kjo_django.transports.memory.transport import MemorySubscription


class Topic:
    """The records of one topic, by partition; an offset is an index."""

    def __init__(self, partitions: int, config: Mapping[str, str]) -> None:
        self.partitions: list[list[Record]] = [[] for _ in range(partitions)]
        self.config = dict(config)
        self._round_robin = count()

    def grow(self, partitions: int) -> None:
        self.partitions += [[] for _ in range(partitions - len(self.partitions))]

    def choose(self, record: OutgoingRecord) -> int:
        """Return the partition a record belongs to."""
        if record.partition is not None:
            return record.partition
        if record.key is None:
            return next(self._round_robin) % len(self.partitions)
        return zlib.crc32(record.key) % len(self.partitions)

    def append(self, record: OutgoingRecord) -> Record:
        partition = self.choose(record)
        log = self.partitions[partition]
        stored = Record(
            topic=record.topic,
            partition=partition,
            offset=len(log),
            key=record.key,
            value=record.value,
            headers=dict(record.headers),
            timestamp=datetime.now(UTC),
        )
        log.append(stored)
        return stored


class Group:
    """Who owns which partition, who should, and what is committed. Guarded by the log's lock."""

    def __init__(self, topics: dict[str, Topic]) -> None:
        self.topics = topics
        self.members: list[MemorySubscription] = []
        self.owners: dict[TopicPartition, MemorySubscription] = {}
        self.targets: dict[TopicPartition, MemorySubscription] = {}
        self.committed: dict[TopicPartition, int] = {}

    def join(self, member: MemorySubscription) -> bool:
        """Return whether that changed anything."""
        if member in self.members:
            return False
        self.members.append(member)
        self.balance()
        return True

    def leave(self, member: MemorySubscription) -> None:
        """Remove a member; its partitions are free at once."""
        if member in self.members:
            self.members.remove(member)
            self.owners = {tp: owner for tp, owner in self.owners.items() if owner is not member}
            self.balance()

    def balance(self) -> None:
        """Decide who should own what: as even as possible, moving as little as possible."""
        self.targets = {}
        for name, topic in self.topics.items():
            members = [member for member in self.members if name in member.topics]
            if members:
                self._balance(name, len(topic.partitions), members)

    def _balance(self, name: str, partitions: int, members: list[MemorySubscription]) -> None:
        least, extra = divmod(partitions, len(members))
        load = dict.fromkeys(members, 0)
        homeless = []
        for partition in (TopicPartition(name, number) for number in range(partitions)):
            owner = self.owners.get(partition)
            if owner in load and load[owner] < least + (extra > 0):
                extra -= load[owner] == least
                load[owner] += 1
                self.targets[partition] = owner
            else:
                homeless.append(partition)
        for partition in homeless:
            member = min(members, key=load.__getitem__)
            load[member] += 1
            self.targets[partition] = member

    def next_expiry(self, asking: MemorySubscription) -> float:
        """Return when the next lease of another member ends, on the monotonic clock."""
        others = (member.expires_at for member in self.members if member is not asking)
        return min(others, default=float("inf"))

    def evict(self, asking: MemorySubscription) -> bool:
        """Remove members that gave no sign of life for the length of their lease; tell if any."""
        now = time.monotonic()
        dead = [each for each in self.members if each is not asking and each.expires_at <= now]
        for member in dead:
            self.leave(member)
        return bool(dead)


@dataclass(slots=True)
class Moves:
    """What a member has to do before it may fetch."""

    lost: list[TopicPartition]
    revoked: list[TopicPartition]
    assigned: list[TopicPartition]

    def __bool__(self) -> bool:
        return bool(self.lost or self.revoked or self.assigned)


class MemoryLog:
    """All state of one transport behind one lock; ``changed`` wakes every waiting poll."""

    def __init__(self, default_partitions: int) -> None:
        self.default_partitions = default_partitions
        self.changed = threading.Condition()
        self.outage: str | None = None
        self._sequence = count()
        self.clear()

    def clear(self) -> None:
        with self.changed:
            self.topics: dict[str, Topic] = {}
            self.groups: dict[str, Group] = {}
            self.delayed: list[tuple[datetime, int, OutgoingRecord]] = []
            self.changed.notify_all()

    def topic(self, name: str) -> Topic:
        if name not in self.topics:
            self.create(name, self.default_partitions, {})
        return self.topics[name]

    def create(self, name: str, partitions: int, config: Mapping[str, str]) -> None:
        self.topics[name] = Topic(partitions, config)
        self.rebalance()

    def rebalance(self) -> None:
        for group in self.groups.values():
            group.balance()
        self.changed.notify_all()

    def group(self, name: str) -> Group:
        if name not in self.groups:
            self.groups[name] = Group(self.topics)
        return self.groups[name]

    def accept(self, record: OutgoingRecord) -> Published:
        topic = self.topic(record.topic)
        if record.partition is not None and not 0 <= record.partition < len(topic.partitions):
            return Published(error=f"topic {record.topic!r} has no partition {record.partition}")
        if record.available_at is not None and record.available_at > datetime.now(UTC):
            # It enters the log when it is due, so until then it has no position.
            heapq.heappush(self.delayed, (record.available_at, next(self._sequence), record))
            return Published()
        stored = topic.append(record)
        return Published(partition=stored.partition, offset=stored.offset)

    def admit_due(self) -> float:
        """Move what is due into the log; return the seconds until more is."""
        now = datetime.now(UTC)
        while self.delayed and self.delayed[0][0] <= now:
            record = heapq.heappop(self.delayed)[2]
            self.topic(record.topic).append(record)
            self.changed.notify_all()
        return (self.delayed[0][0] - now).total_seconds() if self.delayed else float("inf")


def lag_of(
    log: MemoryLog, group: str, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, int]:
    """Return end minus committed for each partition. The caller holds the lock."""
    log.admit_due()
    known = log.groups.get(group)
    return {
        tp: len(log.topic(tp.topic).partitions[tp.partition])
        - (known.committed.get(tp, 0) if known else 0)
        for tp in partitions
    }
