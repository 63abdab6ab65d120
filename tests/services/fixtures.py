"""pytest fixtures: `pytest_plugins = ["tests.services.fixtures"]` in the root conftest.

Each server starts when the first test asks for it and stops with the session; pytest-xdist workers
have their own. Of Kafka they share one, where each test has topics and groups of its own: an idle
broker takes a twentieth of a processor. A server named by its environment variable is used instead.
These servers are shared: a test that stops or kills one makes its own (`with KafkaServer() as
kafka:`).
"""

import os
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from tests.services.environment import (
    KAFKA_VARIABLE,
    MARIADB_VARIABLE,
    MYSQL_VARIABLE,
    POSTGRES_VARIABLE,
    REDIS_VARIABLE,
    given,
)
from tests.services.errors import ServiceError, Unprovisionable
from tests.services.given import GivenServer
from tests.services.kafka import KafkaServer
from tests.services.mariadb import MariaDbServer
from tests.services.mysql import MySqlServer
from tests.services.postgres import PostgresServer
from tests.services.provisioning import provision
from tests.services.redis import RedisServer, ValkeyServer

WITHOUT_DISK = {"fsync": "off", "full_page_writes": "off"}
"""A server that is killed loses nothing by it, only a machine would."""


def require(
    *,
    kafka: bool = False,
    redis: bool = False,
    postgres: bool = False,
    browser: bool = False,
    pgbouncer: bool = False,
    mariadb: bool = False,
    mysql: bool = False,
    valkey: bool = False,
    network: bool = False,
    clients: Collection[str] = (),
) -> None:
    """Provision, or skip the test with the reason; with CI set, fail it.

    For tests that start servers of their own. A green CI run has met every server.
    """
    try:
        provision(
            kafka=kafka,
            redis=redis,
            postgres=postgres,
            browser=browser,
            pgbouncer=pgbouncer,
            mariadb=mariadb,
            mysql=mysql,
            valkey=valkey,
            network=network,
            clients=clients,
        )
    except Unprovisionable as error:
        if os.environ.get("CI", "").lower() in ("", "0", "false"):
            pytest.skip(str(error))
        raise


_shared_kafka: list[KafkaServer] = []
"""The broker that this process has started for those of its parallel run."""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start a broker for the processes of a parallel run, and tell each where it is."""
    if given(KAFKA_VARIABLE):
        return
    if not _shared_kafka:
        try:
            provision(redis=False, postgres=False)
        except ServiceError:
            return  # they will say what is missing, where it is needed
        _shared_kafka.append(KafkaServer())
        _shared_kafka[0].launch()
    node.workerinput[KAFKA_VARIABLE] = _shared_kafka[0].url


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready() -> None:
    """Wait for the broker while the processes collect their tests."""
    for server in _shared_kafka:
        server.wait_ready()


def pytest_unconfigure() -> None:
    while _shared_kafka:
        _shared_kafka.pop().close()


@pytest.fixture(scope="session")
def kafka_server(request: pytest.FixtureRequest) -> Iterator[KafkaServer | GivenServer]:
    shared = getattr(request.config, "workerinput", {}).get(KAFKA_VARIABLE)
    if url := given(KAFKA_VARIABLE) or shared:
        yield GivenServer(url)
        return
    require(kafka=True)
    with KafkaServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer | GivenServer]:
    if url := given(REDIS_VARIABLE):
        yield GivenServer(url)
        return
    require(redis=True)
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    require(valkey=True)
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer | GivenServer]:
    if url := given(POSTGRES_VARIABLE):
        yield GivenServer(url)
        return
    require(postgres=True)
    with PostgresServer(WITHOUT_DISK) as server:
        yield server


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariaDbServer | GivenServer]:
    if url := given(MARIADB_VARIABLE):
        yield GivenServer(url)
        return
    require(mariadb=True)
    with MariaDbServer() as server:
        yield server


@pytest.fixture(scope="session")
def mysql_server() -> Iterator[MySqlServer | GivenServer]:
    if url := given(MYSQL_VARIABLE):
        yield GivenServer(url)
        return
    require(mysql=True)
    with MySqlServer() as server:
        yield server
