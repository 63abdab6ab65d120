"""Pausing and resuming queues."""

from __future__ import annotations

from datetime import timedelta

import pytest

from kjo_django.models import QueueControl
from kjo_django.operations import queues
from tests.factories import QueueControlFactory

pytestmark = pytest.mark.django_db


def test_a_pause_is_a_row_and_is_told_once_it_is_committed(
    hear, django_capture_on_commit_callbacks
):
    # Given
    heard = hear("queue_paused")
    # When
    with django_capture_on_commit_callbacks(execute=True):
        assert queues.pause("emails", actor="ann") is True
        assert queues.pause("emails", actor="bob") is False
    # Then
    assert [(each["queue"], each["actor"]) for each in heard] == [("emails", "ann")]
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


# --- Limits ---------------------------------------------------------------------------------------


def limits_of(queue: str) -> tuple:
    control = QueueControl.objects.get(queue=queue)
    return control.concurrency, control.max_attempts, control.backoff_base


def test_a_policy_changes_what_is_given_and_leaves_the_rest():
    # Given
    QueueControlFactory(queue="emails", is_paused=True, concurrency=7, backoff_base=30)
    # When
    assert queues.set_policy("emails", max_attempts=9, backoff_base=None, actor="ann") is True
    # Then
    assert limits_of("emails") == (7, 9, None)
    control = QueueControl.objects.get()
    assert (control.is_paused, control.changed_by) == (True, "ann")


def test_a_policy_that_holds_already_changes_nothing():
    QueueControlFactory(queue="emails", max_attempts=9, changed_by="ann")
    assert queues.set_policy("emails", max_attempts=9, concurrency=None, actor="bob") is False
    assert queues.set_policy("emails", actor="bob") is False
    assert QueueControl.objects.get().changed_by == "ann"


def test_a_delay_may_be_a_timedelta():
    queues.set_policy("emails", backoff_base=timedelta(minutes=2))
    assert limits_of("emails") == (None, None, 120)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"concurrency": 0}, "concurrency must be a whole number from 1 to 1,000, or None"),
        ({"concurrency": 1001}, "concurrency must be"),
        ({"max_attempts": True}, "max_attempts must be a whole number from 1 to 1,000, or None"),
        ({"max_attempts": "3"}, "max_attempts must be"),
        ({"max_attempts": timedelta(seconds=3)}, "max_attempts must be"),
        ({"backoff_base": 0.5}, "backoff_base must be a whole number of seconds from 1 to 86,400"),
        ({"backoff_base": timedelta(seconds=0.5)}, "backoff_base must be"),
        ({"backoff_base": 86_401}, "backoff_base must be"),
    ],
)
def test_a_policy_out_of_range_is_refused_whole(given, told):
    with pytest.raises(ValueError, match=told):
        queues.set_policy("emails", **{"concurrency": 3, **given})
    assert not QueueControl.objects.exists()


def test_a_policy_is_told_once_it_is_committed(hear, django_capture_on_commit_callbacks):
    # Given
    heard, seen = hear("queue_changed"), []
    # When
    with django_capture_on_commit_callbacks(execute=True):
        queues.set_policy("emails", concurrency=2, actor="ann", on_changed=seen.extend)
        assert heard == []
    # Then
    (told,) = heard
    assert (told["queue"], told["actor"]) == ("emails", "ann")
    assert told["changes"] == {"concurrency": 2}
    assert [(row.queue, row.concurrency) for row in seen] == [("emails", 2)]


def test_the_overview_tells_what_holds_and_what_was_asked(settings):
    # Given
    settings.KJO = {"MAX_ATTEMPTS": 4, "BACKOFF_BASE": 3, "QUEUES": {"emails": {}, "images": {}}}
    QueueControlFactory(queue="images", max_attempts=9, backoff_base=60)
    # When
    found = {row["queue"]: row for row in queues.overview()}
    # Then
    emails, images = found["emails"], found["images"]
    assert (emails["max_attempts"], emails["backoff_base_seconds"]) == (4, 3.0)
    assert emails["asked"] == {"concurrency": None, "max_attempts": None, "backoff_base": None}
    assert (images["max_attempts"], images["backoff_base_seconds"]) == (9, 60)
    assert images["asked"] == {"concurrency": None, "max_attempts": 9, "backoff_base": 60}
