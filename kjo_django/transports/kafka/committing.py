"""Committing the watermarks: now and then without waiting, and at once where it must be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from kjo_django.transports.base import TopicPartition
from kjo_django.transports.kafka.clients import describe, error_of, logger

PATIENCE = 10.0
"""Seconds after which an unanswered commit no longer holds back the next one."""

TOO_LATE = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError._STATE,
        KafkaError._NO_OFFSET,
        KafkaError._ASSIGNMENT_LOST,
    }
)
"""Expected after a rebalance: the records are another consumer's, which gets them again."""


class Committer:
    """Knows what was committed, so that nothing is committed twice or forgotten.

    :param failed: called with the text of an error that is not merely too late.
    """

    def __init__(self, group: str, interval: float, failed: Callable[[str], None]) -> None:
        self._group = group
        self._interval = interval
        self._failed = failed
        self._committed: dict[TopicPartition, int] = {}
        self._sent_at: float | None = None
        self._due = 0.0

    def is_due(self, now: float) -> bool:
        """Whether ``soon`` should be called; true once per interval."""
        if now < self._due or (self._sent_at is not None and now < self._sent_at + PATIENCE):
            return False
        self._due = now + self._interval
        return True

    def soon(self, consumer: Consumer, positions: Mapping[TopicPartition, int]) -> None:
        """Commit what changed, without waiting for the answer."""
        offsets = [
            KafkaPartition(*partition, offset)
            for partition, offset in positions.items()
            if self._committed.get(partition) != offset
        ]
        if not offsets:
            return
        try:
            consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            self._refused(error_of(error), offsets)
        else:
            self._sent_at = time.monotonic()
            # Assumed until the answer says otherwise, so that the next round does not repeat it.
            self._note(offsets)

    def now(self, consumer: Consumer, positions: Mapping[TopicPartition, int]) -> None:
        """Commit and wait for the answer."""
        offsets = [KafkaPartition(*partition, offset) for partition, offset in positions.items()]
        if not offsets:
            return
        try:
            results = consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            self._refused(error_of(error), offsets)
        else:
            self._note(offsets)
            self._check(results or [])

    def answered(self, error: KafkaError | None, offsets: Sequence[KafkaPartition]) -> None:
        """The client's report on a commit of ``soon``."""
        self._sent_at = None
        if error is not None:
            self._refused(error, offsets)
        else:
            self._check(offsets)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Assume nothing about these any more."""
        for partition in partitions:
            self._committed.pop(partition, None)

    def reset(self) -> None:
        """Start anew with a new consumer."""
        self._committed.clear()
        self._sent_at = None

    def _note(self, offsets: Iterable[KafkaPartition]) -> None:
        for each in offsets:
            self._committed[TopicPartition(each.topic, each.partition)] = each.offset

    def _check(self, results: Iterable[KafkaPartition]) -> None:
        for result in results:
            if result.error is not None:
                self._refused(result.error, [result])

    def _refused(self, error: KafkaError | None, offsets: Iterable[KafkaPartition]) -> None:
        self.forget(TopicPartition(each.topic, each.partition) for each in offsets)
        if error is not None and error.code() in TOO_LATE:
            logger.info("A commit of group %s came too late: %s", self._group, describe(error))
            return
        logger.warning("A commit of group %s failed: %s", self._group, describe(error))
        self._failed(f"commit failed: {describe(error)}")
