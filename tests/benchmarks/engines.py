"""Fresh surroundings for every measurement: a copied database, and on Kafka a topic of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from kjo_django.ids import uuid7
from tests.benchmarks import child
from tests.benchmarks.cases import EMBEDDED, POSTGRES, REAL, Input
from tests.benchmarks.errors import BenchmarkError

POSTGRES_SETTINGS = {"shared_buffers": "1GB"}
"""The default of 128 MB is less than what one measurement touches of ten million rows."""
SERVERS = ("KAFKA_BOOTSTRAP_SERVERS", "REDIS_URL", "DATABASE_URL")


class Engine(ABC):
    """Makes each input once and hands out copies of it."""

    name: str
    has_topics: bool
    """Whether messages are kept outside the database."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._base: str | None = None
        self._inputs: dict[Input, str] = {}
        self._topics: dict[Input, list[str]] = {}
        self._seeded: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def prepare(self, input: Input, copies: int) -> None:
        """Make the input, good for so many measurements."""
        if input.rows:
            self._seed(input.rows)
            return
        database = self._copy(self._migrated())
        # In one database with its messages, a topic is copied with them and keeps its name.
        topics = [unique_name("topic") for _ in range(copies if self.has_topics else 1)]
        self._fill(input, topics, self._variables(database, topics[0]))
        self._inputs[input] = database
        self._topics[input] = topics

    @contextmanager
    def fresh(self, input: Input | None) -> Iterator[dict[str, str]]:
        """Yield the environment of one measurement; the database is gone afterwards.

        One that was filled with many rows stays: a copy of it would be measured with a cold cache
        and while the disk still writes it. Measurements add their jobs to it, and count those only.
        """
        if input is not None and input.rows:
            variables = self._variables(self._seeded[input.rows], unique_name("topic"))
            variables["KJO_BENCHMARK_SINCE"] = str(uuid7())
            self._fill(input, [variables["KJO_BENCHMARK_TOPIC"]], variables)
            yield variables
            return
        if input is None:
            source, topic = self._migrated(), unique_name("topic")
        else:
            source, topics = self._inputs[input], self._topics[input]
            topic = topics.pop() if self.has_topics else topics[0]
        database = self._copy(source)
        try:
            yield self._variables(database, topic)
        finally:
            self._drop(database)

    def _fill(self, input: Input, topics: list[str], variables: dict[str, str]) -> None:
        arguments = {**asdict(input), "topics": topics}
        del arguments["rows"]
        child.run("measures.prepare.fill", arguments, variables)

    def _seed(self, rows: int) -> None:
        if rows not in self._seeded:
            database = self._copy(self._migrated())
            child.run("measures.prepare.seed", {"rows": rows}, self._variables(database, "unused"))
            self._seeded[rows] = database

    def _migrated(self) -> str:
        if self._base is None:
            self._base = self._create()
            child.run("measures.prepare.migrate", {}, self._variables(self._base, "unused"))
        return self._base

    def _variables(self, database: str, topic: str) -> dict[str, str]:
        return {**self._environment, "DATABASE_URL": database, "KJO_BENCHMARK_TOPIC": topic}

    @abstractmethod
    def _create(self) -> str:
        """Make an empty database and return its URL."""

    @abstractmethod
    def _copy(self, source: str) -> str:
        """Copy a database nobody is connected to."""

    @abstractmethod
    def _drop(self, database: str) -> None:
        """Remove a database."""

    @abstractmethod
    def close(self) -> None:
        """Leave nothing behind."""


class PostgresEngine(Engine):
    """PostgreSQL alone: the database transport and the database's coordination.

    :param environment: names the server.
    """

    name = POSTGRES
    has_topics = False
    servers_used = ("DATABASE_URL",)

    def __init__(self, environment: Mapping[str, str]) -> None:
        others = {name for name in SERVERS if name not in self.servers_used}
        super().__init__({k: v for k, v in environment.items() if k not in others})
        self._server = environment["DATABASE_URL"]
        self._databases: set[str] = set()

    @property
    def servers(self) -> dict[str, str]:
        """The variables that name the servers."""
        return {name: self._environment[name] for name in self.servers_used}

    @contextmanager
    def empty(self) -> Iterator[str]:
        """Yield the URL of an empty database, gone afterwards."""
        database = self._create()
        try:
            yield database
        finally:
            self._drop(database)

    def _create(self, template: str = "template1") -> str:
        name = unique_name("database")
        self._execute("CREATE DATABASE {} TEMPLATE {}", name, template)
        self._databases.add(name)
        return urlunsplit(urlsplit(self._server)._replace(path=f"/{name}"))

    def _copy(self, source: str) -> str:
        return self._create(_database_name(source))

    def _drop(self, database: str) -> None:
        name = _database_name(database)
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)
        self._databases.discard(name)

    def _execute(self, statement: str, *names: str) -> None:
        import psycopg
        from psycopg import sql

        try:
            with psycopg.connect(self._server, autocommit=True) as connection:
                connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))
        except psycopg.Error as error:
            raise BenchmarkError(f"PostgreSQL (DATABASE_URL) cannot be used: {error}") from error

    def close(self) -> None:
        """Servers of ours end anyway; a given one is left as it was found."""
        if os.environ.get("DATABASE_URL"):
            for name in list(self._databases):
                self._drop(f"//server/{name}")


class RealEngine(PostgresEngine):
    """Kafka, Redis and PostgreSQL.

    :param environment: names all three servers.
    """

    name = REAL
    has_topics = True
    servers_used = SERVERS

    def close(self) -> None:
        """Servers of ours end anyway; a given one is left as it was found."""
        super().close()
        if os.environ.get("KAFKA_BOOTSTRAP_SERVERS"):
            self._delete_topics()

    def _delete_topics(self) -> None:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self._environment["KAFKA_BOOTSTRAP_SERVERS"]})
        ours = [name for name in admin.list_topics(timeout=10).topics if name.startswith(_PREFIX)]
        for deleted in admin.delete_topics(ours).values() if ours else ():
            with suppress(KafkaException):
                deleted.result(30)


class EmbeddedEngine(Engine):
    """SQLite and the database transport: no server at all."""

    name = EMBEDDED
    has_topics = False

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__({k: v for k, v in environment.items() if k not in SERVERS})
        self._directory = Path(tempfile.mkdtemp(prefix="kjo-benchmarks-"))

    def _create(self) -> str:
        return f"sqlite:////{self._directory.joinpath(unique_name('database'))}.sqlite3"

    def _copy(self, source: str) -> str:
        copy = self._create()
        for suffix in ("", "-wal", "-shm"):
            file = Path(f"{_file(source)}{suffix}")
            if file.exists():
                shutil.copyfile(file, f"{_file(copy)}{suffix}")
        return copy

    def _drop(self, database: str) -> None:
        for file in _file(database).parent.glob(f"{_file(database).name}*"):
            file.unlink()

    def close(self) -> None:
        """Remove the directory of all databases."""
        shutil.rmtree(self._directory, ignore_errors=True)


_PREFIX = "kjo-benchmark-"


def unique_name(kind: str) -> str:
    """Return a name nobody else has, for a topic, a database or a queue."""
    return f"{_PREFIX}{kind}-{uuid.uuid4().hex[:12]}"


def _database_name(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")


def _file(url: str) -> Path:
    return Path("/" + urlsplit(url).path.lstrip("/"))


def open_engine(name: str, environment: Mapping[str, str]) -> Engine:
    """Return an engine by its name."""
    kinds: Sequence[type[Engine]] = (RealEngine, PostgresEngine, EmbeddedEngine)
    return next(kind for kind in kinds if kind.name == name)(environment)
