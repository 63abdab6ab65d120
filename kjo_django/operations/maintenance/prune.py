"""Deletion of rows that are older than their retention, in chunks of one transaction each.

Jobs and dead letters are read as a range of the primary key, since a UUIDv7 contains the time of
creation. The time of their end must be old enough, too. Several processes may prune at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from django.db import DatabaseError, connections, transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from kjo_django.clock import CLOCK
from kjo_django.conf import get_settings
from kjo_django.ids import ago, uuid7_floor
from kjo_django.logs import get_logger
from kjo_django.models import (
    DeadLetter,
    DeadLetterState,
    Job,
    JobFailure,
    Lease,
    Mark,
    MetricBucket,
    MetricRollup,
    ProcessedEvent,
    Worker,
    Workflow,
    WorkflowCount,
    WorkflowEdge,
    WorkflowStage,
)
from kjo_django.operations.rows import CHUNK, chunks, lock
from kjo_django.runtime import jobs_database
from kjo_django.states import OPEN_WORKFLOWS, JobState, WorkflowState

logger = get_logger("kjo_django")

LEASES_KEPT = timedelta(days=1)
"""An expired lease still counts the deliveries of its message, which may come again."""

PruneProgress = Callable[[str, int], None]
"""Called with a kind of rows and how many of them are deleted."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long rows are kept after their end."""

    completed: timedelta
    """Completed and cancelled jobs; a job stays as long as its result."""
    failed: timedelta
    """Failed jobs without an open dead letter, and closed dead letters."""
    processed_events: timedelta
    metrics: timedelta
    """Metric buckets and dead workers."""
    open_dead_letters: timedelta | None = None
    """Dead letters that nobody has replayed or discarded; None: they are kept."""

    @classmethod
    def of_settings(cls, **overrides: timedelta | None) -> Retention:
        """Return the retention of the settings. An override of None changes nothing."""
        conf = get_settings()
        usual = {field.name: getattr(conf, f"retention_{field.name}") for field in fields(cls)}
        given = {name: age for name, age in overrides.items() if age is not None}
        return cls(**{**usual, **given})


def prune(
    retention: Retention | None = None,
    *,
    dry_run: bool = False,
    progress: PruneProgress = lambda kind, count: None,
) -> dict[str, int]:
    """Delete rows older than their retention; return how many of each kind.

    :param dry_run: delete nothing; return how many would be deleted.
    """
    counts: dict[str, int] = {}
    for kind, count in prune_in_steps(retention, dry_run=dry_run):
        if count != counts.get(kind):
            progress(kind, count)
        counts[kind] = count
    return counts


def prune_in_steps(
    retention: Retention | None = None, *, dry_run: bool = False
) -> Iterator[tuple[str, int]]:
    """Delete rows older than their retention, a chunk at a time; yield after each chunk, and at the
    end of each kind, the kind and how many rows of it are deleted so far.

    What the database refuses of one kind keeps no other kind from being deleted.

    :param dry_run: delete nothing, and yield how many rows would be deleted.
    :raises DatabaseError: the first of them, at the end; at once if the database is away.
    """
    counts: Counter[str] = Counter()
    errors: list[DatabaseError] = []
    for kind, (selection, order) in _kinds(retention or Retention.of_settings()).items():
        steps = _counted(selection, order) if dry_run else _deleted(selection, order)
        try:
            for count in steps:
                counts[kind] += count
                yield kind, counts[kind]
        except DatabaseError as error:
            if not connections[selection.db].is_usable():
                raise
            errors.append(error)
        yield kind, counts[kind]
    if not dry_run and (deleted := {kind: count for kind, count in counts.items() if count}):
        shown = ", ".join(f"{count:,} {kind}" for kind, count in deleted.items())
        logger.info("Pruned %s", shown, extra={"pruned": deleted})
    if errors:
        raise errors[0]


def _kinds(kept: Retention) -> dict[str, tuple[QuerySet[Any], str]]:
    """Return the rows of each kind that are older than their retention, and the column by which
    they are read: "" for their key."""
    using, now = jobs_database(), CLOCK.now()
    metrics_until = ago(now, kept.metrics)
    closed_until = ago(now, kept.failed)
    # A completed job with an open dead letter may be deleted: the letter is of an earlier
    # generation, and a replay needs nothing else.
    # What an open workflow may still read or repeat stays.
    needed = Workflow.objects.filter(stages=OuterRef("stage"), state__in=OPEN_WORKFLOWS)
    jobs = Job.objects.filter(Q(stage=None) | ~Exists(needed))
    finished = jobs.filter(state__in=(JobState.COMPLETED, JobState.CANCELLED))
    letters = DeadLetter.objects.filter(job=OuterRef("pk"), state=DeadLetterState.OPEN)
    failed = jobs.filter(~Exists(letters), state=JobState.FAILED)
    steps = Job.objects.filter(stage__workflow=OuterRef("pk"))
    workflows = Workflow.objects.filter(
        ~Exists(steps),
        finished_at__lt=ago(now, min(kept.completed, kept.failed)),
        state__in=set(WorkflowState) - set(OPEN_WORKFLOWS),
    )
    closed = DeadLetter.objects.exclude(state=DeadLetterState.OPEN).filter(
        pk__lt=uuid7_floor(closed_until), closed_at__lt=closed_until
    )
    # By time, not by key: other services that share the table have other kinds of keys.
    events = ProcessedEvent.objects.filter(processed_at__lt=ago(now, kept.processed_events))
    kinds: dict[str, tuple[QuerySet[Any], str]] = {}
    if kept.open_dead_letters is not None:
        open_until = ago(now, kept.open_dead_letters)
        open_letters = DeadLetter.objects.filter(
            pk__lt=uuid7_floor(open_until), failed_at__lt=open_until, state=DeadLetterState.OPEN
        )
        # The first: a failed job may be deleted once it has no open letter any more.
        kinds["open_dead_letters"] = (open_letters, "")
    kinds |= {
        "jobs": (_ended(finished.exclude(result_expires_at__gt=now), ago(now, kept.completed)), ""),
        "failed_jobs": (_ended(failed, closed_until), ""),
        "dead_letters": (closed, ""),
        "workflows": (workflows, "pk"),
        "processed_events": (events, "processed_at"),
        "metric_buckets": (MetricBucket.objects.filter(minute__lt=metrics_until), "minute"),
        "metric_rollups": (MetricRollup.objects.filter(minute__lt=metrics_until), "pk"),
        "workers": (Worker.objects.filter(heartbeat_at__lt=metrics_until), "pk"),
        "leases": (Lease.objects.filter(expires_at__lt=now - LEASES_KEPT), "pk"),
        "marks": (Mark.objects.filter(expires_at__lt=now), "pk"),
    }
    return {kind: (rows.using(using), order) for kind, (rows, order) in kinds.items()}


def _counted(rows: QuerySet[Any], order: str) -> Iterator[int]:
    """Yield how many rows would be deleted, one chunk after the other."""
    if order:
        yield rows.order_by().count()
    else:
        yield from map(len, chunks(rows, CHUNK))


def _deleted(rows: QuerySet[Any], order: str) -> Iterator[int]:
    """Delete rows; yield how many were, after each chunk.

    :param order: the column by which they are read; "": by their key, all of them at one time.
    """
    delete: Delete = _DELETE.get(rows.model, _delete)
    for keys in _heads(rows.order_by(order)) if order else chunks(rows, CHUNK):
        with transaction.atomic(using=rows.db):
            count = delete(rows, keys)
        yield count


def _ended(jobs: QuerySet[Job], cutoff: datetime) -> QuerySet[Job]:
    ended = Q(finished_at__lt=cutoff) | Q(finished_at=None)
    return jobs.filter(ended, pk__lt=uuid7_floor(cutoff))


def _delete(rows: QuerySet[Any], keys: list[Any]) -> int:
    """Delete rows but those that others have locked, who may wait for more of them: a later prune
    does."""
    if connections[rows.db].features.has_select_for_update_skip_locked:
        free = rows.filter(pk__in=keys).order_by().select_for_update(skip_locked=True)
        keys = list(free.values_list("pk", flat=True))
    # One statement: no receiver needs the rows' signals.
    return int(rows.filter(pk__in=keys).order_by()._raw_delete(rows.db)) if keys else 0


def _delete_jobs(rows: QuerySet[Job], keys: list[Any]) -> int:
    """Delete the jobs that are still in the selection: another process may have enqueued one."""
    locked = [job.pk for job in lock(rows.only("pk", "state"), keys)]
    if not locked:
        return 0
    JobFailure.objects.using(rows.db).filter(job_id__in=locked).delete()
    DeadLetter.objects.using(rows.db).filter(job_id__in=locked).update(job=None)
    return _delete(Job.objects.using(rows.db), locked)


def _delete_workflows(rows: QuerySet[Any], keys: list[Any]) -> int:
    """Delete workflows of which no step is left."""
    locked = [row.pk for row in lock(rows.only("pk", "state"), keys)]
    stages = WorkflowStage.objects.using(rows.db).filter(workflow__in=locked)
    ids = list(stages.values_list("pk", flat=True))
    stages.update(source=None)
    for start in range(0, len(ids), CHUNK):
        some = ids[start : start + CHUNK]
        WorkflowEdge.objects.using(rows.db).filter(
            Q(required__in=some) | Q(stage__in=some)
        ).delete()
        WorkflowCount.objects.using(rows.db).filter(stage__in=some).delete()
        _delete(stages, some)
    return _delete(Workflow.objects.using(rows.db), locked)


Delete = Callable[[Any, list[Any]], int]
_DELETE: dict[Any, Delete] = {
    Job: _delete_jobs,
    Workflow: _delete_workflows,
}


def _heads(rows: QuerySet[Any]) -> Iterator[list[Any]]:
    """Yield the keys of the first rows again and again; the caller deletes these rows."""
    keys = list(rows.values_list("pk", flat=True)[:CHUNK])
    while keys:
        yield keys
        before, keys = keys, list(rows.values_list("pk", flat=True)[:CHUNK])
        if keys == before:
            return  # the rows were not deleted
