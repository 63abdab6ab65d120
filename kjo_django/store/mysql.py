"""The store on MariaDB and MySQL: what InnoDB locks otherwise than PostgreSQL."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from django.apps import apps
from django.db import Error, connections
from django.db.backends.signals import connection_created
from django.db.models import CharField, TextField
from django.db.models.lookups import IContains

from kjo_django import states
from kjo_django.exceptions import JobTimeoutError
from kjo_django.models import Job
from kjo_django.store.base import Store

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models import Model, QuerySet

LOCK_TIMEOUT, LOCKS_FULL, DEADLOCK = 1205, 1206, 1213
"""Errors of a session. After the last two the server has undone its transaction: for want of memory
for its locks, and to end a deadlock."""


class MySqlStore(Store):
    """InnoDB, with transactions that read what is committed, as Django asks for.

    ``INSERT IGNORE``, which Django uses, is avoided: it also cuts off values that are too long, and
    of two sessions that have met the same row, neither can go on to change it.
    """

    committing = (
        *("alter", "analyze", "check", "create", "drop", "grant", "install", "lock", "optimize"),
        *("rename", "repair", "revoke", r"set\s+password", "truncate", "uninstall"),
    )
    """It commits for them even if it refuses them then, which the driver does not note."""
    changing = ("get_lock", ":=", "into @")

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._insert[True] = self._insert[False][0], " ON DUPLICATE KEY UPDATE id = id"
        search_in_any_case()
        _watch_errors(connections[alias])
        connection_created.connect(_watch_errors, dispatch_uid=f"kjo_django.store.mysql.{alias}")

    def end_session(self, connection: BaseDatabaseWrapper, *, terminates: bool) -> None:
        """End also a session whose statement waits for a lock."""
        raw: Any = connection.connection
        if terminates:
            with connections[self.alias].cursor() as cursor:
                cursor.execute(f"KILL {int(raw.thread_id())}")
        if (line := getattr(raw, "_sock", None)) is None:  # of mysqlclient
            super().end_session(connection, terminates=terminates)
        else:
            line.shutdown(socket.SHUT_RDWR)

    # --- Rows that may be there already -----------------------------------------------------------

    def insert_missing(self, rows: Sequence[Model]) -> None:
        """Insert rows, and lock for this transaction those whose key is taken."""
        connection, options = connections[self.alias], rows[0]._meta
        quote, fields = connection.ops.quote_name, options.local_concrete_fields
        names = [quote(str(field.column)) for field in fields]
        places = ", ".join([f"({', '.join(['%s'] * len(fields))})"] * len(rows))
        values = [
            field.get_db_prep_save(field.pre_save(row, add=True), connection)
            for row in rows
            for field in fields
        ]
        with connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {quote(options.db_table)} ({', '.join(names)}) VALUES {places}"  # noqa: S608 - names of columns
                f" ON DUPLICATE KEY UPDATE {names[0]} = {names[0]}",
                values,
            )

    def insert_jobs(self, jobs: Sequence[Job], *, ignore_conflicts: bool = False) -> int:
        """Insert rows and return how many. A row with a unique id of these is not waited for, which
        the transaction of a running handler has locked."""
        if not ignore_conflicts:
            return super().insert_jobs(jobs)
        stored = Job.objects.using(self.alias)
        names = {job.unique_id for job in jobs} - {None}
        known = stored.filter(queue__in={job.queue for job in jobs}, unique_id__in=names)
        taken = set(known.values_list("queue", "unique_id"))
        new = [job for job in jobs if (job.queue, job.unique_id) not in taken]
        if new:
            super().insert_jobs(new, ignore_conflicts=True)
        # A row that was met is counted by the server, too.
        return stored.filter(pk__in=[job.pk for job in new]).count() if new else 0

    # --- The relay --------------------------------------------------------------------------------

    has_independent_writers = True

    def _first_due(
        self, rows: QuerySet[Job, Any], order: Sequence[str], limit: int, small: int | None = None
    ) -> QuerySet[Job, Any]:
        """Return the first rows that await publishing: those of each state, whose index has this
        order, and then the first of these. There are no partial indexes."""
        pending, failing = (
            super(MySqlStore, self)._first_due(rows.filter(state=state), order, limit, small)
            for state in states.AWAITING_PUBLISH
        )
        return pending.union(failing, all=True).order_by(*order)[:limit]

    def read_windows(self, names: Sequence[str]) -> tuple[datetime, dict[str, str]]:
        """Read both in one query, unless no rate has any starts."""
        places = ", ".join(["%s"] * len(names))
        with connections[self.alias].cursor() as cursor:
            cursor.execute(
                "SELECT UTC_TIMESTAMP(6), name, starts FROM kjo_rate_window "  # noqa: S608 - places
                f"WHERE name IN ({places})",
                list(names),
            )
            rows = cursor.fetchall()
        if not rows:
            return self.server_time(), {}
        now = cast("datetime", rows[0][0]).replace(tzinfo=UTC)
        return now, {name: starts for _, name, starts in rows}

    has_clock = True

    def server_time(self) -> datetime:
        """Return the server's clock."""
        with connections[self.alias].cursor() as cursor:
            cursor.execute("SELECT UTC_TIMESTAMP(6)")
            return cast("datetime", cursor.fetchone()[0]).replace(tzinfo=UTC)


# --- What people search for -----------------------------------------------------------------------


class _IContains(IContains):
    """``icontains`` of a column whose own collation compares exactly."""

    def process_lhs(
        self, compiler: Any, connection: BaseDatabaseWrapper, lhs: Any = None
    ) -> tuple[str, Any]:
        """Return the column and its parameters."""
        sql, parameters = super().process_lhs(compiler, connection, lhs)
        is_ours = connection.vendor == "mysql"
        return f"{sql} COLLATE utf8mb4_general_ci" if is_ours else sql, parameters


def search_in_any_case() -> None:
    """Let ``icontains`` find text of this app's tables in any case, as on other databases."""
    for model in apps.get_app_config("kjo_django").get_models():
        for field in model._meta.local_concrete_fields:
            if isinstance(field, CharField | TextField):
                field.register_lookup(_IContains)


# --- Errors after which a transaction is not what Django believes ---------------------------------


def _watch_errors(connection: BaseDatabaseWrapper, **kwargs: object) -> None:
    if connection.vendor == "mysql" and _watching not in connection.execute_wrappers:
        # Not behind those of others, who take away the last one.
        connection.execute_wrappers.insert(0, _watching)


def _watching(execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
    """Execute a query. Where its error has undone the transaction as a whole, what follows, and is
    committed, would be without what came before. After a timeout of a handler, which is raised
    wherever its thread is, the answer may be half read, and would pass for that to the next query.
    """
    connection: BaseDatabaseWrapper = context["connection"]
    try:
        try:
            return execute(sql, params, many, context)
        except Error as error:
            if connection.in_atomic_block:
                connection.needs_rollback |= _has_undone_all(connection, error)
            raise
    except JobTimeoutError:
        connection.errors_occurred = True
        connection.needs_rollback = connection.in_atomic_block
        with suppress(Exception):
            cast("Any", connection.connection).close()
        raise


def _has_undone_all(connection: BaseDatabaseWrapper, error: Error) -> bool:
    """Return whether the server has undone the transaction, and not just the statement. After a
    lock that was not granted in time it says by an option, off by default, which it does."""
    if error.args[:1] != (LOCK_TIMEOUT,):
        return error.args[:1] in ((DEADLOCK,), (LOCKS_FULL,))
    with connection.wrap_database_errors, cast("Any", connection.connection).cursor() as cursor:
        cursor.execute("SELECT @@innodb_rollback_on_timeout")
        return bool(cursor.fetchone()[0])
