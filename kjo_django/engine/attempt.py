"""What lanes carry: deliveries, and the attempts to run them."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from kjo_django.conf import QueueConf
from kjo_django.coordination.base import lease_name
from kjo_django.exceptions import MessageError
from kjo_django.failure_facts import FailureFacts
from kjo_django.limits.permits import LimitState
from kjo_django.messages.headers import Message
from kjo_django.models import DeadLetterReason, EventKey
from kjo_django.registry import Handler, HandlerOptions, route_of
from kjo_django.runtime import Runtime
from kjo_django.store.rows import JobRow
from kjo_django.transports.base import NoSubscription, Record, Subscription, TopicPartition
from kjo_django.workflows.step_context import WorkflowContext


class Mode(enum.Enum):
    """How a group of deliveries is run; groups are of one mode."""

    ATOMIC = "atomic"
    PLAIN = "plain"
    """``atomic=False``: outside a transaction, under a renewed lease."""
    CONCURRENT = "concurrent"
    """``atomic=False`` and ``async def``: all of a group at once on one event loop."""
    POISON = "poison"
    """Nothing to run: the record is dead-lettered."""


NO_KEY = EventKey("", "", "")


class Delivery:
    """One record on its way through a lane: a message, and the handler that is to run it. What many
    ask of it is worked out once.

    :param service: this process's, under whose name the effects of its messages are marked.
    :param level: its level of priority: 2 urgent, 1 high, 0 normal, -1 low.
    """

    deliveries: int = 1
    """Times it was begun since its last durable outcome, this one included."""

    attempt: Attempt | None
    """The last attempt, while its way is not known to be over; see ``Attempt.must_not_run``."""
    paused_since: datetime | None = None
    """When it first met an error that pauses its partition; None: not in this worker."""
    is_settled: bool = False
    """Whether its outcome is durable and acknowledged: it is not to run again."""
    took: float | None = None
    """Seconds that its coroutine ran; None: it ended with an error, or has not run."""
    was_joined: bool = False
    """Whether steps that it released have run in its transaction. Should it run again, they do not:
    one of them may be why."""
    is_orphan: bool = False
    """Whether it was being run when a worker died, and next runs in a group of its own."""
    waiting_since: float = 0.0
    """When it came to the lanes (monotonic)."""
    put_off_until: float = 0.0
    """When it comes up again, where it is deferred until a moment of its own (monotonic)."""
    limit_state: LimitState | None
    """What its limits know of it, and write; None: it has none."""
    weight: int = 1
    """As how many records it counts; a large value counts as several."""
    trace: Any = None
    """What a tracer keeps of its run until that is settled."""
    kind: str
    """The name of its handler, by which its run time is estimated."""
    mode: Mode
    """How it is run."""
    batch: int | None
    """Most deliveries its handler takes in one call; None for a handler of one."""
    lease: str
    """The name of its lease; "" of a record that nobody can read."""
    has_own_lease: bool
    """Whether its record's own lease keeps all others from it, which then needs none of
    coordination. Records of one item share a lease of coordination, and so do those of one message
    that runs outside a transaction and has no job."""
    key: EventKey
    """Of its marker in ``processed_events``."""
    shard: object
    """What its order is kept by: its record's key, or the item several keys speak of. A record
    without either asks for no order and is a shard of its own, the same one should it be handed out
    again while it still runs here."""

    def __init__(
        self,
        record: Record,
        subscription: Subscription,
        queue: QueueConf,
        service: str,
        message: Message,
        handler: Handler,
        level: int = 0,
    ) -> None:
        self.record = record
        self.subscription = subscription
        self.queue = queue
        self.message = message
        self.handler = handler
        self.level = level
        # Asked for many times in each run: found here, they take half as long as in the class.
        self.attempt = self.limit_state = None
        self.place: TopicPartition = TopicPartition(record.topic, record.partition)
        """The partition it came from."""
        self.kind, self.batch = handler.options.name, handler.options.batch
        outside = Mode.CONCURRENT if handler.is_async else Mode.PLAIN
        self.mode = Mode.ATOMIC if handler.options.atomic else outside
        # Outside a transaction nothing but a job's row keeps a second record of its message away.
        is_excluded = self.mode is Mode.ATOMIC or bool(message.job_id)
        self.has_own_lease = subscription.counts_deliveries and not message.lease_id and is_excluded
        self.key, self.lease = NO_KEY, ""
        if message.id:
            self.key = EventKey(message.id, handler.service or service, message.type)
            self.lease = lease_name(queue, message.lease_id or message.id)
        if message.lease_id:
            self.shard = (record.topic, message.lease_id)
        elif record.key is not None:
            self.shard = (record.topic, record.key)
        else:
            self.shard = (*record.position, queue.consumer_group)

    @property
    def asks_again(self) -> bool:
        """Whether it waits here for its limits: it comes before those that wait in line for
        them."""
        return self.limit_state is not None and self.limit_state.asks_again

    @property
    def has_slot(self) -> bool:
        """Whether a slot of a limit was taken for it."""
        return self.limit_state is not None and self.limit_state.slot_until > 0

    @property
    def is_limited(self) -> bool:
        """Whether it may start only as long as its permit, or its slot, is its own."""
        return self.limit_state is not None and self.limit_state.is_limited

    @property
    def is_in_transaction(self) -> bool:
        """Whether its handler is called in the transaction of its group."""
        return self.mode is Mode.ATOMIC


def _run_nothing() -> None:
    raise AssertionError("A refused record is not run")


_NOBODY = Handler(_run_nothing, HandlerOptions(name=""))


class RefusedRecord(Delivery):
    """A record that no handler here can run, and which is dead-lettered.

    :param problem: why.
    :param message: what could be read of it; None: it cannot be read.
    """

    def __init__(
        self,
        record: Record,
        subscription: Subscription,
        queue: QueueConf,
        service: str,
        problem: MessageError,
        message: Message | None = None,
        level: int = 0,
    ) -> None:
        unread = Message(id="", type="", payload=record.value or b"", content_type="")
        super().__init__(record, subscription, queue, service, message or unread, _NOBODY, level)
        self.mode = Mode.POISON
        self.problem = problem


def unhandled(
    record: Record,
    subscription: Subscription,
    queue: QueueConf,
    service: str,
    message: Message,
    level: int = 0,
) -> RefusedRecord:
    """Return the delivery of a message for which no handler is registered."""
    why = f"No handler is registered for {message.type!r}"
    unknown = MessageError(DeadLetterReason.UNKNOWN_TYPE, why)
    return RefusedRecord(record, subscription, queue, service, unknown, message, level)


def delivery_of(record: Record, queue: QueueConf, runtime: Runtime) -> Delivery | None:
    """Return the delivery of a record that no subscription has handed out; None if it is meant for
    others."""
    subscription, service = NoSubscription(), runtime.service
    try:
        found = route_of(queue.name).read(record, max_bytes=runtime.settings.max_payload_bytes)
    except MessageError as problem:
        return RefusedRecord(record, subscription, queue, service, problem)
    if found is None:
        return None
    message, handler = found
    if handler is None:
        return unhandled(record, subscription, queue, service, message)
    return Delivery(record, subscription, queue, service, message, handler)


class Departed(set[Delivery]):
    """Deliveries that have left their group before its end: coroutines that run on an event loop,
    and what a free lane has taken. The lane that runs the group has nothing more to do with them.
    """

    _offered: tuple[Sequence[Sequence[Attempt]], Sequence[Delivery]] = (), ()
    _lock = threading.Lock()
    """Of all groups: it is held for a moment, and seldom."""

    def offer(self, steps: Sequence[Sequence[Attempt]], behind: Sequence[Delivery]) -> None:
        """Let a free lane take what has not begun, until ``keep`` is called. The caller leaves it
        alone meanwhile.

        :param steps: attempts that are not called yet; those that have an ending stay.
        :param behind: deliveries that come after these.
        """
        self._offered = steps, behind

    def keep(self) -> None:
        """Offer nothing any more: what has not left by now stays in the group."""
        with self._lock:
            self._offered = (), ()

    def take(self, group: Sequence[Delivery]) -> list[Delivery]:
        """Let what is offered of a group leave, and return it. Deliveries stay of whose key, or of
        whose message, others stay: the order of a key is kept."""
        with self._lock:
            steps, behind = self._offered
            offered = {each.delivery for step in steps for each in step if each.ending is None}
            offered.update(behind)
            here = self.remaining(group)
            stay = [each for each in here if each not in offered]
            shards, leases = {d.shard for d in stay}, {d.lease for d in stay if d.lease}
            taken = [d for d in here if d.shard not in shards and d.lease not in leases]
            self.update(taken)
            return taken

    def remaining(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Return those of the deliveries that have not left."""
        return [each for each in deliveries if each not in self]


class Ending(enum.Enum):
    """How an attempt ended; ``Attempt.reason`` says why."""

    COMPLETED = "completed"
    DUPLICATE = "duplicate"
    """The message has taken effect before."""
    SKIPPED = "skipped"
    """Cancelled, deleted or of an earlier generation or attempt: its job's row says what became of
    it."""
    RETRIED = "retried"
    DEAD = "dead"
    CANCELLED = "cancelled"
    """Asked to end while it ran, it did: its writes are undone, it is not retried."""
    IN_LINE = "in line"
    """It is queued for a limit, as its job's row says; its message is settled."""
    DEFERRED = "deferred"
    """Not now: it stays unacknowledged and comes up again here."""


class Reason(enum.StrEnum):
    """Why a delivery was not run, or its run does not count. The reason of a death is a
    ``DeadLetterReason``."""

    COMPLETED = "completed"
    """Its job's row is completed; the next two are such states, too."""
    CANCELLED = "cancelled"
    FAILED = "failed"
    DELETED = "deleted"
    WAITING = "waiting"
    """It is a step of a workflow that waits for others."""
    HAS_ROW = "has_row"
    GENERATION = "generation"
    ATTEMPT = "attempt"
    CHANGED = "changed"
    LEASE_LOST = "lease lost"
    LEASED = "leased"
    PAUSED = "paused"
    OUT_OF_BUDGET = "budget"
    INTERRUPTED = "interrupted"
    LIMITED = "limited"
    ALONE = "alone"
    """It failed in a transaction with others, and runs again at once without them."""


class Abort(enum.Enum):
    """Why a run was asked to end early."""

    CANCELLED = "it was cancelled"
    """Somebody cancelled the job; however the handler fails from here on, it is not retried."""
    SHUTDOWN = "the worker stops"
    LOST = "another worker took it over"
    TIMEOUT = "it exceeded its timeout"


UNWANTED = (Abort.CANCELLED, Abort.SHUTDOWN, Abort.LOST)
"""Reasons to end for which nobody is to run it again now."""
FAILURES = (Ending.RETRIED, Ending.DEAD, Ending.CANCELLED)
"""Endings that are written after the run, in a transaction of their own."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt to run a delivery: how it ended, and how far that has come."""

    delivery: Delivery
    ending: Ending | None = None
    """None: it may run, or runs."""
    reason: Reason | str = ""
    """Why it ended so: a ``Reason``, or that of its dead letter."""
    row: JobRow | None = None
    """Its job's row as it was read when the attempt began; None where there is none."""
    number: int = 0
    """From 1; 0 for one that was never begun."""
    limit: int = 0
    """After how many attempts its job is dead-lettered; 0 for one that was never begun."""

    started_at: datetime | None = None
    seconds: float = 0.0
    result: bytes | None = None
    """The wrapped, serialized return value."""
    result_ttl: int | None = None
    """Milliseconds its outcome is kept, where the run changed that."""
    worker: str = ""
    """The name of its worker, where the run wants it kept with the completed job."""
    error: BaseException | None = None
    failure: FailureFacts | None = None
    """What is kept of an error, once it is written somewhere; see ``failures.failure_of``."""
    log_lines: Sequence[str] | None = None
    """The last lines that were logged in its run; None: there were none."""
    abort_reason: Abort | None = None
    """Why its run was asked to end early, if it was."""

    retry_at: datetime | None = None
    pause_seconds: float | None = None
    """For how long its partition is paused after it; None: not at all."""
    step: WorkflowContext | None = None
    """Of a workflow's step: what its run may ask and add."""
    announcements: Sequence[Callable[[], object]] = ()
    """Calls that send the signals of what has ended with it: its workflow, and steps that were
    cancelled because it has failed. They are made when it is announced."""
    row_lease: str | None = None
    """The token under which its job's row was leased; None: it ran in the group's transaction."""
    is_marked: bool = False
    """Whether its own transaction has inserted its marker, which was not there before."""
    born_id: UUID | None = None
    """Of the row that its failure has made for a message nobody enqueued here."""
    dead_letter_id: str = ""
    key: EventKey = NO_KEY
    """Of its marker in ``processed_events``."""

    is_published: bool = False
    """Whether its dead letter is on the topic, or need not be."""
    is_committed: bool = False
    """Whether it is a completion whose effects and marker another handler of its group has
    committed, while its row is still open."""
    is_in_doubt: bool = False
    """Whether a transaction that recorded it failed. Its COMMIT may have taken effect."""
    is_confirmed: bool = False
    """Whether it is a completion whose COMMIT was not answered, and which was found committed."""
    is_recorded: bool = False
    is_acknowledged: bool = False
    is_announced: bool = False
    """Whether hooks, signals and statistics were called with it."""

    @property
    def must_not_run(self) -> bool:
        """Whether all that is left to do, should its delivery come up again, is to settle it. Of a
        completion whose COMMIT was not answered, the database has to be asked first."""
        return self.ending is not Ending.COMPLETED or self.is_announced or self.is_committed
