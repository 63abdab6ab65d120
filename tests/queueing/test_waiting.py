"""Waiting for results: heard, read, given up, and nothing left behind (issue 4, item 4)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from kjo_django import Queue
from kjo_django.enqueue import waiting
from kjo_django.enqueue.storing import REPLY_CHANNELS
from kjo_django.exceptions import (
    JobCancelledError,
    JobFailedError,
    JobNotFoundError,
    JobTimeoutError,
    UncommittedJobError,
)
from kjo_django.models import Job
from kjo_django.operations import jobs as operations
from kjo_django.patterns.queue import NO_RESULT, CancelResult
from kjo_django.runtime import get_coordination
from tests.queueing.conftest import ENGINES, Recorder
from tests.waiting import PATIENCE, wait_until

ONE_HOUR = timedelta(hours=1)
# Where calls cross processes; that the embedded default polls, the contract shows.
pytestmark = pytest.mark.parametrize("engine", ENGINES[2:4], indirect=True)


@pytest.fixture
def running(queue: Queue) -> Iterator[Queue]:
    """A queue whose jobs give back what they were given."""
    queue.execute(lambda job: job.payload)
    queue.start()
    yield queue


def descriptor_count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def waiting_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "kjo-replies"]


def test_a_lost_notification_costs_time_only(
    running: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PJQ-46, PJQ-F7, PJQ-60: the row is read on a slow poll."""
    running.enqueue_and_wait("first", 1)
    # Given: nobody is ever told that a job has ended
    lost: list[str] = []
    notify = get_coordination().notify

    def lose_replies(*channels: str) -> None:
        replies = [name for name in channels if name.startswith(REPLY_CHANNELS)]
        lost.extend(replies)
        if not replies:
            notify(*channels)

    monkeypatch.setattr(get_coordination(), "notify", lose_replies)
    # When, then
    assert running.enqueue_and_wait("second", 2, timeout=20) == 2
    assert lost


def test_a_call_ends_the_wait_long_before_the_poll(
    running: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PJQ-61: subscribed before it is enqueued, so the call cannot be missed."""
    running.enqueue_and_wait("first", 1)
    pauses: list[float] = []

    def long_pauses(waiter: Any, awaited: Any) -> Iterator[float]:
        while True:
            pauses.append(3600.0)
            yield 3600.0

    monkeypatch.setattr(waiting.Waiter, "_pauses", long_pauses)
    for number in range(5):
        assert running.enqueue_and_wait(f"job-{number}", number, timeout=PATIENCE) == number
    assert pauses


def test_a_new_job_is_read_once_when_it_has_ended(engine: str, running: Queue) -> None:
    """Nothing is read of a job that was stored after its waiter listened; its INSERT needs no
    transaction where the relay publishes it."""
    # Given: a worker, and a process that listens already
    running.enqueue_and_wait("first", 1)
    # When
    with CaptureQueriesContext(connection) as queries:
        assert running.enqueue_and_wait("second", 2, timeout=20) == 2
        # Then a call that came before the wait began is heard too
        assert async_to_sync(running.aenqueue_and_wait)("third", 3, timeout=20) == 3
    texts = [query["sql"] for query in queries]
    assert sum(text.startswith('SELECT "kjo_job"') for text in texts) == 2
    if engine == "kafka":
        assert [text.split()[0] for text in texts] == ["INSERT", "SELECT"] * 2


def test_who_comes_later_waits_too(queue: Queue) -> None:
    """PJQ-15, PJQ-61, PJQ-74: a duplicate waits for the job that is under way, in whichever
    process it was enqueued."""
    go = threading.Event()
    recorder = Recorder(lambda job: go.wait(PATIENCE) and job.payload)
    queue.execute(recorder.__call__, atomic=False)
    queue.enqueue("same", "of the first")

    def wait(number: int) -> Any:
        try:
            if number % 2:
                return queue.wait("same")
            return queue.enqueue_and_wait("same", number)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(wait, number) for number in range(6)]
        queue.start()
        wait_until(lambda: recorder.seen)
        go.set()
        assert [answer.result(PATIENCE) for answer in answers] == ["of the first"] * 6
    assert len(recorder.seen) == 1


def test_a_timeout_leaves_the_job_alone(queue: Queue) -> None:
    """PJQ-13, PJQ-63: it may still complete."""
    begun = time.monotonic()
    with pytest.raises(JobTimeoutError, match="may still complete") as error:
        queue.enqueue_and_wait("late", "done", timeout=0.3)
    assert time.monotonic() - begun >= 0.3
    assert isinstance(error.value, TimeoutError)
    assert queue.get_status("late").state == "queued"
    queue.execute(lambda job: job.payload)
    queue.start()
    assert queue.wait("late") == "done"


def test_a_hundred_timeouts_leave_nothing_behind(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PJQ-62: no listener, no thread, no connection."""

    def give_up(number: int) -> bool:
        try:
            queue.enqueue_and_wait(f"job-{number}", None, timeout=0.05)
        except JobTimeoutError:
            return True
        finally:
            connections.close_all()
        return False

    monkeypatch.setattr(waiting, "IDLE", 0.2)
    assert give_up(-1)
    wait_until(lambda: not waiting_threads())
    descriptors = descriptor_count()
    # When a hundred wait in vain, several at once
    with ThreadPoolExecutor(10) as pool:
        assert all(pool.map(give_up, range(100)))
    board = waiting._reply_listeners.get("default")
    assert board is not None
    assert board.waiting_count == 0
    # Then one listener served them all, and ends when nobody has waited for a while
    assert len(waiting_threads()) <= 1
    wait_until(lambda: not waiting_threads())
    # Pools of clients may have grown by a few; nothing grows with the number of waits.
    wait_until(lambda: descriptor_count() <= descriptors + 15)
    assert Job.objects.filter(queue=queue.name).count() == 101


def test_inside_a_transaction_it_is_refused(running: Queue) -> None:
    """Workers would see the job at the commit that waits for them."""
    with pytest.raises(UncommittedJobError, match="would never end"), transaction.atomic():
        running.enqueue_and_wait("never", 1)
    assert running.get_status("never") is None
    # But what is known already is answered
    running.enqueue_and_wait("known", 1)
    with transaction.atomic():
        assert running.enqueue_and_wait("known", 2) == 1
    # And what was enqueued inside is waited for outside
    with transaction.atomic():
        running.enqueue("inside", 3)
    assert running.wait("inside") == 3


def test_what_ends_otherwise_is_said(queue: Queue) -> None:
    """PJQ-26: cancelled, enqueued anew, deleted, unknown."""

    def meanwhile(act: Callable[[], Any]) -> threading.Timer:
        def run() -> None:
            try:
                act()
            finally:
                connections.close_all()

        timer = threading.Timer(0.2, run)
        timer.start()
        return timer

    timer = meanwhile(lambda: queue.cancel("a"))
    with pytest.raises(JobCancelledError, match="was cancelled") as cancelled:
        queue.enqueue_and_wait("a", 1)
    assert cancelled.value.to_dict()["code"] == "JOB_CANCELLED"
    timer.join()

    def cancel_and_enqueue() -> None:
        with transaction.atomic():
            Job.objects.filter(unique_id="b", queue=queue.name).update(state="cancelled")
            queue.enqueue("b", 2)

    timer = meanwhile(cancel_and_enqueue)
    with pytest.raises(JobCancelledError, match="enqueued anew"):
        queue.enqueue_and_wait("b", 1)
    timer.join()
    timer = meanwhile(lambda: Job.objects.filter(unique_id="c", queue=queue.name).delete())
    with pytest.raises(JobNotFoundError, match="deleted"):
        queue.enqueue_and_wait("c", 1)
    timer.join()
    with pytest.raises(JobNotFoundError, match="knows no job"):
        queue.wait("nobody")


def test_an_operators_requeue_goes_on_waiting(queue: Queue) -> None:
    answer = queue.enqueue("a", 1)
    operations.requeue([answer.job_id])
    queue.execute(lambda job: job.payload)
    queue.start()
    assert queue.wait("a") == 1
    assert queue.enqueue_and_wait("a", 2) == 1


def test_asynchronous_twins(running: Queue) -> None:
    """PJQ-04 and its companions, from coroutines: many wait at once and hold no thread each."""

    async def go() -> list[Any]:
        assert (await running.aenqueue("one", 1)).is_new
        results = await asyncio.gather(
            *(running.aenqueue_and_wait(f"job-{n}", n, timeout=30) for n in range(10))
        )
        status = await running.aget_status("job-3")
        assert status is not None
        assert status.state == "completed"
        assert await running.aget_result("job-3") == 3
        assert await running.aget_result("nobody") is NO_RESULT
        assert await running.acancel("job-3") is CancelResult.COMPLETED
        with pytest.raises(JobTimeoutError):
            await running.aenqueue_and_wait("delayed", 1, timeout=0.2, delay=ONE_HOUR)
        # Given up by its caller, a wait leaves nothing behind either
        waiter = asyncio.create_task(
            running.aenqueue_and_wait("abandoned", 1, timeout=30, delay=ONE_HOUR)
        )
        await asyncio.sleep(0.3)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        return list(results)

    assert async_to_sync(go)() == list(range(10))
    board = waiting._reply_listeners.get("default")
    assert board is None or board.waiting_count == 0


def test_more_waiters_than_channels(running: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who share a channel are woken for one another and go on waiting."""
    monkeypatch.setattr(waiting, "CHANNELS", 2)
    monkeypatch.setattr(waiting, "_reply_listeners", {})

    def wait(number: int) -> Any:
        try:
            return running.enqueue_and_wait(f"job-{number}", number)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(wait, range(16))) == list(range(16))


def test_the_failure_of_a_job_enqueued_elsewhere_is_raised(queue: Queue) -> None:
    """PJQ-F3: and its text is the last attempt's."""

    def handle(job: Any) -> None:
        raise ValueError("broken")

    queue.execute(handle)
    queue.start()
    queue.enqueue("a", 1, max_attempts=1)
    with pytest.raises(JobFailedError, match="broken"):
        queue.wait("a")
