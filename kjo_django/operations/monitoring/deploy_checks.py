"""What ``check --deploy`` asks the servers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from kjo_django import backends
from kjo_django.conf import get_settings
from kjo_django.exceptions import CoordinationError, KjoError
from kjo_django.operations.maintenance import topics
from kjo_django.probing import answer_within
from kjo_django.store import store_for
from kjo_django.store.transactions import jobs_database

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


def meet_poolers() -> Iterator[checks.CheckMessage]:
    """Yield what a pooler in transaction mode before the jobs' database asks for."""
    alias = jobs_database()
    if not store_for(alias).has_notify:
        return
    try:
        is_lent = answer_within(PROBE_TIMEOUT, partial(_lends_sessions, alias))
    except Exception:
        return  # That it cannot be reached is told above.
    if not is_lent:
        return
    settings = connections[alias].settings_dict
    asked = []
    if not settings["OPTIONS"].get("application_name"):
        asked.append(
            (
                "nobody can end the transactions of a frozen worker",
                "['OPTIONS']['application_name']",
            )
        )
    if not settings.get("DISABLE_SERVER_SIDE_CURSORS"):
        asked.append(
            ("iterator() fails outside transactions", "['DISABLE_SERVER_SIDE_CURSORS'] = True")
        )
    for consequence, key in asked:
        yield checks.Warning(
            f"The database {alias!r} is reached through a pooler in transaction mode: "
            f"{consequence}.",
            hint=f"Set DATABASES[{alias!r}]{key}. docs/how-to/production.md tells why.",
            id="kjo.W013",
        )
    from kjo_django.coordination.database.postgres_listener import SessionLentError

    try:
        backends.get_coordination().listen(["kjo-check"]).close()
    except SessionLentError as error:
        yield checks.Warning(f"Coordination: {error}.", id="kjo.W013")
    except (CoordinationError, ImproperlyConfigured):
        pass  # told above


def _lends_sessions(alias: str) -> bool:
    from kjo_django.store.direct_connections import lends_sessions, plain_connection

    with plain_connection(alias) as connection:
        return lends_sessions(connection, partial(plain_connection, alias))
