"""What lanes deal in: keys, groups, and what a group is expected to cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from kjo_django.engine.attempt import Delivery, Mode

Place = tuple[str, bool]
"""Where a shard waits: its queue, and whether what comes next of it is to fly."""


class Shard:
    """The deliveries of one key, oldest first."""

    __slots__ = ("key", "queue", "waiting")

    def __init__(self, key: object, queue: str) -> None:
        self.key = key
        self.queue = queue
        # A list: most keys have one delivery, and an empty deque takes 600 bytes.
        self.waiting: list[Delivery] = []


@dataclass(slots=True)
class Group:
    """What a lane runs in one go."""

    deliveries: list[Delivery]
    mode: Mode
    queue: str
    shards: list[Shard] = field(default_factory=list)

    def is_batch_for(self, delivery: Delivery) -> bool:
        """Whether the batch this group begins with takes one more, and this one: it is filled
        whatever it costs, being one call, but never with a second one of a key."""
        return (
            len(self.deliveries) < (delivery.batch or 0)
            and self.deliveries[0].handler is delivery.handler
            and self.deliveries[-1].shard != delivery.shard
        )


QUICK = 0.005
"""Seconds a handler runs for at most that is called quick."""


class Costs:
    """How long handlers are expected to run.

    :param budget: seconds; a handler nobody knows is taken to need all of them.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._estimates: dict[str, float] = {}

    def of(self, delivery: Delivery) -> float:
        """Return the seconds of run time a delivery adds to its group."""
        mode = delivery.mode
        if mode is Mode.POISON or mode is Mode.CONCURRENT:
            return 0.0
        # Unknown handlers start alone; what they take decides how many follow.
        return self._estimates.get(delivery.kind, self._budget)

    def is_quick(self, kind: str) -> bool:
        """Return whether a handler has been seen to run for a few milliseconds only."""
        return self._estimates.get(kind, QUICK + 1) <= QUICK

    def measure(self, kind: str, seconds: float) -> None:
        """Note how long a handler ran; a moving average decides how many share a group."""
        known = self._estimates.get(kind)
        # Quick to believe that a handler is slow, slower to believe that it is fast.
        weight = 0.5 if known is None or seconds > known else 0.1
        start = seconds if known is None else known
        self._estimates[kind] = start + weight * (seconds - start)
