"""Tasks of a stream whose sender is this service: the outgoing row and the entry it became."""

from __future__ import annotations

import copy
import logging
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError
from django.utils import timezone

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.engine import failures
from kjo_django.engine.attempt import Ending
from kjo_django.enqueue import storing
from kjo_django.exceptions import PermanentError
from kjo_django.models import DeadLetter, Job, JobFailure
from kjo_django.operations import jobs as operations
from kjo_django.patterns.streams import AbstractStreamConsumer, AbstractStreamProducer
from kjo_django.runtime import get_transport, jobs_database
from kjo_django.store import store_for
from kjo_django.store.rows import Publication
from tests.ledger.jobs import write
from tests.ledger.models import Entry
from tests.unit.deliveries import Bench, entries, the_job
from tests.unit.engine.bench import GOOD, both

STREAM = "bench:write:stream"


class Producer(AbstractStreamProducer[str]):
    task_display_name = "writing"
    stream_key = STREAM

    def build_message(self, payload):
        return {"job": payload}

    def payload_identifier(self, payload):
        return payload

    def on_send_failed(self, payload, error):
        raise AssertionError(error)


@pytest.fixture
def tasks(bench_settings, monkeypatch):
    """A worker of a stream; tasks fail as often, or with what, ``tasks.failures`` says."""
    with registry.isolated():
        failures: dict[str, Any] = {}

        class Consumer(AbstractStreamConsumer[str]):
            task_display_name = "writing"
            stream_key = STREAM
            group_name = "bench-group"

            def parse_payload(self, fields: dict[str, Any]) -> str | None:
                return fields.get("job")

            def payload_identifier(self, payload):
                return payload

            def mark_processing(self, payload):
                pass

            def process_business(self, payload):
                left = failures.get(payload, 0)
                if isinstance(left, Exception):
                    raise left
                if left:
                    failures[payload] -= 1
                    raise RuntimeError("not yet")
                Entry.objects.create(job=payload)

            def mark_completed(self, payload):
                pass

            def mark_failed(self, payload, error):
                pass

        bench = Bench(STREAM)
        bench.failures = failures
        yield bench
        bench.close()


def taken_unnoted(tasks: Bench, row: Job) -> list[Any]:
    """What a consumer reads of a relay that has sent the row and not noted that yet."""
    record = storing.record_of(row, get_settings().queue(STREAM))
    assert get_transport().publish([record])[0].error is None
    return [tasks.read(one) for one in tasks.subscription.poll(10, 0.0)]


@both
def test_a_task_whose_sending_is_not_noted_yet_runs(tasks):
    """It passed for an open job of ours whose name somebody used, and was acknowledged unrun."""
    # Given
    id = Producer().send_task("a")
    row = Job.objects.get(pk=id)
    assert row.state == "pending"
    # When its consumer is quicker than the relay's note
    tasks.run(taken_unnoted(tasks, row))
    # Then
    assert tasks.results == [Ending.COMPLETED]
    assert entries() == {"a": 1}


@both
def test_a_task_sent_twice_since_the_relay_died_runs_once(tasks):
    # Given a relay that died between sending and noting
    id = Producer().send_task("a")
    tasks.run(taken_unnoted(tasks, Job.objects.get(pk=id)))
    # When the next one sends it again
    tasks.run(tasks.poll())
    # Then
    assert tasks.results == [Ending.COMPLETED, Ending.DUPLICATE]
    assert entries() == {"a": 1}
    assert the_job().state == "completed"
    assert tasks.lag() == 0


@both
@pytest.mark.usefixtures("transport")
def test_a_message_that_bears_the_id_of_an_open_job_of_ours_is_a_dead_letter(bench):
    """It was skipped and acknowledged: its sender's work was lost without a trace."""
    # Given
    job = write.using(delay=timedelta(hours=1)).enqueue(job="ours")
    # When
    bench.publish(b'{"job":"theirs"}', **GOOD | {"kjo_id": str(job.job_id)})
    bench.run()
    # Then
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.job_id) == ("invalid", None)
    assert bytes(letter.value) == b'{"job":"theirs"}'
    assert str(job.job_id) in letter.error
    assert bench.poll() == []
    bench.run_until_done()
    assert entries() == {"ours": 1}


@pytest.mark.promise("skipped-is-logged")
@both
def test_what_is_skipped_is_logged_with_its_reason(bench, caplog):
    # Given a job that was cancelled after its message was sent
    job = write.enqueue(job="a")
    deliveries = bench.poll()
    Job.objects.filter(pk=job.job_id).update(state="cancelled")
    # When
    with caplog.at_level(logging.INFO, "kjo_django"):
        bench.run(deliveries)
    # Then
    assert bench.results == [Ending.SKIPPED]
    (line,) = [one for one in caplog.records if "Skipped" in one.message]
    assert str(job.job_id) in line.message
    assert "cancelled" in line.message


@both
@pytest.mark.usefixtures("transport")
def test_a_task_that_fails_is_one_row_by_its_id_whatever_becomes_of_it(tasks):
    """The sender's row said completed beside the consumer's, which said failed."""
    # Given
    id = Producer().send_task("a")
    tasks.failures["a"] = 99
    # When its first attempt fails
    tasks.run()
    # Then
    job = the_job()
    assert (job.pk, job.state, job.attempts) == (id, "failing", 1)
    # When all have failed
    tasks.run_until_done()
    # Then
    job = the_job()
    assert (job.pk, job.state, job.attempts) == (id, "failed", 4)
    assert DeadLetter.objects.get().job_id == id
    # And when it is replayed, and does not fail
    tasks.failures["a"] = 0
    operations.requeue([id])
    tasks.run_until_done()
    # Then
    assert (the_job().pk, the_job().state) == (id, "completed")
    assert entries() == {"a": 1}


@both
@pytest.mark.usefixtures("transport")
def test_a_task_that_dies_at_once_is_one_failed_row_that_tells_why(tasks):
    # Given
    id = Producer().send_task("a")
    tasks.failures["a"] = PermanentError("an unsupported format")
    # When
    tasks.run()
    # Then
    job = the_job()
    assert (job.pk, job.state, job.attempts) == (id, "failed", 1)
    assert job.error == "an unsupported format"
    assert job.result_expires_at is not None
    letter = DeadLetter.objects.get()
    assert (letter.job_id, letter.reason) == (id, "fatal")
    assert JobFailure.objects.get().job_id == id


@both
def test_a_relay_that_notes_late_does_not_complete_a_task_that_has_failed(tasks):
    """Its retries would never have come."""
    # Given a task that has been read, and has failed, before the relay notes that it was sent
    id = Producer().send_task("a")
    tasks.failures["a"] = 1
    (due,) = store_for(jobs_database()).due_jobs([STREAM], 10)
    tasks.run(taken_unnoted(tasks, Job.objects.get(pk=id)))
    assert the_job().state == "failing"
    # When
    sent = [Publication(due, "", None, None)]
    storing.record_forwarded(store_for(jobs_database()), sent, timezone.now())
    # Then
    assert the_job().state == "failing"
    tasks.run_until_done()
    assert (the_job().pk, the_job().state) == (id, "completed")
    assert entries() == {"a": 1}


@both
@pytest.mark.usefixtures("transport")
def test_a_task_whose_first_failure_is_recorded_at_the_second_try_is_tried_again(
    tasks, monkeypatch
):
    """Its sender's row, whose id the consumer's takes, passed for the failure: nothing was retried,
    and nothing told of it."""
    # Given a database that goes away before the failure is committed
    id = Producer().send_task("a")
    tasks.failures["a"] = 1
    record, left = failures.record_failures, [OperationalError("gone")]

    def once_gone(*arguments):
        record(*arguments)
        if left:
            raise left.pop()

    monkeypatch.setattr(failures, "record_failures", once_gone)
    monkeypatch.setattr(tasks.stopping, "wait", lambda seconds: False)
    # When
    tasks.run()
    # Then
    assert left == []
    job = the_job()
    assert (job.pk, job.state, job.attempts, job.destination) == (id, "failing", 1, "")
    assert JobFailure.objects.count() == 1
    # And then it does not fail
    tasks.run_until_done()
    assert (the_job().pk, the_job().state) == (id, "completed")
    assert entries() == {"a": 1}


@both
@pytest.mark.usefixtures("transport")
def test_a_task_that_dies_in_two_workers_is_one_dead_letter(tasks, monkeypatch):
    """The second worker had read the entry before the first one's record of it was committed, as
    one that was frozen does: its dead letter had no job, and stood beside the first."""
    # Given another worker that records the death of the same task first
    id = Producer().send_task("a")
    tasks.failures["a"] = PermanentError("an unsupported format")
    record = failures.record_failures

    def after_another_one(runtime, attempts, worker):
        record(runtime, [copy.copy(attempt) for attempt in attempts], "another")
        record(runtime, attempts, worker)

    monkeypatch.setattr(failures, "record_failures", after_another_one)
    # When
    tasks.run()
    # Then
    assert DeadLetter.objects.get().job_id == id
    assert JobFailure.objects.get().job_id == id
    assert the_job().state == "failed"
