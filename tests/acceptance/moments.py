"""What handlers of `tests.ledger.limited` have noted: moments, in a file of the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Moment(NamedTuple):
    """A line of the file."""

    at: float
    pid: int
    what: str


def moments_in(path: Path) -> list[Moment]:
    """Return what was noted in a file, in its order."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        at, pid, what = line.split(" ", 2)
        found.append(Moment(float(at), int(pid), what))
    return sorted(found)


def most_within(moments: list[float], seconds: float) -> int:
    """Return the greatest number of moments in any window of so many seconds."""
    return max(sum(1 for m in moments if first <= m < first + seconds) for first in moments)
