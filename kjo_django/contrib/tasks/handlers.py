"""The one handler that runs tasks: it imports the task its message names and calls it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from django.core.exceptions import SuspiciousOperation
from django.utils.module_loading import import_string

from kjo_django import registry
from kjo_django.contrib.tasks.compat import is_task, normalize_json
from kjo_django.exceptions import MessageError, PermanentError
from kjo_django.messages import headers as names

NAME = "django.tasks"
MAX_KIND_LENGTH = 100

# Headers of a task's message: what must be known before its payload is read.
TASK = "kjo-task"
PLAIN = "kjo-task-plain"
ASYNC = "kjo-task-async"
TIMEOUT = "kjo-task-timeout"


class NotATask(SuspiciousOperation, PermanentError):
    """A message names something that is no task; nothing of it is called."""


@dataclass(frozen=True, slots=True)
class TaskCall:
    """What a task's payload holds."""

    path: str
    """Where the task is imported from."""
    backend: str
    """The alias it was enqueued on."""
    args: list[Any]
    kwargs: dict[str, Any]
    using: dict[str, Any]
    """The options it was enqueued with."""

    @classmethod
    def read(cls, value: Any) -> TaskCall:
        """Read a decoded payload.

        :raises MessageError: it is none.
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
        raise MessageError("invalid", "The payload is no call of a task")


def find_task(path: str) -> Any:
    """Import a task.

    :raises NotATask: there is something else.
    :raises ImportError: there is nothing; a worker with newer code may find it.
    """
    if "." not in path:
        raise NotATask(f"{path!r:.200} is no path of a task")
    found = import_string(path)
    if not is_task(found):
        raise NotATask(f"{path!r:.200} is no task but {type(found).__name__}")
    return found


class TaskHandler(registry.Handler):
    """Runs tasks, each as its message's headers say."""

    observes = True

    def arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the call."""
        return (TaskCall.read(value),), {}

    def check_arguments(self, payload: dict[str, Any]) -> str | None:
        """Whatever its task takes will do."""
        return None

    def fitted(self, headers: Mapping[str, bytes]) -> registry.Handler:
        """Return the variant for one task: atomic or not, asynchronous or not, its time limit."""
        if TASK not in headers:
            return self
        return _variant(
            names.text(headers, TASK),
            PLAIN in headers,
            ASYNC in headers,
            names.text(headers, TIMEOUT),
        )

    def on_settled(self, outcome: Any) -> None:
        """Send ``task_finished``."""
        from kjo_django.contrib.tasks import results

        results.tell_finished(outcome)


def run(context: Any, call: TaskCall) -> Any:
    """Call a task's function; an asynchronous one on an event loop of its own."""
    from kjo_django.contrib.tasks import results

    task = find_task(call.path)
    given = results.begin(task, call, context)
    results.tell_started(given.task_result)
    first = (given,) if task.takes_context else ()
    return normalize_json(task.call(*first, *call.args, **call.kwargs))


async def run_async(context: Any, call: TaskCall) -> Any:
    """Await a task's function; one that is no longer asynchronous runs in a thread."""
    from kjo_django.contrib.tasks import results

    task = find_task(call.path)
    given = results.begin(task, call, context)
    await results.atell_started(given.task_result)
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


def register_handler(queue: str) -> None:
    """Make the handler known; again makes no difference.

    :param queue: one that its tasks go to.
    """
    if registry.find(NAME) is None:
        registry.register(TaskHandler(run, replace(_OPTIONS, queue=queue)))
