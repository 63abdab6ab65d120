"""What makes a world of this process: time, boundaries, handlers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from kjo_django import garbage_collection, registry
from kjo_django.coordination.database import DatabaseCoordination
from kjo_django.engine import poller
from kjo_django.runtime import close_backends
from kjo_django.transports.base import Published
from kjo_django.transports.database import DatabaseTransport
from kjo_django.transports.database.subscription import DatabaseSubscription
from kjo_django.transports.memory import MemoryTransport
from kjo_django.transports.memory.transport import MemorySubscription
from tests.faults import adversaries, boundary, limited  # noqa: F401 - their scenarios
from tests.faults import schedules as schedules  # its scenarios
from tests.faults.clock import Clock
from tests.faults.patterns import Patterns
from tests.faults.scenarios import LEVELS, QUEUE, Kinds
from tests.faults.workflows import Flows
from tests.faults.world import World

W = TypeVar("W", bound=World)
TASKS = {
    "default": {
        "BACKEND": "kjo_django.contrib.tasks.KJOBackend",
        "QUEUES": ["default", "tasks"],
    }
}
CLASSES = [
    MemoryTransport,
    MemorySubscription,
    DatabaseTransport,
    DatabaseSubscription,
    DatabaseCoordination,
]


def kjo(transport: str) -> dict[str, Any]:
    """Return the settings with that transport."""
    settings: dict[str, Any] = {
        "SERVICE_NAME": "tests",
        "BACKOFF_BASE": 1,
        "ERROR_RECOVERY_DELAYS": {"rate_limit": 2},
        # Who shares a group must not depend on how busy the machine is.
        "GROUP_BUDGET": 30,
        "OPERATIONS_QUEUE": QUEUE,
        "PROCESSING_TTL": 30,
        "RECORD_LEASE": 5,
        "TOPIC_OPTIONS": {"partitions": 1, "replication_factor": 1},
        "QUEUES": {LEVELS: {"priorities": 3}},
    }
    if transport == "memory":
        backend = "kjo_django.transports.memory.MemoryTransport"
        settings["TRANSPORTS"] = {"default": {"BACKEND": backend}}
    return settings


@contextmanager
def built(
    monkeypatch: Any,
    empty: Callable[[], None],
    make: Callable[[Clock, Callable[[], None]], W] = World,  # type: ignore[assignment]
    *,
    stands: bool = False,
    tick: float = 0.0,
) -> Iterator[W]:
    """Yield a world; handlers declared for it are forgotten afterwards.

    :param empty: gives every case an empty database.
    :param make: makes the world.
    :param stands: whether time passes only when the world says so.
    :param tick: seconds that pass with each reading of the calendar.
    """
    clock = Clock(stands=stands, tick=tick)
    clock.install(monkeypatch)
    clock.waiting(lambda: boundary.current() is not None, monkeypatch)
    for name in ("POLL_TIMEOUT", "FULL_POLL_TIMEOUT"):
        monkeypatch.setattr(poller, name, 0.0)
    monkeypatch.setattr(MemoryTransport, "publish", _refusing(MemoryTransport.publish))
    boundary.install(monkeypatch, CLASSES)
    logger = logging.getLogger("kjo_django")
    level = logger.level
    # Thousands of errors that were asked for.
    logger.setLevel(os.environ.get("KJO_FAULTS_LOG", "CRITICAL"))
    with (
        garbage_collection.seldom(),
        registry.isolated(),
    ):
        world = make(clock, empty)
        world.kinds = Kinds(world)
        world.patterns = Patterns(world, world.kinds)
        world.flows = Flows(world, world.kinds)
        stop = world.listening()
        try:
            yield world
        finally:
            stop()
            world.close()
            close_backends()
            logger.setLevel(level)


def _refusing(publish: Any) -> Any:
    """A broker refuses for good what is too large for it."""

    def publishing(self: Any, records: Any) -> Any:
        taken = [record for record in records if b"too-large" not in (record.value or b"")]
        answers = iter(publish(self, taken) if taken else ())
        refusal = "MSG_SIZE_TOO_LARGE"
        return [
            next(answers) if record in taken else Published(error=refusal, is_final=True)
            for record in records
        ]

    return publishing
