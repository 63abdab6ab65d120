"""A consumer group's view, on one librdkafka consumer: joining, polling, leaving.

Everything runs in the thread that polls, callbacks of the client included, but for ``acknowledge``
and ``wake``. These two touch the `Watermark`, which has a lock, and a flag; nothing else here is
locked.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from confluent_kafka import Consumer, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from kjo_django.transports.base import (
    AssignedCallback,
    Record,
    RevokedCallback,
    Subscription,
    TopicPartition,
)
from kjo_django.transports.kafka.client_config import KafkaOptions
from kjo_django.transports.kafka.clients import (
    Callbacks,
    Health,
    after_fork,
    close_behind,
    describe,
    keep_for_ever,
    logger,
    make,
    watched,
)
from kjo_django.transports.kafka.committing import Committer
from kjo_django.transports.kafka.reading import (
    Fetcher,
    Reader,
    Reading,
    edges_of,
    known_end_of,
    starts_of,
)
from kjo_django.transports.watermark import Watermark

SLICE = 0.1
"""Seconds of one wait inside ``poll``, which a record ends at once; `wake` is noticed between two.
"""

FLUSH_TIMEOUT = 5.0
LEAVE_TIMEOUT = 10.0
LEAVE_SLICE = 0.01
REOPEN_INTERVAL = 1.0


class KafkaSubscription(Subscription):
    """A member of a consumer group. See the contract.

    It owns the client, and replaces one that failed for good. What it hands out and what it may
    commit is in the `Watermark`, where reading continues in `Reading`; `Fetcher` moves both, and
    `Committer` commits. A rebalance begins and ends the epochs of partitions in both.
    """

    def __init__(
        self,
        options: KafkaOptions,
        topics: Sequence[str],
        group: str,
        on_revoked: RevokedCallback | None = None,
        on_assigned: AssignedCallback | None = None,
    ) -> None:
        self._options = options
        self._topics = list(topics)
        self._group = group
        self._watermark = Watermark()
        self._reading = Reading(starts_at_the_end=options.starts_at_the_end)
        self._health = Health(options, group, self._topics)
        self._callbacks = Callbacks(group)
        self._committer = Committer(group, options.commit_interval, self._health.report)
        self._fetcher = Fetcher(self._watermark, self._reading, self._health, self._callbacks)
        self._on_revoked = on_revoked
        self._on_assigned = on_assigned
        self._woken = False
        self._reopen_at = 0.0
        self._closed = True  # so far: the client may refuse its configuration
        self._consumer: Consumer | None = self._open()
        self._closed = False
        after_fork(self)

    # --- The contract -----------------------------------------------------------------------------

    def poll(self, max_records: int, timeout: float) -> list[Record]:
        deadline = time.monotonic() + timeout
        while not self._closed:
            records = self._round(max_records, min(SLICE, max(0, deadline - time.monotonic())))
            if records or self._woken or time.monotonic() >= deadline:
                self._woken = False
                return records
        return []

    def _round(self, max_records: int, wait: float) -> list[Record]:
        consumer = self._ready()
        if consumer is None:
            time.sleep(wait)
            return []
        self._fetcher.prepare(consumer)
        now = time.monotonic()
        if self._committer.is_due(now):
            self._committer.soon(consumer, self._watermark.positions())
        self._reading.verify(consumer)
        self._health.check(consumer, now, is_idle=not self._reading.readers)
        return self._fetcher.fetch(consumer, max_records, wait)

    def acknowledge(self, records: Iterable[Record]) -> None:
        """Settle ``records`` in memory; ``poll`` commits the watermark they move."""
        self._watermark.settle(records)

    def holds(self, record: Record) -> bool:
        return self._watermark.holds(record)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self._reading.pause(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self._reading.resume(partitions)

    def assignment(self) -> list[TopicPartition]:
        return self._watermark.assignment()

    def uncommitted(self) -> dict[TopicPartition, int]:
        return self._watermark.uncommitted()

    def wake(self) -> None:
        self._woken = True

    @property
    def last_error(self) -> str | None:  # type: ignore[override]  # only we set it
        return self._health.last_error

    def flush(self) -> None:
        """Commit and wait a few seconds. A failure is logged, shown by ``last_error``, and ``poll``
        tries again. A callback may call it, as ``on_revoked`` does."""
        if self._consumer is None:
            return
        if self._callbacks.is_inside:
            self._committer.now(self._consumer, self._watermark.positions())
            return
        deadline = time.monotonic() + FLUSH_TIMEOUT
        self._await_commits(self._consumer, deadline)
        self._committer.soon(self._consumer, self._watermark.positions())
        self._await_commits(self._consumer, deadline)
        if self._committer.is_waiting:
            self._committer.is_silent = True
            self._health.report("no answer to an offset commit")

    def _await_commits(self, consumer: Consumer, deadline: float) -> None:
        while self._committer.is_waiting and time.monotonic() < deadline:
            self._fetcher.serve(consumer, LEAVE_SLICE)

    def lag(self) -> dict[TopicPartition, int] | None:
        """Return end minus watermark. Paused partitions cost a query: the client knows only the end
        it saw at its latest fetch."""
        if self._consumer is None:
            return None
        positions = self._watermark.positions()
        unread = [each for each in self.assignment() if each not in positions]
        at_the_end = self._options.starts_at_the_end
        positions.update(starts_of(self._consumer, unread, at_the_end=at_the_end))
        lags = {}
        for reader in list(self._reading.readers.values()):
            end = self._end_of(self._consumer, reader)
            if end is not None and reader.partition in positions:
                lags[reader.partition] = max(0, end - positions[reader.partition])
        return lags

    def _end_of(self, consumer: Consumer, reader: Reader) -> int | None:
        end = None if reader.client_paused else known_end_of(consumer, reader.partition)
        if end is None:
            edges = edges_of(consumer, reader.partition)
            end = edges[1] if edges else None
        return end

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        consumer = self._consumer
        if consumer is None:
            return
        try:
            self._leave(consumer)
        finally:
            self._consumer = None
            self._retire(list(self._reading.readers.values()))
        self._callbacks.raise_interrupt()

    def __del__(self) -> None:
        # The client's own destructor would wait for a revocation that nobody serves any more,
        # with the interpreter locked.
        if not getattr(self, "_closed", True):
            logger.warning("Consumer group %s: a subscription was never closed", self._group)
            self.close()

    # --- Rebalances: the client calls back inside ``poll``, ``consume`` and ``close`` -------------

    def _assign(self, _: Consumer, partitions: Sequence[KafkaPartition]) -> None:
        """Begin an epoch of each; reading starts at the committed offset, where the client is.

        Under the cooperative protocol each call names only the partitions that move, under an eager
        one all.
        """
        assigned = [TopicPartition(each.topic, each.partition) for each in partitions]
        self._committer.forget(assigned)
        for partition in assigned:
            self._reading.assign(self._watermark.assign(partition))
        self._reading.unsteady = True
        self._health.check_soon()
        if assigned and self._on_assigned is not None:
            self._on_assigned(assigned)

    def _revoke(self, consumer: Consumer, partitions: Sequence[KafkaPartition]) -> None:
        """Commit what is settled once ``on_revoked`` has waited for it, then end the epochs.

        The partitions are still ours until this returns, so the commit is accepted.
        """
        readers = self._reading.find(partitions)
        revoked = [reader.partition for reader in readers]
        try:
            if revoked and self._on_revoked is not None:
                self._on_revoked(revoked, False)
        finally:
            try:
                self._committer.now(consumer, self._watermark.positions(revoked))
            finally:
                # The client remembers a pause beyond the assignment; we remember it ourselves.
                paused = [reader.at_position() for reader in readers if reader.client_paused]
                self._retire(readers)
                if paused:
                    consumer.resume(paused)

    def _lose(self, _: Consumer, partitions: Sequence[KafkaPartition]) -> None:
        """End the epochs and commit nothing."""
        readers = self._reading.find(partitions)
        # Another consumer may own them: nothing that still arrives may move a watermark.
        self._retire(readers)
        if readers and self._on_revoked is not None:
            self._on_revoked([reader.partition for reader in readers], True)

    def _retire(self, readers: Sequence[Reader]) -> None:
        """End the epoch of these partitions: results that still come are dropped."""
        partitions = [reader.partition for reader in readers]
        self._watermark.revoke(partitions)
        self._committer.forget(partitions)
        self._reading.retire(readers)

    # --- The client, from joining the group to leaving it -----------------------------------------

    def _open(self) -> Consumer:
        guard = self._callbacks.guard
        config = watched(self._options.consumer(self._group), self._health.note, guard)
        config["on_commit"] = guard(self._committer.answered)
        consumer: Consumer = make(Consumer, config, self._options)
        consumer.subscribe(
            self._topics,
            on_assign=guard(self._assign),
            on_revoke=guard(self._revoke),
            on_lost=guard(self._lose),
        )
        return consumer

    def _ready(self) -> Consumer | None:
        """Return the consumer, replacing one that failed for good."""
        if self._health.is_fatal and self._consumer is not None:
            self._abandon(self._consumer)
        if self._consumer is None and time.monotonic() >= self._reopen_at:
            self._consumer = self._open()
        return self._consumer

    def _abandon(self, consumer: Consumer) -> None:
        logger.error(
            "Consumer group %s: the client failed permanently and is replaced", self._group
        )
        held = [KafkaPartition(*partition) for partition in self.assignment()]
        self._callbacks.guard(self._lose)(consumer, held)
        self._committer.is_silent = self._committer.is_silent or self._health.is_unanswered
        self._leave(consumer)
        self._consumer = None
        self._health.is_fatal = self._health.is_unanswered = False
        self._committer.reset()
        self._reopen_at = time.monotonic() + REOPEN_INTERVAL

    def _leave(self, consumer: Consumer) -> None:
        """Leave the group, then close.

        ``close`` alone ends the membership first and then serves a revocation that was already
        waiting: its commit is refused, and the client can end up waiting for itself, with the
        interpreter locked (librdkafka#4884). So what waits is served while we are a member.
        """
        self.flush()
        try:
            consumer.pause([KafkaPartition(*each) for each in self.assignment()])
            consumer.poll(0)
            consumer.unsubscribe()
            deadline = time.monotonic() + LEAVE_TIMEOUT
            while consumer.poll(0) is not None or self._reading.readers:
                if time.monotonic() > deadline:
                    break
                consumer.poll(LEAVE_SLICE)
            if self._committer.is_silent:
                close_behind(consumer)
            else:
                consumer.close()
        except (KafkaException, RuntimeError) as error:
            logger.warning(
                "Consumer group %s: closing the client failed: %s", self._group, describe(error)
            )

    def forget_the_parents(self) -> None:
        """In the child of a fork: be closed, since the membership is the parent's."""
        self._closed = True
        if self._consumer is not None:
            keep_for_ever(self._consumer)  # its threads did not survive
            self._consumer = None
