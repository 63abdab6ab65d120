"""Engines as fixtures, each test with an empty one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from kjo_django import registry
from kjo_django.enqueue.definition import JobDefinition
from tests.acceptance.engine import ALIAS, Engine, Servers
from tests.acceptance.items import ItemEngine
from tests.databases import EMPTY, copied_database, in_place_of_sqlite


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """Show the logs of the processes of a test that failed."""
    report = (yield).get_result()
    if report.failed and call.when == "call":
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Engine):
                report.sections.append(("processes of the test", value.report()))


@pytest.fixture
def database_url(
    postgres_server: Any, postgres_template: str, django_db_blocker: Any
) -> Iterator[str]:
    """A migrated PostgreSQL database of the test's own."""
    with django_db_blocker.unblock(), copied_database(postgres_server, postgres_template) as url:
        yield url


# --- Engines --------------------------------------------------------------------------------------


@pytest.fixture
def embedded(
    request: pytest.FixtureRequest, sqlite_template: Path, tmp_path: Path, django_db_blocker: Any
) -> Iterator[Engine]:
    """The default: no server, everything in a SQLite file; or see ``--engine``."""
    if engine := in_place_of_sqlite(request.config):
        yield request.getfixturevalue(engine)
        return
    path = tmp_path / "kjo.sqlite3"
    shutil.copyfile(sqlite_template, path)
    with django_db_blocker.unblock(), Engine(Servers(f"sqlite:///{path}"), tmp_path) as engine:
        yield engine


@pytest.fixture
def postgres(database_url: str, tmp_path: Path) -> Iterator[Engine]:
    """No server but the database: transport and coordination in PostgreSQL."""
    with Engine(Servers(database_url), tmp_path) as engine:
        yield engine


@pytest.fixture
def mariadb(mariadb_url: str, tmp_path: Path, django_db_blocker: Any) -> Iterator[Engine]:
    """No server but the database: transport and coordination in MariaDB."""
    with django_db_blocker.unblock(), emptied_engine("mariadb", mariadb_url, tmp_path) as engine:
        yield engine


@pytest.fixture
def mysql(mysql_url: str, tmp_path: Path, django_db_blocker: Any) -> Iterator[Engine]:
    """No server but the database: transport and coordination in MySQL."""
    with django_db_blocker.unblock(), emptied_engine("mysql", mysql_url, tmp_path) as engine:
        yield engine


@contextmanager
def emptied_engine(name: str, url: str, logs: Path) -> Iterator[Engine]:
    with Engine(Servers(url), logs) as engine:
        with connections[ALIAS].cursor() as cursor:
            EMPTY[name](cursor)
        yield engine


@pytest.fixture
def real_servers(kafka_server: Any, redis_server: Any, database_url: str) -> Servers:
    return Servers(database_url, kafka_server.bootstrap_servers, redis_server.url)


@pytest.fixture
def real(real_servers: Servers, tmp_path: Path) -> Iterator[Engine]:
    """The full engine: Kafka, Redis and PostgreSQL."""
    with Engine(real_servers, tmp_path) as engine:
        yield engine


REAL = pytest.param("real", marks=[pytest.mark.kafka, pytest.mark.redis, pytest.mark.postgres])
POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres)
MARIADB = pytest.param("mariadb", marks=pytest.mark.mariadb)
MYSQL = pytest.param("mysql", marks=pytest.mark.mysql)


SELDOM_ON_MARIADB = pytest.mark.parametrize(
    "engine",
    [
        "embedded",
        pytest.param("mariadb", marks=[pytest.mark.mariadb, pytest.mark.long]),
        MYSQL,
        REAL,
    ],
    indirect=True,
)
"""For tests of `engine` that take long: with ``-m long`` they run on MariaDB, and with ``-m mysql``
on MySQL."""


@pytest.fixture(params=["embedded", MARIADB, MYSQL, REAL])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Both ends of the range, MariaDB and MySQL, one after the other."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["embedded", POSTGRES, MARIADB, MYSQL, REAL])
def any_engine(request: pytest.FixtureRequest) -> Engine:
    """Every combination the settings offer."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def items_engine(real_servers: Servers, tmp_path: Path) -> Iterator[ItemEngine]:
    """The full engine, with the queue of `tests.items`."""
    with ItemEngine(real_servers, tmp_path) as engine:
        yield engine


@pytest.fixture
def limited() -> Iterator[Any]:
    """The module of the handlers with limits. This process plays a web application: it asks for no
    limit."""
    with registry.isolated():
        from tests.ledger import limited

        for declared in vars(limited).values():
            if isinstance(declared, JobDefinition):
                registry.register(declared.handler)
        registry.limited.clear()
        yield limited
