"""Small SVG pictures that are legible on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 760
LEFT, RIGHT = 210, 90
BAR, GAP, GROUP_GAP = 14, 2, 12
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 14px }
.faint { fill: #57606a }
.axis { stroke: #8c959f; stroke-width: 1 }
.grid { stroke: #8c959f; stroke-width: 1; opacity: .25 }
.c0 { fill: #0969da; stroke: #0969da }
.c1 { fill: #8c959f; stroke: #8c959f }
.c2 { fill: #1a7f37; stroke: #1a7f37 }
.line { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .faint { fill: #9198a1 }
  .c0 { fill: #4493f8; stroke: #4493f8 }
  .c2 { fill: #3fb950; stroke: #3fb950 }
}
"""


@dataclass(frozen=True)
class Bars:
    """A group of bars under one name; one value for each series, None for no bar."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Curve:
    """Points joined by a line."""

    name: str
    points: Sequence[tuple[float, float]]


def bar_chart(
    title: str,
    groups: Sequence[Bars],
    *,
    series: Sequence[str],
    unit: str = "",
    is_logarithmic: bool = False,
) -> str:
    """Draw horizontal bars, each with its value.

    :param is_logarithmic: each further tenth of the width is a factor; for values far apart.
    """
    known = [value for group in groups for value in group.values if value]
    scale = _scale(min(known), max(known), is_logarithmic)
    y, parts = 60.0, _legend(series)
    for group in groups:
        height = len(group.values) * (BAR + GAP)
        parts.append(_text(LEFT - 8, y + height / 2 + 3, group.name, "end"))
        for number, value in enumerate(group.values):
            if value:
                width = scale(value) * (WIDTH - LEFT - RIGHT)
                parts.append(
                    f'<rect class="c{number}" x="{LEFT}" y="{y:.1f}" '
                    f'width="{width:.1f}" height="{BAR}" rx="2"/>'
                )
                parts.append(_text(LEFT + width + 6, y + BAR - 3, _shown(value), "start", "faint"))
            y += BAR + GAP
        y += GROUP_GAP
    parts.append(f'<path class="axis" d="M{LEFT} 52V{y - GROUP_GAP + 4:.1f}"/>')
    told = f"{unit}, logarithmic" if is_logarithmic else unit
    return _page(title, told, parts, y + 4)


def line_chart(
    title: str, curves: Sequence[Curve], *, unit: str, x_unit: str, height: float = 240
) -> str:
    """Draw curves over a common axis; both axes begin at nothing."""
    most_x = max(x for curve in curves for x, _ in curve.points)
    most_y = _round_up(max(y for curve in curves for _, y in curve.points))
    left, top, width = 70.0, 60.0, WIDTH - 70.0 - 30
    parts = _legend([curve.name for curve in curves])
    for step in range(5):
        value = most_y * step / 4
        y = top + height * (1 - step / 4)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{left + width:.1f}"/>')
        parts.append(_text(left - 8, y + 4, _shown(value), "end", "faint"))
        x = left + width * step / 4
        parts.append(_text(x, top + height + 20, _shown(most_x * step / 4), "middle", "faint"))
    for number, curve in enumerate(curves):
        path = "L".join(
            f"{left + width * x / most_x:.1f} {top + height * (1 - y / most_y):.1f}"
            for x, y in curve.points
        )
        parts.append(f'<path class="c{number} line" style="fill:none" d="M{path}"/>')
    parts.append(_text(left + width, top + height + 38, x_unit, "end", "faint"))
    return _page(title, unit, parts, top + height + 48)


def _scale(least: float, most: float, is_logarithmic: bool) -> Callable[[float], float]:
    if not is_logarithmic:
        return lambda value: value / most
    low = math.log10(least) - 0.3
    return lambda value: (math.log10(value) - low) / (math.log10(most) - low)


def _round_up(value: float) -> float:
    step = 10 ** math.floor(math.log10(value)) / 2
    return math.ceil(value / step) * step


def _shown(value: float) -> str:
    if value >= 1_000_000:
        return f"{value / 1e6:g} M"
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}"


def _legend(series: Sequence[str]) -> list[str]:
    parts, x = [], 20.0
    for number, name in enumerate(series if len(series) > 1 else ()):
        parts.append(f'<rect class="c{number}" x="{x:.0f}" y="34" width="10" height="10" rx="2"/>')
        parts.append(_text(x + 15, 43, name, "start"))
        x += 40 + 6.6 * len(name)
    return parts


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    chosen = f' class="{kind}"' if kind else ""
    return f'<text{chosen} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _page(title: str, unit: str, parts: Sequence[str], height: float) -> str:
    head = f"{title} ({unit})" if unit else title
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'role="img" aria-label="{escape(head)}">',
            f"<style>{STYLE}</style>",
            _text(20, 22, head, "start", "title"),
            *parts,
            "</svg>",
            "",
        ]
    )
