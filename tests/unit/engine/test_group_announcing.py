"""What a group has committed is announced once, whatever happens to the rest of the group."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from django.db import OperationalError

from kjo_django.engine import failures
from kjo_django.engine.attempt import Ending
from kjo_django.engine.group import send_signals
from kjo_django.models import Job, JobFailure
from kjo_django.runtime import get_coordination
from kjo_django.store import store_for
from tests.items.models import Item, Run
from tests.unit.deliveries import Bench, as_job, make_everything_due, states
from tests.unit.engine.bench import both, reconfigured, settled
from tests.unit.patterns.items.made import consumer, send

KINDS = {
    "a transaction": {},
    "a transaction without savepoints": {"database_only": True},
    "outside a transaction": {"atomic": False},
    "a batch": {"batch": 10},
}


@pytest.fixture
def bench(settings, bench):
    """A worker that records a group's endings together, however slow the machine is."""
    made = reconfigured(settings, bench, GROUP_BUDGET=600)
    yield made
    made.close()


@pytest.fixture
def announced(bench, monkeypatch, hear):
    """The facts of job_completed and job_retried, as a worker sends them."""
    monkeypatch.setattr(bench.pipeline, "_listeners", [bench.outcomes.extend, send_signals])
    return hear("job_completed", "job_retried")


def told(announced) -> list[tuple[str, object]]:
    return [(each["signal"].removeprefix("job_"), each.get("result")) for each in announced]


def a_group_whose_second_fails(options, calls):
    """Three jobs, of which the second raises; each call is noted."""

    def one(number):
        calls.append(number)
        if number == 1:
            raise RuntimeError("it broke")
        return number

    def several(items):
        for item in items:
            calls.append(item.payload["number"])
            if item.payload["number"] == 1:
                item.fail(RuntimeError("it broke"))
        return [item.payload["number"] for item in items]

    job = as_job(several if options.get("batch") else one, "bench.second_fails", **options)
    job.enqueue_many([{"number": number} for number in range(3)])


@both
@pytest.mark.parametrize("kind", KINDS)
def test_an_outage_while_a_failure_is_recorded_costs_no_completion_its_signal(
    bench, transport, announced, monkeypatch, failing, kind
):
    # Given
    calls = []
    a_group_whose_second_fails(KINDS[kind], calls)
    failing(failures, "record_failures", OperationalError("gone"))
    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)
    # When
    deferred = bench.run()
    # Then
    assert deferred == []
    assert sorted(told(announced), key=str) == [
        ("completed", 0),
        ("completed", 2),
        ("retried", None),
    ]
    assert states() == ["completed", "failing", "completed"]
    assert sorted(map(str, bench.results)) == sorted(
        map(str, [Ending.COMPLETED, Ending.COMPLETED, Ending.RETRIED])
    )
    # And nothing ran because of it again
    assert max(calls.count(number) for number in range(3)) <= (2 if "without" in kind else 1)
    assert JobFailure.objects.count() == 1
    assert settled(bench)


@both
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_stops_in_the_outage_hands_back_the_failure_alone(
    bench, transport, announced, failing, kind
):
    # Given
    calls = []
    a_group_whose_second_fails(KINDS[kind], calls)
    deliveries = bench.poll()
    failing(failures, "record_failures", *[OperationalError("gone")] * 2)
    # When: it stops, and tries only once more
    deferred = bench.run(deliveries)
    # Then
    assert deferred == [deliveries[1]]
    assert told(announced) == [("completed", 0), ("completed", 2)]
    # And the failure is recorded as it was, should the record come up here again
    ran = len(calls)
    bench.run(deferred)
    assert (len(calls), JobFailure.objects.count()) == (ran, 1)
    assert told(announced)[2:] == [("retried", None)]
    assert (bench.lag(), list(get_coordination().names("CONS:"))) == (0, [])


def commits_without_an_answer(monkeypatch, is_lost):
    """The connection breaks once, after a COMMIT by which ``is_lost()`` came to hold."""
    store = type(store_for("default"))
    original, left = store.transaction, [OperationalError("server closed the connection")]

    @contextmanager
    def without_an_answer(self, **options):
        with original(self, **options):
            yield
        if left and is_lost():
            raise left.pop()

    monkeypatch.setattr(store, "transaction", without_an_answer)
    return left


@both
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("options", [{}, {"atomic": False}], ids=str)
def test_a_commit_without_an_answer_is_announced_like_any_other(
    bench, announced, monkeypatch, count, options
):
    """The connection broke after the server had committed."""
    # Given
    # Not the transaction that takes row leases: its effect is not a job's.
    left = commits_without_an_answer(
        monkeypatch, lambda: Job.objects.filter(state="completed").exists()
    )
    ran = []
    job = as_job(lambda number: ran.append(number) or number, "bench.note", **options)
    job.enqueue_many([{"number": number} for number in range(count)])
    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)
    # When
    bench.run()
    # Then
    assert left == []
    assert ran == list(range(count))
    assert told(announced) == [("completed", number) for number in range(count)]
    assert settled(bench)


@both
@pytest.mark.parametrize("is_foreign", [False, True], ids=["a job", "a message"])
def test_a_failure_whose_commit_had_no_answer_is_announced_and_recorded_once(
    bench, announced, monkeypatch, is_foreign
):
    """Found by the fault matrix: its second recording found the row changed, by itself, or made the
    message a second row."""
    # Given
    a_group_whose_second_fails({}, [])
    if is_foreign:
        Job.objects.all().delete()
        for number in range(3):
            named = {"kjo_id": f"foreign-{number}", "kjo_type": "bench.second_fails"}
            bench.publish(b'{"number": %d}' % number, **named)
    left = commits_without_an_answer(monkeypatch, JobFailure.objects.exists)
    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)
    # When
    bench.run()
    # Then
    assert left == []
    assert sorted(told(announced), key=str) == [
        ("completed", 0),
        ("completed", 2),
        ("retried", None),
    ]
    assert JobFailure.objects.count() == 1
    assert Job.objects.filter(state="failing").count() == 1
    assert settled(bench)


@both
@pytest.mark.parametrize("count", [1, 3])
def test_items_whose_commit_had_no_answer_are_not_tried_again(
    transport, forgotten_definitions, monkeypatch, count
):
    """One alone in its group was retried although it was done: since its handler judges itself what
    there is to do, its marker was not looked up."""
    # Given
    made = consumer()
    bench = Bench("made")
    created = [Item.objects.create() for _ in range(count)]
    items = [str(item.pk) for item in created]
    send(*created)
    left = commits_without_an_answer(monkeypatch, Run.objects.filter(item=items[0]).exists)
    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)
    # When
    bench.run()
    # Then
    assert left == []
    assert made.calls == items
    assert made.told == [("success", item) for item in items]
    assert bench.results == [Ending.COMPLETED] * count
    assert JobFailure.objects.count() == 0
    assert settled(bench)
    bench.close()


@both
@pytest.mark.parametrize("count", [1, 3])
def test_retried_items_whose_commit_had_no_answer_are_announced(
    transport, forgotten_definitions, monkeypatch, count
):
    """Their jobs have rows by then, which say that they are completed; a handler that judges itself
    was never told that this was its own doing."""

    # Given items whose first attempt has failed
    def fails_at_first(self, message):
        if self.calls.count(message["id"]) == 1:
            raise LookupError("not yet")

    made = consumer(fails_at_first)
    bench = Bench("made")
    created = [Item.objects.create() for _ in range(count)]
    items = [str(item.pk) for item in created]
    send(*created)
    bench.run()
    assert bench.results == [Ending.RETRIED] * count
    make_everything_due()
    # When the COMMIT of their second has no answer
    left = commits_without_an_answer(monkeypatch, Run.objects.filter(item=items[0]).exists)
    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)
    bench.run()
    # Then each is announced, and none runs again
    assert left == []
    assert sorted(made.calls) == sorted(items * 2)
    assert sorted(made.told) == sorted(("success", item) for item in items)
    assert bench.results[count:] == [Ending.COMPLETED] * count
    assert settled(bench)
    bench.close()


def test_a_listener_that_raises_keeps_no_record_from_its_acknowledgement(bench, monkeypatch):
    def broken(outcomes):
        raise LookupError("a bug of ours")

    monkeypatch.setattr(bench.pipeline, "_listeners", [broken])
    as_job(lambda: None, "bench.pass").enqueue_many([{}] * 2)
    assert bench.run() == []
    assert states() == ["completed"] * 2
    assert settled(bench)


def test_an_acknowledgement_that_raises_is_made_again_and_nothing_announced_twice(
    bench, announced, monkeypatch
):
    # Given
    as_job(lambda: 7, "bench.seven").enqueue()
    deliveries = bench.poll()

    def away(records):
        raise OSError("away")

    # When
    with monkeypatch.context() as patch:
        patch.setattr(bench.subscription, "acknowledge", away)
        deferred = bench.run(deliveries)
    # Then
    assert deferred == deliveries
    assert told(announced) == [("completed", 7)]
    # And
    assert bench.run(deferred) == []
    assert told(announced) == [("completed", 7)]
    assert settled(bench)
