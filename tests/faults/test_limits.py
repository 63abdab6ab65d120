"""Limits over several workers in virtual time, one of which dies."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from django.db import connection
from django.db.models import Max

from kjo_django import job
from kjo_django.conf import get_settings
from kjo_django.coordination.base import alive_name, slot_name
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.recorder import EndedQueue
from kjo_django.enqueue import storing
from kjo_django.exceptions import RateLimitExceededError
from kjo_django.limits import lines
from kjo_django.limits.control import clear_limit, set_limit
from kjo_django.limits.limiter import Limiter
from kjo_django.models import HeldJob, Job, MetricBucket, TransportMessage
from kjo_django.operations import jobs as operations
from kjo_django.runtime import current_runtime, get_coordination, get_transport
from kjo_django.values import rate as read_rate
from kjo_django.worker.duties import LimitDuty
from tests.faults.conftest import ENGINES
from tests.faults.process import Process
from tests.faults.scenarios import QUEUE
from tests.faults.world import World

TIME_STANDS = True
every_engine = pytest.mark.parametrize("world", ENGINES, indirect=True)
in_memory = pytest.mark.parametrize("world", ["sqlite-memory"], indirect=True)
pytestmark = [pytest.mark.timeout(600), pytest.mark.medium("sqlite-memory")]
TICK = 0.04
"""Seconds between two looks of each worker: as late as a start may be that nothing delays."""
BEAT = LimitDuty.SOON
"""Seconds between the signs of life; each worker then also looks after the jobs that wait."""


class Workers:
    """Several workers of one world, whose steps are taken one after the other."""

    def __init__(self, world: World, count: int) -> None:
        self.world = world
        world.queues = (QUEUE,)
        world.forget()
        world.begin_empty()
        self.alive = [world.process(f"worker-{n}") for n in range(count)]
        self.beats_at = 0.0

    def run_for(self, seconds: float, tick: float = TICK) -> None:
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:  # timed loop: in virtual time
            beats = now >= self.beats_at
            if beats:
                self.beats_at = now + BEAT
            relays = self.is_due()
            for process in self.alive:
                process.boundary.call_count = 0
                process.turn(beats=beats, relays=relays)
            self.world.clock.advances = 0
            self.world.clock.advance(tick)

    def is_due(self) -> bool:
        """Return whether a relay would publish anything now: each of them would ask the same."""
        runtime = current_runtime()
        next_at = runtime.store.next_due([QUEUE])
        return next_at is not None and next_at <= runtime.clock.now()

    def run_until_done(self, seconds: float, tick: float = 0.25) -> None:
        end = time.monotonic() + seconds
        while Job.objects.open().exists() and time.monotonic() < end:  # timed loop: the same
            self.run_for(tick, tick)
        assert not Job.objects.open().exists(), list(Job.objects.open().values()[:3])

    def kill(self, process: Process) -> None:
        self.alive.remove(process)
        process.bury()
        self.world.processes.remove(process)


def most_within(moments: Sequence[float], seconds: float) -> int:
    """Return how many of the moments lie in one window, wherever that begins."""
    ordered = sorted(moments)
    return max(sum(1 for m in ordered if first <= m < first + seconds) for first in ordered)


@pytest.mark.large
@every_engine
def test_a_rate_holds_over_four_workers_for_a_minute(world: World) -> None:
    # Given
    starts: list[float] = []

    @job(name="limits.rated", queue=QUEUE, rate="5/s")
    def call() -> None:
        starts.append(time.time())

    workers = Workers(world, 4)
    call.enqueue_many([{}] * 400)
    # When a worker dies in the middle
    workers.run_for(30)
    workers.kill(workers.alive[1])
    workers.run_for(30)
    # Then
    assert most_within(starts, 1.0) <= 5
    assert len(starts) >= 0.85 * 60 * 5
    assert Job.objects.filter(state="completed").count() == len(starts)
    assert HeldJob.objects.filter(is_released=False).exists()


SLOW = [
    ("permits", 0.1, 0.8),
    ("permits", 0.3, 0.4),
    ("permits", 1.0, 0.1),
    ("starts", 0.1, 0.9),
    ("settling", 0.1, 0.9),
    ("sleeps", 0.1, 0.9),
]
"""What takes how many seconds longer, and the part of a rate that starts all the same: one thread
does everything here, so nobody starts anything meanwhile."""


def slow_down(world: World, monkeypatch: pytest.MonkeyPatch, what: str, seconds: float) -> None:
    """Let something take longer, each time."""
    if what == "sleeps":
        sleep = time.sleep
        monkeypatch.setattr(time, "sleep", lambda asked: sleep(asked + seconds))
        return
    owner, name = {
        "permits": (LeaseBook, "permit"),
        "starts": (Limiter, "start"),
        "settling": (EndedQueue, "before_handler"),
    }[what]
    original = getattr(owner, name)

    def slow(*arguments: Any, **options: Any) -> Any:
        world.clock.advance(seconds / 2)
        try:
            return original(*arguments, **options)
        finally:
            world.clock.advance(seconds / 2)

    monkeypatch.setattr(owner, name, slow)


@pytest.mark.large(  # of each kind of delay the default tier has one case, and one of two handlers
    "permits-0.1-0.8",
    "permits-0.3-0.4-atomic",
    "permits-1.0-0.1",
    "starts-0.1-0.9-atomic",
    "settling-0.1-0.9-outside",
    "sleeps-0.1-0.9-atomic",
)
@every_engine
@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "outside"])
@pytest.mark.parametrize(("what", "seconds", "part"), SLOW)
def test_a_rate_is_used_and_kept_on_a_machine_where_something_takes_long(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    seconds: float,
    part: float,
    atomic: bool,
) -> None:
    starts: list[float] = []

    @job(name="limits.rated", queue=QUEUE, rate="5/s", atomic=atomic)
    def call() -> None:
        starts.append(time.time())

    slow_down(world, monkeypatch, what, seconds)
    workers = Workers(world, 2)
    call.enqueue_many([{}] * 70)
    # When
    workers.run_for(13)
    # Then
    assert most_within(starts, 1.0) <= 5
    assert len(starts) >= part * 13 * 5


@in_memory
@pytest.mark.large("outside")
@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "outside"])
def test_jobs_that_are_cancelled_when_they_may_start_leave_the_rate_to_others(
    world: World, atomic: bool
) -> None:
    started: list[float] = []

    @job(name="limits.rated", queue=QUEUE, rate="30/s", atomic=atomic)
    def call() -> None:
        started.append(time.time())

    workers = Workers(world, 1)
    call.enqueue_many([{}] * 800)
    worker = workers.alive[0].worker
    cancelled = 0
    for _ in range(100):
        workers.run_for(0.04)
        line = worker.limiter._permits._line.values()
        ready = [each for each in line if each.limit_state.permit is not None]
        for delivery in ready[: min(1, 8 - cancelled)]:
            operations.cancel(Job.objects.filter(pk=delivery.message.job_id))
            cancelled += 1
    assert cancelled == Job.objects.filter(state="cancelled").count() == 8
    worker.statistics.flush()
    assert sum(MetricBucket.objects.values_list("unused_permit_count", flat=True)) == 8
    before = len(started)
    workers.run_for(10)
    assert len(started) - before >= 0.9 * 10 * 30


@in_memory
@pytest.mark.large("10-m-10-100-90-24-20", "200-m-1000-1500-20-1060-20", "400-s")
@pytest.mark.parametrize(
    ("rate", "burst", "count", "seconds", "starts", "most_releases"),
    [
        ("1/h", 1, 20, 20, 1, 2),
        ("10/m", 10, 100, 90, 10 + 14, 20),
        ("200/m", 400, 1500, 20, 400 + 60, 20),
        ("200/m", 1000, 1500, 20, 1000 + 60, 20),
        ("400/s", 1, 2400, 5, 0.95 * 2000, 20),
    ],
    ids=lambda value: str(value).replace("/", "-"),
)
def test_a_line_advances_as_its_rate_does_and_no_job_is_released_in_vain(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    rate: str,
    burst: int,
    count: int,
    seconds: float,
    starts: float,
    most_releases: int,
) -> None:
    """Default tier: of each kind of rate, slow, quick or with a burst, one has stood still, or has
    released the same jobs many times a second."""
    started: list[float] = []
    releases: list[int] = []
    release = lines.release

    @job(name="limits.rated", queue=QUEUE, rate=rate, burst=burst)
    def call() -> None:
        started.append(time.time())

    def count_release(*args: Any) -> int:
        releases.append(release(*args))
        return releases[-1]

    monkeypatch.setattr(lines, "release", count_release)
    workers = Workers(world, 1)
    call.enqueue_many([{}] * count)
    workers.run_for(seconds)
    assert len(started) >= starts
    assert len(releases) <= most_releases
    # What half a second has room for may start at once, and nothing then for as long.
    gaps = [later - earlier for earlier, later in pairwise(started)]
    assert max(gaps, default=0.0) <= 1.5 * read_rate(rate).interval + 0.55


@in_memory
def test_what_goes_to_another_consumer_leaves_the_rate_to_others(world: World) -> None:
    started: list[float] = []

    @job(name="limits.rated", queue=QUEUE, rate="5/s")
    def call() -> None:
        started.append(time.time())

    workers = Workers(world, 1)
    call.enqueue_many([{}] * 300)
    workers.run_for(1)  # those that were released are on their way
    scheduler = workers.alive[0].worker.scheduler
    waiting = [delivery for key in scheduler._keys.values() for delivery in key.waiting]
    assert waiting
    scheduler.discard({delivery.place for delivery in waiting}, waiting[0].subscription)
    before = len(started)
    workers.run_for(20)
    assert len(started) - before >= 0.9 * 20 * 5


@every_engine
@pytest.mark.parametrize("options", [{}, {"database_only": True}], ids=str)
def test_a_job_that_fails_in_a_group_of_a_rate_fails_alone_and_its_attempts_count(
    world: World, options: dict[str, Any]
) -> None:
    """The group is undone and starts again: where permits cannot be taken in a transaction, too."""
    called: list[int] = []

    @job(name="limits.rated", queue=QUEUE, rate="100/s", burst=50, max_attempts=2, **options)
    def call(number: int) -> None:
        called.append(number)
        if number == 3:
            raise RuntimeError("bad")

    workers = Workers(world, 1)
    call.enqueue_many([{"number": number} for number in range(6)])
    workers.run_until_done(60)
    assert Job.objects.filter(state="completed").count() == 5
    assert Job.objects.get(payload=b'{"number":3}').state == "failed"
    assert len(called) < 20


@every_engine
def test_a_burst_starts_at_once_and_the_rest_at_its_rate(world: World) -> None:
    starts: list[float] = []

    @job(name="limits.burst", queue=QUEUE, rate="2/s", burst=4)
    def call() -> None:
        starts.append(time.time())

    workers = Workers(world, 2)
    call.enqueue_many([{}] * 12)
    workers.run_for(6)
    assert len(starts) == 12
    assert most_within(starts, 0.1) == 4
    assert most_within(starts, 1.0) <= 2 + 4 - 1


@every_engine
def test_each_key_has_a_rate_of_its_own_and_others_pass(world: World) -> None:
    starts: dict[str, list[float]] = {"a": [], "b": []}
    others: list[float] = []

    @job(name="limits.keyed", queue=QUEUE, rate="1/s", rate_key="tenant")
    def call(tenant: str) -> None:
        starts[tenant].append(time.time())

    @job(name="limits.free", queue=QUEUE)
    def free() -> None:
        others.append(time.time())

    workers = Workers(world, 2)
    call.enqueue_many([{"tenant": "a"}] * 20)
    workers.run_for(2)
    call.enqueue(tenant="b")
    free.enqueue_many([{}] * 20)
    before = time.time()
    workers.run_for(0.3)
    assert len(others) == 20
    assert len(starts["b"]) == 1
    assert max([*others, *starts["b"]]) < before + 0.3
    assert most_within(starts["a"], 1.0) == 1


@every_engine
def test_jobs_start_in_the_order_they_came(world: World) -> None:
    started: list[int] = []

    @job(name="limits.ordered", queue=QUEUE, rate="4/s", key=lambda number: "k")
    def call(number: int) -> None:
        started.append(number)

    workers = Workers(world, 3)
    for number in range(20):
        call.enqueue(number=number)
        workers.run_for(0.1, 0.05)
    workers.run_for(6)
    assert started == list(range(20))


@pytest.mark.promise("limit")
@every_engine
def test_slots_hold_over_four_workers_one_of_which_dies(world: World) -> None:
    """Handlers run to their end here, one after the other: what counts is who holds a slot."""
    ended: Counter[str] = Counter()

    @job(name="limits.slots", queue=QUEUE, concurrency=3, concurrency_key="tenant")
    def call(tenant: str) -> None:
        ended[tenant] += 1

    workers = Workers(world, 4)
    call.enqueue_many([{"tenant": "a"}] * 20 + [{"tenant": "b"}] * 20)
    workers.run_for(0.1)
    workers.kill(workers.alive[0])
    workers.run_until_done(60)
    workers.run_for(BEAT + 0.2)  # also what the dead one has started leaves the line
    assert ended == {"a": 20, "b": 20}
    assert not HeldJob.objects.exists()


@every_engine
def test_a_cancelled_job_gives_its_place_to_the_next(world: World) -> None:
    started: list[int] = []

    @job(name="limits.cancelled", queue=QUEUE, rate="1/s")
    def call(number: int) -> None:
        started.append(number)

    workers = Workers(world, 1)
    call.enqueue_many([{"number": number} for number in range(10)])
    workers.run_for(0.5)
    waiting = Job.objects.open().order_by("id").exclude(payload=b'{"number":9}')
    operations.cancel(list(waiting))
    workers.run_until_done(30)
    assert started[-1] == 9
    assert len(started) <= 3
    assert not HeldJob.objects.exists()


@every_engine
def test_an_operator_changes_a_rate_while_jobs_wait(world: World) -> None:
    started: list[float] = []

    @job(name="limits.changed", queue=QUEUE, rate="1/h")
    def call() -> None:
        started.append(time.time())

    workers = Workers(world, 2)
    call.enqueue_many([{}] * 30)
    workers.run_for(5, 0.25)
    assert len(started) == 1
    # When
    set_limit("job:limits.changed", rate="2/s")
    read_controls(workers)
    workers.run_for(10)
    assert most_within(started, 1.0) <= 2
    assert len(started) >= 10
    # And when there is no limit any more
    clear_limit("job:limits.changed")
    set_limit("job:limits.changed", rate="1000/s")
    read_controls(workers)
    workers.run_until_done(20, 0.1)


def read_controls(workers: Workers) -> None:
    for process in workers.alive:
        process.worker.controls.read()


@pytest.mark.promise("limit")
@every_engine
def test_a_rate_and_slots_together(world: World) -> None:
    started: list[float] = []

    @job(name="limits.both", queue=QUEUE, rate="10/s", concurrency=2)
    def call() -> None:
        started.append(time.time())

    workers = Workers(world, 3)
    call.enqueue_many([{}] * 30)
    workers.run_for(8)
    assert len(started) == 30
    assert most_within(started, 1.0) <= 10


@every_engine
def test_a_retry_waits_as_a_first_attempt_does(world: World) -> None:
    started: list[float] = []

    @job(name="limits.retried", queue=QUEUE, rate="1/s", takes_context=True)
    def call(context: Any) -> None:
        started.append(time.time())
        if context.attempt == 1:
            raise RuntimeError("not yet")

    workers = Workers(world, 2)
    call.enqueue_many([{}] * 4)
    workers.run_for(14)
    assert most_within(started, 1.0) == 1
    assert len(started) == 8
    assert set(Job.objects.values_list("state", "attempts")) == {("completed", 2)}


def take_slot(name: str) -> Callable[[], None]:
    """Take the only slot of a limit as a living worker does; return what gives it back."""
    coordination = get_coordination()
    names = [slot_name(f"SLOT:{name}", 1), alive_name("another")]
    coordination.claim(names, "another", timedelta(minutes=10))
    return partial(coordination.release, names, "another")


@pytest.mark.promise("frozen-slot")
@every_engine
@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "outside"])
def test_a_worker_that_is_frozen_before_a_start_does_not_use_the_slot_it_has_lost(
    world: World, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    # Given
    ran: list[str] = []
    give_back: list[Callable[[], None]] = []
    claim = LeaseBook.claim_slots

    @job(name="limits.frozen", queue=QUEUE, concurrency=1, atomic=atomic)
    def call() -> None:
        ran.append("once")

    def claim_and_freeze(leases: LeaseBook, asks: Any, ttl: timedelta) -> list[bool]:
        answers = claim(leases, asks, ttl)
        if not give_back:
            world.clock.advance(ttl.total_seconds() + 1)
            give_back.append(take_slot("job:limits.frozen"))
        return answers

    workers = Workers(world, 1)
    call.enqueue()
    # When the worker is frozen after it has taken the slot, until that is another's
    monkeypatch.setattr(LeaseBook, "claim_slots", claim_and_freeze)
    workers.run_for(5)
    # Then it does not start, until the slot is free again
    assert give_back
    assert ran == []
    give_back[0]()
    workers.run_until_done(30)
    assert ran == ["once"]


@every_engine
@pytest.mark.parametrize("options", [{}, {"rate": "20/s"}], ids=["slots", "rate-and-slots"])
def test_a_paused_job_is_the_next_of_its_key_and_others_pass(
    world: World, options: dict[str, Any]
) -> None:
    # Given a slot for which jobs of two keys wait
    ran: list[str] = []

    @job(name="limits.paused", queue=QUEUE, concurrency=1, key=lambda name: name[0], **options)
    def call(name: str) -> None:
        ran.append(name)
        if ran.count("a0") == 1 and name == "a0":
            raise RateLimitExceededError("slow down")

    workers = Workers(world, 2)
    for name in ("a0", "a1", "b0", "a2", "b1", "b2", "a3"):
        call.enqueue(name=name)
    # When the first is paused, and its worker ends before it goes on
    workers.run_for(1)
    assert ran[0] == "a0"
    assert not {"a1", "a2", "a3"} & {*ran}
    assert HeldJob.objects.filter(limit=lines.PAUSED).count() == 1
    workers.kill(workers.alive[0])
    workers.run_for(15, 0.25)
    workers.run_until_done(20, TICK)
    # Then
    assert [name for name in ran if name.startswith("a")] == ["a0", "a0", "a1", "a2", "a3"]
    assert [name for name in ran if name.startswith("b")] == ["b0", "b1", "b2"]
    workers.run_for(1, 0.25)
    assert not HeldJob.objects.exists()


@every_engine
def test_a_job_that_finds_no_slot_at_its_moment_is_not_overtaken_by_the_next_of_its_key(
    world: World,
) -> None:
    # Given a slot that is taken, and jobs that a rate lets come one by one
    ran: list[str] = []

    @job(
        name="limits.both",
        queue=QUEUE,
        rate="4/s",
        burst=2,
        concurrency=1,
        key=lambda name: name[0],
    )
    def call(name: str) -> None:
        ran.append(name)

    workers = Workers(world, 2)
    give_back = take_slot("job:limits.both")
    for name in ("a0", "a1", "a2", "b0", "a3", "b1"):
        call.enqueue(name=name)
    workers.run_for(3)
    assert ran == []
    # When it is given back between the moments of two of them
    give_back()
    workers.run_until_done(30, 0.25)
    # Then
    assert [name for name in ran if name.startswith("a")] == ["a0", "a1", "a2", "a3"]
    assert [name for name in ran if name.startswith("b")] == ["b0", "b1"]


@in_memory
def test_a_job_that_is_due_never_and_has_no_place_in_line_is_held_again(world: World) -> None:
    ran: list[str] = []

    @job(name="limits.held", queue=QUEUE, concurrency=1)
    def call() -> None:
        ran.append("once")

    workers = Workers(world, 1)
    give_back = take_slot("job:limits.held")
    call.enqueue()
    workers.run_for(1, 0.25)
    assert HeldJob.objects.filter(is_released=False).count() == 1
    # When a message of it comes up, while nobody would release it
    HeldJob.objects.all().delete()
    queue = get_settings().queue(QUEUE)
    records = [storing.record_of(each, queue) for each in Job.objects.all()]
    storing.publish(get_transport(queue.transport), records)
    workers.run_for(1, 0.25)
    give_back()
    # Then
    workers.run_until_done(10)
    assert ran == ["once"]


@in_memory
@pytest.mark.parametrize("limit", [{"rate": "1/s"}, {"concurrency": 1}], ids=str)
def test_a_job_that_is_put_off_on_its_way_keeps_nobody_waiting(
    world: World, limit: dict[str, Any]
) -> None:
    ran: list[str] = []

    @job(name="limits.put_off", queue=QUEUE, **limit)
    def call(name: str) -> None:
        ran.append(name)

    # Given two jobs in line, behind those that wait in the worker, of which the first was released
    workers = Workers(world, 1)
    give_back = take_slot("job:limits.put_off")
    call.enqueue_many([{"name": "before"}] * 6)
    put_off = call.using(id="a", on_conflict="replace")
    put_off.enqueue(name="a")
    call.enqueue(name="b")
    workers.run_for(0.5, 0.25)
    (place,) = HeldJob.objects.filter(job_id=Job.objects.get(unique_id="a").pk)
    HeldJob.objects.filter(pk=place.pk).update(is_released=True)
    # When another payload takes its place, which is due later
    put_off.using(delay=3600).enqueue(name="a")
    give_back()
    # Then it keeps nobody waiting
    workers.run_for(20, 0.25)
    assert Counter(ran) == {"before": 6, "b": 1}


@in_memory
def test_a_job_that_is_replaced_in_line_has_its_new_priority_and_key(world: World) -> None:
    """FINDINGS 2.11: it kept those of the job whose place it took."""
    ran: list[str] = []

    @job(name="limits.replaced", queue=QUEUE, concurrency=1, key="key")
    def call(name: str, key: str = "") -> None:
        ran.append(name)

    # Given a line of three
    workers = Workers(world, 1)
    give_back = take_slot("job:limits.replaced")
    last = call.using(id="last", on_conflict="replace")
    moved = call.using(id="moved", on_conflict="replace")
    call.enqueue(name="first")
    moved.enqueue(name="moved", key="before")
    last.enqueue(name="last")
    workers.run_for(1, 0.25)
    assert HeldJob.objects.filter(is_released=False).count() == 3
    # When the last becomes urgent, and another gets another key
    last.using(priority=50).enqueue(name="last, and urgent")
    moved.enqueue(name="moved", key="after")
    workers.run_for(1, 0.25)
    # Then they stand in line as what they are now
    line = dict(HeldJob.objects.values_list("job_id", "key"))
    jobs = {each.unique_id: each for each in Job.objects.all()}
    assert line[jobs["moved"].pk] == jobs["moved"].key == "after"
    give_back()
    workers.run_until_done(10)
    assert ran == ["last, and urgent", "first", "moved"]


def check_what_waiting_costs(world: World, many: int) -> None:
    """Compare the statements of a worker while few jobs wait with those while many do."""
    counts = [statements_while_waiting(world, waiting) for waiting in (20, many)]
    print(f"{counts[0]} statements while 20 jobs wait, {counts[1]} while {many:,} do")
    assert counts[0] == counts[1]


def statements_while_waiting(world: World, waiting: int) -> int:
    """Return how many statements a worker makes in five seconds, in which no job may start."""

    @job(name="limits.rare", queue=QUEUE, rate="1/h", rate_key="tenant")
    def rare(tenant: str) -> None:
        started.append(tenant)

    @job(name="limits.free", queue=QUEUE)
    def free() -> None:
        started.append("free")

    started: list[str] = []
    workers = Workers(world, 1)
    rare.enqueue_many([{"tenant": "a"}] * 20)
    workers.run_for(3, 0.25)
    assert started == ["a"]
    # Given as many as that, in the line that these have formed
    before = TransportMessage.objects.aggregate(last=Max("id"))["last"] or 0
    more = rare.enqueue_many([{"tenant": "a"}] * (waiting - 20)) if waiting > 20 else []
    ids = [handle.job_id for handle in more]
    Job.objects.filter(pk__in=ids).update(available_at=lines.NEVER)
    TransportMessage.objects.filter(id__gt=before).delete()
    first = HeldJob.objects.first()
    assert first is not None
    HeldJob.objects.bulk_create(
        HeldJob(
            job_id=id,
            generation=1,
            limit=first.limit,
            queue=QUEUE,
            rank=0,
            waiting_since=first.waiting_since,
        )
        for id in ids
    )
    assert HeldJob.objects.count() == waiting - 1
    workers.run_for(3, 0.25)
    # When
    statements: list[str] = []

    def count(execute: Any, sql: str, *arguments: Any) -> Any:
        statements.append(sql)
        return execute(sql, *arguments)

    with connection.execute_wrapper(count):
        workers.run_for(5, 0.25)
    assert started == ["a"]
    assert HeldJob.objects.count() == waiting - 1
    # Then a job without a limit passes at once
    free.enqueue()
    workers.run_for(0.05, 0.05)
    assert started == ["a", "free"]
    assert statements
    return len(statements)


@every_engine
def test_a_thousand_waiting_jobs_cost_no_more_statements_than_twenty(world: World) -> None:
    check_what_waiting_costs(world, 1_000)


@pytest.mark.long
@every_engine
def test_ten_thousand_waiting_jobs_cost_no_more_statements_than_twenty(world: World) -> None:
    check_what_waiting_costs(world, 10_000)
