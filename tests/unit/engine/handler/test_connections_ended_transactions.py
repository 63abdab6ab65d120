"""Handlers that end the transaction in which their group is recorded.

What ends a transaction differs from one database to the other: the tests on a database's server are
medium ones for that.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from datetime import timedelta

import pytest
from django.db import DataError, OperationalError, connection, connections, transaction

from kjo_django.engine import failures, recorder
from kjo_django.engine.attempt import Abort, Ending
from kjo_django.engine.handler.connections import answers, sever
from kjo_django.engine.handler.timeouts import RunAbandoned
from kjo_django.exceptions import HandlerTimeout, TransactionEndedError
from kjo_django.models import DeadLetter, Job, JobFailure, ProcessedEvent
from kjo_django.operations import jobs as operations
from kjo_django.store import store_for
from kjo_django.testing import drain
from tests.adversaries import COMMITS, NOTHING, UNDOES, UNSEEN, executing
from tests.databases import MARIADB, MYSQL, POSTGRES, SQLITE, every_way
from tests.ledger import jobs as ledger
from tests.ledger.models import Entry
from tests.unit.deliveries import as_job, entries, states, take_over
from tests.unit.engine.bench import GOOD, settled
from tests.waiting import PATIENCE, wait_until

every_database = pytest.mark.parametrize(
    "_database", [SQLITE, POSTGRES, MARIADB, MYSQL], indirect=True
)


def writing_and(end, *, after=None, raises=False):
    """Return a handler that writes, ends its transaction, and goes on."""

    def handler(job):
        Entry.objects.create(job=job)
        end()
        if after is not None:
            Entry.objects.create(job=after)
        if raises:
            raise ValueError("on its own account")

    return handler


def commit():
    COMMITS[connection.vendor]["commit"]()


def enqueue_beside(guilty, before=6, after=6, innocent=ledger.write):
    """Enqueue a guilty job amid innocent ones; return what these are to write."""
    names = [f"before {number}" for number in range(before)]
    names += [f"after {number}" for number in range(after)]
    for name in names[:before]:
        innocent.enqueue(job=name)
    guilty.enqueue(job="guilty")
    for name in names[before:]:
        innocent.enqueue(job=name)
    return dict.fromkeys(names, 1)


def assert_only_the_guilty_has_failed(bench, innocent, guilty="bench.guilty"):
    """Each innocent job has run once, and its marker says so; the guilty one is a dead letter."""
    assert not bench.stopping.waits
    assert {name: count for name, count in entries().items() if name != "guilty"} == innocent
    others = Job.objects.exclude(handler=guilty)
    assert set(others.values_list("state", flat=True)) <= {"completed"}
    assert ProcessedEvent.objects.count() == len(innocent)
    letter = DeadLetter.objects.get()
    assert (letter.handler, letter.reason, letter.attempts) == (guilty, "fatal", 1)
    assert letter.error_type == "kjo_django.exceptions.TransactionEndedError"
    assert "has ended the transaction that its job is recorded in" in letter.error
    assert settled(bench)


@pytest.mark.promise("ended-transaction-neighbours")
@pytest.mark.large("first")  # which is amid others, without those before it
@every_way(COMMITS, "end")
@pytest.mark.parametrize("before", [0, 6], ids=["first", "amid"])
def test_each_innocent_job_of_a_group_that_a_handler_commits_runs_once(bench, end, before):
    """All thirteen stayed queued for ever: their markers, written first, said that they had run."""
    # Given
    guilty = as_job(writing_and(end), "bench.guilty", max_attempts=3)
    innocent = enqueue_beside(guilty, before)
    # When
    bench.run()
    # Then
    assert_only_the_guilty_has_failed(bench, innocent)
    assert entries()["guilty"] == 1, "what it wrote before is committed"
    assert sorted(bench.results, key=str) == [*[Ending.COMPLETED] * len(innocent), Ending.DEAD]


@pytest.mark.large  # the same without savepoints
@every_way(COMMITS, "end")
def test_so_does_each_of_a_group_without_savepoints(bench, end):
    # Given
    guilty = as_job(writing_and(end), "bench.guilty", database_only=True)
    write = as_job(lambda job: Entry.objects.create(job=job) and None, "w", database_only=True)
    innocent = enqueue_beside(guilty, innocent=write)
    # When
    bench.run()
    # Then
    assert_only_the_guilty_has_failed(bench, innocent)


@pytest.mark.large("raises", "mariadb", "postgres")
@every_way(COMMITS, "end")
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_what_the_guilty_writes_after_its_commit_is_not_there(bench, end, raises):
    # Given
    guilty = as_job(writing_and(end, after="late", raises=raises), "bench.guilty")
    innocent = enqueue_beside(guilty, 1, 1)
    # When
    bench.run()
    # Then
    assert_only_the_guilty_has_failed(bench, innocent)


@pytest.mark.promise("ended-transaction")
@every_way(COMMITS, "end")
def test_alone_it_fails_in_the_same_way(bench, end):
    # Given
    as_job(writing_and(end), "bench.guilty", max_attempts=3).enqueue(job="guilty")
    # When
    bench.run()
    # Then
    assert_only_the_guilty_has_failed(bench, {})
    assert entries() == {"guilty": 1}


@pytest.mark.promise("ended-transaction-neighbours")
@every_way(UNDOES, "end")
@pytest.mark.parametrize("is_database_only", [False, True], ids=["savepoints", "none"])
def test_a_roll_back_by_a_handler_undoes_nobody_else(bench, end, is_database_only):
    # Given
    options = {"database_only": is_database_only}
    guilty = as_job(writing_and(end), "bench.guilty", max_attempts=2, **options)
    write = as_job(lambda job: Entry.objects.create(job=job) and None, "bench.write", **options)
    innocent = enqueue_beside(guilty, innocent=write)
    # When
    bench.run()
    # Then
    assert entries() == innocent
    assert set(Job.objects.filter(handler="bench.write").values_list("state", flat=True)) == {
        "completed"
    }
    assert Job.objects.get(handler="bench.guilty").state == "failing"
    assert "did not leave its transaction as it found it" in JobFailure.objects.get().error
    # And it ends
    bench.run_until_done()
    assert DeadLetter.objects.get().attempts == 2
    assert entries() == innocent
    assert settled(bench)


@pytest.mark.promise("ended-transaction")
@every_database
def test_what_is_sent_past_django_is_noticed_by_the_savepoint_of_the_handler(bench):
    """By its release, which on PostgreSQL goes along with the next handler's first query: that one
    is not to blame."""
    guilty = as_job(writing_and(UNSEEN), "bench.guilty")
    innocent = enqueue_beside(guilty)
    bench.run()
    assert_only_the_guilty_has_failed(bench, innocent)


@every_database
@pytest.mark.parametrize("beside", [0, 1], ids=["alone", "in a group"])
def test_a_handler_may_use_savepoints_and_undo_what_it_did_in_them(bench, beside):
    """None of this ends the transaction."""

    # Given
    def write(job):
        with transaction.atomic():
            Entry.objects.create(job=job)
        with suppress(ZeroDivisionError), transaction.atomic():
            Entry.objects.create(job="undone")
            raise ZeroDivisionError
        sid = transaction.savepoint()
        Entry.objects.create(job="undone")
        transaction.savepoint_rollback(sid)
        executing(
            "SAVEPOINT mine", NOTHING, "ROLLBACK TO SAVEPOINT mine", "RELEASE SAVEPOINT mine"
        )()
        Entry.objects.bulk_create([Entry(job=f"{job} {number}") for number in range(2)])

    names = ["a", *["b"] * beside]
    for name in names:
        as_job(write).enqueue(job=name)
    # When
    bench.run()
    # Then
    assert entries() == {f"{name}{end}": 1 for name in names for end in ("", " 0", " 1")}
    assert set(states()) == {"completed"}
    assert settled(bench)
    assert not [each for each in connection.execute_wrappers if "Guard" in repr(each)]


@every_database
def test_the_error_names_the_query(bench):
    as_job(writing_and(commit), "bench.guilty").enqueue(job="guilty")
    bench.run()
    assert "by a query that begins with 'COMMIT'" in DeadLetter.objects.get().error


@every_database
def test_the_transport_of_the_database_has_nothing_left_either(bench, transport):
    guilty = as_job(writing_and(commit), "bench.guilty")
    innocent = enqueue_beside(guilty)
    bench.run()
    assert_only_the_guilty_has_failed(bench, innocent)


@every_database
def test_a_job_that_had_failed_before_keeps_its_failure_and_is_not_called_again(bench):
    # Given
    calls = []

    def fail(job):
        calls.append(job)
        Entry.objects.create(job=job)
        raise ValueError("before")

    as_job(fail, "bench.failing", max_attempts=2).enqueue(job="failed")
    guilty = as_job(writing_and(commit), "bench.guilty")
    innocent = enqueue_beside(guilty, 1, 1)
    # When
    bench.run()
    # Then
    assert calls == ["failed"]
    assert entries() == {**innocent, "guilty": 1}
    failing = Job.objects.get(handler="bench.failing")
    assert (failing.state, failing.attempts) == ("failing", 1)
    # And its next attempt is none of a duplicate
    bench.run_until_done()
    assert calls == ["failed"] * 2


@pytest.mark.promise("ended-transaction-neighbours")
@pytest.mark.large("mariadb", "postgres")  # as with the rows of our own jobs, which are tried there
@every_way(COMMITS, "end")
def test_messages_of_others_beside_it_run_once_and_their_copies_not_at_all(bench, end):
    """They have no row that could tell that they have not run."""
    # Given
    for number in range(2):
        bench.publish(b'{"job":"b%d"}' % number, **GOOD | {"kjo_id": f"before-{number}"})
    as_job(writing_and(end), "bench.guilty")
    bench.publish(b'{"job":"guilty"}', kjo_id="guilty", kjo_type="bench.guilty")
    for number in range(2):
        bench.publish(b'{"job":"a%d"}' % number, **GOOD | {"kjo_id": f"after-{number}"})
    # When
    bench.run()
    # Then
    innocent = {"b0": 1, "b1": 1, "a0": 1, "a1": 1}
    assert_only_the_guilty_has_failed(bench, innocent)
    # And
    bench.publish(b'{"job":"a1"}', **GOOD | {"kjo_id": "after-1"})
    bench.run()
    assert bench.results[-1] is Ending.DUPLICATE
    assert entries() == {**innocent, "guilty": 1}


@every_database
def test_all_items_of_a_batch_that_commits_have_failed(bench):
    # Given
    def several(items):
        for item in items:
            Entry.objects.create(job=item.payload["job"])
        commit()

    ledger.write.enqueue(job="before")
    as_job(several, "bench.batch", batch=3).enqueue_many([{"job": job} for job in "abc"])
    ledger.write.enqueue(job="after")
    # When
    bench.run()
    # Then
    assert entries() == dict.fromkeys(["before", "a", "b", "c", "after"], 1)
    assert states() == ["completed", *["failed"] * 3, "completed"]
    assert settled(bench)


@every_database
def test_what_an_innocent_job_has_asked_for_on_commit_is_done(bench, hear):
    """Its writes are committed; Django forgets such callbacks with a roll-back."""
    # Given
    called, enqueued = [], hear("job_enqueued")

    def write(job):
        Entry.objects.create(job=job)
        transaction.on_commit(lambda: called.append(job))
        ledger.write.enqueue(job=f"child of {job}")

    guilty = as_job(writing_and(commit), "bench.guilty")
    innocent = enqueue_beside(guilty, 2, 2, innocent=as_job(write, "bench.write"))
    enqueued.clear()
    # When
    bench.run()
    # Then
    assert sorted(called) == sorted(innocent)
    assert len(enqueued) == len(innocent)
    # And
    bench.run()
    assert entries() == innocent | {f"child of {name}": 1 for name in innocent} | {"guilty": 1}


@every_database
def test_copies_of_a_guilty_message_of_another_service_do_not_run_again(bench):
    # Given
    as_job(writing_and(commit), "bench.guilty")
    for _ in range(3):
        bench.publish(b'{"job":"guilty"}', kjo_id="guilty", kjo_type="bench.guilty")
    # When
    bench.run()
    # Then
    assert entries() == {"guilty": 1}
    assert DeadLetter.objects.count() == 1


@pytest.mark.parametrize("_database", [POSTGRES], indirect=True)
def test_a_handler_that_uses_the_driver_alone_is_not_taken_for_the_one_before_it(bench):
    # Given
    def by_the_driver(job):
        raw = connection.connection
        raw.commit()
        raw.execute("SELECT 1")

    ledger.write.enqueue(job="before")
    as_job(by_the_driver, "bench.guilty").enqueue(job="guilty")
    ledger.write.enqueue(job="after")
    # When
    bench.run()
    # Then
    assert_only_the_guilty_has_failed(bench, {"before": 1, "after": 1})


@pytest.fixture
def _locked_table(bench, request):
    """A table that another session reads in a transaction: DDL on it commits, and waits."""
    executing("CREATE TABLE IF NOT EXISTS locked (n integer)", "INSERT INTO locked VALUES (1)")()
    other = connection.copy()
    with other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT * FROM locked")
    yield
    other.close()
    executing("DROP TABLE locked")()


@pytest.mark.parametrize("_database", [MARIADB, MYSQL], indirect=True)
@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "foreign"])
@pytest.mark.usefixtures("_locked_table")
def test_a_thread_that_is_given_up_after_its_handler_has_committed_takes_nobody_with_it(
    bench, is_ours
):
    # Given a handler whose DDL has committed and waits for a lock
    waits, thread_connections = threading.Event(), []

    def alter(job):
        Entry.objects.create(job=job)
        thread_connections.append(connections["default"])
        waits.set()
        executing("ALTER TABLE locked ADD COLUMN m integer")()

    guilty = as_job(alter, "bench.guilty", timeout=timedelta(seconds=30))
    for name, handler in (("before", ledger.write), ("guilty", guilty), ("after", ledger.write)):
        if is_ours:
            handler.enqueue(job=name)
        else:
            body = json.dumps({"job": name}).encode()
            bench.publish(body, kjo_id=name, kjo_type=handler.name)
    deliveries = bench.poll()

    def run():
        with suppress(RunAbandoned):
            bench.pipeline.run(deliveries)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert waits.wait(PATIENCE)
    (connected,) = thread_connections
    waiting = "SELECT count(*) FROM information_schema.processlist WHERE id = %s AND state LIKE %s"
    pattern = "Waiting for table metadata lock%"
    wait_until(lambda: asked(waiting, [connected.connection.thread_id(), pattern]))
    hung = [(job.context, job.seconds, job.delivery) for job in bench.watch.jobs()]
    # When its thread is given up
    bench.watch.abandon(thread.ident)
    sever(connected)
    deferred = bench.pipeline.abandon(deliveries, hung)
    bench.run(deferred)
    # Then
    assert_only_the_guilty_has_failed(bench, {"before": 1, "after": 1})
    thread.join(PATIENCE)


def asked(query, parameters):
    """What another session is told."""
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute(query, parameters)
            return cursor.fetchone()[0]
    finally:
        other.close()


@every_database
def test_in_the_transaction_of_a_test_it_says_what_to_do(bench):
    """That transaction is over, and the test with it."""
    as_job(writing_and(commit), "bench.guilty").enqueue(job="guilty")
    told = pytest.raises(TransactionEndedError, match="Run it in a TransactionTestCase")
    with told, transaction.atomic():
        drain(raise_errors=False)


@every_database
@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "foreign"])
def test_a_job_that_another_worker_has_taken_over_in_an_outage_is_not_taken_for_committed(
    bench, another, transport, monkeypatch, is_ours
):
    """Its marker is there, though not with the moment of this worker's transaction."""
    # Given a handler whose connection breaks, and a worker that has the job meanwhile
    calls, deliveries = [], []

    def run_elsewhere():
        try:
            another.run(take_over(another, deliveries))
        finally:
            connections.close_all()

    def breaking(job):
        calls.append(job)
        Entry.objects.create(job=job)
        if len(calls) == 1:
            connection.connection.close()
            raise OperationalError("the server closed the connection")

    def answering(using):
        if len(calls) == 1:
            taking = threading.Thread(target=run_elsewhere)
            taking.start()
            taking.join(PATIENCE)
        return answers(using)

    monkeypatch.setattr("kjo_django.engine.group.answers", answering)
    handler = as_job(breaking, "bench.breaking", max_attempts=5)
    if is_ours:
        handler.enqueue(job="a")
    else:
        bench.publish(b'{"job":"a"}', kjo_id="a", kjo_type="bench.breaking")
    deliveries += bench.poll()
    # When
    bench.run(deliveries)
    # Then it has run there, and here it is no dead letter
    assert entries() == {"a": 1}
    assert another.results == [Ending.COMPLETED]
    assert Ending.DEAD not in bench.results
    assert not DeadLetter.objects.exists()


@every_database
def test_what_is_committed_and_cannot_be_recorded_is_a_dead_letter_and_not_tried_again(
    bench, monkeypatch
):
    # Given a database that refuses again and again to record a completion
    record = recorder.complete

    def refusing(runtime, attempts, *arguments, **options):
        if "is_last" not in options and attempts:
            raise DataError("refused")
        return record(runtime, attempts, *arguments, **options)

    monkeypatch.setattr(recorder, "complete", refusing)
    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)
    guilty = as_job(writing_and(commit), "bench.guilty", max_attempts=3)
    enqueue_beside(guilty, 1, 0)
    # When
    bench.run_until_done()
    # Then
    assert entries() == {"before 0": 1, "guilty": 1}
    assert states() == ["failed", "failed"]
    assert "refused" in DeadLetter.objects.get(handler="ledger.write").error


@every_database
def test_what_is_cancelled_between_the_commit_and_its_record_is_announced_as_no_completion(
    bench, hear
):
    """As it may be where the leases of the group have lapsed: a COMMIT frees its rows, too."""
    # Given
    completed, deliveries = hear("job_completed"), []

    def cancel():
        try:
            bench.leases.release([delivery.lease for delivery in deliveries])
            operations.cancel(Job.objects.filter(handler="ledger.write"))
        finally:
            connections.close_all()

    def commit_and_wait():
        commit()
        cancelling = threading.Thread(target=cancel)
        cancelling.start()
        cancelling.join(PATIENCE)

    guilty = as_job(writing_and(commit_and_wait), "bench.guilty")
    enqueue_beside(guilty, 1, 0)
    deliveries += bench.poll()
    # When
    bench.run(deliveries)
    # Then its row, its ending and the signals agree
    assert states() == ["cancelled", "failed"]
    assert sorted(bench.results, key=str) == [Ending.DEAD, Ending.SKIPPED]
    assert not completed
    assert settled(bench)


@every_database
@pytest.mark.parametrize("is_database_only", [False, True], ids=["savepoints", "none"])
@pytest.mark.parametrize("why", [Abort.LOST, Abort.SHUTDOWN, Abort.CANCELLED])
def test_a_job_that_was_asked_to_end_and_broke_its_connection_is_not_called_again(
    bench, why, is_database_only
):
    # Given
    calls = []

    def write(job):
        calls.append(job)
        Entry.objects.create(job=job)
        if job == "asked":
            (call,) = bench.watch.calls
            call.context.abort(why)
            connection.connection.close()
            raise HandlerTimeout("interrupted")

    handler = as_job(write, "bench.asked", database_only=is_database_only, max_attempts=5)
    handler.enqueue_many([{"job": job} for job in ("before", "asked", "after")])
    # When
    bench.run()
    # Then
    assert calls.count("asked") == 1
    assert entries() == {"before": 1, "after": 1}


# --- What a worker that died has left -------------------------------------------------------------


@pytest.fixture
def _markers_ahead(bench):
    """Let the database be as a worker leaves it that dies when a handler has committed."""
    ledger.write.enqueue(job="a")
    ledger.write.enqueue(job="b")
    ledger.write.using(id="ours").enqueue(job="c")
    deliveries = bench.poll()
    store_for("default").insert_markers([delivery.key for delivery in deliveries])
    return deliveries


@every_database
def test_a_marker_of_a_job_that_has_not_ended_does_not_keep_it_from_running(
    bench, _markers_ahead, caplog
):
    """A group that an earlier release left so is completed by this one."""
    # When
    bench.run(_markers_ahead)
    # Then
    assert entries() == {"a": 1, "b": 1, "c": 1}
    assert states() == ["completed"] * 3
    assert ProcessedEvent.objects.count() == 3
    assert "3 jobs that have not ended have a marker" in caplog.text
    assert settled(bench)


@every_database
def test_a_failed_job_has_no_marker_though_another_worker_has_committed_one_since(
    bench, monkeypatch
):
    """That one had the job while the first was late, ran it to its commit, and died."""
    # Given
    publish, marked = failures.publish_dead_letters, []

    def publishing_late(runtime, attempts):
        marked.extend(store_for("default").insert_markers([each.key for each in attempts]))
        publish(runtime, attempts)

    monkeypatch.setattr(failures, "publish_dead_letters", publishing_late)
    as_job(writing_and(commit), "bench.guilty").enqueue(job="guilty")
    # When
    bench.run()
    # Then
    assert len(marked) == 1
    assert_only_the_guilty_has_failed(bench, {})


@every_database
@pytest.mark.parametrize("beside", [0, 1], ids=["alone", "in a group"])
def test_a_roll_back_is_not_taken_for_a_commit_because_of_such_markers(bench, beside):
    # Given
    for number in range(beside):
        ledger.write.enqueue(job=f"before {number}")
    rollback = UNDOES[connection.vendor]["rollback"]
    as_job(writing_and(rollback), "bench.guilty", max_attempts=2).enqueue(job="guilty")
    deliveries = bench.poll()
    store_for("default").insert_markers([delivery.key for delivery in deliveries])
    # When
    bench.run(deliveries)
    # Then
    assert entries() == {f"before {number}": 1 for number in range(beside)}
    assert Job.objects.get(handler="bench.guilty").state == "failing"


@every_database
def test_nor_is_it_kept_from_running_outside_a_transaction(bench):
    """Its handler has been declared otherwise since, as the error asks for."""
    # Given
    write = as_job(lambda job: Entry.objects.create(job=job) and None, "bench.out", atomic=False)
    write.enqueue(job="a")
    deliveries = bench.poll()
    store_for("default").insert_markers([delivery.key for delivery in deliveries])
    # When
    bench.run(deliveries)
    # Then
    assert entries() == {"a": 1}
    assert states() == ["completed"]
    assert settled(bench)


@every_database
def test_what_a_handler_has_committed_is_recorded_when_the_database_answers_again(
    bench, monkeypatch
):
    """The jobs before it must not run twice because an outage came in between."""
    # Given
    record, answers = recorder.complete, [OperationalError("away"), OperationalError("away")]

    def failing(*arguments, **options):
        if "is_last" not in options and answers:
            raise answers.pop()
        return record(*arguments, **options)

    monkeypatch.setattr(recorder, "complete", failing)
    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)
    guilty = as_job(writing_and(commit), "bench.guilty")
    innocent = enqueue_beside(guilty, 2, 2)
    # When
    bench.run()
    # Then
    assert not answers
    assert_only_the_guilty_has_failed(bench, innocent)
