"""Workers that die, and what the living do with what these had in hand."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from kjo_django.coordination.base import alive_name
from kjo_django.engine.attempt import Ending
from kjo_django.models import DeadLetter, Job, JobFailure, Lease, TransportMessage
from kjo_django.runtime import get_coordination
from tests.ledger import jobs as ledger
from tests.ledger.models import Entry
from tests.unit.deliveries import Bench, Named, as_job, entries, let_die_with, the_job
from tests.unit.engine.bench import both, settled


def crashed_while_running(bench: Bench, deliveries, times: int = 1) -> None:
    """Leave behind what workers leave that were killed during these: leases and no sign of life, or
    the counts of a transport."""
    for number in range(times):
        let_die_with([delivery for delivery in deliveries if delivery.has_own_lease])
        for delivery in deliveries:
            if delivery.has_own_lease:
                continue
            coordination = get_coordination()
            for token in coordination.holders([delivery.lease]).values():
                coordination.release([delivery.lease], token, count_delivery=True)
            (claim,) = coordination.claim([delivery.lease], f"dead-{number}", timedelta(minutes=5))
            assert claim.acquired


@pytest.mark.promise("death-is-an-attempt")
@both
def test_a_crash_counts_as_an_attempt(bench):
    """Promise 3, PJQ-F10."""
    # Given
    ledger.write_attempt.enqueue(job="a")
    deliveries = bench.poll()
    crashed_while_running(bench, deliveries)
    # When
    bench.run(deliveries)
    # Then
    assert the_job().state == "completed"
    assert the_job().attempts == 2
    assert Entry.objects.get().note == "attempt 2"
    assert deliveries[0].deliveries == 2
    assert settled(bench)


@both
@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_each_attempt_a_dead_worker_had_begun_leaves_a_failure(bench, times):
    """A killed worker's attempt left no trace: two attempts, and no failure."""
    # Given
    ledger.write.using(max_attempts=3).enqueue(job="a")
    deliveries = bench.poll()
    crashed_while_running(bench, deliveries, times)
    # When it runs, and its record comes up once more
    bench.run(deliveries)
    bench.run(deliveries)
    # Then
    failures = JobFailure.objects.order_by("attempt")
    lost = min(times, 3)
    assert [failure.attempt for failure in failures] == list(range(1, lost + 1))
    assert all("worker died" in failure.error for failure in failures)
    assert (the_job().state, the_job().attempts) == (
        ("completed", lost + 1) if times < 3 else ("failed", 3)
    )


def test_a_suspect_runs_alone_and_apart_from_its_group(bench):
    # Given
    ran, groups, run = [], [], bench.pipeline._run_claimed

    def note(deliveries, running):
        groups.append(len(deliveries))
        return run(deliveries, running)

    bench.pipeline._run_claimed = note
    job = as_job(lambda job: ran.append(job), "bench.note")
    job.enqueue_many([{"job": "innocent"}, {"job": "suspect"}, {"job": "innocent too"}])
    deliveries = bench.poll()
    crashed_while_running(bench, [deliveries[1]])
    # When
    bench.run(deliveries)
    # Then
    assert ran == ["innocent", "innocent too", "suspect"]
    assert groups == [2, 1]


@pytest.mark.promise("killer-job")
def test_a_job_that_killed_all_its_workers_ends_as_stalled(bench):
    """Show 5."""
    # Given
    ledger.kill_worker.using(max_attempts=3).enqueue(job="a")
    deliveries = bench.poll()
    crashed_while_running(bench, deliveries, times=3)
    # When
    bench.run(deliveries)
    # Then
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("stalled", 3)
    assert letter.error_type == "kjo_django.exceptions.StalledError"
    assert (the_job().state, the_job().attempts) == ("failed", 3)
    assert settled(bench)


def test_what_a_living_worker_runs_is_left_to_it(bench, another):
    # Given
    ledger.write.enqueue(job="a")
    (delivery,) = bench.poll()
    another.leases.claim([delivery])
    # When, then
    assert bench.run([delivery]) == [delivery]
    assert entries() == {}
    assert bench.outcomes == []
    # And once it is done with it
    another.leases.settle([delivery])
    assert bench.run([delivery]) == []
    assert (entries(), the_job().attempts) == ({"a": 1}, 1)


@pytest.mark.parametrize("atomic", [True, False])
def test_a_worker_that_lives_has_not_died_with_what_it_could_not_renew(
    bench, transport, another, atomic
):
    """The database was away for longer than its records were leased: a job of one attempt was
    dead-lettered as stalled."""
    # Given a worker whose record's lease runs out while it has begun it
    as_job(lambda job: None, "bench.once", atomic=atomic, max_attempts=1).enqueue(job="a")
    deliveries = bench.poll()
    bench.leases.claim(deliveries)
    # When another one has it, which knows by their signs of life who has died
    another.leases.alive_ttl = timedelta(seconds=15)
    if transport == "memory":
        bench.leases.give_back(deliveries)
        bench.subscription.close()
    else:
        expired = timezone.now() - timedelta(seconds=1)
        TransportMessage.objects.update(lease_expires_at=expired)
    another.run()
    # Then
    assert (the_job().state, the_job().attempts) == ("completed", 1)
    assert not JobFailure.objects.exists()


def test_a_worker_without_a_sign_of_life_has_died(bench, another):
    """As far as anybody can say: a sign that outlives the lease of a record says nothing."""
    leases = another.leases
    leases.alive_ttl = timedelta(seconds=15)
    assert set(leases.died_among({"bench", "another", "gone"})) == {"gone"}
    leases.alive_ttl = leases.runtime.settings.record_lease
    assert set(leases.died_among({"bench", "another", "gone"})) == {"bench", "gone"}


def test_a_lease_that_two_of_a_group_share_is_given_back_with_the_last_of_them(bench, another):
    """Messages of one item have one lease, and only one worker runs them at a time."""
    # Given
    first, second, of_another = [Named("CONS:LEDGER:item") for _ in range(3)]
    assert all(claim.acquired for claim in bench.leases.claim([first, second]))
    # When, then
    bench.leases.settle([first])
    assert not another.leases.claim([of_another])[0].acquired
    bench.leases.settle([second])
    assert another.leases.claim([of_another])[0].acquired


def test_a_key_keeps_its_order_though_its_first_job_is_held_elsewhere(bench, another):
    """One of a key at a time and in order, also across workers."""
    # Given
    for number in range(3):
        ledger.write_keyed.enqueue(job=str(number), key="k")
    ledger.write_keyed.enqueue(job="free", key="other")
    deliveries = bench.poll()
    another.leases.claim(deliveries[:1])
    # When
    deferred = bench.run(deliveries)
    # Then
    assert deferred == deliveries[:3]
    assert entries() == {"free": 1}
    another.leases.settle(deliveries[:1])
    assert bench.run(deferred) == []
    assert [entry.job for entry in Entry.objects.order_by("id")] == ["free", "0", "1", "2"]
    assert all(job.attempts == 1 for job in Job.objects.all())


@pytest.mark.promise("row-decides")
def test_without_coordination_the_database_decides(bench, another, coordination_away):
    # Given
    coordination_away("claim", "renew", "release", "holders")
    ledger.write.enqueue(job="a")
    deliveries = bench.poll()
    # When
    bench.run(deliveries)
    another.run([another.read(delivery.record) for delivery in deliveries])
    # Then
    assert entries() == {"a": 1}
    assert bench.results == [Ending.COMPLETED]
    assert another.results[0] in (Ending.DUPLICATE, Ending.SKIPPED)


@pytest.mark.promise("uncounted-deaths")
def test_without_coordination_no_death_is_counted(bench, coordination_away):
    # Given a job whose worker has died
    ledger.write_attempt.enqueue(job="a")
    deliveries = bench.poll()
    crashed_while_running(bench, deliveries)
    # When
    coordination_away("claim", "renew", "release", "holders")
    bench.run(deliveries)
    # Then
    assert (the_job().state, the_job().attempts) == ("completed", 1)


def test_a_worker_that_is_not_alive_loses_its_leases(bench):
    """PJQ-59: workers vanish with their sign of life."""
    silent = Bench(worker="silent", alive=False)
    assert alive_name("silent") not in get_coordination().holders([alive_name("silent")])
    ledger.write.enqueue(job="a")
    (delivery,) = bench.poll()
    silent.leases.claim([delivery])
    bench.run([delivery])
    assert (the_job().state, the_job().attempts) == ("completed", 2)
    silent.close()


@both
@pytest.mark.parametrize("shown", ["not yet", "again"])
def test_where_coordination_forgot_everything_the_living_are_not_taken_for_dead(
    bench, another, shown
):
    """A Redis that came back empty: until each has shown that it lives, nobody can be told from a
    dead one. What a living worker runs outside a transaction would run beside itself."""
    # Given a job that is being run
    ran = []

    def run_beside(job):
        ran.append(job)
        if len(ran) == 1:
            # When coordination forgets, and another worker comes upon its message
            Lease.objects.all().delete()
            if shown == "again":
                another.leases.show_alive()
            deferred.extend(another.run([another.read(record)]))

    definition = as_job(run_beside, "bench.run_beside", atomic=False)
    deferred = []
    definition.enqueue(job="a")
    deliveries = bench.poll()
    record = deliveries[0].record
    bench.run(deliveries)
    # Then
    assert (ran, len(deferred)) == (["a"], 1)
    assert bench.results == [Ending.COMPLETED]
    assert the_job().attempts == 1
