"""Counting steps that have ended, and what follows: steps that waited are released or cancelled.

All of it happens in the transaction that records how a step ended. Locks are taken in one order, so
no two of these transactions wait for each other in a circle:

1. the rows of the jobs that have ended,
2. the counts of their stages, in the order of their keys,
3. the workflows, in the order of their keys,
4. everything else of these workflows: edges, and counts and jobs of stages that wait.

Most transactions end with the second: only the last step of a row of counts, and one that failed,
may release or cancel others. Of two transactions that count the last steps of a stage at once, the
second to lock the workflow sees what the first has written.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import add
from typing import Any
from uuid import UUID

from django.db import connections, transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet, Sum
from django.db.models.functions import Greatest
from django.utils import timezone

from kjo_django import models, signals
from kjo_django.enqueue.storing import after_commit, channel_of, dispatch_jobs, initial_state
from kjo_django.models import Job, WorkflowCount, WorkflowEdge, WorkflowStage, transition
from kjo_django.runtime import Runtime
from kjo_django.states import OPEN_WORKFLOWS, JobState, OnFailure, WorkflowState
from kjo_django.store.rows import StepCounts
from kjo_django.workflows.definition import insert
from kjo_django.workflows.step_context import StageFacts, WorkflowContext, facts_of_stages

logger = logging.getLogger("kjo_django")

CHANGES: dict[str, StepCounts] = {
    JobState.COMPLETED: StepCounts(-1),
    JobState.FAILED: StepCounts(-1, failed=1),
    JobState.CANCELLED: StepCounts(-1, cancelled=1),
}
"""What the end of a step in each state adds to the counts of its stage."""
RELEASED_TOGETHER = 500
"""Jobs whose messages are made at once."""


def count_ended(
    runtime: Runtime,
    ended: Iterable[tuple[UUID, UUID, str]],
    running: Iterable[WorkflowContext] = (),
) -> None:
    """Count steps that have ended, and release what waited for them, inside the transaction that
    records it.

    :param ended: the stage, the job and the final state of each.
    :param running: the contexts of those that have completed; the steps they added are stored.
    """
    changes = [(stage, job, CHANGES[state]) for stage, job, state in ended]
    added = [context for context in running if context.added]
    _count(runtime, changes, added)


def count_reopened(runtime: Runtime, reopened: Iterable[tuple[UUID, UUID, str]]) -> None:
    """Count steps that run again, inside the transaction that requeues them.

    :param reopened: the stage, the job and the state of each before that.
    """
    changes = [
        (stage, job, StepCounts(*(-number for number in CHANGES[state])))
        for stage, job, state in reopened
        if state in CHANGES
    ]
    _count(runtime, changes)


def _count(
    runtime: Runtime,
    changes: Sequence[tuple[UUID, UUID, StepCounts]],
    added: Sequence[WorkflowContext] = (),
) -> None:
    facts = facts_of_stages(runtime, {stage for stage, _, _ in changes})
    now = _write_counts(runtime, facts, changes)
    # A failure may cancel what waits, and a step that runs again reopens its stage.
    notable = {
        stage
        for stage, _, change in changes
        if change.open > 0 or change.failed or change.cancelled
    }
    notable |= {context.stage_id for context in added}
    notable |= {stage for stage, counts in now if counts.open == 0}
    notable &= facts.keys()
    if notable:
        workflows = {facts[stage].workflow_id for stage in notable}
        again = {facts[stage].workflow_id for stage, _, change in changes if change.open > 0}
        _Advance(runtime, workflows, again).run(notable, added)


def give_up(runtime: Runtime, stages: Iterable[UUID]) -> None:
    """Cancel what waits for failed steps that nobody will repeat, in the caller's transaction."""
    facts = facts_of_stages(runtime, set(stages))
    workflows = {one.workflow_id for one in facts.values()}
    if workflows:
        _Advance(runtime, workflows, gives_up=True).run(facts.keys())


def _write_counts(
    runtime: Runtime,
    facts: Mapping[UUID, StageFacts],
    changes: Iterable[tuple[UUID, UUID, StepCounts]],
) -> list[tuple[UUID, StepCounts]]:
    """Add changes to the counts of stages; return the stage and the numbers of each row. A stage
    without facts was pruned."""
    totals: dict[int, StepCounts] = {}
    for stage, job, change in changes:
        if stage in facts:
            counts = facts[stage].counts
            key = counts[job.int % len(counts)]
            found = totals.get(key)
            totals[key] = change if found is None else StepCounts(*map(add, found, change))
    return runtime.store.count_steps(dict(sorted(totals.items()))) if totals else []


class _Advance:
    """What follows from the ends of steps, under the locks of their workflows.

    :param workflows: the keys of these.
    :param again: those with a step that runs again: one that had ended goes on.
    :param gives_up: whether what waits for a failed step to be repeated is cancelled.
    """

    def __init__(
        self,
        runtime: Runtime,
        workflows: Collection[UUID],
        again: Collection[UUID] = (),
        *,
        gives_up: bool = False,
    ) -> None:
        self._runtime = runtime
        self._again = again
        self._cancels = {OnFailure.CANCEL, OnFailure.HOLD} if gives_up else {OnFailure.CANCEL}
        self._using = using = runtime.database
        self._now = timezone.now()
        rows = models.Workflow.objects.using(using).filter(pk__in=workflows).order_by("pk")
        features = connections[using].features
        if features.has_select_for_update:
            rows = rows.select_for_update(no_key=features.has_select_for_no_key_update)
        self.workflows = {row.pk: row for row in rows}
        self._released: set[UUID] = set()
        """Workflows in which this releases steps."""

    def run(
        self,
        stages: Collection[UUID],
        added: Sequence[WorkflowContext] = (),
        *,
        follows: bool = True,
    ) -> None:
        """Go from the stages whose counts have changed to all that follows.

        :param follows: False: only note where the stages and workflows are now.
        """
        for context in added:
            self._insert(context)
        changed: set[UUID] = set()
        left = set(stages)
        while left:
            rows = self._with_counts(left)
            changed |= self._note_ends(rows)
            left = self._follow([row for row in rows if follows and (row.bad or not row.open)])
        for workflow in self.workflows.values():
            self._note_state(workflow, is_changed=workflow.pk in changed)

    def _with_counts(self, stages: Collection[UUID]) -> list[Any]:
        """Return the stages with the sums of their counts: ``open``, and ``bad`` of those that have
        failed or were cancelled."""
        rows = WorkflowStage.objects.using(self._using).filter(pk__in=stages)
        return list(
            rows.annotate(
                open=Sum("counts__open_count"),
                bad=Sum(F("counts__failed_count") + F("counts__cancelled_count")),
            )
        )

    def _note_ends(self, rows: Sequence[Any]) -> set[UUID]:
        """Write down which stages have ended, and which have begun again."""
        ended = [row for row in rows if not row.open and row.finished_at is None]
        again = [row for row in rows if row.open and row.finished_at is not None]
        stages = WorkflowStage.objects.using(self._using)
        for some, moment, change in ((ended, self._now, -1), (again, None, 1)):
            if some:
                stages.filter(pk__in=[row.pk for row in some]).update(finished_at=moment)
            for row in some:
                self.workflows[row.workflow_id].open_stage_count += change
        if again:
            # Those behind it that wait for another stage, too, wait for this one again.
            edges = WorkflowEdge.objects.using(self._using)
            waiting = edges.filter(stage=OuterRef("stage"), is_met=False)
            behind = edges.filter(Exists(waiting), required__in=again, is_met=True)
            edges.filter(pk__in=list(behind.values_list("pk", flat=True))).update(is_met=False)
        return {row.workflow_id for row in rows}

    def _follow(self, rows: Sequence[Any]) -> set[UUID]:
        """Release and cancel what waits for these stages; return the stages that this has ended."""
        if not rows:
            return set()
        by_key = {row.pk: row for row in rows}
        edges = list(
            WorkflowEdge.objects.using(self._using)
            .filter(required__in=by_key, is_met=False)
            .select_related("stage")
            .order_by("pk")
        )
        met: list[WorkflowEdge] = []
        cancelled: dict[WorkflowStage, Any] = {}
        for edge in edges:
            required, policy = by_key[edge.required_id], edge.stage.on_failure
            if required.bad and policy in self._cancels:
                cancelled.setdefault(edge.stage, required)
            elif not required.open and (not required.bad or policy == OnFailure.RUN):
                met.append(edge)
        if met:
            all_edges = WorkflowEdge.objects.using(self._using)
            all_edges.filter(pk__in=[edge.pk for edge in met]).update(is_met=True)
            candidates = {edge.stage_id: edge.stage for edge in met}
            unmet = all_edges.filter(stage__in=candidates, is_met=False)
            for id in set(unmet.values_list("stage_id", flat=True)):
                del candidates[id]
            self._release(list(candidates.values()))
        return self._cancel(cancelled)

    def _release(self, stages: Sequence[WorkflowStage]) -> None:
        """Send the steps of stages on their way."""
        by_queue: dict[tuple[UUID, str], list[UUID]] = {}
        for stage in stages:
            by_queue.setdefault((stage.workflow_id, stage.queue), []).append(stage.pk)
        for (workflow, queue), ids in by_queue.items():
            # None, where all steps were cancelled while they waited.
            if release_jobs(self._runtime, queue, Q(stage__in=ids), self._now):
                self._released.add(workflow)

    def _cancel(self, stages: Mapping[WorkflowStage, Any]) -> set[UUID]:
        """Cancel the steps of stages that wait for one that has failed; return the stages."""
        ended = {stage for stage in stages if stage.finished_at is None}
        for stage in ended:
            required = stages[stage]
            why = f"Cancelled: it waits for {required.handler}, which has failed"
            cancel_waiting(self._runtime, stage, why, self._now)
        return {stage.pk for stage in ended}

    def _note_state(self, workflow: models.Workflow, *, is_changed: bool) -> None:
        """Write down where a workflow is now; once it has ended, tell whoever listens."""
        before = workflow.state
        if not is_changed:
            return
        if workflow.pk in self._again:
            workflow.state = WorkflowState.RUNNING
            if workflow.deadline is not None and workflow.deadline <= self._now:
                workflow.deadline = None
        if workflow.state not in OPEN_WORKFLOWS:
            pass  # it was cancelled, and steps that ran then have ended since
        elif workflow.open_stage_count:
            is_held = workflow.pk not in self._released and not self._has_open_steps(workflow)
            workflow.state = WorkflowState.HELD if is_held else WorkflowState.RUNNING
            workflow.finished_at = None
            workflow.reason = "A failed step is waited for" if is_held else ""
        else:
            workflow.reason = self._why_failed(workflow)
            workflow.state = WorkflowState.FAILED if workflow.reason else WorkflowState.COMPLETED
            workflow.finished_at = self._now
        save_state(self._runtime, workflow, before)

    def _has_open_steps(self, workflow: models.Workflow) -> bool:
        """Return whether a stage has steps that have not ended and wait for nothing."""
        stages = WorkflowStage.objects.using(self._using)
        waiting = WorkflowEdge.objects.using(self._using).filter(
            stage__workflow=workflow, is_met=False
        )
        rows = stages.filter(workflow=workflow, finished_at=None)
        return rows.exclude(pk__in=waiting.values("stage")).exists()

    def _why_failed(self, workflow: models.Workflow) -> str:
        """Return which of the last steps has failed or was cancelled, "" if none."""
        stages = WorkflowStage.objects.using(self._using).filter(workflow=workflow)
        bad = stages.filter(Q(counts__failed_count__gt=0) | Q(counts__cancelled_count__gt=0))
        if not bad.filter(followers=None).exists():
            return ""
        first = bad.order_by("-counts__failed_count", "pk").first()
        return "" if first is None else f"{first.handler} has failed or was cancelled"

    def _insert(self, context: WorkflowContext) -> None:
        """Store the steps that a run has added, before what waits for its stage."""
        workflow = self.workflows.get(UUID(context.id))
        if workflow is None or workflow.state not in OPEN_WORKFLOWS:
            logger.info("Steps added to the workflow %s are dropped: it has ended", context.id)
            return
        edges = WorkflowEdge.objects.using(self._using)
        followers = edges.filter(required=context.stage_id, is_met=False)
        ids = list(followers.values_list("stage_id", flat=True))
        insert(context.added, workflow.pk, self._runtime, ids)
        workflow.open_stage_count += len(context.added)
        workflow.step_count += sum(stage.row.step_count for stage in context.added)
        self._released.add(workflow.pk)


# --- Parts of operators' changes ------------------------------------------------------------------


def cancel_steps(runtime: Runtime, jobs: Collection[UUID]) -> set[UUID]:
    """Cancel those of the jobs that wait for other steps, and return them, inside the caller's
    transaction. What follows from that is done, too."""
    runtime.store.take_write_lock()
    waiting = Job.objects.using(runtime.database).filter(pk__in=jobs, state=JobState.WAITING)
    facts = facts_of_stages(runtime, set(waiting.values_list("stage_id", flat=True)))
    advance = _Advance(runtime, {one.workflow_id for one in facts.values()})
    # Now that the workflows are locked, nobody releases them.
    rows = list(waiting.filter(stage__in=facts).values_list("stage_id", "pk"))
    cancelled = {job for _, job in rows}
    transition("cancel", waiting.filter(pk__in=cancelled), finished_at=timezone.now())
    change = CHANGES[JobState.CANCELLED]
    _write_counts(runtime, facts, [(stage, job, change) for stage, job in rows])
    advance.run({stage for stage, _ in rows})
    return cancelled


def were_cancelled_waiting(runtime: Runtime, steps: Sequence[Job]) -> set[UUID]:
    """Return the ids of those of the steps that were cancelled while they waited for others."""
    cancelled = {job.pk: job.stage_id for job in steps if job.state == JobState.CANCELLED}
    if not cancelled:
        return set()
    edges = WorkflowEdge.objects.using(runtime.database)
    unmet = edges.filter(stage__in=set(cancelled.values()), is_met=False)
    stages = set(unmet.values_list("stage_id", flat=True))
    return {id for id, stage in cancelled.items() if stage in stages}


def await_again(runtime: Runtime, jobs: QuerySet[Job]) -> set[UUID]:
    """Let those of the jobs wait again that were cancelled while they waited for other steps, and
    return them, inside the caller's transaction."""
    using = runtime.database
    cancelled = jobs.using(using).filter(state=JobState.CANCELLED, stage__isnull=False)
    facts = facts_of_stages(runtime, set(cancelled.values_list("stage_id", flat=True)))
    if not facts:
        return set()
    workflows = {one.workflow_id for one in facts.values()}
    advance = _Advance(runtime, workflows, workflows)
    unmet = WorkflowEdge.objects.using(using).filter(stage__in=facts, is_met=False)
    rows = list(cancelled.filter(stage__in=unmet.values("stage")).values_list("stage_id", "pk"))
    waiting = {job for _, job in rows}
    for some in batched(sorted(waiting), RELEASED_TOGETHER):
        transition(
            "await",
            Job.objects.using(using).filter(pk__in=some),
            finished_at=None,
            error="",
            generation=F("generation") + 1,
        )
    change = StepCounts(1, cancelled=-1)
    _write_counts(runtime, facts, [(stage, job, change) for stage, job in rows])
    advance.run({stage for stage, _ in rows}, follows=False)
    return waiting


def release_jobs(runtime: Runtime, queue: str, which: Q, now: Any) -> int:
    """Send steps of one queue that wait on their way; return how many they are."""
    using, conf = runtime.database, runtime.settings.queue(queue)
    state = initial_state(conf)
    rows = Job.objects.using(using).filter(which, queue=queue, state=JobState.WAITING)
    changes: dict[str, Any] = {"state": state, "available_at": Greatest("available_at", now)}
    if state == JobState.PENDING:
        count = transition("release", rows, **changes)
        if count:
            after_commit(using, channel_of(conf))
        return count
    count = 0
    while ids := list(rows.order_by("pk").values_list("pk", flat=True)[:RELEASED_TOGETHER]):
        some = Job.objects.using(using).filter(pk__in=ids)
        transition("release", some, queued_at=now, **changes)
        dispatch_jobs(list(some.order_by("pk").defer("result")), conf)
        count += len(ids)
    return count


def cancel_waiting(runtime: Runtime, stage: Any, why: str, now: Any) -> None:
    """Cancel the steps of a stage that wait, and count them, under the workflow's lock."""
    using = runtime.database
    rows = Job.objects.using(using).filter(stage=stage.pk, state=JobState.WAITING)
    if signals.job_cancelled.receivers:
        columns = ("pk", "unique_id", "queue", "handler")
        facts = list(rows.values_list(*columns))
        transaction.on_commit(partial(_send_cancelled, facts), using=using, robust=True)
    transition("cancel", rows, finished_at=now, error=why)
    counts = WorkflowCount.objects.using(using).filter(stage=stage.pk)
    counts.update(cancelled_count=F("cancelled_count") + F("open_count"), open_count=0)


def batched(items: Sequence[UUID], size: int) -> Iterator[Sequence[UUID]]:
    """Yield parts of a sequence, of up to ``size``."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _send_cancelled(facts: Iterable[tuple[Any, ...]]) -> None:
    for id, unique_id, queue, handler in facts:
        signals.job_cancelled.send_robust(
            sender=handler, job_id=str(id), unique_id=unique_id, queue=queue, handler=handler
        )


def save_state(runtime: Runtime, workflow: models.Workflow, before: str) -> None:
    """Write where a workflow is; if it has ended now, send its signal after the commit.

    :param before: its state until now.
    """
    columns = ("state", "reason", "finished_at", "open_stage_count", "step_count", "deadline")
    workflow.save(using=runtime.database, update_fields=columns)
    if workflow.state == before or workflow.state in OPEN_WORKFLOWS:
        return
    facts: dict[str, Any] = {"workflow_id": str(workflow.pk), "name": workflow.name}
    facts["unique_id"] = workflow.unique_id
    signal = signals.workflow_completed
    if workflow.state != WorkflowState.COMPLETED:
        signal = signals.workflow_failed
        facts |= {"state": workflow.state, "reason": workflow.reason}
    if signal.receivers:
        send = partial(signal.send_robust, sender=workflow.name, **facts)
        transaction.on_commit(send, using=runtime.database, robust=True)
