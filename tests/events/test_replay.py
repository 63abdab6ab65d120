"""Replay across both worlds: in place, repaired, by kind of error (KII-30, KDLQ-21)."""

from __future__ import annotations

import io
import json

import pytest
from django.core.management import call_command

from kjo_django import BaseEvent, PermanentError, event_handler
from kjo_django.exceptions import MessageError
from kjo_django.models import DeadLetter, DeadLetterState
from kjo_django.operations import dead_letters
from kjo_django.operations.dead_letters import DeadLetterFilter, edit_and_replay
from kjo_django.operations.fingerprints import error_groups
from kjo_django.operations.topic_replay import TopicReplay, replay_topic
from kjo_django.patterns.kdlq import DlqConfig, ProcessingStatus, kdlq_handler
from tests.events.bench import EVENTS, MEMORY, TOPIC, Service, send
from tests.ledger.models import Entry
from tests.unit.deliveries import Bench, as_job

pytestmark = pytest.mark.django_db(transaction=True)
EVERYTHING = DeadLetterFilter()


@pytest.fixture(params=["memory", "database"])
def transport(request, settings) -> str:
    settings.KJO = {
        **EVENTS,
        "QUEUES": {"ledger": {}},
        **(MEMORY if request.param == "memory" else {}),
    }
    return request.param


@pytest.fixture
def dead_events(transport):
    """Three events that died at once, and a handler that works by now."""
    works: list[bool] = []

    @event_handler("T", topic=TOPIC)
    def handle(event: BaseEvent) -> None:
        if not works and event.data.get("fail", True):
            raise PermanentError(f"not yet, {event.data['n']}")
        Entry.objects.create(job=str(event.data["n"]))

    service = Service()
    for number in range(3):
        send(BaseEvent(type="T", data={"n": number}).to_bytes())
    service.run()
    assert DeadLetter.objects.filter(state=DeadLetterState.OPEN).count() == 3
    works.append(True)
    yield service
    service.close()


def test_from_the_table(dead_events) -> None:
    """KII-30."""
    assert dead_letters.replay(EVERYTHING).replayed == 3
    dead_events.run()
    assert Entry.objects.count() == 3
    dead_events.run()
    assert Entry.objects.count() == 3
    assert not DeadLetter.objects.filter(state=DeadLetterState.OPEN).exists()


def test_however_often_it_dies_its_last_dead_letter_is_open(transport) -> None:
    """Promise 4."""

    @event_handler("T", topic=TOPIC)
    def handle(event: BaseEvent) -> None:
        raise PermanentError("never")

    service = Service()
    send(BaseEvent(type="T").to_bytes())
    service.run()
    for times in (1, 2):
        assert dead_letters.replay(EVERYTHING).replayed == 1
        service.run()
        (letter,) = DeadLetter.objects.filter(state=DeadLetterState.OPEN)
        assert letter.replay_count == times
    service.close()


def test_from_a_topic(settings) -> None:
    """KDLQ-21: run again what is in the dead-letter topic, without a consumer attached to it."""
    settings.KJO = {**EVENTS, **MEMORY}
    works: list[bool] = []

    @kdlq_handler("payments", topic="pay", config=DlqConfig("pay-dlq"))
    def process(record) -> ProcessingStatus:
        if not works:
            return ProcessingStatus.ERROR
        Entry.objects.create(job=(record.value or b"").decode())
        return ProcessingStatus.OK

    from kjo_django.outbox.relay import Relay

    bench = Bench("pay")
    send(b"v", "pay")
    bench.run()
    Relay().publish_due()
    works.append(True)
    report = replay_topic(TopicReplay("pay-dlq"))
    again = replay_topic(TopicReplay("pay-dlq"))
    bench.close()
    bench = Bench(bench.queue.retries)
    bench.run()
    bench.close()
    assert (report.replayed, again.replayed) == (1, 0)
    assert Entry.objects.get().job == "v"


def test_a_queue_includes_what_died_of_its_retries(transport) -> None:
    """KII-30: ``--queue user-events`` finds both; the name of the retries finds only those."""

    @event_handler("T", topic=TOPIC)
    def handle(event: BaseEvent) -> None:
        raise PermanentError("at once") if event.data["n"] else ValueError("and again")

    service = Service()
    for number in range(2):
        send(BaseEvent(type="T", data={"n": number}).to_bytes())
    service.run()
    letters = DeadLetter.objects.order_by("queue").values_list("queue", "error")
    assert list(letters) == [(TOPIC, "at once"), (f"{TOPIC}-retry", "and again")]
    retries = DeadLetterFilter(queue=f"{TOPIC}-retry")
    assert [letter.error for letter in dead_letters.select(retries)] == ["and again"]
    assert not dead_letters.select(DeadLetterFilter(queue="ledger")).exists()
    # When
    out = io.StringIO()
    call_command("kjo_replay_dlq", "--queue", TOPIC, "--json", stdout=out)
    service.close()
    # Then
    assert json.loads(out.getvalue())["replayed"] == 2
    assert not DeadLetter.objects.filter(state=DeadLetterState.OPEN).exists()


def test_edited_and_replayed(dead_events) -> None:
    """KII-30: repair and republish; the dead letter keeps what died."""
    letter = DeadLetter.objects.order_by("pk").first()
    assert letter is not None
    event = json.loads(bytes(letter.value or b""))
    repaired = json.dumps({**event, "data": {"n": "repaired", "fail": False}}).encode()
    assert edit_and_replay(letter.pk, repaired, actor="me").replayed == 1
    dead_events.run()
    assert Entry.objects.get().job == "repaired"
    letter.refresh_from_db()
    assert (letter.state, letter.note) == (DeadLetterState.REPLAYED, "replayed by me")
    assert json.loads(bytes(letter.value or b"")) == event


def test_a_job_edited_and_replayed(transport) -> None:
    @as_job
    def write(job: str) -> None:
        if job == "wrong":
            raise PermanentError("no")
        Entry.objects.create(job=job)

    write.enqueue(job="wrong")
    bench = Bench()
    bench.run()
    letter = DeadLetter.objects.get()
    with pytest.raises(MessageError):
        edit_and_replay(letter.pk, b"no json")
    assert edit_and_replay(letter.pk, b'{"job": "right"}').replayed == 1
    bench.run_until_done()
    bench.close()
    assert Entry.objects.get().job == "right"


def test_groups_of_equal_errors(dead_events) -> None:
    """Ours 4: what to look at first; a group can be replayed as one."""
    send(b"no json")
    dead_events.run()
    largest, other = error_groups()
    assert (largest.count, largest.handler, largest.error) == (3, "T", "not yet, 2")
    assert largest.first_failed_at <= largest.last_failed_at
    assert (other.count, other.reason) == (1, "deserialization")
    chosen = DeadLetterFilter(fingerprint=largest.fingerprint)
    assert dead_letters.replay(chosen).replayed == 3
    assert [group.count for group in error_groups()] == [1]
