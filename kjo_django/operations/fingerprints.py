"""Groups of open dead letters of one error, with their numbers and times."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Count, QuerySet

from kjo_django.clock import CLOCK
from kjo_django.models import DeadLetter
from kjo_django.operations.dead_letters import DeadLetterFilter, Selection, select
from kjo_django.store.counting import COUNT_LIMIT, keys_of_each, window_floor

RECENT = timedelta(minutes=10)
SAMPLED = 50
"""Newest letters of a group whose releases and replays are read."""
MAX_RELEASES = 5
_OF_THE_NEWEST = (
    *("fingerprint", "failed_at", "release", "replay_count"),
    *("handler", "queue", "reason", "error_type", "error"),
)


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Dead letters of one error, in one wording, in one place of one handler."""

    fingerprint: str
    count: int
    first_failed_at: datetime
    last_failed_at: datetime
    handler: str
    queue: str
    reason: str
    error_type: str
    error: str
    """The error of the newest letter."""
    newest_id: UUID
    releases: tuple[str, ...] = ()
    """The releases that its newest 50 failed in, the latest first, five at most."""
    replayed_count: int = 0
    """How many of its newest 50 had been replayed before."""

    @property
    def goes_on(self) -> bool:
        """Whether one of them is no older than ten minutes."""
        return CLOCK.now() - self.last_failed_at <= RECENT


def error_groups(selection: Selection | None = None, *, limit: int = 50) -> list[ErrorGroup]:
    """Return the largest groups among the newest 100,000 open dead letters of a selection.

    To replay or discard a group, use ``DeadLetterFilter(fingerprint=…)``.
    """
    rows = select(selection if selection is not None else DeadLetterFilter())
    floor = window_floor(rows, COUNT_LIMIT)
    looked_at = rows if floor is None else rows.filter(pk__gt=floor)
    # The index of open fingerprints alone is read, not the rows with their long tracebacks.
    groups = {
        row["fingerprint"]: row["count"]
        for row in looked_at.order_by()
        .values("fingerprint")
        .annotate(count=Count("pk"))
        .order_by("-count", "fingerprint")[:limit]
    }
    letters = _samples(looked_at, groups)
    found = []
    for fingerprint, count in groups.items():
        newest = letters.get(fingerprint)
        if not newest:
            continue  # closed meanwhile
        sample = newest[0]
        # The samples are the newest letters and the oldest, which is the last one.
        oldest = newest[-1]
        releases = dict.fromkeys(letter.release for letter in newest if letter.release)
        found.append(
            ErrorGroup(
                fingerprint=fingerprint,
                count=count,
                first_failed_at=oldest.failed_at,
                last_failed_at=sample.failed_at,
                handler=sample.handler,
                queue=sample.queue,
                reason=sample.reason,
                error_type=sample.error_type,
                error=sample.error,
                newest_id=sample.pk,
                releases=tuple(releases)[:MAX_RELEASES],
                replayed_count=sum(letter.replay_count > 0 for letter in newest[:SAMPLED]),
            )
        )
    return found


def _samples(
    rows: QuerySet[DeadLetter], fingerprints: Collection[str]
) -> dict[str, list[DeadLetter]]:
    """Return the newest letters of each group, the latest first, and its oldest one."""
    wanted = {}
    for fingerprint in fingerprints:
        group = rows.filter(fingerprint=fingerprint)
        wanted[f"{fingerprint} newest"] = group.order_by("-pk")[:SAMPLED]
        wanted[f"{fingerprint} oldest"] = group.order_by("pk")[:1]
    keys = {key for each in keys_of_each(wanted).values() for key in each}
    letters = DeadLetter.objects.using(rows.db).filter(pk__in=keys).order_by("-pk")
    found: dict[str, list[DeadLetter]] = {}
    for letter in letters.only(*_OF_THE_NEWEST):
        found.setdefault(letter.fingerprint, []).append(letter)
    return found
