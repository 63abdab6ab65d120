"""Rows of jobs as psycopg 3 takes them, and storing many of them by one COPY."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from django.db import transaction

from kjo_django.models import Job
from kjo_django.store.postgres import is_psycopg3

COPY_FROM = 20
"""Fewer rows are stored sooner by an INSERT, which needs no transaction of its own."""
BLOCK = 64 * 1024
"""Characters written at once; the server works on one block while the next is made."""

_COLUMNS = {field.attname: field for field in Job._meta.local_concrete_fields}
_HEADERS = list(_COLUMNS).index("headers")
_OWN = ("id", "key", "payload")


def may_copy(connection: Any, count: int) -> bool:
    """Return whether so many rows may be stored by COPY on this connection.

    COPY is not seen by query wrappers, such as the savepoint of a handler that enqueues first
    thing: its rows would survive the handler's failure.
    """
    return (
        count >= COPY_FROM
        and connection.vendor == "postgresql"
        and not connection.execute_wrappers
        and is_psycopg3()
    )


def copy_jobs(connection: Any, jobs: Iterable[Job]) -> None:
    """Store jobs, each with columns of its own."""
    with _copying(connection, list(_COLUMNS)) as copy:
        for job in jobs:
            copy.write_row(values_of(connection, job))


def values_of(connection: Any, job: Job) -> list[Any]:
    """Return a row for psycopg 3, which writes all but JSON as the fields have it."""
    values = [getattr(job, name) for name in _COLUMNS]
    if job.headers is not None:
        values[_HEADERS] = _COLUMNS["headers"].get_db_prep_save(job.headers, connection)
    return values


def copy_alike(connection: Any, job: Job, contents: Iterable[tuple[uuid.UUID, str, bytes]]) -> None:
    """Store jobs with an id, a key and a payload of their own; all other columns are ``job``'s."""
    others = [name for name in _COLUMNS if name not in _OWN]
    # Written once, whatever the number of rows.
    rest = "".join([f"\t{written(getattr(job, name))}" for name in others]) + "\n"
    lines = (
        f"{id.hex}\t{escaped(key) if key else key}\t\\\\x{payload.hex()}{rest}"
        for id, key, payload in contents
    )
    with _copying(connection, [*_OWN, *others]) as copy:
        for block in _blocks(lines):
            copy.write(block)


@contextmanager
def _copying(connection: Any, names: Sequence[str]) -> Iterator[Any]:
    columns = ", ".join(connection.ops.quote_name(_COLUMNS[name].column) for name in names)
    with (
        transaction.atomic(using=connection.alias, savepoint=False),
        connection.cursor() as cursor,
        cursor.copy(f"COPY kjo_job ({columns}) FROM STDIN") as copy,
    ):
        yield copy


def _blocks(lines: Iterable[str]) -> Iterator[str]:
    block: list[str] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line)
        if size >= BLOCK:
            yield "".join(block)
            block.clear()
            size = 0
    yield "".join(block)


def written(value: Any) -> str:
    """Return a column's value in COPY's text format."""
    if value is None:
        return r"\N"
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return rf"\\x{bytes(value).hex()}"
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, dict):
        return escaped(json.dumps(value))
    return str(value)


def escaped(text: str) -> str:
    """Return text so that it neither ends a column or a row nor reads as NULL."""
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")
