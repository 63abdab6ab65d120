"""What handlers do that no handler should: ways to end the transaction of one's group, and to leave
a session that others cannot use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.db import DatabaseError, connection, transaction

NOTHING = "DELETE FROM ledger_entry WHERE job = ''"


def executing(*queries: str) -> Callable[[], None]:
    """Return what executes queries with one of Django's cursors."""

    def execute() -> None:
        with connection.cursor() as cursor:
            for query in queries:
                cursor.execute(query)

    return execute


def committing_past_django() -> None:
    raw: Any = connection.connection
    raw.commit()


def committing_and_closing() -> None:
    """Django knows of the close, and nobody of the COMMIT."""
    committing_past_django()
    connection.close()


def committing_and_closing_past_django() -> None:
    committing_past_django()
    raw: Any = connection.connection
    raw.close()


def committing_behind_a_flag() -> None:
    transaction.set_rollback(True)
    committing_past_django()


def undoing_past_django() -> None:
    raw: Any = connection.connection
    raw.rollback()


def beginning_anew_past_django(end: str) -> Callable[[], None]:
    """Return what ends the transaction and begins another, by cursors of the driver's own."""

    def execute() -> None:
        raw: Any = connection.connection
        for query in (end, "BEGIN", NOTHING):
            raw.cursor().execute(query)

    return execute


def executing_a_script() -> None:
    with connection.cursor() as cursor:
        cursor.executescript("CREATE TABLE IF NOT EXISTS adversary (n integer);")


def executing_a_script_of_its_own_transaction() -> None:
    with connection.cursor() as cursor:
        cursor.executescript("BEGIN; DELETE FROM ledger_entry WHERE job = ''; COMMIT;")


def refused(query: str) -> Callable[[], None]:
    """Return what executes a query that is refused, and goes on."""

    def execute() -> None:
        with suppress(DatabaseError):
            executing(query)()

    return execute


def executing_bytes() -> None:
    with connection.cursor() as cursor:
        cursor.execute(b"COMMIT AND CHAIN")


def executing_composed() -> None:
    from psycopg.sql import SQL  # an extra, which may be missing

    with connection.cursor() as cursor:
        cursor.execute(SQL("COMMIT AND CHAIN"))


_EVERYWHERE = {
    "commit": executing("COMMIT"),
    "commit in lower case": executing("  commit"),
    "commit and begin": executing("COMMIT", "BEGIN"),
    "commit behind comments": executing("-- app\n/* view */ COMMIT"),
    "commit past Django": committing_past_django,
    "commit past Django and close": committing_and_closing,
    "commit and close past Django": committing_and_closing_past_django,
    "commit behind a flag": committing_behind_a_flag,
}
COMMITS: dict[str, dict[str, Callable[[], None]]] = {
    "sqlite": _EVERYWHERE
    | {
        "script": executing_a_script,
        "script with a transaction": executing_a_script_of_its_own_transaction,
    },
    "postgresql": _EVERYWHERE
    | {
        "end": executing("END"),
        "commit and chain": executing("/* app */ COMMIT AND CHAIN"),
        "commit and chain as bytes": executing_bytes,
        "commit and chain as psycopg composes it": executing_composed,
        "script with a transaction": executing(f"BEGIN; {NOTHING}; COMMIT"),
        "script that begins another": executing(f"COMMIT; BEGIN; {NOTHING}"),
        "commit, then a script": executing("COMMIT", f"{NOTHING}; {NOTHING}"),
    },
    "mysql": _EVERYWHERE
    | {
        "begin": executing("BEGIN"),
        "begin behind a comment": executing("# app\nBEGIN"),
        "commit and chain": executing("COMMIT AND CHAIN"),
        "ddl": executing("CREATE TABLE IF NOT EXISTS adversary (n integer)"),
        "truncate": executing(
            "CREATE TABLE IF NOT EXISTS adversary (n integer)", "TRUNCATE TABLE adversary"
        ),
        "check": executing("CHECK TABLE ledger_entry"),
        "refused ddl": refused("CREATE TABLE ledger_entry (n integer)"),
        "refused password": refused("SET PASSWORD FOR 'nobody'@'nowhere' = ''"),
        "refused plugin": refused("INSTALL SONAME 'none'"),
        "autocommit": executing("SET autocommit = 1"),
        "locked tables": executing("LOCK TABLES ledger_entry WRITE", "UNLOCK TABLES"),
    },
}
"""What makes the transaction of a group durable while one of its handlers runs, by vendor."""
UNDOES: dict[str, dict[str, Callable[[], None]]] = {
    "sqlite": {
        "rollback": executing("ROLLBACK"),
        "rollback past Django": undoing_past_django,
        "rollback and begin": executing("ROLLBACK", "BEGIN"),
    },
    "postgresql": {
        "rollback": executing("ROLLBACK"),
        "rollback past Django": undoing_past_django,
        "rollback and begin": executing("ROLLBACK", "BEGIN"),
        "rollback and chain": executing("ROLLBACK AND CHAIN"),
        "script": executing(f"ROLLBACK; BEGIN; {NOTHING}"),
    },
    "mysql": {
        "rollback": executing("ROLLBACK"),
        "rollback past Django": undoing_past_django,
        "rollback and chain": executing("ROLLBACK AND CHAIN"),
    },
}
"""What undoes the transaction of a group, and what the handlers before have written."""

UNSEEN = beginning_anew_past_django("COMMIT")
"""What is noticed only where handlers have savepoints."""


# --- Sessions -------------------------------------------------------------------------------------


def setting(name: str, value: object) -> Callable[[], None]:
    """Return what sets an attribute of the driver's own connection."""

    def execute() -> None:
        setattr(connection.connection, name, value)

    return execute


def rows_as_texts(cursor: Any, row: Any = None) -> Any:
    """A row factory of SQLite's and psycopg's kind, with whose rows nobody else can do anything."""
    return str(row) if row is not None else str


def loading_times_as_texts() -> None:
    from psycopg.adapt import Loader  # an extra, which may be missing

    class AsText(Loader):
        def load(self, data: Any) -> str:
            return bytes(data).decode()

    raw: Any = connection.connection
    raw.adapters.register_loader("timestamptz", AsText)


def refusing_writes() -> None:
    """As a handler does that is to look at data of somebody else's only."""
    import sqlite3

    raw: Any = connection.connection
    writes = (sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE)
    raw.set_authorizer(lambda what, *_: sqlite3.SQLITE_DENY if what in writes else 0)


SPOILS: dict[str, dict[str, Callable[[], None]]] = {
    "sqlite": {
        "query only": executing("PRAGMA query_only = ON"),
        "temporary table": executing("CREATE TEMP TABLE kjo_job (n integer)"),
        "authorizer": refusing_writes,
        "row factory": setting("row_factory", rows_as_texts),
    },
    "postgresql": {
        "read only": executing("SET default_transaction_read_only = on"),
        "characteristics": executing("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"),
        "role": executing("SET ROLE pg_monitor"),
        "user": executing("SET SESSION AUTHORIZATION pg_monitor"),
        "search path": executing("SET search_path TO elsewhere"),
        "date style": executing("SET datestyle TO 'SQL, DMY'"),
        "set_config": executing("SELECT set_config('search_path', 'elsewhere', false)"),
        "temporary table": executing("CREATE TEMP TABLE kjo_job (n integer)"),
        "row factory": setting("row_factory", rows_as_texts),
        "loader": loading_times_as_texts,
    },
    "mysql": {
        "read only": executing("SET SESSION TRANSACTION READ ONLY"),
        "database": executing("USE information_schema"),
        "temporary table": executing("CREATE TEMPORARY TABLE kjo_job (n integer)"),
        "locked tables": executing("LOCK TABLES ledger_entry READ"),
    },
}
"""What leaves a session that the engine cannot use, by vendor."""


def asking(query: str) -> Callable[[], Any]:
    """Return what executes a query with one of Django's cursors and returns its first value."""

    def execute() -> Any:
        with connection.cursor() as cursor:
            cursor.execute(query)
            return (cursor.fetchone() or [None])[0]

    return execute


OWN_STAGES = (
    "SELECT count(*) FROM pg_class"
    " WHERE relname = 'kjo_stage' AND relnamespace = pg_my_temp_schema()"
)
"""Temporary tables and views of this session: that of a session which was closed may be there for
a while, until PostgreSQL has noticed."""
OWN_LOCKS = (
    "SELECT count(*) FROM pg_locks"
    " WHERE locktype = 'advisory' AND objid = 77 AND pid = pg_backend_pid()"
)


CHANGES: dict[str, dict[str, tuple[Callable[[], Any], Callable[[], Any]]]] = {
    "sqlite": {
        "pragma": (executing("PRAGMA cache_size = 77"), asking("PRAGMA cache_size")),
        "temporary table": (
            executing("CREATE TEMPORARY TABLE kjo_stage (n integer)"),
            asking("SELECT count(*) FROM sqlite_temp_master"),
        ),
    },
    "postgresql": {
        "set": (executing("SET TIME ZONE 'Asia/Tokyo'"), asking("SHOW TIME ZONE")),
        "set local": (executing("set local work_mem = '77kB'"), asking("SHOW work_mem")),
        "set_config": (
            executing("SELECT set_config('app.tenant', 'their', false)"),
            asking("SELECT nullif(current_setting('app.tenant', true), '')"),
        ),
        "set_config, locally": (
            executing("SELECT set_config('app.tenant', 'their', true)"),
            asking("SELECT nullif(current_setting('app.tenant', true), '')"),
        ),
        "SET_CONFIG": (
            executing("SELECT SET_CONFIG('app.tenant', 'their', TRUE)"),
            asking("SELECT nullif(current_setting('app.tenant', true), '')"),
        ),
        "block": (
            executing("DO $$ BEGIN PERFORM set_config('app.tenant', 'their', false); END $$"),
            asking("SELECT nullif(current_setting('app.tenant', true), '')"),
        ),
        "second statement behind a comment": (
            executing("SELECT 1; /* app */ SET lock_timeout = 77000"),
            asking("SHOW lock_timeout"),
        ),
        "temporary view": (
            executing("CREATE OR REPLACE TEMP VIEW kjo_stage AS SELECT 1 AS n"),
            asking(OWN_STAGES),
        ),
        "into a temporary table": (
            executing("SELECT 1 AS n INTO TEMP kjo_stage"),
            asking(OWN_STAGES),
        ),
        "one of two temporary tables": (
            executing(
                "CREATE TEMP TABLE kjo_stage (n int); CREATE TEMP TABLE o (n int) ON COMMIT DROP"
            ),
            asking(OWN_STAGES),
        ),
        "behind a comment": (
            executing("/* app */ -- their\n SET lock_timeout = 77000"),
            asking("SHOW lock_timeout"),
        ),
        "script": (
            executing(f"{NOTHING}; SET statement_timeout = 77000"),
            asking("SHOW statement_timeout"),
        ),
        "role": (
            executing("SET ROLE pg_monitor", "SET ROLE NONE", "SET lock_timeout = 77000"),
            asking("SHOW lock_timeout"),
        ),
        "temporary table": (
            executing("CREATE TEMP TABLE IF NOT EXISTS kjo_stage (n integer) ON COMMIT DROP"),
            asking(OWN_STAGES),
        ),
        "lock": (
            executing("SELECT pg_advisory_lock(77)"),
            asking(OWN_LOCKS),
        ),
    },
    "mysql": {
        "set": (
            executing("SET SESSION sort_buffer_size = 77824"),
            asking("SELECT @@sort_buffer_size"),
        ),
        "variable": (executing("SET @tenant = 'their'"), asking("SELECT @tenant")),
        "variable of a result": (
            executing("SELECT 'their' INTO @tenant"),
            asking("SELECT @tenant"),
        ),
        "comment that is executed": (
            executing("/*!40101 SET @tenant = 'their' */"),
            asking("SELECT @tenant"),
        ),
        "variable in a query": (executing("SELECT @tenant := 'their'"), asking("SELECT @tenant")),
        "lock": (executing("SELECT Get_Lock('their', 1)"), asking("SELECT IS_USED_LOCK('their')")),
    },
}
"""What changes something in a session, and what others see of that, by vendor."""
