"""Random graphs, random failures and random operators, compared with a model of a page."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kjo_django import PermanentError, Workflow, job
from kjo_django.engine.handler.context import JobContext
from kjo_django.models import DeadLetter, Job, JobFailure
from kjo_django.models import Workflow as Row
from kjo_django.operations import dead_letters, jobs, workflows
from kjo_django.testing import run_job
from kjo_django.workflows.workflow_handle import WorkflowHandle

BAD = ("failed", "cancelled")
POLICIES = ("cancel", "run", "hold")
CHANGES = ("run", "run", "run", "run", "run", "run", "cancel", "replay", "retry")


NAMES: dict[Any, str] = {}


class Model:
    """What each step's state must be."""

    def __init__(self) -> None:
        self.required: dict[str, set[str]] = {}
        self.policy: dict[str, str] = {}
        self.state: dict[str, str] = {}
        self.released: set[str] = set()

    def add(self, name: str, required: set[str], policy: str) -> None:
        self.required[name], self.policy[name] = set(required), policy
        self.state[name] = "waiting"
        self.release()

    def release(self) -> None:
        for name, required in self.required.items():
            if name in self.released:
                continue
            allowed = {"completed", *(BAD if self.policy[name] == "run" else ())}
            if all(self.state[each] in allowed for each in required):
                self.released.add(name)
                if self.state[name] == "waiting":
                    self.state[name] = "open"

    def end(self, name: str, state: str) -> None:
        self.state[name] = state
        left = [name] if state in BAD else []
        for bad in left:
            for other, required in self.required.items():
                is_cancelled = self.state[other] == "waiting" and self.policy[other] == "cancel"
                if bad in required and is_cancelled:
                    self.state[other] = "cancelled"
                    left.append(other)
        self.release()

    def complete(self, name: str, added: list[str], policy: str) -> None:
        for each in added:
            self.required[each], self.policy[each] = {name}, policy
            self.state[each] = "waiting"
        for other, required in self.required.items():
            if name in required and other not in self.released and other not in added:
                required.update(added)
        self.end(name, "completed")

    def retry(self) -> None:
        for name, state in self.state.items():
            if state in BAD:
                self.state[name] = "open" if name in self.released else "waiting"
        self.release()

    @property
    def has_ended(self) -> bool:
        return not {"waiting", "open"} & set(self.state.values())

    def expected(self) -> str:
        """Return the workflow's state."""
        if not self.has_ended:
            return "running" if "open" in self.state.values() else "held"
        behind = set().union(*self.required.values())
        last = [state for name, state in self.state.items() if name not in behind]
        return "failed" if set(last) & set(BAD) else "completed"


def play(seed: int, most_steps: int) -> None:
    """Play one workflow to its end."""
    chance = random.Random(seed)
    calls: Counter[str] = Counter()
    plan: dict[str, str] = {}

    @job(name="model.step", queue="flows", max_attempts=1, takes_context=True)
    def step(context: JobContext, name: str) -> str:
        calls[name] += 1
        assert context.workflow is not None
        if plan.get(name) == "fails" or (plan.get(name) == "fails once" and calls[name] == 1):
            raise PermanentError(f"{name} fails")
        if plan.get(name) == "adds" and not name.startswith("new"):
            for number in range(2):
                context.workflow.add(step, name=f"new {number} of {name} {calls[name]}")
        return name

    model = Model()
    NAMES.clear()
    size = chance.randint(1, most_steps)
    kinds = ["", "", "", *chance.sample(["fails", "fails once", "adds"], chance.randint(0, 3))]
    default = chance.choice(POLICIES)
    with Workflow("model", on_failure=default) as w:
        steps: list[Any] = []
        for number in range(size):
            name, policy = f"s{number}", chance.choice((default, *POLICIES))
            width = min(number, chance.choice((0, 1, 1, 2, 5)))
            before = chance.sample(range(number), width)
            plan[name] = chance.choice(kinds)
            steps.append(
                w.add(step, name=name, after=[steps[n] for n in before], on_failure=policy)
            )
            model.add(name, {f"s{n}" for n in before}, policy)
    assert w.handle is not None
    for _ in range(min(20 * size + 50, 1000)):
        compare(model, w.handle)
        if model.has_ended and chance.random() < 0.7:
            break
        change(chance, model, w.handle, plan, default)
    plan.clear()  # from now on nothing fails
    for _ in range(3):
        if set(BAD) & set(model.state.values()):
            workflows.retry([w.handle.id])
            model.retry()
        while run_one(chance, model, plan, default):
            pass
    compare(model, w.handle)
    assert set(model.state.values()) == {"completed"}
    assert w.handle.status == "completed"


def change(
    chance: random.Random, model: Model, handle: WorkflowHandle, plan: Any, default: str
) -> None:
    action = chance.choice(CHANGES)
    if action == "run":
        run_one(chance, model, plan, default)
    elif action == "cancel":
        unended = sorted(n for n, state in model.state.items() if state in ("open", "waiting"))
        if unended:
            name = chance.choice(unended)
            jobs.cancel([row_of(name)])
            model.end(name, "cancelled")
    elif action == "replay":
        letter = DeadLetter.objects.filter(state="open").order_by("id").first()
        if letter is not None:
            dead_letters.replay(dead_letters.DeadLetterFilter(ids=[letter.pk]), force=True)
            assert letter.job is not None
            model.state[letter.job.arguments["name"]] = "open"
    else:
        workflows.retry([handle.id])
        model.retry()


def run_one(chance: random.Random, model: Model, plan: Any, default: str) -> bool:
    ready = sorted(name for name, state in model.state.items() if state == "open")
    if not ready:
        return False
    name = chance.choice(ready)
    before = set(names())
    try:
        run_job(row_of(name))
    except PermanentError:
        model.end(name, "failed")
    else:
        new = Job.objects.exclude(pk__in=before).order_by("pk")
        model.complete(name, [job.arguments["name"] for job in new], default)
    return True


def names() -> dict[Any, str]:
    """Return the name of each job by its key; they are read once."""
    for row in Job.objects.exclude(pk__in=NAMES):
        NAMES[row.pk] = row.arguments["name"]
    return NAMES


def row_of(name: str) -> Job:
    return Job.objects.get(pk=next(key for key, found in names().items() if found == name))


def compare(model: Model, handle: WorkflowHandle) -> None:
    by_key = names()
    found = {
        by_key[key]: "open" if state in ("pending", "queued", "failing") else state
        for key, state in Job.objects.values_list("pk", "state")
    }
    assert found == model.state
    snapshot = handle.snapshot()
    assert snapshot is not None
    counted = Counter(model.state.values())
    assert snapshot.steps.completed == counted["completed"]
    assert snapshot.steps.open == counted["open"] + counted["waiting"]
    assert (snapshot.steps.failed, snapshot.steps.cancelled) == (
        counted["failed"],
        counted["cancelled"],
    )
    assert snapshot.state == model.expected()


def empty() -> None:
    DeadLetter.objects.all().delete()
    JobFailure.objects.all().delete()
    Job.objects.all().delete()
    Row.objects.all().delete()


@pytest.mark.django_db
@pytest.mark.medium
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_random_graphs_do_as_the_model(forgotten_definitions: None, seed: int) -> None:
    empty()
    play(seed, 10)


@pytest.mark.long
@pytest.mark.django_db
@pytest.mark.timeout(3600)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_random_graphs_of_two_hundred_steps_do_as_the_model(
    forgotten_definitions: None, seed: int
) -> None:
    empty()
    play(seed, 200)
