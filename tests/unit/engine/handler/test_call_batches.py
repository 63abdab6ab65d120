"""Batch handlers: one call for several jobs, with every promise kept for each of them."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from kjo_django import PermanentError, job, registry
from kjo_django.engine.attempt import Attempt
from kjo_django.engine.handler.call import in_steps
from kjo_django.engine.handler.context import Abort
from kjo_django.engine.scheduler import GroupScheduler
from kjo_django.exceptions import JobCancelledError, RateLimitExceededError
from kjo_django.models import DeadLetter, EventKey, Job, JobFailure, ProcessedEvent
from kjo_django.operations.jobs import cancel_one
from kjo_django.round_trips import GroupBudget
from kjo_django.testing import drain, perform
from tests.ledger.models import Entry
from tests.unit.deliveries import as_job, entries, statements, states
from tests.unit.engine.test_scheduler import delivery

both = pytest.mark.usefixtures("real_database")
EVERY_WAY = pytest.mark.parametrize("is_atomic", [True, False], ids=["atomic", "outside"])


def names(count: int) -> list[dict[str, object]]:
    return [{"job": str(number)} for number in range(count)]


class Index:
    """A handler that writes its batch in one go and remembers what it was given."""

    def __init__(self, *, size: int = 10, is_async: bool = False, **options) -> None:
        self.calls: list[list[str]] = []
        self.items: list = []
        function = self.aindex if is_async else self.index
        self.definition = as_job(function, "index", batch=size, **options)

    def index(self, batch):
        Entry.objects.bulk_create(self.note(batch))
        return self.answer(batch)

    async def aindex(self, batch):
        await Entry.objects.abulk_create(self.note(batch))
        return self.answer(batch)

    def note(self, batch) -> list[Entry]:
        self.calls.append([item.payload["job"] for item in batch])
        self.items += batch
        return [Entry(job=name) for name in self.calls[-1]]

    def answer(self, batch):
        return None


# --- Success --------------------------------------------------------------------------------------


@both
@EVERY_WAY
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_one_call_completes_each_job(bench, transport, is_atomic, is_async):
    # Given
    index = Index(is_async=is_async, atomic=is_atomic)
    index.answer = lambda batch: [f"did {item.payload['job']}" for item in batch]
    answers = index.definition.enqueue_many(names(25))
    # When
    deferred = bench.run()
    # Then
    assert deferred == []
    assert sorted(map(len, index.calls)) == [5, 10, 10]
    assert entries() == {str(number): 1 for number in range(25)}
    jobs = Job.objects.in_bulk([answer.job_id for answer in answers])
    for number, answer in enumerate(answers):
        one = jobs[answer.job_id]
        assert (one.state, one.attempts) == ("completed", 1)
        assert bytes(one.result) == b'{"v":"did %d"}' % number
    assert ProcessedEvent.objects.count() == 25
    assert {item.idempotency_key for item in index.items} == {str(a.job_id) for a in answers}
    assert bench.lag() == 0


def test_a_batch_costs_no_more_queries_than_one_job(standing_clock, bench):
    index = Index(size=100)

    def queries_of(count: int) -> int:
        index.definition.enqueue_many(names(count))
        deliveries = bench.poll()
        with statements() as executed:
            bench.run(deliveries)
        return len(executed)

    queries_of(1)
    assert queries_of(2) == queries_of(80)


def test_other_handlers_of_the_group_run_in_their_own_way(bench):
    index = Index()

    def write(job):
        Entry.objects.create(job=job)

    single = as_job(write)
    index.definition.enqueue(job="a")
    single.enqueue(job="b")
    index.definition.enqueue(job="c")
    bench.run()
    assert index.calls == [["a", "c"]]
    assert entries() == {"a": 1, "b": 1, "c": 1}


# --- Failure of items -----------------------------------------------------------------------------


@both
@EVERY_WAY
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_items_end_as_the_handler_says_of_each(bench, transport, is_atomic, is_async):
    # Given
    index = Index(is_async=is_async, atomic=is_atomic)

    def answer(batch):
        for item in batch:
            if item.attempt == 1:
                match item.payload["job"]:
                    case "1":
                        item.fail(RuntimeError("not this one"))
                    case "2":
                        item.fail(PermanentError("never"))
                    case "3":
                        item.retry("later", delay=timedelta(hours=1))
        return None

    index.answer = answer
    index.definition.enqueue_many(names(5))
    # When
    bench.run()
    # Then
    assert len(index.calls) == 1
    assert states() == ["completed", "failing", "failed", "failing", "completed"]
    assert list(Job.objects.order_by("id").values_list("attempts", flat=True)) == [1] * 5
    assert JobFailure.objects.count() == 3
    assert DeadLetter.objects.get().error_type.endswith("PermanentError")
    assert Job.objects.order_by("id")[3].available_at > timezone.now() + timedelta(minutes=30)
    # And their next attempt is theirs alone
    bench.run_until_done()
    assert states() == ["completed", "completed", "failed", "completed", "completed"]
    assert set(index.calls[1]) == {"1", "3"}


class Mute(Exception):
    """Such as one about a model's instance that cannot name itself."""

    def __str__(self):
        raise AttributeError("customer")

    __repr__ = __str__


@both
@EVERY_WAY
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_what_a_batch_raises_is_the_failure_of_the_guilty_alone(bench, is_atomic, is_async):
    # Given
    index = Index(is_async=is_async, atomic=is_atomic, max_attempts=2)

    def answer(batch):
        for item in batch:
            if item.payload["job"] == "3":
                raise RuntimeError("poison")

    index.answer = answer
    index.definition.enqueue_many(names(6))
    # When
    bench.run()
    # Then: each ran again alone, in its first attempt
    assert [len(call) for call in index.calls] == [6, 1, 1, 1, 1, 1, 1]
    assert {item.attempt for item in index.items} == {1}
    assert states() == ["completed"] * 3 + ["failing"] + ["completed"] * 2
    if is_atomic:
        # What the batch and the guilty had written is undone.
        assert entries() == dict.fromkeys("01245", 1)
    # And only the guilty one dies
    bench.run_until_done()
    assert DeadLetter.objects.count() == 1
    assert Job.objects.filter(state="completed").count() == 5


@both
def test_writes_of_an_item_that_fails_in_its_own_block_are_undone(bench):
    def carefully(batch):
        for item in batch:
            try:
                with transaction.atomic():
                    Entry.objects.create(job=item.payload["job"])
                    if item.payload["job"] == "1":
                        raise RuntimeError
            except RuntimeError as error:
                item.fail(error)

    as_job(carefully, batch=10).enqueue_many(names(3))
    bench.run()
    assert entries() == {"0": 1, "2": 1}
    assert states() == ["completed", "failing", "completed"]


@EVERY_WAY
@pytest.mark.parametrize(
    "wrong", [[1], [1, 2, 3, 4], "ab", {"a": 1}, 7, [1, object()]], ids=lambda w: type(w).__name__
)
def test_answers_that_are_none_per_item_fail_and_say_so(bench, is_atomic, wrong):
    # Given an answer that fits neither a batch of two nor its items alone
    index = Index(atomic=is_atomic)
    index.answer = lambda batch: wrong if len(batch) == 2 else []
    index.definition.enqueue_many(names(2))
    # When
    bench.run()
    # Then
    assert states() == ["failed", "failed"]
    assert "one result for each of its 1 items, not 0" in Job.objects.first().error
    if is_atomic:
        assert not entries()


def test_an_item_that_cannot_be_read_never_reaches_the_handler(bench):
    # Given
    index = Index()
    index.definition.enqueue_many(names(3))
    deliveries = bench.poll()
    deliveries[1].message.payload = b"[no object"
    # When
    bench.run(deliveries)
    # Then
    assert index.calls == [["0", "2"]]
    assert states() == ["completed", "failed", "completed"]


@EVERY_WAY
def test_a_pausable_error_rests_the_others_and_spends_nothing_of_theirs(bench, settings, is_atomic):
    # Given
    index = Index(atomic=is_atomic)

    def answer(batch):
        raise RateLimitExceededError("slow down")

    index.answer = answer
    index.definition.enqueue_many(names(2))
    # When
    bench.run()
    # Then: each of the batch has met it; nothing completes, nothing is spent
    assert set(states()) == {"queued"}
    assert set(Job.objects.values_list("attempts", flat=True)) == {0}


# --- Who is in a batch ----------------------------------------------------------------------------


def test_cancelled_and_expired_jobs_never_reach_the_handler(bench):
    # Given
    index = Index()
    answers = index.definition.enqueue_many(names(2))
    index.definition.using(expires_at=timezone.now() - timedelta(seconds=1)).enqueue(job="late")
    deliveries = bench.poll()
    cancel_one(answers[0].job_id)
    # When
    bench.run(deliveries)
    # Then
    assert index.calls == [["1"]]
    assert states() == ["cancelled", "completed", "failed"]


@both
@EVERY_WAY
def test_two_records_of_one_message_are_one_item(bench, is_atomic):
    # Given
    index = Index(atomic=is_atomic)
    index.definition.enqueue_many(names(3))
    deliveries = bench.poll()
    again = [bench.read(deliveries[0].record), bench.read(deliveries[2].record)]
    # When: in one group, and once more afterwards
    bench.run([*deliveries, *again])
    bench.run([bench.read(deliveries[1].record)])
    # Then
    assert sorted(name for call in index.calls for name in call) == ["0", "1", "2"]
    assert entries() == {"0": 1, "1": 1, "2": 1}


def test_a_key_has_one_item_in_a_batch_and_keeps_its_order(bench):
    # Given
    index = Index(key="key")
    wanted = [("a", 1), ("a", 2), ("b", 1), ("a", 3), ("c", 1), ("b", 2)]
    index.definition.enqueue_many({"job": f"{key}{n}", "key": key} for key, n in wanted)
    # When
    bench.run()
    # Then
    assert index.calls == [["a1", "b1", "c1"], ["a2", "b2"], ["a3"]]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=60))
def test_steps_hold_everything_once_in_the_order_of_its_key(wanted):
    # Given deliveries of two handlers
    one, many = (
        registry.Handler(lambda batch: None, registry.HandlerOptions(name=str(size), batch=size))
        for size in (None, 4)
    )
    deliveries = [delivery(key, handler=many if is_many else one) for key, is_many in wanted]
    # When
    attempts = [
        Attempt(one, key=EventKey(str(number), "", "")) for number, one in enumerate(deliveries)
    ]
    steps = [[attempt.delivery for attempt in step] for step in in_steps(attempts)]
    # Then
    flat = [one for step in steps for one in step]
    assert sorted(map(id, flat)) == sorted(map(id, deliveries))
    for key in "abcdef":
        of_key = [one for one in deliveries if one.record.key == key.encode()]
        assert [one for one in flat if one.record.key == key.encode()] == of_key
    for step in steps:
        assert len({one.handler for one in step}) == 1
        assert len({one.shard for one in step}) == len(step)
        assert len(step) <= (step[0].batch or 1)


def lanes_of(count: int, **options) -> GroupScheduler:
    return GroupScheduler(count, **{"group_size": 5, "budget": GroupBudget(0.1), **options})


def slow_batches(size: int) -> registry.Handler:
    return registry.Handler(lambda batch: None, registry.HandlerOptions(name="b", batch=size))


def test_a_lane_takes_a_whole_batch_however_long_it_takes():
    # Given a handler nobody knows, and one known to be slow
    lanes, handler = lanes_of(4), slow_batches(20)
    for _ in range(2):
        lanes.put([delivery(None, handler=handler) for _ in range(30)])
        # When
        first, second = lanes.take(timeout=0), lanes.take(timeout=0)
        # Then
        assert [len(group.deliveries) for group in (first, second)] == [20, 10]
        lanes.finish(first)
        lanes.finish(second)
        lanes.measure("b", 5.0)


def test_a_lane_waits_for_no_batch_to_be_full():
    lanes, handler = lanes_of(1), slow_batches(100)
    lanes.put([delivery(None, handler=handler) for _ in range(3)])
    assert len(lanes.take(timeout=0).deliveries) == 3


def test_what_cannot_be_in_the_batch_is_not_taken_for_it():
    # Given one key with much to do, and another handler
    lanes, handler = lanes_of(1, group_size=50), slow_batches(20)
    lanes.put([delivery("a", handler=handler) for _ in range(30)])
    lanes.put([delivery(f"k{number}", handler=handler) for number in range(3)])
    lanes.put([delivery(f"s{number}") for number in range(3)])
    # When
    group = lanes.take(timeout=0)
    # Then
    assert [one.record.key for one in group.deliveries] == [b"a", b"k0", b"k1", b"k2"]


# --- Timeouts, cancellation, shutdown -------------------------------------------------------------


@EVERY_WAY
def test_a_batch_that_takes_too_long_runs_again_one_by_one(bench, is_atomic):
    # Given
    index = Index(atomic=is_atomic, timeout=timedelta(seconds=0.3))
    release = threading.Event()

    def answer(batch):
        if len(batch) > 1:
            assert not batch[0].aborted
            while not batch[0].cancel_event.wait(0.01):
                pass
            assert all(item.abort_reason is Abort.TIMEOUT for item in batch)
            release.wait(0)

    index.answer = answer
    index.definition.enqueue_many(names(2))
    # When
    bench.run()
    # Then
    assert [len(call) for call in index.calls] == [2, 1, 1]
    assert states() == ["completed", "completed"]


@EVERY_WAY
def test_a_cancelled_item_ends_and_the_others_go_on(bench, is_atomic):
    # Given
    index = Index(atomic=is_atomic)

    def answer(batch):
        if len(batch) > 1:
            batch[1].abort(Abort.CANCELLED)
        for item in batch:
            item.raise_if_aborted()

    index.answer = answer
    index.definition.enqueue_many(names(3))
    # When
    bench.run()
    # Then
    assert states() == ["completed", "cancelled", "completed"]
    assert index.calls[1:] == [["0"], ["2"]]


@EVERY_WAY
@pytest.mark.parametrize("error", [JobCancelledError, RuntimeError, Mute])
def test_a_shutdown_hands_back_all_with_their_attempts_unspent(bench, is_atomic, error):
    # Given
    index = Index(atomic=is_atomic)

    def answer(batch):
        bench.watch.abort_all()
        raise error("ended")

    index.answer = answer
    index.definition.enqueue_many(names(3))
    # When
    deferred = bench.run()
    # Then
    assert len(deferred) == 3
    assert len(index.calls) == 1
    assert list(Job.objects.values_list("attempts", flat=True)) == [0, 0, 0]


# --- Declaring and testing ------------------------------------------------------------------------


def test_a_batch_handler_takes_one_list():
    with pytest.raises(ImproperlyConfigured, match="takes one list"):
        job(name="wrong", batch=3)(lambda: None)
    with pytest.raises(ImproperlyConfigured, match="own context"):
        job(name="wrong", batch=3, takes_context=True)(lambda batch: None)
    for size in (0, -1, "3"):
        with pytest.raises(ValueError, match="batch"):
            job(name="wrong", batch=size)


def test_fail_takes_an_exception(bench):
    def wrong(batch):
        batch[0].fail("text")

    as_job(wrong, batch=2).enqueue(job="a")
    bench.run()
    assert "fail() takes an exception, not str" in Job.objects.get().error


def test_drain_gives_batches_and_perform_a_batch_of_one(bench):
    # Given
    index = Index(size=4, key="key")
    index.answer = lambda batch: [item.payload["job"] for item in batch]
    index.definition.enqueue_many(names(6))
    index.definition.enqueue_many([{"job": "k1", "key": "k"}, {"job": "k2", "key": "k"}])
    # When
    drained = drain()
    # Then
    assert [len(call) for call in index.calls] == [4, 3, 1]
    assert drained.completed == 8
    assert sorted(drained.results) == ["0", "1", "2", "3", "4", "5", "k1", "k2"]
    assert perform(index.definition, job="x") == "x"
