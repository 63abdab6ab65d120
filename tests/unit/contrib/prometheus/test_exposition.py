"""Metrics for Prometheus: what is measured, what it costs, and who may read it (KJO-102)."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import UUID

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import AnonymousUser, Permission
from django.db import DatabaseError, connection
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import include, path, reverse
from django.utils import timezone
from prometheus_client.parser import text_string_to_metric_families

from kjo_django import conf, registry
from kjo_django.contrib.prometheus import MetricsView, exposition
from kjo_django.coordination.redis import RedisCoordination
from kjo_django.exceptions import CoordinationError, PublishError
from kjo_django.ids import uuid7_floor
from kjo_django.models import (
    BOUNDS,
    UPPER_MILLISECONDS,
    DeadLetter,
    HeldJob,
    Schedule,
    Workflow,
)
from kjo_django.operations.maintenance import topics
from kjo_django.runtime import get_coordination, get_transport
from kjo_django.transports.base import OutgoingRecord, TopicPartition
from kjo_django.transports.memory import MemoryTransport
from tests.conformance.test_coordination_redis import cache_at
from tests.factories import (
    DeadLetterFactory,
    JobFactory,
    MetricBucketFactory,
    QueueControlFactory,
    WorkerFactory,
)
from tests.ledger.workflows import ended, imported

pytestmark = [pytest.mark.medium, pytest.mark.django_db(transaction=True)]
TOKEN = "a-token-of-Prometheus"
urlpatterns = [path("kjo/metrics", include("kjo_django.contrib.prometheus.urls"))]


@pytest.fixture(autouse=True)
def _memory(settings, monkeypatch):
    settings.KJO = {
        "TRANSPORTS": {
            "default": {"BACKEND": "kjo_django.transports.memory.MemoryTransport"},
        },
        "QUEUES": {"emails": {"topic_options": {"partitions": 2}}},
        "METRICS_TOKEN": TOKEN,
    }
    transport = get_transport()
    transport.clear()
    topics.create()
    # Never the hour's first seconds: what a test counted would belong to the hour before.
    noon = timezone.now().replace(minute=30, second=0, microsecond=0)
    monkeypatch.setattr(exposition, "timezone", SimpleNamespace(now=lambda: noon))
    yield
    transport.clear()


def get(by=None, **headers):
    request = RequestFactory().get("/kjo/metrics", headers=headers)
    request.user = by or AnonymousUser()
    return MetricsView.as_view()(request)


def scrape():
    """The families by name, as Prometheus' own client reads them."""
    response = get(authorization=f"Bearer {TOKEN}")
    assert response.status_code == 200, response.content
    families = list(text_string_to_metric_families(response.content.decode()))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


def value(families, name, suffix="", **labels):
    """The one sample with these labels."""
    family = families[name.removesuffix("_total")]
    (found,) = (
        sample.value
        for sample in family.samples
        if sample.name == name + suffix and labels.items() <= sample.labels.items()
    )
    return found


def histogram(seconds):
    counts = [0] * BOUNDS
    for duration in seconds:
        counts[bisect_right(UPPER_MILLISECONDS, duration * 1000)] += 1
    return counts


# --- What is measured -----------------------------------------------------------------------------


def test_the_embedded_default_has_metrics_too(settings):
    """KJO-102: with nothing configured but the token, and nothing in any table."""
    settings.KJO = {"METRICS_TOKEN": TOKEN}
    families = scrape()
    assert value(families, "kjo_workers_alive") == 0
    assert value(families, "kjo_collected", part="lag") == 1


def test_what_workers_did_is_added_up_over_workers_and_minutes():
    """KJO-102: success and failure rates by queue and handler."""
    kind = {"queue": "emails", "handler": "shop.send"}
    now = exposition.timezone.now()
    MetricBucketFactory(**kind, minute=now, completed_count=5, failed_count=1, retried_count=2)
    MetricBucketFactory(**kind, minute=now, completed_count=7, duplicate_count=3, skipped_count=4)
    MetricBucketFactory(**kind, minute=now - timedelta(minutes=1), completed_count=1)
    families = scrape()
    for name, count in (
        ("completed", 13),
        ("failed", 1),
        ("retried", 2),
        ("duplicate", 3),
        ("skipped", 4),
    ):
        assert value(families, f"kjo_jobs_{name}_total", **kind) == count
        assert families[f"kjo_jobs_{name}"].type == "counter"


def test_permits_that_were_not_used_are_counted() -> None:
    kind = {"queue": "emails", "handler": "shop.send"}
    MetricBucketFactory(**kind, minute=exposition.timezone.now(), unused_permit_count=5)
    assert value(scrape(), "kjo_permits_unused_total", **kind) == 5


def test_a_new_hour_begins_with_nothing():
    """What is read is bounded, and pruning never takes anything from a counter."""
    MetricBucketFactory(
        queue="emails", handler="shop.send", minute=exposition.timezone.now() - timedelta(hours=1)
    )
    assert not [
        sample
        for sample in scrape()["kjo_jobs_completed"].samples
        if sample.labels["handler"] == "shop.send"
    ]


def test_every_handler_is_told_of_before_it_ran():
    """Or an hour's first failure would be no increase."""
    handler = registry.handlers()[0]
    labels = {"queue": handler.options.queue, "handler": handler.name}
    families = scrape()
    assert value(families, "kjo_jobs_failed_total", **labels) == 0
    assert value(families, "kjo_job_run_seconds", "_count", **labels) == 0


@pytest.mark.parametrize("name", ["run", "wait"])
def test_durations_are_histograms_with_percentiles(name):
    """KJO-102: p50, p95 and p99 of the processing duration, from cumulative buckets."""
    # Given: half takes 3 ms, some 100 ms, one an age
    counts = histogram([0.003] * 50 + [0.1] * 49 + [100_000])
    kind = {"queue": "emails", "handler": "shop.send"}
    now = exposition.timezone.now()
    sums = {f"{name}_seconds_sum": 100_005.05}
    MetricBucketFactory(**kind, minute=now, **{f"{name}_histogram": counts}, **sums)
    MetricBucketFactory(**kind, minute=now, **{f"{name}_histogram": []})
    # When
    family = scrape()[f"kjo_job_{name}_seconds"]
    # Then
    assert family.type == "histogram"
    lines = [sample for sample in family.samples if kind.items() <= sample.labels.items()]
    buckets = [(float(s.labels["le"]), s.value) for s in lines if s.name.endswith("_bucket")]
    assert [le for le, _ in buckets] == [0.001 * 2**n for n in range(BOUNDS - 1)] + [math.inf]
    assert [count for _, count in buckets] == sorted(count for _, count in buckets)
    assert buckets[-1] == (math.inf, 100)
    assert [sample.value for sample in lines if sample.name.endswith("_count")] == [100]
    # The mean is rate(_sum) / rate(_count).
    assert [sample.value for sample in lines if sample.name.endswith("_sum")] == [100_005.05]
    assert quantile(0.50, buckets) <= 0.004
    assert 0.064 < quantile(0.95, buckets) <= 0.128
    assert 0.064 < quantile(0.99, buckets) <= 0.128


def quantile(share, buckets):
    """The upper bound of the bucket it lies in."""
    return next(le for le, count in buckets if count >= share * buckets[-1][1])


def test_the_lag_of_each_partition():
    """KJO-102."""
    get_transport().publish([OutgoingRecord("emails", b"x", partition=1)] * 3)
    families = scrape()
    assert value(families, "kjo_consumer_lag", queue="emails", partition="0") == 0
    assert value(families, "kjo_consumer_lag", queue="emails", partition="1") == 3


def test_the_production_rate_is_that_of_the_last_minute(monkeypatch):
    """KJO-102."""
    monkeypatch.undo()
    JobFactory.create_batch(6, queue="emails")
    families = scrape()
    assert value(families, "kjo_production_rate", queue="emails") == 0.1
    assert value(families, "kjo_production_rate", queue="ledger") == 0


def test_many_jobs_shorten_the_time_the_production_rate_is_of(monkeypatch):
    """KJO-102: ten rows are looked at, and took ten seconds."""
    monkeypatch.undo()
    monkeypatch.setattr(exposition, "PRODUCTION_ROWS", 10)
    JobFactory.create_batch(20, queue="emails", created_at=timezone.now() - timedelta(seconds=10))
    assert value(scrape(), "kjo_production_rate", queue="emails") == pytest.approx(1.0, rel=0.2)


def test_the_queues_the_relay_and_the_workers_as_they_are(monkeypatch):
    """KJO-102."""
    now = exposition.timezone.now()
    JobFactory(queue="emails", available_at=now - timedelta(seconds=90))
    JobFactory(queue="emails", queued=True, available_at=now - timedelta(seconds=120))
    DeadLetterFactory(queue="emails", failed_at=now - timedelta(hours=1))
    DeadLetterFactory(queue="emails", failed_at=now - timedelta(minutes=1))
    DeadLetterFactory(queue="emails", failed_at=now - timedelta(days=9), discarded=True)
    QueueControlFactory(queue="paused", is_paused=True)
    alive = {"heartbeat_at": now, "in_flight_count": 2, "rss_bytes": 1000, "concurrency": 4}
    WorkerFactory.create_batch(2, **alive)
    WorkerFactory(**{**alive, "heartbeat_at": now - timedelta(hours=1)})
    families = scrape()
    assert value(families, "kjo_outbox_backlog") == 1
    assert value(families, "kjo_outbox_oldest_seconds") == 90
    assert value(families, "kjo_oldest_waiting_seconds", queue="emails") == 120
    assert value(families, "kjo_dead_letters_open", queue="emails") == 2
    assert value(families, "kjo_dead_letters_oldest_seconds", queue="emails") == 3600
    assert value(families, "kjo_dead_letters_oldest_seconds", queue="paused") == 0
    assert value(families, "kjo_queue_paused", queue="paused") == 1
    assert value(families, "kjo_queue_paused", queue="emails") == 0
    assert value(families, "kjo_workers_alive") == 2
    assert value(families, "kjo_jobs_running") == 4
    assert value(families, "kjo_worker_lanes") == 8
    assert value(families, "kjo_workers_memory_bytes") == 2000


def test_schedules_are_counted_by_state_and_the_latest_is_told():
    now = timezone.now().replace(minute=30, second=0, microsecond=0)
    for name, columns in {
        "late": {"next_at": now - timedelta(seconds=90), "last_at": now},
        "broken": {"next_at": now, "problem": "no such job"},
        "paused": {"next_at": now - timedelta(days=1), "is_paused": True},
        "removed": {"is_enabled": False},
    }.items():
        Schedule.objects.create(name=name, job="x", every=60, **columns)
    found = scrape()
    states = dict.fromkeys(("active", "broken", "paused", "disabled"), 1)
    assert {state: value(found, "kjo_schedules", state=state) for state in states} == states
    assert value(found, "kjo_schedule_late_seconds") == 90
    assert value(found, "kjo_schedule_last_tick_timestamp_seconds") == now.timestamp()


def test_ticks_are_counted_by_schedule_and_those_of_very_many_together(monkeypatch):
    counted = {"stored_count": 5, "late_count": 2, "skipped_count": 3}
    for name in "abcd":
        Schedule.objects.create(name=name, job="x", every=60, **counted)
    kinds = {"kjo_schedule_ticks": 5, "kjo_schedule_ticks_late": 2, "kjo_schedule_ticks_skipped": 3}
    for kind, count in kinds.items():
        assert value(scrape(), kind, "_total", schedule="d") == count
    monkeypatch.setattr(exposition, "MOST_NAMES", 2)
    found = scrape()
    for kind, count in kinds.items():
        assert value(found, kind, "_total", schedule="b") == count
        assert value(found, kind, "_total", schedule="") == 2 * count


def test_open_workflows_are_counted_by_name_and_state():
    ended(loads=2)
    ended(loads=2, fails=True, on_failure="hold", name="export")
    for _ in range(2):
        imported(loads=2)
    a_minute_ago = exposition.timezone.now() - timedelta(minutes=1)
    Workflow.objects.filter(name="export").update(created_at=a_minute_ago)
    families = scrape()
    assert value(families, "kjo_workflows_open", workflow="import", state="running") == 2
    assert value(families, "kjo_workflows_open", workflow="export", state="held") == 1
    assert value(families, "kjo_workflows_oldest_seconds", workflow="export", state="held") == 60


def test_jobs_that_wait_for_a_limit_are_counted():
    now = timezone.now().replace(minute=30, second=0, microsecond=0)
    # Those on their way to a worker too
    for seconds, is_released in ((90, False), (10, False), (99, True)):
        since = now - timedelta(seconds=seconds)
        HeldJob.objects.create(
            job_id=JobFactory().pk,
            limit="RATE:queue:emails",
            queue="emails",
            is_released=is_released,
            waiting_since=since,
        )
    found = scrape()
    assert value(found, "kjo_jobs_held", queue="emails") == 3
    assert value(found, "kjo_jobs_held_oldest_seconds", queue="emails") == 99


def test_due_jobs_are_counted_and_delayed_ones_are_not():
    """RST-29: the length of the queue."""
    now = exposition.timezone.now()
    JobFactory.create_batch(2, queue="emails", available_at=now - timedelta(seconds=1))
    JobFactory.create_batch(3, queue="emails", queued=True, available_at=now)
    JobFactory(queue="emails", available_at=now + timedelta(hours=1))
    families = scrape()
    assert value(families, "kjo_jobs_due", queue="emails") == 5
    assert value(families, "kjo_jobs_due", queue="ledger") == 0


def letters(count, at, **fields):
    first = uuid7_floor(at).int
    for number in range(count):
        id = UUID(int=first + number + 1000 * DeadLetter.objects.count())
        DeadLetterFactory(id=id, queue="emails", **fields)


def test_dead_letters_are_counted_by_reason_and_the_discarded_apart():
    """KDLQ-F4: what max_kills drops is seen."""
    now = exposition.timezone.now()
    letters(2, now, reason="exhausted")
    letters(1, now, reason="fatal", state="discarded")
    letters(5, now - timedelta(hours=1), reason="exhausted")
    families = scrape()
    emails = {"queue": "emails"}
    assert value(families, "kjo_dead_letters_total", **emails, reason="exhausted") == 2
    assert value(families, "kjo_dead_letters_total", **emails, reason="fatal") == 1
    assert value(families, "kjo_dead_letters_total", **emails, reason="stalled") == 0
    assert value(families, "kjo_dead_letters_discarded_total", **emails) == 1
    assert value(families, "kjo_dead_letters_discarded_total", queue="ledger") == 0


def test_a_discard_takes_nothing_off_a_counter():
    """Prometheus would take that for a restart, and count it all again."""
    letters(2, exposition.timezone.now(), reason="exhausted")
    DeadLetter.objects.update(state="discarded")
    families = scrape()
    assert value(families, "kjo_dead_letters_total", queue="emails", reason="exhausted") == 2
    assert value(families, "kjo_dead_letters_discarded_total", queue="emails") == 2


@pytest.mark.postgres
def test_the_sessions_of_postgres(postgres):
    """RST-29: connections, of workers and of others."""
    families = scrape()
    assert value(families, "kjo_database_connections", client="other") >= 1
    before = value(families, "kjo_database_connections", client="worker")
    with connection.cursor() as cursor:
        cursor.execute("SET application_name = 'kjo-1234 app'")
    assert value(scrape(), "kjo_database_connections", client="worker") == before + 1


def test_names_and_units_are_those_of_the_conventions():
    """Counters end with _total, and times and sizes say their base unit."""
    for family in exposition.collect(5):
        assert re.fullmatch(r"kjo_[a-z]+(_[a-z]+)*", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter")
        assert not re.search(r"(_ms|_milliseconds|_kb|_mb|_minutes|_ratio_percent)", family.name)
        if re.search(r"oldest|_run_|_wait_", family.name):
            assert family.name.endswith("_seconds")
        if "memory" in family.name:
            assert family.name.endswith("_bytes")


def test_no_label_holds_what_a_message_says():
    """However many strange types, keys and topics come: the labels stay those of the project."""
    now = exposition.timezone.now()
    few = {tuple(s[1].items()) for family in exposition.collect(5) for s in family.samples}
    for number in range(30):
        JobFactory(queue="emails", handler=f"strange-{number}", key=f"k{number}", available_at=now)
        DeadLetterFactory(queue="emails", handler=f"strange-{number}", topic=f"t{number}")
    many = {tuple(s[1].items()) for family in exposition.collect(5) for s in family.samples}
    assert many == few


@pytest.mark.redis
def test_the_memory_of_redis(settings, redis_server):
    """KJO-102: where it coordinates."""
    assert scrape()["kjo_redis_memory_bytes"].samples == []
    settings.CACHES = {**settings.CACHES, "kjo": cache_at(redis_server.url)}
    backend = "kjo_django.coordination.redis.RedisCoordination"
    settings.KJO = {
        **settings.KJO,
        "COORDINATION": {"BACKEND": backend, "OPTIONS": {"CACHE": "kjo"}},
    }
    assert isinstance(get_coordination(), RedisCoordination)
    assert 100_000 < value(scrape(), "kjo_redis_memory_bytes") < 10**10


def test_what_does_not_answer_is_left_out_and_told_of(monkeypatch):
    """KJO-102: the rest is there all the same."""

    def refuse(self, *args):
        raise PublishError("the broker is away")

    class Away:
        def memory_bytes(self, timeout):
            raise CoordinationError("redis is away")

    monkeypatch.setattr(MemoryTransport, "lag", refuse)
    monkeypatch.setattr(exposition, "get_coordination", Away)
    families = scrape()
    assert value(families, "kjo_collected", part="lag") == 0
    assert value(families, "kjo_collected", part="redis") == 0
    assert families["kjo_consumer_lag"].samples == []
    assert value(families, "kjo_workers_alive") == 0


def test_it_is_the_same_on_every_database(real_database):
    """KJO-102: SQLite files and PostgreSQL; the queries are written for both."""
    now = exposition.timezone.now()
    kind = {"queue": "emails", "handler": "shop.send"}
    MetricBucketFactory(**kind, minute=now, completed_count=5, run_histogram=histogram([0.003] * 5))
    JobFactory(queue="emails", available_at=now - timedelta(seconds=90))
    DeadLetterFactory(queue="emails")
    families = scrape()
    assert value(families, "kjo_jobs_completed_total", **kind) == 5
    assert value(families, "kjo_job_run_seconds", "_bucket", **kind, le="0.002") == 0
    assert value(families, "kjo_job_run_seconds", "_bucket", **kind, le="0.004") == 5
    assert value(families, "kjo_oldest_waiting_seconds", queue="emails") == 90
    assert value(families, "kjo_dead_letters_open", queue="emails") == 1
    assert value(families, "kjo_collected", part="lag") == 1


# --- What it costs --------------------------------------------------------------------------------


def queries():
    with CaptureQueriesContext(
        connection,
    ) as captured:
        scrape()
    return [query["sql"] for query in captured if query["sql"] not in ("BEGIN", "COMMIT")]


def test_the_number_of_queries_does_not_grow_and_none_counts_all_jobs(monkeypatch):
    """KJO-102."""
    lag = {TopicPartition("emails", number): 1 for number in range(50)}
    monkeypatch.setattr(MemoryTransport, "lag", lambda self, topics, group: lag)
    few = queries()
    now = exposition.timezone.now()
    for number in range(20):
        JobFactory(queue=f"q{number}", available_at=now)
        DeadLetterFactory(queue=f"q{number}")
        MetricBucketFactory(queue=f"q{number}", handler=f"h{number}", minute=now)
        WorkerFactory(heartbeat_at=now)
        QueueControlFactory(queue=f"q{number}")
    many = queries()
    assert len(many) == len(few) <= 15
    for statement in many:
        if "COUNT(" in statement and 'FROM "kjo_job"' in statement:
            assert "LIMIT" in statement, statement


# --- Who may read it ------------------------------------------------------------------------------


def somebody(*permissions):
    made = get_user_model().objects.create_user("u")
    made.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    return get_user_model().objects.get(pk=made.pk)


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer ö"]
)
def test_without_the_token_nobody_reads(header):
    response = get(authorization=header)
    assert (response.status_code, response["WWW-Authenticate"]) == (401, "Bearer")
    assert b"kjo_" not in response.content


@pytest.mark.parametrize("header", ["Bearer None", "Bearer ", ""])
def test_no_token_lets_nobody_in(settings, header):
    settings.KJO = {**settings.KJO, "METRICS_TOKEN": None}
    assert get(authorization=header).status_code == 401


def test_the_token_or_the_permission_to_see_jobs_is_enough():
    response = get(authorization=f"bearer {TOKEN}")
    assert response.status_code == 200
    assert response["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert response["Cache-Control"] == "no-store"
    assert get(by=somebody("view_job")).status_code == 200


def test_who_may_not_see_jobs_sees_no_metrics():
    assert get(by=somebody("view_worker")).status_code == 401


@pytest.mark.urls(__name__)
def test_it_is_included_where_the_project_wants_it(client):
    assert reverse("kjo_prometheus:metrics") == "/kjo/metrics"
    answer = client.get("/kjo/metrics", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200
    assert client.post("/kjo/metrics").status_code in (403, 405)


def test_a_database_that_is_away_is_a_503(monkeypatch):
    def refuse(timeout):
        raise DatabaseError("at 10.0.0.1")

    monkeypatch.setattr("kjo_django.contrib.prometheus.collect", refuse)
    response = get(authorization=f"Bearer {TOKEN}")
    assert response.status_code == 503
    assert b"10.0.0.1" not in response.content


@pytest.mark.parametrize("token", ["", 5])
def test_a_token_that_is_none_lets_nobody_in_and_says_what_is_wrong(settings, token):
    """It answered 500."""
    settings.KJO = {"METRICS_TOKEN": token}
    assert get().status_code == 401
    assert get(authorization=f"Bearer {token}").status_code == 401
    # And who is let in by their permission is told where to look
    answer = get(by=somebody("view_job"))
    assert answer.status_code == 503
    assert b"see manage.py check" in answer.content


def test_the_token_is_never_shown(settings):
    assert TOKEN not in repr(conf.get_settings())
    settings.KJO = {"METRICS_TOKEN": 12345678}
    (problem,) = conf.problems()
    assert "METRICS_TOKEN" in problem.message
    assert "12345678" not in problem.message + problem.hint


# --- The format -----------------------------------------------------------------------------------


def test_labels_and_help_are_escaped():
    odd = 'a "quoted"\\ name\nin two lines, ünïcode}'
    family = exposition.Family("kjo_x", "gauge", "Two\nlines \\ and more.")
    family.add(1.5, queue=odd, other="b")
    (read,) = text_string_to_metric_families(exposition.render([family]))
    assert read.documentation == "Two\nlines \\ and more."
    (sample,) = read.samples
    assert (sample.labels, sample.value) == ({"queue": odd, "other": "b"}, 1.5)


def test_a_histogram_needs_a_count_for_each_bound_and_an_open_one():
    family = exposition.Family("kjo_x", "histogram", "X.")
    with pytest.raises(ValueError):
        family.add_histogram((0.1, 0.2), (1, 2), 0.5)


def test_the_hour_is_the_one_of_utc(monkeypatch):
    """Where local hours begin at half past, too."""
    moment = datetime(2026, 1, 2, 3, 20, tzinfo=UTC)
    kolkata = moment.astimezone(timezone.get_fixed_timezone(330))
    monkeypatch.setattr(exposition, "timezone", SimpleNamespace(now=lambda: kolkata))
    for minute, count in ((59, 100), (60, 10), (80, 1)):
        MetricBucketFactory(
            queue="emails",
            handler="shop.send",
            minute=datetime(2026, 1, 2, 2, 0, tzinfo=UTC) + timedelta(minutes=minute),
            completed_count=count,
        )
    assert value(scrape(), "kjo_jobs_completed_total", handler="shop.send") == 11
