"""Reading one consumer group's topics: what a poller fetches, and when it fetches nothing.

A poller owns a subscription. It polls, pauses and answers rebalances, and never runs a handler, so
a long job never costs the worker its membership of the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

from kjo_django import registry
from kjo_django.conf import QueueConf, level_of
from kjo_django.engine.attempt import Delivery, RefusedRecord, unhandled
from kjo_django.engine.scheduler import GROUPS_AHEAD, GroupScheduler
from kjo_django.enqueue.storing import topic_channel, wake
from kjo_django.exceptions import MessageError
from kjo_django.failure_facts import error_text
from kjo_django.logs import get_logger
from kjo_django.runtime import Runtime
from kjo_django.transports.base import (
    Record,
    Subscription,
    TopicKey,
    TopicPartition,
    Transport,
)
from kjo_django.values import ANY_SIZE

logger = get_logger("kjo_django")

POLL_TIMEOUT, IDLE_POLL_TIMEOUT = 0.5, 1.0
"""Seconds one poll waits at most; the second of a worker that has nothing to do and is woken before
by publishers."""
FULL_WAIT = 0.05
"""Seconds between looks while the worker holds all the records it may hold."""
FULL_POLL_TIMEOUT = 0.1
"""Seconds one poll waits at most while a partition is full."""
REVOKE_WAIT = 1.0
"""Seconds a rebalance waits for running groups; nothing of the consumer group is read meanwhile.
What runs for longer is delivered to its partition's new owner, too, whom its lease keeps from
running it."""
FIRST_RESTART, LAST_RESTART = 1.0, 30.0
"""Seconds before a poller starts over after a failure, and the most this grows to by doubling. It
never gives up. Connections to brokers are librdkafka's, by its ``reconnect.backoff.*``."""
URGENT_RECORDS = 8
"""Most records fetched at once beyond the room of a worker, because they are more urgent than what
fills it."""
GIVE_BACK_INTERVAL = 0.25
"""Seconds between looks for what cannot start here soon."""
CHUNKS = 8
"""Polls that fill the room of a worker at least, if it is large. A key holds no more than one of
them brings, when that can be helped."""


class FetchPlan(NamedTuple):
    """What a poll may fetch."""

    records: int
    """How many records, 0 where no partition has room."""
    weight: float
    """As how many records they may count, where values are large."""
    timeout: float
    """How many seconds it waits at most."""
    full: frozenset[TopicPartition]
    """The partitions that have no room."""
    urgent_above: Mapping[str, int]
    """Of which topics that are full a few records may be fetched that are more urgent than what
    waits here: those of a higher priority than this."""


class Poller:
    """Feeds the scheduler from one consumer group's topics, one ``step`` after the other.

    Each level of priority has a poller: what a broker's client has fetched ahead of a lower level
    is in nobody's way then.

    :param queues: the queues whose topics it reads.
    :param level: the level of priority it reads.
    :param max_outstanding: records its worker lets wait and run at most.
    :param is_alone: whether its worker reads one topic only, which may have all that room.
    :param on_error: called with each outage, and with None at its end.
    :param on_skipped: called for each record that was meant for others.
    :param died: see ``Subscription.ask_who_died``.
    :param token: of its worker, by which others know what it runs.
    """

    def __init__(
        self,
        runtime: Runtime,
        transport: Transport,
        group: str,
        queues: Sequence[QueueConf],
        scheduler: GroupScheduler,
        *,
        max_outstanding: int,
        is_alone: bool = True,
        level: int = 0,
        on_error: Callable[[str | None], None] = lambda error: None,
        on_skipped: Callable[[QueueConf], None] = lambda queue: None,
        died: Callable[[Collection[str]], Collection[str]] = lambda workers: workers,
        token: str = "",
    ) -> None:
        self._runtime, self._clock = runtime, runtime.clock
        self._settings, self._service = runtime.settings, runtime.service
        self._transport = transport
        self.group = group
        self._scheduler = scheduler
        self._max_outstanding = max_outstanding
        self._is_alone = is_alone
        self._on_error = on_error
        self._died = died
        self._token = token
        self._on_skipped = on_skipped
        self.level = level
        self._queue_of = {queue.levels[level]: queue for queue in reversed(queues)}
        self._routes = {queue.name: registry.route_of(queue.name) for queue in queues}
        self.queues = {queue.name: queue for queue in queues}
        """The queues whose topics it reads, by name."""
        self.topics = list(self._queue_of)
        """The topics it reads."""
        of_topic = Counter(queue.levels[level] for queue in queues)
        self._bounded = [each.name for each in queues if of_topic[each.levels[level]] == 1]
        """The queues of which it fetches only what could start soon, where others can have the
        rest. Of a topic of several queues nobody knows beforehand whose the next records are."""
        self._subscription: Subscription | None = None
        self._is_draining = False
        self._is_closed = False
        self.is_quiet = False
        self._paused_topics: frozenset[str] = frozenset()
        self._paused: set[TopicPartition] = set()
        self._skipped_keys: set[TopicKey] = set()
        self._subscribed_at = 0.0
        self._give_back_at = 0.0
        self._retry_at = 0.0
        self._retry_delay = FIRST_RESTART
        self._hears_publishers = False
        self._has_error = False
        """Whether ``on_error`` was called with an outage that has not ended."""
        self.polled_count = 0
        self.rebalanced_at: datetime | None = None
        """When partitions were given to it or taken from it last."""

    @property
    def needs_wakeup(self) -> bool:
        """Whether publishers wake it through coordination; a broker answers its poll at once."""
        return self._transport.capabilities.transactional

    @property
    def partitions(self) -> list[TopicPartition]:
        """The partitions assigned to it now."""
        return self._subscription.assignment() if self._subscription is not None else []

    # --- What other threads ask of it -------------------------------------------------------------

    def rely_on_wake_ups(self, is_reliable: bool) -> None:
        """Note whether it is woken for every publication from now on; its next step tells the
        subscription. If it is not, it looks now, and from now on as often as one must."""
        self._hears_publishers = is_reliable
        if not is_reliable:
            self.wake()

    def wake(self) -> None:
        """Look for records now."""
        if self._subscription is not None:
            self._subscription.wake()

    def drain(self) -> None:
        """Fetch nothing more, but stay a member of the group until ``close``."""
        self._is_draining = True
        self.wake()

    def set_quiet(self, is_quiet: bool) -> None:
        """Fetch nothing, or again, as a member of the group. What waits in the worker goes to
        others where the transport can hand records back; the partitions of a log stay here."""
        self.is_quiet = is_quiet
        self.wake()

    def set_paused(self, queues: frozenset[str]) -> None:
        """Fetch nothing of these queues, and of all others again: now, though nothing was to be
        fetched for a while."""
        of_queues = [queue for name, queue in self.queues.items() if name in queues]
        before = self._paused_topics
        self._paused_topics = frozenset(queue.levels[self.level] for queue in of_queues)
        if self._paused_topics != before:
            self.wake()

    # --- Its own thread ---------------------------------------------------------------------------

    def step(self) -> float:
        """Poll once, after subscribing if needed; return the seconds until the next poll. Raises
        nothing."""
        pause = self._retry_at - self._clock.monotonic()
        if pause > 0:
            return pause
        pause = FULL_WAIT
        try:
            subscription = self._subscription or self._subscribe()
            subscription.hears_publishers = self._hears_publishers
            if subscription.supports_release and self._scheduler.waiting:
                self._give_back(subscription)
            plan = self._pause_and_plan(subscription)
            if self._is_draining or self.is_quiet:
                subscription.poll(0, 0.0)
                return pause
            if plan.records > 0:
                pause = 0.0
                max_bytes = int(min(ANY_SIZE, plan.weight * self._scheduler.record_bytes))
                records = subscription.poll(plan.records, plan.timeout, max(1, max_bytes))
                outage = subscription.last_error
                if outage is not None or self._has_error:
                    self._has_error = outage is not None
                    self._on_error(outage)
            else:
                records = subscription.poll(0, 0.0)
            if above := plan.urgent_above:
                most_bytes = int(min(ANY_SIZE, URGENT_RECORDS * self._scheduler.record_bytes))
                records += subscription.poll_urgent(above, URGENT_RECORDS, max(1, most_bytes))
            self.polled_count += len(records)
            read = [self.read(record, subscription) for record in records]
            if deliveries := [delivery for delivery in read if delivery is not None]:
                self._scheduler.put(deliveries)
        except Exception as error:
            return self._start_over(error)
        return pause

    def _give_back(self, subscription: Subscription) -> None:
        """Release what others may start sooner: all that waits if this worker is quiet, else what
        no lane can start soon."""
        now = self._clock.monotonic()
        if self.is_quiet:
            given = self._scheduler.discard(subscription.assignment(), subscription)
        elif now >= self._give_back_at:
            self._give_back_at = now + GIVE_BACK_INTERVAL
            given = self._scheduler.take_stuck(subscription, self._bounded)
        else:
            return
        if given:
            subscription.release([delivery.record for delivery in given])
            if self.needs_wakeup:
                topics = {delivery.record.topic for delivery in given}
                wake(self._runtime, *map(topic_channel, sorted(topics)))

    def _start_over(self, error: Exception) -> float:
        """Unsubscribe, so that a later step begins a new subscription: a poller that ended would
        stop all consumption in silence. Returns the seconds until then."""
        logger.exception("Polling %s failed, starting over", ", ".join(self.topics))
        self._has_error = True
        self._on_error(str(error))
        try:
            self.unsubscribe()
        except Exception as second:
            logger.warning("The subscription of %s did not close: %s", self.group, second)
        now = self._clock.monotonic()
        if now - self._subscribed_at > LAST_RESTART:
            # It had worked meanwhile: this is another outage.
            self._retry_delay = FIRST_RESTART
        delay, self._retry_delay = self._retry_delay, min(2 * self._retry_delay, LAST_RESTART)
        self._retry_at = now + delay
        return delay

    def close(self) -> None:
        """Leave the group: acknowledgements are flushed, the rest is handed back. What runs is not
        waited for."""
        self._is_closed = True
        self.unsubscribe()

    def unsubscribe(self) -> None:
        """Close the subscription and forget what it brought and has not started."""
        subscription = self._subscription
        if subscription is None:
            return
        try:
            self._scheduler.discard(subscription.assignment(), subscription)
        finally:
            try:
                # Left open, it would stay a member that reads nothing.
                subscription.close()
            finally:
                self._subscription = None

    def _subscribe(self) -> Subscription:
        self._subscribed_at = self._clock.monotonic()
        self._paused, self._skipped_keys = set(), set()
        self._subscription = self._transport.subscribe(
            self.topics,
            self.group,
            lease=self._settings.record_lease,
            on_revoked=self._on_revoked,
            on_assigned=self._on_assigned,
        )
        self._subscription.ask_who_died(self._died)
        count_starts = partial(self._scheduler.count_starts, list(self.queues))
        self._subscription.begin_at_once(self._token, count_starts)
        return self._subscription

    def read(self, record: Record, subscription: Subscription) -> Delivery | None:
        """Return the delivery of a record; None: it was meant for others, and is acknowledged."""
        queue, service = self._queue_of[record.topic], self._service
        level = self.level or (level_of(record.priority) if record.priority else 0)
        max_bytes = self._settings.max_payload_bytes
        try:
            found = self._routes[queue.name].read(record, max_bytes=max_bytes)
        except MessageError as problem:
            return RefusedRecord(record, subscription, queue, service, problem, level=level)
        except Exception as error:
            # Raised, it would come again with the record, and nothing behind it would be read.
            logger.exception("A record of %s cannot be read", record.topic)
            why = f"It cannot be read: {type(error).__name__}: {error_text(error)}"
            unread = MessageError("invalid", why)
            return RefusedRecord(record, subscription, queue, service, unread, level=level)
        if found is None:
            self._on_skipped(queue)
            subscription.acknowledge([record])
            return None
        message, handler = found
        if handler is None:
            return unhandled(record, subscription, queue, service, message, level)
        if handler.options.queue in self.queues:
            # Queues that share a topic: the handler tells them apart.
            candidate = self.queues[handler.options.queue]
            queue = candidate if record.topic in candidate.levels.values() else queue
        return Delivery(record, subscription, queue, service, message, handler, level)

    def _on_revoked(self, partitions: Sequence[TopicPartition], lost: bool) -> None:
        """Forget what waits of partitions that go to another consumer, and wait a moment for what
        runs. The transport calls this within a poll."""
        self.rebalanced_at = self._clock.now()
        subscription = self._subscription
        if subscription is None:
            return
        self._scheduler.discard(partitions, subscription)
        if lost or self._is_closed:
            return  # a worker that stops has waited for all it is going to wait for
        if not self._scheduler.wait_for(partitions, REVOKE_WAIT):
            logger.info("A rebalance did not wait for long jobs of %s", partitions)
        # Of those that have ended meanwhile, some may have been deferred.
        self._scheduler.discard(partitions, subscription)

    def _on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.rebalanced_at = self._clock.now()

    # --- Pauses -----------------------------------------------------------------------------------

    def _pause_and_plan(self, subscription: Subscription) -> FetchPlan:
        """Pause what is not to be read now, and resume the rest; return what the next poll may
        fetch."""
        assigned, paused_topics = subscription.assignment(), self._paused_topics
        outstanding, occupied, paused = self._scheduler.load_of(subscription)
        unwanted = {tp for tp in assigned if tp.topic in paused_topics}
        unwanted.update(set(assigned).intersection(paused))
        room: Mapping[str, int] = {}
        if is_shared := subscription.supports_release:
            room = self._room_of_topics(subscription)
            subscription.limit(room)
        free = self._max_outstanding - occupied
        max_records, full = plan_fetch(
            self._max_outstanding,
            [each for each in assigned if each not in unwanted],
            outstanding,
            free,
            room=room,
            uncommitted=subscription.uncommitted(),
            paused=self._paused,
            is_alone=self._is_alone,
            lanes=self._scheduler.lanes,
        )
        much = max(1, self._max_outstanding // CHUNKS)
        count = sum(outstanding.values())
        timeout = IDLE_POLL_TIMEOUT if self._hears_publishers and not count else POLL_TIMEOUT
        plan = FetchPlan(
            max_records,
            max(max_records, min(free, much)),
            # One that is full may have room again before another one brings anything.
            FULL_POLL_TIMEOUT if full else timeout,
            full,
            self._urgent_above(full) if full and free + much > 0 else {},
        )
        if full and not max_records:
            # Nothing is read anyway, and a log's client would throw away what it has fetched.
            return plan
        wanted = unwanted | full
        if wanted != self._paused:
            self._pause(subscription, wanted)
        if is_shared or self._skipped_keys or count >= much:
            self._skip_keys(subscription, count, much)
        return plan

    def _pause(self, subscription: Subscription, wanted: set[TopicPartition]) -> None:
        """Pause these partitions, and resume those that were paused before."""
        if to_pause := wanted - self._paused:
            subscription.pause(sorted(to_pause))
        # Also of partitions that somebody else has now: the subscription remembers a pause across
        # rebalances, and a partition must not come back paused for ever.
        if to_resume := self._paused - wanted:
            subscription.resume(sorted(to_resume))
        self._paused = wanted

    def _skip_keys(self, subscription: Subscription, count: int, much: int) -> None:
        """Read past keys of which much waits here already, where the transport can."""
        keys = set[TopicKey]()
        if count >= much:
            keys = self._scheduler.keys_waiting(subscription, much)
        if subscription.supports_release:
            known = self._skipped_keys
            keys |= self._scheduler.keys_with_enough(subscription, self._bounded, known)
        if keys != self._skipped_keys:
            subscription.skip_keys(keys)
            self._skipped_keys = keys

    def _urgent_above(self, full: Collection[TopicPartition]) -> dict[str, int]:
        """Return the lowest priority that waits here of each topic that is full, and of all topics
        where none of its own waits: what is less urgent would start before what is not fetched.
        Where nothing waits, the next claim begins with what is most urgent anyway."""
        if not self._transport.capabilities.priority:
            return {}
        least = self._scheduler.least_priorities()
        lowest = min(least.values(), default=0)
        topics = {each.topic for each in full}
        return {topic: least.get(topic, lowest) for topic in topics} if least else {}

    def _room_of_topics(self, subscription: Subscription) -> dict[str, int]:
        """Return how many records of each topic this worker could start soon, beside those it
        has."""
        room = self._scheduler.room_of(subscription, self._bounded)
        return {self.queues[name].levels[self.level]: count for name, count in room.items()}


def plan_fetch(
    most: int,
    assigned: Sequence[TopicPartition],
    outstanding: Mapping[TopicPartition, int],
    free: int,
    *,
    room: Mapping[str, int],
    uncommitted: Mapping[TopicPartition, int],
    paused: Collection[TopicPartition],
    is_alone: bool,
    lanes: int,
) -> tuple[int, frozenset[TopicPartition]]:
    """Return how many records the next poll may fetch, 0 where no partition has room, and the
    partitions that are full: nothing is fetched of them until they hold less.

    A worker holds ``MAX_OUTSTANDING`` records at most, and all its queues share that room. A record
    with a large value counts as several: as many as have the same share of
    ``MAX_OUTSTANDING_BYTES``. So where there is room for one record, one of any size comes in. A
    backlog of slow jobs would fill it and keep every other queue waiting, so:

    - A topic holds at most as many records as are left free. One busy topic gets half of the room,
      two get a third each, and there is always room for one that was idle so far.
    - A partition holds at most half of what its topic may hold alone: a hot key fills its own
      partition's share, and the keys of other partitions go on.
    - Of a topic whose records others can have, no more are fetched than could start here soon.
    - A partition of a log is read no further than ``MAX_OUTSTANDING`` records past its oldest
      unsettled one: so many are delivered again after a crash.
    - One poll fetches at most an eighth of the room, so that these limits are looked at in time; or
      two records for each lane, if that is more: where a poll takes long, lanes would wait for it.
      It brings no partition of a log beyond its own limit, from wherever its records come.

    :param most: records the worker holds at most.
    :param assigned: the partitions to choose from.
    :param outstanding: records of each partition that wait or run in this worker.
    :param free: records the worker has room for, whatever their topic.
    :param room: how many records of a topic could start soon, where others can have them.
    :param uncommitted: records of each partition that a crash would deliver again.
    :param paused: partitions that were full: they have room again when they hold much less, not
        with every record that ends.
    :param is_alone: whether the worker reads one topic only: that one needs to leave nothing free.
    :param lanes: how many threads take groups.
    """
    chunk = max(1, most // CHUNKS)
    most_fetched = max(chunk, GROUPS_AHEAD * lanes)
    if not assigned:
        # Its partitions are yet to come, within the poll.
        return max(0, min(free, most_fetched)), frozenset()
    if is_alone and free <= 0:
        return 0, frozenset(assigned)
    # A topic alone needs to leave nothing free, whatever it holds.
    parts, counted = (1, {}) if is_alone else (2, outstanding)
    in_topic: Counter[str] = Counter()
    for partition, count in counted.items():
        in_topic[partition.topic] += count
    partitions = Counter(each.topic for each in assigned)
    # From how many records of its topic, from how many of its own, and beyond how many unsettled
    # ones a partition is full, and one that was full still is.
    share = max(CHUNKS, most // (2 * parts))
    limits = (max(1, free), share, most - chunk)
    limits_once_full = (max(1, free // 4), share // 2, most // 2)
    full: set[TopicPartition] = set()
    fetched = 0
    for each in assigned:
        topic, unsettled = each.topic, uncommitted.get(each, 0)
        startable = room.get(topic, most)
        # What has no room to start is paused, too, whatever it holds.
        was_full = each in paused and topic not in room
        most_of_topic, most_of_own, most_unsettled = limits_once_full if was_full else limits
        if (
            startable <= 0
            or in_topic[topic] >= most_of_topic
            or (partitions[topic] > 1 and outstanding.get(each, 0) >= most_of_own)
            or unsettled > most_unsettled
        ):
            full.add(each)
            continue
        # Half of the difference makes what it holds and what is free equal.
        own = max(1, (free - in_topic[topic]) // parts)
        most_fetched = min(most_fetched, most - unsettled)
        fetched = max(fetched, min(most - unsettled, own, startable))
    return max(0, min(fetched, most_fetched)), frozenset(full)
