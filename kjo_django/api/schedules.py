"""Schedules: list, show one with its next ticks and last runs, and add one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from django.http import Http404
from django.utils import timezone
from drf_spectacular.utils import OpenApiExample
from rest_framework import serializers, status
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response

from kjo_django.api.endpoints import ID, KjoView, endpoint, id_of, page_of
from kjo_django.api.fields import (
    JSONValue,
    NamedChoice,
    RequestShape,
    Text,
    columns,
    input_field,
    shape,
)
from kjo_django.api.paging import PageQuery, page
from kjo_django.enqueue.job_status import shown_states
from kjo_django.models import Schedule as ScheduleRow
from kjo_django.operations import redaction, schedules
from kjo_django.operations.actions import SCHEDULE_INPUTS
from kjo_django.runtime import jobs_database
from kjo_django.schedules import shown
from kjo_django.schedules.declarations import ScheduleFaults
from kjo_django.schedules.shown import ScheduleState
from kjo_django.states import JobStatus

TAG = "schedules"
COLUMNS = (
    *("name", "job", "cron", "every", "at", "timezone", "queue", "catch_up", "overlap", "jitter"),
    *("expires_after", "starts_at", "ends_at", "source", "is_enabled", "is_paused", "last_at"),
    *("stored_count", "late_count", "skipped_count", "changed_by"),
)
SHOWN_RUNS = 20

Schedule = shape(
    "Schedule",
    "A job that is enqueued at the ticks of a cron expression or an interval, or once.",
    id=serializers.UUIDField(),
    **columns(ScheduleRow, COLUMNS),
    state=NamedChoice("ScheduleState", ScheduleState),
    payload=JSONValue(help_text="null for users who may not see payloads."),
    overridden=serializers.ListField(
        child=serializers.CharField(), help_text="What an operator has changed of the code's."
    ),
    problem=serializers.CharField(
        allow_blank=True, help_text="Why its next tick cannot be stored; empty: nothing is known."
    ),
    next_at=serializers.DateTimeField(allow_null=True, help_text="null: there is no next tick."),
    late_seconds=serializers.FloatField(help_text="For how long its next tick has been due."),
    last_job=serializers.UUIDField(allow_null=True, help_text="null: none, or it was pruned."),
    last_status=NamedChoice("JobStatus", JobStatus.values, allow_null=True),
    last_seconds=serializers.FloatField(
        allow_null=True, help_text="How long its last job has run; null: it has not ended."
    ),
)
SchedulePage = page_of(Schedule)
Run = shape(
    "ScheduleRun",
    "A job that the schedule has made.",
    job=serializers.UUIDField(),
    status=NamedChoice("JobStatus", JobStatus.values),
    created_at=serializers.DateTimeField(),
    started_at=serializers.DateTimeField(allow_null=True),
    finished_at=serializers.DateTimeField(allow_null=True),
)
ScheduleDetail = shape(
    "ScheduleDetail",
    "A schedule with its next ticks and its last runs.",
    Schedule,
    next_runs=serializers.ListField(
        child=serializers.DateTimeField(), help_text="The next five ticks."
    ),
    runs=Run(many=True, help_text="The last 20 jobs that it has made, newest first."),
)
ScheduleQuery = shape(
    "ScheduleQuery",
    "Which schedules.",
    PageQuery,
    name=serializers.CharField(required=False, max_length=100, help_text="The exact name."),
)


NewSchedule = shape(
    "NewSchedule",
    "A schedule to add. It has one of `cron`, `every` and `at`.",
    RequestShape,
    name=Text(max_length=100),
    **{
        each.name: input_field(
            replace(each, is_required=True, is_nullable=False) if each.name == "job" else each
        )
        for each in SCHEDULE_INPUTS
    },
)
EXAMPLE = OpenApiExample(
    "Each night",
    value={
        "name": "cleanup",
        "job": "shop.cleanup",
        "payload": {"days": 30},
        "cron": "0 3 * * *",
        "timezone": "Europe/Berlin",
    },
    request_only=True,
)


@endpoint("schedules_list", TAG, ["view_schedule"], {200: SchedulePage}, query=ScheduleQuery)
def list_schedules(view: KjoView) -> Response:
    """List schedules, those added last first."""
    query = view.query(ScheduleQuery)
    rows = ScheduleRow.objects.using(jobs_database()).all()
    if "name" in query:
        rows = rows.filter(name=query["name"])
    found, cursor = page(rows, rows, cursor=query.get("cursor"), limit=query["limit"])
    return Response(SchedulePage({"results": summaries(view, found), "next_cursor": cursor}).data)


@endpoint(
    "schedules_read", TAG, ["view_schedule"], {200: ScheduleDetail}, path=[ID], problems=[404]
)
def read_schedule(view: KjoView, id: str) -> Response:
    """Tell of one schedule, its next ticks and its last runs."""
    row = find(id)
    jobs = shown.history(row, SHOWN_RUNS)
    status_of = shown_states(jobs)
    runs = [
        {"job": job.pk, "status": status_of[job.pk]}
        | {name: getattr(job, name) for name in ("created_at", "started_at", "finished_at")}
        for job in jobs
    ]
    answer = summaries(view, [row])[0] | {"next_runs": shown.next_runs(row), "runs": runs}
    return Response(ScheduleDetail(answer).data)


@endpoint(
    "schedules_add",
    TAG,
    ["view_schedule", "add_schedule"],
    {201: (Schedule, "It is added. `Location` is its address.")},
    method="POST",
    body=NewSchedule,
    examples=[EXAMPLE],
)
def add_schedule(view: KjoView) -> Response:
    """Add a schedule; give one of `cron`, `every` and `at`."""
    given = view.body(NewSchedule)
    audit = view.audit("Added.", is_new=True)
    try:
        row = schedules.add(given.pop("name"), actor=view.actor, on_changed=audit, **given)
    except ScheduleFaults as error:
        raise refused(error) from None
    return Response(
        Schedule(summaries(view, [row])[0]).data,
        status=status.HTTP_201_CREATED,
        headers={"Location": view.url_of("schedule", row.pk)},
    )


# --- Details --------------------------------------------------------------------------------------


def find(id: str) -> ScheduleRow:
    """Return a schedule.

    :raises Http404: there is none.
    """
    row = ScheduleRow.objects.using(jobs_database()).filter(pk=id_of(id)).first()
    if row is None:
        raise Http404
    return row


def summaries(view: KjoView, rows: Sequence[ScheduleRow]) -> list[dict[str, Any]]:
    """Return the members of schedules in a list."""
    jobs, now = shown.last_jobs(rows), timezone.now()
    found = []
    for row in rows:
        job = jobs.get(row.pk)
        members = shown.described(row, job, now)
        hidden = redaction.hidden_by(row.job)
        payload = redaction.redacted(row.payload, also=hidden) if view.sees_payloads else None
        found.append(
            members
            | {"payload": payload, "changed_by": row.changed_by, "last_job": members["last_job_id"]}
        )
    return found


def refused(faults: ScheduleFaults) -> ValidationError:
    """Return the problem of options that are wrong."""
    found = faults.faults.items()
    return ValidationError({name or "non_field_errors": text for name, text in found})


def restored(payload: Any, row: ScheduleRow) -> Any:
    """Return an edited payload with what was hidden in it.

    :raises ValidationError: something is marked as hidden that was not.
    """
    try:
        return redaction.restored(payload, row.payload)
    except ValueError as error:
        raise ValidationError({"payload": str(error)}) from None
