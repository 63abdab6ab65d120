"""The clock of this process; tests give another one to run in virtual time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from django.utils import timezone

TOLERANCE = 1.0
"""Seconds that the clocks of a host and of its database may be apart, and that the database may
take to tell its own."""


class Comparison(NamedTuple):
    """What a database's answer tells."""

    ahead: float | None
    """Seconds by which the host's clock is ahead of the database's, negative where it is behind;
    None if the database took too long to tell."""
    took: float
    """Seconds until the answer."""


class Clock:
    """Reads the system's clocks and waits on them, or goes by a database's clock.

    Leases and due times that several hosts compare must be of one clock. So a worker whose host
    is wrong by more than ``TOLERANCE`` goes by its database's: by what that said last, and by the
    monotonic clock since then. A host whose calendar is set right meanwhile changes nothing.
    """

    now: Callable[[], datetime] = staticmethod(lambda: datetime.now(UTC))
    """Returns the current instant, aware. Django's ``timezone.now`` looks up a setting each time,
    and takes more than twice as long."""
    monotonic: Callable[[], float] = staticmethod(time.monotonic)
    """Returns seconds of a clock that never goes back, for durations and deadlines."""

    def compare(self, database_time: Callable[[], datetime]) -> Comparison:
        """Compare the host's clock with a database's."""
        here, began = timezone.now(), self.monotonic()
        there = database_time()
        took = self.monotonic() - began
        ahead = (here - there).total_seconds() + took / 2
        return Comparison(None if took > TOLERANCE else ahead, took)

    def follow(self, ahead: float) -> None:
        """Go by the database's clock from now on, or by the host's if that is right.

        :param ahead: seconds, as ``compare`` returned them.
        """
        if abs(ahead) <= TOLERANCE:
            vars(self).pop("now", None)
            return
        told, at = timezone.now() - timedelta(seconds=ahead), self.monotonic()
        self.now = lambda: told + timedelta(seconds=self.monotonic() - at)

    def wait(self, event: threading.Event | threading.Condition, seconds: float | None) -> bool:
        """Wait for an event or a condition, so many seconds at most; None: without a limit.

        :returns: whether the event is set, or the condition was notified.
        """
        return event.wait(seconds)


CLOCK = Clock()
