"""Cron expressions: what is refused, where the fault is, and the ticks Debian's cron would make."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim

from kjo_django.timetables import INSTANT, NICKNAMES, Timetable, cron_expression, zone_name

MINUTE = timedelta(minutes=1)


def moment(text: str, zone: str = "UTC") -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone))


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("60 * * * *", "whose minute is 0-59, which '60' is not"),
        ("* 25 * * *", "whose hour is 0-23, which '25' is not"),
        ("* * 32 * *", "whose day-of-month is 1-31"),
        ("* * * 13 *", "whose month is 1-12 or JAN-DEC, which '13' is not"),
        ("* * * * FRY", "whose day-of-week is 0-7 or SUN-SAT, 5L, or 5#2, which 'FRY' is not"),
        ("0 0 30 2 *", "whose day-of-month is 1-31, L or LW, and in one of its months"),
        ("*/0 * * * *", "whose minute"),
        ("5-1 * * * *", "whose minute"),
        ("* * * * 5#6", "whose day-of-week"),
        ("* * * *", "five fields (minute, hour, day-of-month, month, day-of-week), and it has 4"),
        ("0 0 3 * * *", "and it has 6"),
        ("@dayly", "Did you mean '@daily'?"),
        ("@reboot", "Known: @hourly"),
        ("", "such as '0 3 * * *'"),
        ("0 3 * * *" + " " * 100, "such as '0 3 * * *'"),
        (7, "such as '0 3 * * *'"),
        (None, "such as '0 3 * * *'"),
    ],
)
def test_a_wrong_expression_is_refused_with_the_place_of_the_fault(text, place):
    with pytest.raises(ValueError) as caught:
        cron_expression(text)
    assert place in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("*/5 * * * *", "0 9-17/2 * * MON-FRI", "0 0 L * *", "0 0 LW * *", "0 0 * * 5L"),
        *("0 0 * * FRI#2", "0 0 29 2 *", "0 0 1,15 JAN,jul *", *NICKNAMES),
    ],
)
def test_a_right_expression_has_ticks(text):
    table = Timetable(cron=cron_expression(text), zone="Europe/Berlin")
    ticks = table.next_ticks(moment("2026-01-01"), 3)
    assert len(ticks) == 3
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(
    ("zone", "hint"),
    [
        ("Europe/Berln", "Did you mean 'Europe/Berlin'?"),
        ("Mars", ""),
        ("../x", ""),
        (1, ""),
        ("", ""),
    ],
)
def test_a_wrong_zone_is_refused(zone, hint):
    with pytest.raises(ValueError, match="name of a time zone") as caught:
        zone_name(zone)
    assert hint in str(caught.value)


# --- Intervals and moments ------------------------------------------------------------------------


def test_an_interval_is_counted_from_its_start_or_from_an_earlier_tick():
    table = Timetable(every=timedelta(minutes=7))
    assert table.next_after(moment("2026-01-01 10:00:00.5")) == moment("2026-01-01 10:07")
    assert table.next_after(moment("2026-01-01 12:00"), moment("2026-01-01 10:07")) == moment(
        "2026-01-01 12:06"
    )
    started = Timetable(every=timedelta(hours=1), starts_at=moment("2026-01-01 10:30"))
    assert started.next_after(moment("2025-01-01")) == moment("2026-01-01 10:30")
    assert started.next_after(moment("2026-01-01 10:30")) == moment("2026-01-01 11:30")


def test_a_moment_comes_once():
    at = moment("2026-01-01 10:30:12")
    assert Timetable(at=at).next_after(at - MINUTE) == at
    assert Timetable(at=at).next_after(at) is None


def test_no_tick_is_before_the_start_or_after_the_end():
    table = Timetable(
        cron="0 * * * *",
        starts_at=moment("2026-01-01 10:00"),
        ends_at=moment("2026-01-01 11:00"),
        zone="UTC",
    )
    assert table.next_ticks(moment("2025-06-01"), 9) == [
        moment("2026-01-01 10:00"),
        moment("2026-01-01 11:00"),
    ]


def test_a_leap_day_comes_every_four_years():
    table = Timetable(cron="30 12 29 2 *", zone="UTC")
    ticks = table.next_ticks(moment("2026-03-01"), 2)
    assert ticks == [moment("2028-02-29 12:30"), moment("2032-02-29 12:30")]
    # 2100 has none.
    assert table.next_after(moment("2096-03-01")) == moment("2104-02-29 12:30")


# --- Summer time ----------------------------------------------------------------------------------

CHANGES = {
    "Europe/Berlin": ("2026-03-29 01:00", "2026-10-25 01:00"),
    "America/New_York": ("2026-03-08 07:00", "2026-11-01 06:00"),
    "America/Santiago": ("2026-09-06 04:00", "2026-04-05 03:00"),
    "Pacific/Chatham": ("2026-09-26 14:00", "2026-04-04 14:00"),
    "Australia/Lord_Howe": ("2026-10-03 15:30", "2026-04-04 15:00"),
    "Africa/Casablanca": ("2026-03-22 02:00", "2026-02-15 02:00"),
}
"""When clocks are changed, by UTC: forward and back; at midnight in Chile, at a quarter to three on
the Chatham Islands, by half an hour on Lord Howe Island, and for Ramadan in Morocco."""
EXPRESSIONS = [
    *("*/10 * * * *", "*/25 2 * * *", "15 * * * *", "30 0-4 * * *", "0 0 * * *", "30 1 * * *"),
    *("0 2 * * *", "30 2 * * *", "45 1,2,3 * * *", "0,15,30,45 2 * * *", "0 3 * * *"),
    *("20 2 * * SUN", "10 23 * * *", "5 0,1,2 * * *", "@hourly", "@daily"),
]


@pytest.mark.parametrize("change", [0, 1], ids=["forward", "back"])
@pytest.mark.parametrize("zone", CHANGES)
def test_the_ticks_are_those_of_debians_cron_when_clocks_are_changed(zone, change):
    changed_at = moment(CHANGES[zone][change])
    begin, end = changed_at - timedelta(hours=26), changed_at + timedelta(hours=26)
    assert (
        begin.astimezone(ZoneInfo(zone)).utcoffset() != end.astimezone(ZoneInfo(zone)).utcoffset()
    ), "the clocks are changed"
    for expression in EXPRESSIONS:
        table = Timetable(cron=cron_expression(expression), zone=zone)
        expected = sorted(set(debians_ticks(expression, zone, begin, end)))
        ticks = [t for t in table.next_ticks(begin, len(expected) + 1) if t <= end]
        assert ticks == expected, expression


@pytest.mark.large
@pytest.mark.parametrize("zone", CHANGES)
def test_the_latest_ticks_are_those_that_came_last(zone):
    for change in CHANGES[zone]:
        begin, end = moment(change) - timedelta(days=3), moment(change) + timedelta(days=3)
        for expression in EXPRESSIONS:
            table = Timetable(cron=cron_expression(expression), zone=zone)
            forward = [t for t in table.next_ticks(begin, 1000) if t <= end]
            assert table.latest(forward[0], end, 2000) == forward, expression
            # From the midst of the change too
            for until in (moment(change) + n * timedelta(minutes=20) for n in range(-4, 5)):
                seen = [t for t in forward if t <= until]
                if seen:
                    assert table.latest(forward[0], until, 2000) == seen, (expression, until)
                    assert table.latest(forward[0], until, 3) == seen[-3:], (expression, until)
                following = next((t for t in forward if t > until), table.next_after(end))
                assert table.next_after(until) == following, (expression, until)


def debians_ticks(expression: str, zone: str, begin: datetime, end: datetime) -> Iterator[datetime]:
    """Yield the minutes in which Debian's cron starts a job; after the main loop of its cron.c.

    It wakes every minute and compares local time with the minute it has last looked at. Between
    five minutes and three hours of difference mean that clocks were changed: a job whose minute or
    hour begins with a star runs by the clock, any other runs for each minute that was skipped, and
    for none that is repeated.
    """
    matcher = Matcher(NICKNAMES.get(expression, expression))
    local = ZoneInfo(zone)
    virtual = wall(begin, local)
    now = begin
    while now < end:
        now += MINUTE
        running = wall(now, local)
        minutes = (running - virtual) // MINUTE
        if 1 <= minutes <= 5 or minutes > 180 or minutes <= -180:
            skipped = [virtual + n * MINUTE for n in range(1, minutes + 1)] if minutes <= 5 else []
            virtual = running
            if any(map(matcher.matches, skipped or [running])):
                yield now
        elif minutes > 5:
            skipped = [virtual + n * MINUTE for n in range(1, minutes + 1)]
            virtual = running
            if any(map(matcher.matches, [running] if matcher.is_wild else skipped)):
                yield now
        elif matcher.is_wild and matcher.matches(running):
            yield now


def wall(now: datetime, local: ZoneInfo) -> datetime:
    return now.astimezone(local).replace(tzinfo=None)


class Matcher:
    """Whether a minute of local time is one of the expression's."""

    def __init__(self, expression: str) -> None:
        minute, hour, *_ = expression.split()
        self.is_wild = minute.startswith("*") or hour.startswith("*")
        self._cron = CronSim(expression, datetime(2026, 1, 1))

    def matches(self, minute: datetime) -> bool:
        cron = self._cron
        return (
            minute.minute in cron.minutes
            and minute.hour in cron.hours
            and minute.month in cron.months
            and cron.match_day(minute.date())
        )


def test_the_zone_of_the_project_is_used_where_none_is_given(settings):
    settings.TIME_ZONE = "Asia/Tokyo"
    ticks = Timetable(cron="0 3 * * *").next_ticks(moment("2026-01-01"), 1)
    assert ticks == [datetime(2026, 1, 1, 18, tzinfo=UTC)]


AROUND_CHANGES = [
    ("Europe/Berlin", "2026-03-28", "2026-10-24"),
    ("America/New_York", "2026-03-07", "2026-10-31"),
    ("Australia/Lord_Howe", "2026-04-04", "2026-10-03"),  # by half an hour
    ("America/Sao_Paulo", "2018-02-17", "2018-11-03"),  # at midnight
    ("UTC", "2026-02-28", "2026-12-31"),
]
"""Zones, and days before their clocks change."""


@pytest.mark.parametrize("zone", AROUND_CHANGES, ids=lambda zone: zone[0])
@pytest.mark.parametrize(
    "text",
    [
        "*/7 * * * *",
        "*/20 * * * *",
        "0 * * * *",
        "30 0-3 * * *",
        "15 2 * * *",
        "0 0 * * *",
        "0 3 1 * *",
    ],
)
def test_each_tick_is_the_first_after_the_moment_before_it(text, zone):
    """By this a process knows whether a stored tick is one of its time zone."""
    name, *days = zone
    table = Timetable(cron=cron_expression(text), zone=name)
    for day in days:
        for tick in table.next_ticks(moment(day, name), 100):
            assert table.next_after(tick - INSTANT) == tick
