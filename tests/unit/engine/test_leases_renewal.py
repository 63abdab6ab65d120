"""Leases of a worker whose renewal fails, and what the heartbeat of an idle worker asks.

Tier: quick; a clock that stands, and one database, since the question is when it is tried again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from kjo_django.engine.leases import LeaseBook
from kjo_django.exceptions import CoordinationError
from kjo_django.runtime import get_coordination
from kjo_django.worker import Worker
from kjo_django.worker.duties import PeriodicDuty
from tests.faults.clock import Clock
from tests.unit.deliveries import Named

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def worker(standing_clock: Clock) -> Iterator[Worker]:
    worker = Worker(["ledger"], owns_process=False)
    worker.open()
    yield worker
    worker.leases.release_all()
    worker._pipeline.close(1.0)
    worker._watch.stop()


def claimed(worker: Worker) -> str:
    """Let the worker have a message's lease, and return its name."""
    delivery: Any = Named("CONS:LEDGER:a")
    worker.leases.claim([delivery])
    return "CONS:LEDGER:a"


def beats_until_called(duty: PeriodicDuty, clock: Clock, calls: list[float]) -> float:
    """Return the seconds until something has been called once more."""
    before, began = len(calls), clock.offset
    while len(calls) == before:
        clock.advance(0.25)
        duty.step()
    return clock.offset - began


def test_leases_that_coordination_did_not_renew_are_renewed_as_soon_as_it_answers(
    worker: Worker,
    standing_clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    forgotten_definitions: None,
) -> None:
    lease = claimed(worker)
    coordination, calls = get_coordination(), []
    renew, life_sign = coordination.renew, worker.duties[0]

    def refuse_once(names, *arguments):
        if lease in names:
            calls.append(standing_clock.offset)
            if len(calls) == 1:
                raise CoordinationError("away")
        return renew(names, *arguments)

    monkeypatch.setattr(coordination, "renew", refuse_once)
    life_sign._renew_at = 0.0
    # When the first renewal meets an outage, then the next one does not wait for its turn
    beats_until_called(life_sign, standing_clock, calls)
    assert beats_until_called(life_sign, standing_clock, calls) < life_sign._renewal / 2
    # And once it has been answered, the leases are left alone until they have to be renewed
    assert beats_until_called(life_sign, standing_clock, calls) >= life_sign._renewal


def test_leases_of_rows_are_renewed_as_soon_as_the_database_answers(
    worker: Worker, standing_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, heartbeat = [], worker._heartbeat

    def refuse_once(leases):
        calls.append(standing_clock.offset)
        if len(calls) == 1:
            raise OperationalError("away")

    monkeypatch.setattr(LeaseBook, "renew_rows", refuse_once)
    heartbeat._renew_at = 0.0
    with pytest.raises(OperationalError):
        beats_until_called(heartbeat, standing_clock, calls)
    assert beats_until_called(heartbeat, standing_clock, calls) < heartbeat._renewal / 2
    assert beats_until_called(heartbeat, standing_clock, calls) >= heartbeat._renewal


def test_the_heartbeat_of_an_idle_worker_asks_one_statement_a_second(
    worker: Worker, standing_clock: Clock
) -> None:
    heartbeat = worker._heartbeat
    heartbeat.work()
    # When seconds pass, within which neither leases nor the worker's row are due
    heartbeat._beat_at = heartbeat._renew_at = heartbeat._clock.monotonic() + 60
    with CaptureQueriesContext(connection) as queries:
        for _ in range(10):
            standing_clock.advance(1.01)
            heartbeat.step()
    # Then
    assert len(queries) == 10
