"""What handlers do that no handler should: ways to end the transaction of one's group."""

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
