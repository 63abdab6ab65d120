"""A short memory of a server that does not answer, so that not everybody waits for it in turn."""

from __future__ import annotations

import threading
import time

SLOW = 0.1
"""Seconds. What fails more quickly than that, a refused connection say, may be asked each time."""
LONGEST = 30.0
"""Seconds, at most, until somebody asks again."""


class Silence:
    """Begins with a question that failed slowly, and ends with the first that is answered.

    Meanwhile one at a time asks for all, first after twice the time the question took, then after
    twice as long each time. Thread-safe; while there is none, a look costs nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0
        self._rest = 0.0
        self._since = 0.0

    def lasts(self) -> bool:
        """Return whether not to ask now; whoever hears False must ask, and tell how it went."""
        if not self._until:
            return False
        with self._lock:
            now = time.monotonic()
            if now < self._until:
                return True
            if self._until:
                self._until = now + LONGEST
            return False

    def failed(self, began: float) -> None:
        """Note that a question asked at that time (monotonic) got no answer."""
        with self._lock:
            now = time.monotonic()
            took = now - began
            if took < SLOW:
                self._until = self._rest = 0.0
            elif began >= self._since:  # else it is one of those that were asked at the same time
                self._rest = min(LONGEST, 2 * (self._rest or took))
                self._until, self._since = now + self._rest, now

    def answered(self) -> bool:
        """Note an answer; return whether that was the end of a silence."""
        if not self._until:
            return False
        with self._lock:
            was_silent, self._until, self._rest = bool(self._until), 0.0, 0.0
            return was_silent
