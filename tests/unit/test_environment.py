"""Settings from the environment: KJO-94."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from kjo_django.conf import get_settings
from kjo_django.runtime import close_backends, get_coordination, transport_class


@pytest.fixture
def settings_of(monkeypatch):
    def read(kjo, **environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        with override_settings(KJO=kjo):
            return get_settings()

    yield read
    close_backends()


def test_what_the_dict_leaves_out(settings_of):
    found = settings_of(
        {"SERVICE_NAME": "from the dict"},
        KJO_SERVICE_NAME="from the environment",
        KJO_CONCURRENCY="7",
        KJO_PROCESSING_TTL="60",
        KJO_SENT_TTL="null",
        KJO_QUEUES='{"emails": {"topic": "email-queue"}}',
        KJO_DATABASE="",
    )
    assert found.service_name == "from the dict"
    assert found.concurrency == 7
    assert found.processing_ttl.total_seconds() == 60
    assert found.sent_ttl is None
    assert found.queue("emails").topic == "email-queue"
    assert found.database is None


@pytest.mark.parametrize("release", ["20261120", "1.10", "123e456", "true"])
def test_a_text_that_looks_like_json_is_a_text(settings_of, release):
    """A build's number, a version, a commit: none of them is a number."""
    found = settings_of({}, KJO_RELEASE=release, KJO_METRICS_TOKEN="4711", KJO_DATABASE="null")
    assert found.release == release
    assert found.metrics_token == "4711"
    assert found.database is None


def test_a_text_may_be_written_as_json(settings_of):
    assert settings_of({}, KJO_SERVICE_NAME='"shop"').service_name == "shop"


def test_a_wrong_value_is_named(settings_of):
    with pytest.raises(ImproperlyConfigured, match=r"KJO\['CONCURRENCY'\]"):
        settings_of({}, KJO_CONCURRENCY="many")


def test_the_seeds_names_of_servers(settings_of):
    found = settings_of({}, KJO_KAFKA_BROKERS="a:1,b:2", KJO_REDIS_URL="redis://c:3/4")
    assert found.transports["default"]["OPTIONS"] == {"bootstrap.servers": "a:1,b:2"}
    with override_settings(KJO={}):
        assert transport_class("default").__name__ == "KafkaTransport"
    assert found.coordination["OPTIONS"] == {"URL": "redis://c:3/4"}


@pytest.mark.redis
def test_coordination_by_url(redis_server):
    coordination = {
        "BACKEND": "kjo_django.coordination.redis.RedisCoordination",
        "OPTIONS": {"URL": redis_server.url},
    }
    with override_settings(KJO={"COORDINATION": coordination}):
        assert "its URL" in get_coordination().probe(5)


def test_a_url_that_is_none_is_refused_without_being_shown():
    coordination = {
        "BACKEND": "kjo_django.coordination.redis.RedisCoordination",
        "OPTIONS": {"URL": "http://user:secret@host"},
    }
    with override_settings(KJO={"COORDINATION": coordination}):
        with pytest.raises(ImproperlyConfigured, match="URL") as raised:
            get_coordination().probe(1)
        assert "secret" not in str(raised.value)
