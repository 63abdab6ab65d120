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

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from operator import add
from typing import Any, Protocol
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.db.models.functions import Greatest

from kjo_django import models, signals
from kjo_django.clock import CLOCK
from kjo_django.conf import QueueConf
from kjo_django.enqueue.storing import RELAY_CHANNEL, after_commit, dispatch_jobs, is_transactional
from kjo_django.enqueue.waiting import workflow_channel
from kjo_django.logs import get_logger
from kjo_django.models import Job, Workflow, WorkflowCount, WorkflowEdge, WorkflowStage, transition
from kjo_django.runtime import Runtime
from kjo_django.states import OPEN_WORKFLOWS, JobState, OnFailure, WorkflowState
from kjo_django.store.rows import Advance, Completing, DueJob, FollowerRow, StageRow, StepCounts
from kjo_django.workflows.definition import insert
from kjo_django.workflows.step_context import (
    StageFacts,
    WorkflowContext,
    facts_of_stages,
    remember_follower,
)

logger = get_logger("kjo_django")

CHANGES: dict[str, StepCounts] = {
    JobState.COMPLETED: StepCounts(-1),
    JobState.FAILED: StepCounts(-1, failed=1),
    JobState.CANCELLED: StepCounts(-1, cancelled=1),
}
"""What the end of a step in each state adds to the counts of its stage."""
Announce = Callable[[Callable[[], object]], object]
"""Takes a call that sends a signal, to be made after the commit."""
RELEASED_TOGETHER = 500
"""Jobs whose messages are made at once."""


class Receiver(Protocol):
    """A worker that runs steps which it has released itself."""

    def room(self, queue: str, handler: str) -> int:
        """Return how many steps of this handler would start at once if they were released now."""
        ...

    def lease(self) -> tuple[str, datetime]:
        """Return the lease that is written into the rows of steps that the worker takes."""
        ...

    def joins(self, queue: str, handler: str) -> bool:
        """Return whether steps of this handler may run in the caller's transaction."""
        ...

    def join(self, steps: Sequence[DueJob]) -> object:
        """Run these steps in the caller's transaction, which has leased them."""
        ...

    def put(self, steps: Sequence[DueJob]) -> object:
        """Run these steps: they were leased, and that is committed."""
        ...


def count_ended(
    runtime: Runtime,
    ended: Iterable[tuple[UUID, UUID, str]],
    running: Iterable[WorkflowContext] = (),
    *,
    announce: Announce | None = None,
    receiver: Receiver | None = None,
    is_last: bool = False,
    completing: Completing = None,
) -> None:
    """Count steps that have ended, and release what waited for them, inside the transaction that
    records it.

    :param ended: the stage, the job and the final state of each.
    :param running: the contexts of those that have completed; the steps they added are stored.
    :param announce: takes the calls that send the signals of what this ends, for a caller that
        makes them once the commit is certain; by default they are made by ``on_commit``, which a
        COMMIT that is not answered loses.
    :param receiver: the caller's worker, where it may run released steps itself; it is handed them
        by a call that ``announce`` takes.
    :param is_last: the caller does nothing more but commit: the commit may go along with the last
        statement.
    :param completing: the completions of these steps, where the caller has their rows locked and
        has not written them yet.
    """
    changes = [(stage, job, CHANGES[state]) for stage, job, state in ended]
    added = [context for context in running if context.added]
    _count(runtime, changes, added, announce, receiver, is_last=is_last, completing=completing)


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
    announce: Announce | None = None,
    receiver: Receiver | None = None,
    *,
    is_last: bool = False,
    completing: Completing = None,
) -> None:
    facts = facts_of_stages(runtime, {stage for stage, _, _ in changes})
    totals = _totals(facts, changes)
    if not totals:
        if completing is not None:
            runtime.store.complete(*completing)
        return
    counted = {stage for stage, _, _ in changes} & facts.keys()
    notable = _notable_stages(facts, changes)
    notable |= {context.stage_id for context in added} & facts.keys()
    if notable != counted:
        now, totals, completing = runtime.store.count_steps(totals, completing), {}, None
        notable |= {stage for stage, counts in now if counts.open == 0}
    if notable:
        workflows = {facts[stage].workflow_id for stage in notable}
        again = {facts[stage].workflow_id for stage, _, change in changes if change.open > 0}
        advance = _Advance(
            *(runtime, workflows, again, totals, () if added else notable),
            announce=announce,
            receiver=receiver,
            completing=completing,
        )
        advance.run(notable, added, is_last=is_last)


def _notable_stages(
    facts: Mapping[UUID, StageFacts], changes: Sequence[tuple[UUID, UUID, StepCounts]]
) -> set[UUID]:
    """Return the stages that their changes have ended, or in which they may have changed others:
    the one step of a stage ends it, a failure may cancel what waits, and a step that runs again
    reopens its stage."""
    return {
        stage
        for stage, _, change in changes
        if stage in facts
        and (facts[stage].step_count == 1 or change.open > 0 or change.failed or change.cancelled)
    }


def give_up(runtime: Runtime, stages: Iterable[UUID]) -> None:
    """Cancel what waits for failed steps that nobody will repeat, in the caller's transaction."""
    facts = facts_of_stages(runtime, set(stages))
    workflows = {one.workflow_id for one in facts.values()}
    if workflows:
        _Advance(runtime, workflows, stages=facts.keys(), gives_up=True).run(facts.keys())


def _totals(
    facts: Mapping[UUID, StageFacts], changes: Iterable[tuple[UUID, UUID, StepCounts]]
) -> dict[int, StepCounts]:
    """Return by how much rows of counts change, in the order of their keys. A stage without facts
    was pruned."""
    totals: dict[int, StepCounts] = {}
    for stage, job, change in changes:
        if stage in facts:
            counts = facts[stage].counts
            key = counts[job.int % len(counts)]
            found = totals.get(key)
            totals[key] = change if found is None else StepCounts(*map(add, found, change))
    return dict(sorted(totals.items()))


class _Advance:
    """What follows from the ends of steps, under the locks of their workflows.

    :param workflows: the keys of these.
    :param again: those with a step that runs again: one that had ended goes on.
    :param totals: changes of rows of counts, made before the workflows are locked.
    :param stages: those that ``run`` begins with, where nothing changes before it.
    :param gives_up: whether what waits for a failed step to be repeated is cancelled.
    :param announce: as in ``count_ended``, and so are ``receiver`` and ``completing``.
    """

    def __init__(
        self,
        runtime: Runtime,
        workflows: Collection[UUID],
        again: Collection[UUID] = (),
        totals: Mapping[int, StepCounts] | None = None,
        stages: Collection[UUID] = (),
        *,
        gives_up: bool = False,
        announce: Announce | None = None,
        receiver: Receiver | None = None,
        completing: Completing = None,
    ) -> None:
        self._runtime = runtime
        self._announce = announce
        self._receiver = receiver
        self._again = again
        self._cancels = {OnFailure.CANCEL, OnFailure.HOLD} if gives_up else {OnFailure.CANCEL}
        self._using = runtime.database
        self._now = CLOCK.now()
        locked, self._rows = runtime.store.lock_workflows(workflows, totals, stages, completing)
        self.workflows = {row.pk: row for row in locked}
        self._released: set[UUID] = set()
        """Workflows in which this releases steps."""
        self._unwritten = Advance(self._now, [], [], [])
        self._joins = True
        """Whether what ``_unwritten`` leases runs in the caller's transaction."""
        self._released_count = self._reserved_count = 0
        """How many steps ``_unwritten`` releases for the relay or the worker, and how many of them
        for the worker."""

    def run(
        self,
        stages: Collection[UUID],
        added: Sequence[WorkflowContext] = (),
        *,
        follows: bool = True,
        is_last: bool = False,
    ) -> None:
        """Go from the stages whose counts have changed to all that follows.

        :param follows: False: only note where the stages and workflows are now.
        :param is_last: the caller does nothing more but commit.
        """
        for context in added:
            self._insert(context)
        changed: set[UUID] = set()
        rows, left = self._rows, set(stages)
        while left:
            rows = rows or self._runtime.store.read_stages(left)
            changed |= {row.workflow_id for row in rows}
            if self._note_ends(rows):
                rows = self._runtime.store.read_stages(left)
            left = self._follow([row for row in rows if follows and (row.bad or not row.open)])
            rows = []
        self._note_workflows([self.workflows[id] for id in sorted(changed)])
        self._write(is_last=is_last)

    def _note_workflows(self, noted: Sequence[Workflow]) -> None:
        """Note where workflows are now, and announce those that have ended."""
        before = {workflow.pk: workflow.state for workflow in noted}
        for workflow in noted:
            self._note_state(workflow)
        self._unwritten.workflows = noted
        for workflow in noted:
            send_end(self._runtime, workflow, before[workflow.pk], self._announce)

    def _write(self, *, is_last: bool = False) -> None:
        unwritten, self._unwritten = self._unwritten, Advance(self._now, [], [], [])
        joins, self._joins = self._joins and bool(unwritten.reserved), True
        leased = self._runtime.store.write_advance(unwritten, is_last=is_last and not joins)
        if leased and self._receiver is not None and joins:
            self._receiver.join(leased)
        elif leased and self._receiver is not None:
            _announcing(self._runtime, self._announce)(partial(self._receiver.put, leased))
        if len(leased) < self._released_count:
            after_commit(self._runtime, RELAY_CHANNEL)
        self._released_count = self._reserved_count = 0

    def _note_ends(self, rows: Sequence[StageRow]) -> bool:
        """Note which stages have ended, and which have begun again; return whether what was read of
        them is no longer so."""
        for row in rows:
            if not row.open and row.finished_at is None:
                self._unwritten.ended.append(row.id)
                self.workflows[row.workflow_id].open_stage_count -= 1
        again = [row for row in rows if row.open and row.finished_at is not None]
        if not again:
            return False
        for row in again:
            self.workflows[row.workflow_id].open_stage_count += 1
        ids = [row.id for row in again]
        WorkflowStage.objects.using(self._using).filter(pk__in=ids).update(finished_at=None)
        # Those behind it that wait for another stage, too, wait for this one again.
        edges = WorkflowEdge.objects.using(self._using)
        waiting = edges.filter(stage=OuterRef("stage"), is_met=False)
        behind = edges.filter(Exists(waiting), required__in=ids, is_met=True)
        edges.filter(pk__in=list(behind.values_list("pk", flat=True))).update(is_met=False)
        return True

    def _follow(self, rows: Sequence[StageRow]) -> set[UUID]:
        """Release and cancel what waits for these stages; return the stages that this has ended."""
        met: defaultdict[UUID, int] = defaultdict(int)
        candidates: dict[UUID, tuple[StageRow, FollowerRow]] = {}
        cancelled: dict[UUID, StageRow] = {}
        followers = [(required, stage) for required in rows for stage in required.followers]
        for required, stage in followers:
            if required.bad and stage.on_failure in self._cancels:
                if stage.finished_at is None:
                    cancelled.setdefault(stage.id, required)
            elif not required.open and (not required.bad or stage.on_failure == OnFailure.RUN):
                self._unwritten.met.append(stage.edge_id)
                met[stage.id] += 1
                candidates[stage.id] = required, stage
        self._release([one for id, one in candidates.items() if one[1].unmet_count == met[id]])
        if cancelled:
            self._write()
            self._cancel(cancelled)
        return set(cancelled)

    def _cancel(self, stages: Mapping[UUID, StageRow]) -> None:
        """Cancel the waiting steps of stages, each for one that has failed."""
        for id, required in stages.items():
            why = f"Cancelled: it waits for {required.handler}, which has failed"
            cancel_waiting(self._runtime, id, why, self._now, self._announce)

    def _release(self, stages: Iterable[tuple[StageRow, FollowerRow]]) -> None:
        """Send the steps of stages on their way."""
        by_queue: dict[str, list[FollowerRow]] = {}
        for required, stage in stages:
            remember_follower(required.id, stage)
            if stage.finished_at is None:  # else all steps were cancelled while they waited
                by_queue.setdefault(stage.queue, []).append(stage)
                self._released.add(required.workflow_id)
        for name, found in by_queue.items():
            queue, ids = self._runtime.settings.queue(name), [stage.id for stage in found]
            if is_transactional(queue):
                _publish_released(self._runtime, queue, ids, self._now)
            else:
                self._unwritten.released += ids
                self._released_count += sum(stage.step_count for stage in found)
                self._reserve(found)

    def _reserve(self, stages: Iterable[FollowerRow]) -> None:
        """Lease the steps of those stages that this worker would start at once."""
        receiver = self._receiver
        if receiver is None:
            return
        for stage in stages:
            count = self._reserved_count + stage.step_count
            if count <= receiver.room(stage.queue, stage.handler):
                self._reserved_count = count
                self._joins = self._joins and receiver.joins(stage.queue, stage.handler)
                self._unwritten.reserved.append(stage.id)
                self._unwritten.lease = receiver.lease()

    def _note_state(self, workflow: models.Workflow) -> None:
        """Note where a workflow is now."""
        if workflow.pk in self._again:
            workflow.state = WorkflowState.RUNNING
            if workflow.deadline is not None and workflow.deadline <= self._now:
                workflow.deadline = None
        if workflow.state not in OPEN_WORKFLOWS:
            pass  # it was cancelled, and steps that ran then have ended since
        elif workflow.open_stage_count:
            awaits_replay = workflow.pk not in self._released and not self._has_open_steps(workflow)
            workflow.state = WorkflowState.HELD if awaits_replay else WorkflowState.RUNNING
            workflow.finished_at = None
            workflow.reason = "A failed step is waited for" if awaits_replay else ""
        else:
            workflow.reason = self._why_failed(workflow)
            workflow.state = WorkflowState.FAILED if workflow.reason else WorkflowState.COMPLETED
            workflow.finished_at = self._now

    def _has_open_steps(self, workflow: models.Workflow) -> bool:
        """Return whether a stage has steps that have not ended and wait for nothing."""
        self._write()
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
    transition("cancel", waiting.filter(pk__in=cancelled), finished_at=CLOCK.now())
    change = CHANGES[JobState.CANCELLED]
    runtime.store.count_steps(_totals(facts, [(stage, job, change) for stage, job in rows]))
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
    runtime.store.count_steps(_totals(facts, [(stage, job, change) for stage, job in rows]))
    advance.run({stage for stage, _ in rows}, follows=False)
    return waiting


def _publish_released(
    runtime: Runtime, queue: QueueConf, stages: Collection[UUID], now: datetime
) -> None:
    """Send steps that wait on their way over a transport that joins the transaction."""
    jobs = Job.objects.using(runtime.database)
    rows = jobs.filter(stage__in=stages, queue=queue.name, state=JobState.WAITING).order_by("pk")
    while ids := list(rows.values_list("pk", flat=True)[:RELEASED_TOGETHER]):
        some = jobs.filter(pk__in=ids)
        due = Greatest("available_at", now)
        transition("release", some, state=JobState.QUEUED, queued_at=now, available_at=due)
        dispatch_jobs(list(some.order_by("pk").defer("result")), queue)


def cancel_waiting(
    runtime: Runtime, stage: UUID, why: str, now: datetime, announce: Announce | None = None
) -> None:
    """Cancel the steps of a stage that wait, and count them, under the workflow's lock.

    :param announce: as in ``count_ended``.
    """
    using = runtime.database
    rows = Job.objects.using(using).filter(stage=stage, state=JobState.WAITING)
    if signals.job_cancelled.receivers:
        columns = ("pk", "unique_id", "queue", "handler")
        facts = list(rows.values_list(*columns))
        _announcing(runtime, announce)(partial(_send_cancelled, facts))
    transition("cancel", rows, finished_at=now, error=why)
    counts = WorkflowCount.objects.using(using).filter(stage=stage)
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
    """Write where a workflow is; see ``send_end``.

    :param before: its state until now.
    """
    runtime.store.write_advance(Advance(CLOCK.now(), [], [], [], [workflow]))
    send_end(runtime, workflow, before)


def send_end(
    runtime: Runtime, workflow: models.Workflow, before: str, announce: Announce | None = None
) -> None:
    """If a workflow has ended now, send its signal and notify those who wait, after the commit.

    :param before: its state until now.
    :param announce: as in ``count_ended``.
    """
    if workflow.state == before or workflow.state in OPEN_WORKFLOWS:
        return
    after_commit(runtime, workflow_channel(workflow.pk))
    facts: dict[str, Any] = {"workflow_id": str(workflow.pk), "name": workflow.name}
    facts["unique_id"] = workflow.unique_id
    signal = signals.workflow_completed
    if workflow.state != WorkflowState.COMPLETED:
        signal = signals.workflow_failed
        facts |= {"state": workflow.state, "reason": workflow.reason}
    if signal.receivers:
        send = partial(signal.send_robust, sender=workflow.name, **facts)
        _announcing(runtime, announce)(send)


def _announcing(runtime: Runtime, announce: Announce | None) -> Announce:
    return announce or partial(transaction.on_commit, using=runtime.database, robust=True)
