"""Reading the job rows of a group."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q
from django.utils import timezone

from kjo_django import states
from kjo_django.conf import get_settings
from kjo_django.engine.attempt import Delivery
from kjo_django.models import EventKey, Job, ProcessedEvent
from kjo_django.models.processed_event import Marking
from kjo_django.store.postgres import (
    execute_both,
    read_times_natively,
    text_array,
)
from kjo_django.store.rows import COLUMNS, NAMED_BY_OTHERS, JobRow


def row_id(delivery: Delivery, service: str) -> str:
    """Return the key of its row in what ``load_rows`` returns.

    :param service: this one's name. What others call their jobs is not looked for among ours.
    """
    message = delivery.message
    assert message is not None
    if message.job_id is not None and message.service == service:
        return message.job_id
    return f"unique:{message.row_name}"


def load_rows(using: str, deliveries: Sequence[Delivery], *, lock: bool) -> dict[str, JobRow]:
    """Return the job rows of a group in one query (two when foreign messages are among them)."""
    wanted = _Wanted(deliveries)
    found = _rows_of(using, wanted.ids, lock=lock) if wanted.ids else {}
    return found | wanted.of_foreign(using)


def mark_and_load(
    using: str, keys: Sequence[EventKey], deliveries: Sequence[Delivery]
) -> tuple[set[EventKey], dict[str, JobRow]]:
    """Mark a group's effects, then lock and return its rows; return which keys were new, too.

    The write comes first: SQLite takes its write lock at once instead of failing half-way. On
    PostgreSQL both are one round trip.
    """
    wanted = _Wanted(deliveries)
    if connections[using].vendor != "postgresql" or not wanted.ids:
        fresh = ProcessedEvent.objects.using(using).mark(keys)
        return fresh, load_rows(using, deliveries, lock=True)
    marking = Marking(sorted(set(keys)), timezone.now())
    with connections[using].cursor() as cursor:
        read_times_natively(cursor)
        asking = f"{_ROWS} FOR NO KEY UPDATE", [text_array(wanted.ids)]
        inserted = execute_both(cursor, marking.statement, asking)
        found = _by_name(cursor.fetchall())
        fresh = marking.fresh(cursor, inserted)
    return fresh, found | wanted.of_foreign(using)


class _Wanted:
    """Whose rows a group needs."""

    __slots__ = ("_foreign", "_named", "_queue", "ids")

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        service = get_settings().service_name
        self.ids: list[str] = []
        # Another service's job has no row here, but for the one its first failure bore.
        self._foreign: dict[str, str] = {}
        self._named: dict[str, str] = {}
        self._queue = deliveries[0].queue.retries
        for delivery in deliveries:
            message = delivery.message
            assert message is not None
            id = message.job_id
            if id is None or message.service != service:
                place = self._foreign[message.row_name] = row_id(delivery, service)
                if not message.unique_id and (named := _IS_NAMED(message.id)):
                    self._named[named[1]] = place
            elif _IS_ID(id):
                self.ids.append(id)

    def of_foreign(self, using: str) -> dict[str, JobRow]:
        """Return the rows of foreign messages: those their first failures bore; and the open jobs
        of ours whose ids they bear, with the generation ``NAMED_BY_OTHERS``.

        A row with a destination is no such job: it is a record for others, a stream's task say,
        that names itself, and may be read before the relay has noted that it was sent.
        """
        foreign = self._foreign
        if not foreign:
            return {}
        wanted = Q(queue=self._queue, unique_id__in=list(foreign))
        if self._named:
            wanted |= Q(pk__in=list(self._named), state__in=states.OPEN, destination="")
        found: dict[str, JobRow] = {}
        for queue, *values in (
            Job.objects.using(using).filter(wanted).values_list("queue", *COLUMNS)
        ):
            row = JobRow.read(values)
            if named := self._named.get(row.id_text):
                found.setdefault(named, replace(row, generation=NAMED_BY_OTHERS))
            if row.unique_id in foreign and queue == self._queue:
                found[foreign[row.unique_id]] = row
        return found


_ID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_IS_ID = re.compile(_ID).fullmatch
"""As we write them; whoever writes them otherwise has no row here."""
_IS_NAMED = re.compile(rf"({_ID})(?::\d+)?").fullmatch
"""As the messages of our jobs are named."""


def _rows_of(using: str, ids: Sequence[str], *, lock: bool) -> dict[str, JobRow]:
    """Return the rows keyed by the id's text, locked against everybody else where that exists."""
    if connections[using].vendor == "postgresql":
        with connections[using].cursor() as cursor:
            read_times_natively(cursor)
            cursor.execute(f"{_ROWS} FOR NO KEY UPDATE" if lock else _ROWS, [text_array(ids)])
            return _by_name(cursor.fetchall())
    if connections[using].vendor == "sqlite":
        return _rows_of_sqlite(connections[using], ids)
    rows = Job.objects.using(using).filter(pk__in=ids).order_by("pk")
    features = connections[using].features
    if lock and features.has_select_for_update:
        rows = rows.select_for_update(no_key=features.has_select_for_no_key_update)
    found = map(JobRow.read, rows.values_list(*COLUMNS))
    return {row.id_text: row for row in found}


# A statement whose text does not grow with the group, and times read by psycopg's own loader
# instead of Django's in Python (both aware; only the class differs).
_ROWS = f"""
SELECT {", ".join(COLUMNS)}, id::text FROM kjo_job WHERE id = ANY(%s::uuid[])
ORDER BY kjo_job.id
"""  # noqa: S608 - column names of ours


def _rows_of_sqlite(connection: BaseDatabaseWrapper, ids: Sequence[str]) -> dict[str, JobRow]:
    """Read what Django would, without its converters, which take longer than the query."""
    columns, places = ", ".join(COLUMNS), ", ".join(["%s"] * len(ids))
    found: dict[str, JobRow] = {}
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT {columns} FROM kjo_job WHERE id IN ({places})",  # noqa: S608 - names of ours
            [id.replace("-", "") for id in ids],
        )
        for values in cursor:
            row = JobRow.read([UUID(values[0]), *values[1:]])
            for name in _TIMES:
                if (moment := getattr(row, name)) is not None:
                    setattr(row, name, moment.replace(tzinfo=connection.timezone))
            found[row.id_text] = row
    return found


_TIMES = ("available_at", "expires_at", "lease_expires_at", "created_at")


def _by_name(rows: Iterable[Sequence[Any]]) -> dict[str, JobRow]:
    return {row[-1]: JobRow(*row) for row in rows}
