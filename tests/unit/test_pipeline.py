"""The pipeline: a group of deliveries in, durable outcomes out.

On a SQLite file; where the database has a say in it, on PostgreSQL too (``both``).
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections import Counter
from datetime import timedelta

import pytest
from django.db import IntegrityError, OperationalError, connection, transaction
from django.utils import timezone

from kjo_django import PermanentError, Retry, registry
from kjo_django.backends import get_coordination, get_transport
from kjo_django.consumer import attempts
from kjo_django.consumer.leases import alive_name
from kjo_django.consumer.work import Mode, Result
from kjo_django.exceptions import MessageError, RateLimitExceededError
from kjo_django.ids import uuid7
from kjo_django.messages import headers as names
from kjo_django.models import (
    DeadLetter,
    Job,
    JobFailure,
    ProcessedEvent,
    TransportMessage,
    transition,
)
from kjo_django.operations.jobs import cancel_one
from kjo_django.producer.enqueue import result_of
from tests.ledger import jobs as ledger
from tests.ledger.models import Entry
from tests.unit.deliveries import KJO, MEMORY, Bench, as_job, make_everything_due

both = pytest.mark.usefixtures("real_database")


@pytest.fixture
def _database(request):
    is_both = "real_database" in request.fixturenames
    request.getfixturevalue("real_database" if is_both else "sqlite_file")


@pytest.fixture(params=["memory", "database"])
def transport(request, settings, _database):
    """Tests that name it run on a log and on a transport that shares the jobs' transactions."""
    settings.KJO = KJO | (MEMORY if request.param == "memory" else {})
    return request.param


@pytest.fixture
def _configured(request, settings, _database):
    if "transport" in request.fixturenames:
        request.getfixturevalue("transport")
    else:
        settings.KJO = KJO | MEMORY


@pytest.fixture
def bench(_configured, monkeypatch):
    """A worker, and handlers that are forgotten with it."""
    monkeypatch.setattr(registry, "_handlers", dict(registry._handlers))
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture
def another(bench):
    """A second worker on the same queue."""
    another = Bench(worker="another")
    yield another
    another.close()


def reconfigured(settings, bench: Bench, **keys: object) -> Bench:
    """A worker under other settings; changing them makes new transports."""
    bench.close()
    settings.KJO = {**settings.KJO, **keys}
    return Bench()


def entries() -> Counter[str]:
    return Counter(entry.job for entry in Entry.objects.all())


def the_job() -> Job:
    return Job.objects.get()


def settled(bench: Bench) -> bool:
    """Whether nothing is left to do, nobody holds a lease and no outage was suspected."""
    return (
        bench.lag() == 0
        and not list(get_coordination().names("CONS:"))
        and not bench.stopping.waits
    )


# --- Success --------------------------------------------------------------------------------------


@both
def test_a_job_runs_and_everything_of_it_is_committed_together(bench, transport):
    """Promise 2."""
    # Given
    before = timezone.now()
    answer = ledger.write.enqueue(job="a")
    # When
    deferred = bench.run()
    # Then
    job = the_job()
    assert deferred == []
    assert bench.results == [Result.COMPLETED]
    assert entries() == {"a": 1}
    assert (job.state, job.attempts, job.error) == ("completed", 1, "")
    assert before <= job.started_at <= job.finished_at <= job.result_expires_at
    event = ProcessedEvent.objects.get()
    assert event.event_key == (str(answer.job_id), "tests", "ledger.write")
    assert bench.measured == ["ledger.write"]
    assert settled(bench)


def test_a_group_runs_each_job_once(bench, transport):
    ledger.write.enqueue_many({"job": str(n)} for n in range(25))
    bench.run()
    assert entries() == {str(n): 1 for n in range(25)}
    assert bench.results == [Result.COMPLETED] * 25
    assert settled(bench)


@pytest.mark.parametrize("value", [None, 0, "", [], {}, False, 1.5, "ü", {"a": [None]}], ids=repr)
def test_a_result_survives_whatever_it_is(bench, value):
    """PJQ-F16."""
    ledger.give.using(id="u").enqueue(value=value)
    bench.run()
    assert the_job().state == "completed"
    assert result_of(the_job()) == value
    answer = ledger.give.using(id="u").enqueue(value="other")
    assert (answer.status, answer.result) == ("completed", value)
    assert type(answer.result) is type(value)


def queries_of(bench: Bench, count: int, definition=ledger.no_op, **payload: object) -> list[str]:
    """The statements of one group of this many jobs, transport and relay left out."""
    definition.enqueue_many([payload] * count)
    deliveries = bench.poll()
    assert len(deliveries) == count
    statements: list[str] = []

    def record(execute, sql, params, many, context):
        statements.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(record):
        bench.run(deliveries)
    assert set(bench.results) == {Result.COMPLETED}
    return statements


def test_the_number_of_queries_does_not_grow_with_the_group(bench, real_database):
    # Given: whatever is asked once in a while has been asked
    queries_of(bench, 1)
    # When
    few, many = queries_of(bench, 2), queries_of(bench, 60)
    # Then
    assert len(many) == len(few)
    writes = [sql.split()[0:3] for sql in many if sql.startswith(("INSERT", "UPDATE", "DELETE"))]
    events = [sql for sql in writes if any("processed_events" in word for word in sql)]
    assert len(events) == 1
    assert not [sql for sql in many if "SAVEPOINT" in sql], "no handler wrote anything"


def test_a_writing_handler_costs_its_own_statements_and_one_savepoint(bench, real_database):
    queries_of(bench, 1)
    idle = len(queries_of(bench, 10))
    writing = queries_of(bench, 10, ledger.write, job="a")
    # On PostgreSQL a savepoint rides along with the handler's own statement.
    own = 1 if real_database == "postgresql" else 3
    assert len(writing) == idle + own * 10


def test_the_handler_is_told_about_its_run(bench):
    # Given
    contexts = []

    def look(context, job):
        contexts.append(context)

    answer = (
        as_job(look, takes_context=True, max_attempts=7)
        .using(headers={"traceparent": "00-1"})
        .enqueue(job="a")
    )
    # When
    bench.run()
    # Then
    (context,) = contexts
    assert context.job_id == context.idempotency_key == str(answer.job_id)
    assert (context.attempt, context.max_attempts, context.queue) == (1, 7, "ledger")
    assert context.headers["traceparent"] == "00-1"
    assert not context.aborted


def test_the_idempotency_key_is_the_same_in_every_attempt(bench):
    # Given
    keys = []

    def look(context):
        keys.append((context.attempt, context.idempotency_key))
        if context.attempt < 3:
            raise RuntimeError

    answer = as_job(look, takes_context=True).enqueue()
    # When
    bench.run_until_done()
    # Then
    assert keys == [(n, str(answer.job_id)) for n in (1, 2, 3)]


# --- Failure --------------------------------------------------------------------------------------


@both
def test_a_failing_one_leaves_the_others_of_its_group_completed(bench, transport):
    # Given
    calls = []

    def maybe(job, fail=False):
        calls.append(job)
        Entry.objects.create(job=job)
        if fail:
            raise RuntimeError("it broke")

    job = as_job(maybe)
    job.enqueue_many([{"job": "a"}, {"job": "b", "fail": True}, {"job": "c"}])
    # When
    bench.run()
    # Then: in one go, nothing ran twice
    assert calls == ["a", "b", "c"]
    assert entries() == {"a": 1, "c": 1}
    assert [job.state for job in Job.objects.order_by("id")] == [
        "completed",
        "failing",
        "completed",
    ]


@pytest.mark.postgres
def test_a_groups_completions_share_one_transaction(bench, real_database):
    if real_database != "postgresql":
        pytest.skip("only PostgreSQL tells a row's transaction")
    ledger.write.enqueue_many([{"job": "a"}, {"job": "b"}])
    ledger.always_fails.enqueue(job="x")
    ledger.write.enqueue(job="c")
    bench.run()
    with connection.cursor() as cursor:
        cursor.execute("SELECT DISTINCT xmin::text FROM kjo_job WHERE state = 'completed'")
        jobs = cursor.fetchall()
        cursor.execute("SELECT DISTINCT xmin::text FROM processed_events")
        assert len(jobs) == 1
        assert cursor.fetchall() == jobs


@both
def test_a_failed_attempt_is_a_row_somebody_can_see_and_another_attempt_is_due(bench, transport):
    # Given
    ledger.write_attempt.enqueue(job="a", fail_times=1)
    # When
    bench.run()
    # Then
    job, failure = the_job(), JobFailure.objects.get()
    assert bench.results == [Result.RETRIED]
    assert (job.state, job.attempts, job.error) == ("failing", 1, "attempt 1 fails")
    assert job.available_at == failure.retry_at > timezone.now()
    assert (failure.job_id, failure.attempt, failure.generation) == (job.pk, 1, 1)
    assert (failure.worker, failure.error_type) == ("bench", "RuntimeError")
    assert failure.error == "attempt 1 fails"
    assert 'raise RuntimeError(f"attempt' in failure.traceback
    assert entries() == {}
    assert not ProcessedEvent.objects.exists()
    # And then
    bench.run_until_done()
    assert the_job().state == "completed"
    assert [entry.note for entry in Entry.objects.all()] == ["attempt 2"]
    assert settled(bench)


def test_a_retry_is_not_due_before_its_time(bench, transport):
    ledger.write_attempt.enqueue(job="a", fail_times=1)
    bench.run()
    assert bench.poll() == []
    make_everything_due()
    assert len(bench.poll()) == 1


@both
def test_attempts_end_in_a_dead_letter(bench, transport):
    # Given
    answer = ledger.always_fails.using(max_attempts=3).enqueue(job="a")
    # When
    bench.run_until_done()
    # Then
    job, letter = the_job(), DeadLetter.objects.get()
    assert bench.results == [Result.RETRIED, Result.RETRIED, Result.DEAD]
    assert (job.state, job.attempts, job.error) == ("failed", 3, "always fails")
    assert job.finished_at < job.result_expires_at
    assert [failure.attempt for failure in job.failures.all()] == [1, 2, 3]
    assert job.failures.last().retry_at is None
    assert (letter.reason, letter.state, letter.attempts) == ("exhausted", "open", 3)
    assert (letter.job_id, letter.message_id) == (answer.job_id, str(answer.job_id))
    assert bytes(letter.value) == bytes(job.payload)
    assert (letter.error_type, letter.error) == ("RuntimeError", "always fails")
    assert entries() == {}
    assert settled(bench)


def test_a_log_gets_the_dead_letter_too(bench):
    # Given
    ledger.always_fails.using(max_attempts=1).enqueue(job="a")
    # When
    bench.run()
    # Then
    (record,) = get_transport().records("ledger-dlq")
    assert bytes(record.value) == bytes(the_job().payload)
    assert record.headers[names.ID] == str(the_job().pk).encode()
    assert record.headers[names.DLQ_REASON] == b"exhausted"
    assert record.headers[names.DLQ_ORIGINAL_TOPIC] == b"ledger"


def test_a_dead_letter_its_topic_refuses_is_neither_recorded_nor_acknowledged(bench, monkeypatch):
    """KII-F3: the topic first, then the row, then the offset."""
    # Given
    ledger.always_fails.using(max_attempts=1).enqueue(job="a")
    ledger.write.enqueue(job="b")
    deliveries = bench.poll()
    get_transport().fail("the broker is away")
    # When
    deferred = bench.run(deliveries)
    # Then
    assert [d.message.type for d in deferred] == ["ledger.always_fails"]
    assert not DeadLetter.objects.exists()
    assert bench.lag() > 0
    assert entries() == {"b": 1}
    # And once the broker is back
    get_transport().fail(None)
    bench.run(deferred)
    assert DeadLetter.objects.count() == 1
    assert settled(bench)


@pytest.mark.parametrize("error", [PermanentError("no"), MessageError("whatever I like", "no")])
def test_a_permanent_error_dies_at_the_first_attempt(bench, error):
    """RST-25."""

    def refuse():
        raise error

    as_job(refuse).enqueue()
    bench.run()
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("fatal", 1)
    assert the_job().state == "failed"


def test_a_retry_asked_for_comes_when_asked(bench):
    # Given
    def later(context):
        if context.attempt == 1:
            raise Retry("not yet", delay=timedelta(hours=2))

    as_job(later, takes_context=True).enqueue()
    # When
    bench.run()
    # Then
    wait = the_job().available_at - timezone.now()
    assert timedelta(hours=1, minutes=59) < wait <= timedelta(hours=2)


def test_a_pausable_error_rests_its_partition(bench, settings):
    bench = reconfigured(settings, bench, ERROR_RECOVERY_DELAYS={"rate_limit": 9})
    ledger.rate_limited.enqueue(job="a")
    bench.run()
    assert [outcome.pause_seconds for outcome in bench.outcomes] == [9.0]


def test_jobs_enqueued_by_a_handler_share_its_fate(bench, transport):
    # Given
    def spawn(fail):
        ledger.write.enqueue(job=f"child {fail}")
        if fail:
            raise PermanentError

    job = as_job(spawn)
    job.enqueue(fail=False)
    job.enqueue(fail=True)
    # When
    bench.run_until_done()
    # Then
    assert entries() == {"child False": 1}
    assert Job.objects.count() == 3


class Unspeakable(Exception):
    """Its text cannot even be made."""

    def __str__(self) -> str:
        raise AttributeError("self.response")


@both
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("x" * 5000), "x" * 500),
        (RuntimeError("nul \x00"), "nul \ufffd"),
        (RuntimeError("lone \ud800"), "lone ?"),
        (RuntimeError(), "RuntimeError"),
        (Unspeakable(), "Unspeakable"),
        (type("E" * 300, (Exception,), {})("long name"), "long name"),
    ],
    ids=["long", "NUL", "surrogate", "without text", "unspeakable", "long name"],
)
def test_any_error_can_be_written_down(bench, error, text):
    """RST-27, RST-F14."""

    def fail():
        raise error

    as_job(fail, max_attempts=1).enqueue()
    bench.run()
    assert bench.results == [Result.DEAD]
    assert (
        JobFailure.objects.get().error == DeadLetter.objects.get().error == the_job().error == text
    )


@both
@pytest.mark.parametrize("mode", ["atomic", "plain"])
@pytest.mark.parametrize(
    "error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit()],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_what_is_no_exception_ends_the_attempt_and_not_the_lane(bench, error, mode):
    """sys.exit() in a handler would otherwise take one lane after the other."""

    def leave():
        Entry.objects.create(job="undone")
        raise error

    as_job(leave, max_attempts=1, atomic=mode == "atomic").enqueue()
    bench.run()
    assert bench.results == [Result.DEAD]
    assert DeadLetter.objects.get().error_type.endswith(type(error).__name__)


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3)], ids=repr)
def test_a_coroutine_that_ends_so_fails_too_and_alone(bench, error, atomic):
    async def leave():
        raise error

    async def stay():
        return 1

    as_job(leave, max_attempts=1, atomic=atomic).enqueue()
    as_job(stay, atomic=atomic).enqueue()
    bench.run()
    assert sorted(result.value for result in bench.results) == ["completed", "dead"]


def test_a_result_nobody_can_store_fails_for_good_and_undoes_the_handler(bench):
    def give():
        Entry.objects.create(job="undone")
        return object()

    as_job(give).enqueue()
    bench.run()
    assert entries() == {}
    assert "result cannot be stored" in DeadLetter.objects.get().error


def test_a_payload_the_handler_no_longer_takes_fails_for_good(bench):
    # Given: enqueued by an older version of the handler
    def old(job, colour): ...

    def new(job): ...

    as_job(old, "bench.changed").enqueue(job="a", colour="red")
    as_job(new, "bench.changed")
    # When
    bench.run()
    # Then
    letter = DeadLetter.objects.get()
    assert letter.reason == "fatal"
    assert "unexpected keyword argument 'colour'" in letter.error


def test_a_handler_that_takes_too_long_has_failed(bench):
    as_job(ledger.hang.handler.function, "bench.hang", timeout=timedelta(milliseconds=50)).using(
        max_attempts=1
    ).enqueue(job="a")
    bench.run()
    letter = DeadLetter.objects.get()
    assert letter.error_type == "kjo_django.consumer.timeouts.HandlerTimeout"
    assert letter.error == "The handler exceeded its timeout of 0.05 s"


# --- What must not run ----------------------------------------------------------------------------


def test_a_job_delivered_again_after_its_commit_is_a_duplicate(bench):
    # Given: a crash between commit and acknowledgement
    ledger.write.enqueue(job="a")
    deliveries = bench.poll()
    bench.run(deliveries)
    # When
    bench.run(deliveries)
    # Then
    assert entries() == {"a": 1}
    assert bench.results[1] in (Result.DUPLICATE, Result.SKIPPED)


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
    assert bench.results[0] is Result.COMPLETED
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
    assert bench.results == [Result.SKIPPED]
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
    assert bench.results == [Result.RETRIED, Result.SKIPPED]
    assert the_job().attempts == 1


def test_a_job_whose_row_was_deleted_does_not_run(bench):
    ledger.write.enqueue(job="a")
    deliveries = bench.poll()
    Job.objects.all().delete()
    bench.run(deliveries)
    assert bench.results == [Result.SKIPPED]
    assert entries() == {}
    assert settled(bench)


def test_a_job_that_was_not_started_in_time_dies_unrun(bench, transport):
    ledger.write.using(expires_at=timezone.now() - timedelta(seconds=1)).enqueue(job="a")
    bench.run()
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("expired", 0)
    assert (the_job().state, the_job().attempts) == ("failed", 0)
    assert entries() == {}
    assert settled(bench)


# --- Poison ---------------------------------------------------------------------------------------

GOOD = {"kjo_id": "foreign-1", "kjo_type": "ledger.write"}
POISON = {
    "tombstone": (None, GOOD, "invalid"),
    "empty": (b"", GOOD, "invalid"),
    "no JSON": (b"{broken", GOOD, "deserialization"),
    "no UTF-8": (b"\xff\xfe", GOOD, "deserialization"),
    "scalar": (b"42", GOOD, "invalid"),
    "array": (b"[]", GOOD, "invalid"),
    "too deep": (b"[" * 10_000 + b"]" * 10_000, GOOD, "deserialization"),
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


def test_a_record_that_dies_twice_is_one_dead_letter(bench):
    """A crash between row and offset."""
    bench.publish(b"{broken", **GOOD)
    deliveries = bench.poll()
    bench.run(deliveries)
    bench.run([bench.read(delivery.record) for delivery in deliveries])
    assert DeadLetter.objects.count() == 1


def test_a_job_whose_handler_is_gone_fails_visibly(bench):
    def gone(): ...

    as_job(gone).enqueue()
    registry.unregister("bench.gone")
    bench.run()
    assert DeadLetter.objects.get().reason == "unknown_type"
    assert the_job().state == "failed"
    assert settled(bench)


# --- Messages nobody enqueued here ----------------------------------------------------------------


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
    assert bench.results == [Result.RETRIED, Result.SKIPPED]
    assert not bench.stopping.waits
    assert the_job().attempts == 1
    bench.run_until_done()
    assert the_job().state == "failed"
    assert DeadLetter.objects.count() == 1


def test_who_waits_for_a_job_is_told_first_and_a_retry_finds_its_lease_free(bench, monkeypatch):
    # Given: somebody who looks at the lease when told of the outcome
    held: dict[str, bool] = {}

    def look(outcomes):
        for outcome in outcomes:
            lease = outcome.delivery.lease
            held[outcome.delivery.kind] = lease in get_coordination().holders([lease])

    monkeypatch.setattr(bench.pipeline, "_on_outcomes", look)
    # When
    for job in (ledger.write, ledger.always_fails):
        job.enqueue(job="a")
        bench.run()
    # Then
    assert held == {"ledger.write": True, "ledger.always_fails": False}
    assert not list(get_coordination().names("CONS:"))


# --- Handlers that break things -------------------------------------------------------------------


def close_connection(before: bool, after: bool):
    def handler(job):
        if before:
            Entry.objects.create(job=job)
        connection.close()
        if after:
            Entry.objects.create(job=job)

    return handler


@both
@pytest.mark.parametrize("after", [False, True], ids=["leaves", "goes on"])
@pytest.mark.parametrize("before", [False, True], ids=["unused", "used"])
def test_a_handler_that_closes_its_connection_spends_an_attempt_and_spares_the_others(
    bench, before, after, transport
):
    """Otherwise it would look like an outage, and be tried again for ever."""
    # Given
    breaking = as_job(close_connection(before, after), "bench.breaking", max_attempts=2)
    ledger.write.enqueue(job="before")
    breaking.enqueue(job="x")
    ledger.write.enqueue(job="after")
    # When
    bench.run()
    # Then
    assert not bench.stopping.waits
    assert entries() == {"before": 1, "after": 1}
    assert Job.objects.get(handler="bench.breaking").attempts == 1
    # And it ends
    bench.run_until_done()
    assert DeadLetter.objects.get().attempts == 2
    assert settled(bench)


@both
@pytest.mark.parametrize("transport_name", ["memory", "database"])
def test_a_violation_the_commit_finds_fails_its_own_job_only(bench, transport_name, settings):
    """Foreign keys are checked at the end of the transaction."""

    # Given
    def violate(job):
        Entry.objects.create(job=job)
        JobFailure.objects.create(job_id=uuid7(), attempt=1, error_type="x", error="x")

    violating = as_job(violate, max_attempts=2)
    ledger.write.enqueue(job="before")
    violating.enqueue(job="x")
    ledger.write.enqueue(job="after")
    # When
    bench.run_until_done()
    # Then
    assert not bench.stopping.waits
    assert entries() == {"before": 1, "after": 1}
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("exhausted", 2)
    assert letter.error_type == "django.db.utils.IntegrityError"
    assert JobFailure.objects.count() == 2
    assert settled(bench)


@both
def test_a_violation_found_at_once_is_an_ordinary_failure(bench):
    def violate():
        Entry.objects.create(pk=7, job="a")
        Entry(pk=7, job="b").save(force_insert=True)

    as_job(violate, max_attempts=1).enqueue()
    ledger.write.enqueue(job="c")
    bench.run()
    assert entries() == {"c": 1}
    assert DeadLetter.objects.get().error_type == "django.db.utils.IntegrityError"


@both
def test_an_error_the_handler_swallowed_does_not_complete_half_of_it(bench):
    def swallow():
        Entry.objects.create(pk=7, job="a")
        try:
            Entry(pk=7, job="b").save(force_insert=True)
        except IntegrityError:
            pass

    as_job(swallow, max_attempts=1).enqueue()
    ledger.write.enqueue(job="c")
    bench.run()
    assert entries() == {"c": 1}
    assert bench.results == [Result.DEAD, Result.COMPLETED] or Result.DEAD in bench.results


def fail_loudly() -> None:
    raise RuntimeError("the callback broke")


@both
@pytest.mark.parametrize(
    "callback", [fail_loudly, functools.partial(fail_loudly)], ids=["function", "partial"]
)
def test_a_callback_that_fails_after_the_commit_leaves_the_job_completed(bench, callback, caplog):
    """KJO-F12."""
    # Given
    called = []

    def with_callback(job):
        Entry.objects.create(job=job)
        transaction.on_commit(callback)

    def with_good_callback(job):
        Entry.objects.create(job=job)
        transaction.on_commit(lambda: called.append(job))

    as_job(with_callback).enqueue(job="a")
    as_job(with_good_callback).enqueue(job="b")
    # When
    bench.run()
    # Then
    assert entries() == {"a": 1, "b": 1}
    assert called == ["b"]
    assert bench.results == [Result.COMPLETED] * 2
    assert "the callback broke" in caplog.text
    assert settled(bench)


def test_callbacks_of_a_failed_handler_are_not_called(bench):
    called = []

    def fail():
        transaction.on_commit(lambda: called.append("no query"))
        Entry.objects.create(job="a")
        transaction.on_commit(lambda: called.append("query"))
        raise RuntimeError

    as_job(fail).enqueue()
    bench.run()
    assert called == []


@both
def test_a_handler_that_leaves_a_transaction_open_by_hand_is_stopped(bench):
    def rollback():
        Entry.objects.create(job="a")
        transaction.set_rollback(True)

    as_job(rollback, max_attempts=1).enqueue()
    ledger.write.enqueue(job="b")
    bench.run()
    assert entries() == {"b": 1}
    assert DeadLetter.objects.get().attempts == 1


# --- Crashes --------------------------------------------------------------------------------------


def crashed_while_running(bench: Bench, deliveries, times: int = 1) -> None:
    """Leave behind what workers leave that were killed during these: leases and no sign of life."""
    for number in range(times):
        for delivery in deliveries:
            coordination = get_coordination()
            for token in coordination.holders([delivery.lease]).values():
                coordination.release([delivery.lease], token, count_delivery=True)
            (claim,) = coordination.claim([delivery.lease], f"dead-{number}", timedelta(minutes=5))
            assert claim.acquired


@both
def test_a_crash_counts_as_an_attempt(bench):
    """Promise 3, PJQ-F10."""
    # Given
    ledger.write_attempt.enqueue(job="a")
    deliveries = bench.poll()
    crashed_while_running(bench, deliveries)
    # When
    bench.run(deliveries)
    # Then
    assert the_job().state == "completed"
    assert the_job().attempts == 2
    assert Entry.objects.get().note == "attempt 2"
    assert deliveries[0].deliveries == 2
    assert settled(bench)


def test_a_suspect_runs_alone_and_apart_from_its_group(bench):
    # Given
    together = []

    def look(job):
        together.append((job, bench.pipeline._alone._waiting))

    job = as_job(look)
    job.enqueue_many([{"job": "innocent"}, {"job": "suspect"}, {"job": "innocent too"}])
    deliveries = bench.poll()
    crashed_while_running(bench, [deliveries[1]])
    # When
    bench.run(deliveries)
    # Then
    assert together == [("innocent", 0), ("innocent too", 0), ("suspect", 1)]


def test_a_job_that_killed_all_its_workers_ends_as_stalled(bench):
    """Show 5."""
    # Given
    ledger.kill_worker.using(max_attempts=3).enqueue(job="a")
    deliveries = bench.poll()
    crashed_while_running(bench, deliveries, times=3)
    # When
    bench.run(deliveries)
    # Then
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("stalled", 3)
    assert letter.error_type == "kjo_django.exceptions.StalledError"
    assert (the_job().state, the_job().attempts) == ("failed", 3)
    assert settled(bench)


def test_a_job_that_killed_all_but_one_gets_its_last_attempt(bench):
    ledger.write.using(max_attempts=3).enqueue(job="a")
    deliveries = bench.poll()
    crashed_while_running(bench, deliveries, times=2)
    bench.run(deliveries)
    assert (the_job().state, the_job().attempts) == ("completed", 3)


def test_what_a_living_worker_runs_is_left_to_it(bench, another):
    # Given
    ledger.write.enqueue(job="a")
    (delivery,) = bench.poll()
    another.leases.claim([delivery.lease])
    # When, then
    assert bench.run([delivery]) == [delivery]
    assert entries() == {}
    assert bench.outcomes == []
    # And once it is done with it
    another.leases.release([delivery.lease])
    assert bench.run([delivery]) == []
    assert (entries(), the_job().attempts) == ({"a": 1}, 1)


def test_a_key_keeps_its_order_though_its_first_job_is_held_elsewhere(bench, another):
    """One of a key at a time and in order, also across workers."""
    # Given
    for number in range(3):
        ledger.write_keyed.enqueue(job=str(number), key="k")
    ledger.write_keyed.enqueue(job="free", key="other")
    deliveries = bench.poll()
    another.leases.claim([deliveries[0].lease])
    # When
    deferred = bench.run(deliveries)
    # Then
    assert deferred == deliveries[:3]
    assert entries() == {"free": 1}
    another.leases.release([deliveries[0].lease])
    assert bench.run(deferred) == []
    assert [entry.job for entry in Entry.objects.order_by("id")] == ["free", "0", "1", "2"]
    assert all(job.attempts == 1 for job in Job.objects.all())


def test_a_key_keeps_its_order_after_a_crash(bench):
    # Given: a worker died in the first of these
    for number in range(3):
        ledger.write_keyed.enqueue(job=str(number), key="k")
    deliveries = bench.poll()
    crashed_while_running(bench, deliveries[:1])
    # When
    for _ in range(3):
        deliveries = bench.run(deliveries)
    # Then
    assert [entry.job for entry in Entry.objects.order_by("id")] == ["0", "1", "2"]


def test_without_coordination_the_database_decides(bench, another, monkeypatch):
    # Given
    from kjo_django.exceptions import CoordinationError

    def refuse(*args, **kwargs):
        raise CoordinationError("away")

    for name in ("claim", "renew", "release", "holders"):
        monkeypatch.setattr(get_coordination(), name, refuse)
    ledger.write.enqueue(job="a")
    deliveries = bench.poll()
    # When
    bench.run(deliveries)
    another.run([another.read(delivery.record) for delivery in deliveries])
    # Then
    assert entries() == {"a": 1}
    assert bench.results == [Result.COMPLETED]
    assert another.results[0] in (Result.DUPLICATE, Result.SKIPPED)


# --- Outages --------------------------------------------------------------------------------------


def test_an_outage_of_the_database_spends_no_attempt_and_loses_nothing(bench, monkeypatch):
    # Given
    ledger.write.enqueue(job="a")
    deliveries = bench.poll()

    def away(*args, **kwargs):
        raise OperationalError("server closed the connection unexpectedly")

    # When
    with monkeypatch.context() as patch:
        patch.setattr("kjo_django.consumer.atomic.mark_and_load", away)
        deferred = bench.run(deliveries)
    # Then: it was waited for, and what could not be settled is handed back
    assert bench.stopping.waits == 1
    assert deferred == deliveries
    assert (the_job().attempts, bench.lag()) == (0, 1)
    assert not ProcessedEvent.objects.exists()
    # And once it is back
    bench.stopping.waits = 0
    bench.run(deferred)
    assert (entries(), the_job().attempts) == ({"a": 1}, 1)
    assert settled(bench)


@both
def test_an_outage_while_failures_are_written_repeats_nothing_that_is_durable(bench, monkeypatch):
    # Given
    ledger.write.enqueue(job="a")
    ledger.always_fails.enqueue(job="x")
    deliveries = bench.poll()
    broken = iter([True])
    original = Job.objects.bulk_create

    from kjo_django.consumer import settlement

    record = settlement.record_failures

    def once_away(*args, **kwargs):
        if next(broken, False):
            raise OperationalError("gone")
        return record(*args, **kwargs)

    monkeypatch.setattr(settlement, "record_failures", once_away)
    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)
    # When
    bench.run(deliveries)
    # Then
    assert original is not None
    assert entries() == {"a": 1}
    assert JobFailure.objects.count() == 1
    assert Job.objects.get(handler="ledger.always_fails").attempts == 1
    assert settled(bench)


# --- Outside the transaction ----------------------------------------------------------------------


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


def test_a_plain_job_is_claimed_on_sqlite_without_holding_up_those_who_write(bench, monkeypatch):
    """A transaction that reads and then writes meets "database is locked" at once, whatever the
    time-out, when somebody else writes in between."""
    written = []

    def write():
        Entry.objects.create(job="another")
        connection.close()
        written.append(True)

    judge = attempts.judge

    def judge_while_another_writes(*arguments, **options):
        writer = threading.Thread(target=write)
        writer.start()
        writer.join(5)
        return judge(*arguments, **options)

    monkeypatch.setattr(attempts, "judge", judge_while_another_writes)
    as_job(lambda: None, atomic=False).enqueue()
    bench.run()
    assert written == [True]
    assert [outcome.result for outcome in bench.outcomes] == [Result.COMPLETED]


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


@both
@pytest.mark.parametrize("is_async", [False, True])
def test_a_late_finisher_is_refused(bench, is_async):
    """It was frozen past its lease, and another worker has the job now."""

    # Given
    def lose_the_lease():
        Job.objects.update(lease_token="another", lease_expires_at=timezone.now() + timedelta(1))

    async def lose_it_later():
        await asyncio.sleep(0)
        from asgiref.sync import sync_to_async

        await sync_to_async(lose_the_lease)()

    as_job(lose_it_later if is_async else lose_the_lease, atomic=False).enqueue()
    # When
    bench.run()
    # Then
    assert bench.results == [Result.SKIPPED]
    assert (the_job().state, the_job().lease_token) != ("completed", "")
    assert the_job().lease_token == "another"
    assert not ProcessedEvent.objects.exists()


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


# --- Coroutines -----------------------------------------------------------------------------------


@both
def test_a_coroutine_writes_within_the_groups_transaction(bench, transport):
    # Given
    async def write(job, fail=False):
        await Entry.objects.acreate(job=job)
        if fail:
            raise RuntimeError

    job = as_job(write, max_attempts=1)
    job.enqueue_many([{"job": "a"}, {"job": "b", "fail": True}, {"job": "c"}])
    # When
    bench.run()
    # Then
    assert entries() == {"a": 1, "c": 1}
    assert sorted(result.value for result in bench.results) == ["completed", "completed", "dead"]
    assert settled(bench)


def test_coroutines_outside_a_transaction_run_at_the_same_time(bench, transport):
    # Given: each waits for all the others
    count = 20
    here = []
    everybody = asyncio.Event()

    async def meet(number):
        here.append(number)
        if len(here) == count:
            everybody.set()
        await asyncio.wait_for(everybody.wait(), 20)
        return number

    as_job(meet, atomic=False).enqueue_many([{"number": n} for n in range(count)])
    deliveries = bench.poll()
    # When
    assert {delivery.mode for delivery in deliveries} == {Mode.CONCURRENT}
    bench.run(deliveries)
    # Then
    assert bench.results == [Result.COMPLETED] * count
    assert [result_of(job) for job in Job.objects.order_by("id")] == list(range(count))
    assert settled(bench)


def test_a_coroutine_that_fails_or_takes_too_long_is_alone_with_it(bench):
    async def behave(how):
        if how == "fail":
            raise RuntimeError
        await asyncio.sleep(3600 if how == "hang" else 0)

    job = as_job(behave, atomic=False, timeout=timedelta(seconds=0.2), max_attempts=1)
    job.enqueue_many([{"how": how} for how in ("fail", "hang", "well")])
    bench.run()
    states = {job.arguments["how"]: (job.state, job.error) for job in Job.objects.all()}
    assert states == {
        "fail": ("failed", "RuntimeError"),
        "hang": ("failed", "The handler exceeded its timeout of 0.2 s"),
        "well": ("completed", ""),
    }


# --- Telling --------------------------------------------------------------------------------------


def test_outcomes_are_told_once_they_are_durable(bench, monkeypatch):
    # Given
    seen = []

    def on_outcomes(outcomes):
        states = sorted(Job.objects.values_list("state", flat=True))
        seen.append((connection.in_atomic_block, bench.lag(), states))

    monkeypatch.setattr(bench.pipeline, "_on_outcomes", on_outcomes)
    ledger.write.enqueue(job="a")
    ledger.refuse.enqueue(job="b")
    # When
    bench.run()
    # Then
    assert seen == [(False, 0, ["completed", "failed"])]


def test_a_worker_that_is_not_alive_loses_its_leases(bench):
    """PJQ-59: workers vanish with their sign of life."""
    silent = Bench(worker="silent", alive=False)
    assert alive_name("silent") not in get_coordination().holders([alive_name("silent")])
    ledger.write.enqueue(job="a")
    (delivery,) = bench.poll()
    silent.leases.claim([delivery.lease])
    bench.run([delivery])
    assert (the_job().state, the_job().attempts) == ("completed", 2)
    silent.close()


def test_a_recursion_without_end_is_an_ordinary_failure(bench):
    def recurse():
        recurse()

    as_job(recurse, max_attempts=1).enqueue()
    bench.run()
    assert DeadLetter.objects.get().error_type == "RecursionError"
    assert sys.getrecursionlimit() < 10**6


def test_a_rate_limit_defers_what_else_of_its_partition_is_in_the_group(bench, settings):
    """KJO-76: the others must not run into the same wall."""
    bench = reconfigured(settings, bench, ERROR_RECOVERY_DELAYS={"rate_limit": 9})
    calls = []

    def limited(job):
        calls.append(job)
        raise RateLimitExceededError

    as_job(limited).enqueue_many([{"job": str(n)} for n in range(3)])
    deferred = bench.run()
    assert calls == ["0"]
    assert len(deferred) == 2
    assert sorted(Job.objects.values_list("attempts", flat=True)) == [0, 0, 1]


def test_the_database_transport_acknowledges_in_the_same_transaction(bench, transport):
    """X-11: acknowledged with the durable outcome."""
    if transport == "database":
        ledger.write.enqueue(job="a")
        bench.run()
        assert not TransportMessage.objects.exists()
