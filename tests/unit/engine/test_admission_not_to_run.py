"""What must not run: duplicates, cancelled, stale, deleted and late jobs."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from kjo_django.engine.attempt import Ending
from kjo_django.models import DeadLetter, Job, ProcessedEvent
from kjo_django.operations.jobs import cancel_one
from kjo_django.operations.maintenance.prune import prune
from tests.ledger import jobs as ledger
from tests.ledger.models import Entry
from tests.unit.deliveries import as_job, entries, the_job
from tests.unit.engine.bench import GOOD, both, settled


def test_a_job_delivered_again_after_its_commit_is_a_duplicate(bench):
    # Given: a crash between commit and acknowledgement
    ledger.write.enqueue(job="a")
    deliveries = bench.poll()
    bench.run(deliveries)
    # When
    bench.run(deliveries)
    # Then
    assert entries() == {"a": 1}
    assert bench.results[1] in (Ending.DUPLICATE, Ending.SKIPPED)


@pytest.mark.promise("stale-message")
@both
def test_two_records_of_one_job_in_a_group_run_it_once(bench):
    """A relay that crashed between publish and record publishes again."""
    # Given
    ledger.write.enqueue(job="a")
    (delivery,) = bench.poll()
    again = bench.read(delivery.record)
    # When
    bench.run([delivery, again])
    # Then
    assert entries() == {"a": 1}
    assert bench.results[0] is Ending.COMPLETED
    assert settled(bench)


@both
@pytest.mark.parametrize("atomic", [True, False])
def test_two_records_of_a_job_that_fails_leave_its_retry_alive(bench, atomic):
    """The second must not pass for a success of the first."""
    # Given
    runs = []

    def fail_once(context):
        runs.append(context.attempt)
        if context.attempt == 1:
            raise RuntimeError
        Entry.objects.create(job="a")

    as_job(fail_once, takes_context=True, atomic=atomic).enqueue()
    (delivery,) = bench.poll()
    # When
    bench.run([delivery, bench.read(delivery.record)])
    bench.run_until_done()
    # Then
    assert the_job().state == "completed"
    assert entries() == {"a": 1}
    assert settled(bench)


def test_a_cancelled_job_does_not_run(bench, transport):
    """X-9, PJQ-52."""
    answer = ledger.write.enqueue(job="a")
    deliveries = bench.poll()
    cancel_one(answer.job_id)
    bench.run(deliveries)
    assert bench.results == [Ending.SKIPPED]
    assert entries() == {}
    assert the_job().state == "cancelled"
    assert not ProcessedEvent.objects.exists()
    assert settled(bench)


@both
def test_a_cancelled_and_enqueued_job_runs_its_new_payload_once(bench, transport):
    """PJQ-F6: upstream ran both payloads."""
    # Given
    answer = ledger.write.using(id="u").enqueue(job="old")
    stale = bench.poll()
    cancel_one(answer.job_id)
    ledger.write.using(id="u").enqueue(job="new")
    # When
    bench.run([*stale, *bench.poll()])
    # Then
    assert entries() == {"new": 1}
    assert sorted(result.value for result in bench.results) == ["completed", "skipped"]
    assert (the_job().generation, the_job().state) == (2, "completed")
    assert settled(bench)


def test_a_record_of_an_attempt_that_has_been_is_stale(bench):
    # Given: the record of attempt 1 comes again after attempt 1 failed
    ledger.write_attempt.enqueue(job="a", fail_times=1)
    deliveries = bench.poll()
    bench.run(deliveries)
    # When
    bench.run(deliveries)
    # Then
    assert bench.results == [Ending.RETRIED, Ending.SKIPPED]
    assert the_job().attempts == 1


@pytest.mark.promise("row-pruned")
def test_a_job_whose_row_was_deleted_does_not_run(bench):
    ledger.write.enqueue(job="a")
    deliveries = bench.poll()
    Job.objects.all().delete()
    bench.run(deliveries)
    assert bench.results == [Ending.SKIPPED]
    assert entries() == {}
    assert settled(bench)


@pytest.mark.promise("marker-pruned")
def test_a_message_of_another_service_runs_again_once_its_marker_is_pruned(bench):
    # Given one that has taken effect, and whose copies do not
    bench.publish(b'{"job":"a"}', **GOOD)
    deliveries = bench.poll()
    for _ in range(2):
        bench.run(deliveries)
    assert entries() == {"a": 1}
    # When
    ProcessedEvent.objects.update(processed_at=timezone.now() - timedelta(days=31))
    prune()
    bench.run(deliveries)
    # Then
    assert entries() == {"a": 2}


@pytest.mark.promise("dead-letter-is-a-row")
def test_a_job_that_was_not_started_in_time_dies_unrun(bench, transport):
    ledger.write.using(expires_at=timezone.now() - timedelta(seconds=1)).enqueue(job="a")
    bench.run()
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("expired", 0)
    assert (the_job().state, the_job().attempts) == ("failed", 0)
    assert entries() == {}
    assert settled(bench)
