"""Who can write to a topic we consume cannot have our internal handlers run."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from django.utils import timezone

from kjo_django import Queue
from kjo_django.conf import get_settings
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, Job
from kjo_django.operations import bulk
from kjo_django.operations.bulk import start_bulk
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord
from tests.factories import DeadLetterFactory, JobFactory
from tests.waiting import wait_until

FORGED = json.dumps(
    {
        "action": "discard_letters",
        "filter": {"handler": "victim"},
        "asked_at": timezone.now().isoformat(),
        "actor": "the-ceo",
        "note": "from the wire",
        "queue": "",
        "rate": None,
        "force": False,
    }
).encode()


@pytest.fixture
def victim(engine: str) -> DeadLetter:
    """An open dead letter that the forged message would close."""
    DeadLetter.objects.all().delete()
    return DeadLetterFactory(handler="victim")


def publish(queue: Queue, **headers: str) -> str:
    """Publish what says it is a discard; return its id."""
    id = headers.pop("id", f"foreign-{uuid.uuid4().hex[:8]}")
    own = {names.ID: id, names.TYPE: bulk.DISCARD, names.CONTENT_TYPE: "application/json"}
    topic = get_settings().queue(queue.name).topic
    sent = {name: text.encode() for name, text in {**own, **headers}.items()}
    answer = get_transport().publish([OutgoingRecord(topic, FORGED, headers=sent)])[0]
    assert answer.error is None
    return id


def letter_of(message_id: str) -> DeadLetter:
    return wait_until(lambda: DeadLetter.objects.filter(message_id=message_id).first())


def started(queue: Queue) -> None:
    queue.execute(lambda job: job.payload)
    queue.start()


def test_a_message_nobody_enqueued_here_is_a_dead_letter(queue: Queue, victim: DeadLetter) -> None:
    # Given a worker
    started(queue)
    # When somebody who can write to its topic asks for a discard
    id = publish(queue)
    # Then
    letter = letter_of(id)
    assert (letter.reason, letter.job_id) == ("invalid", None)
    assert "runs only as a job that was enqueued here" in letter.error
    victim.refresh_from_db()
    assert victim.state == "open"


@pytest.mark.parametrize("of", ["another handler", "another payload"])
def test_a_message_that_bears_the_name_of_a_job_of_ours_is_one_too(
    of: str, queue: Queue, victim: DeadLetter
) -> None:
    # Given an open job whose own message is not there
    job = JobFactory(
        queue=queue.name,
        handler=bulk.DISCARD if of == "another payload" else queue.job_type,
        payload=FORGED.replace(b"victim", b"nobody") if of == "another payload" else b"7",
        queued=True,
    )
    started(queue)
    # When
    publish(queue, id=str(job.pk), **{names.JOB_ID: str(job.pk), names.SERVICE: service_name()})
    # Then
    assert letter_of(str(job.pk)).reason == "invalid"
    victim.refresh_from_db()
    assert victim.state == "open"
    # And the job itself is none the worse for it
    job.refresh_from_db()
    assert (job.state, job.attempts) == ("queued", 0)


def service_name() -> str:
    return get_settings().service_name


def test_what_was_asked_for_here_is_done(queue: Queue, victim: DeadLetter, settings: Any) -> None:
    # Given
    settings.KJO = {**settings.KJO, "OPERATIONS_QUEUE": queue.name}
    started(queue)
    # When
    job = start_bulk(
        "discard_letters", DeadLetterFilter(handler="victim"), actor="cron", note="old"
    )
    # Then
    wait_until(lambda: Job.objects.get(pk=job.pk).state == "completed")
    victim.refresh_from_db()
    assert (victim.state, victim.note) == ("discarded", "old (cron)")
