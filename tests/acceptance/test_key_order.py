"""Jobs of one key run in order, keys in parallel (issue 2, item 8)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.acceptance.engine import Engine
from tests.acceptance.order import assert_order
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)

KEYS = 40


def enqueue(prefix: str, count: int, milliseconds: float) -> list[str]:
    """Enqueue numbered jobs, spread over the keys, in one go."""
    names = [f"{prefix}-{number:04}" for number in range(count)]
    jobs.write_keyed.enqueue_many(
        {"job": name, "key": f"{prefix}-{number % KEYS}", "milliseconds": milliseconds}
        for number, name in enumerate(names)
    )
    return names


@pytest.mark.promise("order-by-key")
@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.postgres
def test_eight_lanes_on_one_partition(real: Engine, tmp_path: Path) -> None:
    """How fast they are is measured by the benchmark of lanes."""
    # Given one partition, eight lanes that take one job each, and twice as many jobs that wait
    real.configure(TOPIC_OPTIONS={"partitions": 1, "replication_factor": 1}, GROUP_SIZE=1)
    real.ready_worker("--concurrency", "8")
    names = [f"job-{number:02}" for number in range(16)]
    jobs.wait_for_keyed.enqueue_many(
        {"job": name, "key": str(number % 8), "path": str(tmp_path / name)}
        for number, name in enumerate(names)
    )

    def begun() -> set[str]:
        return {path.name.partition(".")[0] for path in tmp_path.glob("job-*")}

    # When as many run at once as there are lanes
    real.wait_until(lambda: len(begun()) == 8, "Eight lanes do not run eight keys at once")
    # Then they are the first of each key
    assert begun() == set(names[:8])
    # And when some end, the next of their keys run beside the others
    for name in names[:4]:
        (tmp_path / f"{name}.go").touch()
    real.wait_until(lambda: len(begun()) == 12, "The next of four keys do not run")
    assert begun() == set(names[:12])
    # And each key keeps its order to the end
    for name in names[4:]:
        (tmp_path / f"{name}.go").touch()
    real.settle()
    assert_order(real)
    real.assert_each_ran_once(names)


def test_two_processes_keep_the_order_of_keys(any_engine: Engine) -> None:
    # Given two workers with several lanes, neither of which may take all there is
    any_engine.configure(MAX_OUTSTANDING=16)
    workers = [any_engine.ready_worker("--concurrency", "4") for _ in range(2)]
    # When jobs come, some of which take a while
    names = []
    for batch in range(5):
        names += enqueue(f"{batch}", 80, 2 if batch % 2 else 0)
        time.sleep(0.05)  # sleep: the pace of the load
    any_engine.settle()
    assert [worker.stop() for worker in workers] == [0, 0]
    # Then both took part, and each key kept its order
    assert all(any_engine.settled_count(worker.pid) for worker in workers)
    assert_order(any_engine)
    any_engine.assert_each_ran_once(names)


@pytest.mark.promise("order-by-key")
@pytest.mark.medium("embedded", "real")
def test_keys_keep_their_order_through_a_kill(engine: Engine) -> None:
    names = enqueue("killed", 200, 5)
    worker = engine.worker("--concurrency", "4")
    engine.wait_until(lambda: engine.entries.count() > 40, "It never worked")
    worker.kill()
    other = engine.worker("--concurrency", "4")
    engine.settle()
    assert other.stop() == 0
    assert_order(engine)
    engine.assert_each_ran_once(names)
