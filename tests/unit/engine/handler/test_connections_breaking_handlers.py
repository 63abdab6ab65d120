"""Handlers that break things: the connection, the commit, the transaction."""

from __future__ import annotations

from functools import partial

import pytest
from django.db import DatabaseError, IntegrityError, connection, connections, transaction

from kjo_django.engine.attempt import Ending
from kjo_django.engine.handler.connections import freshen_connections
from kjo_django.exceptions import HandlerTimeout, PermanentError
from kjo_django.ids import uuid7
from kjo_django.models import DeadLetter, Job, JobFailure, ProcessedEvent
from kjo_django.testing import drain
from tests.databases import engine_of
from tests.ledger import jobs as ledger
from tests.ledger.models import Entry
from tests.unit.deliveries import KJO, MEMORY, as_job, entries
from tests.unit.engine.bench import both, settled

LEFT = "The handler did not leave its transaction as it found it (database 'default')"


def close_connection(before: bool, after: bool):
    def handler(job):
        if before:
            Entry.objects.create(job=job)
        connection.close()
        if after:
            Entry.objects.create(job=job)

    return handler


@both
@pytest.mark.parametrize("after", [False, True], ids=["leaves", "goes on"])
@pytest.mark.parametrize("before", [False, True], ids=["unused", "used"])
def test_a_handler_that_closes_its_connection_spends_an_attempt_and_spares_the_others(
    bench, before, after, transport
):
    """Otherwise it would look like an outage, and be tried again for ever."""
    # Given
    breaking = as_job(close_connection(before, after), "bench.breaking", max_attempts=2)
    ledger.write.enqueue(job="before")
    breaking.enqueue(job="x")
    ledger.write.enqueue(job="after")
    # When
    bench.run()
    # Then
    assert not bench.stopping.waits
    assert entries() == {"before": 1, "after": 1}
    assert Job.objects.get(handler="bench.breaking").attempts == 1
    assert LEFT in JobFailure.objects.get().error
    assert "Leave out close_old_connections()" in JobFailure.objects.get().error
    # And it ends
    bench.run_until_done()
    assert DeadLetter.objects.get().attempts == 2
    assert settled(bench)


@both
@pytest.mark.parametrize("transport_name", ["memory", "database"])
def test_a_violation_the_commit_finds_fails_its_own_job_only(bench, transport_name, settings):
    """Foreign keys are checked at the end of the transaction."""

    # Given
    def violate(job):
        Entry.objects.create(job=job)
        JobFailure.objects.create(job_id=uuid7(), attempt=1, error_type="x", error="x")

    violating = as_job(violate, max_attempts=2)
    ledger.write.enqueue(job="before")
    violating.enqueue(job="x")
    ledger.write.enqueue(job="after")
    # When
    bench.run_until_done()
    # Then
    assert not bench.stopping.waits
    assert entries() == {"before": 1, "after": 1}
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("exhausted", 2)
    assert letter.error_type == "django.db.utils.IntegrityError"
    assert JobFailure.objects.count() == 2
    assert settled(bench)


@pytest.fixture
def full_disk(bench):
    """SQLite undoes a transaction by itself then; a trigger makes it do the same to whoever writes
    an entry of ``x``."""
    if connection.vendor != "sqlite":
        pytest.skip("A trigger of SQLite's; elsewhere a deadlock does it, which has its own tests")
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TRIGGER full BEFORE INSERT ON ledger_entry WHEN NEW.job = 'x' "
            "BEGIN SELECT RAISE(ROLLBACK, 'database or disk is full'); END"
        )


@pytest.mark.parametrize("count", [0, 1, 3], ids=["alone", "one before", "more"])
@pytest.mark.parametrize("minds", [True, False], ids=["minds", "swallows"])
@pytest.mark.usefixtures("full_disk")
def test_a_transaction_the_database_undid_by_itself_loses_nobody_s_effects(bench, count, minds):
    """Its group would go on without one, and call those completed whose writes are gone."""

    # Given
    def fill(job: str) -> None:
        Entry.objects.create(job="with it")
        try:
            Entry.objects.create(job=job)
        except DatabaseError:
            if minds:
                raise

    for number in range(count):
        ledger.write.enqueue(job=f"before {number}")
    as_job(fill, "bench.fill").enqueue(job="x")
    for number in range(count // 2):
        ledger.write.enqueue(job=f"after {number}")
    # When
    bench.run()
    # Then
    assert Job.objects.get(handler="bench.fill").state == "failing"
    others = Job.objects.filter(handler="ledger.write")
    assert set(others.values_list("state", flat=True)) <= {"completed"}
    assert sum(entries().values()) == len(entries()) == others.count()
    assert ProcessedEvent.objects.count() == others.count()


@both
def test_a_violation_found_at_once_is_an_ordinary_failure(bench):
    def violate():
        Entry.objects.create(pk=7, job="a")
        Entry(pk=7, job="b").save(force_insert=True)

    as_job(violate, max_attempts=1).enqueue()
    ledger.write.enqueue(job="c")
    bench.run()
    assert entries() == {"c": 1}
    assert DeadLetter.objects.get().error_type == "django.db.utils.IntegrityError"


@both
def test_an_error_the_handler_swallowed_does_not_complete_half_of_it(bench):
    def swallow():
        Entry.objects.create(pk=7, job="a")
        try:
            Entry(pk=7, job="b").save(force_insert=True)
        except IntegrityError:
            pass

    as_job(swallow, max_attempts=1).enqueue()
    ledger.write.enqueue(job="c")
    bench.run()
    assert entries() == {"c": 1}
    assert bench.results == [Ending.DEAD, Ending.COMPLETED] or Ending.DEAD in bench.results


def fail_loudly() -> None:
    raise RuntimeError("the callback broke")


def leave() -> None:
    raise SystemExit("the callback broke")


@both
@pytest.mark.parametrize(
    "callback",
    [fail_loudly, partial(fail_loudly), leave],
    ids=["function", "partial", "exit"],
)
def test_a_callback_that_fails_after_the_commit_leaves_the_job_completed(bench, callback, caplog):
    """KJO-F12."""
    # Given
    called = []

    def with_callback(job):
        Entry.objects.create(job=job)
        transaction.on_commit(callback)

    def with_good_callback(job):
        Entry.objects.create(job=job)
        transaction.on_commit(lambda: called.append(job))

    as_job(with_callback).enqueue(job="a")
    as_job(with_good_callback).enqueue(job="b")
    # When
    bench.run()
    # Then
    assert entries() == {"a": 1, "b": 1}
    assert called == ["b"]
    assert bench.results == [Ending.COMPLETED] * 2
    assert "the callback broke" in caplog.text
    assert settled(bench)


@both
def test_a_handler_that_leaves_a_transaction_open_by_hand_is_stopped(bench):
    def rollback():
        Entry.objects.create(job="a")
        transaction.set_rollback(True)

    as_job(rollback, max_attempts=1).enqueue()
    ledger.write.enqueue(job="b")
    bench.run()
    assert entries() == {"b": 1}
    assert DeadLetter.objects.get().attempts == 1


def committed_states() -> list[str]:
    """What others see."""
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT state FROM kjo_job ORDER BY id")
            return [state for (state,) in cursor.fetchall()]
    finally:
        other.close()


@both
@pytest.mark.parametrize("beside", [0, 1], ids=["alone", "in a group"])
@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("how", ["timeout", "by hand"])
def test_a_block_that_is_entered_and_not_left_takes_nothing_with_it(bench, how, atomic, beside):
    """A timeout is raised between any two steps, and so after ``atomic()`` has begun and before its
    body. All that its thread did from then on was within that block, and never committed."""

    # Given
    def tear(job: str) -> None:
        transaction.atomic().__enter__()
        Entry.objects.create(job=job)
        if how == "timeout":
            raise HandlerTimeout

    def add(job: str) -> None:
        Entry.objects.create(job=job)

    adding = as_job(add, atomic=atomic)
    for number in range(beside):
        adding.enqueue(job=f"before {number}")
    as_job(tear, atomic=atomic).enqueue(job="torn")
    for number in range(beside):
        adding.enqueue(job=f"after {number}")
    # When
    bench.run()
    # Then
    assert committed_states() == ["completed"] * beside + ["failing"] + ["completed"] * beside
    assert "torn" not in entries()
    if how == "by hand":
        assert LEFT in JobFailure.objects.get().error
    assert not connection.in_atomic_block
    # And those that come later are committed too
    adding.enqueue(job="later")
    bench.run()
    assert committed_states()[-1] == "completed"
    assert entries()["later"] == 1


def enter_and_stay() -> None:
    transaction.atomic().__enter__()


def close_within() -> None:
    with transaction.atomic():
        Entry.objects.create(job="undone by the close")
        connection.close()


def stay_without_autocommit() -> None:
    transaction.set_autocommit(False)
    Entry.objects.create(job="undone by nobody's commit")


def begin_by_hand() -> None:
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")


@both
@pytest.mark.parametrize("batch", [None, 10], ids=["single", "batch"])
@pytest.mark.parametrize("leave", [enter_and_stay, stay_without_autocommit, begin_by_hand])
def test_what_was_never_committed_is_not_completed(bench, leave, batch):
    """Outside a transaction a handler that begins one must end it: nobody else commits it."""

    # Given one of three that does not
    def one(job: str) -> None:
        if job == "b":
            leave()
        Entry.objects.create(job=job)

    def several(items) -> None:
        for item in items:
            one(**item.payload)

    handler = as_job(several if batch else one, "bench.leaving", atomic=False, batch=batch)
    handler.enqueue_many([{"job": job} for job in "abc"])
    # When
    bench.run()
    # Then
    assert committed_states() == ["completed", "failing", "completed"]
    assert LEFT in JobFailure.objects.get().error
    assert not bench.stopping.waits
    # And the others have taken effect: once, but for those a batch took with it
    connection.close()
    assert {"a", "c"} == set(entries())


@both
def test_what_a_handler_raises_counts_also_where_it_leaves_a_transaction_open(bench):
    """A verdict of the handler is not replaced by the error of the transaction it has left."""

    def refuse(job: str) -> None:
        enter_and_stay()
        raise PermanentError("The order is not there")

    as_job(refuse, "bench.refusing", atomic=False).enqueue(job="a")
    bench.run()
    letter = DeadLetter.objects.get()
    assert (letter.attempts, letter.error) == (1, "The order is not there")
    assert settled(bench)


@pytest.mark.parametrize("real_database", ["mariadb"], indirect=True)
@pytest.mark.usefixtures("real_database")
def test_what_was_begun_by_hand_and_lost_with_its_connection_is_not_completed(bench):
    """PyMySQL remembers of a closed connection that a transaction was open, which tells of it."""

    # Given
    def write(number: int) -> None:
        if number == 1:
            begin_by_hand()
        Entry.objects.create(job=str(number))
        if number == 1:
            connection.connection.close()

    as_job(write, atomic=False, max_attempts=1).enqueue_many([{"number": n} for n in range(3)])
    # When
    bench.run()
    connection.close()
    # Then
    states = [job.state for job in Job.objects.order_by("id")]
    assert states == ["completed", "failed", "completed"]
    assert entries() == {"0": 1, "2": 1}


@both
def test_a_block_whose_connection_was_closed_is_not_completed(bench):
    """Django leaves such a block without a word."""

    def close(job: str) -> None:
        if job == "b":
            close_within()

    as_job(close, "bench.closing", atomic=False).enqueue_many([{"job": job} for job in "abc"])
    bench.run()
    assert committed_states() == ["completed", "failing", "completed"]
    assert LEFT in JobFailure.objects.get().error
    assert not entries()


@both
@pytest.mark.parametrize("leave", [enter_and_stay, lambda: connection.close()])
def test_of_a_batch_in_a_transaction_the_guilty_item_alone_fails(bench, leave):
    # Given
    def several(items) -> None:
        for item in items:
            if item.payload["job"] == "b":
                leave()
            Entry.objects.create(job=item.payload["job"])

    handler = as_job(several, "bench.leaving", batch=10)
    handler.enqueue_many([{"job": job} for job in "abc"])
    # When
    bench.run()
    # Then
    assert committed_states() == ["completed", "failing", "completed"]
    assert entries() == {"a": 1, "c": 1}
    assert "The handler" in JobFailure.objects.get().error


@both
def test_a_handler_outside_a_transaction_may_close_its_connection(bench):
    """As Django's ``close_old_connections`` does: all it wrote is committed."""

    def close(job: str) -> None:
        Entry.objects.create(job=job)
        connection.close()

    as_job(close, atomic=False).enqueue_many([{"job": job} for job in "ab"])
    bench.run()
    assert committed_states() == ["completed", "completed"]
    assert entries() == {"a": 1, "b": 1}


@pytest.fixture
def second_database(bench, tmp_path, monkeypatch, request):
    """Another database of the project's, with a table of words."""
    name = str(tmp_path / "second.sqlite3")
    if engine := engine_of(connection):
        server, name = request.getfixturevalue(f"{engine}_server"), f"kjo_second_{uuid7().hex}"
        server.createdb(name)
        request.addfinalizer(partial(server.dropdb, name))
    own = {**connection.settings_dict, "NAME": name}
    monkeypatch.setitem(connections.settings, "second", own)
    with connections["second"].cursor() as cursor:
        cursor.execute("CREATE TABLE words (word text)")
    yield "second"
    connections["second"].close()
    del connections["second"]


def words() -> list[str]:
    """What others see of the second database."""
    other = connections["second"].copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT word FROM words")
            return [word for (word,) in cursor.fetchall()]
    finally:
        other.close()


@pytest.mark.parametrize("beside", [0, 1], ids=["alone", "in a group"])
@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("how", ["block", "autocommit"])
def test_a_transaction_left_open_on_another_database_fails_its_attempt(
    bench, second_database, how, atomic, beside
):
    # Given
    def write(job: str) -> None:
        with connections[second_database].cursor() as cursor:
            if job == "left":
                if how == "block":
                    transaction.atomic(using=second_database).__enter__()
                else:
                    transaction.set_autocommit(False, using=second_database)
            cursor.execute("INSERT INTO words VALUES (%s)", [job])

    writing = as_job(write, atomic=atomic)
    others = [f"{when} {number}" for when in ("before", "after") for number in range(beside)]
    for job in sorted([*others, "left"], key=lambda job: (job[0] == "a", job[0] == "l")):
        writing.enqueue(job=job)
    # When
    bench.run()
    # Then
    assert committed_states() == ["completed"] * beside + ["failing"] + ["completed"] * beside
    assert "(database 'second')" in JobFailure.objects.get().error
    assert set(words()) == set(others), "theirs is at least once there"
    # And the next is not affected
    writing.enqueue(job="later")
    bench.run()
    assert "later" in words()


@pytest.mark.promise("second-database")
def test_what_a_failed_handler_wrote_in_another_database_stays_there(bench, second_database):
    """Only the jobs' database takes part in the transaction."""

    # Given
    def write(job: str) -> None:
        Entry.objects.create(job=job)
        with connections[second_database].cursor() as cursor:
            cursor.execute("INSERT INTO words VALUES (%s)", [job])
        raise ValueError("after both")

    as_job(write, max_attempts=2).enqueue(job="a")
    # When
    bench.run_until_done()
    # Then
    assert entries() == {}
    assert words() == ["a", "a"]


CHANGES = {
    "sqlite": ("PRAGMA cache_size = 77", "PRAGMA cache_size"),
    "postgresql": ("SET lock_timeout = 77000", "SHOW lock_timeout"),
    "mysql": ("SET @tenant = 77", "SELECT @tenant"),
}


@pytest.mark.parametrize("atomic", [True, False])
def test_what_a_handler_changes_in_a_session_of_another_database_no_other_finds_there(
    bench, second_database, atomic
):
    # Given
    change, question = CHANGES[connection.vendor]
    found = []

    def work() -> None:
        with connections[second_database].cursor() as cursor:
            cursor.execute(question)
            found.append(cursor.fetchone())
            cursor.execute(change)

    changing = as_job(work, atomic=atomic)
    for _ in range(3):
        changing.enqueue()
    # When
    left = bench.run()
    while left:
        left = bench.run(left)
    # Then
    assert len(found) == 3
    assert len(set(found)) == 1
    assert committed_states() == ["completed"] * 3


@pytest.mark.django_db
@pytest.mark.parametrize("atomic", [True, False])
def test_a_drain_in_a_test_tells_of_it_too(settings, forgotten_definitions, atomic):
    """In the test's own transaction, which stays as it is."""
    # Given
    settings.KJO = KJO | MEMORY
    depth = len(connection.atomic_blocks)

    def leave(job: str) -> None:
        enter_and_stay()
        Entry.objects.create(job=job)

    as_job(leave, atomic=atomic, max_attempts=1).enqueue(job="left")
    ledger.write.enqueue(job="next")
    # When
    drain(raise_errors=False)
    # Then
    assert LEFT in DeadLetter.objects.get().error
    assert entries() == {"next": 1}
    assert len(connection.atomic_blocks) == depth


@pytest.mark.parametrize(
    "vendor", ["sqlite_file", pytest.param("postgres", marks=pytest.mark.postgres)]
)
def test_a_transaction_django_does_not_know_of_is_ended_between_jobs(request, vendor):
    """Torn out of the beginning itself: SQLite has begun, perhaps with the only write lock there
    is; PostgreSQL begins with the next query."""
    request.getfixturevalue(vendor)
    connection.ensure_connection()
    if vendor == "postgres":
        connection.connection.autocommit = False
    else:
        begin = "BEGIN IMMEDIATE" if connection.vendor == "sqlite" else "BEGIN"
        connection.connection.cursor().execute(begin)
    # When
    freshen_connections(is_own=True)
    # Then
    Entry.objects.create(job="a")
    other = connection.copy()
    with other.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM ledger_entry")
        assert cursor.fetchone() == (1,)
    other.close()
