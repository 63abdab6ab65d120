"""Short cuts for PostgreSQL on the hot path; everything works without them, slower."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

_TIMESTAMPTZ = 1184


def array_text(values: Iterable[object]) -> str:
    """Write an array of ids, numbers or instants: what needs no escapes, so one text in one go.

    psycopg looks at the elements of a list one by one, in Python.
    """
    inside = ",".join(["NULL" if value is None else f'"{value}"' for value in values])
    return f"{{{inside}}}"


def text_array(values: Sequence[str]) -> str | list[str]:
    """Write an array of texts as one text too; as a list, for psycopg to write, where one of them
    has something to escape."""
    inside = '","'.join(values)
    if "\\" in inside or inside.count('"') != 2 * (len(values) - 1):
        return list(values)
    return f'{{"{inside}"}}' if values else "{}"


@cache
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


class _Psycopg(NamedTuple):
    """What is asked of psycopg 3 for every job: to import it again takes longer than to ask."""

    client_cursor: Any
    no_pipeline: int
    in_error: int
    idle: int


@cache
def _psycopg() -> _Psycopg:
    import psycopg

    return _Psycopg(
        psycopg.ClientCursor,
        int(psycopg.pq.PipelineStatus.OFF),
        int(psycopg.pq.TransactionStatus.INERROR),
        int(psycopg.pq.TransactionStatus.IDLE),
    )


def takes_several(cursor: Any) -> bool:
    """Return whether several statements may be sent as one: psycopg's client-side cursors, Django's
    default, write the parameters into the text and send that; those of ``server_side_binding`` and
    of ``iterator()`` take one statement at a time, and so does a pipeline.

    :param cursor: the database's own, inside Django's wrapper.
    """
    if not is_psycopg3():
        return False
    known = _psycopg()
    return isinstance(cursor, known.client_cursor) and bool(
        cursor.connection.pgconn.pipeline_status == known.no_pipeline
    )


def pass_over(cursor: Any, results: int) -> None:
    """Leave out so many results of statements that were sent in front of a query; the next to be
    fetched is the query's own.

    :param cursor: the database's own, inside Django's wrapper.
    """
    if hasattr(cursor, "set_result"):  # since psycopg 3.3: prepares for reading just that one
        cursor.set_result(results)
    else:
        for _ in range(results):
            cursor.nextset()


def is_aborted(connection: Any) -> bool:
    """Return whether an error has made the transaction of a connection of Django's unusable, by
    what psycopg knows without asking; False where that cannot be told."""
    if connection.vendor != "postgresql" or connection.connection is None or not is_psycopg3():
        return False
    return bool(connection.connection.pgconn.transaction_status == _psycopg().in_error)


def is_in_transaction(connection: Any) -> bool:
    """Return whether a connection of Django's is in a transaction, or about to begin one, by what
    psycopg knows without asking; False where that cannot be told."""
    if connection.vendor != "postgresql" or connection.connection is None or not is_psycopg3():
        return False
    status = connection.connection.pgconn.transaction_status
    return bool(status != _psycopg().idle or not connection.connection.autocommit)


def execute_both(
    cursor: Any, first: tuple[str, Sequence[Any]], second: tuple[str, Sequence[Any]]
) -> int:
    """Execute two statements, each with its parameters, in one round trip where that can be.

    :returns: how many rows the first one changed; the second one's are left to be fetched.
    """
    (sql, parameters), (next_sql, next_parameters) = first, second
    if takes_several(cursor.cursor):
        cursor.execute(f"{sql}; {next_sql}", [*parameters, *next_parameters])
        changed = int(cursor.rowcount)
        cursor.nextset()
    else:
        cursor.execute(sql, parameters)
        changed = int(cursor.rowcount)
        cursor.execute(next_sql, next_parameters)
    return changed
