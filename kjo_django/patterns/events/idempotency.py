"""``EventIdempotencyService``: run a function once for an event, whatever its source.

The marker is inserted first and commits together with the function's writes, so a crash leaves
neither. When several processes handle one event at once, one of them runs the function; the others
wait for its end and see a duplicate. Effects outside the database may happen again: pass the
event's id to other systems as their idempotency key. ``check_idempotency`` proves this on the real
database and broker.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from asgiref.sync import async_to_sync
from django.db import transaction

from kjo_django.conf import get_settings
from kjo_django.enqueue.coroutines import from_coroutine
from kjo_django.enqueue.storing import publish
from kjo_django.exceptions import KjoError, MessageError
from kjo_django.ids import uuid7
from kjo_django.messages.serializers import storable_json, storable_text
from kjo_django.models import EventKey, ProcessedEvent
from kjo_django.patterns.events.event import (
    MAX_ID_LENGTH,
    MAX_TYPE_LENGTH,
    BaseEvent,
    read_event,
    validated,
)
from kjo_django.runtime import current_runtime, get_transport, jobs_database
from kjo_django.transports.base import OutgoingRecord, Record, TopicSpec
from kjo_django.values import MAX_NAME_LENGTH

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProcessOutcome(Generic[T]):
    """The outcome of ``process_event_safely``."""

    processed: bool
    """False: the event had been processed before, and nothing was done."""
    result: T | None = None
    """What the function returned; None where it was not called."""


class EventIdempotencyService:
    """Knows the events that have taken effect for a service.

    Its methods refuse an ``event_id`` that is not text of 1 to 255 characters, and an
    ``event_type`` that is not text of 1 to 100, with a ``ValueError``.

    :param service_name: ``SERVICE_NAME`` if not given. The same event counts separately for each
        service and for each type.
    :raises ValueError: the name is longer than 100 characters.
    """

    def __init__(self, service_name: str | None = None) -> None:
        self.service_name: str = service_name or get_settings().service_name
        """The service whose events these are."""
        if len(self.service_name) > MAX_NAME_LENGTH:
            raise ValueError(f"service_name must have at most {MAX_NAME_LENGTH} characters")

    def is_event_processed(self, event_id: str, event_type: str) -> bool:
        """Return whether the event has taken effect.

        Do not decide by this answer whether to act, since another process may act in between: call
        ``process_event_safely``.

        :param event_id: the event's id.
        :param event_type: its type; the same id counts separately for each.
        """
        key = self._key(event_id, event_type)
        rows = ProcessedEvent.objects.using(jobs_database())
        return rows.filter(**key._asdict()).exists()

    def mark_event_processed(
        self, event_id: str, event_type: str, event_data: Mapping[str, Any] | None = None
    ) -> bool:
        """Mark the event, joining the caller's transaction; False if it was marked before.

        :param event_id: the event's id.
        :param event_type: its type; the same id counts separately for each.
        :param event_data: kept in the marker's row; JSON must be able to hold it.
        """
        key, using = self._key(event_id, event_type), jobs_database()
        rows = ProcessedEvent.objects.using(using)
        with transaction.atomic(using=using, savepoint=False):
            is_new = key in current_runtime().store.insert_markers([key])
            if is_new and event_data is not None:
                rows.filter(**key._asdict()).update(event_data=storable_json(event_data))
        return is_new

    def process_event_safely(
        self,
        event_id: str,
        event_type: str,
        processor: Callable[[], T],
        event_data: Mapping[str, Any] | None = None,
    ) -> ProcessOutcome[T]:
        """Call ``processor`` unless the event has taken effect; marker and effects are one
        transaction.

        An exception of the processor is raised, and its writes and the marker are undone.

        :param event_id: the event's id.
        :param event_type: its type; the same id counts separately for each.
        :param processor: a function, or a coroutine function, without arguments.
        :param event_data: kept in the marker's row, see ``mark_event_processed``.
        """
        with transaction.atomic(using=jobs_database()):
            if not self.mark_event_processed(event_id, event_type, event_data):
                return ProcessOutcome(processed=False)
            if inspect.iscoroutinefunction(processor):
                # Its queries come back to this thread, so they are part of the transaction.
                return ProcessOutcome(processed=True, result=async_to_sync(processor)())
            return ProcessOutcome(processed=True, result=processor())

    async def ais_event_processed(self, event_id: str, event_type: str) -> bool:
        """``is_event_processed`` from asynchronous code."""
        return await from_coroutine(self.is_event_processed)(event_id, event_type)

    async def amark_event_processed(
        self, event_id: str, event_type: str, event_data: Mapping[str, Any] | None = None
    ) -> bool:
        """``mark_event_processed`` from asynchronous code."""
        return await from_coroutine(self.mark_event_processed)(event_id, event_type, event_data)

    async def aprocess_event_safely(
        self,
        event_id: str,
        event_type: str,
        processor: Callable[[], Any],
        event_data: Mapping[str, Any] | None = None,
    ) -> ProcessOutcome[Any]:
        """``process_event_safely`` from asynchronous code."""
        process = from_coroutine(self.process_event_safely)
        return await process(event_id, event_type, processor, event_data)

    def _key(self, event_id: str, event_type: str) -> EventKey:
        for name, value, limit in (
            ("event_id", event_id, MAX_ID_LENGTH),
            ("event_type", event_type, MAX_TYPE_LENGTH),
        ):
            if not isinstance(value, str) or not 0 < len(value) <= limit:
                raise ValueError(f"{name} must be text of 1 to {limit} characters")
            if storable_text(value) != value:
                raise ValueError(f"{name} must be text of 1 to {limit} characters databases keep")
        return EventKey(event_id, self.service_name, event_type)


# --- Six checks, on the real database and broker --------------------------------------------------


TOPIC = "kjo-idempotency-check"
TYPE = "KJO_IDEMPOTENCY_CHECK"


def check_idempotency(
    *, transport: str = "default", timeout: float = 30.0
) -> Iterator[tuple[str, str]]:
    """Yield the name of each check and its error, or "", as soon as they are known.

    Nothing is left behind but the topic ``kjo-idempotency-check``.

    :param timeout: seconds to wait for the broker.
    """
    check = _Check(transport, timeout)
    try:
        for name, run in check.all:
            try:
                run()
                yield name, ""
            except KjoError as error:
                yield name, str(error)
            except Exception as error:
                yield name, f"{type(error).__name__}: {error}"
    finally:
        check.clean_up()


class _Check:
    def __init__(self, transport: str, timeout: float) -> None:
        self._transport = transport
        self._timeout = timeout
        run = uuid7().hex
        self._services = [EventIdempotencyService(f"kjo-check-{n}-{run}") for n in (1, 2)]
        self._event, self._other = (BaseEvent(type=TYPE, data={"userId": run}) for _ in range(2))
        self._calls = 0

    @property
    def all(self) -> list[tuple[str, Callable[[], None]]]:
        """The result as a mapping. Programs read these names."""
        return [
            ("First event processing", self._first),
            ("Duplicate event skipping", self._duplicate),
            ("Different service processing", self._different_service),
            ("Different event processing", self._different_event),
            ("Database verification", self._database),
            ("Kafka idempotency", self._broker),
        ]

    def clean_up(self) -> None:
        names = [service.service_name for service in self._services]
        ProcessedEvent.objects.using(jobs_database()).filter(service_name__in=names).delete()

    def _process(self, event: BaseEvent, service: int = 0) -> bool:
        def count() -> None:
            self._calls += 1

        before = self._calls
        idempotency = self._services[service]
        outcome = idempotency.process_event_safely(event.id, event.type, count, event.to_wire())
        if outcome.processed != (self._calls == before + 1):
            raise KjoError(f"processed={outcome.processed}, but it was called otherwise")
        return outcome.processed

    def _expect(self, wanted: bool, event: BaseEvent, service: int = 0) -> None:
        if self._process(event, service) is not wanted:
            raise KjoError("it was skipped" if wanted else "it was processed again")

    def _first(self) -> None:
        self._expect(True, self._event)

    def _duplicate(self) -> None:
        self._expect(False, self._event)

    def _different_service(self) -> None:
        self._expect(True, self._event, service=1)

    def _different_event(self) -> None:
        self._expect(True, self._other)

    def _database(self) -> None:
        names = [service.service_name for service in self._services]
        rows = ProcessedEvent.objects.using(jobs_database()).filter(service_name__in=names)
        found = sorted(row.event_key for row in rows)
        wanted = sorted(
            (event.id, names[service], TYPE)
            for event, service in ((self._event, 0), (self._event, 1), (self._other, 0))
        )
        if found != wanted:
            raise KjoError(f"processed_events holds {len(found)} rows, not the {len(wanted)}")
        if any(row.event_data is None for row in rows):
            raise KjoError("event_data was not stored")

    def _broker(self) -> None:
        """Publish one event twice, process it once, and check that a second consumer finds nothing
        to do.
        """
        transport = get_transport(self._transport)
        transport.ensure_topics([TopicSpec(TOPIC, 1)])
        event = BaseEvent(type=TYPE, data={"userId": self._event.user_id})
        copy = OutgoingRecord(TOPIC, event.to_bytes(), event.key.encode())
        group = f"{get_settings().service_name}-idempotency-check"
        if transport.capabilities.transactional:
            # There a record is for those who have subscribed.
            transport.subscribe([TOPIC], group).close()
        for answer in publish(transport, [copy, copy]):
            if answer.error is not None:
                raise KjoError(f"it was not published: {answer.error}")
        answers = [self._process(event) for _ in self._consume(group, event, 2)]
        if answers != [True, False]:
            raise KjoError(f"two deliveries were answered with processed={answers}")
        again = list(self._consume(group, event, 1, patience=2.0))
        if again:
            raise KjoError("a record that was acknowledged came again")

    def _consume(
        self, group: str, event: BaseEvent, count: int, patience: float | None = None
    ) -> Iterator[Record]:
        """Yield the event's records and acknowledge each afterwards, with those that another run
        left.
        """
        deadline = time.monotonic() + (patience or self._timeout)
        subscription = get_transport(self._transport).subscribe([TOPIC], group)
        found = 0
        try:
            while found < count and time.monotonic() < deadline:
                for record in subscription.poll(100, 0.5):
                    if _id_of(record) == event.id:
                        found += 1
                        if record.key != event.key.encode():
                            raise KjoError("the key is not the user")
                        yield record
                    subscription.acknowledge([record])
            subscription.flush()
        finally:
            subscription.close()
        if found < count and patience is None:
            raise KjoError(f"{found} of {count} records came within {self._timeout:g} s")


def _id_of(record: Record) -> Any:
    try:
        return validated(read_event(record.value or b"")).id
    except MessageError:
        return None
