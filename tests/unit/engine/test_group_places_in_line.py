"""What a group does to the places in line of its jobs, and to their slots.

Tier: the quick one, and on PostgreSQL, which reads the line and gives leases up in its own way.
"""

from __future__ import annotations

from functools import partial
from uuid import UUID

import pytest
from django.db import transaction
from django.utils import timezone

from kjo_django import job
from kjo_django.coordination.base import slot_name
from kjo_django.models import NEVER, HeldJob, Job
from kjo_django.runtime import get_coordination
from tests.factories import JobFactory
from tests.ledger.models import Entry
from tests.unit.engine.bench import both


@both
def test_an_earlier_message_takes_no_place_from_the_job_that_is_in_line_again(
    bench, forgotten_definitions
):
    """Without its place nobody would ever release it."""

    # Given messages of two jobs with a limit, of which one has been replaced since, and waits
    def add(job: str) -> None:
        Entry.objects.create(job=job)

    write = job(name="bench.limited", queue="ledger", rate="100/s")(add)
    replaced, _ = (write.enqueue(job=name).job_id for name in ("replaced", "other"))
    deliveries = bench.poll()
    assert len(deliveries) == 2
    Job.objects.filter(pk=replaced).update(generation=2, available_at=NEVER)
    HeldJob.objects.create(
        job_id=replaced,
        generation=2,
        limit="RATE:job:bench.limited",
        queue="ledger",
        waiting_since=timezone.now(),
    )
    # When they come up in one group
    assert bench.run(deliveries) == []
    # Then the place is there
    assert HeldJob.objects.filter(job_id=replaced, generation=2).exists()


@both
def test_a_message_of_an_earlier_attempt_takes_no_place_from_its_job(bench, forgotten_definitions):
    # Given messages of two jobs with a limit, of which one has been run, and waits for its retry
    def add(job: str) -> None:
        Entry.objects.create(job=job)

    write = job(name="bench.limited", queue="ledger", rate="100/s")(add)
    run, _ = (write.enqueue(job=name).job_id for name in ("run", "other"))
    deliveries = bench.poll()
    Job.objects.filter(pk=run).update(state="failing", attempts=1, available_at=NEVER)
    HeldJob.objects.create(
        job_id=run,
        limit="RATE:job:bench.limited",
        queue="ledger",
        waiting_since=timezone.now(),
    )
    # When they come up in one group
    assert bench.run(deliveries) == []
    # Then the place is there
    assert list(Entry.objects.values_list("job", flat=True)) == ["other"]
    assert HeldJob.objects.filter(job_id=run).exists()


@both
def test_a_job_that_fails_leaves_the_line_with_its_failure(bench, forgotten_definitions):
    """Until its retry its place would keep others waiting, if its worker died right then."""

    # Given a job that was released
    @job(name="bench.limited", queue="ledger", rate="100/s")
    def fail() -> None:
        raise ValueError("no")

    failing = fail.enqueue().job_id
    deliveries = bench.poll()
    HeldJob.objects.create(
        job_id=failing,
        limit="RATE:job:bench.limited",
        queue="ledger",
        is_released=True,
        waiting_since=timezone.now(),
    )
    # When the thread that takes jobs out of the line does nothing
    assert bench.pipeline.run(deliveries) == []
    # Then
    assert Job.objects.get().state == "failing"
    assert not HeldJob.objects.exists()


@both
@pytest.mark.parametrize("id", ["order-7", "{01980000-0000-7000-8000-000000000001}"])
def test_a_foreign_message_with_a_limit_may_have_any_id(bench, forgotten_definitions, id):
    # Given a job of ours that is in line, and a message whose job has another kind of id
    entries: list[str] = []

    @job(name="bench.limited", queue="ledger", rate="100/s")
    def write(job: str) -> None:
        entries.append(job)

    bench.publish(
        b'{"job":"theirs"}',
        kjo_type="bench.limited",
        kjo_service="elsewhere",
        kjo_id="foreign-1",
        kjo_job_id=id,
        content_type="application/json",
    )
    ours = JobFactory(
        id=UUID("01980000-0000-7000-8000-000000000001"),
        handler="bench.limited",
        queue="ledger",
        available_at=NEVER,
    )
    HeldJob.objects.create(
        job_id=ours.pk,
        limit="RATE:job:bench.limited",
        queue="ledger",
        is_released=True,
        waiting_since=timezone.now(),
    )
    # When, then
    assert bench.run() == []
    assert entries == ["theirs"]
    assert HeldJob.objects.filter(job_id=ours.pk).exists()


@both
def test_what_a_job_does_on_commit_is_done_within_its_slot(bench, forgotten_definitions):
    # Given
    slot = slot_name("SLOT:job:bench.slotted", 1)
    seen: list[dict[str, str]] = []

    def look() -> None:
        seen.append(get_coordination().holders([slot]))

    def slotted(name: str) -> None:
        transaction.on_commit(partial(look))

    job(name="bench.slotted", queue="ledger", concurrency=1)(slotted).enqueue(name="a")
    # When
    bench.run()
    # Then
    assert [list(holders) for holders in seen] == [[slot]]
    assert get_coordination().holders([slot]) == {}
