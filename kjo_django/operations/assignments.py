"""What a worker holds: its partitions, as its row tells them.

The row is JSON that any release may have written. What this one does not understand is left out:
a screen shows less, and never fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.utils.dateparse import parse_datetime

MOST = 5_000
"""Partitions of one worker that are looked at."""
MOST_RUNNING = 20
MAX_TEXT = 255
_GREATEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that runs in a worker."""

    id: str
    """The job's id, or the message's where no job was enqueued here."""
    handler: str
    started_at: datetime

    def told(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {
            "id": self.id,
            "handler": self.handler,
            "started_at": self.started_at.isoformat(),
        }


@dataclass(frozen=True, slots=True)
class Assignment:
    """One partition of a worker."""

    topic: str
    partition: int
    group: str | None = None
    """The consumer group; None in rows of an older release."""
    rebalanced_at: datetime | None = None
    """When the worker's assignment in this group changed last; None in rows of an older release."""
    resting_until: datetime | None = None
    """It hands out nothing until then: what its messages need is down."""
    running: tuple[RunningJob, ...] = ()
    """What runs of it, the longest first; not all of many, and none that had only begun."""

    def told(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {
            "group": self.group,
            "topic": self.topic,
            "partition": self.partition,
            "rebalanced_at": _isoformat(self.rebalanced_at),
            "resting_until": _isoformat(self.resting_until),
            "running": [each.told() for each in self.running],
        }

    def stored(self) -> dict[str, Any]:
        """Return it as the row has it: without what there is nothing to say of."""
        return {name: value for name, value in self.told().items() if value not in (None, [])}


def assignments(partitions: Any) -> list[Assignment]:
    """Return what can be understood of a row's ``partitions``."""
    if not isinstance(partitions, list):
        return []
    found = (_assignment(each) for each in partitions[:MOST])
    return [each for each in found if each is not None]


def rebalanced_at(held: list[Assignment]) -> datetime | None:
    """Return when the latest of the worker's assignments changed last, None if nobody said."""
    return max((each.rebalanced_at for each in held if each.rebalanced_at), default=None)


# --- Details --------------------------------------------------------------------------------------


def _assignment(told: Any) -> Assignment | None:
    if isinstance(told, list) and len(told) == 2:  # as rows were written before they said more
        told = {"topic": told[0], "partition": told[1]}
    if not isinstance(told, dict):
        return None
    topic, partition = _text(told.get("topic")), told.get("partition")
    if not topic or type(partition) is not int or not 0 <= partition <= _GREATEST:
        return None
    return Assignment(
        topic,
        partition,
        group=_text(told.get("group")),
        rebalanced_at=_moment(told.get("rebalanced_at")),
        resting_until=_moment(told.get("resting_until")),
        running=_running(told.get("running")),
    )


def _running(told: Any) -> tuple[RunningJob, ...]:
    if not isinstance(told, list):
        return ()
    found = []
    for each in told[:MOST_RUNNING]:
        if not isinstance(each, dict):
            continue
        id, handler = _text(each.get("id")), _text(each.get("handler"))
        started_at = _moment(each.get("started_at"))
        if id is not None and handler is not None and started_at is not None:
            found.append(RunningJob(id, handler, started_at))
    return tuple(found)


def _text(told: Any) -> str | None:
    # JSON can escape what no encoding can write.
    return told[:MAX_TEXT].encode(errors="replace").decode() if isinstance(told, str) else None


def _moment(told: Any) -> datetime | None:
    if not isinstance(told, str):
        return None
    try:
        moment = parse_datetime(told)
    except ValueError:
        return None
    # What another time zone could not hold could not be shown.
    if moment is None or moment.tzinfo is None or not 1970 < moment.year < 9000:
        return None
    return moment


def _isoformat(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment is not None else None
