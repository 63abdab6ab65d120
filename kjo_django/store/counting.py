"""Counts that stay fast however many rows there are: past a limit they are lower bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def window_floor(rows: QuerySet[Any], limit: int = COUNT_LIMIT) -> Any:
    """Return the key above which the newest ``limit`` rows lie; None where there are no others.

    An index alone finds it. As a condition on the key it bounds what is looked at: the database
    cannot be tempted to look further, in whatever order it reads.
    """
    keys = rows.order_by("-pk").values_list("pk", flat=True)
    return next(iter(keys[limit : limit + 1]), None)


def bounded_counts(rows: Mapping[str, QuerySet[Any]], limit: int = COUNT_LIMIT) -> dict[str, int]:
    """Return what ``bounded_count`` would for each of them, in one query.

    :param rows: by name; all of one database.
    """
    return dict(_each({name: each.values("pk")[:limit] for name, each in rows.items()}, "COUNT(*)"))


def first_moments(rows: Mapping[str, QuerySet[Any]], column: str) -> dict[str, datetime | None]:
    """Return a time of the first row of each selection, in one query; None where there is none.

    :param rows: by name, each ordered; all of one model and database.
    :param column: the field with the time.
    """
    selections = {name: each.values(column)[:1] for name, each in rows.items()}
    found = dict(_each(selections, "looked_at.*"))
    return {name: _moment(found.get(name)) for name in rows}


def keys_of_each(rows: Mapping[str, QuerySet[Any]]) -> dict[str, list[Any]]:
    """Return the primary keys of each selection, in one query.

    :param rows: by name, each ordered and sliced; all of one model and database.
    """
    keys: dict[str, list[Any]] = {name: [] for name in rows}
    for name, key in _each({name: each.values("pk") for name, each in rows.items()}, "looked_at.*"):
        keys[name].append(rows[name].model._meta.pk.to_python(key))
    return keys


def _each(rows: Mapping[str, QuerySet[Any]], columns: str, end: str = "") -> list[Any]:
    """Return what a SELECT from each of these selections answers, in one query, behind its name.

    :param columns: what is selected.
    :param end: follows the selection.
    """
    statements, parameters, using = [], [], ""
    for name, selection in rows.items():
        using = selection.db
        inner, given = selection.query.get_compiler(using).as_sql()
        statements.append(f"SELECT %s, {columns} FROM ({inner}) AS looked_at {end}")  # noqa: S608 - compiled
        parameters += [name, *given]
    if not statements:
        return []
    with connections[using].cursor() as cursor:
        cursor.execute(" UNION ALL ".join(statements), parameters)
        return list(cursor.fetchall())


Groups = dict[tuple[Any, ...], tuple[int, datetime | None]]
"""``{values: (count, least of the column asked for)}``."""


def grouped_counts(
    rows: QuerySet[Any], by: Sequence[str], *, oldest: str | None = None, limit: int = COUNT_LIMIT
) -> tuple[Groups, bool]:
    """Count the first ``limit`` rows by some columns, in one query.

    :param rows: ordered as they should be looked at.
    :param oldest: column whose least value is wanted for each group.
    :returns: the groups, and whether the limit was reached.
    """
    return many_grouped_counts({"": rows}, by, oldest=oldest, limit=limit)[""]


def many_grouped_counts(
    rows: Mapping[str, QuerySet[Any]],
    by: Sequence[str],
    *,
    oldest: str | None = None,
    limit: int = COUNT_LIMIT,
) -> dict[str, tuple[Groups, bool]]:
    """Return what ``grouped_counts`` would for each of them, in one query.

    :param rows: by name; all of one model and database.
    :param by: names of fields and annotations.
    """
    one = next(iter(rows.values()))

    def column(name: str) -> str:
        is_annotated = name in one.query.annotations
        column = name if is_annotated else one.model._meta.get_field(name).column
        return connections[one.db].ops.quote_name(column)

    wanted = (*by, oldest) if oldest else tuple(by)
    least = f", MIN({column(oldest)})" if oldest else ""
    names = ", ".join(column(name) for name in by)
    selections = {name: each.values(*wanted)[:limit] for name, each in rows.items()}
    found = _each(selections, f"{names}, COUNT(*){least}", f"GROUP BY {names}")
    width = len(by) + 1
    groups: dict[str, Groups] = {name: {} for name in rows}
    for row in found:
        moment = _moment(row[width + 1]) if oldest else None
        groups[row[0]][tuple(row[1:width])] = (row[width], moment)
    return {
        name: (each, sum(count for count, _ in each.values()) >= limit)
        for name, each in groups.items()
    }


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
