"""The system: health checks, figures over time from aggregates, processed events, and the erasure
of personal data."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.http import Http404
from django.utils import timezone, translation
from drf_spectacular.utils import OpenApiExample
from rest_framework import serializers, status
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response

from kjo_django.api.endpoints import ID, KjoView, endpoint, id_of
from kjo_django.api.fields import (
    Flag,
    JSONValue,
    NamedChoice,
    QueryNumber,
    RequestShape,
    Text,
    columns,
    shape,
)
from kjo_django.api.problems import Conflict
from kjo_django.api.showing import shown_event
from kjo_django.models import ProcessedEvent as ProcessedEventRow
from kjo_django.operations.monitoring import metrics
from kjo_django.operations.monitoring.health import Thresholds, health, is_healthy
from kjo_django.operations.monitoring.metrics import Summary
from kjo_django.personal_data.erasure import MAX_REFERENCE, Mode, described, start_erasure
from kjo_django.personal_data.person import MAX_LENGTH, MOST, Person
from kjo_django.runtime import jobs_database
from kjo_django.states import JobStatus

SYSTEM, METRICS = "system", "metrics"
TIMEOUT = 5.0
"""Seconds for all checks."""
MOST_EVENTS = 100
HOUR, DAY = 3600, 86_400


# --- Health and processed events ------------------------------------------------------------------


Check = shape(
    "Check",
    "One check, in the order of their dependencies.",
    name=serializers.CharField(),
    ok=serializers.BooleanField(allow_null=True, help_text="null: not checked."),
    detail=serializers.CharField(allow_blank=True),
    fix=serializers.CharField(allow_blank=True, help_text="What to do about it."),
)
Health = shape(
    "Health",
    "Whether all is well.",
    healthy=serializers.BooleanField(),
    timestamp=serializers.DateTimeField(),
    checks=Check(many=True),
)


HealthQuery = shape(
    "HealthQuery",
    "What is still well.",
    RequestShape,
    max_lag=serializers.IntegerField(
        required=False, min_value=0, max_value=2**31, help_text="Messages a queue may be behind."
    ),
    max_failure_rate=QueryNumber(required=False, min_value=0, max_value=1),
    max_idle=QueryNumber(
        required=False, min_value=1, max_value=86_400, help_text="Seconds due work may wait."
    ),
)


EVENT_COLUMNS = ("id", "event_id", "event_type", "service_name", "processed_at")
ProcessedEvent = shape(
    "ProcessedEvent",
    "An event or message whose effects are committed.",
    **columns(ProcessedEventRow, EVENT_COLUMNS),
    event_data=JSONValue(required=False, help_text="Redacted; with the permission `view_payload`."),
)
ProcessedEvents = shape(
    "ProcessedEvents",
    "The effects of one event: at most 100.",
    results=ProcessedEvent(many=True),
)


EventQuery = shape(
    "EventQuery",
    "Which event, and which consumer's effects.",
    RequestShape,
    event_id=serializers.CharField(
        max_length=255, trim_whitespace=False, help_text="Exactly as the event or message has it."
    ),
    service_name=serializers.CharField(max_length=100, required=False),
    event_type=serializers.CharField(max_length=100, required=False),
)


@endpoint(
    "health",
    SYSTEM,
    ["view_job"],
    {200: (Health, "All is well."), 503: (Health, "Something is not; `fix` says what to do.")},
    query=HealthQuery,
)
def read_health(view: KjoView) -> Response:
    """Check settings, database, coordination, transports, topics, relay, workers and lag."""
    query = view.query(HealthQuery)
    limits: dict[str, Any] = {}
    if "max_lag" in query:
        limits["lag"] = query["max_lag"]
    if "max_failure_rate" in query:
        limits["failure_rate"] = query["max_failure_rate"]
    if "max_idle" in query:
        limits["idle"] = timedelta(seconds=query["max_idle"])
    with translation.override(None):  # as all of this API
        checks = health(TIMEOUT, Thresholds(**limits))
    is_well = is_healthy(checks)
    answer = {"healthy": is_well, "timestamp": timezone.now(), "checks": checks}
    code = status.HTTP_200_OK if is_well else status.HTTP_503_SERVICE_UNAVAILABLE
    return Response(Health(answer).data, status=code)


@endpoint(
    "processed_events_lookup",
    SYSTEM,
    ["view_processedevent"],
    {200: ProcessedEvents},
    query=EventQuery,
)
def find_events(view: KjoView) -> Response:
    """Look up an event by its exact id: which consumers' effects of it are committed."""
    query = view.query(EventQuery)
    names = (*EVENT_COLUMNS, *(["event_data"] if view.sees_payloads else []))
    rows = ProcessedEventRow.objects.using(jobs_database()).filter(**query).order_by("pk")
    results = [
        {name: getattr(row, name) for name in names} for row in rows.only(*names)[:MOST_EVENTS]
    ]
    for row in results:
        if "event_data" in row:
            row["event_data"] = shown_event(row["event_data"], row["event_type"])
    return Response(ProcessedEvents({"results": results}).data)


# --- Metrics --------------------------------------------------------------------------------------


def seconds() -> serializers.FloatField:
    """Return a field of seconds, which is null where nothing was measured."""
    return serializers.FloatField(allow_null=True)


Figures = shape(
    "Figures",
    "What was done in some time.",
    completed=serializers.IntegerField(),
    retried=serializers.IntegerField(help_text="Attempts that failed and are repeated."),
    failed=serializers.IntegerField(),
    duplicate=serializers.IntegerField(help_text="Dropped: they had taken effect before."),
    skipped=serializers.IntegerField(help_text="Meant for others, or not to be run any more."),
    unused_permit=serializers.IntegerField(
        help_text="Permits of a rate whose job did not start in time."
    ),
)
Times = shape(
    "Times",
    "What was done in some time, and how long it took, in seconds.",
    Figures,
    run_p50=seconds(),
    run_p95=seconds(),
    run_p99=seconds(),
    wait_p50=seconds(),
    wait_p95=seconds(),
    wait_p99=seconds(),
)
Point = shape(
    "Point",
    "The figures of one time of a series.",
    Times,
    time=serializers.DateTimeField(help_text="When it begins."),
    minutes=serializers.FloatField(help_text="How long it is; the present one is shorter."),
    lag=serializers.IntegerField(allow_null=True),
)
Totals = shape(
    "Totals",
    "The sums of the whole time, and the present rate and lag.",
    Figures,
    per_minute=serializers.FloatField(help_text="Jobs completed, of the last whole minutes."),
    lag=serializers.IntegerField(
        allow_null=True, help_text="null: not known of every queue that is consumed."
    ),
)
Deploy = shape(
    "Deploy",
    "The first start of a release.",
    time=serializers.DateTimeField(),
    release=serializers.CharField(),
)
Metrics = shape(
    "Metrics",
    "Figures over time.",
    width_seconds=serializers.FloatField(help_text="Of each point."),
    points=Point(many=True, help_text="Evenly spaced, the oldest first, none left out."),
    totals=Totals(help_text="Of all queues and handlers."),
    deploys=Deploy(many=True),
)
MetricSummary = shape(
    "MetricSummary",
    "The figures of a queue or a handler.",
    Times,
    name=serializers.CharField(),
    sparkline=serializers.ListField(
        child=serializers.IntegerField(), help_text="Completed in each minute, the oldest first."
    ),
)
MetricSummaries = shape(
    "MetricSummaries",
    "The figures of each, by name.",
    results=MetricSummary(many=True),
)


MetricQuery = shape(
    "MetricQuery",
    "Which time, and what of it.",
    RequestShape,
    length=serializers.IntegerField(
        required=False,
        default=HOUR,
        min_value=60,
        max_value=31 * DAY,
        help_text="Seconds up to now: told by the minute up to two hours, by the quarter up to a "
        "day, else by the hour.",
    ),
    queue=serializers.CharField(max_length=100, required=False, help_text="Points of it only."),
    handler=serializers.CharField(max_length=100, required=False, help_text="Points of it only."),
)


SummaryQuery = shape(
    "SummaryQuery",
    "Which time.",
    RequestShape,
    length=serializers.IntegerField(
        required=False, default=HOUR, min_value=60, max_value=2 * HOUR, help_text="Seconds."
    ),
)


@endpoint("metrics_read", METRICS, ["view_job"], {200: Metrics}, query=MetricQuery)
def read_metrics(view: KjoView) -> Response:
    """Tell what was done in the time up to now, and how long it took."""
    query = view.query(MetricQuery)
    length = timedelta(seconds=query.pop("length"))
    series = metrics.series(length, **query)
    answer = {
        "width_seconds": series.width.total_seconds(),
        "points": series.points,
        "totals": metrics.totals(length),
        "deploys": metrics.deploys(length),
    }
    return Response(Metrics(answer).data)


@endpoint("metrics_queues", METRICS, ["view_job"], {200: MetricSummaries}, query=SummaryQuery)
def metrics_by_queue(view: KjoView) -> Response:
    """Tell what was done in each queue."""
    return summaries(metrics.by_queue(length_of(view)))


@endpoint("metrics_handlers", METRICS, ["view_job"], {200: MetricSummaries}, query=SummaryQuery)
def metrics_by_handler(view: KjoView) -> Response:
    """Tell what each handler did."""
    return summaries(metrics.by_handler(length_of(view)))


def length_of(view: KjoView) -> timedelta:
    """Return the requested period."""
    return timedelta(seconds=view.query(SummaryQuery)["length"])


def summaries(found: Mapping[str, Summary]) -> Response:
    """Answer with the figures of each."""
    names = [name for name in MetricSummary().fields if name != "name"]
    results: list[dict[str, Any]] = [
        {"name": name} | {each: getattr(figures, each) for each in names}
        for name, figures in sorted(found.items())
    ]
    return Response(MetricSummaries({"results": results}).data)


# --- Personal data --------------------------------------------------------------------------------

ERASE = "erase_personal_data"


def _texts(about: str) -> serializers.Field:
    text = Text(max_length=MAX_LENGTH)
    return serializers.ListField(child=text, max_length=MOST, default=list, help_text=about)


ErasureRequest = shape(
    "ErasureRequest",
    "Who is meant, by at least one key, id or field, and what becomes of the rows.",
    RequestShape,
    keys=_texts("Of jobs, dead letters and messages."),
    ids=_texts("Unique ids, and ids of jobs and messages."),
    fields=_texts("Values in payloads, such as `customer.email=ada@example.org`."),
    mode=NamedChoice("ErasureMode", list(Mode), default=Mode.DELETE.value),
    cancel=Flag(default=False, help_text="Also cancel open jobs and workflows."),
    dry_run=Flag(default=False, help_text="Only count."),
    reference=Text(
        default="", allow_blank=True, max_length=MAX_REFERENCE, help_text="For the log."
    ),
)
ErasureReport = shape(
    "ErasureReport",
    "What was found.",
    dry_run=serializers.BooleanField(),
    mode=NamedChoice("ErasureMode", list(Mode)),
    erased=serializers.DictField(child=serializers.IntegerField(), help_text="Rows by kind."),
    kept=serializers.DictField(child=serializers.IntegerField(), help_text="Rows by reason."),
    unreadable=serializers.DictField(
        child=serializers.IntegerField(), help_text="Rows whose contents nobody could read."
    ),
    complete=serializers.BooleanField(help_text="Whether no row of the person's is kept."),
    left=serializers.ListField(child=serializers.CharField(), help_text="What is left elsewhere."),
)
Erasure = shape(
    "Erasure",
    "A request to erase what is kept of a person. It does not say who that is.",
    id=serializers.UUIDField(help_text="Of the job that does it."),
    state=NamedChoice("JobStatus", JobStatus.values),
    asked_at=serializers.DateTimeField(),
    actor=serializers.CharField(),
    found_by=serializers.CharField(),
    mode=NamedChoice("ErasureMode", list(Mode)),
    cancel=serializers.BooleanField(),
    dry_run=serializers.BooleanField(),
    reference=serializers.CharField(allow_blank=True),
    report=ErasureReport(allow_null=True, help_text="null: not yet, or no longer."),
)
ERASURE_EXAMPLE = OpenApiExample(
    "Count first",
    value={"fields": ["customer.email=ada@example.org"], "dry_run": True, "reference": "R-17"},
    request_only=True,
)


@endpoint(
    "personal_data_erase",
    SYSTEM,
    [ERASE],
    {202: (Erasure, "A job does it; `Location` is the address of its report.")},
    method="POST",
    body=ErasureRequest,
    problems=[409],
    examples=[ERASURE_EXAMPLE],
)
def erase_personal_data(view: KjoView) -> Response:
    """Delete or redact what the tables hold of a person, or count it."""
    given = view.body(ErasureRequest)
    try:
        person = Person.parse({name: given.pop(name) for name in ("keys", "ids", "fields")})
    except ValueError as error:
        raise ValidationError(str(error)) from None
    try:
        row = start_erasure(person, actor=view.actor, **given)
    except ValueError as error:
        raise Conflict(str(error)) from None
    view.audit(f"Asked to erase personal data, found by {person}.", is_new=True)([row])
    headers = {"Location": view.url_of("erasure", row.pk)}
    (facts,) = described([row.pk])
    return Response(Erasure(facts).data, status=status.HTTP_202_ACCEPTED, headers=headers)


@endpoint("personal_data_read", SYSTEM, [ERASE], {200: Erasure}, path=[ID], problems=[404])
def read_erasure(view: KjoView, id: str) -> Response:
    """Tell of one request to erase, and what was found."""
    found = described([id_of(id)])
    if not found:
        raise Http404
    return Response(Erasure(found[0]).data)
