"""``publish_event``: through the outbox, in the caller's transaction; or directly."""

from __future__ import annotations

import json

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, transaction

from kjo_django import BaseEvent, publish_event, registry
from kjo_django.enqueue.storing import carrier_of, store_record
from kjo_django.exceptions import PayloadError, PublishError
from kjo_django.models import Job
from kjo_django.operations import jobs as job_operations
from kjo_django.operations.maintenance import topics
from kjo_django.outbox.relay import Relay
from kjo_django.patterns.events.event import apublish_event
from kjo_django.runtime import get_transport
from kjo_django.states import JobState
from tests.events.bench import EVENTS, MEMORY, TOPIC, read_all
from tests.unit.deliveries import make_everything_due

pytestmark = pytest.mark.django_db(transaction=True)
EVENT = {"type": "T", "data": {"userId": "u1"}, "metadata": {"correlationId": "req-1"}}


@pytest.fixture(params=["memory", "database"])
def transport(request, settings) -> str:
    queues = {TOPIC: {"consume": False}}
    settings.KJO = {
        **EVENTS,
        "QUEUES": queues,
        **(MEMORY if request.param == "memory" else {}),
    }
    return request.param


def relayed() -> None:
    make_everything_due()
    Relay().publish_due()


def test_an_event_goes_out_as_others_read_it(transport) -> None:
    """KII-11, KII-12: key = userId, the value is the event, the row is completed by it."""
    told = publish_event(TOPIC, EVENT)
    relayed()
    (record,) = read_all(TOPIC)
    assert (record.key, json.loads(record.value or b"")) == (b"u1", told.event.to_wire())
    assert record.headers == {
        "content-type": b"application/json",
        "event-id": told.event.id.encode(),
        "event-type": b"T",
        "event-source": b"interview-service",
        "event-version": b"1",
        "correlation-id": b"req-1",
    }
    job = Job.objects.get(pk=told.job_id)
    assert (job.state, job.handler, job.destination) == (JobState.COMPLETED, "T", TOPIC)
    assert job.finished_at is not None
    relayed()
    assert len(read_all(TOPIC, "a-third")) == (1 if transport == "memory" else 0)


def test_rolled_back_it_was_never_told(transport) -> None:
    with pytest.raises(RuntimeError), transaction.atomic():
        publish_event(TOPIC, EVENT)
        raise RuntimeError
    relayed()
    assert (read_all(TOPIC), Job.objects.count()) == ([], 0)


def test_directly_it_is_told_at_once(transport) -> None:
    told = publish_event(TOPIC, EVENT, direct=True)
    # MySQL's INSERT does not say which id it has given.
    is_told = transport == "memory" or connection.features.can_return_columns_from_insert
    assert (told.offset is not None) == is_told
    assert Job.objects.count() == 0
    assert len(read_all(TOPIC)) == 1


def test_a_refusal_is_raised_when_published_directly(transport, monkeypatch) -> None:
    from kjo_django.transports.base import Published

    monkeypatch.setattr(
        type(get_transport()), "publish", lambda self, records: [Published("the broker said no")]
    )
    with pytest.raises(PublishError, match="the broker said no"):
        publish_event(TOPIC, EVENT, direct=True)


def test_from_asynchronous_code(transport) -> None:
    told = async_to_sync(apublish_event)(TOPIC, BaseEvent(type="T"))
    assert Job.objects.filter(pk=told.job_id).exists()


@pytest.mark.parametrize("bad", [{}, {"type": ""}, {"type": "T", "data": {"x": object()}}])
def test_what_is_no_event_is_refused_before_anything_is_written(transport, bad) -> None:
    with pytest.raises(PayloadError):
        publish_event(TOPIC, bad)
    assert Job.objects.count() == 0


def test_an_event_that_is_too_large_is_refused(transport) -> None:
    with pytest.raises(PayloadError, match="MAX_PAYLOAD_BYTES"):
        publish_event(TOPIC, {"type": "T", "data": {"x": "y" * 900_000}})


def test_a_topic_that_is_only_published_to_is_not_consumed(transport) -> None:
    """`consume: False`: no worker subscribes, but kjo_topics makes it."""
    assert TOPIC in registry.queue_names()
    assert TOPIC not in registry.consumed_queue_names()
    assert TOPIC in {wanted.spec.name for wanted in topics.wanted()}


def test_the_row_of_a_published_event_can_be_sent_again(transport) -> None:
    """Requeue publishes it once more, under its own id: who has acted on it skips it."""
    told = publish_event(TOPIC, EVENT)
    relayed()
    assert job_operations.requeue([told.job_id]).changed_count == 1
    relayed()
    assert Job.objects.get().state == JobState.COMPLETED
    values = [json.loads(record.value or b"")["id"] for record in read_all(TOPIC)]
    assert values == [told.event.id] * 2


def test_topics_of_no_declared_queue_are_relayed_too(transport) -> None:
    publish_event("somewhere-else", EVENT)
    assert Job.objects.get().queue == "outgoing"
    relayed()
    assert len(read_all("somewhere-else")) == 1
    with pytest.raises(ValueError, match="'consume': False"):
        carrier_of("somewhere-else", "another")


@pytest.mark.parametrize("key", [None, b"text", b"\xff\x00", b"k" * 300, b"nul\x00"])
def test_records_travel_byte_for_byte(transport, key) -> None:
    headers = {"binary": b"\x00\x00\x00\x01", "text": "ü".encode(), "empty": b""}
    store_record(TOPIC, value=b"\x00\xff", key=key, headers=headers, kind="k")
    relayed()
    (record,) = read_all(TOPIC)
    assert (record.key, record.value, record.headers) == (key, b"\x00\xff", headers)


def test_each_row_tells_where_its_event_went(real_database, settings) -> None:
    """On PostgreSQL in one statement, elsewhere one by one; refused ones stay."""
    settings.KJO = {**EVENTS, **MEMORY}
    told = [publish_event(TOPIC, EVENT) for _ in range(3)]
    relayed()
    rows = Job.objects.filter(pk__in=[each.job_id for each in told]).order_by("offset")
    assert [(row.state, row.topic, row.offset) for row in rows] == [
        ("completed", TOPIC, offset) for offset in range(3)
    ]
    assert all(row.attempts == 1 and row.finished_at for row in rows)
