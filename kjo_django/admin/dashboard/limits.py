"""Limits that hold over all workers: their use, and what operators ask of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db.models import Q, Sum
from django.http import Http404, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from kjo_django.admin.actions import form_of
from kjo_django.admin.dashboard.figures import at_least, number
from kjo_django.admin.dashboard.page import Page, Screen, forget, shared
from kjo_django.clock import CLOCK
from kjo_django.limits import control
from kjo_django.limits.rules import job_limit, queue_limit
from kjo_django.models import MetricBucket
from kjo_django.operations.actions import ACTIONS, Subject
from kjo_django.operations.monitoring.metrics import SETTLED_ATTEMPTS
from kjo_django.runtime import jobs_database
from kjo_django.values import Rate, rate

NAME = "limits"
SHORTEST, LONGEST = timedelta(minutes=5), timedelta(hours=2)
"""The time over which a rate is measured: that of the rate, within these."""


def show(page: Page) -> HttpResponse:
    """Show all limits, and how they are used."""
    rows = [{**row, **_use(row), "buttons": _buttons(page, row)} for row in shared(NAME, _found)]
    waiting = sum(row["waiting_count"] for row in rows)
    limits = ngettext("%d limit", "%d limits", len(rows)) % len(rows)
    jobs = ngettext("%d job waits", "%d jobs wait", waiting) % waiting
    summary = f"{limits}, {jobs}"
    values = {"rows": rows, "summary": summary}
    return page.show("limits.html", values, title=_("Limits"))


def _found() -> list[dict[str, Any]]:
    rows = control.overview()
    _add_reached(rows)
    return rows


def _use(row: dict[str, Any]) -> dict[str, Any]:
    """Return how many jobs wait for a limit, and the rate that is reached, for the template."""
    waiting = at_least(row["waiting_count"], row["waiting_is_lower_bound"])
    reached = None
    if row["reached"] is not None:
        reached = f"{number(round(row['reached'], 2))}/{row['rate'].partition('/')[2]}"
    return {"waiting": waiting, "reached": reached}


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
            page.message(action.done(done.changed_count))
            return HttpResponseRedirect(page.url("limits"))
    return page.show(
        "",
        {"form": form, "limit": limit, "row": row, "back": page.url("limits")},
        controls="limit_form.html",
        title=_("Limit %s") % limit,
    )


# --- How they are used ----------------------------------------------------------------------------


def _add_reached(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each limit, as ``limits.control.overview`` returns it, ``reached``: the jobs that have
    ended an attempt in as much time as the rate names, or None where there is no rate. It takes one
    query, however many limits there are."""
    rates = {row["name"]: rate(row["rate"]) for row in rows if row["rate"]}
    reached = _reached(rates, CLOCK.now())
    for row in rows:
        row["reached"] = reached.get(row["name"])


def _reached(rates: dict[str, Rate], now: datetime) -> dict[str, float]:
    """Return by the name of a limit how many of its jobs have ended an attempt in as much time as
    its rate names, as measured over the last whole minutes."""
    if not rates:
        return {}
    whole = now.replace(second=0, microsecond=0)
    lengths = {name: _measured(timedelta(seconds=each.seconds)) for name, each in rates.items()}
    columns = {length: f"within_{length.total_seconds():.0f}" for length in {*lengths.values()}}
    buckets = (
        MetricBucket.objects.using(jobs_database())
        .order_by()
        .filter(minute__gte=whole - max(columns), minute__lt=whole)
    )
    sums = {
        column: Sum(SETTLED_ATTEMPTS, filter=Q(minute__gte=whole - length))
        for length, column in columns.items()
    }
    ended: Counter[tuple[str, str]] = Counter()
    names = [*sums]
    for queue, handler, *found in buckets.values_list("queue", "handler").annotate(**sums):
        for column, count in zip(names, found, strict=True):
            ended[queue_limit(queue), column] += count or 0
            ended[job_limit(handler), column] += count or 0
    return {
        name: ended[name, columns[lengths[name]]] * each.seconds / lengths[name].total_seconds()
        for name, each in rates.items()
    }


def _measured(length: timedelta) -> timedelta:
    """Return the time over which a rate is measured, in whole minutes."""
    minutes = -(-max(SHORTEST, min(LONGEST, length)) // timedelta(minutes=1))
    return timedelta(minutes=minutes)


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
