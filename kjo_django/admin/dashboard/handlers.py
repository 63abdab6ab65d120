"""Handlers: how often each runs and fails, how long it takes, and what it fails with."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpResponse
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from kjo_django import registry
from kjo_django.admin.dashboard import jobs, overview
from kjo_django.admin.dashboard.charts import sparkline
from kjo_django.admin.dashboard.figures import number
from kjo_django.admin.dashboard.page import Page, Screen, shared
from kjo_django.conf import get_settings
from kjo_django.operations import enqueueing
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.operations.fingerprints import error_groups
from kjo_django.operations.monitoring import metrics
from kjo_django.operations.search import quoted

SHOWN_ERRORS = 10
SHARED_SECONDS = 10.0
"""Seconds for which the errors of a handler are shared between viewers."""


def show(page: Page) -> HttpResponse:
    """Show all handlers: those with attempts in the last hour first, by the time they took."""
    done: dict[str, metrics.Summary] = shared("metrics by handler", metrics.by_handler)
    known = {each.name: each.options.queue for each in registry.handlers()}
    rows = [_row(name, known.get(name, ""), done.get(name)) for name in {*known, *done}]
    rows.sort(key=lambda row: (-row["lanes"], -row["attempts"], row["name"]))
    failed = sum(figures.failed for figures in done.values())
    handlers = ngettext("%s handler", "%s handlers", len(rows)) % number(len(rows))
    jobs = ngettext("%s job failed in the last hour", "%s jobs failed in the last hour", failed)
    context = {
        "rows": rows,
        "summary": f"{handlers}, {jobs % number(failed)}",
    }
    return page.show("handlers.html", context, title=_("Handlers"))


def _row(name: str, queue: str, figures: metrics.Summary | None) -> dict[str, Any]:
    found = figures or metrics.Summary(sparkline=[0])
    attempts = found.completed + found.retried + found.failed
    text = ngettext("%s job in the last hour", "%s jobs in the last hour", found.completed)
    total = text % number(found.completed)
    return {
        "name": name,
        "queue": queue,
        "figures": found,
        "attempts": attempts,
        "unsuccessful": found.retried + found.failed,
        "lanes": found.run_seconds / 3600,
        "spark": sparkline(found.sparkline, total),
    }


def show_one(page: Page, handler: str) -> HttpResponse:
    """Show one handler: its options, its charts, and the errors of its open dead letters."""
    known = registry.find(handler)
    if known is None and handler not in shared("metrics by handler", metrics.by_handler):
        raise Http404(_("No handler has this name, and none had in the last hour."))
    length = overview.RANGES[overview.chosen_range(page)][1]
    context: dict[str, Any] = {
        "handler": handler,
        "description": jobs.description(handler),
        "ranges": overview.range_links(page),
        "charts": [chart.render() for chart in overview.charts(length, handler=handler)],
        "summary": handler,
    }
    if known is not None:
        queue = get_settings().queue(known.options.queue)
        context |= {
            "queue": queue.name,
            "max_attempts": known.max_attempts(queue),
            "time_limit": known.options.timeout or queue.timeout,
            "limits": [*filter(None, (known.options.rate, _slots(known)))],
        }
    if handler in enqueueing.handlers() and page.may("enqueue_job"):
        context["enqueue"] = f"{page.url('job_add')}?{urlencode({'handler': handler})}"
    if page.may("view_job"):
        context["searches"] = [
            {"label": label, "url": _jobs(page, handler, state)} for state, label in _STATES.items()
        ]
    if page.may("view_deadletter"):
        context["errors"] = _errors(page, handler)
    return page.show("handler.html", context, title=handler)


_STATES = {
    "processing": gettext_lazy("Running now"),
    "failing": gettext_lazy("Waiting for a retry"),
    "failed": gettext_lazy("Failed for good"),
}


def _jobs(page: Page, handler: str, state: str) -> str:
    search = f"handler:{quoted(handler)} state:{state}"
    return f"{page.url('jobs')}?{urlencode({'q': search})}"


def _slots(handler: registry.Handler) -> str:
    count = handler.options.concurrency
    return "" if count is None else _("at most %d at once") % count


def _errors(page: Page, handler: str) -> list[dict[str, Any]]:
    """Return the largest groups of its open dead letters, each with a link to them."""
    found = shared(
        f"errors of {handler}",
        lambda: error_groups(DeadLetterFilter(handler=handler), limit=SHOWN_ERRORS),
        SHARED_SECONDS,
    )
    letters = page.url("letters")
    return [
        {"group": each, "url": f"{letters}?{urlencode({'fingerprint': each.fingerprint})}"}
        for each in found
    ]


SCREENS = (
    Screen("handlers", "handlers/", show, title=gettext_lazy("Handlers")),
    Screen("handler", "handlers/<path:handler>/", show_one),
)
