"""Replaying and discarding dead letters: one, some, a group of errors, or all a search finds.

What would happen is shown first, and carried out by a second, posted form. Many are a job's work.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from kjo_django.admin.dashboard.dead_letters import address_of, selection_of
from kjo_django.admin.dashboard.desk import Desk, Screen
from kjo_django.admin.outcome_messages import tell_replay
from kjo_django.models import Job
from kjo_django.operations import bulk, dead_letters
from kjo_django.operations.counting import COUNT_LIMIT, bounded_count
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.operations.rows import RATE_MAX, RATE_MIN

LOOKED_AT = 500
"""Letters a preview looks at one by one; all are counted."""


class ReplayForm(forms.Form):
    """How fast, and whether in spite of what speaks against it."""

    rate = forms.FloatField(
        label=gettext_lazy("At most so many a second"),
        min_value=RATE_MIN,
        max_value=RATE_MAX,
        required=False,
        help_text=gettext_lazy("Empty: as fast as possible."),
    )
    limit = forms.IntegerField(
        label=gettext_lazy("At most so many"),
        min_value=1,
        max_value=bulk.SYNCHRONOUS_LIMIT,
        required=False,
        help_text=gettext_lazy("The oldest first. Empty: all."),
    )
    force = forms.BooleanField(
        label=gettext_lazy("Also those that were replayed too often or have taken effect"),
        required=False,
        help_text=gettext_lazy("These get a new id: what they did is done once more."),
    )


class DiscardForm(forms.Form):
    """Why."""

    note = forms.CharField(
        label=gettext_lazy("Note"),
        max_length=300,
        help_text=gettext_lazy("Why these will not be replayed."),
    )


def replay(desk: Desk) -> HttpResponse:
    """Preview a replay, and carry it out."""
    selection = _selection(desk)
    if selection is None:
        return desk.back("letters")
    is_posted = desk.request.method == "POST" and "confirmed" in desk.request.POST
    form = ReplayForm(desk.request.POST if is_posted else None)
    if is_posted and form.is_valid():
        done = desk.attempt(
            lambda: bulk.replay_or_start(
                selection,
                limit=form.cleaned_data["limit"],
                rate=form.cleaned_data["rate"],
                force=form.cleaned_data["force"],
                actor=desk.actor,
                on_changed=desk.audit("Replayed."),
            )
        )
        return _after(desk, done)
    return _preview(desk, selection, form, gettext_lazy("Replay"), "replay")


def discard(desk: Desk) -> HttpResponse:
    """Preview what would be discarded, and discard it with a note."""
    selection = _selection(desk)
    if selection is None:
        return desk.back("letters")
    is_posted = desk.request.method == "POST" and "confirmed" in desk.request.POST
    form = DiscardForm(desk.request.POST if is_posted else None)
    if is_posted and form.is_valid():
        note = form.cleaned_data["note"]
        done = desk.attempt(
            lambda: bulk.discard_or_start(
                selection,
                note=note,
                actor=desk.actor,
                on_changed=desk.audit(f"Discarded: {note}"),
            )
        )
        return _after(desk, done)
    return _preview(desk, selection, form, gettext_lazy("Discard"), "discard")


def _selection(desk: Desk) -> DeadLetterFilter | None:
    if not desk.may("view_deadletter"):
        raise PermissionDenied  # a preview tells of them
    given = desk.request.POST if desk.request.method == "POST" else desk.request.GET
    selection = selection_of(desk, given)
    if selection.is_empty and "all" not in given:
        desk.tell(_("Tick the dead letters you mean first."), messages.WARNING)
        return None
    return selection


def _preview(
    desk: Desk, selection: DeadLetterFilter, form: forms.Form, label: Any, action: str
) -> HttpResponse:
    rows = dead_letters.select(selection)
    count = bounded_count(rows)
    report = dead_letters.preview(rows, limit=LOOKED_AT)
    return desk.show(
        "",
        {
            "form": form,
            "label": label,
            "action": action,
            "count": count,
            "limit": COUNT_LIMIT,
            "report": report,
            # As lists: a template would look the method's name up among the counts.
            "histogram": list(report.histogram.items()),
            "refused": list(report.refused.items()),
            "looked_at": min(count, LOOKED_AT),
            "fields": _fields(selection),
            "query": address_of(selection),
            "synchronous": bulk.SYNCHRONOUS_LIMIT,
        },
        controls="replay_confirm.html",
        title=_("%s dead letters") % label,
    )


def _fields(selection: DeadLetterFilter) -> list[tuple[str, str]]:
    """Return the selection as hidden fields."""
    pairs = [
        (name, value)
        for name in ("queue", "handler", "reason", "error", "fingerprint")
        if (value := getattr(selection, name))
    ]
    return [*pairs, *(("letter", str(id)) for id in selection.ids or ())]


def _after(desk: Desk, done: Any) -> HttpResponse:
    if isinstance(done, Job):
        desk.audit("Started to replay or discard dead letters.")([done])
        desk.tell(_("This takes a while; a job of its own does it."))
        if desk.may("view_job"):
            return desk.back("job", done.pk)
    elif isinstance(done, int):
        text = ngettext("%d dead letter was discarded.", "%d dead letters were discarded.", done)
        desk.tell(text % done, messages.SUCCESS if done else messages.WARNING)
    elif done is not None:
        tell_replay(desk.tell, done)
    return desk.back("dead_letters")


SCREENS = (
    Screen("replay", "dead-letters/replay/", replay, "replay_dlq"),
    Screen("discard", "dead-letters/discard/", discard, "discard_dlq"),
)
