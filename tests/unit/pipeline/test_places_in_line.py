"""What a group does to the places in line of its jobs, and to their slots.

Tier: the quick one, and on PostgreSQL, which reads the line and gives leases up in its own way.
"""

from __future__ import annotations

from functools import partial

from django.db import transaction
from django.utils import timezone

from kjo_django import job
from kjo_django.coordination.base import slot_name
from kjo_django.models import NEVER, HeldJob, Job
from kjo_django.runtime import get_coordination
from tests.ledger.models import Entry
from tests.unit.pipeline.bench import both


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
