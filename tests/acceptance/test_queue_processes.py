"""The reliable queue across processes: jobs cancelled while they are consumed, workers killed and
frozen (issue 4, items 2 and 6)."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from kjo_django.patterns.queue import CancelResult
from tests.acceptance.conftest import POSTGRES, REAL
from tests.acceptance.engine import ALIAS, Engine
from tests.ledger.jobs import wait_for, wait_outside
from tests.queueing.jobs import ledger
from tests.waiting import PATIENCE

EVERY = pytest.mark.parametrize("name", ["embedded", POSTGRES, REAL])


@pytest.fixture
def engine(name: str, request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(name)


@EVERY
@pytest.mark.timeout(300)
def test_two_hundred_jobs_cancelled_while_they_are_consumed(engine: Engine) -> None:
    """PJQ-05, PJQ-52, PJQ-53, PJQ-F4: each was either cancelled and never ran, or ran."""
    cancel_while_consumed(engine, 200)


@EVERY
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_jobs_cancelled_while_they_are_consumed(engine: Engine) -> None:
    cancel_while_consumed(engine, 3000)


def cancel_while_consumed(engine: Engine, count: int) -> None:
    # Given
    worker = engine.ready_worker("--concurrency", "2")
    # When each is cancelled at some moment of its life, some of them in time
    answers: dict[str, CancelResult] = {}
    cancelled: set[str] = set()
    while len(answers) < count or len(cancelled) <= 10:
        id = f"job-{len(answers)}"
        ledger.enqueue(id, {"seconds": 0.005})
        engine.wait_for_moment(random.choice([0, 0, 0.005, 0.02, 0.1]))
        answers[id] = ledger.cancel(id)
        if answers[id] is CancelResult.CANCELLED:
            cancelled.add(id)
    engine.settle()
    # Then
    ran = engine.ledger()
    assert not cancelled & ran.keys()
    assert ran.keys() == answers.keys() - cancelled
    assert set(ran.values()) == {1}
    assert set(answers.values()) <= {
        CancelResult.CANCELLED,
        CancelResult.COMPLETED,
        CancelResult.PROCESSING,
    }
    assert worker.stop() == 0


@EVERY
@pytest.mark.timeout(200)
def test_a_waiter_gets_the_result_of_the_worker_after_the_one_that_was_killed(
    engine: Engine,
) -> None:
    """PJQ-70, PJQ-72, PJQ-74, PJQ-F9, PJQ-F15."""

    def wait() -> Any:
        try:
            return ledger.enqueue_and_wait("job", {"seconds": 2}, timeout=60)
        finally:
            connections[ALIAS].close()

    first = engine.ready_worker()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(wait)
        engine.wait_until(lambda: engine.jobs.filter(state="queued").exists(), "Nothing queued")
        engine.wait_for_moment(0.5)
        # When
        first.kill()
        second = engine.worker()
        # Then
        assert answer.result(PATIENCE) == {"id": "job", "attempts": 2}
    engine.assert_each_ran_once(["job"])
    assert second.stop() == 0


# A frozen process that holds a transaction open: with SQLite it holds the whole file, so there only
# handlers outside a transaction can be run elsewhere meanwhile.
FROZEN = [
    pytest.param("embedded", wait_outside, id="embedded-outside"),
    pytest.param("postgres", wait_for, marks=pytest.mark.postgres, id="postgres-atomic"),
    pytest.param("postgres", wait_outside, marks=pytest.mark.postgres, id="postgres-outside"),
    pytest.param("real", wait_for, marks=REAL.marks, id="real-atomic"),
    pytest.param("real", wait_outside, marks=REAL.marks, id="real-outside"),
]


@pytest.mark.medium("embedded")
@pytest.mark.parametrize(("name", "handler"), FROZEN)
@pytest.mark.timeout(200)
def test_a_frozen_worker_loses(engine: Engine, handler: Any, tmp_path: Path) -> None:
    """PJQ-10, PJQ-35, PJQ-70, PJQ-71, PJQ-73, PJQ-F10, PJQ-F14: the freeze counts as an attempt,
    another worker runs the job, and the frozen one, continued, changes nothing."""
    path = tmp_path / "job"
    first = engine.ready_worker()
    handler.using(id="job", max_attempts=2).enqueue(job="job", path=str(path))
    engine.wait_until(Path(f"{path}.{first.pid}").exists, "The first worker never ran it")
    # When the process stands still in the middle of the job
    engine.freeze(first)
    second = engine.worker()
    # Then the other one runs it
    engine.wait_until(Path(f"{path}.{second.pid}").exists, "The second worker never ran it")
    Path(f"{path}.{second.pid}.go").touch()
    engine.wait_until(engine.jobs.filter(state="completed").exists, "It was never completed")
    # And when the first wakes up and finishes
    first.thaw()
    Path(f"{path}.{first.pid}.go").touch()
    handler.using(id="next").enqueue(job="next", path=str(path))
    Path(f"{path}.go").touch()
    engine.settle()
    # Then its outcome is refused
    job = engine.jobs.get(unique_id="job")
    assert (job.state, job.attempts) == ("completed", 2)
    assert ledger.get_result("job")["pid"] == second.pid
    assert [failure.attempt for failure in engine.failures.all()] == [1]
    if handler is not wait_for:
        engine.wait_until(
            engine.entries.filter(job="job", note="attempt 1").exists, "The first never came back"
        )
    # And of its writes, those inside the transaction are undone; outside they are at-least-once
    notes = sorted(engine.entries.filter(job="job").values_list("note", flat=True))
    assert notes == (["attempt 2"] if handler is wait_for else ["attempt 1", "attempt 2"])
    assert [first.stop(), second.stop()] == [0, 0]


@pytest.mark.parametrize(
    ("name", "handler"),
    [FROZEN[0], FROZEN[1]],
    ids=["embedded-outside", "postgres-atomic"],
)
@pytest.mark.timeout(200)
def test_a_freeze_spends_the_last_attempt(engine: Engine, handler: Any, tmp_path: Path) -> None:
    """PJQ-F10: a job whose only attempt froze its worker ends as stalled, not again and again."""
    path = tmp_path / "job"
    first = engine.ready_worker()
    handler.using(id="job", max_attempts=1).enqueue(job="job", path=str(path))
    engine.wait_until(Path(f"{path}.{first.pid}").exists, "The first worker never ran it")
    engine.freeze(first)
    second = engine.worker()
    engine.wait_until(engine.dead_letters.exists, "It was never given up")
    assert engine.dead_letters.get().reason == "stalled"
    first.thaw()
    Path(f"{path}.go").touch()
    assert [first.stop(), second.stop()] == [0, 0]
    assert engine.entries.exists() == (handler is wait_outside)
    assert ledger.get_status("job").state == "failed"
