"""What follows from how long the database takes to answer: for how long jobs that share a
transaction may run, and how many lanes a worker has."""

from __future__ import annotations

from collections import deque

ROUND_TRIPS = 8
"""Round trips to the database that a group takes besides its handlers, at most about."""
MEASURED = 12
"""Latest round trips of which the shortest counts: a busy process prolongs most of them. A worker
measures one with each heartbeat."""
NEAR_LANES = 4
"""Lanes of a worker near its database, where the settings give no number."""
MOST_LANES = 16
"""Lanes of a worker that is far from its database, at most."""


def lanes_for(round_trip: float) -> int:
    """Return how many lanes a worker has whose settings give no number: one more for each
    millisecond of a round trip, since a lane that waits for the database runs no handler.

    :param round_trip: seconds that the database takes to answer; 0 where that is not known.
    """
    return min(MOST_LANES, NEAR_LANES + int(round_trip * 1000))


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
        self.round_trip = 0.0
        """Seconds that the database takes to answer; 0: that is not known yet."""

    def note_round_trip(self, seconds: float) -> None:
        """Note how long the database took to answer a query that costs it nothing. The first one
        changes nothing: it may have opened its session, which takes several round trips."""
        self._measured.append(seconds)
        if len(self._measured) > 1:
            self.round_trip = min(self._measured)
            self.seconds = max(self._least, ROUND_TRIPS * self.round_trip)
