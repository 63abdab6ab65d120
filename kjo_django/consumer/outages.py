"""Waiting for servers that are away, longer each time, and no longer than the worker lives."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger("kjo_django")

DELAY_MIN = 0.2
DELAY_MAX = 30.0


class Patience:
    """Of one thing that is tried until it succeeds.

    :param stopping: set when the worker stops.
    """

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self._delay = DELAY_MIN
        self.count = 0
        """How often it has been waited."""

    def goes_on(self, what: str, error: Exception) -> bool:
        """Log what failed, wait, and return whether to try again; False: the worker stops."""
        logger.error("%s, trying again in %.1f s: %s", what, self._delay, error)
        delay, self._delay = self._delay, min(self._delay * 2, DELAY_MAX)
        self.count += 1
        return not self._stopping.wait(delay)
