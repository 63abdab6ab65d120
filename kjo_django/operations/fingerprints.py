"""Open dead letters by kind: how many of each error, since when, until when."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Count

from kjo_django.operations.counting import COUNT_LIMIT
from kjo_django.operations.dead_letters import DeadLetterFilter, Selection, select

SAMPLED = 50
"""Letters of a group whose releases and replays are told."""
MAX_RELEASES = 5
_OF_THE_NEWEST = (
    *("failed_at", "release", "replay_count"),
    *("handler", "queue", "reason", "error_type", "error"),
)


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
    releases: tuple[str, ...] = ()
    """Those its newest failed in, the latest first, five at most."""
    replayed_count: int = 0
    """How many of its newest 50 had been replayed before and died again."""

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return asdict(self)


def error_groups(selection: Selection | None = None, *, limit: int = 50) -> list[ErrorGroup]:
    """Return the largest groups among the newest 100,000 open dead letters of a selection.

    ``DeadLetterFilter(fingerprint=…)`` takes a group to ``replay`` or ``discard``.
    """
    rows = select(selection if selection is not None else DeadLetterFilter())
    # The place where the window ends, as a condition on the key: no list of 100,000 ids is made.
    floor = next(iter(rows.order_by("-pk").values_list("pk", flat=True)[COUNT_LIMIT:][:1]), None)
    looked_at = rows if floor is None else rows.filter(pk__gt=floor)
    # Only what the index of open fingerprints holds is counted: the rows, long with their
    # tracebacks, are not read for it.
    groups = list(
        looked_at.order_by()
        .values("fingerprint")
        .annotate(count=Count("pk"))
        .order_by("-count", "fingerprint")[:limit]
    )
    found = []
    for group in groups:
        of_it = looked_at.filter(fingerprint=group["fingerprint"])
        oldest = of_it.order_by("pk").values_list("failed_at", flat=True).first()
        newest = list(of_it.order_by("-pk").only(*_OF_THE_NEWEST)[:SAMPLED])
        if oldest is None or not newest:
            continue  # closed meanwhile
        sample = newest[0]
        releases = dict.fromkeys(letter.release for letter in newest if letter.release)
        found.append(
            ErrorGroup(
                fingerprint=group["fingerprint"],
                count=group["count"],
                first_failed_at=oldest,
                last_failed_at=sample.failed_at,
                handler=sample.handler,
                queue=sample.queue,
                reason=sample.reason,
                error_type=sample.error_type,
                error=sample.error,
                newest_id=sample.pk,
                releases=tuple(releases)[:MAX_RELEASES],
                replayed_count=sum(letter.replay_count > 0 for letter in newest),
            )
        )
    return found
