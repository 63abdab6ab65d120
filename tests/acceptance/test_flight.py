"""Coroutines in flight when their worker dies, or is told to stop."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from statistics import median

import pytest

from tests.acceptance.conftest import SELDOM_ON_MARIADB
from tests.acceptance.engine import Engine
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)


@pytest.mark.promise("lease-expires")
@pytest.mark.medium("postgres")
def test_a_worker_killed_with_coroutines_in_flight(any_engine: Engine) -> None:
    engine = any_engine
    # Given a worker with coroutines in flight, some of them done
    worker = engine.ready_worker("--concurrency", "2")
    jobs.sleep_async.enqueue_many({"seconds": 0.1} for _ in range(20))
    jobs.sleep_async.enqueue_many({"seconds": 60} for _ in range(5))
    engine.wait_until(
        lambda: engine.jobs.filter(state="completed").count() == 20, "The quick never landed"
    )
    engine.wait_until(
        lambda: engine.jobs.exclude(lease_token="").count() == 5, "The slow never took off"
    )
    # When it is killed, and the sleepers are told to sleep less
    worker.kill()
    assert not engine.dead_letters.exists()
    open_jobs = engine.jobs.exclude(state="completed")
    assert [job.attempts for job in open_jobs] == [0] * 5
    open_jobs.update(max_attempts=1)
    # Then others take over at once: the lost runs were the last these had
    engine.worker()
    engine.wait_until(lambda: engine.dead_letters.count() == 5, "They were not taken over")
    assert set(engine.dead_letters.values_list("reason", flat=True)) == {"stalled"}
    # And what had landed did not run again
    done = engine.jobs.filter(state="completed")
    assert set(done.values_list("attempts", flat=True)) == {1}
    assert done.count() == 20


@pytest.mark.promise("death-is-an-attempt")
def test_a_crash_costs_an_attempt_and_nothing_is_lost(engine: Engine) -> None:
    # Given
    first = engine.ready_worker()
    jobs.sleep_async.enqueue_many({"seconds": 0.5} for _ in range(12))
    engine.wait_until(lambda: engine.jobs.exclude(lease_token="").exists(), "They never took off")
    # When
    first.kill()
    last = engine.worker()
    engine.settle()
    # Then
    assert last.stop() == 0, last.log_tail()
    assert set(engine.jobs.values_list("state", flat=True)) == {"completed"}
    assert set(engine.jobs.values_list("attempts", flat=True)) <= {1, 2}


@SELDOM_ON_MARIADB
def test_what_was_in_flight_in_a_dead_worker_comes_back_beside_what_is_new(engine: Engine) -> None:
    # Given a worker that dies with many in flight
    first = engine.ready_worker()
    jobs.sleep_async_by_attempt.enqueue_many({"seconds": [600, 0.5]} for _ in range(40))
    engine.wait_until(
        lambda: engine.jobs.exclude(lease_token="").count() == 40, "They never took off"
    )
    first.kill()
    # When another one takes over, and runs them one by one
    engine.worker()
    engine.wait_until(engine.jobs.filter(state="completed").exists, "Nothing was taken over")
    new = jobs.sleep_async.enqueue(seconds=0)
    # Then what is new does not wait for them
    engine.wait_until(engine.jobs.filter(pk=new.job_id, state="completed").exists, "It waited")
    assert engine.jobs.exclude(state="completed").exists()
    engine.settle()
    assert set(engine.jobs.values_list("state", flat=True)) == {"completed"}
    assert set(engine.jobs.values_list("attempts", flat=True)) <= {1, 2}
    # And each of them begins when the one before it has ended, whatever else the lanes do
    starts = engine.jobs.filter(attempts=2).order_by("started_at")
    starts = list(starts.values_list("started_at", flat=True))
    between = [later - earlier for earlier, later in pairwise(starts)]
    assert median(between) < timedelta(seconds=0.8), between


def test_what_flies_lands_before_a_worker_ends(engine: Engine) -> None:
    # Given
    worker = engine.ready_worker()
    jobs.sleep_async.enqueue_many({"seconds": 1} for _ in range(50))
    engine.wait_until(lambda: engine.jobs.exclude(lease_token="").exists(), "They never took off")
    flying = set(engine.jobs.exclude(lease_token="").values_list("pk", flat=True))
    # When
    assert worker.stop() == 0, worker.log_tail()
    # Then
    landed = set(engine.jobs.filter(state="completed").values_list("pk", flat=True))
    assert flying <= landed
    assert set(engine.jobs.exclude(pk__in=landed).values_list("attempts", flat=True)) <= {0}
