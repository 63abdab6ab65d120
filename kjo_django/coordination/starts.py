"""How often something may start: counts of starts in the last moments, and an even pace.

A permit is taken shortly before its job starts, for a moment on. It is never void: where a start is
late, it counts when it comes, and one that does not come counts no longer. Two rules hold for each
rate. Any window of its length has no more starts than its number (a sliding window of two hundred
counters). And starts are evenly spread, but for what was late, which is caught up (GCRA, the
generic cell rate algorithm, with a tolerance).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

FARTHEST = 15_000_000
"""Microseconds from now up to which counted starts are remembered; up to the end of the window,
where that is later. No permit allows for a start that is farther: its life and what is added for
the call are five seconds at most (``limits.permits.LONGEST_LIFE``, ``LONGEST_CALL``)."""
COUNTERS = 200
"""Into how many parts a window is divided. A counted start is forgotten up to one part too late."""


class Pace(NamedTuple):
    """One rate as ``Coordination.permit`` is asked for it."""

    name: str
    most: int
    """Permits in any window, at most."""
    seconds: float
    """The length of a window."""
    interval: float
    """Seconds from one permit to the next where all are evenly spread."""
    ahead: float = 0.0
    """Seconds by which a permit may come before its even moment: so much is caught up."""


class Ask(NamedTuple):
    """What is asked of ``Coordination.permit`` for one start."""

    paces: Sequence[Pace]
    lasts: float
    """Seconds in which the start comes, after the moment from which it is permitted; it counts as
    if it were the last of them, until ``Used`` tells when it came."""
    within: float = 0.0
    """Seconds by which that moment may be ahead; half of the shortest window at most."""
    replaces: int = 0
    """The stamp of a permit that was not used in time: it counts no longer, and this one is given
    without a wait. One of long ago is as good as none."""


class Used(NamedTuple):
    """What has become of a permit."""

    paces: Sequence[Pace]
    stamp: int
    ago: float | None
    """Seconds before this call at which the start came; None: it never came."""


class Permit(NamedTuple):
    """The answer to an ``Ask``."""

    wait: float
    """Seconds until the start may come; without a stamp, until it might if all is as it is now."""
    stamp: int = 0
    """Names the permit that was given; 0: none was."""


class Starts:
    """The starts that one rate knows of; moments are microseconds since the epoch.

    :param text: what ``text`` returned before; "" knows of none.
    """

    def __init__(self, text: str = "") -> None:
        even_at, *pairs = text.split() or ["0"]
        self._even_at = int(even_at)
        self._counts: dict[int, int] = {}
        for pair in pairs:
            moment, _, count = pair.partition(":")
            self._counts[int(moment)] = int(count)

    @property
    def text(self) -> str:
        """All of it as text: the next even moment, and how many start until which moment."""
        pairs = (f"{moment}:{count}" for moment, count in sorted(self._counts.items()))
        return " ".join([str(self._even_at), *pairs])

    def forget(self, pace: Pace, now: int) -> None:
        """Forget what lies before the window that ends now, and what a slower rate has left: a
        moment that this one does not reach."""
        begin, end = now - us(pace.seconds), now + max(us(pace.seconds), FARTHEST)
        self._counts = {m: n for m, n in self._counts.items() if begin < m <= end and n > 0}
        if self._even_at > now + us(pace.ahead) + us(pace.interval) + us(pace.seconds) // 2:
            self._even_at = now

    def wait(self, pace: Pace, now: int) -> int:
        """Return in how many microseconds a permit may be given."""
        wait = max(0, self._even_at - us(pace.ahead) - now)
        too_many = sum(self._counts.values()) - pace.most + 1
        for moment, count in sorted(self._counts.items()):
            if too_many <= 0:
                break
            too_many -= count
            wait = max(wait, moment + us(pace.seconds) - now)
        return wait

    def has(self, pace: Pace, stamp: int, now: int) -> bool:
        """Return whether a permit with this stamp counts, and nobody was told of a moment at which
        it will not."""
        is_recent = stamp > now - us(pace.seconds) // 2
        return is_recent and self._counts.get(_part(pace, stamp), 0) > 0

    def take(self, pace: Pace, moment: int, stamp: int) -> None:
        """Count a start that is permitted from a moment on, as if it came at ``stamp``."""
        self._even_at = max(self._even_at, moment) + us(pace.interval)
        self._count(pace, stamp, 1)

    def move(self, pace: Pace, old: int, stamp: int | None) -> None:
        """Count a start at another moment than before; None: no longer."""
        if self._counts.get(_part(pace, old), 0) > 0:
            self._count(pace, old, -1)
            if stamp is None:
                self._even_at -= us(pace.interval)
            else:
                self._count(pace, stamp, 1)

    def _count(self, pace: Pace, stamp: int, count: int) -> None:
        part = _part(pace, stamp)
        self._counts[part] = self._counts.get(part, 0) + count


def permit(
    asks: Sequence[Ask], known: Mapping[str, Starts], now: int, used: Sequence[Used] = ()
) -> list[Permit]:
    """Answer the asks in order: one that is given nothing stands before those that come after it.

    :param known: the starts of each rate, by its name; they are changed.
    :param now: microseconds since the epoch.
    :param used: permits of which it is known by now when they were used.
    """
    # Those that are only told of may have had another rate then.
    for pace in paces_of(asks, ()).values():
        known[pace.name].forget(pace, now)
    for one in used:
        stamp = None if one.ago is None else now - us(one.ago)
        for pace in one.paces:
            known[pace.name].move(pace, one.stamp, stamp)
    planned = {name: Starts(starts.text) for name, starts in known.items()}
    return [_permit(ask, known, planned, now) for ask in asks]


def _permit(
    ask: Ask, known: Mapping[str, Starts], planned: Mapping[str, Starts], now: int
) -> Permit:
    is_moved = bool(ask.replaces) and all(
        known[pace.name].has(pace, ask.replaces, now) for pace in ask.paces
    )
    if ask.replaces and not is_moved:
        for pace in ask.paces:
            known[pace.name].move(pace, ask.replaces, None)
            planned[pace.name].move(pace, ask.replaces, None)
    waits = {pace: planned[pace.name].wait(pace, now) for pace in ask.paces}
    wait = 0 if is_moved else max(waits.values())
    is_given = is_moved or wait <= reach(ask)
    stamp = now + wait + us(ask.lasts)
    for pace in ask.paces:
        if is_moved:
            known[pace.name].move(pace, ask.replaces, stamp)
            planned[pace.name].move(pace, ask.replaces, stamp)
        elif is_given:
            known[pace.name].take(pace, now + wait, stamp)
            planned[pace.name].take(pace, now + wait, stamp)
        elif waits[pace] == wait:  # of a faster rate others start meanwhile
            planned[pace.name].take(pace, now + wait, stamp)
    return Permit(wait / 1e6, stamp if is_given else 0)


def paces_of(asks: Sequence[Ask], used: Sequence[Used]) -> dict[str, Pace]:
    """Return every rate that is named, by its name: as it is asked for, else as it was used; those
    that are asked for come first."""
    asked = {pace.name: pace for ask in asks for pace in ask.paces}
    told = {pace.name: pace for one in used for pace in one.paces}
    return asked | {name: pace for name, pace in told.items() if name not in asked}


def reach(ask: Ask) -> int:
    """Return how many microseconds ahead of its moment a permit is given at most."""
    shortest = min(pace.seconds for pace in ask.paces)
    return us(min(ask.within, shortest / 2))


def us(seconds: float) -> int:
    """Return seconds in microseconds."""
    return round(seconds * 1e6)


def part_of(pace: Pace) -> int:
    """Return how many microseconds of a window have one counter."""
    return max(1, us(pace.seconds) // COUNTERS)


def _part(pace: Pace, stamp: int) -> int:
    """Return the end of the part of a window in which a moment lies."""
    length = part_of(pace)
    return -(-stamp // length) * length
