"""Lanes with jobs of ten minutes, beside workers with free lanes.

All are long: that a job starts within two seconds depends on the machine.
``pytest -m long -s tests/acceptance/test_long_jobs.py`` prints a row for each engine.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.engine import Engine
from tests.acceptance.moments import moments_in
from tests.acceptance.program import Program
from tests.acceptance.test_rates import at_default
from tests.ledger import jobs

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
QUICK = ("mail", "ledger")
COUNT = 5_000
TEN_MINUTES = 600_000


@pytest.fixture(
    params=[
        "embedded",
        pytest.param("postgres", marks=pytest.mark.postgres),
        pytest.param("mariadb", marks=pytest.mark.mariadb),
    ]
)
def engine(request: pytest.FixtureRequest) -> Engine:
    """The engines whose transport is the database, with queues for mails and reports."""
    engine: Engine = request.getfixturevalue(request.param)
    engine.other_queues = ["mail", "reports"]
    engine.variables["KJO_TEST_LIMITS"] = "1"
    at_default(engine)
    return engine


def consumer(engine: Engine, lanes: int) -> Program:
    """Start a worker of all three queues."""
    names = (*QUICK, "reports")
    return engine.manage(
        "kjo_consume", *names, "--status-interval", "0", "--concurrency", str(lanes)
    )


def test_no_job_that_a_free_lane_could_start_waits_for_two_seconds(
    engine: Engine, limited: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Given three lanes, each with a job of ten minutes
    path = tmp_path / "starts"
    for number in range(3):
        # Outside a transaction: SQLite has one writer.
        long = jobs.write_outside.using(queue="reports")
        long.enqueue(job=f"report-{number}", milliseconds=TEN_MINUTES)
    workers = [consumer(engine, 3)]
    engine.wait_until(lambda: engine.has_in_flight(workers[0].pid, 3), "The long jobs never began")
    # When
    for queue in QUICK:
        write = limited.write_at_will.using(queue=queue)
        write.enqueue_many([{"path": str(path)}] * (COUNT // 2))
    for worker in [consumer(engine, 2) for _ in range(2)]:
        engine.wait_until(partial(engine.partitions_of, worker.pid), f"{worker} never began")
    began = time.time()
    engine.wait_until(
        lambda: len(moments_in(path)) >= COUNT, "Not every job has started", patience=300
    )
    # Then
    starts = [moment.at for moment in moments_in(path)]
    later = [began, *(moment for moment in starts if moment > began)]
    longest = max(after - before for before, after in pairwise(later))
    print(f"\n| {request.node.callspec.id} | {len(starts)} | longest wait {longest:.2f} s |")
    assert longest <= 2.0
    assert not engine.entries.filter(job__startswith="report-").exists()
