"""The clock of this process; tests give another one to run in virtual time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime

from django.utils import timezone


class Clock:
    """Reads the system's clocks and waits on them."""

    now: Callable[[], datetime] = staticmethod(timezone.now)
    """Returns the current instant, aware."""
    monotonic: Callable[[], float] = staticmethod(time.monotonic)
    """Returns seconds of a clock that never goes back, for durations and deadlines."""

    def wait(self, event: threading.Event | threading.Condition, seconds: float | None) -> bool:
        """Wait for an event or a condition, so many seconds at most; None: without a limit.

        :returns: whether the event is set, or the condition was notified.
        """
        return event.wait(seconds)


CLOCK = Clock()
