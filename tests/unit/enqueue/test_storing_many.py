"""Many jobs at once, in as many queries as two."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection, transaction
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext

from kjo_django.engine.handler.savepoint import LazySavepoint
from kjo_django.models import Job, TransportMessage
from kjo_django.store import store_for
from kjo_django.store.postgres import PostgresStore
from kjo_django.store.session_changes import notice
from tests.ledger.jobs import write
from tests.unit.enqueue.stored import writing_nothing

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("transport")]


def count_queries(action) -> int:
    with CaptureQueriesContext(connection) as queries:
        action()
    return len(queries)


@pytest.mark.parametrize("with_ids", [False, True], ids=["anonymous", "with ids"])
def test_the_number_of_queries_does_not_grow_with_the_jobs(with_ids):
    # Given: whatever is asked once in a while has been asked
    write.enqueue(job="warm")

    def enqueue(count: int) -> int:
        ids = [f"{count}-{n}" for n in range(count)] if with_ids else None
        return count_queries(
            lambda: write.enqueue_many([{"job": str(n)} for n in range(count)], ids=ids)
        )

    # When
    few, many = enqueue(2), enqueue(30)  # SQLite binds no more in one INSERT
    # Then
    assert few == many
    assert Job.objects.count() == 33


def test_enqueue_many_of_a_log_transport_is_one_insert(transport, django_assert_num_queries):
    if transport == "memory":
        with django_assert_num_queries(1):
            write.enqueue_many([{"job": str(n)} for n in range(20)])


@pytest.mark.postgres
@pytest.mark.parametrize("with_ids", [False, True], ids=["anonymous", "with ids"])
def test_on_postgresql_a_thousand_cost_as_many_queries_as_two(postgres, with_ids):
    def enqueue(count: int) -> int:
        ids = [f"{count}-{n}" for n in range(count)] if with_ids else None
        payloads = [{"job": str(n)} for n in range(count)]
        return count_queries(lambda: write.enqueue_many(payloads, ids=ids))

    write.enqueue(job="warm")
    # Many go by COPY, which needs a transaction of its own: BEGIN and COMMIT are told apart.
    assert enqueue(1000) <= enqueue(2) + 2
    assert Job.objects.count() == 1003


@pytest.mark.parametrize("count", [1, 20])
def test_what_became_of_ids_is_asked_only_where_one_was_taken(transport, count):
    # Given
    write.enqueue(job="warm")
    payloads = [{"job": str(n)} for n in range(count)]

    def selects(ids: list[str]) -> int:
        with CaptureQueriesContext(connection) as queries:
            write.enqueue_many(payloads, ids=ids)
        return sum("kjo_job" in q["sql"] and q["sql"].startswith("SELECT") for q in queries)

    # When, then
    if connection.vendor == "mysql":
        pytest.skip("its INSERT does not tell which rows it has made")
    assert selects([f"new {n}" for n in range(count)]) == 0
    assert selects([f"new {n}" for n in range(count)]) == 1
    assert Job.objects.count() == count + 1


def test_the_answers_come_in_the_order_of_the_payloads():
    answers = write.enqueue_many([{"job": str(n)} for n in range(20)])
    stored = {job.pk: job.arguments["job"] for job in Job.objects.all()}
    assert [stored[answer.job_id] for answer in answers] == [str(n) for n in range(20)]
    assert [answer.job_id for answer in answers] == sorted(answer.job_id for answer in answers)


def test_many_may_be_none_or_a_generator():
    assert write.enqueue_many([]) == []
    assert len(write.enqueue_many({"job": str(n)} for n in range(3))) == 3


@pytest.mark.parametrize("ids", [[], ["1"], ["1", "2", "3"]], ids=len)
def test_there_is_one_id_for_each_payload(ids):
    says = f"there are 2 payloads and {len(ids)} ids"
    with writing_nothing(), pytest.raises(ValueError, match=says):
        write.enqueue_many([{"job": "a"}, {"job": "b"}], ids=iter(ids))


def test_one_bad_payload_among_many_stores_none():
    with writing_nothing(), pytest.raises(TypeError, match="unexpected keyword argument"):
        write.enqueue_many([{"job": "a"}, {"job": "b", "wrong": 1}])


@pytest.fixture
def copied_tables(monkeypatch):
    """The table of each COPY."""
    tables = []
    copy_rows = PostgresStore.copy_rows

    def note(store: PostgresStore, table: str, *arguments: Any) -> None:
        copy_rows(store, table, *arguments)
        tables.append(table)

    monkeypatch.setattr(PostgresStore, "copy_rows", note)
    return tables


@pytest.mark.postgres
def test_what_a_failing_handler_enqueued_first_thing_is_undone_however_many(
    postgres, transport, copied_tables
):
    # Given: nothing has opened the savepoints of the handlers before
    many = [{"job": str(n)} for n in range(100)]
    # When
    with transaction.atomic():
        savepoint = LazySavepoint(connection, store_for("default"))
        with savepoint.group():
            with savepoint:
                write.enqueue_many(many)
            with pytest.raises(ZeroDivisionError), savepoint:
                write.enqueue_many(many)
                raise ZeroDivisionError
            with savepoint:
                write.enqueue(job="other")
    # Then
    tables = ["kjo_job"] if transport == "memory" else ["kjo_job", "kjo_transport_message"]
    assert copied_tables == 2 * tables
    stored = [job.arguments["job"] for job in Job.objects.order_by("id")]
    assert stored == [*map(str, range(100)), "other"]
    if transport == "database":
        assert TransportMessage.objects.count() == len(stored)


@pytest.mark.postgres
def test_many_are_copied_in_a_session_whose_changes_are_noticed(postgres, copied_tables):
    """The sessions of a worker's threads are watched as long as they last."""
    with connection.execute_wrapper(notice):
        write.enqueue_many([{"job": str(n)} for n in range(100)])
    assert "kjo_job" in copied_tables
    assert Job.objects.count() == 100


@pytest.mark.postgres
def test_a_query_wrapper_of_others_is_given_texts_only(postgres, copied_tables):
    # Given
    kinds = set()

    def look(execute: Any, sql: Any, *others: Any) -> Any:
        kinds.add(type(sql))
        return execute(sql, *others)

    # When
    with connection.execute_wrapper(look):
        write.enqueue_many([{"job": str(n)} for n in range(100)])
    # Then
    assert (kinds, copied_tables) == ({str}, [])
    assert Job.objects.count() == 100


@pytest.mark.postgres
def test_none_is_stored_in_a_transaction_that_is_going_to_be_undone(postgres, copied_tables):
    with transaction.atomic():
        with pytest.raises(ZeroDivisionError), transaction.atomic(savepoint=False):
            raise ZeroDivisionError
        with pytest.raises(TransactionManagementError):
            write.enqueue_many([{"job": str(n)} for n in range(100)])
    assert copied_tables == []
