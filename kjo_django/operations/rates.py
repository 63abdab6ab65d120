"""How fast each queue goes, and whether its lag grows, from the aggregates workers write.

Workers count by queue, not by partition: so does this.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F, Sum
from django.utils import timezone

from kjo_django.models import MetricBucket
from kjo_django.operations.metrics import COUNTERS
from kjo_django.store.transactions import jobs_database

MINUTES = 5
"""Minutes, the last whole ones, a rate is that of."""
STEADY = 1.0
"""Records a minute a lag may change by and count as steady."""
MOST = 10_000
_MINUTE = timedelta(minutes=1)
_SETTLED = functools.reduce(operator.add, (F(f"{name}_count") for name in COUNTERS))


class Trend(enum.StrEnum):
    """Where a lag goes."""

    GROWING = "growing"
    SHRINKING = "shrinking"
    STEADY = "steady"


@dataclass(slots=True)
class Rate:
    """What a queue did in the last minutes."""

    settled: int = 0
    lags: list[tuple[datetime, int]] = field(default_factory=list)
    """As workers saw it last in each minute, the oldest first."""

    @property
    def per_minute(self) -> float:
        """Records settled a minute: completed, to be retried, failed, dropped or skipped."""
        return self.settled / MINUTES

    @property
    def lag_per_minute(self) -> float | None:
        """What the lag grows by a minute, below zero where it shrinks; None where fewer than two
        minutes are known."""
        return change_per_minute(self.lags)

    @property
    def trend(self) -> Trend | None:
        """Whether that is much."""
        return trend_of(self.lag_per_minute)

    def told(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {
            "per_minute": self.per_minute,
            "lag_per_minute": self.lag_per_minute,
            "lag_trend": self.trend,
        }


def change_per_minute(lags: Sequence[tuple[datetime, int]]) -> float | None:
    """Return what lies between the first and the last, by the minutes between them."""
    if not lags or lags[-1][0] - lags[0][0] < _MINUTE:
        return None
    (since, first), (until, last) = lags[0], lags[-1]
    return (last - first) / ((until - since) / _MINUTE)


def trend_of(change: float | None) -> Trend | None:
    """Return the word for a change a minute."""
    if change is None:
        return None
    if abs(change) < STEADY:
        return Trend.STEADY
    return Trend.GROWING if change > 0 else Trend.SHRINKING


def add_rates(rows: Iterable[dict[str, Any]]) -> None:
    """Add to each queue its rate."""
    found = by_queue()
    for row in rows:
        row |= found.get(row["queue"], Rate()).told()


def by_queue() -> dict[str, Rate]:
    """Return the rates of each queue that did something or was asked for its lag, in one query."""
    whole = timezone.now().replace(second=0, microsecond=0)
    rows = (
        MetricBucket.objects.using(jobs_database())
        .filter(minute__gte=whole - MINUTES * _MINUTE)
        .order_by("minute", "queue")
        .values_list("queue", "minute")
        .annotate(seen=Sum("lag"), done=Sum(_SETTLED))
    )
    found: dict[str, Rate] = {}
    for queue, minute, lag, settled in rows[:MOST]:
        rate = found.setdefault(queue, Rate())
        if minute < whole:
            rate.settled += settled or 0
        if lag is not None:
            rate.lags.append((minute, lag))
    return found
