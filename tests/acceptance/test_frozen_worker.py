"""A worker freezes and comes back (promise 2): its job has moved on, its outcome is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from kjo_django.messages.serializers import load_result
from kjo_django.models import ProcessedEvent
from tests.acceptance.conftest import SELDOM_ON_MARIADB
from tests.acceptance.engine import ALIAS, Engine, Servers
from tests.acceptance.program import Program
from tests.acceptance.test_shutdown import let_go, started
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)


def freeze_in_the_middle(engine: Engine, path: Path, definition: Any) -> tuple[Program, Program]:
    """Freeze a worker within a job; return it and the worker that took the job over."""
    engine.configure(PROCESSING_TTL=2)
    frozen = engine.ready_worker("--concurrency", "2")
    definition.enqueue(job="job", path=str(path))
    engine.wait_until(lambda: started(path, frozen.pid), "The first worker did not start it")
    engine.freeze(frozen)
    other = engine.worker("--concurrency", "2")
    return frozen, other


@pytest.mark.promise("lease-expires")
@pytest.mark.medium("embedded")
def test_a_frozen_worker_loses_its_job(engine: Engine, tmp_path: Path) -> None:
    """Outside a transaction, where the lease in the row decides."""
    # Given a job taken over from a frozen worker
    path = tmp_path / "job"
    frozen, other = freeze_in_the_middle(engine, path, jobs.wait_outside)
    engine.wait_until(lambda: started(path, other.pid), "Nobody took the job over")
    # When the first comes back and ends its run while the second is at it
    (tmp_path / f"job.{frozen.pid}.go").touch()
    frozen.thaw()
    engine.wait_until(lambda: engine.entries.count() == 1, "It never came back")
    assert frozen.stop() == 0, frozen.log_tail()
    # Then its outcome does not count
    assert engine.jobs.get().state == "queued"
    assert not ProcessedEvent.objects.using(ALIAS).exists()
    # And the second's does: the second attempt
    let_go(path)
    engine.settle()
    assert other.stop() == 0, other.log_tail()
    job = engine.jobs.get()
    assert (job.state, job.attempts) == ("completed", 2)
    assert load_result(bytes(job.result)) == {"pid": other.pid, "attempt": 2}
    assert ProcessedEvent.objects.using(ALIAS).count() == 1
    assert (engine.failures.get().attempt, engine.dead_letters.count()) == (1, 0)


@pytest.mark.medium("real")
@SELDOM_ON_MARIADB
def test_a_frozen_worker_comes_back_after_all_is_done(engine: Engine, tmp_path: Path) -> None:
    # Given a job taken over from a frozen worker and done
    path = tmp_path / "job"
    frozen, other = freeze_in_the_middle(engine, path, jobs.wait_outside)
    let_go(path)
    engine.settle()
    done = engine.jobs.get()
    assert (done.state, done.attempts) == ("completed", 2)
    # When the first comes back
    frozen.thaw()
    engine.wait_until(lambda: engine.entries.count() == 2, "It never came back")
    # Then nothing changes
    assert [frozen.stop(), other.stop()] == [0, 0]
    now = engine.jobs.get()
    assert (now.result, now.attempts, now.finished_at) == (
        done.result,
        done.attempts,
        done.finished_at,
    )
    # And both workers work on
    assert (engine.failures.count(), engine.dead_letters.count(), engine.lag()) == (1, 0, 0)


@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.postgres
def test_a_frozen_transaction(real: Engine, tmp_path: Path) -> None:
    """Within a transaction the database decides: whoever commits first, the effect is single.

    The frozen worker's open transaction holds the job's row and marker until it is back, so the
    second worker waits for it and then finds a duplicate. On SQLite it would hold the write lock
    of the whole file: nobody writes while a writer is frozen.
    """
    path = tmp_path / "job"
    frozen, other = freeze_in_the_middle(real, path, jobs.wait_for)
    let_go(path)
    real.wait_until(lambda: real.partitions_of(other.pid), "The other never took over")
    frozen.thaw()
    real.settle()
    assert [frozen.stop(), other.stop()] == [0, 0]
    real.assert_each_ran_once(["job"])


@pytest.mark.mariadb
def test_a_frozen_transaction_that_mariadb_ends(mariadb: Engine, tmp_path: Path) -> None:
    """With ``idle_transaction_timeout`` nobody waits until the worker is back."""
    # Given workers whose sessions the server ends when they idle in a transaction
    url = mariadb.servers.database_url
    command = quote("SET SESSION idle_transaction_timeout = 4")
    mariadb.servers = Servers(f"{url}?init_command={command}")
    mariadb.configure(PROCESSING_TTL=2)
    # And one that is frozen in a handler's transaction
    path = tmp_path / "job"
    frozen = mariadb.ready_worker("--concurrency", "2")
    jobs.wait_for.enqueue(job="job", path=str(path))
    mariadb.wait_until(lambda: started(path, frozen.pid), "The first worker did not start it")
    frozen.freeze()
    let_go(path)
    # When another works
    other = mariadb.worker("--concurrency", "2")
    # Then it completes the job meanwhile
    mariadb.wait_until(lambda: mariadb.jobs.filter(state="completed").exists(), "It never ran")
    assert started(path, other.pid)
    # And what the first one did in its transaction never was
    frozen.thaw()
    mariadb.settle()
    assert [frozen.stop(), other.stop()] == [0, 0]
    mariadb.assert_each_ran_once(["job"])
