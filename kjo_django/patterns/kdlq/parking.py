"""``ordering="key"``: while a message of a key waits for its redelivery, later ones wait too.

A waiting message is a row that stays open until the message has been handled. Whoever comes to a
key with open rows that are ahead of it gets a row behind them, and comes back after them. The place
in the line is taken once and kept through every redelivery. All messages of a key go through one
partition of each topic, and its redeliveries through one of the redelivery topic, so two of a key
never run at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import QuerySet
from django.utils import timezone

from kjo_django import states
from kjo_django.ids import uuid7
from kjo_django.messages import headers as names
from kjo_django.models import Job, transition
from kjo_django.runtime import jobs_database
from kjo_django.transports.base import Record

LIMIT_OF_KEY = 1_000
"""Messages of one key that wait. Beyond it the next one stays with the broker, and its key with
it, until there is room."""
LIMIT = 100_000
"""Messages of one queue that wait."""


@dataclass(frozen=True, slots=True)
class Line:
    """The line of a message's key, as it stands."""

    place: str
    """The message's own place: uuids of version 7 sort by time."""
    row: str
    """The row it has been waiting in; empty when it comes for the first time."""
    is_stale: bool
    """It is a second copy: the row it waited in is closed."""
    ahead_until: datetime | None
    """When the last one ahead is due; None when nobody is ahead."""
    is_full: bool
    """No more may wait."""


def line_of(record: Record, queue: str, consumer: str, key: str) -> Line:
    """Look at the line of a record's key, inside the transaction that will change it."""
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
    """Close the row a message waited in: it has been handled, or waits in another one."""
    if line.row:
        rows = Job.objects.using(jobs_database()).filter(pk=line.row)
        transition("complete", rows, finished_at=timezone.now())


def _id_in(record: Record, header: str) -> str:
    """Return a header of ours; "" where it holds no id, as whoever writes to the topic may do."""
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
