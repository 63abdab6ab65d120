"""Handlers that run outside the transaction, under a lease."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection
from django.utils import timezone

from kjo_django.coordination.base import alive_name
from kjo_django.engine import admission, failures, recorder
from kjo_django.engine.attempt import Ending, Reason
from kjo_django.engine.handler import running
from kjo_django.models import Job, JobFailure, ProcessedEvent, TransportMessage, transition
from kjo_django.runtime import current_runtime, get_coordination
from tests.ledger.models import Entry
from tests.unit.deliveries import as_job, entries, the_job
from tests.unit.engine.bench import both, settled
from tests.waiting import PATIENCE


@both
def test_a_plain_handler_runs_outside_any_transaction(bench, transport):
    # Given
    seen = []

    def plain(job):
        seen.append((connection.in_atomic_block, the_job().status, bool(the_job().lease_token)))
        Entry.objects.create(job=job)

    as_job(plain, atomic=False).enqueue(job="a")
    # When
    bench.run()
    # Then
    job = the_job()
    assert seen == [(False, "processing", True)]
    assert (job.state, job.attempts) == ("completed", 1)
    assert (job.lease_token, job.lease_expires_at) == ("", None)
    assert entries() == {"a": 1}
    assert ProcessedEvent.objects.count() == 1
    assert settled(bench)


@pytest.mark.promise("not-atomic")
def test_what_a_plain_handler_wrote_before_it_failed_is_written_again(bench):
    # Given
    def plain(job):
        Entry.objects.create(job=job)
        raise ValueError("after it has written")

    as_job(plain, atomic=False, max_attempts=2).enqueue(job="a")
    # When
    bench.run_until_done()
    # Then
    assert entries() == {"a": 2}


def test_a_plain_job_is_claimed_on_sqlite_without_holding_up_those_who_write(bench, monkeypatch):
    """A transaction that reads and then writes meets "database is locked" at once, whatever the
    time-out, when somebody else writes in between."""
    written = []

    def write():
        Entry.objects.create(job="another")
        connection.close()
        written.append(True)

    judge = admission.admit

    def judge_while_another_writes(*arguments, **options):
        writer = threading.Thread(target=write)
        writer.start()
        writer.join(PATIENCE)
        return judge(*arguments, **options)

    monkeypatch.setattr(admission, "admit", judge_while_another_writes)
    as_job(lambda: None, atomic=False).enqueue()
    bench.run()
    assert written == [True]
    assert [outcome.ending for outcome in bench.outcomes] == [Ending.COMPLETED]


def test_a_plain_handler_that_fails_keeps_what_it_wrote_and_is_retried(bench):
    def plain(context):
        Entry.objects.create(job=f"attempt {context.attempt}")
        if context.attempt == 1:
            raise RuntimeError

    as_job(plain, atomic=False, takes_context=True).enqueue()
    bench.run_until_done()
    assert entries() == {"attempt 1": 1, "attempt 2": 1}
    assert (the_job().state, the_job().attempts) == ("completed", 2)
    assert JobFailure.objects.count() == 1


def test_rows_of_failures_that_were_requeued_meanwhile_are_read_together(bench, monkeypatch):
    """Many of them, as after an operator's requeue of a whole queue, cost the lane one query."""
    # Given: jobs whose rows another generation has while they fail
    end_lost, asked = failures.end_lost, []

    def plain(context):
        Job.objects.filter(pk=context.job_id).update(generation=2)
        raise RuntimeError

    def note_and_end(store, lost):
        asked.append(len(lost))
        end_lost(store, lost)

    monkeypatch.setattr(failures, "end_lost", note_and_end)
    as_job(plain, atomic=False, takes_context=True).enqueue_many([{}] * 3)
    # When
    bench.run()
    # Then
    assert asked == [3]
    assert [(each.ending, each.reason) for each in bench.outcomes] == [
        (Ending.SKIPPED, Reason.CHANGED)
    ] * 3
    assert not JobFailure.objects.exists()


@both
@pytest.mark.parametrize("has_coordination", [True, False])
def test_of_two_workers_one_runs_a_plain_job(bench, another, monkeypatch, has_coordination):
    """The row's lease decides even when coordination has vanished."""
    # Given
    runs, late = [], []

    def plain():
        runs.append(1)
        if len(runs) == 1:
            # While it runs, the same record reaches another worker.
            late.extend(another.run([another.read(delivery.record)]))

    as_job(plain, atomic=False).enqueue()
    (delivery,) = bench.poll()
    if not has_coordination:
        from kjo_django.coordination.base import Claim

        monkeypatch.setattr(
            another.leases, "claim", lambda names, *_: [Claim(True, 1)] * len(names)
        )
    # When
    bench.run([delivery])
    # Then
    assert len(runs) == 1
    assert len(late) == 1, "the other keeps it until it knows better"
    another.run(late)
    assert len(runs) == 1
    assert the_job().state == "completed"


def outlives_its_lease(ending: str, is_async: bool, during: Callable[[], None]) -> None:
    """Enqueue a job whose first run is frozen past its leases, `during` which things happen, and
    which then completes, fails for a retry or dies."""
    began: list[bool] = []

    def outlive():
        if began:
            return
        began.append(True)
        during()
        if ending != "completes":
            raise RuntimeError("late")

    async def outlive_later():
        await asyncio.sleep(0)
        await sync_to_async(outlive)()

    attempts = 1 if ending == "dies" else 2
    run = outlive_later if is_async else outlive
    as_job(run, name="bench.late", atomic=False, max_attempts=attempts).enqueue()


def has_died_with_its_row() -> None:
    """Another worker has taken the job over, and was killed."""
    # Its message's lease ends as well: this worker may have it again.
    TransportMessage.objects.update(lease_expires_at=timezone.now())
    Job.objects.update(lease_token="another", lease_expires_at=timezone.now() + timedelta(1))


@both
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("ending", ["completes", "fails", "dies"])
def test_a_late_end_counts_for_nothing_and_leaves_the_message_for_who_runs_the_job(
    bench, transport, caplog, ending, is_async
):
    """Nobody but a worker that has died had the job: its message was the only one left."""
    # Given
    outlives_its_lease(ending, is_async, has_died_with_its_row)
    # When
    (left,) = bench.run()
    # Then
    assert bench.results == []
    assert (the_job().state, the_job().lease_token) != ("completed", "")
    assert the_job().lease_token == "another"
    assert not ProcessedEvent.objects.exists()
    assert not JobFailure.objects.exists()
    assert bench.lag() == 1
    assert any(r.levelname == "WARNING" and "Deferred" in r.message for r in caplog.records)
    # And it is run as soon as the other's lease ends
    Job.objects.update(lease_expires_at=timezone.now())
    assert bench.run([left]) == []
    assert the_job().state == "completed"
    assert settled(bench)


@both
@pytest.mark.parametrize("ending", ["completes", "fails", "dies"])
def test_a_late_end_acknowledges_the_message_of_a_job_that_has_ended_meanwhile(
    bench, transport, ending
):
    # Given
    outlives_its_lease(ending, False, lambda: transition("cancel", Job.objects.all()))
    # When
    assert bench.run() == []
    # Then
    assert bench.results == [Ending.SKIPPED]
    assert the_job().state == "cancelled"
    assert settled(bench)


@pytest.mark.parametrize("ending", ["completes", "fails"])
def test_a_late_end_whose_recording_is_repeated_is_judged_anew_each_time(
    bench, transport, monkeypatch, ending
):
    """It was not settled, and would have been put off for as long as its worker lived."""
    # Given a late end whose first COMMIT fails
    outlives_its_lease(ending, False, has_died_with_its_row)
    failing = [OperationalError("the connection was lost")]
    acknowledge = recorder.acknowledge_within

    def interrupted(attempts):
        acknowledge(attempts)
        if failing:
            raise failing.pop()

    monkeypatch.setattr(recorder, "acknowledge_within", interrupted)
    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)
    (left,) = bench.run()
    assert not failing
    # When the other's lease ends
    Job.objects.update(lease_expires_at=timezone.now())
    # Then
    assert bench.run([left]) == []
    assert the_job().state == "completed"
    assert settled(bench)


@both
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_run_whose_job_another_worker_has_finished_is_told_and_refused_aloud(
    bench, another, monkeypatch, caplog, is_ours
):
    """It was frozen. Nobody holds the lease any more, which was read as: it is ours still."""
    # Given
    monkeypatch.setattr(running, "SETTLED_AFTER", -60.0)
    told: list[bool] = []

    def plain(context):
        if told:
            return
        told.append(context.aborted)
        # When it is frozen, and another worker has run the job to its end
        get_coordination().release([alive_name("bench")], "bench")
        assert another.run([another.read(delivery.record)]) == []
        bench.leases.show_alive()
        running.look_after(bench.watch, current_runtime(), "bench")
        told.append(context.aborted)

    job = as_job(plain, atomic=False, takes_context=True)
    if is_ours:
        job.enqueue()
    else:
        bench.publish(b"{}", kjo_id="foreign-1", kjo_type="bench.plain")
    (delivery,) = bench.poll()
    # When it comes back
    bench.run([delivery])
    # Then
    assert told == [False, True]
    assert another.results == [Ending.COMPLETED]
    assert bench.results == [Ending.DUPLICATE]
    assert any(r.levelname == "WARNING" and "lease" in r.message for r in caplog.records)


@both
def test_a_run_whose_worker_is_late_with_its_sign_of_life_gives_it_before_it_begins(
    bench, another, monkeypatch
):
    """On an SQLite that many write to, the thread that gives it may wait for seconds."""
    # Given a worker whose sign of life has expired
    ran: list[str] = []

    def plain():
        # When another worker meets the job that runs
        if not ran:
            ran.append("bench")
            assert another.run([another.read(delivery.record)]) != []
        else:
            ran.append("another")

    as_job(plain, atomic=False).enqueue()
    (delivery,) = bench.poll()
    get_coordination().release([alive_name("bench")], "bench")
    monkeypatch.setattr(bench.leases, "_shown_at", -60.0)
    bench.run([delivery])
    # Then it leaves it alone
    assert ran == ["bench"]
    assert bench.results == [Ending.COMPLETED]


@both
def test_a_run_coordination_knows_nothing_of_is_not_disturbed(bench, monkeypatch):
    """Coordination was away when it began, or has been emptied since."""
    monkeypatch.setattr(running, "SETTLED_AFTER", -60.0)
    told: list[bool] = []

    def plain(context):
        get_coordination().release([context.lease], "bench")
        running.look_after(bench.watch, current_runtime(), "bench")
        told.append(context.aborted)

    as_job(plain, atomic=False, takes_context=True).enqueue()
    bench.run()
    assert told == [False]
    assert the_job().state == "completed"


@both
def test_a_late_failure_does_not_take_the_job_from_its_new_owner(bench):
    def lose_it_and_fail():
        Job.objects.update(lease_token="another", lease_expires_at=timezone.now() + timedelta(1))
        raise RuntimeError

    as_job(lose_it_and_fail, atomic=False).enqueue()
    bench.run()
    job = the_job()
    assert (job.lease_token, job.attempts) == ("another", 0)
    assert not JobFailure.objects.exists()


def test_a_plain_job_cancelled_while_it_ran_stays_cancelled(bench):
    def cancel_myself():
        assert transition("cancel", Job.objects.all())

    as_job(cancel_myself, atomic=False).enqueue()
    bench.run()
    assert the_job().state == "cancelled"
    assert not ProcessedEvent.objects.exists()
