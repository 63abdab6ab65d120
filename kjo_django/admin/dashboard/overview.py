"""The first screen: failed checks, figures and charts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.http import HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from kjo_django.admin.dashboard.charts import Chart, Line
from kjo_django.admin.dashboard.figures import capped, duration, number
from kjo_django.admin.dashboard.page import CACHE_SECONDS, Page, Screen, shared
from kjo_django.operations.monitoring import health, metrics
from kjo_django.operations.monitoring import status as overview
from kjo_django.store.counting import COUNT_LIMIT

RANGES: dict[str, tuple[Any, timedelta]] = {
    "5m": (gettext_lazy("5 minutes"), timedelta(minutes=5)),
    "1h": (gettext_lazy("1 hour"), timedelta(hours=1)),
    "24h": (gettext_lazy("24 hours"), timedelta(hours=24)),
    "7d": (gettext_lazy("7 days"), timedelta(days=7)),
}
USUAL_RANGE = "1h"
HEALTH_SECONDS = 10.0
"""Seconds for which a result of the checks is shared: they also ask the broker."""
HEALTH_TIMEOUT = 1.5


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure."""

    label: Any
    value: str
    url: str = ""
    detail: str = ""
    is_bad: bool = False


def chosen_range(page: Page) -> str:
    """Return the period of the charts that the address asks for."""
    wanted = page.request.GET.get("range", USUAL_RANGE)
    return wanted if wanted in RANGES else USUAL_RANGE


def range_links(page: Page) -> list[dict[str, Any]]:
    """Return the choices of the charts' period."""
    now = chosen_range(page)
    links = []
    for name, (label, _length) in RANGES.items():
        query = page.request.GET.copy()
        query["range"] = name
        links.append({"label": label, "url": f"?{query.urlencode()}", "is_here": name == now})
    return links


def charts(length: timedelta, queue: str | None = None) -> list[Chart]:
    """Return the charts of all queues, or of one."""
    # A point of a long time changes slowly, and costs more to add up.
    seconds = max(CACHE_SECONDS, length.total_seconds() / 20_000)
    found = shared(f"series {length} {queue}", lambda: metrics.series(length, queue=queue), seconds)
    marks = shared(f"deploys {length}", lambda: metrics.deploys(length), seconds=10)
    times = [point.time for point in found.points]

    def line(kind: str, label: Any, name: str) -> Line:
        return Line(kind, label, [getattr(point, name) for point in found.points])

    made = [
        Chart(
            "throughput",
            _("Jobs per minute"),
            times,
            [
                line("completed", _("completed"), "completed_per_minute"),
                line("retried", _("retried"), "retried_per_minute"),
                line("failed", _("failed"), "failed_per_minute"),
            ],
            is_stacked=True,
            marks=[(deploy["time"], deploy["release"]) for deploy in marks],
        )
    ]
    for name, title in (("run", _("Run time")), ("wait", _("Waiting time"))):
        lines = [line(f"p{p}", f"p{p}", f"{name}_p{p}") for p in (50, 95, 99)]
        made.append(Chart(name, title, times, lines, show=duration))
    made.append(Chart("lag", _("Lag"), times, [line("lag", _("messages"), "lag")]))
    return made


def failing_checks() -> list[health.Check]:
    """Return the checks that failed, as of a moment ago."""
    found: list[health.Check] = shared(
        "health", lambda: health.health(HEALTH_TIMEOUT), HEALTH_SECONDS
    )
    return [check for check in found if check.ok is False]


def show(page: Page) -> HttpResponse:
    """Show tiles, charts and failed checks."""
    figures = shared("overview", overview.overview)
    length = RANGES[chosen_range(page)][1]
    return page.show(
        "overview.html",
        {
            "tiles": _tiles(page, figures),
            "summary": _summary(figures),
            "broken": failing_checks(),
            "ranges": range_links(page),
            "charts": [chart.render() for chart in charts(length)],
        },
        title=_("Dashboard"),
    )


def _tiles(page: Page, figures: dict[str, Any]) -> list[Tile]:
    def count(state: str) -> str:
        return capped(figures["states"][state], COUNT_LIMIT)

    def jobs(state: str) -> str:
        return f"{page.url('jobs')}?q=state:{state}" if page.may("view_job") else ""

    letters = figures["open_dead_letters"]
    age = figures["oldest_backlog_seconds"]
    is_late = (age or 0) > health.Thresholds().relay_age.total_seconds()
    letters_url = page.url("dead_letters") if page.may("view_deadletter") else ""
    backlog_age = _("oldest %s") % duration(age) if age is not None else ""
    return [
        Tile(_("Pending"), count("pending"), jobs("pending")),
        Tile(_("Scheduled"), count("scheduled"), jobs("scheduled")),
        Tile(_("Queued"), count("queued"), jobs("queued")),
        Tile(_("In flight"), number(figures["in_flight"]), jobs("processing")),
        Tile(_("Retrying"), count("failing"), jobs("failing")),
        Tile(_("Dead letters"), capped(letters, COUNT_LIMIT), letters_url, is_bad=letters > 0),
        Tile(_("Failed, last hour"), number(figures["failed_last_hour"])),
        Tile(_("Done per minute"), number(figures["done_per_minute"])),
        Tile(_("Oldest waiting"), duration(figures["oldest_waiting_seconds"])),
        Tile(_("Consumer lag"), number(figures["lag"]), page.url("consumers")),
        Tile(_("Outbox"), capped(figures["backlog"], COUNT_LIMIT), "", backlog_age, is_late),
        Tile(
            _("Workers"),
            number(figures["living_workers"]),
            page.url("consumers"),
            is_bad=not figures["living_workers"],
        ),
    ]


def _summary(figures: dict[str, Any]) -> str:
    return _(
        "%(running)s in flight, %(failed)s failed in the last hour, %(letters)s dead letters"
    ) % {
        "running": number(figures["in_flight"]),
        "failed": number(figures["failed_last_hour"]),
        "letters": number(figures["open_dead_letters"]),
    }


SCREENS = (Screen("overview", "", show, title=gettext_lazy("Overview")),)
