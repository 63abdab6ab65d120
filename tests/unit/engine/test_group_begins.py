"""When a group notes that it runs jobs whose messages' own leases keep others away.

Tier: the quick one. It is a rule of the engine, and SQLite has all of it.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import OperationalError

from kjo_django import job
from kjo_django.engine import admission
from kjo_django.messages import serializers
from kjo_django.messages.serializers import Serializer, register_serializer
from kjo_django.models import TransportRun
from kjo_django.transports.database.runs import Runs
from kjo_django.transports.database.subscription import DatabaseSubscription
from tests.ledger.models import Entry
from tests.unit.deliveries import Bench, entries, next_delivery

pytestmark = pytest.mark.parametrize("transport", ["database"], indirect=True)


def write(job: str) -> None:
    Entry.objects.create(job=job)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages each run has named that was written, in order."""
    counts: list[int] = []
    store = Runs.store

    def noting(self: Runs, number: int, messages: Any) -> None:
        counts.append(len(messages))
        store(self, number, messages)

    monkeypatch.setattr(Runs, "store", noting)
    return counts


def test_only_what_its_limit_permits_is_noted(
    bench: Bench, transport: str, noted: list[int]
) -> None:
    """With the database far away each note is a round trip, which made starts late."""
    # Given four jobs of which one may start
    limited = job(name="bench.limited", queue="ledger", rate="1/h")(write)
    limited.enqueue_many([{"job": str(number)} for number in range(4)])
    # When
    bench.run()
    # Then
    assert entries() == {"0": 1}
    assert noted == [1]


def test_a_job_whose_limit_has_a_key_that_ends_the_worker_counts_as_begun(
    bench: Bench, transport: str
) -> None:
    """Its worker would end each time, and the job would never become a dead letter."""

    # Given
    def key(job: str) -> str:
        raise SystemExit

    limited = job(name="bench.limited", queue="ledger", rate="1/h", rate_key=key)(write)
    limited.enqueue(job="a")
    deliveries = bench.poll()
    named: list[int] = []

    def killed(*arguments: object) -> None:
        named.extend(TransportRun.objects.values_list("number", flat=True))

    # When the worker is killed as the key is computed
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(bench.leases, "give_back", killed)
        bench.pipeline.run(deliveries)
    # Then
    assert named
    bench.leases.give_back(deliveries)
    assert next_delivery(deliveries[0]) == 2


class Killing(Serializer):
    """Ends the worker that reads a payload."""

    content_type = "application/x-killing"

    def dumps(self, value: Any) -> bytes:
        return b"x"

    def loads(self, data: bytes) -> Any:
        raise SystemExit


@pytest.mark.parametrize("name", ["rate_key", "concurrency_key"])
def test_a_job_whose_payload_ends_the_worker_that_reads_a_key_in_it_counts_as_begun(
    bench: Bench, transport: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(serializers, "_serializers", {**serializers._serializers})
    register_serializer(Killing())
    options: Any = {"rate": "1/h", "concurrency": 1, name: "job", "serializer": Killing()}
    job(name="bench.limited", queue="ledger", **options)(write).enqueue(job="a")
    deliveries = bench.poll()
    # When
    with pytest.raises(SystemExit):
        bench.pipeline.run(deliveries)
    # Then it is counted, and was before
    assert TransportRun.objects.exists()
    assert next_delivery(deliveries[0]) == 2


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("when", ["as it begins", "as it is admitted"])
def test_a_job_that_an_outage_interrupts_before_its_handler_has_one_slot(
    bench: Bench, transport: str, monkeypatch: pytest.MonkeyPatch, slots: int, when: str
) -> None:
    """It got in line behind its own one, or took two."""
    taken: list[int] = []

    def count(job: str) -> None:
        taken.append(sum(map(len, bench.leases._slots.values())))

    job(name="bench.limited", queue="ledger", concurrency=slots)(count).enqueue(job="a")
    owner: Any = DatabaseSubscription if when == "as it begins" else admission
    name = "begin" if owner is DatabaseSubscription else "admit_group"
    original, failed = getattr(owner, name), list[str]()

    def refused_once(*arguments: Any, **named: Any) -> Any:
        if not failed:
            failed.append(name)
            raise OperationalError("away")
        return original(*arguments, **named)

    monkeypatch.setattr(bench.pipeline, "_stops_waiting", threading.Event())
    monkeypatch.setattr(owner, name, refused_once)
    # When
    assert bench.run() == []
    # Then
    assert (failed, taken) == ([name], [1])


def test_what_others_have_taken_over_before_it_is_noted_does_not_run(
    bench: Bench, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given three jobs, two of them with one key, and another worker that takes over the first of
    # these between the limits and the note
    handler = job(name="bench.keyed", queue="ledger", key="job")(write)
    for name in ("shared", "shared", "other"):
        handler.enqueue(job=name)
    deliveries = bench.poll()
    assert len(deliveries) == 3
    begin = DatabaseSubscription.begin

    def late(self: DatabaseSubscription, records: Any, worker: str) -> list[int]:
        self._taken_over.add(deliveries[0].record.offset)
        monkeypatch.setattr(self, "_look_at", lambda ids: None)
        return begin(self, records, worker)

    monkeypatch.setattr(DatabaseSubscription, "begin", late)
    # When
    deferred = bench.pipeline.run(deliveries)
    # Then it is deferred with what is behind it
    assert set(deferred) == set(deliveries[:2])
    assert entries() == {"other": 1}
    assert not bench.leases.owned
