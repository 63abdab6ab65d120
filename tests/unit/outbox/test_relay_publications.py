"""While the relay works off a backlog, where one batch went is recorded as the next goes out."""

from __future__ import annotations

import threading

import pytest
from django.db import OperationalError

from kjo_django.models import Job
from kjo_django.outbox.relay import Relay
from kjo_django.runtime import get_transport
from kjo_django.store.postgres import PostgresStore
from kjo_django.testing.conformance import eventually
from tests.ledger.jobs import write
from tests.unit.deliveries import KJO, MEMORY, row_locked, states
from tests.waiting import PATIENCE

NAME = "kjo-relay-records"

pytestmark = [pytest.mark.postgres, pytest.mark.usefixtures("postgres")]


@pytest.fixture(autouse=True)
def _configured(settings):
    settings.KJO = {**KJO, **MEMORY, "RELAY_BATCH_SIZE": 2, "POLL_INTERVAL": 0.2}


def enqueue(count: int) -> None:
    write.enqueue_many([{"job": str(number)} for number in range(count)])


def published() -> list[bytes]:
    return [record.value for record in get_transport().records("ledger")]


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == NAME}


def publish_all(relay: Relay) -> None:
    while relay.publish_due():
        pass


def test_given_a_backlog_when_it_is_worked_off_then_each_goes_out_once_in_order_and_is_recorded():
    enqueue(7)
    before = threads()  # of relays that other tests left within a backlog

    publish_all(Relay())

    assert published() == [b'{"job":"%d"}' % number for number in range(7)]
    assert states() == ["queued"] * 7
    places = Job.objects.order_by("id").values_list("offset", flat=True)
    assert list(places) == list(range(7))
    assert eventually(lambda: threads() <= before), "its thread and connection go with the backlog"


def test_given_a_statement_that_takes_long_when_there_is_more_then_that_goes_out_meanwhile(
    monkeypatch,
):
    record, went_out = PostgresStore.record_published, threading.Event()

    def record_slowly(*arguments):
        assert went_out.wait(PATIENCE), "the second batch waits for the record of the first"
        return record(*arguments)

    monkeypatch.setattr(PostgresStore, "record_published", record_slowly)
    enqueue(4)
    relay = Relay()
    assert relay.publish_due() == 2
    assert states() == ["pending"] * 4

    monkeypatch.setattr(get_transport(), "publish", tell(get_transport().publish, went_out))
    publish_all(relay)

    assert states() == ["queued"] * 4
    assert len(published()) == 4


def tell(publish, event):
    def publish_and_tell(records):
        event.set()
        return publish(records)

    return publish_and_tell


@pytest.mark.parametrize("refused", [1, 2])
def test_given_records_the_database_refuses_when_it_takes_them_again_then_nothing_goes_out_twice(
    failing, refused
):
    failing(PostgresStore, "record_published", *[OperationalError("the server is gone")] * refused)
    enqueue(6)
    relay = Relay()

    failures = 0
    while states() != ["queued"] * 6:
        try:
            publish_all(relay)
            relay._publications.record_missing()
        except OperationalError:
            failures += 1
        assert failures <= refused

    assert failures >= 1, "an outage is told"
    assert len(published()) == 6
    assert not relay._publications.unrecorded


def test_given_a_row_that_is_locked_when_its_batch_is_recorded_then_the_others_do_not_wait_for_it():
    enqueue(4)
    relay = Relay()
    with row_locked(Job.objects.order_by("id").first().pk):
        publish_all(relay)
        assert states() == ["pending", "queued", "queued", "queued"]

    relay._publications.record_missing()

    assert states() == ["queued"] * 4
    assert len(published()) == 4
