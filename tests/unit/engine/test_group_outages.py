"""A database that is away."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from threading import Event

import pytest
from django.db import IntegrityError, OperationalError, connection, connections, transaction

from kjo_django.engine import failures
from kjo_django.engine.attempt import Ending
from kjo_django.exceptions import CoordinationError
from kjo_django.models import Job, ProcessedEvent
from kjo_django.runtime import get_coordination
from tests.items.models import Item
from tests.ledger import jobs as ledger
from tests.ledger.models import Entry
from tests.unit.deliveries import as_job, entries, the_job
from tests.unit.engine.bench import both, settled


def test_an_outage_of_the_database_spends_no_attempt_and_loses_nothing(bench, monkeypatch):
    # Given
    ledger.write.enqueue(job="a")
    deliveries = bench.poll()

    def away(*args, **kwargs):
        raise OperationalError("server closed the connection unexpectedly")

    # When
    with monkeypatch.context() as patch:
        patch.setattr("kjo_django.engine.admission.load_rows", away)
        deferred = bench.run(deliveries)
    # Then: it was waited for, and what could not be settled is handed back
    assert bench.stopping.waits == 1
    assert deferred == deliveries
    assert (the_job().attempts, bench.lag()) == (0, 1)
    assert not ProcessedEvent.objects.exists()
    # And once it is back
    bench.stopping.waits = 0
    bench.run(deferred)
    assert (entries(), the_job().attempts) == ({"a": 1}, 1)
    assert settled(bench)


@both
def test_what_the_database_refuses_again_and_again_keeps_neither_its_lane_nor_others(
    bench, monkeypatch
):
    """Its handler fails, and the failure cannot be written, for what it is: nothing is away."""
    # Given
    ledger.always_fails.using(key="bad").enqueue(job="bad")
    ledger.always_fails.using(key="bad").enqueue(job="behind")
    ledger.always_fails.using(key="good").enqueue(job="good")
    deliveries = bench.poll()
    bad, behind, good = (delivery.message.job_id for delivery in deliveries)
    record = failures.record_failures

    def refuse(using, outcomes, worker):
        if any(outcome.delivery.message.job_id == bad for outcome in outcomes):
            raise IntegrityError("a row like no other")
        record(using, outcomes, worker)

    waits = []

    def wait(seconds):
        waits.append(seconds)
        assert len(waits) < 10, "it keeps its lane for ever"
        return False

    monkeypatch.setattr(failures, "record_failures", refuse)
    monkeypatch.setattr(bench.stopping, "wait", wait)
    # When
    deferred = bench.pipeline.run(deliveries)
    # Then: it comes up again; what ran in its group is recorded without it
    assert deferred == [deliveries[0]]
    attempts = {str(job.pk): job.attempts for job in Job.objects.all()}
    assert attempts == {bad: 0, behind: 1, good: 1}
    assert list(get_coordination().names("CONS:")) == []


@pytest.fixture
def is_undone_by_sqlite(_database: None) -> None:
    """For tests in which the driver's ``rollback`` does what SQLite does by itself."""
    if connection.vendor == "mysql":
        pytest.skip("MariaDB tells that it has undone a transaction: see the deadlock below")


@pytest.mark.usefixtures("is_undone_by_sqlite")
def test_a_transaction_that_sqlite_undid_while_leases_were_released_completes_nothing(
    bench, monkeypatch
):
    """Found by the fault matrix: a full disk makes SQLite roll back by itself, and what was
    executed after that, the jobs' completion, was committed without their effects."""
    if connection.vendor != "sqlite":
        pytest.skip("leases are released after the transaction")
    # Given
    ledger.write.enqueue_many([{"job": "a"}, {"job": "b"}])
    deliveries = bench.poll()
    coordination, left = get_coordination(), [True]
    release = coordination.release

    def full(*arguments, **named):
        release(*arguments, **named)
        if left and connection.in_atomic_block:
            left.pop()
            connection.connection.rollback()
            raise CoordinationError("database or disk is full")

    monkeypatch.setattr(coordination, "release", full)
    # When
    bench.run(deliveries)
    # Then
    assert left == []
    assert entries() == {"a": 1, "b": 1}
    assert ProcessedEvent.objects.count() == 2
    assert settled(bench)


@pytest.mark.usefixtures("is_undone_by_sqlite")
@pytest.mark.parametrize("catches", [False, True])
def test_a_transaction_that_sqlite_undid_while_a_savepoint_was_opened_completes_nothing(
    bench, catches
):
    """Found by the fault matrix: the handler that met the full disk failed alone, or not even that
    where it caught the error, and the others, whose markers were undone, were completed."""
    # Given a group whose second handler meets a full disk with its first query
    original, left = connection.savepoint, [True]

    def full():
        if left and Entry.objects.exists():
            left.pop()
            connection.connection.rollback()
            raise OperationalError("database or disk is full")
        return original()

    def write(job):
        with suppress(OperationalError) if catches else nullcontext(), transaction.atomic():
            Entry.objects.create(job=job)

    job = as_job(write, "bench.write")
    job.enqueue_many([{"job": "a"}, {"job": "b"}, {"job": "c"}])
    deliveries = bench.poll()
    # When
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections["default"], "savepoint", full)
        bench.run(deliveries)
    # Then
    assert left == []
    assert entries() == {"a": 1, "b": 1, "c": 1}
    assert ProcessedEvent.objects.count() == 3
    assert settled(bench)


@contextmanager
def crossing(first: Item, second: Item) -> Iterator[None]:
    """Meanwhile another session has locked `first` and asks for `second`. Of a deadlock with it the
    other side is the victim, since it has written less."""
    has_first = Event()

    def other() -> None:
        try:
            with transaction.atomic():
                Entry.objects.bulk_create(Entry(job="other") for _ in range(500))
                Item.objects.filter(pk=first.pk).update(looked_at=1)
                has_first.set()
                Item.objects.filter(pk=second.pk).update(looked_at=1)
                transaction.set_rollback(True)
        finally:
            has_first.set()
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(other)
        has_first.wait()
        yield
        running.result()


@pytest.mark.parametrize("database_only", [False, True])
@pytest.mark.parametrize("around", ["nothing", "the statement", "a block"])
def test_a_group_in_which_innodb_ended_a_deadlock_completes_nothing(
    innodb, bench, around, database_only
):
    """The server has undone the transaction as a whole, the markers and effects of others in it,
    and Django goes on in it: what follows was committed without what came before."""
    # Given a group whose second handler is the victim of a deadlock, and may catch the error
    first, second, left = Item.objects.create(), Item.objects.create(), [True]
    errors: list[OperationalError] = []

    def collide():
        Item.objects.filter(pk=second.pk).update(looked_at=2)
        with crossing(first, second):
            try:
                # Of an error of an update Django itself would take note.
                Item.objects.select_for_update().get(pk=first.pk)
            except OperationalError as error:
                errors.append(error)
                raise

    def write(job):
        Entry.objects.create(job=job)
        if job == "b" and left:
            left.pop()
            catching = nullcontext() if around == "nothing" else suppress(OperationalError)
            with catching, transaction.atomic() if around == "a block" else nullcontext():
                collide()

    job = as_job(write, "bench.write", database_only=database_only)
    job.enqueue_many([{"job": "a"}, {"job": "b"}, {"job": "c"}])
    deliveries = bench.poll()
    # When
    bench.run(deliveries)
    # Then
    assert [error.args[0] for error in errors] == [1213]
    assert entries() == {"a": 1, "b": 1, "c": 1}
    assert ProcessedEvent.objects.count() == 3
    assert settled(bench)


def test_a_completion_is_announced_whose_record_is_known_to_be_gone(bench, transport, monkeypatch):
    """Its COMMIT was not answered, and its consumer renewed its leases before it ran again."""
    # Given
    as_job(lambda job: None, "bench.unanswered").enqueue(job="a")
    database, left = connections["default"], [True]
    commit = database._commit

    def unanswered():
        commit()
        if left and Job.objects.filter(state="completed").exists():
            left.pop()
            raise OperationalError("server closed the connection unexpectedly")

    def renew(seconds):
        if transport == "database":
            bench.subscription._renew()
        return False

    monkeypatch.setattr(database, "_commit", unanswered)
    monkeypatch.setattr("kjo_django.engine.group.answers", lambda using: False)
    monkeypatch.setattr(bench.stopping, "wait", renew)
    # When
    deferred = bench.run()
    # Then
    assert (deferred, left) == ([], [])
    assert bench.results == [Ending.COMPLETED]
