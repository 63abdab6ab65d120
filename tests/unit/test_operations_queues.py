"""Pausing and resuming queues."""

from __future__ import annotations

import pytest

from kjo_django import signals
from kjo_django.models import QueueControl
from kjo_django.operations import queues
from tests.factories import QueueControlFactory

pytestmark = pytest.mark.django_db


def test_a_pause_is_a_row_and_is_told_once_it_is_committed(django_capture_on_commit_callbacks):
    # Given
    seen = []

    def receiver(signal, sender, queue, actor, **kwargs):
        seen.append((queue, actor))

    signals.queue_paused.connect(receiver)
    # When
    with django_capture_on_commit_callbacks(execute=True):
        assert queues.pause("emails", actor="ann") is True
        assert queues.pause("emails", actor="bob") is False
    signals.queue_paused.disconnect(receiver)
    # Then
    assert seen == [("emails", "ann")]
    assert queues.paused_queues() == {"emails"}
    assert QueueControl.objects.get().changed_by == "ann"


def test_resuming_leaves_the_other_limits_of_the_queue_alone():
    # Given
    QueueControlFactory(queue="emails", is_paused=True, concurrency=7)
    # When
    assert queues.resume("emails", actor="ann") is True
    # Then
    control = QueueControl.objects.get()
    assert (control.is_paused, control.concurrency) == (False, 7)
    assert queues.resume("emails") is False


def test_the_overview_names_declared_and_touched_queues(settings):
    # Given
    settings.KJO = {"QUEUES": {"emails": {"topic": "email-queue"}}}
    QueueControlFactory(queue="images", is_paused=True, changed_by="ann")
    # When
    found = {row["queue"]: row for row in queues.overview()}
    # Then
    assert found["emails"]["topic"] == "email-queue"
    assert found["emails"]["dead_letter_topic"] == "email-queue-dlq"
    assert found["emails"]["is_paused"] is False
    assert found["images"]["is_paused"] is True
    assert found["images"]["changed_by"] == "ann"


def test_a_row_for_every_known_queue_can_be_made(settings):
    # Given
    settings.KJO = {"QUEUES": {"emails": {}, "images": {}}}
    QueueControlFactory(queue="images", is_paused=True)
    # When
    queues.ensure_rows()
    queues.ensure_rows()
    # Then
    assert {"emails", "images"} <= set(QueueControl.objects.values_list("queue", flat=True))
    assert queues.paused_queues() == {"images"}


@pytest.mark.parametrize("name", ["", "x" * 101])
def test_an_absurd_queue_name_is_refused(name):
    with pytest.raises(ValueError, match="No queue"):
        queues.pause(name)
