"""Waiting for a job's end: heard where possible, read always.

The row decides. It is read right after subscribing, whenever the waiter is called, on a slow poll,
and once more before giving up, so a lost call costs time only (PJQ-F7).
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from asgiref.sync import sync_to_async
from django.db import InterfaceError, OperationalError, connections

from kjo_django.backends import get_coordination
from kjo_django.conf import get_settings
from kjo_django.enqueue.storing import result_of
from kjo_django.exceptions import (
    JobCancelledError,
    JobNotFoundError,
    JobTimeoutError,
    UncommittedJobError,
)
from kjo_django.models import Job
from kjo_django.operations.replies import Reply, listen_for_reply
from kjo_django.operations.results import failure_of
from kjo_django.states import JobState
from kjo_django.store.transactions import jobs_database

FIRST_POLL = 0.02
POLL_GROWTH = 1.5
DEFAULT_TIMEOUT = 30.0
RELEASED_FROM = 0.2
"""Seconds of sleep that are worth a new connection afterwards."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """Which run of a job is waited for."""

    job_id: uuid.UUID
    name: str
    """As people know it, for messages."""
    created_at: datetime | None = None
    """Of the enqueue waited for; None for whichever run the row holds when it is first read."""
    is_called: bool = False
    """Whether the job carries our channel; else its end is found by polling."""
    attempts: int = 0
    """Those with a recorded outcome, when its row was last read."""


def seconds_of(timeout: Any) -> float:
    """Return the timeout, validated before anything is written.

    :raises ValueError: not a positive, finite number of seconds.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be positive and finite, not {timeout!r}")
    return float(timeout)


def refuse_in_transaction(name: str) -> None:
    """Raise if the caller's transaction keeps a job from being seen.

    :raises UncommittedJobError: always, inside ``atomic``.
    """
    if connections[jobs_database()].in_atomic_block:
        raise UncommittedJobError(
            f"Waiting for job {name!r} inside a transaction would never end: workers see the job "
            "when the transaction commits, which waits for them. Enqueue it inside and wait "
            "outside; with ATOMIC_REQUESTS, mark the view @transaction.non_atomic_requests. In a "
            "TestCase run it with kjo_django.testing.drain()."
        )


class Waiter:
    """One who waits: subscribe, enqueue with ``channel``, then ``wait``. A context manager, so the
    subscription ends however the wait ends (PJQ-62).

    :param timeout: seconds.
    :param releases: close this thread's database connections for the longer sleeps: where many
        wait at once, they have threads and no sessions. Those in a transaction stay open.
    """

    def __init__(self, timeout: float, *, releases: bool = False) -> None:
        self._deadline = time.monotonic() + seconds_of(timeout)
        self._timeout = timeout
        self._releases = releases
        self._reply: Reply | None = None
        self._called = threading.Event()
        self._heard: Callable[[], None] = self._called.set

    def __enter__(self) -> Waiter:
        self._reply = listen_for_reply(lambda: self._heard())
        return self

    def __exit__(self, *error: object) -> None:
        if self._reply is not None:
            self._reply.close()

    @property
    def channel(self) -> str | None:
        """What the job is to carry; None when nobody would be heard."""
        return self._reply.channel if self._reply is not None else None

    def wait(self, awaited: Awaited) -> Any:
        """Return the job's result.

        :raises JobFailedError: it failed for good.
        :raises JobCancelledError: it was cancelled, or enqueued anew with another payload.
        :raises JobNotFoundError: its row was deleted.
        :raises JobTimeoutError: the time is over; the job may still complete.
        """
        pauses = _Pauses(self._reply, awaited)
        while True:
            self._called.clear()
            is_ended, value, awaited = self._look(awaited)
            if is_ended:
                return value
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise self._too_late(awaited)
            pause = min(remaining, pauses.next())
            if self._releases and pause >= RELEASED_FROM:
                _release_connections()
            self._called.wait(pause)

    async def await_(self, awaited: Awaited) -> Any:
        """``wait`` without holding a thread."""
        loop, called = asyncio.get_running_loop(), asyncio.Event()

        def heard() -> None:
            with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(called.set)

        self._heard = heard
        pauses = _Pauses(self._reply, awaited)
        while True:
            called.clear()
            is_ended, value, awaited = await sync_to_async(self._look)(awaited)
            if is_ended:
                return value
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise self._too_late(awaited)
            with suppress(TimeoutError):
                await asyncio.wait_for(called.wait(), min(remaining, pauses.next()))

    def _look(self, awaited: Awaited) -> tuple[bool, Any, Awaited]:
        """Read the row. An outage means: not yet known."""
        try:
            return _look(awaited)
        except (OperationalError, InterfaceError):
            connection = connections[jobs_database()]
            if connection.in_atomic_block or time.monotonic() >= self._deadline:
                raise
            connection.close()
            return False, None, awaited

    def _too_late(self, awaited: Awaited) -> JobTimeoutError:
        return JobTimeoutError(
            f"Job {awaited.name!r} did not end within {self._timeout:g} s; it may still complete",
            job_id=awaited.name,
            timeout=self._timeout,
            attempts=awaited.attempts,
        )


def _release_connections() -> None:
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()


class _Pauses:
    """How long to sleep between looks: long where the end is heard, growing where it is not."""

    def __init__(self, reply: Reply | None, awaited: Awaited) -> None:
        self._longest = get_settings().poll_interval.total_seconds()
        is_heard = reply is not None and awaited.is_called and get_coordination().supports_wake_ups
        self._pause = self._longest if is_heard else min(FIRST_POLL, self._longest)

    def next(self) -> float:
        pause, self._pause = self._pause, min(self._pause * POLL_GROWTH, self._longest)
        return pause


_READ = ("state", "created_at", "content_type", "result", "error", "attempts", "generation")


def _look(awaited: Awaited) -> tuple[bool, Any, Awaited]:
    """Return whether the run has ended, its result, and whom to wait for from now on."""
    job = Job.objects.using(jobs_database()).filter(pk=awaited.job_id).only(*_READ).first()
    if job is None:
        raise JobNotFoundError(f"Job {awaited.name!r} was deleted while it was waited for")
    awaited = replace(awaited, attempts=job.attempts)
    if awaited.created_at is None:
        awaited = replace(awaited, created_at=job.created_at)
    elif job.created_at != awaited.created_at:
        raise JobCancelledError(f"Job {awaited.name!r} was ended and enqueued anew meanwhile")
    if job.state == JobState.COMPLETED:
        return True, result_of(job), awaited
    if job.state == JobState.FAILED:
        raise failure_of(awaited.name, job)
    if job.state == JobState.CANCELLED:
        raise JobCancelledError(f"Job {awaited.name!r} was cancelled")
    return False, None, awaited
