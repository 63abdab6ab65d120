"""Limits of a queue, changed while its worker runs."""

from __future__ import annotations

import pytest

from kjo_django.operations import queues
from tests.acceptance.conftest import SELDOM_ON_MARIADB
from tests.acceptance.engine import Engine
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)


@SELDOM_ON_MARIADB
def test_a_running_worker_obeys_new_limits_also_for_jobs_enqueued_before(engine: Engine) -> None:
    # Given a worker, and a job of five attempts that waits for its second one
    engine.configure(BACKOFF_BASE=3, BACKOFF_JITTER=0)
    worker = engine.ready_worker()
    jobs.write_attempt.enqueue(job="unlucky", fail_times=99)
    engine.wait_until(
        lambda: engine.jobs.filter(state="failing", attempts=1).exists(), "It never failed"
    )
    # When its queue's limit is two, and the next back-off is long
    assert queues.set_policy("ledger", max_attempts=2, actor="ann")
    # Then the second attempt is its last
    engine.wait_until(lambda: engine.jobs.filter(state="failed").exists(), "It never died")
    assert engine.jobs.get().attempts == 2
    assert engine.dead_letters.get().reason == "exhausted"
    # When more are allowed, soon after one another
    queues.set_policy("ledger", max_attempts=7, backoff_base=1, actor="ann")
    engine.wait_for_moment(2.0)
    jobs.write_attempt.using(max_attempts=1).enqueue(job="lucky", fail_times=2)
    # Then a job of one attempt gets its third
    engine.settle()
    assert engine.ledger() == {"lucky": 1}
    assert engine.entries.get().note == "attempt 3"
    assert worker.stop() == 0
