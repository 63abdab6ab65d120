"""Status and its bounded counts."""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from kjo_django.exceptions import PublishError
from kjo_django.models import Job
from kjo_django.operations import search
from kjo_django.operations.monitoring import status
from kjo_django.operations.monitoring.status import overview, state_counts
from kjo_django.runtime import get_transport
from kjo_django.store import counting
from kjo_django.transports.base import OutgoingRecord
from kjo_django.transports.memory import MemoryTransport
from tests.factories import DeadLetterFactory, JobFactory, QueueControlFactory, WorkerFactory
from tests.ledger.jobs import write
from tests.running_jobs import let_run
from tests.unit.deliveries import kafka_at, on_memory

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def memory(settings):
    queues = {"emails": {}, "images": {"topic": "image-queue"}}
    with on_memory(settings, QUEUES=queues) as transport:
        yield transport


def queue(name, **kwargs):
    return next(row for row in status.status(**kwargs)["queues"] if row["queue"] == name)


def test_jobs_are_counted_by_queue_and_state():
    # Given
    JobFactory.create_batch(2, queue="emails")
    JobFactory(queue="emails", queued=True)
    JobFactory.create_batch(3, queue="emails", completed=True)
    JobFactory(queue="images", failed=True)
    # When, then
    assert queue("emails")["states"] == {
        "waiting": 0,
        "pending": 2,
        "scheduled": 0,
        "queued": 1,
        "failing": 0,
        "completed": 3,
        "failed": 0,
        "cancelled": 0,
    }
    assert queue("images")["states"]["failed"] == 1


@pytest.mark.parametrize(
    "engine",
    [
        "memory",
        "sqlite",
        pytest.param("postgres", marks=[pytest.mark.postgres]),
    ],
)
def test_a_delayed_job_is_scheduled_in_every_count_and_every_list(engine, settings, request):
    """On the database transport its row is stored as queued at once."""
    # Given
    if engine == "postgres":
        request.getfixturevalue("postgres")
    if engine != "memory":
        settings.KJO = {"QUEUES": {"ledger": {}}}
    else:
        settings.KJO = {**settings.KJO, "QUEUES": {"ledger": {}}}
    write.using(delay=timedelta(hours=2)).enqueue(job="later")
    write.enqueue(job="now")
    retried = write.enqueue(job="retried").job_id
    Job.objects.filter(pk=retried).update(
        state="queued", attempts=1, available_at=timezone.now() + timedelta(hours=1)
    )
    stored = "pending" if engine == "memory" else "queued"
    expected = {"pending": 0, "queued": 1, "scheduled": 1}
    expected[stored] += 1
    # When, then
    found = queue("ledger")
    counts = {
        "kjo_status": found["states"],
        "overview": overview()["states"],
        "tabs": state_counts()[0],
        "lists": {
            state: len(search.page(search.parse(f"state:{state}")).rows) for state in expected
        },
    }
    told = {where: {state: each[state] for state in expected} for where, each in counts.items()}
    assert told == dict.fromkeys(counts, expected)
    if engine != "memory":
        assert found["lag"] == 2  # what no worker could be given yet is not behind


def test_of_states_that_are_shown_as_two_fewer_jobs_are_counted_and_it_is_said(monkeypatch):
    # Given
    later = timezone.now() + timedelta(hours=1)
    JobFactory.create_batch(3, queue="emails")
    JobFactory.create_batch(2, queue="emails", available_at=later)
    JobFactory.create_batch(4, queue="emails", state="failed")
    # When, then
    counts, lower_bounds = state_counts()
    assert (counts["pending"], counts["scheduled"], counts["failed"]) == (3, 2, 4)
    assert lower_bounds == set()
    monkeypatch.setattr(status, "SPLIT_LIMIT", 4)
    counts, lower_bounds = state_counts()
    assert (counts["pending"], counts["scheduled"], counts["failed"]) == (3, 1, 4)
    assert lower_bounds == {"pending", "scheduled"}


def test_counts_look_at_no_more_rows_than_the_limit_and_say_so(monkeypatch):
    """DASHBOARD.md §3."""
    # Given
    JobFactory.create_batch(5, queue="emails")
    rows = Job.objects.using("default").filter(state="pending").order_by("pk")
    # When
    groups, is_capped = counting.grouped_counts(rows, ("queue",), limit=3)
    # Then
    assert groups == {("emails",): (3, None)}
    assert is_capped
    assert counting.bounded_count(rows, limit=3) == 3


def test_the_age_is_that_of_the_longest_waiting_due_job():
    # Given
    now = timezone.now()
    JobFactory(queue="emails", available_at=now - timedelta(seconds=90))
    JobFactory(queue="emails", available_at=now + timedelta(hours=1))
    JobFactory(queue="images", queued=True, available_at=now - timedelta(seconds=30))
    # When, then
    assert 90 <= queue("emails")["oldest_waiting_seconds"] < 100
    assert 30 <= queue("images")["oldest_waiting_seconds"] < 40


def test_an_empty_queue_has_no_age():
    assert queue("emails")["oldest_waiting_seconds"] is None


def test_lag_is_told_by_partition(memory):
    memory.publish([OutgoingRecord("image-queue", b"x")] * 3)
    row = queue("images")
    assert (row["lag"], row["lag_by_partition"], row["lag_error"]) == (3, {"0": 3}, None)


def test_a_transport_that_is_away_is_asked_once_and_the_rest_is_shown(monkeypatch):
    # Given
    asked = []

    def lag(self, topics, group):
        asked.append(topics)
        raise PublishError("away")

    monkeypatch.setattr(MemoryTransport, "lag", lag)
    # When
    found = status.status()
    # Then
    assert [row["lag"] for row in found["queues"]] == [None] * len(found["queues"])
    assert found["queues"][0]["lag_error"] == "away"
    assert len(asked) == 1


def test_a_broker_that_answers_nothing_keeps_no_screen_waiting(settings, monkeypatch):
    """A web server would end the request that waits half a minute for a broker that is away."""
    monkeypatch.setattr("kjo_django.transports.kafka.transport.PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        settings.KJO = {**kafka_at(address, request_timeout=3600), "QUEUES": {"emails": {}}}
        # When
        found = queue("emails")
        # Then it was not waited for as long as a worker would
        assert found["lag"] is None
        assert found["lag_error"].startswith("Kafka, emails: ")
        get_transport().close()


def test_the_relays_backlog_is_what_is_due(settings):
    # Given
    now = timezone.now()
    JobFactory(available_at=now - timedelta(seconds=60))
    JobFactory(state="failing", available_at=now - timedelta(seconds=10))
    JobFactory(available_at=now + timedelta(hours=1))
    # When, then
    found = status.relay()
    assert found["backlog"] == 2
    assert 60 <= found["oldest_seconds"] < 70
    assert found["is_needed"]
    # And a transactional transport needs no relay
    settings.KJO = {}
    assert not status.relay()["is_needed"]


def test_the_backlog_leaves_out_the_queues_that_need_no_relay(settings):
    # Given a queue of each kind
    memory = {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}
    database = {"BACKEND": "kjo_django.transports.database.DatabaseTransport"}
    settings.KJO = {
        "TRANSPORTS": {"default": memory, "own": database},
        "QUEUES": {"emails": {}, "images": {"transport": "own"}},
    }
    now = timezone.now()
    JobFactory(queue="emails", available_at=now - timedelta(seconds=60))
    JobFactory(queue="images", available_at=now - timedelta(seconds=90))
    # When
    relayed, screen = status.relay(now), overview()
    # Then both ways of asking agree
    assert (relayed["backlog"], relayed["oldest_seconds"], relayed["is_needed"]) == (1, 60, True)
    assert screen["backlog"] == 1
    assert 60 <= screen["oldest_backlog_seconds"] < 90 <= screen["oldest_waiting_seconds"]


def test_pauses_dead_letters_and_workers_are_shown_and_it_is_json():
    # Given
    QueueControlFactory(queue="emails", is_paused=True, changed_by="ann")
    DeadLetterFactory(queue="emails", failed_at=timezone.now() - timedelta(hours=2))
    DeadLetterFactory(queue="emails")
    DeadLetterFactory(queue="emails", discarded=True)
    WorkerFactory(name="gone", stale=True)
    WorkerFactory(name="here")
    WorkerFactory(name="bye", state="stopped")
    # When
    found = json.loads(json.dumps(status.status()))
    # Then
    row = next(row for row in found["queues"] if row["queue"] == "emails")
    assert (row["is_paused"], row["changed_by"], row["open_dead_letters"]) == (True, "ann", 2)
    assert 7200 <= row["oldest_dead_letter_seconds"] < 7300
    assert [(w["name"], w["is_alive"]) for w in found["workers"]] == [
        ("here", True),
        ("gone", False),
    ]


def test_one_queue_can_be_asked_for():
    assert [row["queue"] for row in status.status(["emails"])["queues"]] == ["emails"]


def test_running_jobs_are_counted_as_the_list_of_them_has_them():
    # Given two that run, one whose worker has died, and one that nobody has taken
    leased = [JobFactory(queue=name, queued=True) for name in ("emails", "emails", "images")]
    JobFactory(queue="emails", queued=True)
    let_run(*leased[:2])
    let_run(leased[2], worker="dead", is_alive=False)
    # When, then
    listed = [row.queue for row in search.page(search.parse("state:processing")).rows]
    counted = {name: queue(name)["running_count"] for name in ("emails", "images")}
    assert counted == {name: listed.count(name) for name in counted} == {"emails": 2, "images": 0}


def test_how_many_run_is_not_known_while_coordination_is_away(coordination_away):
    JobFactory(queue="emails", queued=True)
    coordination_away("names")
    assert queue("emails")["running_count"] is None


def test_the_number_of_queries_does_not_grow_with_queues_or_jobs(django_assert_max_num_queries):
    JobFactory.create_batch(20, queue="emails")
    WorkerFactory.create_batch(5)
    with django_assert_max_num_queries(15):
        status.status()


def test_a_worker_tells_its_release_and_what_it_was_asked():
    worker = WorkerFactory(asked_to="quiet", release="2026.11", state="quiet")
    (found,) = status.workers()
    assert (found["id"], found["state"]) == (str(worker.pk), "quiet")
    assert (found["asked_to"], found["release"]) == ("quiet", "2026.11")


def test_the_page_for_operators_asks_for_workers_running_jobs_and_handlers():
    # Given
    page = Path(__file__).resolve().parents[4] / "docs" / "how-to" / "operators.md"
    _before, _heading, text = page.read_text().partition("## Ask from code\n\n```python\n")
    snippet = text.partition("```")[0]
    WorkerFactory(concurrency=4)
    WorkerFactory(concurrency=8, heartbeat_at=timezone.now() - timedelta(days=1))
    running, _waiting = JobFactory(queue="emails", queued=True), JobFactory(queue="emails")
    let_run(running)
    # When
    found: dict = {}
    exec(snippet, found)
    # Then
    assert found["lanes"] == 4
    assert [job.pk for job in found["runs_now"]] == [running.pk]
    assert found["queue_of"]["ledger.write"] == "ledger"
    assert found["figures"]["living_workers"] == 1
