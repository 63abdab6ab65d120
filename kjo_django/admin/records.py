"""Processed events, and workers with what they are asked."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from kjo_django.admin.base import KjoAdmin
from kjo_django.admin.display import badge, show_value
from kjo_django.admin.jobs import may_see_payloads
from kjo_django.models import ProcessedEvent, Worker
from kjo_django.operations import redaction
from kjo_django.operations.actions import Subject
from kjo_django.operations.safe_text import inert
from kjo_django.operations.workers import alive_within


@admin.register(ProcessedEvent)
class ProcessedEventAdmin(KjoAdmin):
    """What took effect: duplicates of these are dropped."""

    list_display = ("event_id", "event_type", "service_name", "processed_at")
    search_fields = ("=event_id",)
    search_help_text = _("The exact id of an event or message.")
    never_listed = ("event_data",)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Leave the data to those who may see payloads."""
        fields = ["id", "event_id", "event_type", "service_name", "processed_at", "created_at"]
        return fields + (["shown_data"] if may_see_payloads(request) else [])

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Look up exactly, by the unique constraint's first column."""
        term = search_term.strip()
        return (queryset.filter(event_id=term) if term else queryset), False

    @admin.display(description=_("event data"))
    def shown_data(self, event: ProcessedEvent) -> SafeString:
        """Return what was stored along, without secrets."""
        hidden = redaction.hidden_by(event.event_type)
        return show_value(redaction.redacted(event.event_data, also=hidden))


@admin.register(Worker)
class WorkerAdmin(KjoAdmin):
    """Processes and their signs of life."""

    subject = Subject.WORKERS
    list_display = (
        "name",
        "shown_state",
        "shown_queues",
        "concurrency",
        "in_flight_count",
        "processed_count",
        "failed_count",
        "is_relaying",
        "heartbeat_at",
    )
    fields = (
        "id",
        "name",
        "shown_state",
        "hostname",
        "pid",
        "shown_queues",
        "concurrency",
        "is_relaying",
        "in_flight_count",
        "processed_count",
        "failed_count",
        "partitions",
        "rss_bytes",
        "shown_error",
        "started_at",
        "heartbeat_at",
    )

    def state_of(self, obj: Worker) -> str:
        """Return what it was asked to do, or its state."""
        return str(obj.wish or obj.state)

    @admin.display(description=_("state"))
    def shown_state(self, worker: Worker) -> SafeString:
        """Return whether it lives."""
        if worker.state == Worker.State.STOPPED:
            return badge("stopped", worker.get_state_display())
        if not worker.is_alive(alive_within()):
            return badge("gone", _("No sign of life"))
        return badge("alive", worker.get_state_display())

    @admin.display(description=_("queues"))
    def shown_queues(self, worker: Worker) -> str:
        """Return what it consumes."""
        return inert(", ".join(map(str, worker.queues)))

    @admin.display(description=_("last error"))
    def shown_error(self, worker: Worker) -> str:
        """Return what it met last."""
        return inert(worker.last_error)
