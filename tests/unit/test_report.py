"""The status report of a worker."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from django.utils import timezone

from kjo_django.engine.attempt import Attempt, Ending
from kjo_django.worker import Worker
from kjo_django.worker.report import StatusReporter, render, status_of
from tests.unit.deliveries import KJO
from tests.unit.test_scheduler import delivery

pytestmark = pytest.mark.django_db


@pytest.fixture
def worker(settings):
    settings.KJO = {**KJO, "CONCURRENCY": 4}
    return Worker(["ledger"], name="host-1", relay=False)


def settle(worker: Worker, completed: int = 0, failed: int = 0, error: str = "it broke") -> None:
    dead = Attempt(delivery("a"), Ending.DEAD, error=ValueError(error), started_at=timezone.now())
    done = Attempt(delivery("a"), Ending.COMPLETED, started_at=timezone.now())
    worker.statistics.add([done] * completed + [dead] * failed)


def test_a_worker_that_has_done_nothing_has_failed_nothing(worker):
    status = status_of(worker)
    assert (status["processed"], status["failed"], status["success_percent"]) == (0, 0, 100.0)
    assert (status["active"], status["concurrency"], status["queue_length"]) == (0, 4, 0)
    assert status["last_error"] is None
    assert "Last Error" not in render(worker)


def test_the_numbers_are_those_of_its_statistics_and_lanes(worker):
    settle(worker, completed=7, failed=1)
    worker.scheduler.put([delivery("a"), delivery("b"), delivery("c")])
    worker.scheduler.take(timeout=0)
    status = status_of(worker)
    assert (status["processed"], status["failed"], status["success_percent"]) == (8, 1, 87.5)
    assert (status["active"], status["queue_length"]) == (1, 2)
    assert status["capacity_percent"] == 25.0
    assert status["last_error"] == "it broke"


def test_failed_attempts_count_as_failures_though_another_follows(worker):
    """Or the report says 100 % above the last error."""
    error = ValueError("nothing was sold")
    retried = Attempt(delivery("a"), Ending.RETRIED, error=error, started_at=timezone.now())
    settle(worker, completed=1)
    worker.statistics.add([retried, retried])
    status = status_of(worker)
    assert (status["processed"], status["failed"], status["retried"]) == (3, 0, 2)
    assert status["success_percent"] == 33.3
    text = render(worker)
    assert "Success Rate:      33.3% (2 failures, 0 for good)" in text
    assert 'Last Error:        "nothing was sold"' in text


def test_the_report_is_readable(worker):
    settle(worker, completed=1999, failed=1)
    text = render(worker)
    for line in (
        "host-1: ledger",
        "Active Tasks:      0/4 (0.00% capacity)",
        "Total Processed:   2,000",
        "(1 failures)",
        "Uptime:            00:00:0",
        'Last Error:        "it broke"',
    ):
        assert line in text


def test_it_is_written_when_it_is_time_and_something_has_happened(worker):
    # Given
    out = StringIO()
    reporter = StatusReporter(worker, out, interval=1e-9)
    # When, then
    reporter.report_if_due()
    assert out.getvalue() == ""
    settle(worker, completed=1)
    reporter.report_if_due()
    assert out.getvalue().count("host-1") == 1
    reporter.report_if_due()
    assert out.getvalue().count("host-1") == 1


@pytest.mark.parametrize("interval", [0, 3600])
def test_it_is_not_written_before_its_time_or_when_nobody_wants_it(worker, interval):
    out = StringIO()
    settle(worker, completed=1)
    StatusReporter(worker, out, interval=interval).report_if_due()
    assert out.getvalue() == ""


def test_as_json_every_line_is_an_object(worker):
    out = StringIO()
    reporter = StatusReporter(worker, out, 0, as_json=True)
    reporter.announce()
    settle(worker, completed=1)
    reporter.report()
    (line,) = out.getvalue().splitlines()
    assert json.loads(line)["processed"] == 1


def test_it_says_what_was_started_and_how_to_stop_it(worker):
    out = StringIO()
    StatusReporter(worker, out, 0).announce()
    assert "Consuming ledger with 4 lanes as host-1" in out.getvalue()
    assert "Ctrl-C" in out.getvalue()
