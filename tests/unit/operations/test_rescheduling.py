"""Run now and move: jobs are handed over, never doubled."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from kjo_django.engine.attempt import Ending
from kjo_django.models import Job, TransportMessage
from kjo_django.operations import rescheduling
from kjo_django.outbox.relay import Relay
from tests.factories import JobFactory
from tests.ledger.jobs import write, write_attempt
from tests.ledger.models import Entry
from tests.unit.deliveries import KJO, MEMORY, Bench

pytestmark = pytest.mark.usefixtures("real_database")
LATER = timedelta(hours=2)


@pytest.fixture(params=["database", "memory"])
def transport(request, settings):
    kind = MEMORY if request.param == "memory" else {}
    settings.KJO = {**KJO, **kind, "QUEUES": {"ledger": {}, "other": {}}}
    return request.param


@pytest.fixture(autouse=True)
def _configured(settings, real_database):
    settings.KJO = {**KJO, "QUEUES": {"ledger": {}, "other": {}}}


def ran(bench: Bench) -> list[Ending]:
    """Run what is due; how it ended."""
    before = len(bench.results)
    bench.run()
    return bench.results[before:]


def let_old_messages_come() -> None:
    """Let the time come at which delayed messages are handed out."""
    TransportMessage.objects.update(available_at=timezone.now() - timedelta(seconds=1))


# --- Run now --------------------------------------------------------------------------------------


def test_a_scheduled_job_runs_now_and_once(transport):
    # Given
    id = write.using(delay=LATER).enqueue(job="late").job_id
    bench = Bench()
    assert ran(bench) == []
    # When
    outcomes = rescheduling.run_now([id], actor="ann")
    # Then
    assert outcomes.counts == {"due": 1}
    assert ran(bench) == [Ending.COMPLETED]
    # And the message it had is dropped when its time comes
    let_old_messages_come()
    assert set(ran(bench)) <= {Ending.DUPLICATE, Ending.SKIPPED}
    assert Entry.objects.count() == 1
    assert Job.objects.get().attempts == 1


def test_a_failing_job_gets_the_attempt_that_was_to_come(transport, settings):
    # Given
    settings.KJO = {**settings.KJO, "BACKOFF_BASE": 3600, "BACKOFF_MAX": 3600}
    id = write_attempt.enqueue(job="unlucky", fail_times=1).job_id
    bench = Bench()
    assert ran(bench) == [Ending.RETRIED]
    assert ran(bench) == []
    # When
    assert rescheduling.run_now([id]).counts == {"due": 1}
    # Then
    assert ran(bench) == [Ending.COMPLETED]
    assert Entry.objects.get().note == "attempt 2"
    let_old_messages_come()
    ran(bench)
    assert Entry.objects.count() == 1


def test_what_is_due_or_done_stays_as_it_is(transport):
    # Given
    due, done = JobFactory(state="queued"), JobFactory(completed=True)
    # When
    outcomes = rescheduling.run_now([due, done, "nonsense"])
    # Then
    assert outcomes.counts == {"unchanged": 1, "completed": 1, "not_found": 1}
    assert outcomes.changed_count == 0


def test_a_job_that_is_being_processed_is_left_alone():
    now = timezone.now()
    running = JobFactory(
        state="failing", available_at=now + LATER, lease_token="w", lease_expires_at=now + LATER
    )
    assert rescheduling.run_now([running]).counts == {"processing": 1}
    assert rescheduling.change_queue([running], "other").counts == {"processing": 1}


def test_those_made_due_are_told_with_who_asked(hear):
    # Given
    heard, seen = hear("job_run_now"), []
    later = JobFactory(available_at=timezone.now() + LATER)
    # When
    rescheduling.run_now([later, JobFactory()], actor="ann", on_changed=seen.extend)
    # Then
    assert [(each["job_id"], each["actor"]) for each in heard] == [(str(later.pk), "ann")]
    assert [job.pk for job in seen] == [later.pk]


# --- Move -----------------------------------------------------------------------------------------


def test_a_moved_job_runs_in_its_new_queue_and_its_old_message_never(transport):
    # Given a job whose message is in the first queue
    id = write.enqueue(job="a").job_id
    first, second = Bench("ledger"), Bench("other")
    second.poll()
    Relay(["ledger"]).publish_due()
    # When
    outcomes = rescheduling.change_queue([id], "other", actor="ann")
    # Then
    assert outcomes.counts == {"moved": 1}
    assert set(ran(first)) <= {Ending.SKIPPED}
    assert Entry.objects.count() == 0
    assert ran(second) == [Ending.COMPLETED]
    assert Entry.objects.count() == 1
    moved = Job.objects.get()
    assert (moved.queue, moved.generation, moved.state) == ("other", 2, "completed")


def test_a_moved_job_keeps_its_attempts_and_its_time(transport):
    # Given
    due = timezone.now() + LATER
    failing = JobFactory(queue="ledger", state="failing", attempts=2, available_at=due, error="no")
    # When
    rescheduling.change_queue([failing], "other")
    # Then
    failing.refresh_from_db()
    assert (failing.state, failing.attempts, failing.error) == ("failing", 2, "no")
    assert failing.available_at == due


def test_a_unique_id_that_is_taken_there_keeps_its_job_where_it_is():
    # Given
    JobFactory(queue="other", unique_id="order-7", completed=True)
    here = JobFactory(queue="ledger", unique_id="order-7")
    free = JobFactory(queue="ledger", unique_id="order-8")
    # When
    outcomes = rescheduling.change_queue([here, free], "other")
    # Then
    assert outcomes.counts == {"taken": 1, "moved": 1}
    here.refresh_from_db()
    assert (here.queue, here.generation) == ("ledger", 1)


def test_only_open_jobs_of_handlers_move():
    # Given
    done = JobFactory(queue="ledger", failed=True)
    there = JobFactory(queue="other")
    record = JobFactory(queue="ledger", destination="others-topic")
    # When
    outcomes = rescheduling.change_queue([done, there, record], "other")
    # Then
    assert outcomes.counts == {"failed": 1, "unchanged": 1, "other_kind": 1}


def test_a_queue_nobody_knows_is_refused_with_a_suggestion(settings):
    with pytest.raises(ValueError, match="Did you mean 'other'"):
        rescheduling.change_queue([], "othre")
    settings.KJO = {**KJO, "QUEUES": {"ledger": {}, "other": {"consume": False}}}
    with pytest.raises(ValueError, match="consumes the queue 'other'"):
        rescheduling.change_queue([], "other")


# --- Expiry ---------------------------------------------------------------------------------------


def test_a_job_whose_message_is_on_its_way_expires_as_asked(transport):
    # Given two jobs that wait, and would have run
    soon, later = (write.enqueue(job=name).job_id for name in ("soon", "later"))
    bench = Bench()
    # When one may be started for a second more, the other one for an hour
    rescheduling.change_expiry([soon], 1, actor="ann")
    outcomes = rescheduling.change_expiry([later], 3600, actor="ann")
    Job.objects.filter(pk=soon).update(expires_at=timezone.now() - timedelta(seconds=1))
    ran(bench)
    # Then
    assert outcomes.counts == {"changed": 1}
    assert Job.objects.get(pk=soon).state == "failed"
    assert Job.objects.get(pk=later).state == "completed"


def test_a_job_that_would_expire_never_does(transport, hear):
    # Given
    id = write.using(expires_at=timezone.now() + timedelta(hours=1)).enqueue(job="x").job_id
    heard = hear("job_expiry_changed")
    # When
    outcomes = rescheduling.change_expiry([id], None, actor="ann")
    again = rescheduling.change_expiry([id], None, actor="ann")
    # Then
    assert Job.objects.get(pk=id).expires_at is None
    assert (outcomes.counts, again.counts) == ({"changed": 1}, {"unchanged": 1})
    (told,) = heard
    assert (told["job_id"], told["expires_at"], told["actor"]) == (str(id), None, "ann")


def test_the_expiry_of_what_has_ended_or_runs_or_is_for_others_stays():
    rows = [
        JobFactory(completed=True),
        JobFactory(queued=True, lease_expires_at=timezone.now() + LATER),
        JobFactory(destination="elsewhere"),
    ]
    outcomes = rescheduling.change_expiry(rows, 60)
    assert outcomes.counts == {"completed": 1, "processing": 1, "other_kind": 1}
    assert not Job.objects.exclude(expires_at=None).exists()
