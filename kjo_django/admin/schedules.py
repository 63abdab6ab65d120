"""Schedules: a list, and pages with the operators' buttons; the dashboard adds and edits them."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from kjo_django.admin.base import KjoAdmin
from kjo_django.admin.display import SCHEDULE_BADGES, badge, show_value
from kjo_django.models import Schedule
from kjo_django.operations import redaction
from kjo_django.operations.actions import Subject
from kjo_django.operations.safe_text import inert
from kjo_django.schedules import shown
from kjo_django.schedules.declarations import problem_shown


@admin.register(Schedule)
class ScheduleAdmin(KjoAdmin):
    """Schedules of the code and of operators."""

    screens = ("schedules", "schedule")
    subject = Subject.SCHEDULES
    list_display = ("name", "job", "when", "shown_state", "next_at", "last_at", "source")
    ordering = ("name",)
    search_fields = ("name", "job")
    never_listed = ("declaration",)
    fields = (
        *("name", "job", "when", "timezone", "queue", "shown_state", "shown_problem", "next_at"),
        *("last_at", "stored_count", "late_count", "skipped_count"),
        *("catch_up", "overlap", "jitter", "expires_after"),
        *("starts_at", "ends_at", "source", "overridden", "changed_by", "updated_at"),
    )

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Operators with the permission add schedules in the dashboard."""
        return self.may(request, "add_schedule") and self.may(request, "view_dashboard")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Schedules are deleted by an action, which leaves those of the code."""
        return False

    def add_view(
        self, request: HttpRequest, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Lead to the dashboard's form."""
        place = "admin:kjo_django_dashboard_schedule_add"
        return HttpResponseRedirect(reverse(place, current_app=self.admin_site.name))

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Hide the payload from users who may not see payloads."""
        shown = ["shown_payload"] if self.may(request, "view_payload") else []
        return [*self.fields, *shown]

    def state_of(self, obj: Schedule) -> str:
        """Return what decides which buttons there are."""
        return shown.conditions(obj)

    # --- Columns ----------------------------------------------------------------------------------

    @admin.display(description=_("when"))
    def when(self, schedule: Schedule) -> str:
        """Return the cron expression, the interval or the moment."""
        if schedule.cron:
            return inert(schedule.cron)
        if schedule.every:
            return str(_("every %d s") % schedule.every)
        return str(schedule.at)

    @admin.display(description=_("state"))
    def shown_state(self, schedule: Schedule) -> SafeString:
        """Return the badge of its state."""
        return badge(*SCHEDULE_BADGES[shown.state_of(schedule)])

    @admin.display(description=_("problem"))
    def shown_problem(self, schedule: Schedule) -> str:
        """Return why its next tick cannot be stored."""
        return inert(problem_shown(schedule)) or "–"

    @admin.display(description=_("payload"))
    def shown_payload(self, schedule: Schedule) -> SafeString:
        """Return the payload without its secrets."""
        hidden = redaction.hidden_by(schedule.job)
        return show_value(redaction.redacted(schedule.payload, also=hidden))
