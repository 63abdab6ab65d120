"""The status report: KJO-77 … 85."""

from __future__ import annotations

import json
import platform
from datetime import timedelta
from io import StringIO
from types import SimpleNamespace

import django
import pytest
from django.utils import timezone

from kjo_django.engine.attempt import Attempt, Ending
from kjo_django.runtime import current_runtime
from kjo_django.transports.base import TopicPartition
from kjo_django.worker import Worker, report
from kjo_django.worker.report import StatusReporter, render, start_of, status_of
from kjo_django.worker.statistics import memory_limit
from tests.unit.deliveries import KJO
from tests.unit.engine.test_scheduler import delivery

MB = 2**20


def printed(**changes):
    """A worker as in seed 1's printed report."""
    now = timezone.now()
    facts = {
        "running": 2,
        "waiting": 5,
        "processed": 1247,
        "failed": 23,
        "retried": 4,
        "uptime": 1800.0,
        "partitions": [TopicPartition("email-queue", n) for n in (3, 1, 0, 2)],
        "last_error": "SMTP timeout",
        "last_error_at": now - timedelta(minutes=2, seconds=5),
        **changes,
    }
    return SimpleNamespace(
        name="EmailConsumer",
        queues=[SimpleNamespace(name="email-queue")],
        slots=3,
        scheduler=SimpleNamespace(
            running=facts["running"],
            waiting=facts["waiting"],
            outstanding=facts["running"] + facts["waiting"],
            peak=3,
            oldest_wait=1.5,
        ),
        statistics=SimpleNamespace(
            processed=facts["processed"],
            totals=lambda: (facts["processed"], facts["failed"], facts["retried"]),
            uptime=facts["uptime"],
            started_at=timezone.localtime().replace(hour=10, minute=45),
        ),
        pollers=[SimpleNamespace(partitions=facts["partitions"])],
        runtime=current_runtime(),
        last_error=facts["last_error"],
        last_error_at=facts["last_error_at"],
    )


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    monkeypatch.setattr(report, "memory_bytes", lambda: 124 * MB)
    monkeypatch.setattr(report, "memory_limit", lambda: 512 * MB)


def line(text, name):
    (found,) = [one.strip() for one in text.splitlines() if one.strip().startswith(name)]
    return " ".join(found.split())


@pytest.mark.parametrize(
    "expected",
    [
        "Active Tasks: 2/3 (66.67% capacity)",  # KJO-78
        "Queue Length: 5 (waiting for slot)",  # KJO-79
        "Total Processed: 1,247 (41.57/min average)",  # KJO-80
        "Success Rate: 97.8% (27 failures, 23 for good)",  # KJO-81
        "Uptime: 00:30:00 (started 10:45 AM)",  # KJO-82
        "Active Partitions: [0, 1, 2, 3]",  # KJO-83
        'Last Error: "SMTP timeout" (2 minutes ago)',  # KJO-84
        "Memory Usage: 124MB / 512MB (24.2%)",  # KJO-85
    ],
)
def test_it_prints_what_seed_1_prints(expected):
    name = expected.partition(":")[0]
    assert line(render(printed()), name) == expected


def test_the_same_as_numbers():
    """KJO-57, KJO-77 … 85."""
    status = status_of(printed())
    assert json.loads(json.dumps(status)) == status
    assert (status["active"], status["concurrency"], status["capacity_percent"]) == (2, 3, 66.67)
    assert (status["per_minute"], status["success_percent"]) == (41.57, 97.8)
    assert (status["memory_bytes"], status["memory_limit_bytes"]) == (124 * MB, 512 * MB)
    assert (status["peak"], status["oldest_waiting_ms"]) == (3, 1500)


def test_nothing_processed_divides_nothing_by_zero():
    """KJO-81."""
    text = render(printed(processed=0, failed=0, retried=0, uptime=0.0))
    assert line(text, "Success Rate") == "Success Rate: 100.0% (0 failures)"


def test_partitions_of_several_topics_carry_their_names():
    """KJO-83."""
    partitions = [TopicPartition("b", 0), TopicPartition("a", 1)]
    found = line(render(printed(partitions=partitions)), "Active Partitions")
    assert found == "Active Partitions: [a[1], b[0]]"


@pytest.mark.parametrize(
    ("seconds", "age"),
    [(1, "1 second ago"), (30, "30 seconds ago"), (3700, "1 hour, 1 minute ago")],
)
def test_the_age_of_the_last_error(seconds, age):
    """KJO-84."""
    at = timezone.now() - timedelta(seconds=seconds)
    assert age in line(render(printed(last_error_at=at)), "Last Error")


def test_no_error_no_line():
    """KJO-84."""
    assert "Last Error" not in render(printed(last_error="", last_error_at=None))


@pytest.mark.parametrize(
    ("v2", "v1", "expected"),
    [("536870912\n", None, 512 * MB), ("max\n", None, None), (None, "536870912\n", 512 * MB)],
)
def test_the_limit_is_the_containers(tmp_path, v2, v1, expected):
    """KJO-85: else the machine's."""
    places = []
    for name, text in (("v2", v2), ("v1", v1)):
        places.append(tmp_path / name)
        if text is not None:
            places[-1].write_text(text)
    machine = memory_limit(())
    assert memory_limit(tuple(places)) == (expected or machine)


def test_it_is_written_when_due_and_when_there_is_something_to_tell(monkeypatch, settings):
    """KJO-77."""
    settings.KJO = {**KJO, "STATUS_REPORT_INTERVAL": 30}
    clock = [100.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: clock[0])
    out, busy = StringIO(), printed()
    reporter = StatusReporter(busy, out, interval=None, as_json=True)
    reporter.report_if_due()
    clock[0] += 29.9
    reporter.report_if_due()
    assert out.getvalue() == ""
    clock[0] += 0.2
    reporter.report_if_due()
    assert json.loads(out.getvalue())["processed"] == 1247
    # Nothing new, nothing running: silence.
    busy.scheduler.outstanding = 0
    clock[0] += 30
    reporter.report_if_due()
    assert len(out.getvalue().splitlines()) == 1


@pytest.mark.parametrize(("asked", "interval"), [(None, None), (30, 0)])
def test_nobody_who_has_not_asked_gets_a_report(monkeypatch, settings, asked, interval):
    """KJO-77: --status-interval 0."""
    settings.KJO = {**KJO, "STATUS_REPORT_INTERVAL": asked}
    clock = [100.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: clock[0])
    out = StringIO()
    reporter = StatusReporter(printed(), out, interval)
    clock[0] += 1e6
    reporter.report_if_due()
    assert out.getvalue() == ""
    reporter.conclude()
    what = "1,247 attempts, 27 failed, 23 for good"
    assert out.getvalue() == f"EmailConsumer stopped after 0:30:00: {what}.\n"


@pytest.mark.parametrize(("interval", "as_json"), [(5, False), (0, True)])
def test_the_last_report_is_written_when_the_worker_stops(interval, as_json):
    out = StringIO()
    reporter = StatusReporter(printed(), out, interval, as_json)
    reporter.conclude()
    assert ("Total Processed" in out.getvalue()) is not as_json
    assert not as_json or json.loads(out.getvalue())["processed"] == 1247


def test_an_error_that_quotes_others_is_one_line_without_commands():
    """Of the log, and to a terminal."""
    hostile = "no 'x'\nINFO all is well\x1b[2J\x9b2J"
    (found,) = [
        each for each in render(printed(last_error=hostile)).split("\n") if "no 'x'" in each
    ]
    assert found.isprintable()
    assert "all is well" in found


# --- Of a worker ----------------------------------------------------------------------------------


@pytest.fixture
def worker(db, settings):
    settings.KJO = {**KJO, "CONCURRENCY": 4}
    return Worker(["ledger"], name="host-1", relay=False)


def settle(worker: Worker, completed: int = 0, failed: int = 0) -> None:
    error = ValueError("it broke")
    dead = Attempt(delivery("a"), Ending.DEAD, error=error, started_at=timezone.now())
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


def test_as_json_every_line_is_an_object(worker):
    out = StringIO()
    reporter = StatusReporter(worker, out, 0, as_json=True)
    reporter.announce()
    settle(worker, completed=1)
    reporter.report()
    started, status = map(json.loads, out.getvalue().splitlines())
    assert (started["event"], started["queues"]) == ("started", ["ledger"])
    assert status["processed"] == 1


def test_it_says_what_was_started_and_how_to_stop_it(worker):
    out = StringIO()
    StatusReporter(worker, out, 0).announce()
    assert "Consuming ledger with 4 lanes as host-1" in out.getvalue()
    assert "Ctrl-C" in out.getvalue()


def test_it_says_what_it_serves_with_which_versions_and_no_secret(worker, settings):
    settings.KJO = {
        **settings.KJO,
        "RELEASE": "v1.4\n0",
        "TRANSPORTS": {
            "default": {
                "BACKEND": "kjo_django.transports.memory.MemoryTransport",
                "OPTIONS": {"sasl.password": "secret"},
            }
        },
    }
    worker.runtime = current_runtime()
    out = StringIO()
    StatusReporter(worker, out, 0).announce()
    _, second, third = out.getvalue().splitlines()
    assert second.startswith(f"  Service {worker.runtime.service}, release v1.4\\n0; database: ")
    assert "transport default: MemoryTransport; coordination: " in second
    assert third.startswith(f"  Python {platform.python_version()}, kjo-django ")
    assert f"Django {django.get_version()}" in third
    assert "secret" not in out.getvalue() + json.dumps(start_of(worker))
