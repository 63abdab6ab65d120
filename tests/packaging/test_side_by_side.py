"""Workers and web processes of two releases on one database, across the migrations between them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db.models import F, Max

from kjo_django.models import DeadLetter, Job
from kjo_django.models import Worker as WorkerRow
from kjo_django.states import OPEN
from tests.databases import led_to
from tests.ledger.models import Entry
from tests.settings import database as settings_of
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).resolve().parents[2]
OLDEST = "kjo_django/migrations/0006_workflows.py"
"""The old release is the last state without this file."""
SECONDS = float(os.environ.get("KJO_UPGRADE_SECONDS", "600"))
"""How long the releases are under load; the new schema comes after a quarter of it."""
RATE = 10.0
"""Jobs a second of each web process."""
WEB = """
import itertools, sys, time, django
django.setup()
from tests.ledger.jobs import write, write_attempt, write_slowly
name, rate, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
begun = time.monotonic()
for number in itertools.count():
    due = number / rate
    if due >= seconds:
        break
    time.sleep(max(0.0, begun + due - time.monotonic()))
    if number % 20 == 0:
        write_attempt.enqueue(job=f"{name} {number}", fail_times=1)
    elif number % 5 == 0:
        write_slowly.enqueue(job=f"{name} {number}", milliseconds=200)
    else:
        write.enqueue(job=f"{name} {number}")
print(number)
"""
"""Enqueues jobs that are quick, that are running when a worker is killed, and that are tried twice;
prints how many."""


class Release:
    """The processes of one state of this repository, on one database."""

    def __init__(self, name: str, tree: Path, environment: dict[str, str], log: Path) -> None:
        settings = Path(__file__).parent / "side_by_side.py"
        (tree / "tests" / "packaging").mkdir(exist_ok=True)
        if tree != ROOT:
            shutil.copy(settings, tree / "tests" / "packaging")
        names = {"DJANGO_SETTINGS_MODULE": "tests.packaging.side_by_side", "PYTHONPATH": str(tree)}
        self.name, self.tree, self.environment = name, tree, {**environment, **names}
        self.log = log
        self.worker: subprocess.Popen[bytes] | None = None
        self.pids: list[int] = []
        self.ends: Counter[str] = Counter()

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, *arguments]
        with self.log.open("ab") as log:
            options = {"stdout": log, "stderr": log, **options}
            return subprocess.Popen(command, cwd=self.tree, env=self.environment, **options)

    def manage(self, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start("-m", "django", *arguments)

    def enqueue(self, seconds: float) -> subprocess.Popen[bytes]:
        """Start a web process that enqueues for so long."""
        arguments = ("-c", WEB, self.name, str(RATE), str(seconds))
        return self.start(*arguments, stdout=subprocess.PIPE)

    def consume(self) -> None:
        """Start the release's worker."""
        options = ("--concurrency", "2", "--status-interval", "0")
        self.worker = self.manage("kjo_consume", "ledger", *options)
        self.pids.append(self.worker.pid)

    def strike(self, chance: random.Random) -> None:
        """Kill the worker, or stop it as a deployment does, and start another one."""
        worker = self.worker
        assert worker is not None
        assert worker.poll() is None, f"A worker of the {self.name} release ended by itself"
        if chance.random() < 0.7:
            worker.kill()
            worker.wait()
            self.ends["killed"] += 1
        else:
            self.stop()
        self.consume()

    def stop(self) -> None:
        """Stop the worker in order."""
        assert self.worker is not None
        self.worker.terminate()
        code = self.worker.wait(PATIENCE)
        # A process that has not come to be a worker yet ends by the signal itself.
        assert code in (0, -signal.SIGTERM), (
            f"A worker of the {self.name} release ended with {code}"
        )
        self.ends["stopped"] += 1

    def end(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker.wait()


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
    old = Release("old", tree, environment, tmp_path / "old.log")
    new = Release("new", ROOT, environment, tmp_path / "new.log")
    yield old, new
    old.end()
    new.end()
    postgres_server.dropdb(name)


@pytest.mark.long
@pytest.mark.postgres
@pytest.mark.timeout(SECONDS + 900)
def test_old_and_new_workers_side_by_side_across_the_migrations(
    releases: tuple[Release, Release],
    django_db_setup: None,
    django_db_blocker: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seed = int(os.environ.get("KJO_UPGRADE_SEED") or time.time_ns() % 1_000_000)
    chance, (old, new) = random.Random(seed), releases
    # Given an old release at work
    assert old.manage("migrate", "--verbosity", "0").wait() == 0
    old.consume()
    webs = [old.enqueue(SECONDS)]
    begun, migration, at_work = time.monotonic(), None, [old]
    while (passed := time.monotonic() - begun) < SECONDS:  # timed loop: a load of so many seconds
        time.sleep(chance.uniform(3, 12))  # sleep: the moment of a crash
        # When the schema becomes the new one meanwhile, and then the new release is at work too
        if migration is None and passed > SECONDS / 4:
            migration = new.manage("migrate", "--verbosity", "0")
        if migration is not None and migration.poll() is not None and at_work == [old]:
            assert migration.returncode == 0, new.log.read_text()[-3000:]
            new.consume()
            webs.append(new.enqueue(SECONDS - (time.monotonic() - begun)))
            at_work = [old, new]
            continue  # it has its time to begin
        # When the workers of both are killed or stopped, and others take their places
        chance.choice(at_work).strike(chance)
    counts = [int(web.communicate()[0]) for web in webs]
    assert [web.returncode for web in webs] == [0, 0]
    with django_db_blocker.unblock(), led_to(settings_of(new.environment["SIDE_BY_SIDE"])):
        left = Job.objects.filter(state__in=OPEN)
        wait_until(
            lambda: not left.all().exists(),
            "every job ends",
            lambda: left.all().values().first(),
            patience=180,
        )
        for release in releases:
            release.stop()
        found = Counter(Entry.objects.values_list("job", flat=True))
        repeated = Job.objects.filter(attempts__gt=1).count()
        letters = list(DeadLetter.objects.values_list("handler", "reason", "error"))
        longest = Job.objects.aggregate(time=Max(F("finished_at") - F("created_at")))["time"]
        settled = {
            release.name: sum(
                WorkerRow.objects.filter(pid__in=release.pids).values_list(
                    "processed_count", flat=True
                )
            )
            for release in releases
        }
    enqueued = {
        f"{release.name} {number}"
        for release, count in zip(releases, counts, strict=True)
        for number in range(count)
    }
    lost, doubled = enqueued - found.keys(), {name for name, n in found.items() if n > 1}
    with capsys.disabled():
        print(
            f"\nSeed {seed}, {SECONDS:g} s: enqueued by old and new {counts}, "
            f"workers {[(each.name, dict(each.ends)) for each in releases]}, settled at least "
            f"{settled}, {repeated} jobs in more than one attempt, the longest took {longest}; "
            f"lost {len(lost)}, doubled {len(doubled)}"
        )
    # Then nothing is lost, nothing took effect twice, and both have had their part in it
    assert (lost, doubled, letters) == (set(), set(), [])
    assert found.keys() == enqueued
    assert all(count > 0 for count in settled.values())
    assert all(release.ends["killed"] for release in releases)
