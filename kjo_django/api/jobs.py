"""Jobs: enqueue, list, look at one, wait for it, cancel it, run it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from django.db.models import QuerySet
from django.http import Http404
from django.urls import reverse
from drf_spectacular.utils import OpenApiExample
from rest_framework import status
from rest_framework.exceptions import PermissionDenied, ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from kjo_django import states
from kjo_django.api import job_shapes as shapes
from kjo_django.api.base import KjoView, id_of, may
from kjo_django.api.enqueueing import enqueue
from kjo_django.api.openapi import ID, documented
from kjo_django.api.showing import shown_payload, shown_result
from kjo_django.conf import get_settings
from kjo_django.engine.leases import lease_name
from kjo_django.exceptions import KjoError
from kjo_django.models import DeadLetter, Job, JobFailure
from kjo_django.operations import search
from kjo_django.operations.jobs import live_leases
from kjo_django.operations.jobs.search import JobFilter
from kjo_django.operations.jobs.waiting import Awaited, Waiter
from kjo_django.operations.progress import progress_of
from kjo_django.operations.redaction import hide_texts, shown_headers
from kjo_django.states import JobState, JobStatus
from kjo_django.store.transactions import jobs_database

TAG = "jobs"
HISTORY = 100
"""Failed attempts and dead letters shown of one job."""

_PLAIN = (
    *("id", "queue", "handler", "unique_id", "key", "state", "attempts", "max_attempts"),
    *("created_at", "available_at", "expires_at", "started_at", "finished_at"),
)
_DETAILS = (
    *("generation", "queued_at", "result_expires_at", "content_type"),
    *("topic", "partition", "offset"),
)
_ATTEMPT = (
    *("generation", "attempt", "worker", "error_type", "error"),
    *("started_at", "failed_at", "retry_at"),
)
_LETTER = ("id", "state", "reason", "failed_at", "closed_at", "note")

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


class JobsView(KjoView):
    """All jobs."""

    permissions: ClassVar = {"GET": ("view_job",), "POST": ("enqueue_job",)}

    @documented("jobs_list", TAG, {200: shapes.JobPage}, query=shapes.JobQuery)
    def get(self, request: Request) -> Response:
        """List jobs, newest first, without their payloads."""
        query = self.query(shapes.JobQuery)
        wanted = _filter(self, query)
        try:
            found = search.page(wanted, after=query.get("cursor"), size=query["limit"])
        except ValueError as error:
            raise ValidationError({"cursor": str(error)}) from None
        answer = {
            "results": summaries(self, found.rows),
            "next_cursor": found.next,
            "is_windowed": found.is_windowed,
        }
        return Response(shapes.JobPage(answer).data)

    @documented(
        "jobs_enqueue",
        TAG,
        {
            201: (shapes.Enqueued, "The job is stored. `Location` is its address."),
            200: (shapes.Enqueued, "Nothing was stored: the unique id is this job's."),
        },
        body=shapes.EnqueueBody,
        examples=[EXAMPLE],
    )
    def post(self, request: Request) -> Response:
        """Enqueue a job.

        With a `unique_id` it may be sent again at will: while the first job is open, and as long as
        its result is kept, the answer is that job. A cancelled or expired one begins anew.
        """
        result = enqueue(self.body(shapes.EnqueueBody), self.audit("Enqueued.", is_new=True))
        job = _rows().get(pk=result.job_id)
        answer = {name: getattr(job, name) for name in _PLAIN} | {"is_new": result.is_new}
        if not result.is_new and not self.sees_payloads:
            answer["key"] = ""  # of what somebody else has enqueued
        return Response(
            shapes.Enqueued(answer).data,
            status=status.HTTP_201_CREATED if result.is_new else status.HTTP_200_OK,
            headers={"Location": job_url(request, job.pk)},
        )


class JobView(KjoView):
    """One job."""

    permissions: ClassVar = {"GET": ("view_job",)}

    @documented("jobs_read", TAG, {200: shapes.JobDetail}, path=[ID], problems=[404])
    def get(self, request: Request, id: str) -> Response:
        """Tell a job's state, history and progress, and to those who may see them its payload and
        result."""
        return Response(shapes.JobDetail(detail(self, id)).data)


class WaitView(KjoView):
    """The end of one job."""

    permissions: ClassVar = {"GET": ("view_job",)}

    @documented(
        "jobs_wait",
        TAG,
        {
            200: (shapes.JobDetail, "It has ended: completed, failed or cancelled."),
            202: (shapes.JobDetail, "It is still open; ask again."),
        },
        path=[ID],
        query=shapes.WaitQuery,
        problems=[404],
    )
    def get(self, request: Request, id: str) -> Response:
        """Wait until a job has ended, up to some seconds."""
        seconds = self.query(shapes.WaitQuery)["timeout"]
        job = find(id)
        if job.state in states.OPEN and seconds:
            try:
                with Waiter(seconds, releases=True) as waiter:
                    waiter.wait(Awaited(job.pk, str(job.pk)))
            except KjoError:
                pass  # however it ended, or did not: the row below tells
        told = detail(self, id)
        is_open = told["state"] in states.OPEN
        code = status.HTTP_202_ACCEPTED if is_open else status.HTTP_200_OK
        return Response(shapes.JobDetail(told).data, status=code)


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


def job_url(request: Request, id: Any) -> str:
    """Return the address of a job, wherever the project has put ours."""
    match = request.resolver_match
    return reverse(f"{match.namespace if match else 'kjo_django_api'}:job", args=(id,))


def _filter(view: KjoView, query: dict[str, Any]) -> JobFilter:
    """Return what is looked for: the search, and each parameter in it.

    :raises ValidationError: they contradict each other, or the search cannot be understood.
    """
    try:
        found = search.parse(query.get("q", ""))
    except ValueError as error:
        raise ValidationError({"q": str(error)}) from None
    given = {name: query[name] for name in shapes.SEARCHED if name in query}
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


def statuses(rows: Sequence[Job]) -> dict[Any, JobStatus]:
    """Return what people are shown as the state of each, with one question about leases."""
    conf = get_settings()
    leases = {
        row.pk: lease_name(conf.queue(row.queue), row.message_id)
        for row in rows
        if row.state in states.OPEN
    }
    live = live_leases(list(leases.values()))
    return {row.pk: row.status_with(leased=leases.get(row.pk) in live) for row in rows}


def summaries(view: KjoView, rows: Sequence[Job]) -> list[dict[str, Any]]:
    """Return what is told this user of each job in a list."""
    status_of = statuses(rows)
    if not view.sees_payloads:
        hide_texts(rows)
    return [
        {
            **{name: getattr(row, name) for name in _PLAIN},
            "status": status_of[row.pk],
            "error": row.error or None,
        }
        for row in rows
    ]


def detail(view: KjoView, id: str) -> dict[str, Any]:
    """Return all that this user may be told of one job."""
    rows = Job.objects.using(jobs_database())
    if not view.sees_payloads:
        rows = rows.defer("payload", "result")
    job = rows.filter(pk=id_of(id)).first()
    if job is None:
        raise Http404
    progress = progress_of([job.pk]).get(str(job.pk)) if job.state in states.OPEN else None
    answer: dict[str, Any] = {
        **summaries(view, [job])[0],
        **{name: getattr(job, name) for name in _DETAILS},
        "progress": progress and {"percent": progress.percent, "text": progress.text},
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
    names = (*_ATTEMPT, "traceback") if sees_payloads else _ATTEMPT
    rows = JobFailure.objects.using(jobs_database()).filter(job=job).order_by("-pk").only(*names)
    found = list(rows[:HISTORY])[::-1]
    if not sees_payloads:
        hide_texts(found)
    return shapes.dicts(found, names)


def _letters(job: Job) -> list[dict[str, Any]]:
    rows = DeadLetter.objects.using(jobs_database()).filter(job=job).order_by("-pk")
    return shapes.dicts(list(rows.only(*_LETTER)[:HISTORY])[::-1], _LETTER)
