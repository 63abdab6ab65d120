"""``BaseEvent``: an event between services. Its JSON has camelCase names; input may have either
spelling.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from kjo_django.conf import EVENT_FORMATS, get_settings
from kjo_django.enqueue.coroutines import from_coroutine
from kjo_django.enqueue.storing import (
    carrier_of,
    check_payload_size,
    publish,
    store_record,
    wake_consumers,
)
from kjo_django.exceptions import MessageError, PayloadError, PublishError
from kjo_django.ids import uuid7
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import JSON, storable_text
from kjo_django.patterns.events import cloudevents
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord
from kjo_django.values import MAX_NAME_LENGTH, one_of

MAX_ID_LENGTH = 255
MAX_TYPE_LENGTH = 100
MAX_URI_LENGTH = 1000
"""Characters of the source, the subject and the schema. In the plain format, readers of version 1.0
of the protocol take a source of ``MAX_NAME_LENGTH``."""
MAX_VERSION_LENGTH = 50
MAX_TIMESTAMP = 253_402_300_799_999
"""The last millisecond of the year 9999."""

_CAMEL = {
    "correlation_id": "correlationId",
    "causation_id": "causationId",
    "user_id": "userId",
}


def _text(where: str, value: Any, limit: int) -> str:
    if not isinstance(value, str) or not value.strip():
        raise PayloadError(f"{where} must be text that is not empty, not {value!r:.80}")
    if len(value) > limit:
        raise PayloadError(f"{where} has {len(value)} characters, {limit} are allowed")
    if storable_text(value) != value:
        raise PayloadError(f"{where} holds characters no database stores: {value!r:.80}")
    return value


def normalised_version(value: Any) -> str:
    """Return a version in the form in which versions are compared: ``1``, ``"1"``, ``"v1"`` and
    ``"1.0"`` are equal.

    :raises PayloadError: it is not a version.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            value = f"{value:g}"
        except OverflowError:
            raise PayloadError("version is a number beyond all versions") from None
    text = _text("version", value, MAX_VERSION_LENGTH).strip()
    match = re.fullmatch(r"[vV]?(\d+(?:\.\d+)*)", text)
    if match is None:
        return text
    return re.sub(r"(?:\.0+)+$", "", match[1])


@dataclass(frozen=True, slots=True)
class EventMetadata:
    """The user, correlation, cause and order key of an event."""

    correlation_id: str | None = None
    """Identifies the request that this event and its follow-ups belong to."""
    causation_id: str | None = None
    """The event that caused this one."""
    user_id: str | None = None
    """The user whose events keep their order; the record's key."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the received metadata, unchanged."""

    def __post_init__(self) -> None:
        for name in _CAMEL:
            value = getattr(self, name)
            if value is not None:
                _text(f"metadata.{_CAMEL[name]}", value, MAX_ID_LENGTH)

    @classmethod
    def read(cls, given: Any) -> EventMetadata:
        """Return the metadata in a mapping in camelCase or snake_case.

        :param given: the mapping, or an ``EventMetadata``, which is returned.
        :raises PayloadError: it is no object, or an id is not text of 1 to 255 characters.
        """
        if isinstance(given, EventMetadata):
            return given
        if not isinstance(given, Mapping):
            raise PayloadError(f"metadata must be an object, not {type(given).__name__}")
        known = {name: _either(given, name, camel) for name, camel in _CAMEL.items()}
        names = {*_CAMEL, *_CAMEL.values()}
        extra = {name: value for name, value in given.items() if name not in names}
        return cls(**known, extra=extra)

    def to_wire(self) -> dict[str, Any]:
        """Return the mapping that is sent; unset fields are left out."""
        known = {camel: getattr(self, name) for name, camel in _CAMEL.items()}
        return {**self.extra, **{name: value for name, value in known.items() if value is not None}}


def _either(given: Mapping[str, Any], snake: str, camel: str) -> str | None:
    value = given.get(camel, given.get(snake))
    # Numbers for ids are common enough, and unambiguous.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _new_id() -> str:
    return str(uuid7())


def _own_name() -> str:
    return get_settings().service_name


def _now() -> int:
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseEvent:
    """An event. It is validated when it is constructed, so an invalid one cannot be published.

    :raises PayloadError: a field is missing, too long or of a wrong type.
    """

    type: str
    """The type, such as ``USER_PROFILE_UPDATED``."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What happened; JSON must be able to hold it."""
    id: str = field(default_factory=_new_id)
    """The event's id. Consumers handle each id once."""
    source: str = field(default_factory=_own_name)
    """The publishing service; ``SERVICE_NAME`` if not given."""
    timestamp: int = field(default_factory=_now)
    """The event's time in milliseconds of Unix time."""
    version: str = "1"
    """The version of the contract of ``data``."""
    metadata: EventMetadata | None = None
    """The user, correlation and cause; also taken as a mapping."""
    subject: str | None = None
    """What of its source the event is about, such as the name of a file."""
    dataschema: str | None = None
    """The URI of the schema of ``data``."""

    def __post_init__(self) -> None:
        _text("type", self.type, MAX_TYPE_LENGTH)
        _text("id", self.id, MAX_ID_LENGTH)
        _text("source", self.source, MAX_URI_LENGTH)
        for name in _SINCE_1_1:
            value = getattr(self, name)
            if value is not None:
                _text(name, value, MAX_URI_LENGTH)
        stamp: Any = self.timestamp
        if isinstance(stamp, float) and stamp.is_integer():
            stamp = int(stamp)
            object.__setattr__(self, "timestamp", stamp)
        if isinstance(stamp, bool) or not isinstance(stamp, int) or not 0 < stamp <= MAX_TIMESTAMP:
            raise PayloadError(f"timestamp must be milliseconds of Unix time, not {stamp!r:.80}")
        object.__setattr__(self, "version", normalised_version(self.version))
        if not isinstance(self.data, Mapping):
            raise PayloadError(f"data must be an object, not {type(self.data).__name__}")
        if self.metadata is not None:
            object.__setattr__(self, "metadata", EventMetadata.read(self.metadata))

    @property
    def user_id(self) -> str | None:
        """The user's id: from the metadata, else from the data."""
        if self.metadata is not None and self.metadata.user_id:
            return self.metadata.user_id
        value = self.data.get("userId", self.data.get("user_id"))
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return value if isinstance(value, str) and value else None

    @property
    def key(self) -> str:
        """The record's key: the user's id, else the event's."""
        return storable_text(self.user_id or self.id, MAX_ID_LENGTH)

    def to_wire(self) -> dict[str, Any]:
        """Return the event as a mapping with camelCase names."""
        wire: dict[str, Any] = {
            "id": self.id,
            "type": self.type,
            "source": self.source,
            "timestamp": self.timestamp,
            "version": self.version,
            "data": dict(self.data),
            "subject": self.subject,
            "dataschema": self.dataschema,
        }
        if self.metadata is not None:
            wire["metadata"] = self.metadata.to_wire()
        return {name: value for name, value in wire.items() if value is not None}

    def to_bytes(self) -> bytes:
        """Return the value of the event's record in the plain format.

        :raises PayloadError: the source is longer than this format allows.
        """
        _text("source", self.source, MAX_NAME_LENGTH)
        return JSON.dumps(self.to_wire())

    @classmethod
    def from_wire(cls, given: Any) -> BaseEvent:
        """Return the event in a mapping in camelCase or snake_case; unknown fields are left out.

        :param given: the mapping.
        :raises PayloadError: it is not a valid event.
        """
        if not isinstance(given, Mapping):
            raise PayloadError(f"An event must be an object, not {type(given).__name__}")
        known = {name: given[name] for name in _FIELDS if given.get(name) is not None}
        missing = [name for name in _REQUIRED if name not in known]
        if missing:
            raise PayloadError(f"The event has no {', '.join(missing)}")
        return cls(**known)


_FIELDS = tuple(f.name for f in fields(BaseEvent))
_REQUIRED = ("id", "type", "source", "timestamp", "data")
_SINCE_1_1 = ("subject", "dataschema")


def read_event(value: bytes) -> Any:
    """Decode a record's value.

    :raises MessageError: it is not a JSON object.
    """
    found = JSON.loads(value)
    if not isinstance(found, dict):
        raise MessageError("invalid", f"An event must be an object, not {type(found).__name__}")
    return found


def validated(given: Any) -> BaseEvent:
    """Return the event in a mapping that another service sent.

    :raises MessageError: it is not a valid event, so no retry can help.
    """
    # Readers of version 1.0 of the protocol ignored these whatever they contained.
    for name in _SINCE_1_1 if isinstance(given, Mapping) else ():
        if name in given and not _is_text(given[name]):
            given = {other: value for other, value in given.items() if other != name}
    try:
        return BaseEvent.from_wire(given)
    except PayloadError as error:
        raise MessageError("invalid", f"Not a valid event: {error}") from error


def _is_text(value: Any) -> bool:
    try:
        return bool(_text("", value, MAX_URI_LENGTH))
    except PayloadError:
        return False


def event_of(
    payload: Any,
    headers: Mapping[str, str],
    received_at: datetime | None,
    *,
    decodes_data: bool = True,
) -> BaseEvent:
    """Return the event of a record, which its headers tell the format of.

    :param payload: the decoded value of the record.
    :param received_at: the time of a CloudEvent without one.
    :param decodes_data: False: the data of a CloudEvent is left empty.
    :raises MessageError: it is not a valid event, so no retry can help.
    """
    event_format = cloudevents.format_of(headers, payload)
    if event_format != cloudevents.PLAIN:
        payload = cloudevents.fields_of(
            event_format, payload, headers, received_at, decodes_data=decodes_data
        )
    return validated(payload)


# --- Publishing -----------------------------------------------------------------------------------


EVENT_ID, EVENT_TYPE = "event-id", "event-type"
EVENT_SOURCE, EVENT_VERSION = "event-source", "event-version"


@dataclass(frozen=True, slots=True)
class PublishedEvent:
    """The result of a publication."""

    event: BaseEvent
    """The event as it was sent, with its inherited correlation and cause."""
    job_id: UUID | None = None
    """The outbox row that the relay publishes; None when the event was published directly."""
    partition: int | None = None
    """The partition of an event that was published directly, where the transport says it."""
    offset: int | None = None
    """The offset of its record there."""


def publish_event(
    topic: str,
    event: BaseEvent | Mapping[str, Any],
    *,
    direct: bool = False,
    headers: Mapping[str, str] | None = None,
    event_format: str | None = None,
) -> PublishedEvent:
    """Publish an event to a topic, keyed by its user so that a user's events keep their order.

    The event is stored in the caller's transaction and published after the commit: a rollback
    removes it, and after the commit it is not lost. Within a handler it inherits the trace and the
    correlation, and its cause is the event being handled.

    :param topic: the topic it is published to; its queue's transport is used where
        ``KJO["QUEUES"]`` has one.
    :param event: a ``BaseEvent``, or a mapping in camelCase or snake_case.
    :param direct: publish now, outside any transaction, and wait for the transport's
        acknowledgement. The event is then published even if the caller's transaction rolls back.
    :param headers: further headers of the record. Those of a CloudEvent are not among them.
    :param event_format: ``plain``, ``cloudevents-structured`` or ``cloudevents-binary``; by default
        what the settings say of the topic.
    :raises PayloadError: it is not a valid event, or too large. Nothing is written.
    :raises PublishError: with ``direct``, the transport did not accept it.
    :raises ValueError: there is no such format, or a header is one of a CloudEvent.
    """
    told = _with_context(event if isinstance(event, BaseEvent) else _made(event))
    carrier = carrier_of(topic)
    value, own = _written(told, _format(event_format) or carrier.event_format)
    check_payload_size(value)
    for name in headers or ():
        if name.startswith(cloudevents.PREFIX):
            raise ValueError(
                f"publish_event() was given the header {name!r}, which is an attribute of a "
                "CloudEvent. Give it as a field of the event, and event_format=…"
            )
    sent = names.encode({**names.inherited(), **(headers or {}), **own})
    key = told.key.encode()
    if not direct:
        job = store_record(
            topic, value=value, key=key, headers=sent, kind=told.type, carrier=carrier
        )
        return PublishedEvent(told, job.pk)
    record = OutgoingRecord(topic=topic, value=value, key=key, headers=sent)
    transport = get_transport(carrier.transport)
    answer = publish(transport, [record])[0]
    if answer.error is not None:
        raise PublishError(f"The event {told.id} was not published to {topic!r}: {answer.error}")
    if transport.capabilities.transactional:
        wake_consumers(transport, [record])
    return PublishedEvent(told, partition=answer.partition, offset=answer.offset)


async def apublish_event(topic: str, event: BaseEvent | Mapping[str, Any], **options: Any) -> Any:
    """``publish_event`` from asynchronous code; takes, returns and raises what it does."""
    return await from_coroutine(publish_event)(topic, event, **options)


def _made(given: Mapping[str, Any]) -> BaseEvent:
    """Return the event in a mapping. Fields that a publisher may omit get their defaults."""
    fresh = BaseEvent(type="any")
    defaults = ("id", "source", "timestamp", "data")
    filled = {name: getattr(fresh, name) for name in defaults if given.get(name) is None}
    return BaseEvent.from_wire({**given, **filled})


def _with_context(event: BaseEvent) -> BaseEvent:
    correlation = names.inherited().get(names.CORRELATION_ID)
    cause = names.cause()
    known = event.metadata or EventMetadata()
    completed = replace(
        known,
        correlation_id=known.correlation_id or correlation,
        causation_id=known.causation_id or cause,
    )
    if completed == known:
        return event
    return replace(event, metadata=completed)


def _format(given: str | None) -> str | None:
    try:
        return None if given is None else one_of(*EVENT_FORMATS)(given)
    except ValueError as error:
        hint = getattr(error, "hint", "")
        why = f"publish_event(): event_format must be {error}, not {given!r:.80}. {hint}"
        raise ValueError(why.rstrip()) from None


def _written(event: BaseEvent, event_format: str) -> tuple[bytes, dict[str, str]]:
    """Return the value and the headers of an event's record."""
    if event_format == cloudevents.PLAIN:
        value, headers = (
            event.to_bytes(),
            {
                names.CONTENT_TYPE: JSON.content_type,
                EVENT_ID: event.id,
                EVENT_TYPE: event.type,
                EVENT_SOURCE: event.source,
                EVENT_VERSION: event.version,
            },
        )
    else:
        value, headers = cloudevents.written(event_format, event.to_wire())
    if event.metadata is not None and event.metadata.correlation_id is not None:
        headers[names.CORRELATION_ID] = event.metadata.correlation_id
    return value, headers


def service_group(service: str | None = None) -> str:
    """Return the consumer group of a service, ``{service}-group``."""
    return f"{service or get_settings().service_name}-group"
