"""Promises 1 and 2 under SIGKILL (issue 2, item 4): nothing is lost, each job takes effect once.
PJQ-77: deliveries are at least once, and handlers outside transactions are told so.

The long versions kill as often as KJO_KILLS says: ``KJO_KILLS=500 pytest -m long``.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.acceptance.conftest import MARIADB, MYSQL, REAL
from tests.acceptance.engine import Engine
from tests.acceptance.load import Load
from tests.acceptance.program import Program

LONG = int(os.environ.get("KJO_KILLS", "300"))


def progress(engine: Engine, worker: Program) -> None:
    """Wait until the worker has done something since now."""
    before = engine.entries.count()
    engine.wait_until(
        lambda: engine.entries.count() > before or not worker.is_running,
        f"{worker} did nothing",
    )
    assert worker.is_running, worker.log_tail()


def kill_again_and_again(engine: Engine, kills: int) -> int:
    """Kill worker after worker while jobs are enqueued; return how many jobs there were."""
    with Load(rate=60, long=not engine.is_sqlite) as load:
        for number in range(kills):
            worker = engine.worker("--concurrency", "4")
            if number % 4:
                progress(engine, worker)
            # Else while it boots: before it has connected, joined, or recovered anything.
            moment = random.choice([random.uniform(0, 0.4), random.uniform(0.4, 1.6)])
            engine.wait_for_moment(moment)
            worker.kill()
    last = engine.worker("--concurrency", "4")
    engine.settle()
    assert last.stop() == 0
    engine.assert_each_ran_once(load.expected, unsure=load.unsure)
    return len(load.expected)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("embedded", 6),
        pytest.param("mariadb", 6, marks=MARIADB.marks),
        pytest.param("mysql", 6, marks=MYSQL.marks),
        pytest.param("real", 12, marks=REAL.marks),
    ],
)
def test_a_worker_killed_at_random_moments(
    name: str, kills: int, request: pytest.FixtureRequest, record_property
) -> None:
    # Given a load of jobs of every kind
    engine = request.getfixturevalue(name)
    # When one worker after the other is killed
    jobs = kill_again_and_again(engine, kills)
    # Then each job has added exactly one entry
    record_property("jobs", jobs)


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_a_worker_killed_hundreds_of_times(engine: Engine) -> None:
    kill_again_and_again(engine, LONG)


def kill_one_of_two(engine: Engine, kills: int) -> None:
    with Load(rate=60, long=not engine.is_sqlite) as load:
        workers = [engine.worker("--concurrency", "2") for _ in range(2)]
        for number in range(kills):
            victim = number % 2
            progress(engine, workers[1 - victim])
            engine.wait_for_moment(random.uniform(0, 0.4))
            workers[victim].kill()
            workers[victim] = engine.worker("--concurrency", "2")
    engine.settle()
    # Then both leave in order and each job has added exactly one entry
    assert [worker.stop() for worker in workers] == [0, 0]
    engine.assert_each_ran_once(load.expected, unsure=load.unsure)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "kills"), [("embedded", 4), pytest.param("real", 6, marks=REAL.marks)]
)
def test_one_of_two_workers_killed_in_turn(
    name: str, kills: int, request: pytest.FixtureRequest
) -> None:
    kill_one_of_two(request.getfixturevalue(name), kills)


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_one_of_two_workers_killed_hundreds_of_times(engine: Engine) -> None:
    kill_one_of_two(engine, LONG)
