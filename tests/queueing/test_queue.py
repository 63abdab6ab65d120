"""``Queue`` itself: options, defaults, events, hooks and errors, with no worker."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone

from kjo_django import Queue, exceptions, registry, signals
from kjo_django.conf import default_worker_name, get_settings
from kjo_django.exceptions import (
    JobQueueError,
    JobStateError,
    MaxRetriesError,
    MessageError,
    PayloadError,
)
from kjo_django.messages.msgpack import MSGPACK
from kjo_django.messages.serializers import (
    JSON,
    content_id,
    dump_result,
    load_result,
    serializer_for,
)
from kjo_django.models import Job
from kjo_django.patterns.queue import CancelResult, RequeueResult
from kjo_django.patterns.queue.handlers import AfterExecution
from kjo_django.testing import drain
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db


@pytest.fixture
def queue(forgotten_definitions: None) -> Queue:
    return Queue("tests-queue")


# --- What is refused, before anything is written --------------------------------------------------


@pytest.mark.parametrize(
    "ttl",
    [0, -1, 1.5, math.nan, math.inf, True, "1000", timedelta(0), timedelta(days=-1), 2**60],
)
def test_a_lifetime_that_means_nothing(queue: Queue, ttl: Any) -> None:
    """PJQ-40: at enqueue, for a whole queue, and for a result that is there already."""
    for attempt in (
        lambda: queue.enqueue("a", 1, result_ttl=ttl),
        lambda: Queue("other", result_ttl=ttl),
        lambda: queue.update_result_ttl("a", ttl),
    ):
        with pytest.raises((ValueError, TypeError), match="result_ttl must be"):
            attempt()
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": True}, "max_attempts"),
        ({"delay": "soon"}, "delay"),
        ({"run_at": datetime(2030, 1, 1)}, "run_at"),
        ({"expires_at": "tomorrow"}, "expires_at"),
        ({"delay": timedelta(1), "run_at": timezone.now()}, "not both"),
        ({"headers": {"a": 1}}, "headers"),
        ({"key": "k" * 256}, "key"),
        ({"max_tries": 3}, "max_tries"),
        ({"correlation_id": 7}, "headers"),
    ],
)
def test_options_that_mean_nothing(queue: Queue, options: Any, complaint: str) -> None:
    with pytest.raises((ValueError, TypeError), match=complaint):
        queue.enqueue("a", 1, **options)
    assert not Job.objects.exists()


@pytest.mark.parametrize("id", ["", "a" * 256, 7, None, b"a"])
def test_ids_that_are_none(queue: Queue, id: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="id must be text"):
        queue.enqueue(id, 1)
    assert not Job.objects.exists()


@pytest.mark.parametrize("id", [7, None, b"a", ["a"]])
def test_no_job_is_looked_for_by_what_is_no_text(queue: Queue, id: Any) -> None:
    looks: list[Callable[[], Any]] = [
        *(
            lambda: queue.get_status(id),
            lambda: queue.get_result(id),
            lambda: queue.get_states([id]),
        ),
        *(lambda: queue.cancel(id), lambda: queue.retry(id), lambda: queue.wait(id, timeout=1)),
        lambda: queue.update_result_ttl(id, 1000),
    ]
    for look in looks:
        with pytest.raises(TypeError, match="id must be text"):
            look()


@pytest.mark.parametrize(
    "options",
    [
        {"processing_queue_ttl": 7},
        {"block_timeout": 5},
        {"visibility_timeout": 30},
        {"storage": None},
        {"max_attempts": 3, "max_retries": 3},
        {"max_attempts": 0},
        {"max_retries": 1.5},
        {"concurrency": 0},
    ],
)
def test_options_of_a_queue_are_honoured_or_refused(options: Any) -> None:
    """PJQ-29, PJQ-33, PJQ-35, PJQ-36, PJQ-38, PJQ-39: never silently ignored."""
    with pytest.raises((TypeError, ValueError)):
        Queue("tests-refused", **options)


@pytest.mark.parametrize("name", ["", "q" * 95, None, 7])
def test_a_name_that_no_row_holds_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="name must be text of 1 to 94 characters"):
        Queue(name)


# --- Defaults -------------------------------------------------------------------------------------


def test_three_retries_are_three_executions(queue: Queue, settings: Any) -> None:
    """PJQ-11, PJQ-34, X-1: the enqueue's word, then the queue's, then the settings', then 3."""

    def attempts(queue: Queue, **options: Any) -> int:
        answer = queue.enqueue(f"job-{Job.objects.count()}", 1, **options)
        return Job.objects.get(pk=answer.job_id).max_attempts

    assert attempts(queue) == 3
    assert attempts(queue, max_attempts=7) == 7
    assert attempts(Queue("tests-queue", max_retries=4)) == 4
    settings.KJO = {"QUEUES": {"tests-queue": {"max_attempts": 9}}}
    assert attempts(queue) == 9
    assert attempts(Queue("tests-queue", max_attempts=2)) == 2


def test_the_producers_lifetime_is_stored(queue: Queue, settings: Any) -> None:
    """PJQ-25, PJQ-37, PJQ-41: resolved at the enqueue; a consumer's own default changes nothing."""

    def lifetime(queue: Queue, **options: Any) -> int:
        answer = queue.enqueue(f"job-{Job.objects.count()}", 1, **options)
        return Job.objects.get(pk=answer.job_id).result_ttl

    assert lifetime(queue) == 3_600_000
    assert lifetime(queue, result_ttl=timedelta(minutes=1)) == 60_000
    assert lifetime(Queue("tests-queue", result_ttl=500)) == 500
    settings.KJO = {"QUEUES": {"tests-queue": {"result_ttl": 5}}}
    assert lifetime(queue) == 5_000
    # When it runs where the default is another
    settings.KJO = {"QUEUES": {"tests-queue": {"result_ttl": 99}}}
    queue.execute(lambda job: job.payload)
    drain(queue)
    job = Job.objects.get(unique_id="job-0")
    assert job.result_expires_at - job.finished_at == timedelta(hours=1)


def test_one_at_a_time_unless_told_otherwise(settings: Any) -> None:
    """PJQ-32: but what the settings say of a queue wins."""
    settings.KJO = {
        "CONCURRENCY": 6,
        "QUEUES": {"tests-known": {}, "tests-set": {"concurrency": 2}},
    }
    with registry.isolated():
        Queue("tests-new")
        Queue("tests-wide", concurrency=8)
        Queue("tests-known")
        Queue("tests-set", concurrency=5)
        found = {
            name: get_settings().queue(name).concurrency
            for name in ("tests-new", "tests-wide", "tests-known", "tests-set")
        }
    assert found == {"tests-new": 1, "tests-wide": 8, "tests-known": 6, "tests-set": 2}


def test_the_workers_name() -> None:
    """PJQ-31."""
    assert default_worker_name() == f"{socket.gethostname()}-{os.getpid()}"


# --- Looking --------------------------------------------------------------------------------------


def test_states_of_many(queue: Queue) -> None:
    """PJQ-18, PJQ-45, PJQ-57: the strings of the seed, whatever the ids hold."""
    rows = {
        "a:processing:1": {"completed": True},
        "b": {"failed": True},
        "c": {"state": "failing"},
        "d": {"state": "pending"},
        "e": {"state": "queued", "lease_expires_at": timezone.now() + timedelta(hours=1)},
        "f": {"cancelled": True},
    }
    for id, values in rows.items():
        JobFactory(queue=queue.name, unique_id=id, **values)
    assert queue.get_states([*rows, "nobody"]) == {
        "a:processing:1": "completed",
        "b": "failed",
        "c": "failing",
        "d": "queued",
        "e": "processing",
        "f": "cancelled",
        "nobody": None,
    }


def test_what_can_be_cancelled(queue: Queue) -> None:
    """PJQ-17, PJQ-F5: failing ones; a failed one answers so and keeps its record."""
    JobFactory(queue=queue.name, unique_id="failing", state="failing")
    JobFactory(queue=queue.name, unique_id="failed", failed=True)
    assert queue.cancel("failing") is CancelResult.CANCELLED
    assert queue.cancel("failing") is CancelResult.CANCELLED
    assert queue.cancel("failed") is CancelResult.FAILED
    assert Job.objects.get(unique_id="failed").error == "it broke"
    # A cancelled id is free at once, and a cancelled job may be retried
    assert queue.retry("failing") is RequeueResult.REQUEUED
    with pytest.raises(JobStateError, match="only failed ones"):
        queue.retry("failing")


# --- Events and hooks -----------------------------------------------------------------------------


def test_events_of_this_queue_only(queue: Queue, django_capture_on_commit_callbacks: Any) -> None:
    """PJQ-09, PJQ-F12, X-14: with the caller's ids, never parsed."""
    heard: list[Any] = []
    undo = [
        queue.on(event, lambda *arguments, event=event: heard.append((event, *arguments)))
        for event in ("enqueued", "cancelled", "requeued", "stalled", "error")
    ]
    with django_capture_on_commit_callbacks(execute=True):
        queue.enqueue("host:8080:1", 1)
        queue.cancel("host:8080:1")
        queue.retry("host:8080:1")
        Queue("tests-other").enqueue("b", 1)
    facts = {"job_id": "x", "unique_id": None, "queue": queue.name, "handler": queue.job_type}
    signals.job_stalled.send_robust(sender="x", attempt=2, **facts)
    assert heard == [
        ("enqueued", "host:8080:1"),
        ("cancelled", "host:8080:1"),
        ("requeued", "host:8080:1"),
        ("stalled", "x"),
    ]
    for one in undo:
        one()
    signals.job_stalled.send_robust(sender="x", attempt=2, **facts)
    assert len(heard) == 4
    with pytest.raises(ValueError, match="No event is named 'finished'"):
        queue.on("finished", print)


def test_a_listener_that_fails_is_told_as_an_error(queue: Queue) -> None:
    errors: list[Exception] = []
    undo = queue.on("stalled", lambda id: 1 / 0)
    queue.on("error", errors.append)
    queue.on("error", lambda error: 1 / 0)
    facts = {"job_id": "x", "unique_id": "a", "queue": queue.name, "handler": queue.job_type}
    signals.job_stalled.send_robust(sender="x", attempt=2, **facts)
    undo()
    assert isinstance(errors[0], ZeroDivisionError)


def test_an_error_that_has_no_text_is_told_too(queue: Queue) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise AttributeError("customer")

    failures: list[Any] = []
    undo = queue.on("failed", lambda id, error: failures.append(error))
    facts = {"job_id": str(uuid4()), "unique_id": "a", "queue": queue.name}
    facts |= {"handler": queue.job_type, "reason": "exhausted", "error": Mute()}
    signals.job_failed.send_robust(sender="x", attempt=2, **facts)
    undo()
    assert "Mute" in str(failures[0])


def test_what_comes_after_the_execution(queue: Queue) -> None:
    """O-01: result, error and lifetime may be changed; a hook that fails changes nothing."""
    errors: list[Exception] = []
    queue.on("error", errors.append)

    def after(ended: AfterExecution) -> None:
        if ended.job.id == "result":
            ended.result, ended.result_ttl = {"was": ended.result}, 5_000
        if ended.job.id == "forgiven":
            assert isinstance(ended.error, RuntimeError)
            ended.error, ended.result = None, "forgiven"
        if ended.job.id == "refused":
            ended.error = ValueError("not good enough")
        if ended.job.id == "bad ttl":
            ended.result, ended.result_ttl = "lost", -1
        if ended.job.id == "failed":
            ended.result_ttl = timedelta(seconds=7)

    def handle(job: Any) -> Any:
        if job.payload == "fail":
            raise RuntimeError("broken")
        return job.payload

    queue.execute(handle, after_execution=after)
    for id, payload in (
        ("result", 1),
        ("forgiven", "fail"),
        ("refused", 1),
        ("bad ttl", 2),
        ("failed", "fail"),
    ):
        queue.enqueue(id, payload, max_attempts=1)
    drain(queue, raise_errors=False)
    lifetimes = dict(Job.objects.values_list("unique_id", "result_ttl"))
    assert queue.get_result("result") == {"was": 1}
    assert lifetimes["result"] == 5_000
    assert queue.get_result("forgiven") == "forgiven"
    assert queue.get_status("refused").error == "not good enough"
    assert queue.get_result("bad ttl") == 2
    assert lifetimes["bad ttl"] == 3_600_000
    assert len(errors) == 1
    job = Job.objects.get(unique_id="failed")
    assert job.result_ttl == 7_000
    assert job.result_expires_at - job.finished_at == timedelta(seconds=7)


def test_an_error_may_be_told_as_text(queue: Queue) -> None:
    def handle(job: Any, callback: Any) -> None:
        callback("out of paper" if job.payload == 1 else None, "done")

    def after(ended: AfterExecution) -> None:
        if ended.result == "done":
            ended.error = "not good enough"  # type: ignore[assignment]

    queue.execute(handle, after_execution=after)
    queue.enqueue("told", 1, max_attempts=1)
    queue.enqueue("refused", 2, max_attempts=1)
    drain(queue, raise_errors=False)
    assert queue.get_status("told").error == "out of paper"
    assert queue.get_status("refused").error == "not good enough"


def test_a_queue_has_one_handler(queue: Queue) -> None:
    def one(job: Any) -> None: ...

    def two(job: Any) -> None: ...

    assert queue.handler(one) is one
    queue.execute(one)
    with pytest.raises(ImproperlyConfigured, match="Two jobs are named 'queue:tests-queue'"):
        queue.execute(two)


# --- Errors and serializers -----------------------------------------------------------------------


def test_every_error_has_its_code() -> None:
    """PJQ-26: a tree, stable codes, and a description an API may show."""
    codes = {
        "JobTimeoutError": "TIMEOUT",
        "MaxRetriesError": "MAX_RETRIES",
        "JobFailedError": "JOB_FAILED",
        "JobNotFoundError": "JOB_NOT_FOUND",
        "JobCancelledError": "JOB_CANCELLED",
        "StorageError": "STORAGE_ERROR",
        "JobStateError": "JOB_STATE",
        "StalledError": "STALLED",
        "UncommittedJobError": "UNCOMMITTED",
    }
    for name, code in codes.items():
        kind = getattr(exceptions, name)
        assert issubclass(kind, JobQueueError)
        error = kind("a", 1, "b") if kind is MaxRetriesError else kind("what happened")
        assert error.to_dict() == {"code": code, "type": name, "message": str(error)}
    assert issubclass(exceptions.JobTimeoutError, TimeoutError)
    assert exceptions.JobFailedError("x", original_error="why").original_error == "why"
    error = MaxRetriesError("job", 3, "broke", payload={"a": 1})
    assert (error.job_id, error.attempts, error.last_error) == ("job", 3, "broke")
    assert error.payload == {"a": 1}


def test_content_ids() -> None:
    """PJQ-69, PJQ-F11: whatever the order of the keys; 16 digits, or all of them."""
    id = content_id({"a": 1, "b": [1, 2]})
    assert id == content_id({"b": [1, 2], "a": 1})
    assert len(id) == 16
    assert id != content_id({"a": 1, "b": [2, 1]})


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (b"\x00\xff", b"\x00\xff"),
        ({"a": [1, None, True, "ü", 1.5]}, {"a": [1, None, True, "ü", 1.5]}),
        ((1, 2), [1, 2]),
        ({1: "one"}, {1: "one"}),
        (Decimal("1.50"), "1.50"),
        (datetime(2030, 1, 2, 3, 4), "2030-01-02T03:04:00"),
        (timedelta(hours=1), "P0DT01H00M00S"),
    ],
)
def test_messagepack(value: Any, read: Any) -> None:
    """PJQ-68."""
    assert MSGPACK.loads(MSGPACK.dumps(value)) == read
    assert load_result(dump_result(value, MSGPACK), MSGPACK) == read
    assert serializer_for("application/msgpack; x=y") is MSGPACK


@pytest.mark.parametrize("value", [object(), 2**64, "\ud800", {1, 2}])
def test_what_messagepack_refuses(value: Any) -> None:
    with pytest.raises(PayloadError):
        MSGPACK.dumps(value)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81", b"\x01\x01", b"\xa1\xff", b"\x91" * 2000])
def test_broken_messagepack_is_poison(data: bytes) -> None:
    with pytest.raises(MessageError) as error:
        MSGPACK.loads(data)
    assert error.value.reason == "deserialization"


class Reversing:
    """A serializer of a project's own, which can write nothing but text."""

    content_type = "application/x-reversed"

    def dumps(self, value: Any) -> bytes:
        return str(value)[::-1].encode()

    def loads(self, data: bytes) -> Any:
        return data.decode()[::-1]


def test_results_may_have_a_serializer_of_their_own(forgotten_definitions: None) -> None:
    """PJQ-30, PJQ-68: and payloads one that could not write a result."""
    queue = Queue("tests-own", serializer=Reversing(), result_serializer=MSGPACK)
    queue.execute(lambda job: {"got": job.payload.encode()})
    queue.enqueue("a", "hello")
    assert bytes(Job.objects.get().payload) == b"olleh"
    drain(queue)
    assert queue.get_result("a") == {"got": b"hello"}
    # Whoever reads the row needs to know the payload's serializer only
    assert load_result(bytes(Job.objects.get().result), JSON) == {"got": b"hello"}


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres")  # SQLite takes any text
@pytest.mark.parametrize("id", ["a\0b", "\ud800"])
def test_an_id_no_database_keeps_is_nobodys(id) -> None:
    """Ids come from outside: what nobody has is unknown, not an error."""
    queue = Queue("images")
    assert queue.get_status(id) is None
    assert queue.get_result(id, "none") == "none"
    assert queue.update_result_ttl(id, 1000) == "not_found"
    assert (queue.cancel(id), queue.retry(id)) == ("not_found", "not_found")


# --- A job of the same id -------------------------------------------------------------------------


def test_a_job_that_has_not_begun_is_replaced(queue: Queue) -> None:
    first = queue.enqueue("a", 1)
    second = queue.enqueue("a", 2, on_conflict="replace", max_attempts=7)
    assert (second.status, second.existing_state, second.is_new) == ("replaced", "queued", False)
    assert second.job_id == first.job_id
    row = Job.objects.get()
    assert (row.payload, row.max_attempts) == (b"2", 7)
    # And one of another id is stored
    assert queue.enqueue("b", 1, on_conflict="replace").status == "queued"


def test_a_job_that_has_ended_is_kept(queue: Queue) -> None:
    queue.handler(lambda job: job.payload)
    queue.enqueue("a", 1)
    drain()
    answer = queue.enqueue("a", 2, on_conflict="replace")
    assert (answer.status, answer.result) == ("completed", 1)


def test_a_job_of_the_same_id_may_be_an_error(queue: Queue) -> None:
    first = queue.enqueue("a", 1)
    with pytest.raises(exceptions.JobExistsError) as raised:
        queue.enqueue("a", 2, on_conflict="raise")
    assert (raised.value.job_id, raised.value.existing_state) == (str(first.job_id), "queued")
    with pytest.raises(ValueError, match="on_conflict must be one of"):
        queue.enqueue("a", 2, on_conflict="never")
