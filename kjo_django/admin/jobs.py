"""Jobs with their failed attempts."""

from __future__ import annotations

import uuid
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from kjo_django import registry
from kjo_django.admin.base import BaseInline, KjoAdmin
from kjo_django.admin.dashboard.figures import age, duration
from kjo_django.admin.display import (
    badge,
    seconds_taken,
    short_arguments,
    show_text,
    show_value,
)
from kjo_django.admin.filters import HandlerFilter, QueueFilter, StateFilter
from kjo_django.enqueue.job_status import limits_awaited, progress_of, shown_states
from kjo_django.models import NEVER, Job, JobFailure
from kjo_django.operations import redaction
from kjo_django.operations.actions import Subject
from kjo_django.operations.safe_text import inert
from kjo_django.runtime import jobs_database

FAILURES_SHOWN = 100
"""Most failed attempts shown: a job that is retried without end has thousands, each with its
traceback.
"""
PAYLOAD_FIELDS = ("shown_payload", "shown_result", "shown_headers")


class JobFailureInline(BaseInline):
    """The failed attempts of a job."""

    model = JobFailure
    extra = max_num = 0
    can_delete = False
    ordering = ("id",)
    verbose_name_plural = _("failed attempts (newest 100)")

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Show tracebacks only to those who may see payloads."""
        fields = ["generation", "attempt", "error_type", "shown_error", "worker"]
        fields += ["failed_at", "retry_at"]
        return fields + (["shown_traceback", "shown_log"] if may_see_payloads(request) else [])

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Failures are history."""
        return self.get_fields(request, obj)

    def get_queryset(self, request: HttpRequest) -> QuerySet[JobFailure]:
        """Load only the columns that are shown, and only the newest of what may be thousands of
        rows.
        """
        rows = super().get_queryset(request).using(jobs_database())
        if not may_see_payloads(request):
            rows = rows.defer("traceback", "log")
        job = self._job_of(request)
        if job is None:
            return rows.none()
        newest = rows.filter(job_id=job).order_by("-pk").values_list("pk", flat=True)
        # As a list: a formset filters once more, which no slice takes.
        return rows.filter(pk__in=list(newest[:FAILURES_SHOWN]))

    def _job_of(self, request: HttpRequest) -> uuid.UUID | None:
        match = request.resolver_match
        try:
            return uuid.UUID(str(match.kwargs.get("object_id"))) if match else None
        except ValueError:
            return None

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allow it to users who may see the job."""
        return bool(request.user.has_perm("kjo_django.view_job"))

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Failures are recorded by workers."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Failures are history."""
        return False

    @admin.display(description=_("error"))
    def shown_error(self, failure: JobFailure) -> str:
        """Return its text."""
        return inert(failure.error)

    @admin.display(description=_("traceback"))
    def shown_traceback(self, failure: JobFailure) -> SafeString:
        """Return where it was raised."""
        return show_text(failure.traceback)

    @admin.display(description=_("log"))
    def shown_log(self, failure: JobFailure) -> SafeString:
        """Return the last lines that were logged in it."""
        return show_text(failure.log)


def may_see_payloads(request: HttpRequest) -> bool:
    """Whether the user may see payloads, results and tracebacks."""
    return bool(request.user.has_perm("kjo_django.view_payload"))


@admin.register(Job)
class JobAdmin(KjoAdmin):
    """Read-only, except for actions."""

    screens = ("jobs", "job")
    list_display = (
        "shown_call",
        "shown_state",
        "queue",
        "shown_attempts",
        "shown_age",
        "shown_took",
    )
    list_filter = (StateFilter, QueueFilter, HandlerFilter)
    search_fields = ("=id", "=unique_id")
    search_help_text = _("The exact id of a job, or its exact unique id if you may see payloads.")
    never_listed = ("payload", "result")
    inlines = (JobFailureInline,)
    subject = Subject.JOBS
    what_it_is = (
        *("id", "handler", "queue", "priority", "unique_id", "key"),
        *("shown_state", "shown_attempts", "shown_progress"),
    )
    what_it_became = ("generation", "created_at", "shown_due", "expires_at", "queued_at")
    how_it_ended = ("started_at", "finished_at", "worker", "shown_error", "result_expires_at")
    where_it_is = ("topic", "partition", "offset", "content_type")

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Read what the columns show of the arguments and times of the listed jobs."""
        changes = super().get_changelist_instance(request)
        rows = list(changes.result_list)
        arguments = short_arguments(rows) if may_see_payloads(request) else {}
        taken = seconds_taken(rows, shown_states(rows))
        for row in rows:
            row.short_arguments = arguments.get(row.pk)
            row.seconds_taken = taken.get(row.pk)
        changes.result_list = rows
        return changes

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Hide payload and result from users who may not see them."""
        times = (*self.what_it_became, *self.how_it_ended)
        sections = [
            (None, {"fields": self.what_it_is}),
            (_("History"), {"fields": times}),
            (_("Message"), {"fields": self.where_it_is}),
        ]
        if may_see_payloads(request):
            sections.append((_("Payload"), {"fields": PAYLOAD_FIELDS}))
        return sections

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search by primary key and by the unique constraint, whose first column is the queue."""
        term = search_term.strip()
        if not term:
            return queryset, False
        wanted = Q(pk__in=[])
        if may_see_payloads(request):
            wanted |= Q(queue__in=registry.queue_names(), unique_id=term)
        try:
            wanted |= Q(pk=uuid.UUID(term))
        except ValueError:
            pass  # no id, so it is a unique id
        return queryset.filter(wanted), False

    def state_of(self, obj: Job) -> str:
        """Return its state with the virtual ones."""
        return obj.status

    # --- Columns ----------------------------------------------------------------------------------

    @admin.display(description=_("job"))
    def shown_call(self, job: Any) -> str:
        """Return its handler, with the arguments where the user may see them."""
        if job.short_arguments is None:
            return str(job.handler)
        return inert(f"{job.handler}({job.short_arguments})")

    @admin.display(description=_("age"))
    def shown_age(self, job: Job) -> str:
        """Return how long ago it was enqueued."""
        return age(job.created_at)

    @admin.display(description=_("took"))
    def shown_took(self, job: Any) -> str:
        """Return how long its latest attempt ran."""
        return duration(job.seconds_taken)

    @admin.display(description=_("state"))
    def shown_state(self, job: Job) -> SafeString:
        """Return its state with the virtual ones."""
        status = job.status
        return badge(status, status.label)

    @admin.display(description=_("available at"))
    def shown_due(self, job: Job) -> Any:
        """Return when it is due, or the limit that it waits for."""
        limit = limits_awaited([job]).get(job.pk, "")
        if job.available_at != NEVER:
            return date_format(timezone.localtime(job.available_at), "DATETIME_FORMAT")
        return inert(_("waits for %s") % limit) if limit else "-"

    @admin.display(description=_("attempts"))
    def shown_attempts(self, job: Job) -> str:
        """Return the attempts and their limit."""
        return f"{job.attempts}/{job.max_attempts}"

    @admin.display(description=_("progress"))
    def shown_progress(self, job: Job) -> str:
        """Return the progress that the running handler has reported."""
        progress = progress_of([job.pk]).get(str(job.pk))
        if progress is None:
            return "-"
        percent = "" if progress.percent is None else f"{progress.percent} %"
        return inert(f"{percent} {progress.text}".strip())

    @admin.display(description=_("error"))
    def shown_error(self, job: Job) -> str:
        """Return its text."""
        return inert(job.error)

    @admin.display(description=_("payload"))
    def shown_payload(self, job: Job) -> SafeString:
        """Return the payload."""
        return show_value(redaction.shown_payload(job))

    @admin.display(description=_("result"))
    def shown_result(self, job: Job) -> SafeString | str:
        """Return the result."""
        return "-" if job.result is None else show_value(redaction.shown_result(job))

    @admin.display(description=_("headers"))
    def shown_headers(self, job: Job) -> SafeString:
        """Return the headers."""
        return show_value(redaction.shown_headers(job))
