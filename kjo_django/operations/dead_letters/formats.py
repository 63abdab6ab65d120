"""Formats of dead letters that are not the worker's own: a pattern registers its headers here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter
from kjo_django.transports.base import Record


@dataclass(frozen=True, slots=True)
class DeadLetterFormat:
    """How a pattern marks the messages it puts into dead-letter topics.

    What such a message did has taken effect by its death, and its dead letter is known by its
    place: it has no id.

    :param marker: the header that each of these messages has.
    :param counter: the header that counts redeliveries; a replay begins anew without it.
    :param origin: the header that names the topic a message died on.
    :param letter_of: returns the row of a record, whatever its state; None where it is not here.
    :param is_decided: whether the row of a record has been replayed or discarded since.
    """

    marker: str
    counter: str
    origin: str
    letter_of: Callable[[Record], DeadLetter | None]
    is_decided: Callable[[Record, DeadLetter], bool]


_formats: dict[str, DeadLetterFormat] = {}

ORIGINS = [
    names.DLQ_ORIGINAL_TOPIC,
    "kafka_dlt-original-topic",  # Spring
    "dlq-original-topic",  # of event consumers
    "__dlq.errors.topic",  # Kafka 4.4
]
"""Headers that name the topic a message died on, the first one that is there counts."""
COUNTERS = {names.REDELIVERY}
"""Headers that a replay leaves out: its redeliveries begin anew."""


def register_format(format: DeadLetterFormat) -> None:
    """Let dead letters of this format be replayed from the table and from topics."""
    if format.marker not in _formats:
        ORIGINS.append(format.origin)
        COUNTERS.add(format.counter)
    _formats[format.marker] = format


def format_of(headers: Mapping[str, Any]) -> DeadLetterFormat | None:
    """Return the format that a message's headers are of; None for that of the worker."""
    return next((each for marker, each in _formats.items() if marker in headers), None)
