"""The rows that a consumer may claim, where a claim goes step by step: on SQLite, MariaDB, MySQL,
and on PostgreSQL where the server binds parameters.

The queries are texts. Django took longer to compose the four of a lone job than its worker took for
all of the rest.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.db import connections

from kjo_django.transports.database.claims import FIRST_RANK, LAST_RANK, Asked


class DueRow(NamedTuple):
    """What a claim reads of a row."""

    id: int
    topic: str
    key: bytes | None
    small_value: bytes | None
    """None: it is not small, or there is none."""
    headers: Any
    published_at: datetime
    rank: int
    deliveries: int
    lease_token: str
    size: int | None
    """Bytes of the value; None: there is none."""


class DueRows:
    """The rows of a consumer's group that are due and that nobody holds, those of the highest
    priority first.

    A key in flight at another consumer is left alone entirely, so a key is at one consumer at a
    time; rows of that key wait, rows of others pass.

    :param token: of the consumer's leases.
    """

    def __init__(self, alias: str, group: str, token: str) -> None:
        self._alias = alias
        self._group = group
        self._token = token
        connection = connections[alias]
        # SQLite limits no part of a union by itself; there a query costs no round trip.
        self._takes_parts = bool(connection.features.supports_slicing_ordering_in_compound)
        names = {name: connection.ops.quote_name(name) for name in ("key", "rank")}
        self._due, self._columns = _DUE.format_map(names), _COLUMNS.format_map(names)
        self._order, self._rank = _ORDER.format_map(names), names["rank"]

    def due_topics(
        self, asked: Iterable[Asked], skipped: Mapping[str, Collection[int]], now: datetime
    ) -> set[str]:
        """Return the topics that have a row which may be claimed.

        :param skipped: hashes of keys of which nothing is claimed, by topic.
        """
        parts = [self._part("topic", (), one, skipped, now, "LIMIT 1") for one in asked]
        return {topic for rows in self._execute(parts) for (topic,) in rows}

    def read(
        self,
        asked: Mapping[str, Sequence[Asked]],
        skipped: Mapping[str, Collection[int]],
        now: datetime,
        small: int,
    ) -> Iterator[tuple[str, list[DueRow]]]:
        """Yield each topic with its rows. Where that is a query for each, those are made one after
        the other, as far as they are wanted.

        :param asked: by topic; of each of them so many rows, from the first one on.
        :param skipped: see ``due_topics``.
        :param small: the longest value that comes along with its row, in bytes.
        """
        parts = {
            topic: [
                self._part(self._columns, (small,), one, skipped, now, self._order, one.most)
                for one in own
            ]
            for topic, own in asked.items()
        }
        if not self._takes_parts:
            for topic, own in parts.items():
                yield topic, self._rows(own)
            return
        found: dict[str, list[DueRow]] = {topic: [] for topic in asked}
        for row in self._rows([part for own in parts.values() for part in own]):
            found[row.topic].append(row)
        yield from found.items()

    def _part(
        self,
        columns: str,
        values: Sequence[Any],
        one: Asked,
        skipped: Mapping[str, Collection[int]],
        now: datetime,
        end: str,
        *limit: int,
    ) -> tuple[str, list[Any]]:
        """Return a query of the rows of one topic, with its parameters."""
        moment = connections[self._alias].ops.adapt_datetimefield_value(now)
        busy = [self._group, moment, one.topic, self._token]
        parameters = [*values, self._group, moment, moment, one.topic, self._token, *busy]
        bounds = ""
        if hashes := skipped.get(one.topic):
            bounds += _SKIP.format(", ".join(["%s"] * len(hashes)))
            parameters += hashes
        if one.above != FIRST_RANK:
            bounds += f" AND {self._rank} > %s"
            parameters.append(one.above)
        if one.below != LAST_RANK:
            bounds += f" AND {self._rank} < %s"
            parameters.append(one.below)
        return f"SELECT {columns} {self._due}{bounds} {end}", [*parameters, *limit]

    def _rows(self, parts: Sequence[tuple[str, list[Any]]]) -> list[DueRow]:
        connection: Any = connections[self._alias]
        return [
            _row_of(connection.timezone, *values)
            for rows in self._execute(parts)
            for values in rows
        ]

    def _execute(self, parts: Sequence[tuple[str, list[Any]]]) -> Iterator[list[Any]]:
        """Yield what each of the queries answers, or all of them together."""
        if self._takes_parts and len(parts) > 1:
            sql = " UNION ALL ".join(f"({text})" for text, _ in parts)
            parts = [(sql, [value for _, values in parts for value in values])]
        with connections[self._alias].cursor() as cursor:
            for text, values in parts:
                cursor.execute(text, values)
                yield cursor.fetchall()


def _row_of(
    zone: Any,
    id: int,
    topic: str,
    key: bytes | None,
    small_value: bytes | None,
    headers: Any,
    published_at: datetime,
    *rest: Any,
) -> DueRow:
    if published_at.tzinfo is None:
        published_at = published_at.replace(tzinfo=zone)
    told = json.loads(headers) if isinstance(headers, str) else headers
    return DueRow(id, topic, key, small_value, told, published_at, *rest)


_COLUMNS = """
id, topic, {key}, CASE WHEN LENGTH(value) <= %s THEN value END,
headers, published_at, {rank}, deliveries, lease_token, LENGTH(value)"""
_ORDER = "ORDER BY {rank}, id LIMIT %s"
_DUE = """
FROM kjo_transport_message
WHERE consumer_group = %s AND (lease_expires_at IS NULL OR lease_expires_at <= %s)
    AND available_at <= %s AND topic = %s AND NOT (lease_token = %s)
    AND NOT (key_hash IS NOT NULL AND key_hash IN (
        SELECT key_hash FROM kjo_transport_message
        WHERE NOT (lease_token = '') AND consumer_group = %s AND key_hash IS NOT NULL
            AND lease_expires_at > %s AND COALESCE(topic, '') = %s AND NOT (lease_token = %s)
    ))"""
"""The busy keys are a subquery without correlation on purpose: their number is bounded by the rows
in flight, and databases hash it once, whereas a correlated one tempts PostgreSQL to sort the whole
backlog. Their topic is hidden in an expression: SQLite would walk the backlog by its index on topic
and group, where the partial index leads to the rows in flight. The condition of that index is
spelled as there, or it is not used."""
_SKIP = " AND NOT (key_hash IS NOT NULL AND key_hash IN ({}))"
