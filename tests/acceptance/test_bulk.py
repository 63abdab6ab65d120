"""Large work as a job, run by a real worker that does not live to see its end."""

from __future__ import annotations

import pytest

from kjo_django.enqueue.job_status import progress_of
from kjo_django.models import DeadLetter, Job
from kjo_django.operations import bulk
from kjo_django.operations.dead_letters import DeadLetterFilter
from tests.acceptance.conftest import SELDOM_ON_MARIADB
from tests.acceptance.engine import ALIAS, Engine
from tests.factories import DeadLetterFactory, JobFactory

pytestmark = pytest.mark.timeout(180)
COUNT = 200


def given_dead_letters() -> list[str]:
    """Failed jobs with their open dead letters."""
    names = [f"dead-{number}" for number in range(COUNT)]
    jobs = [
        JobFactory.build(
            queue="ledger",
            handler="ledger.write",
            payload=b'{"job": "%s"}' % name.encode(),
            failed=True,
        )
        for name in names
    ]
    letters = [
        DeadLetterFactory.build(
            job=job, message_id=job.message_id, queue="ledger", handler=job.handler
        )
        for job in jobs
    ]
    Job.objects.using(ALIAS).bulk_create(jobs)
    DeadLetter.objects.using(ALIAS).bulk_create(letters)
    return names


@SELDOM_ON_MARIADB
def test_a_replay_whose_worker_is_killed_goes_on_and_replays_each_once(engine: Engine) -> None:
    # Given a worker that replays dead letters, at a pace
    engine.configure(OPERATIONS_QUEUE="ledger")
    names = given_dead_letters()
    worker = engine.ready_worker()
    letters = engine.dead_letters.filter(state="open")
    job = bulk.start_bulk("replay_letters", DeadLetterFilter(), actor="ann", rate=50)
    engine.wait_until(lambda: letters.count() <= COUNT - 30, "It never began")
    # When it is killed half-way
    worker.kill()
    left = letters.count()
    assert 0 < left < COUNT
    # Then another one goes on with what is left
    other = engine.worker()
    engine.wait_until(lambda: letters.count() < left, "Nobody went on")
    engine.settle()
    job.refresh_from_db(using=ALIAS)
    assert job.state == "completed"
    assert letters.count() == 0
    engine.assert_each_ran_once(names)
    assert set(engine.dead_letters.values_list("replay_count", "note")) == {(1, "replayed by ann")}
    # And had told how far it was
    assert progress_of([job.pk])[str(job.pk)].text.endswith(f"of {left}")
    assert other.stop() == 0
