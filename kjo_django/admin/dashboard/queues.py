"""Queues: figures of each, and its limits and retry policy."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from kjo_django import registry
from kjo_django.admin.actions import form_of
from kjo_django.admin.dashboard import overview
from kjo_django.admin.dashboard.actions import carry_out
from kjo_django.admin.dashboard.charts import sparkline
from kjo_django.admin.dashboard.figures import Tile, capped, duration, number
from kjo_django.admin.dashboard.page import Page, Screen, forget, shared
from kjo_django.conf import get_settings
from kjo_django.operations import search
from kjo_django.operations.actions import ACTIONS, Subject
from kjo_django.operations.monitoring import metrics, status
from kjo_django.operations.monitoring.health import shares_by_partition

NAME = "queues"
MOST_COUNTED = 20_000
"""Most jobs of a state that are counted by queue, for which their rows must be read."""
LAG_SECONDS = 5.0
"""Seconds for which the figures of all queues are shared: they also ask the broker."""


def show(page: Page) -> HttpResponse:
    """Show all queues."""
    rows = _found()
    return page.show(
        "queues.html",
        {"rows": _rows(page, rows), "limit": MOST_COUNTED, "summary": _summary(rows)},
        title=_("Queues"),
    )


def _found() -> list[dict[str, Any]]:
    rows, _is_capped = shared(NAME, lambda: status.queue_rows(limit=MOST_COUNTED), LAG_SECONDS)
    return list(rows)


def _rows(page: Page, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = shared("metrics by queue", metrics.by_queue)
    workers, conf = shared("workers", status.workers), get_settings()
    rows = []
    for row in found:
        figures = done.get(row["queue"])
        values = figures.sparkline if figures else []
        total = number(sum(values))
        text = ngettext("%s job in the last hour", "%s jobs in the last hour", sum(values))
        summary = text % total
        working = [
            worker for worker in workers if worker["is_alive"] and row["queue"] in worker["queues"]
        ]
        rows.append(
            {
                **row,
                "buttons": _buttons(page, row, row["queue"]),
                "figures": figures,
                "is_log": shares_by_partition(conf.queue(row["queue"])),
                "done": sum(values),
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
    queues = ngettext("%d queue", "%d queues", len(rows)) % len(rows)
    return ", ".join((queues, _("%d paused") % paused))


def show_one(page: Page, queue: str) -> HttpResponse:
    """Show one queue with its counts, and change its policy."""
    known = [row for row in _found() if row["queue"] == queue]
    if not known:
        raise Http404(_("No queue has this name."))
    (row,) = _rows(page, known)
    action = ACTIONS["limit_queues"]
    form = None
    if page.allows(action):
        fields = form_of(action, many=False)
        form = fields(page.request.POST or None, initial=row["asked"])
    if page.request.method == "POST":
        if form is None:
            raise PermissionDenied
        if form.is_valid():
            answer = carry_out(page, action, [queue], form.cleaned_data, "queue", queue)
            forget(NAME)
            return answer
    length = overview.RANGES[overview.chosen_range(page)][1]
    return page.show(
        "queue.html",
        {
            "queue": row,
            "groups": _tiles(page, row),
            "buttons": _buttons(page, row),
            "form": form,
            "handlers": [each.name for each in registry.handlers() if each.options.queue == queue],
            "ranges": overview.range_links(page),
            "charts": [chart.render() for chart in overview.charts(length, queue)],
        },
        below="queue_form.html",
        title=_("Queue %s") % queue,
    )


def _tiles(page: Page, row: dict[str, Any]) -> dict[str, list[Tile]]:
    def jobs(state: str, label: Any, detail: str) -> Tile:
        found = search.JobFilter(queue=row["queue"], state=state)
        url = f"{page.url('jobs')}?{urlencode({'q': str(found)})}" if page.may("view_job") else ""
        return Tile(label, capped(row["states"][state], MOST_COUNTED), url, detail)

    figures, letters = row["figures"], row["open_dead_letters"]
    letters_url = f"{page.url('dead_letters')}?{urlencode({'queue': row['queue']})}"
    lanes = ngettext("%d lane", "%d lanes", row["slots"]) % row["slots"]
    return {
        _("Problems"): [
            Tile(
                _("Dead letters"),
                capped(letters, MOST_COUNTED),
                letters_url if page.may("view_deadletter") else "",
                _("wait for a decision"),
                letters > 0,
            ),
            jobs("failing", _("Failing"), _("will be tried again")),
        ],
        _("Waiting"): [
            jobs("queued", _("Queued"), _("ready for a worker")),
            jobs("pending", _("Pending"), _("stored, not published")),
            jobs("scheduled", _("Scheduled"), _("due later")),
        ],
        _("Delays"): [
            Tile(
                _("Oldest waiting"),
                duration(row["oldest_waiting_seconds"]),
                detail=_("since it was due"),
            ),
            Tile(
                _("Lag"),
                _("unknown") if row["lag"] is None else number(row["lag"]),
                detail=_("messages not consumed, just now"),
                is_unknown=row["lag"] is None,
            ),
            Tile(_("Wait p95"), duration(figures and figures.wait_p95), "", _("last hour")),
        ],
        _("Work"): [
            Tile(_("Workers"), number(row["worker_count"]), page.url("consumers"), lanes),
            Tile(_("Completed"), number(row["done"]), "", _("last hour")),
            Tile(_("Run p95"), duration(figures and figures.run_p95), "", _("last hour")),
        ],
    }


SCREENS = (
    Screen("queues", "queues/", show, title=gettext_lazy("Queues"), model="queuecontrol"),
    Screen("queue", "queues/<path:queue>/", show_one),
)
