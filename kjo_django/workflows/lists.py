"""What people and programs are shown of workflows: lists, and the stages of one with counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Count, Q, QuerySet, Sum
from django.utils.translation import gettext_noop as _

from kjo_django.clock import CLOCK
from kjo_django.models import (
    DeadLetter,
    DeadLetterState,
    Job,
    Workflow,
    WorkflowCount,
    WorkflowEdge,
    WorkflowStage,
)
from kjo_django.refusals import RefusedError
from kjo_django.runtime import jobs_database
from kjo_django.states import OPEN_WORKFLOWS, UNFINISHED, JobState, JobStatus, WorkflowState
from kjo_django.store.counting import (
    COUNT_LIMIT,
    Groups,
    bounded_count,
    bounded_counts,
    grouped_counts,
    seconds_since,
    window_floor,
)
from kjo_django.workflows.snapshots import StepNumbers, WorkflowSnapshot, graph, snapshots

MAX_PAGE = 200
MOST_STAGES = 1000
"""Most stages of one workflow that are read one by one; with more, they are counted by handler."""
MOST_HELD = 20
"""Most failed steps that are named as those whose replay a workflow awaits."""


# --- Lists ----------------------------------------------------------------------------------------


def find(*, state: str | None = None, text: str = "") -> QuerySet[Workflow]:
    """Return workflows in a state, whose name or unique id is the text, or begins with it where it
    ends in ``*``.

    The text is looked for among the newest 100,000. A workflow's own id is found in any case.
    """
    rows = Workflow.objects.using(jobs_database()).all()
    if state is not None:
        rows = rows.filter(state=state)
    if not text:
        return rows
    with suppress(ValueError):
        return rows.filter(pk=UUID(text))
    floor = window_floor(rows, COUNT_LIMIT)
    if floor is not None:
        rows = rows.filter(pk__gt=floor)
    lookup, value = ("startswith", text[:-1]) if text.endswith("*") else ("exact", text)
    return rows.filter(Q(**{f"name__{lookup}": value}) | Q(**{f"unique_id__{lookup}": value}))


@dataclass(frozen=True, slots=True)
class WorkflowPage:
    """A page of workflows, the newest first."""

    rows: list[Workflow]
    next: str | None
    """``after`` of the page of older workflows; None at the end."""
    previous: str | None
    """``before`` of the page of newer workflows; None at the beginning."""


def page(
    rows: QuerySet[Workflow], *, after: str | None = None, before: str | None = None, size: int = 50
) -> WorkflowPage:
    """Return a page of workflows.

    :raises ValueError: a cursor is of no page, or there are two.
    """
    if after is not None and before is not None:
        raise RefusedError(_("Give after or before, not both"))
    if not 1 <= size <= MAX_PAGE:
        raise RefusedError(_("A page has 1 to %(most)s rows"), most=MAX_PAGE)
    if before is not None:
        found = list(rows.filter(pk__gt=_cursor(before)).order_by("pk")[: size + 1])
        shown, has_older, has_newer = found[:size][::-1], bool(found), len(found) > size
    else:
        if after is not None:
            rows = rows.filter(pk__lt=_cursor(after))
        found = list(rows.order_by("-pk")[: size + 1])
        shown, has_older, has_newer = found[:size], len(found) > size, after is not None
    return WorkflowPage(
        shown,
        next=str(shown[-1].pk) if shown and has_older else None,
        previous=str(shown[0].pk) if shown and has_newer else None,
    )


def _cursor(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise RefusedError(_("%(text).80r is no place in a list of workflows"), text=text) from None


def state_counts() -> dict[str, int]:
    """Return how many workflows are in each state, up to 100,000 each."""
    rows = Workflow.objects.using(jobs_database())
    return bounded_counts({state: rows.filter(state=state) for state in WorkflowState.values})


def open_by_name() -> tuple[Groups, bool]:
    """Return by name and state how many workflows have not ended and when the oldest of them was
    enqueued, and whether counts are lower bounds."""
    rows = Workflow.objects.using(jobs_database()).filter(state__in=OPEN_WORKFLOWS)
    return grouped_counts(rows.order_by("pk"), ("name", "state"), oldest="created_at")


def facts(workflows: Sequence[Workflow]) -> dict[UUID, dict[str, Any]]:
    """Return what lists, endpoints and commands show of each workflow, by its key, in one query."""
    now = CLOCK.now()
    found = zip(workflows, snapshots(workflows), strict=True)
    return {row.pk: _facts(row, snapshot, now) for row, snapshot in found}


def _facts(row: Workflow, snapshot: WorkflowSnapshot, now: datetime) -> dict[str, Any]:
    steps = snapshot.steps
    return {
        "id": row.pk,
        "name": row.name,
        "unique_id": row.unique_id,
        "state": row.state,
        "reason": row.reason,
        "steps": steps.total,
        "open": steps.open,
        "completed": steps.completed,
        "failed": steps.failed,
        "cancelled": steps.cancelled,
        "percent": round(steps.percent, 1),
        "created_at": row.created_at,
        "finished_at": row.finished_at,
        "deadline": row.deadline,
        "seconds": seconds_since(row.created_at, row.finished_at or now),
    }


# --- One ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageSummary:
    """A stage of a workflow: steps of one handler that wait for the same ones."""

    id: str | None
    """None for all stages of a handler, where there are too many."""
    handler: str
    queue: str
    on_failure: str
    steps: int
    counts: Mapping[str, int]
    """Numbers of its steps by the state that people are shown."""
    requires: tuple[str, ...]
    """The stages it waits for."""
    job: UUID | None
    """The job, if it is one step."""
    is_added: bool = False
    """Whether a running step has added it."""


def stages(workflow: Workflow, leased: Collection[UUID] = ()) -> list[StageSummary]:
    """Return the stages of a workflow, each behind those that it waits for.

    With more than ``MOST_STAGES`` there is one entry for each handler, which requires nothing.

    :param leased: the jobs that living workers hold a lease on; they are shown as processing.
    """
    rows = WorkflowStage.objects.using(jobs_database()).filter(workflow=workflow)
    if bounded_count(rows, MOST_STAGES + 1) > MOST_STAGES:
        return _by_handler(workflow)
    found = graph(workflow.pk)
    states = _open_states([stage.id for stage in found if stage.state == "running"], leased)
    single = [UUID(stage.id) for stage in found if stage.steps.total == 1]
    jobs = Job.objects.using(jobs_database()).filter(stage__in=single)
    job_of = {str(stage): job for stage, job in jobs.values_list("stage", "pk")}
    return [
        StageSummary(
            id=stage.id,
            handler=stage.handler,
            queue=stage.queue,
            on_failure=stage.on_failure,
            steps=stage.steps.total,
            counts=_shown_counts(stage.steps, states.get(stage.id)),
            requires=stage.required,
            job=job_of.get(stage.id),
            # Ids grow: those of the steps that it was enqueued with are made before its own.
            is_added=UUID(stage.id) > workflow.pk,
        )
        for stage in found
    ]


def _shown_counts(steps: StepNumbers, open_states: Mapping[str, int] | None) -> dict[str, int]:
    """Return the numbers of a stage's steps by state.

    :param open_states: of those that do not wait for others; None: all that are open wait.
    """
    counts: dict[str, int] = {
        JobStatus.FAILED.value: steps.failed,
        JobStatus.CANCELLED.value: steps.cancelled,
    }
    counts |= {JobStatus.WAITING.value: steps.open} if open_states is None else open_states
    # The states of open steps are read a moment later than the numbers.
    counts[JobStatus.COMPLETED.value] = max(0, steps.total - sum(counts.values()))
    return {state: count for state, count in counts.items() if count > 0}


def _open_states(keys: Sequence[str], leased: Collection[UUID]) -> dict[str, Counter[str]]:
    """Return by stage how many of its open steps people are shown in which state."""
    found: dict[str, Counter[str]] = {key: Counter() for key in keys}
    if not keys:
        return found
    rows = Job.objects.using(jobs_database()).filter(
        stage__in=[UUID(key) for key in keys], state__in=UNFINISHED
    )
    for stage, state, count in _grouped(rows):
        found[str(stage)][state] += count
    for stage, state, count in _grouped(rows.filter(pk__in=leased)):
        found[str(stage)][state] -= count
        found[str(stage)][JobStatus.PROCESSING.value] += count
    return found


def _grouped(rows: QuerySet[Job]) -> QuerySet[Job, tuple[Any, ...]]:
    return rows.order_by().values_list("stage", "state").annotate(count=Count("pk"))


def _by_handler(workflow: Workflow) -> list[StageSummary]:
    """Return the stages of a workflow with one entry for each handler and queue."""
    stages = WorkflowStage.objects.using(jobs_database()).filter(workflow=workflow).order_by()
    steps = stages.values_list("handler", "queue").annotate(steps=Sum("step_count"))
    counts = WorkflowCount.objects.using(jobs_database()).filter(stage__workflow=workflow)
    sums = (
        counts.order_by()
        .values_list("stage__handler", "stage__queue")
        .annotate(open=Sum("open_count"), failed=Sum("failed_count"), cut=Sum("cancelled_count"))
    )
    by_key = {(handler, queue): numbers for handler, queue, *numbers in sums}
    found = []
    for handler, queue, total in sorted(steps):
        open_count, failed, cancelled = by_key.get((handler, queue), (0, 0, 0))
        numbers = {
            "completed": total - open_count - failed - cancelled,
            "waiting": open_count,
            "failed": failed,
            "cancelled": cancelled,
        }
        shown = {state: count for state, count in numbers.items() if count}
        found.append(StageSummary(None, handler, queue, "", total, shown, (), None))
    return found


def holding(workflow: Workflow) -> list[dict[str, Any]]:
    """Return the failed steps whose replay a workflow awaits, each with its open dead letter."""
    letters = DeadLetter.objects.using(jobs_database()).filter(
        job__stage__workflow=workflow, job__state=JobState.FAILED, state=DeadLetterState.OPEN
    )
    names = ("pk", "job_id", "handler", "error", "error_type")
    return list(letters.order_by("pk").values(*names)[:MOST_HELD])


def workflow_of(job: Job) -> Workflow | None:
    """Return the workflow of a job; None for a job of none."""
    if job.stage_id is None:
        return None
    rows = Workflow.objects.using(jobs_database())
    return rows.filter(stages=job.stage_id).first()


def waits_for(job: Job) -> list[WorkflowStage]:
    """Return the stages that a waiting step still waits for."""
    if job.stage_id is None or job.state != JobState.WAITING:
        return []
    rows = WorkflowStage.objects.using(jobs_database())
    unmet = WorkflowEdge.objects.using(jobs_database()).filter(stage=job.stage_id, is_met=False)
    return list(rows.filter(pk__in=unmet.values("required")).order_by("pk")[:MOST_HELD])
