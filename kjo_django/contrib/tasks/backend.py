"""The backend: a task is a job, and one handler runs all tasks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from django.apps import apps
from django.core import checks
from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured

from kjo_django import conf, registry
from kjo_django.contrib.tasks.compat import (
    DEFAULT_TASK_QUEUE_NAME,
    BaseTaskBackend,
    InvalidTask,
    TaskResultStatus,
    is_backport_unserved,
    normalize_json,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from kjo_django.contrib.tasks.definition import (
    ASYNC,
    CHECKS,
    MAX_KIND_LENGTH,
    NAME,
    PLAIN,
    TASK,
    TIMEOUT,
    KJOTask,
    KJOTaskResult,
    TaskCall,
    find_task,
)
from kjo_django.logs import contained
from kjo_django.messages import headers as names
from kjo_django.values import MAX_QUEUE_LENGTH, did_you_mean, queue_name, signature_of

P = ParamSpec("P")
R = TypeVar("R")

OPTIONS = ("atomic", "max_attempts", "result_ttl", "timeout")
"""The keys of ``OPTIONS``: defaults for tasks."""


class KJOBackend(BaseTaskBackend):
    """Stores tasks as jobs, in the caller's transaction; ``kjo_consume`` runs them.

    It is made while modules that declare tasks are imported, before models are loaded, once in each
    thread. So it opens no connection and keeps no state.
    """

    task_class = KJOTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True
    runs_on_kjo = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        queues = sorted(filter(_is_queue_name, self.queues))
        register_handler(queues[0] if queues else DEFAULT_TASK_QUEUE_NAME)
        for name in queues:
            if name not in conf.declared_queues():
                conf.declare_queue(name)

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> KJOTaskResult:
        """Store the task as a job, joining the caller's transaction.

        :raises InvalidTask: the task cannot be run here; with ``QUEUES`` empty, also a queue that
            nobody declared, which no worker would consume.
        :raises ImproperlyConfigured: ``OPTIONS`` are wrong, or ``INSTALLED_APPS`` lack
            ``kjo_django``.
        :raises TypeError: it does not take these arguments, or they are not JSON.
        :raises PayloadError: they are too large.
        """
        results = self._results()
        self.validate_task(task)
        if not self.queues:
            _known_queue(task.queue_name)
        args, kwargs = normalize_json(list(args)), normalize_json(dict(kwargs))
        first = (None,) if task.takes_context else ()
        try:
            signature_of(task.func).bind(*first, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{task.module_path}: {error}") from None
        result: KJOTaskResult = results.store_task(self, task, args, kwargs)
        if result.is_new:
            # The task is stored: that a receiver's error cannot be logged must not be its error.
            with contained("task_enqueued"):
                task_enqueued.send_robust(sender=type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> KJOTaskResult:
        """Return the result of a task that was enqueued on this backend.

        :raises TaskResultDoesNotExist: there is none, or its lifetime is over.
        :raises ImproperlyConfigured: ``INSTALLED_APPS`` lack ``kjo_django``.
        """
        found: KJOTaskResult = self._results().get_result(self, result_id)
        return found

    async def aenqueue(self, task: Any, args: Any, kwargs: Any) -> KJOTaskResult:
        """``enqueue`` from asynchronous code.

        :raises TransactionManagementError: the coroutine is run inside a transaction by
            ``asyncio.run``, which would not have the job.
        """
        return await self._awaited(self.enqueue)(task, args, kwargs)

    async def aget_result(self, result_id: str) -> KJOTaskResult:
        """``get_result`` from asynchronous code, which raises what ``aenqueue`` does, too."""
        return await self._awaited(self.get_result)(result_id)

    def default(self, task: Any, name: str) -> Any:
        """Return a task's option, or the default in ``OPTIONS``.

        :raises ImproperlyConfigured: ``OPTIONS`` are wrong.
        """
        value = getattr(task, name, None)
        if value is not None or name not in OPTIONS:
            return value
        for problem in self._problems():
            raise ImproperlyConfigured(problem.msg)
        return self.options.get(name)

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """Check the options, the queues and ``INSTALLED_APPS`` without a connection."""
        return [*self._app_problems(), *self._problems(), *self._queue_problems()]

    def _results(self) -> Any:
        # Without the app its models cannot be imported; Django's error does not name the setting.
        for problem in self._app_problems():
            raise ImproperlyConfigured(f"{problem.msg} {problem.hint}")
        from kjo_django.contrib.tasks import results

        return results

    def _awaited(self, function: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
        self._results()
        from kjo_django.enqueue.coroutines import from_coroutine

        return from_coroutine(function)

    def _app_problems(self) -> Iterator[CheckMessage]:
        if not apps.is_installed("kjo_django"):
            yield Error(
                f"TASKS[{self.alias!r}]['BACKEND'] is {type(self).__name__}, and INSTALLED_APPS "
                "lack 'kjo_django', which has its tables, and the command that runs tasks.",
                hint="Write it there: INSTALLED_APPS = [..., 'kjo_django'].",
                id="kjo.E023",
            )

    def _problems(self) -> Iterator[CheckMessage]:
        where = f"TASKS[{self.alias!r}]['OPTIONS']"
        for name, value in self.options.items():
            if name not in OPTIONS:
                hint = did_you_mean(str(name), OPTIONS, f"Known: {', '.join(OPTIONS)}.")
                yield Error(f"{where} has no key {name!r}.", hint=hint, id="kjo.E009")
            elif value is not None:
                try:
                    CHECKS[name](value)
                except (TypeError, ValueError) as error:
                    text = f"{where}[{name!r}] must be {error}, not {value!r:.80}."
                    yield Error(text, id="kjo.E009")

    def _queue_problems(self) -> Iterator[CheckMessage]:
        for name in sorted(self.queues, key=str):
            where = f"TASKS[{self.alias!r}]['QUEUES']"
            if not _is_queue_name(name):
                yield Error(
                    f"{where} has {name!r:.120}; the name of a queue has 1 to {MAX_QUEUE_LENGTH} "
                    "characters, without blanks and slashes.",
                    id="kjo.E010",
                )
            elif registry.route_of(name) is not registry.JOBS:
                yield Error(
                    f"{where} has {name!r}, whose topic carries no jobs but records of its own.",
                    hint="Give the tasks a queue that no template consumer or event handler has.",
                    id="kjo.E010",
                )


@checks.register("kjo")
def check_frameworks(**kwargs: Any) -> list[CheckMessage]:
    """Warn of the backport beside Django's own tasks: what waits for its signals waits in vain."""
    if not is_backport_unserved():
        return []
    return [
        checks.Warning(
            "Both django.tasks and django_tasks are in use, and KJOBackend serves the first. Tasks "
            "that are declared with the second run, but django_tasks.signals tell nothing of them, "
            "and no result or exception is an instance of the classes of django_tasks.",
            hint="Import signals, exceptions and types from django.tasks. Where django_tasks only "
            "declares tasks, as in a library, nothing is missed: SILENCED_SYSTEM_CHECKS = "
            "['kjo.W021'].",
            id="kjo.W021",
        )
    ]


def _is_queue_name(name: Any) -> bool:
    try:
        queue_name(name)
    except ValueError:
        return False
    return True


def _known_queue(name: str) -> None:
    known = registry.queue_names()
    if name not in known:
        hint = did_you_mean(name, known, "Declare it in KJO['QUEUES'].")
        raise InvalidTask(f"No worker consumes the queue {name!r}. {hint}")


# --- The one handler that runs tasks: it imports the task its message names and calls it ----------


class TaskHandler(registry.Handler):
    """Runs each task with the options in its message's headers."""

    observes = True

    def arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call."""
        return (TaskCall.read(value),), {}

    def check_arguments(self, payload: dict[str, Any]) -> str | None:
        """Accept any arguments."""
        return None

    def fitted(self, headers: Mapping[str, bytes]) -> registry.Handler:
        """Return the handler with a task's options: atomic or not, asynchronous or not, its time
        limit.
        """
        if TASK not in headers:
            return self
        return _variant(
            names.text(headers, TASK),
            PLAIN in headers,
            ASYNC in headers,
            names.text(headers, TIMEOUT),
        )

    def on_settled(self, attempt: Any) -> None:
        """Send ``task_finished``."""
        from kjo_django.contrib.tasks import results

        ended = results.ended(attempt)
        if ended is None:
            return
        sender = _sender_of(ended.backend)
        try:
            if ended.status == TaskResultStatus.FAILED:
                raise RuntimeError("no error") if attempt.error is None else attempt.error
        except BaseException:
            # While the error is handled: the framework's own receiver logs it with its traceback.
            task_finished.send_robust(sender=sender, task_result=ended)
        else:
            task_finished.send_robust(sender=sender, task_result=ended)


def run(context: Any, call: TaskCall) -> Any:
    """Call a task's function; an asynchronous one on an event loop of its own."""
    from kjo_django.contrib.tasks import results

    task = find_task(call.path)
    given = results.begin(task, call, context)
    result = given.task_result
    task_started.send_robust(sender=_sender_of(result.backend), task_result=result)
    first = (given,) if task.takes_context else ()
    return normalize_json(task.call(*first, *call.args, **call.kwargs))


async def run_async(context: Any, call: TaskCall) -> Any:
    """Await a task's function; one that is no longer asynchronous runs in a thread."""
    from kjo_django.contrib.tasks import results

    task = find_task(call.path)
    given = results.begin(task, call, context)
    result = given.task_result
    # Receivers could not ask the database on the event loop.
    await task_started.asend_robust(sender=_sender_of(result.backend), task_result=result)
    first = (given,) if task.takes_context else ()
    return normalize_json(await task.acall(*first, *call.args, **call.kwargs))


_OPTIONS = registry.HandlerOptions(name=NAME, takes_context=True)


@functools.lru_cache(maxsize=1024)
def _variant(path: str, is_plain: bool, is_async: bool, timeout: str) -> TaskHandler:
    # Named after the task: run times are learned, and statistics kept, for each by itself. A name
    # with NUL in it, and no statistics would be stored again.
    name = path if 0 < len(path) <= MAX_KIND_LENGTH and path.isprintable() else NAME
    options = replace(_OPTIONS, name=name, atomic=not is_plain, timeout=_seconds(timeout))
    return TaskHandler(run_async if is_async else run, options)


def _seconds(text: str) -> timedelta | None:
    try:
        seconds = float(text)
        return timedelta(seconds=seconds) if seconds > 0 and math.isfinite(seconds) else None
    except (ValueError, OverflowError):
        return None


def _sender_of(alias: str) -> type[Any]:
    """Return the sender of a task's signals: the class of its backend."""
    try:
        return type(task_backends[alias])
    except Exception:
        return KJOBackend  # the worker's settings know the alias no longer


def register_handler(queue: str) -> None:
    """Register the handler; idempotent.

    :param queue: one of its tasks' queues.
    """
    if registry.find(NAME) is None:
        registry.register(TaskHandler(run, replace(_OPTIONS, queue=queue)))
