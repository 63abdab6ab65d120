"""Promise 3 (issue 2, item 5): a job that kills its worker ends in the dead letters, alone."""

from __future__ import annotations

import pytest

from kjo_django.states import JobState
from tests.acceptance.engine import Engine
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)


@pytest.mark.promise("killer-job")
def test_a_job_that_kills_its_process(engine: Engine) -> None:
    # Given supervised workers, a killer, and bystanders before, beside and behind it that may be
    # tried no more often than the killer
    before = [f"before-{number}" for number in range(20)]
    beside = [f"beside-{number}" for number in range(6)]
    behind = [f"behind-{number}" for number in range(40)]
    jobs.write.using(max_attempts=3).enqueue_many({"job": name} for name in before)
    jobs.write_slowly.using(max_attempts=3).enqueue_many(
        {"job": name, "milliseconds": 300} for name in beside[:3]
    )
    killer = jobs.kill_worker.enqueue(job="killer")
    jobs.write_slowly.using(max_attempts=3).enqueue_many(
        {"job": name, "milliseconds": 300} for name in beside[3:]
    )
    jobs.write.using(max_attempts=3).enqueue_many({"job": name} for name in behind)
    # When they run
    worker = engine.worker("--processes", "2", "--concurrency", "4")
    engine.wait_until(
        lambda: engine.jobs.get(pk=killer.job_id).state == JobState.FAILED, "The killer goes on"
    )
    # Then the killer is dead after its three attempts, and the reason is told
    letter = engine.dead_letters.get(job_id=killer.job_id)
    assert (letter.reason, letter.attempts) == ("stalled", 3)
    assert "died or froze" in letter.error
    # And jobs go on, those enqueued since as well
    jobs.write.enqueue(job="since")
    engine.settle()
    assert worker.stop() == 0, worker.log_tail()
    # And nobody else came to harm
    assert engine.dead_letters.count() == 1, list(
        engine.dead_letters.values_list("handler", "reason", "attempts")
    )
    engine.assert_each_ran_once([*before, *beside, *behind, "since"])


def test_jobs_that_began_in_one_group_with_a_killer(any_engine: Engine) -> None:
    engine = any_engine
    # Given a killer that begins with many, who may be tried as often as it
    worker = engine.worker("--concurrency", "1")
    first = [f"first-{number}" for number in range(60)]
    jobs.write_wait_or_kill.enqueue_many({"job": name} for name in first)
    engine.settle()
    mortal = jobs.write_wait_or_kill.using(max_attempts=4)
    others = [f"other-{number}" for number in range(60)]
    payloads = [{"job": name} for name in others]
    payloads.insert(0, {"job": "killer", "kill": True})
    mortal.enqueue_many(payloads)
    # When it kills worker after worker
    while not engine.dead_letters.exists():
        engine.wait_until(
            lambda w=worker: not w.is_running or engine.dead_letters.exists(), "It does not kill"
        )
        if not worker.is_running:
            worker = engine.worker("--concurrency", "1")
    engine.settle()
    # Then it is dead after its attempts, and has taken one from the others at most
    letter = engine.dead_letters.get()
    assert (letter.reason, letter.attempts) == ("stalled", 4)
    done = engine.jobs.filter(state=JobState.COMPLETED)
    assert done.count() == len(first) + len(others)
    assert max(done.values_list("attempts", flat=True)) <= 2
    assert worker.stop() == 0, worker.log_tail()
