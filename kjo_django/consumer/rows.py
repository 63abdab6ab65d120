"""Reading the job rows of a group."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from django.db import connections

from kjo_django.conf import get_settings
from kjo_django.consumer.attempts import COLUMNS
from kjo_django.consumer.work import Delivery
from kjo_django.models import Job
from kjo_django.models.postgres import array_text, read_times_natively


def row_id(delivery: Delivery) -> str:
    """Return the key of its row in what ``load_rows`` returns."""
    message = delivery.message
    assert message is not None
    return message.job_id or f"unique:{message.row_name}"


def load_rows(using: str, deliveries: Sequence[Delivery], *, lock: bool) -> dict[str, Any]:
    """Return the job rows of a group in one query (two when foreign messages are among them)."""
    service = get_settings().service_name
    ids, foreign = [], {}
    for delivery in deliveries:
        message = delivery.message
        assert message is not None
        if message.job_id is not None and (id := _uuid(message.job_id)) is not None:
            ids.append(id)
        if message.job_id is None or message.service != service:
            # Another service's job has no row here, but for the one its first failure bore.
            foreign[message.row_name] = row_id(delivery)
    found = {}
    if ids:
        found.update(_rows_of(using, ids, lock=lock))
    foreign = {id: place for id, place in foreign.items() if place not in found}
    if foreign:
        queue = deliveries[0].queue.retries
        rows = Job.objects.using(using).filter(queue=queue, unique_id__in=list(foreign))
        for row in rows.values(*COLUMNS):
            found[foreign[row["unique_id"]]] = row
    return found


def _uuid(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None


def _rows_of(using: str, ids: Sequence[uuid.UUID], *, lock: bool) -> dict[str, Any]:
    """Return the rows keyed by the id's text, locked against everybody else where that exists."""
    if connections[using].vendor == "postgresql":
        return _rows_at_once(using, ids, lock=lock)
    rows = Job.objects.using(using).filter(pk__in=ids).order_by("pk")
    features = connections[using].features
    if lock and features.has_select_for_update:
        rows = rows.select_for_update(no_key=features.has_select_for_no_key_update)
    return {str(row["id"]): row for row in rows.values(*COLUMNS)}


_ROWS = f"""
SELECT id::text AS name, {", ".join(COLUMNS)} FROM kjo_job WHERE id = ANY(%s::uuid[])
ORDER BY kjo_job.id
"""  # noqa: S608 - column names of ours


def _rows_at_once(using: str, ids: Sequence[uuid.UUID], *, lock: bool) -> dict[str, Any]:
    """The same for PostgreSQL: a statement whose text does not grow with the group, and times read
    by psycopg's own loader instead of Django's in Python (both aware; only the class differs)."""
    with connections[using].cursor() as cursor:
        read_times_natively(cursor)
        cursor.execute(f"{_ROWS} FOR NO KEY UPDATE" if lock else _ROWS, [array_text(ids)])
        return {row[0]: dict(zip(COLUMNS, row[1:], strict=True)) for row in cursor.fetchall()}
