"""What an operator asks of one worker process, it does within seconds: quiet, go on, stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from kjo_django.models import Worker as WorkerRow
from kjo_django.operations import workers
from tests.acceptance.conftest import SELDOM_ON_MARIADB
from tests.acceptance.engine import ALIAS, Engine
from tests.acceptance.program import Program
from tests.acceptance.test_shutdown import let_go, start_job, wait_for_fetched
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)


def row_of(worker: Program) -> WorkerRow:
    return WorkerRow.objects.using(ALIAS).get(pid=worker.pid)


@SELDOM_ON_MARIADB
def test_a_quiet_worker_starts_nothing_holds_up_nothing_and_goes_on_when_told(
    engine: Engine, tmp_path: Path
) -> None:
    """DASHBOARD 1.6: quiet."""
    # Given a worker of one lane in the middle of a job, with others waiting behind it
    worker = engine.ready_worker("--concurrency", "1")
    start_job(engine, worker, tmp_path / "long")
    names = [f"waiting-{number}" for number in range(5)]
    jobs.write.enqueue_many({"job": name} for name in names)
    wait_for_fetched(engine, worker, 6)
    # When it is asked to be quiet
    assert workers.quiet([row_of(worker)], actor="ann").counts == {"asked": 1}
    engine.wait_until(lambda: row_of(worker).state == "quiet", "It was not quiet")
    let_go(tmp_path / "long")
    # Then what runs ends, and nothing else begins
    engine.wait_until(lambda: engine.ledger() == {"long": 1}, "The job never ended")
    engine.wait_for_moment(1.5)
    assert engine.ledger() == {"long": 1}
    assert worker.is_running
    if not engine.servers.kafka:
        # And what it had fetched is another worker's at once
        other = engine.worker()
        engine.settle()
        assert other.stop() == 0
    # When it may go on
    workers.unquiet([row_of(worker)], actor="ann")
    jobs.write.enqueue(job="afterwards")
    # Then it does
    engine.settle()
    engine.wait_until(lambda: row_of(worker).state == "running", "It never says that it works")
    engine.assert_each_ran_once(["long", *names, "afterwards"])
    assert engine.jobs.exclude(attempts=1).count() == 0
    assert worker.stop() == 0


@pytest.mark.medium("embedded")
@SELDOM_ON_MARIADB
def test_a_worker_that_is_stopped_ends_as_by_a_signal(engine: Engine, tmp_path: Path) -> None:
    """DASHBOARD 1.6: stop."""
    # Given
    worker = engine.ready_worker("--concurrency", "1")
    start_job(engine, worker, tmp_path / "long")
    jobs.write.enqueue(job="waiting")
    wait_for_fetched(engine, worker, 2)
    # When
    workers.stop([row_of(worker)], actor="ann")
    engine.wait_until(lambda: "finishing what runs" in worker.log, "It was not told")
    engine.wait_for_moment(1.0)
    assert worker.is_running
    let_go(tmp_path / "long")
    # Then what ran has ended, the rest is handed back, the exit code is 0
    assert worker.wait() == 0, worker.log_tail()
    assert row_of(worker).state == "stopped"
    assert engine.ledger() == {"long": 1}
    # And the old request does not stop the process started in its place
    other = engine.worker()
    engine.settle()
    engine.assert_each_ran_once(["long", "waiting"])
    engine.wait_for_moment(1.5)
    assert other.stop() == 0


def test_a_supervisor_starts_no_other_for_a_child_that_was_stopped(
    embedded: Engine, tmp_path: Path
) -> None:
    # Given two children, one of them in the middle of a job that outlasts the grace period
    embedded.configure(SHUTDOWN_GRACE=0.5)
    supervisor = embedded.worker("--processes", "2")
    rows = WorkerRow.objects.using(ALIAS)
    embedded.wait_until(lambda: rows.filter(state="running").count() == 2, "They never came")
    jobs.wait_outside.enqueue(job="long", path=str(tmp_path / "long"))
    embedded.wait_until(lambda: rows.filter(in_flight_count__gte=1).exists(), "Nobody runs the job")
    busy = rows.get(in_flight_count__gte=1)
    # When an operator stops that one
    workers.stop([busy], actor="ann")
    embedded.wait_until(
        lambda: rows.get(pk=busy.pk).state == "stopped", "The busy one never stopped"
    )
    # Then the other goes on alone
    embedded.wait_for_moment(2.0)
    assert rows.count() == 2
    assert rows.filter(state="running").count() == 1
    # And with the last one the supervisor ends, saying that a job was left running
    workers.stop(rows.filter(state="running"))
    assert supervisor.wait() == 3, supervisor.log_tail()
