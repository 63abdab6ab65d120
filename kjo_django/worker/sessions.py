"""Database sessions of workers that are no more.

A worker that is frozen inside a job's transaction (SIGSTOP, a swapping or cut-off machine) keeps
that transaction open: the marker it inserted makes everybody who runs the job wait, without end.
So on PostgreSQL the sessions that run handlers bear their worker's token as application name, and
each worker ends those of workers that are proven dead: no heartbeat in the database and no sign of
life in coordination.

Behind a pooler a session is handed on with its name to clients that have none, and they would be
ended in the worker's place. So there the name is only put before one of the project's own, which
tells that its clients have names.

Elsewhere nothing can be done from outside: MySQL gives up waiting by itself and the job is tried
again, SQLite belongs to whoever holds its file.
"""

from __future__ import annotations

import functools
import re
import threading
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import DatabaseError
from django.db.backends.signals import connection_created

from kjo_django.coordination.base import alive_name
from kjo_django.exceptions import CoordinationError
from kjo_django.logs import get_logger
from kjo_django.models import Worker
from kjo_django.runtime import Runtime
from kjo_django.store import store_for

logger = get_logger("kjo_django")

PREFIX = "kjo-"
_thread = threading.local()


def mark_sessions(token: str) -> None:
    """Name the database sessions this thread opens from now on after its worker."""
    _thread.token = token


def _mark(sender: Any, connection: Any, **kwargs: Any) -> None:
    token = getattr(_thread, "token", None)
    if token is None:
        return
    may_be_ended = store_for(connection.alias).name_session(connection, PREFIX + token)
    if not may_be_ended:
        _warn_of_namelessness(connection.alias)


@functools.cache
def _warn_of_namelessness(alias: str) -> None:
    logger.warning(
        "The database %r is reached through a pooler, without a name: should this worker freeze "
        "within a job, nobody can end its transaction. Set DATABASES[%r]['OPTIONS']"
        "['application_name'], in every program that uses the pooler.",
        alias,
        alias,
    )


connection_created.connect(_mark, dispatch_uid="kjo_django.worker.sessions")


def end_sessions_of_dead_workers(runtime: Runtime, alive_ttl: timedelta) -> int:
    """End the open transactions of vanished workers; return how many.

    :param alive_ttl: how long a worker counts as alive without a sign of life.
    """
    store = runtime.store
    # Only what has stood still for so long; a living worker's long job is left alone below.
    names = store.idle_transactions(PREFIX, len(PREFIX) + 32, alive_ttl)
    sessions = {pid: name[len(PREFIX) :] for pid, name in names.items()}
    dead = _dead_workers(runtime, set(sessions.values()), alive_ttl) if sessions else set()
    doomed = [pid for pid, token in sessions.items() if token in dead]
    if doomed:
        logger.warning(
            "Ending %d database sessions of workers that vanished: %s",
            len(doomed),
            ", ".join(sorted(dead)),
        )
        try:
            store.end_sessions(doomed)
        except DatabaseError as error:
            logger.error("They cannot be ended: %s", error)
    return len(doomed)


def _dead_workers(runtime: Runtime, tokens: set[str], alive_ttl: timedelta) -> set[str]:
    """Return those of the workers that neither the database nor coordination has heard of lately.

    Both, since a Redis that was away for a while forgets workers that live. A token without a row
    is nobody's we know: projects may share a database, each with a schema of its own.
    """
    ids = [UUID(token) for token in tokens if _is_token(token)]
    silent_since = runtime.clock.now() - alive_ttl
    rows = Worker.objects.using(runtime.database).filter(pk__in=ids, heartbeat_at__lt=silent_since)
    suspects = {id.hex for id in rows.values_list("pk", flat=True)}
    if not suspects:
        return set()
    names = {alive_name(token): token for token in suspects}
    try:
        return suspects - {names[name] for name in runtime.coordination.holders(list(names))}
    except CoordinationError:
        return suspects


_is_token = re.compile("[0-9a-f]{32}").fullmatch
