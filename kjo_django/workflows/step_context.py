"""What a running step of a workflow may ask of the others, and add to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, overload
from uuid import UUID

from kjo_django.enqueue.coroutines import from_coroutine
from kjo_django.enqueue.definition import JobDefinition, Step
from kjo_django.enqueue.handle import R
from kjo_django.exceptions import PermanentError
from kjo_django.messages.serializers import load_result, serializer_for
from kjo_django.models import Job, WorkflowEdge, WorkflowStage
from kjo_django.runtime import Runtime
from kjo_django.states import FINAL, JobState
from kjo_django.store.rows import FollowerRow
from kjo_django.workflows.definition import (
    FailurePolicy,
    Graph,
    PlannedStage,
    WorkflowStep,
    checked,
    plan,
    step_of,
)

READ_FIRST, READ_MOST = 50, 5000
"""Results that are in memory at once: at first, and at most, where they are small."""
READ_BYTES = 1_000_000
"""About how many bytes of results are in memory at once."""
REMEMBERED = 10_000


class StageFacts(NamedTuple):
    """What never changes of a stage."""

    workflow_id: UUID
    name: str
    """The workflow's."""
    unique_id: str | None
    on_failure: str
    """What the workflow's steps declare by default."""
    argument: str
    source_id: UUID | None
    step_count: int
    counts: tuple[int, ...]
    """The keys of its rows of counts."""


_facts: dict[UUID, StageFacts] = {}


def remember_follower(stage: UUID, follower: FollowerRow) -> None:
    """Keep what never changes of a stage that follows another one of its workflow: its steps may
    run in this process."""
    if follower.counts and (facts := _facts.get(stage)) is not None:
        _keep(
            {
                follower.id: facts._replace(
                    argument=follower.argument,
                    source_id=follower.source_id,
                    step_count=follower.step_count,
                    counts=tuple(follower.counts),
                )
            }
        )


def _keep(found: Mapping[UUID, StageFacts]) -> None:
    if len(_facts) > REMEMBERED:
        _facts.clear()
    _facts.update(found)


def facts_of_stages(runtime: Runtime, ids: Collection[UUID]) -> dict[UUID, StageFacts]:
    """Return what never changes of stages; one query for those that this process has not read
    lately. A stage that was pruned is missing."""
    known = {id: facts for id in ids if (facts := _facts.get(id)) is not None}
    missing = [id for id in ids if id not in known]
    if missing:
        rows: dict[UUID, list[Any]] = {}
        columns = (
            *("pk", "workflow_id", "workflow__name", "workflow__unique_id"),
            *("workflow__on_failure", "argument", "source_id", "step_count", "counts__pk"),
        )
        stages = WorkflowStage.objects.using(runtime.database).filter(pk__in=missing)
        for id, *facts, count in stages.order_by("counts__pk").values_list(*columns):
            rows.setdefault(id, [*facts, ()])[-1] += (count,)
        found = {id: StageFacts(*facts) for id, facts in rows.items()}
        _keep(found)
        known |= found
    return known


def contexts(runtime: Runtime, steps: Collection[tuple[UUID, UUID]]) -> dict[UUID, WorkflowContext]:
    """Return the context of each of these steps, by the id of its job. One query for the results
    that chained steps are given.

    :param steps: the ids of a job and its stage.
    """
    facts = facts_of_stages(runtime, {stage for _, stage in steps})
    sources = {one.source_id for one in facts.values() if one.argument}
    results: dict[Any, tuple[Any, ...]] = {}
    if sources:
        rows = Job.objects.using(runtime.database).filter(stage__in=sources)
        for stage, *found in rows.values_list("stage_id", "result", "content_type"):
            results[stage] = tuple(found)
    return {
        job: WorkflowContext(runtime, stage, facts[stage], results.get(facts[stage].source_id))
        for job, stage in steps
        if stage in facts
    }


class StepOutcome(NamedTuple):
    """The outcome of a step, or its present state."""

    job_id: UUID
    """The id of the step's job."""
    handler: str
    """The name of the job, as it is registered."""
    state: str
    """The state of the job's row: ``completed``, ``failed``, ``waiting``, …"""
    error: str
    """The text of its latest error; empty if there was none."""


class WorkflowContext:
    """The workflow of a running step: ``context.workflow``."""

    def __init__(
        self,
        runtime: Any,  # a Runtime: handlers are given this object and make none
        stage_id: UUID,
        facts: StageFacts,
        source: tuple[Any, ...] | None,
    ) -> None:
        self._runtime: Runtime = runtime
        self._facts = facts
        self._source = source
        self.stage_id = stage_id
        """The key of the step's row among the stages; for this package's own use."""
        self._graph: Graph | None = None
        self.added: list[PlannedStage] = []
        """The steps that this run has added, as they are stored with its completion; for this
        package's own use."""

    @property
    def id(self) -> str:
        """The workflow's id."""
        return str(self._facts.workflow_id)

    @property
    def name(self) -> str:
        """The workflow's name."""
        return self._facts.name

    @property
    def unique_id(self) -> str | None:
        """The unique id that the workflow was enqueued with, if one was."""
        return self._facts.unique_id

    def begin_run(self, payload: Any) -> Any:
        """Forget what an earlier call has added; return the payload with the argument that is given
        the result of the step before. For this package's own use.

        :raises PermanentError: that result is gone.
        """
        self._graph = None
        name = self._facts.argument
        if not name or not isinstance(payload, dict):
            return payload
        if self._source is None:
            raise PermanentError(
                f"The result that {name!r} is given is gone: the row of the step before was deleted"
            )
        result, content_type = self._source
        value = None
        if result is not None:
            value = load_result(bytes(result), serializer_for(content_type))
        return {**payload, name: value}

    @overload
    def results(self, step: JobDefinition[..., R]) -> Iterator[R]: ...
    @overload
    def results(self, step: str | None = None) -> Iterator[Any]: ...
    def results(self, step: JobDefinition[..., Any] | str | None = None) -> Iterator[Any]:
        """Yield the results of completed steps, in the order in which they were added; only a few
        are in memory at a time.

        :param step: a job or its name, for all its steps in this workflow. None: the steps that
            this step has waited for.
        :raises LookupError: the workflow has no such step.
        """
        columns = ("pk", "result", "content_type")
        for _, result, content_type in self._read(step, columns, state=JobState.COMPLETED):
            if result is None:
                yield None
            else:
                yield load_result(bytes(result), serializer_for(content_type))

    @overload
    def aresults(self, step: JobDefinition[..., R]) -> AsyncIterator[R]: ...
    @overload
    def aresults(self, step: str | None = None) -> AsyncIterator[Any]: ...
    async def aresults(
        self, step: JobDefinition[..., Any] | str | None = None
    ) -> AsyncIterator[Any]:
        """``results`` from asynchronous code.

        :param step: as in ``results``.
        """
        found, end = self.results(step), object()
        while (value := await from_coroutine(lambda: next(found, end))()) is not end:
            yield value

    def outcomes(self, step: JobDefinition[..., Any] | str | None = None) -> Iterator[StepOutcome]:
        """Yield the states and errors of steps, in the order in which they were added.

        :param step: as in ``results``.
        """
        for row in self._read(step, ("pk", "handler", "state", "error")):
            yield StepOutcome(*row)

    def failures(self, step: JobDefinition[..., Any] | str | None = None) -> list[StepOutcome]:
        """Return the steps that have failed for good or were cancelled.

        :param step: as in ``results``.
        """
        ended = [str(state) for state in FINAL if state != JobState.COMPLETED]
        columns = ("pk", "handler", "state", "error")
        return [StepOutcome(*row) for row in self._read(step, columns, state__in=ended)]

    def add(
        self,
        job: JobDefinition[..., Any] | Step,
        /,
        *,
        after: WorkflowStep | Iterable[WorkflowStep] | None = None,
        on_failure: FailurePolicy | None = None,
        **payload: Any,
    ) -> WorkflowStep:
        """Add a step to the workflow. It is stored together with this step's completion; if this
        attempt fails, it is not stored. Steps that wait for this step then wait for the added
        steps, too.

        :param job: the job, or ``job.step(…)``.
        :param after: steps that this run has added; without any, it starts when this step has
            completed.
        :param on_failure: as in ``Workflow.add``.
        :param payload: the arguments of the job.
        :raises TypeError: the function does not take these arguments.
        :raises PayloadError: the payload cannot be serialized or is too large.
        """
        if self._graph is None:
            self._graph = Graph()
        added = self._graph.add(step_of(job, payload), after, on_failure)
        checked(added, self._runtime)
        return added

    def end_run(self) -> None:
        """Plan the steps that the run has added, when it has ended. For this package's own use.

        :raises ValueError: they wait for one another in a circle.
        """
        if self._graph is not None:
            self.added = plan(self._graph, self._runtime, self._facts.on_failure)

    def _read(
        self, step: JobDefinition[..., Any] | str | None, columns: tuple[str, ...], **condition: Any
    ) -> Iterator[Any]:
        using = self._runtime.database
        if step is None:
            edges = WorkflowEdge.objects.using(using).filter(stage=self.stage_id)
            stages = list(edges.values_list("required_id", flat=True))
        else:
            name = step if isinstance(step, str) else step.name
            rows = WorkflowStage.objects.using(using).filter(
                workflow=self._facts.workflow_id, handler=name
            )
            stages = list(rows.values_list("pk", flat=True))
            if not stages:
                raise LookupError(f"The workflow {self.name} has no step {name!r}")
        jobs = Job.objects.using(using).filter(stage__in=stages, **condition).order_by("pk")
        rest, count = jobs.values_list(*columns), READ_FIRST
        while chunk := list(rest[:count]):
            yield from chunk
            rest = jobs.filter(pk__gt=chunk[-1][0]).values_list(*columns)
            size = sum(len(row[1]) for row in chunk if isinstance(row[1], bytes | memoryview))
            count = min(READ_MOST, max(1, READ_BYTES * len(chunk) // (size + 100 * len(chunk))))
