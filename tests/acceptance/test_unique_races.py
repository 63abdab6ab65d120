"""Unique windows and debounced jobs while many processes enqueue and workers run (issue 16)."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from tests.acceptance.engine import Engine
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)
THREADS = 20
HOUR = timedelta(hours=1)


def together(definition: Any, count: int = THREADS) -> list[Any]:
    """Let so many threads enqueue at once, each its own payload; return their answers."""
    barrier = threading.Barrier(count)

    def enqueue(number: int) -> Any:
        barrier.wait()
        try:
            return definition.enqueue(job=f"thread-{number}")
        finally:
            connections.close_all()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(enqueue, range(count)))


@pytest.mark.promise("unique-window")
@pytest.mark.medium("mariadb", "postgres")
def test_of_threads_that_enqueue_at_once_one_stores_the_job(any_engine: Engine) -> None:
    # When
    answers = together(jobs.write.using(unique_for=HOUR, unique_by=()))
    # Then
    said = Counter(answer.answer for answer in answers)
    assert said == {"queued": 1, "duplicate": THREADS - 1}
    assert any_engine.jobs.count() == 1
    any_engine.drain()
    (winner,) = [number for number, answer in enumerate(answers) if answer.is_new]
    any_engine.assert_each_ran_once([f"thread-{winner}"])


@pytest.mark.promise("debounced-payload")
@pytest.mark.medium("mariadb", "postgres")
def test_of_threads_that_debounce_at_once_the_last_payload_runs(any_engine: Engine) -> None:
    # When
    answers = together(jobs.write.using(debounce=timedelta(seconds=2), unique_by=()))
    # Then each found the one before
    said = Counter(answer.answer for answer in answers)
    assert said == {"queued": 1, "replaced": THREADS - 1}
    (job,) = any_engine.jobs.all()
    assert job.generation == THREADS
    # And one runs: what is in the row
    any_engine.ready_worker()
    any_engine.settle()
    any_engine.assert_each_ran_once([job.arguments["job"]])


@pytest.mark.medium("real")
def test_a_published_message_with_an_older_payload_never_runs(any_engine: Engine) -> None:
    # Given a job whose message is in the topic
    any_engine.create_topics()
    replacing = jobs.write.using(unique_for=HOUR, unique_by=(), on_conflict="replace")
    replacing.enqueue(job="first")
    if any_engine.servers.kafka:
        relay = any_engine.relay("--once")
        assert relay.wait() == 0, relay.log_tail()
    # When it is replaced, and all messages are read
    assert replacing.enqueue(job="last").answer == "replaced"
    any_engine.drain()
    any_engine.settle()
    # Then
    any_engine.assert_each_ran_once(["last"])


@pytest.mark.parametrize("handler", ["wait_for", "wait_outside"])
def test_a_call_while_the_job_runs_is_run_after_it(
    any_engine: Engine, tmp_path: Path, handler: str
) -> None:
    if any_engine.is_sqlite and handler == "wait_for":
        pytest.skip("while it runs, nobody else writes to SQLite")
    # Given a job that is running
    path = tmp_path / "gate"
    declared = getattr(jobs, handler)
    debounced = declared.using(debounce=timedelta(milliseconds=500), unique_by=())
    any_engine.ready_worker()
    debounced.enqueue(job="running", path=str(path))
    any_engine.wait_until(lambda: list(tmp_path.glob("gate.*")), "It never ran")
    # When two calls come, and then it ends
    answers = [debounced.enqueue(job=name, path=str(path)) for name in ("second", "last")]
    Path(f"{path}.go").touch()
    # Then they are one job, which runs after it
    assert [answer.answer for answer in answers] == ["queued", "replaced"]
    any_engine.settle()
    any_engine.assert_each_ran_once(["running", "last"])
    order = list(any_engine.entries.order_by("id").values_list("job", flat=True))
    assert order == ["running", "last"]


@pytest.mark.promise("debounced-payload")
def test_a_worker_is_killed_while_a_debounced_job_runs(engine: Engine, tmp_path: Path) -> None:
    """The call that came meanwhile runs, and so does the job that was interrupted."""
    # Given a job that is running
    path = tmp_path / "gate"
    debounced = jobs.wait_outside.using(debounce=timedelta(milliseconds=300), unique_by=())
    worker = engine.ready_worker()
    debounced.enqueue(job="running", path=str(path))
    engine.wait_until(lambda: list(tmp_path.glob("gate.*")), "It never ran")
    # When a call comes, and the worker is killed
    assert debounced.enqueue(job="last", path=str(path)).is_new
    worker.kill()
    Path(f"{path}.go").touch()
    engine.ready_worker()
    # Then
    engine.settle()
    engine.assert_each_ran_once(["running", "last"])
