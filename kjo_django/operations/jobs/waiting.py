"""Waiting for a job's end: heard where possible, read always.

The row decides. It is read right after subscribing, whenever the waiter is called, on a slow poll,
and once more before giving up, so a lost call costs time only (PJQ-F7).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.db import InterfaceError, OperationalError, connections
from django.utils import timezone

from kjo_django import states
from kjo_django.backends import get_coordination
from kjo_django.conf import get_settings
from kjo_django.coordination.base import Coordination, Listener
from kjo_django.engine.leases import lease_name
from kjo_django.enqueue.storing import milliseconds, result_of
from kjo_django.enqueue.wakeups import REPLY_CHANNELS
from kjo_django.exceptions import (
    CoordinationError,
    JobCancelledError,
    JobFailedError,
    JobNotFoundError,
    JobTimeoutError,
    UncommittedJobError,
)
from kjo_django.ids import uuid7
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import storable_text
from kjo_django.models import Job, JobFailure, JobQuerySet
from kjo_django.operations.jobs.changes import live_leases
from kjo_django.operations.progress import Progress, progress_of
from kjo_django.states import JobState, JobStatus
from kjo_django.store.transactions import jobs_database


class NoResult(enum.Enum):
    """The type of ``NO_RESULT``; falsy."""

    NO_RESULT = "no result"

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "NO_RESULT"


NO_RESULT: Final = NoResult.NO_RESULT
"""There is no result: the job is unknown, has not completed, or its result has expired. A job that
returned None has a result, which is None (PJQ-06, PJQ-F16)."""


EXPIRED = "expired"
"""The state of a job whose result or error is no longer kept."""


class UpdateTtlResult(enum.StrEnum):
    """What changing a result's lifetime ended with (O-02)."""

    UPDATED = "updated"
    NOT_FOUND = "not_found"
    NOT_TERMINAL = "not_terminal"
    MISSING_PAYLOAD = "missing_payload"
    """It has ended, but no result or error is kept: expired, or cancelled."""


@dataclass(frozen=True, slots=True)
class MessageStatus:
    """What is known of a job (PJQ-07)."""

    id: str
    state: str
    """queued, processing, failing, completed, failed, cancelled, or expired: it had completed or
    failed, and its result or error is no longer kept."""
    created_at: datetime
    attempts: int
    """Attempts whose outcome is recorded."""
    max_attempts: int
    result_ttl: int
    """Milliseconds."""
    correlation_id: str | None = None
    result: Any = NO_RESULT
    """Of a completed one, while it lives."""
    error: str | None = None
    """Text of the latest error, of a failing or failed one; of the latter while it lives."""
    error_type: str | None = None
    """Import path of that error's class."""
    error_code: str | None = None
    """That error's ``code``, if it has one."""
    error_details: Any = None
    """What that error's ``to_dict()`` returned, or its ``details``; None where JSON cannot hold
    them in 10,000 bytes."""
    progress: Progress | None = None
    job_id: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it with the names it has on the wire (PJQ-23); times in milliseconds."""
        known: dict[str, Any] = {
            "id": self.id,
            "state": self.state,
            "createdAt": int(self.created_at.timestamp() * 1000),
            "attempts": self.attempts,
            "maxAttempts": self.max_attempts,
            "resultTTL": self.result_ttl,
        }
        if self.correlation_id is not None:
            known["correlationId"] = self.correlation_id
        if self.result is not NO_RESULT:
            known["result"] = self.result
        if self.error is not None:
            known["error"] = self.error
        if self.error_type is not None:
            known["errorType"] = self.error_type
        if self.error_code is not None:
            known["errorCode"] = self.error_code
        if self.error_details is not None:
            known["errorDetails"] = self.error_details
        if self.progress is not None:
            known["progress"] = {"percent": self.progress.percent, "text": self.progress.text}
        return known


def named(queue: str, *unique_ids: str) -> JobQuerySet:
    """Return the jobs of this queue and these unique ids. An id may come from anywhere: one that no
    database keeps is nobody's, and PostgreSQL cannot even be asked for it.

    :raises TypeError: an id is no text.
    """
    for id in unique_ids:
        if not isinstance(id, str):
            raise TypeError(f"id must be text, not {id!r}")
    jobs: JobQuerySet = Job.objects.using(jobs_database())
    known = [id for id in unique_ids if storable_text(id) == id]
    return jobs.filter(queue=queue, unique_id__in=known) if known else jobs.none()


def find(queue: str, unique_id: str) -> Job | None:
    """Return the job of this queue and unique id."""
    return named(queue, unique_id).defer("payload").first()


def status_of(queue: str, unique_id: str) -> MessageStatus | None:
    """Return what is known of a job, None for one that is not."""
    job = find(queue, unique_id)
    if job is None:
        return None
    is_open = job.state in states.OPEN
    is_kept = _is_kept(job)
    error = (job.error or None) if is_open or is_kept else None
    failure = last_failure(job) if error is not None else None
    return MessageStatus(
        id=unique_id,
        state=EXPIRED if is_expired(job) else states.to_queue(_status(job)),
        created_at=job.created_at,
        attempts=job.attempts,
        max_attempts=job.max_attempts,
        result_ttl=job.result_ttl,
        correlation_id=(job.headers or {}).get(names.CORRELATION_ID),
        result=result_of(job) if job.state == JobState.COMPLETED and is_kept else NO_RESULT,
        error=error,
        error_type=(failure and failure.error_type) or None,
        error_code=(failure and failure.code) or None,
        error_details=failure and failure.details,
        progress=progress_of([job.pk]).get(str(job.pk)) if is_open else None,
        job_id=str(job.pk),
    )


def states_of(queue: str, unique_ids: Collection[str]) -> dict[str, str | None]:
    """Return the state of each job, None for an unknown id, in two round trips (PJQ-57)."""
    rows = list(named(queue, *unique_ids).defer("payload", "result"))
    conf = get_settings().queue(queue)
    names = {row.pk: lease_name(conf, row.message_id) for row in rows if row.state in states.OPEN}
    leased = live_leases(list(names.values()))
    found = {
        row.unique_id: EXPIRED
        if is_expired(row)
        else states.to_queue(row.status_with(leased=names.get(row.pk) in leased))
        for row in rows
    }
    return {id: found.get(id) for id in unique_ids}


def _status(job: Job) -> JobStatus:
    """A running atomic handler shows by the lease its worker holds in coordination."""
    if job.state not in states.OPEN:
        return JobStatus(job.state)
    name = lease_name(get_settings().queue(job.queue), job.message_id)
    return job.status_with(leased=name in live_leases([name]))


def is_expired(job: Job) -> bool:
    """Whether the job has completed or failed and its result or error is no longer kept: its id is
    free, and its row is history."""
    has_ended = job.state in (JobState.COMPLETED, JobState.FAILED)
    return has_ended and job.result_expires_at is not None and not _is_kept(job)


def last_failure(job: Job) -> JobFailure | None:
    """Return the latest failed attempt of the job's present generation."""
    rows = JobFailure.objects.using(jobs_database()).defer("traceback")
    return rows.filter(job=job.pk, generation=job.generation).order_by("-attempt", "-pk").first()


def failure_of(id: str, job: Job) -> JobFailedError:
    """Return what is raised to those who wait for a failed job.

    :param id: as they know it.
    """
    failure = last_failure(job)
    return JobFailedError(
        f"Job {id!r} failed: {job.error}",
        original_error=job.error,
        job_id=id,
        attempts=job.attempts,
        error_type=(failure and failure.error_type) or None,
        error_code=(failure and failure.code) or None,
        error_details=failure and failure.details,
    )


def _is_kept(job: Job) -> bool:
    return job.result_expires_at is not None and job.result_expires_at > timezone.now()


def result_for(queue: str, unique_id: str) -> Any:
    """Return a completed job's living result, or ``NO_RESULT``."""
    job = find(queue, unique_id)
    if job is None or job.state != JobState.COMPLETED or not _is_kept(job):
        return NO_RESULT
    return result_of(job)


def update_result_ttl(queue: str, unique_id: str, ttl: timedelta | int) -> UpdateTtlResult:
    """Keep a finished job's result or error for ``ttl`` from now on, in one conditional UPDATE.

    :param ttl: a timedelta, or whole milliseconds; refused before anything is written.
    """
    lasts = milliseconds(ttl, timedelta(1))
    now = timezone.now()
    jobs = named(queue, unique_id)
    changed = jobs.filter(
        state__in=(JobState.COMPLETED, JobState.FAILED), result_expires_at__gt=now
    ).update(result_ttl=lasts, result_expires_at=now + timedelta(milliseconds=lasts))
    if changed:
        return UpdateTtlResult.UPDATED
    state = jobs.values_list("state", flat=True).first()
    if state is None:
        return UpdateTtlResult.NOT_FOUND
    if state in states.OPEN:
        return UpdateTtlResult.NOT_TERMINAL
    return UpdateTtlResult.MISSING_PAYLOAD


logger = logging.getLogger("kjo_django")

CHANNELS = 64
"""Beyond so many waiters at once, some share a channel and are woken for one another."""
IDLE = 10.0
"""Seconds without a waiter after which the listener and its thread are given up."""
_WAIT = 1.0


class Reply:
    """A waiter's place: ``channel`` goes with the job, ``heard`` is called when it is called.

    ``heard`` runs in the listener's thread and must return at once.
    """

    def __init__(self, switchboard: Switchboard, number: int, heard: Callable[[], None]) -> None:
        self._switchboard = switchboard
        self.number = number
        self.heard = heard

    @property
    def channel(self) -> str:
        """Whom to call."""
        return self._switchboard.channels[self.number]

    def close(self) -> None:
        """Hear nothing more."""
        self._switchboard.leave(self)


class Switchboard:
    """The listener of this process and its thread, which exist while somebody waits."""

    def __init__(self, coordination: Coordination) -> None:
        self.coordination = coordination
        self.pid = os.getpid()
        name = uuid7().hex
        self.channels = [f"{REPLY_CHANNELS}{name}:{number}" for number in range(CHANNELS)]
        self._numbers = {channel: number for number, channel in enumerate(self.channels)}
        self._waiting: list[set[Reply]] = [set() for _ in range(CHANNELS)]
        self._lock = threading.Lock()
        self._listener: Listener | None = None
        self._idle_since = time.monotonic()

    @property
    def waiting_count(self) -> int:
        """How many wait now."""
        return sum(len(replies) for replies in self._waiting)

    def enter(self, heard: Callable[[], None]) -> Reply:
        """Open a place; calls made after this returned are heard.

        :raises CoordinationError: nobody can be heard now.
        """
        with self._lock:
            if self._listener is None:
                self._listener = self.coordination.listen(self.channels)
                thread = threading.Thread(
                    target=self._run, args=(self._listener,), name="kjo-replies", daemon=True
                )
                thread.start()
            number = min(range(CHANNELS), key=lambda n: len(self._waiting[n]))
            reply = Reply(self, number, heard)
            self._waiting[number].add(reply)
            return reply

    def leave(self, reply: Reply) -> None:
        """Close a place."""
        with self._lock:
            self._waiting[reply.number].discard(reply)
            self._idle_since = time.monotonic()

    def _run(self, listener: Listener) -> None:
        try:
            while not self._may_end(listener):
                for channel in listener.wait(_WAIT):
                    self._call(self._numbers[channel])
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

    def _call(self, number: int) -> None:
        with self._lock:
            replies = list(self._waiting[number])
        for reply in replies:
            reply.heard()

    def close(self) -> None:
        """End the thread soon."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.wake()


_switchboard: Switchboard | None = None
_lock = threading.Lock()


def listen_for_reply(heard: Callable[[], None]) -> Reply | None:
    """Open a place at this process' switchboard; None when nobody can be heard now."""
    global _switchboard
    try:
        coordination = get_coordination()
        with _lock:
            board = _switchboard
            if board is None or board.coordination is not coordination or board.pid != os.getpid():
                # Settings changed, or this is a forked child: the parent's is not ours to close.
                if board is not None and board.pid == os.getpid():
                    board.close()
                board = _switchboard = Switchboard(coordination)
        return board.enter(heard)
    except CoordinationError as error:
        logger.warning("Waiting by polling only: %s", error)
        return None


def switchboard() -> Switchboard | None:
    """Return this process' switchboard, if somebody has waited yet; for tests and diagnosis."""
    return _switchboard


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
