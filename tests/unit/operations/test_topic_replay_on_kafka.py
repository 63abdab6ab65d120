"""Topics and topic replay on a real broker: what the memory transport cannot prove."""

from __future__ import annotations

import uuid

import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, Job
from kjo_django.operations.dead_letters import replay
from kjo_django.operations.maintenance import topics
from kjo_django.operations.monitoring import status
from kjo_django.operations.topic_replay import TopicReplay, replay_topic
from kjo_django.outbox.relay import Relay
from kjo_django.runtime import get_transport
from kjo_django.testing.conformance import eventually
from kjo_django.transports.base import OutgoingRecord, TopicSpec
from tests.ledger.jobs import write
from tests.unit.deliveries import kafka_at
from tests.waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.django_db(transaction=True)]

OPTIONS = {"partitions": 3, "retention_ms": 86_400_000, "compression_type": "gzip"}


@pytest.fixture
def topic(settings, kafka_server):
    """A queue ``events`` on a topic of its own."""
    name = f"it-events-{uuid.uuid4().hex[:8]}"
    settings.KJO = {
        **kafka_at(kafka_server.bootstrap_servers),
        "QUEUES": {"events": {"topic": name, "topic_options": OPTIONS}},
    }
    return name


def read_all(topic, count):
    """Return the values in a topic, waiting for ``count`` of them."""
    subscription = get_transport().subscribe([topic], f"reader-{topic}")
    found = []
    try:
        wait_until(
            lambda: found.extend(subscription.poll(100, 0.5)) or len(found) >= count,
            f"{count} records on {topic}",
        )
        found += subscription.poll(100, 1.0)
    finally:
        subscription.close()
    return sorted(record.value for record in found)


def test_created_topics_are_as_configured_and_creating_again_changes_nothing(topic):
    """KJO-91 … 93, KII-06."""
    assert {report.action for report in topics.plan(["events"])} == {"create"}
    assert len(topics.create(["events"])) == 2
    assert all(report.is_ok for report in topics.plan(["events"])), topics.plan(["events"])
    assert topics.create(["events"]) == []


def test_a_topic_is_replayed_once_in_several_runs_and_dry_runs_move_nothing(topic):
    """KAFKA.md 2.4: own group, commit after the delivery report, resumable."""
    # Given
    topics.create(["events"])
    source = f"{topic}-dlq"
    records = [
        OutgoingRecord(source, b"value-%02d" % n, b"key-%d" % n, {names.ID: b"m-%d" % n})
        for n in range(40)
    ]
    assert not [outcome for outcome in get_transport().publish(records) if outcome.error]
    # When
    before = replay_topic(TopicReplay(source, dry_run=True))
    first = replay_topic(TopicReplay(source, limit=15))
    between = replay_topic(TopicReplay(source, dry_run=True))
    second = replay_topic(TopicReplay(source))
    third = replay_topic(TopicReplay(source))
    # Then
    assert (before.matched, between.matched) == (40, 25)
    assert (first.replayed, second.replayed, third.replayed) == (15, 25, 0)
    assert read_all(topic, 40) == [b"value-%02d" % n for n in range(40)]
    # And the queue's own group has it all before it
    assert status.status(["events"])["queues"][0]["lag"] == 40


def test_a_job_over_its_topics_limit_is_a_dead_letter_until_the_limit_is_raised(
    topic, kafka_server
):
    # Given a topic that takes less than the job needs
    get_transport().ensure_topics([TopicSpec(topic, config={"max.message.bytes": 20_000})])
    jobs = [write.using(queue="events").enqueue(job="small") for _ in range(5)]
    jobs.insert(2, write.using(queue="events").enqueue(job="large", note="x" * 200_000))
    relay = Relay()
    # When
    relay.publish_due()
    # Then the large one alone has failed, for everybody to see
    states = {job.pk: job.state for job in Job.objects.all()}
    assert sorted(states.values()) == ["failed", *["queued"] * 5]
    letter = DeadLetter.objects.get()
    assert (states[letter.job_id], letter.reason) == ("failed", "too_large")
    assert "MSG_SIZE_TOO_LARGE" in letter.error
    assert relay.publish_due() == 0
    # When the limit is raised and the letter replayed
    raised = ConfigEntry(
        "max.message.bytes", "1000000", incremental_operation=AlterConfigOpType.SET
    )
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[raised])
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap_servers})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(PATIENCE)
    assert replay(DeadLetter.objects.all()).replayed == 1

    def is_taken():
        replay(DeadLetter.objects.all())  # the broker may take a moment to know its new limit
        relay.publish_due()
        return Job.objects.get(pk=letter.job_id).state == "queued"

    # Then
    eventually(is_taken, 20, "the large one is taken")
    assert len(read_all(topic, 6)) == 6
