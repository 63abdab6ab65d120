"""``event_handler``: handle events of other services, each once.

The records of an event topic are events, not jobs: an `EventRoute` reads them. It passes over types
without a handler here, since they are for other services. An invalid event of a handled type
becomes a dead letter. Other groups read the same topic, so a failed event is not published there
again: its retries and its replays go through a topic of this group, ``<topic>-retry-<group>``.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured

from kjo_django import conf, registry, signals
from kjo_django.conf import get_settings
from kjo_django.engine.handler.context import JobContext
from kjo_django.enqueue.coroutines import from_coroutine
from kjo_django.exceptions import MessageError
from kjo_django.messages import headers as names
from kjo_django.messages.headers import Message, message_id
from kjo_django.messages.serializers import JSON, storable_text
from kjo_django.models import EventKey
from kjo_django.patterns.events import cloudevents
from kjo_django.patterns.events.event import (
    MAX_ID_LENGTH,
    MAX_TYPE_LENGTH,
    BaseEvent,
    event_of,
    normalised_version,
    read_event,
    service_group,
)
from kjo_django.registry import Handler, HandlerOptions, Route
from kjo_django.runtime import current_runtime
from kjo_django.transports.base import Record
from kjo_django.values import MAX_NAME_LENGTH

MAX_ROW_NAME = 255

F = TypeVar("F", bound=Callable[..., Any])


class EventHandler(Handler):
    """An event's handler function, and the versions it understands."""

    def __init__(
        self,
        function: Callable[..., Any],
        options: HandlerOptions,
        *,
        service: str,
        versions: Collection[str],
    ) -> None:
        super().__init__(function, replace(options, takes_context=True))
        self.original = function
        self.service = service
        # It always gets the context, to tell the function's publications where they belong.
        self.function = self._carrying(function, takes_context=options.takes_context)
        self.versions = frozenset(versions)

    def arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the decoded value; the headers that it is read with are in the call's context."""
        return (value,), {}

    def check_arguments(self, payload: dict[str, Any]) -> str | None:
        """Accept any event."""
        return None

    def _carrying(self, function: Callable[..., Any], *, takes_context: bool) -> Callable[..., Any]:
        """Let the function's publications inherit from the event."""

        def given(context: JobContext, event: BaseEvent) -> tuple[Any, ...]:
            return (context, event) if takes_context else (event,)

        if self.is_async:

            @functools.wraps(function)
            async def run_async(context: JobContext, payload: Any) -> Any:
                event = event_of(payload, context.headers, context.created_at)
                with _within(context, event):
                    result = await function(*given(context, event))
                if _is_replay(context):
                    await from_coroutine(self._mark_bare)(event)
                return result

            return run_async

        @functools.wraps(function)
        def run(context: JobContext, payload: Any) -> Any:
            event = event_of(payload, context.headers, context.created_at)
            with _within(context, event):
                result = function(*given(context, event))
            if _is_replay(context):
                self._mark_bare(event)
            return result

        return run

    def _mark_bare(self, event: BaseEvent) -> None:
        """Insert the marker of a replayed event's original message, too.

        A replay runs as a new generation with a marker of its own. Without this second marker a
        late copy from the topic would run the handler again after the replay.
        """
        service = self.service or get_settings().service_name
        key = EventKey(event.id, service, event.type)
        current_runtime().store.insert_markers([key])


def _is_replay(context: JobContext) -> bool:
    return context.headers.get(names.GENERATION, "1") != "1"


def _within(context: JobContext, event: BaseEvent) -> AbstractContextManager[None]:
    correlation = event.metadata.correlation_id if event.metadata else None
    headers = {names.CORRELATION_ID: correlation or "", **context.headers}
    return names.carrying(headers, causation_id=event.id)


class EventRoute(Route):
    """Reads the events of one topic for one group."""

    def __init__(self, topic: str, group: str, queue: str) -> None:
        self.topic = topic
        self.group = group
        self.queue = queue
        self.handlers: dict[str, EventHandler] = {}
        self.skipped: Counter[str] = Counter()
        """Events passed over by this process, by type."""
        self._lock = threading.Lock()

    def read(self, record: Record, *, max_bytes: int) -> tuple[Message, Handler | None] | None:
        """Read an event; return None for a type that is not handled here.

        :raises MessageError: the event is invalid and its type is handled here, or it has no type.
        """
        value, headers = record.value, names.texts(record.headers)
        event_format = cloudevents.format_of(headers)
        is_binary = event_format == cloudevents.BINARY
        if value is None and not is_binary:
            raise MessageError("invalid", "The event has no value (a tombstone)")
        if len(value or b"") > max_bytes:
            raise MessageError(
                "too_large", f"The event has {len(value or b'')} bytes; the limit is {max_bytes}"
            )
        found = {} if is_binary else read_event(value or b"")
        type = headers.get("ce_type") if is_binary else found.get("type")
        if isinstance(type, str) and type and type not in self.handlers:
            self._skip(type)
            return None
        payload, content_type = value or b"", JSON.content_type
        if event_format == cloudevents.STRUCTURED:
            content_type = cloudevents.CONTENT_TYPE
        elif is_binary:
            payload, content_type = cloudevents.read_data(value, headers)
        # The data of a CloudEvent may need a schema of a registry: a lane can wait for that.
        event = event_of(found, headers, record.timestamp, decodes_data=False)
        handler = self.handlers[event.type]
        if handler.versions and event.version not in handler.versions:
            raise MessageError(
                "invalid",
                f"Version {event.version!r} of {event.type} is not understood here; "
                f"known: {', '.join(sorted(handler.versions))}",
            )
        return _message_of(event, record, payload, content_type), handler

    def _skip(self, type: str) -> None:
        with self._lock:
            # The types are others' to choose: a flood of them must not fill the memory.
            known = type if type in self.skipped or len(self.skipped) < 1000 else "(others)"
            self.skipped[storable_text(known, MAX_TYPE_LENGTH)] += 1
        signals.event_skipped.send_robust(sender=self.topic, topic=self.topic, event_type=type)


def _message_of(event: BaseEvent, record: Record, payload: bytes, content_type: str) -> Message:
    headers = record.headers
    ours = names.text(headers, names.SERVICE) == get_settings().service_name
    job_id = names.text(headers, names.JOB_ID) if ours else ""
    generation = names.number(headers, names.GENERATION, 1) if job_id else 1
    return Message(
        id=_generation_id(event.id, generation),
        type=event.type,
        payload=payload,
        content_type=content_type,
        job_id=job_id or None,
        service=names.text(headers, names.SERVICE) if job_id else "",
        generation=generation,
        attempt=names.number(headers, names.ATTEMPT, 1) if job_id else 1,
        replay_count=names.number(headers, names.REPLAY_COUNT, 0),
        timestamp=record.timestamp,
        # One id may come with two types, and both may fail.
        unique_id=row_name(event),
    )


def _generation_id(id: str, generation: int) -> str:
    """Return an id for a generation of an event, which is short enough and differs from those of
    other generations.
    """
    name = message_id(id, generation)
    return name if len(name) <= MAX_ID_LENGTH else message_id(_digest(id), generation)


def row_name(event: BaseEvent) -> str:
    """Return the unique id, within its queue, of the row of an event's retries."""
    name = f"{event.type} {event.id}"
    if len(name) <= MAX_ROW_NAME:
        return name
    return f"{event.type} {_digest(event.id)}"


def _digest(id: str) -> str:
    return hashlib.sha256(id.encode()).hexdigest()


# --- Declaring ------------------------------------------------------------------------------------


_routes: dict[tuple[str, str], EventRoute] = {}
_UNFIT = re.compile(r"[^a-zA-Z0-9._-]")
"""Characters that the name of a Kafka topic cannot contain."""
MAX_TOPIC = 249


def event_route(topic: str, group: str | None = None, **queue_options: Any) -> EventRoute:
    """Return the route of a topic's events for a group, declaring its two queues at first.

    The topic's queue is named after it, or is the one the settings declare for it; that of its
    retries has ``-retry`` appended. Another group than the service's own has its name appended.
    """
    own_group = service_group(conf.settings_as_read().service_name)
    wanted = group or own_group
    present = _routes.get((topic, wanted))
    # A test may have forgotten it: `registry.isolated`.
    if present is not None and registry.route_of(present.queue) is present:
        return present
    name = _declared_for(topic) or topic
    if group is not None and group != own_group:
        name = f"{topic}@{group}"
    retry = f"{name}-retry"
    # What the settings say of the topic's queue holds for its retries too.
    given = {**queue_options, **conf.settings_as_read().queues.get(name, {})}
    if given.get("consume") is False:
        raise ImproperlyConfigured(
            f"KJO['QUEUES'][{name!r}] says 'consume': False, and an event_handler of this service "
            f"listens to {topic!r}. Take one of them away."
        )
    shared = {key: value for key, value in given.items() if key not in ("topic", "retry_queue")}
    shared.setdefault("dead_letter_topic", f"{topic}-dlq")
    shared.setdefault("key_prefix", name.upper())
    shared["consumer_group"] = given.get("consumer_group", wanted)
    shared["consume"] = True
    conf.declare_queue(name, **{**queue_options, **shared}, topic=topic, retry_queue=retry)
    conf.declare_queue(retry, **shared, topic=retry_topic(topic, shared["consumer_group"]))
    route = EventRoute(topic, wanted, name)
    registry.bind(name, route)
    registry.bind(retry, route)
    _routes[topic, wanted] = route
    return route


def retry_topic(topic: str, group: str) -> str:
    """Return the topic of a group's own that carries its retries: ``<topic>-retry-<group>``."""
    name = f"{topic}-retry-{_UNFIT.sub('-', group)}"
    if len(name) <= MAX_TOPIC:
        return name
    return f"{name[: MAX_TOPIC - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _declared_for(topic: str) -> str | None:
    """Return the queue the settings declare for a topic, by its name or its ``topic``."""
    queues = conf.settings_as_read().queues
    return next((name for name in queues if (queues[name].get("topic") or name) == topic), None)


_OPTIONS = ("group", "versions", "max_attempts", "timeout", "atomic", "takes_context")


def event_handler(
    type: str,
    *,
    topic: str,
    group: str | None = None,
    versions: Collection[str] = (),
    max_attempts: int | None = None,
    timeout: timedelta | None = None,
    atomic: bool = True,
    takes_context: bool = False,
    **queue_options: Any,
) -> Callable[[F], F]:
    """Declare a function, sync or ``async def``, as the handler of a type of event on a topic.

    It takes the ``BaseEvent`` (after the ``JobContext``, with ``takes_context``) and runs once for
    each event: the marker in ``processed_events`` and what it writes are one transaction. One
    function may handle several types; of a type, one function in a group.

    :param type: the type of event, 1 to 100 characters.
    :param topic: the topic to read.
    :param group: consumer group, ``{SERVICE_NAME}-group`` by default. Another group sees every
        event too, with markers of its own: so one project can act on a type in two places.
    :param versions: understood versions; an event of another one becomes a dead letter. Any, if
        none is given.
    :param max_attempts: executions before an event is dead-lettered.
    :param timeout: longest run of one attempt; ``KJO["TIMEOUT"]`` if not given.
    :param atomic: run in the transaction of the marker, as with ``@job``.
    :param takes_context: pass the ``JobContext`` first.
    :param queue_options: of the queue made for the topic, see ``KJO["QUEUES"]``.
    :raises TypeError: there is no such option.
    :raises ValueError: the value of one means nothing.
    :raises ImproperlyConfigured: another function handles this type of this topic in this group.
    """
    if not isinstance(type, str) or not 0 < len(type) <= MAX_TYPE_LENGTH:
        raise ValueError(f"event_handler: type must be text of 1 to {MAX_TYPE_LENGTH} characters")
    conf.check_queue_options(queue_options, "event_handler", *_OPTIONS)
    if len(group or "") > MAX_NAME_LENGTH:
        raise ValueError(f"event_handler: group must have at most {MAX_NAME_LENGTH} characters")

    def declare(function: F) -> F:
        route = event_route(topic, group, **queue_options)
        options = HandlerOptions(
            name=type,
            queue=route.queue,
            max_attempts=max_attempts,
            timeout=timeout,
            atomic=atomic,
            takes_context=takes_context,
        )
        handler = EventHandler(
            function,
            options,
            service="" if group is None else route.group,
            versions=[normalised_version(version) for version in versions],
        )
        present = route.handlers.get(type)
        if present is not None and _place(present.original) != _place(function):
            raise ImproperlyConfigured(
                f"Two functions handle {type!r} of {topic!r} in the group {route.group!r}: "
                f"{_place(present.original)} and {_place(function)}. Give one of them a group=…"
            )
        route.handlers[type] = handler
        return function

    return declare


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
