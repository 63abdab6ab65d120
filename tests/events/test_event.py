"""``BaseEvent``: fields, lengths, names on the wire (KII-01 … 03, F9, F13)."""

from __future__ import annotations

import json

import pytest

from kjo_django import BaseEvent
from kjo_django.exceptions import MessageError, PayloadError
from kjo_django.patterns.events.event import normalised_version, validated

SEED = {
    "id": "550e8400-e29b-41d4-a716-446655440000",
    "type": "USER_PROFILE_UPDATED",
    "source": "user-service",
    "timestamp": 1693891200000,
    "version": "1",
    "data": {
        "userId": "123e4567-e89b-12d3-a456-426614174000",
        "email": "user@example.com",
        "changes": ["email", "firstName"],
    },
    "metadata": {
        "correlationId": "req-123",
        "userId": "123e4567-e89b-12d3-a456-426614174000",
    },
}


def test_the_seeds_event_travels_unchanged() -> None:
    """KII-01, KII-02: camelCase on the wire."""
    event = BaseEvent.from_wire(SEED)
    assert json.loads(event.to_bytes()) == SEED
    assert event.metadata is not None
    assert event.metadata.correlation_id == "req-123"


def test_snake_case_is_read_and_camel_case_written() -> None:
    """KII-01."""
    given = {**SEED, "metadata": {"correlation_id": "r", "causation_id": "c", "user_id": 7}}
    wire = BaseEvent.from_wire(given).to_wire()
    assert wire["metadata"] == {"correlationId": "r", "causationId": "c", "userId": "7"}


def test_what_others_put_into_the_metadata_is_kept() -> None:
    given = {**SEED, "metadata": {"traceId": "t", "userId": "u"}}
    assert BaseEvent.from_wire(given).to_wire()["metadata"] == {"traceId": "t", "userId": "u"}


def test_a_new_event_says_who_when_and_which(settings) -> None:
    """KII-01: source, timestamp in milliseconds, version and a UUID by default."""
    settings.KJO = {"SERVICE_NAME": "user-service"}
    event = BaseEvent(type="USER_REGISTERED", data={})
    assert (event.source, event.version, len(event.id)) == ("user-service", "1", 36)
    assert event.timestamp > 1_600_000_000_000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", ""),
        ("id", "x" * 256),
        ("id", 7),
        ("type", "x" * 101),
        ("type", "  "),
        ("source", "x" * 1001),
        ("timestamp", True),
        ("timestamp", -1),
        ("timestamp", "yesterday"),
        ("timestamp", 10**16),
        ("version", True),
        ("version", 10**400),
        ("data", [1]),
        ("metadata", "no"),
        ("metadata", {"userId": "x" * 256}),
        ("metadata", {"userId": ["u"]}),
        ("id", "nul\x00"),
    ],
)
def test_what_is_no_event_is_refused(field: str, value: object) -> None:
    """KII-03: the lengths of the table's columns; poison is a MessageError."""
    with pytest.raises(PayloadError):
        BaseEvent.from_wire({**SEED, field: value})
    with pytest.raises(MessageError) as refusal:
        validated({**SEED, field: value})
    assert refusal.value.reason == "invalid"


def test_the_longest_names_fit() -> None:
    """KII-03: event_id 255, event_type 100."""
    event = BaseEvent.from_wire({**SEED, "id": "i" * 255, "type": "t" * 100, "source": "s" * 100})
    assert len(event.id) == 255


@pytest.mark.parametrize("missing", ["id", "type", "source", "timestamp", "data"])
def test_a_missing_field_is_named(missing: str) -> None:
    with pytest.raises(PayloadError, match=missing):
        BaseEvent.from_wire({name: value for name, value in SEED.items() if name != missing})


@pytest.mark.parametrize("given", ["1", "1.0", 1, 1.0, "v1", "1.0.0", " 1 "])
def test_versions_are_normalised(given: object) -> None:
    """KII-F13: "1" here and "1.0" in headers are one."""
    assert normalised_version(given) == "1"


def test_other_versions_stay() -> None:
    assert [normalised_version(v) for v in ("1.2", "2.0", "2024-01")] == ["1.2", "2", "2024-01"]


@pytest.mark.parametrize(
    ("metadata", "data", "key"),
    [
        ({"userId": "m"}, {"userId": "d"}, "m"),
        ({"userId": ""}, {"userId": "d"}, "d"),
        (None, {"userId": "d"}, "d"),
        (None, {"user_id": 7}, "7"),
        (None, {"userId": {"no": "text"}}, "event-1"),
        (None, {}, "event-1"),
    ],
)
def test_the_key_is_the_user_else_the_event(metadata, data, key) -> None:
    """KII-12, KII-F9: metadata.userId, then data.userId, then the id; never none."""
    if metadata == {"userId": ""}:
        with pytest.raises(PayloadError):
            BaseEvent(type="T", id="event-1", data=data, metadata=metadata)
        return
    assert BaseEvent(type="T", id="event-1", data=data, metadata=metadata).key == key
