"""The thread that owns a subscription: it polls, pauses, and is told of rebalances; it never runs a
handler, so a long job never costs the group membership."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime

from django.db import connections
from django.utils import timezone

from kjo_django import registry
from kjo_django.conf import QueueConf, get_settings
from kjo_django.engine.attempt import Delivery
from kjo_django.engine.dead_lettering import error_text
from kjo_django.engine.flow_control import FlowControl
from kjo_django.engine.scheduler import Lanes
from kjo_django.exceptions import MessageError
from kjo_django.transports.base import (
    Record,
    Subscription,
    TopicKey,
    TopicPartition,
    Transport,
)

logger = logging.getLogger("kjo_django")

POLL_TIMEOUT = 0.5
"""Seconds one poll waits at most; the subscription is woken before."""
FULL_WAIT = 0.05
"""Seconds between looks while the lanes are full."""
FULL_POLL_TIMEOUT = 0.1
"""Seconds one poll waits at most while a partition is full."""
REVOKE_WAIT = 5.0
"""Seconds a rebalance waits for running groups; well below every session timeout."""
FIRST_RESTART, LAST_RESTART = 1.0, 30.0
"""Seconds before it starts over after a failure, and the most it grows to by doubling (KJO-53). It
never gives up. Connections to brokers are librdkafka's, by its ``reconnect.backoff.*``."""


class Poller:
    """Feeds the lanes from one consumer group's topics.

    :param queues: the queues whose topics it reads.
    :param max_outstanding: records its worker lets wait and run at most.
    :param is_alone: whether its worker reads one topic only, which may have all that room.
    :param on_error: told of outages, and with None of their end.
    :param on_skipped: told of each record that was meant for others.
    """

    def __init__(
        self,
        transport: Transport,
        group: str,
        queues: Sequence[QueueConf],
        lanes: Lanes,
        *,
        max_outstanding: int,
        is_alone: bool = True,
        on_error: Callable[[str | None], None] = lambda error: None,
        on_skipped: Callable[[QueueConf], None] = lambda queue: None,
    ) -> None:
        self._transport = transport
        self.group = group
        self._lanes = lanes
        self._max_outstanding = max_outstanding
        self._flow = FlowControl(max_outstanding, is_alone=is_alone)
        self._on_error = on_error
        self._on_skipped = on_skipped
        self._queue_of = {queue.topic: queue for queue in reversed(queues)}
        self._queues = {queue.name: queue for queue in queues}
        self._max_bytes = get_settings().max_payload_bytes
        self._subscription: Subscription | None = None
        self._is_draining = threading.Event()
        self._is_closed = threading.Event()
        self.is_quiet = False
        self._wanted_pauses: frozenset[str] = frozenset()
        self._paused: set[TopicPartition] = set()
        self._skipped_keys: set[TopicKey] = set()
        self._is_full = False
        self._resume_at: dict[TopicPartition, float] = {}
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=f"kjo-poll-{group}", daemon=True)
        self.polled_count = 0
        self.rebalanced_at: datetime | None = None
        """When partitions were given to it or taken from it last."""

    @property
    def topics(self) -> list[str]:
        """The topics it reads."""
        return list(self._queue_of)

    @property
    def is_called(self) -> bool:
        """Whether those who publish to its topics call; others' brokers answer its poll at once."""
        return self._transport.capabilities.transactional

    @property
    def partitions(self) -> list[TopicPartition]:
        """The partitions assigned to it now."""
        return self._subscription.assignment() if self._subscription is not None else []

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def wake(self) -> None:
        """Look for records now."""
        if self._subscription is not None:
            self._subscription.wake()

    def drain(self) -> None:
        """Fetch nothing more, but stay a member of the group until ``close``."""
        self._is_draining.set()
        self.wake()

    def leave(self) -> None:
        """Begin to leave the group: acknowledgements are flushed, the rest is handed back. What
        runs is not waited for; the thread ends when it has left."""
        self._is_draining.set()
        self._is_closed.set()
        self.wake()

    def close(self, timeout: float) -> None:
        """Leave the group, waiting so many seconds until that is done."""
        self.leave()
        self.thread.join(timeout)

    def set_quiet(self, is_quiet: bool) -> None:
        """Fetch nothing, or again, as a member of the group. What waits in the lanes goes to others
        where the transport can hand records back; the partitions of a log stay here with it."""
        self.is_quiet = is_quiet
        self.wake()

    def set_paused(self, queues: frozenset[str]) -> None:
        """Fetch nothing of these queues, and of all others again."""
        self._wanted_pauses = queues

    def pause_for(self, partition: TopicPartition, seconds: float) -> None:
        """Let one partition rest: what its messages need is down (KJO-76)."""
        with self._lock:
            self._resume_at[partition] = time.monotonic() + seconds

    def resting(self) -> dict[TopicPartition, float]:
        """Return the partitions that rest, with the seconds they still will; thread-safe."""
        now = time.monotonic()
        with self._lock:
            return {tp: due - now for tp, due in self._resume_at.items() if due > now}

    # --- The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        delay = FIRST_RESTART
        try:
            while not self._is_closed.is_set():
                began = time.monotonic()
                try:
                    self._poll_until_closed()
                except Exception as error:
                    # A poller that dies silently would stop consumption with everything looking
                    # alive: report, back off, start over with a new subscription.
                    logger.exception("Polling %s failed, starting over", ", ".join(self.topics))
                    self._on_error(str(error))
                    if time.monotonic() - began > LAST_RESTART:
                        # It had worked meanwhile: this is another outage.
                        delay = FIRST_RESTART
                    self._is_closed.wait(delay)
                    delay = min(delay * 2, LAST_RESTART)
        finally:
            connections.close_all()

    def _poll_until_closed(self) -> None:
        subscription = self._transport.subscribe(
            self.topics,
            self.group,
            lease=get_settings().record_lease,
            on_revoked=self._on_revoked,
            on_assigned=self._on_assigned,
        )
        self._subscription = subscription
        self._paused, self._skipped_keys = set(), set()
        try:
            while not self._is_closed.is_set():
                self._poll_once(subscription)
        finally:
            try:
                self._lanes.discard(subscription.assignment(), subscription)
            finally:
                # Left open, it would stay a member that reads nothing.
                subscription.close()

    def _poll_once(self, subscription: Subscription) -> None:
        max_records = self._prepare(subscription)
        if self.is_quiet and subscription.supports_release and self._lanes.waiting:
            waiting = self._lanes.discard(subscription.assignment(), subscription)
            subscription.release([delivery.record for delivery in waiting])
        if self._is_draining.is_set() or self.is_quiet or max_records <= 0:
            subscription.poll(0, 0.0)
            self._is_closed.wait(FULL_WAIT)
            return
        # One that is full may have room again before another one brings anything.
        timeout = FULL_POLL_TIMEOUT if self._is_full else POLL_TIMEOUT
        records = subscription.poll(max_records, timeout)
        self._on_error(subscription.last_error)
        if records:
            self.polled_count += len(records)
            read = [self.read(record, subscription) for record in records]
            self._lanes.put([delivery for delivery in read if delivery is not None])

    def read(self, record: Record, subscription: Subscription) -> Delivery | None:
        """Read the message and find its handler; what cannot be read becomes poison, not an error:
        the loop goes on. None: the record was meant for others, and is settled."""
        queue = self._queue_of[record.topic]
        try:
            found = registry.route_of(queue.name).read(record, max_bytes=self._max_bytes)
        except MessageError as problem:
            return Delivery(record, subscription, queue, None, None, problem)
        except Exception as error:
            # Raised, it would come again with the record, and nothing behind it would be read.
            logger.exception("A record of %s cannot be read", record.topic)
            why = f"It cannot be read: {type(error).__name__}: {error_text(error)}"
            unread = MessageError("invalid", why)
            return Delivery(record, subscription, queue, None, None, unread)
        if found is None:
            self._on_skipped(queue)
            subscription.acknowledge([record])
            return None
        message, handler = found
        if handler is not None and handler.options.queue in self._queues:
            # Queues that share a topic: the handler tells them apart.
            candidate = self._queues[handler.options.queue]
            queue = candidate if candidate.topic == record.topic else queue
        return Delivery(record, subscription, queue, message, handler)

    def _on_revoked(self, partitions: Sequence[TopicPartition], lost: bool) -> None:
        """Called within poll: forget what waits, let what runs end, bounded and lock-free."""
        self.rebalanced_at = timezone.now()
        if self._subscription is None:
            return
        self._lanes.discard(partitions, self._subscription)
        if lost or self._is_closed.is_set():
            return  # a worker that stops has waited for all it is going to wait for
        if not self._lanes.wait_for(partitions, REVOKE_WAIT):
            logger.warning("A rebalance did not wait for long jobs of %s", partitions)
        # Of those that have ended meanwhile, some may have been put off.
        self._lanes.discard(partitions, self._subscription)

    def _on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.rebalanced_at = timezone.now()

    # --- Pauses -----------------------------------------------------------------------------------

    def _prepare(self, subscription: Subscription) -> int:
        """Pause what is not to be read now, and resume the rest; return how many records the next
        poll may bring."""
        assigned = subscription.assignment()
        unwanted = self._unwanted(assigned)
        plan = self._flow.plan(
            [each for each in assigned if each not in unwanted],
            self._lanes.held_of(subscription),
            self._max_outstanding - self._lanes.occupied,
            subscription.uncommitted(),
            self._paused,
        )
        self._is_full = bool(plan.full)
        if plan.max_records or not plan.full:
            self._pause(subscription, {*unwanted, *plan.full})
            self._skip_keys(subscription)
        # Else nothing is read anyway, and a log's client would throw away what it has fetched.
        return plan.max_records

    def _unwanted(self, assigned: Sequence[TopicPartition]) -> set[TopicPartition]:
        """Return the partitions that operators or an outage have paused."""
        wanted = {q.topic for q in self._queues.values() if q.name in self._wanted_pauses}
        now = time.monotonic()
        with self._lock:
            self._resume_at = {tp: due for tp, due in self._resume_at.items() if due > now}
            return {tp for tp in assigned if tp.topic in wanted or tp in self._resume_at}

    def _pause(self, subscription: Subscription, wanted: set[TopicPartition]) -> None:
        if to_pause := wanted - self._paused:
            subscription.pause(sorted(to_pause))
        # Of those somebody else has now, too: the subscription remembers a pause across rebalances,
        # and a partition must not come back paused for ever.
        if to_resume := self._paused - wanted:
            subscription.resume(sorted(to_resume))
        self._paused = wanted

    def _skip_keys(self, subscription: Subscription) -> None:
        """Leave keys alone of which much waits here, where the transport can read past them."""
        waits = self._lanes.outstanding >= self._flow.chunk
        keys = self._lanes.keys_waiting(subscription, self._flow.chunk) if waits else set()
        if keys != self._skipped_keys:
            subscription.skip_keys(keys)
            self._skipped_keys = keys
