"""On PostgreSQL the transaction of a group begins along with its first statement, and its commit
goes along with its last."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from django.db import DataError, ProgrammingError, connection, transaction
from django.db.transaction import TransactionManagementError

from kjo_django import signals
from kjo_django.engine.handler.savepoint import LazySavepoint
from kjo_django.enqueue.definition import JobDefinition
from kjo_django.models import (
    Job,
    Lease,
    ProcessedEvent,
    TransportMessage,
    TransportSubscription,
)
from kjo_django.store import postgres, store_for
from kjo_django.store.postgres import _Along, _begin, begin_with_first_query
from kjo_django.transports.database.insertion import MOST_ROWS
from kjo_django.transports.database.transport import forget_groups
from tests.ledger import jobs as ledger
from tests.ledger.models import Entry
from tests.unit.deliveries import KJO, Bench, as_job, benched
from tests.waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.usefixtures("postgres")]

STATUS = psycopg.pq.TransactionStatus


@pytest.fixture
def bench(settings, postgres) -> Iterator[Bench]:
    with benched(settings) as bench:
        yield bench


def entries() -> list[str]:
    return sorted(Entry.objects.values_list("job", flat=True))


def status() -> int:
    return connection.connection.info.transaction_status


def asked(sql: str) -> object:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()[0]


# --- Beginning ------------------------------------------------------------------------------------


def test_the_first_query_carries_the_beginning_along_and_answers_as_if_it_were_alone(sent):
    # When
    with store_for("default").transaction():
        connection.ensure_connection()
        assert status() == STATUS.IDLE
        answers = asked("SELECT 1"), asked("SELECT 2")
        inside = status()
    # Then
    assert sent == ["BEGIN; SELECT 1", "SELECT 2"]
    assert answers == (1, 2)
    assert inside == STATUS.INTRANS
    assert (status(), connection.connection.autocommit) == (STATUS.IDLE, True)


def test_leases_are_claimed_in_one_round_trip(sent):
    claimed = store_for("default").claim_leases(["a", "b"], "me", timedelta(minutes=1))
    assert claimed == {"a": (True, 1), "b": (True, 1)}
    (text,) = sent
    assert text.startswith("BEGIN; SET LOCAL synchronous_commit TO off; ")
    assert text.endswith("; COMMIT")
    assert (status(), connection.connection.autocommit) == (STATUS.IDLE, True)


def test_what_it_carries_is_one_transaction_that_can_be_undone():
    with pytest.raises(ZeroDivisionError), store_for("default").transaction():
        Entry.objects.create(job="a")
        Entry.objects.create(job="b")
        raise ZeroDivisionError
    assert entries() == []


def test_a_first_query_that_is_refused_begins_nothing_and_leaves_the_connection_usable():
    for sql in ("SELEKT 1", "SELECT 1 FROM no_such_table"):
        with pytest.raises(ProgrammingError), store_for("default").transaction():
            asked(sql)
        assert (status(), connection.connection.autocommit) == (STATUS.IDLE, True)
    assert asked("SELECT 1") == 1


def test_where_nothing_is_asked_nothing_stays_behind():
    before = list(connection.execute_wrappers)
    with store_for("default").transaction():
        pass
    assert connection.execute_wrappers == before


def test_what_says_that_nobody_waits_for_the_disk_takes_no_round_trip(sent):
    with store_for("default").transaction(waits_for_disk=False):
        assert asked("SHOW synchronous_commit") == "off"
    assert sent == ["BEGIN; SET LOCAL synchronous_commit TO off; SHOW synchronous_commit"]
    assert asked("SHOW synchronous_commit") == "on"


def test_it_is_said_also_where_the_first_query_must_be_sent_alone():
    with store_for("default").transaction(waits_for_disk=False), connection.cursor() as cursor:
        cursor.executemany("INSERT INTO ledger_entry (job) VALUES (%s)", [])
        assert asked("SHOW synchronous_commit") == "off"


# --- Along with the next query, and with the commit -----------------------------------------------

COUNT = "SELECT count(*) FROM ledger_entry WHERE job LIKE '%'"
ADD = "INSERT INTO ledger_entry (job, note, created_at) VALUES (%s, '', now())"


def test_what_goes_with_the_next_query_takes_no_round_trip(sent):
    store = store_for("default")
    with store.transaction():
        asked("SELECT 1")
        store.execute_with_next(ADD, ["a%"])
        store.execute_with_next(ADD, ["b"])
        assert asked(COUNT) == 2
        store.execute_with_next(ADD, ["c"])
    assert sent[1].startswith("INSERT") and sent[1].endswith(COUNT.replace("%", "%%"))
    assert sent[2] == f"{ADD}; COMMIT"
    assert len(sent) == 3
    assert entries() == ["a%", "b", "c"]
    assert (status(), connection.connection.autocommit) == (STATUS.IDLE, True)


def test_what_comes_first_in_a_transaction_or_in_one_of_somebody_elses_is_executed_at_once(sent):
    store = store_for("default")
    with store.transaction():
        store.execute_with_next(ADD, ["a"])
        assert sent == [f"BEGIN; {ADD}"]
    with transaction.atomic():
        store.execute_with_next(ADD, ["b"])
        assert sent[1:] == [ADD]
    assert entries() == ["a", "b"]


def test_it_is_undone_with_its_transaction():
    store = store_for("default")
    with pytest.raises(ZeroDivisionError), store.transaction():
        asked("SELECT 1")
        store.execute_with_next(ADD, ["a"])
        raise ZeroDivisionError
    with store.transaction():
        asked("SELECT 1")
    assert entries() == []
    assert connection.execute_wrappers == []


def test_before_a_query_that_must_be_sent_alone_it_is_sent_alone():
    store = store_for("default")
    with store.transaction():
        asked("SELECT 1")
        store.execute_with_next(ADD, ["a"])
        assert [entry.job for entry in Entry.objects.iterator()] == ["a"]
        store.execute_with_next(ADD, ["b"])
        with connection.cursor() as cursor:
            cursor.executemany(ADD, [["c"], ["d"]])
            store.execute_with_next(ADD, ["e"])
            cursor.execute("SELECT %(what)s", {"what": "a name"})
            assert cursor.fetchone() == ("a name",)
    assert entries() == ["a", "b", "c", "d", "e"]


def test_what_a_query_answers_is_its_own_whatever_went_in_front_of_it(bench):
    """Of a group that has savepoints the last one is released along with it, too."""
    # Given a group of which one job's row is taken away when all have run
    jobs = [ledger.write.enqueue(job=name) for name in ("a", "b")]
    store = store_for("default")

    def take_away(*arguments: Any, **options: Any) -> Any:
        Job.objects.filter(pk=jobs[0].job_id).delete()
        store.execute_with_next(ADD, ["along 1"])
        store.execute_with_next(ADD, ["along 2"])
        counted.append(complete(*arguments, **options))
        return counted[-1]

    counted: list[set[UUID]] = []
    complete, bench.pipeline._runtime.store.complete = store.complete, take_away
    # When
    try:
        bench.run()
    finally:
        del bench.pipeline._runtime.store.complete
    # Then
    assert counted == [{jobs[1].job_id}]
    assert entries() == ["a", "along 1", "along 2", "b"]


# --- Enqueue --------------------------------------------------------------------------------------


@pytest.fixture
def database_transport(settings, postgres) -> None:
    settings.KJO = {**KJO}


@pytest.mark.usefixtures("database_transport")
def test_a_job_is_stored_and_committed_with_its_message_in_one_round_trip(sent):
    ledger.write.enqueue(job="first")  # also finds out which groups there are
    TransportSubscription.objects.create(topic="ledger", consumer_group="g")
    ledger.write.enqueue(job="second")
    del sent[:]
    # When
    job = ledger.write.enqueue(job="third")
    # Then what comes behind is the call of those who listen
    text, *after = sent
    assert re.findall(r"BEGIN|INSERT INTO \S+|COMMIT", text) == [
        *("BEGIN", "INSERT INTO kjo_job", "INSERT INTO kjo_transport_message", "COMMIT")
    ]
    assert all("pg_notify" in each for each in after)
    assert Job.objects.get(pk=job.job_id).state == "queued"
    assert TransportMessage.objects.filter(headers__isnull=False).count() == 3
    assert (status(), connection.connection.autocommit) == (STATUS.IDLE, True)


@pytest.mark.usefixtures("database_transport")
def test_a_job_that_is_refused_is_not_stored_and_nothing_stays_behind(sent):
    ledger.write.enqueue(job="first")
    with pytest.raises(DataError), connection.execute_wrapper(_spoil):
        ledger.write.enqueue(job="second")
    assert (status(), connection.connection.autocommit) == (STATUS.IDLE, True)
    assert Job.objects.count() == TransportMessage.objects.count() == 1
    ledger.write.enqueue(job="third")
    assert Job.objects.count() == TransportMessage.objects.count() == 2


@pytest.mark.usefixtures("database_transport")
def test_in_a_transaction_of_the_callers_a_job_is_there_at_once():
    with transaction.atomic():
        ledger.write.enqueue(job="a")
        assert Job.objects.count() == TransportMessage.objects.count() == 1
        transaction.set_rollback(True)
    assert Job.objects.count() == TransportMessage.objects.count() == 0


@pytest.mark.usefixtures("database_transport")
def test_beside_a_query_wrapper_of_others_many_messages_are_not_one_text(sent):
    """It would be longer than the server takes."""
    ids = list(map(str, range(2 * MOST_ROWS)))
    with connection.execute_wrapper(lambda execute, *query: execute(*query)):
        ledger.write.enqueue_many([{"job": id} for id in ids], ids=ids)
    assert Job.objects.count() == TransportMessage.objects.count() == len(ids)
    assert max(text.count("INSERT INTO kjo_transport_message") for text in sent) == 1


@pytest.mark.usefixtures("database_transport")
def test_what_comes_after_a_job_that_the_caller_commits_is_a_transaction_too():
    """Without autocommit a caller begins and ends transactions by hand."""
    transaction.set_autocommit(False)
    try:
        ledger.write.enqueue(job="first")
        transaction.commit()
        TransportSubscription.objects.create(topic="ledger", consumer_group="g")
        transaction.rollback()
        ledger.write.enqueue(job="second")
        transaction.rollback()
    finally:
        transaction.set_autocommit(True)
    assert Job.objects.count() == TransportMessage.objects.count() == 1
    assert not TransportSubscription.objects.exists()


def test_in_a_savepoint_nothing_waits_for_the_commit(sent):
    store = store_for("default")
    with store.transaction(defers=True):
        assert store.defers
        with transaction.atomic():
            assert not store.defers
    with store.transaction():
        assert not store.defers
        with store.transaction(defers=True):
            assert not store.defers  # a worker may have called a handler in it
    with transaction.atomic(), store.transaction(defers=True):
        assert store.defers
        with transaction.atomic():
            assert not store.defers
    assert not store.defers


@pytest.mark.usefixtures("database_transport")
def test_within_a_transaction_a_job_and_its_message_take_one_round_trip(sent):
    ledger.write.enqueue(job="first")  # also finds out which groups there are
    with transaction.atomic():
        Entry.objects.create(job="the caller's")
        del sent[:]
        # When
        job = ledger.write.enqueue(job="second")
        # Then
        (text,) = sent
        inserted = re.findall(r"BEGIN|INSERT INTO \S+|COMMIT", text)
        assert inserted == ["INSERT INTO kjo_job", "INSERT INTO kjo_transport_message"]
        assert Job.objects.get(pk=job.job_id).state == "queued"
        assert TransportMessage.objects.count() == 2


@pytest.mark.usefixtures("database_transport")
def test_a_job_that_is_refused_within_a_transaction_leaves_the_callers_savepoint_usable(sent):
    with transaction.atomic():
        Entry.objects.create(job="the caller's")
        with pytest.raises(DataError), transaction.atomic(), connection.execute_wrapper(_spoil):
            ledger.write.enqueue(job="refused")
        ledger.write.enqueue(job="stored")
    assert entries() == ["the caller's"]
    assert Job.objects.count() == TransportMessage.objects.count() == 1


@pytest.mark.usefixtures("database_transport")
def test_a_job_of_a_broken_transaction_is_refused():
    """Django undoes such a transaction without an error, and the job with it."""
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError):
            ledger.write.enqueue(job="a")


def test_what_a_timeout_has_left_of_another_transaction_takes_nothing_along(sent):
    """It may be raised from outside before the wrapper is removed."""
    store = store_for("default")
    with store.transaction(), transaction.atomic():
        (left,) = [each for each in connection.execute_wrappers if isinstance(each, _Along)]
    connection.execute_wrappers.append(left)
    left.before.append((ADD, ["left"]))
    try:
        with transaction.atomic():
            assert not store.defers
            asked("SELECT 1")
            store.execute_with_next(ADD, ["a"])
    finally:
        connection.execute_wrappers.remove(left)
    assert entries() == ["a"]


@pytest.fixture
def workers(settings, postgres, forgotten_definitions) -> Iterator[Bench]:
    """A worker of the database transport."""
    settings.KJO = {**KJO}
    bench = Bench()
    yield bench
    bench.close()


def enqueue_first(name: str) -> None:
    """Enqueue by the first query of a handler, after one that looks which groups there are."""
    forget_groups()  # as after some seconds
    ledger.write.enqueue(job=name)


@pytest.mark.usefixtures("database_transport")
def test_the_savepoint_of_a_handler_is_opened_before_its_first_job_is_stored(sent):
    """Also in a transaction that no worker has begun, as where a test runs jobs at once."""
    savepoint = LazySavepoint(connection, store_for("default"))
    with transaction.atomic(), savepoint.group():
        asked("SELECT 1")
        with suppress(ValueError), savepoint:
            enqueue_first("a")
            raise ValueError
    assert not Job.objects.exists()


def test_a_handler_that_enqueues_first_is_called_once_and_stores_one_job(workers):
    # Given two that share a transaction, each with a savepoint
    calls: list[str] = []

    def first(name: str) -> None:
        calls.append(name)
        enqueue_first(name)

    as_job(first).enqueue_many([{"name": name} for name in "ab"])
    # When
    workers.run(workers.poll())
    # Then
    assert calls == ["a", "b"]
    assert Job.objects.filter(handler="ledger.write").count() == TransportMessage.objects.count()
    assert TransportMessage.objects.count() == 2


def test_what_a_failed_handler_has_enqueued_first_is_undone_and_not_told(workers):
    told: list[str] = []

    def first(name: str) -> None:
        enqueue_first(name)
        if name == "b":
            raise ValueError

    def hear(job_id: str, handler: str, **_: Any) -> None:
        if handler == "ledger.write":
            told.append(job_id)

    as_job(first).enqueue_many([{"name": name} for name in "ab"])
    signals.job_enqueued.connect(hear)
    try:
        workers.run(workers.poll())
    finally:
        signals.job_enqueued.disconnect(hear)
    stored = Job.objects.filter(handler="ledger.write").values_list("id", flat=True)
    assert told == [str(id) for id in stored]
    assert len(told) == 1


def test_leases_are_deleted_in_a_block_within_the_callers_transaction_too(sent):
    store = store_for("default")
    store.claim_leases(["lease"], "me", timedelta(minutes=1))
    with transaction.atomic(), store.transaction(defers=True):
        store.delete_leases(["lease"], "me")
    assert not Lease.objects.exists()


def _spoil(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    """Have the server refuse the last statement of a text before its commit."""
    if "kjo_transport_message" in sql:
        sql = sql.replace(
            "INSERT INTO kjo_transport_message", "SELECT 1 / 0; INSERT INTO kjo_transport_message"
        )
    return execute(sql, params, many, context)


def test_leases_go_behind_the_commit_in_the_same_round_trip(sent):
    store = store_for("default")
    store.claim_leases(["a", "b"], "me", timedelta(minutes=1))
    with store.transaction():
        asked("SELECT 1")
        store.delete_leases(["a", "b"], "me")
        store.execute_all([(ADD, ["a"])], is_last=True)
    assert sent[-1] == f"{ADD}; COMMIT; {postgres._DELETE_FREE_LEASES}"
    assert not Lease.objects.exists()
    # Also where the commit comes by itself
    store.claim_leases(["a", "b"], "me", timedelta(minutes=1))
    with store.transaction():
        asked("SELECT 1")
        store.delete_leases(["a", "b"], "me")
    assert sent[-1] == f"COMMIT; {postgres._DELETE_FREE_LEASES}"
    assert not Lease.objects.exists()
    assert asked("SHOW synchronous_commit") == "on"


def test_leases_that_somebody_has_locked_are_deleted_when_the_commit_is_over():
    """Nothing behind a COMMIT waits: what is refused for that would hide that it was committed."""
    # Given a lease that another session has locked
    store = store_for("default")
    store.claim_leases(["a", "b"], "me", timedelta(minutes=1))
    told: list[str] = []

    def settle() -> None:
        try:
            with store.transaction():
                asked("SELECT 1")
                transaction.on_commit(lambda: told.append("committed"))
                store.delete_leases(["a", "b"], "me")
                store.execute_all([(ADD, ["a"])], is_last=True)
        finally:
            connection.close()

    other = connection.copy()
    other.set_autocommit(False)
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT 1 FROM kjo_lease WHERE name = 'a' FOR UPDATE")
        # When
        thread = threading.Thread(target=settle)
        thread.start()
        # Then all is committed and told, and the other lease is free
        wait_until(lambda: told == ["committed"], "It waits for the lock")
        assert entries() == ["a"]
        assert set(Lease.objects.values_list("name", flat=True)) == {"a"}
        other.rollback()
        # And the lease is, when it is not locked any more
        thread.join(PATIENCE)
        assert not Lease.objects.exists()
    finally:
        other.close()


def test_where_the_server_binds_parameters_each_statement_is_sent_alone(monkeypatch, sent):
    # Given a project whose connections take one statement at a time
    options = {**connection.settings_dict["OPTIONS"], "server_side_binding": True}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    connection.close()
    store = store_for("default")
    job = ledger.write.enqueue(job="a")
    try:
        # When
        with store.transaction(waits_for_disk=False):
            assert asked("SHOW synchronous_commit") == "off"
        claimed = store.claim_leases(["a", "b"], "me", timedelta(minutes=1))
        sent.clear()
        with store.transaction():
            asked("SELECT 1")
            store.execute_with_next(ADD, ["a"])
            store.delete_leases(["a", "b"], "me")
            assert store.execute_all([(ADD, ["b"])], is_last=True) == [[(1,)]]
        rows, line = store.job_rows_and_line([str(job.job_id)], ["a limit"])
    finally:
        connection.close()
    # Then all has been done
    assert claimed == {"a": (True, 1), "b": (True, 1)}
    assert sent[:4] == ["SELECT 1", ADD, ADD, postgres._DELETE_LEASES_ALONE]
    assert entries() == ["a", "b"]
    assert not Lease.objects.exists()
    assert ([*rows], [*line]) == ([str(job.job_id)], [])


def test_leases_in_a_transaction_of_somebody_elses_are_part_of_it():
    store = store_for("default")
    store.claim_leases(["a"], "me", timedelta(minutes=1))
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        store.delete_leases(["a"], "me")
        assert not Lease.objects.exists()
        raise ZeroDivisionError
    assert Lease.objects.get().token == "me"
    store.delete_leases(["a"], "me")
    assert not Lease.objects.exists()


def test_leases_stay_where_the_transaction_is_undone():
    store = store_for("default")
    store.claim_leases(["a"], "me", timedelta(minutes=1))
    with pytest.raises(ZeroDivisionError), store.transaction():
        asked("SELECT 1")
        store.delete_leases(["a"], "me")
        raise ZeroDivisionError
    assert Lease.objects.get().token == "me"


def test_what_fails_behind_a_commit_takes_nothing_from_it(monkeypatch):
    # Given a statement that the server refuses
    monkeypatch.setattr(postgres, "_DELETE_FREE_LEASES", "SELECT %s, %s FROM no_such_table")
    store = store_for("default")
    # When
    with pytest.raises(ProgrammingError), store.transaction():
        asked("SELECT 1")
        store.delete_leases(["a"], "me")
        store.execute_all([(ADD, ["a"])], is_last=True)
    # Then
    assert entries() == ["a"]
    assert (status(), connection.connection.autocommit) == (STATUS.IDLE, True)


# --- Where handlers run ---------------------------------------------------------------------------


def test_where_handlers_are_called_psycopg_begins_by_itself(sent):
    with store_for("default").transaction(calls_handlers=True):
        asked("SELECT 1")
        assert (status(), connection.connection.autocommit) == (STATUS.INTRANS, False)
    assert sent == ["SELECT 1"]


def test_within_a_transaction_of_somebody_elses_none_is_begun(sent):
    with transaction.atomic():
        asked("SELECT 1")
        with begin_with_first_query(connection):
            asked("SELECT 2")
        with store_for("default").transaction():
            asked("SELECT 3")
    # Nor where it has asked nothing yet: all of it would be out of psycopg's hands
    with transaction.atomic(), store_for("default").transaction():
        asked("SELECT 4")
        assert not connection.connection.autocommit
    assert [text for text in sent if "BEGIN" in text] == []


def test_it_begins_as_psycopg_would():
    connection.ensure_connection()
    driver = connection.connection
    levels = [None, *psycopg.IsolationLevel]
    try:
        for level, read_only, deferrable in itertools.product(levels, *[[None, True, False]] * 2):
            driver.isolation_level = level
            driver.read_only, driver.deferrable = read_only, deferrable
            assert _begin(driver).encode() == driver._get_tx_start_command()
    finally:
        connection.close()


def test_after_a_first_query_that_was_refused_the_next_begins_the_transaction(sent):
    """Otherwise each query would be committed by itself, though the block is undone."""
    with pytest.raises(ZeroDivisionError), store_for("default").transaction():
        with pytest.raises(ProgrammingError):
            asked("SELEKT 1")
        Entry.objects.create(job="a")
        assert status() == STATUS.INTRANS
        raise ZeroDivisionError
    assert entries() == []


def test_the_isolation_asked_for_in_the_settings_is_kept(bench):
    # Given
    seen: list[object] = []
    as_job(
        lambda: seen.append(asked("SHOW transaction_isolation")), "bench.isolation"
    ).enqueue_many([{}, {}])
    options = connection.settings_dict["OPTIONS"]
    connection.close()
    connection.settings_dict["OPTIONS"] = {
        **options,
        "isolation_level": psycopg.IsolationLevel.REPEATABLE_READ,
    }
    try:
        # When
        bench.run()
        # Then
        assert seen == ["repeatable read"] * 2
    finally:
        connection.close()
        connection.settings_dict["OPTIONS"] = options


def test_handlers_find_the_driver_as_within_any_transaction(bench):
    """Out of autocommit: a cursor of the server's for rows to be locked is none "with hold"."""

    # Given
    def handler(job: str) -> None:
        for entry in Entry.objects.select_for_update().iterator():
            entry.note = job
            entry.save()

    Entry.objects.create(job="before")
    as_job(handler, "bench.iterating").enqueue_many([{"job": "a"}, {"job": "b"}])
    # When
    bench.run()
    # Then
    assert set(Job.objects.values_list("state", flat=True)) == {"completed"}
    assert Entry.objects.get().note == "b"


def test_an_enqueue_that_takes_more_than_one_statement_begins_along_with_the_first(sent):
    ledger.write.using(id="one").enqueue(job="a")
    assert [text.startswith("BEGIN; ") for text in sent] == [True] + [False] * (len(sent) - 1)
    assert Job.objects.get().unique_id == "one"


# --- Ending ---------------------------------------------------------------------------------------


def write_and_tell(told: list[str]) -> JobDefinition:
    def handler(job: str) -> None:
        Entry.objects.create(job=job)
        transaction.on_commit(lambda: told.append(job))

    return as_job(handler, "bench.write_and_tell")


@pytest.mark.parametrize("count", [1, 3])
def test_the_commit_goes_along_with_the_last_statement_of_its_group(
    bench, sent, monkeypatch, count
):
    # Given
    told: list[str] = []
    write_and_tell(told).enqueue_many([{"job": str(n)} for n in range(count)])
    deliveries = bench.poll()
    sent.clear()
    left: list[int] = []
    commit = psycopg.Connection.commit

    def committing(self):
        left.append(self.info.transaction_status)
        commit(self)

    monkeypatch.setattr(psycopg.Connection, "commit", committing)
    # When
    bench.pipeline._transact(deliveries, [], savepoints=len(deliveries) > 1)
    # Then: Django has nothing more to commit, and calls who waited for it
    assert [text for text in sent if "COMMIT" in text] == sent[-1:]
    assert left == [psycopg.pq.TransactionStatus.IDLE]
    assert entries() == told == [str(n) for n in range(count)]


def test_within_a_transaction_of_somebody_elses_nothing_is_committed(bench):
    # Given
    told: list[str] = []
    write_and_tell(told).enqueue(job="a")
    deliveries = bench.poll()
    # When
    with transaction.atomic():
        bench.pipeline._transact(deliveries, [], savepoints=len(deliveries) > 1)
        transaction.set_rollback(True)
    # Then
    assert (entries(), told) == ([], [])
    assert Job.objects.get().state == "queued"


@pytest.fixture
def refusing_commits(postgres) -> Iterator[None]:
    """A constraint that is looked at when a transaction commits: no two entries have one note."""
    table, name = "ALTER TABLE ledger_entry", "no_note_twice"
    with connection.cursor() as cursor:
        cursor.execute(f"{table} ADD CONSTRAINT {name} UNIQUE (note) DEFERRABLE INITIALLY DEFERRED")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"{table} DROP CONSTRAINT {name}")


def test_a_commit_that_is_refused_fails_the_job_it_is_refused_for(refusing_commits, bench):
    # Given: of three in a group, the second does what the database refuses at the end
    told: list[str] = []

    def noting(job: str, note: str) -> None:
        Entry.objects.create(job=job, note=note)
        transaction.on_commit(lambda: told.append(job))

    Entry.objects.create(job="before", note="twice")
    job = as_job(noting, "bench.noting")
    notes = {"a": "one", "b": "twice", "c": "two"}
    job.enqueue_many([{"job": name, "note": note} for name, note in notes.items()])
    # When
    bench.run()
    # Then
    assert (entries(), told) == (["a", "before", "c"], ["a", "c"])
    rows = Job.objects.order_by("id").values_list("state", "attempts")
    assert [*rows] == [("completed", 1), ("failing", 1), ("completed", 1)]
    assert ProcessedEvent.objects.count() == 2
