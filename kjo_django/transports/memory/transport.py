"""A log within this process, for tests: no server, yet the behaviour of one.

It has partitions, groups, epochs, cooperative rebalancing between the subscriptions of a group,
leases, delays and replay. Like Kafka it stores one watermark per group and partition, so a restart
delivers again whatever was settled beyond the first unsettled record: code that passes on it has
met duplicates.

OPTIONS: ``partitions``, the number a topic gets when it is first used (default 1).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
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
from kjo_django.transports.memory.log import Group, MemoryLog, Moves, lag_of
from kjo_django.transports.watermark import Watermark

logger = logging.getLogger(__name__)


class MemorySubscription(Subscription):
    """A member of a group. See `MemoryTransport.subscribe`."""

    def __init__(
        self,
        log: MemoryLog,
        topics: Sequence[str],
        group: str,
        lease: timedelta,
        on_revoked: RevokedCallback | None,
        on_assigned: AssignedCallback | None,
    ) -> None:
        self.topics = frozenset(topics)
        self.expires_at = float("inf")
        self._log = log
        self._group_name = group
        self._lease = lease.total_seconds()
        self._on_revoked = on_revoked
        self._on_assigned = on_assigned
        self._watermark = Watermark()
        self._next: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._woken = False
        self._gone = False
        self._renew()
        with log.changed:
            for topic in sorted(self.topics):
                log.topic(topic)
            self._group.join(self)
            log.changed.notify_all()

    @property
    def _group(self) -> Group:
        return self._log.group(self._group_name)

    def poll(self, max_records: int, timeout: float) -> list[Record]:
        deadline = time.monotonic() + timeout
        # A member that waits in here is alive however long it waits.
        self.expires_at = float("inf")
        try:
            while not self._gone:
                records = self._attempt(max_records, deadline)
                if records is not None:
                    return records
            return []
        finally:
            self._renew()

    def _attempt(self, max_records: int, deadline: float) -> list[Record] | None:
        """Move partitions, hand out records or wait once. None: try again."""
        with self._log.changed:
            moves = self._moves()
            if not moves:
                self.last_error = self._log.outage
                due = self._log.admit_due()
                records = [] if self.last_error else self._take(max_records)
                remaining = deadline - time.monotonic()
                if records or self._woken or remaining <= 0:
                    self._woken = False
                    return records
                expiry = self._group.next_expiry(self) - time.monotonic()
                self._log.changed.wait(max(min(remaining, due, expiry), 0))
                return None
        # Outside the lock: the callbacks wait for threads that acknowledge.
        self._move(moves)
        return None

    def _moves(self) -> Moves:
        group = self._group
        if group.evict(self) | group.join(self):
            self._log.changed.notify_all()
        mine = self._watermark.assigned()
        kept = [tp for tp in mine if group.owners.get(tp) is self]
        return Moves(
            lost=[tp for tp in mine if group.owners.get(tp) is not self],
            revoked=[tp for tp in kept if group.targets.get(tp) is not self],
            assigned=[
                tp
                for tp, target in group.targets.items()
                if target is self and tp not in group.owners
            ],
        )

    def _move(self, moves: Moves) -> None:
        if moves.lost:
            self._watermark.revoke(moves.lost)
            self._call(self._on_revoked, moves.lost, True)
        if moves.revoked:
            self._call(self._on_revoked, moves.revoked, False)
            self._release(moves.revoked)
        assigned = self._acquire(moves.assigned)
        if assigned:
            self._call(self._on_assigned, assigned)

    def _release(self, partitions: Iterable[TopicPartition]) -> None:
        with self._log.changed:
            self._watermark.revoke(partitions)
            for partition in partitions:
                if self._group.owners.get(partition) is self:
                    del self._group.owners[partition]
            self._log.changed.notify_all()

    def _acquire(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        with self._log.changed:
            group = self._group
            free = [
                tp for tp in partitions if tp not in group.owners and group.targets.get(tp) is self
            ]
            for partition in free:
                group.owners[partition] = self
                self._watermark.assign(partition)
                self._next[partition] = group.committed.get(partition, 0)
            return free

    def _call(self, callback: Callable[..., None] | None, *arguments: Any) -> None:
        if callback is None:
            return
        try:
            callback(*arguments)
        except Exception:
            logger.exception("A rebalance callback of group %r failed", self._group_name)

    def _take(self, max_records: int) -> list[Record]:
        taken: list[Record] = []
        for partition in self._watermark.assigned():
            if len(taken) >= max_records:
                break
            if partition in self._paused:
                continue
            batch = self._fetch(partition, max_records - len(taken))
            if batch:
                # Whoever gave goes to the back of the queue, so no partition starves another.
                self._watermark.rotate(partition)
                taken += batch
        return taken

    def _fetch(self, partition: TopicPartition, limit: int) -> list[Record]:
        assignment = self._watermark.get(partition)
        assert assignment is not None
        start = self._next[partition]
        stored = self._log.topic(partition.topic).partitions[partition.partition]
        batch = [
            replace(each, headers=dict(each.headers), epoch=assignment.epoch, token=assignment)
            for each in stored[start : start + limit]
        ]
        self._next[partition] = start + len(batch)
        self._watermark.deliver(assignment, [record.offset for record in batch])
        return batch

    def acknowledge(self, records: Iterable[Record]) -> None:
        """Settle ``records``; the watermark they move is durable when this returns."""
        with self._log.changed:
            self._watermark.settle(records)
            for partition, position in self._watermark.positions().items():
                if self._group.owners.get(partition) is self:
                    self._group.committed[partition] = position

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
            self._woken = True
            self._log.changed.notify_all()

    def lag(self) -> dict[TopicPartition, int]:
        with self._log.changed:
            return lag_of(self._log, self._group_name, self._watermark.assigned())

    def close(self) -> None:
        if self._gone:
            return
        partitions = self._watermark.assigned()
        if partitions:
            self._call(self._on_revoked, partitions, False)
        self.crash()

    def crash(self) -> None:
        """Vanish as a killed process does once its lease ends: no callback, nothing acknowledged
        any more. For tests."""
        with self._log.changed:
            self._gone = True
            self._watermark.revoke(self._watermark.assigned())
            self._group.leave(self)
            self._log.changed.notify_all()

    def _renew(self) -> None:
        self.expires_at = time.monotonic() + self._lease


class MemoryTransport(Transport):
    """The log belongs to the instance and survives ``close``; `clear` empties it."""

    capabilities = Capabilities(ordering=True, delay=True, transactional=False, replay=True)
    known_options = frozenset({"partitions"})

    def __init__(self, alias: str, options: Mapping[str, Any]) -> None:
        super().__init__(alias, options)
        setting = f"KJO['TRANSPORTS'][{alias!r}]['OPTIONS']"
        partitions = self.options.get("partitions", 1)
        if not isinstance(partitions, int) or partitions < 1:
            raise ImproperlyConfigured(f"{setting}['partitions'] must be a whole number above 0.")
        self._log = MemoryLog(partitions)

    def publish(self, records: Sequence[OutgoingRecord]) -> list[Published]:
        with self._log.changed:
            if self._log.outage:
                return [Published(error=self._log.outage) for _ in records]
            outcomes = [self._log.accept(record) for record in records]
            self._log.changed.notify_all()
            return outcomes

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
        return MemorySubscription(self._log, topics, group, lease, on_revoked, on_assigned)

    def close(self) -> None:
        """Do nothing: there is nothing to flush, and a log outlives its clients."""

    def ensure_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        with self._log.changed:
            return [line for spec in specs if (line := self._ensure(spec))]

    def _ensure(self, spec: TopicSpec) -> str | None:
        topic = self._log.topics.get(spec.name)
        if topic is None:
            self._log.create(spec.name, spec.partitions, spec.config)
            return f"created {spec.name} with {spec.partitions} partitions"
        before = len(topic.partitions)
        if before >= spec.partitions:
            return None
        topic.grow(spec.partitions)
        self._log.rebalance()
        return f"grew {spec.name} from {before} to {spec.partitions} partitions"

    def describe_topics(self, names: Sequence[str]) -> list[TopicDescription]:
        with self._log.changed:
            return [self._describe(name) for name in names]

    def _describe(self, name: str) -> TopicDescription:
        topic = self._log.topics.get(name)
        if topic is None:
            return TopicDescription(name, None)
        return TopicDescription(name, len(topic.partitions), 1, dict(topic.config))

    def lag(self, topics: Sequence[str], group: str) -> dict[TopicPartition, int]:
        with self._log.changed:
            partitions = [
                TopicPartition(name, number)
                for name in topics
                if name in self._log.topics
                for number in range(len(self._log.topics[name].partitions))
            ]
            return lag_of(self._log, group, partitions)

    def probe(self, timeout: float) -> str:
        if self._log.outage:
            raise PublishError(self._log.outage)
        return "in process"

    # --- For tests --------------------------------------------------------------------------------

    def records(self, topic: str) -> list[Record]:
        """Return everything ever published to ``topic`` and due, by partition and offset."""
        with self._log.changed:
            self._log.admit_due()
            stored = self._log.topics.get(topic)
            return [replace(each) for part in stored.partitions for each in part] if stored else []

    def clear(self) -> None:
        """Forget all topics, groups and records, and end an outage."""
        self._log.outage = None
        self._log.clear()

    def fail(self, reason: str | None) -> None:
        """Refuse everything with ``reason``, like a broker that is down; None ends it."""
        with self._log.changed:
            self._log.outage = reason
            self._log.changed.notify_all()
