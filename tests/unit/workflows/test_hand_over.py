"""Steps that the worker runs itself which has released them, and those that the relay publishes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from kjo_django import Workflow, chain, group, job
from kjo_django.clock import Clock
from kjo_django.engine.handler.context import JobContext

from kjo_django.models import DeadLetter, Job, QueueControl
from kjo_django.operations import jobs as operations
from kjo_django.runtime import current_runtime, get_transport
from kjo_django.states import JobState
from kjo_django.worker import Worker
from tests.unit.workflows.conftest import KJO, MEMORY, Steps

LEASE = 30.0
"""Seconds that a step is its worker's: the default of ``RECORD_LEASE``."""


@pytest.fixture(
    params=["sqlite_file", pytest.param("postgres", marks=pytest.mark.postgres)], autouse=True
)
def _database(request: pytest.FixtureRequest, settings: Any) -> None:
    """Each store; the transport needs the relay."""
    request.getfixturevalue(request.param)
    settings.KJO = KJO | MEMORY
    get_transport().clear()


class Stepped:
    """A worker without threads, whose clock a test sets on."""

    def __init__(self, *queues: str, lanes: int = 2, **options: Any) -> None:
        self.worker = Worker(
            queues or ("flows",), concurrency=lanes, owns_process=False, **options
        )
        self.worker.open()
        for poller in self.worker.pollers:
            poller.step()

    def relay(self) -> int:
        """Publish what is due; return how much that was."""
        return self.worker._relay.publish_due()

    def run(self, groups: int = 1) -> None:
        """Publish and read what is due, and run so many groups."""
        self.relay()
        for poller in self.worker.pollers:
            poller.step()
        for _ in range(groups):
            assert self.worker.lanes.run_group(0.0)

    @property
    def waiting(self) -> int:
        return self.worker.scheduler.waiting

    def end(self) -> None:
        """Stop as a worker does whose threads have ended."""
        self.worker.scheduler.stop()
        for poller in self.worker.pollers:
            poller.close()
        self.worker._pipeline.close(1.0)
        self.worker._watch.stop()
        self.worker._hand_over.close()
        self.worker._heartbeat.end_worker()


@contextmanager
def stepped(*queues: str, **options: Any) -> Iterator[Stepped]:
    worker = Stepped(*queues, **options)
    try:
        yield worker
    finally:
        worker.end()


def rows(**condition: Any) -> list[Job]:
    return list(Job.objects.filter(**condition).order_by("pk"))


# --- Handed over ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["note", "outside"])
def test_the_worker_runs_what_it_has_released_and_the_relay_publishes_the_first_step_alone(
    steps: Steps, kind: str
) -> None:
    # Given a chain whose first step is published
    chain(*(getattr(steps, kind).step(name=f"s{n}") for n in range(3))).enqueue()
    with stepped() as worker:
        assert worker.relay() == 1
        worker.run()
        # When the next one is released
        assert steps.calls == ["s0"]
        assert worker.waiting == 1
        # Then nothing is left for a relay
        assert worker.relay() == 0
        # And the worker runs the rest
        assert worker.worker.lanes.run_group(0.0)
        assert worker.worker.lanes.run_group(0.0)
        assert not worker.worker.lanes.run_group(0.0)
    assert steps.calls == ["s0", "s1", "s2"]
    first, *others = rows()
    assert (first.state, first.topic) == (JobState.COMPLETED, "flows")
    for other in others:
        assert (other.state, other.attempts, other.lease_token) == (JobState.COMPLETED, 1, "")
        # And its row says that it was never published
        assert (other.topic, other.partition, other.offset) == ("", None, None)
        assert other.queued_at is None
        assert other.available_at <= other.started_at
