"""Tasks with the options of jobs, and results with the job's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Any

from django.apps import apps
from django.core.exceptions import SuspiciousOperation
from django.utils import timezone
from django.utils.module_loading import import_string

from kjo_django.contrib.tasks import compat
from kjo_django.contrib.tasks.compat import (
    DEFAULT_TASK_BACKEND_ALIAS,
    DEFAULT_TASK_PRIORITY,
    DEFAULT_TASK_QUEUE_NAME,
    TASK_REFRESH_ATTRS,
    InvalidTask,
    Task,
    TaskContext,
    TaskResult,
    is_task,
    task_backends,
)
from kjo_django.exceptions import MessageError, PermanentError
from kjo_django.registry import Handler, HandlerOptions
from kjo_django.values import attempts, duration, lifetime, refuse_unknown


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


def _identity(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 255:
        raise ValueError("text of 1 to 255 characters")
    return value


def _key(value: Any) -> Any:
    return value if callable(value) else _identity(value)


def _end(value: Any) -> Any:
    if isinstance(value, datetime) and timezone.is_aware(value):
        return value
    try:
        return duration(value)
    except ValueError:
        wanted = "a positive timedelta or number of seconds, or an aware datetime"
        raise ValueError(wanted) from None


UNIQUE = ("unique_for", "unique_by", "debounce", "debounce_max", "on_conflict")
"""The options that say what an enqueue does about earlier ones."""


def _of_unique(name: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        # A task that is declared before models are loaded is checked when it is enqueued.
        if not apps.models_ready:
            return value
        from kjo_django.enqueue import unique

        return unique.CHECKS[name](value)

    return check


CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "max_attempts": attempts,
    "timeout": duration,
    "unique_id": _identity,
    "key": _key,
    "expires": _end,
    "result_ttl": lifetime,
    "atomic": _flag,
    **{name: _of_unique(name) for name in UNIQUE},
}
"""The type of each option of a task; the backend's ``OPTIONS`` have these types, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KJOTask(Task):  # type: ignore[type-arg]
    """A task with the options of a job; None leaves one to the backend's ``OPTIONS``, then to the
    queue."""

    max_attempts: int | None = None
    timeout: timedelta | float | None = None
    """Longest run of an attempt, timedelta or seconds."""
    unique_id: str | None = None
    """One job per queue and id. A second enqueue returns the existing result."""
    key: str | Callable[..., str] | None = None
    """Tasks of one key run one at a time and in order. A function is given the task's arguments."""
    expires: timedelta | float | datetime | None = None
    """The job is not started after this time; a timedelta or seconds count from the enqueue."""
    result_ttl: timedelta | None = None
    """How long its result and its errors are kept."""
    atomic: bool | None = None
    """False: run outside the transaction that records the outcome."""
    unique_for: timedelta | None = None
    """Of the enqueues with the same arguments, one in so long a time stores a job."""
    unique_by: Sequence[str] | None = None
    """The arguments that ``unique_for`` and ``debounce`` compare; all if not given."""
    debounce: timedelta | None = None
    """Due once no further enqueue with the same arguments has come for so long."""
    debounce_max: timedelta | None = None
    """A debounced task is due so long after the first enqueue at the latest."""
    on_conflict: str | None = None
    """What an enqueue does that meets a job of its id or window: ``keep`` it, ``replace`` it if it
    has not begun, or ``raise`` ``JobExistsError``."""

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            value = getattr(self, name)
            if value is not None:
                try:
                    check(value)
                except (TypeError, ValueError) as error:
                    raise InvalidTask(f"{name} must be {error}, not {value!r:.80}") from None
        if any(getattr(self, name) is not None for name in UNIQUE) and apps.models_ready:
            try:
                unique_definition(self)
            except ValueError as error:
                raise InvalidTask(str(error)) from None
        # Not super(): a dataclass with slots is another class than the one super() would know.
        Task.__post_init__(self)

    def using(self, **options: Any) -> KJOTask:
        """Return a copy with options for the next enqueues. Options that are None stay unchanged.

        :raises TypeError: there is no such option.
        """
        refuse_unknown(options, _USABLE, "using")
        given = {name: value for name, value in options.items() if value is not None}
        return replace(self, **given)


_USABLE = {"priority", "queue_name", "run_after", "backend", *CHECKS}


@dataclass(frozen=True, slots=True, kw_only=True)
class KJOTaskResult(TaskResult):  # type: ignore[type-arg,misc]
    """A result with the states that the framework's four states do not distinguish."""

    job_status: str = ""
    """pending, scheduled, queued, processing, failing, completed, failed or cancelled."""
    is_new: bool = field(default=True, compare=False)
    """Whether the enqueue stored a job. False if the unique id was taken."""

    def refresh(self) -> None:
        """Reload the attributes that may have changed."""
        self._take(self.task.get_backend().get_result(self.id))

    async def arefresh(self) -> None:
        """``refresh`` from asynchronous code."""
        self._take(await self.task.get_backend().aget_result(self.id))

    def _take(self, fresh: Any) -> None:
        for name in (*TASK_REFRESH_ATTRS, "job_status"):
            object.__setattr__(self, name, getattr(fresh, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class KJOTaskContext(TaskContext):  # type: ignore[type-arg,misc]
    """A task's context with the job's context."""

    job: Any
    """The ``JobContext``: idempotency key, abort flag, progress."""


def task(
    function: Callable[..., Any] | None = None,
    *,
    priority: int = DEFAULT_TASK_PRIORITY,
    queue_name: str = DEFAULT_TASK_QUEUE_NAME,
    backend: str = DEFAULT_TASK_BACKEND_ALIAS,
    takes_context: bool = False,
    **options: Any,
) -> Any:
    """Declare a task with the options of ``KJOTask``, on every version of the framework.

    Django 6.0's own decorator does not take them.
    """
    refuse_unknown(options, {*CHECKS, "run_after"}, "task")
    if "run_after" in options:
        raise TypeError("run_after is not an option of the decorator; use .using(run_after=…)")

    def declare(function: Callable[..., Any]) -> Any:
        return task_backends[backend].task_class(
            func=function,
            priority=priority,
            queue_name=queue_name,
            backend=backend,
            takes_context=takes_context,
            run_after=None,
            **options,
        )

    return declare if function is None else declare(function)


def changed_options(task: Any) -> dict[str, Any]:
    """Return a task's own options that are set and can be stored."""
    given = {name: getattr(task, name, None) for name in CHECKS}
    return {name: v for name, v in given.items() if v is not None and not callable(v)}


def own_options(task: Any) -> dict[str, Any]:
    """Return what a task says of the identity of its jobs, and when they are due."""
    unique_id, run_at = getattr(task, "unique_id", None), task.run_after
    return {"id": unique_id, "run_at": run_at, **{n: getattr(task, n, None) for n in UNIQUE}}


def unique_definition(task: Any, options: Any = None) -> Any:
    """Return a ``JobDefinition`` that says what an enqueue of a task does about earlier ones.

    :param options: of the enqueue; the task's own if not given.
    :raises ValueError: two options contradict each other, or one means nothing.
    """
    from kjo_django.enqueue.definition import EnqueueOptions, JobDefinition

    own = HandlerOptions(task.module_path, takes_context=task.takes_context)
    given = options or EnqueueOptions(**own_options(task))
    return JobDefinition(Handler(task.func, own), given)


def restored(task: Any, **changes: Any) -> Any:
    """Return a copy with the options of its enqueue, without validation: options that were valid
    then may not be now.
    """
    copy = object.__new__(type(task))
    for one in fields(task):
        object.__setattr__(copy, one.name, changes.get(one.name, getattr(task, one.name)))
    return copy


# --- The message of a task ------------------------------------------------------------------------

NAME = "django.tasks"
MAX_KIND_LENGTH = 100

# Headers of a task's message: what must be known before its payload is read.
TASK = "kjo-task"
PLAIN = "kjo-task-plain"
ASYNC = "kjo-task-async"
TIMEOUT = "kjo-task-timeout"


class NotATask(SuspiciousOperation, PermanentError):
    """A message names an object that is not a task. Nothing of it is called."""


@dataclass(frozen=True, slots=True)
class TaskCall:
    """The payload of a task."""

    path: str
    """The import path of the task."""
    backend: str
    """The alias it was enqueued on."""
    args: list[Any]
    kwargs: dict[str, Any]
    using: dict[str, Any]
    """The options it was enqueued with."""

    @classmethod
    def read(cls, value: Any) -> TaskCall:
        """Return the call in a decoded payload.

        :raises MessageError: it is not a task's.
        """
        if isinstance(value, dict):
            call = cls(
                path=value.get("task", ""),
                backend=value.get("backend", ""),
                args=value.get("args", []),
                kwargs=value.get("kwargs", {}),
                using=value.get("using", {}),
            )
            texts = isinstance(call.path, str) and isinstance(call.backend, str)
            dicts = isinstance(call.kwargs, dict) and isinstance(call.using, dict)
            if texts and call.path and dicts and isinstance(call.args, list):
                return call
        raise MessageError("invalid", "The payload is not a call of a task")


def find_task(path: str) -> Any:
    """Import a task.

    :raises NotATask: the path is that of another object.
    :raises ImportError: there is nothing; a worker with newer code may find it.
    """
    if "." not in path:
        raise NotATask(f"{path!r:.200} is not the path of a task")
    found = import_string(path)
    if not is_task(found):
        raise NotATask(f"{path!r:.200} is no task but {type(found).__name__}")
    return found


# --- Django's backends for tests and development, which refuse every option but their own ---------


class ImmediateBackend(compat.ImmediateBackend):
    """Runs a task where it is enqueued; its options are accepted and change nothing."""

    task_class = KJOTask


class DummyBackend(compat.DummyBackend):
    """Keeps results and runs nothing."""

    task_class = KJOTask
