"""Imports of the installed framework: Django's own tasks, or the backport."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from django.tasks import (
        Task,
        TaskContext,
        TaskResult,
        TaskResultStatus,
        checks,
        task_backends,
    )
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.backends.dummy import DummyBackend
    from django.tasks.backends.immediate import ImmediateBackend
    from django.tasks.base import (
        DEFAULT_TASK_BACKEND_ALIAS,
        DEFAULT_TASK_PRIORITY,
        DEFAULT_TASK_QUEUE_NAME,
        TASK_REFRESH_ATTRS,
        TaskError,
    )
    from django.tasks.exceptions import InvalidTask, InvalidTaskBackend, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
else:
    try:
        from django.tasks import (
            Task,
            TaskContext,
            TaskResult,
            TaskResultStatus,
            checks,
            task_backends,
        )
        from django.tasks.backends.base import BaseTaskBackend
        from django.tasks.backends.dummy import DummyBackend
        from django.tasks.backends.immediate import ImmediateBackend
        from django.tasks.base import (
            DEFAULT_TASK_BACKEND_ALIAS,
            DEFAULT_TASK_PRIORITY,
            DEFAULT_TASK_QUEUE_NAME,
            TASK_REFRESH_ATTRS,
            TaskError,
        )
        from django.tasks.exceptions import (
            InvalidTask,
            InvalidTaskBackend,
            TaskResultDoesNotExist,
        )
        from django.tasks.signals import task_enqueued, task_finished, task_started
        from django.utils.json import normalize_json
    except ModuleNotFoundError as missing:
        if not (missing.name or "").startswith("django."):
            raise
        try:
            from django_tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
            from django_tasks import checks as checks
            from django_tasks.backends.base import BaseTaskBackend
            from django_tasks.backends.dummy import DummyBackend
            from django_tasks.backends.immediate import ImmediateBackend
            from django_tasks.base import (
                DEFAULT_TASK_BACKEND_ALIAS,
                DEFAULT_TASK_PRIORITY,
                DEFAULT_TASK_QUEUE_NAME,
                TASK_REFRESH_ATTRS,
                Task,
                TaskError,
            )
            from django_tasks.exceptions import InvalidTaskBackendError as InvalidTaskBackend
            from django_tasks.exceptions import InvalidTaskError as InvalidTask
            from django_tasks.exceptions import TaskResultDoesNotExist
            from django_tasks.signals import task_enqueued, task_finished, task_started
            from django_tasks.utils import normalize_json
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "kjo_django.contrib.tasks needs Django 6.0, or on Django 5.2 the backport: "
                "pip install django-tasks",
                name=error.name,
            ) from error

__all__ = [
    "DEFAULT_TASK_BACKEND_ALIAS",
    "DEFAULT_TASK_PRIORITY",
    "DEFAULT_TASK_QUEUE_NAME",
    "TASK_REFRESH_ATTRS",
    "BaseTaskBackend",
    "DummyBackend",
    "ImmediateBackend",
    "InvalidTask",
    "InvalidTaskBackend",
    "Task",
    "TaskContext",
    "TaskError",
    "TaskResult",
    "TaskResultDoesNotExist",
    "TaskResultStatus",
    "checks",
    "is_backport_unserved",
    "is_task",
    "normalize_json",
    "task_backends",
    "task_enqueued",
    "task_finished",
    "task_started",
]


def is_task(value: Any) -> bool:
    """Return whether this is a task of either framework: on Django 6 both may be in use."""
    if isinstance(value, Task):
        return True
    backport = sys.modules.get("django_tasks.base")
    return backport is not None and isinstance(value, backport.Task)


def is_backport_unserved() -> bool:
    """Return whether the backport is loaded although Django has tasks, which are served then."""
    backport = sys.modules.get("django_tasks.base")
    return backport is not None and backport.Task is not Task
