"""Databases with real transactions, in which threads and broken connections behave as in life.

Under these fixtures the alias ``default`` itself leads to another database for the length of one
test: product code, routers and ``transaction.atomic()`` then all mean it, in every thread.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import InterfaceError, OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import load_backend

from kjo_django.runtime import close_backends
from kjo_django.transports.database.transport import forget_groups
from tests.settings import database as settings_of

DEFAULT = "default"
OPTION = "--engine"
ELSEWHERE = ("postgres", "mariadb", "mysql", "kafka")
"""Marks of tests that name their servers themselves."""


KEPT = "'^(django_(migrations|content_type)|auth_permission)(_id_seq)?$'"
"""Tables whose rows migrations write, and their sequences: not emptied between tests."""


def _empty_postgres(cursor: Any) -> None:
    """Leave no row but those that migrations write, and let ids begin anew."""
    ours = f"!~ {KEPT} AND relnamespace = current_schema()::regnamespace"
    cursor.execute(
        "SELECT relname, pg_table_size(oid) > 262144 FROM pg_class"
        f" WHERE relkind = 'r' AND relname {ours}"
    )
    tables = cursor.fetchall()
    # Truncating makes a table's files anew, a thousand times the work: only where it has grown.
    for name in (name for name, has_grown in tables if has_grown):
        cursor.execute(f'TRUNCATE "{name}" CASCADE')
    cursor.execute("; ".join(f'DELETE FROM "{name}"' for name, _ in tables))
    cursor.execute(
        "SELECT setval(seqrelid::regclass, seqstart, false)"
        f" FROM pg_sequence JOIN pg_class ON pg_class.oid = seqrelid WHERE relname {ours}"
    )


def _empty_mariadb(cursor: Any) -> None:
    """Leave no row but those that migrations write, and let ids begin anew."""
    cursor.execute(
        "SELECT table_name, auto_increment FROM information_schema.tables"
        f" WHERE table_schema = DATABASE() AND table_name NOT REGEXP {KEPT}"
    )
    tables = cursor.fetchall()
    cursor.execute("SET foreign_key_checks = 0")
    for name, number in tables:
        cursor.execute(f"DELETE FROM `{name}`")
        if (number or 1) > 1:
            cursor.execute(f"ALTER TABLE `{name}` AUTO_INCREMENT = 1")
    cursor.execute("SET foreign_key_checks = 1")


EMPTY: dict[str, Callable[[Any], None]] = {
    "postgres": _empty_postgres,
    "mariadb": _empty_mariadb,
    "mysql": _empty_mariadb,
}
"""The databases that can take the place of SQLite, and how one is emptied through a cursor."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION,
        choices=[*EMPTY],
        help="run here what runs on SQLite; leave out tests that name another server",
    )


def in_place_of_sqlite(config: pytest.Config) -> str | None:
    """Return which database takes the place of SQLite in this run.

    Its name is the fixture of a test's database, and its server's with ``_server`` behind it.
    """
    return config.getoption(OPTION)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    engine, expression = in_place_of_sqlite(config), config.option.markexpr
    left_out = {
        item
        for item in items
        if _names_mysql_unasked(item, expression) or (engine and _names(item))
    }
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _names(item: pytest.Item) -> bool:
    """Return whether a test names its servers itself."""
    return any(map(item.get_closest_marker, ELSEWHERE)) or "world" in _fixtures_of(item)


def _names_mysql_unasked(item: pytest.Item, expression: str) -> bool:
    """Return whether a test is on MySQL, which comes from a suite that changes every day, while
    ``-m`` does not name that; of one that is long it must name that, too."""
    return bool(item.get_closest_marker("mysql")) and any(
        name not in expression for name in ("mysql", "long") if item.get_closest_marker(name)
    )


def _fixtures_of(item: pytest.Item) -> list[str]:
    """Return the names of a test's fixtures; the worlds of the fault harness name their engines."""
    return getattr(item, "fixturenames", [])


@contextmanager
def led_to(settings: dict[str, Any]) -> Iterator[None]:
    """Let ``default`` mean the database of these settings."""
    configured = connections.configure_settings({DEFAULT: settings})[DEFAULT]
    before, usual = connections[DEFAULT], connections.settings[DEFAULT]
    connections.settings[DEFAULT] = configured
    del connections[DEFAULT]
    close_backends()
    forget_groups()
    try:
        yield
    finally:
        close_backends()
        forget_groups()
        connections[DEFAULT].close()
        connections.settings[DEFAULT] = usual
        connections[DEFAULT] = before


def sqlite_settings(path: Path) -> dict[str, Any]:
    # What these tests lose in a power cut, nobody misses.
    options = {"timeout": 20, "init_command": "PRAGMA synchronous=OFF"}
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path), "OPTIONS": options}


def migrate(settings: dict[str, Any]) -> None:
    """Create every table of the test settings."""
    with led_to(settings):
        call_command("migrate", verbosity=0)


@pytest.fixture(scope="session")
def sqlite_template(
    django_db_setup: None, django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A migrated file to copy."""
    path = tmp_path_factory.mktemp("databases") / "template.sqlite3"
    with django_db_blocker.unblock():
        migrate(sqlite_settings(path))
    return path


@pytest.fixture(scope="session")
def postgres_template(
    django_db_setup: None, django_db_blocker: Any, postgres_server: Any
) -> Iterator[str]:
    """The name of a migrated database to make others of: nobody is connected to it."""
    # A name of its own: the processes of a test run may share the server.
    name = f"kjo_template_{uuid.uuid4().hex[:12]}"
    with django_db_blocker.unblock():
        migrate(settings_of(postgres_server.createdb(name)))
    yield name
    postgres_server.dropdb(name)


@contextmanager
def copied_database(server: Any, template: str) -> Iterator[str]:
    """Yield the URL of a copy, which is dropped afterwards."""
    name = f"kjo_{uuid.uuid4().hex[:12]}"
    try:
        url = server.createdb(name, template)
        yield url
        forget(url)
    finally:
        server.dropdb(name)


@pytest.fixture(scope="session")
def postgres_url(postgres_server: Any, postgres_template: str) -> Iterator[str]:
    """A migrated database for one test after the other."""
    with copied_database(postgres_server, postgres_template) as url:
        yield url


@contextmanager
def migrated_database(server: Any, blocker: Any) -> Iterator[str]:
    """Yield the URL of a database for one test after the other, of a server that copies none."""
    name = f"kjo_{uuid.uuid4().hex[:12]}"
    url = server.createdb(name)
    with blocker.unblock():
        migrate(settings_of(url))
    yield url
    forget(url)
    server.dropdb(name)


@pytest.fixture(scope="session")
def mariadb_url(
    django_db_setup: None, django_db_blocker: Any, mariadb_server: Any
) -> Iterator[str]:
    """A migrated database of MariaDB's."""
    with migrated_database(mariadb_server, django_db_blocker) as url:
        yield url


@pytest.fixture(scope="session")
def mysql_url(django_db_setup: None, django_db_blocker: Any, mysql_server: Any) -> Iterator[str]:
    """A migrated database of MySQL's."""
    with migrated_database(mysql_server, django_db_blocker) as url:
        yield url


def engine_of(connection: Any) -> str | None:
    """Return which of `EMPTY`'s databases a connection leads to; none for SQLite."""
    if connection.vendor == "mysql":
        return "mariadb" if connection.mysql_is_mariadb else "mysql"
    return "postgres" if connection.vendor == "postgresql" else None


@pytest.fixture
def sqlite_file(
    request: pytest.FixtureRequest, sqlite_template: Path, django_db_blocker: Any, tmp_path: Path
) -> Iterator[Path]:
    """``default`` is a fresh SQLite file; its path. With ``--engine``: that database."""
    path = tmp_path / "db.sqlite3"
    if engine := in_place_of_sqlite(request.config):
        request.getfixturevalue(engine)
        yield path
        return
    shutil.copyfile(sqlite_template, path)
    with django_db_blocker.unblock(), led_to(sqlite_settings(path)):
        yield path


@contextmanager
def emptied(engine: str, url: str) -> Iterator[None]:
    """Let ``default`` mean this database, without the rows of earlier tests."""
    try:
        empty(engine, url)
    except (InterfaceError, OperationalError):  # a test has ended all sessions of the server
        forget(url)
        empty(engine, url)
    with led_to(settings_of(url)):
        # What is asked in each new session of a worker's process is not counted by any test.
        connections[DEFAULT].ensure_connection()
        yield


_emptying: dict[str, BaseDatabaseWrapper] = {}


def empty(engine: str, url: str) -> None:
    """Empty a database through a session that is kept for that: in a new one PostgreSQL reads of
    each table what it is, which takes most of the time."""
    if url not in _emptying:
        settings = connections.configure_settings({DEFAULT: settings_of(url)})[DEFAULT]
        backend: Any = load_backend(settings["ENGINE"])
        _emptying[url] = backend.DatabaseWrapper(settings, DEFAULT)
    with _emptying[url].cursor() as cursor:
        EMPTY[engine](cursor)


def forget(url: str) -> None:
    """Close the session in which a database is emptied."""
    if connection := _emptying.pop(url, None):
        connection.close()


@pytest.fixture
def postgres(postgres_url: str, django_db_blocker: Any) -> Iterator[None]:
    """``default`` is an empty PostgreSQL database."""
    with django_db_blocker.unblock(), emptied("postgres", postgres_url):
        yield


@pytest.fixture
def mariadb(mariadb_url: str, django_db_blocker: Any) -> Iterator[None]:
    """``default`` is an empty MariaDB database."""
    with django_db_blocker.unblock(), emptied("mariadb", mariadb_url):
        yield


@pytest.fixture
def mysql(mysql_url: str, django_db_blocker: Any) -> Iterator[None]:
    """``default`` is an empty MySQL database."""
    with django_db_blocker.unblock(), emptied("mysql", mysql_url):
        yield


@pytest.fixture
def _database(request: pytest.FixtureRequest) -> None:
    """The database a test names, as its parameter or by the fixture of several; a file of SQLite's
    if it names none."""
    named = (name for name in ("real_database", "innodb") if name in request.fixturenames)
    request.getfixturevalue(getattr(request, "param", next(named, "sqlite_file")))


SQLITE = pytest.param("sqlite_file", id="sqlite")
POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres, id="postgres")
MARIADB = pytest.param("mariadb", marks=pytest.mark.mariadb, id="mariadb")
MYSQL = pytest.param("mysql", marks=pytest.mark.mysql, id="mysql")
OF_VENDOR = {"sqlite": [SQLITE], "postgresql": [POSTGRES], "mysql": [MARIADB, MYSQL]}


def every_way(table: dict[str, dict[str, Any]], *names: str) -> pytest.MarkDecorator:
    """Run a test for each way to do something, on the databases that have it.

    :param table: by vendor and name, what the test is given, a tuple where it has several names.
    """
    return pytest.mark.parametrize(
        ("_database", *names),
        [
            pytest.param(
                *database.values,
                *(way if isinstance(way, tuple) else (way,)),
                marks=database.marks,
                id=f"{database.id}-{name}",
            )
            for vendor, ways in table.items()
            for database in OF_VENDOR[vendor]
            for name, way in ways.items()
        ],
        indirect=["_database"],
    )


@pytest.fixture(params=[MARIADB, MYSQL])
def innodb(request: pytest.FixtureRequest) -> str:
    """What is so with InnoDB, on MariaDB and on MySQL; its name."""
    request.getfixturevalue(request.param)
    return str(request.param)


@pytest.fixture(
    params=["sqlite_file", pytest.param("postgres", marks=pytest.mark.postgres)],
    ids=["sqlite", "postgres"],
)
def real_database(request: pytest.FixtureRequest) -> str:
    """The same test on a SQLite file and on PostgreSQL; the vendor's name."""
    request.getfixturevalue(request.param)
    return str(connections[DEFAULT].vendor)


@pytest.fixture(
    params=[
        pytest.param("sqlite_file", id="sqlite"),
        pytest.param("postgres", marks=pytest.mark.postgres),
        MARIADB,
        MYSQL,
    ],
)
def any_database(request: pytest.FixtureRequest) -> str:
    """The same test on a SQLite file, PostgreSQL, MariaDB and MySQL; the vendor's name."""
    request.getfixturevalue(request.param)
    return str(connections[DEFAULT].vendor)
