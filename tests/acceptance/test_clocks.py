"""Workers on hosts whose clocks disagree (FINDINGS 2.10 q): one by ten minutes.

One case is in the default tier, since leases and due times that two hosts compare are a promise of
their own; that each heartbeat follows each database is in tests/unit/test_clock.py.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from kjo_django.models import Worker as WorkerRow
from tests.acceptance.conftest import MARIADB, POSTGRES, REAL
from tests.acceptance.engine import ALIAS, Engine
from tests.acceptance.test_shutdown import let_go, started
from tests.ledger import jobs

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.large,
    pytest.mark.medium("postgres-ahead"),
]
AHEAD = 600.0
OTHERS = 5


@pytest.fixture(params=[POSTGRES, MARIADB, REAL])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each whose database has a clock of its own."""
    return request.getfixturevalue(request.param)


@pytest.mark.promise("wrong-clock")
@pytest.mark.parametrize("ahead", [AHEAD, -AHEAD], ids=["ahead", "behind"])
def test_a_host_whose_clock_is_wrong_runs_nothing_twice_and_nothing_early(
    engine: Engine, tmp_path: Path, ahead: float
) -> None:
    path = tmp_path / "job"
    hosts = {"wrong": str(ahead), "right": "0"}
    # Given a worker that runs a job, and one that takes all others
    first, second = ("right", "wrong") if ahead > 0 else ("wrong", "right")
    engine.variables = {"KJO_TEST_CLOCK_AHEAD": hosts[first]}
    busy = engine.ready_worker("--concurrency", "1")
    jobs.wait_outside.enqueue(job="held", path=str(path))
    engine.wait_until(lambda: started(path, busy.pid), "It was not started")
    jobs.write.using(delay=timedelta(seconds=AHEAD / 2)).enqueue(job="later")
    engine.variables = {"KJO_TEST_CLOCK_AHEAD": hosts[second]}
    free = engine.ready_worker("--concurrency", "2")
    # When the other has run a number of jobs, one after the other
    for number in range(OTHERS):
        for each in range(8):
            jobs.write.enqueue(job=f"{number}-{each}")
        of_this_round = engine.entries.filter(job__startswith=f"{number}-")
        engine.wait_until(of_this_round.exists, "Nobody runs the others")
    # Then it has neither taken over what runs nor run what is due in five minutes
    assert not started(path, free.pid)
    assert not engine.entries.filter(job="later").exists()
    # And each says by how much its clock is wrong
    wrong, right = (free, busy) if second == "wrong" else (busy, free)
    told = {row.pid: row.clock_ahead for row in WorkerRow.objects.using(ALIAS)}
    assert abs(told[wrong.pid] - ahead) < 60
    assert abs(told[right.pid]) < 60
    assert "The clock of this host is" in wrong.log
    assert "The clock of this host is" not in right.log
    # And the job that ran all this time ends once
    let_go(path)
    engine.wait_until(lambda: engine.entries.filter(job="held").exists(), "It was lost")
    for worker in (free, busy):
        assert worker.stop() == 0, worker.log_tail()
    assert engine.entries.filter(job="held").count() == 1
