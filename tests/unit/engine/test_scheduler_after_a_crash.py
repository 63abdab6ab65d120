"""After a crash: what was being run when a worker died runs one at a time on one lane, and all
others go on.

What a worker leaves behind is made by hand, as in the pipeline's tests; SIGKILL is in
tests/acceptance.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from kjo_django.clock import Clock
from kjo_django.engine.attempt import Ending
from kjo_django.engine.scheduler import GroupScheduler
from kjo_django.models import DeadLetter, Job, JobFailure, Lease
from kjo_django.round_trips import GroupBudget
from kjo_django.runtime import get_coordination
from kjo_django.worker.lanes import Lanes
from tests.unit.deliveries import Bench, as_job, benched
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.medium  # threads and waits of a worker, in real time


@pytest.fixture
def bench(sqlite_file, settings):
    with benched(settings) as bench:
        yield bench


@pytest.fixture
def groups(bench, monkeypatch):
    """How many ran together each time."""
    seen, run = [], bench.pipeline._run_claimed

    def look(deliveries, running):
        seen.append(len(deliveries))
        return run(deliveries, running)

    monkeypatch.setattr(bench.pipeline, "_run_claimed", look)
    return seen


def left_by_the_dead(deliveries, times: int = 1, *, has_expired: bool = False) -> None:
    """What workers leave that were killed during these: leases, and no sign of life."""
    coordination, names = get_coordination(), [delivery.lease for delivery in deliveries]
    for number in range(times):
        for name, token in coordination.holders(names).items():
            coordination.release([name], token, count_delivery=True)
        coordination.claim(names, f"dead-{number}", timedelta(minutes=5))
    if has_expired:
        Lease.objects.filter(name__in=names).update(expires_at=timezone.now())


def run_all(bench, deliveries, rounds: int = 500) -> None:
    """Run them to their ends; what is deferred comes up again, as it does in a worker."""
    while deliveries:
        rounds -= 1
        assert rounds, f"they never end; leases: {list(Lease.objects.values_list())}"
        deliveries = bench.run(deliveries)


class Lane:
    """Runs a group beside the test's own thread, which is another lane of the worker."""

    def __init__(self, bench, deliveries) -> None:
        self.deferred = None

        def run() -> None:
            try:
                self.deferred = bench.run(deliveries)
            finally:
                connection.close()

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def join(self):
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        return self.deferred


@pytest.mark.parametrize("has_expired", [False, True])
@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"batch": 10}], ids=str)
def test_each_runs_alone_and_spends_one_attempt_more(bench, groups, options, has_expired):
    # Given
    ran = []

    def note(given):
        ran.append([item.payload["n"] for item in given] if options.get("batch") else given)

    job = as_job(
        note if options.get("batch") else lambda n: ran.append([n]), "bench.note", **options
    )
    job.enqueue_many([{"n": n} for n in range(20)])
    deliveries = bench.poll()
    left_by_the_dead(deliveries, has_expired=has_expired)
    # When
    run_all(bench, deliveries)
    # Then
    assert groups == [1] * 20
    assert sorted(ran) == [[n] for n in range(20)]
    assert set(bench.results) == {Ending.COMPLETED}
    assert set(Job.objects.values_list("attempts", flat=True)) == {2}


def test_each_costs_as_many_statements_as_any_job_that_runs_alone(bench):
    """A worker that is killed while it drains leaves a thousand, and the next may live for seconds:
    whose leases they are and what they have lost is found out once for all of them."""
    # Given
    job = as_job(lambda: None, "bench.nothing")
    counts = []

    def count(execute, *rest):
        counts[-1] += 1
        return execute(*rest)

    # When
    for orphans in (0, 10, 30):
        job.enqueue_many([{}] * max(1, orphans))
        deliveries = bench.poll()
        left_by_the_dead(deliveries[:orphans])
        counts.append(0)
        with connection.execute_wrapper(count):
            run_all(bench, deliveries)
    # Then
    alone, ten, thirty = counts
    assert (thirty - ten) / 20 == alone
    assert JobFailure.objects.count() == 40


def test_coroutines_too(bench, groups):
    ran = []

    async def note(n):
        ran.append(n)

    as_job(note, atomic=False).enqueue_many([{"n": n} for n in range(10)])
    deliveries = bench.poll()
    left_by_the_dead(deliveries)
    run_all(bench, deliveries)
    assert groups == [1] * 10
    assert sorted(ran) == list(range(10))


def test_a_long_job_of_another_lane_keeps_none_of_them_waiting_nor_anybody_else(bench):
    """A handler that runs for an hour must not stop the worker after a crash (issue 14, 10)."""
    # Given a job that is being run in another lane
    begun, go_on, ran = threading.Event(), threading.Event(), []

    def slow():
        begun.set()
        assert go_on.wait(PATIENCE)

    as_job(slow, atomic=False).enqueue()
    slow_one = bench.poll()
    lane = Lane(bench, slow_one)
    assert begun.wait(PATIENCE)
    # When a group comes, of which some were being run when a worker died
    as_job(lambda n: ran.append(n), "bench.note", atomic=False).enqueue_many(
        [{"n": n} for n in range(9)]
    )
    deliveries = bench.poll()
    left_by_the_dead(deliveries[::2])
    run_all(bench, deliveries)
    # Then all of them have run beside it
    assert sorted(ran) == list(range(9))
    assert lane.thread.is_alive()
    go_on.set()
    assert lane.join() == []


@pytest.mark.parametrize("has_expired", [False, True])
def test_one_of_them_runs_at_a_time_while_other_lanes_go_on(bench, has_expired):
    # Given one that keeps the lane it runs on
    begun, go_on, ran = threading.Event(), threading.Event(), []

    def slow():
        begun.set()
        assert go_on.wait(PATIENCE)

    as_job(slow, atomic=False).enqueue()
    slow_one = bench.poll()
    job = as_job(lambda n: ran.append(n), "bench.note", atomic=False)
    job.enqueue_many([{"n": n} for n in range(4)])
    deliveries = bench.poll()
    left_by_the_dead([*slow_one, *deliveries[:2]], has_expired=has_expired)
    scheduler = GroupScheduler(2, group_size=10, budget=GroupBudget(1))
    lanes = Lanes(scheduler, bench.pipeline, bench.watch, lambda: None)
    scheduler.put(slow_one)
    lanes.start(1)
    assert begun.wait(PATIENCE)
    # When another lane, which is this thread, has two more of them, and two others
    scheduler.put(deliveries)
    while lanes.run_group(0):
        pass
    # Then these two wait
    assert (sorted(ran), scheduler.waiting) == ([2, 3], 2)
    # And run when the first has ended; none has been counted for that
    go_on.set()
    wait_until(lambda: not scheduler.outstanding)  # between the two nothing runs
    scheduler.stop()
    lanes.threads[0].join(PATIENCE)
    assert sorted(ran) == list(range(4))
    assert Counter(Job.objects.values_list("attempts", flat=True)) == {1: 2, 2: 3}


def test_they_run_back_to_back(bench, monkeypatch):
    """Twenty deaths of a worker leave hundreds: a pause after each would keep them for minutes."""
    # Given a worker for which no time passes, and jobs that take longer than a group may
    clock, ran = Clock(), []
    clock.monotonic = lambda: 0.0
    budget = 0.05
    monkeypatch.setattr(bench.leases.runtime.group_budget, "seconds", budget)
    scheduler = GroupScheduler(1, group_size=500, budget=GroupBudget(budget), clock=clock)
    lanes = Lanes(scheduler, bench.pipeline, bench.watch, lambda: None)

    def note(n):
        time.sleep(1.1 * budget)  # sleep: longer than a group may run
        ran.append(n)

    as_job(note).enqueue_many([{"n": n} for n in range(5)])
    deliveries = bench.poll()
    left_by_the_dead(deliveries)
    scheduler.put(deliveries)
    scheduler.measure(deliveries[0].kind, 0.0)
    # When its lane takes what may start
    while lanes.run_group(0):
        pass
    # Then that was all of them
    assert sorted(ran) == list(range(5))
    assert scheduler.outstanding == 0


def test_a_key_keeps_its_order(bench):
    # Given suspects of three keys, and of each key another that had not begun
    ran = []
    job = as_job(lambda key, n: ran.append((key, n)), "bench.keyed", key="key")
    for number in range(5):
        for key in "abc":
            job.enqueue(key=key, n=number)
    deliveries = bench.poll()
    left_by_the_dead(deliveries[:12])
    # When
    run_all(bench, deliveries)
    # Then
    for key in "abc":
        assert [n for k, n in ran if k == key] == list(range(5))
    assert set(bench.results) == {Ending.COMPLETED}


def test_behind_one_that_is_deferred_nothing_of_its_key_begins(bench, monkeypatch):
    """Though it was in no dead worker's hands, and the next of its key was."""
    # Given
    ran = []
    job = as_job(lambda n: ran.append(n), "bench.keyed")
    for number in range(2):
        job.using(key="k").enqueue(n=number)
    first, second = bench.poll()
    left_by_the_dead([second])
    run = bench.pipeline._run_claimed

    def defer_the_first(deliveries, running):
        return deliveries if first in deliveries else run(deliveries, running)

    # When: a lease in its row, say
    with monkeypatch.context() as patch:
        patch.setattr(bench.pipeline, "_run_claimed", defer_the_first)
        deferred = bench.run([first, second])
    # Then
    assert (ran, deferred) == ([], [first, second])
    run_all(bench, deferred)
    assert ran == [0, 1]


def test_what_waits_behind_one_is_not_counted_with_it(bench, monkeypatch):
    """A worker that dies has begun one of them only."""

    # Given
    class Killed(BaseException):
        pass

    def kill(deliveries, running):
        raise Killed

    as_job(lambda: None, "bench.pass").enqueue_many([{}] * 16)
    deliveries = bench.poll()
    left_by_the_dead(deliveries)
    monkeypatch.setattr(bench.pipeline, "_run_claimed", kill)
    # When
    with pytest.raises(Killed):
        bench.run(deliveries)
    # Then
    claims = get_coordination().claim(
        [delivery.lease for delivery in deliveries], "next", timedelta(minutes=5)
    )
    begun = [claim.deliveries - claim.acquired for claim in claims]  # before this claim
    assert Counter(begun) == {2: 1, 1: 15}


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_lost_to_a_killer(bench, seed):
    """Whatever kills its worker, whenever it is run, beside whatever runs in other lanes: the
    killers and only they end as stalled, and others spend one attempt on each killer they meet."""

    class Killed(KeyboardInterrupt):
        """Of all a handler may raise, this alone goes through the pipeline, as a kill does."""

    # Given jobs of various limits, two of them killers
    chance = random.Random(seed)
    limits = [chance.randint(4, 6) for _ in range(40)]
    killers = set(chance.sample(range(40), 2))

    def run_or_kill(n):
        if n in killers:
            raise Killed

    job = as_job(run_or_kill, "bench.mortal")
    for number, limit in enumerate(limits):
        job.using(max_attempts=limit).enqueue(n=number)
    left = bench.poll()
    # When worker after worker runs what the last has left, in two lanes: what the other one has
    # just begun when the worker is killed is left behind as well
    for generation in range(200):
        if not left:
            break
        chance.shuffle(left)
        token = f"mortal-{generation}"
        worker = Bench(worker=token)
        beside = left[: chance.randint(0, len(left) // 2)]
        ended = []
        try:
            claims = worker.leases.claim(beside) if beside else []
            deferred = worker.run([d for d in left if d not in beside])
        except Killed:
            # Those of the other lane that no worker had died with before were being run.
            fresh = {c for c, claim in zip(beside, claims, strict=True) if claim.deliveries == 1}
            again = [d.lease for d in beside if d not in fresh]
            get_coordination().release(again, token, undo_claim=True)
            get_coordination().release([f"WORKER:{token}"], token)
            ended = [o.delivery for o in worker.outcomes]
        else:
            worker.leases.give_back(beside)
            ended = [d for d in left if d not in beside and d not in deferred]
        finally:
            worker.close()
        left = [d for d in left if d not in ended]
    # Then
    states = dict(Job.objects.order_by("id").values_list("id", "state"))
    lost = [number for number, state in enumerate(states.values()) if state != "completed"]
    assert lost == sorted(killers)
    assert set(DeadLetter.objects.values_list("reason", flat=True)) == {"stalled"}
    spent = Job.objects.filter(state="completed").values_list("attempts", flat=True)
    assert max(spent) <= 1 + len(killers)
