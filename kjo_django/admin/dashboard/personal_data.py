"""Personal data: the form that looks for a person, and what was asked and erased.

A person is typed once. The form only counts, by an internal job whose payload holds digests; what
it has counted is erased by a button.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django import forms
from django.http import Http404, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop

from kjo_django.admin.dashboard.page import Page, Screen
from kjo_django.models import Job
from kjo_django.operations.translations import translated
from kjo_django.personal_data.erasure import (
    MAX_REFERENCE,
    Mode,
    described,
    newest,
    start_counted,
    start_erasure,
)
from kjo_django.personal_data.person import MAX_LENGTH, MOST, Person
from kjo_django.refusals import shown
from kjo_django.runtime import jobs_database

SHOWN = 20
TYPED = {"keys": "keys", "ids": "ids", "values": "fields"}
"""Fields of the form, and what they are called in a request."""
MODES = (
    (Mode.DELETE.value, gettext_lazy("Delete jobs and dead letters")),
    (Mode.REDACT.value, gettext_lazy("Keep the rows and empty them")),
)


def _lines(label: Any, help_text: Any) -> forms.CharField:
    area = forms.Textarea(attrs={"rows": 3, "autocomplete": "off", "spellcheck": "false"})
    longest = MOST * MAX_LENGTH
    return forms.CharField(
        label=label, help_text=help_text, required=False, widget=area, max_length=longest
    )


class PersonForm(forms.Form):
    """What a person is known by, and what is to become of the rows."""

    keys = _lines(gettext_lazy("Keys"), gettext_lazy("Keys of jobs and messages, one per line."))
    ids = _lines(
        gettext_lazy("Ids"),
        gettext_lazy("Unique ids, and ids of jobs and messages, one per line."),
    )
    values = _lines(
        gettext_lazy("Fields"),
        gettext_lazy("For example customer.email=ada@example.org, one per line. *=… is any field."),
    )
    mode = forms.ChoiceField(label=gettext_lazy("What to do with the rows"), choices=MODES)
    cancel = forms.BooleanField(
        label=gettext_lazy("Also cancel open jobs and workflows"), required=False
    )
    reference = forms.CharField(
        label=gettext_lazy("Reference"),
        help_text=gettext_lazy("Reference of the request, for the log. A number, not a name."),
        required=False,
        max_length=MAX_REFERENCE,
    )

    def clean(self) -> dict[str, Any]:
        """Put the digests in the place of what was typed."""
        given = dict(self.cleaned_data)
        lines = {
            name: [line.strip() for line in given.pop(field, "").splitlines() if line.strip()]
            for field, name in TYPED.items()
        }
        try:
            return {**given, "person": Person.parse(lines)}
        except ValueError as error:
            raise forms.ValidationError(shown(error)) from None


def show(page: Page) -> HttpResponse:
    """Show the form and the newest requests; look for the person that was posted."""
    # Reports of errors leave out what was typed.
    setattr(page.request, "sensitive_post_parameters", tuple(TYPED))  # noqa: B010
    form = PersonForm(page.request.POST or None)
    if page.request.method == "POST" and form.is_valid():
        options = {**form.cleaned_data, "actor": page.actor, "dry_run": True}
        if (row := page.attempt(lambda: start_erasure(**options))) is not None:
            return _asked(page, row, gettext_noop("Looking for the person."))
    rows = [_translated(row) for row in newest(SHOWN)]
    context = {"form": form, "rows": rows, "shown": SHOWN}
    return page.show(
        "erasures.html", context, controls="person_form.html", title=_("Personal data")
    )


def show_one(page: Page, job: UUID) -> HttpResponse:
    """Show one request and its report."""
    return page.show("erasure.html", {"row": _translated(_find(job))}, title=_("Personal data"))


def erase(page: Page, job: UUID) -> HttpResponse:
    """Erase what a request has counted."""
    row = Job.objects.using(jobs_database()).get(pk=_find(job)["id"])
    started = page.attempt(lambda: start_counted(row, actor=page.actor))
    if started is None:
        return page.back("erasure", job)
    return _asked(page, started, gettext_noop("Erasing what was found."))


def _find(job: UUID) -> dict[str, Any]:
    found = described([job])
    if not found:
        raise Http404(_("There is no such request."))
    return found[0]


def _translated(row: dict[str, Any]) -> dict[str, Any]:
    """Return a request as its reader's language says what the person was found by."""
    return {**row, "found_by": ", ".join(map(translated, row["found_by"].split(", ")))}


def _asked(page: Page, row: Job, message: str) -> HttpResponse:
    """Show a message in the operator's language; the log has it in English."""
    page.audit(f"{message} Found by {_find(row.pk)['found_by']}.")([row])
    page.message(_(message))
    return HttpResponseRedirect(page.url("erasure", row.pk))


PERMISSION = "erase_personal_data"
SCREENS = (
    Screen(
        "personal_data",
        "personal-data/",
        show,
        PERMISSION,
        title=gettext_lazy("Personal data"),
    ),
    Screen("erasure", "personal-data/<uuid:job>/", show_one, PERMISSION),
    Screen("erasure_start", "personal-data/<uuid:job>/erase/", erase, PERMISSION, is_action=True),
)
