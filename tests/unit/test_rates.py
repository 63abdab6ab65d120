"""How fast queues go and where their lags go, from the minute aggregates."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from kjo_django.models import MetricBucket
from kjo_django.operations.monitoring import metrics
from kjo_django.operations.monitoring.metrics import Trend

NOW = datetime(2026, 5, 4, 10, 37, 20, tzinfo=UTC)
WHOLE = NOW.replace(second=0)


def lag_of(queue: str = "mails") -> tuple[float | None, Trend | None]:
    rows = [{"queue": queue}]
    metrics.add_rates(rows)
    return rows[0]["lag_per_minute"], rows[0]["lag_trend"]


def bucket(minutes_ago, queue="mails", **figures):
    figures.setdefault("worker_id", uuid.uuid4())
    minute = WHOLE - timedelta(minutes=minutes_ago)
    return MetricBucket.objects.create(minute=minute, queue=queue, **figures)


@pytest.fixture
def now(db, monkeypatch):
    monkeypatch.setattr(timezone, "now", lambda: NOW)


@pytest.mark.usefixtures("now")
@pytest.mark.parametrize(
    ("seen", "change", "trend"),
    [
        ((), None, None),
        ((5,), None, None),
        ((None, 5, None), None, None),
        ((0, 0, 0), 0.0, Trend.STEADY),
        ((10, 20, 40), 15.0, Trend.GROWING),
        ((40, 90, 10), -15.0, Trend.SHRINKING),
        ((10, None, None, 40), 10.0, Trend.GROWING),
        ((0, 1, 1, 1, 1, 1), 0.2, Trend.STEADY),
        ((5, 5, 5, 5, 5, 0), -1.0, Trend.SHRINKING),
    ],
)
def test_a_trend_is_what_lies_between_the_first_and_the_last(seen, change, trend):
    """A lag a minute; None where nobody asked."""
    for number, lag in enumerate(seen):
        if lag is not None:
            bucket(len(seen) - 1 - number, handler="", lag=lag)
    assert lag_of() == (change, trend)


@pytest.mark.usefixtures("now")
def test_whatever_is_settled_in_the_last_whole_minutes_counts():
    # Given what handlers of two workers did, and what is too old or not over
    bucket(1, handler="a", completed_count=10, retried_count=5)
    bucket(1, handler="b", failed_count=3, duplicate_count=2)
    bucket(5, handler="a", skipped_count=5)
    bucket(6, handler="a", completed_count=1000)
    bucket(0, handler="a", completed_count=1000)
    bucket(2, queue="other", handler="c", completed_count=50)
    # When
    rows = [{"queue": "mails"}, {"queue": "other"}]
    metrics.add_rates(rows)
    # Then
    assert [row["per_minute"] for row in rows] == [5.0, 10.0]


@pytest.mark.usefixtures("now")
def test_a_lag_is_followed_to_the_present_minute():
    for ago, lag in ((7, 10_000), (4, 100), (2, 60), (0, 20)):
        bucket(ago, handler="", lag=lag)
        bucket(ago, handler="a", completed_count=1)
    assert lag_of() == (-20.0, Trend.SHRINKING)


@pytest.mark.usefixtures("now")
def test_one_query_tells_of_all_queues(django_assert_num_queries):
    for number in range(20):
        bucket(1, queue=f"queue-{number}", handler="a", completed_count=number)
    rows = [{"queue": f"queue-{number}"} for number in range(21)]
    with django_assert_num_queries(1):
        metrics.add_rates(rows)
    assert rows[10] == {
        "queue": "queue-10",
        "per_minute": 2.0,
        "lag_per_minute": None,
        "lag_trend": None,
    }
    assert rows[20]["per_minute"] == 0
