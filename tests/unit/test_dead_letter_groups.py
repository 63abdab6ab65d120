"""Dead letters by kind of error, counted and foreseen within bounds."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from kjo_django.models import DeadLetter
from kjo_django.operations import dead_letters, fingerprints
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.operations.fingerprints import error_groups
from tests.factories import DeadLetterFactory, ProcessedEventFactory

pytestmark = pytest.mark.django_db
NOW = timezone.now()


def letters(fingerprint: str, count: int, **columns) -> list[DeadLetter]:
    return [DeadLetterFactory(fingerprint=fingerprint, **columns) for _ in range(count)]


def test_a_group_tells_since_when_in_which_releases_and_how_often_it_came_back():
    # Given
    for number, release in enumerate(["1", "", "2", "2", "3"]):
        DeadLetterFactory(
            fingerprint="often",
            release=release,
            error=f"error {number}",
            replay_count=number % 2,
            failed_at=NOW - timedelta(minutes=9 - number),
        )
    letters("once", 1)
    # When
    often, once = error_groups()
    # Then
    assert (often.fingerprint, often.count, often.error) == ("often", 5, "error 4")
    assert (often.first_failed_at, often.last_failed_at) == (
        NOW - timedelta(minutes=9),
        NOW - timedelta(minutes=5),
    )
    assert often.releases == ("3", "2", "1")
    assert often.replayed_count == 2
    assert (once.count, once.releases, once.replayed_count) == (1, (), 0)


def test_five_releases_of_a_group_are_told_at_most():
    for number in range(7):
        letters("often", 1, release=f"r{number}")
    assert error_groups()[0].releases == ("r6", "r5", "r4", "r3", "r2")


def test_groups_are_those_of_the_newest_letters_and_of_the_selection(monkeypatch):
    # Given
    letters("old", 3, queue="emails")
    letters("new", 2)
    # Then
    found = [group.fingerprint for group in error_groups(DeadLetterFilter(queue="emails"))]
    assert found == ["old"]
    monkeypatch.setattr(fingerprints, "COUNT_LIMIT", 3)
    assert [(g.fingerprint, g.count) for g in error_groups()] == [("new", 2), ("old", 1)]


def test_a_group_is_resolved_by_discarding_it_with_a_note():
    # Given
    letters("known", 3)
    letters("other", 1)
    # When
    assert dead_letters.discard(DeadLetterFilter(fingerprint="known"), note="fixed in 2") == 3
    # Then
    assert [group.fingerprint for group in error_groups()] == ["other"]
    closed = DeadLetter.objects.filter(fingerprint="known")
    assert set(closed.values_list("state", "note")) == {("discarded", "fixed in 2")}


def test_a_preview_is_bounded_and_tells_what_has_taken_effect():
    # Given
    done = DeadLetterFactory(message_id="done")
    ProcessedEventFactory(event_id="done", event_type=done.handler, service_name="tests")
    letters("a", 2)
    # When
    report = dead_letters.preview(DeadLetterFilter(), limit=2)
    # Then
    assert (report.matched, report.already_processed, report.is_capped) == (2, 1, True)
    assert report.refused == {"already processed": 1}
    whole = dead_letters.preview(DeadLetterFilter())
    assert (whole.matched, whole.is_capped) == (3, False)
    assert dead_letters.replay(DeadLetterFilter(), dry_run=True, limit=None).matched == 3
    assert DeadLetter.objects.filter(state="open").count() == 3
