"""After a crash: who runs with whom.

What a worker leaves behind is made by hand, as in the pipeline's tests; SIGKILL is in
tests/acceptance.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from datetime import timedelta

import pytest
from django.db import connection

from kjo_django.backends import get_coordination
from kjo_django.consumer.work import Result
from kjo_django.models import DeadLetter, Job
from tests.unit.deliveries import Bench, as_job, benched


@pytest.fixture
def bench(sqlite_file, settings, monkeypatch):
    with benched(settings, monkeypatch) as bench:
        yield bench


@pytest.fixture
def rounds(bench, monkeypatch):
    """How many ran together each time, and whether nobody else could."""
    seen, run = [], bench.pipeline._run_together

    def look(deliveries, mode):
        seen.append((len(deliveries), bool(bench.pipeline._alone._waiting)))
        return run(deliveries, mode)

    monkeypatch.setattr(bench.pipeline, "_run_together", look)
    return seen


def left_by_the_dead(deliveries, times: int = 1) -> None:
    """What workers leave that were killed during these: leases, and no sign of life."""
    coordination, names = get_coordination(), [delivery.lease for delivery in deliveries]
    for number in range(times):
        for name, token in coordination.holders(names).items():
            coordination.release([name], token, count_delivery=True)
        coordination.claim(names, f"dead-{number}", timedelta(minutes=5))


@pytest.mark.parametrize("options", [{}, {"atomic": False}])
def test_the_first_time_a_few_share_a_run(bench, rounds, options):
    # Given
    ran = []
    as_job(lambda n: ran.append(n), "bench.note", **options).enqueue_many(
        [{"n": n} for n in range(100)]
    )
    deliveries = bench.poll()
    left_by_the_dead(deliveries)
    # When
    bench.run(deliveries)
    # Then
    assert rounds == [(10, True)] * 10
    assert ran == list(range(100))
    assert set(bench.results) == {Result.COMPLETED}
    assert set(Job.objects.values_list("attempts", flat=True)) == {2}


def test_coroutines_too(bench, rounds):
    ran = []

    async def note(n):
        ran.append(n)

    as_job(note, atomic=False).enqueue_many([{"n": n} for n in range(30)])
    deliveries = bench.poll()
    left_by_the_dead(deliveries)
    bench.run(deliveries)
    assert rounds == [(5, True)] * 6
    assert sorted(ran) == list(range(30))


@pytest.mark.parametrize(
    ("limit", "times"), [(5, 2), (5, 3), (3, 1), (2, 1)], ids=lambda value: str(value)
)
def test_who_cannot_afford_it_runs_alone(bench, rounds, limit, times):
    """Because a worker died in its second run too, or since its attempts are few."""
    as_job(lambda: None, "bench.pass", max_attempts=limit).enqueue_many([{}] * 9)
    deliveries = bench.poll()
    left_by_the_dead(deliveries, times)
    bench.run(deliveries)
    assert rounds == [(1, True)] * 9
    assert set(Job.objects.values_list("state", "attempts")) == {("completed", times + 1)}


def test_attempts_of_its_own_count_too(bench, rounds):
    """Four and one of its own failures: the next but one would be the last."""
    # Given
    as_job(lambda: None, "bench.pass", max_attempts=5).enqueue_many([{}] * 18)
    first = list(Job.objects.order_by("id").values_list("pk", flat=True))[:9]
    deliveries = bench.poll()
    Job.objects.filter(pk__in=first).update(attempts=2, state="failing")
    for delivery in deliveries[:9]:
        object.__setattr__(delivery.message, "attempt", 3)
    left_by_the_dead(deliveries)
    # When
    bench.run(deliveries)
    # Then
    assert sorted(rounds) == [(1, True)] * 9 + [(3, True)] * 3


def test_a_key_keeps_its_order_and_has_one_in_a_round(bench, rounds):
    # Given suspects of three keys, and of each key another that had not begun
    ran = []
    job = as_job(lambda key, n: ran.append((key, n)), "bench.keyed", key="key")
    for number in range(5):
        for key in "abc":
            job.enqueue(key=key, n=number)
    deliveries = bench.poll()
    left_by_the_dead(deliveries[:12])
    # When
    bench.run(deliveries)
    # Then
    for key in "abc":
        assert [n for k, n in ran if k == key] == list(range(5))
    assert max(count for count, _ in rounds) == 3
    assert set(bench.results) == {Result.COMPLETED}


def test_others_do_not_run_beside_a_round(bench, rounds):
    # Given a group of another lane that runs when a round is to begin
    order, begun, go_on = [], threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go_on.wait(60)
        order.append("slow")

    other = as_job(slow, atomic=False)
    job = as_job(lambda: order.append("suspect"), "bench.suspect")
    other.enqueue()
    (slow_one,) = bench.poll()
    job.enqueue_many([{}] * 4)
    deliveries = bench.poll()
    left_by_the_dead(deliveries)

    def run() -> None:
        try:
            bench.run([slow_one])
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    threading.Timer(0.3, go_on.set).start()
    # When
    bench.run(deliveries)
    thread.join(60)
    # Then
    assert order == ["slow", *["suspect"] * 4]


def test_what_waits_behind_a_round_is_not_counted_with_it(bench, monkeypatch):
    """A worker that dies in a round has begun that round only."""

    # Given
    class Killed(BaseException):
        pass

    def kill(deliveries, mode):
        raise Killed

    as_job(lambda: None, "bench.pass").enqueue_many([{}] * 16)
    deliveries = bench.poll()
    left_by_the_dead(deliveries)
    monkeypatch.setattr(bench.pipeline, "_run_together", kill)
    # When
    with pytest.raises(Killed):
        bench.run(deliveries)
    # Then
    claims = get_coordination().claim(
        [delivery.lease for delivery in deliveries], "next", timedelta(minutes=5)
    )
    assert Counter(claim.deliveries for claim in claims) == {2: 4, 1: 12}


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_lost_to_a_neighbour(bench, seed):
    """Whatever of a group kills its worker, whenever it is run: the killers and only they end as
    stalled, and nobody else spends more than two attempts on them."""

    class Killed(KeyboardInterrupt):
        """Of all a handler may raise, this alone goes through the pipeline, as a kill does."""

    # Given jobs of various limits, some of them killers
    chance = random.Random(seed)
    limits = [chance.randint(3, 6) for _ in range(40)]
    killers = set(chance.sample(range(40), chance.randint(1, 4)))

    def run_or_kill(n):
        if n in killers:
            raise Killed

    job = as_job(run_or_kill, "bench.mortal")
    for number, limit in enumerate(limits):
        job.using(max_attempts=limit).enqueue(n=number)
    left = bench.poll()
    # When worker after worker runs what the last has left
    for generation in range(200):
        worker = Bench(worker=f"mortal-{generation}")
        try:
            left = worker.run(left)
        except Killed:
            get_coordination().release([f"WORKER:mortal-{generation}"], f"mortal-{generation}")
        else:
            break
        finally:
            worker.close()
        ended = {str(o.delivery.record.offset) for o in worker.outcomes}
        left = [d for d in left if str(d.record.offset) not in ended]
    # Then
    states = dict(Job.objects.order_by("id").values_list("id", "state"))
    lost = [number for number, state in enumerate(states.values()) if state != "completed"]
    assert lost == sorted(killers)
    assert set(DeadLetter.objects.values_list("reason", flat=True)) == {"stalled"}
    spent = Job.objects.filter(state="completed").values_list("attempts", flat=True)
    assert max(spent) <= 3
