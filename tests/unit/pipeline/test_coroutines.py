"""Handlers that are coroutines."""

from __future__ import annotations

import asyncio

from kjo_django.engine.attempt import Ending, Mode
from kjo_django.enqueue.storing import result_of
from kjo_django.models import Job
from tests.ledger.models import Entry
from tests.unit.deliveries import as_job, entries
from tests.unit.pipeline.bench import both, settled


@both
def test_a_coroutine_writes_within_the_groups_transaction(bench, transport):
    # Given
    async def write(job, fail=False):
        await Entry.objects.acreate(job=job)
        if fail:
            raise RuntimeError

    job = as_job(write, max_attempts=1)
    job.enqueue_many([{"job": "a"}, {"job": "b", "fail": True}, {"job": "c"}])
    # When
    bench.run()
    # Then
    assert entries() == {"a": 1, "c": 1}
    assert sorted(result.value for result in bench.results) == ["completed", "completed", "dead"]
    assert settled(bench)


def test_coroutines_outside_a_transaction_run_at_the_same_time(bench, transport):
    # Given: each waits for all the others
    count = 20
    here = []
    everybody = asyncio.Event()

    async def meet(number):
        here.append(number)
        if len(here) == count:
            everybody.set()
        await asyncio.wait_for(everybody.wait(), 20)
        return number

    as_job(meet, atomic=False).enqueue_many([{"number": n} for n in range(count)])
    deliveries = bench.poll()
    # When
    assert {delivery.mode for delivery in deliveries} == {Mode.CONCURRENT}
    bench.run(deliveries)
    # Then
    assert bench.results == [Ending.COMPLETED] * count
    assert [result_of(job) for job in Job.objects.order_by("id")] == list(range(count))
    assert settled(bench)
