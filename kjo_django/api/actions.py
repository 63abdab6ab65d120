"""Endpoints of the table of actions: their bodies and their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.http import Http404
from django.urls import URLPattern, path
from drf_spectacular.utils import OpenApiExample
from rest_framework import serializers, status
from rest_framework.exceptions import PermissionDenied, ValidationError
from rest_framework.response import Response

from kjo_django.api import dead_letters as letters
from kjo_django.api import jobs, limits, queues, schedules, workers, workflows
from kjo_django.api.endpoints import ID, KjoView, Method, address, endpoint
from kjo_django.api.fields import (
    NamedChoice,
    RequestShape,
    columns,
    input_field,
    shape,
)
from kjo_django.api.problems import Conflict, Unavailable
from kjo_django.messages.serializers import JSON, serializer_for
from kjo_django.models import DeadLetter, Job
from kjo_django.operations import bulk
from kjo_django.operations.actions import Action, Kind, Report, Subject, Surface, actions_of
from kjo_django.operations.dead_letters import PREVIEW_LIMIT, ReplayReport, preview, select
from kjo_django.operations.jobs import ChangeResult
from kjo_django.operations.queues import overview
from kjo_django.schedules.declarations import ScheduleFaults
from kjo_django.store.counting import bounded_count

REFUSALS = {
    "processing": "The job is being processed; try again later.",
    "taken": "Another job of that queue has its unique id.",
    "other_kind": "It is no job of a handler; it stays in the queue of its kind.",
    "gone": "The worker has stopped, or shows no sign of life.",
    "declared": "The code declares the schedule and would bring it back.",
    "broken": "The job of the schedule cannot be enqueued; `problem` tells why.",
    "waiting": "The job waits for other steps of its workflow, which alone release it.",
    "limited": "The job waits for a limit, which alone releases it; change the limit.",
    "stopping": "The worker was asked to stop, which nothing undoes.",
}
"""By outcome: the reason why one row was not changed."""


# --- Bodies ---------------------------------------------------------------------------------------

NoBody = shape("NoBody", "Nothing: an empty body, or an object without members.", RequestShape)


def body_of(action: Action) -> type[Any]:
    """Return the body of an action on one row."""
    members = {each.name: input_field(each) for each in action.inputs if not each.is_for_many}
    if not members:
        return NoBody
    name = action.rest.body or f"{_camel(action.name)}Body"
    return shape(name, action.rest.about, RequestShape, **members)


def bulk_body_of(action: Action) -> type[Any]:
    """Return the body of an action on many dead letters."""
    members = {each.name: input_field(each) for each in action.inputs}
    name = f"Bulk{_camel(action.name)}Body"
    return shape(name, action.rest.about_many, letters.Selection, **members)


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


# --- Answers --------------------------------------------------------------------------------------

LetterOutcome = shape(
    "LetterOutcome",
    "What became of a request about a dead letter, and the letter after it.",
    outcome=serializers.CharField(),
    dead_letter=letters.Letter(),
)
QueueOutcome = shape(
    "QueueOutcome",
    "Whether the request changed anything, and the queue after it.",
    is_changed=serializers.BooleanField(),
    queue=queues.Queue(),
)
WorkerOutcome = shape(
    "WorkerOutcome",
    "What became of a request about a worker, and the worker after it.",
    outcome=NamedChoice("WorkerAnswer", [ChangeResult.ASKED, ChangeResult.UNCHANGED]),
    worker=workers.Worker(),
)
LimitOutcome = shape(
    "LimitOutcome",
    "Whether the request changed anything, and the limit after it.",
    is_changed=serializers.BooleanField(),
    limit=limits.Limit(),
)
ScheduleOutcome = shape(
    "ScheduleOutcome",
    "What became of a request about a schedule, and the schedule after it.",
    outcome=serializers.CharField(),
    schedule=schedules.Schedule(allow_null=True, help_text="null: it was deleted."),
)
Sample = shape(
    "Sample",
    "One that was refused or failed, and why.",
    id=serializers.CharField(),
    outcome=serializers.CharField(),
    detail=serializers.CharField(),
)
Count = shape(
    "Count",
    "How many of a kind.",
    reason=serializers.CharField(),
    **columns(DeadLetter, ("handler", "error_type")),
    count=serializers.IntegerField(),
)
ReplayAnswer = shape(
    "ReplayReport",
    "What a replay did, or would do.",
    dry_run=serializers.BooleanField(),
    is_capped=serializers.BooleanField(
        help_text="Of a dry run: whether there are more than it looked at: `limit`, or 1,000."
    ),
    matched=serializers.IntegerField(),
    replayed=serializers.IntegerField(),
    refused=serializers.DictField(child=serializers.IntegerField(), help_text="By reason."),
    failed=serializers.IntegerField(help_text="Not accepted by the transport; still open."),
    skipped=serializers.IntegerField(help_text="Changed by somebody else meanwhile."),
    already_processed=serializers.IntegerField(),
    histogram=Count(many=True),
    samples=Sample(many=True, help_text="The first 20 refused or failed."),
    stopped=serializers.CharField(allow_null=True, help_text="Why it ended early, if it did."),
    ok=serializers.BooleanField(),
)
DiscardAnswer = shape(
    "DiscardReport",
    "What discarding did, or would do.",
    dry_run=serializers.BooleanField(),
    discarded=serializers.IntegerField(help_text="A dry run counts up to 100,000."),
)
Background = shape(
    "Background",
    "The background job that does what is too much for one request.",
    job=serializers.UUIDField(),
    url=serializers.CharField(help_text="Its address: state, progress and report."),
)


# --- One row --------------------------------------------------------------------------------------


def _perform(view: KjoView, action: Action, key: Any, inputs: dict[str, Any]) -> Report:
    """Carry out an action on one row.

    :raises ValidationError: an input is not allowed.
    """
    audit = view.audit(action.log_entry(inputs))
    try:
        return action.perform([key], actor=view.actor, on_changed=audit, **inputs)
    except ScheduleFaults as error:
        raise schedules.refused(error) from None
    except ValueError as error:
        if not action.inputs:
            raise
        name = action.inputs[0].name
        code = "unknown" if action.inputs[0].kind is Kind.QUEUE else None
        raise ValidationError({name: str(error)}, code=code) from None


def _outcome(action: Action, report: Report, noun: str = "job") -> str:
    """Return the outcome of an action on one row.

    :param noun: what a row is called in the text of a refusal.
    :raises Http404: the row was deleted meanwhile.
    :raises PermissionDenied: it is an internal job, and the user lacks the permission of its
        action.
    :raises Conflict: it was refused.
    """
    assert not isinstance(report, ReplayReport)
    result = next(iter(report.counts))
    if result == action.result or result in action.harmless:
        return result
    if result == "not_found":
        raise Http404
    if result == "forbidden":
        raise PermissionDenied("An internal job also needs the permission of its action.")
    raise Conflict(REFUSALS.get(result, f"The {noun} has {result} already; its record stays."))


def _change_job(view: KjoView, action: Action, inputs: dict[str, Any], id: str) -> Response:
    job = jobs.find(id)
    report = _perform(view, action, job.pk, inputs)
    code = status.HTTP_200_OK
    result = next(iter(report.counts)) if not isinstance(report, ReplayReport) else ""
    if result == "processing" and "abort" in inputs:
        if not inputs["abort"]:
            raise Conflict("The job is being processed; `abort` asks it to end.")
        view.audit("Asked to end.")([job])
        code = status.HTTP_202_ACCEPTED
    else:
        result = _outcome(action, report)
    answer = {"outcome": result, "job": jobs.summaries(view, [jobs.find(id)])[0]}
    return Response(jobs.JobOutcome(answer).data, status=code)


def _change_letter(view: KjoView, action: Action, inputs: dict[str, Any], id: str) -> Response:
    letter = letters.find(id)
    if "payload" in inputs:
        serializer = serializer_for(letter.content_type or JSON.content_type)
        inputs = {"payload": serializer.dumps(inputs["payload"])}
    report = _perform(view, action, letter.pk, inputs)
    if isinstance(report, ReplayReport):
        result = "replayed" if report.replayed else ""
        detail = report.samples[0]["detail"] if report.samples else ""
        if report.failed:
            raise Unavailable(f"The message was not accepted, the dead letter stays open: {detail}")
        if report.refused:
            raise Conflict(f"Refused: {detail}")
    else:
        result = action.result if report.changed_count else ""
    after = letters.find(id)
    if not result:
        raise Conflict(f"The dead letter is {after.state} already.")
    answer = {"outcome": result, "dead_letter": letters.summary(view, after)}
    return Response(LetterOutcome(answer).data)


def _change_queue(view: KjoView, action: Action, inputs: dict[str, Any], queue: str) -> Response:
    if queue not in {row["queue"] for row in overview()}:
        raise Http404
    report = _perform(view, action, queue, inputs)
    assert not isinstance(report, ReplayReport)
    answer = {"is_changed": bool(report.changed_count), "queue": queues.find(queue)}
    return Response(QueueOutcome(answer).data)


def _change_worker(view: KjoView, action: Action, inputs: dict[str, Any], id: str) -> Response:
    row = workers.find(id)
    result = _outcome(action, _perform(view, action, row.pk, inputs))
    answer = {"outcome": result, "worker": workers.summary(workers.find(id))}
    return Response(WorkerOutcome(answer).data)


def _change_workflow(view: KjoView, action: Action, inputs: dict[str, Any], id: str) -> Response:
    row = workflows.find(id)
    report = _perform(view, action, row.pk, inputs)
    result = _outcome(action, report, "workflow")
    after = workflows.summaries(view, [workflows.find(id)])[0]
    return Response(workflows.WorkflowOutcome({"outcome": result, "workflow": after}).data)


def _change_limit(view: KjoView, action: Action, inputs: dict[str, Any], limit: str) -> Response:
    limits.find(limit)
    report = _perform(view, action, limit, inputs)
    assert not isinstance(report, ReplayReport)
    answer = {"is_changed": bool(report.changed_count), "limit": limits.find(limit)}
    return Response(LimitOutcome(answer).data)


def _change_schedule(view: KjoView, action: Action, inputs: dict[str, Any], id: str) -> Response:
    row = schedules.find(id)
    if "payload" in inputs:
        inputs["payload"] = schedules.restored(inputs["payload"], row)
    result = _outcome(action, _perform(view, action, row.pk, inputs))
    after = None if result == "deleted" else schedules.summaries(view, [schedules.find(id)])[0]
    return Response(ScheduleOutcome({"outcome": result, "schedule": after}).data)


@dataclass(frozen=True, slots=True)
class Place:
    """The addresses of the actions on a subject's rows, and how they are carried out on one row."""

    module: Any
    path: str
    name: str
    prefix: str
    """Prefix of the operations' ids."""
    answer: type[Any]
    change: Callable[..., Response]


PLACES = {
    Subject.JOBS: Place(jobs, "jobs/<str:id>/", "job", "jobs", jobs.JobOutcome, _change_job),
    Subject.LETTERS: Place(
        letters,
        "dead-letters/<str:id>/",
        "dead-letter",
        "dead_letters",
        LetterOutcome,
        _change_letter,
    ),
    Subject.QUEUES: Place(
        queues, "queues/<str:queue>/", "queue", "queues", QueueOutcome, _change_queue
    ),
    Subject.WORKERS: Place(
        workers, "workers/<str:id>/", "worker", "workers", WorkerOutcome, _change_worker
    ),
    Subject.WORKFLOWS: Place(
        workflows,
        "workflows/<str:id>/",
        "workflow",
        "workflows",
        workflows.WorkflowOutcome,
        _change_workflow,
    ),
    Subject.LIMITS: Place(
        limits, "limits/<str:limit>/", "limit", "limits", LimitOutcome, _change_limit
    ),
    Subject.SCHEDULES: Place(
        schedules,
        "schedules/<str:id>/",
        "schedule",
        "schedules",
        ScheduleOutcome,
        _change_schedule,
    ),
}


NAMES = {Subject.QUEUES: queues.NAME, Subject.LIMITS: limits.NAME}
"""The last part of the address of a row that has a name and no id."""


def _method_of(action: Action) -> Method:
    """Return the method of the address of one row that does an action."""
    place, body, rest = PLACES[action.subject], body_of(action), action.rest
    meanings = rest.answers or {200: str(place.answer.__doc__)}

    def act(view: KjoView, **parts: str) -> Response:
        return place.change(view, action, view.body(body), **parts)

    declare = endpoint(
        f"{place.prefix}_{action.name}",
        place.module.TAG,
        action.permissions,
        {code: (place.answer, meaning) for code, meaning in meanings.items()},
        method=rest.method,
        about=action.about,
        body=body,
        path=[NAMES.get(action.subject, ID)],
        problems=rest.problems,
        examples=[OpenApiExample(rest.example[0], value=rest.example[1], request_only=True)]
        if rest.example
        else [],
    )
    return declare(act)


def methods_at(subject: Subject) -> list[Method]:
    """Return the methods of actions that have no address of their own, but that of their row."""
    found = actions_of(subject, Surface.REST)
    return [_method_of(action) for action in found if action.rest.path == ""]


# --- Many dead letters ----------------------------------------------------------------------------


@contextmanager
def _refusing() -> Iterator[None]:
    """Return the problem that no worker consumes the queue of internal jobs."""
    try:
        yield
    except ValueError as error:
        raise Conflict(str(error)) from None


def _bulk_method_of(action: Action) -> Method:
    body = bulk_body_of(action)
    answer = ReplayAnswer if action.name == "replay" else DiscardAnswer

    def act(view: KjoView) -> Response:
        given = view.body(body)
        view.refuse_texts(given)
        selection = letters.selected(given)
        inputs = {each.name: given[each.name] for each in action.inputs if each.name in given}
        if given["dry_run"]:
            return Response(answer(_foresee(action, selection, inputs)).data)
        with _refusing():
            done = bulk.change_or_start(
                action.key,
                selection,
                actor=view.actor,
                on_changed=view.audit(action.log_entry(inputs)),
                **inputs,
            )
        if isinstance(done, Job):
            return _in_background(view, action, done, inputs)
        if isinstance(done, ReplayReport):
            return Response(answer(done.as_dict()).data)
        return Response(answer({"dry_run": False, "discarded": done.changed_count}).data)

    declare = endpoint(
        f"dead_letters_bulk_{action.name}",
        letters.TAG,
        action.permissions,
        {
            200: answer,
            202: (Background, "They are many: a job does it. `Location` is its address."),
        },
        method="POST",
        about=action.rest.about_bulk,
        body=body,
        problems=[each for each in action.rest.problems if each != 404],
    )
    return declare(act)


def _foresee(action: Action, selection: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    if action.name == "replay":
        limit = inputs.get("limit") or PREVIEW_LIMIT
        return preview(selection, limit=limit, force=inputs["force"]).as_dict()
    return {"dry_run": True, "discarded": bounded_count(select(selection))}


def _in_background(view: KjoView, action: Action, job: Job, inputs: dict[str, Any]) -> Response:
    """Answer with the internal job, and write its log entry."""
    note = f": {inputs['note']}" if "note" in inputs else "."
    view.audit(f"{action.name.capitalize()}s dead letters{note}", is_new=True)([job])
    url = view.url_of("job", job.pk)
    return Response(
        Background({"job": job.pk, "url": url}).data,
        status=status.HTTP_202_ACCEPTED,
        headers={"Location": url},
    )


# --- Addresses ------------------------------------------------------------------------------------


def bulk_addresses() -> list[URLPattern]:
    """Return the addresses of actions on many dead letters. They must come before the address of
    one.
    """
    return [
        path(
            f"dead-letters/{action.name}/",
            address(_bulk_method_of(action)),
            name=f"dead-letters-{action.name}",
        )
        for action in actions_of(Subject.LETTERS, Surface.REST)
        if action.is_bulk
    ]


def addresses() -> list[URLPattern]:
    """Return the addresses of actions on one row."""
    found = []
    for subject, place in PLACES.items():
        for action in actions_of(subject, Surface.REST):
            if action.rest.path != "":
                name = action.name.replace("_", "-")
                view = address(_method_of(action))
                found.append(path(f"{place.path}{name}/", view, name=f"{place.name}-{name}"))
    return found
