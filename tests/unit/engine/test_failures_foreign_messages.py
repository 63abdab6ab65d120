"""Messages nobody enqueued here."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from django.db import connections, transaction
from django.utils import timezone

from kjo_django import Queue, job, publish_event, registry
from kjo_django.engine import failures
from kjo_django.engine.attempt import Ending
from kjo_django.engine.leases import LeaseBook
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, Job, JobFailure, ProcessedEvent
from kjo_django.operations import jobs as operations
from tests.ledger.jobs import write
from tests.ledger.models import Entry
from tests.unit.deliveries import Bench, as_job, entries, the_job
from tests.unit.engine.bench import GOOD, both, settled
from tests.waiting import PATIENCE


def test_a_foreign_message_runs_once_and_leaves_no_row_but_its_marker(bench):
    bench.publish(b'{"job":"a"}', **GOOD)
    bench.publish(b'{"job":"a"}', **GOOD)
    bench.run()
    assert entries() == {"a": 1}
    assert not Job.objects.exists()
    assert ProcessedEvent.objects.get().event_id == "foreign-1"
    assert settled(bench)


@both
def test_a_foreign_message_that_fails_gets_a_row_and_its_retries(bench):
    """DESIGN §6: their row is born at the first failure."""
    # Given
    bench.publish(b'{"job":"a","fail_times":2}', **GOOD | {"kjo_type": "ledger.write_attempt"})
    # When
    bench.run()
    # Then
    job = the_job()
    assert (job.state, job.attempts, job.unique_id) == ("failing", 1, "foreign-1")
    assert job.message_id == "foreign-1"
    # And then
    bench.run_until_done()
    assert the_job().state == "completed"
    assert [entry.note for entry in Entry.objects.all()] == ["attempt 3"]
    assert ProcessedEvent.objects.get().event_id == "foreign-1"


@both
def test_a_foreign_message_named_like_a_job_of_ours_does_not_pass_for_it(bench):
    """It completed a job that was due later, which then never ran."""
    # Given
    job = write.using(id="order-7", delay=timedelta(hours=1)).enqueue(job="ours")
    # When
    bench.publish(b'{"job":"theirs"}', **GOOD | {"kjo_id": "order-7"})
    bench.run()
    # Then
    assert Job.objects.get(pk=job.job_id).state == "pending"
    bench.run_until_done()
    assert entries() == {"ours": 1}


@both
@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kjo_service": "elsewhere"},
        {"kjo_service": "elsewhere", "kjo_job_id": "x"},
        {"kjo_service": "tests"},
    ],
    ids=["no service", "another service", "another job", "our service"],
)
def test_a_message_named_like_ours_leaves_our_job_its_run(bench, generation, more):
    """Its marker said that the job was done, which stayed open for ever."""
    # Given
    id = str(write.using(delay=timedelta(hours=1)).enqueue(job="ours").job_id)
    if generation > 1:
        operations.requeue([id])
        Job.objects.update(available_at=timezone.now() + timedelta(hours=1))
        id += ":2"
    # When
    if "kjo_job_id" in more:
        more = more | {"kjo_job_id": id}
    bench.publish(b'{"job":"theirs"}', **GOOD | more | {"kjo_id": id})
    bench.run()
    # Then
    bench.run_until_done()
    assert entries() == {"ours": 1}
    assert the_job().state == "completed"


@both
@pytest.mark.parametrize("type", ["ledger.write", "nobody.knows"])
@pytest.mark.parametrize("is_together", [True, False])
def test_a_job_of_another_service_does_not_pass_for_ours_of_its_id(bench, type, is_together):
    """Whatever ids others give to theirs, or copy from ours."""
    # Given
    job = write.using(delay=timedelta(hours=not is_together)).enqueue(job="ours")
    # When
    theirs = {"kjo_id": "theirs", "kjo_type": type, "kjo_service": "elsewhere"}
    bench.publish(b'{"job":"theirs"}', **theirs, kjo_job_id=str(job.job_id))
    bench.run()
    # Then
    bench.run_until_done()
    wanted = {"ours": 1, "theirs": 1} if type == "ledger.write" else {"ours": 1}
    assert entries() == wanted
    assert Job.objects.get(pk=job.job_id).state == "completed"
    assert settled(bench)


def test_a_foreign_message_that_exhausts_its_attempts_is_a_dead_letter(bench):
    bench.publish(b'{"job":"a"}', **GOOD | {"kjo_type": "ledger.always_fails"})
    bench.run_until_done()
    assert DeadLetter.objects.get().reason == "exhausted"
    assert the_job().state == "failed"
    assert JobFailure.objects.count() == 2


@both
def test_a_foreign_job_completes_the_row_its_failure_left_whatever_its_own_id_is(bench):
    """The id of the other service's job is in the message, and means nothing here."""
    # Given: its first attempt failed
    fails = iter([True])

    def fail_once(job: str) -> None:
        if next(fails, False):
            raise ValueError("not yet")

    as_job(fail_once, "bench.fail_once")
    foreign = {**GOOD, "kjo_type": "bench.fail_once", "kjo_job_id": "no uuid"}
    bench.publish(b'{"job": "a"}', **foreign, kjo_service="elsewhere")
    bench.run()
    row = Job.objects.get()
    assert (row.state, row.attempts, row.unique_id) == ("failing", 1, "foreign-1")
    # When: they send another attempt
    bench.publish(b'{"job": "a"}', **foreign, kjo_service="elsewhere", kjo_attempt="2")
    theirs = [one for one in bench.poll() if one.record.headers[names.SERVICE] == b"elsewhere"]
    bench.run(theirs)
    # Then
    row.refresh_from_db()
    assert (row.state, row.attempts) == ("completed", 2)


@both
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"kjo_service": "elsewhere", "kjo_job_id": "01980000-0000-7000-8000-000000000001"},
        {
            "kjo_id": "01980000-0000-7000-8000-000000000001",
            "kjo_service": "elsewhere",
            "kjo_job_id": "01980000-0000-7000-8000-000000000001",
        },
        {
            "kjo_id": "01980000-0000-7000-8000-000000000001:2",
            "kjo_service": "elsewhere",
            "kjo_job_id": "01980000-0000-7000-8000-000000000001",
            "kjo_generation": "2",
        },
        {"kjo_service": "elsewhere", "kjo_job_id": "no uuid"},
    ],
    ids=["of no job", "of a job", "of a job by its id", "of a second generation", "of nonsense"],
)
def test_a_foreign_message_delivered_again_after_it_failed_leaves_the_rest_to_its_row(
    bench, headers
):
    """A crash between the failure's commit and the offset's."""
    # Given
    bench.publish(b'{"job":"a"}', **GOOD | {"kjo_type": "ledger.always_fails"} | headers)
    deliveries = bench.poll()
    bench.run(deliveries)
    # When
    bench.run([bench.read(delivery.record) for delivery in deliveries])
    # Then
    assert bench.results == [Ending.RETRIED, Ending.SKIPPED]
    assert not bench.stopping.waits
    assert the_job().attempts == 1
    bench.run_until_done()
    assert the_job().state == "failed"
    assert DeadLetter.objects.count() == 1


@both
@pytest.mark.parametrize("correlation", [b"c" * 300, b" ", b"a\0b", b"\xff"])
def test_what_others_call_a_correlation_fails_no_publication(bench, correlation):
    """A handler inherits it; an event's metadata takes 255 characters, PostgreSQL no NUL."""

    def tell(job: str) -> None:
        write.enqueue(job="child")
        publish_event("told", {"type": "TOLD", "data": {}})

    as_job(tell)
    bench.publish(b'{"job": "a"}', **GOOD | {"kjo_type": "bench.tell"}, correlation_id=correlation)
    bench.run()
    assert bench.results == [Ending.COMPLETED]
    told = [(job.headers or {}).get(names.CORRELATION_ID) for job in Job.objects.all()]
    wanted = correlation.decode("utf-8", "replace").replace("\0", "\ufffd").strip()[:255]
    assert told == [wanted or None] * 2


@both
@pytest.mark.parametrize("origin", [b"\xff", b"of-another"])
def test_an_origin_made_up_by_others_is_not_believed(bench, transport, origin):
    """Bytes that are no text ended the relay at every look; a text would have marked another
    message as done."""
    # Given a message whose id can be that of a row
    id = "01980000-0000-7000-8000-000000000001"
    headers = GOOD | {"kjo_id": id, "kjo_type": "ledger.write_attempt", "kjo_origin_id": origin}
    bench.publish(b'{"job":"a","fail_times":1}', **headers)
    # When it fails once
    bench.run_until_done()
    # Then
    assert the_job().message_id == id
    assert the_job().state == "completed"
    assert [event.event_id for event in ProcessedEvent.objects.all()] == [id]


@both
@pytest.mark.parametrize("atomic", [True, False])
def test_a_row_is_not_left_open_by_another_copy_that_took_effect(
    bench, another, monkeypatch, coordination_away, atomic
):
    """While coordination is away two workers run a copy each, and the one that fails writes its
    retry down last: every attempt of that would be a duplicate, and no end in sight."""
    # Given
    coordination_away("claim", "renew", "release", "holders")
    # As one that is elsewhere, which can be away while the database is there.
    monkeypatch.setattr(LeaseBook, "settle_within", lambda self, using, deliveries: [])
    ran = []

    def fail_once(job: str) -> None:
        ran.append(job)
        if len(ran) == 1:
            raise ValueError("not this one")

    as_job(fail_once, "bench.fail_once", atomic=atomic)
    bench.publish(b'{"job": "a"}', **GOOD | {"kjo_type": "bench.fail_once"})
    deliveries = bench.poll()
    publish, copies = failures.publish_dead_letters, iter([list(deliveries)])

    def let_the_other_go_first(runtime, outcomes):
        for copy in next(copies, ()):
            another.run([another.read(copy.record)])
        return publish(runtime, outcomes)

    monkeypatch.setattr(failures, "publish_dead_letters", let_the_other_go_first)
    # When
    bench.run(deliveries)
    # Then
    assert another.results == [Ending.COMPLETED]
    assert the_job().state == "failing"
    bench.run_until_done()
    assert (the_job().state, ran) == ("completed", ["a", "a"])
    assert the_job().finished_at is not None


@both
@pytest.mark.usefixtures("transport")
def test_a_queues_options_hold_for_messages_nobody_enqueued_here(bench_settings):
    """They got five attempts, and results the settings' lifetime."""
    # Given
    with registry.isolated():
        queue = Queue("foreign-ones", max_attempts=2, result_ttl=timedelta(seconds=4))

        @queue.handler
        def fail(job):
            runs.append((job.attempts, job.max_attempts))
            raise RuntimeError("always")

        runs: list[tuple[int, int]] = []
        bench = Bench("foreign-ones")
        # When
        bench.publish(b'{"job":"a"}', kjo_id="foreign-1", kjo_type=queue.job_type)
        bench.run_until_done()
        bench.close()
    # Then
    assert runs == [(1, 2), (2, 2)]
    assert (the_job().max_attempts, the_job().result_ttl) == (2, 4000)
    assert the_job().result_expires_at - the_job().finished_at == timedelta(seconds=4)


@both
def test_a_queue_without_options_gives_others_messages_what_it_gives_its_own(bench_settings):
    with registry.isolated():
        queue = Queue("foreign-ones")
        runs: list[int] = []

        @queue.handler
        def fail(job):
            runs.append(job.max_attempts)
            raise RuntimeError("always")

        bench = Bench("foreign-ones")
        bench.publish(b'{"job":"a"}', kjo_id="foreign-1", kjo_type=queue.job_type)
        bench.run_until_done()
        bench.close()
    assert runs == [3, 3, 3]


def test_a_first_failure_waits_for_another_ones_lock(bench):
    """On SQLite it read before it wrote: refused at once, again and again while others wrote."""
    # Given somebody who begins to write its row while the handler runs, and goes on for a while
    is_held, may_begin = threading.Event(), threading.Event()
    name = "0196e0a4-0000-7000-8000-000000000001"

    def write_elsewhere() -> None:
        try:
            may_begin.wait(PATIENCE)
            with transaction.atomic():
                row = {"handler": "fails_meanwhile", "unique_id": name, "payload": b"{}"}
                Job.objects.create(queue="ledger", max_attempts=5, result_ttl=1000, **row)
                is_held.set()
                time.sleep(0.5)  # sleep: how long the others' transaction takes
                transaction.set_rollback(True)
        finally:
            connections.close_all()

    @job(queue="ledger", name="fails_meanwhile", atomic=False)
    def fails_meanwhile(job: str) -> None:
        may_begin.set()
        is_held.wait(PATIENCE)
        raise RuntimeError("no")

    other = threading.Thread(target=write_elsewhere)
    other.start()
    bench.publish(b'{"job":"a"}', **GOOD | {"kjo_type": "fails_meanwhile", "kjo_id": name})
    # When
    bench.run()
    other.join()
    # Then
    assert is_held.is_set()
    assert (the_job().state, the_job().attempts) == ("failing", 1)
    assert settled(bench)


def test_a_first_failure_another_worker_has_recorded_already_is_not_recorded_again(bench):
    """It was tried again and again, half a minute apart, and kept its lane."""

    @job(queue="ledger", name="fails_late", atomic=False)
    def fails_late(job: str) -> None:
        Job.objects.create(
            queue="ledger",
            handler="fails_late",
            unique_id="foreign-1",
            max_attempts=5,
            payload=b"{}",
            result_ttl=1000,
            error="of the other worker",
        )
        raise RuntimeError("no")

    bench.publish(b'{"job":"a"}', **GOOD | {"kjo_type": "fails_late"})
    # When
    bench.run()
    # Then
    assert the_job().error == "of the other worker"
    assert not JobFailure.objects.exists()
    assert bench.results == [Ending.SKIPPED]
    assert settled(bench)
