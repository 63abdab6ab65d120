"""Which delivery runs when: one of a key at a time and in order, keys in parallel.

Deliveries of one topic and key form a *shard*. A lane (a thread) takes the shards that have waited
longest and runs their deliveries as one group, so concurrency is bounded neither by the number of
partitions nor by an unlucky hash, and no key is ever in two lanes. The idea is the Confluent
Parallel Consumer's.

How much a lane takes adapts: fast handlers are grouped up to a budget of run time, a slow one runs
alone, and while other lanes are idle the waiting shards are spread over them first.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from kjo_django.consumer.work import Delivery, Mode
from kjo_django.transports.base import TopicPartition

CONCURRENT_GROUP = 1000
"""Most coroutines one lane runs at once."""


class _Shard:
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
    _shards: list[_Shard] = field(default_factory=list)


class Lanes:
    """The waiting room between pollers and lanes. Thread-safe.

    :param lanes: how many threads take groups from it.
    :param group_size: most deliveries of one group.
    :param budget: seconds of expected run time up to which deliveries share a group.
    :param limit_of: groups of a queue that may run at once.
    """

    def __init__(
        self,
        lanes: int,
        *,
        group_size: int,
        budget: float,
        limit_of: Callable[[str], int] = lambda queue: 1_000_000,
    ) -> None:
        self._size = group_size
        self._budget = budget
        self._limit_of = limit_of
        self._changed = threading.Condition()
        self._shards: dict[object, _Shard] = {}
        self._ready: dict[str, deque[_Shard]] = {}
        self._running: dict[str, int] = {}
        # By plain (topic, partition) pairs: they equal TopicPartition and cost nothing to make.
        self._in_flight: dict[tuple[str, int], int] = {}
        self._deferred: list[tuple[float, int, _Shard]] = []
        self._tickets = itertools.count()
        self._estimates: dict[str, float] = {}
        self._turn: deque[str] = deque()
        self._held: dict[tuple[str, int], float] = {}
        self._paused: frozenset[str] = frozenset()
        self._idle = lanes
        self._lanes = lanes
        self._peak = 0
        self._waiting_count = 0
        self._running_count = 0
        self._is_stopped = False

    # --- Filling ----------------------------------------------------------------------------------

    def put(self, deliveries: Iterable[Delivery]) -> None:
        """Add deliveries in the order they were polled."""
        with self._changed:
            for delivery in deliveries:
                self._add(delivery)
            self._changed.notify_all()

    def _add(self, delivery: Delivery) -> None:
        key = delivery.shard
        delivery.waiting_since = time.monotonic()
        shard = self._shards.get(key)
        if shard is None:
            shard = self._shards[key] = _Shard(key, delivery.queue.name)
            self._make_ready(shard)
        shard.waiting.append(delivery)
        self._waiting_count += 1

    def _make_ready(self, shard: _Shard) -> None:
        ready = self._ready.get(shard.queue)
        if ready is None:
            ready = self._ready[shard.queue] = deque()
            self._turn.append(shard.queue)
        ready.append(shard)

    # --- Taking -----------------------------------------------------------------------------------

    def take(self, timeout: float | None = None) -> Group | None:
        """Return the next group, waiting for one; None after ``timeout`` seconds or ``stop``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._is_stopped:
                next_due = self._wake_deferred()
                queue = self._next_queue()
                if queue is not None:
                    group = self._form_group(queue)
                    if group.deliveries:
                        return group
                    continue
                now = time.monotonic()
                waits = [t - now for t in (deadline, next_due) if t is not None]
                if deadline is not None and deadline <= now:
                    return None
                self._changed.wait(max(0.0, min(waits)) if waits else None)
        return None

    def _wake_deferred(self) -> float | None:
        """Make deferred shards that are due ready again; return when the next one is."""
        now = time.monotonic()
        while self._deferred and self._deferred[0][0] <= now:
            self._make_ready(heapq.heappop(self._deferred)[2])
        return self._deferred[0][0] if self._deferred else None

    def _next_queue(self) -> str | None:
        """Return the queue whose turn it is among those that may start a group."""
        for _ in range(len(self._turn)):
            queue = self._turn[0]
            self._turn.rotate(-1)
            if (
                self._ready[queue]
                and queue not in self._paused
                and self._running.get(queue, 0) < self._limit_of(queue)
            ):
                return queue
        return None

    def _form_group(self, queue: str) -> Group:
        ready = self._ready[queue]
        # Lanes that wait get their share before this one takes a second shard.
        share = max(1, -(-len(ready) // max(1, min(self._idle, self._limit_of(queue)))))
        self._set_aside(ready)
        if not ready:
            return Group([], Mode.POISON, queue)
        first = ready[0].waiting[0]
        group = Group([], first.mode, queue)
        size = CONCURRENT_GROUP if group.mode is Mode.CONCURRENT else self._size
        if first.batch is not None:
            # One call for what is there is worth more than a lane for each share of it.
            size, share = max(size, first.batch), max(share, first.batch)
        budget = self._budget
        while ready and len(group.deliveries) < size and len(group._shards) < share:
            shard = ready[0]
            if shard.waiting[0].mode is not group.mode:
                break
            if not self._has_room(group, shard.waiting[0], budget):
                break
            ready.popleft()
            group._shards.append(shard)
            budget = self._fill(group, shard, size, budget)
            self._set_aside(ready)
        self._start(group)
        return group

    def _set_aside(self, ready: deque[_Shard]) -> None:
        """Drop empty shards from the front, and put off those of a held partition."""
        while ready:
            shard = ready[0]
            if not shard.waiting:  # discarded meanwhile
                self._shards.pop(shard.key, None)
            elif self._held and (due := self._held_until(shard.waiting[0])):
                heapq.heappush(self._deferred, (due, next(self._tickets), shard))
            else:
                return
            ready.popleft()

    def _held_until(self, delivery: Delivery) -> float | None:
        where = (delivery.record.topic, delivery.record.partition)
        due = self._held.get(where)
        if due is not None and due <= time.monotonic():
            del self._held[where]
            return None
        return due

    def _fill(self, group: Group, shard: _Shard, size: int, budget: float) -> float:
        """Move deliveries of one shard into the group, in order; return the budget left."""
        while shard.waiting and len(group.deliveries) < size:
            head = shard.waiting[0]
            if head.mode is not group.mode or not self._has_room(group, head, budget):
                break
            group.deliveries.append(shard.waiting.pop(0))
            budget -= self._cost(head)
            if group.mode is Mode.CONCURRENT:
                break  # those of a group run at the same time, those of a key must not
        return budget

    def _has_room(self, group: Group, delivery: Delivery, budget: float) -> bool:
        if not group.deliveries or budget >= self._cost(delivery):
            return True
        # The batch a group begins with is filled whatever it costs: that is one call. Only those
        # that can be in it, so not a second one of a key.
        return (
            len(group.deliveries) < (delivery.batch or 0)
            and group.deliveries[0].handler is delivery.handler
            and group.deliveries[-1].shard != delivery.shard
        )

    def _cost(self, delivery: Delivery) -> float:
        mode = delivery.mode
        if mode is Mode.POISON or mode is Mode.CONCURRENT:
            return 0.0
        # Unknown handlers start alone; what they take decides how many follow.
        return self._estimates.get(delivery.kind, self._budget)

    def _start(self, group: Group) -> None:
        count = len(group.deliveries)
        self._waiting_count -= count
        self._running_count += count
        self._running[group.queue] = self._running.get(group.queue, 0) + 1
        self._idle -= 1
        self._peak = max(self._peak, self._lanes - self._idle)
        for delivery in group.deliveries:
            where = (delivery.record.topic, delivery.record.partition)
            self._in_flight[where] = self._in_flight.get(where, 0) + 1

    # --- Finishing --------------------------------------------------------------------------------

    def done(self, group: Group, deferred: Collection[Delivery] = (), delay: float = 0.0) -> None:
        """Free the keys of a group.

        :param deferred: deliveries to run again, after ``delay`` seconds and before anything that
            came later with their keys.
        """
        with self._changed:
            self._running_count -= len(group.deliveries)
            self._running[group.queue] -= 1
            self._idle += 1
            for delivery in group.deliveries:
                where = (delivery.record.topic, delivery.record.partition)
                self._in_flight[where] -= 1
            back = set(deferred)
            held: dict[object, list[Delivery]] = {}
            for delivery in group.deliveries:
                if delivery in back:
                    held.setdefault(delivery.shard, []).append(delivery)
            for shard in group._shards:
                self._return(shard, held.get(shard.key, []), delay)
            self._changed.notify_all()

    def _return(self, shard: _Shard, held: list[Delivery], delay: float) -> None:
        shard.waiting[:0] = held
        self._waiting_count += len(held)
        if held and delay > 0:
            due = time.monotonic() + delay
            heapq.heappush(self._deferred, (due, next(self._tickets), shard))
        elif shard.waiting:
            self._make_ready(shard)
        else:
            self._shards.pop(shard.key, None)

    def measure(self, kind: str, seconds: float) -> None:
        """Note how long a handler ran; a moving average decides how many share a group."""
        known = self._estimates.get(kind)
        # Quick to believe that a handler is slow, slower to believe that it is fast.
        weight = 0.5 if known is None or seconds > known else 0.1
        start = seconds if known is None else known
        self._estimates[kind] = start + weight * (seconds - start)

    # --- Control ----------------------------------------------------------------------------------

    def discard(self, partitions: Iterable[TopicPartition]) -> list[Delivery]:
        """Forget what waits of these partitions, and return it: it goes to another consumer."""
        gone = set(partitions)
        dropped: list[Delivery] = []
        with self._changed:
            for shard in self._shards.values():
                leaving = [d for d in shard.waiting if d.place in gone]
                if leaving:
                    dropped += leaving
                    shard.waiting = [d for d in shard.waiting if d.place not in gone]
            self._waiting_count -= len(dropped)
        return dropped

    def wait_for(self, partitions: Iterable[TopicPartition] | None, timeout: float) -> bool:
        """Wait until nothing of these partitions (None: of any) is running; False when it lasts
        longer than ``timeout`` seconds."""
        wanted = None if partitions is None else set(partitions)

        def is_quiet() -> bool:
            if wanted is None:
                return self._running_count == 0
            return not any(self._in_flight.get(partition) for partition in wanted)

        with self._changed:
            return self._changed.wait_for(is_quiet, timeout)

    def set_paused(self, queues: Iterable[str]) -> None:
        """Start nothing of these queues, and of all others again."""
        with self._changed:
            self._paused = frozenset(queues)
            self._changed.notify_all()

    def hold(self, partition: TopicPartition, seconds: float) -> None:
        """Start nothing of this partition for a while: what it needs is down (KJO-76)."""
        with self._changed:
            self._held[partition] = time.monotonic() + seconds

    def add_lanes(self, count: int) -> None:
        """Expect this many more threads to take groups."""
        with self._changed:
            self._lanes += count
            self._idle += count

    def look_again(self) -> None:
        """Limits have changed: what waited for them may start."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Let every ``take`` return None; what waits stays unacknowledged."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    @property
    def is_stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return self._is_stopped

    @property
    def outstanding(self) -> int:
        """Deliveries waiting and running."""
        return self._waiting_count + self._running_count

    @property
    def waiting(self) -> int:
        """Deliveries waiting for a lane."""
        return self._waiting_count

    @property
    def running(self) -> int:
        """Groups running now."""
        return self._lanes - self._idle

    @property
    def peak(self) -> int:
        """Most groups that ever ran at once."""
        return self._peak

    @property
    def oldest_wait(self) -> float:
        """Seconds the longest-waiting delivery has been waiting."""
        with self._changed:
            since = [s.waiting[0].waiting_since for s in self._shards.values() if s.waiting]
        return time.monotonic() - min(since) if since else 0.0
