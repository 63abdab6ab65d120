"""Replaying a dead-letter topic that others filled."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from kjo_django.exceptions import PublishError
from kjo_django.messages import headers as names
from kjo_django.models import TransportMessage
from kjo_django.operations import jobs
from kjo_django.operations import topic_replay as module
from kjo_django.operations.dead_letters import REFUSED_LOOP, REFUSED_PROCESSED, DeadLetterFilter
from kjo_django.operations.topic_replay import TopicReplay, replay_topic
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord, TopicSpec
from tests.factories import JobFactory, ProcessedEventFactory
from tests.unit.deliveries import on_memory

pytestmark = pytest.mark.django_db

SOURCE = "events-dlq"


@pytest.fixture(autouse=True)
def memory(settings, monkeypatch):
    monkeypatch.setattr(module, "IDLE_PATIENCE", 0.1)
    keys = {"QUEUES": {"orders": {"topic": "order-events"}}, "MAX_REPLAYS": 3}
    with on_memory(settings, **keys) as transport:
        transport.ensure_topics([TopicSpec(SOURCE, 2)])
        yield transport


def fill(count=1, topic=SOURCE, **headers):
    get_transport().publish(
        [
            OutgoingRecord(
                topic,
                value=b"value-%d" % n,
                key=b"key-%d" % n,
                headers={names.ID: b"m-%d" % n, **headers},
            )
            for n in range(count)
        ]
    )


def values(topic):
    return sorted(record.value for record in get_transport().records(topic))


def test_records_go_back_to_the_topic_the_source_is_named_after():
    """KII-28, KAFKA.md 2.4."""
    # Given
    fill(3, **{names.DLQ_REASON: b"fatal", "x": b"\xff"})
    # When
    report = replay_topic(TopicReplay(SOURCE))
    # Then
    assert (report.replayed, report.is_ok) == (3, True)
    assert values("events") == [b"value-0", b"value-1", b"value-2"]
    record = get_transport().records("events")[0]
    assert record.headers["x"] == b"\xff"
    assert record.headers[names.REPLAY_COUNT] == b"1"
    assert names.DLQ_REASON not in record.headers
    assert get_transport().lag([SOURCE], "django-replay-events-dlq") == {
        (SOURCE, 0): 0,
        (SOURCE, 1): 0,
    }


def test_a_record_that_names_its_origin_goes_there_if_it_is_a_topic_of_ours():
    """Others write that header; it must not send messages anywhere (target allow-list)."""
    # Given
    fill(1, **{names.DLQ_ORIGINAL_TOPIC: b"order-events"})
    fill(1, **{"kafka_dlt-original-topic": b"order-events"})
    fill(1, **{names.DLQ_ORIGINAL_TOPIC: b"payroll"})
    # When
    report = replay_topic(TopicReplay(SOURCE))
    # Then
    assert len(values("order-events")) == 2
    assert values("payroll") == []
    assert dict(report.refused) == {"no allowed target": 1}
    assert "--target" in report.samples[0]["detail"]


def test_an_explicit_target_takes_everything():
    fill(1, **{names.DLQ_ORIGINAL_TOPIC: b"payroll"})
    assert replay_topic(TopicReplay(SOURCE, target="elsewhere")).replayed == 1
    assert len(values("elsewhere")) == 1


def test_the_source_is_refused_as_target():
    with pytest.raises(ValueError, match="source itself"):
        TopicReplay(SOURCE, target=SOURCE)
    # And by way of a header too
    fill(1, **{names.DLQ_ORIGINAL_TOPIC: SOURCE.encode()})
    assert replay_topic(TopicReplay(SOURCE)).refused["no allowed target"] == 1


def test_a_topic_without_suffix_needs_a_target():
    fill(1, topic="graveyard")
    assert replay_topic(TopicReplay("graveyard")).refused["no allowed target"] == 1


def test_a_topic_that_does_not_exist_is_an_error_and_is_not_created():
    with pytest.raises(PublishError, match="does not exist"):
        replay_topic(TopicReplay("missing-dlq"))
    assert get_transport().describe_topics(["missing-dlq"])[0].partitions is None


def test_a_run_goes_on_where_the_one_before_ended():
    # Given
    fill(5)
    # When
    first = replay_topic(TopicReplay(SOURCE, limit=2))
    second = replay_topic(TopicReplay(SOURCE))
    third = replay_topic(TopicReplay(SOURCE))
    # Then
    assert (first.replayed, second.replayed, third.replayed) == (2, 3, 0)
    assert len(values("events")) == 5


def test_what_comes_after_the_start_waits_for_the_next_run(monkeypatch):
    """Messages that die again at once do not keep a run going for ever."""
    # Given
    fill(2)
    publish = module.publish_one

    def die_again(record, transport):
        publish(record, transport)
        fill(1)

    monkeypatch.setattr(module, "publish_one", die_again)
    # When
    report = replay_topic(TopicReplay(SOURCE))
    # Then
    assert report.replayed == 2
    assert len(values("events")) == 2


def test_a_dry_run_acknowledges_nothing_and_skips_what_was_replayed_before():
    # Given
    fill(5, **{names.DLQ_REASON: b"fatal", names.TYPE: b"tests.add"})
    replay_topic(TopicReplay(SOURCE, limit=2))
    # When
    report = replay_topic(TopicReplay(SOURCE, dry_run=True))
    # Then
    assert report.replayed == 0
    assert sum(report.histogram.values()) == report.matched == 3
    assert list(report.histogram) == [("fatal", "tests.add", "")]
    assert len(values("events")) == 2
    # And the real run still replays all three
    assert replay_topic(TopicReplay(SOURCE)).replayed == 3


def test_a_record_that_is_not_accepted_stops_the_run_and_is_the_next_ones_first(monkeypatch):
    # Given
    fill(3)

    def refuse(record, transport):
        raise PublishError("away")

    with monkeypatch.context() as patch:
        patch.setattr(module, "publish_one", refuse)
        # When
        report = replay_topic(TopicReplay(SOURCE))
    # Then
    assert (report.failed, report.replayed, report.is_ok) == (1, 0, False)
    assert replay_topic(TopicReplay(SOURCE)).replayed == 3


def test_the_loop_guard_counts_in_the_header():
    # Given
    fill(1, **{names.REPLAY_COUNT: b"3"})
    fill(1, **{names.REPLAY_COUNT: b"2"})
    # When
    report = replay_topic(TopicReplay(SOURCE))
    # Then
    assert report.replayed == 1
    assert dict(report.refused) == {REFUSED_LOOP: 1}
    # And --force, with a group that has not passed over it
    assert replay_topic(TopicReplay(SOURCE, force=True, group="again")).replayed == 2


def test_a_message_that_took_effect_is_refused():
    fill(1, **{names.TYPE: b"tests.add"})
    ProcessedEventFactory(event_id="m-0", event_type="tests.add")
    report = replay_topic(TopicReplay(SOURCE))
    assert dict(report.refused) == {REFUSED_PROCESSED: 1}
    assert report.already_processed == 1


def test_a_record_of_one_of_our_jobs_requeues_the_job():
    """Its consumer would drop the message: the job has failed."""
    # Given
    job = JobFactory(failed=True)
    ours = {names.SERVICE: b"django", names.JOB_ID: str(job.pk).encode(), names.GENERATION: b"1"}
    fill(2, **ours)
    # When
    report = replay_topic(TopicReplay(SOURCE))
    # Then its second copy finds the job gone on
    assert report.replayed == 1
    assert dict(report.refused) == {"its job has moved on": 1}
    job.refresh_from_db()
    assert (job.state, job.generation) == ("pending", 2)
    assert values("events") == []


def record_of(job, generation=1):
    """Put a record of a job's death into the topic."""
    number = str(generation).encode()
    fill(
        1,
        **{
            names.SERVICE: b"django",
            names.JOB_ID: str(job.pk).encode(),
            names.GENERATION: number,
        },
    )


def test_the_record_of_an_earlier_death_does_not_run_the_job_again():
    """It was requeued, and failed again: that death has a record of its own."""
    job = JobFactory(failed=True, generation=2)
    record_of(job, 1)
    report = replay_topic(TopicReplay(SOURCE))
    assert dict(report.refused) == {"its job has moved on": 1}
    job.refresh_from_db()
    assert (job.state, job.generation) == ("failed", 2)


def test_of_two_who_replay_a_record_at_once_one_does(monkeypatch):
    # Given somebody else who requeues the job when it has been looked at
    job = JobFactory(failed=True)
    record_of(job)
    looked_at = module.DeadRecord

    def look_and_lose(*arguments):
        found = looked_at(*arguments)
        jobs.requeue([job.pk])
        return found

    monkeypatch.setattr(module, "DeadRecord", look_and_lose)
    # When
    report = replay_topic(TopicReplay(SOURCE))
    # Then
    assert (report.replayed, sum(report.refused.values())) == (0, 1)
    job.refresh_from_db()
    assert job.generation == 2


NOW = datetime.now(UTC)


@pytest.mark.parametrize(
    "selection",
    [
        DeadLetterFilter(ids=["m-0"]),
        DeadLetterFilter(queue="orders"),
        DeadLetterFilter(handler="tests.add"),
        DeadLetterFilter(reason="fatal"),
        DeadLetterFilter(error="TIMED out"),
        DeadLetterFilter(error="timeouterror"),
        DeadLetterFilter(since=NOW - timedelta(hours=1)),
    ],
)
def test_filters_read_the_headers_and_what_they_leave_out_is_for_another_run(selection):
    # Given
    fill(
        1,
        **{
            names.DLQ_ORIGINAL_TOPIC: b"order-events",
            names.DLQ_HANDLER: b"tests.add",
            names.DLQ_REASON: b"fatal",
            names.DLQ_EXCEPTION_MESSAGE: b"it timed out",
            names.DLQ_EXCEPTION_TYPE: b"TimeoutError",
            names.DLQ_LAST_FAILED_AT: NOW.isoformat().encode(),
        },
    )
    other = (NOW - timedelta(days=1)).isoformat().encode()
    fill(1, **{names.ID: b"other", names.DLQ_LAST_FAILED_AT: other})
    # When
    report = replay_topic(TopicReplay(SOURCE, selection=selection))
    # Then
    assert (report.replayed, report.skipped) == (1, 1)
    assert len(values("order-events")) == 1
    # And a run with another filter sees the other one
    assert replay_topic(TopicReplay(SOURCE, selection=DeadLetterFilter(ids=["other"]))).replayed


def test_a_fingerprint_cannot_be_asked_of_a_topic():
    with pytest.raises(ValueError, match="fingerprint"):
        TopicReplay(SOURCE, selection=DeadLetterFilter(fingerprint="x"))


def test_an_outage_ends_the_run_with_its_reason(memory, monkeypatch):
    fill(1)
    monkeypatch.setattr(module, "JOIN_PATIENCE", 0.1)
    memory.fail("the broker is away")
    report = replay_topic(TopicReplay(SOURCE))
    assert "the broker is away" in report.stopped
    assert not report.is_ok


@pytest.mark.django_db(transaction=True)
def test_where_acknowledging_deletes_what_is_left_out_stays(settings):
    """The database transport."""
    # Given
    settings.KJO = {}
    fill(1, **{names.DLQ_REASON: b"fatal"})
    fill(1, **{names.DLQ_REASON: b"exhausted"})
    only_fatal = DeadLetterFilter(reason="fatal")
    # When
    dry = replay_topic(TopicReplay(SOURCE, dry_run=True))
    report = replay_topic(TopicReplay(SOURCE, selection=only_fatal))
    # Then
    assert dry.matched == 2
    assert (report.replayed, report.skipped) == (1, 1)
    assert TransportMessage.objects.filter(topic=SOURCE).count() == 1
    assert replay_topic(TopicReplay(SOURCE)).replayed == 1
    assert TransportMessage.objects.filter(topic="events").count() == 2


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres")  # SQLite takes any text
def test_an_id_no_database_keeps_does_not_stop_a_run():
    """Whoever may write to the topic writes its headers."""
    fill(1, **{names.DLQ_MESSAGE_ID: b"a\0b"})
    assert replay_topic(TopicReplay(SOURCE)).replayed == 1
