"""A worker in this process: what it starts, how it stops, what it tells. On a SQLite file."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import uuid4

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connection
from django.utils import timezone

from kjo_django import job, signals
from kjo_django.conf import get_settings
from kjo_django.coordination.base import alive_name
from kjo_django.engine.group import Pipeline
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.poller import Poller
from kjo_django.engine.recorder import Recorder
from kjo_django.engine.runners.loop import LoopRunner
from kjo_django.exceptions import CoordinationError, PublishError
from kjo_django.limits import lines
from kjo_django.models import DeadLetter, HeldJob, Job, LimitControl, MetricBucket, QueueControl
from kjo_django.models import Worker as WorkerRow
from kjo_django.operations.maintenance import topics
from kjo_django.operations.workers import Assignment, assignments, rebalanced_at
from kjo_django.outbox.relay import Relay
from kjo_django.runtime import current_runtime, get_coordination, get_transport
from kjo_django.schedules.ticker import Ticker
from kjo_django.worker import Worker
from kjo_django.worker.duties import LineDuty, Rescuer
from kjo_django.worker.heartbeat import Controls, Heartbeat, LifeSign
from kjo_django.worker.lanes import Lanes
from kjo_django.worker.supervisor import THREAD_DIED
from tests.ledger.jobs import (
    always_fails,
    give,
    write,
    write_async,
    write_keyed,
    write_outside,
    write_together,
)
from tests.ledger.models import Entry
from tests.unit.deliveries import KJO, MEMORY, Named, as_job
from tests.unit.workers import Running
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.medium  # threads and waits of a worker, in real time


@pytest.fixture(params=["database", "memory"])
def transport(request):
    return request.param


@pytest.fixture(autouse=True)
def _configured(request, settings, sqlite_file, forgotten_definitions):
    has_transport = "transport" in request.fixturenames
    kind = request.getfixturevalue("transport") if has_transport else "database"
    settings.KJO = {
        **KJO,
        **(MEMORY if kind == "memory" else {}),
        "QUEUES": {"ledger": {}, "other": {}},
        "POLL_INTERVAL": 0.2,
        "HEARTBEAT_INTERVAL": 0.2,
        "BACKOFF_BASE": 0.05,
        "SHUTDOWN_GRACE": 5,
        "CONCURRENCY": 3,
    }


def finished() -> bool:
    return not Job.objects.open().exists()


# --- Work -----------------------------------------------------------------------------------------


def test_it_runs_what_waits_and_what_comes_until_it_is_stopped(transport):
    """Promise 5: no settings but a transport, no server, one process."""
    write.enqueue(job="before")
    with Running() as running:
        wait_until(lambda: Entry.objects.filter(job="before").exists())
        write.enqueue(job="after")
        write_async.enqueue(job="async")
        write_outside.enqueue(job="outside")
        wait_until(finished)
    assert running.code == 0
    assert sorted(Entry.objects.values_list("job", flat=True)) == [
        "after",
        "async",
        "before",
        "outside",
    ]
    assert set(Job.objects.values_list("state", flat=True)) == {"completed"}


def test_keys_keep_their_order_over_three_lanes(transport):
    write_keyed.enqueue_many({"job": str(n), "key": str(n % 4)} for n in range(60))
    with Running():
        wait_until(finished)
    for key in "0123":
        found = Entry.objects.filter(note=key).order_by("id").values_list("job", flat=True)
        assert [int(job) for job in found] == sorted(int(job) for job in found)
    assert Entry.objects.count() == 60


def test_two_workers_share_the_work_and_repeat_none_of_it(transport):
    with Running(name="one"), Running(name="two"):
        write.enqueue_many({"job": str(n)} for n in range(100))
        wait_until(finished)
    assert Entry.objects.count() == Entry.objects.values("job").distinct().count() == 100


def test_it_drains_and_ends(transport):
    write.enqueue_many({"job": str(n)} for n in range(20))
    worker = Worker(["ledger"])
    assert worker.run(until=worker.is_drained) == 0
    assert Entry.objects.count() == 20
    assert worker.is_drained()


def test_it_is_not_drained_while_a_slot_that_is_free_again_has_to_let_the_next_start(
    transport, monkeypatch, forgotten_definitions
):
    # Given jobs of one slot, and a thread that releases the next only when the worker was asked
    # whether it is drained
    ran: list[int] = []

    @job(name="bench.slotted", queue="ledger", concurrency=1, atomic=False)
    def slotted(n: int) -> None:
        if not ran:
            wait_until(lambda: HeldJob.objects.count() == 3)
        ran.append(n)

    slotted.enqueue_many({"n": n} for n in range(4))
    worker, asked = Worker(["ledger"]), threading.Event()
    release = lines.release

    def release_late(*arguments):
        asked.clear()
        assert asked.wait(PATIENCE)
        return release(*arguments)

    def is_drained():
        is_drained = worker.is_drained()
        asked.set()
        return is_drained

    monkeypatch.setattr(lines, "release", release_late)
    # When, then
    assert worker.run(until=is_drained) == 0
    assert sorted(ran) == [0, 1, 2, 3]


def test_what_is_due_later_does_not_keep_it_from_being_drained():
    write.using(delay=timedelta(hours=1)).enqueue(job="later")
    worker = Worker(["ledger"])
    assert worker.is_drained()
    write.enqueue(job="now")
    assert not worker.is_drained()


@pytest.mark.parametrize("kind", ["atomic", "outside", "batch", "coroutine"])
def test_it_ends_after_exactly_so_many_messages(kind):
    """Two ran five: a group of five had begun."""

    async def fly(job: str) -> None:
        await Entry.objects.acreate(job=job)

    kinds = {"atomic": write, "outside": write_outside, "batch": write_together}
    job = kinds.get(kind) or as_job(fly, atomic=False)
    job.enqueue_many({"job": str(n)} for n in range(9))
    worker = Worker(["ledger"], max_messages=2)
    assert worker.run() == 0
    assert Entry.objects.count() == 2
    worker = Worker(["ledger"], max_messages=3, concurrency=1)
    assert worker.run() == 0
    assert Entry.objects.count() == 5


# --- Lanes ----------------------------------------------------------------------------------------


@pytest.fixture
def far_away(monkeypatch, settings) -> Iterator[threading.Event]:
    """Whether the database takes 12 ms to tell its time."""
    settings.KJO = {**settings.KJO, "CONCURRENCY": None, "HEARTBEAT_INTERVAL": 0.05}
    is_far, store = threading.Event(), type(current_runtime().store)
    tell = store.server_time

    def tell_from_afar(self):
        if is_far.is_set():
            time.sleep(0.012)  # sleep: the round trip that is measured
        return tell(self)

    monkeypatch.setattr(store, "server_time", tell_from_afar)
    yield is_far


def test_near_its_database_a_worker_has_four_lanes(far_away):
    worker = Worker(["ledger"])
    worker.open()
    assert worker.concurrency == 4


def test_a_worker_that_is_far_from_its_database_has_more_lanes(far_away):
    """Four lanes 20 ms away waited for the database nearly all the time."""
    far_away.set()
    worker = Worker(["ledger"])
    worker.open()
    assert worker.concurrency == worker.controls.limits["ledger"].groups == 16


def test_a_worker_that_is_far_away_runs_as_many_handlers_at_once(far_away, forgotten_definitions):
    together = threading.Barrier(6)

    @job(name="bench.together", queue="ledger", atomic=False)
    def meet() -> None:
        together.wait(PATIENCE)

    far_away.set()
    with Running():
        meet.enqueue_many([{}] * 6)
        wait_until(finished)
    assert set(Job.objects.values_list("state", flat=True)) == {"completed"}


def test_handlers_that_take_the_processor_are_not_taken_for_a_database_far_away(far_away):
    """They prolong what the heartbeat measures, and each lane more would prolong it more."""
    with Running() as running:
        wait_until(lambda: running.worker.lanes.threads)
        far_away.set()
        budget = running.worker.runtime.group_budget
        wait_until(lambda: budget.round_trip > 0.01)
        assert len(running.worker.lanes.threads) == running.worker.concurrency == 4


@pytest.mark.parametrize(
    ("setting", "argument", "options", "expected"),
    [(3, None, {}, 3), (None, 2, {}, 2), (None, None, {"pool": True}, 4)],
    ids=["setting", "argument", "pool"],
)
def test_a_number_of_lanes_that_was_given_holds_however_far_the_database_is(
    far_away, settings, monkeypatch, setting, argument, options, expected
):
    """Nor is a pool of connections outgrown, whose threads would wait for one another."""
    far_away.set()
    settings.KJO = {**settings.KJO, "CONCURRENCY": setting}
    connection.ensure_connection()  # that of SQLite knows no pool
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    worker = Worker(["ledger"], concurrency=argument)
    worker.open()
    assert worker.concurrency == worker.controls.limits["ledger"].groups == expected


def test_other_queues_are_left_alone():
    write.using(queue="other").enqueue(job="theirs")
    write.enqueue(job="mine")
    with Running(["ledger"]):
        wait_until(lambda: Entry.objects.exists())
    assert list(Entry.objects.values_list("job", flat=True)) == ["mine"]


def test_an_unknown_queue_is_refused_with_the_known_ones():
    with pytest.raises(ImproperlyConfigured, match=r"No queue is named 'legder'\. Known: .*ledger"):
        Worker(["legder"])


# --- Stopping -------------------------------------------------------------------------------------


def test_what_runs_may_finish_and_what_waits_is_handed_back(transport):
    """Shutdown spends no attempt."""
    # Given: one runs, the others wait behind it
    started, release = threading.Event(), threading.Event()

    def hold(job):
        started.set()
        release.wait(PATIENCE)
        Entry.objects.create(job=job)

    holding = as_job(hold)
    holding.using(key="k").enqueue_many([{"job": "runs"}, {"job": "waits"}, {"job": "waits too"}])
    with Running(concurrency=1) as running:
        assert started.wait(PATIENCE)
        # When
        running.worker.stop()
        wait_until(lambda: running.worker.scheduler.is_stopped)
        release.set()
        running.join()
    # Then
    assert running.code == 0
    assert list(Entry.objects.values_list("job", flat=True)) == ["runs"]
    states = [(job.state, job.attempts) for job in Job.objects.order_by("id")]
    assert states == [("completed", 1), ("queued", 0), ("queued", 0)]
    assert not list(get_coordination().names("CONS:"))


def test_a_job_that_does_not_end_within_the_grace_costs_the_exit_code(settings):
    # Given
    settings.KJO = {**settings.KJO, "SHUTDOWN_GRACE": 0.1}
    started, release, contexts = threading.Event(), threading.Event(), []

    def hang(context):
        contexts.append(context)
        started.set()
        release.wait(PATIENCE)

    # Within a transaction it would keep SQLite's one write lock from everybody else.
    as_job(hang, takes_context=True, atomic=False).enqueue()
    with Running() as running:
        assert started.wait(PATIENCE)
        # When
        running.worker.stop()
        running.join()
        release.set()
    # Then
    assert running.code == 1
    assert contexts[0].aborted
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("kjo-lane")])


@pytest.mark.parametrize(
    "name",
    [
        *("SHUTDOWN_GRACE", "TIMEOUT", "PROCESSING_TTL", "SENT_TTL", "RECORD_LEASE"),
        *("STATUS_REPORT_INTERVAL", "RESCUE_AFTER", "BACKOFF_MAX"),
    ],
)
def test_a_time_without_end_ends_no_worker_badly(settings, caplog, name):
    settings.KJO = {**settings.KJO, name: timedelta.max}
    started, release = threading.Event(), threading.Event()

    def run():
        started.set()
        release.wait(PATIENCE)

    as_job(run, atomic=False).enqueue()
    with Running() as running:
        assert started.wait(PATIENCE)
        running.worker.stop()
        threading.Timer(0.2, release.set).start()
        running.join()
    assert running.code == 0
    assert finished()
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_a_job_that_minds_its_abort_flag_ends_with_the_worker(settings):
    settings.KJO = {**settings.KJO, "SHUTDOWN_GRACE": 0.1}
    started = threading.Event()

    def mind(context):
        started.set()
        wait_until(lambda: context.aborted)

    as_job(mind, takes_context=True).enqueue()
    with Running() as running:
        assert started.wait(PATIENCE)
        running.worker.stop()
        running.join()
    assert running.code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_signal_stops_it_well_and_its_handlers_are_restored(number):
    before = signal.getsignal(number)
    worker = Worker(["ledger"], install_signal_handlers=True)
    threading.Timer(0.3, os.kill, [os.getpid(), number]).start()
    assert worker.run() == 0
    assert signal.getsignal(number) is before


def test_no_thread_outlives_it():
    with Running(["ledger"]):
        wait_until(lambda: WorkerRow.objects.exists())
    left = [t.name for t in threading.enumerate() if t.name.startswith(("kjo-lane", "kjo-poll"))]
    assert left == []


# --- Surviving ------------------------------------------------------------------------------------


def test_a_lane_survives_an_error_nobody_expected(failing, caplog):
    # Given: a bug in the pipeline
    failing(Pipeline, "run", ZeroDivisionError("a bug"))
    write.enqueue(job="a")
    # When
    with Running(concurrency=1):
        wait_until(finished)
    # Then
    assert Entry.objects.count() == 1
    assert "A lane failed on a group of 1" in caplog.text


@pytest.mark.parametrize("atomic", [True, False])
def test_a_handler_that_exits_takes_no_lane_with_it(atomic):
    def leave():
        sys.exit(1)

    as_job(leave, max_attempts=1, atomic=atomic).enqueue_many([{}] * 5)
    with Running(concurrency=2):
        wait_until(lambda: DeadLetter.objects.count() == 5)
        write.enqueue(job="after")
        wait_until(lambda: Entry.objects.exists())


class Panic(BaseException):
    """As libraries written in Rust raise it: no ``Exception``, and nothing Python itself knows."""


@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"batch": 3}])
def test_a_handler_that_panics_takes_no_lane_with_it(options):
    def panic(items=()):
        raise Panic("at src/lib.rs:7")

    job = as_job(panic, max_attempts=1, **options)
    job.enqueue_many([{}] * 5)
    with Running(concurrency=2):
        wait_until(lambda: DeadLetter.objects.count() == 5)
        write.enqueue(job="after")
        wait_until(lambda: Entry.objects.exists())
    assert set(DeadLetter.objects.values_list("error", flat=True)) == {"at src/lib.rs:7"}


class Broken(logging.Handler):
    """As projects have them: it reads ``request``, which records of a worker do not have."""

    def handle(self, record: logging.LogRecord) -> bool:
        return bool(record.request)  # type: ignore[attr-defined]


@pytest.fixture
def _broken_logging():
    """Every record raises where it is logged, whoever logs it; asyncio tells of each loop."""
    broken, level = Broken(), logging.root.level
    logging.root.addHandler(broken)
    logging.root.setLevel(logging.DEBUG)
    yield
    logging.root.removeHandler(broken)
    logging.root.setLevel(level)


@pytest.mark.parametrize(
    "options",
    [{}, {"atomic": False}, {"batch": 3}, {"is_async": True}, {"is_async": True, "atomic": False}],
    ids=str,
)
@pytest.mark.usefixtures("_broken_logging")
def test_logging_that_raises_takes_no_lane_with_it(options, hear):
    """One failing job for each lane was enough: then nothing ran, and the worker looked alive."""
    # Given
    options = dict(options)

    def fail(items=()):
        raise ValueError("a failure that is logged")

    async def afail():
        raise ValueError("a failure that is logged")

    def receive(**facts):
        raise KeyError("a failure that Django logs")

    handler = afail if options.pop("is_async", False) else fail
    as_job(handler, max_attempts=2, **options).enqueue_many([{}] * 7)
    signals.job_failed.connect(receive)
    # When
    try:
        with Running(concurrency=2) as running:
            wait_until(lambda: DeadLetter.objects.count() == 7)
            write.enqueue(job="after")
            write_outside.enqueue(job="outside")
            wait_until(lambda: Entry.objects.count() == 2)
    finally:
        signals.job_failed.disconnect(receive)
    # Then it ends as it should, within its grace
    assert running.code == 0


@pytest.mark.usefixtures("_broken_logging")
def test_a_callback_that_fails_ends_no_coroutine_beside_it():
    """The event loop logs what a callback raises. What that raised ended the loop, and each of its
    coroutines."""
    # Given
    has_failed = threading.Event()

    def fail():
        has_failed.set()
        raise ValueError("of a callback")

    async def call_back():
        asyncio.get_running_loop().call_soon(fail)

    async def wait_for_it():
        while not has_failed.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)

    # When
    for name, function in (("bench.waits", wait_for_it), ("bench.calls", call_back)):
        as_job(function, name, atomic=False, max_attempts=1).enqueue()
    with Running():
        wait_until(lambda: not Job.objects.open().exists())
    # Then
    assert set(Job.objects.values_list("state", flat=True)) == {"completed"}


def dying(monkeypatch, kind, name):
    """Let one thread that is started from now on die at its first step, by an error that nothing
    catches. What other tests have left running is not it."""
    step, has_died, others = getattr(kind, name), threading.Event(), {*threading.enumerate()}

    def die(*arguments, **options):
        if threading.current_thread() not in others and not has_died.is_set():
            has_died.set()
            raise SystemExit("a bug")
        return step(*arguments, **options)

    monkeypatch.setattr(kind, name, die)


@pytest.mark.parametrize(
    ("kind", "name", "thread"),
    [
        (Lanes, "run_group", "kjo-lane-"),
        (Poller, "step", "kjo-poll-"),
        (Relay, "step", "kjo-relay"),
        (LifeSign, "step", "kjo-alive"),
        (Heartbeat, "step", "kjo-heartbeat"),
        (Rescuer, "step", "kjo-duties"),
        (LineDuty, "step", "kjo-line"),
        (Ticker, "step", "kjo-schedules"),
        (Recorder, "step", "kjo-recorder"),
        (LoopRunner, "_run", "kjo-loop"),
        (TimeoutWatch, "_look", "kjo-timeouts"),
    ],
    ids=lambda each: each if isinstance(each, str) and each.startswith("kjo") else "",
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_one_of_whose_threads_has_died_ends_and_says_which(
    settings, monkeypatch, caplog, kind, name, thread
):
    """It would show signs of life, and do a part of its work no longer. What the dead thread would
    have settled is not waited for."""
    # Given a transport with a relay
    settings.KJO = settings.KJO | MEMORY | {"SHUTDOWN_GRACE": 3600}
    dying(monkeypatch, kind, name)
    timed = as_job(lambda: None, "bench.timed", timeout=timedelta(seconds=30))
    timed.enqueue()
    as_job(write_async.handler.function, "bench.outside", atomic=False).enqueue(job="async")
    # When
    running = Running(schedules=True)
    running._thread.start()
    running.join()
    # Then
    assert running.code == THREAD_DIED
    assert caplog.text.count("Threads have died, so the worker ends") == 1
    assert f"so the worker ends: {thread}" in running.worker.last_error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_its_row_names_the_thread_though_something_else_was_wrong_before(settings, monkeypatch):
    settings.KJO = settings.KJO | MEMORY
    running = Running()
    running.worker._outages.note("relay", "the broker is away")
    dying(monkeypatch, Heartbeat, "step")
    running._thread.start()
    running.join()
    assert "so the worker ends: kjo-heartbeat" in running.worker.last_error


def test_a_lane_that_failed_holds_no_leases(monkeypatch):
    """They would be renewed for ever, although a rebalance may have taken the records away."""
    # Given: a bug, in what runs a job
    failed = threading.Event()

    def fail(self, delivery):
        failed.set()
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Pipeline, "_run_alone", fail)
    write.enqueue(job="a")
    # When
    with Running(concurrency=1) as running:
        assert failed.wait(PATIENCE)
        # Then, until it is tried again
        wait_until(lambda: not running.worker.leases._held)
        wait_until(lambda: not list(get_coordination().names("CONS:")))


def test_a_worker_without_coordination_works_on(coordination_away):
    coordination_away("claim", "renew", "release", "holders", "notify", "listen")
    write.enqueue(job="a")
    with Running():
        wait_until(finished)
    assert Entry.objects.count() == 1


def test_leases_not_given_back_in_an_outage_are_given_back_after_it(monkeypatch):
    """Else a retry that comes to another worker would wait for PROCESSING_TTL."""

    def refuse(*args, **kwargs):
        raise CoordinationError("away")

    # Given leases that could not be released, one of them taken again since
    coordination, day = get_coordination(), timedelta(days=1)
    book = LeaseBook(current_runtime(), "me", day, day)
    first, second = Named("CONS:X:1"), Named("CONS:X:2")
    book.claim([first, second])
    with monkeypatch.context() as outage:
        outage.setattr(coordination, "release", refuse)
        book.settle([first, second])
    book.claim([second])
    assert set(coordination.holders(["CONS:X:1", "CONS:X:2"])) == {"CONS:X:1", "CONS:X:2"}
    # When coordination is back
    book.show_alive()
    # Then others may have what is not held
    assert set(coordination.holders(["CONS:X:1", "CONS:X:2"])) == {"CONS:X:2"}


# --- Being seen and obeying -----------------------------------------------------------------------


def test_it_is_known_while_it_lives_and_says_goodbye():
    with Running(name="host-1") as running:
        wait_until(lambda: WorkerRow.objects.exists())
        row = WorkerRow.objects.get()
        assert (row.name, row.pid, row.queues, row.state) == (
            "host-1",
            os.getpid(),
            ["ledger"],
            "running",
        )
        assert row.concurrency == 3
        write.enqueue(job="a")
        wait_until(lambda: WorkerRow.objects.get().processed_count == 1)
        assert running.worker.id == row.pk
    row = WorkerRow.objects.get()
    assert row.state == "stopped"
    assert row.heartbeat_at <= timezone.now()
    assert sum(bucket.completed_count for bucket in MetricBucket.objects.all()) == 1


def rows_by_name() -> dict[str, list[Assignment]]:
    rows = WorkerRow.objects.filter(state="running")
    return {row.name: assignments(row.partitions) for row in rows}


def given_to(name: str, count: int) -> datetime:
    """Wait for a row to tell of so many partitions; return since when."""

    def is_told() -> bool:
        held = rows_by_name().get(name, [])
        return len(held) == count and rebalanced_at(held) is not None

    wait_until(is_told)
    return rebalanced_at(rows_by_name()[name])


def test_its_row_tells_when_a_rebalance_changed_its_partitions(settings):
    # Given one that has all there is
    topics = {"partitions": 2, "replication_factor": 1}
    settings.KJO = {**settings.KJO, **MEMORY, "TOPIC_OPTIONS": topics}
    with Running(name="one"):
        alone = given_to("one", 2)
        group = get_settings().queue("ledger").consumer_group
        assert {each.group for each in rows_by_name()["one"]} == {group}
        # When a second comes
        with Running(name="two"):
            # Then the rows of both say so, and when
            shared = given_to("one", 1)
            assert alone < shared <= given_to("two", 1)
        # And when it has left, the first one's says that
        wait_until(lambda: given_to("one", 2) > shared)


def test_its_row_names_the_job_that_runs(transport):
    release = threading.Event()

    def hold():
        release.wait(PATIENCE)

    def told() -> list[tuple[str, str]]:
        held = rows_by_name().get("one", ())
        return [(job.id, job.handler) for each in held for job in each.running]

    holding = as_job(hold, atomic=False)
    with Running(name="one"):
        try:
            job_id = holding.enqueue().job_id
            wait_until(lambda: told() == [(str(job_id), "bench.hold")])
        finally:
            release.set()
        # And no longer than it does
        wait_until(lambda: told() == [])


def test_its_row_tells_since_when_what_it_has_fetched_waits_for_a_lane(settings):
    # Given a log transport, which has no other worker start what this one has fetched
    settings.KJO = {**settings.KJO, **MEMORY}
    release = threading.Event()

    def hold():
        release.wait(PATIENCE)

    def waiting_since() -> list[datetime]:
        held = rows_by_name().get("one", ())
        return [each.waiting_since for each in held if each.waiting_since is not None]

    with Running(name="one", concurrency=1):
        try:
            as_job(hold, atomic=False).enqueue()
            wait_until(lambda: any(each.running for each in rows_by_name().get("one", ())))
            # When
            enqueued_at = timezone.now()
            write.enqueue(job="a")
            # Then
            wait_until(waiting_since)
            assert enqueued_at <= waiting_since()[0] <= timezone.now()
        finally:
            release.set()
        # And no longer than it does
        wait_until(lambda: not waiting_since())


def test_it_touches_its_heartbeat_file(tmp_path):
    path = tmp_path / "alive"
    with Running(heartbeat_file=str(path)):
        wait_until(path.exists)
    assert path.read_text().startswith("20")


def test_a_pause_is_obeyed_and_its_end_too():
    QueueControl.objects.create(queue="ledger", is_paused=True)
    with Running():
        wait_until(lambda: WorkerRow.objects.exists())
        write.enqueue(job="a")
        time.sleep(0.5)  # sleep: a chance to run for the job that must not
        assert not Entry.objects.exists()
        QueueControl.objects.update(is_paused=False)
        wait_until(lambda: Entry.objects.exists())


def test_the_end_of_a_pause_is_obeyed_by_a_worker_that_is_idle(monkeypatch):
    """Its consumer waits: nobody publishes when a pause ends."""
    # Given
    monkeypatch.setattr("kjo_django.engine.poller.POLL_TIMEOUT", 10 * PATIENCE)
    monkeypatch.setattr("kjo_django.engine.poller.IDLE_POLL_TIMEOUT", 10 * PATIENCE)
    QueueControl.objects.create(queue="ledger", is_paused=True)
    with Running() as running:
        (poller,) = running.worker.pollers
        wait_until(lambda: poller._paused)
        write.enqueue(job="a")
        # When
        QueueControl.objects.update(is_paused=False)
        # Then
        wait_until(lambda: Entry.objects.exists())


def test_signals_tell_what_became_of_each_job_after_it_is_durable(hear):
    """Observed from a connection of its own: only what is committed can be seen."""
    # Given
    seen = []

    def look(signal, sender, job_id, **facts):
        if facts.get("attempt"):
            seen.append((facts["attempt"], Job.objects.get(pk=job_id).state))

    signals.job_completed.connect(look)
    signals.job_retried.connect(look)
    signals.job_failed.connect(look)
    done = give.enqueue(value=[1])
    dead = always_fails.enqueue(job="x")
    heard = hear("job_completed", "job_retried", "job_failed", "message_dead_lettered")
    life = hear("worker_started", "worker_stopped")
    # When
    with Running():
        wait_until(lambda: len(heard) >= 4)
    # Then
    facts = {each["signal"]: each for each in heard}
    assert facts["job_completed"]["result"] == [1]
    assert facts["job_completed"]["job_id"] == str(done.job_id)
    assert facts["job_completed"]["sender"] == facts["job_completed"]["handler"] == "ledger.give"
    assert facts["job_retried"]["attempt"] == 1
    assert str(facts["job_failed"]["error"]) == "always fails"
    assert facts["message_dead_lettered"]["reason"] == "exhausted"
    assert facts["message_dead_lettered"]["dead_letter_id"] == str(DeadLetter.objects.get().pk)
    assert facts["job_failed"]["job_id"] == str(dead.job_id)
    assert sorted(seen) == [(1, "completed"), (1, "failing"), (2, "failed")]
    assert [each["signal"] for each in life] == ["worker_started", "worker_stopped"]


def test_a_receiver_that_raises_changes_nothing(caplog):
    def receiver(**facts):
        raise RuntimeError("a receiver broke")

    signals.job_completed.connect(receiver)
    try:
        write.enqueue(job="a")
        with Running():
            wait_until(finished)
            wait_until(lambda: "a receiver broke" in caplog.text)
            write.enqueue(job="b")
            wait_until(finished)
    finally:
        signals.job_completed.disconnect(receiver)
    assert Entry.objects.count() == 2


def test_an_outage_of_the_transport_is_its_last_error_and_passes(transport, caplog):
    caplog.set_level(logging.CRITICAL, "kjo_django")
    if transport == "database":
        pytest.skip("it goes with the database itself")
    with Running() as running:
        get_transport().fail("the broker is away")
        write.enqueue(job="a")
        wait_until(lambda: "the broker is away" in running.worker.last_error)
        get_transport().fail(None)
        Job.objects.update(available_at=timezone.now())
        wait_until(finished)


def test_signs_of_life_and_leases_go_on_while_the_database_is_away(tmp_path, monkeypatch):
    """Nobody has a reason to take over what runs here, or to restart the worker."""
    # Given a worker whose duties in the database fail; coordination is elsewhere and answers
    alive, done = tmp_path / "alive", []
    running = Running(heartbeat_file=str(alive))
    leases = running.worker.leases

    def away(self) -> None:
        raise OperationalError("the database is away")

    monkeypatch.setattr(Controls, "read", away)
    monkeypatch.setattr(leases, "show_alive", lambda: done.append("alive"))
    monkeypatch.setattr(leases, "renew", lambda: done.append("renewed"))
    # When, then
    with running:
        wait_until(lambda: alive.exists() and "renewed" in done and done.count("alive") > 3)


def test_a_heartbeat_file_that_cannot_be_written_costs_the_probe_alone(tmp_path, caplog):
    """A disk may fill up, or become read-only, while a worker runs: its leases live on."""
    with Running(heartbeat_file=str(tmp_path / "gone" / "alive")) as running:
        leases = running.worker.leases
        first = WorkerRow.objects.filter(pk=running.worker.id)
        wait_until(first.exists)
        told = first.get().heartbeat_at
        wait_until(lambda: first.get().heartbeat_at > told)
        assert get_coordination().holders([alive_name(leases.token)])
    errors = [record for record in caplog.records if "heartbeat file" in record.getMessage()]
    assert len(errors) == 1


class Watched(dict):
    """What lanes read; notes the keys there are after each change."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _note(self):
        self.seen.append(set(self))

    def update(self, *arguments):
        super().update(*arguments)
        self._note()

    def clear(self):
        super().clear()
        self._note()

    def __delitem__(self, key):
        super().__delitem__(key)
        self._note()


def test_what_operators_asked_holds_while_it_is_read_anew():
    """For a moment no limit held: a lane that asked for none began what was not permitted."""
    # Given
    LimitControl.objects.create(name="queue:ledger", rate="1/s")
    gone = LimitControl.objects.create(name="queue:other", rate="1/s")
    QueueControl.objects.create(queue="ledger", concurrency=1)
    limits, queues = Watched(), Watched()
    runtime = replace(current_runtime(), queue_controls=queues, limit_controls=limits)
    controls = Controls(runtime, uuid4(), [get_settings().queue("ledger")], 4)
    controls.read()
    limits.seen.clear()
    queues.seen.clear()
    # When
    gone.delete()
    LimitControl.objects.update(rate="2/s")
    controls.read()
    # Then
    assert all("queue:ledger" in seen for seen in limits.seen)
    assert all("ledger" in seen for seen in queues.seen)
    assert {name: row.rate for name, row in limits.items()} == {"queue:ledger": "2/s"}


def test_a_heartbeat_survives_an_error_nobody_expected(monkeypatch, caplog):
    broken, beaten = iter([True]), threading.Event()
    read = Controls.read

    def fail_once(self) -> bool:
        if next(broken, False):
            raise ZeroDivisionError("a bug")
        beaten.set()
        return read(self)

    with Running() as running:
        wait_until(lambda: running.worker.pollers[0].partitions)
        monkeypatch.setattr(Controls, "read", fail_once)
        assert beaten.wait(PATIENCE)
    assert "Heartbeat failed, trying again: a bug" in caplog.text


def test_a_topic_found_missing_later_stops_no_heartbeat(monkeypatch):
    # Given: the broker is away when the worker starts, and when it is back a topic is missing
    answers = iter([PublishError("away")])

    def look(queues):
        raise next(answers, None) or ImproperlyConfigured("Topic 'ledger' is missing")

    monkeypatch.setattr(topics, "ensure_topics", look)
    with Running() as running:
        # Then: it is told, and the worker's row goes on saying that it lives
        wait_until(lambda: "is missing" in running.worker.last_error)
        before = timezone.now()
        wait_until(lambda: WorkerRow.objects.get().heartbeat_at > before)
        assert "is missing" in WorkerRow.objects.get().last_error


def test_a_broker_that_lets_the_question_for_topics_wait_holds_up_no_heartbeat(monkeypatch):
    """Half a minute without a sign of life, and others take over what runs here."""
    # Given: the broker is away when the worker starts, and then answers nothing at all
    first, asked, answered = iter([PublishError("away")]), threading.Event(), threading.Event()

    def look(queues):
        if error := next(first, None):
            raise error
        asked.set()
        answered.wait(2 * PATIENCE)
        raise PublishError("away still")

    monkeypatch.setattr(topics, "ensure_topics", look)
    with Running():
        try:
            assert asked.wait(PATIENCE)
            before = timezone.now()
            # Then
            wait_until(lambda: WorkerRow.objects.get().heartbeat_at > before)
        finally:
            answered.set()


def test_signs_of_life_do_not_wait_for_a_database_that_hangs(monkeypatch):
    """After three missed ones, others would run again what runs here outside a transaction."""
    # Given a worker whose connection hangs while it reads what operators want
    hangs, go_on = threading.Event(), threading.Event()
    given: list[float] = []
    show_alive = LeaseBook.show_alive

    def count(self):
        given.append(time.monotonic())
        show_alive(self)

    def hang(self):
        hangs.set()
        go_on.wait(PATIENCE)
        return False

    monkeypatch.setattr(LeaseBook, "show_alive", count)
    with Running():
        wait_until(lambda: len(given) >= 2)
        monkeypatch.setattr(Controls, "read", hang)
        assert hangs.wait(PATIENCE)
        before = len(given)
        # Then it goes on showing that it lives
        wait_until(lambda: len(given) >= before + 3)
        go_on.set()
