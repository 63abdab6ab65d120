"""Requeue and cancel."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from kjo_django.exceptions import CoordinationError
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetterState, Job, TransportMessage
from kjo_django.operations import jobs
from kjo_django.operations.jobs import CancelResult
from kjo_django.operations.rows import CHUNK
from kjo_django.runtime import get_transport
from kjo_django.states import JobState
from tests.factories import DeadLetterFactory, JobFactory
from tests.running_jobs import let_die, let_run
from tests.unit.deliveries import MEMORY, row_locked


@pytest.fixture
def received(hear):
    return hear("job_requeued", "job_cancelled", "message_replayed")


@pytest.mark.django_db
@pytest.mark.parametrize("state", ["pending", "queued", "failing"])
def test_an_open_job_is_cancelled_by_one_conditional_transition(
    state, received, django_capture_on_commit_callbacks
):
    """PJQ-52, PJQ-F4, PJQ-F5: queued, and failing too."""
    # Given
    job = JobFactory(state=state)
    # When
    with django_capture_on_commit_callbacks(execute=True):
        answer = jobs.cancel_one(job.pk)
    # Then
    assert answer is CancelResult.CANCELLED
    job.refresh_from_db()
    assert job.state == JobState.CANCELLED
    assert job.finished_at is not None
    facts = {"unique_id": None, "queue": "default", "handler": "tests.add", "sender": "tests.add"}
    assert received == [{"signal": "job_cancelled", "job_id": str(job.pk), **facts}]


@pytest.mark.django_db
@pytest.mark.parametrize("state", ["completed", "failed"])
def test_a_finished_job_answers_with_its_state_and_keeps_its_record(state):
    """PJQ-17, PJQ-F5: cancelling must not destroy what failed."""
    # Given
    job = JobFactory(**{state: True})
    # When, then
    assert jobs.cancel_one(job.pk) == state
    job.refresh_from_db()
    assert job.state == state
    assert bytes(job.payload) == b'{"a": 1}'


@pytest.mark.django_db
@pytest.mark.parametrize("id", ["01980000-0000-7000-8000-000000000000", "no id at all", ""])
def test_cancelling_what_does_not_exist_answers_not_found(id):
    """PJQ-17."""
    assert jobs.cancel_one(id) is CancelResult.NOT_FOUND


@pytest.mark.django_db
def test_cancelling_twice_answers_cancelled_and_changes_nothing(received):
    # Given
    job = JobFactory(cancelled=True)
    # When
    outcomes = jobs.cancel([job])
    # Then
    assert outcomes.counts == {"cancelled": 1}
    assert outcomes.changed_count == 0


@pytest.mark.django_db
def test_a_job_whose_row_is_leased_answers_processing():
    """PJQ-52: atomic=False handlers hold the row's own lease."""
    # Given
    job = JobFactory(
        queued=True, lease_token="t", lease_expires_at=timezone.now() + timedelta(minutes=1)
    )
    # When, then
    assert jobs.cancel_one(job.pk) is CancelResult.PROCESSING
    assert jobs.requeue([job]).counts == {"processing": 1}
    job.refresh_from_db()
    assert (job.state, job.generation) == (JobState.QUEUED, 1)


@pytest.mark.django_db
def test_a_job_whose_row_lease_has_expired_can_be_cancelled():
    # Given a worker that died
    job = JobFactory(
        queued=True, lease_token="t", lease_expires_at=timezone.now() - timedelta(seconds=1)
    )
    # When, then
    assert jobs.cancel_one(job.pk) is CancelResult.CANCELLED


@pytest.mark.django_db(transaction=True)
def test_a_job_leased_by_a_living_worker_answers_processing_until_that_worker_is_gone():
    """The virtual processing state (KJO-60): a live lease."""
    # Given
    job = JobFactory(queued=True)
    let_run(job)
    # When, then
    assert jobs.cancel_one(job.pk) is CancelResult.PROCESSING
    # When the worker shows no sign of life any more, its lease is void
    let_die()
    assert jobs.cancel_one(job.pk) is CancelResult.CANCELLED


@pytest.mark.django_db
def test_without_coordination_the_rows_decide(coordination_away):
    """Correctness never depends on coordination."""
    # Given
    coordination_away("holders")
    # When, then
    assert jobs.cancel_one(JobFactory(queued=True).pk) is CancelResult.CANCELLED


@pytest.mark.promise("generation")
@pytest.mark.django_db
def test_a_requeued_job_starts_a_new_generation_with_all_its_attempts(
    settings, received, django_capture_on_commit_callbacks
):
    # Given
    settings.KJO = MEMORY
    job = JobFactory(failed=True, result=b"x", partition=3, offset=9, topic="old")
    letter = DeadLetterFactory(job=job)
    # When
    with django_capture_on_commit_callbacks(execute=True):
        outcomes = jobs.requeue([job.pk], actor="ann")
    # Then
    assert outcomes.counts == {"requeued": 1}
    job.refresh_from_db()
    assert (job.state, job.generation, job.attempts) == (JobState.PENDING, 2, 0)
    assert (job.finished_at, job.result, job.error, job.offset) == (None, None, "", None)
    # And its dead letter is closed
    letter.refresh_from_db()
    assert letter.state == DeadLetterState.REPLAYED
    assert letter.replay_count == 1
    assert letter.note == "replayed by ann"
    assert [each["signal"] for each in received] == ["job_requeued", "message_replayed"]


@pytest.mark.django_db
def test_on_a_transactional_transport_the_message_is_written_with_the_row():
    # Given the default: the database transport
    job = JobFactory(failed=True)
    # When
    jobs.requeue([job])
    # Then
    job.refresh_from_db()
    assert job.state == JobState.QUEUED
    message = TransportMessage.objects.get()
    assert bytes(message.value) == b'{"a": 1}'
    assert get_transport().capabilities.transactional


@pytest.mark.django_db
def test_requeueing_lifts_an_expiry_that_has_passed_and_keeps_one_to_come():
    # Given
    now = timezone.now()
    past = JobFactory(failed=True, expires_at=now - timedelta(hours=1))
    later = JobFactory(failed=True, expires_at=now + timedelta(hours=1))
    # When
    jobs.requeue([past, later])
    # Then
    past.refresh_from_db()
    later.refresh_from_db()
    assert past.expires_at is None
    assert later.expires_at == now + timedelta(hours=1)


@pytest.mark.django_db
def test_a_requeue_that_rolls_back_leaves_nothing(received):
    # Given
    job = JobFactory(failed=True)

    def refuse(changed):
        raise RuntimeError("the audit failed")

    # When
    with pytest.raises(RuntimeError):
        jobs.requeue([job], on_changed=refuse)
    # Then
    job.refresh_from_db()
    assert (job.state, job.generation) == (JobState.FAILED, 1)
    assert not TransportMessage.objects.exists()
    assert received == []


@pytest.mark.django_db
def test_a_selection_of_many_chunks_is_requeued_once_each(monkeypatch, settings):
    # Given
    settings.KJO = MEMORY
    monkeypatch.setattr("kjo_django.operations.rows.chunks.__defaults__", (7,))
    JobFactory.create_batch(20, failed=True)
    JobFactory(completed=True)
    seen = []
    # When the selection is a queryset whose rows leave it on the way
    outcomes = jobs.requeue(
        Job.objects.filter(state="failed"), on_changed=lambda rows: seen.append(len(rows))
    )
    # Then
    assert outcomes.counts == {"requeued": 20}
    assert seen == [7, 7, 6]
    assert Job.objects.filter(state="pending", generation=2).count() == 20


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres")  # SQLite locks the whole database: the UPDATE waits there
def test_a_job_whose_row_a_running_handler_has_locked_answers_processing():
    """PJQ-F4: an atomic handler holds its job's row until it commits."""
    # Given
    job = JobFactory(queued=True)
    other = JobFactory(queued=True)
    # When, then nobody waits for it
    with row_locked(job.pk, "FOR NO KEY UPDATE"):
        assert jobs.cancel([job, other]).counts == {"processing": 1, "cancelled": 1}
        assert jobs.requeue([job]).counts == {"processing": 1}
    assert jobs.cancel_one(job.pk) is CancelResult.CANCELLED


@pytest.mark.usefixtures("real_database")
def test_of_many_who_requeue_one_job_at_once_one_generation_each_and_none_is_lost():
    """Race-safe: every answer is true, and there are as many messages as generations."""
    # Given
    job = JobFactory(failed=True)
    answers = []

    def requeue():
        answers.append(jobs.requeue([job.pk]).counts)
        connection.close()

    threads = [threading.Thread(target=requeue) for _ in range(4)]
    # When
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Then
    done = sum(counts.get("requeued", 0) for counts in answers)
    assert done >= 1
    job.refresh_from_db()
    assert job.generation == 1 + done
    assert TransportMessage.objects.count() == done


@pytest.fixture
def completed_before_it_is_locked(monkeypatch):
    """Somebody else requeues what was found, and it completes, before it is locked."""
    take = jobs.lock_jobs

    def late(keys):
        Job.objects.filter(state="failed").update(state="completed")
        return take(keys)

    monkeypatch.setattr(jobs, "lock_jobs", late)


@pytest.mark.django_db
@pytest.mark.usefixtures("completed_before_it_is_locked")
def test_what_somebody_else_requeued_meanwhile_does_not_run_twice():
    # Given
    job = JobFactory(failed=True)
    # When
    outcomes = jobs.requeue(Job.objects.filter(state="failed"))
    # Then
    assert (outcomes.counts, outcomes.changed_count) == ({"not_found": 1}, 0)
    job.refresh_from_db()
    assert (job.state, job.generation) == (JobState.COMPLETED, 1)


@pytest.mark.django_db
def test_a_job_asked_for_twice_counts_once():
    job = JobFactory(failed=True)
    assert jobs.requeue([job.pk, str(job.pk), "no id"]).counts == {"not_found": 1, "requeued": 1}


@pytest.mark.django_db
def test_running_jobs_that_cannot_be_asked_keep_no_other_from_being_cancelled(coordination_away):
    """Whatever chunk they are in."""
    soon = timezone.now() + timedelta(minutes=1)
    busy = JobFactory(queued=True, lease_expires_at=soon)
    others = JobFactory.create_batch(CHUNK)
    coordination_away("set_marks")
    with pytest.raises(CoordinationError):
        jobs.cancel(Job.objects.all(), abort=True)
    assert Job.objects.filter(state="cancelled").count() == len(others)
    busy.refresh_from_db()
    assert busy.state == "queued"


@pytest.mark.django_db
def test_a_job_with_a_header_of_no_text_is_cancelled_and_told_of(
    received, django_capture_on_commit_callbacks
):
    """Born of a message of others, its row has their headers."""
    job = JobFactory(state="failing", headers={names.REPLY_TO: {"base64": "/w=="}})
    with django_capture_on_commit_callbacks(execute=True):
        assert jobs.cancel_one(job.pk) is CancelResult.CANCELLED
    assert [each["signal"] for each in received] == ["job_cancelled"]
