"""What handlers change in a database session: settings, a role, temporary tables, locks.

A lane's session serves one job after the other, and the transaction of a group several. So what one
job changes there would be there for the next: another's tenant, role, search path or time zone.
Statements that do so are noticed by their text, as they pass Django's cursors. A group ends with a
handler that executes one, and a session in which something is changed beyond its transaction is
closed, so that the next job finds one like new.

Not noticed is what a function or procedure of the database changes, and what is done with the
driver's own connection.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

COMMENTS = (
    r"(?:\s|--[^\n]*(?:\n|$)|#[^\n]*(?:\n|$)|/\*(?!M?!)[^*]*\*+(?:[^/*][^*]*\*+)*/)*"
    r"(?:/\*M?!\d*\s*)?"
)
"""What may stand before a statement; MariaDB and MySQL execute what stands behind ``/*!``."""

changed: WeakSet[BaseDatabaseWrapper] = WeakSet()
"""Connections whose sessions are to be closed before they serve another job: something is changed
in them beyond the transaction."""


def finder(words: str, functions: str = "") -> Callable[[str], object]:
    """Return what finds statements by their first words, also amid others, and by functions.

    :param functions: a pattern whose alternatives each have one of ``_PARTS``.
    """
    first = re.compile(rf"{COMMENTS}(?:{words})", re.IGNORECASE).match
    later = re.compile(rf";{COMMENTS}(?:{words})", re.IGNORECASE).search
    inner = re.compile(functions or "(?!)", re.IGNORECASE).search

    def find(sql: str) -> object:
        if first(sql) or (";" in sql and later(sql)):
            return True
        lowered = sql.lower() if functions else ""
        return any(part in lowered for part in _PARTS) and inner(sql)

    return find


_PARTS = ("set_config", "advisory_lock", "into temp", "get_lock", ":=", "into @")
"""Looked for first: that is quicker by far than a pattern."""
_TEMPORARY = (
    r"create\s+(?:or\s+replace\s+)?(?:(?:local|global)\s+)?temp(?:orary)?\b"
    r"|create\s+(?:unlogged\s+)?table\s+(?:if\s+not\s+exists\s+)?pg_temp\b"
)
_POSTGRES = r"reset\b|discard\b|listen\b|unlisten\b|load\b|deallocate\b|prepare\s+(?!transaction\b)"
_FUNCTIONS = r"\bpg_(?:try_)?advisory_lock|\binto\s+temp(?:orary)?\b"
_MYSQL = finder(
    r"set\s+(?!statement\b)|use\b|lock\b|flush\b|prepare\b|handler\b"
    r"|create\s+(?:or\s+replace\s+)?temporary\b",
    r"\bget_lock\s*\(|:=|\binto\s+@",
)
_SQLITE = finder(
    rf"attach\b|detach\b|{_TEMPORARY}|pragma\s+[\w.]+\s*(?:=|\(\s*(?:-?\d|on|off|true|false))"
)
_CHANGES: dict[str, tuple[Callable[[str], object], Callable[[str], object]]] = {
    "postgresql": (
        finder(rf"set\b|{_POSTGRES}|{_TEMPORARY}", rf"\bset_config\s*\(|{_FUNCTIONS}"),
        finder(
            rf"set\s+(?!(?:local|constraints|transaction)\b)|{_POSTGRES}"
            rf"|(?:{_TEMPORARY})(?![^;]*\bon\s+commit\s+drop\b)",
            rf"\bset_config\s*\((?![^()]*,\s*true\s*\))|{_FUNCTIONS}",
        ),
    ),
    "mysql": (_MYSQL, _MYSQL),
    "sqlite": (_SQLITE, _SQLITE),
}
"""By vendor: what finds statements that change something, and those of them whose change outlasts
the transaction."""


def note_changes(connection: BaseDatabaseWrapper, sql: str) -> bool:
    """Return whether a query changes something in the session; if that outlasts the transaction,
    the session is to be closed after it.

    :param sql: its text.
    """
    if connection.vendor not in _CHANGES:
        return False
    changes, outlasts = _CHANGES[connection.vendor]
    if not changes(sql):
        return False
    if outlasts(sql):
        changed.add(connection)
    return True


def note_new_sessions() -> None:
    """From now on, what is set while a connection is made is what each session begins with. To be
    called when all others who do that there are known."""
    connection_created.disconnect(dispatch_uid=__name__)  # to be the last receiver
    connection_created.connect(_note_new_session, dispatch_uid=__name__)


def _note_new_session(connection: BaseDatabaseWrapper, **others: object) -> None:
    changed.discard(connection)


def watch(connection: BaseDatabaseWrapper) -> None:
    """Notice from now on what is changed in the sessions of a connection."""
    if notice not in connection.execute_wrappers:
        connection.execute_wrappers.append(notice)


def notice(execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
    """Execute a query, as a wrapper of Django's, and note what it changes in the session."""
    note_changes(context["connection"], text_of_query(sql, context["cursor"].cursor))
    return execute(sql, params, many, context)


def text_of_query(sql: Any, cursor: Any) -> str:
    """Return the text of a query: Django passes on what the driver takes.

    :param cursor: the driver's own.
    """
    if isinstance(sql, str):
        return sql
    if isinstance(sql, bytes):
        return sql.decode("utf-8", "replace")
    return str(sql.as_string(cursor)) if hasattr(sql, "as_string") else str(sql)
