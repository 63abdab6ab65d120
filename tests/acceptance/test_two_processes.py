"""Two terminals on SQLite (issue 2, item 3): a worker in one, a save in the other's shell."""

from __future__ import annotations

import statistics
import time

import pytest

from tests.acceptance.engine import Engine
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)


def test_a_job_runs_within_a_second(any_engine: Engine, record_property) -> None:
    # Given a worker as anybody would start it, with the settings nobody has touched
    engine = any_engine
    engine.configure(HEARTBEAT_INTERVAL=5, POLL_INTERVAL=1, RECORD_LEASE=30)
    worker = engine.ready_worker()
    # And a first job, since a broker just started takes a second to know its first producer
    jobs.write.enqueue(job="first")
    engine.settle()
    # When another process, this one, enqueues now and then
    for number in range(8):
        time.sleep(0.3)  # sleep: so long that the worker polls as rarely as it ever does
        jobs.write.enqueue(job=f"job-{number}")
    engine.settle()
    # Then each job is done within a second
    delays = [
        (finished - created).total_seconds()
        for finished, created in engine.jobs.order_by("created_at").values_list(
            "finished_at", "created_at"
        )[1:]
    ]
    median, longest = statistics.median(delays), max(delays)
    record_property("median_ms", round(1000 * median))
    record_property("max_ms", round(1000 * longest))
    print(f"\nmedian {1000 * median:.0f} ms, longest {1000 * longest:.0f} ms")
    assert worker.stop() == 0
    assert longest < 1


def test_a_shell_beside_a_worker(embedded: Engine) -> None:
    """Word for word: a `manage.py shell` enqueues, a `manage.py kjo_consume` runs."""
    worker = embedded.ready_worker()
    command = "from tests.ledger.jobs import write; write.enqueue(job='from the shell')"
    shell = embedded.manage("shell", "-c", command)
    assert shell.wait() == 0, shell.log_tail()
    embedded.wait_until(lambda: embedded.ledger()["from the shell"], "It never ran")
    assert worker.stop() == 0
