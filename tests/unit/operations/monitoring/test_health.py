"""Health: ordered checks, each with its fix, within a timeout (RST-31, KII-35)."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import OperationalError
from django.db.migrations.executor import MigrationExecutor
from django.utils import timezone

from kjo_django import registry
from kjo_django.coordination.database import DatabaseCoordination
from kjo_django.exceptions import CoordinationError, PublishError
from kjo_django.models import Job
from kjo_django.operations.maintenance import topics
from kjo_django.operations.maintenance.rescue import rescue
from kjo_django.operations.monitoring import health as module
from kjo_django.operations.monitoring.health import PROBES, Thresholds, health, is_healthy
from kjo_django.operations.workers import THREADS_DIED
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord
from kjo_django.transports.memory import MemoryTransport
from tests.clocks import set_now
from tests.factories import JobFactory, MetricBucketFactory, QueueControlFactory, WorkerFactory
from tests.unit.deliveries import on_memory
from tests.waiting import PATIENCE

# The probes run in threads of their own, which see committed rows only.
pytestmark = [pytest.mark.medium, pytest.mark.django_db(transaction=True)]


@pytest.fixture(autouse=True)
def memory(settings):
    with on_memory(settings, QUEUES={"emails": {}}) as transport:
        topics.create()
        yield transport


@pytest.fixture
def worker():
    return WorkerFactory(queues=registry.queue_names())


def check(name, **kwargs):
    return next(found for found in health(**kwargs) if found.name == name)


def test_all_is_well_with_a_worker_and_nothing_waiting(worker):
    checks = health()
    assert is_healthy(checks), [found for found in checks if not found.ok]
    assert [found.name for found in checks] == [probe.name for probe in PROBES]
    assert all(found.fix == "" and found.detail for found in checks)


def test_a_check_that_times_out_says_so_and_advises_nothing_else(monkeypatch, worker):
    """It has not found that workers are missing; to start one is no advice."""
    # Given
    answered = threading.Event()

    def hang(thresholds, timeout):
        answered.wait(PATIENCE)
        return True, "", ""

    slow = [replace(probe, ask=hang) if probe.name == "progress" else probe for probe in PROBES]
    monkeypatch.setattr(module, "PROBES", slow)
    # When
    try:
        found = {each.name: each for each in health(timeout=3)}
    finally:
        answered.set()
    # Then
    progress, scaling = found["progress"], found["scaling"]
    assert (progress.ok, progress.detail.startswith("timed out: no answer within")) == (False, True)
    assert progress.fix.startswith("It may be well: ask again with more time")
    assert progress.is_unknown and scaling.is_unknown
    assert (scaling.ok, scaling.fix) == (None, "")
    assert scaling.detail == "not checked: the time was up"
    assert not is_healthy(found.values())


def test_wrong_settings_are_named_and_nothing_else_is_asked(settings):
    settings.KJO = {"QUEUESS": {}}
    first, *rest = health()
    assert (first.name, first.ok) == ("settings", False)
    assert "QUEUESS" in first.detail
    assert "QUEUES" in first.fix
    assert {found.ok for found in rest} == {None}
    assert not is_healthy([first, *rest])


def test_the_embedded_default_is_well_without_relay_or_topics(settings, worker):
    settings.KJO = {}
    worker.queues = []
    worker.save()
    checks = health()
    assert is_healthy(checks), [found for found in checks if not found.ok]
    assert "not needed" in next(c for c in checks if c.name == "relay").detail


def test_a_transport_out_of_reach_takes_its_dependants_with_it(memory, worker):
    memory.fail("the broker is away")
    by_name = {found.name: found for found in health()}
    assert by_name["transports"].ok is False
    assert "the broker is away" in by_name["transports"].detail
    assert not by_name["transports"].is_unknown
    assert by_name["topics"].ok is by_name["lag"].ok is None
    assert by_name["workers"].ok is True


def test_coordination_out_of_reach_is_told(monkeypatch):
    def probe(self, timeout):
        raise CoordinationError("redis is away")

    monkeypatch.setattr(DatabaseCoordination, "probe", probe)
    assert "redis is away" in check("coordination").detail


def test_a_probe_that_hangs_is_given_up_in_time(monkeypatch):
    # Given a server behind a firewall
    answers = threading.Event()
    monkeypatch.setattr(MemoryTransport, "probe", lambda self, timeout: answers.wait())
    # When
    try:
        found = check("transports", timeout=0.5)
    finally:
        answers.set()
    # Then
    assert found.ok is False
    assert found.is_unknown
    assert "no answer" in found.detail

    # Nobody knows that it is stopped: whoever starts it a second time does harm.
    assert "stopped, overloaded or cut off" in found.fix
    assert "Start" not in found.fix


def test_what_needs_a_server_without_an_answer_does_not_call_it_unwell(monkeypatch, worker):
    def silent(self, timeout):
        raise PublishError("no metadata") from TimeoutError("no answer within 0.2 s")

    monkeypatch.setattr(MemoryTransport, "probe", silent)
    by_name = {found.name: found for found in health()}
    assert by_name["transports"].is_unknown
    assert by_name["lag"].detail == "not checked: transports gave no answer"
    assert not is_healthy(by_name.values())


def test_a_transport_that_is_broken_is_told_though_one_before_it_is_silent(settings, monkeypatch):
    backend = settings.KJO["TRANSPORTS"]["default"]
    settings.KJO = {**settings.KJO, "TRANSPORTS": {"default": backend, "other": backend}}
    errors = [TimeoutError("no answer within 0.2 s"), ConnectionRefusedError("refused")]

    def fail(self, timeout):
        raise PublishError("away") from errors.pop(0)

    monkeypatch.setattr(MemoryTransport, "probe", fail)
    found = check("transports")
    assert (found.detail, found.is_unknown, found.fix) == (
        "other: away",
        False,
        "Start it, or correct KJO['TRANSPORTS'].",
    )


@pytest.mark.parametrize("name", ["workers", "lag", "failures", "progress", "topics"])
def test_a_check_that_ends_with_an_error_gives_no_advice_about_what_it_has_not_seen(
    monkeypatch, name
):
    """More workers do not help where nobody could ask for the lag."""

    def fail(thresholds, timeout):
        raise OperationalError("the connection was reset")

    broken = [replace(probe, ask=fail) if probe.name == name else probe for probe in PROBES]
    monkeypatch.setattr(module, "PROBES", broken)
    # When
    found = check(name)
    # Then
    assert (found.ok, found.detail) == (False, "OperationalError: the connection was reset")
    assert found.fix == module.UNKNOWN


def test_missing_topics_are_named_with_the_command_that_makes_them(memory):
    memory.clear()
    found = check("topics")
    assert found.ok is False
    assert "emails" in found.detail
    assert "kjo_topics create" in found.fix


def test_a_relay_that_is_late_is_told():
    JobFactory(queue="emails", available_at=timezone.now() - timedelta(seconds=61))
    found = check("relay")
    assert (found.ok, "1 due jobs" in found.detail) == (False, True)


def test_a_queue_without_a_living_worker_is_told():
    WorkerFactory(queues=["emails"], stale=True)
    found = check("workers")
    assert found.ok is False
    assert "emails" in found.detail
    assert "kjo_consume" in found.fix


@pytest.mark.parametrize(("count", "ok"), [(100, True), (101, False)])
def test_the_lag_may_be_a_hundred_messages(memory, count, ok):
    """RST-31, RST-F3: lag, not the length of the stream."""
    memory.publish([OutgoingRecord("emails", b"x")] * count)
    assert check("lag").ok is ok
    assert check("lag", thresholds=Thresholds(lag=1000)).ok is True


@pytest.mark.parametrize(("failed", "ok"), [(10, True), (11, False)])
def test_a_tenth_of_the_jobs_may_fail(worker, failed, ok):
    """RST-31."""
    MetricBucketFactory(completed_count=100 - failed, failed_count=failed, worker_id=worker.pk)
    old = timezone.now() - timedelta(hours=1)
    MetricBucketFactory(minute=old, completed_count=0, failed_count=999, worker_id=worker.pk)
    assert check("failures").ok is ok


def test_a_few_failures_of_few_jobs_say_nothing(worker):
    MetricBucketFactory(completed_count=1, failed_count=1, worker_id=worker.pk)
    assert check("failures").ok is True


def test_work_that_waits_while_nothing_is_processed_is_told(worker):
    """RST-31: nothing processed in five minutes."""
    # Given
    JobFactory(queue="emails", queued=True, available_at=timezone.now() - timedelta(seconds=301))
    # When, then
    assert check("progress").ok is False
    # When something is processed, it is merely busy
    MetricBucketFactory(completed_count=1, worker_id=worker.pk)
    assert check("progress").ok is True


def test_work_of_a_paused_queue_may_wait():
    JobFactory(queue="emails", queued=True, available_at=timezone.now() - timedelta(hours=1))
    QueueControlFactory(queue="emails", is_paused=True)
    assert check("progress").ok is True


def test_unapplied_migrations_are_told(monkeypatch):
    monkeypatch.setattr(
        MigrationExecutor, "migration_plan", lambda self, targets: [("kjo_django", "0002")]
    )
    found = check("database")
    assert "not applied" in found.detail
    assert found.fix == "Run manage.py migrate."
    # And where the jobs are in another database than the default one
    monkeypatch.setattr(module, "DEFAULT_DB_ALIAS", "the project's")
    assert check("database").fix == "Run manage.py migrate --database default."


def test_a_transport_that_is_away_leaves_time_to_ask_the_rest(monkeypatch):
    """What has failed and what waits is in the database, and most wanted just then."""

    def probe(self, timeout):
        time.sleep(timeout)  # sleep: as long as it may
        raise PublishError("away")

    monkeypatch.setattr(MemoryTransport, "probe", probe)
    checks = {each.name: each for each in health(2.0)}
    assert checks["transports"].ok is False
    assert "away" in checks["transports"].detail
    assert checks["failures"].ok and checks["progress"].ok


def test_a_broker_away_for_an_hour_is_asked_for_the_lag_by_one_thread_at_a_time(monkeypatch):
    """Prometheus asks every few seconds: threads, and their database connections, would pile up."""
    asked, answered = [], threading.Event()

    def lag(self, topics, group):
        asked.append(topics)
        answered.wait(PATIENCE)
        return {}

    monkeypatch.setattr(MemoryTransport, "lag", lag)
    try:
        assert [module.lag_by_partition(0.05) for _ in range(3)] == [None] * 3
        assert len(asked) == 1
    finally:
        answered.set()


def test_a_probe_that_raises_is_a_failed_check(monkeypatch):
    def lag(self, topics, group):
        raise PublishError("no")

    monkeypatch.setattr(MemoryTransport, "lag", lag)
    assert check("lag").ok is False


# --- What keeps jobs from running though workers live ---------------------------------------------


def minutes_ago(minutes):
    return timezone.now() - timedelta(minutes=minutes)


def holding(minutes, partition=0):
    """Return what a worker's row tells of a partition."""
    since = minutes_ago(minutes).isoformat()
    return {"topic": "emails", "partition": partition, "group": "tests", "waiting_since": since}


def test_a_worker_that_holds_what_it_cannot_start_is_told_as_long_as_it_does(monkeypatch):
    # Given
    now = timezone.now()
    set_now(monkeypatch, lambda: now)
    fetched = [holding(1), holding(20, partition=3), holding(10, partition=2)]
    worker = WorkerFactory(name="w1", partitions=fetched)
    WorkerFactory(partitions=[holding(20)], stale=True)
    # When, then
    found = check("lanes")
    assert found.ok is False
    assert found.detail == "w1 has kept what it fetched from emails/3 for 1200 s"
    assert "workers of their own" in found.fix
    assert check("lanes", thresholds=Thresholds(idle=timedelta(hours=1))).ok
    # When
    worker.partitions = [holding(1)]
    worker.save()
    # Then
    assert check("lanes").detail == "no fetched record waits long for a lane"


def test_a_worker_that_has_ended_since_a_thread_died_is_told():
    # Given
    why = f"{THREADS_DIED}, so the worker ends: kjo-lane-1"
    WorkerFactory(name="w1", state="stopped", last_error=why)
    WorkerFactory(state="stopped", last_error="the broker was away")
    WorkerFactory(state="stopped", last_error=why, stale=True)
    # When
    found = check("lanes")
    # Then
    assert (found.ok, found.detail) == (False, f"w1 has ended: {why}")
    assert "the log of its worker" in found.fix


def test_jobs_that_are_rescued_again_and_again_are_told_until_they_run(monkeypatch):
    # Given a job whose message is dropped each time
    job = JobFactory(queue="emails", state="queued", queued_at=timezone.now())
    start = timezone.now()

    def rescue_after(minutes):
        set_now(monkeypatch, lambda: start + timedelta(minutes=minutes))
        assert rescue(["emails"]).republished == 1
        Job.objects.update(state="queued", queued_at=timezone.now())  # as the relay does

    # When, then
    rescue_after(20)
    assert check("rescues").ok
    rescue_after(40)
    found = check("rescues")
    assert found.ok is False
    waiting = f"1 of emails, as {job.pk}"
    assert found.detail == f"published long after they were due, and not run: {waiting}"
    assert "log of such a job" in found.fix
    # When
    Job.objects.update(state="completed", finished_at=timezone.now())
    # Then
    assert check("rescues").detail == "no job is published again and again"


@pytest.mark.parametrize("after", [timedelta(days=365 * 60), timedelta.max])
def test_where_nothing_is_ever_rescued_nothing_is_rescued_again(settings, after):
    settings.KJO = {**settings.KJO, "RESCUE_AFTER": after}
    JobFactory(
        queue="emails", state="queued", available_at=minutes_ago(60), queued_at=timezone.now()
    )
    assert check("rescues").ok


# --- KJO-100: the partitions bound the workers ----------------------------------------------------


def partitioned(settings, count):
    options = {"partitions": count}
    settings.KJO = {**settings.KJO, "QUEUES": {"emails": {"topic_options": options}}}
    get_transport().clear()
    topics.create()


def test_more_workers_than_partitions_are_a_warning(settings):
    """KJO-100: the third of two partitions stands by; all is well, but told."""
    # Given
    partitioned(settings, 2)
    WorkerFactory.create_batch(2, queues=["emails"])
    WorkerFactory(queues=["emails"], stale=True)
    WorkerFactory(queues=["other"])
    # When, then
    found = check("scaling")
    assert (found.ok, found.fix) == (True, "")
    # When
    WorkerFactory(queues=["emails"])
    # Then
    found = check("scaling")
    assert found.ok is True
    assert found.detail == "some workers have no partition: emails has 3 workers for 2 partitions"
    assert "twice the workers" in found.fix


def test_the_command_says_warning(settings, capsys):
    """KJO-100."""
    partitioned(settings, 1)
    WorkerFactory.create_batch(2, queues=["emails"])
    with contextlib.suppress(SystemExit, CommandError):
        call_command("kjo_health")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "  scaling " in line)
    assert line.startswith("warning  scaling")


def test_where_any_number_of_workers_shares_a_topic_none_stands_by(settings):
    """KJO-100: the database hands out records, not partitions."""
    settings.KJO = {"QUEUES": {"emails": {}}}
    WorkerFactory.create_batch(20, queues=["emails"])
    assert check("scaling").fix == ""


def test_a_topic_that_is_missing_is_told_elsewhere(memory):
    """KJO-100."""
    WorkerFactory.create_batch(2, queues=["emails"])
    memory.clear()
    assert (check("scaling").ok, check("topics").ok) == (True, False)
