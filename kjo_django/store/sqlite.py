"""The store on SQLite: statements executed for many rows, without Django's converters."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.utils import timezone

from kjo_django.ids import uuid7s
from kjo_django.models import EventKey, Job, Lease
from kjo_django.store.base import Store
from kjo_django.store.rows import COLUMNS, JobRow

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
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

    def is_undone(self, connection: BaseDatabaseWrapper) -> bool:
        """As SQLite does when its disk is full: after that each statement is committed at once."""
        return not getattr(connection.connection, "in_transaction", True)

    def is_in_transaction(self, connection: BaseDatabaseWrapper) -> bool:
        """Return what the driver says."""
        return bool(connection.connection.in_transaction)

    def end_session(self, connection: BaseDatabaseWrapper, *, terminates: bool) -> None:
        """Interrupt, roll back and close; a database in memory would be gone with that."""
        raw: Any = connection.connection
        if not getattr(connection, "is_in_memory_db", lambda: True)():
            raw.interrupt()
            raw.rollback()
            raw.close()

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

    # --- Leases of coordination -------------------------------------------------------------------

    has_one_writer = True

    def claim_leases(
        self, names: Sequence[str], token: str, ttl: timedelta
    ) -> dict[str, tuple[bool, int]]:
        """Claim all names in one statement, where the library knows RETURNING (3.35)."""
        connection = self.connection
        if not connection.features.can_return_columns_from_insert:
            return super().claim_leases(names, token, ttl)
        # Only a transaction that may write knows what time it is: waiting for that takes seconds
        # at times.
        self.take_write_lock(Lease)
        moment = timezone.now()
        now = connection.ops.adapt_datetimefield_value(moment)
        until = connection.ops.adapt_datetimefield_value(moment + ttl)
        with connection.cursor() as cursor:
            statement = _CLAIM_LEASES.format(names=", ".join(["(%s)"] * len(names)))
            cursor.execute(statement, [token, until, *names, now, now])
            claims = {name: (True, deliveries) for name, deliveries in cursor.fetchall()}
            held = [name for name in names if name not in claims]
            if held:
                cursor.execute(
                    f"SELECT name, deliveries FROM kjo_lease WHERE name IN ({_places(held)})",  # noqa: S608 - places
                    held,
                )
                claims.update((name, (False, deliveries)) for name, deliveries in cursor)
        return claims


# WHERE true tells SQLite that ON belongs to the conflict, not to a join.
_CLAIM_LEASES = """
INSERT INTO kjo_lease (name, token, expires_at, deliveries)
SELECT column1, %s, %s, 1 FROM (VALUES {names}) WHERE true
ON CONFLICT (name) DO UPDATE SET token = excluded.token, expires_at = excluded.expires_at,
    deliveries = kjo_lease.deliveries + (kjo_lease.expires_at <= %s)
WHERE kjo_lease.expires_at <= %s OR kjo_lease.token = excluded.token
RETURNING name, deliveries
"""
_INSERT_MARKER = """INSERT INTO processed_events
    (id, event_id, service_name, event_type, processed_at, created_at, updated_at)
VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING
"""
_TIMES = ("available_at", "expires_at", "lease_expires_at", "created_at")


def _places(values: Sequence[object]) -> str:
    return ", ".join(["%s"] * len(values))
