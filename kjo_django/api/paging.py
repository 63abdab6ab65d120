"""Keyset pages, newest first: no count and no offset, so the last page costs as much as the first.

A filter without an index searches within a window: the page may then have fewer rows than
requested, or none, and its cursor continues where the window ended.
"""

from __future__ import annotations

import uuid
from typing import TypeVar

from django.db.models import Model, QuerySet
from rest_framework import serializers

from kjo_django.api.fields import Identifier, RequestShape, shape

M = TypeVar("M", bound=Model)

WINDOW = 50_000
"""Rows looked at for one page."""
DEFAULT_LIMIT, MAX_LIMIT = 50, 200


def page_limit() -> serializers.IntegerField:
    """Return the field for the size of a page."""
    return serializers.IntegerField(
        required=False,
        default=DEFAULT_LIMIT,
        min_value=1,
        max_value=MAX_LIMIT,
        help_text="Most rows of the page.",
    )


PageQuery = shape(
    "PageQuery",
    "Which page.",
    RequestShape,
    cursor=Identifier(required=False, help_text="`next_cursor` of the page before this one."),
    limit=page_limit(),
)


def page(
    rows: QuerySet[M], wanted: QuerySet[M], *, cursor: uuid.UUID | None, limit: int
) -> tuple[list[M], str | None]:
    """Return those of the newest ``rows`` before the cursor that are also ``wanted``, and the
    cursor of the next page; None at the end.

    :param rows: rows that an index finds, in the order of the key.
    :param wanted: these rows with all filters; ``rows`` itself if an index serves them all.
    """
    before = {} if cursor is None else {"pk__lt": cursor}
    floor = None
    if wanted is not rows:
        keys = rows.filter(**before).order_by("-pk").values_list("pk", flat=True)
        floor = next(iter(keys[WINDOW : WINDOW + 1]), None)
        if floor is not None:
            wanted = wanted.filter(pk__gt=floor)
    found = list(wanted.filter(**before).order_by("-pk")[: limit + 1])
    if len(found) > limit:
        return found[:limit], str(found[limit - 1].pk)
    if floor is None:
        return found, None
    # The row at the floor itself has not been looked at.
    return found, str(uuid.UUID(int=floor.int + 1))
