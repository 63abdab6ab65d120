"""Which delivery runs when: those of one key one at a time and in order, keys in parallel.

Deliveries of one topic and key wait in a ``KeyQueue``. A lane (a thread that runs groups) takes the
keys that have waited longest and runs their deliveries as one group. So concurrency is bounded
neither by the number of partitions nor by an unlucky hash, and no key is ever in two lanes. The
idea is the Confluent Parallel Consumer's. Coroutines outside a transaction leave their lane when
they start: the lane is free while they run, and each frees its key when it has ended.

The size of a group adapts. Quick handlers share a group up to a budget of run time, and a slow one
runs alone. Another lane is woken only for work that would keep it busy for longer than waking it
costs, so quick jobs that are ready together run in one group.

An orphan, which was being run when a worker died, may be what killed it. Orphans wait in lists of
their own. Each is a group, and one runs at a time while the other lanes go on.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kjo_django.clock import CLOCK, Clock
from kjo_django.engine.attempt import Delivery, Mode
from kjo_django.engine.handler.timeouts import LONG_RUN
from kjo_django.round_trips import ROUND_TRIPS, GroupBudget
from kjo_django.transports.base import Subscription, TopicKey, TopicPartition

CONCURRENT_GROUP = 1000
"""Most coroutines a lane starts at once."""
WORTH_A_LANE = 0.005
"""Seconds of run time. Less work than this is not worth another lane: its wake-up, its leases and
its transaction cost about as much."""
RAMP_INTERVAL = 0.1
"""Seconds between looks at whether more coroutines may start while none ends."""
AHEAD = 1.0
"""Seconds. As many deliveries of a queue may wait as lanes have taken in so long."""
MANY_GROUPS = 2000
"""Number of groups in the list of those taken lately from which old ones are dropped, although no
poll asks for their number, as on a log."""
GROUPS_AHEAD = 2
"""For how many groups of each free lane deliveries may wait."""
LEAST_OF_A_KEY = 8
"""Deliveries of a key that are fetched, whatever could start soon."""
STUCK_AFTER = 1.5
"""Seconds after which what waits and cannot start soon goes back to others."""
SLOW_BY = 0.1
"""Seconds more than twice the quickest that a coroutine may take for reasons of the worker."""
MOST_ALONE = 10_000
"""Runs of a handler for which a long one is remembered, at most."""
TIMED = (Mode.ATOMIC, Mode.PLAIN)
"""Modes in which the run times of a group's deliveries add up."""


@dataclass(slots=True, eq=False)
class KeyQueue:
    """The waiting deliveries of one key, oldest first."""

    key: object
    queue: str
    # A list: most keys have one delivery, and an empty deque takes 600 bytes.
    waiting: list[Delivery]
    ready_since: float
    """When the first of them began to wait for a lane (monotonic)."""
    due: tuple[float, int] | None = None
    """When it starts (monotonic), of those that start later, and its number among them."""


@dataclass(slots=True, eq=False)
class Group:
    """What a lane runs in one go."""

    deliveries: list[Delivery]
    mode: Mode
    queue: str
    began: float = 0.0
    """When a lane took it (monotonic)."""
    late_at: float = math.inf
    """When a free lane is to take what has not begun of it (monotonic)."""
    has_ended: bool = False


class StartRamp:
    """How many coroutines of a queue may start now, of as many as wait.

    The number rises with those that complete: each lets two more start, so a server that answers
    slowly is asked slowly. One that has failed, or has taken twice as long as the quickest of its
    handler, lets one start: what it calls has enough to do. Besides, ``rate`` start a second, at
    most a tenth of that at once: those of which none ends for long come to run together, too.
    """

    def __init__(self, rate: float) -> None:
        self.room = 0.0
        self._rate = rate
        self._counted_at = -math.inf
        self._quickest: dict[str, float] = {}
        """Seconds that the quickest took since none ran, by handler."""

    def count(self, now: float) -> int:
        """Return how many may start now (monotonic)."""
        least = max(1.0, self._rate * RAMP_INTERVAL)
        if self.room < least:
            self.room = min(least, self.room + self._rate * (now - self._counted_at))
        self._counted_at = now
        return int(self.room)

    def end(self, deliveries: Collection[Delivery], running: int) -> None:
        """Note that some have ended.

        :param running: how many ran before. What nobody used of the room is forgotten with them, so
            that many jobs after a quiet time begin slowly again.
        """
        for delivery in deliveries:
            kind, took = delivery.kind, delivery.took
            self.room += 1
            if took is not None:
                quickest = self._quickest[kind] = min(took, self._quickest.get(kind, took))
                self.room += took <= 2 * quickest + SLOW_BY
        self.room = min(self.room, max(2 * running, self._rate * RAMP_INTERVAL))
        if len(deliveries) == running:
            self._quickest.clear()


class QueueLimit(NamedTuple):
    """How many groups and how many coroutines of a queue may run at once."""

    groups: int
    coroutines: int


NO_LIMIT = QueueLimit(1_000_000, 1_000_000)


ReadyName = tuple[str, bool, bool, int]
"""A list of keys that may start: their queue, whether coroutines come next, whether orphans do, and
their level of priority. Coroutines that wait for their limit, and orphans that wait for one
another, hold up nothing else of the queue."""
LEVEL_WEIGHT = 4.0
"""How many groups of a level start for one of the level below it, while both have a backlog."""


class GroupScheduler:
    """Keeps deliveries between pollers and lanes, and forms groups of them. Thread-safe.

    :param lanes: how many threads take groups from it.
    :param group_size: most deliveries of one group.
    :param budget: expected run time up to which deliveries share a group; also what a handler that
        has not run yet is expected to take.
    :param most: deliveries that are run to their end in all; None for any number.
    :param record_bytes: bytes of a value that count as one record.
    :param ramp_up: coroutines of a queue that may start each second beside two for each that has
        ended; None: all at once.
    """

    def __init__(
        self,
        lanes: int,
        *,
        group_size: int,
        budget: GroupBudget,
        most: int | None = None,
        record_bytes: float = math.inf,
        ramp_up: float | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self._clock = clock
        self.record_bytes = record_bytes
        self._size = group_size
        self._budget = budget
        self._limits: Mapping[str, QueueLimit] = {}
        self._left = math.inf if most is None else most
        """Deliveries that may still be started."""
        self._lock = threading.Lock()
        self.on_discarded: Callable[[Sequence[Delivery]], None] = lambda deliveries: None
        """Is called with what goes to another consumer."""
        self.on_late: Callable[[Group], None] = lambda group: None
        """Is called by a free lane with a group that has run for long and has more than one
        delivery."""
        self.sleeping: list[threading.Condition] = []
        """One of each lane that waits for something to take, the one that has run last at the end.
        That one is woken first: its database session is open. One notification wakes one lane; the
        lane that takes a group passes it on while something is left."""
        self._ended = threading.Condition(self._lock)
        """Notified of every group that has ended."""
        self._keys: dict[object, KeyQueue] = {}
        """Every key of which something waits or runs."""
        self._ready: defaultdict[ReadyName, deque[KeyQueue]] = defaultdict(deque)
        """The keys that may start. The list that gave a group last comes last."""
        self._is_weighted = False
        """Whether some lists give more groups than others."""
        self._has_priorities = False
        """Whether any delivery has had another priority than 0."""
        self._weights: Mapping[str, float] = {}
        """By queue; 1 of those that are not named."""
        self._shares: defaultdict[ReadyName, float] = defaultdict(float)
        """How much each list has been given so far: the groups it gave, divided by its weight. The
        list that has been given least gives the next group."""
        self._share = 0.0
        """The share of the list that gave a group last, before it did. A list that was empty for
        long has saved up nothing: it begins here."""
        self._delayed: list[tuple[float, int, KeyQueue]] = []
        """A heap of keys that start later (monotonic). Keys of one moment keep their order."""
        self._tickets = itertools.count()
        self._watched_until = math.inf
        """When the lane that waits for the first delayed key wakes up: one lane is enough."""
        self._paused_until: dict[TopicPartition, float] = {}
        """Partitions of which nothing starts before a moment (monotonic)."""
        self._running: set[Delivery] = set()
        self._taken: dict[int, Group] = {}
        """The last group that each thread has taken, by the thread's id."""
        self._in_lanes: set[Group] = set()
        """The groups that run."""
        self._groups: Counter[str] = Counter()
        """Groups that run, by queue."""
        self._coroutines: Counter[str] = Counter()
        """Coroutines that run, by queue."""
        self._ramps: defaultdict[str, StartRamp] = defaultdict(lambda: StartRamp(ramp_up or 0))
        self._has_ramps = ramp_up is not None
        self._taken_lately: deque[tuple[float, str, int]] = deque()
        """The groups that lanes took within the last second, and earlier ones that are not
        forgotten yet: when (monotonic), of which queue, and of how many deliveries."""
        self._taken_counts: Counter[str] = Counter()
        """Deliveries of these groups, by queue."""
        self._taken_last: dict[str, tuple[str, int]] = {}
        """The handler of what was taken last of each queue, and of how many jobs its calls are."""
        self._modes: defaultdict[str, set[bool]] = defaultdict(set)
        """Whether a queue has had coroutines, others, or both."""
        self._is_ramping = False
        """Whether, when it was last looked, coroutines waited for those that run."""
        self._orphan: Delivery | None = None
        """The orphan that runs."""
        self._run_times: dict[str, float] = {}
        """Seconds that a handler's run is expected to take, by the handler's name."""
        self._late_at = math.inf
        """When the first of the groups that run is late (monotonic), or one that has ended was."""
        self._alone: dict[str, float] = {}
        """How many more runs of a handler have a transaction of their own, by its name."""
        self._shares_run: dict[str, float] = {}
        """The part of a handler's new deliveries that its limits let run, by its name."""
        self._paused: frozenset[str] = frozenset()
        self._idle = lanes
        self.lanes = lanes
        """How many threads take groups."""
        self.peak = 0
        """Most groups that ever ran at once."""
        self.waiting = 0
        """Deliveries waiting for a lane."""
        self._loads: Counter[tuple[Subscription, TopicPartition]] = Counter()
        """The weights of the deliveries that wait and run, by where they came from."""
        self.is_stopped = False
        """Whether ``stop`` was called."""

    # --- Filling ----------------------------------------------------------------------------------

    def put(self, deliveries: Iterable[Delivery]) -> None:
        """Add deliveries in the order they were polled."""
        with self._lock:
            now, has_new_key = self._clock.monotonic(), False
            for delivery in deliveries:
                self.waiting += 1
                if (size := len(delivery.record.value or b"")) > self.record_bytes:
                    delivery.weight = math.ceil(size / self.record_bytes)
                self._loads[delivery.subscription, delivery.place] += delivery.weight
                delivery.waiting_since = now
                if delivery.record.priority:
                    self._has_priorities = True
                key = self._keys.get(delivery.shard)
                if key is not None:
                    key.waiting.append(delivery)
                    continue
                queue, level = delivery.queue.name, delivery.level
                key = self._keys[delivery.shard] = KeyQueue(delivery.shard, queue, [delivery], now)
                self._ready[queue, delivery.mode is Mode.CONCURRENT, False, level].append(key)
                has_new_key = True
                if level:
                    self._is_weighted = True
            if has_new_key and self.sleeping:
                self.sleeping.pop().notify()

    def room(self, queue: str, place: TopicPartition) -> int:
        """Return how many deliveries of this queue and partition would start at once if they were
        added when the caller's group has ended; none while any delivery waits for a lane."""
        with self._lock:
            is_paused = self._paused_until.get(place, 0.0) > self._clock.monotonic()
            if self.waiting or self.is_stopped or is_paused or queue in self._paused:
                return 0
            free = self._limits.get(queue, NO_LIMIT).groups - self._groups[queue]
            return int(min(min(self._idle, free) + 1, self._left))

    def count_starts(self, queues: Collection[str]) -> int:
        """Return how many deliveries of these queues would start at once; none while any delivery
        waits for a lane, or one partition is paused."""
        with self._lock:
            if self.waiting or self.is_stopped or self._paused_until:
                return 0
            wanted = [queue for queue in queues if queue not in self._paused]
            free = min(map(self._free_of, wanted), default=0)
            return int(max(0, min(free, self._idle, self._left)))

    def _free_of(self, queue: str) -> float:
        """Return how many more deliveries of a queue may run by its limits."""
        limit = self._limits.get(queue, NO_LIMIT)
        free: float = limit.groups - self._groups[queue]
        if True in self._modes.get(queue, ()):
            free = min(free, limit.coroutines - self._coroutines[queue])
            if self._has_ramps:
                free = min(free, self._ramps[queue].count(self._clock.monotonic()))
        return free

    def run_time(self, kind: str) -> float:
        """Return how many seconds a run of this handler is expected to take; infinity if it has not
        run here, or if it has had a long run lately."""
        return math.inf if kind in self._alone else self._run_times.get(kind, math.inf)

    def may_join(self, queue: str, place: TopicPartition) -> bool:
        """Return whether a delivery of the caller's queue may run with the caller's group: it would
        start at once anyway, and nobody counts what starts."""
        return self._left == math.inf and self.room(queue, place) > 0

    def join(self, deliveries: Sequence[Delivery]) -> bool:
        """Add deliveries to the group that the calling thread has taken; return False if it has
        ended: another thread is there in place of this one."""
        with self._lock:
            group = self._taken.get(threading.get_ident())
            if group is None or group.has_ended:
                return False
            for delivery in deliveries:
                self._loads[delivery.subscription, delivery.place] += delivery.weight
                if delivery.shard in self._keys:
                    delivery.shard = object()  # a stale record of its job is there, too
                self._keys[delivery.shard] = KeyQueue(delivery.shard, group.queue, [], 0.0)
            self._running.update(deliveries)
            group.deliveries += deliveries
            return True

    # --- Taking -----------------------------------------------------------------------------------

    def take(self, timeout: float | None = None) -> Group | None:
        """Return the next group, waiting for one; None after ``timeout`` seconds or ``stop``."""
        deadline = math.inf if timeout is None else self._clock.monotonic() + timeout
        with self._lock:
            while not self.is_stopped:
                self._is_ramping = False
                if self._delayed:
                    self._end_delays()
                for name in self._by_share() if self._is_weighted else list(self._ready):
                    if self._may_start(name) and (group := self._form_group(name)) is not None:
                        return group
                now = self._clock.monotonic()
                if self._late_at <= now:
                    self._relieve_late(now)
                elif not self._wait(deadline, now):
                    return None
        return None

    def _relieve_late(self, now: float) -> None:
        """Let the groups be relieved whose lanes are late, where nothing else may start. The lock,
        which the caller holds, is released meanwhile."""
        late = [group for group in self._in_lanes if group.late_at <= now]
        for group in late:
            group.late_at = now + LONG_RUN
        self._late_at = min((group.late_at for group in self._in_lanes), default=math.inf)
        self._lock.release()
        try:
            for group in late:
                self.on_late(group)
        finally:
            self._lock.acquire()

    def _wait(self, deadline: float, now: float) -> bool:
        """Wait for a notification until the deadline (monotonic); return whether it lay ahead.

        One of the lanes that wait wakes up for the first delayed key, for the first group that is
        late, or to look whether more coroutines may start.
        """
        if deadline <= now:
            return False
        due = min(self._delayed[0][0] if self._delayed else math.inf, self._late_at)
        if self._is_ramping:
            due = min(due, now + RAMP_INTERVAL)
        watches = due < self._watched_until
        if watches:
            self._watched_until = due
        end = min(deadline, due) if watches else deadline
        own = threading.Condition(self._lock)
        self.sleeping.append(own)
        try:
            own.wait(None if end == math.inf else max(0.0, end - now))
        finally:
            if own in self.sleeping:  # nobody has woken it
                self.sleeping.remove(own)
            if watches and self._watched_until == due:
                self._watched_until = math.inf
        return True

    def _wake_lane(self) -> None:
        """Wake the lane that has run last of those that wait, if any waits."""
        if self.sleeping:
            self.sleeping.pop().notify()

    def _wake_lane_if_needed(self) -> None:
        """Wake another lane if it has something to take, or has to watch for delayed keys or late
        groups."""
        self._is_ramping = False
        if (
            any(map(self._may_start, self._ready))
            or (self._is_ramping and self._clock.monotonic() + RAMP_INTERVAL < self._watched_until)
            or (self._delayed and self._delayed[0][0] < self._watched_until)
            or self._late_at < self._watched_until
        ):
            self._wake_lane()

    def _make_ready(self, key: KeyQueue) -> None:
        """Let a key start of which something waits."""
        key.ready_since = self._clock.monotonic()
        first = key.waiting[0]
        is_concurrent = first.mode is Mode.CONCURRENT
        ready = self._ready[key.queue, is_concurrent, first.is_orphan, first.level]
        # What may start by its limits now is not to wait for what is only met.
        ready.insert(_asking_again(ready) if first.asks_again else len(ready), key)

    def _by_share(self) -> list[ReadyName]:
        """Return the ready lists, first the one that has been given the smallest share; of equal
        ones the one that has waited longest."""
        return sorted(self._ready, key=lambda name: max(self._shares[name], self._share))

    def _charge(self, name: ReadyName) -> None:
        """Note that a ready list has given a group. A queue without a backlog owes no more than the
        one of the greatest weight: its next job is not to wait for many of that one's."""
        self._share = max(self._shares[name], self._share)
        heaviest = max(self._weights.values(), default=1)
        weight = self._weights.get(name[0], 1) if self._ready[name] else heaviest
        self._shares[name] = self._share + 1 / (weight * LEVEL_WEIGHT ** name[3])

    def _may_start(self, name: ReadyName) -> bool:
        queue, is_concurrent, is_orphan, _ = name
        limit = self._limits.get(queue, NO_LIMIT)
        is_allowed = (
            bool(self._ready[name])
            and self._left > 0
            and queue not in self._paused
            and self._groups[queue] < limit.groups
            and not (is_concurrent and self._coroutines[queue] >= limit.coroutines)
            and not (is_orphan and self._orphan is not None)
        )
        if is_allowed and is_concurrent and self._has_ramps and not is_orphan:
            is_allowed = self._ramps[queue].count(self._clock.monotonic()) > 0
            self._is_ramping = self._is_ramping or not is_allowed
        return is_allowed

    def _form_group(self, name: ReadyName) -> Group | None:
        """Take a group from a ready list, and wake another lane if something is left for it; None
        if no key of the list may start now."""
        queue, ready = name[0], self._ready[name]
        if self._paused_until or not ready[0].waiting:
            self._drop_unstartable(ready)
            if not ready:
                return None
        first = ready[0].waiting[0]
        if first.is_orphan:
            self._orphan = first
        now = self._clock.monotonic()
        if len(ready) == len(ready[0].waiting) == 1:
            deliveries = [ready.popleft().waiting.pop()]  # nothing else is ready
        else:
            deliveries = self._take_deliveries(ready, queue)
        group = Group(deliveries, first.mode, queue, now)
        self._ready[name] = self._ready.pop(name)
        if self._is_weighted:
            self._charge(name)
        count = len(group.deliveries)
        if len(self._taken_lately) >= MANY_GROUPS:
            self._forget_taken(now)
        self._taken_lately.append((now, queue, count))
        self._taken_counts[queue] += count
        self._taken_last[queue] = first.kind, first.batch or 1
        self._modes[queue].add(name[1])
        self._left -= count
        self.waiting -= count
        self._running.update(group.deliveries)
        self._groups[queue] += 1
        self._in_lanes.add(group)
        if group.mode is Mode.CONCURRENT:
            self._coroutines[queue] += count
            self._ramps[queue].room -= count
        self._idle -= 1
        self.peak = max(self.peak, self.lanes - self._idle)
        self._taken[threading.get_ident()] = group
        if group.mode is Mode.PLAIN and count > 1:
            group.late_at = now + LONG_RUN
            self._late_at = min(self._late_at, group.late_at)
        if self._delayed or self._late_at < math.inf or any(self._ready.values()):
            self._wake_lane_if_needed()
        return group

    def _bounds_of_group(self, ready: deque[KeyQueue], queue: str) -> tuple[int, int]:
        """Return how many deliveries, and how many keys, a lane takes from a ready list as one
        group at most."""
        first = ready[0].waiting[0]
        size, limit = self._size, self._limits.get(queue, NO_LIMIT)
        if first.is_orphan:
            size = 1
        elif first.mode is Mode.CONCURRENT:
            size = max(1, min(CONCURRENT_GROUP, limit.coroutines - self._coroutines[queue]))
            if self._has_ramps:
                size = max(1, min(size, int(self._ramps[queue].room)))
        elif first.batch is not None:
            # One call for what is there is worth more than a lane for each share of it.
            size = max(size, first.batch)
        size = int(min(size, self._left))
        # Lanes that are worth waking get their share before this one takes a second key.
        # They are worth one for each full group, or for each WORTH_A_LANE seconds of run time.
        seconds = self._expected_time(first, self._budget.seconds, len(ready))
        worth = max(math.ceil(len(ready) / size), math.ceil(seconds / WORTH_A_LANE))
        lanes = min(self._idle, limit.groups, worth)
        return size, max(-(-len(ready) // max(1, lanes)), first.batch or 1)

    def _expected_time(self, delivery: Delivery, unknown: float, count: int = 1) -> float:
        """Return how many seconds a lane is expected to run so many deliveries like this one.

        :param unknown: seconds that a handler is expected to take that has not run yet.
        """
        if delivery.mode not in TIMED:
            return 0.0
        seconds = count * self._run_times.get(delivery.kind, unknown)
        if self._alone and delivery.kind in self._alone and delivery.mode is Mode.ATOMIC:
            seconds = count * unknown
        if self._shares_run and not delivery.asks_again:
            seconds *= self._shares_run.get(delivery.kind, 1.0)
        return seconds

    def _take_deliveries(self, ready: deque[KeyQueue], queue: str) -> list[Delivery]:
        """Take the deliveries of a group from a ready list whose first key may start."""
        size, share = self._bounds_of_group(ready, queue)
        taken: list[Delivery] = []
        budget = unknown = self._budget.seconds
        while ready and share and len(taken) < size:
            waiting, before = ready[0].waiting, len(taken)
            while waiting and len(taken) < size:
                seconds = self._expected_time(waiting[0], unknown)
                if taken and not _may_follow(taken, waiting[0], seconds <= budget):
                    break
                budget -= seconds
                taken.append(waiting.pop(0))
            if len(taken) == before:
                break
            ready.popleft()
            share -= 1
            if self._paused_until or (ready and not ready[0].waiting):
                self._drop_unstartable(ready)
        return taken

    def _drop_unstartable(self, ready: deque[KeyQueue]) -> None:
        """Drop empty keys from the front, and delay those of a paused partition."""
        now = self._clock.monotonic()
        while ready:
            key = ready[0]
            if not key.waiting:  # discarded meanwhile
                del self._keys[key.key]
            else:
                until = self._paused_until.get(key.waiting[0].place, 0.0)
                if until <= now:
                    self._paused_until.pop(key.waiting[0].place, None)
                    return
                self._delay(key, until)
            ready.popleft()

    def _delay(self, key: KeyQueue, until: float) -> None:
        key.due = until, next(self._tickets)
        heapq.heappush(self._delayed, (*key.due, key))

    def _end_delays(self) -> None:
        """Let the delayed keys start whose moment has come."""
        while self._delayed and self._delayed[0][0] <= self._clock.monotonic():
            until, number, key = heapq.heappop(self._delayed)
            if key.due != (until, number):
                continue  # it was hastened
            key.due = None
            if key.waiting:
                self._make_ready(key)
            else:
                del self._keys[key.key]

    def hasten(self, moments: Mapping[Delivery, float]) -> None:
        """Let deliveries that come up later do so at these moments (monotonic), where those are
        earlier."""
        with self._lock:
            for delivery, moment in moments.items():
                key = self._keys.get(delivery.shard)
                is_first = key is not None and key.waiting[:1] == [delivery]
                if key is not None and is_first and key.due is not None and moment < key.due[0]:
                    self._delay(key, moment)
            self._wake_lane()

    def put_off(self, moments: Mapping[Delivery, float]) -> None:
        """Let deliveries that are about to be deferred come up at these moments (monotonic)."""
        with self._lock:
            for delivery, moment in moments.items():
                delivery.put_off_until = moment

    def measure(self, kind: str, seconds: float) -> None:
        """Note how long a handler ran; what is expected of it is a moving average."""
        known = self._run_times.get(kind, seconds)
        # Quick to believe that a handler is slow, slower to believe that it is fast.
        weight = 0.5 if seconds > known else 0.1
        self._run_times[kind] = known + weight * (seconds - known)
        if seconds >= LONG_RUN:
            self.note_long(kind, seconds)
        elif kind in self._alone:
            with self._lock:
                self._alone[kind] = self._alone.get(kind, 0) - 1
                if self._alone[kind] <= 0:
                    del self._alone[kind]

    def note_long(self, kind: str, seconds: float) -> None:
        """Let a handler's next runs each have a transaction of their own, since one of them takes
        so long: as many as cost a lane as much time as that one does."""
        cost = max(WORTH_A_LANE, ROUND_TRIPS * self._budget.round_trip)
        with self._lock:
            count = max(self._alone.get(kind, 0), seconds / cost)
            self._alone[kind] = min(MOST_ALONE, count)

    def measure_share(self, kind: str, ran: int, taken: int) -> None:
        """Note how many of a handler's deliveries in a group its limits let run. A lane is done
        with the others at once, so it may take many of them."""
        known = self._shares_run.get(kind, 1.0)
        self._shares_run[kind] = known + 0.5 * (ran / taken - known)

    # --- Finishing --------------------------------------------------------------------------------

    def finish(
        self,
        group: Group,
        deferred: Collection[Delivery] = (),
        delay: float = 0.0,
        *,
        departed: Collection[Delivery] = (),
    ) -> None:
        """Free the lane and the keys of a group. The lane takes the next group itself and wakes
        others for the rest.

        :param deferred: deliveries to run again, after ``delay`` seconds, or at moments of their
            own, and before anything that came later with their keys; those that are another
            consumer's by now are forgotten. Orphans found in the group have waited for nothing yet:
            they may run at once.
        :param departed: what has left the group: coroutines that go on, and what others have taken.
        """
        with self._lock:
            group.has_ended = True
            if group.deliveries[0] is self._orphan:
                self._orphan = None
            self._groups[group.queue] -= 1
            self._in_lanes.discard(group)
            self._idle += 1
            ended = [each for each in group.deliveries if each not in departed]
            self._free_keys(ended, deferred, delay)

    def finish_departed(
        self, deliveries: Iterable[Delivery], deferred: Collection[Delivery] = (), delay: float = 0
    ) -> None:
        """Free the keys of what has left its group: of coroutines that have ended, and of what is
        to run in another group; see ``finish``."""
        with self._lock:
            self._free_keys(list(deliveries), deferred, delay)
            # No lane takes the next group itself.
            self._wake_lane_if_needed()

    def _free_keys(
        self, ended: Sequence[Delivery], deferred: Collection[Delivery], delay: float
    ) -> None:
        """Free the keys of deliveries that have ended; see ``finish``."""
        deferred = set(deferred)
        keys: dict[object, list[Delivery]] = {}
        """The keys that are free now, and what of each has to run again."""
        for delivery in ended:
            self._running.remove(delivery)
            returned = keys.setdefault(delivery.shard, [])
            if delivery in deferred:
                self._left += 1
                if delivery.subscription.holds(delivery.record):
                    returned.append(delivery)
                    continue
            self._loads[delivery.subscription, delivery.place] -= delivery.weight
        if coroutines := [each for each in ended if each.mode is Mode.CONCURRENT]:
            self._end_coroutines(coroutines)
        for shard, returned in keys.items():
            key = self._keys[shard]
            if returned:
                self._take_back(key, returned, delay)
            elif key.waiting:
                self._make_ready(key)
            else:
                del self._keys[shard]
        self._ended.notify_all()

    def _end_coroutines(self, coroutines: Iterable[Delivery]) -> None:
        """Let others start in place of coroutines that have ended."""
        by_queue: defaultdict[str, list[Delivery]] = defaultdict(list)
        for delivery in coroutines:
            by_queue[self._keys[delivery.shard].queue].append(delivery)
        for queue, ended in by_queue.items():
            self._ramps[queue].end(ended, self._coroutines[queue])
            self._coroutines[queue] -= len(ended)

    def _take_back(self, key: KeyQueue, deliveries: list[Delivery], delay: float) -> None:
        """Let deliveries run again that were deferred, before the others of their key."""
        key.waiting[:0] = deliveries
        self.waiting += len(deliveries)
        if delay <= 0 or deliveries[0].is_orphan:
            self._make_ready(key)
            return
        until = deliveries[0].put_off_until or self._clock.monotonic() + delay
        for delivery in deliveries:
            delivery.put_off_until = 0.0
        self._delay(key, until)

    # --- Control ----------------------------------------------------------------------------------

    def discard(
        self, partitions: Iterable[TopicPartition], subscription: Subscription
    ) -> list[Delivery]:
        """Forget what a subscription brought of these partitions and still waits, and return it: it
        goes to another consumer. Another group's records of the same partitions stay."""
        gone = set(partitions)
        dropped: list[Delivery] = []
        with self._lock:
            for key in self._keys.values():
                leaving = [
                    d for d in key.waiting if d.subscription is subscription and d.place in gone
                ]
                if leaving:
                    dropped += self._drop(key, leaving)
        if dropped:
            self.on_discarded(dropped)
        return dropped

    def take_stuck(self, subscription: Subscription, queues: Collection[str]) -> list[Delivery]:
        """Forget what a subscription brought of these queues and lanes cannot start soon, where the
        next one has waited for long, and return it: what other consumers may start.

        The last ones of each queue go, those of lower levels first. Those of a key go together,
        since the others of that key must not overtake them.
        """
        dropped: list[Delivery] = []
        with self._lock:
            now = self._clock.monotonic()
            # Mostly none, and to count what waits takes longer than to look at the next ones.
            stuck = [name for name in self._ready if not name[2] and self._is_stuck(name, now)]
            counts = self._count_startable(subscription, queues) if stuck else {}
            surplus = {
                queue: 0 if queue in self._paused else count - self._startable_soon(queue, now)
                for queue, count in counts.items()
            }
            for name in sorted(stuck, key=lambda name: name[3]):
                count = surplus.get(name[0], 0)
                if count > 0:
                    gone = self._drop_last(name, count, subscription)
                    surplus[name[0]] -= len(gone)
                    dropped += gone
        if dropped:
            self.on_discarded(dropped)
        return dropped

    def _is_stuck(self, name: ReadyName, now: float) -> bool:
        """Return whether the next delivery of a ready list has waited for long."""
        first = next((key.waiting[0] for key in self._ready[name] if key.waiting), None)
        return first is not None and now - first.waiting_since >= STUCK_AFTER

    def _drop_last(self, name: ReadyName, count: int, subscription: Subscription) -> list[Delivery]:
        """Take the last keys out of a ready list, until so many deliveries are gone."""
        dropped: list[Delivery] = []
        ready = self._ready[name]
        for key in reversed(ready):
            if len(dropped) >= count:
                break
            if _may_leave(key, subscription, self._paused_until):
                dropped += self._drop(key, list(key.waiting))
        for key in ready:
            if not key.waiting:
                del self._keys[key.key]
        self._ready[name] = deque(key for key in ready if key.waiting)
        return dropped

    def _drop(self, key: KeyQueue, leaving: list[Delivery]) -> list[Delivery]:
        """Take some of a key's deliveries out, and return them."""
        gone = set(leaving)
        key.waiting = [delivery for delivery in key.waiting if delivery not in gone]
        self.waiting -= len(leaving)
        for delivery in leaving:
            self._loads[delivery.subscription, delivery.place] -= delivery.weight
        return leaving

    def wait_for(self, partitions: Iterable[TopicPartition] | None, timeout: float) -> bool:
        """Wait until nothing of these partitions (None: of any) is running; False when it lasts
        longer than ``timeout`` seconds."""
        wanted = None if partitions is None else set(partitions)

        def has_ended() -> bool:
            if wanted is None:
                return not self._running
            return not any(delivery.place in wanted for delivery in self._running)

        with self._lock:
            return self._ended.wait_for(has_ended, timeout)

    def set_paused(self, queues: Iterable[str]) -> None:
        """Start nothing of these queues, and of all others again."""
        with self._lock:
            self._paused = frozenset(queues)
            self._wake_lane()

    def set_limits(self, limits: Mapping[str, QueueLimit]) -> None:
        """Run no more of these queues at once than this; of others, any number."""
        with self._lock:
            self._limits = limits
            self._wake_lane()

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Start so many groups of each of these queues for one of a queue that is not named, while
        both have a backlog. A queue that was idle is next, whatever its weight."""
        with self._lock:
            self._weights = weights
            self._is_weighted = self._is_weighted or bool(weights)

    def pause_partition(self, partition: TopicPartition, seconds: float) -> None:
        """Fetch and start nothing of this partition for a while: what its messages need is down."""
        with self._lock:
            until = self._clock.monotonic() + seconds
            self._paused_until[partition] = max(until, self._paused_until.get(partition, 0.0))

    def paused_partitions(self) -> dict[TopicPartition, float]:
        """Return the partitions that are paused, with the seconds this lasts."""
        now = self._clock.monotonic()
        with self._lock:
            self._paused_until = {tp: end for tp, end in self._paused_until.items() if end > now}
            return {tp: end - now for tp, end in self._paused_until.items()}

    def waits_for_lanes(self) -> dict[TopicPartition, float]:
        """Return of each partition how many seconds a delivery has waited that needs nothing but a
        lane. Those of paused queues are left out."""
        now, waits = self._clock.monotonic(), dict[TopicPartition, float]()
        with self._lock:
            startable = (
                key
                for name, ready in self._ready.items()
                for key in ready
                if key.waiting and name[0] not in self._paused
            )
            for key in startable:
                place = key.waiting[0].place
                waits[place] = max(waits.get(place, 0.0), now - key.ready_since)
        return waits

    def raise_lanes(self, count: int) -> int:
        """Expect at least so many threads to take groups; return how many more these are."""
        with self._lock:
            more = max(0, count - self.lanes)
            self.lanes += more
            self._idle += more
            return more

    def stop(self) -> None:
        """Let every ``take`` return None; what waits stays unacknowledged."""
        with self._lock:
            self.is_stopped = True
            while self.sleeping:
                self._wake_lane()

    # --- What it holds ----------------------------------------------------------------------------

    def load_of(
        self, subscription: Subscription
    ) -> tuple[dict[TopicPartition, int], int, Collection[TopicPartition]]:
        """Return how many deliveries of a subscription wait and run, by partition; how many of all
        subscriptions keep others from being fetched; and the partitions that are paused.

        Those of paused queues do so only while they run: nothing more is fetched of such a queue,
        and what waits of it must not stop the other queues.
        """
        with self._lock:
            self._loads = +self._loads  # without those that have come to nothing
            outstanding = {
                tp: count for (own, tp), count in self._loads.items() if own is subscription
            }
            occupied = sum(self._loads.values())
            if self._paused:
                paused = (key for key in self._keys.values() if key.queue in self._paused)
                occupied -= sum(each.weight for key in paused for each in key.waiting)
            now = self._clock.monotonic()
            self._paused_until = {tp: end for tp, end in self._paused_until.items() if end > now}
            return outstanding, occupied, set(self._paused_until)

    def room_of(self, subscription: Subscription, queues: Collection[str]) -> dict[str, int]:
        """Return how many more deliveries lanes could start soon, beside what a subscription
        brought and waits, of those of these queues that have no coroutines; 0 while more than half
        of them waits already, so that they are fetched many at a time."""
        with self._lock:
            now, room = self._clock.monotonic(), {}
            for queue, waiting in self._count_startable(subscription, queues).items():
                soon = self._startable_soon(queue, now)
                room[queue] = soon - waiting if waiting <= soon / 2 else 0
            return room

    def least_priorities(self) -> dict[str, int]:
        """Return the lowest priority of what waits for nothing but a lane of its queue, by topic;
        coroutines may wait for others to end."""
        least: dict[str, int] = {}
        with self._lock:
            for (queue, _, is_orphan, _), ready in self._ready.items():
                if is_orphan or queue in self._paused:
                    continue
                for key in ready:
                    for delivery in key.waiting[:1]:
                        topic, priority = delivery.record.topic, delivery.record.priority
                        least[topic] = min(priority, least.get(topic, priority))
                    if key.waiting and not self._has_priorities:
                        break  # as it is with all of them
        return least

    def _startable_soon(self, queue: str, now: float) -> int:
        """Return how many deliveries of a queue lanes could start soon: as many as they have taken
        within the last second, or two groups for each lane that is free or has taken its group
        within that second."""
        limit = self._limits.get(queue, NO_LIMIT)
        self._forget_taken(now)
        recent = [each for each in self._in_lanes if now - each.began < AHEAD]
        own = sum(each.queue == queue for each in recent)
        lanes = max(0, min(self._idle + len(recent), limit.groups - self._groups[queue] + own))
        kind, batch = self._taken_last.get(queue, ("", 1))
        budget = self._budget.seconds
        run_time = max(self._run_times.get(kind, budget), budget / self._size)
        size = max(batch, 1, int(budget / run_time))
        return int(min(max(self._taken_counts[queue], GROUPS_AHEAD * lanes * size), self._left))

    def _forget_taken(self, now: float) -> None:
        """Forget the groups that lanes took a second ago or earlier."""
        while self._taken_lately and now - self._taken_lately[0][0] >= AHEAD:
            _, queue, count = self._taken_lately.popleft()
            self._taken_counts[queue] -= count

    def _count_startable(
        self, subscription: Subscription, queues: Collection[str]
    ) -> dict[str, int]:
        """Return how many deliveries of a subscription wait for nothing but a lane, by queue: of
        those of these queues that have had no coroutines.

        What waits for something else does not keep more from being fetched: orphans, which run one
        after the other, and coroutines, which have limits of their own.
        """
        counts = {queue: 0 for queue in queues if True not in self._modes[queue]}
        for (queue, _, is_orphan, _), ready in self._ready.items():
            if queue not in counts or is_orphan:
                continue
            # A loop: each poll looks at all that waits, and a generator takes twice as long.
            for key in ready:
                waiting = key.waiting
                if waiting and waiting[0].subscription is subscription:
                    counts[queue] += len(waiting)
        return counts

    def keys_waiting(self, subscription: Subscription, count: int) -> set[TopicKey]:
        """Return the keys of which at least so many of a subscription's deliveries wait."""
        with self._lock:
            is_heavy = sum(self._loads.values()) > self.outstanding
            return {
                (first.record.topic, first.record.key)
                for key in self._keys.values()
                if _has_waiting(key, count, is_heavy)
                and (first := key.waiting[0]).subscription is subscription
                and first.record.key is not None
            }

    def keys_with_enough(
        self, subscription: Subscription, queues: Collection[str], before: Collection[TopicKey]
    ) -> set[TopicKey]:
        """Return the keys of these queues of which as much waits as lanes could start soon of the
        whole queue, and eight at least.

        :param before: those that had enough: they have until half of it is left.
        """
        with self._lock:
            now, enough = self._clock.monotonic(), dict[str, int]()
            found = set[TopicKey]()
            for key in self._keys.values():
                if len(key.waiting) < LEAST_OF_A_KEY / 2 or key.queue not in queues:
                    continue
                record = key.waiting[0].record
                if record.key is None or key.waiting[0].subscription is not subscription:
                    continue
                if key.queue not in enough:
                    soon = self._startable_soon(key.queue, now)
                    enough[key.queue] = max(LEAST_OF_A_KEY, soon)
                count = enough[key.queue] / (2 if (record.topic, record.key) in before else 1)
                if len(key.waiting) >= count:
                    found.add((record.topic, record.key))
            return found

    @property
    def outstanding(self) -> int:
        """Deliveries waiting and running."""
        return self.waiting + len(self._running)

    @property
    def running(self) -> int:
        """Groups running now."""
        return self.lanes - self._idle

    @property
    def oldest_wait(self) -> float:
        """Seconds the longest-waiting delivery has been waiting."""
        with self._lock:
            since = [key.waiting[0].waiting_since for key in self._keys.values() if key.waiting]
        return self._clock.monotonic() - min(since) if since else 0.0


def _may_follow(taken: list[Delivery], delivery: Delivery, is_in_budget: bool) -> bool:
    """Return whether a delivery runs in one group with those that were taken before it."""
    first = taken[0]
    if delivery.mode is not first.mode:
        return False
    if delivery.limit_state is not first.limit_state and delivery.asks_again != first.asks_again:
        return False
    if first.mode is Mode.CONCURRENT:
        # Those of a group run at the same time, those of a key must not.
        return delivery.shard != taken[-1].shard
    if is_in_budget:
        return True
    # A batch is one call, so its run time does not count; it never takes two of one key.
    has_room = len(taken) < (delivery.batch or 0) and delivery.handler is first.handler
    return has_room and delivery.shard != taken[-1].shard


def _has_waiting(key: KeyQueue, count: int, is_heavy: bool) -> bool:
    """Return whether so many deliveries of a key wait, or large ones that count as so many."""
    waiting = key.waiting
    return len(waiting) >= count or (is_heavy and sum(each.weight for each in waiting) >= count)


def _may_leave(
    key: KeyQueue, subscription: Subscription, paused: Collection[TopicPartition]
) -> bool:
    """Return whether another consumer may have what waits of a key that nobody runs."""
    return bool(key.waiting) and all(
        each.subscription is subscription
        and each.attempt is None
        and not each.has_slot
        and each.place not in paused
        and (subscription.release_keeps_order or each.record.key is None)
        for each in key.waiting
    )


def _asking_again(ready: Collection[KeyQueue]) -> int:
    """Return behind how many keys of a list that ask their limits again another such one comes."""
    return sum(
        1 for _ in itertools.takewhile(lambda key: key.waiting and key.waiting[0].asks_again, ready)
    )
