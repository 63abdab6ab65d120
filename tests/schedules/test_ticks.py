"""What is stored when a tick is due, missed, overlapped or broken."""

from __future__ import annotations

import logging
from datetime import UTC, timedelta
from zoneinfo import ZoneInfo

import pytest
from django.db import OperationalError

from kjo_django import job, registry
from kjo_django.models import Job, Schedule
from kjo_django.schedules.shown import history, late
from kjo_django.schedules.ticker import LEAST_PAUSE, QUICK_RETRIES, Ticker
from kjo_django.states import JobState
from kjo_django.testing import drain
from tests.schedules.conftest import minutes, now, scheduled, step, ticks_of

pytestmark = pytest.mark.django_db


def test_a_tick_becomes_one_job_that_knows_it(clock):
    row = scheduled()
    tick = row.next_at
    ticker = step()
    assert ticks_of() == []
    clock.advance(60.5)
    step(ticker, 3)
    assert ticks_of() == [tick.isoformat().replace("+00:00", "Z")]
    assert drain().results == [tick.isoformat()]
    (done,) = history(row)
    assert done.state == JobState.COMPLETED
    row.refresh_from_db()
    assert (row.last_at, row.next_at, row.last_job_id) == (tick, tick + minutes(1), done.pk)


def test_a_job_that_no_schedule_stored_has_no_tick():
    from kjo_django import job

    seen = []
    job(name="shop.look", takes_context=True)(lambda context: seen.append(context.scheduled_for))
    from kjo_django.enqueue.definition import JobDefinition

    JobDefinition(registry.find("shop.look")).enqueue()
    drain()
    assert seen == [None]


def test_the_next_look_is_at_the_next_tick_and_within_a_second(clock):
    scheduled(at=now() + timedelta(seconds=1.4))
    ticker = step()
    assert ticker.step() == 1.0
    clock.advance(1)
    assert ticker.step() == pytest.approx(0.4)
    clock.advance(0.4)
    assert ticker.step() == 1.0
    assert len(ticks_of()) == 1


def test_ticks_are_counted_and_so_are_late_and_skipped_ones(clock):
    scheduled(catch_up="all")
    scheduled("missed", catch_up="none")
    ticker = step()
    # One tick in time, one two seconds late, and three of which two are more than a minute late
    for seconds in (60.4, 61.6, 180):
        clock.advance(seconds)
        step(ticker)
    counts = Schedule.objects.order_by("name").values_list(
        "name", "stored_count", "late_count", "skipped_count"
    )
    assert list(counts) == [("missed", 3, 2, 2), ("nightly", 5, 4, 0)]


@pytest.mark.django_db(transaction=True)
def test_a_look_that_fails_is_repeated_at_once_and_a_database_that_is_away_is_told(
    clock, monkeypatch
):
    # Given a database that fails
    scheduled()
    ticker = step()
    clock.advance(60)
    storing = Ticker._store_due

    def fail(ticker):
        raise OperationalError("database is locked")

    monkeypatch.setattr(Ticker, "_store_due", fail)
    # When, then
    pauses = [ticker.step() for _ in range(QUICK_RETRIES)]
    assert sum(pauses) <= 0.5
    with pytest.raises(OperationalError):
        ticker.step()
    # And once it answers again, the tick is stored and failures count from the beginning
    monkeypatch.setattr(Ticker, "_store_due", storing)
    ticker.step()
    assert len(ticks_of()) == 1
    monkeypatch.setattr(Ticker, "_store_due", fail)
    clock.advance(60)
    assert ticker.step() == LEAST_PAUSE


def test_ticks_follow_the_time_zone_of_the_settings(clock, settings, caplog):
    """The next tick came at the old zone's hour, and another one hours later; a yearly one was
    wrong for a year."""
    # Given schedules of the project's zone, of one of their own, and of intervals
    settings.TIME_ZONE = "UTC"
    scheduled("yearly", cron="0 3 1 1 *")
    daily = scheduled("daily", cron="0 3 * * *")
    kept = [
        scheduled("own", cron="0 3 * * *", timezone="UTC"),
        scheduled("interval", every=3600),
        scheduled("moment", at=now() + minutes(5)),
        scheduled("the same", cron="*/15 * * * *"),
    ]
    step()
    # When a deploy changes it
    settings.TIME_ZONE = "America/New_York"
    ticker = step()
    # Then
    found = {row.name: row.next_at for row in Schedule.objects.all()}
    assert found["daily"].astimezone(ZoneInfo("America/New_York")).hour == 3
    assert found["yearly"].astimezone(ZoneInfo("America/New_York")).hour == 3
    assert {row.name: found[row.name] for row in kept} == {row.name: row.next_at for row in kept}
    assert caplog.text.count("TIME_ZONE has changed") == 2
    # And the tick comes once
    clock.advance((found["daily"] - now()).total_seconds())
    step(ticker)
    assert ticks_of("daily") == [found["daily"].astimezone(UTC).isoformat().replace("+00:00", "Z")]
    daily.refresh_from_db()
    assert daily.next_at - found["daily"] >= timedelta(hours=23)


def test_the_log_says_how_many_ticks_are_skipped_each_time(clock, caplog):
    """It said how many have been skipped in all."""
    scheduled(catch_up="none")
    ticker = step()
    with caplog.at_level(logging.INFO, "kjo_django"):
        for _ in range(2):
            clock.advance(3 * 60 + 90)
            step(ticker)
    told = [text for text in caplog.messages if "skips" in text]
    assert [text.split(" skips ")[1].split()[0] for text in told] == ["3", "3"]


@pytest.mark.promise("tick")
def test_two_workers_store_a_tick_once(clock):
    scheduled()
    one, other = step(), step()
    clock.advance(61)
    step(one)
    step(other)
    assert len(ticks_of()) == 1


@pytest.mark.promise("tick")
def test_a_row_that_is_set_back_stores_no_tick_twice(clock):
    row = scheduled()
    clock.advance(61)
    step()
    Schedule.objects.update(next_at=row.next_at, last_at=None)
    step()
    assert len(ticks_of()) == 1
    row.refresh_from_db()
    assert row.skipped_count == 1


@pytest.mark.promise("missed-tick")
@pytest.mark.parametrize(
    ("catch_up", "expected"),
    [("none", 0), ("one", 1), ("all", 6)],
)
def test_ticks_that_nobody_was_there_for(clock, catch_up, expected):
    """Every ten minutes, and nobody looks for an hour: the last tick was five minutes ago."""
    row = scheduled(every=600, catch_up=catch_up)
    clock.advance(3600 + 300)
    step(times=3)
    ticks = [row.next_at + n * minutes(10) for n in range(6)]
    latest = [tick.isoformat().replace("+00:00", "Z") for tick in ticks[6 - expected :]]
    assert ticks_of() == latest
    row.refresh_from_db()
    assert row.skipped_count == 6 - expected
    assert (row.last_at, row.next_at) == (ticks[-1], ticks[-1] + minutes(10))


@pytest.mark.promise("missed-tick")
@pytest.mark.parametrize("catch_up", ["none", "one", "all"])
def test_ticks_that_are_only_late_are_all_stored(clock, catch_up):
    scheduled(every=5, catch_up=catch_up)
    clock.advance(42)
    step()
    assert len(ticks_of()) == 8


def test_catching_up_is_bounded(clock):
    scheduled(every=1, catch_up="all")
    clock.advance(86_400)
    step()
    assert len(ticks_of()) == 100
    assert Schedule.objects.get().next_at > now()


def test_a_year_away_costs_no_more_than_an_hour(clock):
    scheduled(cron="* * * * *", timezone="Europe/Berlin", catch_up="one")
    clock.advance(365 * 86_400 + 30)
    step()
    assert len(ticks_of()) == 1


def test_jobs_that_may_not_overlap(clock):
    scheduled(overlap="skip")
    clock.advance(61)
    ticker = step()
    clock.advance(60)
    step(ticker)
    # The first job is still open
    assert len(ticks_of()) == 1
    assert Schedule.objects.get().skipped_count == 1
    drain()
    clock.advance(60)
    step(ticker)
    assert len(ticks_of()) == 2


def test_jitter_spreads_the_jobs_and_is_the_same_in_every_process(clock):
    for number in range(20):
        scheduled(f"s{number}", jitter=30)
    clock.advance(60)
    step()
    delays = {(job.available_at - now()).total_seconds() for job in Job.objects.all()}
    assert len(delays) == 20
    assert all(0 <= delay <= 30 for delay in delays)


def test_a_job_that_expires_is_not_stored_when_it_is_too_late_for_it(clock):
    scheduled(every=3600, expires_after=300, catch_up="all")
    clock.advance(3600)
    ticker = step()
    assert Job.objects.get().expires_at == now() + minutes(5)
    clock.advance(3600 + 301)
    step(ticker)
    assert len(ticks_of()) == 1


def test_a_moment_comes_once(clock):
    scheduled(at=now() + minutes(1))
    clock.advance(3600)
    step(times=2)
    assert len(ticks_of()) == 1
    assert Schedule.objects.get().next_at is None


@pytest.mark.parametrize("column", ["is_enabled", "is_paused"])
def test_no_ticks_while_it_is_paused_or_disabled(clock, column):
    scheduled(**{column: column == "is_paused"})
    clock.advance(600)
    step()
    assert ticks_of() == []


# --- What is broken -------------------------------------------------------------------------------


def test_the_tick_of_a_job_that_is_gone_waits_and_is_shown(clock, caplog):
    row = scheduled(job="shop.gone")
    scheduled("well")
    clock.advance(61)
    with caplog.at_level(logging.ERROR, "kjo_django"):
        ticker = step(times=3)
        clock.advance(31)
        step(ticker)
    # Others are not kept from their ticks
    assert (ticks_of(), len(ticks_of("well"))) == ([], 1)
    row.refresh_from_db()
    assert row.problem == "No job is named 'shop.gone' here"
    assert len(caplog.records) == 1, "said once"
    clock.advance(60)
    assert late() == [row]
    # When a worker comes that has the job, its tick is made up for
    job(name="shop.gone")(lambda: None)
    step()
    assert len(ticks_of()) == 1
    row.refresh_from_db()
    assert (row.problem, row.skipped_count) == ("", 1)


def test_a_payload_the_job_does_not_take_is_a_problem_of_its_schedule_alone(clock):
    row = scheduled(job="shop.clean", payload={"days": 1, "dayz": 3})
    scheduled("well")
    clock.advance(61)
    step()
    row.refresh_from_db()
    assert "dayz" in row.problem
    assert len(ticks_of("well")) == 1


# --- Clocks that are wrong ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cron", "expected"),
    [("30 2 * * *", 1), ("*/20 * * * *", 1), ("0 3 * * *", 1), ("0 12 * * *", 0)],
)
def test_a_clock_that_jumps_an_hour_forward(clock, cron, expected):
    """As Debian's cron: what has a time of day and was skipped runs once, what runs by the clock
    runs for the present minute alone."""
    at_two = (now() + timedelta(days=1)).replace(hour=2, minute=0, second=0, microsecond=0)
    clock.advance((at_two - now()).total_seconds())
    scheduled(cron=cron, timezone="UTC", catch_up="one")
    clock.advance(3600)
    step(times=3)
    assert len(ticks_of()) == expected


def test_a_clock_that_jumps_an_hour_back_repeats_nothing(clock):
    scheduled(every=600)
    ticker = step()
    for _ in range(6):
        clock.advance(600)
        step(ticker)
    before = ticks_of()
    assert len(before) == 6
    clock.offset -= 3600
    for _ in range(6):
        step(ticker)
        clock.advance(600)
    assert ticks_of() == before
    clock.advance(600)
    step(ticker)
    assert len(ticks_of()) == 7


def test_a_clock_that_was_a_year_ahead_stops_nothing_for_a_year(clock):
    scheduled(every=600)
    ticker = step()
    clock.advance(365 * 86_400)
    step(ticker)
    clock.offset -= 365 * 86_400
    step()  # another process, started since
    clock.advance(601)
    step(ticker)
    assert Schedule.objects.get().next_at < now() + minutes(11)
    assert len(ticks_of()) == 2


def test_a_zone_this_machine_does_not_know_is_a_problem_of_its_schedule_alone(clock):
    row = scheduled(cron="* * * * *", timezone="Europe/Berlin")
    scheduled("well")
    Schedule.objects.filter(pk=row.pk).update(timezone="Mars/Olympus", last_at=now() + minutes(600))
    clock.advance(61)
    step(times=2)
    row.refresh_from_db()
    assert "Mars/Olympus" in row.problem
    assert (ticks_of(), len(ticks_of("well"))) == ([], 1)
