"""Limits that hold over all workers: their use, and what operators ask of them."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from kjo_django.admin.actions import form_of
from kjo_django.admin.dashboard.page import Page, Screen, forget, shared
from kjo_django.limits import control
from kjo_django.operations.actions import ACTIONS, Subject
from kjo_django.store.counting import COUNT_LIMIT

NAME = "limits"


def show(page: Page) -> HttpResponse:
    """Show all limits, and how they are used."""
    found = shared(NAME, control.overview)
    rows = [{**row, "buttons": _buttons(page, row)} for row in found]
    waiting = sum(row["waiting_count"] for row in rows)
    summary = _("%(count)d limits, %(waiting)d jobs wait") % {
        "count": len(rows),
        "waiting": waiting,
    }
    values = {"rows": rows, "summary": summary, "limit": COUNT_LIMIT}
    return page.show("limits.html", values, title=_("Limits"))


def _buttons(page: Page, row: dict[str, Any]) -> list[dict[str, Any]]:
    is_asked = any(value is not None for value in row["asked"].values())
    buttons = page.buttons(
        Subject.LIMITS, "asked" if is_asked else "declared", row["name"], row["name"]
    )
    if not page.allows(ACTIONS["change_limits"]):
        return buttons
    link = {"label": _("Change"), "url": page.url("limit", row["name"]), "asks": True}
    return [link, *buttons]


def change(page: Page, limit: str) -> HttpResponse:
    """Show the form that changes a limit; store what was posted."""
    action = ACTIONS["change_limits"]
    if not page.allows(action):
        raise PermissionDenied
    known = {row["name"]: row for row in control.overview()}
    if limit not in known and not control.is_known(limit):
        raise Http404(_("No limit has this name."))
    row = known.get(limit, {"asked": {}, "declared": {}})
    fields = form_of(action, many=False)
    form = fields(page.request.POST or None, initial=row["asked"])
    if limit.startswith("queue:"):
        del form.fields["concurrency"]  # that of a queue is of each worker
    if page.request.method == "POST" and form.is_valid():
        given = {name: value or None for name, value in form.cleaned_data.items()}
        audit = page.audit(action.log_entry(given))
        done = page.attempt(
            lambda: action.perform([limit], actor=page.actor, on_changed=audit, **given)
        )
        forget(NAME)
        if done is not None:
            page.message(str(action.done % done.changed_count))
            return HttpResponseRedirect(page.url("limits"))
    return page.show(
        "",
        {"form": form, "limit": limit, "row": row, "back": page.url("limits")},
        controls="limit_form.html",
        title=_("Limit %s") % limit,
    )


SCREENS = (
    Screen(
        "limits",
        "limits/",
        show,
        "view_limitcontrol",
        title=gettext_lazy("Limits"),
        model="limitcontrol",
    ),
    Screen("limit", "limits/<path:limit>/", change, "view_limitcontrol"),
)
