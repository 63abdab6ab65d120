"""Topics as the settings ask for them (KJO-88 … 93, KJO-98, KJO-F16, KJO-F17)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from kjo_django.operations.maintenance import topics
from kjo_django.runtime import get_transport
from kjo_django.transports.base import TopicSpec

MEMORY = {"default": {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}}


def configure(settings, **queues):
    settings.KJO = {"TRANSPORTS": MEMORY, "QUEUES": queues}
    get_transport().clear()


def read(**options):
    return topics.read_options(options, "here")


def test_the_defaults_are_one_partition_one_replica_and_automatic_creation():
    """X-12: the only place that has a default. KJO-88, KJO-89, KJO-90."""
    options, errors, warnings = read()
    assert (options.partitions, options.replication_factor, options.auto_create) == (1, 1, True)
    assert errors == warnings == []


def test_named_options_become_config_entries_as_text():
    """KJO-91, KJO-92."""
    options, _, _ = read(
        retention_ms=604_800_000,
        segment_ms="86400000",
        compression_type="gzip",
        cleanup_policy="delete",
        config_entries={"max.message.bytes": 1_000_000, "preallocate": True},
    )
    assert options.config == {
        "retention.ms": "604800000",
        "segment.ms": "86400000",
        "compression.type": "gzip",
        "cleanup.policy": "delete",
        "max.message.bytes": "1000000",
        "preallocate": "true",
    }


def test_an_explicit_config_entry_wins_and_the_conflict_is_a_warning():
    """KJO-F17."""
    options, errors, warnings = read(retention_ms=1000, config_entries={"retention.ms": "2000"})
    assert options.config["retention.ms"] == "2000"
    assert len(warnings) == 1
    assert "the latter wins" in warnings[0].message
    assert errors == []


def test_equal_values_in_both_places_are_no_conflict():
    _, _, warnings = read(retention_ms=1000, config_entries={"retention.ms": 1000})
    assert warnings == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [("partition", "partitions"), ("retentionMs", "retention_ms"), ("nothing_like", "Known")],
)
def test_an_unknown_option_is_an_error_with_a_suggestion(name, hint):
    _, (problem,), _ = read(**{name: 1})
    assert name in problem.message
    assert hint in problem.hint


@pytest.mark.parametrize(
    "options",
    [
        {"partitions": 0},
        {"partitions": "4"},
        {"replication_factor": True},
        {"auto_create": "yes"},
        {"config_entries": []},
        {"retention_ms": "soon"},
        {"compression_type": ""},
        {"config_entries": {"min.insync.replicas": "some"}},
    ],
)
def test_a_wrong_value_is_an_error(options):
    _, errors, _ = read(**options)
    assert len(errors) == 1


def test_more_insync_replicas_than_replicas_are_an_error():
    """KJO-98."""
    _, (error,), _ = read(replication_factor=1, config_entries={"min.insync.replicas": 2})
    assert "nothing could be published" in error.message


def test_as_many_insync_replicas_as_replicas_are_a_warning():
    """KJO-F16."""
    _, errors, (warning,) = read(replication_factor=2, config_entries={"min.insync.replicas": 2})
    assert errors == []
    assert "one broker" in warning.message


def test_every_queue_has_its_topic_and_an_uncompacted_dead_letter_topic(settings):
    """KII-05, KII-28."""
    # Given
    configure(
        settings,
        emails={
            "topic": "email-queue",
            "topic_options": {"partitions": 4, "cleanup_policy": "compact"},
        },
    )
    # When
    specs = {topic.spec.name: topic.spec for topic in topics.wanted(["emails"])}
    # Then
    assert specs["email-queue"] == TopicSpec("email-queue", 4, 1, {"cleanup.policy": "compact"})
    assert specs["email-queue-dlq"] == TopicSpec(
        "email-queue-dlq", 4, 1, {"cleanup.policy": "delete"}
    )


def test_queues_sharing_a_topic_want_it_once_with_the_larger_numbers(settings):
    # Given
    configure(
        settings,
        a={"topic": "shared", "topic_options": {"partitions": 2}},
        b={"topic": "shared", "topic_options": {"partitions": 6, "auto_create": False}},
    )
    # When
    shared = next(t for t in topics.wanted(["a", "b"]) if t.spec.name == "shared")
    # Then
    assert shared.spec.partitions == 6
    assert shared.queues == ("a", "b")
    assert shared.auto_create is False


def test_creating_makes_the_plan_come_true_and_a_second_time_changes_nothing(settings):
    """KJO-93: an existing topic is tolerated, grown when it is too small, never shrunk."""
    # Given
    configure(settings, emails={"topic_options": {"partitions": 4}})
    get_transport().ensure_topics([TopicSpec("emails", 2)])
    # When
    before = {report.name: report.action for report in topics.plan(["emails"])}
    lines = topics.create(["emails"])
    # Then
    assert before == {"emails": "grow", "emails-dlq": "create"}
    assert len(lines) == 2
    assert all(report.is_ok for report in topics.plan(["emails"]))
    assert topics.create(["emails"]) == []


def test_more_partitions_than_asked_for_are_reported_and_left_alone(settings):
    # Given
    configure(settings, emails={"topic_options": {"partitions": 1}})
    get_transport().ensure_topics([TopicSpec("emails", 8), TopicSpec("emails-dlq", 1)])
    # When
    report = next(r for r in topics.plan(["emails"]) if r.name == "emails")
    # Then
    assert report.is_ok
    assert report.action == "none"
    assert report.differences == ["has 8 partitions, 1 are asked"]


def test_what_no_program_should_change_is_left_to_people(settings):
    # Given
    configure(settings, emails={"topic_options": {"retention_ms": 1000}})
    get_transport().ensure_topics(
        [
            TopicSpec("emails", 1, 1, {"retention.ms": "5"}),
            TopicSpec("emails-dlq", 1, 1, {"retention.ms": "1000"}),
        ]
    )
    # When
    report = next(r for r in topics.plan(["emails"]) if r.name == "emails")
    # Then
    assert (report.action, report.is_ok) == ("by hand", False)
    assert report.differences == ["has retention.ms=5, not 1000"]


def test_a_worker_refuses_to_start_without_a_topic_it_may_not_create(settings):
    """KJO-90: when off and missing, a clear error."""
    # Given
    configure(settings, emails={"topic_options": {"auto_create": False}})
    # When, then
    with pytest.raises(ImproperlyConfigured, match="kjo_topics create"):
        topics.ensure_topics(["emails"])
    # And an operator's command creates it all the same
    topics.create(["emails"])
    assert topics.ensure_topics(["emails"]) == []


def test_wrong_options_are_refused_before_anything_is_created(settings):
    configure(settings, emails={"topic_options": {"partition": 3}})
    with pytest.raises(ImproperlyConfigured, match="Did you mean 'partitions'"):
        topics.create(["emails"])


@pytest.mark.django_db
def test_a_transport_without_topics_of_its_own_needs_none(settings):
    # Given the embedded default
    settings.KJO = {"QUEUES": {"emails": {"topic_options": {"partitions": 4}}}}
    # When, then
    assert [report.name for report in topics.plan(["emails"])] == ["emails"]
    assert all(report.is_ok for report in topics.plan(["emails"]))
    assert topics.ensure_topics(["emails"]) == topics.create(["emails"]) == []


def test_the_production_profile_of_the_documentation():
    """KJO-97, KJO-98, KJO-F16: it is read without complaint, and survives a broker."""
    root = Path(__file__).resolve().parents[4]
    page = (root / "docs" / "how-to" / "template-producers-and-consumers.md").read_text()
    (source,) = re.findall(r"topic_options = (\{.*?\n\})", page, re.DOTALL)
    options, errors, warnings = topics.read_options(eval(source), "here")
    assert errors == warnings == []
    assert (options.partitions, options.replication_factor) == (4, 3)
    assert options.config["compression.type"] == "gzip"
    assert options.config["retention.ms"] == "604800000"
