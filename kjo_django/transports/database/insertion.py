"""Rows of published records, written without the ORM, which takes longer for a row than most
databases do.

On PostgreSQL many rows go by COPY, in binary. A statement with a place for each value has to be
read by psycopg and by the server, place by place. Elsewhere, and for few rows, a statement inserts
up to some hundred rows, and its text is composed once for each number of rows.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from django.db import connections, transaction

from kjo_django.messages.serializers import storable_text
from kjo_django.models import TransportMessage
from kjo_django.store import store_for
from kjo_django.transports.base import OutgoingRecord
from kjo_django.transports.database.subscription import key_hash

MOST_OF_STATEMENT = 4 * 1024**2
"""Bytes of keys, values and headers. MariaDB refuses 16 MB, and its driver writes each byte as two
digits."""
MOST_ROWS = 500
"""Rows of a statement. More of them are no faster, and make a longer text."""


class MessageRow(NamedTuple):
    """What is written of a row; the database fills in the other columns.

    :ivar headers: the text of a JSON object.
    """

    topic: str
    consumer_group: str
    key: bytes | None
    key_hash: int | None
    value: bytes | None
    headers: str
    rank: int
    published_at: datetime
    available_at: datetime
    lease_token: str = ""


def rows_of(
    records: Iterable[OutgoingRecord], groups: Mapping[str, Sequence[str]], now: datetime
) -> list[MessageRow]:
    """Return the rows of records, in their order: of each record one for each consumer group.

    :param groups: those of each topic.
    """
    headers_text = _HeadersText()
    rows: list[MessageRow] = []
    for record in records:
        key, text = record.key, headers_text(record.headers)
        hash = None if key is None else key_hash(key)
        available_at, rank = record.available_at or now, -record.priority
        for group in groups[record.topic]:
            rows.append(
                MessageRow(
                    *(record.topic, group, key, hash, record.value, text, rank, now, available_at)
                )
            )
    return rows


class _HeadersText:
    """Writes the headers of one record after another as ``json.dumps(to_json(headers))`` would.

    Records that are published together have most of their headers in common: of each name the text
    that was written last is kept.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[bytes | None, str]] = {}

    def __call__(self, headers: Mapping[str, bytes]) -> str:
        last, texts = self._last, []
        for name, value in headers.items():
            known = last.get(name)
            if known is None or known[0] != value:
                encoded = base64.b64encode(value or b"").decode()
                known = last[name] = value, f'{_name_text(name)}: "{encoded}"'
            texts.append(known[1])
        return f"{{{', '.join(texts)}}}"


@lru_cache(maxsize=256)
def _name_text(name: str) -> str:
    return json.dumps(storable_text(name))


def insert_rows(alias: str, rows: Sequence[MessageRow]) -> Sequence[int]:
    """Write rows, all or none, and return their ids, in order; none where the database does not
    tell, or they are written with the commit.

    :param alias: of the database, whose open transaction is joined.
    """
    store = store_for(alias)
    if store.may_copy(len(rows)):
        return _copy(alias, rows)
    connection: Any = connections[alias]
    most = (connection.features.max_query_params or 65_535) // len(MessageRow._fields)
    chunks = list(_chunks(rows, min(MOST_ROWS, most)))
    defers = store.defers and len(chunks) == 1  # what is put off goes as one text
    returns_ids = connection.features.can_return_rows_from_bulk_insert and not defers
    statements = _statements(connection, chunks, returns_ids=returns_ids)
    if defers:
        for statement in statements:
            store.execute_with_next(*statement)
        return []
    ids: list[int] = []
    several = transaction.atomic(using=alias, savepoint=False)
    with several if len(chunks) > 1 else nullcontext(), connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(*statement)
            if returns_ids:
                ids += [id for (id,) in cursor.fetchall()]
    return ids


def _statements(
    connection: Any, chunks: Iterable[Sequence[MessageRow]], *, returns_ids: bool
) -> Iterator[tuple[str, list[Any]]]:
    """Yield what inserts these rows, a statement for each chunk, with its parameters."""
    prepare = _preparing(connection)
    for chunk in chunks:
        values = [value for row in chunk for value in prepare(row)]
        yield _insertion(connection.vendor, len(chunk), returns_ids=returns_ids), values


def _chunks(rows: Sequence[MessageRow], most: int) -> Iterator[Sequence[MessageRow]]:
    """Yield the rows of each statement: at most so many, and no more than it may be long, but for
    one row."""
    start = size = 0
    for number, row in enumerate(rows):
        size_of_row = len(row.key or b"") + len(row.value or b"") + len(row.headers)
        if number > start and (number - start == most or size + size_of_row > MOST_OF_STATEMENT):
            yield rows[start:number]
            start, size = number, 0
        size += size_of_row
    if start < len(rows):
        yield rows[start:]


def _preparing(connection: Any) -> Callable[[MessageRow], tuple[Any, ...]]:
    """Return what makes of a row the values that a database's driver takes."""
    moment, binary = connection.ops.adapt_datetimefield_value, connection.Database.Binary

    def prepare(row: MessageRow) -> tuple[Any, ...]:
        return row._replace(
            key=None if row.key is None else binary(row.key),
            value=None if row.value is None else binary(row.value),
            published_at=moment(row.published_at),
            available_at=moment(row.available_at),
        )

    return prepare


def _copy(alias: str, rows: Sequence[MessageRow]) -> Sequence[int]:
    """Write rows by COPY. COPY returns no ids, so they are taken from the sequence first, if the
    role may use it; it may always insert without."""
    with connections[alias].cursor() as cursor:
        cursor.execute(_NEXT_IDS, [len(rows)])
        ids = [id for (id,) in cursor.fetchall()]
    types = _COPIED if not ids else {"id": "int8", **_COPIED}
    copied = map(_copied, rows)
    numbered = copied if not ids else ((id, *row) for id, row in zip(ids, copied, strict=True))
    store_for(alias).copy_rows(_TABLE, types, numbered)
    return ids


def _copied(row: MessageRow) -> tuple[Any, ...]:
    """Return the values of a row as ``_COPIED`` says."""
    return row._replace(
        headers=b"\x01" + row.headers.encode(),  # type: ignore[arg-type] # the format's version
        published_at=_microseconds(row.published_at),
        available_at=_microseconds(row.available_at),
    )


def _microseconds(moment: datetime) -> Any:
    return (moment - _EPOCH) // _MICROSECOND


@lru_cache(maxsize=64)
def _insertion(vendor: str, rows: int, *, returns_ids: bool) -> str:
    """Return the statement that inserts so many rows."""
    quote = "`" if vendor == "mysql" else '"'
    columns = ", ".join(f"{quote}{column}{quote}" for column in MessageRow._fields)
    places = f"({', '.join(['%s'] * len(MessageRow._fields))})"
    text = f"INSERT INTO {_TABLE} ({columns}) VALUES {', '.join([places] * rows)}"  # noqa: S608 - names of columns
    return f"{text} RETURNING id" if returns_ids else text


_TABLE = TransportMessage._meta.db_table
_NEXT_IDS = """
SELECT nextval(ids) FROM generate_series(1, %s),
    pg_get_serial_sequence('kjo_transport_message', 'id') AS ids
WHERE has_sequence_privilege(ids, 'USAGE')
"""
_COPIED = {
    "topic": "text",
    "consumer_group": "text",
    "key": "bytea",
    "key_hash": "int8",
    "value": "bytea",
    "headers": "bytea",
    "rank": "int2",
    "published_at": "int8",
    "available_at": "int8",
    "lease_token": "text",
}
"""The columns that are copied, and as what psycopg writes each. JSON and instants have the format
of these types, which are written in C."""
_EPOCH, _MICROSECOND = datetime(2000, 1, 1, tzinfo=UTC), timedelta(microseconds=1)
"""What PostgreSQL counts instants from, and by."""
