"""Jobs: enqueue, list, show one, and wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from django.db.models import QuerySet
from django.http import Http404
from drf_spectacular.utils import OpenApiExample
from rest_framework import serializers, status
from rest_framework.exceptions import PermissionDenied, ValidationError
from rest_framework.response import Response

from kjo_django import states
from kjo_django.api.endpoints import ID, KjoView, endpoint, id_of, may, page_of
from kjo_django.api.fields import (
    JSONObject,
    JSONValue,
    Moment,
    NamedChoice,
    QueryNumber,
    RequestShape,
    Seconds,
    Text,
    Whole,
    columns,
    shape,
)
from kjo_django.api.paging import page_limit
from kjo_django.api.showing import shown_payload, shown_result
from kjo_django.enqueue.handle import JobHandle
from kjo_django.enqueue.job_status import limits_awaited, progress_of, shown_states
from kjo_django.enqueue.waiting import Awaited, Waiter
from kjo_django.exceptions import KjoError, PayloadError
from kjo_django.models import NEVER, DeadLetter, DeadLetterState, Job, JobFailure
from kjo_django.operations import enqueueing, search
from kjo_django.operations.redaction import hide_texts, shown_headers
from kjo_django.operations.search import JobFilter
from kjo_django.runtime import jobs_database
from kjo_django.states import JobState, JobStatus
from kjo_django.values import MAX_PRIORITY
from kjo_django.workflows.lists import workflow_of

TAG = "jobs"
HISTORY = 100
"""Most failed attempts and dead letters of one job in an answer."""
LARGEST = 2**31 - 1
"""The largest number in a column of four bytes."""
WITH_PAYLOADS = "With the permission `view_payload`."

# --- Requests -------------------------------------------------------------------------------------


EnqueueBody = shape(
    "EnqueueBody",
    "A job to enqueue: the handler's name, its arguments, and what `using()` takes.",
    RequestShape,
    handler=Text(max_length=100, help_text="As registered, such as `shop.send_confirmation`."),
    payload=JSONObject(default=dict, help_text="The handler's arguments by name."),
    unique_id=Text(
        max_length=255,
        required=False,
        allow_null=True,
        help_text="One job per queue and id: a second request is answered with the first's job.",
    ),
    key=Text(
        max_length=255,
        required=False,
        allow_null=True,
        allow_blank=True,
        help_text="Jobs of one key run one at a time and in order.",
    ),
    queue=Text(max_length=100, required=False, allow_null=True),
    delay=Seconds(required=False, allow_null=True, help_text="Seconds; not with `run_at`."),
    run_at=Moment(required=False, allow_null=True),
    expires_at=Moment(
        required=False, allow_null=True, help_text="Not started by then, never started."
    ),
    priority=Whole(
        required=False,
        allow_null=True,
        min_value=-MAX_PRIORITY,
        max_value=MAX_PRIORITY,
        help_text="From -100 to 100, the highest first; null: that of the job.",
    ),
    max_attempts=Whole(required=False, allow_null=True, min_value=1, max_value=LARGEST),
    result_ttl=Seconds(
        required=False,
        allow_null=True,
        min_value=0.001,
        help_text="Seconds its result or error is kept.",
    ),
)


MAX_SEARCH = 4000
SEARCHED = ("state", "queue", "handler", "key", "unique_id")


JobQuery = shape(
    "JobQuery",
    "Which jobs. A text that ends in `*` is a beginning. Ids, a time of creation and every "
    "state but completed are served by an index; for the rest the newest 100,000 of these are "
    "looked at, and `is_windowed` says so.",
    RequestShape,
    q=serializers.CharField(
        max_length=MAX_SEARCH,
        required=False,
        help_text="A search, such as `state:failed handler:shop.* args.order_id:7 since:2h`.",
    ),
    state=NamedChoice("JobStatus", JobStatus.values, required=False),
    queue=serializers.CharField(max_length=100, required=False),
    handler=serializers.CharField(max_length=100, required=False),
    key=serializers.CharField(max_length=255, required=False),
    unique_id=serializers.CharField(max_length=255, required=False, trim_whitespace=False),
    cursor=serializers.CharField(
        max_length=100, required=False, help_text="`next_cursor` of the page before this one."
    ),
    limit=page_limit(),
)


WaitQuery = shape(
    "WaitQuery",
    "How long to wait.",
    RequestShape,
    timeout=QueryNumber(
        required=False, default=20.0, min_value=0, max_value=30, help_text="Seconds."
    ),
)


# --- Answers --------------------------------------------------------------------------------------

COLUMNS = (
    *("id", "queue", "handler", "unique_id", "key", "priority", "attempts", "max_attempts"),
    *("created_at", "available_at", "expires_at", "started_at", "finished_at"),
)
DETAILS = (
    *("generation", "queued_at", "worker", "result_expires_at", "content_type"),
    *("topic", "partition", "offset"),
)
OF_ATTEMPTS = (
    *("generation", "attempt", "worker", "error_type", "error"),
    *("started_at", "failed_at", "retry_at"),
)
OF_LETTERS = ("id", "reason", "failed_at", "closed_at", "note")

JobShape = shape(
    "Job",
    "A job.",
    **columns(Job, COLUMNS)
    | {
        "available_at": serializers.DateTimeField(
            allow_null=True, help_text="When it is due; null: when its limit lets it start."
        )
    },
    state=NamedChoice("JobState", JobState.values, help_text="As stored."),
    status=NamedChoice(
        "JobStatus", JobStatus.values, help_text="The state with `scheduled` and `processing`."
    ),
    error=serializers.CharField(allow_null=True),
    waits_for=serializers.CharField(
        allow_null=True,
        help_text="The limit it is in line for, as `rate 5/s of job:shop.call_partner`, or null.",
    ),
)
JobPage = shape(
    "JobPage",
    "A page of jobs.",
    page_of(JobShape),
    is_windowed=serializers.BooleanField(
        help_text="Whether older jobs were not looked at, which may fit as well."
    ),
)
Enqueued = shape(
    "Enqueued",
    "What became of a request to enqueue.",
    **columns(Job, ("id", "queue", "handler", "unique_id")),
    is_new=serializers.BooleanField(
        help_text="false: the id was taken; this is the job that has it."
    ),
    state=NamedChoice("JobState", JobState.values),
)
Progress = shape(
    "Progress",
    "How far a running job says it is.",
    percent=serializers.FloatField(allow_null=True),
    text=serializers.CharField(allow_blank=True),
)
Attempt = shape(
    "Attempt",
    "A failed attempt.",
    **columns(JobFailure, OF_ATTEMPTS),
    traceback=serializers.CharField(allow_blank=True, required=False, help_text=WITH_PAYLOADS),
    log=serializers.CharField(allow_blank=True, required=False, help_text=WITH_PAYLOADS),
)
JobLetter = shape(
    "JobLetter",
    "A dead letter of a job.",
    **columns(DeadLetter, OF_LETTERS),
    state=NamedChoice("DeadLetterState", DeadLetterState.values),
)
JobDetail = shape(
    "JobDetail",
    "A job with its history.",
    JobShape,
    **columns(Job, DETAILS)
    | {"generation": serializers.IntegerField(help_text="Grows with every requeue.")},
    workflow=serializers.UUIDField(allow_null=True, help_text="Whose step it is; null: of none."),
    progress=Progress(allow_null=True),
    failures=Attempt(many=True, help_text="The newest 100 failed attempts, oldest first."),
    dead_letters=JobLetter(
        many=True,
        required=False,
        help_text="The newest 100; with the permission `view_deadletter`.",
    ),
    payload=JSONValue(required=False, help_text="Redacted; with the permission `view_payload`."),
    result=JSONValue(
        required=False, help_text="Of a completed job; with the permission `view_payload`."
    ),
    headers=serializers.DictField(
        child=serializers.CharField(),
        required=False,
        help_text="Sent along; with the permission `view_payload`.",
    ),
)
JobOutcome = shape(
    "JobOutcome",
    "What became of a request about a job, and the job after it.",
    outcome=serializers.CharField(),
    job=JobShape(),
)


# --- Endpoints ------------------------------------------------------------------------------------

EXAMPLE = OpenApiExample(
    "A confirmation, once",
    value={
        "handler": "shop.send_confirmation",
        "payload": {"order_id": 7},
        "unique_id": "order-7",
        "delay": 60,
    },
    request_only=True,
)


@endpoint("jobs_list", TAG, ["view_job"], {200: JobPage}, query=JobQuery)
def list_jobs(view: KjoView) -> Response:
    """List jobs, newest first, without their payloads."""
    query = view.query(JobQuery)
    wanted = _filter(view, query)
    try:
        found = search.page(wanted, after=query.get("cursor"), size=query["limit"])
    except ValueError as error:
        raise ValidationError({"cursor": str(error)}) from None
    answer = {
        "results": summaries(view, found.rows),
        "next_cursor": found.next,
        "is_windowed": found.is_windowed,
    }
    return Response(JobPage(answer).data)


@endpoint(
    "jobs_enqueue",
    TAG,
    ["enqueue_job"],
    {
        201: (Enqueued, "The job is stored. `Location` is its address."),
        200: (Enqueued, "Nothing was stored: the unique id is this job's."),
    },
    method="POST",
    body=EnqueueBody,
    examples=[EXAMPLE],
)
def enqueue_job(view: KjoView) -> Response:
    """Enqueue a job.

    With a `unique_id` it may be sent again at will: while the first job is open, and as long as
    its result is kept, the answer is that job. A cancelled or expired one begins anew.
    """
    result = enqueue(view.body(EnqueueBody), view.audit("Enqueued.", is_new=True))
    job = _rows().using(result.database).get(pk=result.job_id)
    place = view.url_of("job", job.pk, result.database)
    answer = {name: getattr(job, name) for name in (*COLUMNS, "state")} | {"is_new": result.is_new}
    if not result.is_new and not view.sees_payloads:
        answer["key"] = ""  # of what somebody else has enqueued
    return Response(
        Enqueued(answer).data,
        status=status.HTTP_201_CREATED if result.is_new else status.HTTP_200_OK,
        headers={"Location": place},
    )


@endpoint("jobs_read", TAG, ["view_job"], {200: JobDetail}, path=[ID], problems=[404])
def read_job(view: KjoView, id: str) -> Response:
    """Tell a job's state, history and progress, and to those who may see them its payload and
    result."""
    return Response(JobDetail(detail(view, id)).data)


@endpoint(
    "jobs_wait",
    TAG,
    ["view_job"],
    {
        200: (JobDetail, "It has ended: completed, failed or cancelled."),
        202: (JobDetail, "It is still open; ask again."),
    },
    path=[ID],
    query=WaitQuery,
    problems=[404],
)
def wait_for_job(view: KjoView, id: str) -> Response:
    """Wait until a job has ended, up to some seconds."""
    seconds = view.query(WaitQuery)["timeout"]
    job = find(id)
    if job.state in states.OPEN and seconds:
        try:
            with Waiter(seconds, releases=True) as waiter:
                waiter.wait(Awaited(job.pk, str(job.pk)))
        except KjoError:
            pass  # however it ended, or did not: the row below says
    found = detail(view, id)
    is_open = found["state"] in states.OPEN
    code = status.HTTP_202_ACCEPTED if is_open else status.HTTP_200_OK
    return Response(JobDetail(found).data, status=code)


# --- Enqueueing -----------------------------------------------------------------------------------

OPTIONS = (
    *("key", "queue", "priority", "delay", "run_at", "expires_at"),
    *("max_attempts", "result_ttl"),
)


def enqueue(body: dict[str, Any], on_stored: Callable[[Sequence[Job]], None]) -> JobHandle[Any]:
    """Store the job in a validated body.

    :raises ValidationError: there is no such handler, or it does not take these arguments or
        options.
    """
    options = {name: body[name] for name in OPTIONS if body.get(name) is not None}
    options["id"] = body.get("unique_id")
    try:
        return enqueueing.enqueue(body["handler"], body["payload"], options, on_stored=on_stored)
    except LookupError as error:
        raise ValidationError({"handler": str(error)}, code="unknown") from None
    except TypeError as error:
        raise ValidationError({"payload": str(error)}, code="arguments") from None
    except PayloadError as error:
        raise ValidationError({"payload": str(error)}) from None
    except ValueError as error:
        raise ValidationError(str(error)) from None


# --- Details --------------------------------------------------------------------------------------


def _rows() -> QuerySet[Job]:
    return Job.objects.using(jobs_database()).defer("payload", "result")


def find(id: str) -> Job:
    """Return a job without its large columns.

    :raises Http404: there is none.
    """
    job = _rows().filter(pk=id_of(id)).first()
    if job is None:
        raise Http404
    return job


def _filter(view: KjoView, query: dict[str, Any]) -> JobFilter:
    """Return the search of a query, and each of its parameters.

    :raises ValidationError: they contradict each other, or the search cannot be parsed.
    """
    try:
        found = search.parse(query.get("q", ""))
    except ValueError as error:
        raise ValidationError({"q": str(error)}) from None
    given = {name: query[name] for name in SEARCHED if name in query}
    twice = [name for name in given if getattr(found, name) is not None]
    if twice:
        raise ValidationError(dict.fromkeys(twice, "Given in `q` too."))
    found = replace(found, **given)
    if view.sees_payloads:
        return found
    try:
        return found.limited()
    except ValueError as error:
        raise PermissionDenied(str(error)) from None


def summaries(view: KjoView, rows: Sequence[Job]) -> list[dict[str, Any]]:
    """Return the members of each job in a list, for this user."""
    status_of, limits = shown_states(rows), limits_awaited(rows)
    if not view.sees_payloads:
        hide_texts(rows)
    return [
        {
            **{name: getattr(row, name) for name in (*COLUMNS, "state")},
            "status": status_of[row.pk],
            "error": row.error or None,
            "waits_for": limits.get(row.pk),
            **({"available_at": None} if row.available_at == NEVER else {}),
        }
        for row in rows
    ]


def detail(view: KjoView, id: str) -> dict[str, Any]:
    """Return all members of one job that this user may see."""
    rows = Job.objects.using(jobs_database())
    if not view.sees_payloads:
        rows = rows.defer("payload", "result")
    job = rows.filter(pk=id_of(id)).first()
    if job is None:
        raise Http404
    progress = progress_of([job.pk]).get(str(job.pk)) if job.state in states.OPEN else None
    answer: dict[str, Any] = {
        **summaries(view, [job])[0],
        **{name: getattr(job, name) for name in DETAILS},
        "progress": progress and {"percent": progress.percent, "text": progress.text},
        "workflow": (found := workflow_of(job)) and found.pk,
        "failures": _failures(job, view.sees_payloads),
    }
    if may(view.request, "view_deadletter"):
        answer["dead_letters"] = _letters(job)
    if view.sees_payloads:
        answer["payload"] = shown_payload(job)
        answer["headers"] = {name: str(text) for name, text in shown_headers(job).items()}
        if job.state == JobState.COMPLETED:
            answer["result"] = shown_result(job)
    return answer


def _failures(job: Job, sees_payloads: bool) -> list[dict[str, Any]]:
    names = (*OF_ATTEMPTS, "traceback", "log") if sees_payloads else OF_ATTEMPTS
    rows = JobFailure.objects.using(jobs_database()).filter(job=job).order_by("-pk").only(*names)
    found = list(rows[:HISTORY])[::-1]
    if not sees_payloads:
        hide_texts(found)
    return _dicts(found, names)


def _letters(job: Job) -> list[dict[str, Any]]:
    rows = DeadLetter.objects.using(jobs_database()).filter(job=job).order_by("-pk")
    names = (*OF_LETTERS, "state")
    return _dicts(list(rows.only(*names)[:HISTORY])[::-1], names)


def _dicts(rows: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
    return [{name: getattr(row, name) for name in names} for row in rows]
