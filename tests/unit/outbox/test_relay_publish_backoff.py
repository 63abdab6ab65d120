"""What takes nothing is left alone for a while, and holds up nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kjo_django.enqueue.storing import store_record
from kjo_django.exceptions import CoordinationError
from kjo_django.models import Job
from kjo_django.outbox.relay import LONGEST_BACKOFF, PublishBackoff, Relay
from kjo_django.runtime import get_coordination, get_transport
from kjo_django.store import store_for
from kjo_django.transports.base import OutgoingRecord, Published
from tests.ledger.jobs import write
from tests.unit.deliveries import KJO, MEMORY, SetClock

KINDS = {**KJO, **MEMORY, "QUEUES": {"ledger": {}}, "POLL_INTERVAL": 3600}


@pytest.fixture
def relay(settings, real_database):
    settings.KJO = KINDS
    return Relay()


@pytest.fixture
def refuse(monkeypatch) -> Callable[..., None]:
    """Have the transport refuse the records of some topics."""
    transport = get_transport()
    publish = transport.publish

    def refuse(*topics: str, is_topics: bool = True) -> None:
        def answer(record: OutgoingRecord) -> Published:
            if record.topic in topics:
                return Published(error=f"nothing for {record.topic}", is_topics=is_topics)
            return publish([record])[0]

        monkeypatch.setattr(transport, "publish", lambda records: [answer(r) for r in records])

    return refuse


def store(topic: str, value: bytes = b"1") -> Job:
    return store_record(topic, value=value, key=b"k", headers={}, kind="an event")


def published(topic: str) -> list[bytes]:
    return [record.value for record in get_transport().records(topic)]


# --- Topics ---------------------------------------------------------------------------------------


def test_records_for_a_missing_topic_hold_up_no_record_for_another(relay, refuse):
    # Given: it was the only one that was due
    refuse("missing")
    store("missing")
    assert relay.publish_due() == 1
    # When
    store("there")
    # Then
    assert relay.publish_due() == 1
    assert published("there") == [b"1"]
    # And it is not asked for all the time
    assert relay.publish_due() == 0


def test_records_that_were_refused_beside_others_keep_their_order(relay, refuse):
    """Each delayed by itself, a later one of the key would go out before it."""
    # Given
    refuse("missing")
    first = store("missing", b"first")
    store("there")
    assert relay.publish_due() == 2
    assert published("there") == [b"1"]
    assert Job.objects.get(pk=first.pk).available_at == first.available_at
    # When the topic is made
    refuse()
    store("missing", b"second")
    relay._topic_backoff.pop("missing")
    # Then
    assert relay.publish_due() == 2
    assert published("missing") == [b"first", b"second"]
    assert {job.state for job in Job.objects.all()} == {"completed"}


def test_when_no_topic_is_taken_for_a_reason_of_the_brokers_all_of_them_rest(relay, refuse):
    """One by one, each would wait for the broker, and keep the relay from its queues."""
    # Given
    refuse("one", "two", is_topics=False)
    store("one")
    assert relay.publish_due() == 1
    # When
    store("two")
    write.enqueue(job="a")
    # Then
    assert relay.publish_due() == 1
    assert len(published("ledger")) == 1
    assert Job.objects.filter(state="pending").count() == 2


def test_a_topic_that_rests_is_neither_due_nor_next(relay):
    # Given
    resting, other = store("missing"), store("there")
    queues = [resting.queue, "ledger"]
    # When
    found = store_for("default").due_jobs(queues, 10, without_topics=["missing", "unheard of"])
    # Then
    assert [each.id for each in found] == [other.pk]
    next_at = store_for("default").next_due(queues, without_topics=["missing"])
    assert next_at == Job.objects.get(pk=other.pk).available_at
    assert store_for("default").next_due(queues, without_topics=["missing", "there"]) is None
    assert len(store_for("default").due_jobs(queues, 10)) == 2


# --- Coordination ---------------------------------------------------------------------------------


def test_a_silent_coordination_is_not_waited_for_batch_after_batch(relay, monkeypatch):
    # Given
    asked = []

    def hang(names: object, token: str, ttl: object) -> None:
        asked.append(names)
        time.sleep(0.15)  # sleep: a server that answers nothing until the caller gives up
        raise CoordinationError("timed out")

    monkeypatch.setattr(get_coordination(), "claim", hang)
    # When
    taken = [relay._leases.take(relay.queues) for _ in range(5)]
    # Then: it works without a lease, as in any outage
    assert all("ledger" in queues for queues in taken)
    assert len(asked) == 1


# --- The backoff ----------------------------------------------------------------------------------


def test_each_failure_doubles_the_wait_up_to_half_a_minute():
    backoff = PublishBackoff(SetClock())
    assert [backoff.fail("a") for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    backoff.pop("a")
    assert backoff.names() == []
    assert backoff.fail("a") == 1


def test_a_wait_ends_and_what_nobody_tries_again_is_forgotten():
    clock = SetClock()
    backoff = PublishBackoff(clock)
    backoff.fail("a")
    assert backoff.names() == ["a"]
    # Ended, it counts still
    clock.seconds += 1
    assert backoff.names() == []
    assert backoff.fail("a") == 2
    # And not for ever: there may be any number of topics
    clock.seconds += 2 + LONGEST_BACKOFF + 1
    assert backoff.names() == []
    assert backoff.fail("a") == 1
