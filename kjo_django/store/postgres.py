"""Short cuts for PostgreSQL on the hot path; everything works without them, slower."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    isolation_level: Any


@cache
def _psycopg() -> _Psycopg:
    import psycopg

    return _Psycopg(
        psycopg.ClientCursor,
        int(psycopg.pq.PipelineStatus.OFF),
        int(psycopg.pq.TransactionStatus.INERROR),
        int(psycopg.pq.TransactionStatus.IDLE),
        psycopg.IsolationLevel,
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


class BeginAlong:
    """Sends the ``BEGIN`` of a transaction in one round trip with its first query.

    To be entered within ``atomic()``, before anything is asked. psycopg, out of autocommit, would
    send a ``BEGIN`` of its own before that query, and wait for it. Its setter does not let anybody
    change autocommit for a single query, so the attribute behind it is; where there is none, or the
    query must go alone, psycopg does as ever.
    """

    def __init__(self, connection: Any) -> None:
        self._wrappers = connection.execute_wrappers

    def __enter__(self) -> None:
        self._wrappers.append(self)

    def __exit__(self, *error: object) -> None:
        if self in self._wrappers:  # nothing was asked
            self._wrappers.remove(self)

    def __call__(
        self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any
    ) -> Any:
        self._wrappers.remove(self)
        cursor = context["cursor"].cursor
        if many or not isinstance(sql, str) or not takes_several(cursor):
            return execute(sql, params, many, context)
        driver = cursor.connection
        is_begun = driver.pgconn.transaction_status != _psycopg().idle
        if is_begun or getattr(driver, "_autocommit", True):
            return execute(sql, params, many, context)
        driver._autocommit = True
        try:
            answer = execute(f"{_begin(driver)}; {sql}", params, many, context)
        finally:
            driver._autocommit = False
        pass_over(cursor, 1)
        return answer


def _begin(driver: Any) -> str:
    """Return the statement a connection of psycopg 3 begins its transactions with."""
    words = ["BEGIN"]
    if driver.isolation_level is not None:
        level = _psycopg().isolation_level(driver.isolation_level)
        words.append(f"ISOLATION LEVEL {level.name.replace('_', ' ')}")
    if driver.read_only is not None:
        words.append("READ ONLY" if driver.read_only else "READ WRITE")
    if driver.deferrable is not None:
        words.append("DEFERRABLE" if driver.deferrable else "NOT DEFERRABLE")
    return " ".join(words)


def execute_last(connection: Any, cursor: Any, sql: str, parameters: Sequence[Any]) -> None:
    """Execute the last statement of a transaction, and commit in the same round trip where that can
    be: not within a transaction that was open before. Django's own commit then has nothing to do.

    :param connection: Django's, in the outermost ``atomic()`` of the transaction.
    :param cursor: of this connection, for what the statement answers.
    :raises DatabaseError: the statement or the commit failed; nothing has taken effect.
    """
    is_outermost = len(connection.atomic_blocks) == 1 and connection.commit_on_exit
    ends = is_outermost and takes_several(cursor.cursor)
    cursor.execute(f"{sql}; COMMIT" if ends else sql, parameters)
