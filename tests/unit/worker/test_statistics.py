"""Counting what a worker did."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import DatabaseError, connections
from django.db.models.signals import pre_save
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from kjo_django.clock import Clock
from kjo_django.conf import get_settings
from kjo_django.engine.attempt import Attempt, Delivery, Ending, RefusedRecord
from kjo_django.exceptions import MessageError
from kjo_django.ids import uuid7
from kjo_django.models import BOUNDS, UPPER_MILLISECONDS, MetricBucket, MetricRollup
from kjo_django.operations.monitoring import metrics
from kjo_django.registry import find
from kjo_django.runtime import current_runtime
from kjo_django.transports.base import Record
from kjo_django.worker import statistics as module
from kjo_django.worker.statistics import OutageLog, RollupMerger, Statistics
from tests.ledger.models import Entry
from tests.unit.deliveries import NAMELESS, Silent
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db


def outcome(result: Ending = Ending.COMPLETED, *, handler="ledger.write", waited=None, **facts):
    record = Record("ledger", 0, 0, None, b"{}", {})
    queue = get_settings().queue("ledger")
    delivery: Delivery
    if handler:
        delivery = Delivery(record, Silent(), queue, "tests", NAMELESS, find(handler))
    else:
        unread = MessageError("invalid", "no")
        delivery = RefusedRecord(record, Silent(), queue, "tests", unread)
    job = None
    if waited is not None:
        facts["started_at"] = timezone.now()
        job = SimpleNamespace(available_at=facts["started_at"] - timedelta(seconds=waited))
    return Attempt(delivery, result, row=job, **facts)


@pytest.fixture
def statistics():
    return Statistics(current_runtime(), uuid7())


@given(st.floats(0, 1e6))
def test_a_histograms_bucket_holds_what_is_below_its_bound(seconds):
    index = bisect_right(UPPER_MILLISECONDS, seconds * 1000)
    assert 0 <= index < BOUNDS
    if index < BOUNDS - 1:
        assert seconds * 1000 < 2**index
    if index:
        assert int(seconds * 1000) >= 2 ** (index - 1)


def test_a_clock_that_stepped_back_counts_as_no_time():
    assert bisect_right(UPPER_MILLISECONDS, -5 * 1000) == 0


def test_outcomes_are_counted_by_their_kind(statistics):
    results = [Ending.COMPLETED] * 3 + [Ending.RETRIED] * 2 + [Ending.DEAD]
    others = [Ending.DUPLICATE, Ending.SKIPPED, Ending.DEFERRED]
    statistics.add([outcome(result) for result in results + others])
    assert (statistics.processed, statistics.failed, statistics.retried) == (6, 1, 2)


def test_the_last_error_is_kept(statistics):
    statistics.add([outcome(Ending.RETRIED, error=ValueError("first"))])
    statistics.add([outcome(Ending.DEAD, error=ValueError("last " + "x" * 600)), outcome()])
    assert statistics.last_error.startswith("last xxx")
    assert len(statistics.last_error) == 500
    assert statistics.last_error_at <= timezone.now()


@pytest.mark.promise("skipped-is-counted")
def test_a_flush_writes_a_row_per_minute_queue_and_handler(statistics):
    # Given
    statistics.add(
        [
            outcome(waited=0.5, seconds=0.003),
            outcome(waited=0.5, seconds=0.003),
            outcome(Ending.DEAD, handler="ledger.refuse", waited=3),
            outcome(Ending.DUPLICATE, handler=None),
        ]
    )
    # When
    statistics.flush()
    # Then
    written = {row.handler: row for row in MetricBucket.objects.all()}
    assert set(written) == {"ledger.write", "ledger.refuse", ""}
    row = written["ledger.write"]
    assert (row.completed_count, row.failed_count, row.queue) == (2, 0, "ledger")
    assert row.run_histogram[2] == 2  # from 2 to 4 ms
    assert row.wait_histogram[9] == 2  # from 256 to 512 ms
    assert (sum(row.run_histogram), sum(row.wait_histogram)) == (2, 2)
    assert row.run_seconds_sum == pytest.approx(0.006)
    assert row.wait_seconds_sum == pytest.approx(1.0)
    assert row.minute.second == 0
    assert written["ledger.refuse"].failed_count == 1
    assert written[""].duplicate_count == 1


def test_a_second_flush_adds_to_the_same_minute(statistics, monkeypatch):
    now = timezone.now().replace(second=30)
    monkeypatch.setattr(statistics, "_clock", SimpleNamespace(now=lambda: now))
    for _ in range(2):
        statistics.add([outcome(waited=0, seconds=0.5)])
        statistics.flush()
    row = MetricBucket.objects.get()
    assert (row.completed_count, sum(row.run_histogram)) == (2, 2)
    assert (row.run_seconds_sum, row.wait_seconds_sum) == (1.0, 0.0)


def test_the_minutes_of_a_quarter_and_an_hour_are_rolled_up(statistics, monkeypatch):
    hour = timezone.now().replace(minute=0, second=30, microsecond=0)
    for minute in (1, 14, 16):
        now = hour.replace(minute=minute)
        monkeypatch.setattr(statistics, "_clock", SimpleNamespace(now=lambda now=now: now))
        statistics.add([outcome(waited=0, seconds=0.5)])
        statistics.flush()

    rows = MetricRollup.objects.order_by("minutes", "minute")
    assert [(row.minutes, row.minute.minute, row.completed_count) for row in rows] == [
        (15, 0, 2),
        (15, 15, 1),
        (60, 0, 3),
    ]
    assert sum(rows.last().run_histogram) == 3
    assert MetricBucket.objects.count() == 3


def test_a_job_that_started_before_it_was_due_takes_nothing_off_the_sum(statistics):
    """A counter that falls is taken for a restart by Prometheus."""
    statistics.add([outcome(waited=-30, seconds=0.5), outcome(waited=2, seconds=0.5)])
    statistics.flush()
    assert MetricBucket.objects.get().wait_seconds_sum == 2.0


def test_nothing_new_writes_nothing(statistics, django_assert_num_queries):
    statistics.add([])
    with django_assert_num_queries(0):
        statistics.flush()


def test_each_worker_has_rows_of_its_own(statistics):
    for one in (statistics, Statistics(current_runtime(), uuid7())):
        one.add([outcome()])
        one.flush()
    assert MetricBucket.objects.count() == 2


def test_what_an_outage_kept_from_being_written_is_written_later(statistics, monkeypatch):
    # Given
    statistics.add([outcome(waited=0, seconds=0.5)])

    def away(self, key, bucket):
        raise DatabaseError("away")

    with monkeypatch.context() as patch:
        patch.setattr(Statistics, "_write", away)
        with pytest.raises(DatabaseError):
            statistics.flush()
    # When
    statistics.add([outcome(waited=0, seconds=0.5)])
    statistics.flush()
    # Then
    rows = MetricBucket.objects.all()
    assert sum(row.completed_count for row in rows) == 2
    assert sum(sum(row.run_histogram) for row in rows) == 2
    assert sum(row.run_seconds_sum for row in rows) == 1.0


def test_lanes_count_at_the_same_time(statistics):
    def work() -> None:
        for _ in range(200):
            statistics.add([outcome(), outcome(Ending.DEAD)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (statistics.processed, statistics.failed) == (1600, 800)


# --- Beside other writers of a file of SQLite -----------------------------------------------------


@pytest.mark.usefixtures("sqlite_file")
def test_counts_are_kept_though_another_writes_meanwhile(monkeypatch):
    """Who has read and then writes is refused at once, however long he would wait."""
    # Given rows that are read and added to
    statistics = Statistics(current_runtime(), uuid7())
    statistics.add([outcome()])
    statistics.flush()
    statistics.add([outcome()])

    # And a writer that comes in between
    def write() -> None:
        Entry.objects.create(job="j")
        connections.close_all()

    writer, add = threading.Thread(target=write), module._sum

    def add_beside_a_writer(left, right):
        if writer.ident is None:
            writer.start()
            writer.join(0.5)
        return add(left, right)

    monkeypatch.setattr(module, "_sum", add_beside_a_writer)
    # When
    statistics.flush()
    writer.join(PATIENCE)
    # Then
    assert MetricBucket.objects.get().completed_count == 2
    assert Entry.objects.count() == 1


# --- What a worker cannot do just now: told once, kept until it is over ---------------------------


def test_an_outage_is_told_once_and_kept_until_it_is_over(caplog):
    # Given
    caplog.set_level(logging.ERROR, "kjo_django")
    told, before = [], timezone.now()
    outages = OutageLog(lambda source, error: told.append((source, error)))
    # When a part meets the same again and again
    for _ in range(3):
        outages.note("relay", "the broker is away")
    # Then
    assert told == [("relay", "the broker is away")]
    assert caplog.messages == ["relay: the broker is away"]
    assert outages.error == "the broker is away"
    assert before <= outages.began_at <= timezone.now()
    # And once it is over, it is news again
    outages.note("relay", None)
    assert (outages.error, outages.began_at) == ("", None)
    outages.note("relay", "the broker is away")
    assert len(told) == 2


def test_what_one_part_has_is_not_over_since_another_works():
    # Given
    outages = OutageLog(lambda source, error: None)
    outages.note("mailers (default)", "away")
    outages.note("mailers (other)", "gone")
    # When
    outages.note("mailers (default)", None)
    # Then
    assert outages.error == "gone"


def test_a_worker_tells_groups_of_one_name_apart(settings):
    """Two transports with a group of the same name, of which one works."""
    # Given
    from kjo_django.worker.process import Worker

    memory = {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}
    queue = {"consumer_group": "mailers"}
    settings.KJO = {
        "TRANSPORTS": {"default": memory, "other": memory},
        "QUEUES": {"a": queue, "b": {**queue, "transport": "other"}},
    }
    told = []
    worker = Worker(["a", "b"], on_error=lambda source, error: told.append(source))
    one, other = worker.pollers
    # When
    for _ in range(2):
        one._on_error("away")
        other._on_error(None)
    # Then
    assert told == ["mailers (default)"]
    assert worker.last_error == "away"


# --- Roll-ups of several workers ------------------------------------------------------------------


def roll_ups(count, *, hours_ago=3, **values):
    """Roll-ups of so many workers, of an hour and of its first quarter."""
    hour = timezone.now().replace(minute=0, second=0, microsecond=0) - timedelta(hours=hours_ago)
    histogram = [0] * (BOUNDS - 1) + [1]
    facts = {"minute": hour, "queue": "ledger", "handler": "ledger.write", "completed_count": 1}
    facts |= {"run_histogram": histogram, "wait_histogram": histogram, "run_seconds_sum": 2.0}
    rows = [
        MetricRollup(minutes=minutes, worker_id=uuid7(), **{**facts, **values})
        for minutes in MetricRollup.LENGTHS
        for _ in range(count)
    ]
    MetricRollup.objects.bulk_create(rows)


def merge():
    RollupMerger(current_runtime(), "me").work_on(["METRICS"])


def figures():
    """What the screens show of the last day and of the last week."""
    return [
        [
            (point.completed, point.runs, point.waits, point.run_seconds, point.lag)
            for point in points
        ]
        for _, points in map(metrics.series, (timedelta(days=1), timedelta(days=7)))
    ]


def test_roll_ups_of_several_workers_become_one_row_and_screens_show_the_same():
    roll_ups(3)
    roll_ups(2, handler="ledger.other")
    roll_ups(1, handler="", lag=5, run_histogram=[], wait_histogram=[], completed_count=0)
    roll_ups(2, handler="", run_histogram=[], wait_histogram=[], completed_count=0, skipped_count=1)
    before = figures()
    merge()
    assert MetricRollup.objects.count() == 3 * len(MetricRollup.LENGTHS)
    assert figures() == before


def test_what_a_worker_adds_later_is_merged_in_its_turn():
    roll_ups(2)
    merge()
    roll_ups(1)
    merge()
    assert [row.completed_count for row in MetricRollup.objects.all()] == [3, 3]
    assert {row.worker_id for row in MetricRollup.objects.all()} == {RollupMerger.WORKER}


def test_roll_ups_of_a_time_that_is_not_over_stay_each_workers_own():
    roll_ups(2, hours_ago=0)
    merge()
    hours = MetricRollup.objects.filter(minutes=MetricRollup.HOUR)
    assert hours.count() == 2


def test_a_row_that_is_merged_while_its_worker_adds_to_it_is_not_made_again():
    # Given a worker that counts late, and a merge between its look for the row and its write
    class Late(Clock):
        def now(self):
            return hour

    hour = timezone.now().replace(minute=0, second=0, microsecond=0) - timedelta(hours=3)
    statistics = Statistics(replace(current_runtime(), clock=Late()), uuid7())
    statistics.add([outcome()])
    statistics.flush()
    statistics.add([outcome()])
    roll_ups(1)

    def merge_first(**facts):
        pre_save.disconnect(merge_first, sender=MetricRollup)
        merge()

    pre_save.connect(merge_first, sender=MetricRollup, weak=False)
    # When
    with pytest.raises(DatabaseError):
        statistics.flush()
    statistics.flush()
    merge()
    # Then
    assert [row.completed_count for row in MetricRollup.objects.all()] == [3, 3]


def test_roll_ups_of_one_worker_are_not_touched():
    roll_ups(1)
    before = set(MetricRollup.objects.values_list("pk", "worker_id"))
    merge()
    assert set(MetricRollup.objects.values_list("pk", "worker_id")) == before
