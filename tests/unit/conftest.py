"""Workers without threads and with, what is sent to a database, definitions that are forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.clock import Clock
from tests.unit.deliveries import KJO, MEMORY, Bench
from tests.unit.steps import Steps


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts psycopg is asked to send, one for each round trip."""
    import psycopg  # an extra, which may be missing

    texts: list[str] = []
    execute = psycopg.Cursor.execute

    def recording(self: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        texts.append(str(query))
        return execute(self, query, *arguments, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", recording)
    return texts


@pytest.fixture
def one_lane(settings: Any, _database: None, forgotten_definitions: None) -> None:
    """Settings of workers that run one job or group after the other, and are quick to retry. Jobs
    of a handler that has run share their groups, however slow the machine is."""
    settings.KJO = {
        **KJO,
        **MEMORY,
        "CONCURRENCY": 1,
        "GROUP_BUDGET": 60,
        "POLL_INTERVAL": 0.2,
        "HEARTBEAT_INTERVAL": 0.2,
        "BACKOFF_BASE": 0.05,
        "SHUTDOWN_GRACE": 5,
    }


@pytest.fixture
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time passes when the test says so. What is asked of a database once in a while is asked, or
    not, by decision: who counts statements names this fixture before the worker's."""
    clock = Clock(stands=True)
    clock.install(monkeypatch)
    return clock


@pytest.fixture(params=["memory", "database"])
def transport(request: pytest.FixtureRequest, settings: Any, _database: None) -> str:
    """Tests that name it run on a log and on a transport that shares the jobs' transactions."""
    settings.KJO = KJO | (MEMORY if request.param == "memory" else {})
    return str(request.param)


@pytest.fixture
def bench_settings(request: pytest.FixtureRequest, settings: Any, _database: None) -> None:
    """The settings of a `bench`: on the transport that the test names, else on the memory one."""
    if "transport" in request.fixturenames:
        request.getfixturevalue("transport")
    else:
        settings.KJO = KJO | MEMORY


@pytest.fixture
def bench(bench_settings: None, forgotten_definitions: None) -> Iterator[Bench]:
    """A worker without threads, and handlers that are forgotten with it."""
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture
def another(bench: Bench) -> Iterator[Bench]:
    """A second worker on the same queue."""
    another = Bench(worker="another")
    yield another
    another.close()


@pytest.fixture
def steps(forgotten_definitions: None) -> Iterator[Steps]:
    yield Steps()
