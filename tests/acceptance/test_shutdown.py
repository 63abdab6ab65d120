"""Stopping a worker (DESIGN 6, shutdown): what runs ends, what waits is handed back unspent."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest

from kjo_django.models import Worker as WorkerRow
from kjo_django.states import OPEN
from tests.acceptance.conftest import SELDOM_ON_MARIADB
from tests.acceptance.engine import ALIAS, Engine
from tests.acceptance.load import Load
from tests.acceptance.program import Program
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)


def start_job(engine: Engine, worker: Program, path: Path, name: str = "long") -> None:
    """Enqueue a job that runs until ``path.go`` appears, and wait until the worker runs it.

    On SQLite one outside a transaction: inside, nobody could write while it runs.
    """
    definition = jobs.wait_outside if engine.is_sqlite else jobs.wait_for
    definition.enqueue(job=name, path=str(path))
    engine.wait_until(lambda: started(path, worker.pid), f"{worker} did not start it")


def started(path: Path, pid: int) -> bool:
    return path.with_name(f"{path.name}.{pid}").exists()


def let_go(path: Path) -> None:
    path.with_name(f"{path.name}.go").touch()


@pytest.mark.medium("real")
def test_what_runs_may_end(engine: Engine, tmp_path: Path) -> None:
    """RST-10, RST-F13: shutdown waits for what runs."""
    stop_in_the_middle(engine, tmp_path, signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR2])
def test_other_signals_stop_as_well(
    number: signal.Signals, embedded: Engine, tmp_path: Path
) -> None:
    stop_in_the_middle(embedded, tmp_path, number)


def wait_for_fetched(engine: Engine, worker: Program, count: int) -> None:
    """Wait until a worker holds what it runs and what it may fetch behind that, so many in all.

    Where others could have them, it fetches nothing that waits behind a long job.
    """
    fetched = count if engine.servers.kafka else 1
    engine.wait_until(lambda: engine.has_in_flight(worker.pid, fetched), "They never arrived")


def stop_in_the_middle(engine: Engine, tmp_path: Path, number: signal.Signals) -> None:
    # Given a worker of one lane in the middle of a job, and jobs that wait behind it
    worker = engine.ready_worker("--concurrency", "1")
    start_job(engine, worker, tmp_path / "long")
    jobs.write_attempt.enqueue_many({"job": f"waiting-{number}"} for number in range(5))
    wait_for_fetched(engine, worker, 6)
    # When it is told to stop
    worker.signal(number)
    engine.wait_until(lambda: "finishing what runs" in worker.log, "It was not told")
    # And the job goes on for a while
    engine.wait_for_moment(1.5)
    assert worker.is_running
    let_go(tmp_path / "long")
    # Then the job ends, the exit code is 0, and nothing else was begun
    assert worker.wait() == 0, worker.log_tail()
    assert engine.ledger() == {"long": 1}
    # And the next worker runs the rest, in their first attempt
    other = engine.worker()
    engine.settle()
    assert other.stop() == 0
    engine.assert_each_ran_once(["long", *(f"waiting-{number}" for number in range(5))])
    assert set(engine.entries.values_list("note", flat=True)) == {"attempt 1"}
    assert engine.jobs.exclude(attempts=1).count() == 0
    assert engine.failures.count() == 0


@pytest.mark.medium("embedded")
@SELDOM_ON_MARIADB
def test_a_second_signal_forces(engine: Engine, tmp_path: Path) -> None:
    # Given a worker that waits for a job
    worker = engine.ready_worker()
    start_job(engine, worker, tmp_path / "long")
    worker.terminate()
    engine.wait_until(lambda: "finishing what runs" in worker.log, "It was not told")
    # When it is told again
    worker.terminate()
    # Then it ends at once: not with 1, as it would after the time that its job has
    assert worker.wait() == 128 + signal.SIGTERM
    # And the job runs elsewhere
    let_go(tmp_path / "long")
    other = engine.worker()
    engine.settle()
    assert other.stop() == 0
    engine.assert_each_ran_once(["long"])


@pytest.mark.promise("stop-spends-nothing")
@SELDOM_ON_MARIADB
def test_a_job_longer_than_the_grace_period(engine: Engine, tmp_path: Path) -> None:
    # Given a worker in the middle of a job that takes longer than it will be given
    engine.configure(SHUTDOWN_GRACE=0.5)
    worker = engine.ready_worker()
    start_job(engine, worker, tmp_path / "long")
    # When it is told to stop
    worker.terminate()
    # Then it ends all the same, and says that it left something
    assert worker.wait() == 1
    assert "Jobs still ran after 0.5 s; they are handed back" in worker.log
    assert engine.ledger() == {}
    # And the job says that it waits, not that it runs
    job = engine.jobs.get()
    assert (job.status, job.lease_token) == ("queued", "")
    # And the job is run elsewhere, once, and this is its first attempt
    let_go(tmp_path / "long")
    other = engine.worker()
    engine.settle()
    assert other.stop() == 0
    engine.assert_each_ran_once(["long"])
    assert engine.jobs.get().attempts == 1
    assert engine.failures.count() == 0


def test_a_handler_that_holds_sqlites_write_lock_does_not_hold_up_the_stop(
    embedded: Engine, tmp_path: Path
) -> None:
    # Given a worker in the middle of a transaction: nobody else can write, nor can the worker
    embedded.configure(SHUTDOWN_GRACE=0.5)
    worker = embedded.ready_worker()
    jobs.wait_for.enqueue(job="long", path=str(tmp_path / "long"))
    embedded.wait_until(lambda: started(tmp_path / "long", worker.pid), "It did not start")
    # When it is told to stop
    worker.terminate()
    # Then it ends, and the job does not, which waits for its file
    assert worker.wait() == 1
    # And the job is run elsewhere, once, and this is its first attempt
    let_go(tmp_path / "long")
    other = embedded.worker()
    embedded.settle()
    assert other.stop() == 0
    embedded.assert_each_ran_once(["long"])
    assert embedded.jobs.get().attempts == 1


@pytest.mark.medium
def test_drain(engine: Engine) -> None:
    """--drain ends when all that is due is done, what handlers enqueue included."""
    jobs.spawn.enqueue(job="parent", children=20)
    names = [f"job-{number}" for number in range(100)]
    jobs.write.enqueue_many({"job": name} for name in names)
    jobs.write.using(delay=timedelta(hours=1)).enqueue(job="later")
    worker = engine.drain("--processes", "2")
    assert not worker.is_running
    engine.assert_each_ran_once([*names, "parent", *(f"parent/{number}" for number in range(20))])
    # What is due later waits
    assert engine.jobs.filter(state__in=OPEN).count() == 1


@SELDOM_ON_MARIADB
def test_max_messages(engine: Engine) -> None:
    # Given more jobs than the worker may take
    names = [f"job-{number}" for number in range(40)]
    jobs.write_slowly.enqueue_many({"job": name, "milliseconds": 20} for name in names)
    # When it has settled as many
    worker = engine.worker("--max-messages", "10", "--concurrency", "2")
    assert worker.wait() == 0, worker.log_tail()
    # Then it has ended in order, and the rest is not lost
    assert engine.entries.count() == 10
    engine.drain()
    engine.assert_each_ran_once(names)


@pytest.mark.medium("embedded")
def test_a_killed_child_is_replaced(engine: Engine) -> None:
    # Given two supervised worker processes
    def children() -> set[int]:
        rows = WorkerRow.objects.using(ALIAS).filter(state="running")
        return set(rows.values_list("pid", flat=True)) - dead

    dead: set[int] = set()
    supervisor = engine.worker("--processes", "2")
    pids = engine.wait_until(
        lambda: children() if len(children()) == 2 else None, "There were never two"
    )
    # When one is killed
    victim = min(pids)
    os.kill(victim, signal.SIGKILL)
    dead.add(victim)
    # Then another takes its place
    after = engine.wait_until(
        lambda: children() if len(children()) == 2 else None, "It was not replaced"
    )
    assert victim not in after
    assert supervisor.pid not in after
    # And jobs run, and all end with the supervisor
    names = [f"job-{number}" for number in range(20)]
    jobs.write.enqueue_many({"job": name} for name in names)
    engine.settle()
    engine.assert_each_ran_once(names)
    assert supervisor.stop() == 0, supervisor.log_tail()
    for pid in after:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no process can be pinned here")
@SELDOM_ON_MARIADB
def test_pinned_processes_die_and_are_restarted_one_by_one_under_load(engine: Engine) -> None:
    """Issue 19, item 5: nothing is lost, and nobody else stops."""

    def children() -> set[int]:
        rows = WorkerRow.objects.using(ALIAS).filter(state="running")
        return set(rows.values_list("pid", flat=True)) - ended

    def another(than: set[int]) -> int:
        """Wait for the process that takes the place of one that has ended."""
        (found,) = engine.wait_until(lambda: children() - than, "It was not replaced")
        return int(found)

    def works(pid: int) -> None:
        """Wait until a process gets on."""
        before = engine.settled_count(pid)
        engine.wait_until(lambda: engine.settled_count(pid) > before, f"{pid} does not get on")

    def processors(*pids: int) -> list[int]:
        return sorted(number for pid in pids for number in os.sched_getaffinity(pid))

    allowed = sorted(os.sched_getaffinity(0))
    places = sorted([allowed[0], allowed[1 % len(allowed)]])
    ended: set[int] = set()
    with Load(rate=60) as load:
        # Given two processes at work, each on its own processor
        supervisor = engine.worker("--processes", "2", "--pin", "--concurrency", "2")
        engine.wait_until(lambda: len(children()) == 2, "There were never two")
        first, second = sorted(children())
        assert processors(first, second) == places
        works(first)
        # When one is killed
        freed = processors(first)
        os.kill(first, signal.SIGKILL)
        ended.add(first)
        # Then another takes its place and its processor, and the other one goes on
        third = another({second})
        assert processors(third) == freed
        works(second)
        # When that one is told to stop
        os.kill(second, signal.SIGTERM)
        ended.add(second)
        # Then it is replaced too, and the new one goes on
        fourth = another({third})
        assert processors(third, fourth) == places
        works(third)
        assert supervisor.is_running
    engine.settle()
    assert supervisor.stop() == 0, supervisor.log_tail()
    # And each job has added exactly one entry
    engine.assert_each_ran_once(load.expected, unsure=load.unsure)
