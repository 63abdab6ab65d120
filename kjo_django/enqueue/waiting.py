"""Waiting for the end of a job or of a workflow.

Each waiter has a channel, which its job's header ``kjo-reply-to`` names. The worker that commits
the job's end notifies the channel. So a job nobody waits for costs nothing, and an awaited one
costs one notification. The end of a workflow is notified on one of a few channels that all
processes know. Notifications may be lost: the row decides. It is read after subscribing, unless it
was stored since, at each notification, on a slow poll, and once more at the end of the time.
"""

from __future__ import annotations

import asyncio
import enum
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, ClassVar, Final

from asgiref.sync import sync_to_async
from django.db import InterfaceError, OperationalError, connections

from kjo_django.clock import CLOCK
from kjo_django.conf import get_settings
from kjo_django.coordination.base import Coordination, Listener
from kjo_django.enqueue.coroutines import from_coroutine
from kjo_django.exceptions import (
    CoordinationError,
    JobCancelledError,
    JobFailedError,
    JobNotFoundError,
    JobTimeoutError,
    UncommittedJobError,
)
from kjo_django.ids import uuid7
from kjo_django.logs import get_logger
from kjo_django.messages.serializers import load_result, serializer_for
from kjo_django.models import Job, JobFailure
from kjo_django.runtime import get_coordination, jobs_database
from kjo_django.states import JobState

logger = get_logger("kjo_django")

REPLY_CHANNELS = "kjo:reply:"
"""Begins the names of the channels on which waiters are told that their job has ended."""


class NoResult(enum.Enum):
    """The type of ``NO_RESULT``; falsy."""

    NO_RESULT = "no result"

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "NO_RESULT"


NO_RESULT: Final = NoResult.NO_RESULT
"""There is no result: the job is unknown, has not completed, or its result has expired. The result
of a job that returned None is None."""


# --- The end of a job -----------------------------------------------------------------------------


def result_of(job: Job) -> Any:
    """Return a completed job's result; a handler that returned None stored nothing."""
    if job.result is None:
        return None
    return load_result(bytes(job.result), serializer_for(job.content_type))


def is_expired(job: Job) -> bool:
    """Whether the job has completed or failed and its result or error is no longer kept.

    Another job may take its id then.
    """
    has_ended = job.state in (JobState.COMPLETED, JobState.FAILED)
    return has_ended and job.result_expires_at is not None and not is_kept(job)


def is_kept(job: Job) -> bool:
    """Whether the result or error of an ended job is still kept."""
    return job.result_expires_at is not None and job.result_expires_at > CLOCK.now()


def failure_of(id: str, job: Job) -> JobFailedError:
    """Return the exception for a failed job.

    :param id: the job's id in the message.
    """
    return JobFailedError(
        f"Job {id!r} failed: {job.error}",
        original_error=job.error,
        job_id=id,
        attempts=job.attempts,
        **facts_of_failure(job),
    )


def facts_of_failure(job: Job) -> dict[str, Any]:
    """Return the facts of the latest failed attempt of the job's present generation."""
    rows = JobFailure.objects.using(jobs_database()).defer("traceback", "log")
    found = rows.filter(job=job.pk, generation=job.generation).order_by("-attempt", "-pk").first()
    if found is None:
        return {}
    return {
        "error_type": found.error_type or None,
        "error_code": found.code or None,
        "error_details": found.details,
    }


# --- Notifications --------------------------------------------------------------------------------

CHANNELS = 64
"""With more waiters than this, some share a channel and are also woken for other jobs."""
WORKFLOW_CHANNELS = [f"kjo:workflows:{number}" for number in range(64)]
"""On which the ends of workflows are notified; waiters are also woken for other workflows."""
IDLE = 10.0
"""Seconds without a waiter after which the listener and its thread end."""
_WAIT = 1.0


def workflow_channel(id: uuid.UUID) -> str:
    """Return the channel on which the end of a workflow is notified."""
    return WORKFLOW_CHANNELS[id.int % len(WORKFLOW_CHANNELS)]


class ReplyListener:
    """The listener of this process for all its waiters. Its thread runs while somebody waits.

    A waiter is a function. It is called in the listener's thread and must return at once.
    """

    def __init__(self, coordination: Coordination) -> None:
        self.coordination = coordination
        self.pid = os.getpid()
        name = uuid7().hex
        self.channels = [f"{REPLY_CHANNELS}{name}:{number}" for number in range(CHANNELS)]
        heard = (*self.channels, *WORKFLOW_CHANNELS)
        self._waiting: dict[str, set[Callable[[], None]]] = {name: set() for name in heard}
        self._lock = threading.Lock()
        self._listener: Listener | None = None
        self._idle_since = time.monotonic()

    @property
    def waiting_count(self) -> int:
        """The number of waiters."""
        return sum(map(len, self._waiting.values()))

    def add(self, waiter: Callable[[], None], channel: str = "") -> str:
        """Return a channel whose notifications reach the waiter from now on.

        :param channel: one of ``WORKFLOW_CHANNELS``; empty: one of this listener's own.
        :raises CoordinationError: coordination cannot be reached.
        """
        with self._lock:
            if self._listener is None:
                self._listener = self.coordination.listen(list(self._waiting))
                thread = threading.Thread(
                    target=self._run, args=(self._listener,), name="kjo-replies", daemon=True
                )
                thread.start()
            channel = channel or min(self.channels, key=lambda name: len(self._waiting[name]))
            self._waiting[channel].add(waiter)
            return channel

    def remove(self, channel: str, waiter: Callable[[], None]) -> None:
        """Stop calling this waiter."""
        with self._lock:
            self._waiting[channel].discard(waiter)
            self._idle_since = time.monotonic()

    def _run(self, listener: Listener) -> None:
        try:
            while not self._may_end(listener):
                for channel in listener.wait(_WAIT):
                    with self._lock:
                        waiters = list(self._waiting[channel])
                    for waiter in waiters:
                        waiter()
        except Exception:
            # Waiters poll; the next one opens a new listener.
            logger.exception("The listener for awaited jobs failed")
        finally:
            with self._lock:
                if self._listener is listener:
                    self._listener = None
            listener.close()
            connections.close_all()

    def _may_end(self, listener: Listener) -> bool:
        with self._lock:
            if self._listener is not listener:
                return True
            if self.waiting_count or time.monotonic() - self._idle_since < IDLE:
                return False
            self._listener = None
            return True

    def close(self) -> None:
        """End the listener and its thread."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.wake()


_reply_listeners: dict[str, ReplyListener] = {}
"""By the alias of the database whose jobs are waited for."""
_lock = threading.Lock()


def _current_listener() -> ReplyListener:
    coordination, database = get_coordination(), jobs_database()
    with _lock:
        found = _reply_listeners.get(database)
        if found is None or found.coordination is not coordination or found.pid != os.getpid():
            # The settings changed, or this is a forked child, which must not close the parent's.
            if found is not None and found.pid == os.getpid():
                found.close()
            found = _reply_listeners[database] = ReplyListener(coordination)
        return found


# --- Waiting --------------------------------------------------------------------------------------

FIRST_POLL = 0.02
POLL_GROWTH = 1.5
DEFAULT_TIMEOUT = 30.0
RELEASED_FROM = 0.2
"""Connections are closed for a sleep of at least so many seconds."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """Which run of a job is waited for."""

    job_id: uuid.UUID
    name: str
    """The job's id in messages."""
    created_at: datetime | None = None
    """When the awaited run was enqueued; None: the run that the row holds when it is first read."""
    is_called: bool = False
    """Whether its end notifies the waiter's channel; else its end is found by polling."""
    is_new: bool = False
    """Whether it was stored after its waiter had begun to listen: nothing is read of it before the
    first notification or pause."""
    attempts: int = 0
    """Attempts with a recorded outcome, when the row was last read."""

    what: ClassVar = "Job"

    def look(self) -> tuple[bool, Any, Awaited]:
        """Read the row; return whether the run has ended, its result, and the run to wait for from
        now on.

        :raises JobError: the run has ended without a result.
        """
        job = Job.objects.using(jobs_database()).filter(pk=self.job_id).only(*_READ).first()
        if job is None:
            raise JobNotFoundError(f"Job {self.name!r} was deleted while it was waited for")
        if self.created_at is not None and job.created_at != self.created_at:
            raise JobCancelledError(f"Job {self.name!r} was ended and enqueued anew meanwhile")
        if job.state == JobState.COMPLETED:
            return True, result_of(job), self
        if job.state == JobState.FAILED:
            raise failure_of(self.name, job)
        if job.state == JobState.CANCELLED:
            raise JobCancelledError(f"Job {self.name!r} was cancelled")
        return False, None, replace(self, attempts=job.attempts, created_at=job.created_at)


_READ = ("state", "created_at", "content_type", "result", "error", "attempts", "generation")


def seconds_of(timeout: Any) -> float:
    """Return the timeout as a number.

    :raises ValueError: it is not a positive, finite number of seconds.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be positive and finite, not {timeout!r}")
    return float(timeout)


def refuse_in_transaction(name: str) -> None:
    """Raise an error inside a transaction, where workers cannot see the job yet.

    :raises UncommittedJobError: always, inside ``atomic``.
    """
    if connections[jobs_database()].in_atomic_block:
        raise UncommittedJobError(
            f"Waiting for job {name!r} inside a transaction would never end: workers see the job "
            "when the transaction commits, which waits for them. Enqueue it inside and wait "
            "outside; with ATOMIC_REQUESTS, mark the view @transaction.non_atomic_requests. In a "
            "TestCase run it with kjo_django.testing.drain()."
        )


def close_connections() -> None:
    """Close this thread's database connections that are in no transaction."""
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()


class Waiter:
    """Waits for one job or workflow: enter it as a context manager, enqueue a job with ``channel``,
    call ``wait``.

    :param timeout: seconds.
    :param shared: one of ``WORKFLOW_CHANNELS``, to be notified there.
    :param releases: close this thread's database connections for longer sleeps, so that many
        waiters need few sessions. Connections in a transaction stay open.
    """

    channel: str | None = None
    """The channel for the job's header; None if coordination cannot be reached."""

    def __init__(self, timeout: float, *, shared: str = "", releases: bool = False) -> None:
        self._deadline = time.monotonic() + seconds_of(timeout)
        self._timeout = timeout
        self._shared = shared
        self._releases = releases
        self._listener: ReplyListener | None = None
        self._called = threading.Event()
        self._on_call: Callable[[], None] = self._called.set

    def _call(self) -> None:
        self._on_call()

    def __enter__(self) -> Waiter:
        try:
            self._listener = _current_listener()
            self.channel = self._listener.add(self._call, self._shared)
        except CoordinationError as error:
            logger.warning("Waiting by polling only: %s", error)
        return self

    def __exit__(self, *error: object) -> None:
        if self._listener is not None and self.channel is not None:
            self._listener.remove(self.channel, self._call)

    def wait(self, awaited: Awaited) -> Any:
        """Return the result of a job or workflow.

        :raises JobFailedError: it failed for good.
        :raises JobCancelledError: it was cancelled, or enqueued anew with another payload.
        :raises JobNotFoundError: its row was deleted.
        :raises JobTimeoutError: the time is over; the job may still complete.
        """
        pauses = self._pauses(awaited)
        while True:
            is_ended, value, awaited = self._read(awaited)
            if is_ended:
                return value
            pause = min(self._remaining(awaited), next(pauses))
            if self._releases and pause >= RELEASED_FROM:
                close_connections()
            self._called.wait(pause)
            self._called.clear()

    async def await_(self, awaited: Awaited) -> Any:
        """Return the result without blocking a thread; see ``wait``."""
        loop, called = asyncio.get_running_loop(), asyncio.Event()

        def on_call() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(called.set)

        self._on_call = on_call
        if self._called.is_set():  # notified before
            called.set()
        pauses = self._pauses(awaited)
        while True:
            is_ended, value, awaited = await from_coroutine(self._read)(awaited)
            if is_ended:
                return value
            pause = min(self._remaining(awaited), next(pauses))
            if self._releases and pause >= RELEASED_FROM:
                await sync_to_async(close_connections)()
            with suppress(TimeoutError):
                await asyncio.wait_for(called.wait(), pause)
            called.clear()

    def _read(self, awaited: Awaited) -> tuple[bool, Any, Awaited]:
        """Read the row, unless the job is new. While the database is away, the job or workflow has
        not ended."""
        if awaited.is_new:
            return False, None, replace(awaited, is_new=False)
        try:
            return awaited.look()
        except (OperationalError, InterfaceError):
            connection = connections[jobs_database()]
            if connection.in_atomic_block or time.monotonic() >= self._deadline:
                raise
            connection.close()
            return False, None, awaited

    def _remaining(self, awaited: Awaited) -> float:
        remaining = self._deadline - time.monotonic()
        if remaining > 0:
            return remaining
        raise JobTimeoutError(
            f"{awaited.what} {awaited.name!r} did not end within {self._timeout:g} s; "
            "it may still complete",
            job_id=awaited.name,
            timeout=self._timeout,
            attempts=awaited.attempts,
        )

    def _pauses(self, awaited: Awaited) -> Iterator[float]:
        """Yield the seconds between two reads of the row: many if a notification is expected, else
        few at first."""
        longest = get_settings().poll_interval.total_seconds()
        is_called = self.channel is not None and awaited.is_called
        is_called = is_called and get_coordination().supports_wake_ups
        pause = longest if is_called else min(FIRST_POLL, longest)
        while True:
            yield pause
            pause = min(pause * POLL_GROWTH, longest)
