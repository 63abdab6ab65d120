"""A message that met an error which pauses its partition keeps its place and its attempts: on every
transport, and over the end of its worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import REAL
from tests.acceptance.engine import Engine, Servers
from tests.acceptance.test_redis_streams import StreamEngine
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def streams(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StreamEngine]:
    redis = request.getfixturevalue("redis_server")
    database_url = request.getfixturevalue("database_url")
    with StreamEngine(Servers(database_url, redis=redis.url), tmp_path) as engine:
        yield engine


STREAMS = pytest.param("streams", marks=[pytest.mark.redis, pytest.mark.postgres])


@pytest.mark.promise("order-by-key")
@pytest.mark.medium("real")
@pytest.mark.parametrize("kind", ["embedded", REAL, STREAMS])
def test_an_outage_inverts_no_key_and_costs_no_attempt(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    engine: Engine = request.getfixturevalue(kind)
    # Given jobs of a key, each of which may be tried once, and a service that is away
    engine.configure(ERROR_RECOVERY_DELAYS={"rate_limit": 0.5})
    gate = tmp_path / "gate"
    calls = tmp_path / "gate.calls"

    def called(times: int) -> bool:
        return calls.exists() and len(calls.read_text().split()) >= times

    worker = engine.ready_worker()
    names = [f"job-{number}" for number in range(6)]
    jobs.write_when_open.enqueue_many({"job": n, "key": "k", "gate": str(gate)} for n in names)
    # When it is away for some pauses, also over the end of a worker
    engine.wait_until(lambda: called(3), "It was not tried again after its pause")
    assert worker.stop() == 0
    before = len(calls.read_text().split())
    worker = engine.worker()
    engine.wait_until(lambda: called(before + 2), "The next worker does not try it")
    # Then the first of the key alone has been tried
    assert set(calls.read_text().split()) == {"job-0"}
    # And once the service is back all run in their order, with the attempt they had
    gate.touch()
    engine.settle()
    assert list(engine.entries.order_by("id").values_list("job", flat=True)) == names
    assert set(engine.jobs.values_list("state", "attempts")) == {("completed", 1)}
    assert not engine.failures.exists()
    assert not engine.dead_letters.exists()
    assert worker.stop() == 0
