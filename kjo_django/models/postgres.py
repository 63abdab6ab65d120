"""Short cuts for PostgreSQL on the hot path; everything works without them, slower."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_TIMESTAMPTZ = 1184


def array_text(values: Iterable[object]) -> str:
    """Write an array of ids, numbers or instants: what needs no escapes, so one text in one go.

    psycopg looks at the elements of a list one by one, in Python.
    """
    inside = ",".join(["NULL" if value is None else f'"{value}"' for value in values])
    return f"{{{inside}}}"


def is_psycopg3() -> bool:
    """Return whether Django talks through psycopg 3."""
    from django.db.backends.postgresql.psycopg_any import is_psycopg3 as answer

    return bool(answer)


def read_times_natively(cursor: Any) -> None:
    """Let this cursor read instants by psycopg's own loader, in C. Django's is in Python, and only
    differs in the class of the time zone: both give aware datetimes."""
    if not is_psycopg3():
        return
    import psycopg

    loader = psycopg.adapters.get_loader(_TIMESTAMPTZ, psycopg.pq.Format.TEXT)
    if loader is not None:
        cursor.cursor.adapters.register_loader(_TIMESTAMPTZ, loader)
