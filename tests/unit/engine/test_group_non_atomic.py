"""Groups of ``atomic=False`` handlers: claimed together, recorded together, little left unrecorded.

On PostgreSQL and on a SQLite file.
"""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import IntegrityError, OperationalError, connection, transaction
from django.db.backends.signals import connection_created
from django.utils import timezone

from kjo_django.engine import failures, recorder
from kjo_django.engine.attempt import Ending
from kjo_django.engine.group import Pipeline
from kjo_django.engine.runners import lane
from kjo_django.exceptions import RateLimitExceededError
from kjo_django.models import Job, JobFailure, ProcessedEvent, transition
from kjo_django.runtime import get_coordination
from kjo_django.store import store_for
from kjo_django.store.rows import row_of
from tests.clocks import SetClock
from tests.factories import JobFactory
from tests.ledger.models import Entry
from tests.unit.deliveries import KJO, MEMORY, Bench, as_job, statements, states
from tests.unit.workers import Running
from tests.waiting import PATIENCE, wait_until

pytestmark = [
    pytest.mark.medium,
    pytest.mark.usefixtures("real_database", "forgotten_definitions"),
]  # threads and waits of a worker, in real time
AMPLE, SHORT, NEXT_TO_NONE = 600, 0.2, 0.000002
"""Seconds of budget: one nothing exhausts here, one a sleep does, one everything does."""
GONE = OperationalError("server closed the connection unexpectedly")


@pytest.fixture
def make_bench(settings):
    made = []

    def make(budget: float, worker: str = "bench", **options: object) -> Bench:
        if not made:
            settings.KJO = {**KJO, **MEMORY, "GROUP_BUDGET": budget, **options}
        made.append(Bench(worker=worker))
        return made[-1]

    yield make
    for bench in made:
        bench.pipeline.close(PATIENCE)
        bench.close()


def noting(ran: list[int]):
    def note(number):
        ran.append(number)

    return note


def completed() -> int:
    return Job.objects.filter(state="completed").count()


def leased() -> int:
    return Job.objects.exclude(lease_token="", lease_expires_at=None).count()


def settled(bench: Bench) -> bool:
    return not leased() and not list(get_coordination().names("CONS:")) and bench.lag() == 0


@contextmanager
def refusing_to_record(monkeypatch, error, is_refused=lambda attempt: True):
    """Neither a completion nor a failure of these attempts can be recorded."""
    record, record_failures = recorder.record_completions, failures.record_failures

    def refuse(runtime, attempts, *others):
        if any(map(is_refused, attempts)):
            raise error
        return record(runtime, attempts, *others)

    def refuse_failures(runtime, attempts, worker):
        if any(map(is_refused, attempts)):
            raise error
        return record_failures(runtime, attempts, worker)

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "record_completions", refuse)
        patch.setattr(failures, "record_failures", refuse_failures)
        yield


# --- Together -------------------------------------------------------------------------------------


def test_the_number_of_queries_does_not_grow_with_the_group(standing_clock, make_bench):
    bench = make_bench(AMPLE)
    ran = []
    job = as_job(noting(ran), "bench.note", atomic=False)

    def queries_of(count: int) -> int:
        job.enqueue_many([{"number": number} for number in range(count)])
        deliveries = bench.poll()
        with statements() as executed:
            bench.run(deliveries)
        return len(executed)

    queries_of(1)
    assert queries_of(60) == queries_of(2)
    assert len(ran) == completed() == ProcessedEvent.objects.count() == 63
    assert settled(bench)


def test_each_runs_once_in_order_and_outside_any_transaction(make_bench):
    bench, seen = make_bench(AMPLE), []

    def look(number):
        seen.append((number, connection.in_atomic_block, completed(), leased()))

    as_job(look, atomic=False).enqueue_many([{"number": n} for n in range(5)])
    bench.run()
    assert seen == [(n, False, 0, 5) for n in range(5)]
    assert bench.results == [Ending.COMPLETED] * 5
    assert settled(bench)


def test_a_failure_is_its_own(make_bench):
    bench = make_bench(AMPLE)

    def maybe(number):
        Entry.objects.create(job=str(number))
        if number == 1:
            raise RuntimeError

    as_job(maybe, atomic=False).enqueue_many([{"number": n} for n in range(3)])
    bench.run()
    assert states() == ["completed", "failing", "completed"]
    assert (Entry.objects.count(), JobFailure.objects.count()) == (3, 1)
    assert settled(bench)


def test_two_records_of_one_job_run_it_once(make_bench):
    """Also where its coordination lease is both's."""
    bench, ran = make_bench(AMPLE), []
    as_job(lambda: ran.append(1), "bench.once", atomic=False).enqueue()
    (delivery,) = bench.poll()
    bench.run([delivery, bench.read(delivery.record)])
    assert ran == [1]
    assert bench.results[0] is Ending.COMPLETED
    assert len(bench.results) == 2
    assert settled(bench)


def test_two_records_of_one_coroutine_do_not_run_at_the_same_time(make_bench):
    bench, ran = make_bench(AMPLE), []

    async def once():
        ran.append(1)

    as_job(once, atomic=False).enqueue()
    (delivery,) = bench.poll()
    again = bench.read(delivery.record)
    assert bench.run([delivery, again]) == [again]
    assert bench.run([again]) == []
    assert ran == [1]
    assert settled(bench)


def test_two_lanes_with_a_record_each_of_one_job_run_it_once(make_bench):
    """The lease in its row is the worker's, so it does not tell one lane from the other."""
    bench, ran, late = make_bench(AMPLE), [], []

    def run_again() -> None:
        try:
            late.extend(bench.pipeline.run([again]))
        finally:
            connection.close()

    def once():
        ran.append(1)
        other = threading.Thread(target=run_again)
        other.start()
        other.join(PATIENCE)

    as_job(once, atomic=False).enqueue()
    (delivery,) = bench.poll()
    again = bench.read(delivery.record)
    bench.run([delivery])
    assert (ran, late) == ([1], [again])
    assert bench.run(late) == []
    assert ran == [1]


# --- What is unrecorded ---------------------------------------------------------------------------


def test_with_next_to_no_budget_each_is_recorded_before_the_next_starts(make_bench):
    bench, seen = make_bench(NEXT_TO_NONE), []
    as_job(lambda: seen.append(completed()), "bench.look", atomic=False).enqueue_many([{}] * 4)
    bench.run()
    assert seen == [0, 1, 2, 3]
    assert settled(bench)


@pytest.mark.promise("not-atomic-crash")
def test_what_has_run_is_recorded_before_another_starts_when_it_took_a_part_of_the_budget(
    make_bench, monkeypatch
):
    # Given
    bench, seen, clock = make_bench(AMPLE), [], SetClock()
    monkeypatch.setattr(recorder, "time", clock)
    monkeypatch.setattr(lane, "time", clock)

    def look(number):
        seen.append(completed())
        if number == 1:
            clock.advance(recorder.UNRECORDED * AMPLE + 1)

    as_job(look, atomic=False).enqueue_many([{"number": n} for n in range(4)])
    # When
    bench.run()
    # Then
    assert seen == [0, 0, 2, 2]
    assert settled(bench)


def test_what_was_quick_does_not_wait_for_what_is_slow(make_bench):
    """Its record and its waiters do not, though the lane is busy."""
    # Given
    bench, told = make_bench(SHORT), []

    def look(number):
        if number == 2:
            wait_until(lambda: completed() == 2)
            wait_until(lambda: len(bench.outcomes) == 2)
            told.extend(bench.outcomes)

    as_job(look, atomic=False).enqueue_many([{"number": n} for n in range(4)])
    # When
    bench.run()
    # Then
    assert [outcome.ending for outcome in told] == [Ending.COMPLETED] * 2
    assert states() == ["completed"] * 4
    assert settled(bench)


def test_endings_a_bug_kept_from_being_recorded_beside_the_lane_are_recorded_by_it(
    make_bench, monkeypatch
):
    """Nobody else knows of them: dropped, they would hold back their partition until a restart."""
    # Given
    # With a budget so long that on a busy machine, too, the lane is not the first to record.
    bench, record = make_bench(SHORT * 10), recorder.record_completions
    failed = threading.Event()

    def fail_once(runtime, attempts, *others):
        if not failed.is_set():
            failed.set()
            raise TypeError("a bug")
        return record(runtime, attempts, *others)

    monkeypatch.setattr(recorder, "record_completions", fail_once)

    def look(number):
        if number == 1:
            assert failed.wait(PATIENCE)

    as_job(look, atomic=False).enqueue_many([{"number": n} for n in range(3)])
    # When
    deferred = bench.run()
    # Then
    assert (deferred, states()) == ([], ["completed"] * 3)
    assert settled(bench)


def test_endings_a_bug_kept_from_being_recorded_at_all_run_again(make_bench, monkeypatch):
    """The worker does not go on taking them for another lane's."""
    # Given
    bench, ran = make_bench(AMPLE), []
    as_job(noting(ran), "bench.note", atomic=False).enqueue_many([{"number": n} for n in range(2)])
    deliveries = bench.poll()
    with refusing_to_record(monkeypatch, TypeError("a bug")):
        deferred = bench.run(deliveries)
    assert deferred == deliveries
    # When
    deferred = bench.run(deferred)
    # Then
    assert (deferred, ran, states()) == ([], [0, 1, 0, 1], ["completed"] * 2)
    assert settled(bench)


def test_a_batch_is_one_call_and_recorded_like_one(make_bench):
    bench, calls = make_bench(NEXT_TO_NONE), []

    def together(batch):
        calls.append((len(batch), completed()))

    as_job(together, atomic=False, batch=2).enqueue_many([{"number": n} for n in range(5)])
    bench.run()
    assert calls == [(2, 0), (2, 2), (1, 4)]
    assert settled(bench)


# --- Between claim and run, between run and record ------------------------------------------------


def test_a_claim_is_good_for_the_budget_only(make_bench):
    """What was cancelled meanwhile does not run."""
    # Given
    bench, ran = make_bench(SHORT), []

    def cancel_the_others(number):
        ran.append(number)
        others = Job.objects.order_by("id")[1:3]
        assert transition("cancel", Job.objects.filter(pk__in=[job.pk for job in others])) == 2
        time.sleep(SHORT)  # sleep: uses up the budget

    def note(number):
        ran.append(number)

    as_job(cancel_the_others, atomic=False).enqueue(number=0)
    as_job(note, atomic=False).enqueue_many([{"number": n} for n in (1, 2, 3)])
    # When
    bench.run()
    # Then
    assert ran == [0, 3]
    assert states() == ["completed", "cancelled", "cancelled", "completed"]
    assert bench.results == [Ending.COMPLETED, Ending.SKIPPED, Ending.SKIPPED, Ending.COMPLETED]


def test_of_handlers_slower_than_thought_no_more_are_admitted_than_the_budget_allows(
    make_bench, monkeypatch
):
    """What is admitted and does not begin is leased, released and admitted again."""
    # Given
    bench, ran, admitted = make_bench(SHORT), [], []
    store = type(bench.leases.runtime.store)
    take = store.take_row_leases

    def take_noting(self, rows, *rest):
        admitted.append((len(rows), len(ran)))
        return take(self, rows, *rest)

    monkeypatch.setattr(store, "take_row_leases", take_noting)

    def linger(number):
        ran.append(number)
        time.sleep(0.6 * SHORT)  # sleep: uses up a part of the budget

    as_job(linger, atomic=False).enqueue_many([{"number": number} for number in range(7)])
    # When
    bench.run()
    # Then the first group is all there is, and each after it as large as what the last one ran
    assert ran == list(range(7))
    assert admitted[0][0] == 7
    for (_, before), (size, after) in itertools.pairwise(admitted):
        assert size <= after - before
    assert settled(bench)


def test_a_job_of_this_service_is_admitted_by_its_row_alone(make_bench):
    # Given
    bench, ran = make_bench(AMPLE), []
    as_job(noting(ran), "bench.note", atomic=False).enqueue_many([{"number": n} for n in range(3)])
    deliveries = bench.poll()
    # When
    with statements() as executed:
        bench.run(deliveries)
    # Then no marker was looked for, and each was inserted; MariaDB is asked afterwards which ones
    of_markers = [sql for sql in executed if "processed_events" in sql]
    looks = [sql.lstrip().startswith("SELECT") for sql in of_markers]
    assert not (looks[0] if connection.vendor == "mysql" else any(looks)), of_markers
    assert ProcessedEvent.objects.count() == 3


@pytest.mark.parametrize("fails", [False, True])
def test_who_lost_its_lease_before_it_is_recorded_is_refused_alone(make_bench, fails):
    # Given
    bench = make_bench(AMPLE)

    def note(number):
        if number == 2:
            theirs = {"lease_token": "another", "lease_expires_at": timezone.now() + timedelta(1)}
            Job.objects.filter(pk=Job.objects.order_by("id")[1].pk).update(**theirs)
        if fails and number == 1:
            raise RuntimeError

    as_job(note, atomic=False).enqueue_many([{"number": n} for n in range(3)])
    # When
    (left,) = bench.run()
    # Then
    assert bench.results == [Ending.COMPLETED] * 2
    lost = Job.objects.order_by("id")[1]
    assert left.message.job_id == str(lost.pk), "its message stays until the job has ended"
    assert (lost.state != "completed", lost.lease_token, lost.attempts) == (True, "another", 0)
    assert ProcessedEvent.objects.count() == 2


def test_of_two_workers_that_judge_a_group_at_once_each_job_is_one_s(make_bench, monkeypatch):
    # Given two workers without coordination between them
    bench, another = make_bench(AMPLE), make_bench(AMPLE, worker="another")
    store = type(store_for("default"))
    ran, take, lost = [], store.take_row_leases, []
    as_job(noting(ran), "bench.note", atomic=False).enqueue_many([{"number": n} for n in range(6)])
    deliveries = bench.poll()
    theirs = [another.read(delivery.record) for delivery in deliveries[2:4]]

    def take_after_the_other(self, rows, token, *times):
        if token == "bench":
            monkeypatch.setattr(store, "take_row_leases", take)
            attempts = another.pipeline._admit_leased(theirs)
            assert [attempt.ending for attempt in attempts] == [None, None]
        return take(self, rows, token, *times)

    monkeypatch.setattr(store, "take_row_leases", take_after_the_other)
    # When the other is quicker between the judgement and the lease
    lost = bench.run(deliveries)
    # Then
    assert ran == [0, 1, 4, 5]
    assert lost == deliveries[2:4]
    assert leased() == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"generation": 2},
        {"attempts": 1},
        {"lease_token": "another"},
        {"lease_expires_at": None},
        {"state": "cancelled"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_row_that_has_changed_in_any_way_since_it_was_judged_is_not_leased(make_bench, changed):
    # Given a row whose lease has run out, as it was read
    make_bench(AMPLE)
    now = timezone.now()
    old, new = now - timedelta(minutes=1), now + timedelta(minutes=1)
    job = JobFactory(queued=True, lease_token="dead", lease_expires_at=old)
    row = row_of(Job.objects.get())
    # When
    Job.objects.update(**changed)
    # Then
    assert not store_for("default").take_row_leases([row], "bench", now, new)
    assert Job.objects.get().lease_token != "bench"
    # And as it was it is
    Job.objects.update(**{name: getattr(row, name) for name in changed})
    assert store_for("default").take_row_leases([row], "bench", now, new) == {job.pk}


def test_what_waits_behind_a_pause_keeps_no_lease(make_bench):
    # Given jobs of one partition; one of them meets a rate limit
    bench, ran = make_bench(AMPLE, ERROR_RECOVERY_DELAYS={"rate_limit": 9}), []

    def note(number):
        ran.append(number)
        if number == 1 and ran.count(1) == 1:
            raise RateLimitExceededError("slow down")

    job = as_job(note, atomic=False)
    job.enqueue_many([{"number": n} for n in range(4)])
    # When
    deferred = bench.run()
    # Then
    assert ran == [0, 1]
    assert [delivery.deliveries for delivery in deferred] == [1, 1, 1]
    assert (leased(), list(get_coordination().names("CONS:"))) == (0, [])
    assert not Job.objects.filter(state="queued").exclude(started_at=None).exists()
    # And another worker may have them at once
    another = make_bench(AMPLE, worker="another")
    another.run([another.read(delivery.record) for delivery in deferred])
    assert sorted(ran) == [0, 1, 1, 2, 3]


def test_behind_one_of_its_key_that_is_held_elsewhere_nothing_runs_and_nothing_is_held(make_bench):
    bench, ran = make_bench(AMPLE), []
    job = as_job(lambda key, n: ran.append(n), "bench.keyed", atomic=False, key="key")
    for number, key in enumerate("kkok"):
        job.enqueue(key=key, n=number)
    deliveries = bench.poll()
    theirs = {"lease_token": "another", "lease_expires_at": timezone.now() + timedelta(1)}
    get_coordination().claim(["WORKER:another"], "another", timedelta(minutes=1))
    Job.objects.filter(pk=Job.objects.order_by("id")[1].pk).update(**theirs)
    # When
    deferred = bench.run(deliveries)
    # Then
    assert ran == [0, 2]
    assert deferred == [deliveries[1], deliveries[3]]
    assert leased() == 1


# --- Outages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [1, 3])
def test_an_outage_while_recording_runs_nothing_again(make_bench, monkeypatch, failing, failures):
    # Given
    bench, ran = make_bench(AMPLE), []
    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)
    failing(recorder, "record_completions", *[GONE] * failures)
    as_job(noting(ran), "bench.note", atomic=False).enqueue_many([{"number": n} for n in range(3)])
    # When
    bench.run()
    # Then
    assert (ran, states()) == ([0, 1, 2], ["completed"] * 3)
    assert bench.results == [Ending.COMPLETED] * 3
    assert settled(bench)


def test_a_lock_in_the_way_of_the_record_is_waited_out_and_runs_nothing_again(
    make_bench, monkeypatch, real_database
):
    """On SQLite an atomic handler, or whoever else writes, may hold it for minutes."""
    # Given
    bench, ran, waits = make_bench(AMPLE), [], []
    short_patience, *lock = {
        "sqlite": ["PRAGMA busy_timeout = 1", "BEGIN IMMEDIATE"],
        "postgresql": ["SET lock_timeout = '20ms'", "BEGIN", "SELECT id FROM kjo_job FOR UPDATE"],
        "mysql": [
            "SET innodb_lock_wait_timeout = 1",
            "START TRANSACTION",
            "SELECT id FROM kjo_job FOR UPDATE",
        ],
    }[real_database]

    def be_impatient(connection, **others):
        connection.cursor().execute(short_patience)

    connection.close()
    connection_created.connect(be_impatient)
    other = connection.copy()

    def note(number):
        if not ran:
            for statement in lock:
                other.cursor().execute(statement)
        ran.append(number)

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 6:
            other.cursor().execute("ROLLBACK")
        return False

    monkeypatch.setattr(bench.stopping, "wait", wait)
    as_job(note, atomic=False).enqueue_many([{"number": n} for n in range(3)])
    # When
    try:
        deferred = bench.run()
    finally:
        connection_created.disconnect(be_impatient)
        other.close()
        connection.close()
    # Then
    assert (deferred, ran, states()) == ([], [0, 1, 2], ["completed"] * 3)
    assert len(waits) == 6
    assert settled(bench)


def test_an_outage_that_was_waited_out_is_no_refusal(make_bench, monkeypatch, failing):
    """The database comes back between the attempt to record and the look whether it is there."""
    # Given
    bench, ran = make_bench(AMPLE), []
    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)
    is_there = iter([False] * 5 + [True] * 2)
    failing(recorder, "record_completions", *[GONE] * 7)
    monkeypatch.setattr("kjo_django.engine.recorder.answers", lambda using: next(is_there))
    as_job(noting(ran), "bench.note", atomic=False).enqueue(number=0)
    # When
    deferred = bench.run()
    # Then
    assert (deferred, ran, states()) == ([], [0], ["completed"])


def test_an_ending_that_cannot_be_recorded_takes_no_others_with_it(make_bench, monkeypatch):
    # Given
    bench, ran = make_bench(AMPLE), []
    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)
    as_job(noting(ran), "bench.note", atomic=False).enqueue_many([{"number": n} for n in range(3)])
    # When
    deliveries = bench.poll()
    with refusing_to_record(
        monkeypatch,
        IntegrityError("not this one"),
        lambda attempt: attempt.delivery.message.payload == b'{"number":1}',
    ):
        deferred = bench.run(deliveries)
    # Then
    assert (ran, deferred) == ([0, 1, 2], [deliveries[1]])
    assert completed() == 2
    assert leased() == 0
    # And it runs again, as its second attempt: the first began and left no outcome
    bench.run(deferred)
    assert (completed(), Job.objects.order_by("id")[1].attempts) == (3, 2)
    assert settled(bench)


def test_a_completion_that_cannot_be_recorded_is_a_failure_of_its_attempt(
    make_bench, monkeypatch, failing
):
    # Given
    bench, ran = make_bench(AMPLE), []
    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)

    failing(recorder, "record_completions", *[IntegrityError("not this one")] * 100)
    as_job(noting(ran), "bench.note", atomic=False).enqueue(number=0)
    # When
    deferred = bench.run()
    # Then
    assert (ran, deferred, states()) == ([0], [], ["failing"])
    assert "not this one" in JobFailure.objects.get().error
    assert settled(bench)


def test_behind_an_ending_that_cannot_be_recorded_its_key_waits(make_bench, monkeypatch):
    # Given
    bench, ran = make_bench(NEXT_TO_NONE), []
    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)
    job = as_job(lambda key, n: ran.append(n), "bench.keyed", atomic=False, key="key")
    for number, key in enumerate("kok"):
        job.enqueue(key=key, n=number)
    deliveries = bench.poll()
    # When
    with refusing_to_record(
        monkeypatch,
        IntegrityError("not this one"),
        lambda attempt: b'"n":0' in attempt.delivery.message.payload,
    ):
        deferred = bench.run(deliveries)
    # Then
    assert ran == [0, 1]
    assert deferred == [deliveries[0], deliveries[2]]


def test_a_lease_two_records_share_is_kept_until_the_last_has_ended(make_bench, monkeypatch):
    # Given
    bench, held, claim = make_bench(NEXT_TO_NONE), [], Pipeline._admit_leased
    as_job(lambda: None, "bench.once", atomic=False).enqueue()
    (delivery,) = bench.poll()

    def look(self, deliveries):
        held.append(len(get_coordination().holders([delivery.lease])))
        return claim(self, deliveries)

    monkeypatch.setattr(Pipeline, "_admit_leased", look)
    # When
    bench.run([delivery, bench.read(delivery.record)])
    # Then
    assert held == [1, 1]
    assert settled(bench)


def test_one_that_cannot_be_claimed_keeps_neither_its_lane_nor_others(make_bench, monkeypatch):
    """What the database refuses for what it is, it refuses for ever."""
    # Given
    bench, ran, claim, waits = make_bench(AMPLE), [], Pipeline._admit_leased, []

    def refuse(self, deliveries):
        if any(b'"n":1' in delivery.message.payload for delivery in deliveries):
            raise IntegrityError("not this one")
        return claim(self, deliveries)

    def wait(seconds):
        waits.append(seconds)
        assert len(waits) < 10, "it keeps its lane for ever"
        return False

    monkeypatch.setattr(Pipeline, "_admit_leased", refuse)
    monkeypatch.setattr(bench.stopping, "wait", wait)
    job = as_job(lambda key, n: ran.append(n), "bench.keyed", atomic=False, key="key")
    for number, key in enumerate("okko"):
        job.enqueue(key=key, n=number)
    deliveries = bench.poll()
    # When
    deferred = bench.run(deliveries)
    # Then: it comes up again, and what is behind it with its key
    assert ran == [0, 3]
    assert deferred == [deliveries[1], deliveries[2]]
    assert (leased(), list(get_coordination().names("CONS:"))) == (0, [])
    monkeypatch.setattr(Pipeline, "_admit_leased", claim)
    assert bench.run(deferred) == []
    assert ran == [0, 3, 1, 2]


def test_an_outage_before_they_begin_spends_nothing(make_bench, monkeypatch):
    # Given a worker that stops while its database is away
    bench, ran = make_bench(AMPLE), []
    as_job(noting(ran), "bench.note", atomic=False).enqueue_many([{"number": n} for n in range(3)])
    deliveries = bench.poll()

    def away(*args, **kwargs):
        raise GONE

    with monkeypatch.context() as patch:
        patch.setattr("kjo_django.engine.admission.load_rows", away)
        patch.setattr("kjo_django.engine.recorder.answers", lambda using: False)
        deferred = bench.run(deliveries)
    # Then
    assert (bench.stopping.waits, deferred, ran) == (1, deliveries, [])
    assert (leased(), list(get_coordination().names("CONS:"))) == (0, [])
    # And once it is back
    bench.stopping.waits = 0
    assert bench.run(deferred) == []
    assert ran == [0, 1, 2]
    assert set(Job.objects.values_list("attempts", flat=True)) == {1}


def test_a_claim_the_database_refuses_is_made_one_by_one(make_bench, monkeypatch):
    bench, ran, claim, sizes = make_bench(AMPLE), [], Pipeline._admit_leased, []

    def refuse_many(self, deliveries):
        sizes.append(len(deliveries))
        if len(deliveries) == 3:
            raise IntegrityError("not these")
        return claim(self, deliveries)

    monkeypatch.setattr(Pipeline, "_admit_leased", refuse_many)
    as_job(noting(ran), "bench.note", atomic=False).enqueue_many([{"number": n} for n in range(3)])
    bench.run()
    assert (ran, sizes, bench.stopping.waits) == ([0, 1, 2], [3, 1, 2], 0)
    assert settled(bench)


def test_a_transaction_one_leaves_open_is_not_the_next_ones(make_bench):
    # Given
    bench = make_bench(AMPLE)

    def leave_open(number):
        Entry.objects.create(job=str(number))
        if number == 1:
            transaction.set_autocommit(False)
            Entry.objects.create(job="never committed")

    as_job(leave_open, atomic=False).enqueue_many([{"number": n} for n in range(3)])
    # When
    bench.run()
    # Then
    connection.close()
    assert states() == ["completed", "failing", "completed"]
    assert sorted(Entry.objects.values_list("job", flat=True)) == ["0", "1", "2"]


@pytest.mark.parametrize("real_database", ["postgres"], indirect=True)
def test_a_connection_one_breaks_is_not_the_next_ones(make_bench):
    # Given
    bench = make_bench(AMPLE)

    def break_it(number):
        Entry.objects.create(job=str(number))
        if number == 1:
            connection.connection.close()
            Entry.objects.count()

    as_job(break_it, atomic=False).enqueue_many([{"number": n} for n in range(3)])
    # When
    bench.run()
    # Then
    assert states() == ["completed", "failing", "completed"]
    assert (Entry.objects.count(), bench.stopping.waits) == (3, 0)


# --- The end --------------------------------------------------------------------------------------


def test_a_worker_that_stops_begins_no_more_of_a_group(settings):
    # Given a worker in the first of a group
    settings.KJO = {
        **KJO,
        **MEMORY,
        "GROUP_BUDGET": AMPLE,
        "CONCURRENCY": 1,
        "POLL_INTERVAL": 0.1,
        "HEARTBEAT_INTERVAL": 0.2,
    }
    ran, begun, go_on = [], threading.Event(), threading.Event()

    def note(number):
        ran.append(number)
        if number == 1:
            begun.set()
            assert go_on.wait(PATIENCE)

    job = as_job(note, atomic=False)
    # Not the first anybody sees of it: that one runs alone.
    job.enqueue(number=0)
    with Running(owns_process=False) as running:
        try:
            wait_until(lambda: completed() == 1)
            with transaction.atomic():
                job.enqueue_many([{"number": n} for n in range(1, 40)])
            assert begun.wait(PATIENCE)
            # When
            running.worker.stop()
            wait_until(lambda: running.worker.scheduler.is_stopped)
        finally:
            go_on.set()
    # Then: what it was in is finished, the others are as they were
    assert running.code == 0
    assert ran == [0, 1]
    assert completed() == 2
    rest = Job.objects.exclude(state="completed")
    assert set(rest.values_list("attempts", "lease_token", "lease_expires_at", "started_at")) == {
        (0, "", None, None)
    }
    assert not list(get_coordination().names("CONS:"))
