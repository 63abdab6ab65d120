"""A Redis that takes connections and answers nothing: its machine swaps, or hangs."""

from __future__ import annotations

import time

import pytest

from kjo_django.coordination.base import CircuitBreaker
from kjo_django.models import Job
from kjo_django.runtime import get_coordination
from tests.ledger import jobs as ledger
from tests.services import RedisServer
from tests.services.fixtures import require
from tests.unit.deliveries import Named, as_job, entries
from tests.unit.engine.bench import reconfigured
from tests.waiting import wait_until

pytestmark = pytest.mark.redis
TIMEOUT = 0.3
GROUPS = 20


@pytest.fixture(scope="module")
def redis():
    require(redis=True)
    with RedisServer() as server:
        yield server


@pytest.fixture
def worker(bench, settings, redis):
    """One whose coordination gives each question so many seconds."""
    coordination = {
        "BACKEND": "kjo_django.coordination.redis.RedisCoordination",
        "OPTIONS": {
            "URL": f"{redis.url}?socket_timeout={TIMEOUT}&socket_connect_timeout={TIMEOUT}"
        },
    }
    worker = reconfigured(settings, bench, COORDINATION=coordination)
    yield worker
    worker.close()


def leases() -> list[str]:
    return list(get_coordination().names("CONS:"))


def show_alive_until_nothing_is_leased(worker) -> None:
    """A server that goes on has first to do what it was asked meanwhile."""
    wait_until(lambda: worker.leases.show_alive() or not leases(), "no lease is left", leases)


@pytest.mark.promise("row-decides")
@pytest.mark.parametrize("atomic", [True, False])
def test_a_worker_waits_for_it_once_and_not_with_every_group(worker, redis, atomic, monkeypatch):
    # Given jobs of which each is a group
    def write(job: str) -> None:
        ledger.write(job)

    as_job(write, atomic=atomic).enqueue_many([{"job": str(n)} for n in range(GROUPS)])
    deliveries = worker.poll()
    unanswered: list[float] = []
    record_failure = CircuitBreaker.record_failure

    def note(breaker, began):
        unanswered.append(began)
        record_failure(breaker, began)

    monkeypatch.setattr(CircuitBreaker, "record_failure", note)
    # When
    redis.pause()
    try:
        for delivery in deliveries:
            worker.run([delivery])
    finally:
        redis.resume()
    # Then the database has decided, and few groups have waited for an answer
    assert set(entries().values()) == {1}
    assert Job.objects.filter(state="completed").count() == GROUPS
    assert 1 <= len(unanswered) < GROUPS / 2
    # And what was leased before it froze, or after, is given back
    show_alive_until_nothing_is_leased(worker)


@pytest.mark.promise("uncounted-deaths")
def test_leases_are_taken_again_when_it_answers(worker, redis):
    # Given a silence
    held = []
    ledger.write.enqueue(job="a")
    as_job(lambda: held.extend(leases()), "bench.note").enqueue()
    first, second = worker.poll()
    redis.pause()
    try:
        worker.run([first])
    finally:
        redis.resume()
    # When its heartbeat hears of the end
    show_alive_until_nothing_is_leased(worker)
    worker.run([second])
    # Then
    assert held == [second.lease]
    assert not leases()


def test_what_is_claimed_again_is_not_given_back_for_the_time_before(worker, redis):
    """A retry comes to the same worker before its heartbeat hears of the end."""
    # Given a lease that could not be given back
    owners = [Named("CONS:LEDGER:a")]
    redis.pause()
    try:
        worker.leases.claim(owners)
        worker.leases.settle(owners)
    finally:
        redis.resume()
    time.sleep(3 * TIMEOUT)  # sleep: until the breaker lets one ask for all
    # When one asks for all, and it answers
    assert worker.leases.claim(owners)[0].acquired
    worker.leases.show_alive()
    # Then
    assert leases() == ["CONS:LEDGER:a"]
    worker.leases.settle(owners)
    assert not leases()
