"""A worker's inside without its threads: relay, subscription and pipeline, step by step."""

from __future__ import annotations

import itertools
import math
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import connection
from django.db.models import F
from django.utils import timezone

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.engine.attempt import Attempt, Delivery, Departed, Ending, Mode
from kjo_django.engine.group import Pipeline
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.poller import Poller
from kjo_django.engine.scheduler import GroupScheduler
from kjo_django.enqueue.definition import JobDefinition
from kjo_django.messages.headers import Message
from kjo_django.models import Job, TransportMessage
from kjo_django.outbox.relay import Relay
from kjo_django.registry import HandlerOptions
from kjo_django.round_trips import GroupBudget
from kjo_django.runtime import current_runtime, get_coordination, get_transport
from kjo_django.states import JobState
from kjo_django.transports.base import OutgoingRecord, Record, Subscription
from kjo_django.transports.database.runs import begun_by
from tests.clocks import SetClock
from tests.ledger.models import Entry

MEMORY = {"TRANSPORTS": {"default": {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}}}
KJO: dict[str, Any] = {
    "SERVICE_NAME": "tests",
    "QUEUES": {"ledger": {}},
    "BACKOFF_BASE": 1,
    "ERROR_RECOVERY_DELAYS": {},
    # A busy machine holds up handlers, and no group is to end for that.
    "GROUP_BUDGET": 3600,
    "TOPIC_OPTIONS": {"partitions": 1, "replication_factor": 1},
}


def kafka_at(servers: str, **options: Any) -> dict[str, Any]:
    """The settings of a transport there, by default every queue's, and of a service of its own: a
    member of its groups that died in another test would be waited for until its session ends."""
    options = {"bootstrap.servers": servers, **options}
    backend = "kjo_django.transports.kafka.KafkaTransport"
    return {
        "SERVICE_NAME": f"tests-{uuid.uuid4().hex[:8]}",
        "TRANSPORTS": {"default": {"BACKEND": backend, "OPTIONS": options}},
    }


class Impatience:
    """Stands for the worker's stop flag: an outage is waited for once, then the worker stops."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        return True

    def is_set(self) -> bool:
        return self.waits > 0


NAMELESS = Message(id="", type="", payload=b"{}", content_type="")
"""The message of a delivery whose message is not asked for anything."""


class Bench:
    """One worker of one queue, driven by hand.

    :param alive: whether it gives a sign of life, as a worker's heartbeat does.
    """

    def __init__(self, queue: str = "ledger", worker: str = "bench", *, alive: bool = True) -> None:
        self.queue = get_settings().queue(queue)
        self.transport = get_transport(self.queue.transport)
        self.subscription = self.transport.subscribe([self.queue.topic], self.queue.consumer_group)
        runtime = current_runtime()
        self.leases = LeaseBook(runtime, worker, timedelta(minutes=5), timedelta(minutes=1))
        if alive:
            self.leases.show_alive()
        self.subscription.ask_who_died(self.leases.died_among)
        self.watch = TimeoutWatch()
        self.outcomes: list[Attempt] = []
        self.pauses: list[Attempt] = []
        self.measured: list[str] = []
        self.stopping = Impatience()
        self.pipeline = Pipeline(
            self.leases,
            self.watch,
            worker=worker,
            listeners=[self.outcomes.extend],
            on_measure=lambda kind, seconds: self.measured.append(kind),
            on_pause=self.pauses.append,
            stopping=self.stopping,  # type: ignore[arg-type]
            on_settled=self._note_settled,
        )
        self._ended: set[Delivery] = set()
        self._deferred: list[Delivery] = []
        self._has_ended = threading.Condition()
        self._poller = Poller(
            runtime,
            self.transport,
            self.queue.consumer_group,
            [self.queue],
            GroupScheduler(1, group_size=1, budget=GroupBudget(1)),
            max_outstanding=1,
        )

    def read(self, record: Record) -> Delivery:
        return self._poller.read(record, self.subscription)

    def poll(self, count: int = 1000) -> list[Delivery]:
        """Publish what is due and take it."""
        Relay([self.queue.name]).publish_due()
        return [self.read(record) for record in self.subscription.poll(count, 0.0)]

    def run(self, deliveries: Sequence[Delivery] | None = None) -> list[Delivery]:
        """Run everything due as one group per mode, and each orphan found in one as a group of its
        own; return what was deferred."""
        taken = self.poll() if deliveries is None else list(deliveries)
        groups = [list(group) for _, group in itertools.groupby(taken, key=lambda one: one.mode)]
        deferred: list[Delivery] = []
        for group in groups:
            running = Departed()
            left = self.pipeline.run(group, running)
            self.advance_lines()
            with self._has_ended:
                assert self._has_ended.wait_for(partial(running.issubset, self._ended), 60)
                left += [delivery for delivery in self._deferred if delivery in running]
                self._ended -= running
                self._deferred = []
            first_of_key: dict[object, Delivery] = {}
            for delivery in group:
                if delivery in left:
                    first_of_key.setdefault(delivery.shard, delivery)
            orphans = [delivery for delivery in first_of_key.values() if delivery.is_orphan]
            groups += [[delivery] for delivery in orphans]
            deferred += [each for each in group if each in left and each not in orphans]
        mine = {delivery.lease for delivery in taken}
        mine |= {each.message.job_id for each in taken if each.message is not None}
        assert mine.isdisjoint(self.owned())  # another lane may run others meanwhile
        return deferred

    def advance_lines(self) -> None:
        """Do what a thread of the worker does for the lines of limits."""
        self.pipeline.limiter.releaser.settle_starts()
        self.pipeline.limiter.releaser.step()

    def owned(self) -> list[str]:
        """Return the leases that the worker renews or whose slots it has, those of deliveries that
        own anything, and the jobs whose rows it has leased."""
        leases = self.leases
        names = [*leases._held, *leases._slots, *(delivery.lease for delivery in leases.owned)]
        return [*names, *map(str, leases.held_rows())]

    def _note_settled(self, deliveries: Sequence[Delivery], deferred: Collection[Delivery]) -> None:
        with self._has_ended:
            self._ended.update(deliveries)
            self._deferred += deferred
            self._has_ended.notify_all()

    def run_until_done(self, rounds: int = 20) -> None:
        """Run every attempt there is, back-off passing at once."""
        for _ in range(rounds):
            make_everything_due()
            if not (deliveries := self.poll()):
                return
            self.run(deliveries)
        raise AssertionError(f"still running after {rounds} rounds")

    @property
    def results(self) -> list[Ending]:
        """How each delivery ended, in order."""
        return [outcome.ending for outcome in self.outcomes]

    def publish(self, value: bytes | None, **headers: bytes | str) -> None:
        """Put a record on the topic as another service would."""
        named = {
            name.replace("_", "-"): text.encode() if isinstance(text, str) else text
            for name, text in headers.items()
        }
        record = OutgoingRecord(self.queue.topic, value, key=b"foreign", headers=named)
        assert self.transport.publish([record])[0].error is None

    def lag(self) -> int:
        """Records not acknowledged."""
        counts = self.transport.lag([self.queue.topic], self.queue.consumer_group)
        return sum(counts.values())

    def close(self) -> None:
        self.pipeline.close(10)
        self.watch.stop()
        self.subscription.close()


@contextmanager
def benched(settings: Any) -> Iterator[Bench]:
    """Yield a worker on the memory transport, without limits; handlers made meanwhile are
    forgotten with it."""
    settings.KJO = KJO | MEMORY
    with registry.isolated():
        registry.limited.clear()
        bench = Bench()
        try:
            yield bench
        finally:
            bench.pipeline.close(10)
            bench.close()


@contextmanager
def on_memory(settings: Any, **keys: Any) -> Iterator[Any]:
    """Yield the memory transport, with nothing in it before and afterwards."""
    settings.KJO = MEMORY | keys
    transport = get_transport()
    transport.clear()
    yield transport
    transport.clear()


@contextmanager
def statements() -> Iterator[list[str]]:
    """Yield a list that grows by each statement executed meanwhile."""
    executed: list[str] = []

    def note(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        executed.append(sql)
        return execute(sql, *rest)

    with connection.execute_wrapper(note):
        yield executed


@contextmanager
def row_locked(pk: Any, lock: str = "FOR UPDATE") -> Iterator[None]:
    """Meanwhile another connection holds a job's row, as that of a job that runs does."""
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute(f"SELECT id FROM kjo_job WHERE id = %s {lock}", [pk])
            assert cursor.fetchone() is not None
            try:
                yield
            finally:
                # A server notices a closed connection some time later, this it answers.
                cursor.execute("ROLLBACK")
    finally:
        other.close()


def make_everything_due() -> None:
    """Let all delays pass."""
    now = timezone.now()
    Job.objects.filter(state__in=(JobState.PENDING, JobState.FAILING)).update(available_at=now)
    TransportMessage.objects.update(available_at=now)


def as_job(function: Callable[..., Any], name: str | None = None, **options: Any) -> JobDefinition:
    """Declare a function as a job of the ledger's queue, replacing one of its name."""
    name = name or f"bench.{function.__name__}"
    registry.unregister(name)
    own = HandlerOptions(name=name, **{"queue": "ledger", **options})
    handler = registry.Handler(function, own)
    registry.register(handler)
    return JobDefinition(handler)


def entries() -> Counter[str]:
    """How often each job took effect."""
    return Counter(Entry.objects.values_list("job", flat=True))


def states() -> list[str]:
    """The states of all jobs, oldest first."""
    return list(Job.objects.order_by("id").values_list("state", flat=True))


def the_job() -> Job:
    """The only job there is."""
    return Job.objects.get()


def take_over(worker: Bench, deliveries: Sequence[Delivery]) -> list[Delivery]:
    """Return deliveries of the same records to this worker, which has begun them: another one had
    them, and has been silent for too long."""
    if all(delivery.has_own_lease for delivery in deliveries):
        TransportMessage.objects.filter(pk__in=[each.record.offset for each in deliveries]).update(
            lease_expires_at=timezone.now() - timedelta(seconds=1)
        )
        for subscription in {each.subscription for each in deliveries}:
            subscription._renewed_at = -math.inf  # type: ignore[attr-defined]
        taken = worker.poll()
    else:
        names = [each.lease for each in deliveries]
        for owner in set(get_coordination().holders(names).values()):
            get_coordination().release(names, owner)
        taken = [worker.read(delivery.record) for delivery in deliveries]
    assert all(claim.acquired for claim in worker.leases.claim(taken))
    assert {*worker.leases.begin(taken)} == {*taken}
    return taken


def let_die_with(deliveries: Sequence[Delivery]) -> None:
    """Have a worker begin what these deliveries are of, and die."""
    for delivery in deliveries:
        if delivery.has_own_lease:
            delivery.record.deliveries += 1
            row = TransportMessage.objects.filter(pk=delivery.record.offset)
            row.update(deliveries=F("deliveries") + 1)
    if names := [each.lease for each in deliveries if not each.has_own_lease]:
        get_coordination().claim(names, "dead", timedelta(minutes=5))
        get_coordination().release(names, "dead", count_delivery=True)


def next_delivery(delivery: Delivery) -> int:
    """Return how often it will have been begun when the next worker begins it."""
    if delivery.has_own_lease:
        row = TransportMessage.objects.filter(pk=delivery.record.offset).first()
        if row is None:
            return 1
        is_begun = (row.lease_token, row.pk) in begun_by("default", [row.lease_token])
        return row.deliveries + is_begun + 1
    (claim,) = get_coordination().claim([delivery.lease], "next", timedelta(minutes=1))
    return claim.deliveries


class Named:
    """What has a lease of this name, instead of a delivery."""

    has_own_lease = False

    def __init__(self, lease: str) -> None:
        self.lease = lease


class Silent(Subscription):
    """A subscription for deliveries that come from nowhere."""

    def poll(self, max_records: int, timeout: float, max_bytes: int = 0) -> list[Record]:
        return []

    def acknowledge(self, records: Any) -> None: ...

    def pause(self, partitions: Any) -> None: ...

    def resume(self, partitions: Any) -> None: ...

    def assignment(self) -> list[Any]:
        return []

    def close(self) -> None: ...


__all__ = [
    "KJO",
    "MEMORY",
    "Bench",
    "Mode",
    "Named",
    "SetClock",
    "Silent",
    "as_job",
    "benched",
    "entries",
    "make_everything_due",
    "on_memory",
    "row_locked",
    "statements",
    "states",
    "the_job",
]
