"""Queues with databases of their own: two PostgreSQL servers, Kafka, one ``kjo_consume``."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, InterfaceError, connections, transaction

from kjo_django import chain
from kjo_django.exceptions import KjoError
from kjo_django.models import Job, Workflow
from kjo_django.models import Worker as WorkerRow
from kjo_django.operations.maintenance import topics
from kjo_django.states import OPEN
from tests.acceptance.engine import ALIAS, Engine, Servers
from tests.databases import migrate
from tests.ledger import jobs
from tests.ledger.models import Entry
from tests.services import PostgresServer
from tests.services.fixtures import WITHOUT_DISK, require
from tests.settings import database as settings_of

pytestmark = [pytest.mark.timeout(180), pytest.mark.postgres, pytest.mark.kafka]

JOBS2 = "jobs2"
QUEUES = {ALIAS: "ledger", JOBS2: "remote"}
MANY = 100
PACE = 0.02


class EngineOfTwo(Engine):
    """An engine whose queue ``remote`` has its jobs in another database."""

    def _kjo(self) -> dict[str, Any]:
        kjo = super()._kjo()
        own = {"topic": f"remote-{self._suffix}", "consumer_group": self.group}
        kjo["QUEUES"]["remote"] = {**own, "database": JOBS2}
        return kjo


@pytest.fixture
def second(django_db_setup: None, django_db_blocker: Any) -> Iterator[PostgresServer]:
    """A PostgreSQL server of the test's own, with the tables of the app."""
    require(postgres=True)
    with PostgresServer(WITHOUT_DISK) as server:
        settings = settings_of(server.url)
        with django_db_blocker.unblock():
            migrate(settings)
            connections.settings[JOBS2] = connections.configure_settings(
                {"default": {}, JOBS2: settings}
            )[JOBS2]
            yield server
            connections[JOBS2].close()
            del connections[JOBS2]
            del connections.settings[JOBS2]


@pytest.fixture
def engine(
    second: PostgresServer, database_url: str, kafka_server: Any, tmp_path: Path
) -> Iterator[Engine]:
    servers = Servers(database_url, kafka_server.bootstrap_servers)
    with EngineOfTwo(servers, tmp_path) as engine:
        engine.variables["JOBS2_DATABASE_URL"] = second.url
        topics.create(list(QUEUES.values()))
        yield engine


class Load:
    """A web application that enqueues for one queue, each job in a transaction on its database."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.expected: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"load-{alias}")

    def _run(self) -> None:
        try:
            while not self._stopping.wait(PACE):
                self._enqueue(f"{self.alias}-{len(self.expected)}")
        finally:
            connections.close_all()

    def _enqueue(self, name: str) -> None:
        try:
            with transaction.atomic(using=self.alias):
                options = {"id": name, "max_attempts": MANY, "queue": QUEUES[self.alias]}
                jobs.write.using(**options).enqueue(job=name)
        except (DatabaseError, InterfaceError, KjoError):
            connections[self.alias].close()  # it is enqueued again, under its id
        else:
            self.expected.add(name)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()


def entries(alias: str) -> Counter[str]:
    return Counter(Entry.objects.using(alias).values_list("job", flat=True))


def goes_on(engine: Engine, alias: str, count: int = 20) -> None:
    """Wait until so many more jobs have run."""
    before = len(entries(alias))
    engine.wait_until(lambda: len(entries(alias)) >= before + count, f"Nothing runs in {alias}")


def pid_of_worker(engine: Engine, alias: str) -> int:
    rows = WorkerRow.objects.using(alias).filter(state="running").order_by("-started_at")
    found = engine.wait_until(lambda: rows.first(), f"No worker is in {alias}")
    return int(found.pid)


def has_settled(alias: str) -> bool:
    connections[alias].close()
    return not Job.objects.using(alias).filter(state__in=OPEN).exists()


@contextmanager
def round_trips(alias: str) -> Iterator[list[str]]:
    """Collect the statements that are sent to a database, a text for each round trip."""
    sent: list[str] = []

    def note(execute: Any, sql: str, *arguments: Any) -> Any:
        sent.append(sql)
        return execute(sql, *arguments)

    with connections[alias].execute_wrapper(note):
        yield sent


def test_a_workflow_of_the_second_database_is_stored_there_in_one_round_trip_and_ends(
    engine: Engine,
) -> None:
    # Given a workflow whose steps have their queue in the second database
    step = jobs.write.using(queue="remote").step
    chain(step(job=f"{JOBS2}-warm")).enqueue()
    # When it is enqueued
    with round_trips(JOBS2) as sent:
        handle = chain(*(step(job=f"{JOBS2}-{number}") for number in range(3))).enqueue()
    # Then all of its rows and the commit are one text
    (stored,) = (sql for sql in sent if "INSERT INTO kjo_workflow " in sql.replace('"', ""))
    assert stored.endswith("; COMMIT")
    assert sum("INSERT" in sql for sql in sent) == 1
    # And they are in the second database only
    assert Workflow.objects.using(JOBS2).count() == 2
    assert not Workflow.objects.using(ALIAS).exists()
    # And it runs to its end there
    program = engine.manage("kjo_consume", "ledger", "remote", "--status-interval", "0")
    engine.wait_until(lambda: handle.status == "completed", "The workflow does not end")
    engine.wait_until(lambda: has_settled(JOBS2), "Jobs are left")
    assert sorted(entries(JOBS2)) == [
        *(f"{JOBS2}-{number}" for number in range(3)),
        f"{JOBS2}-warm",
    ]
    assert not entries(ALIAS)
    assert program.stop() == 0, program.log_tail()


def test_each_database_loses_and_doubles_nothing_and_does_without_the_other(
    engine: Engine, second: PostgresServer
) -> None:
    # Given one command that serves the queues of both databases, under load
    program = engine.manage("kjo_consume", "ledger", "remote", "--status-interval", "0")
    with Load(ALIAS) as first_load, Load(JOBS2) as second_load:
        for alias in QUEUES:
            goes_on(engine, alias)
        # When the workers of both are killed
        for alias in QUEUES:
            os.kill(pid_of_worker(engine, alias), signal.SIGKILL)
        # Then others take their places
        for alias in QUEUES:
            goes_on(engine, alias)
        # When the server of the second is killed
        second.kill()
        connections[JOBS2].close()
        # Then the jobs of the first run
        goes_on(engine, ALIAS)
        # And those of the second run when it is back
        second.start()
        goes_on(engine, JOBS2)
    for alias in QUEUES:
        engine.wait_until(lambda alias=alias: has_settled(alias), f"Jobs are left in {alias}")
    # And what was committed took effect once, in its database only
    for load in (first_load, second_load):
        found = entries(load.alias)
        lost = sorted(load.expected - found.keys())
        doubled = [name for name, count in found.items() if count > 1]
        strange = [name for name in found if not name.startswith(load.alias)]
        assert (lost, doubled, strange) == ([], [], []), load.alias
    assert program.stop() == 0, program.log_tail()
