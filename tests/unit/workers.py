"""Workers in threads of a test."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from django.db import connection

from kjo_django import job
from kjo_django.engine.attempt import Delivery
from kjo_django.operations.maintenance import topics
from kjo_django.worker import Worker
from tests.unit.deliveries import KJO
from tests.waiting import PATIENCE, wait_until

TRANSPORTS = {
    "memory": "memory.MemoryTransport",
    "database": "database.DatabaseTransport",
    "kafka": "kafka.KafkaTransport",
    "redis_streams": "redis_streams.RedisStreamsTransport",
}


class Running:
    """A worker in its thread; ``code`` is its exit code once it has ended."""

    def __init__(self, queues: Iterable[str] = ("ledger",), **options: Any) -> None:
        self.worker = Worker(list(queues), **options)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.code = self.worker.run()
        finally:
            connection.close()

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.worker.stop()
        self.join()

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the worker does not end"


class Turns:
    """In the place of an event that jobs wait for: lets one of them go on at a time."""

    def __init__(self) -> None:
        self._semaphore = threading.Semaphore(0)

    def wait(self, timeout: float) -> None:
        self._semaphore.acquire(timeout=timeout)

    def let_one(self) -> None:
        self._semaphore.release()

    def set(self) -> None:
        """Let all go on."""
        self._semaphore.release(1_000_000)


class Noting(Running):
    """A worker in its thread, with a job of each of its queues that notes when it begins.

    :param seconds: how long a job takes that has no ``waits``.
    :param release: what jobs wait for that have ``waits``, for so many seconds at most.
    """

    def __init__(
        self,
        queues: Sequence[str],
        seconds: float = 0.0,
        *,
        release: threading.Event | Turns | None = None,
        **options: Any,
    ) -> None:
        self.begun: list[str] = []
        self.has_begun = threading.Condition()
        self.release = release or threading.Event()

        def work(name: str, waits: float = 0.0) -> None:
            with self.has_begun:
                self.begun.append(name)
                self.has_begun.notify_all()
            if waits:
                self.release.wait(waits)
            elif seconds:
                time.sleep(seconds)  # sleep: as long as the test wants the job to take

        self.jobs = {
            queue: job(name=f"work.{queue}", queue=queue, atomic=False)(work) for queue in queues
        }
        super().__init__(queues, **options)
        self._fetched: list[bytes] = []
        self._note_what_is_fetched()

    def __exit__(self, *error: object) -> None:
        self.worker.stop()
        self.release.set()
        self.join()

    def _note_what_is_fetched(self) -> None:
        scheduler = self.worker.scheduler
        put = scheduler.put

        def note(deliveries: Iterable[Delivery]) -> None:
            deliveries = list(deliveries)
            put(deliveries)
            self._fetched += [delivery.record.value or b"" for delivery in deliveries]

        scheduler.put = note  # type: ignore[method-assign]

    def wait_until_it_holds(self, name: str) -> None:
        """Wait until it has fetched a job, which its lanes may start from then on."""
        wait_until(
            lambda: any(f'"{name}"'.encode() in value for value in self._fetched),
            f"the fetch of {name}",
        )

    def turns_until(self, name: str) -> int:
        """Let one job after the other go on until this one has begun; return how many others have
        begun before it."""
        assert isinstance(self.release, Turns)
        before = len(self.begun)
        while name not in self.begun:
            seen = len(self.begun)
            self.release.let_one()
            assert self.begins(lambda begun, seen=seen: len(begun) > seen), "nothing more begins"
        return self.begun.index(name) - before

    def begins(self, condition: Callable[[list[str]], Any]) -> bool:
        """Whether what has begun comes to be so."""
        with self.has_begun:
            return bool(self.has_begun.wait_for(lambda: condition(self.begun), PATIENCE))

    def delay_of(self, name: str, enqueue: Callable[[], object]) -> float:
        """Return after how many seconds a job begins that is enqueued now."""
        enqueued_at = time.monotonic()
        enqueue()
        assert self.begins(lambda begun: name in begun), f"{name} never begins"
        return time.monotonic() - enqueued_at


class Configure:
    """Settings for workers on a transport, whose queues have topics of their own.

    :param request: the servers' fixtures are asked for where they are needed.
    """

    def __init__(self, request: Any, settings: Any) -> None:
        self._request, self._settings = request, settings

    def __call__(self, transport: str, queues: dict[str, dict[str, Any]], **options: Any) -> None:
        suffix = uuid.uuid4().hex[:8]
        own: dict[str, Any] = {}
        if transport == "kafka":
            servers = self._request.getfixturevalue("kafka_server").bootstrap_servers
            own = {"bootstrap.servers": servers}
        elif transport == "redis_streams":
            url = self._request.getfixturevalue("redis_server").url
            cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}
            self._settings.CACHES = {"default": cache}
            own = {"KEY_PREFIX": f"{suffix}:"}
        elif transport == "memory":
            own = {"partitions": 2}
        backend = f"kjo_django.transports.{TRANSPORTS[transport]}"
        self._settings.KJO = {
            **KJO,
            "TRANSPORTS": {"default": {"BACKEND": backend, "OPTIONS": own}},
            "QUEUES": {
                name: {"topic": f"{name}-{suffix}", "consumer_group": suffix, **queue}
                for name, queue in queues.items()
            },
            "TOPIC_OPTIONS": {"partitions": 2, "replication_factor": 1},
            "POLL_INTERVAL": 0.2,
            "CONCURRENCY": 2,
            "SHUTDOWN_GRACE": 5,
            **options,
        }
        topics.create(list(queues))
