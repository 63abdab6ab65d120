"""``Queue``: jobs by ids of the caller: enqueue, wait, cancel and look up."""

from __future__ import annotations

import functools
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, Never, TypeVar, cast, overload

from django.db import connections, transaction

from kjo_django import registry, states, values
from kjo_django.conf import declare_queue, declared_queues, get_settings, settings_as_read
from kjo_django.enqueue.coroutines import from_coroutine
from kjo_django.enqueue.definition import EnqueueOptions, dumped, new_job
from kjo_django.enqueue.handle import JobHandle
from kjo_django.enqueue.storing import milliseconds, store
from kjo_django.enqueue.unique import rule_for_ids
from kjo_django.enqueue.waiting import (
    DEFAULT_TIMEOUT,
    NO_RESULT,
    Awaited,
    Waiter,
    failure_of,
    is_expired,
    refuse_in_transaction,
)
from kjo_django.exceptions import JobNotFoundError, JobStateError
from kjo_django.logs import get_logger
from kjo_django.messages import headers as names
from kjo_django.messages.headers import MAX_TYPE_LENGTH
from kjo_django.messages.serializers import JSON, Serializer, register_serializer
from kjo_django.models import DeadLetter, Job, source_of_job
from kjo_django.operations import jobs as operations
from kjo_django.operations.jobs import CancelResult, RequeueResult
from kjo_django.patterns.queue import message_status as statuses
from kjo_django.patterns.queue.events import Events, Listener
from kjo_django.patterns.queue.handlers import Hook, QueueHandler, adapt, attempts_in
from kjo_django.patterns.queue.message_status import MessageStatus, UpdateTtlResult
from kjo_django.runtime import (
    current_runtime,
    database_of,
    jobs_database,
    use_database,
)
from kjo_django.states import JobState
from kjo_django.values import refuse_unknown, whole
from kjo_django.worker import Worker
from kjo_django.worker.supervisor import THREAD_DIED

_OPTIONS = frozenset(
    {
        *("max_attempts", "max_retries", "result_ttl", "concurrency"),
        *("serializer", "result_serializer", "worker_id"),
    }
)
_HANDLER_OPTIONS = frozenset({"atomic", "timeout", "after_execution"})
_ENQUEUE_OPTIONS = frozenset(
    {
        *("retry_failed", "max_attempts", "result_ttl", "delay", "run_at", "expires_at", "key"),
        *("headers", "correlation_id", "serializer", "priority", "on_conflict"),
    }
)


@dataclass(frozen=True, slots=True)
class EnqueueResult:
    """The answer to ``Queue.enqueue``; duplicates are answers, never exceptions."""

    status: Literal["queued", "replaced", "duplicate", "completed"]
    """``queued``: a job is stored. ``replaced``: the job that was there has the new payload.
    ``duplicate``: nothing is stored. ``completed``: nothing is stored, and there is a result."""
    job_id: uuid.UUID
    """The key of the job that is stored, or was there."""
    existing_state: str | None = None
    """Of a duplicate: queued, processing, failing, completed or failed. Of a replaced one: what it
    was."""
    result: Any = None
    """Of a completed one: its cached result."""

    @property
    def is_new(self) -> bool:
        """Whether this call stored a job."""
        return self.status == "queued"

    @property
    def handle(self) -> JobHandle[Any]:
        """A handle to follow the job."""
        return JobHandle(self.job_id)


F = TypeVar("F", bound=Callable[..., Any])


def _in_its_database(method: F) -> F:
    """Let a method of a queue work with the database that holds the queue's jobs."""

    @functools.wraps(method)
    def call(queue: Queue, *args: Any, **kwargs: Any) -> Any:
        with use_database(database_of(queue.name)):
            return method(queue, *args, **kwargs)

    return cast(F, call)


class Queue:
    """A queue of messages known by their callers' ids. Thread-safe.

    :param name: of the queue, as in ``KJO["QUEUES"]``.
    :param max_attempts: executions of a job, unless its enqueue says otherwise; if neither this nor
        ``KJO["QUEUES"]`` does, 3.
    :param max_retries: the same by its other name: 3 retries are 3 executions.
    :param result_ttl: how long results and errors are kept; a timedelta or whole milliseconds. It
        is resolved when a job is enqueued and stored with it.
    :param concurrency: groups of this queue one worker runs at once. For a queue that
        ``KJO["QUEUES"]`` does not name, 1 if not given: first in, first out.
    :param serializer: of payloads.
    :param result_serializer: of results, where it is another one.
    :param worker_id: name of the worker that ``start`` begins; ``<host>-<pid>`` if not given.
    :raises ValueError: the value of an option means nothing, or both counts are given.
    :raises TypeError: there is no such option.
    """

    def __init__(
        self,
        name: str,
        *,
        max_attempts: int | None = None,
        max_retries: int | None = None,
        result_ttl: timedelta | int | None = None,
        concurrency: int | None = None,
        serializer: Serializer = JSON,
        result_serializer: Serializer | None = None,
        worker_id: str | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(unknown, _OPTIONS, "Queue")
        if max_attempts is not None and max_retries is not None:
            raise ValueError("Give max_attempts or max_retries, not both: they are the same count")
        self.name: str = name
        """The queue's name."""
        self.job_type: str = f"queue:{name}"
        """The handler's name in its jobs."""
        if not isinstance(name, str) or not name or len(self.job_type) > MAX_TYPE_LENGTH:
            longest = MAX_TYPE_LENGTH - len("queue:")
            raise ValueError(f"Queue: name must be text of 1 to {longest} characters")
        attempts = self._checked("max_attempts", max_attempts, values.attempts)
        attempts = attempts or self._checked("max_retries", max_retries, values.attempts)
        concurrency = self._checked("concurrency", concurrency, whole(1))
        self._builder = JobBuilder(name, self.job_type, attempts, result_ttl, serializer)
        self._serializer = serializer
        self._result_serializer = result_serializer
        self._worker_id = worker_id
        self._events = Events(name, self.job_type)
        self._lock = threading.RLock()
        self._is_started = False
        self._worker: LocalWorker | None = None
        self._declare(concurrency)

    def __repr__(self) -> str:
        return f"<queue {self.name}>"

    def _checked(self, option: str, value: Any, check: Callable[[Any], int]) -> int | None:
        if value is None:
            return None
        try:
            return check(value)
        except ValueError as error:
            told = f"{option} must be {error}, not {value!r:.80}"
            raise ValueError(f"Queue({self.name!r}): {told}") from None

    def _declare(self, concurrency: int | None) -> None:
        if concurrency is None and self.name not in settings_as_read().queues:
            concurrency = 1
        if concurrency is not None and self.name not in declared_queues():
            declare_queue(self.name, concurrency=concurrency)

    # --- Handling ---------------------------------------------------------------------------------

    def execute(
        self,
        handler: Callable[..., Any],
        *,
        atomic: bool = True,
        timeout: timedelta | None = None,
        after_execution: Hook | None = None,
        **unknown: Never,
    ) -> None:
        """Run this queue's jobs with ``handler(job)``: sync, async, or ``handler(job, callback)``.

        Before or after ``start``; at import time for workers that are processes of their own.

        :param handler: a function of a ``QueueJob``, or of it and ``callback(error, result)``.
        :param atomic: run in the transaction that records the outcome, see ``@job``.
        :param timeout: longest run of an attempt.
        :param after_execution: may change result, error and lifetime before they are stored.
        :raises TypeError: there is no such option.
        """
        refuse_unknown(unknown, _HANDLER_OPTIONS, "Queue.execute")
        function = adapt(handler, after_execution, self._complain)
        lasts = self._builder.result_ttl
        options = registry.HandlerOptions(
            name=self.job_type,
            queue=self.name,
            max_attempts=self._builder.max_attempts,
            result_ttl=timedelta(milliseconds=lasts) if lasts is not None else None,
            timeout=timeout,
            atomic=atomic,
            takes_context=True,
            serializer=self._serializer,
            result_serializer=self._result_serializer,
        )
        registry.register(QueueHandler(function, options))
        with self._lock:
            if self._is_started:
                self._ensure_worker()

    @overload
    def handler(self, function: Callable[..., Any], /) -> Callable[..., Any]: ...
    @overload
    def handler(
        self,
        /,
        *,
        atomic: bool = True,
        timeout: timedelta | None = None,
        after_execution: Hook | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
    def handler(self, function: Any = None, /, **options: Any) -> Any:
        """``execute`` as a decorator; the function stays callable as it was."""
        refuse_unknown(options, _HANDLER_OPTIONS, "Queue.handler")

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            self.execute(function, **options)
            return function

        return declare if function is None else declare(function)

    def start(self) -> None:
        """Run jobs in a thread of this process, if there is a handler. Idempotent.

        Use it for scripts, tests and small services. Elsewhere run ``manage.py kjo_consume``
        instead: enqueueing, waiting and look-ups work without ``start``.
        """
        with self._lock:
            was_started, self._is_started = self._is_started, True
            self._ensure_worker()
        if not was_started:
            self._events.emit("started")

    def stop(self) -> None:
        """Let running jobs end within ``SHUTDOWN_GRACE`` and return the others. Idempotent."""
        with self._lock:
            was_started, self._is_started = self._is_started, False
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()
        if was_started:
            self._events.emit("stopped")

    def _ensure_worker(self) -> None:
        if self._worker is None and registry.find(self.job_type) is not None:
            self._worker = LocalWorker(self.name, self._worker_id, self._complain)
            self._worker.start()

    def on(self, event: str, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` when ``event`` happens in this process; returns what undoes it.

        ``completed(id, result)``, ``failed(id, error)``, ``failing(id, error, attempt)``,
        ``enqueued(id)``, ``stalled(id)``, ``cancelled(id)``, ``requeued(id)``, ``started()``,
        ``stopped()``, ``error(error)``.

        :param event: one of these names.
        :param listener: called with these arguments. What it raises is logged and goes to
            ``error``.
        :raises ValueError: there is no such event.
        """
        return self._events.on(event, listener)

    def _complain(self, error: Exception) -> None:
        self._events.emit("error", error)

    # --- Enqueueing -------------------------------------------------------------------------------

    @_in_its_database
    def enqueue(
        self, id: str, payload: Any, *, retry_failed: bool = False, **options: Any
    ) -> EnqueueResult:
        """Store a job, once per id, joining the caller's transaction.

        The first accepted enqueue decides payload, lifetime and attempts. Everything is validated
        before anything is written.

        :param id: the id by which its caller knows the job, 1 to 255 characters.
        :param payload: anything its serializer takes.
        :param retry_failed: begin anew where the job of this id has failed, instead of answering
            ``duplicate`` until its error expires.
        :param options: ``max_attempts``, ``result_ttl`` (timedelta or whole milliseconds),
            ``delay``, ``run_at``, ``expires_at``, ``key``, ``priority``, ``headers``,
            ``correlation_id``, ``serializer``, and ``on_conflict``: ``keep`` the job of this id,
            ``replace`` its payload and options if it has not begun, or ``raise``.
        :raises JobExistsError: there is a job of this id, and ``on_conflict`` is ``raise``.
        :raises PayloadError: the payload cannot be serialized or is too large.
        :raises TypeError: there is no such option.
        """
        refuse_unknown(options, _ENQUEUE_OPTIONS, "Queue.enqueue")
        return self._store(self._builder.build(id, payload, **options), retry_failed)

    @_in_its_database
    def enqueue_and_wait(
        self,
        id: str,
        payload: Any,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        retry_failed: bool = False,
        **options: Any,
    ) -> Any:
        """Enqueue and return the handler's result.

        A living result of the same id is returned at once; a job of this id that is under way is
        waited for.

        :param id: as of ``enqueue``.
        :param payload: as of ``enqueue``.
        :param timeout: seconds.
        :param retry_failed: as of ``enqueue``.
        :param options: as of ``enqueue``.
        :raises JobTimeoutError: the time is over; the job may still complete.
        :raises JobFailedError: it failed for good, now or before.
        :raises JobCancelledError: it was cancelled meanwhile.
        :raises UncommittedJobError: called inside a transaction.
        """
        with Waiter(timeout) as waiter:
            is_known, awaited = self._enqueue_for(waiter, id, payload, retry_failed, options)
            return awaited if is_known else waiter.wait(awaited)

    @_in_its_database
    def wait(self, id: str, *, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """Return the result of a job enqueued before, found by polling.

        :param id: the id it was enqueued with.
        :param timeout: seconds.
        :raises JobNotFoundError: no job has this id, or its result or error has expired.
        :raises JobTimeoutError: the time is over; the job may still complete.
        :raises JobFailedError: it failed for good.
        :raises JobCancelledError: it was cancelled, or enqueued anew meanwhile.
        :raises UncommittedJobError: called inside a transaction, and it has not ended.
        """
        with Waiter(timeout) as waiter:
            job = self._find(id)
            if is_expired(job):
                told = f"The result of job {id!r} has expired"
                raise JobNotFoundError(told)
            if job.state in states.OPEN:
                refuse_in_transaction(id)
            return waiter.wait(Awaited(job.pk, id, job.created_at))

    def _enqueue_for(
        self, waiter: Waiter, id: str, payload: Any, retry_failed: bool, options: dict[str, Any]
    ) -> tuple[bool, Any]:
        """Return True and the result if it is known, else False and the job to wait for."""
        refuse_unknown(options, _ENQUEUE_OPTIONS | {"timeout"}, "Queue.enqueue_and_wait")
        job = self._builder.build(id, payload, reply_to=waiter.channel, **options)
        if connections[jobs_database()].in_atomic_block:
            status = statuses.status_of(self.name, id)
            if status is None or (status.result is NO_RESULT and status.state != "failed"):
                refuse_in_transaction(id)
        answer = self._store(job, retry_failed)
        if answer.status == "completed":
            return True, answer.result
        if answer.status in ("queued", "replaced"):
            awaited = Awaited(answer.job_id, id, job.created_at, is_called=True, is_new=True)
            return False, awaited
        if answer.existing_state == "failed":
            raise failure_of(id, self._find(id))
        return False, Awaited(answer.job_id, id)

    def _store(self, job: Job, retry_failed: bool) -> EnqueueResult:
        (answer,) = self._store_anew(job) if retry_failed else store([job])
        state = answer.existing_state
        if state in ("queued", "failing"):
            # A running atomic job shows by its lease, not in its row.
            status = statuses.status_of(self.name, job.unique_id or "")
            if status is not None and status.state == "processing":
                state = "processing"
        result = None if answer.cached_result is NO_RESULT else answer.cached_result
        said = answer.answer
        assert said is not None
        return EnqueueResult(said, answer.job_id, state, result)

    def _store_anew(self, job: Job) -> list[JobHandle[Any]]:
        """Store the job even if one of this id has failed, and close that failure's dead letter."""
        using = jobs_database()
        with transaction.atomic(using=using, savepoint=False):
            answers = store([job], revives_failed=True)
            if answers[0].is_new:
                failed = source_of_job(answers[0].job_id, job.generation - 1)
                letters = DeadLetter.objects.using(using).filter(source_id=failed)
                operations.close_as_replayed(letters, "a new enqueue")
            return answers

    # --- Looking and changing ---------------------------------------------------------------------

    @_in_its_database
    def cancel(self, id: str, *, abort: bool = False) -> CancelResult:
        """Cancel a job that is not running; returns ``cancelled``, ``not_found``, ``processing``,
        ``completed`` or ``failed``.

        :param id: the id it was enqueued with.
        :param abort: ask a running job to end, see ``JobContext.aborted``. The answer is
            ``processing`` then; its handler decides whether it ends as cancelled.
        """
        key = self._key_of(id)
        if key is None:
            return CancelResult.NOT_FOUND
        return operations.cancel_one(key, abort=abort)

    @_in_its_database
    def get_status(self, id: str) -> MessageStatus | None:
        """Return a job's status; None for an unknown id.

        :param id: the id it was enqueued with.
        """
        return statuses.status_of(self.name, id)

    @_in_its_database
    def get_states(self, ids: Collection[str]) -> dict[str, str | None]:
        """Return the state of each job by one query; None for an unknown id.

        :param ids: those they were enqueued with.
        """
        return statuses.states_of(self.name, ids)

    @_in_its_database
    def get_result(self, id: str, default: Any = NO_RESULT) -> Any:
        """Return a completed job's result until it expires, else ``default``. A handler that
        returned None has the result None; ``NO_RESULT`` means no result.

        :param id: the id it was enqueued with.
        :param default: returned where there is no result.
        """
        found = statuses.result_for(self.name, id)
        return default if found is NO_RESULT else found

    @_in_its_database
    def update_result_ttl(self, id: str, result_ttl: timedelta | int) -> UpdateTtlResult:
        """Set the lifetime of a finished job's result or error, from now on.

        Returns ``updated``, ``not_found``, ``not_terminal`` if the job has not ended, or
        ``missing_payload`` if no result or error is kept.

        :param id: the id it was enqueued with.
        :param result_ttl: a timedelta, or whole milliseconds.
        """
        return statuses.update_result_ttl(self.name, id, result_ttl)

    @_in_its_database
    def retry(self, id: str) -> RequeueResult:
        """Give a failed or cancelled job a new run with its own payload and all its attempts.

        :param id: the id it was enqueued with.
        :raises JobStateError: it neither failed nor was cancelled; nothing was changed.
        """
        jobs = statuses.named(self.name, id)
        ended = jobs.filter(state__in=(JobState.FAILED, JobState.CANCELLED))
        outcomes = operations.requeue(ended)
        result = next(iter(outcomes.counts), RequeueResult.NOT_FOUND)
        state = jobs.values_list("state", flat=True).first()
        if result == RequeueResult.NOT_FOUND and state is not None:
            raise JobStateError(f"Job {id!r} is {state}; only failed ones can be retried")
        return RequeueResult(result)

    @_in_its_database
    def retry_failed(self) -> int:
        """Give every failed job of this queue a new run; return how many."""
        failed = Job.objects.using(jobs_database()).filter(
            queue=self.name, handler=self.job_type, state=JobState.FAILED
        )
        return operations.requeue(failed).changed_count

    def _key_of(self, id: str) -> Any:
        return statuses.named(self.name, id).values_list("pk", flat=True).first()

    def _find(self, id: str) -> Job:
        job = statuses.find(self.name, id)
        if job is None:
            raise JobNotFoundError(f"Queue {self.name!r} knows no job {id!r}")
        return job

    # --- The same from asynchronous code ----------------------------------------------------------

    async def aenqueue(self, id: str, payload: Any, **options: Any) -> EnqueueResult:
        """``enqueue`` from asynchronous code."""
        return await from_coroutine(self.enqueue)(id, payload, **options)

    async def aenqueue_and_wait(
        self,
        id: str,
        payload: Any,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        retry_failed: bool = False,
        **options: Any,
    ) -> Any:
        """``enqueue_and_wait`` from asynchronous code. It holds no thread while it waits."""
        waiter = Waiter(timeout)
        with use_database(database_of(self.name)):
            await from_coroutine(waiter.__enter__)()
            try:
                is_known, awaited = await from_coroutine(self._enqueue_for)(
                    waiter, id, payload, retry_failed, options
                )
                return awaited if is_known else await waiter.await_(awaited)
            finally:
                waiter.__exit__()

    async def acancel(self, id: str, *, abort: bool = False) -> CancelResult:
        """``cancel`` from asynchronous code."""
        return await from_coroutine(self.cancel)(id, abort=abort)

    async def aget_status(self, id: str) -> MessageStatus | None:
        """``get_status`` from asynchronous code."""
        return await from_coroutine(self.get_status)(id)

    async def aget_result(self, id: str, default: Any = NO_RESULT) -> Any:
        """``get_result`` from asynchronous code."""
        return await from_coroutine(self.get_result)(id, default)


# --- The rows of its jobs -------------------------------------------------------------------------


def unsaved_job(queue: Queue, id: str, payload: Any, **options: Any) -> Job:
    """Return the unsaved row of a queue's job; everything is validated here, before any write."""
    refuse_unknown(options, _ENQUEUE_OPTIONS, "Queue.enqueue")
    return queue._builder.build(id, payload, **options)


class JobBuilder:
    """Builds the jobs of one queue, with its defaults.

    :raises ValueError: an invalid lifetime.
    """

    def __init__(
        self,
        queue: str,
        handler: str,
        max_attempts: int | None,
        result_ttl: timedelta | int | None,
        serializer: Serializer,
    ) -> None:
        register_serializer(serializer)
        self._queue = queue
        self._handler = handler
        self.max_attempts = max_attempts
        self.result_ttl = None if result_ttl is None else milliseconds(result_ttl)
        self._serializer = serializer

    def build(
        self,
        id: str,
        payload: Any,
        *,
        serializer: Serializer | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        reply_to: str | None = None,
        key: str | None = None,
        priority: int | None = None,
        on_conflict: str | None = None,
        delay: timedelta | float | None = None,
        run_at: datetime | None = None,
        expires_at: datetime | None = None,
        max_attempts: int | None = None,
        result_ttl: timedelta | int | None = None,
    ) -> Job:
        """Return the unsaved row of a job; see ``Queue.enqueue``."""
        if not isinstance(id, str):
            raise TypeError(f"id must be text, not {id!r}")
        ours = {names.CORRELATION_ID: correlation_id, names.REPLY_TO: reply_to}
        lasts = self.result_ttl if result_ttl is None else milliseconds(result_ttl)
        sent = {**(headers or {}), **{k: v for k, v in ours.items() if v is not None}}
        options = EnqueueOptions(
            id=id,
            key=key,
            priority=priority,
            on_conflict=on_conflict,
            delay=cast("timedelta | None", delay),
            run_at=run_at,
            expires_at=expires_at,
            max_attempts=max_attempts,
            result_ttl=timedelta(milliseconds=lasts) if lasts is not None else None,
            headers=sent or None,
        )
        if serializer is not None:
            register_serializer(serializer)
        declared = registry.HandlerOptions(
            name=self._handler,
            queue=self._queue,
            max_attempts=attempts_in(self._queue, self.max_attempts),
            serializer=serializer or self._serializer,
        )
        data = dumped(payload, declared.serializer)
        job = new_job(options, declared, key or "", data, current_runtime())
        if (rule := rule_for_ids(options)) is not None:
            rule.apply_to(job)
        return job


# --- Working in this process ----------------------------------------------------------------------


logger = get_logger("kjo_django")

RESTART_DELAY = 1.0
"""Seconds until another worker takes the place of one that a thread of it has died in."""
STOP_MARGIN = 20.0
"""Seconds beyond the grace period in which a worker leaves its groups and flushes."""


class LocalWorker:
    """A worker thread that is started once and stopped once.

    :param complain: called with outages and with the worker's failure.
    """

    def __init__(self, queue: str, name: str | None, complain: Callable[[Exception], None]) -> None:
        self._queue = queue
        self._name = name
        self._complain = complain
        self._stopping = threading.Event()
        self._worker = self._make_worker()
        self._thread = threading.Thread(target=self._run, name=f"kjo-queue-{queue}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Let running jobs end within ``SHUTDOWN_GRACE``, return the others, and wait for the
        thread.
        """
        self._stopping.set()
        self._worker.stop()
        self._thread.join(get_settings().shutdown_grace.total_seconds() + STOP_MARGIN)

    def _make_worker(self) -> Worker:
        def complain(source: str, error: str) -> None:
            self._complain(RuntimeError(f"{source}: {error}"))

        # Others in this process enqueue and wait on the same transports.
        return Worker([self._queue], name=self._name, owns_process=False, on_error=complain)

    def _run(self) -> None:
        try:
            # The process is the project's: it goes on, and so does the queue.
            while self._worker.run() == THREAD_DIED and not self._stopping.wait(RESTART_DELAY):
                self._worker = self._make_worker()
                if self._stopping.is_set():
                    break
        except Exception as error:
            logger.exception("The worker of queue %s failed", self._queue)
            self._complain(error)
        finally:
            connections.close_all()
