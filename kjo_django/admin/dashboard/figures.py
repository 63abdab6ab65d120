"""How numbers and times are written for people, and a figure of a screen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Any

from django.utils import timezone
from django.utils.formats import date_format, number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure. The first of a group is the largest.

    :param value: as it is shown.
    :param url: leads to the rows that are counted.
    :param detail: what the figure counts, in a few words.
    """

    label: Any
    value: str
    url: str = ""
    detail: str = ""
    is_bad: bool = False
    is_unknown: bool = False


_UNITS = ((1e3, "k"), (1e6, "M"), (1e9, "G"))
_DURATIONS = (
    (0.001, gettext_lazy("%s ms")),
    (1.0, gettext_lazy("%s s")),
    (60.0, gettext_lazy("%s min")),
    (3_600.0, gettext_lazy("%s h")),
    (86_400.0, gettext_lazy("%s d")),
)
_ROUND_SECONDS = (1, 2, 5, 10, 15, 30)
_ROUND_DURATIONS = (
    *_ROUND_SECONDS,
    *(60 * count for count in _ROUND_SECONDS),
    *(3_600 * count for count in (1, 2, 3, 6, 12)),
)
"""Steps of an axis of durations from a second to half a day, in seconds."""


def number(value: float | str | None) -> str:
    """Return a count, rounded: with all its digits below ten thousand, short above."""
    if value is None or isinstance(value, str):  # a template's word for what is not there
        return NOTHING
    if round(abs(value)) >= 10_000:
        scaled, unit = next(
            (found, unit)
            for size, unit in _UNITS
            if round(abs(found := value / size)) < 1000 or unit == _UNITS[-1][1]
        )
        return f"{_rounded(scaled, 1 if round(abs(scaled), 1) < 100 else 0)} {unit}"
    if value == int(value):
        return number_format(int(value), use_l10n=True, force_grouping=True)
    return _rounded(value, 1 if abs(value) >= 1 else 2)


def _rounded(value: float, places: int) -> str:
    """Return a number with so many decimal places. Django cuts those of a float."""
    return number_format(f"{value:.{places}f}", places)


def exact(value: int | str | None) -> str:
    """Return a whole number with all its digits, as an offset needs them."""
    return str(value) if isinstance(value, int) else NOTHING


def capped(value: int, limit: int) -> str:
    """Return a bounded count; at its limit it is shown as a lower bound."""
    return at_least(value, value >= limit)


def at_least(value: int, is_lower_bound: bool) -> str:
    """Return a count that may be a lower bound."""
    return f"{number(value)}+" if is_lower_bound else number(value)


def duration(seconds: float | str | None) -> str:
    """Return a time, rounded, in the unit that suits it."""
    if seconds is None or isinstance(seconds, str):
        return NOTHING
    if seconds == 0:
        return "0"
    longer = [size for size, _text in _DURATIONS[1:]]
    for (size, text), next_size in zip(_DURATIONS, [*longer, math.inf], strict=True):
        scaled = round(seconds / size, 1 if seconds / size < 10 else 0)
        if scaled * size < next_size:
            return str(text) % _rounded(scaled, 0 if scaled == int(scaled) else 1)
    return NOTHING


def number_step(least: float) -> float:
    """Return the step of an axis of numbers: the next one of 1, 2 or 5 times a power of ten that is
    not below ``least``."""
    if least < 1e-9:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    # A logarithm's rounding error must not make the step too small.
    return next((power * count for count in (1, 2, 5) if power * count >= least), power * 10)


def duration_step(least: float) -> float:
    """Return the step of an axis of durations: a round number of milliseconds, seconds, minutes,
    hours or days that is not below ``least``, all in seconds."""
    day = _DURATIONS[-1][0]
    if least <= 1:
        return number_step(least)
    if least > _ROUND_DURATIONS[-1]:
        return day * number_step(least / day)
    return float(next(step for step in _ROUND_DURATIONS if step >= least))


def age(value: datetime | None) -> SafeString | str:
    """Return how long ago a moment was, or how far ahead it is; the exact one is in its title."""
    if not value:
        return NOTHING
    seconds = (timezone.now() - value).total_seconds()
    text = duration(abs(seconds)) if abs(seconds) >= 1 else _("%s s") % 1
    if seconds < 0:
        text = _("in %s") % text
    return format_html(
        '<time datetime="{}" title="{}">{}</time>', value.isoformat(), with_zone(value), text
    )


def size(count: int | None) -> str:
    """Return bytes as MiB."""
    if not count:
        return NOTHING
    return _("%s MiB") % number_format(count / 1048576, 0)


def moment(value: datetime | None) -> SafeString | str:
    """Return a moment in the current time zone, to the second. Its title has the year and the zone,
    its attribute the exact moment."""
    if not value:
        return NOTHING
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        value.isoformat(),
        with_zone(value),
        date_format(timezone.localtime(value), "j M H:i:s"),
    )


def with_zone(value: datetime, zone: tzinfo | None = None) -> str:
    """Return a moment with its day of the week, its year and the name of the zone.

    :param zone: whose clocks show it; None: the current one.
    """
    local = timezone.localtime(value, zone)
    return f"{date_format(local, 'D j M Y H:i:s')} {local.tzname()}"
