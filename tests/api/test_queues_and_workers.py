"""Queues, workers, metrics, events and health over HTTP."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone
from rest_framework.test import APIClient

from kjo_django import registry
from kjo_django.models import QueueControl, Worker
from kjo_django.operations.monitoring.health import Check
from kjo_django.transports.base import GroupOffsets, TopicPartition
from kjo_django.transports.database import DatabaseTransport
from tests.api.conftest import Login, errors_of, problem_of
from tests.factories import (
    DeadLetterFactory,
    JobFactory,
    MetricBucketFactory,
    ProcessedEventFactory,
    WorkerFactory,
)

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator(login: Login) -> APIClient:
    return login(
        "view_queuecontrol", "pause_queue", "change_queuecontrol", "view_worker", "control_worker"
    )


# --- Queues ---------------------------------------------------------------------------------------


def test_queues_tell_what_waits_in_them(operator: APIClient) -> None:
    JobFactory.create_batch(2)
    JobFactory(failed=True)
    DeadLetterFactory()
    told = operator.get("/kjo/queues/").json()
    assert not told["is_capped"]
    rows = {row["queue"]: row for row in told["results"]}
    assert {"default", "mails"} <= rows.keys()
    assert rows["default"]["states"]["pending"] == 2
    assert rows["default"]["states"]["failed"] == rows["default"]["open_dead_letters"] == 1
    assert rows["mails"]["oldest_waiting_seconds"] is None


def test_one_queue_tells_how_far_its_consumers_are_behind(operator: APIClient) -> None:
    told = operator.get("/kjo/queues/mails/").json()
    assert (told["lag"], told["lag_error"]) == (0, None)


def test_a_queue_is_paused_once_and_resumed_once(operator: APIClient) -> None:
    changes = [
        operator.post(f"/kjo/queues/mails/{action}/").json()
        for action in ("pause", "pause", "resume", "resume")
    ]
    assert [told["is_changed"] for told in changes] == [True, False, True, False]
    assert [told["queue"]["is_paused"] for told in changes] == [True, True, False, False]
    messages = LogEntry.objects.order_by("pk").values_list("change_message", flat=True)
    assert list(messages) == ["Paused.", "Resumed."]


def test_the_signal_says_who_paused_it(
    operator: APIClient, hear: Any, django_capture_on_commit_callbacks: Any
) -> None:
    heard = hear("queue_paused")
    with django_capture_on_commit_callbacks(execute=True):
        operator.post("/kjo/queues/mails/pause/")
    (told,) = heard
    assert (told["queue"], told["actor"]) == ("mails", operator.user.username)


def test_limits_that_are_not_given_stay(operator: APIClient) -> None:
    limits = {"concurrency": 2, "max_attempts": 7, "backoff_base": 30}
    told = operator.patch("/kjo/queues/mails/", limits).json()
    assert told["queue"]["asked"] == limits
    told = operator.patch("/kjo/queues/mails/", {"concurrency": None}).json()
    assert told["queue"]["asked"] == {**limits, "concurrency": None}
    assert operator.patch("/kjo/queues/mails/", {}).json()["is_changed"] is False
    assert QueueControl.objects.get().changed_by == operator.user.username


@pytest.mark.parametrize(
    "body",
    [
        {"concurrency": 0},
        {"concurrency": 1001},
        {"concurrency": "2"},
        {"concurrency": True},
        {"max_attempts": 1.5},
        {"backoff_base": 10**9},
        {"backoff_bas": 1},
        [],
    ],
    ids=str,
)
def test_limits_out_of_range_are_refused(operator: APIClient, body: Any) -> None:
    errors_of(operator.patch("/kjo/queues/mails/", body))
    assert not QueueControl.objects.exists()


def test_a_queue_nothing_names_is_not_made_by_asking(operator: APIClient) -> None:
    for name in ("mial", "x" * 200, "%00", "🙂"):
        problem_of(operator.get(f"/kjo/queues/{name}/"), 404)
        problem_of(operator.post(f"/kjo/queues/{name}/pause/"), 404)
        problem_of(operator.patch(f"/kjo/queues/{name}/", {"concurrency": 1}), 404)
    assert not QueueControl.objects.exists()


# --- Workers --------------------------------------------------------------------------------------


def test_a_worker_is_asked_once(operator: APIClient) -> None:
    worker = WorkerFactory()
    for outcome in ("asked", "unchanged"):
        told = operator.post(f"/kjo/workers/{worker.pk}/quiet/").json()
        assert (told["outcome"], told["worker"]["asked_to"]) == (outcome, "quiet")
    told = operator.post(f"/kjo/workers/{worker.pk}/unquiet/").json()
    assert (told["outcome"], told["worker"]["asked_to"]) == ("asked", "")
    assert LogEntry.objects.count() == 2


def test_a_stop_is_not_undone(operator: APIClient) -> None:
    worker = WorkerFactory()
    operator.post(f"/kjo/workers/{worker.pk}/stop/")
    problem_of(operator.post(f"/kjo/workers/{worker.pk}/unquiet/"), 409)
    assert Worker.objects.get().asked_to == "stop"


def test_one_that_is_gone_cannot_be_asked(operator: APIClient) -> None:
    worker = WorkerFactory(stale=True)
    assert operator.get(f"/kjo/workers/{worker.pk}/").json()["is_alive"] is False
    for action in ("quiet", "unquiet", "stop"):
        problem_of(operator.post(f"/kjo/workers/{worker.pk}/{action}/"), 409)
        problem_of(operator.post(f"/kjo/workers/{uuid.uuid4()}/{action}/"), 404)


def test_workers_are_listed_by_state(operator: APIClient) -> None:
    WorkerFactory(state="stopped")
    running = WorkerFactory(partitions=[{"topic": "default", "partition": 0}])
    (told,) = operator.get("/kjo/workers/", {"state": "running"}).json()["results"]
    assert told["id"] == str(running.pk)
    told = operator.get(f"/kjo/workers/{running.pk}/").json()
    assert [(each["topic"], each["partition"]) for each in told["partitions"]] == [("default", 0)]


def test_a_worker_tells_what_it_holds_and_what_runs_there(operator: APIClient) -> None:
    moment = timezone.localtime().replace(microsecond=0).isoformat()
    job = {"id": "1", "handler": "shop.send", "started_at": moment}
    held = {"group": "g", "topic": "default", "partition": 3, "rebalanced_at": moment}
    # Given a partition of which little is known, one with all, and one that makes no sense
    worker = WorkerFactory(
        partitions=[{"topic": "default", "partition": 0}, {**held, "running": [job]}, {"topic": 5}]
    )
    # When
    told = operator.get(f"/kjo/workers/{worker.pk}/").json()
    # Then
    nothing = {"rebalanced_at": None, "resting_until": None, "waiting_since": None, "running": []}
    assert told["partitions"] == [
        {"group": None, "topic": "default", "partition": 0, **nothing},
        {**nothing, **held, "running": [job]},
    ]
    assert told["rebalanced_at"] == moment


def test_a_queue_tells_where_its_group_is_in_each_partition(
    operator: APIClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {TopicPartition("mails", 1): GroupOffsets(lag=3, committed=7, end=10)}
    monkeypatch.setattr(DatabaseTransport, "offsets", lambda self, topics, group: found)
    told = operator.get("/kjo/queues/mails/").json()
    where = {"topic": "mails", "partition": 1}
    assert told["partitions"] == [{**where, "committed": 7, "end": 10, "lag": 3}]
    assert (told["lag"], told["lag_by_partition"]) == (3, {"1": 3})
    assert (told["per_minute"], told["lag_per_minute"], told["lag_trend"]) == (0.0, None, None)


# --- The rest -------------------------------------------------------------------------------------


def test_metrics_tell_what_was_done(login: Login) -> None:
    client = login("view_job")
    MetricBucketFactory(completed_count=3)
    MetricBucketFactory(queue="mails", handler="shop.send", completed_count=4)
    told = client.get("/kjo/metrics/", {"length": 600}).json()
    assert (told["width_seconds"], len(told["points"])) == (60, 10)
    # A minute may end between the work and a request: then the last point but one is theirs.
    assert max(point["completed"] for point in told["points"][-2:]) == 7
    assert told["totals"]["completed"] == 7
    told = client.get("/kjo/metrics/", {"queue": "mails"}).json()
    assert max(point["completed"] for point in told["points"][-2:]) == 4
    queues = client.get("/kjo/metrics/queues/").json()["results"]
    assert {row["name"]: row["completed"] for row in queues} == {"default": 3, "mails": 4}
    handlers = client.get("/kjo/metrics/handlers/").json()["results"]
    assert {row["name"]: max(row["sparkline"][-2:]) for row in handlers} == {
        "shop.send": 4,
        "tests.add": 3,
    }


def test_a_lag_that_is_not_known_is_null_in_the_totals_and_in_the_last_point(
    login: Login, monkeypatch
) -> None:
    monkeypatch.setattr(registry, "consumed_queue_names", lambda: ["mails"])
    client = login("view_job")

    def lags_told() -> list[int | None]:
        told = client.get("/kjo/metrics/").json()
        return [told["totals"]["lag"], told["points"][-1]["lag"]]

    assert lags_told() == [None, None]
    MetricBucketFactory(queue="mails", handler="", lag=4152)
    assert lags_told() == [4152, 4152]


@pytest.mark.parametrize("length", ["0", "59", "99999999999", "x", "1e3", ""])
def test_a_time_out_of_range_is_refused(login: Login, length: str) -> None:
    for path in ("metrics/", "metrics/queues/", "metrics/handlers/"):
        errors_of(login("view_job").get(f"/kjo/{path}", {"length": length}))


def test_an_event_is_looked_up_by_its_id(login: Login) -> None:
    ProcessedEventFactory(event_id="e-1", service_name="a", event_data={"x": 1, "token": "t"})
    ProcessedEventFactory(event_id="e-1", service_name="b")
    ProcessedEventFactory(event_id="e-2")
    client = login("view_processedevent")
    told = client.get("/kjo/processed-events/", {"event_id": "e-1"}).json()["results"]
    assert [row["service_name"] for row in told] == ["a", "b"]
    assert "event_data" not in told[0]
    client = login("view_processedevent", "view_payload")
    query = {"event_id": "e-1", "service_name": "a", "event_type": "tests.add"}
    (row,) = client.get("/kjo/processed-events/", query).json()["results"]
    assert row["event_data"] == {"x": 1, "token": "[redacted]"}
    assert "event_id" in errors_of(client.get("/kjo/processed-events/"))


@pytest.mark.parametrize("is_well", [True, False])
def test_health_says_by_its_status_whether_all_is_well(
    login: Login, monkeypatch: pytest.MonkeyPatch, is_well: bool
) -> None:
    asked: list[Any] = []

    def health(timeout: float, thresholds: Any) -> list[Check]:
        asked.append(thresholds)
        return [Check("settings", True, "fine"), Check("lag", is_well, "5 behind", "Start more.")]

    monkeypatch.setattr("kjo_django.api.system.health", health)
    client = login("view_job")
    query = {"max_lag": 7, "max_failure_rate": 0.5, "max_idle": 60}
    answer = client.get("/kjo/health/", query)
    assert answer.status_code == (200 if is_well else 503)
    assert answer["Content-Type"] == "application/json"
    assert answer.json()["healthy"] is is_well
    assert answer.json()["checks"][1]["fix"] == "Start more."
    assert (asked[0].lag, asked[0].failure_rate, asked[0].idle.seconds) == (7, 0.5, 60)
    errors_of(client.get("/kjo/health/", {"max_lag": "many"}))
