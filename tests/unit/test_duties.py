"""A worker's duties, whatever goes wrong: step by step in virtual time, and on a thread."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import OperationalError

from kjo_django.clock import Clock
from kjo_django.runtime import current_runtime, get_coordination
from kjo_django.values import LONGEST
from kjo_django.worker.duties import DutyThread, LeasedDuty
from tests.unit.deliveries import KJO


class Time(Clock):
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


class Sweep(LeasedDuty):
    """Fails as often as it is told to."""

    leases = ("SWEEP",)

    def __init__(self, runtime=None, token="me", errors=(), pause=timedelta(seconds=0.02)) -> None:
        self._errors = list(errors)
        self.rounds = 0
        self.has_worked = threading.Event()
        super().__init__(runtime or current_runtime(), token, pause.total_seconds())

    def work_on(self, held: list[str]) -> None:
        if self._errors:
            raise self._errors.pop()
        self.rounds += 1
        self.has_worked.set()


@pytest.fixture(autouse=True)
def _configured(sqlite_file, settings):
    settings.KJO = KJO


def test_its_steps_do_what_is_due_and_say_when_to_come_back():
    time = Time()
    sweep = Sweep(replace(current_runtime(), clock=time), pause=timedelta(minutes=1))
    assert (sweep.step(), sweep.rounds) == (60, 0)
    time.seconds += 59
    assert (sweep.step(), sweep.rounds) == (1, 0)
    time.seconds += 1
    assert (sweep.step(), sweep.rounds) == (60, 1)


def test_of_two_workers_one_does_it_until_it_leaves():
    time = Time()
    runtime = replace(current_runtime(), clock=time)
    first, second = (Sweep(runtime, name, pause=timedelta(minutes=1)) for name in "ab")
    for _ in range(2):
        time.seconds += 60
        first.step()
        second.step()
    assert (first.rounds, second.rounds) == (2, 0)
    first.close()
    time.seconds += 60
    second.step()
    assert second.rounds == 1


@pytest.mark.parametrize(
    "error",
    [OperationalError("away"), ValueError("a bug")],
    ids=lambda error: type(error).__name__,
)
def test_it_goes_on_after_whatever_goes_wrong(error, caplog):
    """Promise 3: nobody else would notice that nothing is rescued any more."""
    # Given
    sweep = Sweep(errors=[error])
    thread = DutyThread(current_runtime(), "sweep", [sweep])
    # When
    thread.start()
    try:
        # Then
        assert sweep.has_worked.wait(10)
    finally:
        thread.stop()
        thread.join(10)
        assert not thread.is_alive()
    assert f"Sweep is late: {error}" in caplog.text
    assert get_coordination().holders(["SWEEP"]) == {}


def test_one_that_fails_keeps_no_other_of_its_thread_from_its_work():
    failing, other = Sweep(errors=[ValueError("a bug")] * 1000), Sweep(token="other")
    other.leases = ("OTHER",)
    thread = DutyThread(current_runtime(), "both", [failing, other])
    thread.start()
    try:
        assert other.has_worked.wait(10)
    finally:
        thread.stop()
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("pause", [3 * LONGEST, timedelta.max])
def test_a_rest_without_end_ends_no_duty(pause):
    """Three heartbeats of a century are longer than a thread can wait."""
    thread = DutyThread(current_runtime(), "sweep", [Sweep(pause=pause)])
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    thread.stop()
    thread.join(10)
    assert not thread.is_alive()
