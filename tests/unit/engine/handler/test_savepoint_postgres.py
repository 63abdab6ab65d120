"""PostgreSQL's savepoints ride along with the handlers' own queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest
from django.db import DatabaseError, connection, transaction
from django.db.transaction import TransactionManagementError

from kjo_django.engine.handler.savepoint import LazySavepoint
from kjo_django.exceptions import HandlerTimeout
from kjo_django.models import Job, ProcessedEvent
from kjo_django.store import store_for
from kjo_django.store.postgres import text_array
from tests.ledger import jobs as ledger
from tests.ledger.models import Entry
from tests.unit.deliveries import Bench, as_job, benched

pytestmark = [pytest.mark.postgres, pytest.mark.usefixtures("postgres")]

OPEN_A, OPEN_B = "SAVEPOINT kjo_handler_a; ", "SAVEPOINT kjo_handler_b; "
INSERT = 'INSERT INTO "ledger_entry"'


class Failed(Exception):
    pass


@contextmanager
def group() -> Iterator[LazySavepoint]:
    """The transaction of a group, and the savepoint its handlers enter."""
    savepoint = LazySavepoint(connection, store_for("default"))
    with transaction.atomic(), savepoint.group():
        yield savepoint


def entries() -> list[str]:
    return sorted(Entry.objects.values_list("job", flat=True))


def fail(savepoint: LazySavepoint, how) -> None:
    """Let a handler fail that writes before."""
    with pytest.raises(Failed), savepoint:
        how()
        raise Failed


def test_it_costs_no_round_trip_of_its_own(sent):
    with group() as savepoint:
        # When: two handlers write, one of them twice, then their group
        with savepoint:
            Entry.objects.create(job="a")
            Entry.objects.create(job="b")
        with savepoint:
            Entry.objects.create(job="c")
        with savepoint:
            Entry.objects.create(job="d")
        Entry.objects.create(job="group")
        Entry.objects.create(job="group")
    # Then
    inserts = [text for text in sent if INSERT in text]
    to_b, to_a = f"RELEASE {OPEN_A}{OPEN_B}", f"RELEASE {OPEN_B}{OPEN_A}"
    beginnings = [OPEN_A, "", to_b, to_a, f"RELEASE {OPEN_A}", ""]
    assert [text.partition(INSERT)[0] for text in inserts] == beginnings
    assert len(sent) == len(inserts)
    assert entries() == ["a", "b", "c", "d", "group", "group"]


@pytest.mark.parametrize("version", ["3.3", "3.2"])
def test_the_query_it_rides_along_with_answers_as_if_it_were_alone(monkeypatch, version):
    if version == "3.2":
        monkeypatch.delattr(psycopg.Cursor, "set_result", raising=False)
    Entry.objects.create(job="before")
    with group() as savepoint:
        with savepoint:
            assert entries() == ["before"]
        with savepoint:
            assert Entry.objects.filter(job="before").update(note="seen") == 1
        with savepoint:
            assert Entry.objects.create(job="made").pk
        with savepoint, connection.cursor() as cursor:
            cursor.execute("SELECT note, 100 %% 7 FROM ledger_entry WHERE job = %s", ["before"])
            assert (cursor.fetchall(), cursor.nextset()) == ([("seen", 2)], None)
        with savepoint, connection.cursor() as cursor:
            cursor.execute("SELECT 'first'; SELECT 'second'")
            assert (cursor.fetchall(), cursor.nextset()) == ([("first",)], True)
            assert (cursor.fetchall(), cursor.nextset()) == ([("second",)], None)


def test_a_query_that_was_never_sent_has_opened_nothing():
    """psycopg looks at the parameters first."""
    with group() as savepoint:
        with savepoint:
            Entry.objects.create(job="a")
        with pytest.raises(DatabaseError), savepoint:
            connection.cursor().execute("SELECT %s, %s", [1])
        with savepoint:
            # And after one the handler minds, the next opens it
            with pytest.raises(DatabaseError):
                connection.cursor().execute("SELECT %s, %s", [1])
            Entry.objects.create(job="b")
        fail(savepoint, lambda: Entry.objects.create(job="lost"))
    assert entries() == ["a", "b"]


def test_a_first_query_that_must_go_alone_and_is_refused_costs_its_successor_nothing():
    """Its savepoint was opened before it, and with it the one before released."""
    wrong = "INSERT INTO ledger_entry (job, note, created_at) VALUES (%s, '', now())"
    with group() as savepoint:
        with savepoint:
            Entry.objects.create(job="a")
        with pytest.raises(DatabaseError), savepoint:
            connection.cursor().executemany(wrong, [["x", "one too many"]])
        with savepoint:
            Entry.objects.create(job="b")
        with savepoint:
            # And after one the handler minds, it goes on in the same savepoint
            with pytest.raises(DatabaseError):
                connection.cursor().executemany(wrong, [["x", "one too many"]])
            Entry.objects.create(job="c")
        fail(savepoint, lambda: Entry.objects.create(job="lost"))
    assert entries() == ["a", "b", "c"]


@pytest.mark.parametrize("minds", [False, True])
def test_a_timeout_during_the_first_query_undoes_that_query(monkeypatch, minds):
    """It is raised from outside, when the answer is there: the query was sent."""
    execute = psycopg.Cursor.execute
    insert = "INSERT INTO ledger_entry (job, note, created_at) VALUES ('lost', '', now())"

    def run_out_of_time(self, query, *arguments, **options):
        execute(self, query, *arguments, **options)
        monkeypatch.undo()
        raise HandlerTimeout

    with group() as savepoint:
        with savepoint:
            Entry.objects.create(job="a")
        with pytest.raises(HandlerTimeout), savepoint:
            monkeypatch.setattr(psycopg.Cursor, "execute", run_out_of_time)
            try:
                connection.cursor().execute(insert)
            except HandlerTimeout:
                if minds:
                    connection.cursor().execute(insert)
                raise
        with savepoint:
            Entry.objects.create(job="b")
    assert entries() == ["a", "b"]


def test_a_syntax_error_loses_the_whole_transaction_and_never_keeps_half_of_it():
    """The server reads all of a text before it does any of it, so the savepoint is not there."""
    with pytest.raises(DatabaseError), group() as savepoint:
        with savepoint:
            Entry.objects.create(job="a")
        with pytest.raises(DatabaseError, match="syntax error"), savepoint:
            connection.cursor().execute("SELEKT 1")
        with savepoint:
            Entry.objects.create(job="b")
    assert entries() == []


def test_an_error_that_was_swallowed_is_noticed_without_asking_the_server():
    with group() as savepoint:
        with pytest.raises(TransactionManagementError), savepoint:
            Entry.objects.create(job="lost")
            with pytest.raises(DatabaseError):
                connection.cursor().execute("INSERT INTO no_such_table VALUES (1)")
        with savepoint:
            Entry.objects.create(job="b")
    assert entries() == ["b"]


@pytest.mark.parametrize("handler_first", [True, False])
def test_what_must_go_alone_comes_after_a_savepoint_of_its_own(handler_first, sent):
    """Named cursors and statements for many rows take nothing along."""
    Entry.objects.create(job="before")
    with group() as savepoint:
        if not handler_first:
            with savepoint:
                Entry.objects.create(job="a")
        with savepoint:
            assert [entry.job for entry in Entry.objects.order_by("job").iterator()][-1] == "before"
        with savepoint, connection.cursor() as cursor:
            sql = "INSERT INTO ledger_entry (job, note, created_at) VALUES (%s, '', now())"
            cursor.executemany(sql, [["x"], ["y"]])
        fail(savepoint, lambda: Entry.objects.create(job="lost"))
    assert [text for text in sent if text.endswith((OPEN_A, OPEN_B))]
    assert entries() == sorted(["before", "x", "y", *([] if handler_first else ["a"])])


# --- In a worker ----------------------------------------------------------------------------------


@pytest.fixture
def bench(settings, postgres) -> Iterator[Bench]:
    with benched(settings) as bench:
        yield bench


def select(sql: str) -> Callable[..., None]:
    """A handler that writes, then asks something in SQL of its own."""

    def handler(job: str) -> None:
        connection.cursor().execute(sql)
        Entry.objects.create(job=job)

    return handler


@pytest.mark.parametrize("sql", ["SELEKT 1", "SELECT 1 FROM no_such_table"])
def test_a_handler_with_bad_sql_fails_alone(bench, sql):
    # Given: it is in the middle of a group
    ledger.write.enqueue(job="a")
    as_job(select(sql), "bench.select").enqueue(job="lost")
    ledger.write.enqueue(job="b")
    # When
    bench.run()
    # Then
    assert entries() == ["a", "b"]
    failed = Job.objects.exclude(state="completed").get()
    assert (failed.handler, failed.state, failed.attempts) == ("bench.select", "failing", 1)


def test_what_a_handler_began_by_a_query_that_took_too_long_is_undone(bench):
    """Or it takes effect once more with each attempt."""

    # Given: it is in the middle of a group
    def slow(job: str) -> None:
        connection.cursor().execute(
            "INSERT INTO ledger_entry (job, note, created_at) "
            "SELECT %s, '', now() FROM pg_sleep(1)",
            [job],
        )

    ledger.write.enqueue(job="a")
    as_job(slow, "bench.slow", timeout=timedelta(milliseconds=100)).enqueue(job="lost")
    ledger.write.enqueue(job="b")
    # When
    bench.run()
    # Then
    assert Job.objects.get(handler="bench.slow").state == "failing"
    assert entries() == ["a", "b"]


def test_everything_works_with_parameters_bound_by_the_server(bench, settings):
    """Then every statement goes alone."""
    # Given
    connection.close()
    options = connection.settings_dict["OPTIONS"]
    connection.settings_dict["OPTIONS"] = {**options, "server_side_binding": True}
    try:
        ledger.write.enqueue_many([{"job": "a"}, {"job": "b"}, {"job": "c"}])
        ledger.always_fails.enqueue(job="x")
        # When
        bench.run()
        # Then
        assert entries() == ["a", "b", "c"]
        assert sorted(Job.objects.values_list("state", flat=True)) == [
            *["completed"] * 3,
            "failing",
        ]
        assert ProcessedEvent.objects.count() == 3
    finally:
        connection.close()
        connection.settings_dict["OPTIONS"] = options


# --- Texts instead of lists -----------------------------------------------------------------------

PLAIN = "plain", "", "with, comma", "{braces}", "NULL", "ünï"
HOSTILE = 'quote"', "back\\slash", '\\"', "', DROP", "tab\tand\nline"


@pytest.mark.parametrize("values", [[], ["one"], [*PLAIN], [*PLAIN, *HOSTILE], ["", ""], ['","']])
def test_an_array_written_as_one_text_arrives_as_it_was(values):
    with connection.cursor() as cursor:
        cursor.execute("SELECT %s::text[]", [text_array(values)])
        assert cursor.fetchall() == [(values,)]
