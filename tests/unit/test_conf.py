"""The ``KJO`` setting: typed, with defaults, refusing what nobody meant."""

from __future__ import annotations

import math
import socket
from dataclasses import fields
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from hypothesis import given
from hypothesis import strategies as st

from kjo_django import conf
from kjo_django.conf import QueueOptions, Settings, get_settings
from kjo_django.coordination.database import DatabaseCoordination
from kjo_django.runtime import close_backends, get_coordination, get_transport, transport_class
from kjo_django.transports.database import DatabaseTransport
from kjo_django.transports.memory import MemoryTransport
from kjo_django.values import Problem, read_options

MEMORY = "kjo_django.transports.memory.MemoryTransport"


def only(kind: type, given: object, where: str = "KJO") -> Problem:
    """Read settings with one fault and return it."""
    _, problems = read_options(kind, given, where, upper=kind is Settings)
    assert len(problems) == 1, problems
    return problems[0]


# --- Defaults -------------------------------------------------------------------------------------


@pytest.mark.promise("no-servers")
@override_settings(KJO={})
def test_with_no_settings_at_all_everything_has_a_default():
    """Promise 5."""
    settings = get_settings()
    assert settings == Settings()
    assert transport_class("default") is DatabaseTransport
    assert isinstance(get_coordination(), DatabaseCoordination)


def test_a_project_without_the_setting_runs_on_defaults(settings):
    settings.KJO = {}  # announced, and so is its end; a deletion is not
    del settings.KJO
    assert not hasattr(settings, "KJO")
    assert get_settings() == Settings()


def test_every_setting_says_what_it_is():
    for field in (*fields(Settings), *fields(QueueOptions)):
        assert field.metadata["help"].endswith("."), field.name


@override_settings(KJO={"SERVICE_NAME": "shop", "MAX_ATTEMPTS": 7, "TIMEOUT": 60})
def test_an_undeclared_queue_has_the_defaults_of_the_settings():
    queue = get_settings().queue("emails")
    assert (queue.topic, queue.dead_letter_topic) == ("emails", "emails-dlq")
    assert queue.consumer_group == "shop-group"
    assert queue.key_prefix == "EMAILS"
    assert (queue.max_attempts, queue.timeout) == (7, timedelta(minutes=1))


@override_settings(
    KJO={
        "TOPIC_OPTIONS": {"partitions": 4, "retention_ms": 1},
        "QUEUES": {
            "emails": {
                "topic": "email-queue",
                "consumer_group": "email-processors",
                "concurrency": 3,
                "timeout": 5,
                "topic_options": {"partitions": 2},
            }
        },
    }
)
def test_a_declared_queue_overrides_key_by_key():
    queue = get_settings().queue("emails")
    assert (queue.topic, queue.consumer_group) == ("email-queue", "email-processors")
    assert queue.dead_letter_topic == "email-queue-dlq"
    assert (queue.concurrency, queue.timeout) == (3, timedelta(seconds=5))
    assert queue.topic_options == {"partitions": 2, "retention_ms": 1}


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({}, 20),
        ({"PROCESSING_TTL": 60}, 120),
        ({"PROCESSING_TTL": 60, "SENT_TTL": 7}, 7),
        ({"SENT_TTL": 7}, 7),
    ],
)
def test_the_sent_mark_follows_a_customised_processing_ttl(given, seconds):
    """KJO-F4."""
    settings, _ = read_options(Settings, given, "KJO", upper=True)
    assert settings.queue("items").sent_ttl == timedelta(seconds=seconds)


def test_a_worker_is_named_after_its_host_and_process():
    """PJQ-31."""
    host, _, pid = conf.default_worker_name().rpartition("-")
    assert host == socket.gethostname()
    assert pid.isdigit()


# --- Faults ---------------------------------------------------------------------------------------

RIGHT = {
    conf.duration: 5,
    conf.optional_duration: None,
    conf.flag: True,
    conf.text: "x",
    conf.optional_text: None,
    conf.mapping: {},
    conf.texts: [],
    conf.short_text: "x",
    conf.name_text: "x",
}
WRONG = {
    "SERVICE_NAME": ["", "  ", None, 5, b"x", "x" * 101],
    "DATABASE": ["", 5],
    "TRANSPORTS": [None, [], "x", {1: {}}],
    "COORDINATION": [None, [], "x"],
    "QUEUES": [None, [], "emails", {None: {}}],
    "SCHEDULES": [None, [], "nightly", {None: {}}],
    "MIDDLEWARE": ["shop.middleware.tenant", {"shop.middleware.tenant"}, [""], [5], None],
    "CONCURRENCY": [0, -1, 1.5, "4", True],
    "MAX_ATTEMPTS": [0, "5", None, True, math.inf],
    "BACKOFF_BASE": [0, -1, "2", None, True, math.nan, math.inf, timedelta(0), 1e30],
    "BACKOFF_MAX": [timedelta(-1), []],
    "BACKOFF_JITTER": [-0.1, 1.1, math.inf, math.nan, "0.2", None, True],
    "ERROR_RECOVERY_DELAYS": [None, [30], 30],
    "PAUSE_BUDGET": [0, -1, "24h", True, None],
    "UNKNOWN_HANDLER_WAIT": [0, -1, "1h", True],
    "PAUSABLE_ERRORS": ["shop.errors.Down", {"shop.errors.Down"}, [""], [5], None],
    "TIMEOUT": [0, -5, "30", math.nan],
    "RESULT_TTL": [0, None, "1h", 1e-6, timedelta.max],
    "PROCESSING_TTL": [0, None],
    "SENT_TTL": [0, "x"],
    "RECORD_LEASE": [0, None],
    "MAX_PAYLOAD_BYTES": [0, 1e6, "1MB"],
    "GROUP_SIZE": [0],
    "GROUP_BUDGET": [0, "fast"],
    "MAX_OUTSTANDING": [0],
    "MAX_OUTSTANDING_BYTES": [0, 1e6, "64MB"],
    "RELAY_BATCH_SIZE": [0],
    "RELAY_BATCH_BYTES": [0, 1e6, "16MB"],
    "POLL_INTERVAL": [0],
    "HEARTBEAT_INTERVAL": [0],
    "SHUTDOWN_GRACE": [0],
    "STATUS_REPORT_INTERVAL": [0],
    "RESCUE_AFTER": [0],
    "JOB_LOG_LINES": [-1, 1.5, "many", None],
    "PRUNE_INTERVAL": [0, "1h"],
    "MAX_REPLAYS": [0],
    "TOPIC_OPTIONS": [None, []],
    "RETENTION_COMPLETED": [0],
    "RETENTION_FAILED": [0],
    "RETENTION_OPEN_DEAD_LETTERS": [0, "never"],
    "RETENTION_PROCESSED_EVENTS": [0],
    "RETENTION_METRICS": [0],
    "ASYNC_CONCURRENCY": [0, -1, "x", None],
    "ASYNC_RAMP_UP": [0, -1, "x", None],
    "RELEASE": [None, 5, "x" * 101],
    "DEAD_LETTER_EXCEPTION_HEADERS": [0, "no", None],
    "REDACT": ["password", [""], None],
    "OPERATIONS_QUEUE": ["", 5, None],
    "METRICS_TOKEN": ["", "  ", 5],
    "EVENT_FORMAT": ["cloudevents", "", 5, None, []],
    "SCHEMA_REGISTRY": [None, [], "http://registry", {1: "x"}],
}

SECRET = {"METRICS_TOKEN", "SCHEMA_REGISTRY"}
"""Their values are never shown."""


def test_the_table_of_wrong_values_knows_every_key():
    assert set(WRONG) == {field.name.upper() for field in fields(Settings)}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, wrong in WRONG.items() for value in wrong], ids=repr
)
def test_a_value_of_a_wrong_type_is_named_with_what_it_must_be(key, value):
    """X-13: durations are timedeltas or seconds, other units are in the name."""
    # When
    problem = only(Settings, {key: value})
    # Then
    assert problem.message.startswith(f"KJO[{key!r}] must be ")
    shown = repr(value)[:80] if key not in SECRET else type(value).__name__
    assert shown in problem.message
    assert problem.hint
    with (
        override_settings(KJO={key: value}),
        pytest.raises(ImproperlyConfigured, match=f"KJO\\['{key}'\\]"),
    ):
        get_settings()


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("transport", ["", None, 1]),
        ("topic", [""]),
        ("consumer_group", [5]),
        ("concurrency", [0, "3", True]),
        ("key_prefix", [""]),
        ("max_attempts", [0]),
        ("timeout", [0]),
        ("result_ttl", [0, timedelta(days=36_501)]),
        ("dead_letter_topic", [""]),
        ("topic_options", [[]]),
    ],
)
def test_a_queues_value_of_a_wrong_type_is_named_too(key, wrong):
    for value in wrong:
        problem = only(QueueOptions, {key: value}, "KJO['QUEUES']['emails']")
        assert problem.message.startswith(f"KJO['QUEUES']['emails'][{key!r}] must be ")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("CONCURENCY", "CONCURRENCY"),
        ("concurrency", "CONCURRENCY"),
        ("TRANSPORT", "TRANSPORTS"),
        ("MAX_ATTEMPT", "MAX_ATTEMPTS"),
    ],
)
def test_an_unknown_key_is_asked_whether_another_was_meant(given, meant):
    problem = only(Settings, {given: 1})
    assert problem.is_unknown_key
    assert problem.message == f"KJO has an unknown key {given!r}."
    assert problem.hint == f"Did you mean {meant!r}?"


def test_an_unknown_key_like_no_other_gets_the_list():
    assert "CONCURRENCY" in only(Settings, {"XYZ": 1}).hint
    assert only(Settings, {5: 1}).is_unknown_key


@override_settings(KJO={"QUEUES": {"emails": {"topics": "x"}}})
def test_a_queues_unknown_key_is_refused_with_a_suggestion():
    with pytest.raises(ImproperlyConfigured, match=r"unknown key 'topics'.*mean 'topic'"):
        get_settings().queue("emails")


@pytest.mark.parametrize("given", [None, [], "x", 5])
def test_a_setting_that_is_no_dict_is_refused(given):
    assert only(Settings, given).message.startswith("KJO must be a dict, not ")


def test_all_faults_are_told_at_once_and_the_rest_keeps_its_value():
    given = {"CONCURRENCY": 0, "MAX_ATEMPTS": 1, "GROUP_SIZE": 7}
    settings, problems = read_options(Settings, given, "KJO", upper=True)
    assert len(problems) == 2
    assert (settings.group_size, settings.concurrency) == (7, None)


@given(
    st.dictionaries(
        st.text() | st.sampled_from(sorted(WRONG)) | st.integers(),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text()),
        max_size=5,
    )
)
def test_whatever_is_given_reading_never_fails(given):
    settings, problems = read_options(Settings, given, "KJO", upper=True)
    assert isinstance(settings, Settings)
    assert len(problems) <= len(given)


# --- Overriding -----------------------------------------------------------------------------------


def test_an_override_takes_effect_at_once_and_ends_with_its_block():
    # Given
    before = get_settings().group_size
    queue = get_settings().queue("emails")
    # When
    with override_settings(KJO={"GROUP_SIZE": before + 1, "QUEUES": {"emails": {"topic": "t"}}}):
        # Then
        assert get_settings().group_size == before + 1
        assert get_settings().queue("emails").topic == "t"
    assert get_settings().group_size == before
    assert get_settings().queue("emails") == queue


def test_an_override_makes_backends_anew():
    before = get_transport()
    with override_settings(KJO={"TRANSPORTS": {"default": {"BACKEND": MEMORY}}}):
        assert isinstance(get_transport(), MemoryTransport)
        assert get_transport() is get_transport()
    assert get_transport() is not before
    assert not isinstance(get_transport(), MemoryTransport)


# --- Backends -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transports", "says"),
    [
        ({}, "has no 'default'. Declared: none"),
        ({"other": {"BACKEND": MEMORY}}, "has no 'default'. Declared: other"),
        ({"default": "x"}, "must be a dict with a 'BACKEND'"),
        ({"default": {}}, "must be a dict with a 'BACKEND'"),
        ({"default": {"BACKEND": 5}}, "must be a dict with a 'BACKEND'"),
        ({"default": {"BACKEND": "no.such.Module"}}, "cannot be imported: No module named 'no'"),
        ({"default": {"BACKEND": "kjo_django.ids.uuid7"}}, "is not a Transport"),
        ({"default": {"BACKEND": "datetime.timedelta"}}, "is not a Transport"),
    ],
)
def test_a_transport_that_cannot_be_made_is_named(transports, says):
    with (
        override_settings(KJO={"TRANSPORTS": transports}),
        pytest.raises(ImproperlyConfigured, match=says),
    ):
        get_transport()


def test_a_coordination_that_cannot_be_made_is_named():
    with (
        override_settings(KJO={"COORDINATION": {"BACKEND": MEMORY}}),
        pytest.raises(ImproperlyConfigured, match=r"KJO\['COORDINATION'\].*is not a Coordination"),
    ):
        get_coordination()


# --- From the environment: KJO-94 -----------------------------------------------------------------


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
