"""Leases of rows and of coordination that a worker keeps although nothing runs under them."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from django.db import connection

from kjo_django import job
from kjo_django.engine import recorder
from kjo_django.engine.handler.timeouts import RunAbandoned
from kjo_django.exceptions import CoordinationError
from kjo_django.ids import uuid7
from kjo_django.models import Job
from kjo_django.runtime import get_coordination
from tests.unit.deliveries import Named, as_job
from tests.unit.engine.bench import both, settled
from tests.waiting import PATIENCE, wait_until

pytestmark = both


@pytest.mark.parametrize("where", ["lane", "loop"])
def test_a_rated_coroutine_that_misses_its_permit_runs_when_it_has_another(
    where, bench, forgotten_definitions, monkeypatch
):
    """Its worker kept its row's lease, and deferred it for ever."""
    # Given
    ran = []

    @job(name="bench.rated", queue="ledger", atomic=False, rate="5/s")
    async def rated() -> None:
        ran.append(1)

    asked, name = {
        "lane": (bench.pipeline.limiter, "await_permits"),
        "loop": (bench.pipeline._loop, "_use_permits"),
    }[where]
    ask = getattr(asked, name)
    refusals = [lambda deliveries: []]

    def refuse_once(deliveries):
        return (refusals.pop() if refusals else ask)(deliveries)

    monkeypatch.setattr(asked, name, refuse_once)
    rated.enqueue()
    # When
    (left,) = bench.run()
    # Then
    assert not ran
    assert Job.objects.get().lease_token == ""
    assert not bench.leases.held_rows()
    # And it runs
    assert bench.run([left]) == []
    assert ran == [1]
    assert Job.objects.get().state == "completed"
    assert settled(bench)


def test_of_a_group_whose_thread_is_given_up_no_row_stays_held(bench, monkeypatch):
    """A job that had been settled there, requeued later, was deferred by this worker for ever."""
    # Given a group whose first job is settled, and whose second one hangs
    hangs, ends = threading.Event(), threading.Event()

    def work(job: str) -> None:
        if job == "hangs":
            hangs.set()
            ends.wait(PATIENCE)

    monkeypatch.setattr(recorder, "UNRECORDED", 0.0)  # what has run is settled at once
    outside = as_job(work, atomic=False, max_attempts=1)
    first = outside.enqueue(job="first")
    outside.enqueue(job="hangs")
    deliveries = bench.poll()

    def run() -> None:
        try:
            with suppress(RunAbandoned):
                bench.pipeline.run(deliveries)
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert hangs.wait(PATIENCE)
    wait_until(lambda: first.status == "completed")
    # When its thread is given up
    hung = [(job.context, job.seconds, job.delivery) for job in bench.watch.jobs()]
    bench.watch.abandon(thread.ident)
    left = bench.pipeline.abandon(deliveries, hung)
    ends.set()
    thread.join(PATIENCE)
    # Then
    assert not bench.leases.held_rows()
    bench.run(left)
    assert Job.objects.filter(state="failed").count() == 1


def test_a_lease_cannot_be_taken_anew_while_it_is_released_late(bench, monkeypatch):
    """It was released by the heartbeat just after a lane had taken it."""
    # Given a lease that could not be released during an outage
    coordination = get_coordination()
    release, claims = coordination.release, []
    names = [f"CONS:{uuid7()}"]
    owners = [Named(names[0])]
    with monkeypatch.context() as patch:
        patch.setattr(coordination, "release", raising)
        bench.leases.claim(owners)
        bench.leases.settle(owners)

    def claiming(*arguments, **options):
        claims.extend(bench.leases.claim(owners))
        return release(*arguments, **options)

    monkeypatch.setattr(coordination, "release", claiming)
    # When a lane asks for it while the heartbeat releases it
    bench.leases.show_alive()
    # Then
    assert [claim.acquired for claim in claims] == [False]
    assert not coordination.holders(names)
    assert [claim.acquired for claim in bench.leases.claim(owners)] == [True]


def test_a_lease_that_this_worker_has_not_is_not_given_back(bench, monkeypatch):
    # Given what another worker, or nobody, has leased
    coordination, asked = get_coordination(), []
    theirs = f"CONS:{uuid7()}"
    assert coordination.claim([theirs], "theirs", bench.leases.ttl)[0].acquired
    monkeypatch.setattr(coordination, "release", lambda names, *_, **__: asked.append(names))
    # When
    bench.leases.release([theirs, f"CONS:{uuid7()}"])
    # Then coordination is not even asked
    assert not asked


def raising(*arguments, **options):
    raise CoordinationError("away")
