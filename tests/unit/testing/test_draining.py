"""What running jobs in a test's own transaction leaves of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, transaction

from kjo_django import PermanentError, chain, group
from kjo_django.models import DeadLetter, Job
from kjo_django.store.postgres import PostgresStore
from kjo_django.testing import drain, immediate, run_job
from tests.ledger.jobs import no_op, refuse, write
from tests.ledger.models import Entry
from tests.unit.deliveries import KJO, MEMORY, as_job


@pytest.mark.django_db
def test_callbacks_of_the_tests_transaction_stay_as_they_are() -> None:
    # Given
    def callback() -> None:
        raise AssertionError("the test's transaction is not committed")

    transaction.on_commit(callback)
    no_op.enqueue_many([{}] * 30)
    # When: they would be wrapped once more for each job, and their texts grow twofold
    assert drain().completed == 30
    # Then
    assert connection.run_on_commit[0][1] is callback


# --- At once --------------------------------------------------------------------------------------


@pytest.fixture
def at_once(db: None) -> Iterator[None]:
    with immediate():
        yield


@pytest.mark.usefixtures("at_once")
def test_a_job_has_run_when_its_enqueue_returns() -> None:
    handle = write.enqueue(job="a")
    assert Entry.objects.get().job == "a"
    assert handle.status == "completed"


@pytest.mark.usefixtures("at_once")
def test_many_jobs_and_the_steps_of_a_chain_run_at_once() -> None:
    write.enqueue_many([{"job": "a"}, {"job": "b"}])
    assert sorted(Entry.objects.values_list("job", flat=True)) == ["a", "b"]
    chain(write.step(job="c"), write.step(job="d")).enqueue()
    assert [entry.job for entry in Entry.objects.order_by("pk")][2:] == ["c", "d"]


@pytest.mark.usefixtures("at_once")
def test_what_a_handler_enqueues_runs_when_the_handler_has_ended() -> None:
    order = []

    def inner() -> None:
        order.append("inner")

    inner_job = as_job(inner, "test.inner")

    def outer() -> None:
        inner_job.enqueue()
        order.append("outer")

    as_job(outer, "test.outer").enqueue()
    assert order == ["outer", "inner"]


@pytest.mark.usefixtures("at_once")
def test_the_error_of_a_handler_is_raised_by_its_enqueue_once_it_is_recorded() -> None:
    with pytest.raises(PermanentError, match="this will never work") as raised:
        refuse.enqueue(job="a")
    assert DeadLetter.objects.get().error == str(raised.value)
    # And the next job runs
    write.enqueue(job="b")
    assert Entry.objects.get().job == "b"


@pytest.mark.django_db
def test_an_error_is_left_in_the_job_where_the_test_wants_that() -> None:
    with immediate(raise_errors=False):
        assert refuse.enqueue(job="a").status == "failed"


@pytest.mark.usefixtures("at_once")
def test_a_delayed_job_waits_for_drain() -> None:
    write.using(delay=60).enqueue(job="a")
    assert not Entry.objects.exists()
    assert drain(with_delayed=True).completed == 1


@pytest.mark.django_db
def test_only_jobs_of_the_queues_named_run_and_none_after_the_block(settings) -> None:
    settings.KJO = {**settings.KJO, "QUEUES": {"other": {}}}
    with immediate("ledger"):
        no_op.using(queue="other").enqueue()
        write.enqueue(job="a")
    write.enqueue(job="b")
    done = Job.objects.filter(state="completed")
    assert [job.handler for job in done] == ["ledger.write"]


@immediate()
@pytest.mark.django_db
def test_as_a_decorator_it_holds_for_the_whole_function() -> None:
    write.enqueue(job="a")
    assert Entry.objects.exists()


@pytest.mark.usefixtures("at_once")
def test_a_group_of_many_steps_and_its_callback_run_once_all_is_stored() -> None:
    steps = [write.step(job=f"step {number}") for number in range(25)]
    group(*steps).then(write.step(job="callback")).enqueue()
    assert Entry.objects.count() == 26
    assert Entry.objects.latest("pk").job == "callback"


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("by_id", [False, True], ids=["drain", "run_job"])
def test_what_a_handler_enqueues_within_a_drain_runs_after_it(by_id) -> None:
    # Given a delayed job that enqueues another one
    order = []
    inner_job = as_job(lambda: order.append("inner"), "test.inner")

    def outer() -> None:
        inner_job.enqueue()
        order.append("outer")

    as_job(outer, "test.outer").using(delay=60).enqueue()
    # When
    _ = run_job(Job.objects.get().pk) if by_id else drain(with_delayed=True)
    # Then
    assert order == ["outer", "inner"]


@pytest.mark.usefixtures("at_once")
def test_of_two_blocks_one_runs_a_job() -> None:
    with immediate():
        write.enqueue(job="a")
    assert Entry.objects.count() == 1


def test_a_coroutine_is_no_function_to_decorate() -> None:
    async def test() -> None: ...

    with pytest.raises(TypeError, match="with immediate"):
        immediate()(test)


@pytest.mark.postgres
def test_many_that_are_copied_into_postgresql_run_at_once(
    postgres: None, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a transport of which the relay brings jobs: their rows alone are written, by COPY
    settings.KJO = {**KJO, **MEMORY}
    copied, copy = list[int](), PostgresStore.copy_rows

    def copy_rows(store: Any, table: str, types: Any, rows: Any) -> None:
        found = [tuple(row) for row in rows]
        copied.append(len(found))
        copy(store, table, types, found)

    monkeypatch.setattr(PostgresStore, "copy_rows", copy_rows)
    # When, then
    with immediate():
        handles = write.enqueue_many([{"job": str(number)} for number in range(50)])
        assert {handle.status for handle in handles} == {"completed"}
        with transaction.atomic():
            write.enqueue_many([{"job": str(number)} for number in range(50, 100)])
            assert Entry.objects.count() == 100
            transaction.set_rollback(True)
    assert Entry.objects.count() == 50
    assert copied == [50, 50]
