"""Chains, groups and workflows as a project declares them: checked, then stored in one transaction.

Steps of one handler that wait for the same steps, and that the same steps wait for, are stored as
one stage. A hundred thousand members of a group and their callback are two stages and one edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from django.db.models import Model
from django.utils import timezone

from kjo_django import models
from kjo_django.clock import CLOCK
from kjo_django.enqueue.coroutines import awaited_as, from_coroutine
from kjo_django.enqueue.definition import EnqueueOptions, JobDefinition, Step, new_job
from kjo_django.enqueue.storing import enqueued_together, store, store_alike, too_large
from kjo_django.exceptions import PayloadError, StorageError
from kjo_django.messages.serializers import storable_text
from kjo_django.models import Job, WorkflowCount, WorkflowEdge, WorkflowStage
from kjo_django.runtime import Runtime, runtime_of
from kjo_django.states import JobState, OnFailure
from kjo_django.values import did_you_mean
from kjo_django.workflows.workflow_handle import WorkflowHandle

MOST_COUNTS = 16
STEPS_OF_COUNT = 250
"""A stage has a row of counts for so many steps, up to ``MOST_COUNTS``."""
STORED_ALIKE = 20
"""From so many steps of a stage on, they are stored without an instance of each."""


FailurePolicy = Literal["cancel", "run", "hold"] | OnFailure
"""What becomes of a step when one that it waits for fails for good: it is cancelled, it runs all
the same, or it waits until the failed step has completed."""


class WorkflowStep:
    """A step of a workflow that is not stored yet, as returned by ``add``."""

    __slots__ = ("graph", "job", "number", "on_failure", "payload", "required", "source")

    def __init__(
        self, graph: Graph, number: int, step: Step, on_failure: str | None, source: Any = None
    ) -> None:
        self.graph: Graph = graph
        """Its workflow's steps; for this package's own use."""
        self.number: int = number
        """Its place among the steps of its workflow, from 0."""
        self.job: JobDefinition[..., Any] = step.job
        """The job that it runs."""
        self.payload: dict[str, Any] = step.payload
        """The arguments that the job is called with."""
        self.on_failure: str | None = on_failure
        """What happens to it if a step that it waits for fails for good; None: the value of the
        workflow."""
        self.required: set[int] = set()
        """The numbers of the steps that it waits for."""
        self.source: WorkflowStep | None = source
        """The step whose result it may be given; for this package's own use."""

    def after(self, *steps: WorkflowStep) -> WorkflowStep:
        """Let this step wait for other steps of its workflow, too, and return it.

        :param steps: steps that ``add`` has returned.
        :raises TypeError: one was not returned by ``add``.
        :raises ValueError: a step belongs to another workflow, or the workflow is stored already.
        """
        self.graph.check_open()
        for step in steps:
            if not isinstance(step, WorkflowStep):
                raise TypeError(f"{self} can wait for steps that add() returned, not for {step!r}")
            if step.graph is not self.graph:
                raise ValueError(f"{self} cannot wait for {step} of another workflow")
            self.required.add(step.number)
        return self

    def __repr__(self) -> str:
        return f"step {self.number + 1} ({self.job.name})"


@dataclass(slots=True, eq=False)
class PlannedStage:
    """A stage that is to be stored."""

    row: WorkflowStage
    job: JobDefinition[..., Any]
    required: set[int]
    """The places in the plan of the stages it waits for."""
    is_waited_for: bool
    steps: list[tuple[EnqueueOptions, str, bytes]] = field(default_factory=list)
    """The options, the key and the serialized payload of each step."""


class Graph:
    """Steps and what each of them waits for."""

    def __init__(self) -> None:
        self.steps: list[WorkflowStep] = []
        self.is_planned: bool = False
        """Whether the steps were taken to be stored: one that came later would be lost."""

    def check_open(self) -> None:
        """Refuse changes that would not be stored any more.

        :raises ValueError: the steps have been enqueued.
        """
        if self.is_planned:
            raise ValueError(
                "The workflow has been enqueued: a step that is added now would never run. While "
                "it runs, its steps add others by context.workflow.add(…)"
            )

    def add(
        self,
        step: Step,
        after: WorkflowStep | Iterable[WorkflowStep] | None = None,
        on_failure: str | None = None,
        source: WorkflowStep | None = None,
    ) -> WorkflowStep:
        """Add a step."""
        self.check_open()
        if not isinstance(step, Step):
            raise TypeError(f"A step is a job and its payload, job.step(…), not {step!r}")
        if on_failure is not None:
            checked_on_failure(on_failure, step.job.name)
        added = WorkflowStep(self, len(self.steps), step, on_failure, source)
        before: Any = () if after is None else after
        if isinstance(before, str) or not isinstance(before, Iterable):
            before = (before,)
        added.after(*before)
        self.steps.append(added)
        return added

    def _followers(self) -> list[list[int]]:
        """Return for each step the numbers of those that wait for it."""
        followers: list[list[int]] = [[] for _ in self.steps]
        for step in self.steps:
            for number in step.required:
                followers[number].append(step.number)
        return followers

    def _in_order(self, followers: Sequence[Sequence[int]]) -> Iterator[WorkflowStep]:
        """Yield the steps, each behind those that it waits for."""
        left = [len(step.required) for step in self.steps]
        ready = [step.number for step in self.steps if not step.required]
        for number in ready:
            yield self.steps[number]
            for follower in followers[number]:
                left[follower] -= 1
                if left[follower] == 0:
                    ready.append(follower)
        if len(ready) < len(self.steps):
            circle = [step for step in self.steps if left[step.number]]
            names = ", ".join(map(str, circle[:5])) + (", …" if len(circle) > 5 else "")
            raise ValueError(f"Steps wait for one another in a circle: {names}")


def plan(graph: Graph, runtime: Runtime, on_failure: str) -> list[PlannedStage]:
    """Return the stages of a graph, each behind those that it waits for. Nothing is written.

    :param on_failure: of the steps that declare none.
    :raises ValueError: steps wait for one another in a circle, or the jobs of one are in another
        database.
    :raises TypeError: the function of a step does not take the step's arguments.
    :raises PayloadError: the payload of a step cannot be serialized or is too large.
    """
    followers = graph._followers()
    # Of siblings the same set: a hundred thousand equal ones would be compared with each other.
    alike: dict[Any, Any] = {}
    stages: list[PlannedStage] = []
    place_of: dict[int, int] = {}
    found: dict[tuple[Any, ...], int] = {}
    for step in graph._in_order(followers):
        argument, key, data = checked(step, runtime)
        handler = step.job.handler
        queue = step.job.options.queue or handler.options.queue
        required: frozenset[int] = frozenset(step.required)
        waiting: tuple[int, ...] = tuple(followers[step.number])
        required = alike.setdefault(required, required)
        waiting = alike.setdefault(waiting, waiting)
        source = step.source.number if argument and step.source is not None else None
        policy = step.on_failure or on_failure
        # Equal sets are one object by now.
        kind = (handler.name, queue, policy, argument, source, id(required), id(waiting))
        if kind not in found:
            _check_database(step, queue, runtime)
            found[kind] = len(stages)
            row = WorkflowStage(
                handler=handler.name, queue=queue, on_failure=policy, argument=argument
            )
            if source is not None:
                row.source = stages[place_of[source]].row
            places = {place_of[number] for number in required}
            stages.append(PlannedStage(row, step.job, places, bool(waiting)))
        place_of[step.number] = found[kind]
        stages[found[kind]].steps.append((step.job.options, key, data))
    for stage in stages:
        stage.row.step_count = len(stage.steps)
    graph.is_planned = True
    return stages


def _check_database(step: WorkflowStep, queue: str, runtime: Runtime) -> None:
    if not runtime.holds(queue):
        raise ValueError(
            f"{step}: KJO['QUEUES'][{queue!r}]['database'] is not {runtime.database!r}, "
            "the database of this workflow. All steps of a workflow are in one database: "
            "let a step enqueue a job for another database."
        )


def checked(step: WorkflowStep, runtime: Runtime) -> tuple[str, str, bytes]:
    """Return the argument that is given a result or "", the key, and the serialized payload."""
    handler, options, payload = step.job.handler, step.job.options, step.payload
    for name in ("id", "unique_for", "debounce"):
        if getattr(options, name) is not None:
            raise ValueError(f"{step}: using({name}=…) is not for steps; give the workflow an id")
    missing = handler.required_arguments(payload)
    argument = missing[0] if step.source is not None and len(missing) == 1 else ""
    problem = handler.check_arguments({**payload, argument: None} if argument else payload)
    if problem is not None:
        raise TypeError(f"{step}: {_explained(problem, step, missing)}")
    try:
        key = handler.key_of(payload) if options.key is None else options.key
        if len(key) > 255 or (key and storable_text(key) != key):
            raise PayloadError(f"no key of at most 255 characters: {key!r:.80}")
        data = handler.options.serializer.dumps(payload)
        if len(data) > runtime.settings.max_payload_bytes:
            raise too_large(len(data), runtime.settings.max_payload_bytes)
    except PayloadError as error:
        raise PayloadError(f"{step}: {error}") from error
    except TypeError as error:
        raise TypeError(f"{step}: its key cannot be made: {error}") from error
    return argument, key, data


def _explained(problem: str, step: WorkflowStep, missing: Sequence[str]) -> str:
    """Return what is wrong with the arguments of a step, and why where that is known.

    :param missing: the arguments that its payload does not give.
    """
    if step.source is not None and len(missing) > 1:
        wanted = " and ".join(map(repr, missing))
        return f"it requires {wanted}, and {step.source} gives it one result"
    if missing and step.required and step.source is None:
        return f"{problem} (only a step of a chain is given the result of the one step before it)"
    return problem


def checked_on_failure(value: str, where: str) -> str:
    """Return what becomes of a step after a failure, or refuse a word that means nothing."""
    if value not in OnFailure.values:
        known = ", ".join(OnFailure.values)
        hint = did_you_mean(str(value), OnFailure.values, f"Known: {known}.")
        raise ValueError(f"{where}: on_failure must be one of {known}, not {value!r}. {hint}")
    return str(value)


# --- Storing --------------------------------------------------------------------------------------


def insert(
    stages: Sequence[PlannedStage],
    workflow: Any,
    runtime: Runtime,
    followers: Iterable[Any] = (),
    *,
    new: Sequence[models.Workflow] = (),
    is_last: bool = False,
) -> None:
    """Store stages with their steps, inside the caller's transaction.

    :param workflow: the key of the workflow's row.
    :param followers: keys of stored stages that are to wait for the last of these.
    :param new: the workflow's row, where it is not stored yet.
    :param is_last: the caller does nothing more but commit.
    """
    for stage in stages:
        stage.row.workflow_id = workflow
    edges = _edges_of(stages, followers)
    rows: list[Sequence[Model]] = [new, [stage.row for stage in stages], edges]
    with enqueued_together(runtime):
        _insert_steps(stages, rows, runtime, is_last=is_last)


def _insert_steps(
    stages: Sequence[PlannedStage],
    rows: list[Sequence[Model]],
    runtime: Runtime,
    *,
    is_last: bool,
) -> None:
    """Store the steps of stages.

    :param rows: of the workflow and its stages, which are stored with them; see ``insert_steps`` of
        the store.
    """
    jobs: list[Job] = []
    counts: list[WorkflowCount] = []
    for stage in stages:
        waits = bool(stage.required)
        ids = []
        for options, steps in _by_options(stage):
            template = _new_step(stage, options, *steps[0], runtime)
            if len(steps) >= STORED_ALIKE:
                # What is first in a transaction of ours begins it along, and COPY cannot.
                runtime.store.insert_steps(rows, ())
                rows = []
                ids += _store_alike(template, steps, runtime, waits=waits)
                continue
            made = [template, *(_new_step(stage, options, *one, runtime) for one in steps[1:])]
            jobs += made
            ids += [row.pk for row in made]
        counts += _counts_of(stage, ids)
    rows.append(counts)
    if jobs:
        store(jobs, runtime=runtime, beside=rows, is_last=is_last)
    else:
        runtime.store.insert_steps(rows, (), is_last=is_last)


def _store_alike(
    template: Job, steps: Sequence[tuple[str, bytes]], runtime: Runtime, *, waits: bool
) -> list[UUID]:
    """Store many steps of one stage; return their ids."""
    keys, payloads = zip(*steps, strict=True)
    none = [None] * len(steps)
    answers = store_alike(template, none, keys, payloads, runtime, waits=waits)
    return [answer.job_id for answer in answers]


def _edges_of(stages: Sequence[PlannedStage], followers: Iterable[Any]) -> list[WorkflowEdge]:
    """Return which stages wait for which, those that are stored already among them."""
    edges = [
        WorkflowEdge(required_id=stages[place].row.pk, stage_id=stage.row.pk)
        for stage in stages
        for place in sorted(stage.required)
    ]
    last = [stage.row.pk for stage in stages if not stage.is_waited_for]
    edges += [WorkflowEdge(required_id=pk, stage_id=each) for each in followers for pk in last]
    return edges


def _counts_of(stage: PlannedStage, ids: Sequence[UUID]) -> list[WorkflowCount]:
    """Return the counts of a stage's open steps: several where these are many, since each end of a
    step changes one."""
    size = min(MOST_COUNTS, 1 + len(ids) // STEPS_OF_COUNT)
    opened = [0] * size
    for id in ids:
        opened[id.int % size] += 1
    return [WorkflowCount(stage_id=stage.row.pk, open_count=count) for count in opened]


def _by_options(stage: PlannedStage) -> list[tuple[EnqueueOptions, list[tuple[str, bytes]]]]:
    found: dict[int, tuple[EnqueueOptions, list[tuple[str, bytes]]]] = {}
    for options, key, data in stage.steps:
        found.setdefault(id(options), (options, []))[1].append((key, data))
    return list(found.values())


def _new_step(
    stage: PlannedStage, options: EnqueueOptions, key: str, data: bytes, runtime: Runtime
) -> Job:
    job = new_job(options, stage.job.handler.options, key, data, runtime)
    job.stage_id = stage.row.pk
    if stage.required:
        job.state = JobState.WAITING
    return job


# --- What a project declares ----------------------------------------------------------------------


class _Part:
    """Steps that can be enqueued as a workflow, or be put into a chain or a group."""

    def then(self, part: Step | _Part) -> Chain:
        """Return a chain that runs the given part once, after all of these steps have ended.

        :param part: ``job.step(…)``, a chain or a group.
        :raises TypeError: it is none of these.
        """
        return Chain([self, part])

    def enqueue(
        self,
        *,
        name: str = "",
        id: str | None = None,
        on_failure: FailurePolicy = OnFailure.CANCEL,
        deadline: timedelta | datetime | None = None,
    ) -> WorkflowHandle:
        """Store the steps as a workflow, in the caller's transaction, and return a handle.

        :param name: the displayed name, text of 1 to 100 characters; by default the name of the
            first job.
        :param id: unique id: one workflow per name and id; a second one is not stored, and the
            handle is that of the first.
        :param on_failure: what happens to a step if a step that it waits for fails for good:
            ``"cancel"``, ``"run"`` or ``"hold"``.
        :param deadline: the time by which all steps must have ended: an aware datetime, or a
            timedelta from the enqueue. At the deadline steps that have not ended are cancelled, and
            the workflow fails.
        :raises ValueError: there are no steps, or an option is not valid.
        :raises TypeError: a step does not take its arguments; the message names it.
        :raises PayloadError: a payload cannot be serialized; the message names the step.
        """
        workflow = Workflow("workflow", id=id, on_failure=on_failure, deadline=deadline)
        self.add_to(workflow.graph, [], None)
        if not workflow.graph.steps:
            raise ValueError("There are no steps to enqueue")
        workflow.name = _checked_name(name or workflow.graph.steps[0].job.name)
        return workflow.enqueue()

    async def aenqueue(
        self,
        *,
        name: str = "",
        id: str | None = None,
        on_failure: FailurePolicy = OnFailure.CANCEL,
        deadline: timedelta | datetime | None = None,
    ) -> WorkflowHandle:
        """``enqueue`` from asynchronous code, with the same options."""
        return await from_coroutine(self.enqueue)(
            name=name, id=id, on_failure=on_failure, deadline=deadline
        )

    def add_to(
        self, graph: Graph, after: list[WorkflowStep], source: WorkflowStep | None
    ) -> tuple[list[WorkflowStep], WorkflowStep | None]:
        """Add the steps to a graph; return the last of them, and the one whose result what follows
        is given, if there is one. For this package's own use.

        :param after: the steps to wait for.
        :param source: the step whose result the first ones are given.
        """
        raise NotImplementedError


class Chain(_Part):
    """Steps that run one after another, as returned by ``chain(…)``."""

    def __init__(self, parts: Sequence[Step | _Part]) -> None:
        self.parts: list[Step | _Part] = [_checked_part(part, "chain") for part in parts]
        """The parts, in their order."""

    def add_to(
        self, graph: Graph, after: list[WorkflowStep], source: WorkflowStep | None
    ) -> tuple[list[WorkflowStep], WorkflowStep | None]:
        """Add each part behind the one before; for this package's own use."""
        for part in self.parts:
            after, source = _add(part, graph, after, source)
        return after, source


class Group(_Part):
    """Steps that run at the same time, as returned by ``group(…)``."""

    def __init__(self, parts: Iterable[Step | _Part]) -> None:
        self.parts: list[Step | _Part] = [_checked_part(part, "group") for part in parts]
        """Its members."""

    def add_to(
        self, graph: Graph, after: list[WorkflowStep], source: WorkflowStep | None
    ) -> tuple[list[WorkflowStep], WorkflowStep | None]:
        """Add each part behind the same steps; for this package's own use."""
        last = [step for part in self.parts for step in _add(part, graph, after, source)[0]]
        return last or after, None


def _add(
    part: Step | _Part, graph: Graph, after: list[WorkflowStep], source: WorkflowStep | None
) -> tuple[list[WorkflowStep], WorkflowStep | None]:
    if isinstance(part, _Part):
        return part.add_to(graph, after, source)
    step = graph.add(part, after, source=source)
    return [step], step


def _checked_part(part: Any, where: str) -> Step | _Part:
    if not isinstance(part, Step | _Part):
        raise TypeError(f"A {where} is made of job.step(…), chains and groups, not of {part!r:.80}")
    return part


def _checked_name(name: Any) -> str:
    if not (isinstance(name, str) and name.strip() and len(name) <= 100):
        raise ValueError(f"A workflow's name is text of 1 to 100 characters, not {name!r:.120}")
    if storable_text(name) != name:
        raise ValueError(f"The name holds a character no database keeps: {name!r}")
    return name


def chain(*parts: Step | _Part) -> Chain:
    """Return steps that run one after another; each gets the result of the step before.

    The result is passed as the one argument that the step's function requires and its payload does
    not have. If no such argument is left, the result is not passed.

    :param parts: ``job.step(…)``, other chains, and groups; a step after a group gets no result.
    :raises TypeError: a part is none of these.
    """
    return Chain(parts)


def group(*parts: Step | _Part | Iterable[Step | _Part]) -> Group:
    """Return steps that run at the same time. To run a step when all have ended, see ``then``.

    :param parts: the members, or one iterable of them: ``job.step(…)``, chains, and other groups.
    :raises TypeError: a part is none of these.
    """
    if len(parts) == 1 and not isinstance(parts[0], Step | _Part):
        return Group(parts[0])
    return Group(parts)  # type: ignore[arg-type] # which are checked


class Workflow:
    """Steps that wait for one another, as any graph without cycles.

    As a context manager it is stored at the end of the block, in one transaction; if the block
    raises, nothing is stored.

    :param name: the displayed name, text of 1 to 100 characters.
    :param id: unique id: one workflow per name and id; a second one is not stored, and the handle
        is that of the first.
    :param on_failure: what happens to a step without its own ``on_failure`` if a step that it waits
        for fails for good: ``"cancel"``, ``"run"`` or ``"hold"``.
    :param deadline: the time by which all steps must have ended: an aware datetime, or a timedelta
        from the enqueue. At the deadline steps that have not ended are cancelled, and the workflow
        fails.
    :raises ValueError: an argument is not valid.
    """

    def __init__(
        self,
        name: str,
        *,
        id: str | None = None,
        on_failure: FailurePolicy = OnFailure.CANCEL,
        deadline: timedelta | datetime | None = None,
    ) -> None:
        self.name: str = _checked_name(name)
        """The displayed name."""
        options = EnqueueOptions(id=id)  # checks it
        self.id: str | None = options.id
        """The unique id, or None; not the ``id`` of ``handle``."""
        self.on_failure: str = checked_on_failure(on_failure, name)
        """What happens to steps without their own ``on_failure`` after a failure."""
        if isinstance(deadline, timedelta):
            is_valid = timedelta(0) < deadline <= timedelta(days=36500)
        else:
            is_valid = deadline is None or (
                isinstance(deadline, datetime) and not timezone.is_naive(deadline)
            )
        if not is_valid:
            raise ValueError(
                f"{name}: deadline must be a positive timedelta or an aware datetime, "
                f"not {deadline!r}"
            )
        self.deadline: timedelta | datetime | None = deadline
        """The time by which all steps must have ended, or the time that they may take."""
        self.graph: Graph = Graph()
        """Its steps; for this package's own use."""
        self.handle: WorkflowHandle | None = None
        """The handle of the stored workflow; None before it is stored."""

    def add(
        self,
        job: JobDefinition[..., Any] | Step,
        /,
        *,
        after: WorkflowStep | Iterable[WorkflowStep] | None = None,
        on_failure: FailurePolicy | None = None,
        **payload: Any,
    ) -> WorkflowStep:
        """Add a step and return it, so that other steps can wait for it.

        :param job: the job, or ``job.step(…)``. ``using()`` can set its options, except ``id``,
            ``unique_for`` and ``debounce``.
        :param after: the step or the steps that it waits for; without any, it starts immediately.
        :param on_failure: what happens to this step if a step that it waits for fails for good:
            ``"cancel"``, ``"run"`` or ``"hold"``; None: the value of the workflow.
        :param payload: the arguments of the job.
        :raises TypeError: it is not a job, or a step to wait for was not returned by ``add``.
        :raises ValueError: the workflow has been enqueued, or a step belongs to another workflow.
        """
        return self.graph.add(step_of(job, payload), after, on_failure)

    @awaited_as("workflow.aenqueue()")
    def enqueue(self) -> WorkflowHandle:
        """Store the workflow and its steps in the caller's transaction, and return a handle.

        :raises ValueError: there are no steps, steps wait for one another in a cycle, or the
            workflow has been enqueued already.
        :raises TypeError: a step does not take its arguments; the message names it.
        :raises PayloadError: a payload cannot be serialized; the message names the step.
        """
        if self.handle is not None:
            raise ValueError(f"The workflow {self.name} has been enqueued already")
        if not self.graph.steps:
            raise ValueError(f"The workflow {self.name} has no steps")
        first = self.graph.steps[0].job
        runtime = runtime_of(first.options.queue or first.handler.options.queue)
        stages = plan(self.graph, runtime, self.on_failure)
        now = CLOCK.now()
        deadline = self.deadline
        if isinstance(deadline, timedelta):
            deadline = now + deadline
        row = models.Workflow(
            name=self.name,
            unique_id=self.id,
            on_failure=self.on_failure,
            step_count=len(self.graph.steps),
            open_stage_count=len(stages),
            deadline=deadline,
            created_at=now,
        )
        rows = models.Workflow.objects.using(runtime.database)
        with runtime.store.transaction(savepoint=False):
            new = [row]
            if self.id is not None:
                runtime.store.insert_missing(new)
                known = rows.filter(name=self.name, unique_id=self.id).first()
                if known is None:
                    raise StorageError(f"The workflow {self.name} {self.id} could not be stored")
                if known.pk != row.pk:
                    self.handle = WorkflowHandle(known.pk, "duplicate", runtime.database)
                    return self.handle
                new = []
            insert(stages, row.pk, runtime, new=new, is_last=True)
        self.handle = WorkflowHandle(row.pk, "queued", runtime.database)
        return self.handle

    async def aenqueue(self) -> WorkflowHandle:
        """``enqueue`` from asynchronous code; raises the same errors."""
        return await from_coroutine(self.enqueue)()

    def __enter__(self) -> Workflow:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None and self.handle is None:
            self.enqueue()


def step_of(job: JobDefinition[..., Any] | Step, payload: dict[str, Any]) -> Step:
    """Return a step of a job and its payload; of a step, that with more in its payload."""
    if isinstance(job, JobDefinition):
        return job.step(**payload)
    if isinstance(job, Step):
        return Step(job.job, {**job.payload, **payload}) if payload else job
    raise TypeError(f"A step is a job of @job and its payload, not {job!r:.80}")
