"""How numbers and times are written for people."""

from __future__ import annotations

from datetime import datetime

from django.utils import timezone
from django.utils.formats import date_format, number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

NOTHING = "–"


def number(value: float | str | None) -> str:
    """Return a count: exact below ten thousand, short above."""
    if value is None or isinstance(value, str):  # a template's word for what is not there
        return NOTHING
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / {"G": 1e9, "M": 1e6, "k": 1e3}[unit]
            return f"{number_format(scaled, 1 if scaled < 100 else 0)} {unit}"
    if value == int(value):
        return number_format(int(value), use_l10n=True, force_grouping=True)
    return number_format(value, 1 if abs(value) >= 1 else 2)


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
    """Return a time in the unit that suits it."""
    if seconds is None or isinstance(seconds, str):
        return NOTHING
    if seconds == 0:
        return "0"
    if seconds < 1:
        return _("%s ms") % number_format(seconds * 1000, 0 if seconds >= 0.01 else 1)
    if seconds < 60:
        return _("%s s") % number_format(seconds, 1 if seconds < 10 else 0)
    for size, text in ((60, _("%s min")), (3600, _("%s h")), (86400, _("%s d"))):
        if seconds < size * (60 if size == 60 else 24 if size == 3600 else 1e9):
            scaled = seconds / size
            return text % number_format(scaled, 1 if scaled < 10 else 0)
    return NOTHING


def age(value: datetime | None) -> SafeString | str:
    """Return how long ago a moment was, or how far ahead it is; the exact one is in its title."""
    if not value:
        return NOTHING
    seconds = (timezone.now() - value).total_seconds()
    text = duration(abs(seconds)) if abs(seconds) >= 1 else _("%s s") % 1
    if seconds < 0:
        text = _("in %s") % text
    title = date_format(timezone.localtime(value), "j M Y H:i:s")
    return format_html('<time datetime="{}" title="{}">{}</time>', value.isoformat(), title, text)


def size(count: int | None) -> str:
    """Return bytes as MiB."""
    if not count:
        return NOTHING
    return _("%s MiB") % number_format(count / 1048576, 0)


def moment(value: datetime | None) -> SafeString | str:
    """Return a moment in the current time zone, to the second; the exact one is in its title."""
    if not value:
        return NOTHING
    local = timezone.localtime(value)
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        value.isoformat(),
        value.isoformat(),
        date_format(local, "j M H:i:s"),
    )
