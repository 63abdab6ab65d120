"""A worker runs the steps that it releases itself, without messages, where nothing speaks against
it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from kjo_django import chain, group, job
from kjo_django.models import Job
from kjo_django.worker import Worker
from kjo_django.workflows.countdown import TAKEN_FOR
from tests.unit.workflows.conftest import KJO, MEMORY, Steps


class Stepped:
    """A worker whose steps a test takes."""

    def __init__(self, **options: Any) -> None:
        self.worker = Worker(["flows"], owns_process=False, concurrency=2, **options)
        self.worker.open()
        self.worker.leases.show_alive()
        for kind in ("note", "outside", "coroutine", "double"):
            self.worker.scheduler.measure(f"flows.{kind}", 0.001)

    @property
    def published(self) -> int:
        return self.worker._relay.published_count

    def publish(self) -> None:
        """Publish what is due, and read it."""
        self.worker._relay.call()
        self.worker._relay.step()
        for poller in self.worker.pollers:
            poller.step()

    def run(self, most: int = 100) -> None:
        """Run what has come here, without looking for more."""
        for _ in range(most):
            group = self.worker.scheduler.waiting
            if not group or not self.worker.lanes.run_group(0):
                return


@pytest.fixture(params=["sqlite_file", pytest.param("postgres", marks=pytest.mark.postgres)])
def stepped(request: pytest.FixtureRequest, settings: Any, steps: Steps) -> Iterator[Stepped]:
    request.getfixturevalue(request.param)
    settings.KJO = (
        KJO | MEMORY | {"GROUP_BUDGET": timedelta(seconds=20)}
    )  # quick for a busy machine
    made = Stepped()
    yield made
    made.worker._pipeline.close(5)


def due_at_once() -> None:
    Job.objects.filter(state="pending").update(available_at=timezone.now())


@pytest.mark.parametrize("kind", ["note", "outside"])
def test_a_chain_needs_one_message(stepped: Stepped, steps: Steps, kind: str) -> None:
    made = getattr(steps, kind)
    handle = chain(*(made.step(name=name) for name in "abcde")).enqueue()
    stepped.publish()
    stepped.run()
    assert steps.calls == list("abcde")
    assert (handle.status, stepped.published) == ("completed", 1)
    assert stepped.worker.statistics.processed == 5
    assert stepped.worker.scheduler.outstanding == 0
    # Its message was in no topic, and none comes later.
    assert Job.objects.filter(topic="", partition=None, state="completed").count() == 4
    due_at_once()
    stepped.publish()
    assert stepped.published == 1


def test_results_are_given_to_steps_that_are_taken(stepped: Stepped, steps: Steps) -> None:
    chain(steps.double.step(value=1), steps.double.step(), steps.double.step()).enqueue()
    stepped.publish()
    stepped.run()
    assert steps.calls == ["double 1", "double 2", "double 4"]


def test_a_step_that_was_taken_by_a_worker_that_died_is_published(
    stepped: Stepped, steps: Steps
) -> None:
    handle = chain(steps.note.step(name="a"), steps.note.step(name="b")).enqueue()
    stepped.publish()
    stepped.run(most=1)
    # Then: no relay takes it away from the worker
    waiting = Job.objects.get(state="pending").available_at - timezone.now()
    assert timedelta(0) < waiting <= TAKEN_FOR
    other = Stepped()
    other.publish()
    assert other.published == 0
    # When
    stepped.worker._relay.close()
    for poller in stepped.worker.pollers:
        poller.close()
    due_at_once()
    for _ in range(3):  # with the one in which its partitions are assigned
        other.publish()
    other.run()
    assert (steps.calls, handle.status) == (["a", "b"], "completed")
    # Then: it was only frozen, and runs it no more
    stepped.run()
    assert steps.calls == ["a", "b"]


def test_a_taken_step_that_fails_is_tried_again_through_its_topic(stepped: Stepped) -> None:
    calls = []

    @job(queue="flows", name="flows.flaky", max_attempts=2, backoff=(0.0,))
    def flaky() -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise OSError("once")

    stepped.worker.scheduler.measure("flows.flaky", 0.001)
    handle = chain(flaky.step(), flaky.step()).enqueue()
    stepped.publish()
    stepped.run()
    failing = Job.objects.get(state="failing")
    assert (failing.attempts, failing.topic) == (1, "")
    Job.objects.filter(state="failing").update(available_at=timezone.now())
    stepped.publish()
    stepped.run()
    assert (handle.status, len(calls), stepped.published) == ("completed", 3, 2)


def test_no_more_is_taken_than_there_are_lanes(stepped: Stepped, steps: Steps) -> None:
    for count, published in ((2, 1), (3, 4)):
        before = stepped.published
        handle = chain(
            steps.note.step(name="a"), group(steps.note.step(name=f"m{n}") for n in range(count))
        ).enqueue()
        stepped.publish()
        stepped.run()
        stepped.publish()
        stepped.run()
        assert (handle.status, stepped.published - before) == ("completed", published)


def _slow(stepped: Stepped) -> None:
    stepped.worker.scheduler.measure("flows.outside", 600)


def _unknown(stepped: Stepped) -> None:
    stepped.worker.scheduler._run_times.clear()


@pytest.mark.parametrize("change", [_slow, _unknown])
def test_a_worker_takes_what_is_quick_and_may_start(
    stepped: Stepped, steps: Steps, change: Any
) -> None:
    chain(steps.note.step(name="a"), steps.outside.step(name="b")).enqueue()
    stepped.publish()
    change(stepped)
    stepped.run()
    assert steps.calls == ["a"]
    assert Job.objects.get(state="pending").available_at <= timezone.now()


@pytest.mark.parametrize(
    "options",
    [{"key": lambda: "k"}, {"priority": 50}, {"rate": "9/s"}, {"concurrency": 3}, {}],
    ids=["key", "priority", "rate", "concurrency", "delay"],
)
def test_what_has_an_order_a_limit_or_a_moment_goes_its_usual_way(
    stepped: Stepped, steps: Steps, options: dict[str, Any]
) -> None:
    @job(queue="flows", name="flows.other_way", **options)
    def other_way() -> None:
        steps.calls.append("b")

    stepped.worker.scheduler.measure("flows.other_way", 0.001)
    chain(steps.note.step(name="a"), other_way.step()).enqueue()
    if not options:
        later = timezone.now() + timedelta(hours=1)
        Job.objects.filter(handler="flows.other_way").update(available_at=later)
    stepped.publish()
    stepped.run()
    assert steps.calls == ["a"]
    assert Job.objects.filter(state="pending").count() == 1


def test_nothing_is_taken_that_would_not_start(stepped: Stepped, steps: Steps) -> None:
    taker = stepped.worker.runtime.step_taker
    assert taker.takes("flows", "flows.note", 2)
    assert not taker.takes("flows", "flows.note", 4)
    assert not taker.takes("other", "flows.note", 1)
    assert not taker.takes("flows", "flows.nobody", 1)
    stepped.worker.scheduler.set_paused({"flows"})
    assert not taker.takes("flows", "flows.note", 1)
    stepped.worker.scheduler.set_paused(())
    assert taker.takes("flows", "flows.note", 1)
    stepped.worker.scheduler.stop()
    assert not taker.takes("flows", "flows.note", 1)
