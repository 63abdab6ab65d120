"""What the reliable queue promises, one suite on every engine (issue 4, item 1; PJQ-54, 64 … 66).

Each test is a scenario of the seed's storage contract; the ids are those of REQUIREMENTS.md §2.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections
from django.utils import timezone

from kjo_django import PermanentError, Queue
from kjo_django.exceptions import JobCancelledError, JobFailedError, MaxRetriesError
from kjo_django.messages.msgpack import MSGPACK
from kjo_django.messages.serializers import JSON
from kjo_django.models import DeadLetter, Job
from kjo_django.patterns.queue import (
    NO_RESULT,
    CancelResult,
    RequeueResult,
    UpdateTtlResult,
    client,
)
from kjo_django.worker.heartbeat import Heartbeat
from tests.queueing.conftest import Recorder
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.medium  # threads and waits of a worker, in real time

STRANGE_IDS = ["host:8080:7", "../../etc/passwd", "völlig egal ✓", "a" * 255, " a ", "%s{}"]


def state_of(queue: Queue, id: str) -> str | None:
    status = queue.get_status(id)
    return status and status.state


def test_request_and_response(queue: Queue) -> None:
    """PJQ-01, PJQ-02, PJQ-04, PJQ-06, PJQ-07, PJQ-16, PJQ-20, PJQ-22, PJQ-23, PJQ-24, PJQ-61,
    PJQ-64, PJQ-F16, PJQ-F19: any value goes in, any value comes out, None included."""
    # Given a handler that returns what it was given
    seen: list[Any] = []
    queue.execute(lambda job: (seen.append(job), job.payload)[1])
    queue.start()
    before = timezone.now()
    # When values of every kind are enqueued and waited for
    values = [{"a": [1, 2.5, "ü"]}, [1, 2], "text", 7, True, None]
    given = [
        queue.enqueue_and_wait(f"job-{n}", value, correlation_id=f"request-{n}")
        for n, value in enumerate(values)
    ]
    # Then each came back
    assert given == values
    # And the handler knew its job
    first = seen[0]
    assert (first.id, first.attempts, first.max_attempts) == ("job-0", 1, 3)
    assert first.correlation_id == "request-0"
    assert before <= first.created_at <= timezone.now()
    assert not first.signal.is_set()
    # And so does everybody who asks
    status = queue.get_status("job-0")
    assert status is not None
    assert status.to_dict() == {
        "id": "job-0",
        "state": "completed",
        "createdAt": int(first.created_at.timestamp() * 1000),
        "attempts": 1,
        "maxAttempts": 3,
        "resultTTL": 3_600_000,
        "correlationId": "request-0",
        "result": values[0],
    }
    # No result is not the result None
    assert queue.get_result("job-5") is None
    assert queue.get_result("nobody") is NO_RESULT
    assert queue.get_result("nobody", default="?") == "?"
    assert queue.get_status("nobody") is None
    # And a second request is answered from the cache, whatever it carries
    assert queue.enqueue_and_wait("job-3", "ignored") == 7
    assert queue.enqueue("job-5", 1).status == "completed"
    assert queue.enqueue("job-5", 1).result is None
    assert len(seen) == len(values)


def test_first_in_first_out(queue: Queue) -> None:
    """PJQ-32, PJQ-48, PJQ-F21: and a job that fails does not starve those behind it."""

    def handle(job: Any) -> None:
        if job.payload == 3 and job.attempts < 3:
            raise RuntimeError("not yet")

    # Given jobs waiting, one of which fails twice
    recorder = Recorder(handle)
    for number in range(12):
        queue.enqueue(f"job-{number}", number)
    # When they are run
    queue.execute(recorder.__call__)
    queue.start()
    wait_until(lambda: len(recorder.seen) == 14)
    # Then they ran in order, and the retries came after those that were waiting
    assert recorder.payloads[:12] == list(range(12))
    assert recorder.payloads[12:] == [3, 3]


def test_an_id_is_accepted_once(queue: Queue) -> None:
    """PJQ-03, PJQ-14, PJQ-15, PJQ-27, PJQ-42, PJQ-47, PJQ-55: the first accepted enqueue decides,
    duplicates are answers."""
    # When many threads enqueue the same id at once
    start = threading.Barrier(6)

    def enqueue(number: int) -> Any:
        start.wait()
        try:
            return queue.enqueue("same", number, result_ttl=1000 + number, max_attempts=number + 1)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(enqueue, range(6)))
    # Then one of them was accepted
    assert sorted(answer.status for answer in answers) == ["duplicate"] * 5 + ["queued"]
    assert {a.existing_state for a in answers if not a.is_new} == {"queued"}
    winner = next(n for n, answer in enumerate(answers) if answer.is_new)
    # And its payload, lifetime and attempts stand
    recorder = Recorder()
    queue.execute(recorder.__call__)
    queue.start()
    wait_until(lambda: state_of(queue, "same") == "completed")
    assert recorder.payloads == [winner]
    job = Job.objects.get(queue=queue.name)
    assert (job.result_ttl, job.max_attempts) == (1000 + winner, winner + 1)


def test_failing_and_failed(queue: Queue) -> None:
    """PJQ-09, PJQ-18, PJQ-19, PJQ-26, PJQ-28, PJQ-34, PJQ-50, PJQ-58, PJQ-60, PJQ-F1, PJQ-F3: three
    retries are three executions, and the end is an error with everything in it."""

    def handle(job: Any) -> None:
        raise RuntimeError(f"attempt {job.attempts} broke")

    recorder, events = Recorder(handle), []
    for name in ("failing", "failed", "completed"):
        queue.on(name, lambda *arguments, name=name: events.append((name, *arguments)))
    queue.execute(recorder.__call__)
    queue.start()
    # When somebody waits for a job that always fails
    with pytest.raises(JobFailedError) as failure:
        queue.enqueue_and_wait("bad", {"x": 1})
    # Then it was executed three times
    assert [attempt for _, _, attempt in recorder.seen] == [1, 2, 3]
    assert failure.value.original_error == "attempt 3 broke"
    assert failure.value.code == "JOB_FAILED"
    wait_until(lambda: len(events) == 3)
    assert [(e[0], e[1]) for e in events] == [("failing", "bad")] * 2 + [("failed", "bad")]
    assert [str(event[2]) for event in events[:2]] == ["attempt 1 broke", "attempt 2 broke"]
    error = events[2][2]
    assert isinstance(error, MaxRetriesError)
    assert (error.job_id, error.attempts, error.last_error) == ("bad", 3, "attempt 3 broke")
    assert error.payload == {"x": 1}
    assert isinstance(error.__cause__, RuntimeError)
    # And who waits for it now is told, though nothing will happen
    with pytest.raises(JobFailedError, match="attempt 3 broke"):
        queue.enqueue_and_wait("bad", {"x": 1})
    answer = queue.enqueue("bad", {"x": 1})
    assert (answer.status, answer.existing_state) == ("duplicate", "failed")
    assert queue.get_status("bad").error == "attempt 3 broke"
    assert len(recorder.seen) == 3


def test_failed_jobs_run_again_when_somebody_says_so(queue: Queue) -> None:
    """PJQ-F1: ``retry``, ``retry_failed`` and ``enqueue(retry_failed=True)``."""
    is_broken = True

    def handle(job: Any) -> Any:
        if is_broken:
            raise PermanentError("no")
        return job.payload

    queue.execute(handle)
    queue.start()
    for id in ("a", "b", "c"):
        queue.enqueue(id, id)
    wait_until(lambda: DeadLetter.objects.filter(queue=queue.name).count() == 3)
    is_broken = False
    # When each is asked for in its own way
    assert queue.retry("a") is RequeueResult.REQUEUED
    assert queue.enqueue("b", "new", retry_failed=True).is_new
    wait_until(lambda: state_of(queue, "b") == "completed")
    assert queue.retry_failed() == 1
    wait_until(lambda: state_of(queue, "c") == "completed")
    # Then each has run, and no dead letter is open
    wait_until(lambda: queue.get_result("a") == "a")
    assert (queue.get_result("b"), queue.get_result("c")) == ("new", "c")
    assert not DeadLetter.objects.filter(queue=queue.name, state="open").exists()
    assert queue.retry("nobody") is RequeueResult.NOT_FOUND


def test_cancelled_and_enqueued_again(queue: Queue) -> None:
    """PJQ-05, PJQ-17, PJQ-52, PJQ-53, PJQ-F4, PJQ-F6; issue 4, item 3: fifty times over, with no
    worker; then one run, of the last payload."""
    for number in range(50):
        assert queue.enqueue("same", number).status == "queued"
        assert queue.cancel("same") is CancelResult.CANCELLED
        assert state_of(queue, "same") == "cancelled"
    assert queue.enqueue("same", "last").is_new
    assert queue.cancel("nobody") is CancelResult.NOT_FOUND
    # When a worker comes
    recorder = Recorder()
    queue.execute(recorder.__call__)
    queue.start()
    wait_until(lambda: state_of(queue, "same") == "completed")
    queue.enqueue_and_wait("another", None)  # whatever was before it on the way has been seen
    # Then
    assert recorder.payloads == ["last", None]
    # And what has ended is not cancelled any more
    assert queue.cancel("same") is CancelResult.COMPLETED
    assert queue.get_result("same") == "last"


def test_results_and_errors_live_side_by_side(queue: Queue) -> None:
    """PJQ-11, PJQ-12, PJQ-25, PJQ-37, PJQ-40 … 43, PJQ-79, PJQ-F2, PJQ-F20, O-02: each for as long
    as its own enqueue said, results and errors alike; then its id is free again."""
    is_broken = True

    def handle(job: Any) -> Any:
        if job.payload == "bad" and is_broken:
            raise PermanentError("broken")
        return job.payload

    queue.execute(handle)
    queue.start()
    short, long = timedelta(milliseconds=400), timedelta(hours=2)
    for id, payload, ttl in (
        ("short", 1, short),
        ("long", 2, long),
        ("short-bad", "bad", 400),
        ("long-bad", "bad", 7_200_000),
    ):
        queue.enqueue(id, payload, result_ttl=ttl)
    wait_until(lambda: state_of(queue, "long-bad") == "failed")
    assert queue.update_result_ttl("nobody", 1) is UpdateTtlResult.NOT_FOUND
    # When the short ones have expired
    wait_until(lambda: queue.get_result("short") is NO_RESULT)
    wait_until(lambda: queue.get_status("short-bad").error is None)
    # Then the long ones live
    assert queue.get_result("long") == 2
    assert queue.get_status("long-bad").error == "broken"
    assert queue.update_result_ttl("short", 5) is UpdateTtlResult.MISSING_PAYLOAD
    # And the ids of the expired are free: no duplicate that never ends
    is_broken = False
    assert queue.enqueue_and_wait("short", 3) == 3
    assert queue.enqueue_and_wait("short-bad", "bad", result_ttl=300) == "bad"
    assert queue.enqueue("long-bad", "bad").existing_state == "failed"
    # And a lifetime can be changed afterwards
    assert queue.update_result_ttl("long", 1) is UpdateTtlResult.UPDATED
    wait_until(lambda: queue.get_result("long") is NO_RESULT)


def test_bytes_survive_everything(make_queue: Callable[..., Queue]) -> None:
    """PJQ-30, PJQ-44, PJQ-68, PJQ-F17, PJQ-F12, PJQ-F18: enqueue, retry, dead letter, replay and
    result; and ids are never taken apart."""
    queue = make_queue(serializer=MSGPACK, max_attempts=2)
    frames = {"frames": [bytes(range(256)), b"\x00\xff"], "n": 1}
    is_broken = True

    def handle(job: Any) -> Any:
        if is_broken:
            raise RuntimeError("try again")
        return {"thumbnails": job.payload["frames"]}

    recorder = Recorder(handle)
    queue.execute(recorder.__call__)
    queue.start()
    queue.enqueue("video", frames)
    wait_until(lambda: state_of(queue, "video") == "failed")
    is_broken = False
    queue.retry("video")
    assert queue.wait("video") == {"thumbnails": frames["frames"]}
    assert recorder.payloads == [frames] * 3
    # And one job may have a serializer of its own
    own = {"frames": ["text"], "n": 2}
    assert queue.enqueue_and_wait("json", own, serializer=JSON) == {"thumbnails": ["text"]}
    for id in STRANGE_IDS:
        given = {"frames": [id.encode()], "n": 3}
        assert queue.enqueue_and_wait(id, given)["thumbnails"] == [id.encode()]
    assert [id for id, *_ in recorder.seen[4:]] == STRANGE_IDS


def test_later_and_never(queue: Queue) -> None:
    """Delayed jobs and expiry, on every transport (issue 4; PJQ-78 had none)."""
    started: dict[str, Any] = {}

    def handle(job: Any) -> None:
        started[job.id] = timezone.now()

    queue.execute(handle)
    queue.enqueue("late", None, expires_at=timezone.now() - timedelta(seconds=1))
    queue.enqueue("now", None, expires_at=timezone.now() + timedelta(hours=1))
    due = timezone.now() + timedelta(seconds=1.5)
    queue.enqueue("at", None, run_at=due)
    queue.enqueue("after", None, delay=timedelta(seconds=1.5))
    queue.enqueue("cancelled", None, delay=timedelta(seconds=1))
    assert state_of(queue, "at") == "queued"
    assert queue.cancel("cancelled") is CancelResult.CANCELLED
    # When
    queue.start()
    wait_until(lambda: len(started) == 3)
    # Then
    assert due <= min(started["at"], started["after"])
    wait_until(lambda: state_of(queue, "late") == "failed")
    assert DeadLetter.objects.get(queue=queue.name).reason == "expired"
    assert "late" not in started
    assert "cancelled" not in started


def test_handlers_of_every_kind_before_and_after_the_start(
    make_queue: Callable[..., Queue],
) -> None:
    """PJQ-02, PJQ-08: start and stop twice, execute late, async, callbacks; PJQ-31 the worker's
    name."""
    one, two, three = (make_queue() for _ in range(3))
    events: list[str] = []
    one.on("started", lambda: events.append("started"))
    one.on("stopped", lambda: events.append("stopped"))
    one.start()
    one.start()
    one.enqueue("a", 1)  # a producer only: nothing runs
    assert state_of(one, "a") == "queued"

    @one.handler
    async def double(job: Any) -> int:
        return int(job.payload) * 2

    @two.handler(atomic=False)
    def later(job: Any, callback: Callable[..., None]) -> None:
        threading.Timer(0.05, callback, [None, job.payload * 3]).start()

    @three.handler
    def broken(job: Any, callback: Callable[..., None]) -> None:
        callback(PermanentError("by callback"))

    two.start()
    three.start()
    assert one.wait("a") == 2
    assert two.enqueue_and_wait("b", 2) == 6
    with pytest.raises(JobFailedError, match="by callback"):
        three.enqueue_and_wait("c", 3)
    one.stop()
    one.stop()
    assert events == ["started", "stopped"]
    # And it may start again
    one.start()
    assert one.enqueue_and_wait("d", 5, timeout=90) == 10


@pytest.mark.promise("stop-spends-nothing")
@pytest.mark.large("kafka", "memory", "sqlite")
def test_stop_waits_and_hands_back(queue: Queue) -> None:
    """PJQ-49, PJQ-72, PJQ-76, PJQ-F13, PJQ-F14: what runs may end; what will not is aborted and
    runs elsewhere, with no attempt spent."""
    runs: list[tuple[str, int]] = []
    may_end = threading.Event()

    def handle(job: Any) -> str:
        runs.append((job.id, job.attempts))
        if job.id == "stubborn" and not may_end.is_set():
            assert job.signal.wait(PATIENCE)
            job.raise_if_aborted()
        if job.id == "slow":
            time.sleep(0.5)  # sleep: so that it runs while the queue stops
        return "done"

    queue.execute(handle, atomic=False)
    queue.start()
    queue.enqueue("slow", None)
    wait_until(lambda: runs == [("slow", 1)])
    # When it is stopped while a job runs
    queue.stop()
    # Then the job has ended
    assert queue.get_result("slow") == "done"
    # And one that waits for the abort goes back
    queue.enqueue("stubborn", None)
    queue.start()
    wait_until(lambda: ("stubborn", 1) in runs)
    queue.stop()
    assert state_of(queue, "stubborn") in ("queued", "processing")
    may_end.set()
    queue.start()
    assert queue.wait("stubborn", timeout=90) == "done"
    assert runs[1:] == [("stubborn", 1), ("stubborn", 1)]


def test_a_running_job_is_cancelled_if_it_agrees(queue: Queue) -> None:
    """PJQ-20, PJQ-21: the abort flag; the answer is ``processing`` and the handler decides."""
    runs: list[str] = []

    def handle(job: Any) -> None:
        runs.append(job.id)
        job.progress(40, "half of it")
        if job.signal.wait(3600):
            job.raise_if_aborted()

    queue.execute(handle, atomic=False)
    queue.start()
    queue.enqueue("long", None)
    wait_until(lambda: runs == ["long"])
    wait_until(lambda: state_of(queue, "long") == "processing")
    assert queue.enqueue("long", None).existing_state == "processing"
    # Its progress shows while it runs
    wait_until(lambda: queue.get_status("long").progress is not None)
    assert queue.get_status("long").progress == (40, "half of it")
    # Asked politely, nothing happens
    assert queue.cancel("long") is CancelResult.PROCESSING
    # When it is asked to end
    assert queue.cancel("long", abort=True) is CancelResult.PROCESSING
    # Then it ends before it would by itself, and is not retried
    with pytest.raises(JobCancelledError):
        queue.wait("long")
    assert state_of(queue, "long") == "cancelled"
    assert runs == ["long"]
    assert not DeadLetter.objects.filter(queue=queue.name).exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_queue_goes_on_though_a_thread_of_its_worker_has_died(
    file_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is the project's own: nobody would start it again."""
    # Given
    monkeypatch.setattr(client, "RESTART_DELAY", 0.0)
    step, has_died, told = Heartbeat.step, threading.Event(), list[str]()

    def die(heartbeat: Heartbeat) -> float:
        if threading.current_thread().name == "kjo-heartbeat" and not has_died.is_set():
            has_died.set()
            raise SystemExit("a bug")
        return step(heartbeat)

    monkeypatch.setattr(Heartbeat, "step", die)
    file_queue.on("error", lambda error: told.append(str(error)))
    file_queue.execute(lambda job: job.payload)
    # When
    file_queue.start()
    assert has_died.wait(PATIENCE)
    # Then
    assert file_queue.enqueue_and_wait("a", {"x": 1}) == {"x": 1}
    wait_until(lambda: any("Threads have died" in text for text in told))
