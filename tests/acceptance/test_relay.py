"""A relay that dies between publish and record (issue 2, item 4; promise 1).

What it had published goes out once more, and the consumer absorbs the second copy: each job adds
exactly one entry.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections, transaction

from kjo_django.conf import get_settings
from kjo_django.enqueue.storing import record_of
from kjo_django.runtime import get_transport
from kjo_django.states import JobState
from kjo_django.transports.base import OutgoingRecord
from tests.acceptance.conftest import SELDOM_ON_MARIADB
from tests.acceptance.engine import ALIAS, Engine
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(180)


@pytest.mark.promise("job-is-run")
@pytest.mark.medium("1")
@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.postgres
@pytest.mark.parametrize("batches", [1, 2])
def test_a_relay_killed_between_publish_and_record(real: Engine, batches: int) -> None:
    """Of a backlog, one batch is being recorded as the next goes out: two are lost at most."""
    # Given committed jobs, some of which fail at first, and a relay that publishes and dies
    real.configure(RELAY_BATCH_SIZE=40)
    real.create_topics()
    names = [f"job-{number}" for number in range(120)]
    for number, name in enumerate(names):
        if number % 3:
            jobs.write.enqueue(job=name)
        else:
            jobs.write_attempt.enqueue(job=name, fail_times=number % 2)
    relay = real.run("tests.acceptance.relay_that_dies", str(batches))
    assert relay.wait() == -9, relay.log_tail()
    # Then the database does not know of it
    assert real.jobs.filter(state=JobState.PENDING).count() == 120
    assert real.lag() == 40 * batches
    # When another relay and a worker come
    worker = real.worker()
    real.settle()
    assert worker.stop() == 0
    # Then every job ran once, though the topic holds some of them twice
    real.assert_each_ran_once(names)
    assert real.failures.count() == 20


@pytest.mark.promise("stale-message")
@pytest.mark.medium("real")
@SELDOM_ON_MARIADB
def test_copies_of_a_message_that_fails_at_first(engine: Engine) -> None:
    """Both copies in one group: the marker of the failed one must not make its retry a duplicate
    (found by killing workers on the real engine)."""
    # Given a handler known to be quick, so that several of its jobs share a group
    engine.drain()
    names = [f"quick-{number}" for number in range(50)]
    jobs.write_attempt.enqueue_many({"job": name} for name in names)
    engine.drain()
    # And jobs whose messages are there twice, as a crashed relay leaves them
    queue = get_settings().queue("ledger")
    failing = [f"failing-{number}" for number in range(50)]
    with transaction.atomic(using=ALIAS):
        for result in jobs.write_attempt.enqueue_many(
            {"job": name, "fail_times": 1} for name in failing
        ):
            job = engine.jobs.get(pk=result.job_id)
            get_transport().publish([record_of(job, queue)])
    # When they run
    worker = engine.worker("--concurrency", "1")
    engine.settle()
    assert worker.stop() == 0
    # Then each has failed once and run once
    engine.assert_each_ran_once([*names, *failing])
    assert engine.failures.count() == 50


@pytest.mark.promise("stale-message")
@SELDOM_ON_MARIADB
def test_a_stale_copy_before_the_retry(engine: Engine) -> None:
    """A late copy of attempt 1 in one group with attempt 2: the copy is dropped, the retry runs."""
    # Given a handler known to be quick
    engine.drain()
    jobs.write_attempt.enqueue_many({"job": f"quick-{number}"} for number in range(50))
    engine.drain()
    # And jobs that failed once, a copy of whose first message comes just before the second
    queue = get_settings().queue("ledger")
    names = [f"failed-{number}" for number in range(20)]
    with transaction.atomic(using=ALIAS):
        stale: list[OutgoingRecord] = []
        for result in jobs.write_attempt.enqueue_many({"job": name} for name in names):
            job = engine.jobs.get(pk=result.job_id)
            stale.append(record_of(job, queue))
            if not get_transport().capabilities.transactional:
                get_transport().publish([stale[-1]])
        engine.jobs.filter(state__in=["queued", "pending"]).update(
            state=JobState.QUEUED, attempts=1
        )
        for result in engine.jobs.filter(state=JobState.QUEUED):
            get_transport().publish([record_of(result, queue)])
    # When they run
    worker = engine.worker("--concurrency", "1")
    engine.settle()
    assert worker.stop() == 0
    # Then none is lost
    engine.assert_each_ran_once([*names, *(f"quick-{number}" for number in range(50))])


@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.postgres
def test_a_long_job_does_not_hold_up_the_relay(real: Engine) -> None:
    """A consumer may be quicker than the relay's note of what it published. It then has the row
    locked for as long as its job runs; everything else must go out all the same."""
    # Given a job whose row is locked, as a consumer does that is running it
    real.create_topics()
    running = jobs.write.enqueue(job="running")
    with transaction.atomic(using=ALIAS):
        real.jobs.select_for_update(no_key=True).get(pk=running.job_id)
        relay = real.relay()
        real.wait_until(lambda: real.lag() == 1, "The relay published nothing")
        # When further jobs are enqueued
        with ThreadPoolExecutor(1) as pool:
            pool.submit(enqueue_elsewhere, ["a", "b", "c"]).result()
        # Then they are published, once, and so was the first
        real.wait_until(lambda: real.lag() == 4, "The relay waits for the job that runs")
        real.wait_for_moment(1.5)  # the time of several looks at what is due
        assert real.lag() == 4
    # And what could not be noted is noted when the lock is gone
    real.wait_until(lambda: not real.jobs.filter(state=JobState.PENDING).exists(), "Never noted")
    assert relay.stop() == 0, relay.log_tail()
    real.drain()
    real.assert_each_ran_once(["running", "a", "b", "c"])


def enqueue_elsewhere(names: list[str]) -> None:
    """Enqueue on a connection of this thread's own."""
    try:
        jobs.write.enqueue_many({"job": name} for name in names)
    finally:
        connections.close_all()
