"""What spans say, by the semantic conventions for messaging. No payloads, no keys, and no ids that
could be a person's: of ids only those that are UUIDs, as ours are."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kjo_django.backends import transport_class
from kjo_django.engine.attempt import Delivery
from kjo_django.engine.handler.context import JobContext
from kjo_django.models import Job

Attributes = dict[str, str | int]

SYSTEM = "messaging.system"
DESTINATION = "messaging.destination.name"
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
MESSAGE_ID = "messaging.message.id"
MESSAGE_COUNT = "messaging.batch.message_count"
PARTITION = "messaging.destination.partition.id"
GROUP = "messaging.consumer.group.name"
KAFKA_OFFSET = "messaging.kafka.offset"
ERROR_TYPE = "error.type"
HANDLER = "kjo.handler"
QUEUE = "kjo.queue"
JOB_ID = "kjo.job_id"
ATTEMPT = "kjo.attempt"
OUTCOME = "kjo.outcome"
REASON = "kjo.reason"
OFFSET = "kjo.offset"

_OPAQUE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(:\d+)?", re.IGNORECASE)


def system_of(alias: str) -> str:
    """Return what a transport is called: ``kafka``, ``redis_streams``, ``database``, ``memory``; of
    one of the project's own, its class without ``Transport``, with underscores."""
    return _system(transport_class(alias).__name__)


@functools.cache
def _system(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Transport")).lower()


def operation(name: str, kind: str) -> Attributes:
    """Return what is done, and which of the conventions' operations that is."""
    return {OPERATION_NAME: name, OPERATION_TYPE: kind}


def of_jobs(jobs: Collection[Job], topics: Collection[str], systems: Collection[str]) -> Attributes:
    """Describe the jobs one call stores; what differs between them is left out."""
    told: Attributes = operation("enqueue", "create")
    for name, values in (
        (SYSTEM, set(systems)),
        (DESTINATION, set(topics)),
        (HANDLER, {job.handler for job in jobs}),
        (QUEUE, {job.queue for job in jobs}),
    ):
        if len(values) == 1:
            told[name] = values.pop()
    if len(jobs) > 1:
        told[MESSAGE_COUNT] = len(jobs)
    return told


def of_delivery(delivery: Delivery) -> Attributes:
    """Describe a message that is handled, and where it was read."""
    record, message = delivery.record, delivery.message
    system = system_of(delivery.queue.transport)
    told = operation("process", "process") | {
        SYSTEM: system,
        DESTINATION: record.topic,
        GROUP: delivery.queue.consumer_group,
        HANDLER: handler_of(delivery),
        QUEUE: delivery.queue.name,
    }
    if record.partition >= 0:  # else it comes from no topic: an operator runs it again
        told[PARTITION] = str(record.partition)
        told[KAFKA_OFFSET if system == "kafka" else OFFSET] = record.offset
    ids = {} if message is None else {MESSAGE_ID: message.id, JOB_ID: message.job_id}
    told.update({name: id for name, id in ids.items() if id and _OPAQUE.fullmatch(id)})
    return told


def of_run(deliveries: Sequence[Delivery], contexts: Sequence[JobContext]) -> Attributes:
    """Describe an attempt; of a batch what its items have in common, and how many they are."""
    first, *others = [
        {**of_delivery(delivery), ATTEMPT: context.attempt}
        for delivery, context in zip(deliveries, contexts, strict=True)
    ]
    for other in others:
        first = {name: value for name, value in first.items() if other.get(name) == value}
    return {**first, MESSAGE_COUNT: len(deliveries)} if others else first


def handler_of(delivery: Delivery) -> str:
    """Return the handler's name, or "unknown" where there is none: what a stranger wrote into a
    header names no span."""
    return delivery.kind or "unknown"


def error_type(error: BaseException) -> str:
    """Return the exception's class."""
    kind = type(error)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def text_headers(headers: Mapping[str, Any], wanted: Collection[str]) -> dict[str, str]:
    """Return those headers that are there, as text."""
    found = {name: headers[name] for name in wanted if headers.get(name)}
    return {
        name: value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
        for name, value in found.items()
    }
