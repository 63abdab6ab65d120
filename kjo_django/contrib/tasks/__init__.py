"""A backend for Django Tasks: ``django.tasks`` of Django 6, or the ``django-tasks`` backport.

TASKS = {"default": {"BACKEND": "kjo_django.contrib.tasks.KJOBackend"}}

Each name is loaded when it is first used: the app looks here on Djangos without tasks too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kjo_django.contrib.tasks.backend import KJOBackend
    from kjo_django.contrib.tasks.definition import KJOTask, KJOTaskContext, KJOTaskResult, task
    from kjo_django.contrib.tasks.tolerant import DummyBackend, ImmediateBackend

_PUBLIC = {
    "DummyBackend": "tolerant",
    "ImmediateBackend": "tolerant",
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
