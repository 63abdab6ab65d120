"""What psycopg's cursors are given and asked.

Apart from the store on PostgreSQL, which a worker of another database does not load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from django.core.exceptions import ImproperlyConfigured

_NO_PIPELINE = 0
"""State of libpq's."""


def array_text(values: Iterable[object]) -> str:
    """Write an array of ids, numbers or instants: what needs no escapes, so one text in one go.

    psycopg looks at the elements of a list one by one, in Python.
    """
    inside = '","'.join(map(str, values))
    return f'{{"{inside}"}}'.replace('"None"', "NULL") if inside else "{}"


def text_array(values: Sequence[str]) -> str | list[str]:
    """Write an array of texts as one text too; as a list, for psycopg to write, where one of them
    has something to escape."""
    inside = '","'.join(values)
    if "\\" in inside or inside.count('"') != 2 * (len(values) - 1):
        return list(values)
    return f'{{"{inside}"}}' if values else "{}"


@cache
def psycopg_module() -> Any:
    """Return psycopg 3, which is imported only where a database is PostgreSQL."""
    try:
        import psycopg
    except ImportError as error:
        raise ImproperlyConfigured(f"PostgreSQL needs psycopg[binary] 3: {error}") from error
    return psycopg


def takes_several(cursor: Any) -> bool:
    """Return whether several statements may be sent as one: psycopg's client-side cursors, Django's
    default, write the parameters into the text and send that; those of ``server_side_binding`` and
    of ``iterator()`` take one statement at a time, and so does a pipeline.

    :param cursor: the database's own, inside Django's wrapper.
    """
    is_client_side = isinstance(cursor, psycopg_module().ClientCursor)
    return is_client_side and bool(cursor.connection.pgconn.pipeline_status == _NO_PIPELINE)


def pass_over(cursor: Any, results: int) -> None:
    """Skip the results of statements that were sent in front of a query; the next result to be
    fetched is the query's own.

    :param cursor: the database's own, inside Django's wrapper.
    """
    if hasattr(cursor, "set_result"):  # since psycopg 3.3: prepares for reading just that one
        cursor.set_result(results)
    else:
        for _ in range(results):
            cursor.nextset()
