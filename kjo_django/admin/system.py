"""Queues, workers and processed events."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.auth import get_permission_codename
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from kjo_django.admin.base import KjoAdmin
from kjo_django.admin.display import badge, show_value
from kjo_django.admin.jobs import may_see_payloads
from kjo_django.conf import get_settings
from kjo_django.models import ProcessedEvent, QueueControl, Worker
from kjo_django.operations import queues, redaction
from kjo_django.operations.actions import Action, Subject
from kjo_django.operations.safe_text import inert
from kjo_django.operations.workers import alive_within


@admin.register(QueueControl)
class QueueControlAdmin(KjoAdmin):
    """Every known queue, with the operators' limits."""

    screens = ("queues", "")
    list_display = (
        "shown_queue",
        "shown_state",
        "concurrency",
        "topic",
        "consumer_group",
        "changed_by",
        "updated_at",
    )
    ordering = ("queue",)
    fields = list_display
    changeable = ("concurrency",)
    subject = Subject.QUEUES

    # A queue nobody has touched has no row: it is shown without one, and an action makes it.

    def run_action(self, request: HttpRequest, action: Action, rows: QuerySet[Any]) -> None:
        """Include queues without a row in the rows of an action."""
        queues.ensure_rows()
        super().run_action(request, action, rows)

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """List known queues without a row, too."""
        changes = super().get_changelist_instance(request)
        if not changes.multi_page:
            known = {control.queue for control in changes.result_list}
            missing = [row for row in queues.untouched() if row.queue not in known]
            rows = sorted([*changes.result_list, *missing], key=lambda row: row.queue)
            changes.result_list = rows
            changes.result_count = changes.full_result_count = len(rows)
        return changes

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return a known queue without a row, too."""
        found = super().get_object(request, object_id, from_field)
        if found is None:
            found = next((row for row in queues.untouched() if row.queue == object_id), None)
        return found

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """The concurrency may be changed by those with the model's permission."""
        return self.may(request, get_permission_codename("change", self.opts))

    def state_of(self, obj: QueueControl) -> str:
        """Return whether it is paused."""
        return "paused" if obj.is_paused else "running"

    def save_model(self, request: HttpRequest, obj: QueueControl, form: Any, change: bool) -> None:
        """Change only the form's fields: another operator may have paused the queue meanwhile."""
        queues.set_policy(obj.queue, concurrency=obj.concurrency, actor=request.user.get_username())

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Validate the form with the operation's own check."""
        if db_field.name in self.changeable:
            _unit, most = queues.LIMITS[db_field.name]
            kwargs |= {"min_value": 1, "max_value": most}
        return super().formfield_for_dbfield(db_field, request, **kwargs)

    # --- Columns ----------------------------------------------------------------------------------

    @admin.display(description=_("queue"))
    def shown_queue(self, control: QueueControl) -> str:
        """Return its name."""
        return inert(control.queue)

    @admin.display(description=_("state"))
    def shown_state(self, control: QueueControl) -> SafeString:
        """Return whether it is paused."""
        if control.is_paused:
            return badge("paused", _("Paused"))
        return badge("alive", _("Running"))

    @admin.display(description=_("topic"))
    def topic(self, control: QueueControl) -> str:
        """Return the topic its messages go to."""
        return inert(get_settings().queue(control.queue).topic)

    @admin.display(description=_("consumer group"))
    def consumer_group(self, control: QueueControl) -> str:
        """Return the group that reads it."""
        return inert(get_settings().queue(control.queue).consumer_group)


@admin.register(ProcessedEvent)
class ProcessedEventAdmin(KjoAdmin):
    """Processed events; duplicates of these are dropped."""

    screens = ("events", "")
    list_display = ("event_id", "event_type", "service_name", "processed_at")
    search_fields = ("=event_id",)
    search_help_text = _("The exact id of an event or message.")
    never_listed = ("event_data",)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Hide the data from users who may not see payloads."""
        fields = ["id", "event_id", "event_type", "service_name", "processed_at", "created_at"]
        return fields + (["shown_data"] if may_see_payloads(request) else [])

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search by exact match on the unique constraint's first column."""
        term = search_term.strip()
        return (queryset.filter(event_id=term) if term else queryset), False

    @admin.display(description=_("event data"))
    def shown_data(self, event: ProcessedEvent) -> SafeString:
        """Return the data stored with the event, without secrets."""
        hidden = redaction.hidden_by(event.event_type)
        return show_value(redaction.redacted(event.event_data, also=hidden))


@admin.register(Worker)
class WorkerAdmin(KjoAdmin):
    """Worker processes and their heartbeats."""

    screens = ("consumers", "")
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
        "clock_ahead",
    )

    def state_of(self, obj: Worker) -> str:
        """Return the requested action, or its state."""
        return str(obj.asked_to or obj.state)

    @admin.display(description=_("state"))
    def shown_state(self, worker: Worker) -> SafeString:
        """Return whether its heartbeat is recent."""
        if worker.state == Worker.State.STOPPED:
            return badge("stopped", worker.get_state_display())
        if not worker.is_alive(alive_within()):
            return badge("gone", _("No sign of life"))
        return badge("alive", worker.get_state_display())

    @admin.display(description=_("queues"))
    def shown_queues(self, worker: Worker) -> str:
        """Return its queues."""
        return inert(", ".join(map(str, worker.queues)))

    @admin.display(description=_("last error"))
    def shown_error(self, worker: Worker) -> str:
        """Return its last error."""
        return inert(worker.last_error)
