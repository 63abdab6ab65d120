"""Messages that nobody can read or handle."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from pytest import approx

from kjo_django import registry
from kjo_django.engine import admission, failures, recorder
from kjo_django.engine.attempt import Ending
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, HeldJob, Job, JobFailure
from kjo_django.operations import jobs
from kjo_django.operations.monitoring import status
from kjo_django.operations.monitoring.health import health
from kjo_django.runtime import current_runtime, get_transport
from tests.ledger import jobs as ledger
from tests.unit.deliveries import Bench, as_job, entries, make_everything_due, states, the_job
from tests.unit.engine.bench import GOOD, both, reconfigured, settled

POISON = {
    "tombstone": (None, GOOD, "invalid"),
    "empty": (b"", GOOD, "invalid"),
    "no JSON": (b"{broken", GOOD, "deserialization"),
    "no UTF-8": (b"\xff\xfe", GOOD, "deserialization"),
    "scalar": (b"42", GOOD, "invalid"),
    "array": (b"[]", GOOD, "invalid"),
    "too deep": (b"[" * 100_000 + b"]" * 100_000, GOOD, "deserialization"),
    "huge integer": (b'{"job":' + b"9" * 10_000 + b"}", GOOD, "deserialization"),
    "too large": (b'"' + b"x" * 2000 + b'"', GOOD, "too_large"),
    "no id": (b"{}", {"kjo_type": "ledger.write"}, "invalid"),
    "no type": (b"{}", {"kjo_id": "foreign-1"}, "invalid"),
    "no headers": (b"{}", {}, "invalid"),
    "id of no text": (b"{}", GOOD | {"kjo_id": b"\xff"}, "invalid"),
    "NUL in its type": (b"{}", GOOD | {"kjo_type": b"a\x00b"}, "invalid"),
    "unknown type": (b"{}", GOOD | {"kjo_type": "nobody.knows"}, "unknown_type"),
    "unknown content type": (b"{}", GOOD | {"content_type": "x/pickle"}, "deserialization"),
    "wrong arguments": (b'{"jib":1}', GOOD, "fatal"),
    "absurd numbers": (
        b'{"jib":1}',
        GOOD | {"kjo_generation": "9" * 12, "kjo_attempt": "9" * 12, "kjo_replay_count": "9" * 12},
        "fatal",
    ),
}


@both
@pytest.mark.parametrize("kind", POISON)
def test_poison_is_a_dead_letter_with_its_bytes_and_a_reason_and_the_loop_goes_on(
    settings, bench, kind
):
    """Show 7, promise 4."""
    # Given
    value, headers, reason = POISON[kind]
    if kind == "too large":
        bench = reconfigured(settings, bench, MAX_PAYLOAD_BYTES=1000)
    bench.publish(value, **headers)
    ledger.write.enqueue(job="after")
    # When
    bench.run()
    # Then
    letter = DeadLetter.objects.get()
    assert letter.reason == reason
    assert letter.error
    assert (None if letter.value is None else bytes(letter.value)) == value
    assert bytes(letter.key) == b"foreign"
    assert (letter.topic, letter.partition) == ("ledger", 0)
    assert letter.offset is not None
    stored = names.from_json(letter.headers)
    assert stored.get(names.ID) == (headers["kjo_id"] if isinstance(headers.get("kjo_id"), bytes)
                                    else headers.get("kjo_id", "").encode() or None)  # fmt: skip
    assert entries() == {"after": 1}
    assert settled(bench)


def test_poison_of_the_topic_is_on_its_dead_letter_topic_as_it_was(bench):
    bench.publish(b"\xff\xfe", **GOOD)
    bench.run()
    (record,) = get_transport().records("ledger-dlq")
    assert record.value == b"\xff\xfe"
    assert record.key == b"foreign"
    assert record.headers[names.ID] == b"foreign-1"
    assert record.headers[names.DLQ_REASON] == b"deserialization"


def test_a_record_that_dies_twice_is_one_dead_letter(bench, monkeypatch):
    """A crash between row and offset, as of what was settled behind a message that still ran."""
    bench.publish(b"{broken", **GOOD)
    bench.publish(b"{}", **GOOD | {"kjo_type": "nobody.knows"})
    deliveries = bench.poll()
    bench.run(deliveries)
    published: list[int] = []
    publish = failures.storing.publish
    monkeypatch.setattr(
        failures.storing,
        "publish",
        lambda transport, records: published.append(len(records)) or publish(transport, records),
    )
    bench.run([bench.read(delivery.record) for delivery in deliveries])
    assert published == [], "not even an empty batch, of which a tracer has a span"
    assert DeadLetter.objects.count() == 2
    assert len(get_transport().records("ledger-dlq")) == 2
    assert settled(bench)


# --- Handlers that only workers of another release know -------------------------------------------


def done(): ...


def broken():
    raise ValueError("broken")


def unknown_here(count: int = 1):
    """Enqueue jobs that this worker does not know, as processes of a newer release do."""
    as_job(done).enqueue_many([{}] * count)
    registry.unregister("bench.done")


@both
def test_a_job_whose_handler_is_not_known_yet_waits_for_a_worker_that_knows_it(bench):
    """FINDINGS 2.10 o."""
    # Given
    unknown_here()
    # When a worker of the release before has it, twice
    bench.run()
    make_everything_due()
    bench.run()
    # Then no attempt is spent, and the wait was noted, announced and counted once
    job = the_job()
    assert (job.state, job.attempts) == ("failing", 0)
    assert job.error.startswith("No handler is registered for 'bench.done'. It waits until ")
    (failure,) = JobFailure.objects.all()
    assert (failure.code, failure.attempt, failure.error) == ("unknown_type", 0, job.error)
    assert bench.results == [Ending.RETRIED]
    assert settled(bench)
    # And once it is known it runs
    as_job(done)
    bench.run_until_done()
    assert (the_job().state, the_job().attempts) == ("completed", 1)
    assert bench.results == [Ending.RETRIED, Ending.COMPLETED]
    assert not DeadLetter.objects.exists()


@both
def test_after_an_hour_nobody_waits_for_its_handler_any_more(bench):
    # Given
    unknown_here()
    bench.run()
    JobFailure.objects.update(failed_at=timezone.now() - timedelta(hours=1))
    # When
    bench.run_until_done()
    # Then
    assert DeadLetter.objects.get().reason == "unknown_type"
    assert (the_job().state, the_job().attempts) == ("failed", 0)
    assert bench.results == [Ending.RETRIED, Ending.DEAD]
    assert settled(bench)


def test_looks_for_a_handler_are_seconds_apart_at_first_and_a_minute_later_on(bench):
    unknown_here()
    pauses = []
    for minutes in (0, 0.5, 10, 59.75):
        since = timezone.now() - timedelta(minutes=minutes)
        JobFailure.objects.update(failed_at=since)
        make_everything_due()
        before = timezone.now()
        bench.run()
        pauses.append((the_job().available_at - before).total_seconds())
    assert pauses == [approx(seconds, abs=2) for seconds in (5, 30, 60, 15)]


def test_each_attempt_waits_for_its_handler_and_each_requeue_does(bench):
    """A wait of an attempt before is over."""
    unknown_here()
    bench.run()
    JobFailure.objects.update(failed_at=timezone.now() - timedelta(hours=1))
    jobs.requeue([the_job()])
    bench.run()
    assert (the_job().state, bench.results) == ("failing", [Ending.RETRIED] * 2)


@both
def test_health_names_a_handler_for_which_jobs_wait(bench):
    def check():
        (*_, found) = health(only={"settings", "database", "handlers"})
        return found

    unknown_here(2)
    bench.run()
    # A deploy is no fault
    warning = check()
    assert (warning.ok, "UNKNOWN_HANDLER_WAIT" in warning.fix) == (True, True)
    assert warning.detail.startswith("not known to a worker: 'bench.done' (2 jobs), the first for ")
    # A handler that is not known for minutes is one
    JobFailure.objects.update(failed_at=timezone.now() - timedelta(minutes=6))
    assert (check().ok, check().detail[-5:]) == (False, "360 s")
    # And once it is known nothing is said, though an attempt fails by itself
    as_job(broken, "bench.done")
    make_everything_due()
    bench.run()
    assert (states(), check().ok, check().fix) == (["failing"] * 2, True, "")


def test_jobs_that_nobody_knows_cost_a_worker_no_query_each(bench):
    def queries(count: int) -> int:
        unknown_here(count)
        deliveries = bench.poll()
        with CaptureQueriesContext(connection) as asked:
            refused = admission.refuse(bench.leases, deliveries)
            failures.wait_for_handlers(current_runtime(), refused)
        return len(asked)

    assert queries(20) == queries(1) == 3  # rows, failures, places in line


@pytest.mark.parametrize("is_ours", [True, False], ids=["no wait is wanted", "another service's"])
def test_what_may_not_wait_for_a_handler_fails_visibly_at_once(settings, bench, is_ours):
    # Given
    if is_ours:
        bench = reconfigured(settings, bench, UNKNOWN_HANDLER_WAIT=None)
        unknown_here()
    else:
        bench.publish(b"{}", **GOOD | {"kjo_type": "nobody.knows"})
    # When
    bench.run()
    # Then
    assert DeadLetter.objects.get().reason == "unknown_type"
    assert states() == ["failed"] * is_ours
    assert settled(bench)


@both
@pytest.mark.parametrize("count", [1, 20])
def test_a_wait_that_could_not_be_recorded_is_recorded_when_the_database_is_back(
    bench, monkeypatch, count
):
    """It was taken for recorded, since it spends no attempt; nothing would have run the jobs."""
    # Given a transaction that fails at its end, once
    unknown_here(count)
    record, calls = failures.record_failures, []

    def fail_once(*arguments):
        record(*arguments)
        calls.append(arguments)
        if len(calls) == 1:
            raise OperationalError("the server closed the connection")

    monkeypatch.setattr(failures, "record_failures", fail_once)
    # When
    bench.run()
    # Then
    assert states() == ["failing"] * count
    assert JobFailure.objects.count() == count
    as_job(done)
    bench.run_until_done()
    assert states() == ["completed"] * count


@both
def test_a_wait_whose_commit_was_not_answered_is_recorded_once(bench, monkeypatch):
    unknown_here()
    acknowledge, calls = recorder.acknowledge_within, []

    def commit_without_answer(attempts):
        acknowledge(attempts)
        calls.append(attempts)
        if len(calls) == 1:
            transaction.on_commit(lose_answer)

    def lose_answer():
        raise OperationalError("the server closed the connection")

    monkeypatch.setattr(recorder, "acknowledge_within", commit_without_answer)
    bench.run()
    assert (states(), JobFailure.objects.count()) == (["failing"], 1)
    assert bench.results == [Ending.RETRIED]


@both
def test_a_job_that_a_worker_runs_is_left_to_it_by_one_that_does_not_know_its_handler(bench):
    """The rebalance of a deploy: it ran twice."""
    ran = []

    def slow():
        # Given the same record at a worker of the release before, while it runs
        ran.append(1)
        handler = registry.find("bench.slow")
        registry.unregister(handler.name)
        other = Bench(worker="before")
        copy = other.read(delivery.record)
        assert other.run([copy]) == [copy]
        other.close()
        registry.register(handler)

    as_job(slow, atomic=False).enqueue()
    (delivery,) = bench.poll()
    bench.run([delivery])
    bench.run_until_done()
    assert (states(), ran, bench.results) == (["completed"], [1], [Ending.COMPLETED])


@both
def test_an_expired_job_does_not_wait_for_its_handler(bench):
    unknown_here()
    deliveries = bench.poll()
    Job.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    bench.run(deliveries)
    assert DeadLetter.objects.get().reason == "expired"


def test_a_job_that_waits_for_its_handler_stands_in_no_line(settings, bench):
    """Those behind it would wait for as long."""
    unknown_here()
    deliveries = bench.poll()
    HeldJob.objects.create(
        job_id=the_job().pk,
        generation=1,
        limit="RATE:queue:ledger",
        queue="ledger",
        rank=0,
        is_released=True,
        waiting_since=timezone.now(),
    )
    bench.run(deliveries)
    assert (states(), HeldJob.objects.exists()) == (["failing"], False)


def test_an_error_of_a_handler_with_the_same_code_is_no_wait(bench):
    class OwnError(Exception):
        code = "unknown_type"

    def broken_by_type():
        raise OwnError

    as_job(broken_by_type).enqueue()
    bench.run()
    assert JobFailure.objects.get().code == "unknown_type"
    assert status.unknown_handlers() == {}
    JobFailure.objects.update(failed_at=timezone.now() - timedelta(hours=2))
    registry.unregister("bench.broken_by_type")
    make_everything_due()
    bench.run()
    assert (states(), the_job().attempts) == (["failing"], 1)
    assert the_job().started_at is not None  # that of the attempt that ran


def test_a_job_that_was_cancelled_does_not_wait_for_its_handler(bench):
    unknown_here()
    deliveries = bench.poll()
    jobs.cancel([the_job()])
    bench.run(deliveries)
    assert (states(), bench.results) == (["cancelled"], [Ending.SKIPPED])


# --- The log --------------------------------------------------------------------------------------


def test_poison_is_one_line_of_the_log_whatever_it_is_called(bench, caplog):
    """Nobody writes records of the log by way of a message's id."""
    id = b"1\n2026-11-20 ERROR root: all is lost\x1b[2J"
    bench.publish(b"{broken", **GOOD | {"kjo_id": id})
    bench.run()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line.isprintable()
    assert "all is lost" in line
    assert DeadLetter.objects.get().message_id == id.decode()
