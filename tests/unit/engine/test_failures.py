"""What fails: seen, tried again in its time, dead in the end, and alone with it."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from kjo_django import PermanentError, Retry
from kjo_django.engine.attempt import Ending
from kjo_django.exceptions import MessageError, RateLimitExceededError
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, Job, JobFailure, ProcessedEvent
from kjo_django.runtime import get_transport
from tests.ledger import jobs as ledger
from tests.ledger.models import Entry
from tests.unit.deliveries import as_job, entries, make_everything_due, the_job
from tests.unit.engine.bench import both, reconfigured, settled


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


@pytest.mark.promise("one-transaction")
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
    assert bench.results == [Ending.RETRIED]
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


@pytest.mark.promise("failed-loses-place")
@both
def test_later_jobs_of_its_key_run_before_the_retry_of_a_failed_one(bench, transport):
    # Given
    ran = []

    def fail_once(context, job: str) -> None:
        ran.append((job, context.attempt))
        if (job, context.attempt) == ("first", 1):
            raise RuntimeError("not now")

    keyed = as_job(fail_once, takes_context=True).using(key="k")
    for name in ("first", "second"):
        keyed.enqueue(job=name)
    # When
    bench.run_until_done()
    # Then
    assert ran == [("first", 1), ("second", 1), ("first", 2)]


@pytest.mark.promise("dead-letter-is-a-row")
@both
def test_attempts_end_in_a_dead_letter(bench, transport):
    # Given
    answer = ledger.always_fails.using(max_attempts=3).enqueue(job="a")
    # When
    bench.run_until_done()
    # Then
    job, letter = the_job(), DeadLetter.objects.get()
    assert bench.results == [Ending.RETRIED, Ending.RETRIED, Ending.DEAD]
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


@pytest.mark.promise("stored-before-acknowledged")
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


@both
@pytest.mark.parametrize("kind", ["atomic", "plain", "coroutine"])
def test_who_died_does_not_die_again_because_a_topic_refuses_the_dead_letter(bench, kind):
    """It comes up once a second, for as long as that lasts, and a mail went out each time."""
    # Given
    ran = []

    def die(n: int) -> None:
        ran.append(n)
        if n == 1:
            raise PermanentError("no")

    async def die_in_the_air(n: int) -> None:
        die(n)

    function = die_in_the_air if kind == "coroutine" else die
    as_job(function, atomic=kind == "atomic", key="n").enqueue_many([{"n": n} for n in range(3)])
    deliveries = bench.poll()
    get_transport().fail("the topic is not there")
    # When
    deferred = bench.run(deliveries)
    for _ in range(3):
        deferred = bench.run(deferred)
        assert deferred == deliveries[1:2]
    # Then
    assert sorted(ran) == [0, 1, 2]
    get_transport().fail(None)
    assert bench.run(deferred) == []
    assert sorted(ran) == [0, 1, 2]
    assert [job.state for job in Job.objects.order_by("id")] == ["completed", "failed", "completed"]
    letter = DeadLetter.objects.get()
    assert (letter.attempts, letter.error) == (1, "no")
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
    assert bench.results == [Ending.DEAD]
    assert (
        JobFailure.objects.get().error == DeadLetter.objects.get().error == the_job().error == text
    )


class Hasty(Retry):
    """Written without a thought of its parent."""

    def __init__(self) -> None: ...


class Unclear(MessageError):
    """The same."""

    def __init__(self) -> None: ...


class Unnotable(Exception):
    """Its notes cannot even be read."""

    @property
    def __notes__(self) -> list[str]:
        raise RuntimeError("no notes")


def impatient() -> Retry:
    error = Retry()
    error.delay = 30  # type: ignore[assignment]
    return error


ODD = {
    "an OSError of things": lambda: OSError({"code": 7}, "of a client"),
    "no delay": Hasty,
    "a number for a delay": impatient,
    "no reason": Unclear,
    "no notes": Unnotable,
    "bytes for code": lambda: SyntaxError("odd", ("file", 1, 1, b"text")),
}


@both
@pytest.mark.parametrize("kind", ODD)
def test_errors_made_oddly_end_the_attempt_too(bench, kind):
    """Raised again while it was judged or written down, it left the job neither done nor dead, and
    its partition behind it."""

    def fail():
        raise ODD[kind]()

    as_job(fail, max_attempts=2).enqueue()
    bench.run_until_done()
    assert bench.results[-1] is Ending.DEAD
    assert "in fail" in JobFailure.objects.latest("pk").traceback
    assert settled(bench)


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
    assert bench.results == [Ending.DEAD]
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
    assert letter.error_type == "kjo_django.exceptions.HandlerTimeout"
    assert letter.error == "The handler exceeded its timeout of 0.05 s"


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
    assert len(deferred) == 3
    assert set(Job.objects.values_list("attempts", flat=True)) == {0}
