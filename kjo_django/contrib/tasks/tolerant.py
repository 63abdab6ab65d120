"""Django's backends for tests and development, for tasks with options of ``KJOTask``.

The originals refuse every option but their own.
"""

from __future__ import annotations

from kjo_django.contrib.tasks import compat
from kjo_django.contrib.tasks.definition import KJOTask


class ImmediateBackend(compat.ImmediateBackend):
    """Runs a task where it is enqueued; its options are accepted and change nothing."""

    task_class = KJOTask


class DummyBackend(compat.DummyBackend):
    """Keeps results and runs nothing."""

    task_class = KJOTask
