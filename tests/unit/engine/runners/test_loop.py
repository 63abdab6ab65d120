"""Coroutines outside a transaction, in flight on a worker's one event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter, defaultdict
from datetime import timedelta
from unittest import mock

import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, OperationalError, transaction

from kjo_django import PermanentError
from kjo_django.clock import Clock
from kjo_django.engine import recorder
from kjo_django.engine.attempt import Delivery, Mode
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.runners.loop import LoopRunner
from kjo_django.engine.scheduler import GroupScheduler, QueueLimit
from kjo_django.limits.permits import EARLY
from kjo_django.models import DeadLetter, Job, ProcessedEvent
from kjo_django.operations.jobs import cancel_one
from kjo_django.round_trips import GroupBudget
from kjo_django.runtime import current_runtime, get_coordination
from kjo_django.values import rate
from tests.factories import JobFactory
from tests.ledger.models import Entry
from tests.unit.deliveries import KJO, MEMORY, as_job, row_locked, states
from tests.unit.engine.test_scheduler import delivery, handler
from tests.unit.workers import Running
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.medium  # threads and waits of a worker, in real time


@pytest.fixture(params=["memory", "database"])
def transport(request):
    return request.param


@pytest.fixture
def configured(request, settings, forgotten_definitions):
    database = "real_database" if "real_database" in request.fixturenames else "sqlite_file"
    request.getfixturevalue(database)
    on_database = "transport" in request.fixturenames and request.getfixturevalue("transport")
    settings.KJO = {
        **KJO,
        **({} if on_database == "database" else MEMORY),
        "POLL_INTERVAL": 0.1,
        "HEARTBEAT_INTERVAL": 0.2,
        "BACKOFF_BASE": 0.05,
        "SHUTDOWN_GRACE": 5,
        "CONCURRENCY": 2,
    }
    return settings


def finished() -> bool:
    return not Job.objects.open().exists()


def settled() -> bool:
    return finished() and not list(get_coordination().names("CONS:"))


# --- In the air -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("real_database")
def test_the_slow_hold_up_nobody(configured, transport):
    # Given one that waits until everything enqueued later has ended
    go_on = threading.Event()

    async def patient(number):
        while number == 0 and not go_on.is_set():
            await asyncio.sleep(0.01)
        return number

    job = as_job(patient, atomic=False)
    job.enqueue_many([{"number": n} for n in range(100)])
    with Running() as running:
        wait_until(lambda: Job.objects.filter(state="completed").count() == 99)
        job.enqueue(number=100)
        wait_until(lambda: Job.objects.filter(state="completed").count() == 100)
        wait_until(lambda: running.worker.scheduler.outstanding == 1)
        # And the lanes are free meanwhile
        as_job(lambda: None, "quick").enqueue()
        wait_until(lambda: Job.objects.filter(state="completed").count() == 101)
        go_on.set()
        wait_until(settled)
    assert running.code == 0
    assert ProcessedEvent.objects.count() == 102
    assert not Job.objects.exclude(lease_token="").exists()


@pytest.mark.large
def test_thousands_are_in_flight_at_once(configured):
    # Given more than one lane takes at a time, each waiting for all
    count, here, everybody = 1500, [], threading.Event()
    configured.KJO = {**configured.KJO, "ASYNC_RAMP_UP": 1000}

    async def meet(number):
        here.append(number)
        if len(here) == count:
            everybody.set()
        while not everybody.is_set():
            await asyncio.sleep(0.05)

    as_job(meet, atomic=False, timeout=timedelta(seconds=120)).enqueue_many(
        [{"number": n} for n in range(count)]
    )
    with Running():
        wait_until(everybody.is_set)
        wait_until(settled)
    assert set(states()) == {"completed"}


def test_starts_that_take_long_hold_up_none_that_runs(configured):
    """A client of HTTP of one's own takes 20 ms to make: answers would wait for all of them."""
    # Given coroutines whose starts keep the loop busy
    moments = []

    async def make_a_client_and_ask(number):
        began = time.monotonic()
        time.sleep(0.02)  # sleep: keeps the loop busy, as work of a processor does
        await asyncio.sleep(0)  # the answer is there
        moments.append(time.monotonic() - began)

    configured.KJO = {**configured.KJO, "ASYNC_RAMP_UP": 100_000}
    as_job(make_a_client_and_ask, atomic=False).enqueue_many([{"number": n} for n in range(50)])
    # When they are all started together
    with Running():
        wait_until(settled)
    # Then each has its answer after a few other starts, not after those of all
    assert sorted(moments)[25] < 0.25


def test_quick_starts_share_turns_of_the_loop(configured):
    """A turn costs more than a quick start, and gives up the interpreter to the lanes."""
    # Given coroutines that note which turn of the loop they started in
    turn, seen = 0, []

    async def note():
        if not seen:
            count_turns()
        seen.append(turn)
        await asyncio.sleep(0.5)

    def count_turns():
        nonlocal turn
        turn += 1
        if len(seen) < 500:
            asyncio.get_running_loop().call_soon(count_turns)

    configured.KJO = {**configured.KJO, "ASYNC_RAMP_UP": 100_000}
    as_job(note, atomic=False).enqueue_many([{} for _ in range(500)])
    # When they are all started together
    with Running():
        wait_until(settled)
    # Then several start in one turn
    assert len(seen) == 500
    assert len(set(seen)) < 500


def test_no_more_are_in_flight_than_the_queue_allows(configured):
    # Given
    configured.KJO = {**configured.KJO, "QUEUES": {"ledger": {"concurrency": 3}}}
    now, peak = [0], [0]

    async def count(number):
        now[0] += 1
        peak[0] = max(peak[0], now[0])
        await asyncio.sleep(0.005)
        now[0] -= 1

    as_job(count, atomic=False).enqueue_many([{"number": n} for n in range(30)])
    with Running():
        wait_until(settled)
    assert peak == [3]


def test_a_busy_loop_lets_no_more_coroutines_start_than_their_rate(configured):
    """Each has waited for its moment, and the loop comes to all of them in one turn."""
    # Given a coroutine that keeps the loop busy until two others wait for it, a second apart
    starts, is_busy = [], threading.Event()

    async def keep_busy() -> None:
        is_busy.set()
        wait_until(lambda: len(running.worker._pipeline._loop._waiting) == 2)

    async def note() -> None:
        starts.append(time.monotonic())

    with Running() as running:
        as_job(keep_busy, atomic=False).enqueue()
        assert is_busy.wait(PATIENCE)
        # When
        as_job(note, atomic=False, rate=rate("1/s")).enqueue_many([{}, {}])
        wait_until(settled)
    # Then
    assert set(states()) == {"completed"}
    first, second = starts
    assert second - first >= 1.0 - EARLY
    # And the late one has not used the start that it was permitted
    assert Job.objects.filter(attempts=1).count() == 3


def test_a_key_is_in_flight_once_and_in_order(configured, transport):
    # Given
    began, flying = defaultdict(list), set()

    async def one_at_a_time(key, number):
        assert key not in flying
        flying.add(key)
        began[key].append(number)
        await asyncio.sleep(0.002)
        flying.remove(key)

    job = as_job(one_at_a_time, atomic=False, key="key", max_attempts=1)
    job.enqueue_many([{"key": str(n % 7), "number": n} for n in range(140)])
    with Running():
        wait_until(settled)
    assert set(states()) == {"completed"}
    assert began == {str(key): list(range(key, 140, 7)) for key in range(7)}


def test_each_ends_in_its_own_way(configured, transport):
    async def behave(how):
        if how == "fail":
            raise PermanentError("no")
        if how == "exit":
            raise SystemExit(3)
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "cancel":
            raise asyncio.CancelledError
        await asyncio.sleep(3600 if how == "hang" else 0)

    job = as_job(behave, atomic=False, timeout=timedelta(seconds=0.2), max_attempts=1)
    hows = ("fail", "exit", "interrupt", "cancel", "hang", "well")
    job.enqueue_many([{"how": how} for how in hows])
    with Running() as running:
        wait_until(settled)
    assert running.code == 0
    assert states() == ["failed"] * 5 + ["completed"]
    assert DeadLetter.objects.count() == 5


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_coroutine_whose_own_task_exits_costs_those_beside_it_nothing(configured, error):
    """``sys.exit()`` in a task would end the event loop itself, and cancel all others on it."""
    has_exited, beside = threading.Event(), []

    async def leave() -> None:
        raise error

    async def gather() -> None:
        await asyncio.gather(leave())

    async def land() -> None: ...

    async def stay(number) -> None:
        beside.append(number)
        while not has_exited.is_set():
            await asyncio.sleep(0.01)

    # Given some that are in the air
    as_job(stay, atomic=False, max_attempts=1).enqueue_many([{"number": n} for n in range(3)])
    with Running() as running:
        wait_until(lambda: len(beside) == 3)
        # When the task of another one exits
        as_job(gather, atomic=False, max_attempts=1).enqueue()
        wait_until(lambda: DeadLetter.objects.count() == 1)
        has_exited.set()
        # Then those that come later take off, too
        as_job(land, atomic=False).enqueue()
        wait_until(settled)
    assert states() == ["completed"] * 3 + ["failed", "completed"]
    assert sorted(beside) == [0, 1, 2]
    assert DeadLetter.objects.get().error_type == "kjo_django.engine.runners.loop.TaskExited"
    assert running.code == 0


def test_a_loop_that_cannot_be_made_is_tried_again_after_a_while(configured, monkeypatch):
    """And not as often as a processor can."""
    tries = []

    async def broken(self):
        tries.append(time.monotonic())
        raise OSError("too many open files")

    monkeypatch.setattr(LoopRunner, "_run_loop", broken)
    monkeypatch.setattr("kjo_django.engine.runners.loop.RESTART_DELAY", 0.2)
    flight = LoopRunner(*[None] * 4, on_thread=lambda: None, use_permits=list)
    thread = threading.Thread(target=flight._run)
    thread.start()
    wait_until(lambda: len(tries) >= 3)
    flight.is_closed = True
    flight._has_closed.set()
    thread.join(PATIENCE)
    assert tries[2] - tries[0] >= 0.4


def test_those_that_board_while_the_loop_ends_take_off_with_the_next(configured):
    """Cancelled with it before they begin, they would be in the air for ever, with their keys."""
    is_flying = threading.Event()

    async def exit_beside_the_next() -> None:
        is_flying.set()
        flight = running.worker._pipeline._loop
        wait_until(lambda: flight._waiting)
        # Both come in the loop's next turn, the boarding first
        flight._wake.set()
        asyncio.get_running_loop().call_soon(sys.exit, 3)

    async def land() -> None: ...

    # Given
    as_job(exit_beside_the_next, atomic=False, max_attempts=1).enqueue()
    with Running() as running:
        assert is_flying.wait(PATIENCE)
        # When
        as_job(land, atomic=False, max_attempts=1).enqueue()
        # Then
        wait_until(settled)
    assert states()[1] == "completed"
    assert running.code == 0


def test_batches_fly_too(configured):
    calls = []

    async def together(batch):
        calls.append(len(batch))
        await asyncio.sleep(0.01)
        batch[0].fail(PermanentError("the first"))

    as_job(together, atomic=False, batch=4).enqueue_many([{"n": n} for n in range(8)])
    with Running():
        wait_until(settled)
    assert sum(calls) == 8
    assert states().count("failed") == len(calls)


def test_a_job_cancelled_in_the_air_is_cancelled(configured):
    flying = threading.Event()

    async def obedient(context):
        flying.set()
        while True:
            context.raise_if_aborted()
            await asyncio.sleep(0.02)

    answer = as_job(obedient, atomic=False, takes_context=True).enqueue()
    with Running():
        assert flying.wait(PATIENCE)
        cancel_one(answer.job_id, abort=True)
        wait_until(settled)
    assert states() == ["cancelled"]


# --- Landing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [1, 3])
def test_an_outage_while_landing_runs_nothing_again(configured, failing, failures):
    # Given
    ran, gone = [], OperationalError("server closed the connection unexpectedly")
    failing(recorder, "record_completions", *[gone] * failures)

    async def note(number):
        ran.append(number)

    as_job(note, atomic=False).enqueue(number=1)
    with Running():
        wait_until(settled)
    assert (ran, states()) == ([1], ["completed"])


def test_one_ending_that_cannot_be_recorded_takes_no_others_with_it(configured, monkeypatch):
    # Given
    record, landed = recorder.record_completions, []

    def refuse(runtime, attempts, *others):
        if any(b"poison" in one.delivery.message.payload for one in attempts):
            raise IntegrityError("not this one")
        landed.append(len(attempts))
        return record(runtime, attempts, *others)

    async def well(job):
        await asyncio.sleep(0.05)

    monkeypatch.setattr(recorder, "record_completions", refuse)
    monkeypatch.setattr("kjo_django.engine.recorder.DELAY_MIN", 0.01)
    as_job(well, atomic=False).enqueue_many({"job": name} for name in ("a", "poison", "b"))
    with Running():
        wait_until(lambda: Job.objects.filter(state="completed").count() == 2)
        # Then it is tried again, and lands when it can
        monkeypatch.setattr(recorder, "record_completions", record)
        wait_until(settled)
    assert set(states()) == {"completed"}


def test_endings_are_settled_together(configured, monkeypatch):
    groups, record = [], recorder.record_completions

    def count(runtime, attempts, *others):
        groups.append(len(attempts))
        return record(runtime, attempts, *others)

    gate = threading.Event()

    async def together(number):
        while not gate.is_set():
            await asyncio.sleep(0.01)

    monkeypatch.setattr(recorder, "record_completions", count)
    as_job(together, atomic=False).enqueue_many([{"number": n} for n in range(300)])
    with Running() as running:
        wait_until(lambda: running.worker.scheduler.outstanding == 300)
        gate.set()
        wait_until(settled)
    assert sum(groups) == 300
    assert len(groups) < 60


# --- The end --------------------------------------------------------------------------------------


def test_a_worker_that_stops_lets_them_land(configured):
    others = set(threading.enumerate())
    flying = threading.Event()

    async def last(job):
        flying.set()
        await asyncio.sleep(0.5)
        await Entry.objects.acreate(job=job)

    as_job(last, atomic=False).enqueue(job="a")
    with Running() as running:
        assert flying.wait(PATIENCE)
    assert running.code == 0
    assert states() == ["completed"]
    assert Entry.objects.count() == 1
    names = {thread.name for thread in threading.enumerate() if thread not in others}
    assert names.isdisjoint({"kjo-loop", "kjo-recorder"})


def test_what_does_not_land_in_time_is_handed_back_and_runs_elsewhere(configured):
    # Given one that ends for the second worker only
    configured.KJO = {**configured.KJO, "SHUTDOWN_GRACE": 0.2}
    flying, is_second = threading.Event(), threading.Event()

    async def stubborn():
        flying.set()
        while not is_second.is_set():
            await asyncio.sleep(0.01)

    as_job(stubborn, atomic=False).enqueue()
    with Running() as first:
        assert flying.wait(PATIENCE)
    assert first.code == 1
    assert states() == ["queued"]
    is_second.set()
    with Running():
        wait_until(settled)
    assert states() == ["completed"]


@pytest.mark.promise("stop-spends-nothing")
def test_an_obedient_one_keeps_its_attempt(configured):
    configured.KJO = {**configured.KJO, "SHUTDOWN_GRACE": 0.2}
    flying = threading.Event()

    async def obedient(context):
        flying.set()
        while True:
            context.raise_if_aborted()
            await asyncio.sleep(0.01)

    as_job(obedient, atomic=False, takes_context=True).enqueue()
    with Running() as running:
        assert flying.wait(PATIENCE)
    assert running.code == 0
    assert list(Job.objects.values_list("state", "attempts")) == [("queued", 0)]


# --- The scheduler --------------------------------------------------------------------------------


CONCURRENT = handler("async", mode=Mode.CONCURRENT)


def test_a_lane_is_free_while_its_coroutines_fly():
    # Given
    lanes = GroupScheduler(1, group_size=10, budget=GroupBudget(1.0))
    flying = [delivery(key, handler=CONCURRENT) for key in "aba"]
    lanes.put(flying)
    group = lanes.take(timeout=0)
    assert group.deliveries == flying[:2]
    # When
    lanes.finish(group, departed=set(group.deliveries))
    # Then its keys are not, until they land
    assert lanes.take(timeout=0) is None
    assert (lanes.running, lanes.outstanding) == (0, 3)
    assert not lanes.wait_for(None, 0)
    lanes.finish_departed([flying[1]])
    assert lanes.take(timeout=0) is None
    lanes.finish_departed([flying[0]], {flying[0]})
    again = lanes.take(timeout=0)
    assert again.deliveries == [flying[0]]
    lanes.finish(again)
    assert lanes.take(timeout=0).deliveries == [flying[2]]


def test_what_waits_for_room_in_the_air_holds_up_nothing_else():
    lanes = GroupScheduler(2, group_size=10, budget=GroupBudget(1.0))
    lanes.set_limits({"q": QueueLimit(2, 2)})
    lanes.put([delivery(None, handler=CONCURRENT) for _ in range(3)])
    lanes.put([delivery(None)])
    first = lanes.take(timeout=0)
    assert len(first.deliveries) == 2
    lanes.finish(first, departed=set(first.deliveries))
    assert lanes.take(timeout=0).mode is Mode.ATOMIC
    assert lanes.take(timeout=0) is None
    lanes.finish_departed(first.deliveries[:1])
    assert len(lanes.take(timeout=0).deliveries) == 1


class SetClock(Clock):
    """A clock that goes on when a test says so."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.monotonic = lambda: self.at


def started(lanes: GroupScheduler) -> list[Delivery]:
    """Start the coroutines that may start now."""
    found = []
    while (group := lanes.take(timeout=0)) is not None:
        lanes.finish(group, departed=set(group.deliveries))
        found += group.deliveries
    return found


def test_many_coroutines_start_one_after_the_other():
    # Given
    clock = SetClock()
    lanes = GroupScheduler(2, group_size=10, budget=GroupBudget(1.0), ramp_up=100, clock=clock)
    lanes.put(delivery(None, handler=CONCURRENT) for _ in range(1000))
    lanes.put([delivery(None)])
    # Then only a few of them start at once, beside what is no coroutine
    first = started(lanes)
    assert Counter(one.mode for one in first) == {Mode.CONCURRENT: 10, Mode.ATOMIC: 1}
    assert started(lanes) == []
    # When time goes by, and none ends
    for _ in range(10):
        clock.at += 0.1
        assert len(started(lanes)) == 10


def ended(coroutines: list[Delivery], took: float | None) -> list[Delivery]:
    for coroutine in coroutines:
        coroutine.took = took
    return coroutines


def test_each_coroutine_that_completes_lets_two_start():
    # Given
    lanes = GroupScheduler(2, group_size=10, budget=GroupBudget(1.0), ramp_up=100, clock=SetClock())
    lanes.put(delivery(None, handler=CONCURRENT) for _ in range(1000))
    running = started(lanes)
    # When all complete but one, again and again
    numbers = []
    for _ in range(4):
        lanes.finish_departed(ended(running[1:], 1.0))
        running = running[:1] + started(lanes)
        numbers.append(len(running))
    # Then
    assert numbers == [19, 37, 73, 145]


@pytest.mark.parametrize("took", [None, 2.2], ids=["failed", "slow"])
def test_a_coroutine_whose_server_has_enough_to_do_lets_one_start(took):
    # Given ten of which one took a second
    lanes = GroupScheduler(2, group_size=10, budget=GroupBudget(1.0), ramp_up=100, clock=SetClock())
    lanes.put(delivery(None, handler=CONCURRENT) for _ in range(1000))
    running = started(lanes)
    lanes.finish_departed(ended(running[:1], 1.0))
    running = running[1:] + started(lanes)
    assert len(running) == 11
    # When the others fail, or take more than twice as long
    lanes.finish_departed(ended(running[:-1], took))
    # Then no more start than have ended
    assert len(started(lanes)) == 10


def test_after_a_quiet_time_coroutines_start_slowly_again():
    # Given a hundred that have run together, and ended one by one
    clock = SetClock()
    lanes = GroupScheduler(2, group_size=10, budget=GroupBudget(1.0), ramp_up=1000, clock=clock)
    lanes.put(delivery(None, handler=CONCURRENT) for _ in range(100))
    for coroutine in ended(started(lanes), 0.1):
        lanes.finish_departed([coroutine])
    clock.at += 3600
    # When
    lanes.put(delivery(None, handler=CONCURRENT) for _ in range(1000))
    # Then
    assert len(started(lanes)) == 100


def ramped(ramp_up: float, clock: Clock, count: int = 1000) -> GroupScheduler:
    """So many coroutines that wait for their start."""
    budget = GroupBudget(1.0)
    lanes = GroupScheduler(2, group_size=10, budget=budget, ramp_up=ramp_up, clock=clock)
    lanes.put(delivery(None, handler=CONCURRENT) for _ in range(count))
    return lanes


def test_a_few_coroutines_a_second_start_one_by_one():
    clock = SetClock()
    lanes = ramped(2, clock)
    numbers = []
    for _ in range(4):
        numbers.append(len(started(lanes)))
        clock.at += 0.5
    assert numbers == [1, 1, 1, 1]


@pytest.mark.parametrize(("took", "count"), [(0.1, 12), (0.2, 11)])
def test_some_hundredths_of_a_second_more_do_not_make_a_coroutine_slow(took, count):
    # Given a handler that has taken a millisecond once
    lanes = ramped(100, SetClock())
    running = started(lanes)
    lanes.finish_departed(ended(running[:1], 0.001))
    running = running[1:] + started(lanes)
    assert len(running) == 11
    # When it takes more than twice as long
    lanes.finish_departed(ended(running[:1], took))
    assert len(running[1:] + started(lanes)) == count


def test_after_coroutines_that_ran_alone_as_many_start_at_once_as_after_none():
    # Given one that has run by itself
    lanes = ramped(100, SetClock(), 1)
    lanes.finish_departed(ended(started(lanes), 0.1))
    # When
    lanes.put(delivery(None, handler=CONCURRENT) for _ in range(1000))
    assert len(started(lanes)) == 10


def test_how_quick_a_coroutine_was_is_forgotten_when_none_runs():
    """Its server may be another one by then."""
    # Given ten that were quick
    clock = SetClock()
    lanes = ramped(100, clock, 10)
    lanes.finish_departed(ended(started(lanes), 0.1))
    # When those of a slower server complete
    clock.at += 60
    lanes.put(delivery(None, handler=CONCURRENT) for _ in range(1000))
    running = started(lanes)
    lanes.finish_departed(ended(running[1:], 3.0))
    # Then each lets two start
    assert len(started(lanes)) == 2 * (len(running) - 1)


def test_a_lane_wakes_up_for_the_next_coroutine():
    # Given all that may start now started, and nothing that ends
    lanes = GroupScheduler(1, group_size=10, budget=GroupBudget(1.0), ramp_up=100)
    lanes.put(delivery(None, handler=CONCURRENT) for _ in range(30))
    started(lanes)
    # Then
    assert lanes.take(timeout=10) is not None


def test_a_flight_that_never_began_closes():
    others = [mock.Mock() for _ in range(4)]
    flight = LoopRunner(*others, on_thread=lambda: None, use_permits=list)
    flight.close(0.1)


# --- Leases ---------------------------------------------------------------------------------------


@pytest.mark.postgres
def test_renewing_waits_for_no_row_that_is_being_recorded(postgres, settings):
    """Two statements that wait for each other's rows would be a deadlock."""
    # Given two leases, one in a row that somebody is writing
    settings.KJO = KJO | MEMORY
    token = "mine"
    leases = LeaseBook(current_runtime(), token, timedelta(minutes=5), timedelta(minutes=1))
    busy, free = (JobFactory(queue="ledger", state="queued", lease_token=token) for _ in range(2))
    leases.hold_rows([busy.pk, free.pk])
    # When
    with row_locked(busy.pk):
        leases.renew_rows()
        renewed = set(Job.objects.exclude(lease_expires_at=None).values_list("pk", flat=True))
    # Then
    assert renewed == {free.pk}


# --- The connection they share --------------------------------------------------------------------


@pytest.mark.usefixtures("real_database")
@pytest.mark.parametrize("how", ["block", "autocommit"])
def test_a_transaction_one_leaves_open_completes_nothing_it_undid(configured, how):
    """They share a connection: what others write meanwhile goes into the same transaction."""
    # Given one that is in the air while another leaves a transaction open
    is_open = asyncio.Event()

    def leave_open() -> None:
        if how == "block":
            transaction.atomic().__enter__()
        else:
            transaction.set_autocommit(False)

    async def write(name):
        if name == "guilty":
            await sync_to_async(leave_open)()
            is_open.set()
        elif name == "beside":
            await is_open.wait()
        await Entry.objects.acreate(job=name)

    job = as_job(write, atomic=False, max_attempts=1)
    job.enqueue_many([{"name": name} for name in ("beside", "guilty")])
    # When
    with Running():
        wait_until(finished)
        job.enqueue(name="later")
        wait_until(settled)
    # Then whoever is completed has written: one that took off later may be
    ended = {job.arguments["name"]: job.state for job in Job.objects.all()}
    assert (ended["guilty"], ended["later"]) == ("failed", "completed")
    written = set(Entry.objects.values_list("job", flat=True))
    assert {name for name, state in ended.items() if state == "completed"} <= written
    for letter in DeadLetter.objects.all():
        assert "One of the coroutines that ran at the same time: The handler " in letter.error


@pytest.mark.usefixtures("real_database")
def test_a_block_that_is_left_is_nobodys_fault(configured):
    """Those that end while another is in a block of its own."""

    def write(name) -> None:
        with transaction.atomic():
            time.sleep(0.02)  # sleep: so that others end within this block
            Entry.objects.create(job=name)

    async def handle(name):
        if int(name) % 2:
            await sync_to_async(write)(name)

    job = as_job(handle, atomic=False, max_attempts=1)
    job.enqueue_many([{"name": str(number)} for number in range(20)])
    with Running():
        wait_until(settled)
    assert set(states()) == {"completed"}
    assert Entry.objects.count() == 10
