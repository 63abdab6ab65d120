"""Helpers for tests of projects, and conformance suites for authors of backends.

``assert_enqueued``, ``refute_enqueued``, ``all_enqueued``, ``drain``, ``immediate``, ``run_job``,
``perform`` and ``isolated`` are for a project's tests; ``conformance`` and
``coordination_conformance`` for backends. With pytest:
``pytest_plugins = ["kjo_django.testing.pytest_plugin"]``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kjo_django.registry import isolated
    from kjo_django.testing.assertions import all_enqueued, assert_enqueued, refute_enqueued
    from kjo_django.testing.draining import (
        Drained,
        DrainedRun,
        drain,
        immediate,
        perform,
        run_job,
    )

_PUBLIC = {
    "Drained": "kjo_django.testing.draining",
    "DrainedRun": "kjo_django.testing.draining",
    "all_enqueued": "kjo_django.testing.assertions",
    "assert_enqueued": "kjo_django.testing.assertions",
    "drain": "kjo_django.testing.draining",
    "immediate": "kjo_django.testing.draining",
    "isolated": "kjo_django.registry",
    "perform": "kjo_django.testing.draining",
    "refute_enqueued": "kjo_django.testing.assertions",
    "run_job": "kjo_django.testing.draining",
}

__all__ = [
    "Drained",
    "DrainedRun",
    "all_enqueued",
    "assert_enqueued",
    "drain",
    "immediate",
    "isolated",
    "perform",
    "refute_enqueued",
    "run_job",
]


def __getattr__(name: str) -> Any:
    # Lazy: pytest imports the plugin, and with it this package, before the apps are ready.
    try:
        return getattr(import_module(_PUBLIC[name]), name)
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
