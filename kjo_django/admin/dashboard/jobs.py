"""Jobs: the list with its search and tabs by state, and one job with its history."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.http import Http404, HttpResponse
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from kjo_django import refusals, registry, states
from kjo_django.admin.dashboard.figures import at_least, duration
from kjo_django.admin.dashboard.page import Page, Screen, button_actions, shared
from kjo_django.admin.display import one_line, seconds_taken, short_arguments
from kjo_django.enqueue.job_status import limits_awaited, progress_of, shown_states
from kjo_django.models import NEVER, DeadLetter, Job, JobFailure
from kjo_django.operations import redaction, search
from kjo_django.operations.actions import Action, Subject
from kjo_django.operations.monitoring.status import state_counts
from kjo_django.operations.redaction import hide_texts
from kjo_django.runtime import jobs_database
from kjo_django.states import JobState, JobStatus
from kjo_django.values import signature_of
from kjo_django.workflows.lists import waits_for, workflow_of

SIZE = 50
SHOWN_FAILURES = 50
SHOWN_LETTERS = 10
LONGEST_DESCRIPTION = 300
MOST_SUGGESTIONS = 300


def show_list(page: Page) -> HttpResponse:
    """Show a page of the jobs that a search finds."""
    text, found, wrong = search_of(page)
    listed = None
    if found is not None:
        try:
            listed = search.page(
                found,
                after=page.request.GET.get("after"),
                before=page.request.GET.get("before"),
                size=SIZE,
            )
        except ValueError as error:
            wrong = refusals.shown(error)
    if listed is not None and not page.may("view_payload"):
        hide_texts(listed.rows)
    rows: Sequence[Any] = () if listed is None else listed.rows
    shown, limits = shown_states(rows), limits_awaited(rows)
    taken = seconds_taken(rows, shown)
    arguments = short_arguments(rows) if page.may("view_payload") else {}
    for row in rows:
        row.shown_state = shown[row.pk]
        row.waits_for_limit = limits.get(row.pk, "")
        row.seconds_taken = taken.get(row.pk)
        row.short_arguments = arguments.get(row.pk)
    return page.show(
        "jobs.html",
        {
            "page": listed,
            "q": text,
            "wrong": wrong,
            "suggestions": _suggestions(page),
            "tabs": _tabs(page, found),
            "is_unfiltered": found is not None and found.is_empty,
            **_offered(page, {*shown.values()}, found),
            "links": _links(text, listed),
            "window": search.WINDOW,
        },
        controls="jobs_form.html",
        title=_("Jobs"),
    )


def _offered(
    page: Page, shown: Collection[str], found: search.JobFilter | None
) -> dict[str, list[Action]]:
    """Return the actions that can do something to jobs of the page, and to those that are found.

    :param shown: the states of the jobs of the page.
    """
    offered = [each for each in button_actions(Subject.JOBS) if each.is_bulk and page.allows(each)]
    state = None if found is None else found.state
    return {
        "actions": offered,
        "actions_on_page": [each for each in offered if any(map(each.applies, shown))],
        "actions_on_found": [each for each in offered if state is None or each.applies(state)],
    }


def _suggestions(page: Page) -> list[str]:
    """Return what the search field suggests: conditions on the states, queues and handlers that
    there are, and for users who may see payloads on the arguments of the handlers.
    """
    filters = [search.JobFilter(state=str(state)) for state in JobStatus]
    filters += [search.JobFilter(queue=name) for name in registry.queue_names()]
    handlers = registry.handlers()
    filters += [search.JobFilter(handler=each.name) for each in handlers]
    filters += [search.JobFilter(since=timedelta(hours=hours)) for hours in (1, 24, 168)]
    words = [str(each) for each in filters]
    if page.may("view_payload"):
        words += ["key:", "unique:", "error:"]
        names = {name for each in handlers for name in _argument_names(each)}
        words += [f"args.{name}:" for name in sorted(names)]
    return words[:MOST_SUGGESTIONS]


def _argument_names(handler: registry.Handler) -> list[str]:
    """Return the names of the arguments that a search may ask for."""
    if handler.options.batch is not None:
        return []
    hidden = redaction.hidden_by(handler.name)
    names = list(signature_of(handler.function).parameters.items())
    return [
        name
        for name, parameter in names[1 if handler.options.takes_context else 0 :]
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and not redaction.is_redacted(name, also=hidden)
    ]


def search_of(page: Page) -> tuple[str, search.JobFilter | None, str]:
    """Return the text of the search, the parsed search, and the error if it cannot be parsed."""
    text = page.request.GET.get("q", page.request.POST.get("q", "")).strip()
    try:
        found = search.parse(text)
    except ValueError as error:
        return text, None, refusals.shown(error)
    if not page.may("view_payload"):
        try:
            found = found.limited()
        except ValueError as error:
            return text, None, refusals.shown(error)
    return text, found, ""


def _tabs(page: Page, found: search.JobFilter | None) -> list[dict[str, Any]]:
    if found is None:
        return []
    # Counting what a search finds would cost a search for each state.
    is_all = replace(found, state=None).is_empty
    counts, lower_bounds = shared("state counts", state_counts) if is_all else ({}, set())
    tabs: list[dict[str, Any]] = [{"label": _("All"), "state": None}]
    tabs += [{"label": each.label, "state": str(each)} for each in JobStatus]
    for tab in tabs:
        if (count := counts.get(tab["state"])) is not None:
            tab["count"] = at_least(count, tab["state"] in lower_bounds)
        tab["url"] = _address(replace(found, state=tab["state"]))
        tab["is_here"] = found.state == tab["state"]
    return tabs


def _address(found: search.JobFilter) -> str:
    return f"?{urlencode({'q': str(found)})}"


def _links(text: str, listed: Any) -> dict[str, str]:
    if listed is None:
        return {}
    base = {"q": text} if text else {}
    return {
        name: f"?{urlencode({**base, parameter: cursor})}"
        for name, parameter, cursor in (
            ("newer", "before", listed.previous),
            ("older", "after", listed.next),
        )
        if cursor
    }


# --- One ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """An event in a job's history, or a future one."""

    moment: datetime | None
    kind: str
    """``done``, ``failed``, ``next`` or ``""``."""
    text: str
    detail: str = ""
    failure: JobFailure | None = None


def show_one(page: Page, job: UUID) -> HttpResponse:
    """Show one job: what it does, how it went, and its attempts."""
    found = _find(job)
    status = shown_states([found])[found.pk]
    failures = list(_failures(page, found))
    letters = DeadLetter.objects.using(jobs_database()).filter(job=found).order_by("-pk")
    letters = letters.defer("value", "headers", "traceback")
    if not page.may("view_payload"):
        redaction.hide_texts([found, *failures])
    progress = progress_of([found.pk]).get(str(found.pk))
    limit = limits_awaited([found]).get(found.pk, "")
    payload = redaction.shown_payload(found) if page.may("view_payload") else None
    title = f"{found.handler}({one_line(payload)})" if page.may("view_payload") else found.handler
    return page.show(
        "job.html",
        {
            "job": found,
            "status": status,
            "django_status": states.to_django_tasks(status),
            "steps": _steps(found, status, failures, limit, has_log=page.has_log),
            "failures": failures,
            "letters": list(letters[:SHOWN_LETTERS]) if page.may("view_deadletter") else [],
            "progress": progress,
            "is_running": status == JobStatus.PROCESSING,
            "description": description(found.handler),
            "waited": _seconds_between(found.available_at, found.started_at),
            "taken": seconds_taken([found], {found.pk: status}).get(found.pk),
            "payload": payload,
            "result": _result(page, found),
            "headers": redaction.shown_headers(found) if page.may("view_payload") else None,
            "buttons": page.buttons(Subject.JOBS, status, found.pk),
            "workflow": workflow_of(found) if page.may("view_workflow") else None,
            "waits_for": waits_for(found) if page.may("view_workflow") else [],
            "knows_queue": found.queue in registry.queue_names(),
            "waits_for_limit": limit,
            "summary": f"{found.handler}: {status.label}",
        },
        title=title,
    )


def _find(job: UUID) -> Job:
    found: Job | None = Job.objects.using(jobs_database()).filter(pk=job).first()
    if found is None:
        raise Http404(_("There is no such job; it may have been pruned."))
    return found


def description(name: str) -> str:
    """Return the first paragraph of the docstring of a handler's function, on one line."""
    handler = registry.find(name)
    text = inspect.getdoc(handler.function) if handler is not None else None
    return " ".join((text or "").split("\n\n")[0].split())[:LONGEST_DESCRIPTION]


def _seconds_between(start: datetime | None, end: datetime | None) -> float | None:
    return None if start is None or end is None else max(0.0, (end - start).total_seconds())


def _failures(page: Page, job: Job) -> Any:
    rows = JobFailure.objects.using(jobs_database()).filter(job=job).order_by("-pk")
    return (rows if page.may("view_payload") else rows.defer("traceback", "log"))[:SHOWN_FAILURES]


def _result(page: Page, job: Job) -> Any:
    if job.state != JobState.COMPLETED or not page.may("view_payload"):
        return None
    return {"value": redaction.shown_result(job)}


def _steps(
    job: Job, status: JobStatus, failures: list[JobFailure], limit: str, *, has_log: bool
) -> list[Step]:
    steps = [Step(job.created_at, "done", _("Enqueued"), job.queue)]
    if job.queued_at is not None:
        place = f"{job.topic} {job.partition}/{job.offset}" if job.offset is not None else job.topic
        steps.append(Step(job.queued_at, "done", _("Published"), place if has_log else ""))
    steps += map(_failed_step, reversed(failures))
    if job.started_at is not None and status in (JobStatus.PROCESSING, JobStatus.COMPLETED):
        # The attempt that runs is counted when it has ended.
        number = job.attempts + (status == JobStatus.PROCESSING)
        text = _("Attempt %(attempt)d started") % {"attempt": number}
        waited = _seconds_between(job.available_at, job.started_at)
        detail = _("waited %s") % duration(waited) if number == 1 else ""
        steps.append(Step(job.started_at, "done", text, detail))
    steps.sort(key=lambda step: step.moment or timezone.now())
    return [*steps, _last_step(job, status, limit)]


def _failed_step(failure: JobFailure) -> Step:
    text = _("Attempt %(attempt)d failed: %(error)s") % {
        "attempt": failure.attempt,
        "error": failure.error_type,
    }
    if failure.is_wait:
        text = _("Waits for a worker that knows its handler")
    took = _seconds_between(failure.started_at, failure.failed_at)
    detail = _details(failure.started_at, took, failure.worker)
    return Step(failure.failed_at, "failed", text, detail, failure)


def _last_step(job: Job, status: JobStatus, limit: str) -> Step:
    """Return how a job has ended, or what is next."""
    if job.state not in states.FINAL:
        detail = _("waits for %s") % limit if limit else ""
        return Step(_due(job, status), "next", str(status.label), detail)
    kind, parts = "failed", list[str]()
    if job.state == JobState.COMPLETED:
        kind, took = "done", _seconds_between(job.started_at, job.finished_at)
        parts = [_("took %s") % duration(took)] if took is not None else []
    return Step(job.finished_at, kind, str(status.label), _parted(parts, job.worker))


def _details(started_at: datetime | None, took: float | None, worker: str) -> str:
    """Return when an attempt that failed began, how long it took and where it ran."""
    parts = []
    if started_at is not None:
        moment = date_format(timezone.localtime(started_at), "H:i:s")
        parts = [_("started %s") % moment, _("took %s") % duration(took)]
    return _parted(parts, worker)


def _parted(parts: Sequence[str], worker: str) -> str:
    return " · ".join([*parts, worker] if worker else parts)


def _due(job: Job, status: JobStatus) -> datetime | None:
    if job.available_at == NEVER:
        return None
    return job.available_at if status in (JobStatus.SCHEDULED, JobStatus.FAILING) else None


SCREENS = (
    Screen("jobs", "jobs/", show_list, "view_job", title=gettext_lazy("Jobs"), model="job"),
    Screen("job", "jobs/<uuid:job>/", show_one, "view_job", model="job"),
)
