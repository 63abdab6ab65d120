"""``ordering="key"``: while a message of a key waits for its redelivery, later ones wait too.

A waiting message is a row that stays open until the message has been handled. A message whose key
has open rows ahead of it gets a row behind them and is published again after them. It keeps this
place through every redelivery.

All messages of a key go through one partition of each topic, and its redeliveries through one of
the redelivery topic, so two messages of a key never run at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import QuerySet

from kjo_django import states
from kjo_django.clock import CLOCK
from kjo_django.ids import uuid7
from kjo_django.messages import headers as names
from kjo_django.models import Job, transition
from kjo_django.runtime import jobs_database
from kjo_django.transports.base import Record

LIMIT_OF_KEY = 1_000
"""Most waiting messages of one key. The next one, and its key, stays at the broker until there is
room.
"""
LIMIT = 100_000
"""Most waiting messages of one queue."""


@dataclass(frozen=True, slots=True)
class Line:
    """The order of a message's key at a moment."""

    place: str
    """The message's own place. UUIDs of version 7 sort by time."""
    row: str
    """The row it has been waiting in; empty for a new message."""
    is_stale: bool
    """Whether it is a second copy: the row it waited in is closed."""
    ahead_until: datetime | None
    """When the last message ahead is due; None when there is none."""
    is_full: bool
    """Whether no more messages may wait."""


def line_of(record: Record, queue: str, consumer: str, key: str) -> Line:
    """Return the order of a record's key, inside the transaction that will change it."""
    rows = _waiting(queue, consumer)
    mine = _id_in(record, names.PARKED_ROW)
    place = _id_in(record, names.PARKED_PLACE) or str(uuid7())
    # Several topics may add to a line at once, so it can be longer than its limit by a few.
    of_key = list(rows.filter(key=key).values("pk", "headers", "available_at")[: 2 * LIMIT_OF_KEY])
    ahead = [
        row["available_at"]
        for row in of_key
        if str(row["pk"]) != mine and (row["headers"] or {})[names.PARKED_PLACE] < place
    ]
    is_full = not mine and bool(ahead) and (len(of_key) >= LIMIT_OF_KEY or _is_full(rows))
    # Asked of the row alone: to take a message for a copy drops it.
    is_stale = bool(mine) and not rows.filter(pk=mine).exists()
    return Line(place, mine, is_stale, max(ahead, default=None), is_full)


def leave(line: Line) -> None:
    """Close the row a message waited in, since it has been handled or waits in another row."""
    if line.row:
        rows = Job.objects.using(jobs_database()).filter(pk=line.row)
        transition("complete", rows, finished_at=CLOCK.now())


def _id_in(record: Record, header: str) -> str:
    """Return a header of ours; "" if it is not an id: other services may write to the topic."""
    try:
        return str(UUID(names.text(record.headers, header)))
    except ValueError:
        return ""


def _waiting(queue: str, consumer: str) -> QuerySet[Job, Any]:
    return (
        Job.objects.using(jobs_database())
        .filter(queue=queue, handler=consumer, state__in=states.OPEN)
        .filter(headers__has_key=names.PARKED_ROW)
    )


def _is_full(rows: QuerySet[Job, Any]) -> bool:
    return len(rows.values_list("pk")[: LIMIT + 1]) > LIMIT
