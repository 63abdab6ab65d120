"""Spans of OpenTelemetry, from the enqueue to the handler; needs the extra ``tracing``.

INSTALLED_APPS = [..., "kjo_django.contrib.opentelemetry"]

or, where the project sets up its telemetry, ``instrument()``. The SDK and its exporters are the
project's to bring. Nothing of OpenTelemetry is imported before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured

from kjo_django import signals, tracing

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

__all__ = ["instrument", "uninstrument"]

_FLUSH = "kjo_django.contrib.opentelemetry"


def instrument(
    tracer_provider: TracerProvider | None = None, *, record_exceptions: bool = True
) -> None:
    """Trace from now on, in this process.

    :param tracer_provider: the global one if not given; it may be set up later.
    :param record_exceptions: whether a failed attempt's span has the exception's message and
        traceback, which come from the handler; False keeps its type only.
    :raises ImproperlyConfigured: ``opentelemetry-api`` is not installed.
    """
    try:
        from kjo_django.contrib.opentelemetry.tracer import OpenTelemetryTracer
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "opentelemetry":
            raise
        raise ImproperlyConfigured(
            "kjo_django.contrib.opentelemetry needs opentelemetry-api: "
            "pip install 'kjo-django[tracing]'"
        ) from error
    tracer = OpenTelemetryTracer(tracer_provider, record_exceptions=record_exceptions)
    tracing.install(tracer)
    signals.worker_stopped.disconnect(dispatch_uid=_FLUSH)
    signals.worker_stopped.connect(tracer.flush, weak=False, dispatch_uid=_FLUSH)


def uninstrument() -> None:
    """Stop tracing. Runs that have begun end without a span."""
    tracing.install(None)
    signals.worker_stopped.disconnect(dispatch_uid=_FLUSH)
