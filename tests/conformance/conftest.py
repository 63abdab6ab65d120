"""Databases for the suites: SQLite, PostgreSQL, MariaDB and MySQL, with real transactions."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from tests.conformance.databases import (
    MARIADB,
    MYSQL,
    POSTGRES,
    SQLITE,
    added_database,
    empty_tables,
    sqlite_settings,
)
from tests.databases import copied_database
from tests.settings import database as settings_of


@pytest.fixture(scope="session")
def _sqlite_database(
    sqlite_template: Path, django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    path = shutil.copy(sqlite_template, tmp_path_factory.mktemp("kjo") / "kjo.sqlite3")
    with django_db_blocker.unblock(), added_database(SQLITE, sqlite_settings(path)) as alias:
        yield alias


@pytest.fixture(scope="session")
def _postgres_database(
    postgres_template: str, django_db_blocker: Any, postgres_server: Any
) -> Iterator[str]:
    with (
        django_db_blocker.unblock(),
        copied_database(postgres_server, postgres_template) as url,
        added_database(POSTGRES, settings_of(url)) as alias,
    ):
        yield alias


@pytest.fixture(scope="session")
def _mariadb_database(mariadb_url: str, django_db_blocker: Any) -> Iterator[str]:
    with (
        django_db_blocker.unblock(),
        added_database(MARIADB, settings_of(mariadb_url)) as alias,
    ):
        yield alias


@pytest.fixture(scope="session")
def _mysql_database(mysql_url: str, django_db_blocker: Any) -> Iterator[str]:
    with django_db_blocker.unblock(), added_database(MYSQL, settings_of(mysql_url)) as alias:
        yield alias


def _use(alias: str, blocker: Any) -> Iterator[str]:
    with blocker.unblock():
        empty_tables(alias)
        yield alias
        connections[alias].close()


@pytest.fixture
def sqlite_alias(_sqlite_database: str, django_db_blocker: Any) -> Iterator[str]:
    """An empty SQLite file with Django's default settings."""
    yield from _use(_sqlite_database, django_db_blocker)


@pytest.fixture
def postgres_alias(_postgres_database: str, django_db_blocker: Any) -> Iterator[str]:
    """An empty PostgreSQL database."""
    yield from _use(_postgres_database, django_db_blocker)


@pytest.fixture
def mariadb_alias(_mariadb_database: str, django_db_blocker: Any) -> Iterator[str]:
    """An empty MariaDB database."""
    yield from _use(_mariadb_database, django_db_blocker)


@pytest.fixture
def mysql_alias(_mysql_database: str, django_db_blocker: Any) -> Iterator[str]:
    """An empty MySQL database."""
    yield from _use(_mysql_database, django_db_blocker)


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.postgres),
        pytest.param("mariadb", marks=pytest.mark.mariadb),
        pytest.param("mysql", marks=pytest.mark.mysql),
    ],
)
def alias(request: pytest.FixtureRequest) -> str:
    """Each database that the transport can use."""
    return request.getfixturevalue(f"{request.param}_alias")
