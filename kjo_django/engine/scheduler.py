"""Which delivery runs when: one of a key at a time and in order, keys in parallel.

Deliveries of one topic and key form a *shard*. A lane (a thread) takes the shards that have waited
longest and runs their deliveries as one group, so concurrency is bounded neither by the number of
partitions nor by an unlucky hash, and no key is ever in two lanes. The idea is the Confluent
Parallel Consumer's. Coroutines outside a transaction leave their lane when they start: it is free
for others while they are *in flight*, and each frees its key when it lands.

How much a lane takes adapts: fast handlers are grouped up to a budget of run time, a slow one runs
alone, and while other lanes are idle the waiting shards are spread over them first.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from kjo_django.engine.attempt import Delivery, Mode
from kjo_django.engine.key_queue import Costs, Group, Place, Shard
from kjo_django.engine.postponed import Later
from kjo_django.transports.base import Subscription, TopicKey, TopicPartition

CONCURRENT_GROUP = 1000
"""Most coroutines a lane starts at once."""


class Lanes:
    """The waiting room between pollers and lanes. Thread-safe.

    :param lanes: how many threads take groups from it.
    :param group_size: most deliveries of one group.
    :param budget: seconds of expected run time up to which deliveries share a group.
    :param limit_of: groups of a queue that may run at once.
    :param flights_of: coroutines of a queue that may be in flight at once.
    :param most: deliveries that are run to their end in all; None for any number.
    """

    def __init__(
        self,
        lanes: int,
        *,
        group_size: int,
        budget: float,
        limit_of: Callable[[str], int] = lambda queue: 1_000_000,
        flights_of: Callable[[str], int] = lambda queue: 1_000_000,
        most: int | None = None,
    ) -> None:
        self._size = group_size
        self._budget = budget
        self._limit_of = limit_of
        self._flights_of = flights_of
        self._left = float("inf") if most is None else most
        """Deliveries that may still be started."""
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        """Told of what lanes may take."""
        self._ended = threading.Condition(lock)
        """Told of every group that has ended."""
        self._shards: dict[object, Shard] = {}
        # By queue and whether they fly: what waits for room in the air holds up nothing else.
        self._ready: dict[Place, deque[Shard]] = {}
        self._turn: deque[Place] = deque()
        self._running: dict[str, int] = {}
        self._flying: dict[str, int] = {}
        self._aloft: dict[Delivery, Shard] = {}
        self._groups: dict[int, Group] = {}
        self._later = Later()
        self._costs = Costs(budget)
        self.measure = self._costs.measure
        self.is_quick = self._costs.is_quick
        self._paused: frozenset[str] = frozenset()
        self._idle = lanes
        self._lanes = lanes
        self._peak = 0
        self._waiting_count = 0
        self._running_count = 0
        self._held: dict[Subscription, dict[TopicPartition, int]] = {}
        self._is_stopped = False

    # --- Filling ----------------------------------------------------------------------------------

    def put(self, deliveries: Iterable[Delivery]) -> None:
        """Add deliveries in the order they were polled."""
        with self._changed:
            now = time.monotonic()
            # No more lanes than there is something for: each that wakes wants the interpreter.
            self._changed.notify(sum(self._add(delivery, now) for delivery in deliveries))

    def _add(self, delivery: Delivery, now: float) -> bool:
        """Add one; return whether there is a key more to be taken now."""
        self._waiting_count += 1
        held, place = self._held.setdefault(delivery.subscription, {}), delivery.place
        held[place] = held.get(place, 0) + 1
        key = delivery.shard
        delivery.waiting_since = now
        shard = self._shards.get(key)
        if shard is not None:
            shard.waiting.append(delivery)
            return False
        shard = self._shards[key] = Shard(key, delivery.queue.name)
        shard.waiting.append(delivery)
        self._make_ready(shard)
        return True

    def _make_ready(self, shard: Shard) -> None:
        place = shard.queue, shard.waiting[0].mode is Mode.CONCURRENT
        ready = self._ready.get(place)
        if ready is None:
            ready = self._ready[place] = deque()
            self._turn.append(place)
        ready.append(shard)

    # --- Taking -----------------------------------------------------------------------------------

    def take(self, timeout: float | None = None) -> Group | None:
        """Return the next group, waiting for one; None after ``timeout`` seconds or ``stop``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._is_stopped:
                next_due = self._wake_those_due()
                place = self._next_place()
                if place is not None:
                    group = self._form_group(place)
                    if group.deliveries:
                        if self._later.next_due is not None:
                            # This lane may be long: another one is to wait for what falls due.
                            self._changed.notify()
                        return group
                    continue
                now = time.monotonic()
                waits = [t - now for t in (deadline, next_due) if t is not None]
                if deadline is not None and deadline <= now:
                    return None
                self._changed.wait(max(0.0, min(waits)) if waits else None)
        return None

    def _wake_those_due(self) -> float | None:
        """Make shards whose moment has come ready again; return when the next one's comes."""
        for shard in self._later.take_due():
            if shard.waiting:
                self._make_ready(shard)
            else:  # discarded meanwhile
                self._shards.pop(shard.key, None)
        return self._later.next_due

    def _next_place(self) -> Place | None:
        """Return the queue whose turn it is among those that may start a group."""
        if self._left <= 0:
            return None
        for _ in range(len(self._turn)):
            place = self._turn[0]
            self._turn.rotate(-1)
            queue, flies = place
            if (
                self._ready[place]
                and queue not in self._paused
                and self._running.get(queue, 0) < self._limit_of(queue)
                and not (flies and self._room_in_the_air(queue) <= 0)
            ):
                return place
        return None

    def _room_in_the_air(self, queue: str) -> int:
        return self._flights_of(queue) - self._flying.get(queue, 0)

    def _form_group(self, place: Place) -> Group:
        queue, ready = place[0], self._ready[place]
        # Lanes that wait get their share before this one takes a second shard.
        share = max(1, -(-len(ready) // max(1, min(self._idle, self._limit_of(queue)))))
        self._set_aside(ready)
        if not ready:
            return Group([], Mode.POISON, queue)
        first = ready[0].waiting[0]
        group = Group([], first.mode, queue)
        size = self._size
        if group.mode is Mode.CONCURRENT:
            size = max(1, min(CONCURRENT_GROUP, self._room_in_the_air(queue)))
        elif first.batch is not None:
            # One call for what is there is worth more than a lane for each share of it.
            size = max(size, first.batch)
        size = int(min(size, self._left))
        share = max(share, first.batch or 1)
        budget = self._budget
        while ready and len(group.deliveries) < size and len(group.shards) < share:
            shard = ready[0]
            left = self._fill(group, shard, size, budget)
            if left is None:
                break
            budget = left
            ready.popleft()
            group.shards.append(shard)
            if self._later.holds or (ready and not ready[0].waiting):
                self._set_aside(ready)
        self._start(group)
        return group

    def _set_aside(self, ready: deque[Shard]) -> None:
        """Drop empty shards from the front, and put off those of a held partition."""
        while ready:
            shard = ready[0]
            if not shard.waiting:  # discarded meanwhile
                self._shards.pop(shard.key, None)
            elif self._later.holds and (due := self._later.held_until(shard.waiting[0].place)):
                self._later.put(shard, due)
            else:
                return
            ready.popleft()

    def _fill(self, group: Group, shard: Shard, size: int, budget: float) -> float | None:
        """Move deliveries of a shard into the group; return the budget left, None if none fit."""
        deliveries, waiting, left = group.deliveries, shard.waiting, None
        while waiting and len(deliveries) < size:
            head = waiting[0]
            cost = self._costs.of(head)
            if head.mode is not group.mode:
                break
            if cost > budget and deliveries and not group.is_batch_for(head):
                break
            deliveries.append(waiting.pop(0))
            left = budget = budget - cost
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
        self._peak = max(self._peak, self._lanes - self._idle)
        self._groups[id(group)] = group
        if group.mode is Mode.CONCURRENT:
            self._flying[group.queue] = self._flying.get(group.queue, 0) + count
            self._aloft.update(zip(group.deliveries, group.shards, strict=True))

    # --- Finishing --------------------------------------------------------------------------------

    def done(
        self,
        group: Group,
        deferred: Collection[Delivery] = (),
        delay: float = 0.0,
        *,
        flying: Collection[Delivery] = (),
    ) -> None:
        """Free the lane and the keys of a group.

        :param deferred: deliveries to run again, after ``delay`` seconds and before anything that
            came later with their keys; those that are another consumer's by now are forgotten.
        :param flying: deliveries that are in flight: their keys are freed by ``land``.
        """
        with self._changed:
            self._running[group.queue] -= 1
            self._idle += 1
            del self._groups[id(group)]
            if group.mode is Mode.CONCURRENT:
                self._free_landed([d for d in group.deliveries if d not in flying], deferred, delay)
                return
            self._running_count -= len(group.deliveries)
            self._left += len(deferred)
            back = {each for each in deferred if each.subscription.holds(each.record)}
            held: dict[object, list[Delivery]] = {}
            for delivery in group.deliveries:
                if delivery in back:
                    held.setdefault(delivery.shard, []).append(delivery)
                else:
                    self._forget(delivery)
            for shard in group.shards:
                self._return(shard, held.get(shard.key, ()), delay)
            # Its own lane comes next and takes; another one is needed for what that leaves.
            self._changed.notify(sum(map(len, self._ready.values())))
            self._ended.notify_all()

    def land(
        self, deliveries: Sequence[Delivery], deferred: Collection[Delivery] = (), delay: float = 0
    ) -> None:
        """Free the keys of deliveries that were in flight; see ``done``."""
        with self._changed:
            self._free_landed(deliveries, deferred, delay)

    def _free_landed(
        self, deliveries: Sequence[Delivery], deferred: Collection[Delivery], delay: float
    ) -> None:
        self._running_count -= len(deliveries)
        self._left += sum(delivery in deferred for delivery in deliveries)
        for delivery in deliveries:
            shard = self._aloft.pop(delivery)
            self._flying[shard.queue] -= 1
            if delivery in deferred and delivery.subscription.holds(delivery.record):
                self._return(shard, [delivery], delay)
            else:
                self._forget(delivery)
                self._return(shard, (), delay)
        self._changed.notify_all()
        self._ended.notify_all()

    def _return(self, shard: Shard, held: Sequence[Delivery], delay: float) -> None:
        if held:
            shard.waiting[:0] = held
            self._waiting_count += len(held)
        if held and delay > 0:
            self._later.put(shard, time.monotonic() + delay)
        elif shard.waiting:
            self._make_ready(shard)
        else:
            self._shards.pop(shard.key, None)

    def _forget(self, delivery: Delivery) -> None:
        """Count a delivery no more: it has ended here."""
        held, place = self._held[delivery.subscription], delivery.place
        held[place] -= 1
        if not held[place]:
            del held[place]
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
        with self._changed:
            for shard in self._shards.values():
                leaving = [d for d in shard.waiting if leaves(d)]
                if leaving:
                    dropped += leaving
                    shard.waiting = [d for d in shard.waiting if not leaves(d)]
            self._waiting_count -= len(dropped)
            for delivery in dropped:
                self._forget(delivery)
        return dropped

    def wait_for(self, partitions: Iterable[TopicPartition] | None, timeout: float) -> bool:
        """Wait until nothing of these partitions (None: of any) is running; False when it lasts
        longer than ``timeout`` seconds."""
        wanted = None if partitions is None else set(partitions)

        def is_quiet() -> bool:
            if wanted is None:
                return self._running_count == 0
            running = itertools.chain(
                self._aloft, *(group.deliveries for group in self._groups.values())
            )
            return not any(delivery.place in wanted for delivery in running)

        with self._changed:
            return self._ended.wait_for(is_quiet, timeout)

    def set_paused(self, queues: Iterable[str]) -> None:
        """Start nothing of these queues, and of all others again."""
        with self._changed:
            self._paused = frozenset(queues)
            self._changed.notify_all()

    def hold(self, partition: TopicPartition, seconds: float) -> None:
        """Start nothing of this partition for a while: what it needs is down (KJO-76)."""
        with self._changed:
            self._later.hold(partition, time.monotonic() + seconds)

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
    def occupied(self) -> int:
        """Deliveries that keep others from being fetched: all but those that wait of paused queues.
        Theirs come no more, and what they left here must not stop the other queues."""
        if not self._paused:
            return self.outstanding
        with self._changed:
            paused = (s for s in self._shards.values() if s.queue in self._paused)
            return self.outstanding - sum(len(shard.waiting) for shard in paused)

    def held_of(self, subscription: Subscription) -> dict[TopicPartition, int]:
        """Return how many of a subscription's deliveries wait and run, by partition."""
        with self._changed:
            return dict(self._held.get(subscription, {}))

    def keys_waiting(self, subscription: Subscription, count: int) -> set[TopicKey]:
        """Return the keys of which at least so many of a subscription's deliveries wait."""
        with self._changed:
            return {
                (first.record.topic, first.record.key)
                for shard in self._shards.values()
                if len(shard.waiting) >= count
                and (first := shard.waiting[0]).subscription is subscription
                and first.record.key is not None
            }

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
