"""Counts that stay fast however many rows there are: past a limit they are lower bounds."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from django.db import connections
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.dateparse import parse_datetime

COUNT_LIMIT = 100_000
"""Rows looked at for one count; more are shown as "100000+"."""


def bounded_count(rows: QuerySet[Any], limit: int = COUNT_LIMIT) -> int:
    """Return the number of rows, or ``limit`` when there are at least so many."""
    return rows.order_by()[:limit].count()


def grouped_counts(
    rows: QuerySet[Any], by: Sequence[str], *, oldest: str | None = None, limit: int = COUNT_LIMIT
) -> tuple[dict[tuple[Any, ...], tuple[int, datetime | None]], bool]:
    """Count the first ``limit`` rows by some columns, in one query.

    :param rows: ordered as they should be looked at.
    :param oldest: column whose least value is wanted for each group.
    :returns: ``{values: (count, oldest)}``, and whether the limit was reached.
    """
    connection = connections[rows.db]
    quote = connection.ops.quote_name
    columns = [quote(rows.model._meta.get_field(name).column) for name in by]
    wanted = (*by, oldest) if oldest else tuple(by)
    inner, parameters = rows.values(*wanted)[:limit].query.get_compiler(rows.db).as_sql()
    least = f", MIN({quote(rows.model._meta.get_field(oldest).column)})" if oldest else ""
    names = ", ".join(columns)
    statement = f"SELECT {names}, COUNT(*){least} FROM ({inner}) AS looked_at GROUP BY {names}"  # noqa: S608 - identifiers of the model
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        found = cursor.fetchall()
    width = len(by)
    groups = {
        tuple(row[:width]): (row[width], _moment(row[width + 1]) if oldest else None)
        for row in found
    }
    return groups, sum(count for count, _ in groups.values()) >= limit


def _moment(value: Any) -> datetime | None:
    """Read a timestamp as the driver gave it: an aggregate is not converted by the ORM."""
    if isinstance(value, str):
        value = parse_datetime(value)
    if value is not None and timezone.is_naive(value):
        value = value.replace(tzinfo=UTC)
    return value if isinstance(value, datetime) else None


def seconds_since(moment: datetime | None, now: datetime) -> float | None:
    """Return the age, never negative."""
    return None if moment is None else max(0.0, round((now - moment).total_seconds(), 3))
