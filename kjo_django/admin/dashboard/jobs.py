"""The list of jobs: search, tabs by state, and changing many at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from kjo_django.admin.dashboard.desk import Desk, Screen, shared
from kjo_django.admin.outcome_messages import tell_outcomes
from kjo_django.models import Job
from kjo_django.operations import bulk, jobs, rescheduling, search
from kjo_django.operations.counting import COUNT_LIMIT, bounded_count
from kjo_django.operations.monitoring.status import state_counts
from kjo_django.operations.redaction import hide_texts
from kjo_django.states import JobStatus

SIZE = 50
SAMPLE = 10
MOST_CHOSEN = 1000

ACTIONS: dict[str, tuple[Any, str, str, Any]] = {
    # name: what the button says, the permission, the word of the log, the operation
    "requeue": (gettext_lazy("Requeue"), "retry_job", "Requeued.", jobs.requeue),
    "run_now": (gettext_lazy("Run now"), "retry_job", "Made due now.", rescheduling.run_now),
    "cancel": (gettext_lazy("Cancel"), "cancel_job", "Cancelled.", jobs.cancel),
}
WANTED = {"requeue": "requeued", "run_now": "due", "cancel": "cancelled"}


def show(desk: Desk) -> HttpResponse:
    """Return a page of the jobs a search finds."""
    text, found, wrong = _search(desk)
    page = None
    if found is not None:
        try:
            page = search.page(
                found,
                after=desk.request.GET.get("after"),
                before=desk.request.GET.get("before"),
                size=SIZE,
            )
        except ValueError as error:
            wrong = str(error)
    if page is not None and not desk.may("view_payload"):
        hide_texts(page.rows)
    return desk.show(
        "jobs.html",
        {
            "page": page,
            "q": text,
            "wrong": wrong,
            "tabs": _tabs(desk, found),
            "actions": _actions(desk),
            "links": _links(text, page),
            "window": search.WINDOW,
            "limit": COUNT_LIMIT,
        },
        controls="jobs_form.html",
        title=_("Jobs"),
    )


def _search(desk: Desk) -> tuple[str, search.JobFilter | None, str]:
    text = desk.request.GET.get("q", desk.request.POST.get("q", "")).strip()
    try:
        found = search.parse(text)
    except ValueError as error:
        return text, None, str(error)
    if not desk.may("view_payload"):
        try:
            found = found.limited()
        except ValueError as error:
            return text, None, str(error)
    return text, found, ""


def _tabs(desk: Desk, found: search.JobFilter | None) -> list[dict[str, Any]]:
    if found is None:
        return []
    # Counting what a search finds would cost a search for each state.
    is_all = replace(found, state=None).is_empty
    counts = shared("state counts", state_counts) if is_all else {}
    tabs: list[dict[str, Any]] = [{"label": _("All"), "state": None}]
    tabs += [
        {"label": each.label, "state": str(each), "count": counts.get(each)} for each in JobStatus
    ]
    for tab in tabs:
        tab["url"] = _address(replace(found, state=tab["state"]))
        tab["is_here"] = found.state == tab["state"]
    return tabs


def _address(found: search.JobFilter) -> str:
    return f"?{urlencode({'q': str(found)})}"


def _links(text: str, page: Any) -> dict[str, str]:
    if page is None:
        return {}
    base = {"q": text} if text else {}
    return {
        name: f"?{urlencode({**base, parameter: cursor})}"
        for name, parameter, cursor in (
            ("newer", "before", page.previous),
            ("older", "after", page.next),
        )
        if cursor
    }


def _actions(desk: Desk) -> list[dict[str, Any]]:
    return [
        {"name": name, "label": label}
        for name, (label, permission, _word, _act) in ACTIONS.items()
        if desk.may(permission)
    ]


# --- Changing many --------------------------------------------------------------------------------


def _action(desk: Desk, action: str) -> tuple[Any, str, str, Any]:
    if action not in ACTIONS:
        raise Http404
    if not desk.may(ACTIONS[action][1]):
        raise PermissionDenied
    return ACTIONS[action]


def change_chosen(desk: Desk, action: str) -> HttpResponse:
    """Change the jobs whose boxes were ticked."""
    _label, _permission, word, act = _action(desk, action)
    chosen = desk.request.POST.getlist("job")[:MOST_CHOSEN]
    if not chosen:
        desk.tell(_("Tick the jobs you mean first."), messages.WARNING)
        return desk.back("jobs")
    outcomes = desk.attempt(lambda: act(chosen, actor=desk.actor, on_changed=desk.audit(word)))
    if outcomes is not None:
        tell_outcomes(desk.tell, outcomes, WANTED[action])
    return desk.back("jobs")


def change_all(desk: Desk, action: str) -> HttpResponse:
    """Preview a change of all the jobs a search finds, and carry it out."""
    label, _permission, word, _act = _action(desk, action)
    text, found, wrong = _search(desk)
    if found is None or wrong:
        desk.tell(wrong, messages.ERROR)
        return desk.back("jobs")
    if desk.request.method == "POST":
        done = desk.attempt(
            lambda: bulk.change_or_start(
                action, found, actor=desk.actor, on_changed=desk.audit(word)
            )
        )
        if isinstance(done, Job):
            desk.audit(f"Started to change jobs: {action} {text}")([done])
            desk.tell(_("This takes a while; a job of its own does it."))
            return desk.back("job", done.pk)
        if done is not None:
            tell_outcomes(desk.tell, done, WANTED[action])
        return desk.back("jobs")
    page = search.page(found, size=SAMPLE)
    return desk.show(
        "",
        {
            "label": label,
            "action": action,
            "q": text,
            "count": bounded_count(search.find(found)),
            "limit": COUNT_LIMIT,
            "sample": page.rows,
            "synchronous": bulk.SYNCHRONOUS_LIMIT,
        },
        controls="jobs_confirm.html",
        title=_("%s: all jobs found") % label,
    )


SCREENS = (
    Screen("jobs", "jobs/", show, "view_job", title=gettext_lazy("Jobs")),
    Screen("jobs_all", "jobs/all/<str:action>/", change_all, "view_job"),
    Screen("jobs_chosen", "jobs/chosen/<str:action>/", change_chosen, "view_job", is_action=True),
)
