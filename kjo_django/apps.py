"""The Django application."""

from __future__ import annotations

from django.apps import AppConfig
from django.conf import settings
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
        from kjo_django.contrib.tasks import load_backends

        if any("mysql" in str(each.get("ENGINE")) for each in settings.DATABASES.values()):
            from kjo_django.store.mysql import search_in_any_case

            search_in_any_case()
        load_backends()
        autodiscover_modules("jobs", "consumers", "producers")
