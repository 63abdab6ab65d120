"""Deleting what has been kept long enough (KII-37, KII-F10)."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import timedelta
from unittest.mock import Mock

import pytest
from django.db import OperationalError
from django.utils import timezone

from kjo_django.ids import uuid7_floor
from kjo_django.models import (
    DeadLetter,
    Job,
    JobFailure,
    Lease,
    Mark,
    MetricBucket,
    ProcessedEvent,
    Worker,
)
from kjo_django.operations import rows
from kjo_django.operations.maintenance import prune as module
from kjo_django.operations.maintenance.prune import Retention, prune
from kjo_django.runtime import current_runtime
from kjo_django.worker import Worker as ConsumingWorker
from kjo_django.worker.duties import Pruner
from tests.factories import (
    DeadLetterFactory,
    JobFactory,
    JobFailureFactory,
    MetricBucketFactory,
    ProcessedEventFactory,
    WorkerFactory,
)
from tests.unit.deliveries import KJO, SetClock

pytestmark = pytest.mark.django_db


def ago(**time):
    return timezone.now() - timedelta(**time)


def id_of(moment):
    """A UUIDv7 minted at this moment."""
    return uuid.UUID(int=uuid7_floor(moment).int + uuid.uuid4().int % 2**60)


def old_job(days, **kwargs):
    moment = ago(days=days)
    return JobFactory(id=id_of(moment), created_at=moment, finished_at=moment, **kwargs)


def test_finished_jobs_go_after_their_retention_and_open_ones_stay():
    # Given
    old_job(8, state="completed")
    old_job(8, state="cancelled")
    kept = {
        old_job(6, state="completed").pk,
        old_job(8, state="pending").pk,
        old_job(8, state="queued").pk,
        old_job(8, state="failing").pk,
        old_job(8, state="failed").pk,
    }
    # When
    counts = prune()
    # Then
    assert counts["jobs"] == 2
    assert set(Job.objects.values_list("pk", flat=True)) == kept


def test_a_job_created_long_ago_that_ended_today_stays():
    job = old_job(90, state="completed")
    Job.objects.update(finished_at=timezone.now())
    assert prune()["jobs"] == 0
    assert Job.objects.get() == job


def test_a_job_whose_result_still_lives_stays():
    old_job(90, state="completed", result_expires_at=timezone.now() + timedelta(days=1))
    assert prune()["jobs"] == 0


def test_a_failed_job_stays_as_long_as_its_dead_letter_is_open():
    # Given
    waiting = old_job(40, state="failed")
    DeadLetterFactory(job=waiting)
    done = old_job(40, state="failed")
    letter = DeadLetterFactory(job=done, discarded=True)
    JobFailureFactory(job=done)
    # When
    counts = prune()
    # Then
    assert counts["failed_jobs"] == 1
    assert Job.objects.get() == waiting
    assert not JobFailure.objects.exists()
    letter.refresh_from_db()
    assert letter.job is None


@pytest.mark.parametrize("state", ["completed", "cancelled"])
def test_a_job_that_went_on_without_its_dead_letter_goes_and_leaves_that_open(state):
    """Enqueued again under its id, a failed job moves on. The letter of its earlier generation
    holds all that its replay needs."""
    # Given
    letter = DeadLetterFactory(job=old_job(8, state=state))
    Job.objects.update(generation=2)
    # When, then
    assert prune()["jobs"] == 1
    letter.refresh_from_db()
    assert (letter.job, letter.state) == (None, "open")


def test_only_closed_dead_letters_go():
    # Given
    long_ago = ago(days=40)
    DeadLetterFactory(id=id_of(long_ago), state="discarded", closed_at=long_ago)
    DeadLetterFactory(id=id_of(long_ago), state="replayed", closed_at=long_ago)
    stay = [
        DeadLetterFactory(id=id_of(long_ago), state="open"),
        DeadLetterFactory(id=id_of(long_ago), state="discarded", closed_at=timezone.now()),
    ]
    # When, then
    assert prune()["dead_letters"] == 2
    assert set(DeadLetter.objects.all()) == set(stay)


def test_open_dead_letters_are_kept_for_ever_unless_their_retention_is_set(settings, caplog):
    # Given
    job = old_job(400, state="failed")
    DeadLetterFactory(id=id_of(ago(days=400)), job=job, failed_at=ago(days=400))
    young = DeadLetterFactory(id=id_of(ago(days=80)), failed_at=ago(days=80))
    # When, then
    assert "open_dead_letters" not in prune()
    assert DeadLetter.objects.count() == 2
    # When
    settings.KJO = {"RETENTION_OPEN_DEAD_LETTERS": timedelta(days=90)}
    assert prune(dry_run=True)["open_dead_letters"] == 1
    with caplog.at_level("INFO", logger="kjo_django"):
        counts = prune()
    # Then
    assert (counts["open_dead_letters"], counts["failed_jobs"]) == (1, 1)
    assert list(DeadLetter.objects.all()) == [young]
    assert "Pruned 1 open_dead_letters, 1 failed_jobs" in caplog.messages


def test_a_replayed_letter_that_has_failed_again_lately_is_young(settings):
    settings.KJO = {"RETENTION_OPEN_DEAD_LETTERS": timedelta(days=90)}
    DeadLetterFactory(id=id_of(ago(days=400)), failed_at=ago(days=1))
    assert prune()["open_dead_letters"] == 0


def test_processed_events_go_by_their_time_whoever_minted_their_ids():
    """KII-17: other services that share the table use random ids."""
    # Given a random id that sorts before every UUIDv7
    recent = ProcessedEventFactory(id=uuid.UUID(int=7))
    ProcessedEventFactory(id=uuid.UUID(int=2**128 - 1), processed_at=ago(days=31))
    ProcessedEventFactory(processed_at=ago(days=31))
    # When, then
    assert prune()["processed_events"] == 2
    assert ProcessedEvent.objects.get() == recent


def test_metrics_dead_workers_and_expired_marks_go():
    # Given
    alive = WorkerFactory()
    WorkerFactory(heartbeat_at=ago(days=31))
    MetricBucketFactory(minute=ago(days=31), worker_id=alive.pk)
    MetricBucketFactory(worker_id=alive.pk)
    Mark.objects.create(name="old", value="x", expires_at=ago(seconds=1))
    Mark.objects.create(name="new", value="x", expires_at=ago(seconds=-60))
    # When
    counts = prune()
    # Then
    assert (counts["metric_buckets"], counts["workers"], counts["marks"]) == (1, 1, 1)
    assert Worker.objects.get() == alive
    assert MetricBucket.objects.count() == 1
    assert Mark.objects.get().name == "new"


def test_an_expired_lease_keeps_its_deliveries_for_a_day():
    """Its message may come again, and the crash must count."""
    Lease.objects.create(name="fresh", expires_at=ago(hours=1), deliveries=2)
    Lease.objects.create(name="stale", expires_at=ago(days=2), deliveries=1)
    assert prune()["leases"] == 1
    assert Lease.objects.get().name == "fresh"


def test_a_dry_run_counts_the_same_and_deletes_nothing():
    # Given
    old_job(8, state="completed")
    DeadLetterFactory(id=id_of(ago(days=40)), state="discarded", closed_at=ago(days=40))
    ProcessedEventFactory(processed_at=ago(days=31))
    # When
    dry = prune(dry_run=True)
    # Then
    assert Job.objects.count() == DeadLetter.objects.count() == 1
    assert prune() == dry
    assert set(prune().values()) == {0}


def test_overrides_replace_single_retentions():
    retention = Retention.of_settings(completed=timedelta(days=1), failed=None)
    assert retention.completed == timedelta(days=1)
    assert retention.failed == timedelta(days=30)
    old_job(2, state="completed")
    assert prune(retention)["jobs"] == 1


def test_many_chunks_are_walked_and_told(monkeypatch):
    # Given
    monkeypatch.setattr(module, "CHUNK", 3)
    for _ in range(7):
        old_job(8, state="completed")
    ProcessedEventFactory.create_batch(7, processed_at=ago(days=31))
    told = []
    # When
    counts = prune(progress=lambda kind, count: told.append((kind, count)))
    # Then
    assert counts["jobs"] == counts["processed_events"] == 7
    assert [count for kind, count in told if kind == "jobs"] == [3, 6, 7]


def test_a_job_enqueued_anew_while_it_was_being_pruned_stays(monkeypatch):
    """Found as completed, revived before it was locked."""
    # Given
    job = old_job(8, state="completed")
    lock = module.lock

    def revive_first(rows, keys):
        Job.objects.update(state="pending", generation=2)
        return lock(rows, keys)

    monkeypatch.setattr(module, "lock", revive_first)
    # When, then
    assert prune()["jobs"] == 0
    assert Job.objects.get() == job


@pytest.mark.parametrize("age", [timedelta(days=36_500), timedelta.max])
def test_what_is_kept_for_a_century_or_for_ever_is_not_pruned(age):
    old_job(3650, state="completed")
    assert set(prune(Retention(age, age, age, age)).values()) == {0}


def test_an_override_of_no_time_is_one():
    """Or the settings would decide, without a word."""
    old_job(1, state="completed")
    assert prune(Retention.of_settings(completed=timedelta(0)))["jobs"] == 1


# --- By a worker ----------------------------------------------------------------------------------


@pytest.fixture
def clock():
    return SetClock()


@pytest.fixture
def pruner(clock):
    return Pruner(replace(current_runtime(), clock=clock), "me", timedelta(hours=1))


def take_steps(pruner, most=100):
    """Take the steps of a round, until nothing is due any more."""
    for _ in range(most):
        if pruner.step() > 1:
            return
    pytest.fail("The round does not end")


def test_a_worker_deletes_what_is_old_a_minute_after_its_start_and_then_each_hour(pruner, clock):
    old_job(8, state="completed")
    # When less than a minute has passed, nothing is deleted
    clock.seconds += 59
    assert pruner.step() == 1
    assert Job.objects.exists()
    # Then, soon after, it is
    clock.seconds += 1
    take_steps(pruner)
    assert not Job.objects.exists()
    # And what is old later goes with the next round
    old_job(8, state="completed")
    clock.seconds += 3599
    assert pruner.step() == 1
    assert Job.objects.exists()
    clock.seconds += 1
    take_steps(pruner)
    assert not Job.objects.exists()


def test_a_worker_deletes_one_chunk_with_each_step(pruner, clock, monkeypatch):
    # Given more rows than a chunk has
    monkeypatch.setattr(rows, "CHUNK", 2)
    monkeypatch.setattr(module, "CHUNK", 2)
    for _ in range(5):
        old_job(8, state="completed")
    clock.seconds += 60
    # When
    left = []
    while Job.objects.exists():
        pruner.step()
        left.append(Job.objects.count())
    # Then others of its thread had their turn in between
    assert left == [3, 1, 0]


def test_a_worker_that_stops_leaves_the_rest_of_a_round(pruner, clock, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    for _ in range(5):
        old_job(8, state="completed")
    clock.seconds += 60
    pruner.step()
    pruner.wake()
    take_steps(pruner)
    pruner.close()
    assert Job.objects.count() == 3


def test_what_the_database_refuses_of_one_kind_keeps_no_other_from_being_deleted(
    pruner, clock, monkeypatch
):
    # Given
    old_job(8, state="completed")
    ProcessedEventFactory(processed_at=ago(days=31))
    clock.seconds += 60
    # When jobs cannot be deleted
    with monkeypatch.context() as broken:
        broken.setitem(module._DELETE, Job, Mock(side_effect=OperationalError("locked")))
        with pytest.raises(OperationalError, match="locked"):
            take_steps(pruner)
    # Then the rest is, and the jobs are with the next round, a minute later
    assert Job.objects.exists() and not ProcessedEvent.objects.exists()
    clock.seconds += 60
    take_steps(pruner)
    assert not Job.objects.exists()


def test_a_round_that_lasts_longer_than_the_interval_is_not_begun_anew(clock, monkeypatch):
    # Given chunks of one row, and an interval that is over after each
    monkeypatch.setattr(module, "CHUNK", 1)
    pruner = Pruner(replace(current_runtime(), clock=clock), "me", timedelta(seconds=10))
    old_job(8, state="completed")
    ProcessedEventFactory(processed_at=ago(days=31))
    # When
    for _ in range(40):
        clock.seconds += 11
        pruner.step()
    # Then it has come to the last kinds
    assert not Job.objects.exists() and not ProcessedEvent.objects.exists()


def test_of_two_workers_one_prunes_in_an_interval_and_the_other_takes_over(pruner, clock):
    other = Pruner(replace(current_runtime(), clock=clock), "other", timedelta(hours=1))
    clock.seconds += 60
    take_steps(pruner)
    old_job(8, state="completed")
    # The other one has nothing to do while the lease of the first lives
    take_steps(other)
    clock.seconds += 300
    take_steps(other)
    assert Job.objects.exists()
    # It looks again soon after the first one has gone
    pruner.close()
    clock.seconds += 300
    take_steps(other)
    assert not Job.objects.exists()


@pytest.mark.parametrize(("interval", "count"), [(60, 1), (None, 0)])
def test_workers_prune_unless_the_setting_says_that_they_do_not(settings, interval, count):
    settings.KJO = {**KJO, "PRUNE_INTERVAL": interval}
    worker = ConsumingWorker(["ledger"], relay=False)
    duties = [duty for thread in worker._duty_threads for duty in thread._duties]
    assert sum(isinstance(duty, Pruner) for duty in duties) == count
