"""Limits that hold over all workers: their use, and what operators ask of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db.models import Exists, OuterRef, Q, Sum
from django.http import Http404, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from kjo_django.admin.actions import form_of
from kjo_django.admin.dashboard.figures import at_least, number
from kjo_django.admin.dashboard.page import Page, Screen, forget, shared
from kjo_django.clock import CLOCK
from kjo_django.enqueue.job_status import leased_jobs
from kjo_django.limits import control
from kjo_django.limits.rules import job_limit, queue_limit
from kjo_django.models import HeldJob, Job, MetricBucket
from kjo_django.operations.actions import ACTIONS, Subject
from kjo_django.operations.monitoring.metrics import SETTLED_ATTEMPTS
from kjo_django.operations.monitoring.status import SPLIT_LIMIT, WAITING, with_shown_state
from kjo_django.runtime import jobs_database
from kjo_django.states import JobState
from kjo_django.store.counting import COUNT_LIMIT, many_grouped_counts
from kjo_django.values import Rate, rate

NAME = "limits"
MOST_RUNNING = 500
"""Oldest queued jobs of which it is asked whether they run: those that run are among the first."""
SHORTEST, LONGEST = timedelta(minutes=5), timedelta(hours=2)
"""The time over which a rate is measured: that of the rate, within these."""


def show(page: Page) -> HttpResponse:
    """Show all limits, and how they are used."""
    rows = [{**row, **_use(row), "buttons": _buttons(page, row)} for row in shared(NAME, _found)]
    waiting = sum(row["all_waiting"] for row in rows)
    summary = _("%(count)d limits, %(waiting)d jobs wait") % {
        "count": len(rows),
        "waiting": waiting,
    }
    values = {"rows": rows, "summary": summary}
    return page.show("limits.html", values, title=_("Limits"))


def _found() -> list[dict[str, Any]]:
    rows = control.overview()
    _add_use(rows)
    return rows


def _use(row: dict[str, Any]) -> dict[str, Any]:
    """Return how many jobs wait for a limit, and the rate that is reached, for the template."""
    waiting = row["waiting_count"] + row["due_count"]
    is_capped = row["due_is_capped"] or row["waiting_count"] >= COUNT_LIMIT
    reached = None
    if row["reached"] is not None:
        reached = f"{number(round(row['reached'], 2))}/{row['rate'].partition('/')[2]}"
    return {"all_waiting": waiting, "waiting": at_least(waiting, is_capped), "reached": reached}


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


# --- How they are used ----------------------------------------------------------------------------


def _add_use(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each limit, as ``limits.control.overview`` returns it, ``due_count``, the jobs that
    are due and neither run nor are in line; ``due_is_capped``, whether that is a lower bound; and
    ``reached``, the jobs that have ended an attempt in as much time as the rate names, or None
    where there is no rate.

    It takes three queries beside those of coordination, however many limits there are.
    """
    if not rows:
        return
    now = CLOCK.now()
    due, is_capped = _due(now)
    for row in rows:
        row["due_count"], row["due_is_capped"] = due[row["name"]], is_capped
    reached = _reached({row["name"]: rate(row["rate"]) for row in rows if row["rate"]}, now)
    for row in rows:
        row["reached"] = reached.get(row["name"])


def _due(now: datetime) -> tuple[Counter[str], bool]:
    """Return by the name of a limit how many of its jobs are due, neither run nor are in line, and
    whether only the first rows were looked at."""
    jobs = Job.objects.using(jobs_database()).order_by("pk")
    in_line = HeldJob.objects.using(jobs_database()).filter(
        job_id=OuterRef("pk"), generation=OuterRef("generation")
    )
    looked_at = with_shown_state(jobs, now).annotate(in_line=Exists(in_line))
    found = many_grouped_counts(
        {str(state): looked_at.filter(state=state) for state in WAITING},
        ("queue", "handler", "shown_state", "in_line"),
        limit=SPLIT_LIMIT,
    )
    counts: Counter[str] = Counter()
    for state, (groups, _is_capped) in found.items():
        for (queue, handler, shown, is_in_line), (count, _oldest) in groups.items():
            if shown == state and not is_in_line:
                counts[queue_limit(queue)] += count
                counts[job_limit(handler)] += count
    queued = list(jobs.filter(state=JobState.QUEUED).defer("payload", "result")[:MOST_RUNNING])
    running = leased_jobs(queued)
    for job in queued:
        if job.pk in running:
            counts[queue_limit(job.queue)] -= 1
            counts[job_limit(job.handler)] -= 1
    return counts, any(is_capped for _groups, is_capped in found.values())


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
