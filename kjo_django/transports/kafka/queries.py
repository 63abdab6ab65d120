"""Questions a consumer may ask the broker about its partitions; no answer is None."""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import Consumer, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from kjo_django.transports.base import TopicPartition

QUERY_TIMEOUT = 1.0
"""Seconds. The thread that asks is the one that polls."""


def edges_of(
    consumer: Consumer, partition: TopicPartition, *, timeout: float = QUERY_TIMEOUT
) -> tuple[int, int] | None:
    """Return the first offset of a partition and the one after its last."""
    try:
        return consumer.get_watermark_offsets(KafkaPartition(*partition), timeout=timeout)
    except KafkaException:
        return None


def known_end_of(consumer: Consumer, partition: TopicPartition) -> int | None:
    """Return the offset after the last one as of the latest fetch, without asking the broker."""
    try:
        _, end = consumer.get_watermark_offsets(KafkaPartition(*partition), cached=True)
    except KafkaException:
        return None
    return end if end >= 0 else None


def starts_of(
    consumer: Consumer, partitions: Sequence[TopicPartition], *, at_the_end: bool
) -> dict[TopicPartition, int]:
    """Return where the group begins in each partition: its committed offset, else the earliest.

    :param at_the_end: a group without a committed offset begins with what comes next.
    """
    if not partitions:
        return {}
    try:
        committed = consumer.committed(
            [KafkaPartition(*each) for each in partitions], timeout=QUERY_TIMEOUT
        )
    except KafkaException:
        return {}
    starts = {}
    for partition, found in zip(partitions, committed, strict=True):
        if found.error is not None:
            continue
        if found.offset >= 0:
            starts[partition] = found.offset
        elif edges := edges_of(consumer, partition):
            starts[partition] = edges[1] if at_the_end else edges[0]
    return starts
