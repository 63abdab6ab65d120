"""Rescuing queued jobs whose message is gone: no state waits for a human."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
from django.utils import timezone

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.exceptions import PublishError
from kjo_django.ids import uuid7_floor
from kjo_django.messages import headers as names
from kjo_django.models import Job, TransportMessage
from kjo_django.operations import queues
from kjo_django.operations.maintenance.rescue import rescue
from kjo_django.runtime import get_transport
from kjo_django.testing.conformance import eventually
from kjo_django.transports.base import GroupOffsets, OutgoingRecord, TopicPartition, TopicSpec
from kjo_django.transports.memory import MemoryTransport
from tests.factories import JobFactory
from tests.unit.deliveries import MEMORY, kafka_at, on_memory

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("after", [timedelta(days=365 * 60), timedelta.max])
@pytest.mark.parametrize("lag", [0, 5])
def test_who_waits_for_ever_rescues_nothing(memory, settings, monkeypatch, after, lag):
    settings.KJO = {**MEMORY, "RESCUE_AFTER": after}
    place = {TopicPartition("ledger", 0): GroupOffsets(lag)}
    monkeypatch.setattr(MemoryTransport, "offsets", lambda self, topics, group: place)
    queued_job(minutes=60 * 24 * 365 * 20)
    assert rescue().republished == 0


@pytest.fixture
def memory(settings):
    with on_memory(settings) as transport:
        yield transport


def queued_job(minutes=30, **kwargs):
    moment = timezone.now() - timedelta(minutes=minutes)
    defaults = {
        "id": uuid.UUID(int=uuid7_floor(moment).int + uuid.uuid4().int % 2**60),
        "state": "queued",
        "queued_at": moment,
        "available_at": moment,
        "attempts": 1,
        "topic": "default",
        "partition": 0,
        "offset": 0,
    }
    return JobFactory(**{**defaults, **kwargs})


@pytest.mark.promise("where-jobs-are")
def test_a_job_nothing_waits_for_goes_back_to_the_relay_as_it_was(memory):
    # Given
    job = queued_job(generation=3)
    # When
    report = rescue(["default"])
    # Then
    assert report.republished == 1
    job.refresh_from_db()
    assert (job.state, job.generation, job.attempts) == ("pending", 3, 1)
    assert job.offset is None
    # And it is left alone afterwards
    assert rescue(["default"]).republished == 0


def test_on_a_transactional_transport_its_message_is_written_again():
    # Given
    job = queued_job()
    # When
    assert rescue(["default"]).republished == 1
    # Then
    job.refresh_from_db()
    assert job.state == "queued"
    assert job.queued_at > timezone.now() - timedelta(minutes=1)
    assert TransportMessage.objects.count() == 1


@pytest.mark.parametrize(
    "change", [{"state": "failing"}, {"state": "pending", "attempts": 0, "queued_at": None}]
)
def test_on_a_transactional_transport_no_relay_looks_for_retries_and_pending_jobs(change):
    """Their message was deleted, or their queue was another transport's when they were stored."""
    # Given
    job = queued_job(**change)
    # When
    assert rescue(["default"]).republished == 1
    # Then
    attempts = job.attempts
    job.refresh_from_db()
    assert (job.state, job.attempts, job.generation) == ("queued", attempts, 1)
    message = TransportMessage.objects.get()
    assert names.from_json(message.headers)[names.ATTEMPT] == b"%d" % (attempts + 1)
    # And it is left alone afterwards
    assert rescue(["default"]).republished == 0


def test_a_retry_whose_message_waits_in_a_backlog_is_left_alone(settings):
    # Given
    get_transport().publish([OutgoingRecord("default", b"x")])
    job = queued_job(state="failing", minutes=60 * 24)
    Job.objects.filter(pk=job.pk).update(available_at=timezone.now() - timedelta(minutes=30))
    # When, then
    assert rescue(["default"]).republished == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda: {"minutes": 5},
        lambda: {"state": "failing"},
        lambda: {"state": "completed"},
        lambda: {"available_at": timezone.now() + timedelta(hours=1)},
        lambda: {"queued_at": timezone.now()},
    ],
)
def test_a_job_that_is_not_queued_for_long_is_left_alone(memory, change):
    queued_job(**change())
    assert rescue(["default"]).republished == 0


def test_a_job_in_the_hands_of_a_worker_is_left_alone(memory):
    queued_job(lease_token="t", lease_expires_at=timezone.now() + timedelta(minutes=1))
    report = rescue(["default"])
    assert (report.republished, report.busy) == (0, 1)


def test_the_jobs_of_a_paused_queue_wait_as_they_should(memory):
    queued_job()
    queues.pause("default")
    assert rescue(["default"]).republished == 0


def test_a_job_whose_message_still_waits_in_a_backlog_is_left_alone(memory):
    """Publishing it again would double the backlog every time."""
    # Given
    memory.publish([OutgoingRecord("default", b"x")])
    queued_job()
    # When, then
    assert rescue(["default"]).republished == 0
    # But beyond all reason it is published again: late, never not at all
    queued_job(minutes=60 * 24)
    assert rescue(["default"]).republished == 1


def test_where_the_transport_tells_positions_what_the_group_has_passed_is_rescued(
    memory, monkeypatch
):
    # Given
    memory.publish([OutgoingRecord("default", b"x") for _ in range(20)])
    passed, ahead = queued_job(offset=9), queued_job(offset=10)
    offsets = {TopicPartition("default", 0): GroupOffsets(lag=10, committed=10, end=20)}
    monkeypatch.setattr(MemoryTransport, "offsets", lambda self, topics, group: offsets)
    # When
    assert rescue(["default"]).republished == 1
    # Then
    passed.refresh_from_db()
    ahead.refresh_from_db()
    assert (passed.state, ahead.state) == ("pending", "queued")


def test_a_message_that_the_group_has_before_it_is_not_doubled_however_long_it_waits(
    memory, monkeypatch
):
    # Given jobs that have waited beyond all reason, in a backlog
    memory.publish([OutgoingRecord("default", b"x") for _ in range(20)])
    passed, ahead, beyond, unknown = (
        queued_job(minutes=60 * 24, offset=offset) for offset in (9, 10, 20, None)
    )
    offsets = {TopicPartition("default", 0): GroupOffsets(lag=10, committed=10, end=20)}
    monkeypatch.setattr(MemoryTransport, "offsets", lambda self, topics, group: offsets)
    # When
    assert rescue(["default"]).republished == 3
    # Then the one whose message is sure to come is not published once more
    states = Job.objects.in_bulk([passed.pk, ahead.pk, beyond.pk, unknown.pk])
    assert [pk for pk, job in states.items() if job.state == "queued"] == [ahead.pk]


@pytest.mark.kafka
def test_on_kafka_a_job_its_group_has_passed_is_rescued_though_others_wait_behind(
    settings, kafka_server
):
    """What consumed it died of its own bug, say, and acknowledged before the outcome was there."""
    # Given
    topic = f"kjo-{uuid.uuid4().hex[:12]}"
    settings.KJO = {
        **kafka_at(kafka_server.bootstrap_servers),
        "QUEUES": {"ledger": {"topic": topic, "topic_options": {"partitions": 1}}},
    }
    transport = get_transport()
    transport.ensure_topics([TopicSpec(topic, partitions=1)])
    transport.publish([OutgoingRecord(topic, b"x") for _ in range(3)])
    group = get_settings().queue("ledger").consumer_group
    subscription = transport.subscribe([topic], group)
    (record, *_) = eventually(lambda: subscription.poll(1, 1.0))
    subscription.acknowledge([record])
    subscription.close()
    place = {"queue": "ledger", "topic": topic, "partition": 0}
    passed, waiting = queued_job(offset=0, **place), queued_job(offset=1, **place)
    # When
    report = rescue(["ledger"])
    # Then
    assert (report.republished, report.unreachable) == (1, {})
    passed.refresh_from_db()
    waiting.refresh_from_db()
    assert (passed.state, waiting.state) == ("pending", "queued")


def test_a_transport_out_of_reach_is_reported_and_keeps_no_other_queue_waiting(memory, monkeypatch):
    # Given
    queued_job()
    queued_job(queue="emails")

    def lag(self, topics, group):
        if topics == ["default"]:
            raise PublishError("away")
        return {}

    monkeypatch.setattr(MemoryTransport, "lag", lag)
    # When
    report = rescue(["default", "emails"])
    # Then
    assert report.unreachable == {"default": "away"}
    assert report.republished == 1


def test_the_limit_bounds_one_call(memory):
    for _ in range(3):
        queued_job()
    assert rescue(["default"], limit=2).republished == 2
    assert rescue(["default"], limit=2).republished == 1


def test_without_names_every_known_queue_is_looked_at(settings, memory):
    settings.KJO = {**MEMORY, "QUEUES": {"emails": {}}}
    queued_job(queue="emails")
    assert "emails" in registry.queue_names()
    assert rescue().republished == 1
