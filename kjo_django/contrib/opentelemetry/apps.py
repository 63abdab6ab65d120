"""The app that switches on tracing when it is installed."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from kjo_django import tracing
from kjo_django.contrib.opentelemetry import instrument


class OpenTelemetryConfig(AppConfig):
    """Traces from the start of the process."""

    name = "kjo_django.contrib.opentelemetry"
    label = "kjo_opentelemetry"
    verbose_name = _("Tracing of background jobs")

    def ready(self) -> None:
        """Start tracing, unless ``instrument`` was called before."""
        if tracing.tracer is None:
            instrument()
