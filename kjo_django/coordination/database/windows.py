"""The starts of rates in rows of ``kjo_rate_window``: read, counted, and written back where nobody
else has written them since.

A process that is the only one to use a rate knows what its row says, and by what time the server
goes: it writes without reading before, which saves every other round trip. Where another process
has written meanwhile, the refused write says what the rows say now.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from kjo_django.clock import CLOCK, Clock
from kjo_django.coordination.starts import Ask, Pace, Permit, Starts, Used, paces_of, permit
from kjo_django.exceptions import CoordinationError
from kjo_django.models import RateWindow
from kjo_django.store.base import Store, WindowChange

LONGEST_NAME = 255
"""Characters of a name that are stored."""
_BATCH = 900
"""Names in one statement, within what SQLite binds."""
_UNUSED = timedelta(minutes=10)
"""How long the row of a rate is kept that does not need it any more."""
_WRITES = 30
"""How often one call writes the starts of rates that somebody else has written meanwhile."""
_AT_ONCE = 2
"""How often of these it does so at once, by what the refused write has met."""
_KNOWN_FOR = 5.0
"""Seconds after which the starts of a rate are read again, and the server's time with them."""
_KNOWN_WITHIN = 1 / 20
"""Of the window of a rate, by how much the server's time may be uncertain that is gone by."""
_ENOUGH = 32
"""Readings after which it is known how long the quickest takes."""
_MOST_KNOWN = 1_000
"""Rates of which a process knows what their rows say."""


class _Known(NamedTuple):
    """What the row of a rate said last."""

    starts: str
    read_at: float
    """When (monotonic) it was read last."""
    at_least: timedelta
    at_most: timedelta
    """Bounds of the server's time, since the epoch, less the monotonic clock."""
    is_own: bool
    """Whether what was read then had been written by this process."""


class _Read(NamedTuple):
    """What a call goes by."""

    now: datetime
    """The earliest that the server's time can be at that moment."""
    at: float
    """The moment (monotonic)."""
    latest_at: float
    """The moment (monotonic) at which it was that time already, if it is as late as it can be."""
    starts: Mapping[str, str]
    """Of each rate, by the names of their rows."""
    is_known: bool
    """Whether nothing was read for it."""


class RateWindows:
    """Gives permits of rates for one process; thread-safe."""

    def __init__(self, store: Store, clock: Clock = CLOCK) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._read_count = 0
        self._quickest = math.inf
        """Seconds that the quickest reading has taken."""

    def permit(self, asks: Sequence[Ask], used: Sequence[Used]) -> list[Permit]:
        """Answer the asks in order; see ``starts.permit``.

        :raises CoordinationError: others were first, again and again. Nothing has changed.
        :raises DatabaseError: the database cannot be asked, or does not answer.
        """
        paces = {stored_name(name): pace for name, pace in paces_of(asks, used).items()}
        if not paces:
            return []
        called = self._clock.monotonic()
        read = self._recall(paces) or self._read(paces)
        for number in range(_WRITES + 1):
            if number > _AT_ONCE:
                # A pause between a reading and its write would let others be the first again.
                pause = random.uniform(0, 0.002 * number)  # noqa: S311
                self._clock.wait(threading.Event(), pause)
                read = self._read(paces)
            # Starts count as of the latest that the server's time can be, as they lie before the
            # call; so do those to come, of which nobody may ever tell.
            told = [_as_of(read.latest_at, one, told_at=called) for one in used]
            since = max(0.0, called - read.latest_at)
            asked = [ask._replace(lasts=ask.lasts + since) for ask in asks]
            answers, changed = self._permit(asked, told, paces, read)
            if changed is None:
                elapsed = self._clock.monotonic() - read.at
                return [answer._replace(wait=max(0.0, answer.wait - elapsed)) for answer in answers]
            read = changed
        unchanged = CoordinationError("Others have changed these rates each time, too")
        unchanged.may_have_effect = False
        raise unchanged

    def _permit(
        self, asks: Sequence[Ask], used: Sequence[Used], paces: Mapping[str, Pace], read: _Read
    ) -> tuple[list[Permit], _Read | None]:
        """Answer the asks by what was read; the answers are void, and nothing is changed, if others
        have written since, or may have: what the rows say then is returned, too."""
        known = {pace.name: Starts(read.starts[name]) for name, pace in paces.items()}
        answers = permit(asks, known, round(read.now.timestamp() * 1e6), used)
        # What is only forgotten is forgotten with the next one that counts.
        if used or any(answer.stamp for answer in answers) or any(ask.replaces for ask in asks):
            after = {name: known[pace.name].text for name, pace in paces.items()}
            asked = {stored_name(name): pace for name, pace in paces_of(asks, ()).items()}
            return answers, self._write(read, after, asked)
        # Who is told to wait is told so by what others have left.
        return answers, self._read([*paces]) if read.is_known else None

    def _recall(self, paces: Mapping[str, Pace]) -> _Read | None:
        """Return what this process knows of these rates; None where another one may have used
        them, or the server's time is not known well enough."""
        at, starts = self._clock.monotonic(), dict[str, str]()
        at_least, at_most = timedelta.max, timedelta.min
        for name, pace in sorted(paces.items()):
            known = self._known.get(name)
            if known is None or not known.is_own or not 0 <= at - known.read_at < _KNOWN_FOR:
                return None
            if (known.at_most - known.at_least).total_seconds() > _KNOWN_WITHIN * pace.seconds:
                return None
            starts[name] = known.starts
            at_least, at_most = min(at_least, known.at_least), max(at_most, known.at_most)
        return _as_read(at, at_least, at_most, starts, is_known=True)

    def _read(self, names: Collection[str]) -> _Read:
        """Return the time and the starts of rates; a name that has no row gets one."""
        found: dict[str, str] = {}
        names = sorted(names)
        for start in range(0, len(names), _BATCH):
            some, sent = names[start : start + _BATCH], self._clock.monotonic()
            now, starts = self._store.read_windows(some)
            while missing := [name for name in some if name not in starts]:
                # Not yet expired: whoever prunes at this moment leaves it.
                rows = [RateWindow(name=name, expires_at=now + _UNUSED) for name in missing]
                self._store.insert_missing(rows)
                sent = self._clock.monotonic()
                now, starts = self._store.read_windows(some)
            found |= starts
        self._read_count += 1
        self._quickest = min(self._quickest, self._clock.monotonic() - sent)
        return self._note(now, sent, found)

    def _note(self, now: datetime, sent: float, found: Mapping[str, str]) -> _Read:
        """Remember what rows say, and between which bounds the server's time is.

        It was told at some moment between question and answer. Of the quickest readings each way
        takes half of the time, as clocks that are set over a network assume, and of none it takes
        less than that.

        :param now: the server's time, as it was told in answer to what was sent then (monotonic).
        """
        if not self._store.has_clock:
            # It is this host's, and told at once.
            sent, now = self._clock.monotonic(), self._store.server_time()
        at, one_way = self._clock.monotonic(), 0.0
        if self._store.has_clock and self._read_count >= _ENOUGH:
            one_way = min(self._quickest, at - sent) / 2
        at_least = now - _EPOCH - timedelta(seconds=at - one_way)
        at_most = now - _EPOCH - timedelta(seconds=sent + one_way)
        if len(self._known) + len(found) > _MOST_KNOWN:
            self._known.clear()
        for name, text in found.items():
            before = self._known.get(name)
            is_own = before is not None and before.starts == text
            self._known[name] = _Known(text, at, at_least, at_most, is_own)
        return _as_read(at, at_least, at_most, found, is_known=False)

    def _write(
        self, read: _Read, starts: Mapping[str, str], asked: Mapping[str, Pace]
    ) -> _Read | None:
        """Write the starts of rates; return what the rows say, and write nothing, where those of
        one are others by now.

        :param starts: what is to be written, by name.
        :param asked: the rates that are asked for, and not only told of, by name.
        """
        changes: list[WindowChange] = []
        for name, before in sorted(read.starts.items()):
            if starts[name] == before:
                continue
            until = None
            if (pace := asked.get(name)) is not None:
                kept = timedelta(seconds=2 * (pace.seconds + pace.interval + pace.ahead))
                until = read.now + kept + _UNUSED
            changes.append((name, before, starts[name], until))
        if not changes:
            return None
        sent = self._clock.monotonic()
        if (found := self._store.write_windows(changes)) is not None:
            now, texts = found
            if len(texts) < len(changes):
                return self._read(read.starts)  # a row is gone
            changed = self._note(now, sent, texts)
            if read.is_known and len(texts) < len(read.starts):
                return self._read(read.starts)  # the others may have changed, too
            return changed._replace(starts={**read.starts, **texts})
        for name, _, after, _ in changes:
            if (known := self._known.get(name)) is not None:
                self._known[name] = known._replace(starts=after)
        return None


def _as_read(
    at: float, at_least: timedelta, at_most: timedelta, starts: Mapping[str, str], *, is_known: bool
) -> _Read:
    """Return what a call goes by at a moment, between these bounds of ``_Known``."""
    now = _EPOCH + at_least + timedelta(seconds=at)
    return _Read(now, at, at - (at_most - at_least).total_seconds(), starts, is_known)


def _as_of(moment: float, used: Used, *, told_at: float) -> Used:
    """Return what has become of a permit, as it would have been told at another moment."""
    return used if used.ago is None else used._replace(ago=used.ago + moment - told_at)


_EPOCH = datetime.fromtimestamp(0, tz=UTC)


def stored_name(name: str) -> str:
    """Return the name as it is stored: a long name ends in a hash of the whole name."""
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{name[: LONGEST_NAME - len(digest) - 1]}:{digest}"
