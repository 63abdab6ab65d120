"""``publish_event``: tell other services, in the transaction that makes it true."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from asgiref.sync import sync_to_async

from kjo_django.backends import get_transport
from kjo_django.conf import get_settings
from kjo_django.enqueue.dispatch import publish
from kjo_django.enqueue.storing import carrier_of, check_payload_size, store_record
from kjo_django.exceptions import PublishError
from kjo_django.messages import carried
from kjo_django.messages import headers as names
from kjo_django.patterns.events.event import BaseEvent, EventMetadata
from kjo_django.transports.base import OutgoingRecord

logger = logging.getLogger("kjo_django")

EVENT_ID, EVENT_TYPE = "event-id", "event-type"
EVENT_SOURCE, EVENT_VERSION = "event-source", "event-version"


@dataclass(frozen=True, slots=True)
class PublishedEvent:
    """What became of a publication."""

    event: BaseEvent
    """As it was sent: with the correlation and the cause it inherited."""
    job_id: UUID | None = None
    """The row that carries it to the relay; None when it was published directly."""
    partition: int | None = None
    offset: int | None = None


def publish_event(
    topic: str,
    event: BaseEvent | Mapping[str, Any],
    *,
    direct: bool = False,
    headers: Mapping[str, str] | None = None,
) -> PublishedEvent:
    """Publish an event to a topic, keyed by its user so that a user's events keep their order.

    It is stored in the caller's transaction and published once that commits: rolled back with it,
    never told before it is true, never lost after. Within a handler it inherits the trace, the
    correlation and, as its cause, the event being handled.

    :param event: a ``BaseEvent``, or a mapping in camelCase or snake_case.
    :param direct: publish now and wait until the transport has it, outside any transaction. The
        event is told even if the caller's transaction rolls back.
    :param headers: further headers of the record.
    :raises PayloadError: it is no valid event, or too large. Nothing is written.
    :raises PublishError: with ``direct``, the transport did not accept it.
    """
    told = _with_context(event if isinstance(event, BaseEvent) else _made(event))
    value = check_payload_size(told.to_bytes())
    sent = names.encode({**carried.inherited(), **(headers or {})})
    sent |= _headers_of(told)
    key = told.key.encode()
    carrier = carrier_of(topic)
    if not direct:
        job = store_record(
            topic, value=value, key=key, headers=sent, kind=told.type, carrier=carrier
        )
        return PublishedEvent(told, job.pk)
    record = OutgoingRecord(topic=topic, value=value, key=key, headers=sent)
    answer = publish(get_transport(carrier.transport), [record])[0]
    if answer.error is not None:
        raise PublishError(f"The event {told.id} was not published to {topic!r}: {answer.error}")
    return PublishedEvent(told, partition=answer.partition, offset=answer.offset)


async def apublish_event(topic: str, event: BaseEvent | Mapping[str, Any], **options: Any) -> Any:
    """``publish_event`` from asynchronous code."""
    return await sync_to_async(publish_event)(topic, event, **options)


def _made(given: Mapping[str, Any]) -> BaseEvent:
    """Make an event of a mapping; what a publisher need not say has its default."""
    fresh = BaseEvent(type="any")
    defaults = ("id", "source", "timestamp", "data")
    filled = {name: getattr(fresh, name) for name in defaults if given.get(name) is None}
    return BaseEvent.from_wire({**given, **filled})


def _with_context(event: BaseEvent) -> BaseEvent:
    correlation = carried.inherited().get(names.CORRELATION_ID)
    cause = carried.cause()
    known = event.metadata or EventMetadata()
    completed = replace(
        known,
        correlation_id=known.correlation_id or correlation,
        causation_id=known.causation_id or cause,
    )
    if completed == known:
        return event
    return replace(event, metadata=completed)


def _headers_of(event: BaseEvent) -> dict[str, bytes]:
    metadata = event.metadata or EventMetadata()
    return names.encode(
        {
            names.CONTENT_TYPE: "application/json",
            EVENT_ID: event.id,
            EVENT_TYPE: event.type,
            EVENT_SOURCE: event.source,
            EVENT_VERSION: event.version,
            names.CORRELATION_ID: metadata.correlation_id,
        }
    )


def service_group(service: str | None = None) -> str:
    """Return the consumer group of a service, ``{service}-group``."""
    return f"{service or get_settings().service_name}-group"
