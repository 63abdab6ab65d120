"""The store on SQLite: statements executed for many rows, without Django's converters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import connections, transaction

from kjo_django.clock import CLOCK
from kjo_django.ids import uuid7_values
from kjo_django.models import EventKey, Job, Lease
from kjo_django.store.base import Store
from kjo_django.store.rows import COLUMNS, JobRow

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models import Model


class SqliteStore(Store):
    """A database in a file, with one writer at a time."""

    # --- Transactions -----------------------------------------------------------------------------

    def take_write_lock(self, model: type[Model] = Job) -> None:
        """Make the current transaction a writing one before it reads.

        A transaction that has read and then wants to write is refused at once ("database is
        locked") if another wrote in between; one that starts with a write waits its turn. A
        statement that changes no row takes the lock all the same, and dirties no page.
        """
        table, key = model._meta.db_table, model._meta.pk.column
        with connections[self.alias].cursor() as cursor:
            cursor.execute(f"UPDATE {table} SET {key} = {key} WHERE {key} IS NULL")  # noqa: S608 - names of columns

    def end_session(self, connection: BaseDatabaseWrapper, *, terminates: bool) -> None:
        """Interrupt, roll back and close; a database in memory would be gone with that."""
        raw: Any = connection.connection
        if not getattr(connection, "is_in_memory_db", lambda: True)():
            raw.interrupt()
            raw.rollback()
            raw.close()

    # --- The end of jobs --------------------------------------------------------------------------

    def _execute_each(self, cursor: Any, sql: str, rows: Sequence[Sequence[Any]]) -> Iterator[bool]:
        """Execute all in one ``executemany``, which takes the next row of values when the statement
        is done with the one before."""
        raw: Any = connections[self.alias].connection
        counts: list[int] = []

        def taken() -> Iterator[Sequence[Any]]:
            for values in rows:
                counts.append(raw.total_changes)
                yield values

        cursor.executemany(sql, taken())
        counts.append(raw.total_changes)
        return (after > before for before, after in pairwise(counts))

    # --- Markers of effects -----------------------------------------------------------------------

    def insert_markers(
        self, keys: Collection[EventKey], now: datetime | None = None
    ) -> set[EventKey]:
        """Execute one statement for each key, and ask which were new if only some were."""
        if not keys:
            return set()
        connection = connections[self.alias]
        moment = connection.ops.adapt_datetimefield_value(now or CLOCK.now())
        ordered = sorted(set(keys))
        ids = [f"{value:032x}" for value in uuid7_values(len(ordered))]
        with connection.cursor() as cursor:
            times = (moment,) * 3
            rows = [(id, *key, *times) for id, key in zip(ids, ordered, strict=True)]
            cursor.executemany(_INSERT_MARKER, rows)
            if cursor.rowcount in (0, len(ordered)):
                return set(ordered) if cursor.rowcount else set()
            places = ", ".join(["%s"] * len(ids))
            cursor.execute(f"SELECT id FROM processed_events WHERE id IN ({places})", ids)  # noqa: S608 - places
            stored = {id for (id,) in cursor}
        return {key for id, key in zip(ids, ordered, strict=True) if id in stored}

    # --- Rows of a group --------------------------------------------------------------------------

    def job_rows(self, ids: Sequence[str], *, lock: bool) -> dict[str, JobRow]:
        """Read rows without Django's converters, which take longer than the query.

        :param lock: nothing to do: the transaction has written, so it is the only one that may.
        """
        connection: Any = connections[self.alias]
        zone = connection.timezone
        found: dict[str, JobRow] = {}
        places = ", ".join(["%s"] * len(ids))
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {', '.join(COLUMNS)} FROM kjo_job WHERE id IN ({places})",  # noqa: S608 - names of columns
                [id.replace("-", "") for id in ids],
            )
            for values in cursor:
                id = UUID(values[0])
                columns = [id, *values[1:], str(id)]
                row = JobRow(*columns)
                found[row.id_text] = row
                if row.stage_id is not None:
                    row.stage_id = UUID(row.stage_id)  # type: ignore[arg-type] # text, as the id
                for name in _TIMES:
                    if (moment := getattr(row, name)) is not None:
                        setattr(row, name, moment.replace(tzinfo=zone))
        return found

    # --- Leases of coordination -------------------------------------------------------------------

    has_one_writer = True

    def claim_leases(
        self, names: Sequence[str], token: str, ttl: timedelta
    ) -> dict[str, tuple[bool, int]]:
        """Claim all names in one statement, where the library knows RETURNING (3.35)."""
        connection = connections[self.alias]
        if not connection.features.can_return_columns_from_insert:
            return super().claim_leases(names, token, ttl)
        with transaction.atomic(using=self.alias, durable=True), connection.cursor() as cursor:
            # Only a transaction that may write knows what time it is: waiting for that takes
            # seconds at times.
            self.take_write_lock(Lease)
            moment = CLOCK.now()
            now = connection.ops.adapt_datetimefield_value(moment)
            until = connection.ops.adapt_datetimefield_value(moment + ttl)
            statement = _CLAIM_LEASES.format(names=", ".join(["(%s)"] * len(names)))
            cursor.execute(statement, [token, until, *names, now, now])
            claims = {name: (True, deliveries) for name, deliveries in cursor.fetchall()}
            leased = [name for name in names if name not in claims]
            if leased:
                places = ", ".join(["%s"] * len(leased))
                statement = f"SELECT name, deliveries FROM kjo_lease WHERE name IN ({places})"  # noqa: S608 - places
                cursor.execute(statement, leased)
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
