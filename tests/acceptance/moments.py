"""What handlers of `tests.ledger.limited` have noted: moments, in a file of the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Moment(NamedTuple):
    """A line of the file."""

    at: float
    pid: int
    counted_from: float
    """Between this moment and ``counted_by`` (monotonic, the same in all processes) the worker has
    taken the start for the count of its rate. The handler may have noted it much later, on a busy
    machine that let another process run in between."""
    counted_by: float
    what: str


def moments_in(path: Path) -> list[Moment]:
    """Return what was noted in a file, in its order."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        at, pid, counted_from, counted_by, what = line.split(" ", 4)
        found.append(Moment(float(at), int(pid), float(counted_from), float(counted_by), what))
    return sorted(found)


def most_within(moments: list[Moment], seconds: float) -> int:
    """Return the greatest number of starts that have surely been counted within any window of so
    many seconds, whatever held up their processes."""
    return max(
        sum(
            1
            for m in moments
            if last.counted_by - seconds < m.counted_from <= m.counted_by <= last.counted_by
        )
        for last in moments
    )
