"""Steps that run in the worker that has released them, and steps that the relay publishes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from kjo_django import chain, group, job
from kjo_django.engine import direct_steps
from kjo_django.engine.attempt import Delivery
from kjo_django.engine.handler.context import JobContext
from kjo_django.exceptions import RateLimitExceededError
from kjo_django.models import DeadLetter, Job
from kjo_django.operations import workflows
from kjo_django.outbox.relay import Relay
from kjo_django.runtime import current_runtime, get_transport
from kjo_django.states import JobState
from kjo_django.worker import Worker
from tests.unit.deliveries import SetClock
from tests.unit.steps import KJO, MEMORY, Steps

pytestmark = pytest.mark.medium  # threads and waits of a worker, in real time

LEASE = 30.0
"""Seconds that a step is its worker's: the default of ``RECORD_LEASE``."""


@pytest.fixture(
    params=["sqlite_file", pytest.param("postgres", marks=pytest.mark.postgres)], autouse=True
)
def _store_and_relay(request: pytest.FixtureRequest, settings: Any) -> None:
    """Each store, with a transport that needs the relay."""
    request.getfixturevalue(request.param)
    settings.KJO = KJO | MEMORY
    transport: Any = get_transport()
    transport.clear()


class Stepped:
    """A worker without threads, and with a clock that a test sets on."""

    def __init__(self, *queues: str, lanes: int = 2) -> None:
        self.clock = SetClock()
        self.worker = Worker(
            queues or ("flows",),
            concurrency=lanes,
            owns_process=False,
            runtime=replace(current_runtime(), clock=self.clock),
        )
        self.worker.open()
        self.poll()

    def poll(self) -> None:
        """Read what is there."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kjo_django.engine.poller.POLL_TIMEOUT", 0.0)
            for poller in self.worker.pollers:
                poller.step()

    def relay(self) -> int:
        """Publish what is due; return how much that was."""
        return self.worker._relay.publish_due()

    def run(self, groups: int = 1) -> None:
        """Publish and read what is due, and run so many groups."""
        self.relay()
        self.poll()
        for _ in range(groups):
            assert self.lane()

    def lane(self) -> bool:
        """Run a group; return whether there was one."""
        return self.worker.lanes.run_group(0.0)

    @property
    def waiting(self) -> list[Delivery]:
        keys = self.worker.scheduler._keys.values()
        return [delivery for key in keys for delivery in key.waiting]

    def room(self, handler: str = "flows.note") -> int:
        return self.worker._direct_steps.room("flows", handler)

    def vanish(self) -> None:
        """Do as a worker that is killed: nothing is given back."""
        self.lose_partitions()
        self.worker._pipeline.close(1.0)
        self.worker._watch.stop()

    def lose_partitions(self) -> None:
        for poller in self.worker.pollers:
            subscription: Any = poller._subscription
            subscription.crash()

    def end(self) -> None:
        """Stop as a worker does whose threads have ended."""
        self.worker.scheduler.stop()
        for poller in self.worker.pollers:
            poller.close()
        self.worker._pipeline.close(1.0)
        self.worker._watch.stop()
        self.worker._direct_steps.close()
        self.worker._heartbeat.end_worker()


@contextmanager
def stepped(*queues: str, lanes: int = 2) -> Iterator[Stepped]:
    worker = Stepped(*queues, lanes=lanes)
    try:
        yield worker
    finally:
        worker.end()


def rows(**condition: Any) -> list[Job]:
    return list(Job.objects.filter(**condition).order_by("pk"))


def expire_leases() -> None:
    Job.objects.exclude(lease_token="").update(lease_expires_at=timezone.now())


def raising_once(steps: Steps, error: Exception) -> Callable[[], None]:
    """Return a handler whose first call raises."""

    def handler() -> None:
        steps.calls.append("called")
        if steps.calls.count("called") == 1:
            raise error

    return handler


# --- Handed over ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["note", "outside"])
def test_the_worker_runs_what_it_has_released_and_the_relay_publishes_the_first_step_alone(
    steps: Steps, kind: str
) -> None:
    # Given a chain whose first step is published
    chain(*(getattr(steps, kind).step(name=f"s{n}") for n in range(3))).enqueue()
    with stepped() as worker:
        assert worker.relay() == 1
        worker.run()
        # When the next one is released
        assert steps.calls == ["s0"]
        assert len(worker.waiting) == 1
        # Then nothing is left for a relay
        assert worker.relay() == 0
        # And the worker runs the rest
        assert worker.lane()
        assert worker.lane()
        assert not worker.lane()
    assert steps.calls == ["s0", "s1", "s2"]
    first, *others = rows()
    assert (first.state, first.topic) == (JobState.COMPLETED, "flows")
    for other in others:
        assert (other.state, other.attempts, other.lease_token) == (JobState.COMPLETED, 1, "")
        # And its row says that it was never published
        assert (other.topic, other.partition, other.offset) == ("", None, None)
        assert other.queued_at is None
        assert other.available_at <= other.started_at


@pytest.mark.parametrize("kind", ["note", "outside"])
def test_the_callback_of_a_group_is_handed_over(steps: Steps, kind: str) -> None:
    # Given a group whose members are published
    members = [steps.note.step(name=f"m{n}") for n in range(3)]
    group(members).then(getattr(steps, kind).step(name="end")).enqueue()
    with stepped() as worker:
        # When they have run
        worker.run()
        while len(steps.calls) < len(members):
            assert worker.lane()
        # Then the worker runs the callback, and nothing is left for a relay
        assert worker.relay() == 0
        assert worker.lane()
    assert steps.calls == ["m0", "m1", "m2", "end"]


def test_a_step_that_was_handed_over_knows_what_any_other_does(
    steps: Steps,
) -> None:
    # Given a step with a header
    contexts: list[Any] = []

    def tell(context: JobContext) -> None:
        contexts.append((context, context.log_fields, dict(context.headers), context.workflow))

    told = job(name="flows.tell", queue="flows", takes_context=True)(tell)
    headed = told.using(headers={"correlation-id": "c-1"}).step()
    chain(steps.note.step(name="a"), headed).enqueue()
    with stepped() as worker:
        worker.run(groups=2)
        counted = worker.worker.statistics.totals()
    # Then its context has them, and the log is not told of a partition
    ((context, fields, headers, workflow),) = contexts
    assert (context.attempt, context.handler, workflow is not None) == (1, "flows.tell", True)
    assert headers["correlation-id"] == "c-1"
    assert (fields["topic"], fields["partition"], fields["offset"]) == ("flows", None, None)
    # And the worker has counted it
    assert counted == (2, 0, 0)


def test_the_first_attempt_may_fail_and_the_next_one_is_published(steps: Steps) -> None:
    # Given a step that was handed over and fails
    failing = job(name="flows.failing", queue="flows", max_attempts=2)(
        raising_once(steps, ValueError("the first time"))
    )
    chain(steps.note.step(name="a"), failing.step()).enqueue()
    with stepped() as worker:
        worker.run(groups=2)
        (row,) = rows(handler="flows.failing")
        assert (row.state, row.attempts, row.lease_token) == (JobState.FAILING, 1, "")
        assert row.failures.count() == 1
        # When its back-off is over
        Job.objects.update(available_at=timezone.now())
        worker.run()
    # Then the relay has published it
    (row,) = rows(handler="flows.failing")
    assert (row.state, row.attempts, row.topic) == (JobState.COMPLETED, 2, "flows")


def test_a_dead_letter_of_a_step_that_was_handed_over_names_no_partition(steps: Steps) -> None:
    steps.failing.add("b")
    chain(steps.note.step(name="a"), steps.note.step(name="b")).enqueue()
    with stepped() as worker:
        worker.run(groups=2)
    letter = DeadLetter.objects.get()
    assert (letter.topic, letter.partition, letter.offset) == ("flows", None, None)
    assert rows()[1].state == JobState.FAILED


# --- What becomes of it when its worker does not run it -------------------------------------------


def test_the_step_of_a_worker_that_has_vanished_is_published_when_its_lease_expires(
    steps: Steps,
) -> None:
    # Given a worker that dies between the commit and the run of the next step
    chain(steps.note.step(name="a"), steps.note.step(name="b")).enqueue()
    dead = Stepped()
    dead.run()
    dead.vanish()
    with stepped() as other:
        # When another worker looks before the lease has expired
        assert other.relay() == 0
        assert rows()[1].lease_expires_at > timezone.now()
        # And afterwards
        expire_leases()
        other.run()
    # Then the step has run there, in its first attempt
    assert steps.calls == ["a", "b"]
    assert (rows()[1].attempts, rows()[1].topic) == (1, "flows")


def test_a_worker_that_stops_hands_back_at_once_what_it_has_not_begun(steps: Steps) -> None:
    # Given a step that was handed over
    chain(steps.note.step(name="a"), steps.note.step(name="b")).enqueue()
    with stepped() as worker:
        worker.run()
        assert rows()[1].lease_token
    # When its worker has stopped
    assert (rows()[1].lease_token, steps.calls) == ("", ["a"])
    with stepped() as other:
        other.run()
    # Then it runs elsewhere at once
    assert steps.calls == ["a", "b"]


@pytest.mark.parametrize("kind", ["note", "outside"])
def test_a_step_that_was_published_meanwhile_runs_once(steps: Steps, kind: str) -> None:
    # Given a frozen worker whose step the relay of another one has published
    chain(steps.note.step(name="a"), getattr(steps, kind).step(name="b")).enqueue()
    frozen = Stepped()
    frozen.run()
    frozen.lose_partitions()
    expire_leases()
    with stepped() as other:
        other.run()
        assert steps.calls == ["a", "b"]
        # When it is back
        assert frozen.lane()
        assert frozen.waiting == []
        frozen.end()
    # Then the step has run once
    assert steps.calls == ["a", "b"]
    assert [row.state for row in rows()] == [JobState.COMPLETED] * 2


def test_a_step_that_another_worker_holds_is_forgotten_once_its_lease_has_expired(
    steps: Steps,
) -> None:
    # Given a step that was handed over, and whose lease of coordination is another worker's
    chain(steps.note.step(name="a"), steps.note.step(name="b")).enqueue()
    with stepped() as worker, stepped() as other:
        worker.run()
        assert other.worker.leases.claim(worker.waiting[:1])[0].acquired
        # When the worker meets that, it waits
        assert worker.lane()
        assert len(worker.waiting) == 1
        # And once the lease in the row has expired, it waits no longer
        worker.clock.seconds += LEASE + 1
        assert worker.lane()
        assert worker.waiting == []
    assert steps.calls == ["a"]


def test_a_step_whose_error_pauses_its_partition_stays_from_the_relay_for_that_time(
    steps: Steps,
) -> None:
    # Given a step that was handed over and is answered that it comes too often
    too_often = RateLimitExceededError("too often", retry_after=90)
    paused = job(name="flows.paused", queue="flows")(raising_once(steps, too_often))
    chain(steps.note.step(name="a"), paused.step()).enqueue()
    with stepped() as worker:
        worker.run(groups=2)
        # Then it waits here, and no relay publishes it before that time is over
        assert len(worker.waiting) == 1
        (row,) = rows(handler="flows.paused")
        assert (row.state, row.attempts) == (JobState.PENDING, 0)
        assert row.lease_expires_at > timezone.now() + timedelta(seconds=90)
        # And no other step is handed over meanwhile
        assert worker.room() == 0
        # When it is over
        worker.clock.seconds += 91
        assert worker.lane()
    # Then it runs here
    assert steps.calls == ["a", "called", "called"]
    assert rows(handler="flows.paused")[0].topic == ""


def test_a_step_is_cancelled_while_its_worker_has_it(steps: Steps) -> None:
    # Given a step that was handed over
    handle = chain(steps.note.step(name="a"), steps.note.step(name="b")).enqueue()
    with stepped() as worker:
        worker.run()
        # When its workflow is cancelled
        workflows.cancel([handle.workflow_id])
        assert handle.status == "cancelled"
        worker.lane()
    # Then the workflow stays cancelled
    assert handle.status == "cancelled"


# --- The ordinary way -----------------------------------------------------------------------------


def with_key(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Any:
    return job(name="flows.keyed", queue="flows", key="name")(steps.take).step(name="b")


def with_priority(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Any:
    return steps.note.using(priority=5).step(name="b")


def with_a_delay(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Any:
    return steps.note.using(delay=timedelta(hours=1)).step(name="b")


def with_a_rate(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Any:
    return job(name="flows.rated", queue="flows", rate="5/s")(steps.take).step(name="b")


def with_slots(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Any:
    declared = job(name="flows.slots", queue="flows", concurrency=3)
    return declared(steps.take).step(name="b")


def of_another_workers_queue(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Any:
    return steps.other.step(name="b")


def of_a_handler_that_is_unknown_here(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Any:
    step = job(name="flows.gone", queue="flows")(steps.take).step(name="b")
    monkeypatch.setattr(direct_steps.registry, "find", lambda name: None)
    return step


ORDINARY = [
    with_key,
    with_priority,
    with_a_delay,
    with_a_rate,
    with_slots,
    of_another_workers_queue,
    of_a_handler_that_is_unknown_here,
]


@pytest.mark.parametrize("follower", ORDINARY, ids=lambda each: each.__name__)
def test_a_step_against_which_something_may_stand_is_left_to_the_relay(
    steps: Steps, follower: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a step that is released
    chain(steps.note.step(name="a"), follower(steps, monkeypatch)).enqueue()
    with stepped() as worker:
        worker.run()
        # Then it is pending, nobody has a lease in its row, and the relay is called
        row = rows()[1]
        assert (row.state, row.lease_token, row.lease_expires_at) == (JobState.PENDING, "", None)
        assert worker.waiting == []
        if row.available_at <= timezone.now():
            relays = Relay(["flows", "other"])
            assert relays.publish_due() == 1


def test_a_worker_whose_queue_is_paused_hands_nothing_over(steps: Steps) -> None:
    with stepped() as worker:
        assert worker.room() == 3
        worker.worker.scheduler.set_paused(["flows"])
        assert worker.room() == 0


def test_a_worker_that_stops_hands_nothing_over(steps: Steps) -> None:
    with stepped() as worker:
        worker.worker.scheduler.stop()
        assert worker.room() == 0


def test_what_waits_for_a_lane_comes_first(steps: Steps) -> None:
    # Given a worker of one lane with two deliveries that cannot share a group
    chain(*(steps.note.step(name=f"s{n}") for n in range(2))).enqueue()
    steps.outside.enqueue(name="other")
    with stepped(lanes=1) as worker:
        worker.run()
        # When the first step has released the second while the other delivery waits
        assert steps.calls == ["s0"]
        # Then the relay publishes it
        assert [delivery.kind for delivery in worker.waiting] == ["flows.outside"]
        assert worker.relay() == 1


@pytest.mark.parametrize(("count", "is_handed_over"), [(2, True), (3, False)])
def test_no_more_steps_are_handed_over_than_lanes_are_free(
    steps: Steps, count: int, is_handed_over: bool
) -> None:
    # Given a step that some equal siblings wait for
    siblings = [steps.note.step(name=f"s{n}") for n in range(count)]
    chain(steps.note.step(name="a"), group(siblings)).enqueue()
    # When a worker of two lanes releases them
    with stepped() as worker:
        worker.run()
        # Then it takes all of them or none
        assert len(worker.waiting) == (count if is_handed_over else 0)
        assert worker.relay() == (0 if is_handed_over else count)
