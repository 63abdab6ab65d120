"""Asking the cluster about topics and groups, by way of consumers that never join anything.

Not by the admin client: when a broker goes down, an answer to one of its requests that comes too
late aborts the whole process (librdkafka#4605). Whoever asks regularly, workers and web processes,
must survive that; a consumer's own requests do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from kjo_django.exceptions import PublishError
from kjo_django.transports.base import GroupOffsets, TopicPartition
from kjo_django.transports.kafka.clients import (
    PerProcess,
    after_fork,
    describe,
    error_of,
    keep_for_ever,
    make,
    quiet,
)
from kjo_django.transports.kafka.options import KafkaOptions
from kjo_django.transports.kafka.refusals import Refusals, watched

CLOSE_TIMEOUT = 1.0
NOBODY = "kjo-django-asks"
"""The group of questions that are about no group. It has no members and commits nothing."""


class Asker:
    """Questions about one group. Thread-safe; every method raises ``PublishError``."""

    def __init__(self, options: KafkaOptions, group: str = NOBODY) -> None:
        self._options = options
        self._group = group
        self._consumer = PerProcess(self._make)
        self._refusals = Refusals(options)
        self._asking = threading.Lock()
        after_fork(self)

    def close(self) -> None:
        """Forget the client; it is made anew when needed."""
        consumer = self._consumer.take()
        if consumer is None:
            return
        if not self._asking.acquire(timeout=CLOSE_TIMEOUT):
            keep_for_ever(consumer)  # somebody still asks, and no answer comes
            return
        try:
            quiet(consumer.close)()
        finally:
            self._asking.release()

    def forget_the_parents(self) -> None:
        """Called in the child of a fork: a thread of the parent may have been asking."""
        self._asking = threading.Lock()

    def topic(self, name: str) -> Any:
        """Return the metadata of a topic, None where it does not exist. Nobody creates it."""
        with self._asking:
            return self._topic(self._consumer.get(), name)

    def offsets(self, names: Iterable[str]) -> dict[TopicPartition, GroupOffsets]:
        """Return the committed and the end offset; the lag is what is between them, or after the
        earliest where nothing is committed, or where what was is no longer there."""
        with self._asking:
            consumer = self._consumer.get()
            try:
                return self._offsets(consumer, names)
            except KafkaException as error:
                raise PublishError(f"Kafka, group {self._group}: {_reason(error)}") from error
            finally:
                consumer.poll(0)  # or what it logs would pile up

    def _make(self) -> Consumer:
        config = {
            **self._options.admin(),
            "group.id": self._group,
            "enable.auto.commit": False,
            "allow.auto.create.topics": False,
        }
        return make(Consumer, watched(config, self._refusals.note), self._options)

    @property
    def _timeout(self) -> float:
        return self._options.request_timeout

    def _topic(self, consumer: Consumer, name: str) -> Any:
        try:
            topic = self._refusals.list_topics(consumer, self._timeout, name).topics[name]
        except KafkaException as error:
            raise PublishError(f"Kafka, {name}: {_reason(error)}") from error
        finally:
            consumer.poll(0)
        if topic.error is None:
            return topic
        if topic.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return None
        raise PublishError(f"Kafka, {name}: {describe(topic.error)}")

    def _offsets(
        self, consumer: Consumer, names: Iterable[str]
    ) -> dict[TopicPartition, GroupOffsets]:
        topics = {name: self._topic(consumer, name) for name in dict.fromkeys(names)}
        partitions = [
            KafkaPartition(name, number)
            for name, topic in topics.items()
            if topic is not None
            for number in sorted(topic.partitions)
        ]
        if not partitions:
            return {}
        committed = _offsets(consumer.committed(partitions, timeout=self._timeout))
        ends = self._edges(consumer, partitions, OFFSET_END)
        # Where a group has committed nothing, or what retention has passed since, the first record
        # there is comes next. Of who is at the end nobody needs to ask.
        behind = [each for each in partitions if committed[_key(each)] < ends[_key(each)]]
        firsts = self._edges(consumer, behind, OFFSET_BEGINNING)
        nexts = {where: max(offset, firsts.get(where, 0)) for where, offset in committed.items()}
        return {
            where: GroupOffsets(
                lag=max(0, end - nexts[where]),
                committed=nexts[where] if committed[where] >= 0 else None,
                end=end,
            )
            for where, end in ends.items()
        }

    def _edges(
        self, consumer: Consumer, partitions: Sequence[KafkaPartition], edge: int
    ) -> dict[TopicPartition, int]:
        """Return the first offsets, or those after the last: "as of" two special times."""
        if not partitions:
            return {}
        wanted = [KafkaPartition(each.topic, each.partition, edge) for each in partitions]
        return _offsets(consumer.offsets_for_times(wanted, timeout=self._timeout))


def _offsets(answers: Iterable[KafkaPartition]) -> dict[TopicPartition, int]:
    found = {}
    for answer in answers:
        if answer.error is not None:
            raise KafkaException(answer.error)
        found[_key(answer)] = answer.offset
    return found


def _key(partition: KafkaPartition) -> TopicPartition:
    return TopicPartition(partition.topic, partition.partition)


def _reason(error: KafkaException) -> str:
    code = error_of(error)
    if code is not None and code.code() == KafkaError._TIMED_OUT:
        return "no answer in time"
    return describe(error)
