"""Importing a batch, and what has become of it. Every query is bounded by the batch.

The jobs of a batch are named by its orders' references, which sort as their rows do: a range of
unique ids, and these have an index, is the batch. References are letters and digits in fixed
places, so that every collation of every database agrees on that range.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from django.db import transaction
from django.db.models import Count, Q, QuerySet

from example_project.shop.demo.orders_file import Row
from example_project.shop.demo.progress import Progress
from example_project.shop.models import Batch, Order
from kjo_django.models import DeadLetter, Job, JobFailure, Workflow
from kjo_django.states import FINAL, OPEN, OPEN_WORKFLOWS, JobState
from kjo_django.workflows import lists

QUEUES = ("emails", "stock", "invoices")
ROWS_PER_TRANSACTION = 500
REASONS = 50
"""Most different reasons told apart; what is left is counted together."""


def import_orders(source: str, rows: Iterable[Row], progress: Callable[[int], object]) -> Batch:
    """Save each row as an ``Order``; the save hook enqueues its job in the same transaction."""
    batch = Batch.objects.create(code=secrets.token_hex(4), source=source[:255])
    numbered = enumerate(rows, start=1)
    for chunk in _chunks(numbered, ROWS_PER_TRANSACTION):
        with transaction.atomic():
            for number, row in chunk:
                Order(
                    batch=batch, row_number=number, reference=batch.reference(number), **row
                ).save()
        progress(number)
    return batch


def _chunks(items: Iterator[tuple[int, Row]], size: int) -> Iterator[list[tuple[int, Row]]]:
    while chunk := list(itertools.islice(items, size)):
        yield chunk


def jobs_of(batch: Batch) -> QuerySet[Job]:
    """Return the batch's jobs, by the index on queue and unique id."""
    return Job.objects.filter(
        queue__in=QUEUES,
        unique_id__gte=batch.reference(0),
        unique_id__lte=batch.reference(999_999_999),
    )


class Settling:
    """Answers whether every job of the batch is settled, and shows how far it is.

    A job's follow-ups are enqueued in the transaction that completes it, so there is no moment at
    which nothing is open and something is still to come.
    """

    def __init__(self, batch: Batch, progress: Progress) -> None:
        self.batch, self.progress = batch, progress
        self._next_look = 0.0

    def __call__(self) -> bool:
        """Look again, unless that was done a moment ago."""
        began = time.monotonic()
        if began < self._next_look:
            return False
        counts = jobs_of(self.batch).aggregate(
            total=Count("pk"),
            settled=Count("pk", filter=Q(state__in=FINAL)),
            confirming=Count("pk", filter=Q(queue="emails", state__in=OPEN)),
        )
        # Counting a large batch takes a while: a tenth of the time at most goes into it.
        self._next_look = time.monotonic() + 10 * (time.monotonic() - began)
        # Each confirmation still open may be followed by two jobs more.
        self.progress.update(counts["settled"], counts["total"] + 2 * counts["confirming"])
        return bool(counts["settled"] == counts["total"])


class Reporting:
    """Answers whether the workflow of a batch's report has ended, and shows how far it is."""

    def __init__(self, workflow_id: str, progress: Progress) -> None:
        self.workflow_id, self.progress = workflow_id, progress
        self._next_look = 0.0

    def __call__(self) -> bool:
        """Look again, unless that was done a moment ago."""
        began = time.monotonic()
        if began < self._next_look:
            return False
        workflow = Workflow.objects.get(pk=self.workflow_id)
        found = lists.facts([workflow])[workflow.pk]
        self.progress.update(found["steps"] - found["open"], found["steps"])
        self._next_look = time.monotonic() + 10 * (time.monotonic() - began)
        return workflow.state not in OPEN_WORKFLOWS


@dataclass(frozen=True)
class Reason:
    """Why attempts failed: the error's text, how often, and the first rows it met."""

    text: str
    count: int
    rows: list[int] = field(default_factory=list)


@dataclass
class Outcome:
    """What became of a batch. An order is counted once, a job once, whatever they went through."""

    orders: int
    enqueued: int = 0
    """Orders that have a job."""
    completed: int = 0
    """Orders whose three jobs are all completed."""
    dead_letters: int = 0
    """Orders one of whose jobs failed and left a dead letter."""
    retried: int = 0
    """Orders one of whose jobs took more than one attempt."""
    jobs: dict[str, int] = field(default_factory=dict)
    reasons: list[Reason] = field(default_factory=list)
    retries: list[Reason] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is lost: rows in = completed + dead-lettered."""
        return self.orders == self.enqueued == self.completed + self.dead_letters


def outcome_of(batch: Batch) -> Outcome:
    """Count, from the tables alone."""
    jobs = jobs_of(batch)
    outcome = Outcome(orders=batch.orders.count())
    _count_orders(outcome, jobs)
    outcome.jobs = jobs.aggregate(
        enqueued=Count("pk"),
        completed=Count("pk", filter=Q(state=JobState.COMPLETED)),
        dead_letters=Count("pk", filter=Q(state=JobState.FAILED)),
        retried=Count("pk", filter=Q(attempts__gt=1)),
    )
    outcome.reasons = _reasons(
        DeadLetter.objects.filter(job__in=jobs.filter(state=JobState.FAILED).values("pk"))
    )
    outcome.retries = _reasons(
        JobFailure.objects.filter(job__in=jobs.values("pk"), retry_at__isnull=False)
    )
    return outcome


def _count_orders(outcome: Outcome, jobs: QuerySet[Job]) -> None:
    """Add up order by order; the rows stream by, so a large batch needs no more memory."""
    orders = (
        jobs.order_by()
        .values("unique_id")
        .annotate(
            completed=Count("pk", filter=Q(state=JobState.COMPLETED), distinct=True),
            dead=Count(
                "pk",
                filter=Q(state=JobState.FAILED, dead_letters__isnull=False),
                distinct=True,
            ),
            retried=Count("pk", filter=Q(attempts__gt=1), distinct=True),
        )
        .values_list("completed", "dead", "retried")
    )
    for completed, dead, retried in orders.iterator(chunk_size=2000):
        outcome.enqueued += 1
        outcome.completed += completed == len(QUEUES)
        outcome.dead_letters += dead > 0
        outcome.retried += retried > 0


def _reasons(failures: QuerySet[DeadLetter] | QuerySet[JobFailure]) -> list[Reason]:
    """Group by the error's text, the most frequent first."""
    groups = (
        failures.order_by().values("error").annotate(count=Count("pk")).order_by("-count", "error")
    )
    found = [
        Reason(group["error"], group["count"], _first_rows(failures, group["error"]))
        for group in groups[:REASONS]
    ]
    rest = failures.count() - sum(reason.count for reason in found)
    return [*found, Reason("(further reasons)", rest)] if rest else found


def _first_rows(failures: QuerySet[DeadLetter] | QuerySet[JobFailure], error: str) -> list[int]:
    named = failures.filter(error=error).order_by("job__unique_id")
    references = named.values_list("job__unique_id", flat=True).distinct()[:3]
    return [int(str(reference).partition("-")[2]) for reference in references]
