"""A message nobody enqueued here keeps its bytes, headers and place whatever happens to it."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from kjo_django.exceptions import PermanentError
from kjo_django.messages import headers as names
from kjo_django.messages.headers import folded
from kjo_django.models import ORIGIN_ID, DeadLetter, Job
from kjo_django.operations import dead_letters
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.operations.maintenance import topics
from kjo_django.operations.topic_replay import TopicReplay, replay_topic
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord, Record
from tests.settings import cache
from tests.unit.deliveries import KJO, MEMORY, Bench, as_job, kafka_at, make_everything_due, the_job
from tests.waiting import wait_until

STREAMS = "kjo_django.transports.redis_streams.RedisStreamsTransport"
TYPE = "bench.keep"
KEYS = {
    "null": None,
    "empty": b"",
    "binary": b"\xff\x00k",
    "long": b"k" * 400,
    "plain": b"plain",
}
HEADERS = [
    ("zeta", b"1"),
    ("kjo-type", TYPE.encode()),
    ("h", b"1"),
    ("nul", None),
    ("kjo-id", b"foreign-1"),
    ("h", b"2"),
    ("alpha", b"\xff\x00"),
    ("content-type", b"application/json"),
]
OURS = {names.JOB_ID, names.SERVICE, names.GENERATION, names.ATTEMPT, names.REPLAY_COUNT, ORIGIN_ID}
"""What a retry or a replay says besides, or in the place of what was there."""


@pytest.fixture(
    params=[
        pytest.param("memory", marks=pytest.mark.postgres),
        "database",
        pytest.param("kafka", marks=pytest.mark.kafka),
        pytest.param("streams", marks=pytest.mark.redis),
    ]
)
def queue(request, settings, forgotten_definitions):
    """A queue on each transport."""
    name = request.param
    # PostgreSQL sorts the names of a JSON object.
    request.getfixturevalue("postgres" if name == "memory" else "sqlite_file")
    own: dict[str, Any] = MEMORY if name == "memory" else {}
    if name == "kafka":
        own = kafka_at(request.getfixturevalue("kafka_server").bootstrap_servers)
    elif name == "streams":
        server = request.getfixturevalue("redis_server")
        settings.CACHES = {**settings.CACHES, "streams": cache(server.url)}
        own = {"TRANSPORTS": {"default": {"BACKEND": STREAMS, "OPTIONS": {"CACHE": "streams"}}}}
    topic = f"foreign-{uuid.uuid4().hex[:8]}"
    options = {"topic": topic, "topic_options": {"partitions": 1, "replication_factor": 1}}
    settings.KJO = {**KJO, **own, "QUEUES": {"ledger": options}}
    return name


class Reader:
    """A bench whose transport may need a moment."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.seen: list[Record] = []

    def next(self) -> list[Any]:
        """Publish what is due and take it, waiting for it."""
        make_everything_due()
        deliveries = wait_until(self.bench.poll, "a delivery")
        self.seen += [delivery.record for delivery in deliveries]
        return deliveries

    def run(self) -> Record:
        """Run the next message; return it as it was read."""
        self.bench.run(self.next())
        return self.seen[-1]


@pytest.fixture
def reader(queue):
    if queue == "kafka":
        topics.create(["ledger"])
    reader = Reader()
    yield reader
    reader.bench.close()


def send(bench: Bench, key: bytes | None) -> None:
    record = OutgoingRecord(bench.queue.topic, b'{"job": "a"}', key, folded(HEADERS))
    assert bench.transport.publish([record])[0].error is None


def theirs(headers: list[tuple[str, bytes | None]]) -> list[tuple[str, bytes | None]]:
    """Without what says what became of the message."""
    return [
        (name, value)
        for name, value in headers
        if name not in OURS and not name.startswith(names.DLQ_PREFIX)
    ]


def origin(headers: dict[str, bytes]) -> tuple[str, int, int]:
    return (
        names.text(headers, names.DLQ_ORIGINAL_TOPIC),
        int(headers[names.DLQ_ORIGINAL_PARTITION]),
        int(headers[names.DLQ_ORIGINAL_OFFSET]),
    )


@pytest.mark.promise("replay")
@pytest.mark.parametrize(
    ("queue", "key"),
    [
        pytest.param(name, key, marks=marks, id=f"{name}-{which}")
        for name, marks, keys in (
            ("memory", pytest.mark.postgres, KEYS),
            ("database", (), ("null", "binary")),
            ("kafka", pytest.mark.kafka, KEYS),
            ("streams", pytest.mark.redis, ("null", "binary")),
        )
        for which, key in KEYS.items()
        if which in keys
    ],
    indirect=["queue"],
)
@pytest.mark.django_db(transaction=True)
def test_key_value_headers_and_place_survive_retries_the_dead_letter_and_its_replay(
    queue, reader, key
):
    """The key became text or an id, the place that of a retry, headers were dropped."""
    # Given a handler that fails twice, the second time for good
    failures = [RuntimeError("once"), PermanentError("for good")]

    def keep(job: str) -> None:
        if failures:
            raise failures.pop(0)

    as_job(keep, TYPE, max_attempts=5)
    send(reader.bench, key)
    # When
    first = reader.run()
    retry = reader.run()
    # Then
    assert (first.key, theirs(first.header_list)) == (key, HEADERS)
    assert (retry.key, retry.value) == (key, first.value)
    assert theirs(retry.header_list) == HEADERS
    assert origin(retry.headers) == first.position
    letter = DeadLetter.objects.get()
    assert (letter.key if letter.key is None else bytes(letter.key)) == key
    assert bytes(letter.value) == first.value
    assert (letter.topic, letter.partition, letter.offset) == first.position
    assert theirs(names.listed(names.from_json(letter.headers))) == HEADERS
    # And so does its record in the dead-letter topic
    if reader.bench.transport.capabilities.replay:
        (dead,) = read(reader.bench.queue.dead_letter_topic)
        assert (dead.key, dead.value, theirs(dead.header_list)) == (key, first.value, HEADERS)
        assert origin(dead.headers) == first.position
    # And what is replayed of it
    assert dead_letters.replay(DeadLetterFilter()).replayed == 1
    again = reader.run()
    assert (again.key, again.value) == (key, first.value)
    assert origin(again.headers) == first.position
    changed = [(n, v) for n, v in theirs(again.header_list) if n != names.ID]
    assert changed == [(n, v) for n, v in HEADERS if n != names.ID]
    assert the_job().state == "completed"


@pytest.mark.django_db(transaction=True)
def test_what_died_at_once_is_replayed_as_it_was_and_from_where_it_came(queue, reader):
    # Given a message whose first attempt is its last: it has no row
    failures: list[Exception] = [PermanentError("for good"), PermanentError("again")]

    def keep(job: str) -> None:
        if failures:
            raise failures.pop(0)

    as_job(keep, TYPE)
    send(reader.bench, b"\xff\x00k")
    first = reader.run()
    # When it is replayed, and dies again
    assert dead_letters.replay(DeadLetterFilter()).replayed == 1
    again = reader.run()
    # Then
    assert (again.key, again.value, theirs(again.header_list)) == (
        b"\xff\x00k",
        first.value,
        HEADERS,
    )
    letter = DeadLetter.objects.get(state="open")
    assert (letter.topic, letter.partition, letter.offset) == first.position
    # And when that is replayed from the topic
    if reader.bench.transport.capabilities.replay:
        report = replay_topic(TopicReplay(reader.bench.queue.dead_letter_topic, limit=1))
        assert report.replayed == 1
        again = reader.run()
        assert (again.key, theirs(again.header_list)) == (b"\xff\x00k", HEADERS)
        assert origin(again.headers) == first.position
    assert not Job.objects.exists()


def read(topic: str) -> list[Record]:
    subscription = get_transport().subscribe([topic], f"reader-{topic}")
    try:
        return wait_until(lambda: subscription.poll(10, 0.2), f"a record on {topic}")
    finally:
        subscription.close()


@pytest.mark.redis
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("queue", ["streams"], indirect=True)
def test_bytes_of_an_entry_that_others_wrote_are_kept(queue, reader):
    """They became U+FFFD."""
    # Given
    client = reader.bench.subscription._client()
    client.xadd(reader.bench.queue.topic, {b"\xff\xfe": b"\x00\xff", b"name": "größe"})
    # When: it has no type of ours
    reader.run()
    # Then
    letter = DeadLetter.objects.get()
    assert bytes(letter.value) == '{"base64://4=": {"base64": "AP8="}, "name": "größe"}'.encode()
