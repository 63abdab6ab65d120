"""``EventIdempotencyService``: run something once for an event, wherever the event comes from.

The marker is inserted first and commits together with what the processor writes: a crash
in between leaves neither, and of several who process one event at once, one does and the others
wait for its end, then see a duplicate. What the processor does outside the database may happen
again; give other systems the event's id as their idempotency key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from asgiref.sync import async_to_sync, sync_to_async
from django.db import transaction

from kjo_django.conf import get_settings
from kjo_django.messages.serializers import storable_json, storable_text
from kjo_django.models import EventKey, ProcessedEvent
from kjo_django.patterns.events.event import MAX_ID_LENGTH, MAX_TYPE_LENGTH
from kjo_django.store import store_for
from kjo_django.store.transactions import jobs_database
from kjo_django.values import MAX_NAME_LENGTH

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProcessOutcome(Generic[T]):
    """What ``process_event_safely`` did."""

    processed: bool
    """False: the event had been processed before, nothing was done."""
    result: T | None = None


class EventIdempotencyService:
    """Which events have taken effect for a service.

    :param service_name: whose; ``SERVICE_NAME`` if not given. The same event counts for each
        service apart, and so does each type of one id.
    """

    def __init__(self, service_name: str | None = None) -> None:
        self.service_name = service_name or get_settings().service_name
        if len(self.service_name) > MAX_NAME_LENGTH:
            raise ValueError(f"service_name must have at most {MAX_NAME_LENGTH} characters")

    def is_event_processed(self, event_id: str, event_type: str) -> bool:
        """Return whether the event has taken effect. To act on the answer, let
        ``process_event_safely`` ask: between this answer and the act others may act too."""
        key = self._key(event_id, event_type)
        rows = ProcessedEvent.objects.using(jobs_database())
        return rows.filter(**key._asdict()).exists()

    def mark_event_processed(
        self, event_id: str, event_type: str, event_data: Mapping[str, Any] | None = None
    ) -> bool:
        """Mark the event, joining the caller's transaction; False if it was marked before.

        :param event_data: kept in the marker's row.
        """
        key, using = self._key(event_id, event_type), jobs_database()
        rows = ProcessedEvent.objects.using(using)
        with transaction.atomic(using=using, savepoint=False):
            is_new = key in store_for(using).insert_markers([key])
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
        transaction. What it raises is raised, with everything undone, the marker too.

        :param processor: a function, or a coroutine function, without arguments.
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
        return await sync_to_async(self.is_event_processed)(event_id, event_type)

    async def amark_event_processed(
        self, event_id: str, event_type: str, event_data: Mapping[str, Any] | None = None
    ) -> bool:
        """``mark_event_processed`` from asynchronous code."""
        return await sync_to_async(self.mark_event_processed)(event_id, event_type, event_data)

    async def aprocess_event_safely(
        self,
        event_id: str,
        event_type: str,
        processor: Callable[[], Any],
        event_data: Mapping[str, Any] | None = None,
    ) -> ProcessOutcome[Any]:
        """``process_event_safely`` from asynchronous code."""
        process = sync_to_async(self.process_event_safely)
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
