"""The page on upgrades: what each migration locks, that each can be taken back, and that workers of
two releases share one database."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader

from kjo_django.models import Job
from tests.databases import led_to
from tests.ledger.models import Entry
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


def test_every_migration_can_be_taken_back(sqlite_file: Path) -> None:
    first, *_ = migrations()
    call_command("migrate", "kjo_django", first, verbosity=0)
    call_command("migrate", "kjo_django", verbosity=0)
    call_command("makemigrations", "kjo_django", check=True, dry_run=True, verbosity=0)


OLDEST = "kjo_django/migrations/0006_workflows.py"
"""The old release is the last state without this file."""
JOBS = int(os.environ.get("KJO_UPGRADE_JOBS", "3000"))
"""Enqueued by each release, five a second: ten minutes."""
WEB = """
import sys, time, django
django.setup()
from tests.ledger.jobs import write
for number in range(int(sys.argv[2])):
    write.enqueue(job=sys.argv[1] + str(number))
    time.sleep(0.2)
"""


class Release:
    """The processes of one state of this repository, on one database."""

    def __init__(self, tree: Path, environment: dict[str, str]) -> None:
        settings = Path(__file__).parent / "side_by_side.py"
        (tree / "tests" / "packaging").mkdir(exist_ok=True)
        if tree != ROOT:
            shutil.copy(settings, tree / "tests" / "packaging")
        names = {"DJANGO_SETTINGS_MODULE": "tests.packaging.side_by_side", "PYTHONPATH": str(tree)}
        self.tree, self.environment = tree, {**environment, **names}

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, cwd=self.tree, env=self.environment)

    def manage(self, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start("-m", "django", *arguments)


@pytest.fixture
def releases(tmp_path: Path, postgres_server: Any) -> Iterator[tuple[Release, Release]]:
    """The old release and this one, on one empty PostgreSQL."""
    git = ["git", "-C", str(ROOT)]
    log = [*git, "log", "--diff-filter=A", "--format=%H", "-1", "--", OLDEST]
    commit = subprocess.run(log, capture_output=True, text=True).stdout.strip()
    archive = subprocess.run([*git, "archive", f"{commit}~1"], capture_output=True)
    if archive.returncode:
        pytest.skip("the old release is not in this clone")
    tree = tmp_path / "old"
    tree.mkdir()
    subprocess.run(["tar", "--extract"], cwd=tree, input=archive.stdout, check=True)
    name = f"kjo_side_{uuid.uuid4().hex[:12]}"
    environment = {**os.environ, "SIDE_BY_SIDE": postgres_server.createdb(name)}
    yield Release(tree, environment), Release(ROOT, environment)
    postgres_server.dropdb(name)


@pytest.mark.long
@pytest.mark.postgres
@pytest.mark.timeout(3600)
def test_old_and_new_workers_side_by_side_across_a_migration(
    releases: tuple[Release, Release], django_db_setup: None, django_db_blocker: Any
) -> None:
    old, new = releases
    assert old.manage("migrate", "--verbosity", "0").wait() == 0
    consume = ("kjo_consume", "ledger", "--concurrency", "2", "--status-interval", "0")
    workers = [old.manage(*consume)]
    try:
        webs = [old.start("-c", WEB, "old", str(JOBS))]
        time.sleep(JOBS / 20)  # a quarter of them is enqueued before the new schema
        assert new.manage("migrate", "--verbosity", "0").wait() == 0
        workers.append(new.manage(*consume))
        webs.append(new.start("-c", WEB, "new", str(JOBS)))
        assert [web.wait() for web in webs] == [0, 0]
        settings = settings_of(new.environment["SIDE_BY_SIDE"])
        with django_db_blocker.unblock(), led_to(settings):
            ends = time.monotonic() + 120
            while Job.objects.exclude(state="completed").exists():
                assert time.monotonic() < ends, Job.objects.exclude(state="completed").first()
                time.sleep(0.5)
            written = list(Entry.objects.values_list("job", flat=True))
    finally:
        for worker in workers:
            worker.terminate()
        ended = [worker.wait(60) for worker in workers]
    # Then nothing is lost, nothing took effect twice, and both workers stopped in order
    assert len(written) == len(set(written)) == 2 * JOBS
    assert ended == [0, 0]
