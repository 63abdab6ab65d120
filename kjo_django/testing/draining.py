"""Running jobs in the test's own thread and transaction, through the flow that workers use."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from django.db import connections
from django.db.models import Q, QuerySet
from django.utils import timezone

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.coordination.base import Claim
from kjo_django.engine.attempt import Attempt, Delivery, Ending, RefusedRecord, delivery_of
from kjo_django.engine.group import Pipeline, result_of, send_signals
from kjo_django.engine.handler.call import call_step
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.leases import LeaseBook
from kjo_django.enqueue import storing
from kjo_django.enqueue.definition import JobDefinition, unsaved_job
from kjo_django.enqueue.handle import JobHandle
from kjo_django.exceptions import JobFailedError, JobNotFoundError
from kjo_django.logs import get_logger
from kjo_django.messages.serializers import load_result, serializer_for
from kjo_django.models import Job
from kjo_django.patterns.queue import EnqueueResult, Queue
from kjo_django.patterns.queue.client import unsaved_job as unsaved_queue_job
from kjo_django.runtime import current_runtime, jobs_database
from kjo_django.store.rows import row_of
from kjo_django.transports.base import Record

logger = get_logger("kjo_django")

_offsets = itertools.count()
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class DrainedRun:
    """One run of a handler."""

    job_id: str
    """The key of the job, a UUID."""
    handler: str
    """The handler's name."""
    outcome: str
    """``completed``, ``retried``, ``dead``, ``cancelled``, ``duplicate`` or ``skipped``."""
    result: Any = None
    """What the handler returned, if the run has completed."""
    error: BaseException | None = None
    """What the handler raised."""


@dataclass(slots=True)
class Drained:
    """The runs of ``drain``, in order."""

    runs: list[DrainedRun] = field(default_factory=list)
    """One for each run of a handler: a retry is another run."""

    def count(self, outcome: str) -> int:
        """Return the number of runs that ended so.

        :param outcome: as in ``DrainedRun.outcome``.
        """
        return sum(run.outcome == outcome for run in self.runs)

    @property
    def completed(self) -> int:
        """The number of runs that completed."""
        return self.count("completed")

    @property
    def retried(self) -> int:
        """The number of runs that failed with another attempt to come."""
        return self.count("retried")

    @property
    def failed(self) -> int:
        """The number of runs that ended in the dead letters."""
        return self.count("dead")

    @property
    def results(self) -> list[Any]:
        """The results of the completed runs."""
        return [run.result for run in self.runs if run.outcome == "completed"]


def drain(
    *queues: str | Queue,
    with_retries: bool = False,
    with_delayed: bool = False,
    raise_errors: bool = True,
    limit: int = 10_000,
) -> Drained:
    """Run every job that is due, those included that jobs enqueue, and return what happened.

    A batch handler gets what is due when its first job is, as many as it takes, of a key one.

    Works inside ``TestCase``: in this thread, on this connection, whatever the transport; nothing
    is sent to a broker. Each payload has gone through its serializer. What handlers do with
    ``transaction.on_commit`` is done after each job, as after a worker's commit.

    :param queues: only these.
    :param with_retries: run failed attempts again at once, whatever their back-off says.
    :param with_delayed: run delayed jobs as if their time had come.
    :param raise_errors: raise a handler's error once its outcome is recorded; with
        ``with_retries``, only that of a last attempt.
    :param limit: stop with an error after so many runs: jobs that enqueue themselves never end.
    """
    names = {queue.name if isinstance(queue, Queue) else queue for queue in queues}
    drained = Drained()
    with _runner() as runner:
        while job := _due(names, with_retries, with_delayed).first():
            if len(drained.runs) >= limit:
                raise AssertionError(f"drain() ran {limit} jobs and more are due")
            due = _due(names, with_retries, with_delayed)
            runs = runner.run_together([job, *_companions(job, due)])
            drained.runs += runs
            for run in runs:
                is_final = run.outcome == "dead" or not with_retries
                if raise_errors and run.error is not None and is_final:
                    raise run.error
    _run_what_was_enqueued()
    return drained


class immediate(contextlib.ContextDecorator):
    """Run each job as soon as it is enqueued, before ``enqueue()`` returns; a block, or a decorator
    of a function that is no coroutine.

    What is due runs as ``drain`` runs it: in this thread, and in the transaction of who enqueues
    it. What a handler enqueues runs when the handler has ended. Delayed jobs and retries wait for
    ``drain``.

    :param queues: only jobs of these.
    :param raise_errors: a handler's error is raised by ``enqueue()``, once its outcome is recorded.
        What its handler had enqueued runs with the next enqueue.
    """

    def __init__(self, *queues: str | Queue, raise_errors: bool = True) -> None:
        self._queues, self._raises = queues, raise_errors

    def __call__(self, function: F) -> F:
        """Decorate a function.

        :param function: to run inside the block.
        :raises TypeError: it is a coroutine function, which would be over before it has begun.
        """
        if inspect.iscoroutinefunction(function):
            raise TypeError("immediate() decorates no coroutine; write `with immediate():` in it")
        return super().__call__(function)

    def __enter__(self) -> None:
        storing.observers.append(self._run)

    def __exit__(self, *_: object) -> None:
        storing.observers.remove(self._run)

    def _run(self) -> None:
        if _thread.runs_jobs:
            return  # it is run once the handler that enqueues it has ended
        _thread.runs_jobs = True
        try:
            drain(*self._queues, raise_errors=self._raises)
        finally:
            _thread.runs_jobs = False


class _Thread(threading.local):
    runs_jobs = False
    """Whether this thread runs jobs, so that others which are enqueued have to wait."""


_thread = _Thread()


def _run_what_was_enqueued() -> None:
    """Run what handlers have enqueued meanwhile, if each job is to run at once."""
    if storing.observers and not _thread.runs_jobs:
        storing.call_observers(current_runtime())


def run_job(job: Job | JobHandle[Any] | EnqueueResult | uuid.UUID | str) -> Any:
    """Run one open job, due or not, and return its result; its error is raised once recorded.

    :param job: the job, a handle of it, the answer to its enqueue, or its id.
    :raises JobNotFoundError: there is no such job.
    :raises JobFailedError: it was not run: it is no longer open, or it is cancelled.
    """
    key: Any = job.pk if isinstance(job, Job) else getattr(job, "job_id", job)
    row = Job.objects.using(jobs_database()).filter(pk=key).first()
    if row is None:
        raise JobNotFoundError(f"There is no job {key}")
    with _runner() as runner:
        run = runner.run(row)
    _run_what_was_enqueued()
    if run.error is not None:
        raise run.error
    if run.outcome != "completed":
        raise JobFailedError(f"Job {key} was not run: {run.outcome}, it is {row.state}")
    return run.result


def perform(
    job: JobDefinition[..., Any] | Queue, /, *payload: Any, attempt: int = 1, **fields: Any
) -> Any:
    """Call a job's handler as a worker would, without storing anything, and return its result.

    The payload and the result go through their serializers, and a context is passed where the
    handler takes one; a batch handler is given a batch of one.
    ``perform(send_receipt, order_id=7)``, ``perform(queue, {"url": "…"})``.

    :param job: a job, or a ``Queue`` with a handler.
    :param payload: of a ``Queue``, its payload; of a job, a dict of arguments, where they are not
        given by name.
    :param attempt: the number of the attempt in its context.
    :param fields: of a job, the arguments by name; of a ``Queue``, options of its ``enqueue``.
    :raises PayloadError: payload or result cannot be serialized.
    """
    if isinstance(job, Queue):
        (value,) = payload
        row = unsaved_queue_job(job, "test", value, **fields)
    else:
        row = unsaved_job(job, dict(*payload, **fields))
    delivery = _delivery_of(row)
    if isinstance(delivery, RefusedRecord):
        raise delivery.problem
    watch = TimeoutWatch()
    one = Attempt(delivery, row=row_of(row), number=attempt, limit=row.max_attempts)
    try:
        call_step(current_runtime(), watch, [one])
    finally:
        watch.stop()
    if one.error is not None:
        raise one.error
    return None if one.result is None else load_result(one.result, serializer_for(row.content_type))


# --- Details --------------------------------------------------------------------------------------


def _companions(job: Job, due: QuerySet[Job]) -> list[Job]:
    """Return the jobs that a worker would put into one batch with a job."""
    handler = registry.find(job.handler)
    size = handler.options.batch if handler is not None else None
    if size is None:
        return []
    keys = {job.key} - {""}
    found: list[Job] = []
    others = due.filter(queue=job.queue, handler=job.handler).exclude(pk=job.pk)
    for other in others[: 10 * size]:
        if other.key not in keys and len(found) < size - 1:
            found.append(other)
            keys |= {other.key} - {""}
    return found


def _due(names: Collection[str], with_retries: bool, with_delayed: bool) -> QuerySet[Job]:
    rows = Job.objects.using(jobs_database()).open().filter(destination="")
    if names:
        rows = rows.filter(queue__in=names)
    wanted = Q(available_at__lte=timezone.now())
    if with_retries:
        wanted |= Q(attempts__gt=0)
    if with_delayed:
        wanted |= Q(attempts=0)
    return rows.filter(wanted).order_by("available_at", "id")


class _NoLeases(LeaseBook):
    """A test has no rivals, and its transaction no room for leases."""

    def __init__(self) -> None:
        super().__init__(current_runtime(), uuid.uuid4().hex)

    def claim(self, deliveries: Sequence[Delivery], ttl: timedelta | None = None) -> list[Claim]:
        return [Claim(True, 1)] * len(deliveries)

    def is_vanished(self, token: str) -> bool:
        return True


class _Synchronous(Pipeline):
    """The pipeline, but what dies is not published: a test needs no broker."""

    def _settle(self, attempts: Sequence[Attempt]) -> list[Delivery]:
        for attempt in attempts:
            attempt.is_published = True
        return super()._settle(attempts)


class _Runner:
    def __init__(self, watch: TimeoutWatch) -> None:
        self._ended: list[Attempt] = []
        self._pipeline = _Synchronous(
            _NoLeases(), watch, worker="drain", listeners=[self._ended.extend]
        )

    def run(self, job: Job) -> DrainedRun:
        (run,) = self.run_together([job])
        return run

    def run_together(self, jobs: Sequence[Job]) -> list[DrainedRun]:
        """Run jobs of one handler as one group."""
        self._ended.clear()
        deliveries = [_delivery_of(job) for job in jobs]
        with _callbacks_run(jobs_database()):
            deferred = self._pipeline.run(deliveries)
        send_signals(self._ended)
        for job, delivery in zip(jobs, deliveries, strict=True):
            if delivery in deferred:
                raise AssertionError(f"Job {job.pk} could not be run now: somebody else holds it")
        ended = {attempt.delivery: attempt for attempt in self._ended}
        return [self._run_of(job, ended[d]) for job, d in zip(jobs, deliveries, strict=True)]

    @staticmethod
    def _run_of(job: Job, attempt: Attempt) -> DrainedRun:
        is_done = attempt.ending is Ending.COMPLETED
        return DrainedRun(
            job_id=str(job.pk),
            handler=job.handler,
            outcome=attempt.ending.value if attempt.ending is not None else "",
            result=result_of(attempt) if is_done else None,
            error=attempt.error,
        )


@contextlib.contextmanager
def _runner() -> Iterator[_Runner]:
    watch = TimeoutWatch()
    runs_jobs, _thread.runs_jobs = _thread.runs_jobs, True
    try:
        yield _Runner(watch)
    finally:
        _thread.runs_jobs = runs_jobs
        watch.stop()


def _delivery_of(job: Job) -> Delivery:
    """Return the record that a transport would deliver for a job."""
    queue = get_settings().queue(job.queue)
    sent = storing.record_of(job, queue)
    record = Record(
        topic=sent.topic,
        partition=0,
        offset=next(_offsets),
        key=sent.key,
        value=sent.value,
        headers=dict(sent.headers),
        timestamp=timezone.now(),
    )
    delivery = delivery_of(record, queue, current_runtime())
    if delivery is None:
        raise AssertionError(f"The route of queue {queue.name!r} does not take job {job.pk}")
    return delivery


@contextlib.contextmanager
def _callbacks_run(using: str) -> Iterator[None]:
    """Inside a test's transaction, run what the block wanted done on commit, when it ends."""
    connection = connections[using]
    if not connection.in_atomic_block:
        yield  # a real commit does it
        return
    callbacks: list[Any] = connection.run_on_commit
    start = len(callbacks)
    yield
    while len(callbacks) > start:
        _savepoints, function, robust = callbacks.pop(start)
        try:
            function()
        except Exception:
            if not robust:
                raise
            logger.exception("An on_commit callback failed")
