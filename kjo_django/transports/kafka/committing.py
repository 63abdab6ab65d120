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
        self._sent: dict[TopicPartition, int] = {}
        self._confirmed: dict[TopicPartition, int] = {}
        self._unanswered = 0
        self._sent_at = 0.0
        self._due = 0.0
        self.is_silent = False
        """The broker stopped answering: waiting for it again would only cost time."""

    @property
    def is_waiting(self) -> bool:
        """Whether a commit of ``soon`` is not answered yet."""
        return self._unanswered > 0

    def is_due(self, now: float) -> bool:
        """Whether ``soon`` should be called; true once per interval."""
        if now >= self._sent_at + PATIENCE:
            self._unanswered = 0
        if now < self._due or self.is_waiting:
            return False
        self._due = now + self._interval
        return True

    def soon(self, consumer: Consumer, positions: Mapping[TopicPartition, int]) -> None:
        """Commit what changed, without waiting for the answer."""
        offsets = changed(positions, self._sent)
        if not offsets:
            return
        try:
            consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            self._refused(error_of(error), offsets)
        else:
            self._unanswered += 1
            self._sent_at = time.monotonic()
            self._sent.update(positions_of(offsets))

    def now(self, consumer: Consumer, positions: Mapping[TopicPartition, int]) -> None:
        """Commit what is not known to be committed, and wait for the answer.

        While the broker is down that takes the client up to ``session.timeout.ms``.
        """
        offsets = changed(positions, self._confirmed)
        if not offsets or self.is_silent:
            return
        try:
            results = consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            self._refused(error_of(error), offsets)
        else:
            self._accepted(results or [])

    def answered(self, error: KafkaError | None, offsets: Sequence[KafkaPartition]) -> None:
        """The client's report on a commit of ``soon``."""
        self._unanswered = max(0, self._unanswered - 1)
        self.is_silent = False
        if error is not None:
            self._refused(error, offsets)
        else:
            self._accepted(offsets)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Assume nothing about these any more."""
        for partition in partitions:
            self._sent.pop(partition, None)
            self._confirmed.pop(partition, None)

    def reset(self) -> None:
        """Start anew with a new consumer."""
        self._sent.clear()
        self._confirmed.clear()
        self._unanswered = 0
        self.is_silent = False

    def _accepted(self, results: Iterable[KafkaPartition]) -> None:
        for result in results:
            if result.error is not None:
                self._refused(result.error, [result])
            else:
                self._confirmed.update(positions_of([result]))
                self._sent.update(positions_of([result]))

    def _refused(self, error: KafkaError | None, offsets: Iterable[KafkaPartition]) -> None:
        self.forget(positions_of(offsets))
        if error is not None and error.code() in TOO_LATE:
            logger.info(
                "Consumer group %s: an offset commit came too late: %s",
                self._group,
                describe(error),
            )
            return
        logger.warning(
            "Consumer group %s: an offset commit failed: %s", self._group, describe(error)
        )
        self._failed(f"commit failed: {describe(error)}")


def changed(
    positions: Mapping[TopicPartition, int], known: Mapping[TopicPartition, int]
) -> list[KafkaPartition]:
    """Return the positions that are not ``known``, for the client."""
    return [
        KafkaPartition(*partition, offset)
        for partition, offset in positions.items()
        if known.get(partition) != offset
    ]


def positions_of(offsets: Iterable[KafkaPartition]) -> dict[TopicPartition, int]:
    return {TopicPartition(each.topic, each.partition): each.offset for each in offsets}
