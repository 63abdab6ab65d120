"""A log within this process, for tests: no server, yet the behaviour of one.

It has partitions, groups, epochs, cooperative rebalancing between the subscriptions of a group,
leases, delays and replay. Like Kafka it stores one watermark per group and partition, so a restart
delivers again whatever was settled beyond the first unsettled record: code that passes on it has
met duplicates.

OPTIONS: ``partitions``, the number a topic gets when it is first used (default 1).
"""

from __future__ import annotations

import heapq
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import count
from math import inf
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext as _

from kjo_django.exceptions import PublishError
from kjo_django.logs import get_logger
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
from kjo_django.values import ANY_SIZE, count_within

logger = get_logger(__name__)


@dataclass(slots=True)
class Topic:
    """The records of one topic, by partition. An offset is an index."""

    partitions: list[list[Record]]
    config: dict[str, str]
    round_robin: Iterator[int] = field(default_factory=count)


class Group:
    """Who owns which partition, who should, and what is committed."""

    def __init__(self) -> None:
        self.version = 0
        """Grows with every change of members, owners and targets."""
        self.clear()

    def clear(self) -> None:
        """Begin anew: nobody is a member, nothing is committed."""
        self.version += 1
        self.members: list[MemorySubscription] = []
        self.owners: dict[TopicPartition, MemorySubscription] = {}
        self.targets: dict[TopicPartition, MemorySubscription] = {}
        self.committed: dict[TopicPartition, int] = {}

    def remove(self, members: Sequence[MemorySubscription]) -> None:
        """Remove members; their partitions are free at once."""
        self.members = [each for each in self.members if each not in members]
        self.owners = {each: owner for each, owner in self.owners.items() if owner not in members}

    def disown(self, member: MemorySubscription, partitions: Iterable[TopicPartition]) -> None:
        """Free those of the partitions that a member owns."""
        for partition in partitions:
            if self.owners.get(partition) is member:
                del self.owners[partition]

    def balance(self, topics: Mapping[str, Topic]) -> None:
        """Decide who should own what: as even as possible, moving as little as possible."""
        self.version += 1
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


class MemorySubscription(Watermark, Subscription):
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
        super().__init__()
        self.topics = frozenset(topics)
        self.expires_at = log.clock.monotonic() + lease.total_seconds()
        """When the other members may take its partitions, on the monotonic clock."""
        self._log = log
        self._lease = lease.total_seconds()
        self._on_revoked = on_revoked
        self._on_assigned = on_assigned
        self._paused: set[TopicPartition] = set()
        self._is_woken = False
        self._is_closed = False
        with log.changed:
            self._group = log.groups.setdefault(group, Group())
            self._version = self._group.version
            """That of the group when this member last looked who owns what."""
            self._join()

    def poll(self, max_records: int, timeout: float, max_bytes: int = ANY_SIZE) -> list[Record]:
        log, clock, group = self._log, self._log.clock, self._group
        deadline = clock.monotonic() + timeout
        # A member that waits in here is alive however long it waits.
        self.expires_at = inf
        try:
            while not self._is_closed:
                with log.changed:
                    now = clock.monotonic()
                    next_expiry = min((each.expires_at for each in group.members), default=inf)
                    if group.version == self._version and next_expiry > now:
                        self.last_error = log.outage
                        due = log.admit_due() if log.delayed else inf
                        records = self._take(max_records, max_bytes)
                        if records or self._is_woken or now >= deadline:
                            self._is_woken = False
                            return records
                        clock.wait(log.changed, max(min(deadline - now, due, next_expiry - now), 0))
                        continue
                self._rebalance()
            return []
        finally:
            self.expires_at = clock.monotonic() + self._lease

    def _take(self, max_records: int, max_bytes: int) -> list[Record]:
        """Return what the log has of the partitions that are not paused; nothing while it is down.
        The caller holds the lock."""
        taken: list[Record] = []
        if self._log.outage:
            return taken
        for partition, assignment in list(self._assignments.items()):
            limit = max_records - len(taken)
            bytes_left = max_bytes - sum(len(record.value or b"") for record in taken)
            if min(limit, bytes_left) <= 0:
                break
            start = assignment.next_offset or 0
            log = self._log.topics[partition.topic].partitions[partition.partition]
            stored = log[start : start + limit]
            if not stored or partition in self._paused:
                continue
            count = count_within((len(each.value or b"") for each in stored), bytes_left)
            batch = [
                replace(each, headers=dict(each.headers), epoch=assignment.epoch, token=assignment)
                for each in stored[:count]
            ]
            self.deliver(assignment, [record.offset for record in batch])
            # To the end of the dict, so that no partition starves another.
            self._assignments[partition] = self._assignments.pop(partition)
            taken += batch
        return taken

    def _join(self) -> None:
        """Be a member, for whom partitions are distributed anew. The caller holds the lock."""
        for topic in sorted(self.topics):
            self._log.topic(topic)
        self._group.members.append(self)
        self._group.balance(self._log.topics)
        self._log.changed.notify_all()

    def _rebalance(self) -> None:
        """Give up the partitions that are, or should be, another's; own those that are free."""
        log, group = self._log, self._group
        with log.changed:
            now = log.clock.monotonic()
            if expired := [each for each in group.members if each.expires_at <= now]:
                group.remove(expired)
                group.balance(log.topics)
            if self not in group.members:
                self._join()
            self._version = group.version
            lost = [each for each in self._assignments if group.owners.get(each) is not self]
            self.revoke(lost)
            revoked = [
                each for each in list(self._assignments) if group.targets.get(each) is not self
            ]
        # Outside the lock: the callbacks wait for threads that acknowledge.
        self._call(self._on_revoked, lost, True)
        self._call(self._on_revoked, revoked, False)
        with log.changed:
            is_current = self._version == group.version
            self.revoke(revoked)
            group.disown(self, revoked)
            free = self._own_free()
            if revoked or free:
                group.version += 1
                log.changed.notify_all()
            if is_current:
                self._version = group.version
        self._call(self._on_assigned, free)

    def _own_free(self) -> list[TopicPartition]:
        """Own what is to be this member's and is nobody's; return that. The caller holds the
        lock."""
        group, targets = self._group, self._group.targets.items()
        free = [each for each, to in targets if to is self and each not in group.owners]
        for partition in free:
            group.owners[partition] = self
            self.assign(partition).next_offset = group.committed.get(partition, 0)
        return free

    def _call(
        self, callback: Callable[..., None] | None, partitions: list[TopicPartition], *more: bool
    ) -> None:
        if callback is None or not partitions:
            return
        try:
            callback(partitions, *more)
        except Exception:
            logger.exception("A rebalance callback failed")

    def acknowledge(self, records: Iterable[Record]) -> None:
        """Settle ``records``; the watermark they move is durable when this returns."""
        with self._log.changed:
            self.settle(records)
            for partition, position in self.positions().items():
                if self._group.owners.get(partition) is self:
                    self._group.committed[partition] = position

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        with self._log.changed:
            self._paused.update(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        with self._log.changed:
            self._paused.difference_update(partitions)
            self._log.changed.notify_all()

    def wake(self) -> None:
        with self._log.changed:
            self._is_woken = True
            self._log.changed.notify_all()

    def close(self) -> None:
        if not self._is_closed:
            self._call(self._on_revoked, list(self._assignments), False)
            self.crash()

    def crash(self) -> None:
        """Vanish as a killed process does once its lease ends: no callback, nothing acknowledged
        any more. For tests."""
        with self._log.changed:
            self._is_closed = True
            self.revoke(list(self._assignments))
            self._group.remove([self])
            self._group.balance(self._log.topics)
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
        outcomes = []
        with self.changed:
            if self.outage:
                return [Published(error=self.outage) for _ in records]
            for record in records:
                topic = self.topics.get(record.topic) or self.topic(record.topic)
                if record.partition is not None and not (
                    0 <= record.partition < len(topic.partitions)
                ):
                    refusal = f"topic {record.topic!r} has no partition {record.partition}"
                    outcomes.append(Published(error=refusal))
                elif record.available_at is not None and record.available_at > self.clock.now():
                    # It enters the log when it is due, so until then it has no position.
                    entry = record.available_at, next(self._sequence), record
                    heapq.heappush(self.delayed, entry)
                    outcomes.append(Published())
                else:
                    outcomes.append(self._append(record))
            self.changed.notify_all()
        return outcomes

    def _append(self, record: OutgoingRecord) -> Published:
        topic = self.topics[record.topic]
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
        return _("in process")

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
            self.topics, self.delayed = {}, []
            for group in self.groups.values():
                group.clear()
            self.changed.notify_all()

    def fail(self, reason: str | None) -> None:
        """Refuse everything with ``reason``, like a broker that is down; None ends it."""
        with self.changed:
            self.outage = reason
            self.changed.notify_all()
