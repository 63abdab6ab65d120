"""When records were published, as brokers tell it."""

from __future__ import annotations

from datetime import UTC, datetime


def moment(milliseconds: int) -> datetime | None:
    """Return a record's timestamp, None for one that no calendar, or not that of every time zone,
    holds: producers may send anything, and pages show it in the zone of who looks."""
    try:
        found = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return found if 1970 <= found.year < 9000 else None
