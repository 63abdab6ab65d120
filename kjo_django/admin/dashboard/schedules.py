"""Schedules: the list, one with the history of its runs, and the form that adds or edits one."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode
from uuid import UUID
from zoneinfo import available_timezones

from django import forms
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.forms.fields import InvalidJSONInput
from django.http import Http404, HttpResponse, HttpResponseRedirect
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from kjo_django import registry
from kjo_django.admin.actions import form_of
from kjo_django.admin.dashboard.figures import with_zone
from kjo_django.admin.dashboard.page import Page, Screen
from kjo_django.admin.display import SCHEDULE_BADGES, inert_json
from kjo_django.enqueue.job_status import shown_states
from kjo_django.messages import headers as names
from kjo_django.models import Job, Schedule
from kjo_django.operations import redaction, schedules
from kjo_django.operations.actions import ACTIONS, Subject
from kjo_django.operations.safe_text import inert
from kjo_django.runtime import jobs_database
from kjo_django.schedules import shown
from kjo_django.schedules.declarations import (
    COLUMNS,
    TIMES,
    ScheduleFaults,
    in_order,
    problem_shown,
)
from kjo_django.timetables import zone_of

SIZE = 100
SHOWN_RUNS = 50
MAX_SEARCH = 100

FILTERS = (
    ("", gettext_lazy("All")),
    ("active", gettext_lazy("Active")),
    ("paused", gettext_lazy("Paused")),
    ("broken", gettext_lazy("Broken")),
)


# --- The list -------------------------------------------------------------------------------------


def show_list(page: Page) -> HttpResponse:
    """Show a page of the schedules, by name."""
    given = page.request.GET
    text = given.get("q", "").strip().replace("\0", "")[:MAX_SEARCH]
    chosen = given.get("state", "") if given.get("state") in dict(FILTERS) else ""
    after = given.get("after", "").replace("\0", "")
    rows = _found(text, chosen)
    rows = (rows.filter(name__gt=after) if after else rows).order_by("name")
    listed = in_order(rows, SIZE + 1)
    has_more = len(listed) > SIZE
    listed = listed[:SIZE]
    base = {name: value for name, value in (("q", text), ("state", chosen)) if value}
    return page.show(
        "schedules.html",
        {
            "rows": _rows(page, listed),
            "q": text,
            "state": chosen,
            "tabs": [
                {
                    "label": label,
                    "url": f"?{urlencode({**({'q': text} if text else {}), 'state': name})}",
                    "is_here": name == chosen,
                }
                for name, label in FILTERS
            ],
            "next": f"?{urlencode({**base, 'after': listed[-1].name})}" if has_more else "",
            "may_add": page.may("add_schedule"),
        },
        controls="schedules_form.html",
        title=_("Schedules"),
    )


def _found(text: str, state: str) -> QuerySet[Schedule]:
    rows = Schedule.objects.using(jobs_database()).all()
    if text:
        rows = rows.filter(Q(name__icontains=text) | Q(job__icontains=text))
    known = [each.name for each in registry.handlers()]
    is_broken = ~Q(job__in=known) | ~Q(problem="")
    match state:
        case "active":
            return rows.filter(is_enabled=True, is_paused=False, next_at__isnull=False)
        case "paused":
            return rows.filter(is_paused=True)
        case "broken":
            return rows.filter(is_broken, is_enabled=True)
    return rows


def _rows(page: Page, listed: list[Schedule]) -> list[dict[str, Any]]:
    jobs, now = shown.last_jobs(listed), timezone.now()
    states = shown_states(list(jobs.values()))
    found = []
    for row in listed:
        job = jobs.get(row.pk)
        facts = shown.described(row, job, now)
        found.append(
            {
                **facts,
                "problem": problem_shown(row),
                "row": row,
                "badge": SCHEDULE_BADGES[facts["state"]],
                "next": facts["next_at"] and shown_tick(facts["next_at"], _zone_of(row)),
                "source_label": row.get_source_display(),
                "last_job": job,
                "last_state": None if job is None else states[job.pk],
                # Rare ones are on the page of the schedule.
                "buttons": page.buttons(Subject.SCHEDULES, facts["state"], row.pk, row.name),
            }
        )
    return found


def _buttons(page: Page, row: Schedule) -> list[dict[str, Any]]:
    return page.buttons(Subject.SCHEDULES, shown.conditions(row), row.pk)


def _edit_link(page: Page, row: Schedule) -> list[dict[str, Any]]:
    if not page.allows(ACTIONS["edit_schedules"]):
        return []
    return [{"label": _("Edit"), "url": page.url("schedule_edit", row.pk), "asks": True}]


# --- One ------------------------------------------------------------------------------------------


def show_one(page: Page, schedule: UUID) -> HttpResponse:
    """Show one schedule, its next ticks and its last runs."""
    row = _find(schedule)
    runs = shown.history(row, SHOWN_RUNS)
    last = shown.last_jobs([row]).get(row.pk)
    facts = shown.described(row, last, timezone.now())
    zone = _zone_of(row)
    return page.show(
        "schedule.html",
        {
            **facts,
            "problem": problem_shown(row),
            "schedule": row,
            "badge": SCHEDULE_BADGES[facts["state"]],
            "next_runs": [shown_tick(tick, zone) for tick in shown.next_runs(row)],
            "runs": _runs(runs),
            "shown_runs": SHOWN_RUNS,
            "payload": _shown_payload(row) if page.may("view_payload") else None,
            "buttons": [*_edit_link(page, row), *_buttons(page, row)],
            "knows_queue": row.queue in registry.queue_names(),
        },
        title=_("Schedule %s") % row.name,
    )


def _zone_of(row: Schedule) -> Any:
    try:
        return zone_of(row.timezone)
    except (KeyError, ValueError, OSError):
        return UTC  # this machine does not know the zone


def _find(schedule: UUID) -> Schedule:
    found: Schedule | None = Schedule.objects.using(jobs_database()).filter(pk=schedule).first()
    if found is None:
        raise Http404(_("There is no such schedule."))
    return found


def _runs(jobs: list[Job]) -> list[dict[str, Any]]:
    states = shown_states(jobs)
    return [
        {
            "job": job,
            "status": states[job.pk],
            "tick": tick,
            "late": (job.started_at - tick).total_seconds() if job.started_at and tick else None,
            "seconds": shown.seconds_of(job),
        }
        for job in jobs
        for tick in [_tick_of(job)]
    ]


def _tick_of(job: Job) -> datetime | None:
    text = (job.headers or {}).get(names.SCHEDULED_FOR)
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        return None  # anybody may have written the header


def _shown_payload(row: Schedule) -> Any:
    return redaction.redacted(row.payload, also=redaction.hidden_by(row.job))


def shown_tick(tick: datetime, zone: Any) -> dict[str, Any]:
    """Return a tick as every screen shows it: in the current zone as all times are, and where the
    clocks of the schedule's zone differ also by these.

    :param zone: of the schedule.
    """
    is_same = tick.astimezone(zone).utcoffset() == timezone.localtime(tick).utcoffset()
    return {"at": tick, "text": with_zone(tick), "own": "" if is_same else with_zone(tick, zone)}


# --- The form -------------------------------------------------------------------------------------


def _form_class(*, has_name: bool, has_payload: bool) -> type[forms.Form]:
    fields = _fields()
    if not has_payload:
        fields.pop("payload")
    if has_name:
        name = forms.CharField(label=_("Name"), max_length=100)
        fields = {"name": name, **fields}
    for field, choices in (("job", "kjo-jobs"), ("queue", "kjo-queues"), ("timezone", "kjo-zones")):
        fields[field].widget.attrs["list"] = choices
    return type("ScheduleForm", (forms.Form,), fields)


def _fields() -> dict[str, forms.Field]:
    return dict(form_of(ACTIONS["edit_schedules"], many=False).base_fields)


_DEFAULTS = {
    "payload": {},
    **{name: Schedule._meta.get_field(name).default for name in ("catch_up", "overlap", "jitter")},  # type: ignore[union-attr]
}


def add(page: Page) -> HttpResponse:
    """Show the form for a new schedule; store what was posted."""
    fields = _form_class(has_name=True, has_payload=True)
    return _edit(page, None, fields(page.request.POST or None, initial=_DEFAULTS))


def edit(page: Page, schedule: UUID) -> HttpResponse:
    """Show the form that edits a schedule; store what was posted."""
    action = ACTIONS["edit_schedules"]
    if not page.allows(action):
        raise PermissionDenied
    row = _find(schedule)
    initial = {name: getattr(row, name) for name in COLUMNS}
    # No name or expression that is right has such characters.
    initial |= {name: inert(initial[name]) for name in ("job", "queue", "cron", "timezone")}
    text = json.dumps(_shown_payload(row), indent=2, ensure_ascii=False)
    initial["payload"] = InvalidJSONInput(inert_json(text))  # text that stays as it is
    is_short = len(text) <= redaction.LONGEST_SHOWN  # a longer one stays, and REST changes it
    fields = _form_class(has_name=False, has_payload=is_short and page.may("view_payload"))
    return _edit(page, row, fields(page.request.POST or None, initial=initial))


def _submitted(page: Page, row: Schedule | None, form: forms.Form) -> Schedule | None:
    """Save what a valid form says, and return it; None where a preview is asked for, or it cannot
    be saved: then the form says why."""
    given = dict(form.cleaned_data)
    if given.get("payload") is None:
        given.pop("payload", None)
    try:
        if row is not None and "payload" in given:
            given["payload"] = _restored(given["payload"], row)
        return None if "preview" in page.request.POST else _save(page, row, given)
    except ScheduleFaults as error:
        for name, text in error.translated_faults().items():
            form.add_error(name if name in form.fields else None, text)
    return None


def _edit(page: Page, row: Schedule | None, form: forms.Form) -> HttpResponse:
    if page.request.method == "POST" and form.is_valid():
        saved = _submitted(page, row, form)
        if saved is not None:
            return HttpResponseRedirect(page.url("schedule", saved.pk))
    times = _time_form()(page.request.POST or None, initial=form.initial)
    return page.show(
        "",
        {
            "form": form,
            "schedule": row,
            "preview": _preview_of(times),
            "jobs": [each.name for each in registry.handlers() if registry.enqueueable(each.name)],
            "queues": registry.queue_names(),
            "zones": sorted(available_timezones()),
            "back": page.url("schedules") if row is None else page.url("schedule", row.pk),
        },
        controls="schedule_form.html",
        title=_("Add a schedule") if row is None else _("Edit schedule %s") % row.name,
    )


def _restored(payload: Any, row: Schedule) -> Any:
    try:
        return redaction.restored(payload, row.payload)
    except ValueError as error:
        raise ScheduleFaults({"payload": error}) from None


def _save(page: Page, row: Schedule | None, given: dict[str, Any]) -> Schedule:
    if row is None:
        made = schedules.add(
            given.pop("name"), actor=page.actor, on_changed=page.audit("Added."), **given
        )
        page.message(_("Added: %s") % made.name)
        return made
    action = ACTIONS["edit_schedules"]
    changes = {name: value for name, value in given.items() if value != getattr(row, name)}
    audit = page.audit(action.log_entry(changes))
    action.perform([row.pk], actor=page.actor, on_changed=audit, **given)
    page.message(_("Changed: %s") % row.name if changes else _("Nothing was changed."))
    return row


def show_preview(page: Page) -> HttpResponse:
    """Show the next ticks of what a form holds, alone."""
    form = _time_form()(page.request.GET)
    return page.show("schedule_preview.html", {"preview": _preview_of(form)}, title="")


def _time_form() -> type[forms.Form]:
    fields = _fields()
    return type("TimeForm", (forms.Form,), {name: fields[name] for name in TIMES})


def _preview_of(form: forms.Form) -> dict[str, Any]:
    """Return the next ticks of a form's values, or what is wrong with these."""
    values, faults = form.initial, dict[str, str]()
    if form.is_bound:
        values = form.cleaned_data if form.is_valid() else {}
        faults = {name: str(texts[0]) for name, texts in form.errors.items()}
    given = {name: values.get(name) for name in TIMES}
    is_empty = not any(given.get(name) for name in ("cron", "every", "at"))
    ticks: list[datetime] = []
    if not faults and not is_empty:
        ticks, faults = shown.preview(given)
    zone = zone_of(str(given.get("timezone") or "")) if ticks else None
    return {"ticks": [shown_tick(tick, zone) for tick in ticks], "faults": list(faults.values())}


SCREENS = (
    Screen(
        "schedules",
        "schedules/",
        show_list,
        "view_schedule",
        title=gettext_lazy("Schedules"),
        model="schedule",
    ),
    Screen("schedule_add", "schedules/add/", add, "add_schedule"),
    Screen("schedule_preview", "schedules/preview/", show_preview, "view_schedule"),
    Screen("schedule", "schedules/<uuid:schedule>/", show_one, "view_schedule", model="schedule"),
    Screen("schedule_edit", "schedules/<uuid:schedule>/edit/", edit, "view_schedule"),
)
