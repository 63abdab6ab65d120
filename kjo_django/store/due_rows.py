"""Which rows wait for the relay.

Asked at every wake-up: on PostgreSQL the statements are ready-made, since to build one with the ORM
takes several times as long as to have it answered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections
from django.utils import timezone

from kjo_django import states
from kjo_django.models import Job
from kjo_django.models.job import JobQuerySet, log_facts
from kjo_django.store.postgres import array_text


class Due(NamedTuple):
    """A row that was read for the relay. A model instance of each would cost as much as to publish
    it. Results and errors are not part of a message: they are not carried over the wire."""

    id: UUID
    queue: str
    handler: str
    key: str
    generation: int
    attempts: int
    payload: bytes
    content_type: str
    destination: str
    headers: dict[str, Any] | None

    @property
    def pk(self) -> UUID:
        """As of a model instance."""
        return self.id

    @property
    def log_facts(self) -> dict[str, Any]:
        """What a log record about the job says in its ``extra``."""
        return log_facts(self)


_read_headers: Any = Job._meta.get_field("headers").from_db_value

# What is due is few, a queue's jobs are millions: no plan is to begin with the queue, so its name
# and the topic's are hidden in an expression. Of this one PostgreSQL expects that nearly every row
# meets it, so it follows the index as far as the limit goes. Expecting few, it would sort the whole
# backlog for every batch. The states are spelled out for the partial index.
_WAITING = f"""FROM kjo_job
WHERE state IN ({", ".join(f"'{state.value}'" for state in states.AWAITING_PUBLISH)})
    AND array_position(%s::text[], CASE WHEN
        array_position(%s::text[], destination::text) IS NULL THEN queue::text END) IS NOT NULL
    AND id NOT IN (SELECT unnest(%s::uuid[]))"""
_DUE = f"""SELECT {", ".join(Due._fields)} {_WAITING} AND available_at <= %s
ORDER BY available_at, id LIMIT %s"""
_NEXT = f"SELECT available_at {_WAITING} ORDER BY available_at LIMIT 1"


def due_jobs(
    using: str,
    queues: Collection[str],
    limit: int,
    without: Collection[UUID] = (),
    without_topics: Collection[str] = (),
) -> list[Due]:
    """Return rows that are due, in order, with what their messages are made of.

    :param queues: only theirs.
    :param limit: at most so many.
    :param without: ids of rows to leave out.
    :param without_topics: destinations whose rows to leave out.
    """
    now = timezone.now()
    if connections[using].vendor == "postgresql":
        with connections[using].cursor() as cursor:
            cursor.execute(_DUE, [*_parameters(queues, without, without_topics), now, limit])
            return [_due_of(using, row) for row in cursor.fetchall()]
    rows = _waiting(using, without, without_topics).filter(queue__in=queues, available_at__lte=now)
    columns = rows.order_by("available_at", "id").values_list(*Due._fields)
    return [Due._make(row) for row in columns[:limit]]


def due_jobs_of(
    using: str,
    queue: str,
    limit: int,
    without: Collection[UUID] = (),
    without_topics: Collection[str] = (),
) -> list[Due]:
    """Return rows of one queue that are due, in order, behind however many of others.

    For a cursor PostgreSQL prefers a plan that begins at once; otherwise it may sort a backlog it
    does not know of yet. With a queue that only might vary, the order is that of one index alone,
    and it does not walk through the backlog of another queue by the index of all.
    """
    rows = _waiting(using, without, without_topics).filter(
        queue__gte=queue, queue__lte=queue, available_at__lte=timezone.now()
    )
    ordered = rows.order_by("queue", "available_at", "id")
    columns = ordered.values_list(*Due._fields)[:limit]
    return [Due._make(row) for row in columns.iterator(chunk_size=max(limit, 1))]


def next_due(
    using: str,
    queues: Collection[str],
    without: Collection[UUID] = (),
    without_topics: Collection[str] = (),
) -> datetime | None:
    """Return when the first of these rows is due, or was; None when none waits."""
    if connections[using].vendor == "postgresql":
        with connections[using].cursor() as cursor:
            cursor.execute(_NEXT, _parameters(queues, without, without_topics))
            row = cursor.fetchone()
        return row[0] if row else None
    rows = (
        _waiting(using, without, without_topics).filter(queue__in=queues).order_by("available_at")
    )
    return rows.values_list("available_at", flat=True).first()


def _due_of(using: str, row: Sequence[Any]) -> Due:
    due = Due._make(row)
    if due.headers is None:
        return due
    return due._replace(headers=_read_headers(due.headers, None, connections[using]))


def _parameters(
    queues: Collection[str], without: Collection[UUID], without_topics: Collection[str]
) -> list[Any]:
    return [list(queues), list(without_topics), array_text(without)]


def _waiting(using: str, without: Collection[UUID], without_topics: Collection[str]) -> JobQuerySet:
    rows = Job.objects.using(using).filter(state__in=states.AWAITING_PUBLISH)
    if without:
        rows = rows.exclude(pk__in=list(without))
    return rows.exclude(destination__in=list(without_topics)) if without_topics else rows
