"""When records were published, as brokers tell it."""

from __future__ import annotations

from datetime import UTC, datetime


def moment(milliseconds: int) -> datetime | None:
    """Return a record's timestamp, None for one no calendar holds: producers may send anything."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None
