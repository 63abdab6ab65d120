"""What people do to workflows: cancel them, repeat their failed steps, and end the overdue ones."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Unpack

from django.db import connections, transaction
from django.db.models import F, QuerySet

from kjo_django.clock import CLOCK
from kjo_django.exceptions import CoordinationError
from kjo_django.logs import get_logger
from kjo_django.models import Job, Workflow, WorkflowEdge, WorkflowStage
from kjo_django.operations import jobs
from kjo_django.operations.jobs import Outcomes
from kjo_django.operations.rows import ChangeOptions, chunks, key_of
from kjo_django.runtime import current_runtime, jobs_database
from kjo_django.states import FINAL, OPEN, OPEN_WORKFLOWS, JobState, WorkflowState
from kjo_django.workflows.countdown import await_again, cancel_waiting, save_state

logger = get_logger("kjo_django")

_UNCOMPLETED = WorkflowState.CANCELLED, WorkflowState.FAILED
Selection = QuerySet[Workflow] | Iterable[Workflow | uuid.UUID | str]


def cancel(
    workflows: Selection,
    *,
    reason: str = "",
    state: WorkflowState = WorkflowState.CANCELLED,
    **options: Unpack[ChangeOptions],
) -> Outcomes:
    """End workflows: what waits or is queued is cancelled, and running steps are asked to end.

    Results: ``cancelled``; of one that has ended before, its state; ``not_found``. A call whose
    process dies, or that cannot ask running steps, may leave steps of an ended workflow open;
    another call ends these.

    :param reason: why; by default it says who asked.
    :param state: the state that the workflows end in.
    """
    outcomes, actor = Outcomes(), options.get("actor", "")
    why = reason or (f"Cancelled by {actor}" if actor else "Cancelled")
    end = partial(_end, state=state, why=why[:500])
    for key in _changed(workflows, "cancelled", end, outcomes, options, also=_UNCOMPLETED):
        left = Job.objects.using(jobs_database()).filter(stage__workflow=key, state__in=OPEN)
        try:
            jobs.cancel(left, abort=True, actor=actor)
        except CoordinationError as error:
            logger.warning("Running steps of workflow %s go on to their end: %s", key, error)
    return outcomes


def retry(workflows: Selection, **options: Unpack[ChangeOptions]) -> Outcomes:
    """Let workflows go on from their failed and cancelled steps: these run again, with all their
    attempts, and what was cancelled for them waits again.

    Results: ``retried``; ``unchanged`` where no step has failed or was cancelled; ``not_found``.
    """
    outcomes, actor = Outcomes(), options.get("actor", "")
    for keys in chunks(workflows, 1):
        for key in map(key_of, keys):
            row = _read(key)
            if row is None:
                outcomes.add("not_found")
                continue
            count = _requeue(key, actor)
            steps = Job.objects.filter(stage__workflow=key)
            with transaction.atomic(using=jobs_database()):
                current_runtime().store.take_write_lock()
                count += len(await_again(current_runtime(), steps))
                on_changed = options.get("on_changed")
                if count and on_changed is not None:
                    on_changed([row])
            # A step before may have completed meanwhile; what waited for it waits no longer.
            count += _requeue(key, actor)
            if count:
                outcomes.add_changed("retried", 1)
            else:
                outcomes.add("unchanged")
    return outcomes


def set_deadline(
    workflows: Selection, seconds: float | None, **options: Unpack[ChangeOptions]
) -> Outcomes:
    """Change until when open workflows must have ended.

    Results: ``changed``; of one that has ended, its state; ``not_found``.

    :param seconds: from now; None: there is no deadline any more.
    """
    outcomes = Outcomes()
    deadline = None if seconds is None else CLOCK.now() + timedelta(seconds=seconds)

    def change(row: Workflow) -> None:
        row.deadline = deadline
        save_state(current_runtime(), row, row.state)

    for _ in _changed(workflows, "changed", change, outcomes, options):
        pass
    return outcomes


def _changed(
    workflows: Selection,
    result: str,
    change: Callable[[Workflow], None],
    outcomes: Outcomes,
    options: ChangeOptions,
    also: Collection[WorkflowState] = (),
) -> Iterator[Any]:
    """Change each workflow that is open in a transaction of its own, and yield its key after the
    commit.

    :param also: the states of workflows that have ended whose keys are yielded, too.
    """
    for key in (key_of(key) for keys in chunks(workflows, 1) for key in keys):
        before = _change_one(key, change, options)
        if before in OPEN_WORKFLOWS:
            outcomes.add_changed(result, 1)
        else:
            outcomes.add(before)
        if before in (*OPEN_WORKFLOWS, *also):
            yield key


def _change_one(key: Any, change: Callable[[Workflow], None], options: ChangeOptions) -> str:
    """Change a workflow if it is open; return the state it had, or ``not_found``."""
    with transaction.atomic(using=jobs_database()):
        row = _locked(key)
        if row is None:
            return "not_found"
        before, on_changed = row.state, options.get("on_changed")
        if before in OPEN_WORKFLOWS:
            change(row)
            if on_changed is not None:
                on_changed([row])
        return before


def end_overdue(now: datetime | None = None) -> int:
    """Fail the open workflows whose deadline is over; return how many."""
    rows = Workflow.objects.using(jobs_database()).filter(
        state__in=OPEN_WORKFLOWS, deadline__lte=now or CLOCK.now()
    )
    overdue = list(rows.order_by("deadline")[:100])
    why = "It had not ended by its deadline"
    return cancel(overdue, reason=why, state=WorkflowState.FAILED).changed_count if overdue else 0


def _read(key: Any) -> Workflow | None:
    return Workflow.objects.using(jobs_database()).filter(pk=key).first()


def _locked(key: Any) -> Workflow | None:
    """Lock a workflow's row until the transaction ends, and return it."""
    rows = Workflow.objects.using(jobs_database()).filter(pk=key)
    features = connections[jobs_database()].features
    if features.has_select_for_update:
        rows = rows.select_for_update(no_key=features.has_select_for_no_key_update)
    else:
        rows.update(state=F("state"))  # SQLite: the transaction writes before it reads
    return rows.first()


def _end(row: Workflow, state: WorkflowState, why: str) -> None:
    """Cancel all stages that wait, and write down that the workflow has ended."""
    runtime, now, before = current_runtime(), CLOCK.now(), row.state
    stages = WorkflowStage.objects.using(runtime.database).filter(workflow=row)
    for stage in stages.filter(finished_at=None, pk__in=_waiting(row).values("stage")):
        cancel_waiting(runtime, stage.pk, f"The workflow has ended: {why}", now)
        stages.filter(pk=stage.pk).update(finished_at=now)
        row.open_stage_count -= 1
    row.state, row.reason, row.finished_at = state, why, now
    save_state(runtime, row, before)


def _waiting(row: Workflow) -> QuerySet[WorkflowEdge]:
    edges = WorkflowEdge.objects.using(jobs_database())
    return edges.filter(stage__workflow=row, is_met=False)


def _requeue(key: Any, actor: str) -> int:
    """Requeue the failed and cancelled steps of stages that wait for nothing."""
    using = jobs_database()
    ended = [state for state in FINAL if state != JobState.COMPLETED]
    waiting = WorkflowEdge.objects.using(using).filter(stage__workflow=key, is_met=False)
    steps = Job.objects.using(using).filter(stage__workflow=key, state__in=ended)
    again = steps.exclude(stage__in=waiting.values("stage"))
    return jobs.requeue(again, actor=actor).changed_count if again.exists() else 0
