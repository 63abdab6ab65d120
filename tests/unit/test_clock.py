"""The clock of a process, and a host whose own is wrong (FINDINGS 2.10 q).

In the default tier: rules on SQLite, and a worker's heartbeat once on each database with a clock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from io import StringIO
from types import SimpleNamespace
from typing import Any, cast

import pytest
from django.core.management import call_command
from django.utils import timezone

from kjo_django.clock import CLOCK, Clock
from kjo_django.conf import get_settings
from kjo_django.models import Job
from kjo_django.models import Worker as WorkerRow
from kjo_django.operations.monitoring.health import health
from kjo_django.round_trips import GroupBudget
from kjo_django.runtime import Runtime
from kjo_django.worker.duties import ClockCheck
from kjo_django.worker.process import Worker
from tests.clocks import set_now
from tests.databases import MARIADB
from tests.factories import WorkerFactory
from tests.ledger.jobs import write
from tests.unit import deliveries

HOUR = 3600.0
MINUTE = timedelta(minutes=1)


@contextmanager
def host_ahead(seconds: float) -> Iterator[None]:
    """Let this host's clock be wrong meanwhile."""
    now = timezone.now
    with pytest.MonkeyPatch.context() as patch:
        set_now(patch, lambda: now() + timedelta(seconds=seconds))
        try:
            yield
        finally:
            CLOCK.follow(0.0)


def told_by(clock: Clock, took: float = 0.0) -> Any:
    """A database that tells the time, and takes so long to do so."""

    def tell() -> datetime:
        later = clock.monotonic() + took
        clock.monotonic = lambda: later
        return right

    right = timezone.now()
    return tell


@pytest.mark.parametrize("ahead", [HOUR, -HOUR, 1.5])
def test_a_wrong_clock_is_measured_and_left(ahead: float) -> None:
    clock, tell = Clock(), told_by(Clock())
    with host_ahead(ahead):
        measured = clock.compare(tell).ahead
        assert measured is not None and abs(measured - ahead) < 1
        clock.follow(measured)
        assert abs(clock.now() - (timezone.now() - timedelta(seconds=ahead))) < timedelta(seconds=1)


@pytest.mark.parametrize("ahead", [0.0, 0.9, -0.9])
def test_a_clock_that_is_about_right_is_kept(ahead: float) -> None:
    clock = Clock()
    clock.follow(ahead)
    assert clock.now is Clock.now


def test_a_host_that_is_set_right_changes_nothing_of_a_clock_that_goes_by_the_database() -> None:
    clock = Clock()
    with host_ahead(HOUR):
        clock.follow(HOUR)
        wrong = clock.now()
    assert timedelta() <= clock.now() - wrong < timedelta(seconds=HOUR / 2)
    clock.follow(0.0)
    assert clock.now is Clock.now


def test_a_database_that_took_long_to_tell_says_nothing_of_the_clock() -> None:
    clock = Clock()
    assert clock.compare(told_by(clock, took=2.0)).ahead is None
    assert clock.compare(told_by(clock)).ahead is not None


# --- What is said of it ---------------------------------------------------------------------------


def clocks() -> Any:
    (check,) = [
        check for check in health(only={"settings", "database", "clocks"}) if check.name == "clocks"
    ]
    return check


FIVE_MINUTES = timedelta(minutes=5)


@pytest.mark.promise("web-clock")
@pytest.mark.django_db
def test_what_a_web_process_delays_is_due_later_by_what_its_hosts_clock_is_ahead() -> None:
    right = timezone.now()
    with host_ahead(HOUR):
        write.using(delay=FIVE_MINUTES).enqueue(job="a")
    due = Job.objects.get().available_at - right - timedelta(seconds=HOUR)
    assert FIVE_MINUTES <= due < FIVE_MINUTES + MINUTE


@pytest.mark.promise("delay-clock")
@pytest.mark.django_db
def test_in_a_worker_a_delay_counts_from_the_databases_clock() -> None:
    right = timezone.now()
    with host_ahead(HOUR):
        CLOCK.follow(HOUR)
        write.using(delay=FIVE_MINUTES).enqueue(job="a")
    assert FIVE_MINUTES <= Job.objects.get().available_at - right < FIVE_MINUTES + MINUTE


@pytest.mark.promise("run-at-clock")
@pytest.mark.django_db
def test_a_moment_that_a_handler_computes_stays_as_it_is() -> None:
    with host_ahead(HOUR):
        CLOCK.follow(HOUR)
        moment = timezone.now() + FIVE_MINUTES
        write.using(run_at=moment).enqueue(job="a")
    assert Job.objects.get().available_at == moment


@pytest.mark.django_db(transaction=True)
def test_clocks_that_agree_are_well() -> None:
    WorkerFactory(heartbeat_at=timezone.now())
    assert (clocks().ok, clocks().fix) == (True, "")


@pytest.mark.promise("wrong-clock")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("ahead", "words"), [(600, "600.0 s ahead"), (-7, "7.0 s behind")])
def test_health_names_the_host_whose_clock_is_wrong_and_by_how_much(
    ahead: float, words: str
) -> None:
    WorkerFactory(name="one", heartbeat_at=timezone.now(), clock_ahead=ahead)
    WorkerFactory(name="dead", heartbeat_at=timezone.now() - timedelta(hours=1), clock_ahead=1000)
    check = clocks()
    assert check.ok is False
    assert f"one is {words}" in check.detail
    assert "dead" not in check.detail and "this host" not in check.detail
    assert "NTP" in check.fix


@pytest.fixture(
    params=[pytest.param("postgres", marks=pytest.mark.postgres), MARIADB],
)
def database_with_a_clock(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(request.param)


@pytest.mark.promise("database-clock", "wrong-clock", "clock-jump")
@pytest.mark.usefixtures("database_with_a_clock")
@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_a_worker_goes_by_its_databases_clock_and_says_so(
    ahead: float, caplog: pytest.LogCaptureFixture
) -> None:
    heartbeat, rows = Worker(["ledger"])._heartbeat, WorkerRow.objects
    caplog.set_level(logging.INFO, "kjo_django")
    # Given a host whose clock is wrong
    with host_ahead(ahead):
        heartbeat.register()
        right = timezone.now() - timedelta(seconds=ahead)
        # Then all that the worker writes and compares is by the database's
        assert abs(CLOCK.now() - right) < MINUTE
        assert abs(rows.get().heartbeat_at - right) < MINUTE
        # And it says so once
        heartbeat._write()
        assert [round(rows.get().clock_ahead / 60), said(caplog)] == [
            round(ahead / 60),
            ["ahead of" if ahead > 0 else "behind"],
        ]
        assert "this host is" in clocks().detail
    # When the clock is set right
    heartbeat._write()
    # Then it goes by that
    assert (CLOCK.now is Clock.now, clocks().ok) == (True, True)
    assert said(caplog)[1:] == ["agrees"]
    heartbeat._write()
    assert len(said(caplog)) == 2


def measure(check: ClockCheck, ahead: float, took: float = 0.0) -> None:
    """Let a check ask a database that its host's clock is ahead of."""
    now, seconds = timezone.now(), iter([0.0, took])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check._clock, "monotonic", lambda: next(seconds, took))
        set_now(patch, lambda: now)
        tell = SimpleNamespace(server_time=lambda: now - timedelta(seconds=ahead - took / 2))
        patch.setattr(check._runtime, "store", tell)
        check.work()


@pytest.fixture
def check() -> ClockCheck:
    runtime = SimpleNamespace(
        clock=Clock(),
        settings=get_settings(),
        database="main",
        store=None,
        group_budget=GroupBudget(0.05),
    )
    return ClockCheck(cast(Runtime, runtime))


@pytest.mark.promise("clock-jump")
def test_a_clock_that_drifts_is_told_at_every_second(
    check: ClockCheck, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kjo_django")
    for tenths in [*range(25), *reversed(range(25))]:
        measure(check, tenths / 10)
        assert check.ahead == pytest.approx(tenths / 10)
    assert said(caplog) == ["ahead of", "ahead of", "ahead of", "agrees"]


def test_a_database_that_tells_its_time_too_slowly_is_named_once(
    check: ClockCheck, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kjo_django")
    for ahead, took in [(HOUR, 0.0), (0.0, 2.0), (0.0, 2.0), (0.0, 0.0), (0.0, 0.0)]:
        measure(check, ahead, took)
    told = ["ahead of", "not compared", "agrees"]
    assert [word for line, word in zip(caplog.messages, told, strict=True) if word in line] == told


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres")
@pytest.mark.parametrize("command", ["kjo_produce", "kjo_schedule"])
def test_the_relay_and_the_ticker_go_by_it_too(command: str, settings: Any) -> None:
    settings.KJO = {**deliveries.KJO, **deliveries.MEMORY}  # whose transport needs a relay
    with host_ahead(HOUR):
        call_command(command, "--once", stdout=StringIO())
        assert abs(CLOCK.now() - (timezone.now() - timedelta(seconds=HOUR))) < MINUTE


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [line for line in caplog.messages if "clock of this host" in line]
    words = ("ahead of", "behind", "agrees")
    return [next(word for word in words if word in line) for line in lines]
