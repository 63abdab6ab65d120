"""Servers restart under load (issue 2, item 4): nothing is lost, the worker lives through it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.db import connections

from tests.acceptance.engine import ALIAS, Engine, Servers
from tests.acceptance.load import Load
from tests.acceptance.order import assert_order
from tests.databases import copied_database, migrate
from tests.ledger import jobs
from tests.services import KafkaServer, PostgresServer, RedisServer
from tests.services.fixtures import require
from tests.settings import database as settings_of

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.kafka,
    pytest.mark.redis,
    pytest.mark.postgres,
]


class Own(NamedTuple):
    """Servers of this module's own, to be restarted at will."""

    kafka: KafkaServer
    redis: RedisServer
    postgres: PostgresServer


@pytest.fixture(scope="module")
def own() -> Iterator[Own]:
    require(kafka=True, redis=True, postgres=True)
    servers = Own(KafkaServer(), RedisServer(), PostgresServer())
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        for server in servers:
            stack.callback(server.close)
        list(pool.map(lambda server: server.start(), servers))
        yield servers


@pytest.fixture(scope="module")
def template(own: Own, django_db_setup: None, django_db_blocker: Any) -> str:
    with django_db_blocker.unblock():
        migrate(settings_of(own.postgres.createdb("kjo_template")))
    return "kjo_template"


@pytest.fixture
def engine(own: Own, template: str, tmp_path: Path, django_db_blocker: Any) -> Iterator[Engine]:
    with (
        django_db_blocker.unblock(),
        copied_database(own.postgres, template) as url,
        Engine(Servers(url, own.kafka.bootstrap_servers, own.redis.url), tmp_path) as engine,
    ):
        yield engine


@pytest.mark.promise("job-is-run")
@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
@pytest.mark.parametrize("name", Own._fields)
def test_a_server_restarts_under_load(name: str, kill: bool, own: Own, engine: Engine) -> None:
    # Given a worker under load
    server = getattr(own, name)
    worker = engine.worker("--concurrency", "4")
    with Load(rate=60) as load:
        engine.wait_until(lambda: engine.entries.count() > 30, "The worker never worked")
        # When the server is killed, or stopped in order, and comes back
        server.restart(kill=kill)
        back = len(load.expected)
        engine.wait_until(lambda: len(load.expected) > back + 20, "No more enqueues")
        newest = sorted(load.expected, key=lambda job: int(job.split("/")[0][4:]))[-1]
        # Then what is enqueued afterwards runs
        engine.wait_until(
            lambda: engine.entries.filter(job=newest).exists(),
            f"Nothing runs since {name} is back",
        )
    engine.settle()
    # And it was the same process all the time, and each job has added exactly one entry
    assert worker.stop() == 0, worker.log_tail()
    engine.assert_each_ran_once(load.expected, unsure=load.unsure)


@pytest.mark.parametrize("name", Own._fields)
def test_a_worker_starts_while_a_server_is_down(name: str, own: Own, engine: Engine) -> None:
    """Whoever boots a whole machine boots in any order."""
    jobs.write.enqueue(job="early")
    server = getattr(own, name)
    server.stop()
    try:
        worker = engine.worker()
        engine.wait_until(lambda: "ERROR" in worker.log or "WARN" in worker.log, "It says nothing")
    finally:
        server.start()
    connections[ALIAS].close()  # this process' own, which the server has ended
    jobs.write.enqueue(job="late")
    engine.settle()
    assert worker.stop() == 0, worker.log_tail()
    engine.assert_each_ran_once(["early", "late"])


def test_keys_keep_their_order_through_a_long_outage(own: Own, engine: Engine) -> None:
    """Longer than a record may wait for its delivery: what was refused still goes out first."""
    # Given a broker that is away for longer than the producer tries
    names = [f"job-{number:03}" for number in range(60)]

    def enqueue(some: list[str]) -> None:
        jobs.write_keyed.enqueue_many({"job": name, "key": str(int(name[4:]) % 5)} for name in some)

    engine.producer_options["delivery.timeout.ms"] = 1500
    engine.configure()
    worker = engine.ready_worker()
    own.kafka.stop()
    try:
        enqueue(names[:30])
        engine.wait_until(lambda: "TIMED_OUT" in worker.log, "The relay noticed nothing")
    finally:
        own.kafka.start()
    # When more is enqueued as soon as it is back
    enqueue(names[30:])
    engine.settle()
    # Then each key kept its order
    assert worker.stop() == 0, worker.log_tail()
    engine.assert_each_ran_once(names)
    assert_order(engine)
