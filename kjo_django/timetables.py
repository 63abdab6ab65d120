"""When something that repeats is due: cron expressions, intervals and single moments.

Pure: no clock and no database. Cron expressions are read by ``cronsim``, which does as Debian's
cron does when clocks are changed for summer time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import takewhile
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

from django.utils.timezone import get_default_timezone
from django.utils.translation import gettext_noop as _

from kjo_django.refusals import RefusedError, Wording
from kjo_django.values import meant_by

FIELDS: Mapping[str, str] = {
    "minute": "0-59",
    "hour": "0-23",
    "day-of-month": _("1-31, L or LW, and in one of its months"),
    "month": _("1-12 or JAN-DEC"),
    "day-of-week": _("0-7 or SUN-SAT, 5L, or 5#2"),
}
"""The fields of a cron expression, and what each takes."""
NICKNAMES: Mapping[str, str] = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
MAX_CRON = 100
"""Characters of a cron expression."""
MAX_ZONE = 64
"""Characters of the name of a time zone."""
_WINDOWS = [timedelta(hours=2), timedelta(days=2), timedelta(days=40), timedelta(days=800)]
"""Times in which the latest ticks are looked for, before all of the time is looked through."""
INSTANT = timedelta(microseconds=1)
"""What a tick is later than the latest moment before it."""


# --- Values ---------------------------------------------------------------------------------------


def cron_expression(value: Any) -> str:
    """A cron expression of five fields, or one of ``NICKNAMES``."""
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_CRON:
        raise RefusedError(_("a cron expression of five fields, such as '0 3 * * *'"))
    text = " ".join(value.split())
    if text.startswith("@"):
        if text.lower() not in NICKNAMES:
            known = Wording(_("Known: %(names)s."), {"names": ", ".join(NICKNAMES)})
            hint = meant_by(text.lower(), NICKNAMES, known)
            raise RefusedError(_("a cron expression or a known nickname (%(hint)s)"), hint=hint)
        return text.lower()
    parts = text.split()
    if len(parts) != len(FIELDS):
        wanted = _("a cron expression of five fields (%(names)s), and it has %(count)s")
        raise RefusedError(wanted, names=", ".join(FIELDS), count=len(parts))
    if fault := _fault_of(text):
        # "Bad hour"; a text that names no field is not known.
        name = fault.rpartition(" ")[2]
        part = dict(zip(FIELDS, parts, strict=True)).get(name, text)
        values = Wording(FIELDS.get(name, _("known")))
        wanted = _("a cron expression whose %(name)s is %(values)s, which %(part)r is not")
        raise RefusedError(wanted, name=name, values=values, part=part)
    return text


def _fault_of(expression: str) -> str:
    from cronsim import CronSim, CronSimError  # here, since most processes read none

    try:
        next(CronSim(expression, datetime(2000, 1, 1)))
    except CronSimError as error:
        return str(error)
    except StopIteration:
        return "Bad day-of-month"
    return ""


def zone_name(value: Any) -> str:
    """The name of a time zone in the IANA database."""
    if isinstance(value, str) and 0 < len(value) <= MAX_ZONE:
        try:
            ZoneInfo(value)
        except (KeyError, ValueError, OSError):
            otherwise = Wording(_("Such as 'Europe/Berlin'."))
            hint = meant_by(value, available_timezones(), otherwise)
            raise RefusedError(_("the name of a time zone (%(hint)s)"), hint=hint) from None
        return value
    raise RefusedError(_("the name of a time zone, such as 'Europe/Berlin'"))


def aware_moment(value: Any) -> datetime:
    """A datetime with a time zone, or its ISO text with an offset."""
    found = value
    if isinstance(value, str):
        try:
            found = datetime.fromisoformat(value)
        except ValueError:
            found = None
    is_aware = isinstance(found, datetime) and found.utcoffset() is not None
    if not is_aware or not 1970 < found.year < 9000:
        raise RefusedError(_("a datetime with a time zone, or its ISO text with an offset"))
    return found  # type: ignore[no-any-return] # checked above


# --- Timetables -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timetable:
    """The moments at which something is due: its ticks. One of the first three says when."""

    cron: str = ""
    every: timedelta | None = None
    at: datetime | None = None
    zone: str = ""
    """The zone that a cron expression is read in; Django's ``TIME_ZONE`` if empty."""
    starts_at: datetime | None = None
    ends_at: datetime | None = None

    def next_after(self, moment: datetime, anchor: datetime | None = None) -> datetime | None:
        """Return the first tick after a moment; None: there is none.

        :param anchor: an earlier tick, from which intervals without a start are counted.
        """
        if self.starts_at is not None and moment < self.starts_at:
            moment = self.starts_at - INSTANT
        found = self._next_after(moment, anchor)
        if found is None or (self.ends_at is not None and found > self.ends_at):
            return None
        return found

    def next_ticks(
        self, moment: datetime, count: int, anchor: datetime | None = None
    ) -> list[datetime]:
        """Return the first ticks after a moment, at most ``count``."""
        found: list[datetime] = []
        while len(found) < count and (tick := self.next_after(moment, anchor)) is not None:
            found.append(tick)
            moment = anchor = tick
        return found

    def latest(self, first: datetime, last: datetime, most: int) -> list[datetime]:
        """Return the latest ticks up to a moment, oldest first, at most ``most``.

        :param first: the earliest tick that counts.
        """
        if self.ends_at is not None:
            last = min(last, self.ends_at)
        if self.every is not None:
            steps = (last - first) // self.every
            return [first + n * self.every for n in range(max(0, steps - most + 1), steps + 1)]
        if not self.cron:
            return [first]
        for window in _WINDOWS:
            begin = last - window
            if begin <= first:
                break
            found = self._ticks_between(begin, last)
            if len(found) >= most:
                return found[-most:]
        return [first, *self._ticks_between(first, last)][-most:]

    def _ticks_between(self, begin: datetime, end: datetime) -> list[datetime]:
        """Return the ticks of a cron expression after a moment, up to another one."""
        ticks = self._cron_ticks(begin)
        return list(takewhile(lambda tick: tick <= end, ticks))

    def _next_after(self, moment: datetime, anchor: datetime | None) -> datetime | None:
        if self.at is not None:
            return self.at if self.at > moment else None
        if self.every is not None:
            start = self.starts_at or anchor or moment.replace(microsecond=0)
            if start > moment:
                return start
            return start + ((moment - start) // self.every + 1) * self.every
        return next(self._cron_ticks(moment), None)

    def _cron_ticks(self, moment: datetime) -> Iterator[datetime]:
        """Yield the ticks of a cron expression after a moment."""
        from cronsim import CronSim  # here, since most processes read no expression

        expression, zone = NICKNAMES.get(self.cron, self.cron), zone_of(self.zone)
        minute, hour, *_ = expression.split()
        if minute.startswith("*") or hour.startswith("*"):
            yield from _ticks_by_the_clock(expression, moment.astimezone(UTC), zone)
            return
        for tick in CronSim(expression, moment.astimezone(zone)):
            # In an hour that is repeated, the next local time may be an earlier moment.
            if tick > moment:
                yield tick.astimezone(UTC)


def _ticks_by_the_clock(expression: str, moment: datetime, zone: tzinfo) -> Iterator[datetime]:
    """Yield each moment after another one at which the zone's clocks show a time of an expression.

    ``cronsim`` would miss some where clocks are not changed by whole hours at a full hour.

    :param moment: in UTC.
    """
    from cronsim import CronSim

    lead = timedelta(0)
    while True:
        offset = _offset(moment, zone)
        change: datetime | None = None
        for wall in CronSim(expression, (moment + offset - lead).replace(tzinfo=None)):
            tick = wall.replace(tzinfo=UTC) - offset
            change = _first_change(moment, tick, zone)
            if change is not None:
                break
            yield tick
            moment = tick
        if change is None:
            return
        # What the clocks show at the change itself counts too.
        moment, lead = change, timedelta(seconds=1)


def _first_change(begin: datetime, end: datetime, zone: tzinfo) -> datetime | None:
    """Return when a zone's clocks are changed first after a moment, if by ``end``; all in UTC."""
    offset, at = _offset(begin, zone), begin.replace(microsecond=0)
    while at < end:
        later = min(at + timedelta(days=1), end)
        if _offset(later, zone) != offset:
            seconds = range(int((later - at).total_seconds()) + 1)
            changed = bisect_left(
                seconds, True, key=lambda s: _offset(at + timedelta(seconds=s), zone) != offset
            )
            return at + timedelta(seconds=changed)
        at = later
    return None


def _offset(moment: datetime, zone: tzinfo) -> timedelta:
    return moment.astimezone(zone).utcoffset() or timedelta(0)


def zone_of(name: str) -> tzinfo:
    """Return the time zone of this name; Django's ``TIME_ZONE`` if it is empty."""
    return ZoneInfo(name) if name else get_default_timezone()
