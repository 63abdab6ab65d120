"""A short memory of a server that does not answer, so that not everybody waits for it in turn."""

from __future__ import annotations

import threading

from kjo_django.clock import CLOCK, Clock

SLOW = 0.1
"""Seconds. A call that fails more quickly, of a refused connection say, is tried each time."""
LONGEST = 30.0
"""Seconds, at most, until a call is tried again."""


class CircuitBreaker:
    """Opens with a call that failed slowly, and closes with the first that is answered.

    While it is open one call at a time is tried for all: first after twice the time the failed one
    took, then after twice as long each time. Thread-safe; while it is closed, a look costs nothing.
    """

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open_until = 0.0
        self._pause = 0.0
        self._opened_at = 0.0

    def is_open(self) -> bool:
        """Return whether not to call now. Whoever gets False must call, and record how it went."""
        if not self._open_until:
            return False
        with self._lock:
            now = self._clock.monotonic()
            if now < self._open_until:
                return True
            if self._open_until:
                self._open_until = now + LONGEST
            return False

    def record_failure(self, began: float) -> None:
        """Note that a call begun at that time (monotonic) got no answer."""
        with self._lock:
            now = self._clock.monotonic()
            took = now - began
            if took < SLOW:
                self._open_until = self._pause = 0.0
            elif began >= self._opened_at:  # else it is one of several calls of the same time
                self._pause = min(LONGEST, 2 * (self._pause or took))
                self._open_until, self._opened_at = now + self._pause, now

    def record_success(self) -> bool:
        """Note an answer; return whether it closed the breaker."""
        if not self._open_until:
            return False
        with self._lock:
            was_open, self._open_until, self._pause = bool(self._open_until), 0.0, 0.0
            return was_open
