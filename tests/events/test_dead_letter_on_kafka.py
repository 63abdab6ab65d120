"""A dead-letter topic that takes nothing for a while, on a real Kafka (issue 5, item 4; KII-F3)."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from confluent_kafka.admin import AdminClient

from kjo_django import BaseEvent, PermanentError, event_handler, publish_event
from kjo_django.conf import QueueConf, get_settings
from kjo_django.exceptions import PublishError
from kjo_django.models import DeadLetter
from kjo_django.operations.maintenance.topics import ensure_topics
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord, Record, TopicSpec
from kjo_django.worker import Worker
from tests.events.bench import EVENTS
from tests.unit.deliveries import kafka_at
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.kafka
REFUSED = "A dead letter is not published, trying again"


class Topics:
    """The topics of a test: ``source`` and ``dead``, which can be taken away and given back."""

    def __init__(self, servers: str) -> None:
        self.source = f"it-dead-{uuid.uuid4().hex[:8]}"
        self.dead = f"{self.source}-dlq"
        self._admin = AdminClient({"bootstrap.servers": servers})

    def make(self) -> None:
        """Make all of them. A worker that does not find one in time makes it again later, and so
        the one that was taken away."""
        conf = get_settings()
        queues = [conf.queue(self.source), conf.queue(f"{self.source}-retry")]
        wait_until(lambda: _is_ensured(queues))

    def take_away(self) -> None:
        """From now on the broker takes no dead letters."""
        wait_until(self._is_there)
        for answer in self._admin.delete_topics([self.dead]).values():
            answer.result(PATIENCE)
        wait_until(lambda: not self._is_there())

    def _is_there(self) -> bool:
        return self.dead in self._admin.list_topics(timeout=10).topics

    def give_back(self) -> None:
        get_transport().ensure_topics([TopicSpec(self.dead, 1)])

    def send(self, value: bytes) -> None:
        """Publish to the source as another service would."""
        (answer,) = get_transport().publish([OutgoingRecord(self.source, value, b"u1")])
        assert answer.error is None

    def lag(self) -> int:
        """Records of the source whose offsets are not committed."""
        group = get_settings().queue(self.source).consumer_group
        return sum(get_transport().lag([self.source], group).values())

    def read_dead(self) -> list[Record]:
        """Every record of the dead-letter topic; waits a moment for another copy."""
        subscription = get_transport().subscribe([self.dead], uuid.uuid4().hex)
        found: list[Record] = []
        try:
            wait_until(lambda: found.extend(subscription.poll(100, 0.5)) or found)
            found += subscription.poll(100, 2.0)
        finally:
            subscription.close()
        return found


@pytest.fixture
def topics(settings, kafka_server) -> Topics:
    options = {
        "delivery.timeout.ms": 2_000,
        "topic.metadata.propagation.max.ms": 500,
        "topic.metadata.refresh.interval.ms": 1_000,
        "commit_interval": timedelta(seconds=0.1),
    }
    settings.KJO = {
        **EVENTS,
        **kafka_at(kafka_server.bootstrap_servers, **options),
        "POLL_INTERVAL": 0.2,
        "SHUTDOWN_GRACE": 5,
        "CONCURRENCY": 1,
    }
    return Topics(kafka_server.bootstrap_servers)


def _is_ensured(queues: list[QueueConf]) -> bool:
    try:
        ensure_topics(queues)
    except PublishError:
        return False
    return True


@contextmanager
def working(topic: str) -> Iterator[None]:
    """A worker of the events, stopped at the end as a deployment stops it."""
    worker = Worker([topic, f"{topic}-retry"])
    has_begun = threading.Event()
    thread = threading.Thread(target=worker.run, args=[lambda: has_begun.set() or False])
    thread.start()
    try:
        # Until then it makes topics, and so would give back one that is taken away.
        assert has_begun.wait(PATIENCE)
        yield
    finally:
        worker.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.promise("stored-before-acknowledged")
@pytest.mark.large("by a restart")
@pytest.mark.parametrize(
    ("mended", "real_database"),
    [
        ("while it runs", "sqlite_file"),
        pytest.param("by a restart", "postgres", marks=pytest.mark.postgres),
    ],
    indirect=["real_database"],
    ids=["while it runs", "by a restart"],
)
@pytest.mark.usefixtures("real_database")
def test_what_is_not_acknowledged_commits_nothing(topics: Topics, caplog, mended: str) -> None:
    """Nothing before the broker has it; then one copy, one row, and no second one ever."""
    handled: list[str] = []

    @event_handler("T", topic=topics.source)
    def handle(event: BaseEvent) -> None:
        handled.append(event.id)

    # Given a worker whose dead letters the broker does not take
    topics.make()
    with working(topics.source):
        topics.take_away()
        topics.send(b"poison")
        wait_until(lambda: REFUSED in caplog.text)
        assert (topics.lag(), DeadLetter.objects.count()) == (1, 0)
        # When the broker does while the worker tries on
        if mended == "while it runs":
            topics.give_back()
            wait_until(DeadLetter.objects.exists)
    if mended == "by a restart":
        # Or the worker is stopped, which commits nothing, and another one makes the topic
        assert (topics.lag(), DeadLetter.objects.count()) == (1, 0)
        with working(topics.source):
            wait_until(DeadLetter.objects.exists)
    wait_until(lambda: topics.lag() == 0)
    # Then there is one copy of it and one row
    (copy,) = topics.read_dead()
    assert (copy.key, copy.value) == (b"u1", b"poison")
    letter = DeadLetter.objects.get()
    assert (letter.topic, letter.offset, letter.reason) == (topics.source, 0, "deserialization")
    # And a worker that starts again goes on behind it, and adds nothing
    event = BaseEvent(type="T", data={"userId": "u1"})
    with working(topics.source):
        topics.send(event.to_bytes())
        wait_until(lambda: handled)
        wait_until(lambda: topics.lag() == 0)
    assert handled == [event.id]
    assert [record.value for record in topics.read_dead()] == [b"poison"]
    assert DeadLetter.objects.count() == 1


@pytest.mark.parametrize("real_database", ["sqlite_file"], indirect=True)
@pytest.mark.usefixtures("real_database")
def test_cloudevents_on_kafka_are_handled_and_a_dead_one_keeps_its_attributes(
    topics: Topics,
) -> None:
    handled: list[str] = []

    @event_handler("T", topic=topics.source)
    def handle(event: BaseEvent) -> None:
        handled.append(event.id)
        if event.id == "second":
            raise PermanentError("never")

    # Given one CloudEvent of each mode
    topics.make()
    for id, event_format in (("first", "structured"), ("second", "binary")):
        event = BaseEvent(type="T", id=id, subject="Zoë", data={"userId": "u1"})
        event_format = f"cloudevents-{event_format}"
        publish_event(topics.source, event, direct=True, event_format=event_format)
    # When a worker runs
    with working(topics.source):
        wait_until(DeadLetter.objects.exists)
        wait_until(lambda: topics.lag() == 0)
    # Then
    assert handled == ["first", "second"]
    (dead,) = topics.read_dead()
    assert (dead.headers["ce_id"], dead.headers["ce_subject"]) == (b"second", "Zoë".encode())
    assert dead.headers["kjo-dlq-reason"] == b"fatal"
    assert dead.value == b'{"userId":"u1"}'
