"""A deploy that replaces web processes before workers, on the real engines (FINDINGS 2.10 o).

In the tier of each promise once on each engine: how a job comes back is each transport's own.
"""

from __future__ import annotations

import pytest
from django.utils import timezone

from kjo_django.models import TransportMessage
from tests.acceptance.engine import ALIAS, Engine
from tests.ledger import jobs as ledger

pytestmark = pytest.mark.timeout(180)


@pytest.mark.medium("real")
def test_a_job_of_the_next_release_waits_for_its_worker(any_engine: Engine) -> None:
    # Given a worker of the release before
    engine = any_engine
    engine.variables["KJO_TEST_UNKNOWN"] = "ledger.write"
    before = engine.ready_worker()
    # When a web process enqueues what it does not know, and it meets that
    ledger.write.enqueue(job="new")
    engine.wait_until(
        lambda: engine.jobs.filter(failures__code="unknown_type").exists(), "It was never refused"
    )
    # Then nothing is lost when the worker of the next release takes its place
    assert before.stop() == 0, before.log_tail()
    del engine.variables["KJO_TEST_UNKNOWN"]
    for rows in (engine.jobs, TransportMessage.objects.using(ALIAS)):
        rows.update(available_at=timezone.now())
    engine.ready_worker()
    engine.settle()
    engine.assert_each_ran_once(["new"])
    assert engine.jobs.get().attempts == 1
    assert not engine.dead_letters.exists()
