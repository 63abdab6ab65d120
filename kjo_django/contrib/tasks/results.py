"""Results of tasks from job rows. Imported after the models are loaded."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone
from django.utils.dateparse import parse_datetime, parse_duration
from django.utils.duration import duration_iso_string

from kjo_django import conf, states
from kjo_django.contrib.tasks.compat import (
    DEFAULT_TASK_PRIORITY,
    InvalidTask,
    TaskError,
    TaskResultDoesNotExist,
    TaskResultStatus,
)
from kjo_django.contrib.tasks.definition import (
    ASYNC,
    NAME,
    PLAIN,
    TASK,
    TIMEOUT,
    UNIQUE,
    KJOTaskContext,
    KJOTaskResult,
    TaskCall,
    changed_options,
    find_task,
    own_options,
    restored,
    unique_definition,
)
from kjo_django.engine.attempt import Attempt, Ending
from kjo_django.engine.handler.context import JobContext
from kjo_django.enqueue.definition import EnqueueOptions, dumped, make_unique, new_job
from kjo_django.enqueue.handle import database_of_job
from kjo_django.enqueue.job_status import leased_jobs
from kjo_django.enqueue.storing import store
from kjo_django.enqueue.waiting import result_of
from kjo_django.exceptions import MessageError
from kjo_django.logs import get_logger
from kjo_django.messages.serializers import JSON, serializer_for
from kjo_django.models import Job, JobFailure, Worker
from kjo_django.operations.rows import key_of
from kjo_django.operations.workers import assignments
from kjo_django.registry import HandlerOptions
from kjo_django.running_job import worker_name
from kjo_django.runtime import current_runtime, databases, jobs_database
from kjo_django.states import JobState, JobStatus
from kjo_django.values import duration, signature_of

logger = get_logger("kjo_django")


def store_task(backend: Any, task: Any, args: list[Any], kwargs: dict[str, Any]) -> KJOTaskResult:
    """Store a task as a job and return its result, or the existing one of its unique id.

    :raises InvalidTask: the unique id belongs to another task, or to a job that is not a task.
    """
    job = _job_of(backend, task, args, kwargs)
    answer = store([job])[0]
    if answer.is_new:
        return _result(job, [], job.status, task=task, alias=backend.alias, call=_call_of(job))
    row = Job.objects.using(answer.database).get(pk=answer.job_id)
    call = _call_of(row) if row.handler == NAME else None
    if call is None or call.path != task.module_path:
        raise InvalidTask(f"{job.unique_id!r} is the unique id of another job of {job.queue!r}.")
    return _result_of_row(row, call, backend.alias, is_new=False)


def get_result(backend: Any, result_id: Any) -> KJOTaskResult:
    """Return the result of a task that was enqueued on this backend.

    :raises TaskResultDoesNotExist: there is none, or its lifetime is over.
    """
    try:
        key = uuid.UUID(str(result_id))
        job = Job.objects.using(database_of_job(key) or databases()[0]).get(pk=key, handler=NAME)
        call = _call_of(job)
        if call.backend == backend.alias and not _is_over(job):
            return _result_of_row(job, call, backend.alias)
    except (ValueError, Job.DoesNotExist, MessageError):
        pass
    raise TaskResultDoesNotExist(result_id)


def begin(task: Any, call: TaskCall, context: JobContext) -> KJOTaskContext:
    """Return the context of a run that begins now."""
    now, worker = timezone.now(), worker_name.get() or conf.default_worker_name()
    context.worker = worker[:255]
    result = KJOTaskResult(
        task=_restored_task(task, call, context.queue),
        id=context.job_id,
        status=TaskResultStatus.RUNNING,
        enqueued_at=context.created_at,
        started_at=now,
        finished_at=None,
        last_attempted_at=now,
        args=call.args,
        kwargs=call.kwargs,
        backend=call.backend,
        errors=[],
        worker_ids=[""] * (context.attempt - 1) + [worker],
        job_status=str(JobStatus.PROCESSING),
    )
    return KJOTaskContext(task_result=result, job=context)


def ended(attempt: Attempt) -> KJOTaskResult | None:
    """Return the result of a task that has ended for good; None if it has not.

    It is also None if the task cannot be imported, which is why it failed.
    """
    if attempt.row is None or attempt.ending not in _ENDS:
        return None
    job = _row_after(attempt)
    call = _call_of(job)
    if attempt.ending is Ending.COMPLETED:
        return _result_of_row(job, call, call.backend)
    try:
        return _result_of_row(job, call, call.backend)
    except Exception as error:
        logger.warning("No task_finished for job %s: %s", job.pk, error, extra=job.log_facts)
        return None


_ENDS = (Ending.COMPLETED, Ending.DEAD, Ending.CANCELLED)


# --- Details --------------------------------------------------------------------------------------


def _job_of(backend: Any, task: Any, args: list[Any], kwargs: dict[str, Any]) -> Job:
    now = timezone.now()
    key = getattr(task, "key", None)
    expires = getattr(task, "expires", None)
    if expires is not None and not isinstance(expires, datetime):
        expires = now + duration(expires)
    timeout = backend.default(task, "timeout")
    headers = {TASK: task.module_path}
    if backend.default(task, "atomic") is False:
        headers[PLAIN] = "1"
    if inspect.iscoroutinefunction(task.func):
        headers[ASYNC] = "1"
    if timeout is not None:
        headers[TIMEOUT] = repr(duration(timeout).total_seconds())
    options = EnqueueOptions(
        **own_options(task),
        key=str(key(*args, **kwargs)) if callable(key) else key,
        expires_at=expires,
        priority=task.priority,
        max_attempts=backend.default(task, "max_attempts"),
        result_ttl=backend.default(task, "result_ttl"),
        headers=headers,
    )
    payload = {
        "task": task.module_path,
        "backend": backend.alias,
        "args": args,
        "kwargs": kwargs,
        "using": _written(task),
    }
    declared = HandlerOptions(name=NAME, queue=task.queue_name)
    data = dumped(payload, JSON)
    job = new_job(options, declared, options.key or "", data, current_runtime())
    if any(getattr(options, name) is not None for name in UNIQUE):
        make_unique(unique_definition(task, options), job, _arguments(task, args, kwargs))
    return job


def _arguments(task: Any, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names, without the context."""
    signature = signature_of(task.func)
    first = (None,) if task.takes_context else ()
    bound = signature.bind(*first, *args, **kwargs).arguments
    named = {name: bound[name] for name in list(bound)[len(first) :]}
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


_TIMES = (
    *("expires", "result_ttl", "run_after", "timeout", "unique_for", "debounce", "debounce_max"),
)


def _written(task: Any) -> dict[str, Any]:
    """Return a task's options for JSON: durations and times in ISO 8601."""
    given = changed_options(task)
    if task.priority:
        given["priority"] = task.priority
    if task.run_after is not None:
        given["run_after"] = task.run_after
    for name, value in given.items():
        if isinstance(value, timedelta):
            given[name] = duration_iso_string(value)
        elif isinstance(value, datetime):
            given[name] = value.isoformat()
    return given


def _restored_task(task: Any, call: TaskCall, queue: str) -> Any:
    """Return the task as it was enqueued."""
    changes: dict[str, Any] = {"queue_name": queue, "backend": call.backend}
    changes |= {"run_after": None, "priority": DEFAULT_TASK_PRIORITY}
    for name, value in call.using.items():
        if isinstance(value, str) and name in _TIMES:
            value = parse_duration(value) if value.startswith("P") else parse_datetime(value)
        changes[name] = tuple(value) if isinstance(value, list) else value
    return restored(task, **changes)


def _call_of(job: Job) -> TaskCall:
    return TaskCall.read(serializer_for(job.content_type).loads(bytes(job.payload)))


def _is_over(job: Job) -> bool:
    expires_at = job.result_expires_at
    return job.state in states.FINAL and expires_at is not None and expires_at <= timezone.now()


def _result_of_row(job: Job, call: TaskCall, alias: str, *, is_new: bool = True) -> KJOTaskResult:
    failures: list[JobFailure] = []
    if job.attempts > (job.state == JobState.COMPLETED) or job.state == JobState.FAILED:
        rows = JobFailure.objects.using(job._state.db or jobs_database())
        failures = list(rows.filter(job_id=job.pk, generation=job.generation))
    task = _restored_task(find_task(call.path), call, job.queue)
    status, token = _status(job)
    run: tuple[str, datetime | None] = ("", None)
    if status == JobStatus.PROCESSING:
        run = _run_of(job, token)
    elif status == JobStatus.COMPLETED:
        run = (job.worker, None)
    return _result(job, failures, status, task=task, alias=alias, call=call, run=run, is_new=is_new)


def _result(
    job: Job,
    failures: Sequence[JobFailure],
    status: JobStatus,
    *,
    task: Any,
    alias: str,
    call: TaskCall,
    run: tuple[str, datetime | None] = ("", None),
    is_new: bool = True,
) -> KJOTaskResult:
    worker, since = run
    ended = max((failure.failed_at for failure in failures), default=None)
    if since is not None and ended is not None and since <= ended:
        since = None  # the heartbeat is from before this attempt
    begun = [failure.started_at for failure in failures if failure.started_at]
    last = max([*begun, *(each for each in (job.started_at, since) if each)], default=None)
    result = KJOTaskResult(
        task=task,
        id=str(job.pk),
        status=TaskResultStatus[states.to_django_tasks(status)],
        enqueued_at=job.created_at,
        started_at=min(begun, default=last),
        finished_at=job.finished_at,
        last_attempted_at=last,
        args=call.args,
        kwargs=call.kwargs,
        backend=alias,
        errors=[
            TaskError(
                exception_class_path=_class_path(failure.error_type),
                traceback=failure.traceback or f"{failure.error}\n",
            )
            for failure in failures
        ],
        worker_ids=_workers(job, failures, status, worker),
        job_status=str(status),
        is_new=is_new,
    )
    if status == JobStatus.COMPLETED:
        object.__setattr__(result, "_return_value", result_of(job))
    return result


def _status(job: Job) -> tuple[JobStatus, str]:
    """Return a job's status, and the token of the worker that runs it.

    A running atomic task shows by the lease its worker holds in coordination.
    """
    now = timezone.now()
    token = leased_jobs([job]).get(job.pk, "") if job.available_at <= now else ""
    return job.status_with(leased=bool(token), now=now), token or job.lease_token


def _run_of(job: Job, token: str) -> tuple[str, datetime | None]:
    """Return the name of the worker that runs a job, and since when it does, as far as is known.

    No row of a running atomic task says so; its worker did at its last heartbeat.
    """
    key = key_of(token)
    rows = Worker.objects.using(job._state.db or jobs_database())
    worker = rows.filter(pk=key).first() if key is not None else None
    if worker is None:
        return "", None
    running = [each for assignment in assignments(worker.partitions) for each in assignment.running]
    since = (each.started_at for each in running if each.id == str(job.pk))
    return worker.name, next(since, None)


def _workers(job: Job, failures: Sequence[JobFailure], status: JobStatus, worker: str) -> list[str]:
    """Return one entry for each attempt that has begun; empty where the worker is unknown."""
    count = job.attempts + (status == JobStatus.PROCESSING)
    workers = [""] * count
    for failure in failures:
        if 0 < failure.attempt <= count:
            workers[failure.attempt - 1] = failure.worker
    if count and not workers[-1]:
        workers[-1] = worker
    return workers


def _class_path(path: str) -> str:
    return path if "." in path else f"builtins.{path}"


def _row_after(attempt: Attempt) -> Job:
    """Return the job's row as the attempt left it; a completed one without a query."""
    row, message = attempt.row, attempt.delivery.message
    assert row is not None
    if attempt.ending is not Ending.COMPLETED:
        return Job.objects.using(jobs_database()).get(pk=row.id)
    after = {
        **row.columns(),
        "state": JobState.COMPLETED,
        "attempts": attempt.number,
        "started_at": attempt.started_at,
        "finished_at": timezone.now(),
        "result": attempt.result,
        "worker": attempt.worker,
    }
    return Job(
        **after,
        queue=attempt.delivery.queue.name,
        handler=message.type,
        payload=message.payload,
        content_type=message.content_type,
    )
