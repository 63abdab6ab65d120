"""A log within this process, for tests: no server, yet the behaviour of one.

It has partitions, groups, epochs, cooperative rebalancing between the subscriptions of a group,
leases, delays and replay. Like Kafka it stores one watermark per group and partition, so a restart
delivers again whatever was settled beyond the first unsettled record: code that passes on it has
met duplicates.

OPTIONS: ``partitions``, the number a topic gets when it is first used (default 1).
"""

from __future__ import annotations

import heapq
import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import count
from math import inf
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from kjo_django.exceptions import PublishError
from kjo_django.transports.base import (
    AssignedCallback,
    Capabilities,
    OutgoingRecord,
    Published,
    Record,
    RevokedCallback,
    Subscription,
    TopicDescription,
    TopicPartition,
    TopicSpec,
    Transport,
)
from kjo_django.transports.watermark import Watermark

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Topic:
    """The records of one topic, by partition. An offset is an index."""

    partitions: list[list[Record]]
    config: dict[str, str]
    round_robin: Iterator[int] = field(default_factory=count)


class Group:
    """Who owns which partition, who should, and what is committed."""

    def __init__(self) -> None:
        self.members: list[MemorySubscription] = []
        self.owners: dict[TopicPartition, MemorySubscription] = {}
        self.targets: dict[TopicPartition, MemorySubscription] = {}
        self.committed: dict[TopicPartition, int] = {}

    def remove(self, member: MemorySubscription) -> None:
        """Remove a member; its partitions are free at once."""
        self.members.remove(member)
        self.owners = {each: owner for each, owner in self.owners.items() if owner is not member}

    def balance(self, topics: Mapping[str, Topic]) -> None:
        """Decide who should own what: as even as possible, moving as little as possible."""
        self.targets = {}
        for name, topic in topics.items():
            load = {member: 0 for member in self.members if name in member.topics}
            if not load:
                continue
            least, extra = divmod(len(topic.partitions), len(load))
            free = []
            for number in range(len(topic.partitions)):
                partition = TopicPartition(name, number)
                owner = self.owners.get(partition)
                if owner in load and load[owner] < least + (extra > 0):
                    extra -= load[owner] == least
                    load[owner] += 1
                    self.targets[partition] = owner
                else:
                    free.append(partition)
            for partition in free:
                member = min(load, key=load.__getitem__)
                load[member] += 1
                self.targets[partition] = member


class MemorySubscription(Subscription):
    """A member of a group. See `MemoryTransport.subscribe`."""

    def __init__(
        self,
        log: MemoryTransport,
        topics: Sequence[str],
        group: str,
        lease: timedelta,
        on_revoked: RevokedCallback | None,
        on_assigned: AssignedCallback | None,
    ) -> None:
        self.topics = frozenset(topics)
        self.expires_at = log.clock.monotonic() + lease.total_seconds()
        """When the other members may take its partitions, on the monotonic clock."""
        self._log = log
        self._group_name = group
        self._lease = lease.total_seconds()
        self._on_revoked = on_revoked
        self._on_assigned = on_assigned
        self._watermark = Watermark()
        self._next: dict[TopicPartition, int] = {}
        """The offset to read next of each partition owned; the first of them is read first."""
        self._paused: set[TopicPartition] = set()
        self._is_woken = False
        self._is_closed = False
        with log.changed:
            for topic in sorted(self.topics):
                log.topic(topic)
            self._join(log.group(group))

    def poll(self, max_records: int, timeout: float) -> list[Record]:
        clock = self._log.clock
        deadline = clock.monotonic() + timeout
        # A member that waits in here is alive however long it waits.
        self.expires_at = inf
        try:
            while not self._is_closed:
                records = self._attempt(max_records, deadline)
                if records is not None:
                    return records
            return []
        finally:
            self.expires_at = clock.monotonic() + self._lease

    def _attempt(self, max_records: int, deadline: float) -> list[Record] | None:
        """Move partitions, hand out records or wait once. None: try again."""
        log = self._log
        with log.changed:
            group = log.group(self._group_name)
            now = log.clock.monotonic()
            expired = [each for each in group.members if each.expires_at <= now]
            for member in expired:
                group.remove(member)
            self._join(group, is_changed=bool(expired))
            mine = list(self._next)
            lost = [each for each in mine if group.owners.get(each) is not self]
            revoked = [
                each
                for each in mine
                if group.owners.get(each) is self and group.targets.get(each) is not self
            ]
            assigned = [
                each
                for each, target in group.targets.items()
                if target is self and each not in group.owners
            ]
            if not (lost or revoked or assigned):
                self.last_error = log.outage
                due = log.admit_due()
                records = [] if log.outage else self._take(max_records)
                remaining = deadline - now
                if records or self._is_woken or remaining <= 0:
                    self._is_woken = False
                    return records
                next_expiry = min(each.expires_at for each in group.members) - now
                log.clock.wait(log.changed, max(min(remaining, due, next_expiry), 0))
                return None
        # Outside the lock: the callbacks wait for threads that acknowledge.
        if lost:
            self._forget(lost)
            self._call(self._on_revoked, lost, True)
        if revoked:
            self._call(self._on_revoked, revoked, False)
            self._release(revoked)
        if assigned:
            self._acquire(assigned)
        return None

    def _join(self, group: Group, *, is_changed: bool = False) -> None:
        """Be a member, and distribute the partitions anew where that, or anything else, changed the
        members."""
        if self not in group.members:
            group.members.append(self)
            is_changed = True
        if is_changed:
            group.balance(self._log.topics)
            self._log.changed.notify_all()

    def _acquire(self, partitions: Iterable[TopicPartition]) -> None:
        with self._log.changed:
            group = self._log.group(self._group_name)
            free = [
                each
                for each in partitions
                if each not in group.owners and group.targets.get(each) is self
            ]
            for partition in free:
                group.owners[partition] = self
                self._watermark.assign(partition)
                self._next[partition] = group.committed.get(partition, 0)
        if free:
            self._call(self._on_assigned, free)

    def _release(self, partitions: Iterable[TopicPartition]) -> None:
        with self._log.changed:
            self._forget(partitions)
            owners = self._log.group(self._group_name).owners
            for partition in partitions:
                if owners.get(partition) is self:
                    del owners[partition]
            self._log.changed.notify_all()

    def _forget(self, partitions: Iterable[TopicPartition]) -> None:
        self._watermark.revoke(partitions)
        for partition in partitions:
            self._next.pop(partition, None)

    def _call(self, callback: Callable[..., None] | None, *arguments: Any) -> None:
        if callback is None:
            return
        try:
            callback(*arguments)
        except Exception:
            logger.exception("Consumer group %s: a rebalance callback failed", self._group_name)

    def _take(self, max_records: int) -> list[Record]:
        taken: list[Record] = []
        for partition, start in list(self._next.items()):
            limit = max_records - len(taken)
            if limit <= 0:
                break
            assignment = self._watermark.get(partition)
            if partition in self._paused or assignment is None:
                continue
            stored = self._log.topic(partition.topic).partitions[partition.partition]
            batch = [
                replace(each, headers=dict(each.headers), epoch=assignment.epoch, token=assignment)
                for each in stored[start : start + limit]
            ]
            if batch:
                self._watermark.deliver(assignment, [record.offset for record in batch])
                # To the end of the dict, so that no partition starves another.
                del self._next[partition]
                self._next[partition] = start + len(batch)
                taken += batch
        return taken

    def acknowledge(self, records: Iterable[Record]) -> None:
        """Settle ``records``; the watermark they move is durable when this returns."""
        with self._log.changed:
            self._watermark.settle(records)
            group = self._log.group(self._group_name)
            for partition, position in self._watermark.positions().items():
                if group.owners.get(partition) is self:
                    group.committed[partition] = position

    def holds(self, record: Record) -> bool:
        return self._watermark.holds(record)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        with self._log.changed:
            self._paused.update(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        with self._log.changed:
            self._paused.difference_update(partitions)
            self._log.changed.notify_all()

    def assignment(self) -> list[TopicPartition]:
        return self._watermark.assigned()

    def uncommitted(self) -> dict[TopicPartition, int]:
        return self._watermark.uncommitted()

    def wake(self) -> None:
        with self._log.changed:
            self._is_woken = True
            self._log.changed.notify_all()

    def lag(self) -> dict[TopicPartition, int]:
        return self._log.lag_of(self._group_name, self._watermark.assigned())

    def close(self) -> None:
        if self._is_closed:
            return
        partitions = self._watermark.assigned()
        if partitions:
            self._call(self._on_revoked, partitions, False)
        self.crash()

    def crash(self) -> None:
        """Vanish as a killed process does once its lease ends: no callback, nothing acknowledged
        any more. For tests."""
        with self._log.changed:
            self._is_closed = True
            self._forget(self._watermark.assigned())
            group = self._log.group(self._group_name)
            if self in group.members:
                group.remove(self)
                group.balance(self._log.topics)
            self._log.changed.notify_all()


class MemoryTransport(Transport):
    """The log belongs to the instance and survives ``close``; `clear` empties it.

    One lock guards everything: that of ``changed``, which wakes every waiting poll.
    """

    capabilities = Capabilities(ordering=True, delay=True, transactional=False, replay=True)
    known_options = frozenset({"partitions"})

    def __init__(self, alias: str, options: Mapping[str, Any]) -> None:
        super().__init__(alias, options)
        setting = f"KJO['TRANSPORTS'][{alias!r}]['OPTIONS']"
        self._default_partitions = self.options.get("partitions", 1)
        if not isinstance(self._default_partitions, int) or self._default_partitions < 1:
            raise ImproperlyConfigured(f"{setting}['partitions'] must be a whole number above 0.")
        self.changed = threading.Condition()
        self.outage: str | None = None
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, Group] = {}
        self.delayed: list[tuple[datetime, int, OutgoingRecord]] = []
        """A heap of the records that are not due yet."""
        self._sequence = count()

    def publish(self, records: Sequence[OutgoingRecord]) -> list[Published]:
        with self.changed:
            if self.outage:
                return [Published(error=self.outage) for _ in records]
            outcomes = [self._accept(record) for record in records]
            self.changed.notify_all()
            return outcomes

    def _accept(self, record: OutgoingRecord) -> Published:
        partitions = self.topic(record.topic).partitions
        if record.partition is not None and not 0 <= record.partition < len(partitions):
            return Published(error=f"topic {record.topic!r} has no partition {record.partition}")
        if record.available_at is not None and record.available_at > self.clock.now():
            # It enters the log when it is due, so until then it has no position.
            heapq.heappush(self.delayed, (record.available_at, next(self._sequence), record))
            return Published()
        return self._append(record)

    def _append(self, record: OutgoingRecord) -> Published:
        topic = self.topic(record.topic)
        partition = record.partition
        if partition is None and record.key is None:
            partition = next(topic.round_robin) % len(topic.partitions)
        elif partition is None:
            partition = zlib.crc32(record.key or b"") % len(topic.partitions)
        log = topic.partitions[partition]
        log.append(
            Record(
                topic=record.topic,
                partition=partition,
                offset=len(log),
                key=record.key,
                value=record.value,
                headers=dict(record.headers),
                timestamp=self.clock.now(),
            )
        )
        return Published(partition=partition, offset=len(log) - 1)

    def admit_due(self) -> float:
        """Move what is due into the log; return the seconds until more is. The caller holds the
        lock."""
        if not self.delayed:
            return inf
        now = self.clock.now()
        while self.delayed and self.delayed[0][0] <= now:
            self._append(heapq.heappop(self.delayed)[2])
            self.changed.notify_all()
        return (self.delayed[0][0] - now).total_seconds() if self.delayed else inf

    def subscribe(
        self,
        topics: Sequence[str],
        group: str,
        *,
        lease: timedelta = timedelta(seconds=30),
        on_revoked: RevokedCallback | None = None,
        on_assigned: AssignedCallback | None = None,
    ) -> MemorySubscription:
        """Join ``group``. Without a poll for ``lease``, another member takes its partitions."""
        return MemorySubscription(self, topics, group, lease, on_revoked, on_assigned)

    def group(self, name: str) -> Group:
        """Return a group, which its first use makes. The caller holds the lock."""
        if name not in self.groups:
            self.groups[name] = Group()
        return self.groups[name]

    def close(self) -> None:
        """Do nothing: there is nothing to flush, and a log outlives its clients."""

    # --- Topics -----------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """Return a topic, which its first use makes. The caller holds the lock."""
        if name not in self.topics:
            self._grow(TopicSpec(name, self._default_partitions))
        return self.topics[name]

    def _grow(self, spec: TopicSpec) -> None:
        topic = self.topics.setdefault(spec.name, Topic([], dict(spec.config)))
        topic.partitions += [[] for _ in range(spec.partitions - len(topic.partitions))]
        for group in self.groups.values():
            group.balance(self.topics)
        self.changed.notify_all()

    def ensure_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        changes = []
        with self.changed:
            for spec in specs:
                topic = self.topics.get(spec.name)
                before = len(topic.partitions) if topic else 0
                if before >= spec.partitions:
                    continue
                self._grow(spec)
                changes.append(
                    f"grew {spec.name} from {before} to {spec.partitions} partitions"
                    if topic
                    else f"created {spec.name} with {spec.partitions} partitions"
                )
        return changes

    def describe_topics(self, names: Sequence[str]) -> list[TopicDescription]:
        with self.changed:
            return [
                TopicDescription(name, len(topic.partitions), 1, dict(topic.config))
                if (topic := self.topics.get(name))
                else TopicDescription(name, None)
                for name in names
            ]

    def lag(self, topics: Sequence[str], group: str) -> dict[TopicPartition, int]:
        with self.changed:
            partitions = [
                TopicPartition(name, number)
                for name in topics
                if name in self.topics
                for number in range(len(self.topics[name].partitions))
            ]
            return self.lag_of(group, partitions)

    def lag_of(self, group: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return end minus committed for each partition."""
        with self.changed:
            self.admit_due()
            committed = self.groups[group].committed if group in self.groups else {}
            return {
                each: len(self.topic(each.topic).partitions[each.partition])
                - committed.get(each, 0)
                for each in partitions
            }

    def probe(self, timeout: float) -> str:
        if self.outage:
            raise PublishError(self.outage)
        return "in process"

    # --- For tests --------------------------------------------------------------------------------

    def records(self, topic: str) -> list[Record]:
        """Return everything ever published to ``topic`` and due, by partition and offset."""
        with self.changed:
            self.admit_due()
            stored = self.topics.get(topic)
            return [replace(each) for part in stored.partitions for each in part] if stored else []

    def clear(self) -> None:
        """Forget all topics, groups and records, and end an outage."""
        with self.changed:
            self.outage = None
            self.topics, self.groups, self.delayed = {}, {}, []
            self.changed.notify_all()

    def fail(self, reason: str | None) -> None:
        """Refuse everything with ``reason``, like a broker that is down; None ends it."""
        with self.changed:
            self.outage = reason
            self.changed.notify_all()
