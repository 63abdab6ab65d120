"""Which delivery runs when: those of one key one at a time and in order, keys in parallel.

Deliveries of one topic and key wait in a ``KeyQueue``. A lane (a thread that runs groups) takes the
keys that have waited longest and runs their deliveries as one group. So concurrency is bounded
neither by the number of partitions nor by an unlucky hash, and no key is ever in two lanes. The
idea is the Confluent Parallel Consumer's. Coroutines outside a transaction leave their lane when
they start: the lane is free while they run, and each frees its key when it has ended.

The size of a group adapts. Quick handlers share a group up to a budget of run time, and a slow one
runs alone. Another lane is woken only for work that would keep it busy for longer than waking it
costs, so quick jobs that are ready together run in one group.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kjo_django.clock import CLOCK, Clock
from kjo_django.engine.attempt import Delivery, Mode
from kjo_django.transports.base import Subscription, TopicKey, TopicPartition

CONCURRENT_GROUP = 1000
"""Most coroutines a lane starts at once."""
WORTH_A_LANE = 0.005
"""Seconds of run time. Less work than this is not worth another lane: its wake-up, its leases and
its transaction cost about as much."""


@dataclass(slots=True, eq=False)
class KeyQueue:
    """The waiting deliveries of one key, oldest first."""

    key: object
    queue: str
    # A list: most keys have one delivery, and an empty deque takes 600 bytes.
    waiting: list[Delivery]


@dataclass(slots=True)
class Group:
    """What a lane runs in one go."""

    deliveries: list[Delivery]
    mode: Mode
    queue: str
    keys: list[KeyQueue] = field(default_factory=list)

    def takes_into_batch(self, delivery: Delivery) -> bool:
        """Return whether the batch that begins this group takes one more delivery, and this one. A
        batch is one call, so its run time does not count; it never takes two of one key."""
        return (
            len(self.deliveries) < (delivery.batch or 0)
            and self.deliveries[0].handler is delivery.handler
            and self.deliveries[-1].shard != delivery.shard
        )


class RunTimes:
    """How long handlers are expected to run.

    :param unknown: seconds that a handler nobody has seen is expected to run for.
    """

    def __init__(self, unknown: float) -> None:
        self._unknown = unknown
        self._estimates: dict[str, float] = {}

    def expected(self, delivery: Delivery) -> float:
        """Return the seconds of run time that a delivery adds to its group."""
        mode = delivery.mode
        if mode is Mode.POISON or mode is Mode.CONCURRENT:
            return 0.0
        return self._estimates.get(delivery.kind, self._unknown)

    def measure(self, kind: str, seconds: float) -> None:
        """Note how long a handler ran; the estimate is a moving average."""
        known = self._estimates.get(kind)
        # Quick to believe that a handler is slow, slower to believe that it is fast.
        weight = 0.5 if known is None or seconds > known else 0.1
        start = seconds if known is None else known
        self._estimates[kind] = start + weight * (seconds - start)


ReadyName = tuple[str, bool]
"""A list of keys that may start: their queue, and whether coroutines come next. Coroutines that
wait for their limit hold up nothing else of the queue."""


class GroupScheduler:
    """Keeps deliveries between pollers and lanes, and forms groups of them. Thread-safe.

    :param lanes: how many threads take groups from it.
    :param group_size: most deliveries of one group.
    :param budget: seconds of expected run time up to which deliveries share a group.
    :param limit_of: groups of a queue that may run at once.
    :param coroutines_of: coroutines of a queue that may run at once.
    :param most: deliveries that are run to their end in all; None for any number.
    """

    def __init__(
        self,
        lanes: int,
        *,
        group_size: int,
        budget: float,
        limit_of: Callable[[str], int] = lambda queue: 1_000_000,
        coroutines_of: Callable[[str], int] = lambda queue: 1_000_000,
        most: int | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self._clock = clock
        self._size = group_size
        self._budget = budget
        self._limit_of = limit_of
        self._coroutines_of = coroutines_of
        self._left = math.inf if most is None else most
        """Deliveries that may still be started."""
        lock = threading.Lock()
        self._startable = threading.Condition(lock)
        """Notified of what lanes may take. One notification wakes one lane; the lane that takes a
        group passes it on while something is left."""
        self._ended = threading.Condition(lock)
        """Notified of every group that has ended."""
        self._keys: dict[object, KeyQueue] = {}
        self._ready: dict[ReadyName, deque[KeyQueue]] = {}
        self._order: deque[ReadyName] = deque()
        """The ready lists; the first is asked first, and goes to the end."""
        self._delayed: list[tuple[float, int, KeyQueue]] = []
        """A heap of keys that start later (monotonic). Keys of one moment keep their order."""
        self._tickets = itertools.count()
        self._watched_until = math.inf
        """When the lane that waits for the first delayed key wakes up: one lane is enough."""
        self._held_partitions: dict[TopicPartition, float] = {}
        """Partitions of which nothing starts before a moment (monotonic)."""
        self._running: dict[str, int] = {}
        self._coroutines: dict[str, int] = {}
        self._key_of_coroutine: dict[Delivery, KeyQueue] = {}
        self._groups: dict[int, Group] = {}
        self._run_times = RunTimes(budget)
        self.measure = self._run_times.measure
        self._paused: frozenset[str] = frozenset()
        self._idle = lanes
        self.lanes = lanes
        """How many threads take groups."""
        self._peak = 0
        self._waiting_count = 0
        self._running_count = 0
        self._held: dict[Subscription, dict[TopicPartition, int]] = {}
        self._is_stopped = False

    # --- Filling ----------------------------------------------------------------------------------

    def put(self, deliveries: Iterable[Delivery]) -> None:
        """Add deliveries in the order they were polled."""
        with self._startable:
            now = self._clock.monotonic()
            if sum(self._add(delivery, now) for delivery in deliveries):
                self._startable.notify()

    def _add(self, delivery: Delivery, now: float) -> bool:
        """Add one delivery; return whether one key more is ready now."""
        self._waiting_count += 1
        held, partition = self._held.setdefault(delivery.subscription, {}), delivery.place
        held[partition] = held.get(partition, 0) + 1
        name = delivery.shard
        delivery.waiting_since = now
        key = self._keys.get(name)
        if key is not None:
            key.waiting.append(delivery)
            return False
        key = self._keys[name] = KeyQueue(name, delivery.queue.name, [delivery])
        self._make_ready(key)
        return True

    def _make_ready(self, key: KeyQueue) -> None:
        name = key.queue, key.waiting[0].mode is Mode.CONCURRENT
        ready = self._ready.get(name)
        if ready is None:
            ready = self._ready[name] = deque()
            self._order.append(name)
        ready.append(key)

    def _delay(self, key: KeyQueue, until: float) -> None:
        heapq.heappush(self._delayed, (until, next(self._tickets), key))

    # --- Taking -----------------------------------------------------------------------------------

    def take(self, timeout: float | None = None) -> Group | None:
        """Return the next group, waiting for one; None after ``timeout`` seconds or ``stop``."""
        deadline = math.inf if timeout is None else self._clock.monotonic() + timeout
        with self._startable:
            while not self._is_stopped:
                if self._delayed:
                    self._make_due_keys_ready()
                while (name := self._next_ready()) is not None:
                    group = self._form_group(name)
                    if group.deliveries:
                        if self._is_lane_needed():
                            self._startable.notify()
                        return group
                if deadline < math.inf and deadline <= self._clock.monotonic():
                    return None
                self._wait(deadline)
        return None

    def _is_lane_needed(self) -> bool:
        """Return whether another lane has something to take, or has to watch for delayed keys, now
        that this one is about to run a group."""
        if any(map(self._may_start, self._order)):
            return True
        return bool(self._delayed) and self._delayed[0][0] < self._watched_until

    def _wait(self, deadline: float) -> None:
        """Wait for a notification, or for the first delayed key if no other lane does."""
        due = self._delayed[0][0] if self._delayed else math.inf
        watches = due < self._watched_until
        if watches:
            self._watched_until = due
        end = min(deadline, due) if watches else deadline
        try:
            self._startable.wait(
                None if end == math.inf else max(0.0, end - self._clock.monotonic())
            )
        finally:
            if watches and self._watched_until == due:
                self._watched_until = math.inf

    def _make_due_keys_ready(self) -> None:
        now = self._clock.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            key = heapq.heappop(self._delayed)[2]
            if key.waiting:
                self._make_ready(key)
            else:  # discarded meanwhile
                self._keys.pop(key.key, None)

    def _next_ready(self) -> ReadyName | None:
        """Return the ready list that comes next among those that may start a group."""
        for _ in range(len(self._order)):
            name = self._order[0]
            self._order.rotate(-1)
            if self._may_start(name):
                return name
        return None

    def _may_start(self, name: ReadyName) -> bool:
        queue, is_concurrent = name
        return (
            bool(self._ready[name])
            and self._left > 0
            and queue not in self._paused
            and self._running.get(queue, 0) < self._limit_of(queue)
            and not (is_concurrent and self._room_for_coroutines(queue) <= 0)
        )

    def _room_for_coroutines(self, queue: str) -> int:
        return self._coroutines_of(queue) - self._coroutines.get(queue, 0)

    def _form_group(self, name: ReadyName) -> Group:
        queue, ready = name[0], self._ready[name]
        self._drop_unstartable(ready)
        if not ready:
            return Group([], Mode.POISON, queue)
        first = ready[0].waiting[0]
        group = Group([], first.mode, queue)
        size = self._size
        if group.mode is Mode.CONCURRENT:
            size = max(1, min(CONCURRENT_GROUP, self._room_for_coroutines(queue)))
        elif first.batch is not None:
            # One call for what is there is worth more than a lane for each share of it.
            size = max(size, first.batch)
        size = int(min(size, self._left))
        # Lanes that are worth waking get their share before this one takes a second key.
        # They are worth one for each full group, or for each WORTH_A_LANE seconds of run time.
        seconds = len(ready) * self._run_times.expected(first)
        worth = max(math.ceil(len(ready) / size), math.ceil(seconds / WORTH_A_LANE))
        lanes = min(self._idle, self._limit_of(queue), worth)
        share = max(-(-len(ready) // max(1, lanes)), first.batch or 1)
        budget = self._budget
        while ready and len(group.deliveries) < size and len(group.keys) < share:
            key = ready[0]
            left = self._move_deliveries(key, group, size, budget)
            if left is None:
                break
            budget = left
            ready.popleft()
            group.keys.append(key)
            if self._held_partitions or (ready and not ready[0].waiting):
                self._drop_unstartable(ready)
        self._start(group)
        return group

    def _drop_unstartable(self, ready: deque[KeyQueue]) -> None:
        """Drop empty keys from the front, and delay those of a held partition."""
        while ready:
            key = ready[0]
            if not key.waiting:  # discarded meanwhile
                self._keys.pop(key.key, None)
            elif self._held_partitions and (until := self._held_until(key.waiting[0].place)):
                self._delay(key, until)
            else:
                return
            ready.popleft()

    def _held_until(self, partition: TopicPartition) -> float | None:
        until = self._held_partitions.get(partition)
        if until is not None and until <= self._clock.monotonic():
            del self._held_partitions[partition]
            return None
        return until

    def _move_deliveries(
        self, key: KeyQueue, group: Group, size: int, budget: float
    ) -> float | None:
        """Move deliveries of a key into the group; return the budget left, None if none fit."""
        deliveries, waiting, left = group.deliveries, key.waiting, None
        while waiting and len(deliveries) < size:
            head = waiting[0]
            seconds = self._run_times.expected(head)
            if head.mode is not group.mode:
                break
            if seconds > budget and deliveries and not group.takes_into_batch(head):
                break
            deliveries.append(waiting.pop(0))
            left = budget = budget - seconds
            if group.mode is Mode.CONCURRENT:
                break  # those of a group run at the same time, those of a key must not
        return left

    def _start(self, group: Group) -> None:
        count = len(group.deliveries)
        self._left -= count
        self._waiting_count -= count
        self._running_count += count
        self._running[group.queue] = self._running.get(group.queue, 0) + 1
        self._idle -= 1
        self._peak = max(self._peak, self.lanes - self._idle)
        self._groups[id(group)] = group
        if group.mode is Mode.CONCURRENT:
            self._coroutines[group.queue] = self._coroutines.get(group.queue, 0) + count
            self._key_of_coroutine.update(zip(group.deliveries, group.keys, strict=True))

    # --- Finishing --------------------------------------------------------------------------------

    def finish(
        self,
        group: Group,
        deferred: Collection[Delivery] = (),
        delay: float = 0.0,
        *,
        started: Collection[Delivery] = (),
    ) -> None:
        """Free the lane and the keys of a group.

        :param deferred: deliveries to run again, after ``delay`` seconds and before anything that
            came later with their keys; those that are another consumer's by now are forgotten.
        :param started: coroutines that go on: ``finish_coroutines`` frees their keys.
        """
        with self._startable:
            self._running[group.queue] -= 1
            self._idle += 1
            del self._groups[id(group)]
            if group.mode is Mode.CONCURRENT:
                ended = [d for d in group.deliveries if d not in started]
                self._free_coroutines(ended, deferred, delay)
                return
            self._running_count -= len(group.deliveries)
            self._left += len(deferred)
            back = {each for each in deferred if each.subscription.holds(each.record)}
            returned: dict[object, list[Delivery]] = {}
            for delivery in group.deliveries:
                if delivery in back:
                    returned.setdefault(delivery.shard, []).append(delivery)
                else:
                    self._forget(delivery)
            for key in group.keys:
                self._return(key, returned.get(key.key, ()), delay)
            # The lane that ends this group takes the next one and wakes others for the rest.
            self._ended.notify_all()

    def finish_coroutines(
        self, deliveries: Sequence[Delivery], deferred: Collection[Delivery] = (), delay: float = 0
    ) -> None:
        """Free the keys of coroutines that went on after their group's end; see ``finish``."""
        with self._startable:
            self._free_coroutines(deliveries, deferred, delay)

    def _free_coroutines(
        self, deliveries: Sequence[Delivery], deferred: Collection[Delivery], delay: float
    ) -> None:
        self._running_count -= len(deliveries)
        self._left += sum(delivery in deferred for delivery in deliveries)
        for delivery in deliveries:
            key = self._key_of_coroutine.pop(delivery)
            self._coroutines[key.queue] -= 1
            if delivery in deferred and delivery.subscription.holds(delivery.record):
                self._return(key, [delivery], delay)
            else:
                self._forget(delivery)
                self._return(key, (), delay)
        if self._is_lane_needed():
            self._startable.notify()
        self._ended.notify_all()

    def _return(self, key: KeyQueue, returned: Sequence[Delivery], delay: float) -> None:
        if returned:
            key.waiting[:0] = returned
            self._waiting_count += len(returned)
        if returned and delay > 0:
            self._delay(key, self._clock.monotonic() + delay)
        elif key.waiting:
            self._make_ready(key)
        else:
            self._keys.pop(key.key, None)

    def _forget(self, delivery: Delivery) -> None:
        """Count a delivery no more: it has ended here."""
        held, partition = self._held[delivery.subscription], delivery.place
        held[partition] -= 1
        if not held[partition]:
            del held[partition]
            if not held:
                del self._held[delivery.subscription]

    # --- Control ----------------------------------------------------------------------------------

    def discard(
        self, partitions: Iterable[TopicPartition], subscription: Subscription
    ) -> list[Delivery]:
        """Forget what a subscription brought of these partitions and still waits, and return it: it
        goes to another consumer. Another group's records of the same partitions stay."""
        gone = set(partitions)

        def leaves(delivery: Delivery) -> bool:
            return delivery.subscription is subscription and delivery.place in gone

        dropped: list[Delivery] = []
        with self._startable:
            for key in self._keys.values():
                leaving = [d for d in key.waiting if leaves(d)]
                if leaving:
                    dropped += leaving
                    key.waiting = [d for d in key.waiting if not leaves(d)]
            self._waiting_count -= len(dropped)
            for delivery in dropped:
                self._forget(delivery)
        return dropped

    def wait_for(self, partitions: Iterable[TopicPartition] | None, timeout: float) -> bool:
        """Wait until nothing of these partitions (None: of any) is running; False when it lasts
        longer than ``timeout`` seconds."""
        wanted = None if partitions is None else set(partitions)

        def has_ended() -> bool:
            if wanted is None:
                return self._running_count == 0
            running = itertools.chain(
                self._key_of_coroutine, *(group.deliveries for group in self._groups.values())
            )
            return not any(delivery.place in wanted for delivery in running)

        with self._startable:
            return self._ended.wait_for(has_ended, timeout)

    def set_paused(self, queues: Iterable[str]) -> None:
        """Start nothing of these queues, and of all others again."""
        with self._startable:
            self._paused = frozenset(queues)
            self._startable.notify()

    def hold(self, partition: TopicPartition, seconds: float) -> None:
        """Start nothing of this partition for a while: what its messages need is down."""
        with self._startable:
            self._held_partitions[partition] = self._clock.monotonic() + seconds

    def raise_lanes(self, count: int) -> int:
        """Expect at least so many threads to take groups; return how many more these are."""
        with self._startable:
            more = max(0, count - self.lanes)
            self.lanes += more
            self._idle += more
            return more

    def on_limits_changed(self) -> None:
        """Start what waited for a limit that is higher now."""
        with self._startable:
            self._startable.notify()

    def stop(self) -> None:
        """Let every ``take`` return None; what waits stays unacknowledged."""
        with self._startable:
            self._is_stopped = True
            self._startable.notify_all()

    @property
    def is_stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return self._is_stopped

    @property
    def outstanding(self) -> int:
        """Deliveries waiting and running."""
        return self._waiting_count + self._running_count

    @property
    def occupied(self) -> int:
        """Deliveries that keep others from being fetched: all but the waiting ones of paused
        queues. Nothing more of a paused queue is fetched, and what waits of it must not stop the
        other queues."""
        if not self._paused:
            return self.outstanding
        with self._startable:
            paused = (key for key in self._keys.values() if key.queue in self._paused)
            return self.outstanding - sum(len(key.waiting) for key in paused)

    def held_of(self, subscription: Subscription) -> dict[TopicPartition, int]:
        """Return how many of a subscription's deliveries wait and run, by partition."""
        with self._startable:
            return dict(self._held.get(subscription, {}))

    def keys_waiting(self, subscription: Subscription, count: int) -> set[TopicKey]:
        """Return the keys of which at least so many of a subscription's deliveries wait."""
        with self._startable:
            return {
                (first.record.topic, first.record.key)
                for key in self._keys.values()
                if len(key.waiting) >= count
                and (first := key.waiting[0]).subscription is subscription
                and first.record.key is not None
            }

    @property
    def waiting(self) -> int:
        """Deliveries waiting for a lane."""
        return self._waiting_count

    @property
    def running(self) -> int:
        """Groups running now."""
        return self.lanes - self._idle

    @property
    def peak(self) -> int:
        """Most groups that ever ran at once."""
        return self._peak

    @property
    def oldest_wait(self) -> float:
        """Seconds the longest-waiting delivery has been waiting."""
        with self._startable:
            since = [key.waiting[0].waiting_since for key in self._keys.values() if key.waiting]
        return self._clock.monotonic() - min(since) if since else 0.0
