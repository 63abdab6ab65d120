"""Rows for a change: read in chunks, locked on every database, at a rate."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypedDict, TypeVar
from uuid import UUID

from django.db import connections, transaction
from django.db.models import F, Model, QuerySet
from django.utils.translation import gettext_noop as _

from kjo_django.refusals import RefusedError
from kjo_django.runtime import jobs_database
from kjo_django.store import store_for
from kjo_django.values import number

M = TypeVar("M", bound=Model)
T = TypeVar("T")

CHUNK = 500
"""Rows of one transaction. Locks stay short, and SQLite can bind so many parameters."""

Observer = Callable[[Sequence[Any]], None]
"""Called with the changed rows inside their transaction, for audit trails."""
Progress = Callable[[int, int | None], None]
"""Called with the number of rows done, and of all rows if it is known."""


class ChangeOptions(TypedDict, total=False):
    """The options that every change of jobs takes."""

    actor: str
    """Who asked, for the log and the signal."""
    on_changed: Observer | None
    progress: Progress


def no_progress(done: int, total: int | None) -> None:
    """Report nothing."""


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of up to ``size`` items."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def key_of(row: Any) -> UUID | None:
    """Return the key of a row, or the key in a text; None if it is no key."""
    key = getattr(row, "pk", row)
    try:
        return key if isinstance(key, UUID) else UUID(str(key))
    except ValueError:
        return None


def chunks(selection: QuerySet[Any] | Iterable[Any], size: int = CHUNK) -> Iterator[list[Any]]:
    """Yield the primary keys of a selection (a queryset, rows or keys), ``size`` at a time.

    A queryset is read by primary key, up to the last row that it has now. So it may be of any size,
    and may lose or gain rows meanwhile.
    """
    if isinstance(selection, QuerySet):
        selection = where_written(selection)
        if not selection.query.is_sliced:
            yield from _walk(selection.order_by("pk"), size)
            return
        selection = selection.values_list("pk", flat=True)
    yield from batched((getattr(item, "pk", item) for item in selection), size)


def where_written(selection: QuerySet[M]) -> QuerySet[M]:
    """Return a selection of rows as it reads them where they are written, unless it says where, or
    has been read: a router may send reads to a replica."""
    chosen: Any = selection
    if chosen._db is not None or chosen._result_cache is not None:
        return selection
    return selection.using(jobs_database())


def _walk(selection: QuerySet[Any], size: int) -> Iterator[list[Any]]:
    keys = selection.values_list("pk", flat=True)
    last = keys.reverse().first()
    if last is None:
        return
    rest = keys.filter(pk__lte=last)
    while chunk := list(rest[:size]):
        yield chunk
        rest = keys.filter(pk__lte=last, pk__gt=chunk[-1])


def streamed(rows: QuerySet[Any], chunk_size: int = 2000) -> Iterator[Any]:
    """Yield the rows of ``iterator()``, on PostgreSQL within one transaction.

    A server-side cursor behind a pooler in transaction mode needs a transaction, and without a
    pooler it is cheaper in one.
    """
    with store_for(rows.db).streaming():
        yield from rows.iterator(chunk_size)


def lock(rows: QuerySet[M], keys: Sequence[Any]) -> list[M]:
    """Lock the rows with these keys until the transaction ends, and return them.

    With SKIP LOCKED, rows that others hold are left out. Elsewhere an UPDATE that changes nothing
    waits for them. SQLite's transaction then writes before it reads, and is never refused half-way.
    The model needs a column ``state``.
    """
    features = connections[rows.db].features
    wanted = rows.filter(pk__in=keys).order_by("pk")
    if features.has_select_for_update_skip_locked:
        return list(
            wanted.select_for_update(skip_locked=True, no_key=features.has_select_for_no_key_update)
        )
    rows.filter(pk__in=keys).order_by().update(state=F("state"))
    return list(wanted)


def on_commit(using: str, function: Callable[[], object]) -> None:
    """Call a function after the current transaction is committed; log an exception of it."""
    transaction.on_commit(function, using=using, robust=True)


# --- Pace ---------------------------------------------------------------------------------------

RATE_MIN, RATE_MAX = 0.01, 100_000
"""Bounds of a rate, a second. A slower run would look like one that hangs."""


def checked_rate(rate: float | None) -> float | None:
    """Return the rate, or None for no limit.

    :raises ValueError: it is out of bounds, infinite or no number.
    """
    if rate is None:
        return None
    try:
        return number(RATE_MIN, RATE_MAX)(rate)
    except ValueError:
        text = _("The rate must be a number from %(least)s to %(most)s a second, not %(rate)s")
        raise RefusedError(text, least=RATE_MIN, most=RATE_MAX, rate=repr(rate)) from None


class Pace:
    """Spreads work evenly over time: at most ``rate`` a second, without bursts.

    :param rate: None for no limit.
    :raises ValueError: the rate is out of bounds; see ``checked_rate``.
    """

    def __init__(self, rate: float | None) -> None:
        rate = checked_rate(rate)
        self._interval = 0.0 if rate is None else 1 / rate
        self._next = time.monotonic()

    def wait(self) -> None:
        """Sleep until the next row is due."""
        if not self._interval:
            return
        now = time.monotonic()
        if self._next > now:
            time.sleep(self._next - now)
        self._next = max(self._next, now) + self._interval
