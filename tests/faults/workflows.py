"""Scenarios of workflows, and what must hold of each whatever strikes: its counts are those of its
steps, nothing has run before what it waits for, and it has reached an end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from django.db import transaction

from kjo_django import Workflow, chain, group, job
from kjo_django.models import Job, WorkflowEdge
from kjo_django.models import Workflow as Row
from kjo_django.operations import dead_letters, workflows
from kjo_django.operations import jobs as operations
from kjo_django.states import OPEN_WORKFLOWS, UNFINISHED, JobState, OnFailure
from kjo_django.workflows.snapshots import graph, snapshot
from tests.faults.process import Process
from tests.faults.scenarios import QUEUE, Kinds, scenario
from tests.faults.world import World, _name_of
from tests.ledger.models import Entry


class Flows:
    """Steps that do as their job's ``ending`` says, and one that adds others."""

    def __init__(self, world: World, kinds: Kinds) -> None:
        self.world = world
        self.jobs = kinds.jobs
        atomic = kinds.jobs["atomic"]

        def add(context: Any, job: str, ending: str) -> str:
            Entry.objects.create(job=job)
            for number in range(2):
                context.workflow.add(atomic, job=f"{job}-new-{number}", ending="completed")
            if error := kinds.behave(job, ending):
                raise error
            return job

        self.adding = job(name="faults.adding", queue=QUEUE, takes_context=True)(add)

    def step(self, kind: str, name: str, ending: str = "completed") -> Any:
        definition = self.adding if kind == "adding" else self.jobs[kind]
        return definition.step(job=name, ending=ending)

    def enqueue(self, process: Process, names: list[str], put: Callable[[], Any]) -> Any:
        """Do what a request does that commits a workflow with steps of these names."""

        def commit() -> Any:
            with transaction.atomic():
                return put()

        answer = process.ask(commit)
        if answer is not None:
            self.world.promised += names
        return answer

    def problems(self) -> list[str]:
        """Return what does not hold of the workflows there are."""
        many = self.world.many
        return [problem for row in Row.objects.all() for problem in _problems_of(row, many)]


def _problems_of(row: Row, many: set[str]) -> list[str]:
    """Return what does not hold of a workflow.

    :param many: steps that may take effect again, later too.
    """
    found: list[str] = []
    first, last = {}, {}
    for number, name in Entry.objects.order_by("id").values_list("id", "job"):
        first.setdefault(name, number)
        last[name] = number
    steps: defaultdict[Any, list[Job]] = defaultdict(list)
    for each in Job.objects.filter(stage__workflow=row):
        steps[each.stage_id].append(each)
    if row.state in OPEN_WORKFLOWS:
        found.append(f"{row} reaches no end: {row.state}, {row.open_stage_count} open stages")
    shown = snapshot(row.pk)
    assert shown is not None
    states = Counter(each.state for of_stage in steps.values() for each in of_stage)
    counted = (shown.steps.total, shown.steps.failed, shown.steps.cancelled)
    if counted != (states.total(), states[JobState.FAILED], states[JobState.CANCELLED]):
        found.append(f"{row} has counted {shown.steps}, of {dict(states)}")
    unfinished = sum(states[each] for each in UNFINISHED)
    if shown.steps.open != unfinished:
        found.append(f"{row} has counted {shown.steps.open} open steps of {unfinished}")
    for edge in WorkflowEdge.objects.filter(stage__workflow=row).select_related("stage"):
        for after in steps[edge.stage_id]:
            for before in steps[edge.required_id]:
                if edge.stage.on_failure == OnFailure.RUN and before.generation > 1:
                    continue  # it had failed, and was repeated later
                name = _name_of(before)
                ran, required = (
                    first.get(_name_of(after)),
                    (first if name in many else last).get(name),
                )
                if ran is not None and required is not None and ran < required:
                    found.append(f"{_name_of(after)} ran before {_name_of(before)}")
    graph(row.pk)
    return found


# --- Scenarios ------------------------------------------------------------------------------------


def _flow(world: World) -> Flows:
    flows: Flows = world.flows
    return flows


@scenario("workflow-chain")
def _chain(world: World, process: Process) -> None:
    flows = _flow(world)
    names = ["f1", "f2", "f3"]
    flows.enqueue(
        process, names, lambda: chain(*(flows.step("atomic", name) for name in names)).enqueue()
    )
    process.work()


@scenario("workflow-joins")
def _joins(world: World, process: Process) -> None:
    """Steps that run in the transaction that has released them; one of them fails once."""
    flows = _flow(world)
    names = [f"f{number}" for number in range(5)]
    endings = ["completed", "completed", "completed", "retried", "completed"]
    steps = [
        flows.step("database-only", name, ending)
        for name, ending in zip(names, endings, strict=True)
    ]
    flows.enqueue(process, names, lambda: chain(*steps).enqueue())
    process.work()
    world.clock.advance(3)
    process.work()


@scenario("workflow-group")
def _group(world: World, process: Process) -> None:
    flows = _flow(world)
    names = [f"f{number}" for number in range(4)]
    members = [flows.step("atomic", names[0]), flows.step("outside", names[1])]
    members += [flows.step("coroutine", names[2]), flows.step("batch", names[3], "retried")]
    world.many.update(names[1:3])
    flows.enqueue(
        process,
        [*names, "end"],
        lambda: group(members).then(flows.step("atomic", "end")).enqueue(),
    )
    process.work()
    world.clock.advance(3)
    process.work()


@scenario("workflow-fails")
def _fails(world: World, process: Process) -> None:
    flows = _flow(world)

    def put() -> Any:
        with Workflow("fails") as w:
            a = w.add(flows.step("atomic", "a"))
            dead = w.add(flows.step("outside", "dead", "dead"), after=a)
            cancelled = w.add(flows.step("atomic", "cancelled"), after=dead)
            w.add(flows.step("atomic", "too"), after=cancelled)
            w.add(flows.step("atomic", "report"), after=[a, dead], on_failure="run")
        return w.handle

    world.many.add("dead")
    flows.enqueue(process, ["a", "dead", "cancelled", "too", "report"], put)
    process.work()


@scenario("workflow-adds")
def _adds(world: World, process: Process) -> None:
    flows = _flow(world)
    flows.enqueue(
        process,
        ["split", "end"],
        lambda: chain(
            flows.step("adding", "split", "retried"), flows.step("atomic", "end")
        ).enqueue(),
    )
    process.work()
    world.clock.advance(3)
    process.work()


@scenario("workflow-held")
def _held(world: World, process: Process) -> None:
    flows = _flow(world)
    names = ["f1", "f2"]

    def put() -> Any:
        return chain(
            flows.step("atomic", "f1", "until-mended"), flows.step("atomic", "f2")
        ).enqueue(on_failure="hold")

    def replay() -> Any:
        world.is_mended = True
        return dead_letters.replay(dead_letters.DeadLetterFilter(), actor="somebody")

    # Wherever the process dies, somebody replays what holds the workflow.
    world.recovering = replay
    flows.enqueue(process, names, put)
    process.work()
    process.ask(replay)
    process.work()


@scenario("workflow-retried")
def _retried(world: World, process: Process) -> None:
    flows = _flow(world)
    names = ["f1", "f2", "f3"]

    def put() -> Any:
        parts = [flows.step("atomic", "f1"), flows.step("atomic", "f2", "until-mended")]
        return chain(*parts, flows.step("atomic", "f3")).enqueue()

    flows.enqueue(process, names, put)
    process.work()
    world.is_mended = True
    process.ask(lambda: workflows.retry(Row.objects.all(), actor="somebody"))
    process.work()


@scenario("workflow-cancelled")
def _cancelled(world: World, process: Process) -> None:
    flows = _flow(world)
    names = ["f1", "f2", "f3"]
    flows.enqueue(
        process, names, lambda: chain(*(flows.step("atomic", name) for name in names)).enqueue()
    )
    process.ask(lambda: operations.cancel(Job.objects.filter(state=JobState.WAITING)[:1]))
    process.ask(lambda: workflows.cancel(Row.objects.all(), actor="somebody"))
    process.work()
