"""What ``check --deploy`` asks the servers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from kjo_django.exceptions import CoordinationError
from kjo_django.operations.monitoring import health
from kjo_django.probing import answer_within
from kjo_django.runtime import Runtime, current_runtime

PROBE_TIMEOUT = 5.0
"""Seconds for each server."""
IDS = {
    health.TRANSPORTS: "kjo.W008",
    health.COORDINATION: "kjo.W009",
    health.TOPICS: "kjo.W010",
}


def deploy_checks() -> Iterator[checks.CheckMessage]:
    """Yield what is wrong with the transports, their topics, coordination and the database."""
    found = health.health(PROBE_TIMEOUT * len(IDS), only={health.SETTINGS, *IDS})
    for check in found:
        if check.ok is False and check.name in IDS:
            text = f"{check.name.capitalize()}: {check.detail}"
            yield checks.Warning(text, hint=check.fix, id=IDS[check.name])
    yield from _pooler(current_runtime())


def _pooler(runtime: Runtime) -> Iterator[checks.CheckMessage]:
    """Yield the settings that a pooler in transaction mode before the jobs' database needs."""
    alias = runtime.database
    if not runtime.store.has_notify:
        return
    try:
        is_lent = answer_within(PROBE_TIMEOUT, partial(_lends_sessions, alias))
    except Exception:
        return  # The checks of the transports and of coordination report what is out of reach.
    if not is_lent:
        return
    settings = connections[alias].settings_dict
    missing = {}
    if not settings["OPTIONS"].get("application_name"):
        key = "['OPTIONS']['application_name']"
        missing[key] = "nobody can end the transactions of a frozen worker"
    if not settings.get("DISABLE_SERVER_SIDE_CURSORS"):
        key = "['DISABLE_SERVER_SIDE_CURSORS'] = True"
        missing[key] = "iterator() fails outside transactions"
    for key, consequence in missing.items():
        yield checks.Warning(
            f"The database {alias!r} is reached through a pooler in transaction mode: "
            f"{consequence}.",
            hint=f"Set DATABASES[{alias!r}]{key}. docs/how-to/production.md tells why.",
            id="kjo.W013",
        )
    from kjo_django.coordination.database.postgres_listener import SessionLentError

    try:
        runtime.coordination.listen(["kjo-check"]).close()
    except SessionLentError as error:
        yield checks.Warning(f"Coordination: {error}.", id="kjo.W013")
    except (CoordinationError, ImproperlyConfigured):
        pass  # The check of coordination has reported it.


def _lends_sessions(alias: str) -> bool:
    from kjo_django.store.direct_connections import lends_sessions, plain_connection

    with plain_connection(alias) as connection:
        return lends_sessions(connection, partial(plain_connection, alias))
