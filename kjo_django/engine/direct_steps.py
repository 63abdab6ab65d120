"""Steps of workflows that are run by the worker that has released them.

The transaction that releases a step leases its row to the worker, so no relay publishes it. Once
the commit is certain, the step's delivery is put into the worker's scheduler, beside those that
were polled, and goes their way. Nothing is to be acknowledged: the row is all there is. Should the
worker die, freeze or defer the step, the lease expires, and a relay publishes the row like any
other.

A quick step without effects outside the database runs in the very transaction that has released it:
see ``JoinedSteps``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from kjo_django import registry
from kjo_django.engine.attempt import Delivery
from kjo_django.engine.handler.connections import TransactionGuard, drop_broken_connections
from kjo_django.engine.handler.timeouts import RunAbandoned
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.poller import Poller
from kjo_django.engine.recorder import OUTAGES
from kjo_django.engine.scheduler import GroupScheduler
from kjo_django.enqueue import storing
from kjo_django.limits.rules import is_limited
from kjo_django.logs import get_logger
from kjo_django.runtime import Runtime
from kjo_django.store.rows import DueJob
from kjo_django.transports.base import NOWHERE, NoSubscription, Record, TopicPartition

logger = get_logger("kjo_django")


class DirectSteps(NoSubscription):
    """The subscription of the steps that a worker has handed over to itself.

    The token of a record is the id of its job. Each is this worker's for ``RECORD_LEASE``, as a
    record is that a transport leases.

    :param leases: the worker's, whose token the leases in rows bear.
    :param scheduler: takes the deliveries.
    """

    def __init__(self, leases: LeaseBook, scheduler: GroupScheduler) -> None:
        self._runtime, self._token = leases.runtime, leases.token
        self._scheduler = scheduler
        self._pollers: dict[str, Poller] = {}
        self._held: dict[UUID, float] = {}
        """The steps that have not ended, and until when each is leased (monotonic)."""

    def serve(self, poller: Poller) -> None:
        """Take steps of the queues of a poller, which reads their records, if it reads those that
        have no priority."""
        if not poller.level:
            self._pollers |= dict.fromkeys(poller.queues, poller)

    def room(self, queue: str, handler: str) -> int:
        """Return how many steps of this handler would start at once if the caller's transaction
        released them; 0 if they have limits, or if this worker cannot run them."""
        found, conf = registry.find(handler), self._runtime.settings.queue(queue)
        if found is None or queue not in self._pollers or is_limited(self._runtime, found, conf):
            return 0
        return self._scheduler.room(queue, TopicPartition(conf.topic, NOWHERE))

    def joins(self, queue: str, handler: str) -> bool:
        """Return False: the caller is not in the transaction of a group."""
        return False

    def join(self, steps: Sequence[DueJob]) -> None:
        """Do nothing: no step joins."""

    def may_join(self, queue: str, handler: str) -> bool:
        """Return whether a step of this handler may run in the transaction of its queue's group."""
        found, conf = registry.find(handler), self._runtime.settings.queue(queue)
        if found is None or not found.options.database_only or found.options.batch is not None:
            return False
        return self._scheduler.may_join(queue, TopicPartition(conf.topic, NOWHERE))

    def lease(self, seconds: float = 0.0) -> tuple[str, datetime]:
        """Return what is written into the rows of the steps: the worker's token, and until when no
        relay publishes them.

        :param seconds: for how much longer than usual.
        """
        lasts = self._runtime.settings.record_lease + timedelta(seconds=seconds)
        return self._token, self._runtime.clock.now() + lasts

    def put(self, steps: Sequence[DueJob]) -> None:
        """Let steps run that a committed transaction has leased to this worker."""
        self._scheduler.put(self.read(steps))

    def read(self, steps: Sequence[DueJob]) -> list[Delivery]:
        """Return the deliveries of steps that are leased to this worker."""
        now, deliveries = self._runtime.clock.now(), []
        self._hold([step.id for step in steps])
        for step in steps:
            queue = self._runtime.settings.queue(step.queue)
            sent = storing.record_of(step, queue, service=self._runtime.service)
            record = Record(
                *(sent.topic, NOWHERE, NOWHERE, sent.key, sent.value, dict(sent.headers)),
                timestamp=now,
                token=step.id,
            )
            if (delivery := self._pollers[step.queue].read(record, self)) is not None:
                deliveries.append(delivery)
        return deliveries

    def keep(self, delivery: Delivery, seconds: float) -> None:
        """Keep a step here that waits for so long because of an error that pauses its partition;
        deliveries of others are left alone. Raises nothing."""
        if delivery.subscription is not self:
            return
        id, (token, expires_at) = delivery.record.token, self.lease(seconds)
        try:
            self._runtime.store.renew_row_leases([id], token, expires_at)
            self._hold([id], seconds)
        except OUTAGES as error:
            logger.warning("The step %s is published before its pause is over: %s", id, error)
            drop_broken_connections()

    def _hold(self, ids: Iterable[UUID], seconds: float = 0.0) -> None:
        now = self._runtime.clock.monotonic()
        until = now + seconds + self._runtime.settings.record_lease.total_seconds()
        for id in [id for id, end in list(self._held.items()) if end <= now]:
            self._held.pop(id, None)  # it was deferred, and has been published since
        self._held.update(dict.fromkeys(ids, until))

    def joined(self, deliveries: Sequence[Delivery], guard: TransactionGuard) -> JoinedSteps | None:
        """Return what takes the steps that a group of deliveries is about to release; None if they
        are not to run in its transaction, which one of them may have spoilt before.

        :param guard: of that transaction.
        """
        if any(each.was_joined or each.deliveries > 1 for each in deliveries):
            return None
        return JoinedSteps(self, self._scheduler, self._runtime, deliveries, guard)

    # --- As a subscription ------------------------------------------------------------------------

    def acknowledge(self, records: Iterable[Record]) -> None:
        """Forget steps whose rows say how they have ended."""
        for record in records:
            self._held.pop(record.token, None)

    def holds(self, record: Record) -> bool:
        """Return whether the lease has not expired: after that the relay publishes the step."""
        return self._held.get(record.token, 0.0) > self._runtime.clock.monotonic()

    def close(self) -> None:
        """Let the relay publish at once what has not ended."""
        ids, self._held = list(self._held), {}
        if not ids:
            return
        try:
            self._runtime.store.release_row_leases(ids, self._token)
        except OUTAGES as error:
            logger.warning("%d steps are published when their leases expire: %s", len(ids), error)
            drop_broken_connections()
        else:
            storing.wake(self._runtime, storing.RELAY_CHANNEL)


class JoinedSteps:
    """Takes the steps that the completions of a group release. A quick step whose handler has no
    effect but in the job's database runs in the transaction that releases it: one flush to the disk
    for all of them.

    Its row, its marker and its savepoint are its own, so if it fails, the steps before it stand. A
    step with other effects must not run before those it waits for are committed: a mail cannot be
    undone with them.

    As deliveries share a group, as many steps join as are expected to run within the groups'
    budget.

    :param leaders: the deliveries of the group.
    :param guard: knows whether a handler has changed something in the session that steps are not to
        find there.
    """

    def __init__(
        self,
        steps: DirectSteps,
        scheduler: GroupScheduler,
        runtime: Runtime,
        leaders: Sequence[Delivery],
        guard: TransactionGuard,
    ) -> None:
        self._steps, self._scheduler, self._guard = steps, scheduler, guard
        self._leaders, self._queue = leaders, leaders[0].queue.name
        self._budget = runtime.group_budget.seconds
        self._most = runtime.settings.group_size
        self._released: list[DueJob] = []
        self.room, self.lease, self.put = steps.room, steps.lease, steps.put
        self.has_run = False
        """Whether a step has begun in the transaction."""

    def joins(self, queue: str, handler: str) -> bool:
        """Return whether a step of this handler may run in the group's transaction."""
        if self._guard.has_changed:
            return False
        is_short = self._most > 0 and self._scheduler.run_time(handler) <= self._budget
        return is_short and queue == self._queue and self._steps.may_join(queue, handler)

    def join(self, steps: Sequence[DueJob]) -> None:
        """Note what the transaction has leased for itself."""
        self._released += steps

    def take(self) -> list[Delivery]:
        """Return the deliveries of what was released since the last call. They are the group's.

        :raises RunAbandoned: this thread was given up.
        """
        steps, self._released = self._released, []
        if not steps:
            return []
        deliveries = self._steps.read(steps)
        self._budget -= sum(self._scheduler.run_time(each.kind) for each in deliveries)
        self._most -= len(deliveries)
        self.has_run = True
        for leader in self._leaders:
            leader.was_joined = True
        if not self._scheduler.join(deliveries):
            raise RunAbandoned
        return deliveries
