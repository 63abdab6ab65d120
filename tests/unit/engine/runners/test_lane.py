"""Which of a group's handlers a lane calls in the group's transaction."""

from __future__ import annotations

from kjo_django import job
from kjo_django.models import Job
from tests.unit.deliveries import as_job
from tests.unit.engine.bench import both, settled

pytestmark = both


def test_of_a_group_what_its_limit_refuses_does_not_run_and_the_others_do(
    bench, forgotten_definitions, monkeypatch
):
    # Given three jobs with a rate, the second of which has lost its permit when it comes to start
    ran = []

    @job(name="bench.rated", queue="ledger", rate="100/s")
    def rated(number: int) -> None:
        ran.append(number)

    for number in range(3):
        rated.enqueue(number=number)
    take = bench.pipeline.limiter.take_permits
    refused = []

    def take_permits(deliveries):
        late = [each for each in deliveries if b"1" in each.message.payload and not refused]
        refused.extend(late)
        return [each for each in take(deliveries) if each not in late]

    monkeypatch.setattr(bench.pipeline._lane, "_take_permits", take_permits)
    # When
    left = bench.run()
    # Then
    assert sorted(ran) == [0, 2]
    assert left == refused
    assert Job.objects.filter(state="completed").count() == 2
    # And it runs with another one
    assert bench.run(left) == []
    assert sorted(ran) == [0, 1, 2]
    assert settled(bench)


def test_of_a_group_that_has_used_up_its_budget_the_first_job_runs_and_the_others_come_again(
    bench, monkeypatch
):
    """Were the first one put off too, a group would never get on."""
    # Given
    ran = []
    enqueued = as_job(lambda job: ran.append(job))
    for name in ("first", "second", "third"):
        enqueued.enqueue(job=name)
    monkeypatch.setattr(bench.leases.runtime.group_budget, "seconds", 0.0)
    # When
    left = bench.run()
    # Then
    assert ran == ["first"]
    assert len(left) == 2
    # And each time the next one
    while left:
        left = bench.run(left)
    assert ran == ["first", "second", "third"]
    assert settled(bench)
