"""Charts as SVG made here: they work without JavaScript, follow the admin's colours, are read out
by screen readers as a summary and a table, and need no library.

Times are shown in the current time zone. A chart's numbers are computed elsewhere; here is only
where they go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from kjo_django.admin.dashboard.figures import number
from kjo_django.admin.display import inert

WIDTH, HEIGHT = 640, 190
LEFT, RIGHT, TOP, BOTTOM = 58, 630, 14, 160
TICKS = 4
MOMENTS = 5
SPARK_WIDTH, SPARK_HEIGHT = 120, 24


@dataclass(frozen=True, slots=True)
class Line:
    """One row of values; None where nothing was measured.

    :param kind: names its colour in the style sheet.
    """

    kind: str
    label: Any
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """Values over time. Bars are stacked; lines are not.

    :param times: the start of each value's time, evenly spaced.
    :param show: how a value is written.
    :param marks: moments to point out, with a text.
    """

    name: str
    title: Any
    times: Sequence[datetime]
    lines: Sequence[Line]
    is_stacked: bool = False
    show: Callable[[float | None], str] = number
    marks: Sequence[tuple[datetime, str]] = field(default=())

    def render(self) -> SafeString:
        """Return it as HTML."""
        template = "admin/kjo_django/dashboard/chart.html"
        return render_to_string(template, {"chart": _geometry(self)})


def sparkline(values: Sequence[float], summary: str) -> SafeString:
    """Return a row of values as a line as high as a line of text."""
    top = max([*values, 1])
    step = SPARK_WIDTH / max(1, len(values) - 1)
    points = " ".join(
        f"{index * step:.1f},{SPARK_HEIGHT - 2 - (SPARK_HEIGHT - 4) * value / top:.1f}"
        for index, value in enumerate(values)
    )
    context = {"points": points, "summary": summary, "width": SPARK_WIDTH, "height": SPARK_HEIGHT}
    return render_to_string("admin/kjo_django/dashboard/sparkline.html", context)


def _geometry(chart: Chart) -> dict[str, Any]:
    count = len(chart.times)
    slot = (RIGHT - LEFT) / max(1, count)
    top = _ceiling(_highest(chart))

    def across(index: float) -> float:
        return round(LEFT + index * slot, 1)

    def up(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * value / top, 1)

    ticks = [top * step / TICKS for step in range(TICKS + 1)]
    every = max(1, math.ceil(count / MOMENTS))
    has_days = count > 1 and chart.times[-1] - chart.times[0] > timedelta(hours=24)
    return {
        "name": chart.name,
        "title": chart.title,
        "summary": _summary(chart),
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": RIGHT,
        "top": TOP,
        "bottom": BOTTOM,
        "base": BOTTOM + 18,
        "mark_at": TOP - 3,
        "depth": BOTTOM - TOP,
        "label_at": LEFT - 6,
        "ticks": [{"at": up(v), "text_at": up(v) + 4, "text": chart.show(v)} for v in ticks],
        "moments": [
            {"at": across(index + 0.5), "text": _moment(chart.times[index], has_days)}
            for index in range(every // 2, count, every)
        ],
        "bars": _bars(chart, across, up, slot) if chart.is_stacked else (),
        "lines": [
            {
                "kind": line.kind,
                "label": line.label,
                "latest": chart.show(_latest(line.values)),
                "polylines": () if chart.is_stacked else _polylines(line.values, across, up),
            }
            for line in chart.lines
        ],
        "marks": [
            {"at": across(place), "text": inert(text)}
            for moment, text in chart.marks
            if (place := _place(chart.times, moment)) is not None
        ],
        "spots": [
            {"x": across(index), "width": round(slot, 2), "text": _words(chart, index, has_days)}
            for index in range(count)
        ],
        "rows": [
            {
                "moment": _moment(chart.times[index], has_days),
                "cells": [chart.show(line.values[index]) for line in chart.lines],
            }
            for index in reversed(range(count))
        ],
        "is_empty": not any(value for line in chart.lines for value in line.values),
    }


def _highest(chart: Chart) -> float:
    columns = zip(*(line.values for line in chart.lines), strict=True)
    combine = sum if chart.is_stacked else max
    return max((combine(value or 0 for value in column) for column in columns), default=0)


def _ceiling(value: float) -> float:
    """Return the next round number above: 1, 2, 2.5 or 5 times a power of ten."""
    if value < 1e-9:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    # A rounding error of a logarithm must not leave a value above the top.
    return next((power * step for step in (1, 2, 2.5, 5) if power * step >= value), power * 10)


def _bars(
    chart: Chart, across: Callable[[float], float], up: Callable[[float], float], slot: float
) -> list[dict[str, Any]]:
    bars = []
    for index in range(len(chart.times)):
        below = 0.0
        for line in chart.lines:
            value = line.values[index] or 0
            if value <= 0:
                continue
            y, foot = up(below + value), up(below)
            bars.append(
                {
                    "kind": line.kind,
                    "x": across(index + 0.1),
                    "y": y,
                    "width": round(slot * 0.8, 2),
                    "height": round(max(foot - y, 0.5), 1),
                }
            )
            below += value
    return bars


def _polylines(
    values: Sequence[float | None], across: Callable[[float], float], up: Callable[[float], float]
) -> list[str]:
    """Return the points of each stretch without a gap; a lone value gets a short line."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            stretches.append([])
        else:
            stretches[-1].append((across(index + 0.5), up(value)))
    for stretch in stretches:
        if len(stretch) == 1:
            (x, y) = stretch[0]
            stretch[:] = [(x - 3, y), (x + 3, y)]
    return [" ".join(f"{x:g},{y:g}" for x, y in stretch) for stretch in stretches if stretch]


def _place(times: Sequence[datetime], moment: datetime) -> float | None:
    if len(times) < 2 or not times[0] <= moment <= times[-1] + (times[1] - times[0]):
        return None
    return (moment - times[0]) / (times[1] - times[0])


def _moment(moment: datetime, has_days: bool) -> str:
    local = timezone.localtime(moment)
    return date_format(local, "j M H:i" if has_days else "H:i")


def _words(chart: Chart, index: int, has_days: bool) -> str:
    parts = [f"{line.label} {chart.show(line.values[index])}" for line in chart.lines]
    return f"{_moment(chart.times[index], has_days)}: {', '.join(parts)}"


def _summary(chart: Chart) -> str:
    parts = []
    for line in chart.lines:
        known = [value for value in line.values if value is not None]
        highest = chart.show(max(known) if known else None)
        latest = chart.show(_latest(line.values))
        parts.append(
            _("%(line)s: now %(latest)s, at most %(highest)s")
            % {"line": line.label, "latest": latest, "highest": highest}
        )
    return f"{chart.title}. {'; '.join(parts)}"


def _latest(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)
