"""What screens, commands and handles show of workflows. Each function takes a fixed number of
queries, however many steps there are."""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from django.db.models import Sum
from django.db.models.functions import Coalesce

from kjo_django import models
from kjo_django.models import WorkflowEdge, WorkflowStage
from kjo_django.runtime import jobs_database
from kjo_django.states import OnFailure, WorkflowState


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """How many steps there are, and how many of them have ended in which way."""

    total: int
    """Number of steps, including those added at run time."""
    open: int
    """Number of steps that have not ended."""
    failed: int
    """Number of steps that have failed for good."""
    cancelled: int
    """Number of steps that were cancelled."""

    @property
    def completed(self) -> int:
        """Number of steps that have completed."""
        return self.total - self.open - self.failed - self.cancelled

    @property
    def percent(self) -> float:
        """Percentage of steps that have ended, from 0 to 100."""
        return 100.0 * (self.total - self.open) / self.total if self.total else 100.0


@dataclass(frozen=True, slots=True)
class WorkflowSnapshot:
    """The state of a workflow at one moment, from one read."""

    id: str
    """The workflow's id."""
    name: str
    """The displayed name."""
    unique_id: str | None
    """The unique id with which it was enqueued, or None."""
    state: WorkflowState
    """``running``, ``held``, ``completed``, ``failed`` or ``cancelled``."""
    reason: str
    """Why it failed, was cancelled or awaits a replay."""
    steps: StepNumbers
    """How many steps there are, and how they have ended."""
    deadline: datetime | None
    """The moment by which it must have ended, if there is one."""
    created_at: datetime
    """When it was stored."""
    finished_at: datetime | None
    """When it ended; None: it has not."""


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """A node of a workflow's graph: one step, or equal siblings."""

    id: str
    handler: str
    queue: str
    on_failure: OnFailure
    state: Literal["waiting", "running", "completed", "failed", "cancelled"]
    steps: StepNumbers
    layer: int
    """How many nodes stand before it on the longest way from a first one."""
    required: tuple[str, ...] = field(default=())
    """The ids of the nodes it waits for, or has waited for."""
    finished_at: datetime | None = None


def numbers_of(workflows: Collection[uuid.UUID]) -> dict[uuid.UUID, StepNumbers]:
    """Return the numbers of steps of workflows, in one query."""
    rows = models.Workflow.objects.using(jobs_database()).filter(pk__in=workflows)
    counted = rows.annotate(
        **{
            name: Coalesce(Sum(f"stages__counts__{name}_count"), 0)
            for name in ("open", "failed", "cancelled")
        }
    )
    columns = ("pk", "step_count", "open", "failed", "cancelled")
    return {pk: StepNumbers(*counts) for pk, *counts in counted.values_list(*columns)}


def snapshot(id: uuid.UUID | str) -> WorkflowSnapshot | None:
    """Return what is known of a workflow, or None if there is no such row."""
    row = models.Workflow.objects.using(jobs_database()).filter(pk=id).first()
    return None if row is None else snapshots([row])[0]


def snapshots(rows: Collection[models.Workflow]) -> list[WorkflowSnapshot]:
    """Return what is known of the workflows of these rows, in their order, in one query."""
    counts = numbers_of([row.pk for row in rows])
    return [
        WorkflowSnapshot(
            id=str(row.pk),
            name=row.name,
            unique_id=row.unique_id,
            state=WorkflowState(row.state),
            reason=row.reason,
            steps=counts.get(row.pk, StepNumbers(row.step_count, 0, 0, 0)),
            deadline=row.deadline,
            created_at=row.created_at,
            finished_at=row.finished_at,
        )
        for row in rows
    ]


def graph(id: uuid.UUID | str) -> list[StageSnapshot]:
    """Return the nodes of a workflow's graph, each behind those that it waits for.

    :raises ValueError: the id is no UUID.
    """
    using, key = jobs_database(), uuid.UUID(str(id))
    rows = WorkflowStage.objects.using(using).filter(workflow=key).order_by("pk")
    stages = list(
        rows.annotate(
            open=Sum("counts__open_count"),
            failed=Sum("counts__failed_count"),
            cancelled=Sum("counts__cancelled_count"),
        )
    )
    edges = WorkflowEdge.objects.using(using).filter(stage__workflow=key).order_by("pk")
    required: defaultdict[uuid.UUID, list[uuid.UUID]] = defaultdict(list)
    waiting: Counter[uuid.UUID] = Counter()
    for before, follower, is_met in edges.values_list("required_id", "stage_id", "is_met"):
        required[follower].append(before)
        waiting[follower] += not is_met
    layers = _layers([stage.pk for stage in stages], required)
    found = []
    for stage in sorted(stages, key=lambda stage: layers[stage.pk]):
        steps = StepNumbers(stage.step_count, stage.open, stage.failed, stage.cancelled)
        found.append(
            StageSnapshot(
                id=str(stage.pk),
                handler=stage.handler,
                queue=stage.queue,
                on_failure=OnFailure(stage.on_failure),
                state=_state_of(steps, waits=bool(waiting[stage.pk])),
                steps=steps,
                layer=layers[stage.pk],
                required=tuple(map(str, required[stage.pk])),
                finished_at=stage.finished_at,
            )
        )
    return found


def _state_of(
    steps: StepNumbers, *, waits: bool
) -> Literal["waiting", "running", "completed", "failed", "cancelled"]:
    if steps.open:
        return "waiting" if waits else "running"
    if steps.failed:
        return "failed"
    return "cancelled" if steps.cancelled else "completed"


def _layers(
    stages: Collection[uuid.UUID], required: dict[uuid.UUID, list[uuid.UUID]]
) -> dict[uuid.UUID, int]:
    left = {stage: len(required.get(stage, ())) for stage in stages}
    followers: defaultdict[uuid.UUID, list[uuid.UUID]] = defaultdict(list)
    for stage, before in required.items():
        for one in before:
            followers[one].append(stage)
    layers = dict.fromkeys(stages, 0)
    ready = [stage for stage in stages if not left[stage]]
    for stage in ready:
        for follower in followers[stage]:
            layers[follower] = max(layers[follower], layers[stage] + 1)
            left[follower] -= 1
            if not left[follower]:
                ready.append(follower)
    return layers
