"""A job by hand: the form that enqueues one."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django import forms
from django.http import HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from kjo_django import registry
from kjo_django.admin.actions import json_field
from kjo_django.admin.dashboard.page import DATABASE, Page, Screen
from kjo_django.enqueue.handle import JobHandle
from kjo_django.exceptions import PayloadError
from kjo_django.operations import enqueueing
from kjo_django.refusals import shown
from kjo_django.runtime import databases
from kjo_django.values import LONGEST, MAX_PRIORITY

LONGEST_TEXT = 255
OPTIONS = {"queue": "queue", "delay": "delay", "priority": "priority", "key": "key"}
OPTIONS["unique_id"] = "id"
"""Fields of the form, and the options of ``using()`` that they are."""


def _form_class() -> type[forms.Form]:
    names = [(name, name) for name in enqueueing.handlers()]
    queues = [("", gettext_lazy("that of the job")), *((q, q) for q in registry.queue_names())]
    fields = {
        "handler": forms.ChoiceField(label=gettext_lazy("Handler"), choices=names),
        "payload": json_field(
            label=gettext_lazy("Payload"),
            help_text=gettext_lazy("The arguments of the function, as a JSON object."),
            required=False,
        ),
        "queue": forms.ChoiceField(label=gettext_lazy("Queue"), choices=queues, required=False),
        "delay": forms.IntegerField(
            label=gettext_lazy("Delay"),
            help_text=gettext_lazy("Seconds until it may start."),
            min_value=0,
            max_value=int(LONGEST.total_seconds()),
            required=False,
        ),
        "priority": forms.IntegerField(
            label=gettext_lazy("Priority"),
            min_value=-MAX_PRIORITY,
            max_value=MAX_PRIORITY,
            required=False,
        ),
        "key": forms.CharField(
            label=gettext_lazy("Key"),
            help_text=gettext_lazy("Jobs of one key run one at a time and in order."),
            max_length=LONGEST_TEXT,
            required=False,
        ),
        "unique_id": forms.CharField(
            label=gettext_lazy("Unique id"),
            help_text=gettext_lazy("At most one job of a queue has it."),
            max_length=LONGEST_TEXT,
            required=False,
        ),
    }
    return type("EnqueueForm", (forms.Form,), fields)


def add(page: Page) -> HttpResponse:
    """Show the form for a job; enqueue what was posted."""
    initial = {"handler": page.request.GET.get("handler", ""), "payload": {}}
    form = _form_class()(page.request.POST or None, initial=initial)
    if page.request.method == "POST" and form.is_valid():
        handle = _enqueued(page, form)
        if handle is not None:
            return _shown(page, handle, form.cleaned_data["handler"])
    context = {"form": form, "back": page.url("jobs") if page.may("view_job") else ""}
    return page.show("", context, controls="job_form.html", title=_("Enqueue a job"))


def _enqueued(page: Page, form: forms.Form) -> JobHandle[Any] | None:
    """Enqueue what a valid form says; return None if it is refused: then the form says why."""
    given = form.cleaned_data
    payload = {} if given["payload"] is None else given["payload"]
    if not isinstance(payload, dict):
        form.add_error("payload", _("Arguments are given by name, in a JSON object."))
        return None
    options = {
        option: given[field] for field, option in OPTIONS.items() if given[field] not in (None, "")
    }
    audit = page.audit("Enqueued.")
    try:
        return enqueueing.enqueue(given["handler"], payload, options, on_stored=audit)
    except (TypeError, PayloadError) as error:
        form.add_error("payload", shown(error))
    except (LookupError, ValueError) as error:
        form.add_error(None, shown(error))
    return None


def _shown(page: Page, handle: JobHandle[Any], name: str) -> HttpResponse:
    """Lead to the page of a job, which may be in another database than what the page shows."""
    page.message(
        _("Enqueued: %s") % name
        if handle.is_new
        else _("Nothing was enqueued: this job has the unique id.")
    )
    if not page.may("view_job"):
        return HttpResponseRedirect(page.url("job_add"))
    place = page.url("job", handle.job_id)
    if len(databases()) > 1:
        place += f"?{urlencode({DATABASE: handle.database})}"
    return HttpResponseRedirect(place)


SCREENS = (Screen("job_add", "jobs/add/", add, "enqueue_job"),)
