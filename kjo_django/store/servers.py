"""Which server of a database a connection leads to, and whether that server takes writes.

Where a database has a standby, another server may become the primary at any time. The one that was
may stay up, keep its sessions and refuse to write: who only reads there meets no error, and sees
old rows for ever.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from django.db import DatabaseError, Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from kjo_django.logs import get_logger

logger = get_logger("kjo_django")

_REPORTED = ("default_transaction_read_only", "in_hot_standby")
"""What PostgreSQL, since 14, reports to its clients with the next answer when it changes."""
_SERVER = """
SELECT COALESCE(host(inet_server_addr()), 'local'), current_setting('port')
"""
_servers: dict[str, str] = {}
"""The server that this process met last, by alias; empty where it has met none."""
_noting = threading.Lock()


# --- Whether it takes writes ----------------------------------------------------------------------


def is_usable(connection: BaseDatabaseWrapper) -> bool:
    """Return whether an open connection, outside of a transaction, answers and takes writes."""
    if not connection.is_usable():
        return False
    if connection.vendor != "postgresql":
        return True
    raw: Any = connection.connection
    try:
        with connection.wrap_database_errors, raw.cursor() as cursor:
            cursor.execute("SHOW transaction_read_only")
            return bool(cursor.fetchone()[0] == "off")
    except Error:
        return False


def drop(connection: BaseDatabaseWrapper) -> None:
    """Close a connection that is not usable, so that a pool of Django's does not lend it again."""
    if connection.vendor == "postgresql":
        raw: Any = connection.connection
        raw.close()
    connection.close()


def mend_connection(alias: str) -> None:
    """After an error: drop this thread's connection if it is not usable, so that the next query
    connects anew.

    Inside a caller's transaction nothing is touched, its ``atomic`` block cleans up.
    """
    connection = connections[alias]
    if connection.in_atomic_block:
        return
    try:
        # Of a closed one Django's MySQL backend cannot tell.
        if connection.connection is not None and not is_usable(connection):
            drop(connection)
        connection.close_if_unusable_or_obsolete()
    except DatabaseError:  # closing a broken connection may itself complain
        connection.connection = None


def reports_read_only(raw: Any) -> bool:
    """Return whether the server has reported with an earlier answer that it takes no writes; asks
    nothing. A pooler may repeat what another server has reported.

    :param raw: the driver's connection.
    """
    status = getattr(getattr(raw, "info", None), "parameter_status", None)
    return status is not None and not raw.closed and any(status(name) == "on" for name in _REPORTED)


def leave_retired(alias: str) -> None:
    """Drop this thread's connection to a server that refuses to write, outside of a transaction.

    For those who read again and again and seldom write. While the server takes writes, it is not
    asked.
    """
    connection = connections[alias]
    if (
        reports_read_only(connection.connection)
        and not connection.in_atomic_block
        and not is_usable(connection)
    ):
        with suppress(Error):
            drop(connection)


# --- Which one it is ------------------------------------------------------------------------------


def watch_server(alias: str) -> None:
    """From now on, log when connections of this process lead to another server than before."""
    _servers.setdefault(alias, "")
    connection_created.connect(_note_server, dispatch_uid="kjo_django.store.servers")
    if (connection := connections[alias]).connection is not None:
        _note_server(None, connection)


def _note_server(sender: Any, connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    alias, raw = connection.alias, connection.connection
    if alias not in _servers or connection.vendor != "postgresql":
        return
    with raw.cursor() as cursor:
        cursor.execute(_SERVER)
        server = ":".join(cursor.fetchone())
    with _noting:
        before, _servers[alias] = _servers[alias], server
    if before not in ("", server):
        logger.warning("Database %r is another server now: %s, before %s", alias, server, before)
