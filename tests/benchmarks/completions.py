"""The rate of a drain, told by the rows themselves: from the first to the last completion."""

from __future__ import annotations

from datetime import datetime

from django.db.models import Max, Min

from kjo_django.models import Job, ProcessedEvent
from tests.benchmarks.counters import Clock
from tests.benchmarks.errors import BenchmarkError
from tests.ledger.models import Entry


def figures(jobs: int, handler: str, clock: Clock) -> dict[str, float]:
    """Return the figures of a drain that has ended, ours or a limit's.

    What was completed with the first commit is left out, as is the time until then.

    :raises BenchmarkError: not every job took effect exactly once.
    """
    cpu_seconds = clock.cpu_seconds
    _check("completed jobs", Job.objects.filter(state="completed").count(), jobs)
    _check("processed events", ProcessedEvent.objects.count(), jobs)
    _check("ledger entries", Entry.objects.count(), jobs if handler == "write" else 0)
    ends = Job.objects.aggregate(first=Min("finished_at"), last=Max("finished_at"))
    first: datetime = ends["first"]
    last: datetime = ends["last"]
    later = jobs - Job.objects.filter(finished_at=first).count()
    seconds = (last - first).total_seconds()
    if not later or not seconds:
        raise BenchmarkError(f"{jobs} jobs were completed at once: too few to measure a rate")
    return {
        "jobs_per_second": later / seconds,
        "seconds": seconds,
        "seconds_to_first": (first - clock.started_at).total_seconds(),
        "cpu_us_per_job": cpu_seconds / jobs * 1e6,
    }


def _check(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise BenchmarkError(f"{found} {what} instead of {wanted}")
