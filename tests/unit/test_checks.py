"""System checks: each fault found, with what to do; silence where all is well."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.core.checks import Error, Tags, run_checks
from django.core.checks import Warning as CheckWarning
from django.db import connections

from kjo_django import checks, job, registry
from kjo_django.checks import check_servers, check_settings
from kjo_django.operations.monitoring.health import health
from kjo_django.patterns.streams import AbstractStreamProducer
from kjo_django.runtime import get_transport
from kjo_django.transports.base import Transport
from kjo_django.transports.database import DatabaseTransport

MEMORY = {"default": {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}}

DATABASE = "kjo_django.transports.database.DatabaseTransport"
COORDINATION = {"BACKEND": "kjo_django.coordination.database.DatabaseCoordination"}
REDIS = "kjo_django.coordination.redis.RedisCoordination"
STREAMS = "kjo_django.transports.redis_streams.RedisStreamsTransport"
KAFKA = "kjo_django.transports.kafka.KafkaTransport"

ROOT = Path(__file__).resolve().parents[2]
WAL, IMMEDIATE = "PRAGMA journal_mode=WAL", "IMMEDIATE"
OPTIONS = {"init_command": WAL, "transaction_mode": IMMEDIATE, "timeout": 30}


@pytest.fixture(autouse=True)
def database(settings, monkeypatch):
    """Tests live in memory, which is worth a warning anywhere else."""
    named = {"ENGINE": "django.db.backends.sqlite3", "NAME": "never-opened.sqlite3"}
    declared = {**named, "OPTIONS": OPTIONS}
    seen = SimpleNamespace(DATABASES={"default": declared}, USE_TZ=True)
    monkeypatch.setattr("kjo_django.checks.django_settings", seen)
    # Other tests of this process have made some, of databases that have no place here.
    monkeypatch.setattr("kjo_django.checks.save_hooks", [])
    settings.KJO = {}
    return declared


@pytest.fixture
def handler():
    """Register a handler of a queue, and forget it."""
    names = []

    def register(queue, name="tests.checked"):
        registry.register(
            registry.Handler(lambda: None, registry.HandlerOptions(name=name, queue=queue))
        )
        names.append(name)

    yield register
    for name in names:
        registry.unregister(name)


SERVERS = {"bootstrap.servers": "127.0.0.1:1"}


def found(settings, kjo=None, kind=Error):
    if kjo is not None:
        settings.KJO = kjo
    messages = check_settings()
    assert all(type(message) is kind for message in messages), messages
    return [(message.id.removeprefix("kjo."), message.msg, message.hint) for message in messages]


def test_the_default_is_silent():
    """DESIGN §2.5: installed with no settings at all."""
    assert check_settings() == []


def test_the_checks_are_registered_under_their_tag(settings):
    settings.KJO = {"QUEUESS": {}}
    assert [message.id for message in run_checks(tags=["kjo"])] == ["kjo.E002"]
    assert "kjo" not in vars(Tags)


@pytest.mark.parametrize(
    ("kjo", "id", "words", "hint"),
    [
        ({"CONCURRENCY": "4"}, "E001", "CONCURRENCY", "Lanes"),
        ({"PROCESSING_TTL": -1}, "E001", "positive", "lease"),
        ([], "E001", "must be a dict", None),
        ({"QUEUE": {}}, "E002", "QUEUE", "Did you mean 'QUEUES'?"),
        ({"queues": {}}, "E002", "queues", "Did you mean 'QUEUES'?"),
        ({"QUEUES": {"a": {"topics": "x"}}}, "E002", "topics", "Did you mean 'topic"),
        ({"QUEUES": {"a": {"topic": 5}}}, "E001", "'topic'", None),
        (
            {"QUEUES": {"a": {"transport": "defualt"}}},
            "E003",
            "defualt",
            "Did you mean 'default'?",
        ),
        ({"TRANSPORTS": {}}, "E003", "'default'", "Declared: none."),
        ({"TRANSPORTS": {"default": {}}}, "E004", "'BACKEND'", None),
        (
            {"TRANSPORTS": {"default": {"BACKEND": "kjo_django.transports.kafkaa.Kafka"}}},
            "E004",
            "cannot be imported",
            None,
        ),
        (
            {"TRANSPORTS": {"default": {"BACKEND": "datetime.date"}}},
            "E004",
            "not a Transport",
            None,
        ),
        (
            {"TRANSPORTS": {"default": {**MEMORY["default"], "OPTIONS": {"partition": 2}}}},
            "E004",
            "partition",
            None,
        ),
        ({"TRANSPORTS": {"default": {**MEMORY["default"], "OPTIONS": None}}}, "E004", "dict", None),
        (
            {"TRANSPORTS": {"default": {**MEMORY["default"], "OPTION": {}}}},
            "E004",
            "Did you mean 'OPTIONS'?",
            None,
        ),
        (
            {"TRANSPORTS": {"default": {"BACKEND": DATABASE, "OPTIONS": {"LEASES": 5}}}},
            "E004",
            "KJO['TRANSPORTS']['default']['OPTIONS'] has an unknown key 'LEASES'",
            None,
        ),
        ({"COORDINATION": {"BACKEND": "no.such"}}, "E005", "COORDINATION", None),
        (
            {"COORDINATION": {"BACKEND": REDIS, "OPTIONS": {"URL": "http://host"}}},
            "E005",
            "is not a redis:// or rediss:// URL",
            "kjo-django[redis]",
        ),
        (
            {"COORDINATION": {"BACKEND": REDIS, "OPTIONS": {"CACHES": "other"}}},
            "E005",
            "Did you mean 'CACHE'?",
            "kjo-django[redis]",
        ),
        (
            {"COORDINATION": {"BACKEND": REDIS, "OPTIONS": {"CACHE": "default"}}},
            "E005",
            "CACHES['default'] is not a cache of django-redis",
            "kjo-django[redis]",
        ),
        (
            {"TRANSPORTS": {"default": {"BACKEND": STREAMS, "OPTIONS": {"CACHE": "nope"}}}},
            "E004",
            "KJO['TRANSPORTS']['default']['OPTIONS']['CACHE'] names 'nope'",
            "kjo-django[redis]",
        ),
        (
            {"COORDINATION": {**COORDINATION, "OPTIONS": {"DATABASE": "defalt"}}},
            "E007",
            "KJO['COORDINATION']['OPTIONS']['DATABASE'] is 'defalt'",
            "Did you mean 'default'?",
        ),
        (
            {"TRANSPORTS": {"default": {"BACKEND": DATABASE, "OPTIONS": {"DATABASE": "jobs"}}}},
            "E007",
            "KJO['TRANSPORTS']['default']['OPTIONS']['DATABASE'] is 'jobs'",
            "Declared: default.",
        ),
        (
            {"QUEUES": {"a": {"topic_options": {"partition": 4}}}},
            "E006",
            "'a'",
            "Did you mean 'partitions'?",
        ),
        ({"TOPIC_OPTIONS": {"partitions": 0}}, "E006", "at least 1", None),
        (
            {"QUEUES": {"a": {"topic_options": {"config_entries": {"min.insync.replicas": 2}}}}},
            "E006",
            "nothing could be published",
            "Lower",
        ),
        ({"DATABASE": "defalt"}, "E007", "defalt", "Did you mean 'default'?"),
        ({"ERROR_RECOVERY_DELAYS": {"netwrk": 1}}, "E008", "netwrk", "Did you mean 'network'?"),
        ({"ERROR_RECOVERY_DELAYS": {"network": "10"}}, "E008", "number of seconds", None),
        ({"PAUSABLE_ERRORS": ["shop.errors.Away"]}, "E008", "shop.errors.Away", None),
    ],
)
def test_a_fault_is_an_error_that_says_what_to_do(settings, kjo, id, words, hint):
    if REDIS in str(kjo) or hint == "kjo-django[redis]":
        pytest.importorskip("django_redis")
    ((first_id, message, first_hint), *_) = found(settings, kjo)
    assert first_id == id
    assert words in message
    assert (hint or "") in (first_hint or "")


@pytest.mark.parametrize(
    ("kjo", "id", "words"),
    [
        ({"SENT_TTL": 20}, "W001", "SENT_TTL"),
        (
            {"TOPIC_OPTIONS": {"retention_ms": 1, "config_entries": {"retention.ms": 2}}},
            "W002",
            "the latter wins",
        ),
        (
            {
                "TOPIC_OPTIONS": {
                    "replication_factor": 2,
                    "config_entries": {"min.insync.replicas": 2},
                }
            },
            "W002",
            "one broker",
        ),
        ({"PROCESSING_TTL": 10, "HEARTBEAT_INTERVAL": 5}, "W003", "HEARTBEAT_INTERVAL"),
        ({"BACKOFF_BASE": 60, "BACKOFF_MAX": 10}, "W007", "BACKOFF_MAX"),
    ],
)
def test_a_doubtful_setting_is_a_warning(settings, kjo, id, words):
    """KJO-F4, KJO-F16, KJO-F17."""
    ((first_id, message, hint), *_) = found(settings, kjo, CheckWarning)
    assert first_id == id
    assert words in message
    assert hint


@pytest.mark.parametrize(
    "kjo",
    [
        {"PROCESSING_TTL": 600},
        {"SENT_TTL": 600},
        {"PROCESSING_TTL": 15, "HEARTBEAT_INTERVAL": 5},
        {"TIMEOUT": 7200},  # longer than the lease, which is renewed
        {"TIMEOUT": None},
        {"PAUSABLE_ERRORS": ["ShopAway", "django.db.OperationalError"]},
        {"QUEUES": {"a": {"transport": "default"}}},
    ],
)
def test_what_is_right_raises_no_warning(settings, kjo):
    """Only true warnings."""
    settings.KJO = kjo
    assert check_settings() == []


def test_a_database_in_memory_is_a_warning(settings, database):
    database["NAME"] = ":memory:"
    assert [id for id, *_ in found(settings, {}, CheckWarning)] == ["W004"]


@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        ({}, ["init_command", "transaction_mode", "timeout"]),
        ({"timeout": 5, "transaction_mode": "DEFERRED"}, ["init_command", "transaction_mode"]),
        ({"init_command": WAL, "transaction_mode": IMMEDIATE}, ["timeout"]),
        ({"init_command": "PRAGMA synchronous=NORMAL", "timeout": 9}, ["init_command"]),
        (OPTIONS, None),
        (
            {
                "init_command": "PRAGMA foreign_keys=ON; pragma Journal_Mode = 'wal';",
                "transaction_mode": "exclusive",
                "timeout": 1,
            },
            None,
        ),
        (
            {
                "init_command": "PRAGMA journal_mode(WAL); PRAGMA busy_timeout=9000",
                "transaction_mode": IMMEDIATE,
            },
            None,
        ),
        ({"init_command": WAL, "transaction_mode": IMMEDIATE, "timeout": 0}, ["timeout"]),
    ],
)
def test_a_file_of_sqlite_without_the_options_of_several_processes_is_a_warning(
    settings, database, options, lacking
):
    """FINDINGS 2.10 l: beside a busy worker the project's own enqueue() raised."""
    database |= {"NAME": "db.sqlite3", "OPTIONS": options}
    warnings = found(settings, {}, CheckWarning)
    assert [id for id, *_ in warnings] == ["W020"] * (lacking is not None)
    for _, _, hint in warnings:
        assert all(name in hint for name in lacking)


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("file::memory:?cache=shared", "W004"),
        ("file:jobs?mode=memory&cache=shared", "W004"),
        ("/srv/mode=memory.db", "W020"),
        (Path("/srv/jobs.db"), "W020"),
    ],
)
def test_a_file_of_sqlite_is_told_from_a_database_in_memory(settings, database, name, id):
    database |= {"NAME": name, "OPTIONS": {}, "ENGINE": "django.contrib.gis.db.backends.spatialite"}
    if id == "W004":
        database["ENGINE"] = "django.db.backends.sqlite3"
    assert [each for each, *_ in found(settings, {}, CheckWarning)] == [id]


def test_the_options_that_the_warning_names_are_those_of_the_pages(settings, database):
    """Each page that begins a project on SQLite sets them."""
    database |= {"NAME": "db.sqlite3", "OPTIONS": {}}
    ((_, _, hint),) = found(settings, {}, CheckWarning)
    wanted = re.findall(r'"\w+": [^,}]+', hint)
    assert len(wanted) == 3
    for page in ("index.md", "tutorial.md", "how-to/production.md", "how-to/testing.md"):
        text = (ROOT / "docs" / page).read_text()
        assert [option for option in wanted if option not in text] == [], page


@pytest.mark.parametrize(
    ("queue", "topic"),
    [({}, "a:b"), ({"topic": "e:mails"}, "e:mails"), ({"topic": "t" * 246}, "t" * 246 + "-dlq")],
)
def test_a_topic_that_kafka_cannot_name_so_is_named(settings, queue, topic):
    """It would be found out by the first job, which no broker takes."""
    pytest.importorskip("confluent_kafka")
    kafka = {"BACKEND": "kjo_django.transports.kafka.KafkaTransport", "OPTIONS": SERVERS}
    kjo = {"TRANSPORTS": {"default": kafka}, "QUEUES": {"a:b": queue}}
    ((id, _message, hint),) = [each for each in found(settings, kjo) if repr(topic) in each[1]]
    assert id == "E013"
    assert "KJO['QUEUES']['a:b']['topic']" in hint
    # And elsewhere it is no fault
    assert found(settings, {"QUEUES": {"a:b": queue}}) == []


@pytest.mark.parametrize("name", ["a b", "a/b", "a\n", " ", "q" * 101])
def test_a_queue_that_no_address_can_hold_is_named(settings, name):
    """FINDINGS 2.11: it passed on the database transport, and REST could not ask for it."""
    ((id, message, hint),) = found(settings, {"QUEUES": {name: {}}})
    assert (id, repr(name)[:100] in message, "['topic']" in hint) == ("E024", True, True)
    with pytest.raises(ValueError, match="queue"):
        job(name="bench.elsewhere", queue=name)(lambda: None)


def test_a_test_runs_own_database_in_memory_is_no_warning(settings, database):
    """Where SQLite's is kept during ``manage.py test``, which checks the settings after that."""
    database["NAME"] = "file:memorydb_default?mode=memory&cache=shared"
    settings.KJO = {}
    assert check_settings() == []


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({}, None),
        ({"isolation_level": "READ COMMITTED", "charset": "utf8mb4"}, None),
        ({"isolation_level": "repeatable read"}, "isolation_level"),
        ({"isolation_level": None}, "isolation_level"),
        ({"charset": "latin1"}, "charset"),
    ],
)
def test_options_of_mariadb_that_jobs_cannot_use_are_an_error(settings, database, options, wrong):
    # Given nothing, or what Django uses anyway, or something else
    database.update(ENGINE="django.db.backends.mysql", NAME="shop", OPTIONS=options)
    # When the settings are checked
    problems = found(settings, {})
    # Then only something else is wrong, and on another database it would not be
    assert [(id, wrong in message) for id, message, _ in problems] == [("E019", True)] * bool(wrong)
    database["ENGINE"] = "django.db.backends.postgresql"
    assert found(settings, {}) == []


class HalfATransport(Transport):
    capabilities = DatabaseTransport.capabilities


class TransportWithoutCapabilities(Transport):
    pass


@pytest.mark.parametrize("kind", [HalfATransport, TransportWithoutCapabilities])
def test_a_transport_that_lacks_a_method_is_named(settings, kind):
    """And ends no check in a traceback."""
    backend = f"{__name__}.{kind.__name__}"
    messages = found(settings, {"TRANSPORTS": {"default": {"BACKEND": backend}}})
    assert {id for id, *_ in messages} == {"E004"}
    assert f"is an incomplete Transport: {backend} lacks " in messages[0][1]
    assert "subscribe" in messages[0][1]
    assert ("capabilities" in messages[0][1]) is (kind is TransportWithoutCapabilities)


@pytest.mark.parametrize(
    ("retention_ms", "ids"),
    [(86_400_000, []), (60 * 86_400_000, ["W005"]), (-1, ["W005"]), (None, [])],
)
def test_markers_must_outlive_the_messages_of_their_topic(settings, retention_ms, ids):
    """KII-F10, X-10: the longest window of the three is the one nothing may outlive."""
    options = {} if retention_ms is None else {"retention_ms": retention_ms}
    kjo = {"TRANSPORTS": MEMORY, "QUEUES": {"a": {"topic_options": options}}}
    assert [id for id, *_ in found(settings, kjo, CheckWarning)] == ids


def test_a_handlers_queue_one_letter_off_is_a_warning(settings, handler):
    handler("emials")
    ((id, message, hint),) = found(settings, {"QUEUES": {"emails": {}}}, CheckWarning)
    assert id == "W006"
    assert "tests.checked" in message
    assert "Did you mean 'emails'?" in hint


def test_a_handlers_own_undeclared_queue_is_legal(settings, handler):
    handler("thumbnails")
    settings.KJO = {"QUEUES": {"emails": {}}}
    assert check_settings() == []


@pytest.fixture
def stream_producer():
    """A producer of an installed app, until the test has ended."""
    made = []

    def make(key):
        class Analyze(AbstractStreamProducer):
            task_display_name = "analysis"
            stream_key = key

            def build_message(self, payload):
                return {}

            def payload_identifier(self, payload):
                return ""

            def on_send_failed(self, payload, error):
                return

        Analyze.__module__, Analyze.__qualname__ = "tests.ledger.producers", "Analyze"
        made.append(Analyze)

    yield make
    made.clear()
    gc.collect()  # or its base would still know it


def test_a_stream_that_nobody_reads_is_a_warning(settings, stream_producer):
    """Its tasks were taken, and waited for ever."""
    stream_producer("resume:analyse:stream")
    ((id, message, hint),) = found(
        settings, {"QUEUES": {"resume:analyze:stream": {}, "items": {}}}, CheckWarning
    )
    assert id == "W014"
    assert "tests.ledger.producers.Analyze sends to 'resume:analyse:stream'" in message
    assert "Did you mean 'resume:analyze:stream'?" in hint
    assert "'consume': False" in hint


def test_a_stream_that_is_declared_is_right(settings, stream_producer):
    stream_producer("resume:analyze:stream")
    settings.KJO = {
        "QUEUES": {"analysis": {"topic": "resume:analyze:stream", "consume": False}, "items": {}}
    }
    assert check_settings() == []


@pytest.mark.parametrize(("queues", "ids"), [({"itemz": {}}, ["kjo.W014"]), ({"mails": {}}, [])])
def test_a_producers_topic_one_letter_off_is_a_warning_and_another_services_is_not(
    settings, queues, ids
):
    """Of tests.items, whose consumer is not declared here."""
    settings.KJO = {"QUEUES": queues}
    assert [message.id for message in check_settings()] == ids


class ToJobs:
    """A router as docs/how-to/production.md has it."""

    def db_for_write(self, model, **hints):
        return "jobs" if model._meta.app_label == "kjo_django" else None


@pytest.fixture
def two_databases(monkeypatch):
    named = {"ENGINE": "django.db.backends.sqlite3", "NAME": "never-opened.sqlite3"}
    declared = {**named, "OPTIONS": OPTIONS}
    known = connections.configure_settings({"default": {}, "jobs": declared})
    monkeypatch.setitem(connections.settings, "jobs", known["jobs"])
    seen = SimpleNamespace(DATABASES={"default": declared, "jobs": declared}, USE_TZ=True)
    monkeypatch.setattr("kjo_django.checks.django_settings", seen)


@pytest.mark.usefixtures("two_databases")
@pytest.mark.parametrize(("routers", "ids"), [([], ["W012"]), ([ToJobs()], [])])
def test_a_database_the_routers_do_not_choose_is_a_warning(settings, routers, ids):
    """Workers would use the one, the admin and Job.objects the other."""
    settings.DATABASE_ROUTERS = routers
    messages = found(settings, {"DATABASE": "jobs"}, CheckWarning)
    assert [id for id, _, _ in messages] == ids


@pytest.mark.usefixtures("two_databases")
def test_the_database_that_routers_choose_is_the_one_looked_at(settings):
    """Without KJO['DATABASE'] the jobs are where the routers send this app's models."""
    declared = checks.django_settings.DATABASES
    memory = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    declared["jobs"] = {**memory, "OPTIONS": {"pool": {"max_size": 2}}}
    assert found(settings, {}, CheckWarning) == []
    settings.DATABASE_ROUTERS = [ToJobs()]
    assert [id for id, *_ in found(settings, {}, CheckWarning)] == ["W004", "W011"]


@pytest.mark.usefixtures("two_databases")
@pytest.mark.parametrize(("routers", "ids"), [([], ["E012"]), ([ToJobs()], [])])
def test_messages_elsewhere_than_their_jobs_are_an_error(settings, routers, ids):
    """Promise 1: a worker that reads one before its job is committed finds no job."""
    settings.DATABASE_ROUTERS = routers
    elsewhere = {"BACKEND": DATABASE, "OPTIONS": {"DATABASE": "jobs"}}
    messages = found(settings, {"TRANSPORTS": {"default": elsewhere}})
    assert [id for id, _, _ in messages] == ids


@pytest.mark.parametrize(
    ("pool", "concurrency", "is_told"),
    [
        (True, 4, True),
        ({"min_size": 2, "max_size": 16}, 4, True),
        ({"min_size": 2, "max_size": 17}, 4, False),
        ({"min_size": 17}, 4, False),
        ({"max_size": 15}, 8, True),
        (None, 8, False),
        (False, 8, False),
    ],
)
def test_a_pool_smaller_than_a_worker_is_a_warning(settings, database, pool, concurrency, is_told):
    """Each thread keeps its connection: the heartbeat waits for one that no lane gives back."""
    database["OPTIONS"] = {**OPTIONS, "pool": pool}
    messages = found(settings, {"CONCURRENCY": concurrency}, CheckWarning)
    assert [(id, str(concurrency + 13) in hint) for id, _, hint in messages] == (
        [("W011", True)] if is_told else []
    )


def test_servers_are_asked_only_for_deployment(settings):
    """DASHBOARD.md §3: offline by default."""
    settings.KJO = {"TRANSPORTS": MEMORY, "QUEUES": {"emails": {}}}
    get_transport().clear()
    get_transport().fail("the broker is away")
    assert run_checks(tags=["kjo"]) == []
    get_transport().fail(None)
    get_transport().clear()


@pytest.mark.django_db(transaction=True)
def test_for_deployment_what_cannot_be_reached_is_a_warning(settings):
    settings.KJO = {"TRANSPORTS": MEMORY, "QUEUES": {"emails": {}}}
    transport = get_transport()
    transport.clear()
    transport.fail("the broker is away")
    messages = check_servers()
    assert [message.id for message in messages] == ["kjo.W008"]
    assert "the broker is away" in messages[0].msg
    # And once it answers, its topics
    transport.fail(None)
    transport.clear()
    assert {message.id for message in check_servers()} == {"kjo.W010"}
    transport.clear()


def test_moments_without_a_time_zone_are_an_error(settings, monkeypatch):
    monkeypatch.setattr("kjo_django.checks.django_settings.USE_TZ", False)
    ((id, message, _),) = found(settings)
    assert id == "E011"
    assert "USE_TZ" in message


def test_for_deployment_what_a_client_refuses_is_a_warning_too(settings):
    """Only librdkafka knows its keys; a traceback would hide what else there is to say."""
    pytest.importorskip("confluent_kafka")
    options = {"bootstrap.servers": "127.0.0.1:1", "sasl.mechanismm": "PLAIN"}
    settings.KJO = {"TRANSPORTS": {"default": {"BACKEND": KAFKA, "OPTIONS": options}}}
    found = {message.id: message.msg for message in check_servers()}
    assert "sasl.mechanismm" in found["kjo.W008"]


def test_servers_are_not_asked_with_wrong_settings(settings):
    settings.KJO = {"QUEUESS": {}}
    assert check_servers() == []


@pytest.mark.parametrize("url", ["redis://:S3cr3tPw/x@host", "redis://:S3cr3tPw?x@host:1/0"])
@pytest.mark.parametrize(
    ("kjo", "id", "named"),
    [
        ({"COORDINATION": {"BACKEND": REDIS}}, "E005", "LOCATION of CACHES['default']"),
        ({"COORDINATION": {"BACKEND": REDIS, "OPTIONS": {}}}, "E005", "['OPTIONS']['URL']"),
        (
            {"TRANSPORTS": {"default": {"BACKEND": STREAMS}}},
            "E004",
            "LOCATION of CACHES['default']",
        ),
    ],
    ids=["coordination", "coordination by URL", "transport"],
)
def test_a_password_that_breaks_its_url_is_not_told(settings, kjo, id, named, url):
    """A slip that is made often: the check ended in a ValueError with the password in it."""
    # Given
    pytest.importorskip("django_redis")
    if "URL" in named:
        kjo = {"COORDINATION": {"BACKEND": REDIS, "OPTIONS": {"URL": url}}}
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}
    settings.CACHES = {**settings.CACHES, "default": cache}
    # When
    ((told_id, message, _),) = found(settings, kjo)
    # Then
    assert told_id == id
    assert named in message
    assert "%2F" in message
    assert "S3cr3t" not in message
    # And neither by what asks for health
    answers = [check for check in health(timeout=5) if check.name in ("coordination", "transports")]
    assert "S3cr3t" not in str(answers)
    assert named in str(answers)
