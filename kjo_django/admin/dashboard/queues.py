"""Queues: figures of each, and its limits and retry policy."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from kjo_django import registry
from kjo_django.admin.actions import form_of
from kjo_django.admin.dashboard import overview
from kjo_django.admin.dashboard.actions import carry_out
from kjo_django.admin.dashboard.charts import sparkline
from kjo_django.admin.dashboard.figures import number
from kjo_django.admin.dashboard.page import Page, Screen, shared
from kjo_django.models import QueueControl
from kjo_django.operations import queues
from kjo_django.operations.actions import ACTIONS, Subject
from kjo_django.operations.monitoring import metrics, status
from kjo_django.runtime import jobs_database

MOST_COUNTED = 20_000
"""Most jobs of a state that are counted by queue, for which their rows must be read."""
LAG_SECONDS = 5.0
"""Seconds for which the figures of all queues are shared: they also ask the broker."""


def show(page: Page) -> HttpResponse:
    """Show all queues."""
    rows, _is_capped = shared("queues", lambda: status.queue_rows(limit=MOST_COUNTED), LAG_SECONDS)
    return page.show(
        "queues.html",
        {"rows": _rows(page, rows), "limit": MOST_COUNTED, "summary": _summary(rows)},
        title=_("Queues"),
    )


def _rows(page: Page, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = shared("metrics by queue", metrics.by_queue)
    workers = shared("workers", status.workers)
    rows = []
    for row in found:
        figures = done.get(row["queue"])
        values = figures.sparkline if figures else []
        total = number(sum(values))
        summary = _("%s jobs in the last hour") % total
        working = [
            worker for worker in workers if worker["is_alive"] and row["queue"] in worker["queues"]
        ]
        rows.append(
            {
                **row,
                "buttons": _buttons(page, row, row["queue"]),
                "figures": figures,
                "spark": sparkline(values or [0], summary),
                "worker_count": len(working),
                "slots": sum(worker["concurrency"] for worker in working),
            }
        )
    return rows


def _buttons(page: Page, row: dict[str, Any], name: str = "") -> list[dict[str, Any]]:
    state = "paused" if row["is_paused"] else "running"
    return page.buttons(Subject.QUEUES, state, row["queue"], name)


def _summary(rows: list[dict[str, Any]]) -> str:
    paused = sum(row["is_paused"] for row in rows)
    return _("%(count)d queues, %(paused)d paused") % {"count": len(rows), "paused": paused}


def show_one(page: Page, queue: str) -> HttpResponse:
    """Show one queue, and change its policy."""
    known = {row["queue"]: row for row in queues.overview()}
    if queue not in known:
        raise Http404(_("No queue has this name."))
    action = ACTIONS["limit_queues"]
    form = None
    if page.allows(action):
        fields = form_of(action, many=False)
        form = fields(page.request.POST or None, initial=_limits(queue))
    if page.request.method == "POST":
        if form is None:
            raise PermissionDenied
        if form.is_valid():
            return carry_out(page, action, [queue], form.cleaned_data, "queue", queue)
    length = overview.RANGES[overview.chosen_range(page)][1]
    return page.show(
        "queue.html",
        {
            "queue": known[queue],
            "buttons": _buttons(page, known[queue]),
            "form": form,
            "handlers": [each.name for each in registry.handlers() if each.options.queue == queue],
            "ranges": overview.range_links(page),
            "charts": [chart.render() for chart in overview.charts(length, queue)],
        },
        below="queue_form.html",
        title=_("Queue %s") % queue,
    )


def _limits(queue: str) -> dict[str, Any]:
    rows = QueueControl.objects.using(jobs_database()).filter(queue=queue)
    return rows.values(*queues.LIMITS).first() or {}


SCREENS = (
    Screen("queues", "queues/", show, title=gettext_lazy("Queues"), model="queuecontrol"),
    Screen("queue", "queues/<path:queue>/", show_one),
)
