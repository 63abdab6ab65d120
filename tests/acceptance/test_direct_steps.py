"""Steps that a worker runs itself which has released them, on the real engine: whatever befalls the
worker, each takes effect once."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from kjo_django import Workflow, chain
from kjo_django.models import Job
from kjo_django.states import JobState
from tests.acceptance.engine import Engine
from tests.acceptance.test_shutdown import let_go, started
from tests.ledger import jobs

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.kafka,
    pytest.mark.redis,
    pytest.mark.postgres,
]


def row_of(engine: Engine, name: str) -> Job:
    return next(job for job in engine.jobs.all() if job.arguments["job"] == name)


@pytest.mark.promise("steps")
@pytest.mark.medium
def test_a_step_runs_elsewhere_whose_worker_is_killed_when_it_has_released_it(
    real: Engine,
) -> None:
    # Given a worker that is killed when the first step has been committed
    first = jobs.write_and_signal.step(job="a", number=int(signal.SIGKILL))
    worker = real.ready_worker("--concurrency", "2")
    chain(first, jobs.write.step(job="b"), jobs.write.step(job="c")).enqueue()
    real.wait_until(lambda: not worker.is_running, "It was not killed")
    # And which has the next step
    assert real.ledger() == {"a": 1}
    assert (row_of(real, "b").state, row_of(real, "b").topic) == (JobState.PENDING, "")
    assert row_of(real, "b").lease_token
    # When another one works
    other = real.worker("--concurrency", "2")
    real.settle()
    assert other.stop() == 0, other.log_tail()
    # Then it has run that step once, in its first attempt, from the topic
    real.assert_each_ran_once("abc")
    assert (row_of(real, "b").attempts, row_of(real, "b").topic) == (1, real.topic)
    # And the last one without it
    assert (row_of(real, "c").attempts, row_of(real, "c").topic) == (1, "")
    assert real.failures.count() == real.dead_letters.count() == 0


def test_a_step_runs_once_whose_worker_freezes_until_the_relay_has_published_it(
    real: Engine,
) -> None:
    # Given a worker that freezes when the first step has been committed
    first = jobs.write_and_signal.step(job="a", number=int(signal.SIGSTOP))
    frozen = real.ready_worker("--concurrency", "2")
    chain(first, jobs.write_attempt.step(job="b")).enqueue()
    real.wait_until(lambda: real.ledger() == {"a": 1}, "The first step does not run")
    # And another one that runs the next step
    other = real.worker("--concurrency", "2")
    real.wait_until(lambda: real.ledger() == {"a": 1, "b": 1}, "The next step does not run")
    # When the first comes back with its step
    frozen.thaw()
    real.wait_until(lambda: real.settled_count(frozen.pid) == 1, "It does not go on")
    real.settle()
    assert [frozen.stop(), other.stop()] == [0, 0]
    # Then the step has run once
    real.assert_each_ran_once("ab")
    assert row_of(real, "b").attempts == 1


def test_a_step_takes_effect_once_whose_worker_freezes_in_it(real: Engine, tmp_path: Path) -> None:
    # Given a worker that freezes in a step that it has handed over to itself
    frozen = real.ready_worker("--concurrency", "2")
    path = tmp_path / "b"
    chain(jobs.write.step(job="a"), jobs.wait_for.step(job="b", path=str(path))).enqueue()
    real.wait_until(lambda: started(path, frozen.pid), "It does not begin the step")
    assert row_of(real, "b").lease_token
    real.freeze(frozen)
    # When another one takes the step over, from the topic
    other = real.worker("--concurrency", "2")
    real.wait_until(lambda: row_of(real, "b").topic or started(path, other.pid), "Nobody does")
    let_go(path)
    real.wait_until(lambda: real.ledger() == {"a": 1, "b": 1}, "It does not end")
    frozen.thaw()
    real.settle()
    assert [frozen.stop(), other.stop()] == [0, 0]
    # Then it has taken effect once
    real.assert_each_ran_once("ab")


@pytest.mark.promise("stop-spends-nothing")
def test_what_a_worker_that_stops_has_released_runs_elsewhere_at_once(
    real: Engine, tmp_path: Path
) -> None:
    # Given a worker that is told to stop within a step, and leases that last for long
    real.configure(RECORD_LEASE=600)
    worker = real.ready_worker("--concurrency", "2")
    path = tmp_path / "a"
    chain(jobs.wait_for.step(job="a", path=str(path)), jobs.write.step(job="b")).enqueue()
    real.wait_until(lambda: started(path, worker.pid), "It does not begin the step")
    worker.terminate()
    real.wait_until(lambda: "finishing what runs" in worker.log, "It was not told")
    # When the step ends, and so does the worker
    let_go(path)
    assert worker.wait() == 0, worker.log_tail()
    # Then another worker runs the next one
    other = real.worker("--concurrency", "2")
    real.settle()
    assert other.stop() == 0
    real.assert_each_ran_once("ab")


def test_steps_against_which_something_may_stand_are_published(real: Engine) -> None:
    # Given steps that wait for one, and a worker that has a lane for each
    steps: dict[str, Any] = {
        "plain": jobs.write.step(job="plain"),
        "outside": jobs.write_outside.step(job="outside"),
        "key": jobs.write_keyed.step(job="key", key="k"),
        "priority": jobs.write.using(priority=5).step(job="priority"),
        "delay": jobs.write.using(delay=8).step(job="delay"),
    }
    worker = real.ready_worker("--concurrency", "8")
    with Workflow("fan-out") as w:
        first = w.add(jobs.write.step(job="first"))
        for step in steps.values():
            w.add(step, after=first)
    # When all have run
    real.settle()
    assert worker.stop() == 0
    real.assert_each_ran_once(["first", *steps])
    # Then those have been published that have a key, a priority or a delay
    published = {job.arguments["job"] for job in real.jobs.exclude(topic="")}
    assert published == {"first", "key", "priority", "delay"}
