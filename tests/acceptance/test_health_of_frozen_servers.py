"""What the health checks say of servers that take connections and answer nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.engine import Engine, Servers
from tests.acceptance.test_servers_restart import Own, own
from tests.databases import migrate
from tests.settings import database as settings_of

__all__ = ["own"]
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.kafka,
    pytest.mark.redis,
    pytest.mark.postgres,
]
SILENT = "It is not known whether it is stopped, overloaded or cut off"


@pytest.fixture
def engine(
    own: Own, tmp_path: Path, django_db_setup: None, django_db_blocker: Any
) -> Iterator[Engine]:
    with django_db_blocker.unblock():
        url = own.postgres.createdb("kjo_health")
        migrate(settings_of(url))
        with Engine(Servers(url, own.kafka.bootstrap_servers, own.redis.url), tmp_path) as engine:
            engine.ready_worker()
            yield engine
    own.postgres.dropdb("kjo_health")


def health_of(engine: Engine) -> dict[str, dict[str, Any]]:
    command = engine.manage("kjo_health", "--json", "--timeout", "6")
    command.wait()
    line = next(line for line in command.log.splitlines() if line.startswith("{"))
    return {check["name"]: check for check in json.loads(line)["checks"]}


@pytest.mark.parametrize(
    ("server", "name", "others"),
    [
        ("redis", "coordination", ["database", "transports", "workers", "progress"]),
        ("kafka", "transports", ["database", "coordination", "workers", "progress"]),
        ("postgres", "database", ["coordination", "transports"]),
    ],
)
def test_a_frozen_server_is_named_and_hides_nothing_else(
    own: Own, engine: Engine, server: str, name: str, others: list[str]
) -> None:
    # Given
    assert health_of(engine)[name]["ok"] is True
    # When it answers no more
    frozen = getattr(own, server)
    frozen.pause()
    try:
        found = health_of(engine)
    finally:
        frozen.resume()
    # Then its check says what is known, and no more; nobody is told to start or to correct anything
    assert found[name]["ok"] is False
    assert "no answer" in found[name]["detail"] or "does not answer" in found[name]["detail"]
    assert found[name]["fix"].startswith(SILENT)
    # And the servers that answer have been asked
    assert {other: found[other]["ok"] for other in others} == dict.fromkeys(others, True)


@pytest.mark.parametrize(
    ("server", "name", "fix"),
    [
        ("redis", "coordination", "Start it, or correct KJO['COORDINATION']."),
        ("kafka", "transports", "Start it, or correct KJO['TRANSPORTS']."),
        ("postgres", "database", "Start the database, or correct DATABASES."),
    ],
)
def test_a_server_that_is_stopped_is_told_from_one_that_is_silent(
    own: Own, engine: Engine, server: str, name: str, fix: str
) -> None:
    # When nobody listens
    stopped = getattr(own, server)
    stopped.stop()
    try:
        found = health_of(engine)[name]
    finally:
        stopped.start()
    # Then
    assert "refused" in found["detail"]
    assert (found["ok"], found["fix"]) == (False, fix)
