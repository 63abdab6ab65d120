"""What succeeds: committed together, told once it is durable, in as many queries for a hundred."""

from __future__ import annotations

import asyncio
import time

import pytest
from django.db import connection
from django.utils import timezone

from kjo_django.engine.attempt import Ending, Mode
from kjo_django.enqueue.storing import result_of
from kjo_django.models import Job, ProcessedEvent, TransportMessage
from kjo_django.runtime import get_coordination
from tests.ledger import jobs as ledger
from tests.ledger.models import Entry
from tests.unit.deliveries import Bench, as_job, entries, statements, states, the_job
from tests.unit.engine.bench import both, reconfigured, settled


@both
def test_a_job_runs_and_everything_of_it_is_committed_together(bench, transport):
    """Promise 2."""
    # Given
    before = timezone.now()
    answer = ledger.write.enqueue(job="a")
    # When
    deferred = bench.run()
    # Then
    job = the_job()
    assert deferred == []
    assert bench.results == [Ending.COMPLETED]
    assert entries() == {"a": 1}
    assert (job.state, job.attempts, job.error) == ("completed", 1, "")
    assert before <= job.started_at <= job.finished_at <= job.result_expires_at
    event = ProcessedEvent.objects.get()
    assert event.event_key == (str(answer.job_id), "tests", "ledger.write")
    assert bench.measured == ["ledger.write"]
    assert settled(bench)


def test_a_group_runs_each_job_once(bench, transport):
    ledger.write.enqueue_many({"job": str(n)} for n in range(25))
    bench.run()
    assert entries() == {str(n): 1 for n in range(25)}
    assert bench.results == [Ending.COMPLETED] * 25
    assert settled(bench)


@pytest.mark.parametrize("value", [None, 0, "", [], {}, False, 1.5, "ü", {"a": [None]}], ids=repr)
def test_a_result_survives_whatever_it_is(bench, value):
    """PJQ-F16."""
    ledger.give.using(id="u").enqueue(value=value)
    bench.run()
    assert the_job().state == "completed"
    assert result_of(the_job()) == value
    answer = ledger.give.using(id="u").enqueue(value="other")
    assert (answer.answer, answer.result) == ("completed", value)
    assert type(answer.result) is type(value)


def queries_of(bench: Bench, count: int, definition=ledger.no_op, **payload: object) -> list[str]:
    """The statements of one group of this many jobs, transport and relay left out."""
    definition.enqueue_many([payload] * count)
    deliveries = bench.poll()
    assert len(deliveries) == count
    with statements() as executed:
        bench.run(deliveries)
    assert set(bench.results) == {Ending.COMPLETED}
    return executed


def test_the_number_of_queries_does_not_grow_with_the_group(standing_clock, bench, real_database):
    # Given: whatever is asked once in a while has been asked
    queries_of(bench, 1)
    # When
    few, many = queries_of(bench, 2), queries_of(bench, 60)
    # Then
    assert len(many) == len(few)
    writes = [sql.split()[0:3] for sql in many if sql.split()[0] in ("INSERT", "UPDATE", "DELETE")]
    events = [sql for sql in writes if any("processed_events" in word for word in sql)]
    assert len(events) == 1
    assert not [sql for sql in many if "SAVEPOINT" in sql], "no handler wrote anything"


def test_a_writing_handler_costs_its_own_statements_and_one_savepoint(
    standing_clock, bench, real_database
):
    queries_of(bench, 1)
    idle = len(queries_of(bench, 10))
    writing = queries_of(bench, 10, ledger.write, job="a")
    # On PostgreSQL a savepoint rides along with the handler's own statement.
    own = 1 if real_database == "postgresql" else 3
    assert len(writing) == idle + own * 10


def test_the_handler_is_told_about_its_run(bench):
    # Given
    contexts = []

    def look(context, job):
        contexts.append(context)

    answer = (
        as_job(look, takes_context=True, max_attempts=7)
        .using(headers={"traceparent": "00-1"})
        .enqueue(job="a")
    )
    # When
    bench.run()
    # Then
    (context,) = contexts
    assert context.job_id == context.idempotency_key == str(answer.job_id)
    assert (context.attempt, context.max_attempts, context.queue) == (1, 7, "ledger")
    assert context.headers["traceparent"] == "00-1"
    assert not context.aborted


@pytest.mark.promise("idempotency-key")
def test_the_idempotency_key_is_the_same_in_every_attempt(bench):
    # Given
    keys = []

    def look(context):
        keys.append((context.attempt, context.idempotency_key))
        if context.attempt < 3:
            raise RuntimeError

    answer = as_job(look, takes_context=True).enqueue()
    # When
    bench.run_until_done()
    # Then
    assert keys == [(n, str(answer.job_id)) for n in (1, 2, 3)]


def test_outcomes_are_told_once_they_are_durable(bench, monkeypatch):
    # Given
    seen = []

    def on_outcomes(outcomes):
        states = sorted(Job.objects.values_list("state", flat=True))
        seen.append((connection.in_atomic_block, bench.lag(), states))

    monkeypatch.setattr(bench.pipeline, "_listeners", [on_outcomes])
    ledger.write.enqueue(job="a")
    ledger.refuse.enqueue(job="b")
    # When
    bench.run()
    # Then
    assert seen == [(False, 1, ["completed", "queued"]), (False, 0, ["completed", "failed"])]


@both
def test_who_waits_for_a_job_is_not_kept_waiting_and_a_retry_finds_its_lease_free(
    bench, monkeypatch
):
    # Given: somebody who looks at the lease when told of the outcome
    held: dict[str, bool] = {}

    def look(outcomes):
        for outcome in outcomes:
            lease = outcome.delivery.lease
            held[outcome.delivery.kind] = lease in get_coordination().holders([lease])

    monkeypatch.setattr(bench.pipeline, "_listeners", [look])
    # When
    for job in (ledger.write, ledger.always_fails):
        job.enqueue(job="a")
        bench.run()
    # Then
    # ... which went with the commit, but for MariaDB, where it takes a round trip after it
    is_later = connection.vendor == "mysql"
    assert held == {"ledger.write": is_later, "ledger.always_fails": False}
    assert not list(get_coordination().names("CONS:"))


def test_the_database_transport_acknowledges_in_the_same_transaction(bench, transport):
    """X-11: acknowledged with the durable outcome."""
    if transport == "database":
        ledger.write.enqueue(job="a")
        bench.run()
        assert not TransportMessage.objects.exists()


def test_on_sqlite_a_group_is_two_transactions_its_claim_and_all_else(bench, transport):
    if connection.vendor != "sqlite":
        pytest.skip("Elsewhere a lease is taken outside a transaction")
    # Given a worker that has run something before
    ledger.write.enqueue(job="before")
    bench.run()
    ledger.write.enqueue_many({"job": str(n)} for n in range(5))
    deliveries = bench.poll()
    transactions: list[str] = []

    def look(execute, sql, *arguments):
        if not connection.in_atomic_block and not sql.startswith("SELECT"):
            transactions.append(sql.split()[0])
        return execute(sql, *arguments)

    # When
    with connection.execute_wrapper(look):
        bench.run(deliveries)
    # Then
    claim = "UPDATE" if transport == "database" else "BEGIN"
    assert transactions == [claim, "BEGIN"]
    assert settled(bench)


@both
@pytest.mark.parametrize("options", [{}, {"database_only": True}], ids=str)
def test_a_group_far_beyond_its_budget_ends_with_the_handler_that_runs(
    bench, settings, transport, options
):
    """What has completed is not kept locked and unseen by all that was to come after it."""
    # Given a group whose second handler takes much longer than was thought
    bench = reconfigured(settings, bench, GROUP_BUDGET=0.002)
    ran = []

    def slow_once(number):
        ran.append(number)
        if number == 1 and ran.count(1) == 1:
            time.sleep(0.3)  # sleep: far beyond the budget

    job = as_job(slow_once, **options)
    job.enqueue_many([{"number": number} for number in range(4)])
    deliveries = bench.poll()
    # When
    deferred = bench.run(deliveries)
    # Then
    assert deferred == deliveries[2:]
    assert states() == ["completed"] * 2 + ["queued"] * 2
    assert bench.run(deferred) == []
    assert ran == [0, 1, 2, 3]
    assert set(Job.objects.values_list("attempts", flat=True)) == {1}
    assert settled(bench)


# --- Handlers that are coroutines -----------------------------------------------------------------


@both
def test_a_coroutine_writes_within_the_groups_transaction(bench, transport):
    # Given
    async def write(job, fail=False):
        await Entry.objects.acreate(job=job)
        if fail:
            raise RuntimeError

    job = as_job(write, max_attempts=1)
    job.enqueue_many([{"job": "a"}, {"job": "b", "fail": True}, {"job": "c"}])
    # When
    bench.run()
    # Then
    assert entries() == {"a": 1, "c": 1}
    assert sorted(result.value for result in bench.results) == ["completed", "completed", "dead"]
    assert settled(bench)


def test_coroutines_outside_a_transaction_run_at_the_same_time(bench, transport):
    # Given: each waits for all the others
    count = 20
    here = []
    everybody = asyncio.Event()

    async def meet(number):
        here.append(number)
        if len(here) == count:
            everybody.set()
        await asyncio.wait_for(everybody.wait(), 20)
        return number

    as_job(meet, atomic=False).enqueue_many([{"number": n} for n in range(count)])
    deliveries = bench.poll()
    # When
    assert {delivery.mode for delivery in deliveries} == {Mode.CONCURRENT}
    bench.run(deliveries)
    # Then
    assert bench.results == [Ending.COMPLETED] * count
    assert [result_of(job) for job in Job.objects.order_by("id")] == list(range(count))
    assert settled(bench)
