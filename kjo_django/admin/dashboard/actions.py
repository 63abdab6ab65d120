"""Buttons and confirmations of the actions of the table, and what a posted one does.

An action on one row or on selected rows is done at once, if it takes no inputs; else a form asks
for these. An action on all rows found, and any on dead letters, is shown first and carried out by a
second, posted form. Many rows are the work of an internal job.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from kjo_django.admin.actions import form_of, show_report
from kjo_django.admin.dashboard.dead_letters import address_of, selection_of
from kjo_django.admin.dashboard.jobs import search_of
from kjo_django.admin.dashboard.page import Page, Screen, button_actions, forget, screen_of
from kjo_django.admin.dashboard.workflows import find as find_workflow
from kjo_django.models import DeadLetterReason, Job, Schedule, Worker
from kjo_django.operations import bulk, dead_letters, queues, search
from kjo_django.operations.actions import (
    ACTIONS,
    SYNCHRONOUS_LIMIT,
    Action,
    Subject,
    Surface,
    actions_of,
)
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.operations.search import JobFilter
from kjo_django.runtime import jobs_database
from kjo_django.store.counting import COUNT_LIMIT, bounded_count

SAMPLE = 10
MOST_CHOSEN = 1000
LOOKED_AT = 500
"""Dead letters that a preview reads one by one; all are counted."""


# --- Carrying out ---------------------------------------------------------------------------------


def carry_out(
    page: Page,
    action: Action,
    selection: Any,
    inputs: dict[str, Any],
    *back: Any,
) -> HttpResponse:
    """Carry out an action, show its result, and redirect to a screen.

    :param selection: rows' ids, or a filter, which an internal job may process.
    """

    def act() -> Any:
        log = page.audit(action.log_entry(inputs))
        if isinstance(selection, JobFilter | DeadLetterFilter):
            return bulk.change_or_start(
                action.key, selection, actor=page.actor, on_changed=log, **inputs
            )
        return action.perform(selection, actor=page.actor, on_changed=log, **inputs)

    done = page.attempt(act)
    if isinstance(done, Job):
        found = f" {selection}" if isinstance(selection, JobFilter) else ""
        page.audit(f"Started to change {action.subject}: {action.name}{found}")([done])
        page.message(_("A background job does this; its page shows the progress."))
        if page.may("view_job"):
            return page.back("job", done.pk)
    elif done is not None:
        show_report(page.message, action, done)
    return page.back(*back)


def _confirm(
    page: Page,
    action: Action,
    selection: Any,
    preview: Callable[[], dict[str, Any]],
    *back: Any,
    is_confirmed: bool,
    title: str,
) -> HttpResponse:
    """Carry out an action if its form was posted; else show the affected rows with a form for its
    inputs.

    :param preview: returns the template's description of the rows.
    """
    form: forms.Form = form_of(action, many=True)(page.request.POST if is_confirmed else None)
    if is_confirmed and form.is_valid():
        return carry_out(page, action, selection, form.cleaned_data, *back)
    return page.show(
        "",
        {
            "form": form,
            "action": action,
            "limit": COUNT_LIMIT,
            "synchronous": SYNCHRONOUS_LIMIT,
            **preview(),
        },
        controls="action_confirm.html",
        title=title,
    )


# --- Jobs -----------------------------------------------------------------------------------------


def _action_of_jobs(page: Page, name: str) -> Action:
    action = ACTIONS.get(name)
    if action is None or action not in actions_of(Subject.JOBS, Surface.DASHBOARD):
        raise Http404
    if not action.is_allowed(page.request.user):
        raise PermissionDenied
    return action


def change_one(action: Action, page: Page, job: UUID) -> HttpResponse:
    """Carry out an action on one job."""
    if not page.may("view_job"):
        raise PermissionDenied
    rows = Job.objects.using(jobs_database()).filter(pk=job).defer("payload", "result")
    if not rows:
        raise Http404(_("There is no such job; it may have been pruned."))
    if not action.has_required_inputs:
        return carry_out(page, action, [job], {}, "job", job)
    return _confirm(
        page,
        action,
        [job],
        lambda: {"count": 1, "sample": rows, "back": page.url("job", job)},
        "job",
        job,
        is_confirmed="confirmed" in page.request.POST,
        title=f"{action.label}: {job}",
    )


def change_chosen(page: Page, action: str) -> HttpResponse:
    """Carry out an action on the selected jobs."""
    found = _action_of_jobs(page, action)
    chosen = page.request.POST.getlist("job")[:MOST_CHOSEN]
    if not chosen:
        page.message(_("Select jobs first."), messages.WARNING)
        return page.back("jobs")
    if not found.has_required_inputs:
        return carry_out(page, found, chosen, {}, "jobs")
    return _confirm(
        page,
        found,
        chosen,
        lambda: {
            "count": len(chosen),
            "fields": [("job", id) for id in chosen],
            "back": page.url("jobs"),
        },
        "jobs",
        is_confirmed="confirmed" in page.request.POST,
        title=_("%s: the selected jobs") % found.label,
    )


def change_all(page: Page, action: str) -> HttpResponse:
    """Preview an action on all the jobs a search finds, and carry it out."""
    found = _action_of_jobs(page, action)
    text, selection, wrong = search_of(page)
    if selection is None or wrong:
        page.message(wrong, messages.ERROR)
        return page.back("jobs")

    def preview() -> dict[str, Any]:
        return {
            "q": text,
            "fields": [("q", text)],
            "count": bounded_count(search.find(selection)),
            "sample": search.page(selection, size=SAMPLE).rows,
            "back": f"{page.url('jobs')}?{urlencode({'q': text})}",
        }

    return _confirm(
        page,
        found,
        selection,
        preview,
        "jobs",
        is_confirmed=page.request.method == "POST",
        title=_("%s: all jobs found") % found.label,
    )


# --- Dead letters ---------------------------------------------------------------------------------


def change_letters(action: Action, page: Page) -> HttpResponse:
    """Preview an action on one, some, a group or all of the dead letters, and carry it out."""
    if not page.may("view_deadletter"):
        raise PermissionDenied  # a preview shows handlers and errors
    given = page.request.POST if page.request.method == "POST" else page.request.GET
    selection = selection_of(page, given)
    if selection.is_empty and "all" not in given:
        page.message(_("Select dead letters first."), messages.WARNING)
        return page.back("letters")

    def preview() -> dict[str, Any]:
        rows = dead_letters.select(selection)
        count = bounded_count(rows)
        report = dead_letters.preview(rows, limit=LOOKED_AT)
        reasons = dict(DeadLetterReason.choices)
        names = ("queue", "handler", "reason", "error", "fingerprint")
        pairs = [(name, value) for name in names if (value := getattr(selection, name))]
        return {
            "count": count,
            "report": report,
            "histogram": [
                (reasons.get(reason, reason), handler, error, number)
                for (reason, handler, error), number in report.histogram.most_common()
            ],
            # As a list: a template would look the method's name up among the counts.
            "refused": list(report.refused.items()),
            "looked_at": min(count, LOOKED_AT),
            "fields": [("all", "1"), *pairs, *(("letter", str(id)) for id in selection.ids or ())],
            "back": f"{page.url('letters')}?{address_of(selection)}",
        }

    return _confirm(
        page,
        action,
        selection,
        preview,
        "dead_letters",
        is_confirmed=page.request.method == "POST" and "confirmed" in page.request.POST,
        title=_("%s dead letters") % action.label,
    )


# --- Queues and workers ---------------------------------------------------------------------------

QUEUE_MESSAGES: dict[str, tuple[Any, Any]] = {
    "pause": (gettext_lazy("Paused: %s"), gettext_lazy("It was paused already: %s")),
    "resume": (gettext_lazy("Resumed: %s"), gettext_lazy("It was not paused: %s")),
}


def change_queue(action: Action, page: Page, queue: str) -> HttpResponse:
    """Carry out an action on one queue."""
    if queue not in {row["queue"] for row in queues.overview()}:
        raise Http404(_("No queue has this name."))
    log = page.audit(action.log_entry({}))
    done = page.attempt(lambda: action.perform([queue], actor=page.actor, on_changed=log))
    if done is not None:
        changed, unchanged = QUEUE_MESSAGES[action.name]
        if done.changed_count:
            page.message(changed % queue)
        else:
            page.message(unchanged % queue, messages.WARNING)
    forget("queues")
    return page.back("queues")


def change_worker(action: Action, page: Page, worker: UUID) -> HttpResponse:
    """Carry out an action on one worker."""
    if not Worker.objects.using(jobs_database()).filter(pk=worker).exists():
        raise Http404(_("There is no such worker."))
    answer = carry_out(page, action, [worker], {}, "consumers")
    forget("workers")
    return answer


# --- Workflows ------------------------------------------------------------------------------------


def change_workflow(action: Action, page: Page, workflow: UUID) -> HttpResponse:
    """Carry out an action on one workflow."""
    if not page.may("view_workflow"):
        raise PermissionDenied
    found = find_workflow(workflow)
    if not action.has_required_inputs:
        return carry_out(page, action, [workflow], {}, "workflow", workflow)
    return _confirm(
        page,
        action,
        [workflow],
        lambda: {"count": 1, "workflow": found, "back": page.url("workflow", workflow)},
        "workflow",
        workflow,
        is_confirmed="confirmed" in page.request.POST,
        title=f"{action.label}: {found.name}",
    )


def change_chosen_workflows(page: Page, action: str) -> HttpResponse:
    """Carry out an action on the selected workflows."""
    found = ACTIONS.get(f"{action}_{Subject.WORKFLOWS}")
    if found is None or found.has_required_inputs:
        raise Http404
    if not page.allows(found):
        raise PermissionDenied
    chosen = page.request.POST.getlist("workflow")[:MOST_CHOSEN]
    if not chosen:
        page.message(_("Select workflows first."), messages.WARNING)
        return page.back("workflows")
    return carry_out(page, found, chosen, {}, "workflows")


def change_limit(action: Action, page: Page, limit: str) -> HttpResponse:
    """Carry out an action on one limit."""
    answer = carry_out(page, action, [limit], {}, "limits")
    forget("limits")
    return answer


def change_schedule(action: Action, page: Page, schedule: UUID) -> HttpResponse:
    """Carry out an action on one schedule."""
    found = Schedule.objects.using(jobs_database()).filter(pk=schedule).first()
    if found is None:
        raise Http404(_("There is no such schedule."))
    if not action.asks_first:
        return carry_out(page, action, [schedule], {}, "schedules")
    if not page.may("view_schedule"):
        raise PermissionDenied
    return _confirm(
        page,
        action,
        [schedule],
        lambda: {"count": 1, "schedule": found, "back": page.url("schedule", schedule)},
        "schedules",
        is_confirmed="confirmed" in page.request.POST,
        title=f"{action.label}: {found.name}",
    )


# --- Screens --------------------------------------------------------------------------------------


def _screens() -> list[Screen]:
    screens = [
        Screen("jobs_all", "jobs/all/<str:action>/", change_all, "view_job"),
        Screen(
            "jobs_chosen", "jobs/chosen/<str:action>/", change_chosen, "view_job", is_action=True
        ),
        Screen(
            "workflows_chosen",
            "workflows/chosen/<str:action>/",
            change_chosen_workflows,
            "view_workflow",
            is_action=True,
        ),
    ]
    places: dict[Subject, tuple[str, Callable[..., HttpResponse]]] = {
        Subject.JOBS: ("jobs/<uuid:job>/", change_one),
        Subject.QUEUES: ("queues/<path:queue>/", change_queue),
        Subject.WORKERS: ("consumers/<uuid:worker>/", change_worker),
        Subject.LETTERS: ("dead-letters/", change_letters),
        Subject.WORKFLOWS: ("workflows/<uuid:workflow>/", change_workflow),
        Subject.SCHEDULES: ("schedules/<uuid:schedule>/", change_schedule),
        Subject.LIMITS: ("limits/<path:limit>/", change_limit),
    }
    for subject, (place, view) in places.items():
        for action in button_actions(subject):
            is_preview = subject == Subject.LETTERS or action.asks_first
            screens.append(
                Screen(
                    screen_of(action),
                    f"{place}{action.name}/",
                    partial(view, action),
                    action.permission,
                    is_action=not is_preview,
                )
            )
    return screens


SCREENS = tuple(_screens())
