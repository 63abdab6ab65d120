"""The Django app."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class KjoConfig(AppConfig):
    """Registers the system checks and finds the jobs of every installed app."""

    name = "kjo_django"
    verbose_name = _("Background jobs")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Import ``jobs``, ``consumers`` and ``producers`` of the installed apps."""
        from kjo_django import checks, registry  # noqa: F401 - registers by import
        from kjo_django.contrib.tasks.loading import load_backends
        from kjo_django.patterns.items.wiring import above

        above.ensure_topics = _ensure_topics
        above.make_worker = _make_worker
        above.status_of = _status_of
        load_backends()
        autodiscover_modules("jobs", "consumers", "producers")


# What template classes call upwards. Imported when called: a web process never runs a worker.


def _ensure_topics(queues: Sequence[str]) -> list[str]:
    from kjo_django.operations.maintenance import topics

    return topics.ensure_topics(queues)


def _make_worker(queues: Sequence[str], **options: Any) -> Any:
    from kjo_django.worker import Worker

    return Worker(queues, install_signal_handlers=True, **options)


def _status_of(worker: Any) -> dict[str, Any]:
    from kjo_django.worker.report import status_of

    return status_of(worker)
