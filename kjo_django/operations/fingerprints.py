"""Open dead letters by kind: how many of each error, since when, until when."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Count, Max, Min

from kjo_django.models import DeadLetter
from kjo_django.operations.counting import COUNT_LIMIT
from kjo_django.operations.dead_letters import DeadLetterFilter, Selection, select
from kjo_django.producer import dispatch


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Dead letters of one error in one place of one handler."""

    fingerprint: str
    count: int
    first_failed_at: datetime
    last_failed_at: datetime
    handler: str
    queue: str
    reason: str
    error_type: str
    error: str
    """Of the newest of them."""
    newest_id: UUID

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return asdict(self)


def error_groups(selection: Selection | None = None, *, limit: int = 50) -> list[ErrorGroup]:
    """Return the largest groups among the newest 100,000 open dead letters of a selection.

    ``DeadLetterFilter(fingerprint=…)`` takes a group to ``replay`` or ``discard``.
    """
    rows = select(selection if selection is not None else DeadLetterFilter())
    newest = rows.order_by("-pk").values("pk")[:COUNT_LIMIT]
    letters = DeadLetter.objects.using(dispatch.jobs_database())
    groups = list(
        letters.filter(pk__in=newest)
        .order_by()
        .values("fingerprint")
        .annotate(count=Count("pk"), first=Min("failed_at"), last=Max("failed_at"))
        .order_by("-count", "fingerprint")[:limit]
    )
    found = []
    for group in groups:
        sample = rows.filter(fingerprint=group["fingerprint"]).order_by("-pk").first()
        if sample is None:
            continue  # closed meanwhile
        found.append(
            ErrorGroup(
                fingerprint=group["fingerprint"],
                count=group["count"],
                first_failed_at=group["first"],
                last_failed_at=group["last"],
                handler=sample.handler,
                queue=sample.queue,
                reason=sample.reason,
                error_type=sample.error_type,
                error=sample.error,
                newest_id=sample.pk,
            )
        )
    return found
