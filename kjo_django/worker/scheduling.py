"""How the operating system is to share out the processors among a worker's threads."""

from __future__ import annotations

import os
import sys

MANY = 20
"""Jobs that waited together: more of them want to be done soon, fewer to be begun at once."""


class LaneScheduling:
    """How the thread that makes it is scheduled: to answer at once, or to get much done.

    The lanes of a worker share one interpreter. Whenever one of them waits for a server, another
    takes it; the first, once it is answered, wakes up on another processor to find it taken, and
    while they hand it to and fro both do nothing else. Linux knows threads as ``SCHED_BATCH`` that
    have their share of the processors as before, but do not cut in when they wake up.

    Nothing changes where the system knows no such policy or allows none, or where somebody has
    chosen one for the process. What a handler starts inherits it, as it does a nice value.
    """

    def __init__(self) -> None:
        self._gets_much_done = False
        self._can_change = False
        if sys.platform == "linux":
            try:
                self._can_change = os.sched_getscheduler(0) == os.SCHED_OTHER
            except OSError:  # musl knows of no policies
                pass

    def suit(self, waiting: int) -> None:
        """Suit a lane that is about to run a group of so many jobs."""
        much = waiting >= MANY
        if much == self._gets_much_done or not self._can_change or sys.platform != "linux":
            return
        try:
            policy = os.SCHED_BATCH if much else os.SCHED_OTHER
            os.sched_setscheduler(0, policy, os.sched_param(0))
        except OSError:  # the rule in some containers
            self._can_change = False
        else:
            self._gets_much_done = much
