"""Figures over time, from the aggregates: how much, how fast, and where lags go."""

from bisect import bisect_right
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from hypothesis import given
from hypothesis import strategies as st

from kjo_django import registry
from kjo_django.models import BOUNDS, UPPER_MILLISECONDS, MetricBucket, MetricRollup, Worker
from kjo_django.operations.monitoring import metrics
from kjo_django.operations.monitoring.metrics import Trend
from tests.clocks import set_now
from tests.factories import WorkerFactory

NOW = datetime(2026, 5, 4, 10, 37, 20, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def _now(monkeypatch):
    set_now(monkeypatch, lambda: NOW)
    monkeypatch.setattr(registry, "consumed_queue_names", lambda: ["mail"])


def histogram(*seconds):
    counts = [0] * BOUNDS
    for each in seconds:
        counts[bisect_right(UPPER_MILLISECONDS, each * 1000)] += 1
    return counts


def bucket(minutes_ago=0, *, model=MetricBucket, queue="mail", handler="shop.send", **figures):
    minutes = figures.get("minutes", 1)
    start = NOW - timedelta(minutes=minutes_ago)
    start = start.replace(second=0, minute=start.minute // minutes * minutes if minutes < 60 else 0)
    figures.setdefault("worker_id", "019a0000-0000-7000-8000-000000000001")
    return model.objects.create(minute=start, queue=queue, handler=handler, **figures)


@pytest.mark.django_db
def test_an_hour_is_told_by_the_minute_and_no_minute_is_left_out():
    bucket(0, completed_count=3)
    bucket(2, completed_count=5, failed_count=1)

    found = metrics.series(HOUR)

    assert found.width == timedelta(minutes=1)
    assert len(found.points) == 60
    assert [point.completed for point in found.points[-4:]] == [0, 5, 0, 3]
    assert found.points[-3].failed == 1
    gaps = {b.time - a.time for a, b in zip(found.points, found.points[1:], strict=False)}
    assert gaps == {timedelta(minutes=1)}


@pytest.mark.django_db
def test_workers_and_handlers_are_added_up():
    other = "019a0000-0000-7000-8000-000000000002"
    bucket(1, completed_count=3, run_histogram=histogram(0.010), run_seconds_sum=0.01)
    bucket(1, completed_count=4, worker_id=other, run_histogram=histogram(0.010, 0.5))
    bucket(1, completed_count=5, handler="shop.bill", queue="bills")

    assert metrics.series(HOUR).points[-2].completed == 12
    assert metrics.series(HOUR, queue="mail").points[-2].completed == 7
    assert metrics.series(HOUR, handler="shop.bill").points[-2].completed == 5
    assert sum(metrics.series(HOUR, queue="mail").points[-2].runs) == 3


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("length", "minutes", "count"),
    [(timedelta(days=1), 15, 96), (timedelta(days=7), 60, 168), (timedelta(hours=2), 1, 120)],
)
def test_long_times_are_told_by_longer_ones(length, minutes, count):
    for each in MetricRollup.LENGTHS:
        bucket(each, model=MetricRollup, minutes=each, completed_count=each)
    bucket(1, completed_count=1)

    found = metrics.series(length)

    assert len(found.points) == count
    assert found.width == timedelta(minutes=minutes)
    assert sum(point.completed for point in found.points) == minutes


@pytest.mark.django_db
def test_the_present_time_counts_as_long_as_it_is():
    bucket(0, model=MetricRollup, minutes=15, completed_count=70)

    point = metrics.series(timedelta(days=1)).points[-1]

    assert point.completed_per_minute == pytest.approx(70 / (7 + 20 / 60))


@pytest.mark.django_db
def test_the_lag_is_the_sum_of_what_each_worker_saw_last():
    other = "019a0000-0000-7000-8000-000000000002"
    bucket(2, handler="", lag=100)
    bucket(1, handler="", lag=40)
    bucket(1, handler="", lag=2, worker_id=other)
    bucket(10, handler="", lag=9, worker_id="019a0000-0000-7000-8000-000000000003")

    points = metrics.series(HOUR).points

    assert [point.lag for point in points[-4:]] == [None, 100, 42, 42]
    assert metrics.totals(HOUR).lag == 42


@pytest.mark.django_db
def test_a_lag_that_nobody_measured_lately_is_unknown_and_not_0():
    bucket(4, handler="", lag=4152)

    points = metrics.series(HOUR).points

    assert [point.lag for point in points[-5:]] == [4152, None, None, None, None]
    assert metrics.totals(HOUR).lag is None


@pytest.mark.django_db
def test_the_lag_of_all_queues_is_unknown_while_that_of_one_is(monkeypatch):
    """The broker of the one is away; the sum of the others would be taken for all."""
    monkeypatch.setattr(registry, "consumed_queue_names", lambda: ["mail", "stock"])
    bucket(1, handler="", lag=40)
    bucket(9, handler="", queue="stock", lag=4152)

    assert metrics.totals(HOUR).lag is None
    assert metrics.series(HOUR).points[-1].lag is None
    assert metrics.series(HOUR, queue="stock").points[-1].lag is None
    assert metrics.series(HOUR, queue="mail").points[-1].lag == 40


@pytest.mark.django_db
@pytest.mark.parametrize("hours", [1, 24, 7 * 24])
def test_the_last_point_of_a_series_has_the_present_lag_though_a_minute_has_just_begun(
    hours, monkeypatch
):
    monkeypatch.setattr(registry, "consumed_queue_names", lambda: ["mail", "stock"])
    bucket(1, handler="", queue="stock", lag=4000)
    bucket(0, handler="", lag=152)
    for minutes in (15, 60):
        bucket(0, model=MetricRollup, minutes=minutes, handler="", lag=152)

    assert metrics.series(timedelta(hours=hours)).points[-1].lag == 4152
    assert metrics.totals(HOUR).lag == 4152


@pytest.mark.django_db
def test_a_lag_that_is_measured_seldom_is_known_until_the_next_time(settings):
    settings.KJO = {"HEARTBEAT_INTERVAL": 120}
    bucket(6, handler="", lag=7)
    assert metrics.totals(HOUR).lag == 7
    bucket(13, handler="", lag=8)
    MetricBucket.objects.filter(lag=7).delete()
    assert metrics.totals(HOUR).lag is None


@pytest.mark.django_db
def test_a_handler_has_no_lag():
    bucket(0, handler="", lag=3)
    assert metrics.series(HOUR, handler="shop.send").points[-1].lag is None


@pytest.mark.django_db
def test_totals_count_the_time_and_the_present_rate(django_assert_max_num_queries):
    bucket(0, completed_count=1000)
    bucket(1, completed_count=60, failed_count=2, duplicate_count=3, skipped_count=4)
    bucket(2, completed_count=20, unused_permit_count=5)
    bucket(61, completed_count=7)

    with django_assert_max_num_queries(2):
        found = metrics.totals(HOUR)

    assert (found.completed, found.failed, found.duplicate, found.skipped) == (1080, 2, 3, 4)
    assert found.per_minute == 40
    assert found.unused_permit == 5


@pytest.mark.django_db
def test_queues_have_a_sparkline_and_percentiles():
    bucket(0, completed_count=3, wait_histogram=histogram(*[0.002] * 99, 10))
    bucket(59, completed_count=1)
    bucket(0, queue="bills", handler="shop.bill", completed_count=9)

    with CaptureQueriesContext(connection) as queries:
        found = metrics.by_queue()

    # PostgreSQL streams rows in a transaction, which is a savepoint here.
    assert len([query for query in queries if "SAVEPOINT" not in query["sql"]]) == 1
    assert set(found) == {"mail", "bills"}
    assert found["mail"].sparkline == [1, *[0] * 58, 3]
    assert found["mail"].wait_p50 == pytest.approx(0.003, abs=0.001)
    assert found["mail"].wait_p99 < 0.005 < 8 < metrics.percentile(found["mail"].waits, 1)
    assert found["mail"].run_p95 is None
    assert set(metrics.by_handler()) == {"shop.send", "shop.bill"}


@pytest.mark.django_db
def test_a_deploy_is_the_first_start_of_a_release():
    for release, hours in (("1", 30), ("1", 1), ("2", 3), ("2", 2), ("", 1)):
        WorkerFactory(release=release, started_at=NOW - timedelta(hours=hours))
    assert Worker.objects.count() == 5

    found = metrics.deploys(timedelta(days=1))

    assert found == [{"time": NOW - timedelta(hours=3), "release": "2"}]


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_percentile_lies_within_the_bounds_of_its_measurement(seconds, share):
    found = metrics.percentile(histogram(*seconds), share)
    exact = sorted(seconds)[max(0, -(-int(share * len(seconds) * 1e9) // 10**9) - 1)]
    index = bisect_right(UPPER_MILLISECONDS, exact * 1000)
    assert found is not None
    assert found >= 0
    assert bisect_right(UPPER_MILLISECONDS, found * 1000) in (index - 1, index, index + 1)


def test_nothing_measured_has_no_percentile():
    assert metrics.percentile([0] * BOUNDS, 0.5) is None
    assert metrics.percentile([], 0.5) is None


# --- How fast queues go and where their lags go ---------------------------------------------------


def lag_of(queue: str = "mail") -> tuple[float | None, Trend | None]:
    rows = [{"queue": queue}]
    metrics.add_rates(rows)
    return rows[0]["lag_per_minute"], rows[0]["lag_trend"]


@pytest.mark.django_db
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


@pytest.mark.django_db
def test_whatever_is_settled_in_the_last_whole_minutes_counts():
    # Given what handlers of two workers did, and what is too old or not over
    bucket(1, handler="a", completed_count=10, retried_count=5)
    other = "019a0000-0000-7000-8000-000000000002"
    bucket(1, handler="b", failed_count=3, duplicate_count=2, worker_id=other)
    bucket(5, handler="a", skipped_count=5)
    bucket(6, handler="a", completed_count=1000)
    bucket(0, handler="a", completed_count=1000)
    bucket(2, queue="other", handler="c", completed_count=50)
    # When
    rows = [{"queue": "mail"}, {"queue": "other"}]
    metrics.add_rates(rows)
    # Then
    assert [row["per_minute"] for row in rows] == [5.0, 10.0]


@pytest.mark.django_db
def test_a_lag_is_followed_to_the_present_minute():
    for ago, lag in ((7, 10_000), (4, 100), (2, 60), (0, 20)):
        bucket(ago, handler="", lag=lag)
        bucket(ago, handler="a", completed_count=1)
    assert lag_of() == (-20.0, Trend.SHRINKING)


@pytest.mark.django_db
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
