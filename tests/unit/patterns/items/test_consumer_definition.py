"""What a consumer's class must say, and what it makes of it."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured

from kjo_django import AbstractConsumer, registry
from kjo_django.conf import get_settings
from kjo_django.states import ItemState
from tests.unit.patterns.items.made import consumer

pytestmark = pytest.mark.usefixtures("forgotten_definitions")


REQUIRED = {
    "get_message_id",
    "get_message_key",
    "process",
    "mark_item_as_completed",
    "mark_item_as_failed",
    "is_item_completed",
}


def test_six_methods_are_required():
    """KJO-35 … 41, KJO-95."""
    assert AbstractConsumer.__abstractmethods__ == REQUIRED
    with pytest.raises(TypeError, match="abstract"):
        AbstractConsumer()


def test_three_hooks_are_optional():
    """KJO-42 … 44, KJO-95."""
    hooks = {"handle_processing_result", "on_success", "on_failed"}
    assert all(hasattr(AbstractConsumer, hook) for hook in hooks)
    assert not hooks & AbstractConsumer.__abstractmethods__


@pytest.mark.parametrize("missing", ["topic", "consumer_group", "key_prefix"])
def test_what_is_required_is_asked_for_by_name(missing):
    """KJO-86."""
    with pytest.raises(ImproperlyConfigured, match=missing):
        consumer(**{missing: None})


@pytest.mark.parametrize("name", ["topic", "consumer_group", "key_prefix"])
@pytest.mark.parametrize("value", ["", "  ", 7])
def test_empty_values_are_refused(name, value):
    """KJO-86."""
    with pytest.raises(ImproperlyConfigured, match=name):
        consumer(**{name: value})


def test_a_base_without_configuration_is_not_registered():
    base = consumer(topic=None, consumer_group=None, key_prefix=None)
    assert "made" not in registry.queue_names()
    with pytest.raises(ImproperlyConfigured, match="topic, consumer_group, key_prefix"):
        base()


def test_the_seeds_configuration_declares_the_queue():
    """KJO-86 … 92: as seed 1 prints it."""
    consumer(
        topic=None,
        consumer_group=None,
        key_prefix=None,
        config={
            "topic": "email-queue",
            "consumerGroup": "email-processors",
            "redisOptions": {"keyPrefix": "EMAIL", "processingTtl": 300, "sentTtl": 20},
            "topicOptions": {
                "partitions": 4,
                "replicationFactor": 2,
                "autoCreate": True,
                "configEntries": {"retention.ms": "604800000", "compression.type": "gzip"},
                "retentionMs": "604800000",
                "segmentMs": "86400000",
                "compressionType": "gzip",
                "cleanupPolicy": "delete",
            },
        },
    )
    queue = get_settings().queue("email-queue")
    assert (queue.consumer_group, queue.key_prefix) == ("email-processors", "EMAIL")
    assert queue.processing_ttl == timedelta(seconds=300)
    assert queue.sent_ttl == timedelta(seconds=20)
    from kjo_django.operations.maintenance import topics

    spec = topics.wanted(["email-queue"])[0].spec
    assert (spec.partitions, spec.replication_factor) == (4, 2)
    assert spec.config == {
        "retention.ms": "604800000",
        "segment.ms": "86400000",
        "compression.type": "gzip",
        "cleanup.policy": "delete",
    }


def test_the_settings_win_over_the_class(settings):
    """KJO-94."""
    consumer()
    settings.KJO = {"QUEUES": {"made": {"topic": "elsewhere"}}}
    assert get_settings().queue("made").topic == "elsewhere"
    assert get_settings().queue("made").key_prefix == "MADE"


@pytest.mark.parametrize(("given", "expected"), [(None, 3), ("7", 7)])
def test_concurrency_comes_from_the_environment(monkeypatch, given, expected):
    """KJO-55."""
    monkeypatch.delenv("MAX_CONCURRENT_MESSAGES", raising=False)
    if given:
        monkeypatch.setenv("MAX_CONCURRENT_MESSAGES", given)
    consumer()
    assert get_settings().queue("made").concurrency == expected


def test_a_concurrency_that_is_no_number_is_refused(monkeypatch):
    """KJO-55."""
    monkeypatch.setenv("MAX_CONCURRENT_MESSAGES", "many")
    with pytest.raises(ImproperlyConfigured, match="MAX_CONCURRENT_MESSAGES"):
        consumer()


def test_states_have_the_seeds_numbers():
    """KJO-68: processing is virtual, so it has none (KJO-67)."""
    assert {state.name: state.value for state in AbstractConsumer.STATES} == {
        "PENDING": 1,
        "COMPLETED": 2,
        "FAILED": 3,
    }
    assert AbstractConsumer.STATES is ItemState
