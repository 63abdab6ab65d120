"""Deleting what has been kept long enough, in bounded chunks, each its own transaction.

Jobs and dead letters are walked as a range of the primary key, since UUIDv7 is the time of
creation; nothing is deleted before its own time of ending is old enough as well. Run it as often as
you like, side by side too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from kjo_django.conf import get_settings
from kjo_django.ids import ago, uuid7_floor
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
)
from kjo_django.operations.rows import CHUNK, chunks, lock
from kjo_django.runtime import jobs_database
from kjo_django.states import JobState

LEASES_KEPT = timedelta(days=1)
"""An expired lease still counts the deliveries of its message, which may yet come again."""

PruneProgress = Callable[[str, int], None]
"""Called with what is being pruned and how many rows of it are gone."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long what is kept, counted from its end."""

    completed: timedelta
    """Completed and cancelled jobs; a living result keeps its job."""
    failed: timedelta
    """Failed jobs without an open dead letter, and closed dead letters."""
    processed_events: timedelta
    metrics: timedelta
    """Metric buckets and dead workers."""

    @classmethod
    def of_settings(cls, **overrides: timedelta | None) -> Retention:
        """Return that of the settings; None overrides nothing."""
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
    """Delete what is older than its retention; returns how many rows of each kind were deleted, or
    would be."""
    pruner = _Pruner(retention or Retention.of_settings(), dry_run, progress)
    return pruner.run()


class _Pruner:
    def __init__(self, retention: Retention, dry_run: bool, progress: PruneProgress) -> None:
        self._retention = retention
        self._dry_run = dry_run
        self._progress = progress
        self._using = jobs_database()
        self._now = timezone.now()

    def run(self) -> dict[str, int]:
        kept = self._retention
        return {
            "jobs": self._jobs("jobs", self._finished(), kept.completed),
            "failed_jobs": self._jobs("failed_jobs", self._failed(), kept.failed),
            "dead_letters": self._dead_letters(),
            "processed_events": self._rows(
                "processed_events",
                # By time, not by key: other services that share the table mint other ids.
                ProcessedEvent.objects.filter(
                    processed_at__lt=ago(self._now, kept.processed_events)
                ),
                "processed_at",
            ),
            "metric_buckets": self._rows(
                "metric_buckets",
                MetricBucket.objects.filter(minute__lt=ago(self._now, kept.metrics)),
                "minute",
            ),
            "metric_rollups": self._rows(
                "metric_rollups",
                MetricRollup.objects.filter(minute__lt=ago(self._now, kept.metrics)),
                "pk",
            ),
            "workers": self._rows(
                "workers",
                Worker.objects.filter(heartbeat_at__lt=ago(self._now, kept.metrics)),
                "pk",
            ),
            "leases": self._rows(
                "leases", Lease.objects.filter(expires_at__lt=self._now - LEASES_KEPT), "pk"
            ),
            "marks": self._rows("marks", Mark.objects.filter(expires_at__lt=self._now), "pk"),
        }

    # --- What is old enough -----------------------------------------------------------------------

    def _finished(self) -> QuerySet[Job]:
        # Their open dead letters are of earlier generations, and hold all that a replay needs.
        jobs = Job.objects.filter(state__in=(JobState.COMPLETED, JobState.CANCELLED))
        return jobs.exclude(result_expires_at__gt=self._now)

    def _failed(self) -> QuerySet[Job]:
        letters = DeadLetter.objects.filter(job=OuterRef("pk"), state=DeadLetterState.OPEN)
        return Job.objects.filter(~Exists(letters), state=JobState.FAILED)

    # --- Deleting ---------------------------------------------------------------------------------

    def _jobs(self, kind: str, jobs: QuerySet[Job], age: timedelta) -> int:
        cutoff = ago(self._now, age)
        ended = Q(finished_at__lt=cutoff) | Q(finished_at=None)
        rows = jobs.using(self._using).filter(ended, pk__lt=uuid7_floor(cutoff))
        count = 0
        for keys in chunks(rows, CHUNK):
            count += len(keys) if self._dry_run else self._delete_jobs(rows, keys)
            self._progress(kind, count)
        return count

    def _delete_jobs(self, rows: QuerySet[Job], keys: list[Any]) -> int:
        """Delete those that still are what they were when they were found: another process may have
        enqueued one of them anew."""
        with transaction.atomic(using=self._using):
            held = [job.pk for job in lock(rows.only("pk", "state"), keys)]
            if not held:
                return 0
            JobFailure.objects.using(self._using).filter(job_id__in=held).delete()
            DeadLetter.objects.using(self._using).filter(job_id__in=held).update(job=None)
            # One statement: what refers to them is gone, and nobody listens to their signals.
            return Job.objects.using(self._using).filter(pk__in=held)._raw_delete(self._using)

    def _dead_letters(self) -> int:
        cutoff = ago(self._now, self._retention.failed)
        closed = DeadLetter.objects.exclude(state=DeadLetterState.OPEN)
        rows = closed.using(self._using).filter(pk__lt=uuid7_floor(cutoff), closed_at__lt=cutoff)
        return self._chunked("dead_letters", chunks(rows, CHUNK), rows)

    def _rows(self, kind: str, rows: QuerySet[Any], order: str) -> int:
        rows = rows.using(self._using)
        if self._dry_run:
            count = rows.order_by().count()
            self._progress(kind, count)
            return count
        return self._chunked(kind, _heads(rows.order_by(order)), rows)

    def _chunked(self, kind: str, found: Iterable[list[Any]], rows: QuerySet[Any]) -> int:
        count = 0
        for keys in found:
            if self._dry_run:
                count += len(keys)
            else:
                with transaction.atomic(using=self._using):
                    count += rows.filter(pk__in=keys).order_by()._raw_delete(self._using)
            self._progress(kind, count)
        return count


def _heads(rows: QuerySet[Any]) -> Iterator[list[Any]]:
    """Yield the first rows again and again; whoever takes them deletes them."""
    keys = list(rows.values_list("pk", flat=True)[:CHUNK])
    while keys:
        yield keys
        before, keys = keys, list(rows.values_list("pk", flat=True)[:CHUNK])
        if keys == before:
            return  # not deleted after all, as if a row had been touched: leave it
