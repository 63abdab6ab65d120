"""The page on upgrades: what each migration locks, and that each can be taken back."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader

from tests.databases import led_to
from tests.settings import database as settings_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "upgrade.md"
ROW = re.compile(r"^\| `(\d{4})` \| (.*?) ?\| (nothing|reads and writes|writes)[,| ]", re.MULTILINE)
STRENGTHS = {"AccessExclusiveLock": "reads and writes", "ShareLock": "writes"}
"""What waits for a lock of a migration. Weaker ones stop only other migrations and VACUUM."""
LOCKS = """
SELECT DISTINCT relname, mode FROM pg_locks JOIN pg_class ON pg_class.oid = relation
WHERE pid = pg_backend_pid() AND relkind = 'r'
"""
TABLES = "SELECT relname FROM pg_class WHERE relkind = 'r'"


def migrations() -> list[str]:
    nodes = MigrationLoader(None).graph.nodes
    return sorted(name for app, name in nodes if app == "kjo_django")


def asked(sql: str) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        found: list[Any] = cursor.fetchall()
    return found


@pytest.fixture
def empty_postgres(
    django_db_setup: None, django_db_blocker: Any, postgres_server: Any
) -> Iterator[None]:
    name = f"kjo_empty_{uuid.uuid4().hex[:12]}"
    with django_db_blocker.unblock(), led_to(settings_of(postgres_server.createdb(name))):
        yield
    postgres_server.dropdb(name)


@pytest.mark.postgres
def test_the_page_says_what_each_migration_locks(empty_postgres: None) -> None:
    first, *later = migrations()
    MigrationExecutor(connection).migrate([("kjo_django", first)])
    found = {}
    for name in later:
        before = {table for (table,) in asked(TABLES)}
        with transaction.atomic():
            MigrationExecutor(connection).migrate([("kjo_django", name)])
            locks = asked(LOCKS)
        strong = [
            (table, STRENGTHS[mode])
            for table, mode in locks
            if table in before and table.startswith("kjo_") and mode in STRENGTHS
        ]
        waits = min((what for _, what in strong), default="nothing")
        found[name[:4]] = (sorted({table for table, _ in strong}), waits)
    said = {
        number: (sorted(re.findall(r"`(\w+)`", tables)), waits)
        for number, tables, waits in ROW.findall(PAGE.read_text())
    }
    assert said == found, "docs/how-to/upgrade.md has a line for each migration"


def test_the_worker_of_a_job_costs_sqlite_no_table_and_old_code_no_insert(
    sqlite_file: Path,
) -> None:
    """A table that is written anew has another first page."""
    where = "SELECT rootpage FROM sqlite_master WHERE name = 'kjo_job'"
    before = [("kjo_django", "0015_dashboard_without_rows")]
    old = MigrationExecutor(connection).migrate(before).apps.get_model("kjo_django", "Job")
    old.objects.create(queue="q", handler="h", max_attempts=1, payload=b"{}", result_ttl=1)
    page = asked(where)
    # When
    call_command("migrate", "kjo_django", verbosity=0)
    old.objects.create(queue="q", handler="h", max_attempts=1, payload=b"{}", result_ttl=1)
    # Then
    assert asked(where) == page
    assert asked("SELECT worker FROM kjo_job") == [("",), ("",)]


def test_every_migration_can_be_taken_back(sqlite_file: Path) -> None:
    first, *_ = migrations()
    call_command("migrate", "kjo_django", first, verbosity=0)
    call_command("migrate", "kjo_django", verbosity=0)
    call_command("makemigrations", "kjo_django", check=True, dry_run=True, verbosity=0)
