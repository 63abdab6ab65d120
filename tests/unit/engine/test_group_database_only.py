"""Handlers whose effects are in the database only: no savepoints, until one of a group fails."""

from __future__ import annotations

import pytest
from django.db import DatabaseError, connection, transaction

from kjo_django import job
from kjo_django.engine.handler.context import Abort
from kjo_django.models import Job, ProcessedEvent
from tests.ledger import jobs as ledger
from tests.ledger.models import Entry
from tests.unit.deliveries import Bench, as_job, benched, entries, statements, states

pytestmark = pytest.mark.usefixtures("real_database")


@pytest.fixture
def bench(real_database, settings):
    with benched(settings) as bench:
        yield bench


class Writer:
    """A handler that writes, and does something else for the job named ``odd``."""

    def __init__(self, then=lambda: None, **options) -> None:
        self.calls: list[str] = []
        self.committed: list[str] = []
        self.then = then
        self.definition = as_job(self.write, database_only=True, takes_context=True, **options)

    def write(self, context, job):
        self.calls.append(job)
        Entry.objects.create(job=job)
        transaction.on_commit(lambda: self.committed.append(job))
        if job == "odd":
            self.context = context
            self.then()

    def enqueue(self, *names: str) -> None:
        self.definition.enqueue_many({"job": name} for name in names)


def savepoints_of(bench: Bench) -> int:
    deliveries = bench.poll()
    with statements() as executed:
        bench.run(deliveries)
    return sum(sql.count("SAVEPOINT") for sql in executed)


def fail() -> None:
    raise RuntimeError("it broke")


def test_a_group_has_no_savepoints(bench):
    write = Writer()
    write.enqueue(*"abcd")
    assert savepoints_of(bench) == 0
    assert entries() == dict.fromkeys("abcd", 1)
    assert states() == ["completed"] * 4
    assert sorted(write.committed) == [*"abcd"]


def test_beside_others_it_has(bench):
    """They have promised nothing: their effects must not be repeated for a neighbour's failure."""
    write = Writer(fail)
    write.enqueue("a", "odd")
    ledger.write.enqueue(job="other")
    assert savepoints_of(bench) > 0
    assert write.calls == ["a", "odd"]


@pytest.mark.parametrize("at", [0, 2, 4])
def test_one_that_fails_takes_nobody_with_it(bench, at):
    # Given
    write = Writer(fail)
    names = [*"abcd"]
    names.insert(at, "odd")
    write.enqueue(*names)
    # When
    bench.run()
    # Then: up to it, and all again
    assert write.calls == [*names[: at + 1], *names]
    assert entries() == dict.fromkeys("abcd", 1)
    assert sorted(write.committed) == [*"abcd"]
    wanted = ["completed"] * 4
    wanted.insert(at, "failing")
    assert states() == wanted
    assert set(Job.objects.values_list("attempts", flat=True)) == {1}
    assert ProcessedEvent.objects.count() == 4


def swallow() -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT * FROM there_is_no_such_table")
    except DatabaseError:
        pass


def swallow_in_the_orm() -> None:
    try:
        Entry.objects.create(pk=Entry.objects.first().pk, job="twice")
    except DatabaseError:
        pass


@pytest.mark.parametrize("then", [swallow, swallow_in_the_orm])
def test_one_that_breaks_the_transaction_and_says_nothing_takes_nobody_with_it(bench, then):
    write = Writer(then)
    write.enqueue("a", "odd", "b")
    bench.run()
    found = entries()
    assert (found["a"], found["b"]) == (1, 1)
    assert [states()[0], states()[2]] == ["completed", "completed"]
    assert set(Job.objects.values_list("attempts", flat=True)) == {1}


def test_one_that_breaks_the_connection_takes_nobody_with_it(bench):
    def close() -> None:
        connection.close()
        Entry.objects.count()

    write = Writer(close, max_attempts=1)
    write.enqueue("a", "odd", "b")
    bench.run()
    assert entries() == {"a": 1, "b": 1}
    assert states() == ["completed", "failed", "completed"]


def test_one_that_was_asked_to_end_is_not_called_again(bench):
    # Given
    write = Writer()

    def end() -> None:
        write.context.abort(Abort.CANCELLED)
        write.context.raise_if_aborted()

    write.then = end
    write.enqueue("a", "odd", "b")
    # When
    bench.run()
    # Then
    assert write.calls == ["a", "odd", "a", "b"]
    assert states() == ["completed", "cancelled", "completed"]
    assert entries() == {"a": 1, "b": 1}


def test_batches_too(bench):
    # Given
    calls = []

    def write(batch):
        calls.append([item.payload["job"] for item in batch])
        Entry.objects.bulk_create([Entry(job=item.payload["job"]) for item in batch])
        if any(item.payload["job"] == "odd" for item in batch):
            fail()

    definition = as_job(write, batch=3, database_only=True)
    definition.enqueue_many({"job": name} for name in "abcdef")
    assert savepoints_of(bench) == 0
    calls.clear()
    definition.enqueue_many({"job": name} for name in ("g", "odd", "h"))
    # When
    bench.run()
    # Then
    assert calls == [["g", "odd", "h"], ["g", "odd", "h"], ["g"], ["odd"], ["h"]]
    assert entries() == dict.fromkeys("abcdefgh", 1)


def test_one_alone_is_called_once(bench):
    write = Writer(fail)
    write.enqueue("odd")
    bench.run()
    assert write.calls == ["odd"]
    assert entries() == {}


def test_without_a_transaction_there_is_nothing_to_roll_back():
    with pytest.raises(ValueError, match="no roll-back"):
        job(name="wrong", database_only=True, atomic=False)
