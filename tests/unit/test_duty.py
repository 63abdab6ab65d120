"""What one worker does for all, whatever goes wrong."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.db import OperationalError

from kjo_django.backends import get_coordination
from kjo_django.values import LONGEST
from kjo_django.worker.duty import Duty
from tests.unit.deliveries import KJO


class Failing(Duty):
    """Fails in its first turn."""

    name = "failing"
    leases = ("FAILING",)

    def __init__(self, error: Exception) -> None:
        super().__init__("me")
        self._errors = [error]
        self.has_worked = threading.Event()

    def pause(self) -> timedelta:
        return timedelta(seconds=0.02)

    def work(self, held: list[str]) -> None:
        if self._errors:
            raise self._errors.pop()
        self.has_worked.set()


@pytest.mark.parametrize(
    "error",
    [OperationalError("away"), ValueError("a bug")],
    ids=lambda error: type(error).__name__,
)
def test_it_goes_on_after_whatever_goes_wrong(sqlite_file, settings, error, caplog):
    """Promise 3: nobody else would notice that nothing is rescued any more."""
    # Given
    settings.KJO = KJO
    duty = Failing(error)
    thread = threading.Thread(target=duty.run)
    # When
    thread.start()
    try:
        # Then
        assert duty.has_worked.wait(10)
    finally:
        duty.stop()
        thread.join(10)
    assert not thread.is_alive()
    assert f"Failing has to wait: {error}" in caplog.text
    assert get_coordination().holders(["FAILING"]) == {}


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("pause", [3 * LONGEST, timedelta.max])
def test_a_rest_without_end_ends_no_duty(sqlite_file, settings, pause):
    """Three heartbeats of a century are longer than a thread can wait."""
    settings.KJO = KJO
    duty = Failing(ValueError("a bug"))
    duty.pause = lambda: pause
    thread = threading.Thread(target=duty.run)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    duty.stop()
    thread.join(10)
    assert not thread.is_alive()
