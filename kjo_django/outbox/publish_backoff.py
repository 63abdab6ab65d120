"""What is left alone for a while, since records for it were not taken: queues, and topics."""

from __future__ import annotations

import time

REST_MAX = 30.0
"""Seconds, at most. The first rest is of one second, each after it twice as long."""


class Rests:
    """Who rests, and until when. A name that nobody has tried for long is forgotten."""

    def __init__(self) -> None:
        self._rests: dict[str, tuple[float, float]] = {}

    def begin(self, name: str) -> float:
        """Let it rest, for twice as long as the last time; return the seconds."""
        delay = min(2 * self._rests[name][1], REST_MAX) if name in self._rests else 1.0
        self._rests[name] = (time.monotonic() + delay, delay)
        return delay

    def end(self, name: str) -> None:
        """Forget that it ever rested: its records are taken."""
        self._rests.pop(name, None)

    def names(self) -> list[str]:
        """Return who rests now."""
        if not self._rests:
            return []
        now = time.monotonic()
        for name in [name for name, rest in self._rests.items() if rest[0] + REST_MAX < now]:
            del self._rests[name]
        return [name for name, rest in self._rests.items() if rest[0] > now]
