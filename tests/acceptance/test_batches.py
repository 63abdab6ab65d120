"""Batch handlers under SIGKILL: what a batch had not committed runs again, what it had does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.engine import Engine
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)


@pytest.mark.medium("mariadb")
def test_a_worker_killed_in_the_middle_of_a_batch(any_engine: Engine, tmp_path: Path) -> None:
    engine = any_engine
    # Given batches that are committed
    first = [f"first-{number}" for number in range(25)]
    jobs.write_together.enqueue_many({"job": name} for name in first)
    worker = engine.ready_worker("--concurrency", "1")
    engine.settle()
    # And one that has written and does not end
    second = [f"second-{number}" for number in range(10)]
    path = tmp_path / "batch"
    jobs.write_together.enqueue_many({"job": name, "path": str(path)} for name in second)
    engine.wait_until(path.with_name(f"batch.{worker.pid}").exists, "The batch never began")
    # When its worker is killed
    worker.kill()
    path.with_name("batch.go").touch()
    engine.worker()
    engine.settle()
    # Then each job has taken effect once
    engine.assert_each_ran_once([*first, *second])
    # And only those that were running have spent an attempt
    for job in engine.jobs.all():
        is_second = job.arguments["job"].startswith("second")
        assert job.attempts == 1 or is_second, job.arguments
