"""PgBouncer in transaction mode between every process and PostgreSQL: promises 1 to 3 hold, and
what a lent session cannot do is told, not silently lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from kjo_django.exceptions import CoordinationError
from kjo_django.models import Worker as WorkerRow
from kjo_django.operations.rows import streamed
from kjo_django.runtime import get_coordination
from tests.acceptance.engine import ALIAS, Engine, Servers
from tests.acceptance.load import Load
from tests.acceptance.test_shutdown import let_go, start_job, started
from tests.ledger import jobs
from tests.ledger.models import Entry
from tests.services import PgBouncerServer
from tests.services.fixtures import require

pytestmark = [pytest.mark.timeout(120), pytest.mark.postgres]


@pytest.fixture(scope="module")
def pooler(postgres_server: Any) -> Iterator[PgBouncerServer]:
    require(pgbouncer=True)
    with PgBouncerServer(postgres_server.url) as server:
        yield server


@pytest.fixture
def engine(pooler: PgBouncerServer, database_url: str, tmp_path: Path) -> Iterator[Engine]:
    url = f"{pooler.through(database_url)}?application_name=tests"
    with Engine(Servers(url), tmp_path) as engine:
        yield engine


@pytest.mark.medium
def test_killed_behind_a_pooler(engine: Engine) -> None:
    """Its sessions are the pooler's, which rolls back what the dead one had begun."""
    with Load(rate=60) as load:
        for _ in range(2):
            # When worker after worker is killed under load
            worker = engine.worker("--concurrency", "4")
            before = engine.entries.count()
            engine.wait_until(lambda b=before: engine.entries.count() > b + 20, "Nothing ran")
            worker.kill()
        last = engine.worker("--concurrency", "4")
        engine.wait_until(lambda: len(load.expected) > 100, "Too few jobs")
    # Then each job has added exactly one entry
    engine.settle()
    assert last.stop() == 0, last.log_tail()
    engine.assert_each_ran_once(load.expected, unsure=load.unsure)
    assert "Traceback" not in last.log


def test_hundreds_at_once(engine: Engine) -> None:
    """COPY, and what is bound in arrays, need no session."""
    names = [f"job-{number}" for number in range(500)]
    jobs.write.enqueue_many({"job": name} for name in names)
    engine.drain()
    engine.assert_each_ran_once(names)


def test_a_frozen_worker_is_ended(engine: Engine, tmp_path: Path) -> None:
    """Decision 31: the session it holds bears its name, by way of the pooler."""
    engine.configure(PROCESSING_TTL=2)
    frozen = engine.ready_worker("--concurrency", "1")
    start_job(engine, frozen, tmp_path / "job")
    engine.freeze(frozen)
    other = engine.worker("--concurrency", "1")
    engine.wait_until(lambda: started(tmp_path / "job", other.pid), "Nobody took the job over")
    let_go(tmp_path / "job")
    engine.settle()
    frozen.thaw()
    assert [frozen.stop(), other.stop()] == [0, 0]
    engine.assert_each_ran_once(["long"])


# --- What a lent session cannot do ----------------------------------------------------------------


@pytest.fixture
def nameless(pooler: PgBouncerServer, database_url: str, tmp_path: Path) -> Iterator[Engine]:
    """As Django is without further settings: its connections have no application_name."""
    with Engine(Servers(pooler.through(database_url)), tmp_path) as engine:
        yield engine


def test_a_bystander_is_not_ended(nameless: Engine) -> None:
    """A session keeps the name of who had it last, for the next client without one."""
    # Given a worker that has worked and dies, and transactions on the sessions it had
    dead = nameless.ready_worker()
    jobs.write_slowly.enqueue_many({"job": f"job-{n}", "milliseconds": 50} for n in range(20))
    nameless.settle()
    assert "['application_name']" in dead.log
    dead.kill()
    with ExitStack() as stack:
        bystanders = [psycopg.connect(nameless.servers.database_url) for _ in range(12)]
        for connection in bystanders:
            stack.enter_context(connection).execute("SELECT 1")
        # When another worker has had all the time it takes to end those of the dead
        nameless.ready_worker()
        rows = WorkerRow.objects.using(ALIAS)
        end = rows.get(pid=dead.pid).heartbeat_at + timedelta(seconds=3)
        nameless.wait_until(
            lambda: rows.filter(heartbeat_at__gt=end).exists(), "It shows no sign of life"
        )
        # Then they are as they were
        for connection in bystanders:
            connection.execute("SELECT 1")


@pytest.mark.medium
def test_nobody_can_listen(engine: Engine, pooler: PgBouncerServer) -> None:
    # When one listens by way of the pooler
    with pytest.raises(CoordinationError, match="LISTEN_DATABASE"):
        get_coordination().listen(["calls"])
    # Then workers poll, and say why, once
    worker = engine.ready_worker()
    engine.wait_until(lambda: "LISTEN_DATABASE" in worker.log, "It does not say why")
    jobs.write.enqueue(job="polled")
    engine.settle()
    assert worker.stop() == 0, worker.log_tail()
    assert worker.log.count("LISTEN_DATABASE") == 1
    # And no call reaches a session whose next client would get it
    assert "got packet 'A'" not in pooler.log_since_start()


def test_a_way_around_to_listen(engine: Engine, database_url: str) -> None:
    # Given a worker that looks by itself once in ten minutes, and listens past the pooler
    engine.variables["DIRECT_DATABASE_URL"] = database_url
    backend = "kjo_django.coordination.database.DatabaseCoordination"
    engine.configure(
        POLL_INTERVAL=600,
        COORDINATION={"BACKEND": backend, "OPTIONS": {"LISTEN_DATABASE": "direct"}},
    )
    worker = engine.ready_worker()
    # When jobs are enqueued by way of the pooler
    for name in ("first", "second"):
        jobs.write.enqueue(job=name)
        engine.wait_until(
            lambda name=name: engine.entries.filter(job=name).exists(), "It was not called", 10
        )
    assert worker.stop() == 0, worker.log_tail()


@pytest.mark.medium
def test_rows_are_streamed_within_a_transaction(engine: Engine) -> None:
    Entry.objects.using(ALIAS).bulk_create(Entry(job=f"job-{number}") for number in range(300))
    with psycopg.connect(engine.servers.database_url) as other:
        rows = streamed(Entry.objects.using(ALIAS).order_by("pk"), chunk_size=100)
        first = next(rows)
        # Whoever comes between two fetches would have been given the session with the cursor.
        other.execute("SELECT 1")
        assert len({first.pk, *(row.pk for row in rows)}) == 300


def test_what_to_set_is_told(nameless: Engine, database_url: str) -> None:
    """By ``check --deploy``; nothing of it where Django connects directly."""
    checked = nameless.manage("check", "--deploy", "--tag", "kjo")
    assert checked.wait() == 0, checked.log_tail()
    for setting in (
        "DATABASES['default']['OPTIONS']['application_name']",
        "DATABASES['default']['DISABLE_SERVER_SIDE_CURSORS']",
        "KJO['COORDINATION']['OPTIONS']['LISTEN_DATABASE']",
    ):
        assert setting in checked.log, checked.log_tail()
    nameless.variables["DATABASE_URL"] = database_url
    directly = nameless.manage("check", "--deploy", "--tag", "kjo")
    assert directly.wait() == 0, directly.log_tail()
    assert "W013" not in directly.log
