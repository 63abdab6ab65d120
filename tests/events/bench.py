"""A service on the bench: its event queues and their retries, driven by hand."""

from __future__ import annotations

from typing import Any

from kjo_django.conf import get_settings
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord, Record
from tests.unit.deliveries import Bench, make_everything_due

TOPIC = "user-events"
EVENTS: dict[str, Any] = {
    "SERVICE_NAME": "interview-service",
    "BACKOFF_BASE": 1,
    "ERROR_RECOVERY_DELAYS": {},
    "TOPIC_OPTIONS": {"partitions": 1, "replication_factor": 1},
}
MEMORY = {"TRANSPORTS": {"default": {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}}}


class Service:
    """The worker of one event queue and of its retries."""

    def __init__(self, queue: str = TOPIC) -> None:
        self.main = Bench(queue)
        self.retries = Bench(get_settings().queue(queue).retries)

    def run(self) -> None:
        """Handle what has come; back-off passes at once."""
        for _ in range(10):
            make_everything_due()
            for bench in (self.main, self.retries):
                bench.run(skipping(bench))

    @property
    def results(self) -> list[str]:
        """How each delivery ended."""
        benches = (self.main, self.retries)
        return [result.value for bench in benches for result in bench.results]

    def close(self) -> None:
        self.main.close()
        self.retries.close()


def skipping(bench: Bench) -> list[Any]:
    """Poll; what was meant for others is none."""
    return [delivery for delivery in bench.poll() if delivery is not None]


def send(value: bytes | None, topic: str = TOPIC, key: bytes = b"u1", **headers: bytes) -> None:
    """Publish a record as another service would."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    answer = get_transport().publish([OutgoingRecord(topic, value, key, named)])[0]
    assert answer.error is None


def read_all(topic: str, group: str = "somebody-else") -> list[Record]:
    """Read a topic as another service would."""
    subscription = get_transport().subscribe([topic], group)
    try:
        return subscription.poll(1000, 0.1)
    finally:
        subscription.close()
