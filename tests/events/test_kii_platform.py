"""What seed 5 asks of clients, tables, signals and retention, and where its own scripts went."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from datetime import timedelta
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from kjo_django import BaseEvent, event_handler, publish_event
from kjo_django.conf import get_settings
from kjo_django.models import DeadLetter, Job, ProcessedEvent
from kjo_django.operations.maintenance import topics
from kjo_django.operations.maintenance.prune import prune
from kjo_django.outbox.relay import LEASE_TTL, LONGEST_BACKOFF, Relay
from kjo_django.runtime import get_transport
from kjo_django.states import JobState
from kjo_django.transports.base import OutgoingRecord, Published, TopicSpec
from kjo_django.transports.kafka import KafkaTransport
from kjo_django.transports.kafka.clients import KafkaOptions
from kjo_django.transports.memory import MemoryTransport
from kjo_django.worker import Worker
from tests.events.bench import EVENTS, MEMORY, TOPIC, Service, read_all, send
from tests.factories import ProcessedEventFactory
from tests.ledger.models import Entry
from tests.waiting import PATIENCE

DOCS = Path(__file__).parents[2] / "docs"
SERVERS = {"bootstrap.servers": "localhost:9092"}


# --- Clients --------------------------------------------------------------------------------------


def test_the_producer_is_idempotent_and_partitions_as_java_does() -> None:
    """KII-15: acks of all replicas, the partitioner KafkaJS calls legacy."""
    config = KafkaOptions("default", SERVERS).producer()
    assert config["enable.idempotence"] is True
    assert config["acks"] == "all"
    assert config["partitioner"] == "murmur2_random"
    # In flight 5 and retries without end are what idempotence gives; the seed's 1 and 5 may be set
    wanted = {"max.in.flight.requests.per.connection": 1, "retries": 5}
    config = KafkaOptions("default", {**SERVERS, "producer": wanted}).producer()
    assert wanted.items() <= config.items()


def test_the_consumer_is_as_the_seeds_is() -> None:
    """KII-16; nothing is committed behind our back (KII-24). The long wait may be set."""
    config = KafkaOptions("default", SERVERS).consumer("user-service-group")
    assert config["session.timeout.ms"] == 30_000
    assert config["heartbeat.interval.ms"] == 3_000
    assert config["allow.auto.create.topics"] is False
    assert config["enable.auto.commit"] is False
    assert config["group.id"] == "user-service-group"
    config = KafkaOptions("default", {**SERVERS, "fetch.wait.max.ms": 5_000}).consumer("g")
    assert config["fetch.wait.max.ms"] == 5_000


def test_a_new_group_begins_at_the_beginning() -> None:
    """KII-33, KII-F6: by default; the seed's fromBeginning=false is ``latest``."""
    assert KafkaOptions("default", SERVERS).consumer("g")["auto.offset.reset"] == "earliest"
    options = KafkaOptions("default", {**SERVERS, "auto.offset.reset": "latest"})
    assert options.consumer("g")["auto.offset.reset"] == "latest"
    assert options.starts_at_the_end


@pytest.mark.kafka
def test_a_new_group_sees_what_was_told_before_it_joined(kafka_server) -> None:
    """KII-33, KII-F6, on a real Kafka."""
    transport = KafkaTransport("t", {"bootstrap.servers": kafka_server.bootstrap_servers})
    topic = f"it-new-group-{uuid.uuid4().hex[:8]}"
    transport.ensure_topics([TopicSpec(topic, 1)])
    (answer,) = transport.publish([OutgoingRecord(topic, b"before", b"u1")])
    assert answer.error is None
    subscription = transport.subscribe([topic], f"{topic}-group")
    found = next((batch for _ in range(60) if (batch := subscription.poll(10, 0.5))), [])
    subscription.close()
    transport.close()
    assert [record.value for record in found] == [b"before"]


def test_the_replication_factor_is_the_settings(settings) -> None:
    """KII-F7: one replica is a default for development; the settings say three, for each topic."""
    settings.KJO = {
        **EVENTS,
        **MEMORY,
        "TOPIC_OPTIONS": {"replication_factor": 3, "config_entries": {"min.insync.replicas": 2}},
        "QUEUES": {TOPIC: {"consume": False}},
    }
    found = {each.spec.name: each.spec for each in topics.wanted([TOPIC])}
    assert set(found) == {TOPIC, f"{TOPIC}-dlq"}
    assert {spec.replication_factor for spec in found.values()} == {3}
    assert {str(spec.config["min.insync.replicas"]) for spec in found.values()} == {"2"}
    assert "`replication_factor` 3" in (DOCS / "how-to/production.md").read_text()


# --- The table ------------------------------------------------------------------------------------


def test_the_table_is_the_seeds(real_database) -> None:
    """KII-17, as the database tells it."""
    with connection.cursor() as cursor:
        columns = {
            column.name: column
            for column in connection.introspection.get_table_description(cursor, "processed_events")
        }
    assert set(columns) == {
        *("id", "event_id", "event_type", "service_name", "processed_at"),
        *("event_data", "created_at", "updated_at"),
    }
    assert [name for name, column in columns.items() if column.null_ok] == ["event_data"]
    lengths = {"event_id": 255, "event_type": 100, "service_name": 100}
    assert {name: columns[name].display_size for name in lengths} == lengths
    if real_database == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT column_name, udt_name FROM information_schema.columns"
                " WHERE table_name = 'processed_events' AND udt_name <> 'varchar'"
            )
            types = dict(cursor.fetchall())
        times = dict.fromkeys(("processed_at", "created_at", "updated_at"), "timestamptz")
        assert types == {"id": "uuid", "event_data": "jsonb", **times}


def test_constraint_and_index_have_the_seeds_names(real_database) -> None:
    """KII-18, KII-19: the triple in this order; what is looked up by event or time has an index."""
    with connection.cursor() as cursor:
        found = connection.introspection.get_constraints(cursor, "processed_events")
    unique = found["uk_processed_events_event_service"]
    assert unique["unique"]
    assert unique["columns"] == ["event_id", "service_name", "event_type"]
    by_age = found["idx_processed_events_processed_at"]
    assert (by_age["index"], by_age["columns"]) == (True, ["processed_at"])
    if real_database == "sqlite":
        # The seed's index by event is the beginning of the constraint's, which is used for it.
        plan = ProcessedEvent.objects.filter(event_id="e").order_by().explain()
        assert "SEARCH processed_events" in plan
        assert "event_id=?" in plan


def test_the_triple_is_unique(real_database) -> None:
    """KII-18: by the database itself, for whoever else writes the table."""
    triple = {"event_id": "e", "service_name": "s", "event_type": "t"}
    ProcessedEvent.objects.create(**triple)
    for changed in triple:
        ProcessedEvent.objects.create(**{**triple, changed: "another"})
    with pytest.raises(IntegrityError), transaction.atomic():
        ProcessedEvent.objects.create(**triple)
    assert ProcessedEvent.objects.count() == 4


@pytest.mark.django_db
def test_the_table_does_not_grow_for_ever(settings) -> None:
    """KII-37, KII-F10: 30 days by default, longer than Kafka keeps records by its own default."""
    assert get_settings().retention_processed_events == timedelta(days=30) > timedelta(days=7)
    ages = (29, 31, 90)
    for days in ages:
        ProcessedEventFactory(processed_at=timezone.now() - timedelta(days=days))
    call_command("kjo_prune", verbosity=0)
    assert ProcessedEvent.objects.count() == 1
    settings.KJO = {"RETENTION_PROCESSED_EVENTS": timedelta(days=28)}
    assert prune()["processed_events"] == 1


# --- Order, attempts, progress --------------------------------------------------------------------


@pytest.fixture
def memory(settings) -> None:
    settings.KJO = {**EVENTS, **MEMORY, "BACKOFF_BASE": 1}


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("memory")
def test_a_users_events_keep_their_order() -> None:
    """KII-13: told with one key each, so one partition each, and handled as they were told."""
    get_transport().ensure_topics([TopicSpec(TOPIC, 3)])
    seen: dict[str, list[int]] = {}

    @event_handler("T", topic=TOPIC)
    def handle(event: BaseEvent) -> None:
        seen.setdefault(event.data["userId"], []).append(event.data["n"])

    for number in range(30):
        user = f"u{number % 3}"
        publish_event(TOPIC, BaseEvent(type="T", data={"userId": user, "n": number}), direct=True)
    service = Service()
    service.run()
    service.close()
    assert seen == {f"u{user}": list(range(user, 30, 3)) for user in range(3)}
    places: dict[bytes | None, set[int]] = {}
    for record in read_all(TOPIC):
        places.setdefault(record.key, set()).add(record.partition)
    assert set(places) == {b"u0", b"u1", b"u2"}
    assert [len(partitions) for partitions in places.values()] == [1, 1, 1]


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("memory")
def test_attempts_are_counted_and_bounded_and_hold_up_nobody() -> None:
    """KII-F4: a failing event is not retried for ever and does not block its partition."""
    attempts: list[int] = []

    @event_handler("T", topic=TOPIC, max_attempts=3)
    def handle(event: BaseEvent) -> None:
        if event.data["n"] == 0:
            attempts.append(len(attempts))
            raise ValueError("always")
        Entry.objects.create(job=str(event.data["n"]))

    for number in range(3):
        send(BaseEvent(type="T", data={"n": number}).to_bytes())
    service = Service()
    service.main.run(service.main.poll())
    # The others are done and the offset has moved while the first still has attempts left
    assert sorted(Entry.objects.values_list("job", flat=True)) == ["1", "2"]
    assert (service.main.lag(), len(attempts)) == (0, 1)
    service.run()
    service.close()
    assert len(attempts) == 3
    letter = DeadLetter.objects.get()
    assert (letter.attempts, letter.reason) == (3, "exhausted")


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("memory")
def test_progress_is_committed_within_a_batch() -> None:
    """KII-F11: each group of what was polled is acknowledged as it ends, not all at the end."""

    @event_handler("T", topic=TOPIC)
    def handle(event: BaseEvent) -> None:
        Entry.objects.create(job=event.id)

    service = Service()
    for _ in range(6):
        send(BaseEvent(type="T", data={"userId": "u"}).to_bytes())
    batch = service.main.poll()
    lags = []
    for start in range(0, 6, 2):
        service.main.run(batch[start : start + 2])
        service.main.subscription.flush()
        lags.append(service.main.lag())
    service.close()
    assert lags == [4, 2, 0]
    # On Kafka that is every half second, and when partitions are revoked
    assert KafkaOptions("default", SERVERS).commit_interval == 0.5


@pytest.mark.promise("outside-effects")
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("memory")
def test_delivery_is_at_least_once_and_effects_are_once() -> None:
    """KII-F1: the same event twice runs once; what a handler does outside the database, a failure
    after it repeats. The documentation says so and claims no more."""
    outside: list[str] = []

    @event_handler("T", topic=TOPIC)
    def handle(event: BaseEvent) -> None:
        outside.append(event.id)
        Entry.objects.create(job=event.id)
        if len(outside) == 1:
            raise ValueError("after both")

    event = BaseEvent(type="T")
    service = Service()
    for _ in range(2):
        send(event.to_bytes())
        service.run()
    service.close()
    assert Entry.objects.get().job == event.id
    assert outside == [event.id] * 2
    told = (DOCS / "explanation/guarantees.md").read_text()
    assert "At-least-once delivery, effectively-once database effects" in told
    assert (
        "effectively-once database effects"
        in (DOCS / "how-to/events-between-services.md").read_text()
    )
    for page in DOCS.glob("**/*.md"):
        assert "exactly-once" not in page.read_text().lower(), page


# --- Shutdown -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_consumer_of_events_stops_gracefully(settings, sqlite_file, number) -> None:
    """KII-31: the handler that runs ends, its offset is committed, nothing else is begun."""
    settings.KJO = {**EVENTS, **MEMORY, "CONCURRENCY": 1, "SHUTDOWN_GRACE": 20}
    began, ended = threading.Event(), threading.Event()

    @event_handler("T", topic=TOPIC)
    def handle(event: BaseEvent) -> None:
        began.set()
        ended.wait(PATIENCE)
        Entry.objects.create(job=event.id)

    def stop() -> None:
        if not began.wait(PATIENCE):
            worker.stop()  # the assertions below tell
            return
        os.kill(os.getpid(), number)
        threading.Timer(0.3, ended.set).start()

    send(BaseEvent(type="T").to_bytes())
    worker = Worker([TOPIC, f"{TOPIC}-retry"], install_signal_handlers=True)
    before = signal.getsignal(number)
    threading.Thread(target=stop).start()
    assert worker.run() == 0
    assert Entry.objects.count() == ProcessedEvent.objects.count() == 1
    assert sum(get_transport().lag([TOPIC], "interview-service-group").values()) == 0
    assert signal.getsignal(number) is before


# --- The outbox -----------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("memory")
def test_the_outbox_publishes_what_is_pending_and_keeps_what_is_refused(monkeypatch) -> None:
    """KII-38: pending, then published; refused, it stays pending, is tried again after a rest and
    is never given up."""
    events = [BaseEvent(type="T", data={"n": number}) for number in range(3)]
    for event in events:
        publish_event(TOPIC, event)
    rows = Job.objects.filter(destination=TOPIC)
    assert set(rows.values_list("state", flat=True)) == {JobState.PENDING}
    relay = Relay()
    # Given a broker that refuses
    with monkeypatch.context() as patched:
        patched.setattr(
            MemoryTransport, "publish", lambda self, records: [Published("no")] * len(records)
        )
        assert relay.publish_due() == 3
    assert set(rows.values_list("state", flat=True)) == {JobState.PENDING}
    assert relay.publish_due() == 0  # it rests
    # When another one, or this one after its rest, finds a broker that accepts
    assert Relay().publish_due() == 3
    # Then
    assert set(rows.values_list("state", flat=True)) == {JobState.COMPLETED}
    assert Relay().publish_due() == 0
    assert len(read_all(TOPIC)) == 3
    # And the seed's numbers have these places
    assert get_settings().relay_batch_size == 1000
    assert LONGEST_BACKOFF == 30
    assert LEASE_TTL.total_seconds() <= 10  # a relay that is stuck is relieved after it
    assert get_settings().retention_completed >= timedelta(hours=24)


# --- What has no place here -----------------------------------------------------------------------


@pytest.mark.parametrize("id", ["KII-07", "KII-08", "KII-10", "KII-34"])
def test_scripts_of_the_seed_that_have_no_place_here_are_named(id: str) -> None:
    """KII-07, KII-08, KII-10, KII-34: each is a row of the page that says what takes its place."""
    page = (DOCS / "how-to/events-between-services.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {id} ")]
    assert [cell.strip() for cell in row.strip("|").split("|")][2]


def test_no_port_is_freed_by_killing_its_owner() -> None:
    """KII-07, KII-34: we end no process that we did not start."""
    package = DOCS.parent / "kjo_django"
    for path in package.glob("**/*.py"):
        text = path.read_text()
        assert "lsof" not in text, path
        assert "fuser" not in text, path
