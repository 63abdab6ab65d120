"""What ``check --deploy`` asks the servers."""

from __future__ import annotations

from collections.abc import Iterator

from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from kjo_django import backends
from kjo_django.conf import get_settings
from kjo_django.exceptions import KjoError
from kjo_django.operations import topics

PROBE_TIMEOUT = 5.0


def reach_transports() -> Iterator[checks.CheckMessage]:
    """Yield what is wrong with transports and their topics."""
    for alias in get_settings().transports:
        try:
            backends.get_transport(alias).probe(PROBE_TIMEOUT)
        except (KjoError, ImproperlyConfigured) as error:
            yield checks.Warning(f"Transport {alias!r}: {error}", id="kjo.W008")
            return
    try:
        reports = topics.plan()
    except KjoError as error:
        yield checks.Warning(f"Topics cannot be asked for: {error}", id="kjo.W010")
        return
    for report in reports:
        if not report.is_ok:
            yield checks.Warning(
                f"Topic {report.name!r} {', '.join(report.differences)}.",
                hint="Run manage.py kjo_topics plan.",
                id="kjo.W010",
            )


def reach_coordination() -> Iterator[checks.CheckMessage]:
    """Yield what is wrong with coordination."""
    try:
        backends.get_coordination().probe(PROBE_TIMEOUT)
    except (KjoError, ImproperlyConfigured) as error:
        yield checks.Warning(f"Coordination: {error}", id="kjo.W009")
