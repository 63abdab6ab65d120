"""Handlers that are right alone, and fail in a transaction that they share with others."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable

import pytest
from django.db import OperationalError, connection, transaction

from kjo_django import BatchItem, PermanentError, Retry, chain, job
from kjo_django.engine import scheduler
from kjo_django.engine.group import REPEATS
from kjo_django.exceptions import HandlerTimeout
from kjo_django.models import DeadLetter, Job, JobFailure
from tests.databases import MARIADB, POSTGRES, SQLITE, every_way
from tests.ledger.models import Entry
from tests.unit.deliveries import as_job, entries
from tests.unit.workers import Running
from tests.waiting import PATIENCE, wait_until

# a worker's threads, on the databases
pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("one_lane")]

every_database = pytest.mark.parametrize(
    "_database",
    [SQLITE, POSTGRES, MARIADB],
    indirect=True,
)
on_postgres = pytest.mark.parametrize("_database", [POSTGRES], indirect=True)


class Sharing:
    """A handler that writes, and fails where another job has run in its transaction before.

    :param error: what it raises then.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls: list[str] = []

    def __call__(self, job: str) -> None:
        self.calls.append(job)
        Entry.objects.create(job=job)
        if connection.run_on_commit:
            raise self.error
        transaction.on_commit(lambda: None)

    def batch(self, batch: list[BatchItem]) -> None:
        for item in batch:
            self(item.payload["job"])


def run(handler, count=6, **options):
    """Enqueue jobs of a handler, and let one lane run them to their ends."""
    for number in range(count):
        handler.using(**options).enqueue(job=str(number))
    with Running():
        wait_until(have_ended, "their ends", lambda: list(Job.objects.values("state", "attempts")))


def have_ended():
    return not Job.objects.exclude(state__in=["completed", "failed"]).exists()


def wrapped():
    """An error of a project's own, raised for one of the database."""
    error = LookupError("its own")
    error.__cause__ = OperationalError("deadlock detected")
    return error


@pytest.mark.large("database-only-caused", "keyed-caused", "batch-caused")
@every_database
@pytest.mark.parametrize("error", [OperationalError("locked"), wrapped()], ids=["of it", "caused"])
@pytest.mark.parametrize("kind", ["atomic", "database-only", "keyed", "batch"])
def test_what_fails_in_a_shared_transaction_runs_again_alone_in_the_same_attempt(kind, error):
    """It spent an attempt, and was a dead letter where that was its only one."""
    # Given
    sharing = Sharing(error)
    options = {"database-only": {"database_only": True}, "batch": {"batch": 2}}.get(kind, {})

    def work(job: str) -> None:
        sharing(job)

    def work_batch(batch: list[BatchItem]) -> None:
        sharing.batch(batch)

    handler = as_job(work_batch if kind == "batch" else work, "sharing", max_attempts=1, **options)
    # When
    run(handler, **({"key": "one"} if kind == "keyed" else {}))
    # Then
    assert entries() == {str(number): 1 for number in range(6)}
    assert set(Job.objects.values_list("state", "attempts")) == {("completed", 1)}
    assert not JobFailure.objects.exists()
    if kind == "keyed":
        assert list(Entry.objects.order_by("pk").values_list("job", flat=True)) == list("012345")


@every_database
def test_what_fails_alone_too_fails_its_attempt(_database):
    # Given
    calls = []

    def work(job: str) -> None:
        calls.append(job)
        if job == "3":
            with connection.cursor() as cursor:
                cursor.execute("SELECT * FROM nowhere")

    # When
    run(as_job(work, "fails", max_attempts=2))
    # Then
    assert Job.objects.filter(state="completed", attempts=1).count() == 5
    failed = Job.objects.get(state="failed")
    assert (failed.attempts, JobFailure.objects.filter(job=failed.pk).count()) == (2, 2)
    assert DeadLetter.objects.get().job_id == failed.pk
    # In its group and alone; its second attempt was alone anyway
    assert calls.count("3") == 3
    assert all(calls.count(other) == 1 for other in "01245")


@every_database
def test_what_fails_for_another_reason_runs_once_an_attempt(_database):
    # Given
    sharing = Sharing(ValueError("of its own"))
    # When
    run(as_job(lambda job: sharing(job), "sharing", max_attempts=1))
    # Then
    assert sharing.calls == list("012345")
    assert Job.objects.filter(state="failed", attempts=1).exists()


@pytest.mark.promise("undone-start")
@every_database
def test_a_job_with_a_limit_runs_again_without_another_permit(_database):
    # Given
    sharing = Sharing(OperationalError("locked"))
    limited = job(name="sharing", queue="ledger", max_attempts=1, rate="6/h", burst=6)
    handler = limited(lambda job: sharing(job))
    # When: each of the six starts that an hour permits is needed
    run(handler)
    # Then
    assert entries() == {str(number): 1 for number in range(6)}
    assert set(Job.objects.values_list("state", "attempts")) == {("completed", 1)}


@every_database
def test_the_steps_of_a_chain_that_fail_in_one_transaction_run_alone_one_after_the_other(_database):
    """Each ran within the settlement of the one before it, until Python had no frames left."""
    # Given steps that join the transaction of the step before, and fail there
    depths = []

    def step(number: int) -> None:
        depths.append(len(inspect.stack(0)))
        if number >= 0 and connection.run_on_commit:
            raise OperationalError("locked")
        transaction.on_commit(lambda: None)

    steps = as_job(step, "chained", database_only=True, max_attempts=1)
    with Running():
        for _ in range(40):  # a handler of which is known how long it takes
            steps.enqueue(number=-1)
        wait_until(have_ended, "their ends")
        depths.clear()
        # When
        chain(*(steps.step(number=number) for number in range(30))).enqueue()
        wait_until(have_ended, "their ends")
    # Then
    assert len(depths) > 30
    assert max(depths) - min(depths) < 30
    assert set(Job.objects.values_list("state", "attempts")) == {("completed", 1)}


RAISED: dict[str, tuple[Callable[[], None], int]] = {}
"""How a handler fails in a transaction with others, and how often it is called then."""


def raised(calls: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def note(function: Callable[[], None]) -> Callable[[], None]:
        RAISED[function.__name__] = function, calls
        return function

    return note


@raised(2)
def in_a_group_of_errors() -> None:
    raise ExceptionGroup("tasks", [ValueError("own"), OperationalError("locked")])


@raised(2)
def while_another_was_handled() -> None:
    try:
        raise OperationalError("locked")
    except OperationalError:
        raise ValueError("own")  # noqa: B904


@raised(1)
def instead_of_another() -> None:
    try:
        raise OperationalError("locked")
    except OperationalError:
        raise ValueError("own") from None


@raised(1)
def as_a_verdict() -> None:
    try:
        raise OperationalError(1213, "Deadlock found when trying to get lock")
    except OperationalError as error:
        raise PermanentError("for good") from error


@raised(1)
def of_its_own() -> None:
    raise ValueError("own")


@pytest.mark.parametrize("_database", ["sqlite_file"], indirect=True)
@pytest.mark.parametrize("way", RAISED)
def test_an_error_is_of_the_database_where_one_is_its_cause_or_part(_database, way):
    # Given
    fail, count = RAISED[way]
    calls = []

    def work(job: str) -> None:
        calls.append(job)
        if job == "3":
            fail()

    # When
    run(as_job(work, "fails", max_attempts=1), 5)
    # Then
    assert calls.count("3") == count


def deadlock() -> None:
    raise OperationalError(1213, "Deadlock found when trying to get lock")


def serialization_failure() -> None:
    with connection.cursor() as cursor:
        cursor.execute("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$")


every_repeatable = every_way(
    {
        "sqlite": {"deadlock": deadlock},
        "mysql": {"deadlock": deadlock},
        "postgresql": {"serialization": serialization_failure},
    },
    "end",
)


@every_repeatable
@pytest.mark.parametrize("limit", [None, "1/h"], ids=["free", "limited"])
def test_a_transaction_that_may_be_repeated_costs_no_attempt(end, limit):
    """Where three attempts were made, each lost to another one's lock, it was a dead letter."""
    # Given
    calls = []

    def work(job: str) -> None:
        calls.append(job)
        Entry.objects.create(job=job)
        if len(calls) <= 3:
            end()

    handler = job(name="repeats", queue="ledger", max_attempts=1, rate=limit)(work)
    # When
    run(handler, 1)
    # Then
    assert len(calls) == 4
    assert entries() == {"0": 1}
    assert set(Job.objects.values_list("state", "attempts")) == {("completed", 1)}
    assert not JobFailure.objects.exists()


@pytest.mark.parametrize("_database", ["sqlite_file"], indirect=True)
@pytest.mark.parametrize("verdict", [PermanentError, Retry, HandlerTimeout])
def test_what_a_handler_says_of_a_deadlock_counts(_database, verdict):
    """What it asked for was not heard, and a time limit lasted six times as long."""
    # Given
    calls = []

    def work(job: str) -> None:
        calls.append(job)
        try:
            deadlock()
        except OperationalError as error:
            raise verdict("its own") from error

    # When
    run(as_job(work, "says", max_attempts=2), 1)
    # Then
    assert len(calls) == Job.objects.get().attempts == (1 if verdict is PermanentError else 2)


@on_postgres
def test_a_group_whose_commit_is_refused_needs_no_second_permits(_database):
    # Given jobs that cannot be committed together
    calls = []

    def work(job: str) -> None:
        calls.append(job)
        Entry.objects.create(job=job)
        if connection.run_on_commit:
            with connection.cursor() as cursor:
                cursor.execute("INSERT INTO refused VALUES (1)")
        transaction.on_commit(lambda: None)

    limited = job(name="refused", queue="ledger", max_attempts=1, rate="6/h", burst=6)
    handler = limited(work)
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE refused (n int);"
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE SQLSTATE '40001'; END $$;"
            "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON refused"
            " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
    try:
        # When
        run(handler)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE refused; DROP FUNCTION refuse")
    # Then
    assert len(calls) > 6
    assert entries() == {str(number): 1 for number in range(6)}
    assert set(Job.objects.values_list("state", "attempts")) == {("completed", 1)}


@every_repeatable
def test_it_is_repeated_a_bounded_number_of_times(end):
    # Given
    calls = []

    def work(job: str) -> None:
        calls.append(job)
        end()

    # When
    run(as_job(work, "repeats", max_attempts=2), 1)
    # Then
    assert len(calls) == 2 * (1 + REPEATS)
    assert set(Job.objects.values_list("state", "attempts")) == {("failed", 2)}


@on_postgres
def test_a_job_that_locks_one_row_is_not_lost_to_a_deadlock_of_its_group(settings, monkeypatch):
    """Alone it cannot be in a deadlock: the other lock is one that its group holds."""
    # Given two groups each of which is about to lock the row that the other one has locked
    monkeypatch.setattr(scheduler, "WORTH_A_LANE", math.inf)  # the jobs of a queue stay together
    settings.KJO = {**settings.KJO, "CONCURRENCY": 2, "QUEUES": {"ledger": {}, "other": {}}}
    for row in ("left", "right"):
        Entry.objects.create(job=row)
    calls, has_locked = [], threading.Barrier(2)

    def lock(row: str, first: bool = False) -> None:
        calls.append(row)
        if row:
            Entry.objects.select_for_update().get(job=row)
        if first:
            has_locked.wait(PATIENCE)

    locks = as_job(lock, "locks", max_attempts=1)
    groups = {"ledger": ("left", "right"), "other": ("right", "left")}
    with Running(groups):
        for _ in range(40):  # a handler of which is known how long it takes shares its group
            locks.enqueue(row="")
        wait_until(have_ended, "their ends")
        calls.clear()
        # When
        with transaction.atomic():
            for queue, rows in groups.items():
                for row in rows:
                    locks.using(queue=queue).enqueue(row=row, first=row == rows[0])
        wait_until(have_ended, "their ends", lambda: calls)
    # Then one was chosen to fail, and ran again alone
    assert sorted(calls) in (["left"] * 3 + ["right"] * 2, ["left"] * 2 + ["right"] * 3)
    assert set(Job.objects.values_list("state", "attempts")) == {("completed", 1)}


@on_postgres
def test_at_serializable_what_the_database_cannot_order_is_repeated_in_the_same_attempt(
    settings, monkeypatch, _database
):
    """FINDINGS 2.10 p: of 1,500 such jobs 59 became dead letters."""
    # Given sessions at that level, and two jobs that each count the entries before either adds one
    from psycopg import IsolationLevel  # an extra, which may be missing

    monkeypatch.setitem(
        connection.settings_dict["OPTIONS"], "isolation_level", IsolationLevel.SERIALIZABLE
    )
    connection.close()
    settings.KJO = {**settings.KJO, "CONCURRENCY": 2, "QUEUES": {"ledger": {}, "other": {}}}
    calls, levels, have_counted = [], set(), threading.Barrier(2)

    def count_and_add(name: str) -> None:
        is_first = name not in calls
        calls.append(name)
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            levels.add(cursor.fetchone())
        count = Entry.objects.count()
        if is_first:
            have_counted.wait(PATIENCE)
        Entry.objects.create(job=name, note=str(count))

    counts = as_job(count_and_add, "counts", max_attempts=1)
    for queue in ("ledger", "other"):
        counts.using(queue=queue).enqueue(name=queue)
    # When
    with Running(("ledger", "other")):
        wait_until(have_ended, "their ends", lambda: calls)
    # Then the second one has counted the first
    assert levels == {("serializable",)}
    assert len(calls) == 3
    assert sorted(Entry.objects.values_list("note", flat=True)) == ["0", "1"]
    assert set(Job.objects.values_list("state", "attempts")) == {("completed", 1)}
    connection.close()  # those of other tests are at the default
