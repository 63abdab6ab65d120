"""Markers of effects: each key takes effect once, and the one whose marker is new is known."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.db import transaction

from kjo_django.models import EventKey, ProcessedEvent
from kjo_django.store import store_for

pytestmark = pytest.mark.django_db


def keys(*numbers: int) -> list[EventKey]:
    return [EventKey(f"event-{number}", "shop", "paid") for number in numbers]


def mark(marked: list[EventKey], **options) -> set[EventKey]:
    with transaction.atomic():
        return store_for("default").insert_markers(marked, **options)


@pytest.mark.parametrize("count", [1, 950], ids=["one", "more than a statement asks for"])
def test_of_those_known_already_none_is_new_and_the_others_are(real_database, count):
    # Given
    assert mark(keys(*range(count))) == set(keys(*range(count)))
    # When
    fresh = mark(keys(*range(2 * count)))
    # Then
    assert fresh == set(keys(*range(count, 2 * count)))
    assert mark(keys(*range(2 * count))) == set()
    assert ProcessedEvent.objects.count() == 2 * count


def test_one_key_twice_is_one_marker(real_database):
    assert mark(keys(1, 1)) == set(keys(1))
    assert ProcessedEvent.objects.count() == 1


def test_a_marker_can_be_read_as_django_would_have_written_it(real_database):
    # Given
    moment = datetime(2024, 2, 29, 12, 0, 0, 123456, UTC)
    # When
    mark(keys(1), now=moment)
    # Then
    marker = ProcessedEvent.objects.get()
    assert (marker.event_key, marker.processed_at) == (keys(1)[0], moment)
    assert (marker.created_at, marker.updated_at) == (moment, moment)
    assert ProcessedEvent.objects.get(pk=marker.pk) == marker
    assert marker.pk.version == 7
