"""Charts as SVG made here: they work without JavaScript, follow the admin's colours, are read out
by screen readers as a summary and a table, and need no library.

Times are shown in the current time zone. A chart's numbers are computed elsewhere; here is only
where they go.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, tzinfo
from typing import Any

from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import get_language
from django.utils.translation import gettext as _

from kjo_django.admin.dashboard.figures import number, number_step
from kjo_django.operations.safe_text import inert

WIDTH, HEIGHT = 640, 190
LEFT, RIGHT, TOP, BOTTOM = 58, 630, 14, 160
MOST_STEPS = 5
"""Most steps of the vertical axis."""
MOMENTS = 5
MARK_LETTERS = 12
"""Most characters of a mark; a release may be a commit's digest."""
SPARK_WIDTH, SPARK_HEIGHT = 120, 24


@dataclass(frozen=True, slots=True)
class Line:
    """One series of values; None where nothing was measured.

    :param kind: names its colour in the style sheet.
    :param is_level: whether its last value is the present one, also where that is not known; of
        another line the present value is the last that was measured.
    """

    kind: str
    label: Any
    values: Sequence[float | None]
    is_level: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Values over time. Bars are stacked; lines are not.

    :param times: the start of each value's time, evenly spaced.
    :param show: how a value is written.
    :param step: returns the next round step of the axis that is not below a value.
    :param marks: moments to point out, with a text.
    """

    name: str
    title: Any
    times: Sequence[datetime]
    lines: Sequence[Line]
    is_stacked: bool = False
    show: Callable[[float | None], str] = number
    step: Callable[[float], float] = number_step
    marks: Sequence[tuple[datetime, str]] = field(default=())

    def render(self) -> SafeString:
        """Return the chart as HTML."""
        template = "admin/kjo_django/dashboard/chart.html"
        return render_to_string(template, {"chart": _geometry(self)})


def sparkline(values: Sequence[float], summary: str) -> SafeString:
    """Return a series as a sparkline."""
    top = max([*values, 1])
    step = SPARK_WIDTH / max(1, len(values) - 1)
    points = " ".join(
        f"{index * step:.1f},{SPARK_HEIGHT - 2 - (SPARK_HEIGHT - 4) * value / top:.1f}"
        for index, value in enumerate(values)
    )
    context = {"points": points, "summary": summary, "box": f"0 0 {SPARK_WIDTH} {SPARK_HEIGHT}"}
    return render_to_string("admin/kjo_django/dashboard/sparkline.html", context)


def _geometry(chart: Chart) -> dict[str, Any]:
    """Return the template's values. Coordinates are text already: a template would localise
    numbers, and SVG takes no decimal comma.
    """
    count = len(chart.times)
    slot = (RIGHT - LEFT) / max(1, count)
    levels = _levels(chart)
    top = levels[-1]

    def across(index: float) -> str:
        return f"{LEFT + index * slot:.1f}"

    def up(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / top

    every = max(1, math.ceil(count / MOMENTS))
    has_days = count > 1 and chart.times[-1] - chart.times[0] > timedelta(hours=24)
    moments = [_moment(time, has_days) for time in chart.times]
    cells = [[chart.show(value) for value in line.values] for line in chart.lines]
    latest = [_latest(line, chart.show) for line in chart.lines]
    return {
        "name": chart.name,
        "title": chart.title,
        "summary": _summary(chart, latest),
        "box": f"0 0 {WIDTH} {HEIGHT}",
        "left": str(LEFT),
        "right": str(RIGHT),
        "top": str(TOP),
        "bottom": str(BOTTOM),
        "base": str(BOTTOM + 18),
        "mark_at": str(TOP - 3),
        "label_at": str(LEFT - 6),
        "ticks": [
            {
                "at": f"{up(value):.1f}",
                "text_at": f"{up(value) + 4:.1f}",
                "text": chart.show(value),
            }
            for value in levels
        ],
        "moments": [
            {"at": across(index + 0.5), "text": moments[index]}
            for index in range(every // 2, count, every)
        ],
        "bars": _bars(chart, up, slot) if chart.is_stacked else (),
        "lines": _lines(chart, latest, up, slot),
        "marks": [
            {"at": across(place), "text": inert(_short(text)), "title": inert(text)}
            for moment, text in chart.marks
            if (place := _place(chart.times, moment)) is not None
        ],
        "spots": format_html_join(
            "",
            '<rect class="kjo-spot" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>',
            (
                (
                    across(index),
                    TOP,
                    f"{slot:.2f}",
                    BOTTOM - TOP,
                    _words(chart, index, moments, cells),
                )
                for index in range(count)
            ),
        ),
        "rows": format_html_join(
            "",
            '<tr><th scope="row">{}</th>{}</tr>',
            (
                (
                    moments[index],
                    format_html_join("", "<td>{}</td>", ((column[index],) for column in cells)),
                )
                for index in reversed(range(count))
            ),
        ),
        "is_empty": not any(value for line in chart.lines for value in line.values),
    }


def _levels(chart: Chart) -> list[float]:
    """Return the values at the lines of the vertical axis: zero and multiples of a round step, the
    last of which is not below the highest value."""
    highest = _highest(chart)
    step = chart.step(highest / MOST_STEPS)
    return [step * count for count in range(max(1, math.ceil(highest / step)) + 1)]


def _lines(
    chart: Chart, latest: Sequence[str], up: Callable[[float], float], slot: float
) -> list[dict[str, Any]]:
    """Return each series with its latest value; stacked ones are drawn as bars."""
    return [
        {
            "kind": line.kind,
            "label": line.label,
            "latest": now,
            "polylines": () if chart.is_stacked else _polylines(line.values, up, slot),
        }
        for line, now in zip(chart.lines, latest, strict=True)
    ]


def _highest(chart: Chart) -> float:
    columns = zip(*(line.values for line in chart.lines), strict=True)
    combine = sum if chart.is_stacked else max
    return max((combine(value or 0 for value in column) for column in columns), default=0)


def _bars(chart: Chart, up: Callable[[float], float], slot: float) -> list[dict[str, str]]:
    """Return the outline of the stacked bars of each series."""
    below = [0.0] * len(chart.times)
    bars = []
    for line in chart.lines:
        outline = []
        for index, value in enumerate(line.values):
            if not value or value < 0:
                continue
            foot, head = up(below[index]), up(below[index] + value)
            below[index] += value
            x, width = LEFT + (index + 0.1) * slot, slot * 0.8
            outline.append(
                f"M{x:.1f} {foot:.1f}V{min(head, foot - 0.5):.1f}h{width:.1f}V{foot:.1f}z"
            )
        bars.append({"kind": line.kind, "outline": "".join(outline)})
    return bars


def _polylines(
    values: Sequence[float | None], up: Callable[[float], float], slot: float
) -> list[str]:
    """Return the points of each stretch without a gap; a single value gets a short line."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            stretches.append([])
        else:
            stretches[-1].append((LEFT + (index + 0.5) * slot, up(value)))
    for stretch in stretches:
        if len(stretch) == 1:
            (x, y) = stretch[0]
            stretch[:] = [(x - 3, y), (x + 3, y)]
    return [" ".join(f"{x:.1f},{y:.1f}" for x, y in stretch) for stretch in stretches if stretch]


def _place(times: Sequence[datetime], moment: datetime) -> float | None:
    if len(times) < 2 or not times[0] <= moment <= times[-1] + (times[1] - times[0]):
        return None
    return (moment - times[0]) / (times[1] - times[0])


def _short(text: str) -> str:
    return text if len(text) <= MARK_LETTERS else f"{text[: MARK_LETTERS - 1]}…"


def _moment(moment: datetime, has_days: bool) -> str:
    # All charts of a page have the same times.
    return _written(moment, has_days, timezone.get_current_timezone(), get_language())


@functools.lru_cache(maxsize=2048)
def _written(moment: datetime, has_days: bool, zone: tzinfo, language: str | None) -> str:
    return date_format(timezone.localtime(moment, zone), "j M H:i" if has_days else "H:i")


def _words(chart: Chart, index: int, moments: list[str], cells: list[list[str]]) -> str:
    pairs = zip(chart.lines, cells, strict=True)
    parts = [f"{line.label} {column[index]}" for line, column in pairs]
    return f"{moments[index]}: {', '.join(parts)}"


def _summary(chart: Chart, latest: list[str]) -> str:
    parts = []
    for line, now in zip(chart.lines, latest, strict=True):
        known = [value for value in line.values if value is not None]
        parts.append(
            _("%(line)s: now %(latest)s, at most %(highest)s")
            % {
                "line": line.label,
                "latest": now,
                "highest": chart.show(max(known) if known else None),
            }
        )
    return f"{chart.title}. {'; '.join(parts)}"


def _latest(line: Line, show: Callable[[float | None], str]) -> str:
    if line.is_level and line.values[-1] is None:
        return _("unknown")
    return show(next((value for value in reversed(line.values) if value is not None), None))
