"""The mixed load on every engine, seeded: what failed can be run again by the command it prints.

KJO_MIXED_SEED=4711 pytest "tests/mixed/test_mixed.py::test_a_mixed_load[kafka]"
"""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.engine import Servers
from tests.mixed.execution import MixedEngine, carry_out, collect, stage_of
from tests.mixed.invariants import complaints
from tests.mixed.plan import PHASE, Plan, draw

pytestmark = [pytest.mark.timeout(300)]
MARKS = {
    "memory": [],
    "sqlite": [],
    "postgres": [pytest.mark.postgres],
    "mariadb": [pytest.mark.mariadb],
    "kafka": [pytest.mark.kafka, pytest.mark.redis, pytest.mark.postgres],
    "redis_streams": [pytest.mark.redis, pytest.mark.postgres],
}
EVERY = [pytest.param(name, marks=marks) for name, marks in MARKS.items()]
MYSQL = pytest.param("mysql", marks=pytest.mark.mysql)
SEED = os.environ.get("KJO_MIXED_SEED")
PHASES = int(os.environ.get("KJO_MIXED_PHASES", "2"))
FIXED = 1


@pytest.fixture
def servers_of(request: pytest.FixtureRequest, tmp_path: Path, django_db_blocker: Any) -> Any:
    """Return the servers of an engine, with an empty database."""

    def make(engine: str) -> Servers:
        if engine in ("sqlite", "memory"):
            path = tmp_path / "kjo.sqlite3"
            shutil.copyfile(request.getfixturevalue("sqlite_template"), path)
            return Servers(f"sqlite:///{path}")
        if engine in ("mariadb", "mysql"):
            request.getfixturevalue(engine)  # empties it
            return Servers(request.getfixturevalue(f"{engine}_url"))
        url = request.getfixturevalue("database_url")
        if engine == "postgres":
            return Servers(url)
        redis_url = request.getfixturevalue("redis_server").url
        if engine == "redis_streams":
            return Servers(url, redis=redis_url)
        return Servers(url, request.getfixturevalue("kafka_server").bootstrap_servers, redis_url)

    with django_db_blocker.unblock():
        yield make


def run(plan: Plan, servers: Servers, logs: Path) -> None:
    """Carry out a plan and check what it left; the complaint says how to run it again."""
    print(f"\n{plan}")
    with MixedEngine(plan, servers, logs) as engine:
        stage = stage_of(engine)
        with engine.database_away(plan.away) if plan.away else nullcontext():
            left = carry_out(stage)
        evidence = collect(stage, left)
        found = complaints(evidence)
        if found:
            phases = round(plan.seconds / PHASE)
            test = f"tests/mixed/test_mixed.py::test_a_mixed_load[{plan.engine.name}]"
            again = f'KJO_MIXED_SEED={plan.seed} KJO_MIXED_PHASES={phases} pytest "{test}"'
            raise AssertionError("\n".join([str(plan), again, *found, engine.report()]))


@pytest.mark.parametrize("engine", [*EVERY, MYSQL])
def test_a_mixed_load(engine: str, servers_of: Any, tmp_path: Path) -> None:
    run(draw(int(SEED or FIXED), engine, PHASES), servers_of(engine), tmp_path)


@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.postgres
@pytest.mark.mariadb
def test_the_mixed_load_of_the_day(servers_of: Any, tmp_path: Path) -> None:
    """Another seed each day, on another engine."""
    day = datetime.now(tz=UTC).toordinal()
    engine = [*MARKS][day % len(MARKS)]
    run(draw(day, engine), servers_of(engine), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(int(os.environ.get("KJO_MIXED_SEEDS", "50"))))
@pytest.mark.parametrize("engine", EVERY)
def test_many_mixed_loads(engine: str, seed: int, servers_of: Any, tmp_path: Path) -> None:
    """Twice as long each, and as many as KJO_MIXED_SEEDS says."""
    run(draw(1000 + seed, engine, phases=4), servers_of(engine), tmp_path)
