"""For how long the handlers of jobs that share a transaction may run, one after the other."""

from __future__ import annotations

from collections import deque

ROUND_TRIPS = 8
"""Round trips to the database that a group takes besides its handlers, at most about."""
MEASURED = 12
"""Latest round trips of which the shortest counts: a busy process prolongs most of them. A worker
measures one with each heartbeat."""


class GroupBudget:
    """The seconds of run time up to which jobs share a transaction.

    Jobs that share one share its round trips too. With the database 20 ms away these take three
    times ``GROUP_BUDGET``: groups that end with that would wait for the database most of the time.
    So the budget is as long as the round trips of a group take, where that is longer.

    :param least: the setting ``GROUP_BUDGET``, in seconds.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._measured: deque[float] = deque(maxlen=MEASURED)
        self.seconds = least
        """The budget as it is now."""

    def note_round_trip(self, seconds: float) -> None:
        """Note how long the database took to answer a query that costs it nothing. The first one
        changes nothing: it may have opened its session, which takes several round trips."""
        self._measured.append(seconds)
        if len(self._measured) > 1:
            self.seconds = max(self._least, ROUND_TRIPS * min(self._measured))
