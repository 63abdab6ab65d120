"""The lazy savepoint: one handler's writes apart from its group's, for nothing when it has none."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from django.db import DatabaseError, Error, IntegrityError, connection, transaction
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext

from kjo_django.engine.handler.savepoint import LazySavepoint
from kjo_django.enqueue.storing import after_commit
from kjo_django.models import QueueControl
from kjo_django.store import store_for
from tests.ledger.models import Entry

pytestmark = pytest.mark.usefixtures("real_database")


@contextmanager
def group():
    """The transaction of a group, with a write that must survive whatever a handler does."""
    with transaction.atomic():
        Entry.objects.create(job="group")
        yield
        Entry.objects.create(job="after")


@contextmanager
def handler():
    """What a handler does runs inside."""
    savepoint = LazySavepoint(connection, store_for("default"))
    with savepoint.group(), savepoint:
        yield


class Failed(Exception):
    pass


def entries() -> list[str]:
    return sorted(entry.job for entry in Entry.objects.all())


def violate() -> None:
    """Let the database refuse an INSERT, which on PostgreSQL aborts the transaction."""
    QueueControl(queue="taken").save(force_insert=True)


@pytest.fixture
def _taken(real_database):
    QueueControl.objects.create(queue="taken")


def savepoint_statements(queries: CaptureQueriesContext) -> list[str]:
    return [q["sql"].split()[0] for q in queries if "SAVEPOINT" in q["sql"]]


# --- What it costs --------------------------------------------------------------------------------


def test_a_handler_that_asks_nothing_opens_no_savepoint():
    with group(), CaptureQueriesContext(connection) as queries, handler():
        pass
    assert len(queries) == 0


def test_the_first_query_opens_one_and_the_others_use_it(real_database):
    with group(), CaptureQueriesContext(connection) as queries, handler():
        Entry.objects.create(job="a")
        Entry.objects.create(job="b")
    if real_database == "postgresql":  # along with the query, see test_savepoint_postgres.py
        assert (savepoint_statements(queries), len(queries)) == (["SAVEPOINT"], 2)
    else:
        assert (savepoint_statements(queries), len(queries)) == (["SAVEPOINT", "RELEASE"], 4)
    assert queries[0]["sql"].startswith("SAVEPOINT")


def test_a_handler_that_fails_without_a_query_opens_none_either():
    with group(), CaptureQueriesContext(connection) as queries, pytest.raises(Failed), handler():
        raise Failed
    assert len(queries) == 0


def test_nothing_of_it_stays_on_the_connection():
    with group():
        before = list(connection.savepoint_ids), list(connection.execute_wrappers)
        for error in (None, Failed):
            try:
                with handler():
                    Entry.objects.create(job="a")
                    if error:
                        raise error
            except Failed:
                pass
            assert (connection.savepoint_ids, connection.execute_wrappers) == before


# --- Success and failure --------------------------------------------------------------------------


def test_what_a_handler_wrote_joins_the_group():
    with group(), handler():
        Entry.objects.create(job="a")
    assert entries() == ["a", "after", "group"]


def test_a_failure_undoes_that_handlers_writes_only():
    with group():
        with handler():
            Entry.objects.create(job="first")
        with pytest.raises(Failed), handler():
            Entry.objects.create(job="second")
            raise Failed
        with handler():
            Entry.objects.create(job="third")
    assert entries() == ["after", "first", "group", "third"]


@pytest.mark.usefixtures("_taken")
def test_an_error_of_the_database_undoes_the_handler_and_leaves_the_group_usable():
    with group():
        with pytest.raises(IntegrityError), handler():
            Entry.objects.create(job="a")
            violate()
        with handler():
            Entry.objects.create(job="b")
    assert entries() == ["after", "b", "group"]


@pytest.mark.usefixtures("_taken")
def test_an_error_in_the_very_first_query_too():
    with group(), pytest.raises(IntegrityError), handler():
        violate()
    assert entries() == ["after", "group"]


def test_callbacks_of_a_failed_handler_are_not_called_and_those_of_others_are():
    # Given
    called: list[str] = []

    def later(name: str) -> None:
        transaction.on_commit(lambda: called.append(name))

    # When
    with group():
        later("group")
        with handler():
            later("before any query")
            Entry.objects.create(job="a")
            later("after a query")
        for has_query in (False, True):
            with pytest.raises(Failed), handler():
                later("lost")
                if has_query:
                    Entry.objects.create(job="b")
                    later("lost too")
                raise Failed
        with handler():
            later("last")
    # Then
    assert called == ["group", "before any query", "after a query", "last"]


def test_jobs_enqueued_by_a_failed_handler_wake_nobody(monkeypatch):
    # Given
    from kjo_django.runtime import current_runtime, get_coordination

    calls: list[str] = []
    monkeypatch.setattr(get_coordination(), "notify", calls.append)
    # When
    with group():
        with handler():
            Entry.objects.create(job="a")
            after_commit(current_runtime(), "kept")
        with pytest.raises(Failed), handler():
            Entry.objects.create(job="b")
            after_commit(current_runtime(), "lost")
            raise Failed
    # Then
    assert calls == ["kept"]


# --- Transactions a handler opens itself ----------------------------------------------------------


def test_a_nested_atomic_commits_and_fails_on_its_own():
    with group(), handler():
        with transaction.atomic():
            Entry.objects.create(job="inner")
        with pytest.raises(Failed), transaction.atomic():
            Entry.objects.create(job="gone")
            raise Failed
        Entry.objects.create(job="outer")
    assert entries() == ["after", "group", "inner", "outer"]


def test_an_atomic_around_everything_before_the_first_query_is_kept_apart():
    with group():
        with pytest.raises(Failed), handler(), transaction.atomic():
            Entry.objects.create(job="gone")
            raise Failed
        with handler(), transaction.atomic(), transaction.atomic():
            Entry.objects.create(job="kept")
    assert entries() == ["after", "group", "kept"]


def test_an_inner_failure_and_then_an_outer_one_undo_everything():
    with group(), pytest.raises(Failed), handler():
        Entry.objects.create(job="a")
        with pytest.raises(ValueError, match="x"), transaction.atomic():
            Entry.objects.create(job="b")
            raise ValueError("x")
        Entry.objects.create(job="c")
        raise Failed
    assert entries() == ["after", "group"]


def test_an_atomic_without_a_savepoint_that_fails_fails_the_handler():
    """Django marks the transaction unusable; the handler may not look away from that."""
    with group():
        with pytest.raises(TransactionManagementError, match="was undone"), handler():
            Entry.objects.create(job="a")
            with pytest.raises(Failed), transaction.atomic(savepoint=False):
                Entry.objects.create(job="b")
                raise Failed
        with handler():
            Entry.objects.create(job="c")
    assert entries() == ["after", "c", "group"]


def test_an_atomic_without_a_savepoint_that_succeeds_is_nothing_special():
    with group(), handler(), transaction.atomic(savepoint=False):
        Entry.objects.create(job="a")
    assert entries() == ["a", "after", "group"]


def test_saving_and_deleting_a_model_within():
    """Both open transactions without savepoints of their own."""
    with group(), handler():
        entry = Entry(job="a")
        entry.save()
        other = Entry.objects.create(job="b")
        other.delete()
        Entry.objects.filter(job="group").delete()
    assert entries() == ["a", "after"]


def test_saving_as_the_first_query_and_failing_undoes_it():
    with group(), pytest.raises(Failed), handler():
        Entry(job="a").save()
        raise Failed
    assert entries() == ["after", "group"]


def test_a_savepoint_of_the_handlers_own_is_inside_ours():
    with group(), handler():
        sid = transaction.savepoint()
        Entry.objects.create(job="a")
        transaction.savepoint_rollback(sid)
        Entry.objects.create(job="b")
    assert entries() == ["after", "b", "group"]


def test_set_rollback_is_heard():
    with group(), pytest.raises(TransactionManagementError), handler():
        Entry.objects.create(job="a")
        transaction.set_rollback(True)
    assert entries() == ["after", "group"]


@pytest.mark.parametrize("error", [None, Failed])
@pytest.mark.parametrize("is_used", [False, True])
def test_a_handler_that_closes_the_connection_leaves_no_open_block_behind(is_used, error):
    """The next transaction of this thread must find a connection like new."""
    with pytest.raises((Error, Failed)), transaction.atomic():
        Entry.objects.create(job="group")
        with handler():
            if is_used:
                Entry.objects.create(job="a")
            connection.close()
            if error:
                raise error
    assert not connection.in_atomic_block
    assert not connection.savepoint_ids
    Entry.objects.create(job="b")
    assert entries() == ["b"]


# --- Swallowed errors -----------------------------------------------------------------------------


@pytest.mark.usefixtures("_taken")
def test_an_error_swallowed_inside_atomic_is_no_error():
    with group(), handler():
        Entry.objects.create(job="a")
        with pytest.raises(IntegrityError), transaction.atomic():
            violate()
        Entry.objects.create(job="b")
    assert entries() == ["a", "after", "b", "group"]


@pytest.mark.usefixtures("_taken")
def test_an_error_swallowed_without_atomic_fails_the_handler_and_not_its_group():
    """On PostgreSQL the transaction is aborted by it; the group must not be."""
    with group():
        with pytest.raises(DatabaseError), handler():
            Entry.objects.create(job="a")
            with pytest.raises(IntegrityError):
                violate()
        with handler():
            Entry.objects.create(job="b")
    assert entries() == ["after", "b", "group"]


@pytest.mark.usefixtures("_taken")
def test_going_on_after_a_swallowed_error_does_not_help():
    with group(), pytest.raises(DatabaseError), handler():
        with pytest.raises(IntegrityError):
            violate()
        Entry.objects.create(job="a")
    assert entries() == ["after", "group"]


@pytest.mark.usefixtures("_taken")
def test_raw_sql_that_fails_and_is_swallowed_fails_the_handler_and_not_its_group(real_database):
    """Nothing marks the transaction for Django here; PostgreSQL has aborted it all the same."""
    with group():
        try:
            with handler():
                Entry.objects.create(job="a")
                with pytest.raises(DatabaseError), connection.cursor() as cursor:
                    cursor.execute("INSERT INTO no_such_table VALUES (1)")
        except DatabaseError:
            assert real_database == "postgresql"
        with handler():
            Entry.objects.create(job="b")
    # SQLite undoes the one statement and goes on.
    kept = ["b"] if real_database == "postgresql" else ["a", "b"]
    assert entries() == sorted([*kept, "after", "group"])
