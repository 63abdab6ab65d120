"""Making the backends of ``TASKS`` known when the app starts, whether or not tasks are there."""

from __future__ import annotations

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string


def load_backends() -> None:
    """Create the backends of this package, so that workers know their handler and their queues.

    A worker need not import any task before its first message asks for one.
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
