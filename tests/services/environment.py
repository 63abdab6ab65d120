"""Servers by environment variable: a given one is used, a missing one is started."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from tests.services.kafka import KafkaServer
from tests.services.postgres import PostgresServer
from tests.services.provisioning import provision
from tests.services.redis import RedisServer
from tests.services.server import Server

KAFKA_VARIABLE = "KAFKA_BOOTSTRAP_SERVERS"
REDIS_VARIABLE = "REDIS_URL"
POSTGRES_VARIABLE = "DATABASE_URL"
MARIADB_VARIABLE = "MARIADB_URL"
MYSQL_VARIABLE = "MYSQL_URL"


@contextmanager
def running(
    *,
    kafka: bool = True,
    redis: bool = True,
    postgres: bool = True,
    postgres_settings: Mapping[str, str] | None = None,
    verbose: bool = False,
) -> Iterator[Mapping[str, str]]:
    """Start the servers no variable names and yield an environment that names them all.

    `os.environ` itself stays as it is. A server that a variable names is never touched.
    """
    kafka = kafka and not given(KAFKA_VARIABLE)
    redis = redis and not given(REDIS_VARIABLE)
    postgres = postgres and not given(POSTGRES_VARIABLE)
    provision(kafka=kafka, redis=redis, postgres=postgres)

    servers: dict[str, Server] = {}
    if kafka:
        servers[KAFKA_VARIABLE] = KafkaServer()
    if redis:
        servers[REDIS_VARIABLE] = RedisServer()
    if postgres:
        servers[POSTGRES_VARIABLE] = PostgresServer(postgres_settings)
    with ExitStack() as stack:
        for server in servers.values():
            stack.callback(server.close)
        _start(list(servers.values()), verbose=verbose)
        urls = {variable: server.url for variable, server in servers.items()}
        yield {**os.environ, **urls}


def given(variable: str) -> str | None:
    """The server a variable names; an empty variable names none."""
    return os.environ.get(variable) or None


def _start(servers: list[Server], *, verbose: bool) -> None:
    def start(server: Server) -> None:
        began = time.monotonic()
        server.start()
        if verbose:
            took = time.monotonic() - began
            print(f"{server.name}: {server.url} (ready in {took:.1f} s)", file=sys.stderr)

    if servers:
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(start, servers))
