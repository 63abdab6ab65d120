"""Consumers come and go under load (issue 2, item 4; DESIGN 6, rebalance).

On the real engine each of these is a rebalance of the group; on the embedded default the workers
share rows. Either way each job adds exactly one entry.
"""

from __future__ import annotations

import pytest

from tests.acceptance.conftest import SELDOM_ON_MARIADB
from tests.acceptance.engine import Engine
from tests.acceptance.load import Load
from tests.acceptance.program import Program
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)


def wait_until_all_work(engine: Engine, *workers: Program) -> None:
    """Wait until each of the workers has something of the group, and gets on."""
    before = {worker: engine.settled_count(worker.pid) for worker in workers}
    for worker in workers:
        engine.wait_until(
            lambda worker=worker: (
                engine.partitions_of(worker.pid)
                and engine.settled_count(worker.pid) > before[worker]
            ),
            f"{worker} got nothing to do",
        )
    assert all(worker.is_running for worker in workers)


@SELDOM_ON_MARIADB
def test_workers_join_and_leave_under_load(engine: Engine) -> None:
    with Load(rate=60) as load:
        # Given a worker at work
        first = engine.worker("--concurrency", "2")
        wait_until_all_work(engine, first)
        # When a second joins
        second = engine.worker("--concurrency", "2")
        wait_until_all_work(engine, first, second)
        # And the first leaves in order
        assert first.stop() == 0, first.log_tail()
        wait_until_all_work(engine, second)
        # And a third joins, and the second is killed
        third = engine.worker("--concurrency", "2")
        wait_until_all_work(engine, second, third)
        second.kill()
        # Then the group goes on
        wait_until_all_work(engine, third)
    engine.settle()
    assert third.stop() == 0, third.log_tail()
    # And each job has added exactly one entry
    engine.assert_each_ran_once(load.expected, unsure=load.unsure)


@SELDOM_ON_MARIADB
def test_a_group_grows_and_shrinks_while_a_long_job_runs(engine: Engine, tmp_path) -> None:
    """A rebalance waits for long jobs for a bounded time; their effects stay single."""
    # Given a worker in the middle of a long job (on SQLite one that lets others write)
    path = tmp_path / "long"
    first = engine.worker("--concurrency", "2")
    long_job = jobs.wait_outside if engine.is_sqlite else jobs.wait_for
    long_job.using(key="k").enqueue(job="long", path=str(path))
    engine.wait_until(lambda: path.with_name(f"long.{first.pid}").exists(), "It never started")
    # When others come
    others = [engine.ready_worker("--concurrency", "2") for _ in range(2)]
    # Then jobs of other keys go on, and the long one ends once
    jobs.write_keyed.enqueue_many({"job": f"job-{n}", "key": f"k{n}"} for n in range(40))
    engine.wait_until(lambda: engine.entries.count() == 40, "The others wait for the long one")
    path.with_name("long.go").touch()
    engine.settle()
    assert [worker.stop() for worker in (first, *others)] == [0, 0, 0]
    engine.assert_each_ran_once(["long", *(f"job-{n}" for n in range(40))])
