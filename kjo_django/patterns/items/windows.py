"""Reading a queryset past any number of excluded rows, in statements of bounded size (KJO-F9)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from django.db import models

SMALLEST_PAGE = 100
LARGEST_PAGE = 5000


def pages(queryset: models.QuerySet[Any], size: int) -> Iterator[list[Any]]:
    """Yield the rows in the order of their primary key, each page after the last row of the one
    before: rows may change or vanish meanwhile without any being passed over."""
    ordered = queryset.order_by("pk")
    last: Any = None
    size = max(size, SMALLEST_PAGE)
    while True:
        page = list((ordered if last is None else ordered.filter(pk__gt=last))[:size])
        if page:
            yield page
        if len(page) < size:
            return
        last = page[-1].pk
        size = min(2 * size, max(size, LARGEST_PAGE))


def take(
    queryset: models.QuerySet[Any],
    limit: int,
    excluded_ids: Collection[str],
    id_of: Callable[[Any], str] = lambda row: str(row.pk),
) -> list[Any]:
    """Return the first ``limit`` rows whose id is not excluded.

    No ``NOT IN``: the database is never handed the ids, so neither its limit on parameters nor its
    planner minds how many there are.
    """
    excluded = excluded_ids if isinstance(excluded_ids, (set, frozenset)) else set(excluded_ids)
    found: list[Any] = []
    for page in pages(queryset, limit + min(len(excluded), LARGEST_PAGE)):
        found += [row for row in page if id_of(row) not in excluded][: limit - len(found)]
        if len(found) >= limit:
            break
    return found
