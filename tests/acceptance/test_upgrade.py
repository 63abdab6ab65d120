"""An upgrade, and a roll-back of the code, under load on the full engine (issue 18, point 5).

The older release is the code of this repository's history, so a checkout without one cannot run it.
``tests/packaging/test_side_by_side.py`` kills workers of two releases for ten minutes.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from tests.acceptance import steady_load
from tests.acceptance.engine import ALIAS, Engine, Servers
from tests.acceptance.program import Program

ROOT = Path(__file__).resolve().parents[2]
UNKNOWN_MIGRATION = "0010_ticks_of_schedules"
"""The first that the older release does not know."""
RATE = 20.0
"""Jobs a second that each web application enqueues."""
PHASE = float(os.environ.get("KJO_UPGRADE_PHASE", "3"))
"""Seconds that each of six states of the upgrade lasts."""


def git(*arguments: str) -> bytes:
    """Return what git says of this checkout; b"" where it is none."""
    command = ["git", "-c", "safe.directory=*", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    return b"" if done.returncode else done.stdout


@pytest.fixture(scope="module")
def older_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code before a migration that it does not know."""
    path = f"kjo_django/migrations/{UNKNOWN_MIGRATION}.py"
    added = git("log", "--diff-filter=A", "--format=%H", "-1", "--", path).decode().strip()
    archive = git("archive", f"{added}^", "kjo_django", "tests") if added else b""
    if not archive:
        pytest.skip("this checkout has no history with an older release")
    folder = tmp_path_factory.mktemp("older_release")
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")
    assert not (folder / path).exists()
    shutil.copy(ROOT / "tests" / "acceptance" / "steady_load.py", folder / "tests" / "acceptance")
    return folder


@pytest.fixture
def unmigrated(
    kafka_server: Any,
    redis_server: Any,
    postgres_server: Any,
    tmp_path: Path,
    django_db_blocker: Any,
) -> Iterator[Engine]:
    """The full engine on a database without tables."""
    name = f"kjo_upgrade_{uuid.uuid4().hex[:12]}"
    servers = Servers(
        postgres_server.createdb(name), kafka_server.bootstrap_servers, redis_server.url
    )
    with django_db_blocker.unblock(), Engine(servers, tmp_path) as engine:
        yield engine
    postgres_server.dropdb(name)


class Upgrade:
    """Processes of two releases on one engine.

    :param older: where the code of the older release is.
    :param phase: seconds that each state of the upgrade lasts.
    """

    def __init__(self, engine: Engine, older: Path, phase: float) -> None:
        self.engine, self.older, self.phase = engine, older, phase
        self.applications: list[Program] = []

    def of(self, release: str, *arguments: str) -> Program:
        """Start a process of the "older" or the "newer" release."""
        return self.engine.run(*arguments, folder=self.older if release == "older" else ROOT)

    def migrate(self, release: str) -> None:
        migration = self.of(
            release, "tests.acceptance.manage", "migrate", "--run-syncdb", "--verbosity", "0"
        )
        assert migration.wait(120) == 0, migration.log_tail()

    def is_migrated(self) -> bool:
        """Whether the schema is the newer release's."""
        with connections[ALIAS].cursor() as cursor:
            cursor.execute("SELECT name FROM django_migrations WHERE app = 'kjo_django'")
            return (UNKNOWN_MIGRATION,) in cursor.fetchall()

    def worker(self, release: str) -> Program:
        arguments = ("kjo_consume", "ledger", "--concurrency", "2", "--status-interval", "0")
        return self.of(release, "tests.acceptance.manage", *arguments)

    def enqueue(self, release: str, name: str) -> Program:
        """Start a web application."""
        found = self.of(release, "tests.acceptance.steady_load", name, str(RATE))
        self.applications.append(found)
        return found

    def pass_phase(self, *alive: Program) -> None:
        """Let these run for a while, in which jobs go on to take effect."""
        before = self.engine.entries.count()
        self.engine.wait_for_moment(self.phase)
        self.engine.wait_until(
            lambda: self.engine.entries.count() > before + self.phase * RATE / 4,
            "Hardly any job took effect",
        )
        for program in alive:
            assert program.is_running, program.log_tail()

    def promised(self) -> list[str]:
        lines = [line for each in self.applications for line in each.log.splitlines()]
        start = steady_load.PROMISED
        return [line.removeprefix(start) for line in lines if line.startswith(start)]


def upgrade_and_roll_back(engine: Engine, older: Path, phase: float) -> int:
    """Go from one release to the next, back, and forth again; return how many jobs there were."""
    upgrade = Upgrade(engine, older, phase)
    # Given a web application and workers of the older release on its schema
    upgrade.migrate("older")
    old_web = upgrade.enqueue("older", "older")
    old_workers = [upgrade.worker("older"), upgrade.worker("older")]
    upgrade.pass_phase(old_web, *old_workers)
    assert not upgrade.is_migrated()
    # When the schema is migrated under load
    upgrade.migrate("newer")
    assert upgrade.is_migrated()
    upgrade.pass_phase(old_web, *old_workers)
    # And workers and web applications of both releases run side by side, one of each is killed
    new_workers = [upgrade.worker("newer"), upgrade.worker("newer")]
    new_web = upgrade.enqueue("newer", "newer")
    upgrade.pass_phase(old_web, new_web, *old_workers, *new_workers)
    old_workers.pop().kill()
    new_workers.pop().kill()
    upgrade.pass_phase(old_web, new_web, *old_workers, *new_workers)
    # And the code is rolled back, on the schema that stays
    for program in (new_web, *new_workers):
        assert program.stop() == 0, program.log_tail()
    upgrade.pass_phase(old_web, *old_workers)
    # And goes forward to its end
    newest = upgrade.worker("newer")
    for program in (old_web, *old_workers):
        assert program.stop() == 0, program.log_tail()
    last_web = upgrade.enqueue("newer", "last")
    upgrade.pass_phase(last_web, newest)
    assert last_web.stop() == 0, last_web.log_tail()
    # Then every job that either has promised took effect once
    engine.settle(120)
    assert newest.stop() == 0, newest.log_tail()
    promised = upgrade.promised()
    engine.assert_each_ran_once(promised)
    return len(promised)


@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.redis
@pytest.mark.timeout(300 + 10 * PHASE)
def test_two_releases_lose_and_double_nothing_across_a_migration(
    unmigrated: Engine, older_release: Path
) -> None:
    jobs = upgrade_and_roll_back(unmigrated, older_release, PHASE)
    print(f"{jobs} jobs")
