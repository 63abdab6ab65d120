"""What other sessions of a database are to those of a mixed load: they hold rows, or are ended."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql

STAGE = "mixed-stage"
"""Name of sessions of this module on PostgreSQL, which it does not end."""
POSTGRES = (
    "SELECT pid FROM pg_stat_activity WHERE datname = %s"
    f" AND application_name <> '{STAGE}' AND backend_type = 'client backend'",
    "SELECT pg_terminate_backend(%s)",
)
"""Which sessions there are, and what ends one."""
MARIADB = (
    # Sessions of this module are those that have chosen no database.
    "SELECT id FROM information_schema.processlist WHERE db = %s",
    "KILL %s",
)


def end_some(url: str, chance: random.Random) -> None:
    """End about half of the sessions."""
    parts = urlsplit(url)
    sessions, ending = MARIADB if parts.scheme == "mysql" else POSTGRES
    with _session(url) as (_, cursor):
        cursor.execute(sessions, [parts.path.removeprefix("/")])
        for row in cursor.fetchall():
            if chance.random() < 0.5:
                # It may have ended meanwhile, which MariaDB calls an error.
                with suppress(pymysql.OperationalError):
                    cursor.execute(ending, row)


def hold_rows(url: str, seconds: float) -> None:
    """Lock what is found of the outbox's rows, a moment at a time."""
    parts = urlsplit(url)
    end = time.monotonic() + seconds
    table = f"{parts.path.removeprefix('/')}.kjo_job" if parts.scheme == "mysql" else "kjo_job"
    held = f"SELECT id FROM {table} WHERE state IN ('pending', 'failing') LIMIT 20"
    with _session(url) as (connection, cursor):
        while time.monotonic() < end:  # timed loop: for as long as the plan says
            cursor.execute(f"{held} FOR UPDATE SKIP LOCKED")
            time.sleep(0.25 if cursor.fetchall() else 0.005)  # sleep: holds what it has locked
            connection.rollback()


@contextmanager
def _session(url: str) -> Iterator[tuple[Any, Any]]:
    """Yield a connection and its cursor. On MariaDB it reads what is committed, as Django does."""
    parts = urlsplit(url)
    if parts.scheme != "mysql":
        with psycopg.connect(f"{url}?application_name={STAGE}") as connection:
            yield connection, connection.cursor()
        return
    where = {"host": parts.hostname, "port": parts.port, "password": parts.password or ""}
    level = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
    with pymysql.connect(**where, user=parts.username, init_command=level) as connection:
        yield connection, connection.cursor()
