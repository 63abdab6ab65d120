"""The primary of Redis is lost while workers work, and sentinels make another one: jobs go on, none
is lost, and none takes effect twice (KJO-99)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.acceptance.engine import Engine, Servers
from tests.acceptance.load import Load
from tests.acceptance.test_redis_streams import StreamEngine
from tests.services import RedisServer
from tests.services.fixtures import require
from tests.services.sentinel import SentinelServer, sentinels
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(120), pytest.mark.redis, pytest.mark.postgres]

Group = tuple[RedisServer, RedisServer, list[SentinelServer]]


@pytest.fixture
def group() -> Iterator[Group]:
    require(redis=True)
    with sentinels() as found:
        yield found


@pytest.fixture
def engine(
    request: pytest.FixtureRequest, group: Group, database_url: str, tmp_path: Path
) -> Iterator[Engine]:
    _, _, watching = group
    redis = f"sentinel://{','.join(each.url for each in watching)}/{watching[0].primary_name}/0"
    servers = Servers(database_url, redis=redis)
    # Entries that were not replicated yet are lost with the primary.
    with request.param(servers, tmp_path, {"RESCUE_AFTER": 3}) as engine:
        yield engine


def killed(primary: RedisServer, replica: RedisServer) -> Iterator[None]:
    primary.kill()
    yield
    primary.start()


def frozen(primary: RedisServer, replica: RedisServer) -> Iterator[None]:
    """It takes connections and answers nobody; back, it still thinks that it is the primary."""
    primary.pause()
    yield
    primary.resume()


def demoted(primary: RedisServer, replica: RedisServer) -> Iterator[None]:
    """The same, until the sentinels have told it otherwise, some ten seconds later."""
    yield from frozen(primary, replica)
    wait_until(replica.has_replica, "the one that was frozen becomes a replica")


@pytest.mark.promise("row-decides")
@pytest.mark.parametrize(
    ("loss", "engine"),
    [
        (killed, StreamEngine),
        (frozen, Engine),
        pytest.param(frozen, StreamEngine, marks=pytest.mark.long),
        pytest.param(demoted, Engine, marks=pytest.mark.long),
    ],
    indirect=["engine"],
)
def test_a_failover_under_load(
    loss: Callable[[RedisServer, RedisServer], Iterator[None]], group: Group, engine: Engine
) -> None:
    # Given two workers under load
    primary, replica, watching = group
    workers = [engine.worker("--concurrency", "2") for _ in range(2)]

    def goes_on(since: str) -> None:
        before = engine.entries.count()
        engine.wait_until(lambda: engine.entries.count() > before + 30, f"Nothing runs {since}")

    with Load(rate=60) as load:
        goes_on("at first")
        assert replica.calls_of("evalsha") == 0
        # When the primary is lost, and another server takes its place
        course = loss(primary, replica)
        next(course)
        engine.wait_until(
            lambda: all(each.primary_port() == replica.port for each in watching), "No failover"
        )
        # Then jobs go on, with leases of the new one
        goes_on("after the failover")
        engine.wait_until(lambda: replica.calls_of("evalsha") > 5, "Nobody claims there")
        # Also when the first is back
        next(course, None)
        goes_on("since the old primary is back")
    engine.settle()
    for worker in workers:
        assert worker.stop() == 0, worker.log_tail()
        assert "Traceback" not in worker.log
    engine.assert_each_ran_once(load.expected, unsure=load.unsure)
