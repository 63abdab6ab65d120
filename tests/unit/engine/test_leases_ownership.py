"""Whatever way a group ends, nothing is owned any more that nobody runs.

In the small tier: each way out is a rule of the engine, and SQLite has all of them. `Bench.run`
looks after each group, so every test of this folder is one of these, on the other engines, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
from django.db import OperationalError, connections

from kjo_django import job
from kjo_django.clock import CLOCK
from kjo_django.coordination.base import Claim
from kjo_django.engine import admission, failures, recorder
from kjo_django.engine.attempt import Attempt, Delivery, Departed
from kjo_django.engine.handler.timeouts import RunAbandoned
from kjo_django.engine.recorder import EndedQueue
from kjo_django.enqueue.definition import JobDefinition
from kjo_django.exceptions import CoordinationError
from kjo_django.models import Job
from kjo_django.runtime import get_coordination, get_transport
from kjo_django.states import OPEN
from kjo_django.transports.base import OutgoingRecord
from tests.ledger.models import Entry
from tests.unit.deliveries import (
    Bench,
    Mode,
    Silent,
    as_job,
    entries,
    let_die_with,
    make_everything_due,
    next_delivery,
    take_over,
)
from tests.waiting import PATIENCE, wait_until

COUNT = 3


class Kind(NamedTuple):
    """A kind of handler: how it is declared, and the steps in which its groups are recorded."""

    options: dict[str, Any]
    is_async: bool = False
    is_batch: bool = False


KINDS = {
    "atomic": Kind({}),
    "without savepoints": Kind({"database_only": True}),
    "plain": Kind({"atomic": False}),
    "coroutine": Kind({"atomic": False}, is_async=True),
    "batch": Kind({"batch": 10}, is_batch=True),
    "plain batch": Kind({"batch": 10, "atomic": False}, is_batch=True),
}


class Refused(Exception):
    """What a handler raises that fails."""


@pytest.fixture(params=KINDS)
def work(request: pytest.FixtureRequest, bench: Bench, transport: str) -> Callable[..., Any]:
    """Declares a handler of a kind, which writes what it is called with, or fails."""
    kind = KINDS[request.param]

    def write(job: str) -> None:
        Entry.objects.create(job=job)
        if job.startswith("fails"):
            raise Refused(job)

    def one(job: str) -> None:
        write(job)

    async def coroutine(job: str) -> None:
        await Entry.objects.acreate(job=job)
        if job.startswith("fails"):
            raise Refused(job)

    def batch(items: Sequence[Any]) -> None:
        for item in items:
            write(item.payload["job"])

    function = coroutine if kind.is_async else batch if kind.is_batch else one

    def declare(**options: Any) -> JobDefinition:
        return as_job(function, name="bench.work", **kind.options, **options)

    return declare


def leases() -> list[str]:
    """What anybody owns, as others see it."""
    tokens = Job.objects.exclude(lease_token="").values_list("lease_token", flat=True)
    # Of what has ended, the row may be deleted a moment later.
    ended = map(str, Job.objects.exclude(state__in=OPEN).values_list("id", flat=True))
    begun = {id.partition(":")[0] for id in get_transport().running()}
    return [*get_coordination().names("CONS:"), *tokens, *begun.difference(ended)]


@pytest.mark.parametrize("name", ["returns", "fails"])
@pytest.mark.parametrize("most", [1, 5], ids=["last attempt", "first attempt"])
def test_of_a_group_that_has_run(bench: Bench, work: Any, name: str, most: int) -> None:
    definition = work(max_attempts=most)
    for number in range(COUNT):
        definition.enqueue(job=f"{name} {number}")
    assert bench.run() == []
    assert not bench.owned()
    assert not leases()


def test_of_messages_that_another_worker_has(bench: Bench, another: Bench, work: Any) -> None:
    definition = work()
    for number in range(COUNT):
        definition.enqueue(job=str(number))
    deliveries = bench.poll()
    take_over(another, deliveries[:1])
    assert bench.run(deliveries) == deliveries[:1]
    assert len(leases()) == 1


def test_of_jobs_that_were_cancelled_or_done_before(bench: Bench, work: Any) -> None:
    definition = work()
    for number in range(COUNT):
        definition.enqueue(job=str(number))
    deliveries = bench.poll()
    Job.objects.filter(pk=Job.objects.first().pk).update(state="cancelled")  # type: ignore[union-attr]
    assert bench.run(deliveries) == []
    assert sum(entries().values()) == COUNT - 1
    assert not leases()


POINTS = {
    "admission": (admission, "admit_group"),
    "rows": ("store", "take_row_leases"),
    "completion in the transaction": (recorder, "complete"),
    "completion": (recorder, "record_completions"),
    "acknowledgement in the transaction": (recorder, "acknowledge_within"),
    "acknowledgement": ("subscription", "acknowledge"),
    "judgement": (failures, "judge"),
    "failure": (failures, "record_failures"),
    "announcement": ("pipeline", "_announce"),
    "release of rows": ("store", "release_row_leases"),
}
ERRORS = [OperationalError, RuntimeError, SystemExit]


@pytest.mark.large("always", "database", "without savepoints", "plain batch")  # as others, mostly
@pytest.mark.parametrize("times", [1, 100], ids=["once", "always"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("point", POINTS)
def test_of_a_group_in_which_a_step_fails(
    bench: Bench,
    work: Any,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    point: str,
    error: type[BaseException],
    times: int,
) -> None:
    if error is SystemExit and request.node.callspec.params["work"] == "coroutine":
        pytest.skip("ends the recorder's thread, and the worker with it")
    # Given a step of the way that fails
    owner, name = POINTS[point]
    places = {
        "store": bench.leases.runtime.store,
        "subscription": bench.subscription,
        "pipeline": bench.pipeline,
    }
    where = places.get(owner, owner)  # type: ignore[call-overload]
    step, left = getattr(where, name), [error("broken")] * times

    def breaks(*arguments: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return step(*arguments, **options)

    # On no machine has one that was admitted not begun in time: its lease in its row would be given
    # back meanwhile, and expire where that fails.
    monkeypatch.setattr(bench.leases.runtime.group_budget, "seconds", PATIENCE)
    definition = work(max_attempts=5)
    for number in range(COUNT):
        definition.enqueue(job=f"{'fails' if number == 1 else 'returns'} {number}")
    deliveries = bench.poll()
    # When
    with monkeypatch.context() as patch:
        patch.setattr(where, name, breaks)
        with suppress(error):
            bench.run(deliveries)
    # Then
    assert not bench.owned()
    assert not leases()
    # And all run to their end once that is over
    bench.stopping.waits = 0
    bench.run(_unsettled(deliveries))
    make_everything_due()
    bench.run_until_done()
    assert {name for name in entries() if name.startswith("returns")} == {"returns 0", "returns 2"}
    assert not leases()


def test_of_a_slot_that_was_taken_after_the_claim_was_not_even_asked_for(
    bench: Bench, transport: str, forgotten_definitions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coordination answers again between the claim and the question for a slot."""
    claim, breaker = bench.leases.claim, bench.leases._breaker

    def claims_while_away(*arguments: Any) -> list[Claim]:
        with monkeypatch.context() as patch:
            patch.setattr(breaker, "is_open", lambda: True)
            return claim(*arguments)

    monkeypatch.setattr(bench.leases, "claim", claims_while_away)
    ran: list[str] = []

    @job(name="bench.slots", queue="ledger", concurrency=1)
    def limited(job: str) -> None:
        ran.append(job)

    limited.enqueue(job="a")
    assert bench.run() == []
    assert ran == ["a"]
    assert not bench.leases._slots
    assert not list(get_coordination().names("SLOT:"))


def test_an_attempt_that_is_recorded_later_leaves_no_count_of_the_crash_before_it(
    bench: Bench, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt was taken for one that a worker had died with."""
    # Given a job that a worker has died with, and whose failure cannot be recorded
    work(max_attempts=9).enqueue(job="fails")
    deliveries = bench.poll()
    let_die_with(deliveries)
    with monkeypatch.context() as patch:
        patch.setattr(failures, "record_failures", raising)
        assert bench.run(deliveries) == deliveries
    # When it is recorded
    bench.stopping.waits = 0
    assert bench.run(deliveries) == []
    attempts = Job.objects.get().attempts
    # Then the next attempt is one more
    make_everything_due()
    bench.run()
    assert Job.objects.get().attempts == attempts + 1
    assert not leases()


def test_of_what_is_settled_beside_what_cannot_be_acknowledged(
    bench: Bench, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A durable outcome was kept like one that has begun and has none."""

    class Exits(Silent):
        def acknowledge(self, records: Any) -> None:
            raise SystemExit

    definition = work()
    for number in range(2):
        definition.enqueue(job=str(number))
    first, second = bench.poll()
    second.subscription = Exits()
    monkeypatch.setattr(get_coordination(), "releases_within", None, raising=False)
    if first.mode is Mode.CONCURRENT:
        return  # the thread that would meet it is the recorder's
    with suppress(SystemExit):
        bench.run([first, second])
    assert not bench.owned()
    assert counted([first]) == [1]


def test_of_a_thread_that_was_given_up_and_of_coroutines_that_run_nothing_is_taken(
    bench: Bench, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their owner is another thread by now."""
    work().enqueue_many([{"job": "a"}, {"job": "b"}])
    deliveries = bench.poll()

    def ends(error: BaseException) -> Callable[..., Any]:
        def run(group: Any, running: Departed) -> Any:
            bench.leases.claim(group)
            running.update(group[:1])
            raise error

        return run

    with monkeypatch.context() as patch, suppress(RunAbandoned):
        patch.setattr(bench.pipeline, "_run_once", ends(RunAbandoned()))
        bench.pipeline.run(deliveries, Departed())
    assert set(bench.leases.owned) == set(deliveries)
    with monkeypatch.context() as patch, suppress(SystemExit):
        patch.setattr(bench.pipeline, "_run_once", ends(SystemExit()))
        bench.pipeline.run(deliveries, Departed())
    assert set(bench.leases.owned) == {deliveries[0]}
    assert not bench.leases.owned[deliveries[0]].is_spent
    bench.leases.give_back(deliveries)


def test_a_row_is_another_lanes_only_once_its_lease_is_given_back(
    bench: Bench, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token is the same: that lane's lease was taken out of the row while its handler ran."""
    as_job(lambda job: None, name="bench.outside", atomic=False).enqueue(job="a")
    (delivery,) = bench.poll()
    copy = bench.read(delivery.record)
    rows = admission.load_rows(bench.leases.runtime, [delivery])[1]
    assert bench.leases.lease_rows(rows) == {delivery}
    store, answers = bench.leases.runtime.store, []
    release = store.release_row_leases

    def meanwhile(ids: Any, token: str) -> None:
        release(ids, token)
        answers.append(bench.leases.lease_rows({copy: rows[delivery]}))

    with monkeypatch.context() as patch:
        patch.setattr(store, "release_row_leases", meanwhile)
        bench.leases.give_back([delivery])
    assert answers == [set()]
    assert not bench.owned()


on_the_database = pytest.mark.parametrize("transport", ["database"], indirect=True)


@on_the_database
def test_two_records_of_one_message_without_a_job_do_not_run_beside_each_other(
    bench: Bench, transport: str, another: Bench
) -> None:
    """As of an event that is replayed while it runs, outside a transaction: no row and no marker
    keeps the second one away."""
    ran: list[str] = []

    def outside(job: str) -> None:
        # When the second one comes up while the first one runs
        ran.append(job)
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(another.pipeline.run, [copy]).result() == [copy]

    # Given two records of a message that nobody enqueued here
    as_job(outside, name="bench.outside", atomic=False)
    headers = {"kjo-id": b"foreign-1", "kjo-type": b"bench.outside"}
    record = OutgoingRecord(bench.queue.topic, b'{"job": "a"}', headers=headers)
    bench.transport.publish([record, record])
    (first,), (copy,) = bench.poll(1), another.poll(1)
    assert bench.run([first]) == []
    # Then
    assert ran == ["a"]


@on_the_database
def test_what_ends_when_its_consumer_is_closed_is_acknowledged(
    bench: Bench, transport: str, another: Bench
) -> None:
    """Its poller starts over after an error, and what it has begun goes on."""
    as_job(lambda job: bench.subscription.close(), name="bench.closes").enqueue(job="a")
    assert bench.run() == []
    assert another.poll() == []
    assert bench.lag() == 0


# --- What counts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SystemExit, RuntimeError])
def test_a_failure_that_could_not_be_recorded_counts_once_whatever_ends_its_run(
    bench: Bench, transport: str, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """It was recorded later, and its claim counted as an attempt without an ending besides."""
    # Given
    as_job(failing, name="bench.fails", max_attempts=9).enqueue(job="a")
    deliveries = bench.poll()
    with monkeypatch.context() as patch, suppress(SystemExit):
        bench.stopping.waits = 1  # an outage is not waited for
        patch.setattr(failures, "record_failures", raising)
        patch.setattr(bench.pipeline.limiter, "keep_places", raiser(error))
        bench.run(deliveries)
    assert deliveries[0].attempt is not None
    # When
    bench.stopping.waits = 0
    assert bench.run(deliveries) == []
    # Then
    assert Job.objects.get().attempts == 1
    make_everything_due()
    assert bench.run() == []
    assert Job.objects.get().attempts == 2


def test_what_was_put_off_does_not_count_where_others_of_its_group_meet_a_bug(
    bench: Bench, another: Bench, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a job that another worker has, and one whose outcome cannot be judged
    for name in ("theirs", "fails"):
        as_job(failing, name="bench.atomic", max_attempts=1).enqueue(job=name)
    theirs, guilty = deliveries = bench.poll()
    assert theirs.message is not None
    theirs_until = {"lease_expires_at": CLOCK.now() + timedelta(minutes=5)}
    rows = Job.objects.filter(pk=theirs.message.job_id)
    rows.update(lease_token=another.leases.token, **theirs_until)
    settle = bench.pipeline._settle

    def settle_others(attempts: Sequence[Attempt]) -> list[Delivery]:
        if any(attempt.delivery is guilty for attempt in attempts):
            raise RuntimeError("a bug")
        return settle(attempts)

    # When each is run alone
    with monkeypatch.context() as patch:
        patch.setattr(bench.pipeline, "_settle", settle_others)
        patch.setattr(bench.pipeline, "_run_in_transaction", raiser(RuntimeError))
        left = bench.pipeline.run(deliveries)
    # Then
    assert set(left) == {theirs, guilty}
    assert counted(deliveries) == [1, 2]


@pytest.mark.parametrize("error", [SystemExit, RuntimeError])
def test_a_thread_that_was_given_up_lets_nothing_count_that_another_has(
    bench: Bench, transport: str, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    as_job(write, name="bench.atomic").enqueue(job="a")
    deliveries = bench.poll()

    def given_up(*arguments: Any) -> None:
        bench.watch.abandon(threading.get_ident())
        bench.leases.claim(deliveries)  # as another lane does meanwhile
        raise error

    with monkeypatch.context() as patch, suppress(SystemExit):
        patch.setattr(bench.pipeline, "_run_once", given_up)
        try:
            bench.pipeline.run(deliveries)
        finally:
            bench.watch.forget(threading.get_ident())
    assert not bench.leases.owned[deliveries[0]].is_spent
    bench.leases.give_back(deliveries)


def test_a_coroutine_counts_whose_settling_ends_the_recorder(
    bench: Bench, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(job: str) -> None: ...

    as_job(run, name="bench.coroutine", atomic=False).enqueue(job="a")
    deliveries = bench.poll()
    bench.leases.claim(deliveries)
    attempts = [Attempt(each) for each in deliveries]
    monkeypatch.setattr(bench.pipeline, "_settle", raiser(SystemExit))
    with suppress(SystemExit):
        bench.pipeline._settle_coroutines(lambda *_: None, attempts)
    assert counted(deliveries) == [2]


def test_a_handler_that_hangs_counts_where_it_cannot_be_judged(
    bench: Bench, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_job(write, name="bench.atomic").enqueue_many([{"job": "hangs"}, {"job": "waits"}])
    deliveries = bench.poll()
    bench.leases.claim(deliveries)
    context: Any = None  # nothing comes so far as to look at it
    with monkeypatch.context() as patch, suppress(OperationalError):
        patch.setattr(admission, "load_rows", raising)
        bench.pipeline.abandon(deliveries, [(context, 9.0, deliveries[0])])
    assert not bench.leases.owned
    assert counted(deliveries) == [2, 1]


def test_a_claim_that_is_not_answered_forgets_no_death(
    bench: Bench, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a job whose worker has died
    as_job(write, name="bench.atomic").enqueue(job="a")
    deliveries = bench.poll()
    let_die_with(deliveries)
    assert [claim.deliveries for claim in bench.leases.claim(deliveries)] == [2]
    # When its group is admitted anew, and coordination has gone away
    with monkeypatch.context() as patch:
        patch.setattr(get_coordination(), "claim", raiser(CoordinationError))
        bench.leases.claim(deliveries)
    bench.leases.give_back(deliveries)
    # Then
    assert counted(deliveries) == [2]


# --- A thread that is given up --------------------------------------------------------------------


@pytest.mark.parametrize("when", ["the recorder settles it", "it waits", "the thread is back"])
def test_what_ended_before_a_handler_hung_does_not_run_again(
    bench: Bench, transport: str, settings: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """All of its group was given back, with what was just being recorded."""
    is_recorders = when == "the recorder settles it"
    settings.KJO = {**settings.KJO, "GROUP_BUDGET": 0.2 if is_recorders else 3600.0}
    monkeypatch.setattr(recorder, "UNRECORDED", 0.9)
    worker = Bench(worker="hangs")  # with this budget
    ran, left = list[str](), list[Delivery]()
    hangs, ends, asked, answers, waits = (threading.Event() for _ in range(5))

    def work(job: str) -> None:
        ran.append(job)
        if job == "hangs":
            hangs.set()
            ends.wait(PATIENCE)

    record, settle = recorder.record_completions, EndedQueue.settle

    def record_slowly(*arguments: Any, **options: Any) -> None:
        if threading.current_thread().name == "kjo-recorder":
            asked.set()
            answers.wait(PATIENCE)
        record(*arguments, **options)

    def settle_and_say(queue: EndedQueue, **options: Any) -> None:
        if threading.current_thread().name == "next":
            waits.set()
        settle(queue, **options)

    monkeypatch.setattr(recorder, "record_completions", record_slowly)
    monkeypatch.setattr(EndedQueue, "settle", settle_and_say)
    definition = as_job(work, name="bench.outside", atomic=False)
    definition.enqueue_many([{"job": "first"}, {"job": "hangs"}])
    deliveries = worker.poll()

    def run() -> None:
        try:
            with suppress(RunAbandoned):
                worker.pipeline.run(deliveries)
        finally:
            worker.watch.forget(threading.get_ident())

    def abandon() -> None:
        left.extend(worker.pipeline.abandon(deliveries, []))

    lane = in_thread(run, "lane")
    try:
        # Given a group of which one handler has run, and another one hangs
        assert hangs.wait(PATIENCE)
        assert not is_recorders or asked.wait(PATIENCE)
        # When its thread is given up
        assert lane.ident is not None
        worker.watch.abandon(lane.ident)
        if when == "the thread is back":
            ends.set()
            lane.join(PATIENCE)
        next_lane = in_thread(abandon, "next")
        wait_until(lambda: waits.is_set() or not next_lane.is_alive())
        answers.set()
        next_lane.join(PATIENCE)
        # Then only the other one runs again
        assert left == deliveries[1:]
        ends.set()
        assert worker.pipeline.run(left) == []
    finally:
        for event in (answers, ends):
            event.set()
        lane.join(PATIENCE)
        worker.close()
    assert ran == ["first", "hangs", "hangs"]
    assert not worker.owned()
    assert not worker.pipeline._ended
    assert [job.attempts for job in Job.objects.order_by("created_at")] == [1, 1]


def test_a_thread_that_was_given_up_does_not_go_on_after_an_outage(
    bench: Bench, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own session is closed; its group is another thread's."""
    as_job(write, name="bench.plain", atomic=False).enqueue(job="a")
    deliveries, errors = bench.poll(), [OperationalError("closed")]

    def given_up(*arguments: Any) -> list[Delivery]:
        bench.watch.abandon(threading.get_ident())
        bench.leases.claim(deliveries)  # as another lane does meanwhile
        if errors:
            raise errors.pop()
        return []

    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)
    with monkeypatch.context() as patch, pytest.raises(RunAbandoned):
        patch.setattr(bench.pipeline, "_run_once", given_up)
        try:
            bench.pipeline.run(deliveries)
        finally:
            bench.watch.forget(threading.get_ident())
    assert set(bench.leases.owned) == set(deliveries)
    bench.leases.give_back(deliveries)


def test_after_an_outage_jobs_run_that_had_been_leased_before_it(
    bench: Bench, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows were taken for another delivery's, and they waited."""
    as_job(write, name="bench.plain", atomic=False).enqueue_many([{"job": "a"}, {"job": "b"}])
    run, errors = bench.pipeline._lane.run_leased, [OperationalError("away")]

    def run_later(*arguments: Any) -> None:
        if errors:
            raise errors.pop()
        run(*arguments)

    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)
    monkeypatch.setattr(bench.pipeline._lane, "run_leased", run_later)
    assert bench.run() == []
    assert entries() == {"a": 1, "b": 1}


def test_a_slot_that_is_given_back_releases_the_next_in_line(
    bench: Bench, transport: str, forgotten_definitions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two jobs that share a slot, of which one has it and the other waits
    @job(name="bench.slots", queue="ledger", concurrency=1, atomic=False, max_attempts=9)
    def limited(job: str) -> None: ...

    limited.enqueue_many([{"job": "a"}, {"job": "b"}])
    # When the run of the first breaks off
    with monkeypatch.context() as patch, suppress(SystemExit):
        patch.setattr(recorder, "record_completions", raiser(SystemExit))
        bench.run()
    bench.advance_lines()
    # Then the other one is released
    assert not bench.leases.freed
    assert not bench.owned()
    assert not Job.objects.filter(state="waiting").exists()


# --- What raises while it is given back -----------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
@pytest.mark.parametrize("run", ["returns", "fails"])
def test_a_release_that_raises_keeps_no_lease(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    run: str,
    error: type[BaseException],
) -> None:
    function = failing if run == "fails" else write
    as_job(function, name="bench.plain", atomic=False).enqueue(job="a")
    deliveries = bench.poll()
    release, errors = get_coordination().release, [error()]

    def raise_once(*arguments: Any, **options: Any) -> None:
        if errors:
            raise errors.pop()
        release(*arguments, **options)

    with monkeypatch.context() as patch, suppress(error):
        patch.setattr(get_coordination(), "release", raise_once)
        bench.pipeline.run(deliveries, Departed())
    assert not errors
    assert not bench.owned()


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_row_whose_release_raises_is_renewed_no_longer(
    bench: Bench, transport: str, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    as_job(write, name="bench.plain", atomic=False).enqueue(job="a")
    deliveries = bench.poll()
    with monkeypatch.context() as patch, suppress(error):
        patch.setattr(recorder, "record_completions", raiser(error))
        patch.setattr(bench.leases.runtime.store, "release_row_leases", raiser(error))
        bench.pipeline.run(deliveries, Departed())
    assert not bench.owned()


def test_of_several_releases_one_that_raises_keeps_no_other_from_its_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two claims, of which one is spent: they are released in different ways
    as_job(write, name="bench.atomic").enqueue_many([{"job": "a"}, {"job": "b"}])
    deliveries = bench.poll()
    bench.leases.claim(deliveries)
    bench.leases.spend(deliveries[1:])
    errors = [RuntimeError()]

    def raise_once(*arguments: Any, **options: Any) -> None:
        if errors:
            raise errors.pop()

    with monkeypatch.context() as patch, suppress(RuntimeError):
        patch.setattr(get_coordination(), "release", raise_once)
        bench.leases.give_back(deliveries)
    assert not errors
    assert not bench.owned()


@pytest.mark.parametrize("transport", ["database"], indirect=True)
@pytest.mark.parametrize("error", [OperationalError, RuntimeError, SystemExit])
def test_a_record_that_cannot_be_ended_is_not_begun_twice(
    bench: Bench,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    # Given a job that is put off, while the database refuses to say so in its message's row
    as_job(write, name="bench.plain", atomic=False).enqueue(job="a")
    deliveries = bench.poll()
    with monkeypatch.context() as patch, suppress(error):
        patch.setattr(admission, "admit_group", raiser(OperationalError))
        patch.setattr(bench.subscription, "end", raiser(error))
        bench.pipeline.run(deliveries, set())
    assert not bench.owned()
    assert counted(deliveries) == [2]
    # When it runs after all
    bench.stopping.waits = 0
    assert bench.run(deliveries) == []
    # Then it had been begun once
    assert Job.objects.get().attempts == 1
    assert entries() == {"a": 1}


def counted(deliveries: Sequence[Delivery]) -> list[int]:
    """Return which claim of each delivery the next one is."""
    return [next_delivery(delivery) for delivery in deliveries]


def in_thread(function: Callable[[], None], name: str) -> threading.Thread:
    """Call a function in a thread of this name."""

    def call() -> None:
        try:
            function()
        finally:
            connections.close_all()

    thread = threading.Thread(target=call, name=name)
    thread.start()
    return thread


def write(job: str) -> None:
    Entry.objects.create(job=job)


def failing(job: str) -> None:
    raise Refused(job)


def raiser(error: type[BaseException]) -> Callable[..., Any]:
    """Return a function that raises that, whatever it is called with."""

    def raise_it(*arguments: Any, **options: Any) -> None:
        raise error

    return raise_it


def raising(*arguments: Any, **options: Any) -> None:
    raise OperationalError("away")


def _unsettled(deliveries: Sequence[Delivery]) -> list[Delivery]:
    return [delivery for delivery in deliveries if not delivery.is_settled]
