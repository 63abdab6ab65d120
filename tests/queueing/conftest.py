"""Queues with a worker of their own in this process, on every transport.

`engine` leads ``default`` to a database with real transactions and sets the transport, and each
test has a queue nobody else uses.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from kjo_django import Queue, registry
from kjo_django.enqueue import waiting
from kjo_django.runtime import get_transport

KAFKA = "kjo_django.transports.kafka.KafkaTransport"
STREAMS = "kjo_django.transports.redis_streams.RedisStreamsTransport"
MEMORY = "kjo_django.transports.memory.MemoryTransport"
QUICK: dict[str, Any] = {
    "SERVICE_NAME": "tests",
    "QUEUES": {},
    "BACKOFF_BASE": 0.05,
    "BACKOFF_JITTER": 0,
    "ERROR_RECOVERY_DELAYS": {},
    "POLL_INTERVAL": 0.3,
    "HEARTBEAT_INTERVAL": 0.5,
    "RECORD_LEASE": 2,
    "SHUTDOWN_GRACE": 3,
    "TOPIC_OPTIONS": {"partitions": 1, "replication_factor": 1},
}

ENGINES = [
    "memory",
    "sqlite",
    pytest.param("postgres", marks=pytest.mark.postgres),
    pytest.param("kafka", marks=[pytest.mark.kafka, pytest.mark.redis, pytest.mark.postgres]),
    pytest.param("redis_streams", marks=[pytest.mark.redis, pytest.mark.postgres]),
]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, settings: Any) -> Iterator[str]:
    """The contract's engines: memory, SQLite, PostgreSQL, Kafka with Redis, Redis Streams."""
    name: str = request.param
    # A consumer group of its own too: one that is stopped while it joins keeps its group waiting.
    kjo = {**QUICK, "SERVICE_NAME": f"tests-{uuid.uuid4().hex[:8]}"}
    is_file = name in ("memory", "sqlite")
    request.getfixturevalue("sqlite_file" if is_file else "postgres")
    if name == "memory":
        kjo["TRANSPORTS"] = {"default": {"BACKEND": MEMORY}}
    if name == "kafka":
        servers = request.getfixturevalue("kafka_server").bootstrap_servers
        kjo["TRANSPORTS"] = {
            "default": {"BACKEND": KAFKA, "OPTIONS": {"bootstrap.servers": servers}}
        }
    if name == "redis_streams":
        kjo["TRANSPORTS"] = {"default": {"BACKEND": STREAMS, "OPTIONS": {"CACHE": "default"}}}
    if name in ("kafka", "redis_streams"):
        location = request.getfixturevalue("redis_server").url
        cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location}
        settings.CACHES = {**settings.CACHES, "default": cache}
        kjo["COORDINATION"] = {
            "BACKEND": "kjo_django.coordination.redis.RedisCoordination",
            "OPTIONS": {"CACHE": "default", "KEY_PREFIX": f"{uuid.uuid4().hex[:8]}:"},
        }
    settings.KJO = kjo
    yield name
    get_transport().close()


@pytest.fixture
def file_queue(sqlite_file: Path, settings: Any) -> Iterator[Queue]:
    """A queue on the embedded default, for what does not depend on the engine."""
    settings.KJO = QUICK
    yield from _one_queue()


def _one_queue() -> Iterator[Queue]:
    with registry.isolated():
        queue = Queue(f"q-{uuid.uuid4().hex[:12]}")
        yield queue
        queue.stop()
        _hang_up()


def _hang_up() -> None:
    board = waiting._reply_listeners.get("default")
    if board is not None:
        board.close()
    connections.close_all()


@pytest.fixture
def make_queue(engine: str) -> Iterator[Callable[..., Queue]]:
    """Make queues that are stopped and forgotten after the test."""
    made: list[Queue] = []

    def make(**options: Any) -> Queue:
        queue = Queue(f"q-{uuid.uuid4().hex[:12]}", **options)
        made.append(queue)
        return queue

    with registry.isolated():
        yield make
        for queue in made:
            queue.stop()
        _hang_up()


@pytest.fixture
def queue(make_queue: Callable[..., Queue]) -> Queue:
    """A queue of this test."""
    return make_queue()


class Recorder:
    """A handler that remembers what it was given, and can be told to fail or to wait."""

    def __init__(self, result: Callable[[Any], Any] = lambda job: job.payload) -> None:
        self.seen: list[tuple[str, Any, int]] = []
        self._result = result
        self._lock = threading.Lock()

    def __call__(self, job: Any) -> Any:
        with self._lock:
            self.seen.append((job.id, job.payload, job.attempts))
        return self._result(job)

    @property
    def payloads(self) -> list[Any]:
        return [payload for _, payload, _ in self.seen]
