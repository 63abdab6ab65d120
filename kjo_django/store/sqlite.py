"""The store on SQLite: statements executed for many rows, without Django's converters."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from kjo_django.ids import uuid7s
from kjo_django.models import EventKey, Job
from kjo_django.store.base import Store
from kjo_django.store.rows import COLUMNS, JobRow

if TYPE_CHECKING:
    from django.db.models import Model

_MOST_PARAMETERS = 900
"""Below the 999 parameters an old SQLite takes."""


class SqliteStore(Store):
    """A database in a file, with one writer at a time."""

    # --- Transactions -----------------------------------------------------------------------------

    def take_write_lock(self, model: type[Model] = Job) -> None:
        """Make the current transaction a writing one before it reads.

        A transaction that has read and then wants to write is refused at once ("database is
        locked") if another wrote in between; one that starts with a write waits its turn. A
        statement that changes no row takes the lock all the same, and dirties no page.
        """
        key = self.connection.ops.quote_name(str(model._meta.pk.column))
        table = self.connection.ops.quote_name(model._meta.db_table)
        with self.connection.cursor() as cursor:
            cursor.execute(f"UPDATE {table} SET {key} = {key} WHERE {key} IS NULL")  # noqa: S608 - names of columns

    # --- Markers of effects -----------------------------------------------------------------------

    def _insert_markers(self, keys: Sequence[EventKey], now: datetime) -> set[EventKey]:
        """Execute one statement for each key; which were new is asked if not all were."""
        moment = self.connection.ops.adapt_datetimefield_value(now)
        minted = dict(zip((id.hex for id in uuid7s(len(keys))), keys, strict=True))
        with self.connection.cursor() as cursor:
            rows = [(id, *key, moment, moment, moment) for id, key in minted.items()]
            cursor.executemany(_INSERT_MARKER, rows)
            if cursor.rowcount in (0, len(keys)):
                return set(keys) if cursor.rowcount else set()
            ids = list(minted)
            fresh: set[EventKey] = set()
            for start in range(0, len(ids), _MOST_PARAMETERS):
                chunk = ids[start : start + _MOST_PARAMETERS]
                cursor.execute(
                    f"SELECT id FROM processed_events WHERE id IN ({_places(chunk)})",  # noqa: S608 - places
                    chunk,
                )
                fresh.update(minted[id] for (id,) in cursor.fetchall())
        return fresh

    # --- Rows of a group --------------------------------------------------------------------------

    def job_rows(self, ids: Sequence[str], *, lock: bool) -> dict[str, JobRow]:
        """Read rows without Django's converters, which take longer than the query.

        :param lock: nothing to do: the transaction has written, so it is the only one that may.
        """
        connection: Any = self.connection
        found: dict[str, JobRow] = {}
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {', '.join(COLUMNS)} FROM kjo_job WHERE id IN ({_places(ids)})",  # noqa: S608 - names of columns
                [id.replace("-", "") for id in ids],
            )
            for values in cursor:
                row = JobRow.read([UUID(values[0]), *values[1:]])
                for name in _TIMES:
                    if (moment := getattr(row, name)) is not None:
                        setattr(row, name, moment.replace(tzinfo=connection.timezone))
                found[row.id_text] = row
        return found


_INSERT_MARKER = """
INSERT INTO processed_events
    (id, event_id, service_name, event_type, processed_at, created_at, updated_at)
VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING
"""
_TIMES = ("available_at", "expires_at", "lease_expires_at", "created_at")


def _places(values: Sequence[object]) -> str:
    return ", ".join(["%s"] * len(values))
