"""The first screen: whether all is well, figures and charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.http import HttpResponse
from django.utils.translation import get_language, gettext_lazy, ngettext
from django.utils.translation import gettext as _

from kjo_django.admin.dashboard.charts import Chart, Line
from kjo_django.admin.dashboard.figures import (
    Tile,
    at_least,
    capped,
    duration,
    duration_step,
    number,
)
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


def _series(
    length: timedelta, queue: str | None = None, handler: str | None = None
) -> metrics.Series:
    # A point of a long time changes slowly, and costs more to add up.
    seconds = max(CACHE_SECONDS, length.total_seconds() / 20_000)
    found: metrics.Series = shared(
        f"series {length} {queue}\n{handler}",
        lambda: metrics.series(length, queue=queue, handler=handler),
        seconds,
    )
    return found


def charts(length: timedelta, queue: str | None = None, handler: str | None = None) -> list[Chart]:
    """Return the charts of all queues, of one queue, or of one handler."""
    found = _series(length, queue, handler)
    marks = shared(f"deploys {length}", lambda: metrics.deploys(length), seconds=10)
    times = [point.time for point in found.points]

    def line(kind: str, label: Any, name: str, **more: Any) -> Line:
        return Line(kind, label, [getattr(point, name) for point in found.points], **more)

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
        made.append(Chart(name, title, times, lines, show=duration, step=duration_step))
    if handler is None:  # a topic's records are of several
        lag = line("lag", _("messages"), "lag", is_level=True)
        made.append(Chart("lag", _("Lag"), times, [lag]))
    return made


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence that says whether all is well, and what is to be done if not."""

    kind: str
    """``good``, ``unknown``, ``warning`` or ``bad``."""
    text: str
    checks: Sequence[health.Check] = ()
    """Those that failed or warn, each with its remedy."""
    url: str = ""
    """Where the operator goes next, with ``link`` as its words."""
    link: Any = ""


def _verdict(page: Page, figures: dict[str, Any], checks: Sequence[health.Check]) -> Verdict:
    """Judge by what is known. A server has little time to answer a page: one that does not is no
    failure."""
    failed = [check for check in checks if not check.ok and not check.is_unknown]
    warnings = [check for check in checks if check.ok and check.fix]
    status_url, see_checks = page.url("status"), _("See all checks")
    if failed:
        text = ngettext(
            "%d check fails.",
            "%d checks fail.",
            len(failed),
        )
        found = [*failed, *warnings]
        return Verdict("bad", text % len(failed), found, status_url, see_checks)
    letters = figures["open_dead_letters"]
    if letters:
        text = ngettext(
            "Work goes on, and %(count)s dead letter needs a decision: replay or discard it.",
            "Work goes on, and %(count)s dead letters need a decision: replay or discard them.",
            letters,
        ) % {"count": capped(letters, COUNT_LIMIT)}
        url = page.url("dead_letters") if page.may("view_deadletter") else ""
        return Verdict("warning", text, warnings, url, _("See them by error"))
    if warnings:
        count = len(warnings)
        text = ngettext("Work goes on, with %d warning.", "Work goes on, with %d warnings.", count)
        return Verdict("warning", text % count, warnings, status_url, see_checks)
    if any(check.is_unknown for check in checks):
        return Verdict("unknown", _("What is known is well: %s") % _facts(figures))
    return Verdict("good", _("All is well: %s") % _facts(figures))


def _facts(figures: dict[str, Any]) -> str:
    """Return the rest of the sentence for a system that needs nobody."""
    workers = ngettext("%d worker", "%d workers", figures["living_workers"])
    values = {
        "workers": workers % figures["living_workers"],
        "rate": number(figures["done_per_minute"]),
        "age": duration(figures["oldest_waiting_seconds"]),
    }
    if figures["oldest_waiting_seconds"]:
        text = _("%(workers)s, %(rate)s jobs a minute; the oldest job has waited for %(age)s.")
    else:
        text = _("%(workers)s, %(rate)s jobs a minute; no job waits.")
    return text % values


def show(page: Page) -> HttpResponse:
    """Show the verdict, tiles and charts."""
    figures = shared("overview", overview.overview)
    length = RANGES[chosen_range(page)][1]
    checks: list[health.Check] = shared(
        f"health:{get_language()}", lambda: health.health(HEALTH_TIMEOUT), HEALTH_SECONDS
    )
    verdict = _verdict(page, figures, checks)
    return page.show(
        "overview.html",
        {
            # The lag is read where the chart reads it.
            "groups": _tiles(page, figures, _series(length).points[-1].lag),
            "summary": f"{verdict.text} {_summary(figures)}",
            "verdict": verdict,
            "unknown": [check.name for check in checks if check.is_unknown],
            "ranges": range_links(page),
            "charts": [chart.render() for chart in charts(length)],
        },
        title=_("Dashboard"),
    )


def _tiles(page: Page, figures: dict[str, Any], lag: int | None) -> dict[str, list[Tile]]:
    """Return the figures in groups of what belongs together, by the title of each."""
    return {
        _("Problems"): _problems(page, figures),
        _("Work"): _work(page, figures),
        _("Waiting"): [
            _jobs(page, figures, "queued", _("Queued"), _("ready for a worker")),
            _jobs(page, figures, "failing", _("Failing"), _("will be tried again")),
            _jobs(page, figures, "scheduled", _("Scheduled"), _("due later")),
        ],
        _("Delivery"): _delivery(page, figures, lag),
    }


def _jobs(page: Page, figures: dict[str, Any], state: str, label: Any, detail: str) -> Tile:
    count = at_least(figures["states"][state], state in figures["lower_bounds"])
    url = f"{page.url('jobs')}?q=state:{state}" if page.may("view_job") else ""
    return Tile(label, count, url, detail)


def _problems(page: Page, figures: dict[str, Any]) -> list[Tile]:
    letters = figures["open_dead_letters"]
    url = page.url("dead_letters") if page.may("view_deadletter") else ""
    count, oldest = capped(letters, COUNT_LIMIT), duration(figures["oldest_waiting_seconds"])
    return [
        Tile(_("Dead letters"), count, url, _("wait for a decision"), letters > 0),
        Tile(_("Failed, last hour"), number(figures["failed_last_hour"]), "", _("given up")),
        Tile(_("Oldest waiting"), oldest, "", _("since it was due")),
    ]


def _work(page: Page, figures: dict[str, Any]) -> list[Tile]:
    consumers, workers = page.url("consumers"), figures["living_workers"]
    lanes = ngettext("run or are next, %d lane", "run or are next, %d lanes", figures["lanes"])
    return [
        Tile(_("Done per minute"), number(figures["done_per_minute"]), "", _("now")),
        Tile(_("Workers"), number(workers), consumers, _("alive"), not workers),
        Tile(_("At workers"), number(figures["in_flight"]), consumers, lanes % figures["lanes"]),
    ]


def _delivery(page: Page, figures: dict[str, Any], lag: int | None) -> list[Tile]:
    label = _("Consumer lag") if page.has_log else _("Lag")
    tiles = [
        Tile(
            *(label, _("unknown") if lag is None else number(lag)),
            *(page.url("consumers"), _("messages not consumed")),
            is_unknown=lag is None,
        ),
        _jobs(page, figures, "pending", _("Pending"), _("stored, not published")),
    ]
    if not figures["needs_relay"]:
        return tiles  # a job is published by the transaction that stores it
    age = figures["oldest_backlog_seconds"]
    is_late = (age or 0) > health.Thresholds().relay_age.total_seconds()
    backlog = _("due, not published") if age is None else _("due, oldest %s") % duration(age)
    outbox = capped(figures["backlog"], COUNT_LIMIT)
    return [*tiles, Tile(_("Outbox"), outbox, "", backlog, is_late)]


def _summary(figures: dict[str, Any]) -> str:
    return _(
        "%(rate)s jobs a minute, %(failed)s failed in the last hour, %(letters)s dead letters"
    ) % {
        "rate": number(figures["done_per_minute"]),
        "failed": number(figures["failed_last_hour"]),
        "letters": capped(figures["open_dead_letters"], COUNT_LIMIT),
    }


SCREENS = (Screen("overview", "", show, title=gettext_lazy("Overview")),)
