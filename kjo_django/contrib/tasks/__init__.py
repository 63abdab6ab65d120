"""A backend for Django Tasks: ``django.tasks`` of Django 6, or the ``django-tasks`` backport.

TASKS = {"default": {"BACKEND": "kjo_django.contrib.tasks.KJOBackend"}}

Each name is loaded when it is first used: the app looks here on Djangos without tasks too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

if TYPE_CHECKING:
    from kjo_django.contrib.tasks.backend import KJOBackend
    from kjo_django.contrib.tasks.definition import (
        DummyBackend,
        ImmediateBackend,
        KJOTask,
        KJOTaskContext,
        KJOTaskResult,
        task,
    )

_PUBLIC = {
    "DummyBackend": "definition",
    "ImmediateBackend": "definition",
    "KJOBackend": "backend",
    "KJOTask": "definition",
    "KJOTaskContext": "definition",
    "KJOTaskResult": "definition",
    "task": "definition",
}

__all__ = [
    "DummyBackend",
    "ImmediateBackend",
    "KJOBackend",
    "KJOTask",
    "KJOTaskContext",
    "KJOTaskResult",
    "task",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def load_backends() -> None:
    """Create the backends of this package, so that workers know their handler and their queues.

    A worker imports a task when the first message names it.
    """
    declared = getattr(settings, "TASKS", None)
    for alias, parameters in declared.items() if isinstance(declared, dict) else ():
        path = str(parameters.get("BACKEND", ""))
        try:
            backend = import_string(path)
        except ImportError as error:
            if path.startswith("kjo_django."):
                raise ImproperlyConfigured(f"TASKS[{alias!r}]: {error}") from error
            continue  # somebody else's; the framework's own check says what is wrong with it
        if getattr(backend, "runs_on_kjo", False):
            from kjo_django.contrib.tasks.compat import task_backends

            task_backends[alias]
