"""A relay that dies between publish and record (issue 2, item 4; promise 1).

What it had published goes out once more, and the consumer absorbs the second copy: each job adds
exactly one entry.
"""

from __future__ import annotations

import pytest
from django.db import transaction

from kjo_django.backends import get_transport
from kjo_django.conf import get_settings
from kjo_django.producer.dispatch import record_of
from kjo_django.states import JobState
from kjo_django.transports.base import OutgoingRecord
from tests.acceptance.engine import ALIAS, Engine
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)


@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.postgres
def test_a_relay_killed_between_publish_and_record(real: Engine) -> None:
    # Given committed jobs, some of which fail at first, and a relay that publishes and dies
    real.configure(RELAY_BATCH_SIZE=40)
    real.create_topics()
    names = [f"job-{number}" for number in range(120)]
    for number, name in enumerate(names):
        if number % 3:
            jobs.write.enqueue(job=name)
        else:
            jobs.write_attempt.enqueue(job=name, fail_times=number % 2)
    relay = real.run("tests.acceptance.relay_that_dies")
    assert relay.wait() == -9, relay.log_tail()
    # Then the database does not know of it
    assert real.jobs.filter(state=JobState.PENDING).count() == 120
    assert real.lag() == 40
    # When another relay and a worker come
    worker = real.worker()
    real.settle()
    assert worker.stop() == 0
    # Then every job ran once, though the topic holds 40 of them twice
    real.assert_each_ran_once(names)
    assert real.failures.count() == 20


def test_copies_of_a_message_that_fails_at_first(any_engine: Engine) -> None:
    """Both copies in one group: the marker of the failed one must not make its retry a duplicate
    (found by killing workers on the real engine)."""
    # Given a handler known to be quick, so that several of its jobs share a group
    any_engine.drain()
    names = [f"quick-{number}" for number in range(50)]
    jobs.write_attempt.enqueue_many({"job": name} for name in names)
    any_engine.drain()
    # And jobs whose messages are there twice, as a crashed relay leaves them
    queue = get_settings().queue("ledger")
    failing = [f"failing-{number}" for number in range(50)]
    with transaction.atomic(using=ALIAS):
        for result in jobs.write_attempt.enqueue_many(
            {"job": name, "fail_times": 1} for name in failing
        ):
            job = any_engine.jobs.get(pk=result.job_id)
            get_transport().publish([record_of(job, queue)])
    # When they run
    worker = any_engine.worker("--concurrency", "1")
    any_engine.settle()
    assert worker.stop() == 0
    # Then each has failed once and run once
    any_engine.assert_each_ran_once([*names, *failing])
    assert any_engine.failures.count() == 50


def test_a_stale_copy_before_the_retry(any_engine: Engine) -> None:
    """A late copy of attempt 1 in one group with attempt 2: the copy is dropped, the retry runs."""
    # Given a handler known to be quick
    any_engine.drain()
    jobs.write_attempt.enqueue_many({"job": f"quick-{number}"} for number in range(50))
    any_engine.drain()
    # And jobs that failed once, a copy of whose first message comes just before the second
    queue = get_settings().queue("ledger")
    names = [f"failed-{number}" for number in range(20)]
    with transaction.atomic(using=ALIAS):
        stale: list[OutgoingRecord] = []
        for result in jobs.write_attempt.enqueue_many({"job": name} for name in names):
            job = any_engine.jobs.get(pk=result.job_id)
            stale.append(record_of(job, queue))
            if not get_transport().capabilities.transactional:
                get_transport().publish([stale[-1]])
        any_engine.jobs.filter(state__in=["queued", "pending"]).update(
            state=JobState.QUEUED, attempts=1
        )
        for result in any_engine.jobs.filter(state=JobState.QUEUED):
            get_transport().publish([record_of(result, queue)])
    # When they run
    worker = any_engine.worker("--concurrency", "1")
    any_engine.settle()
    assert worker.stop() == 0
    # Then none is lost
    any_engine.assert_each_ran_once([*names, *(f"quick-{number}" for number in range(50))])
