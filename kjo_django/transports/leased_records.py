"""Subscriptions of transports that lease records one by one: the database's and Redis Streams'."""

from __future__ import annotations

import abc
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from kjo_django.clock import CLOCK, Clock
from kjo_django.logs import get_logger
from kjo_django.transports.base import (
    AssignedCallback,
    Record,
    RevokedCallback,
    Subscription,
    TopicPartition,
)
from kjo_django.values import ANY_SIZE

logger = get_logger("kjo_django.transports")


class LeasedSubscription(Subscription):
    """A view of topics whose records a group shares one by one.

    Each is leased to one consumer until it is acknowledged. Each topic is one partition, and all
    are assigned to every consumer.

    What a subclass puts into ``Record.token`` tells this consumer's hold of the record from every
    other; it is hashable. Acknowledgements are noted, and written by ``_write_settled``.
    """

    supports_release = True

    def __init__(
        self,
        topics: Iterable[str],
        group: str,
        *,
        on_revoked: RevokedCallback | None,
        on_assigned: AssignedCallback | None,
        clock: Clock = CLOCK,
    ) -> None:
        self._topics = list(dict.fromkeys(topics))
        self._group = group
        self._on_revoked = on_revoked
        self._on_assigned = on_assigned
        self._clock = clock
        self._lock = threading.Lock()
        self._owned: set[Any] = set()
        """The tokens of what was handed out and is not given up."""
        self._settled: set[Any] = set()
        """Those of them that are acknowledged."""
        self._paused: set[TopicPartition] = set()
        self._woken = threading.Event()
        self._is_assigned = False
        self._is_closed = False

    @abc.abstractmethod
    def _attempt(self, max_records: int, max_bytes: int, deadline: float) -> list[Record]:
        """Do once all that needs the server, and return what is there; an outage ends it, empty.

        :param max_bytes: as of ``poll``.
        :param deadline: until when it may wait, on the monotonic clock.
        """

    @abc.abstractmethod
    def _wait(self, longest: float) -> bool:
        """Wait after an attempt in vain, for so many seconds at most; return whether it was woken
        meanwhile."""

    @abc.abstractmethod
    def _delete(self, tokens: Sequence[Any]) -> None:
        """Acknowledge these for good; those whose lease is lost are another's by now, and stay."""

    @abc.abstractmethod
    def _leave(self) -> None:
        """Write acknowledgements, give back what is owned and leave the group; raises nothing."""

    def poll(self, max_records: int, timeout: float, max_bytes: int = ANY_SIZE) -> list[Record]:
        """Attempt it again and again until there are records, it is woken or the time is up."""
        deadline = self._clock.monotonic() + timeout
        if not self._is_assigned and not self._is_closed:
            self._is_assigned = True
            if self._on_assigned is not None:
                self._on_assigned(self.assignment())
        while not self._is_closed:
            records = self._attempt(max_records, max_bytes, deadline)
            remaining = deadline - self._clock.monotonic()
            if records or remaining <= 0:
                return records
            if self._wait(remaining):
                self._woken.clear()
                return []
        return []

    def _mine(self, records: Iterable[Record]) -> list[Any]:
        """Return the tokens of those records that this consumer still holds."""
        with self._lock:
            return [each.token for each in records if each.token in self._owned]

    def _hold(self, records: Iterable[Record]) -> None:
        with self._lock:
            self._owned.update(record.token for record in records)

    def _forget(self, tokens: Iterable[Any]) -> None:
        with self._lock:
            self._owned.difference_update(tokens)
            self._settled.difference_update(tokens)

    def acknowledge(self, records: Iterable[Record]) -> None:
        """Note settled records; the next poll, ``flush`` or ``close`` writes them."""
        with self._lock:
            if not self._is_closed:
                mine = (each.token for each in records if each.token in self._owned)
                self._settled.update(mine)

    def _write_settled(self) -> None:
        with self._lock:
            settled = sorted(self._settled)
        if settled:
            self._delete(settled)
            # Only now: what could not be written is written again.
            self._forget(settled)

    def holds(self, record: Record) -> bool:
        """Return whether the record is this consumer's by all it knows."""
        with self._lock:
            return record.token in self._owned and not self._is_closed

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Fetch nothing of these topics; what was handed out stays this consumer's."""
        self._paused.update(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Fetch from these topics again, at the next poll."""
        self._paused.difference_update(partitions)

    def _wanted_topics(self) -> list[str]:
        return [topic for topic in self._topics if TopicPartition(topic, 0) not in self._paused]

    def assignment(self) -> list[TopicPartition]:
        """Return all topics."""
        return [] if self._is_closed else [TopicPartition(topic, 0) for topic in self._topics]

    def wake(self) -> None:
        """Make a waiting ``poll`` return; the next one returns early if none waits."""
        self._woken.set()

    def close(self) -> None:
        """Hand back what was not acknowledged; while the server is away that comes back when its
        lease ends."""
        if self._is_closed:
            return
        if self._on_revoked is not None and self._is_assigned:
            try:
                self._on_revoked(self.assignment(), False)
            except Exception:
                logger.exception("Consumer group %s: a callback failed", self._group)
        self._is_closed = True
        self._leave()
