"""The rate of a drain, told by the rows themselves: from the first to the last completion."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django.db.models import Max, Min, QuerySet

from kjo_django.models import Job, ProcessedEvent
from tests.benchmarks.counters import Clock
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.workloads import WORKLOADS, Workload
from tests.ledger.models import Entry


def figures(jobs: int, workload: str, clock: Clock) -> dict[str, float]:
    """Return the figures of a drain that has ended, ours or a limit's.

    What was completed with the first commit is left out, as is the time until then.

    :raises BenchmarkError: not every job took effect exactly once, or keys are out of order.
    """
    cpu_seconds = clock.cpu_seconds
    check(jobs, WORKLOADS[workload])
    completed = measured_jobs()
    ends = completed.aggregate(first=Min("finished_at"), last=Max("finished_at"))
    first: datetime = ends["first"]
    last: datetime = ends["last"]
    later = jobs - completed.filter(finished_at=first).count()
    seconds = (last - first).total_seconds()
    if not later or not seconds:
        raise BenchmarkError(f"{jobs} jobs were completed at once: too few to measure a rate")
    return {
        "jobs_per_second": later / seconds,
        "seconds": seconds,
        "seconds_to_first": (first - clock.started_at).total_seconds(),
        "cpu_us_per_job": cpu_seconds / jobs * 1e6,
    }


def measured_jobs(state: str = "completed") -> QuerySet[Job]:
    """Return the jobs this measurement brought to a state; not those its table is filled with."""
    return _since(Job.objects.filter(state=state))


def check(jobs: int, workload: Workload) -> None:
    """Look whether every job took effect exactly once.

    :raises BenchmarkError: no; which and how many.
    """
    _equal("completed jobs", measured_jobs().count(), jobs)
    _equal("processed events", _since(ProcessedEvent.objects.all()).count(), jobs)
    _equal("ledger entries", Entry.objects.count(), jobs if workload.has_entries else 0)
    if workload.is_ordered:
        check_order(Entry.objects.order_by("id").values_list("note", "job"))


def check_order(entries: Iterable[tuple[str, str]]) -> None:
    """Look whether the jobs of each key come in order; entries are keys and jobs.

    :raises BenchmarkError: they do not.
    """
    by_key: dict[str, list[str]] = {}
    for key, job in entries:
        by_key.setdefault(key, []).append(job)
    for key, jobs in by_key.items():
        for before, after in itertools.pairwise(jobs):
            if before >= after:
                raise BenchmarkError(f"{key}: {after} was carried out after {before}")


def _since(rows: QuerySet[Any]) -> QuerySet[Any]:
    # Ids grow with time.
    since = os.environ.get("KJO_BENCHMARK_SINCE")
    return rows.filter(pk__gte=since) if since else rows


def _equal(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise BenchmarkError(f"{found} {what} instead of {wanted}")
