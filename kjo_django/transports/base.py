"""The contract of a transport: it carries records from publishers to consumer groups.

A transport knows nothing of jobs, handlers or retries; it moves bytes. Two small interfaces, so a
new one can be written in an afternoon and proven by ``kjo_django.testing.conformance``, which every
implementation here passes.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, NamedTuple

from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext as _

from kjo_django.clock import CLOCK, Clock
from kjo_django.messages.headers import listed
from kjo_django.values import ANY_SIZE, unknown_key


class TopicPartition(NamedTuple):
    """One ordered part of a topic. Transports without partitions use partition 0."""

    topic: str
    partition: int


TopicKey = tuple[str, bytes]
"""A topic and a key of its records."""


class GroupOffsets(NamedTuple):
    """Where a consumer group is in one partition."""

    lag: int
    """Records not acknowledged yet."""
    committed: int | None = None
    """The offset it reads next after a crash; None where it has committed nothing, or there are no
    offsets."""
    end: int | None = None
    """The offset the next record published gets; None where there are no offsets."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do; callers ask before they rely on it."""

    ordering: bool
    """Records of one key reach one consumer at a time, in the order of publishing."""
    delay: bool
    """``OutgoingRecord.available_at`` is honoured; without it the relay waits instead."""
    transactional: bool
    """``publish`` joins the caller's database transaction: no relay is needed, and a record is
    seen if and only if that transaction commits."""
    replay: bool
    """Acknowledged records stay readable for another group, until the topic's retention ends."""
    priority: bool = False
    """``OutgoingRecord.priority`` decides the order of handing out; without it each level of a
    queue's priorities has a topic of its own."""
    counts_deliveries: bool = False
    """Its subscriptions lease each record to one consumer and count how often it was begun, so a
    record needs no lease of coordination; ``Transport.running`` tells which are begun."""


@dataclass(frozen=True, slots=True)
class OutgoingRecord:
    """What is handed to ``publish``."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    """Records of equal key keep their order. None: no order is asked for."""
    headers: Mapping[str, bytes] = field(default_factory=dict)
    """By name. A transport that carries a list sends what ``messages.headers.listed`` returns."""
    available_at: datetime | None = None
    """Not delivered before this moment (aware). Only where ``capabilities.delay``."""
    partition: int | None = None
    """A partition to use instead of the one the key selects, where there are partitions."""
    priority: int = 0
    """From -100 to 100: of the records of a topic the highest come first, those of one priority
    in their order. Only where ``capabilities.priority``."""


@dataclass(slots=True)
class Published:
    """The outcome of one record, in the order of the records published."""

    error: str | None = None
    """None when the transport has durably accepted the record."""
    is_final: bool = False
    """Whether the same record would be refused again, however often it is tried."""
    is_too_large: bool = False
    """Whether its size is why it is refused for good."""
    is_topics: bool = False
    """Whether its topic is what takes nothing, being missing or not ours to write: records for
    others need not wait."""
    partition: int | None = None
    offset: int | None = None


@dataclass(slots=True)
class Record:
    """What ``poll`` hands out. Two deliveries of one record are equal in ``position``."""

    topic: str
    partition: int
    offset: int
    """Grows within a partition, possibly with gaps."""
    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes]
    """By name: of a name given twice the last, and b"" for a header without a value. See
    ``header_list``."""
    timestamp: datetime | None = None
    """When it was published, aware."""
    epoch: int = 0
    """The assignment of the partition under which it was handed out. After a rebalance, records of
    an older epoch are no longer this consumer's: acknowledging them is a no-op."""
    token: Any = None
    """The transport's own handle for acknowledging."""
    priority: int = 0
    """As it was published with, where ``capabilities.priority``."""
    deliveries: int = 0
    """Times it was begun since its last durable outcome, where its subscription counts them; see
    ``Subscription.begin``."""

    @property
    def header_list(self) -> list[tuple[str, bytes | None]]:
        """All headers in order, as the record came with them; None for one without a value."""
        return listed(self.headers)

    @property
    def position(self) -> tuple[str, int, int]:
        """Topic, partition and offset."""
        return (self.topic, self.partition, self.offset)

    @property
    def place(self) -> tuple[str, int | None, int | None]:
        """Topic, partition and offset; only the topic of a record that was read from none."""
        if self.partition == NOWHERE:
            return (self.topic, None, None)
        return (self.topic, self.partition, self.offset)


NOWHERE = -1
"""The partition and the offset of a record that comes from no topic."""

RevokedCallback = Callable[[Sequence[TopicPartition], bool], None]
"""Called inside ``poll`` or ``close`` with the partitions taken away and whether they were *lost*.

Revoked (``lost=False``): the callback may wait a bounded time for work in flight; what has been
acknowledged when it returns is committed. Lost: another consumer may own them already, nothing is
committed any more."""

AssignedCallback = Callable[[Sequence[TopicPartition]], None]


class Subscription(abc.ABC):
    """One consumer group's view of some topics.

    Not thread-safe but for ``acknowledge``, ``wake``: one thread owns it and polls regularly, since
    polling is also what keeps leases and group membership alive.
    """

    @abc.abstractmethod
    def poll(self, max_records: int, timeout: float, max_bytes: int = ANY_SIZE) -> list[Record]:
        """Return up to ``max_records`` records, waiting at most ``timeout`` seconds for the first.

        None follows the record with which their values reach ``max_bytes``, so one of any size is
        returned. Where a server cannot count bytes a few may follow. No more than about twice that
        is loaded to find out.
        ``max_records=0`` fetches nothing but keeps the membership and the leases alive. Returns
        early, empty, after ``wake()``. A group that never read a topic starts at its earliest
        record. Raises nothing for outages that pass: it returns an empty list and reports them
        through ``last_error``.
        """

    def poll_urgent(
        self, above: Mapping[str, int], max_records: int, max_bytes: int = ANY_SIZE
    ) -> list[Record]:
        """Return up to ``max_records`` records of these topics, paused or not, that have a higher
        priority than this, by topic; at once, a few times a second at most.

        For topics that are paused because their consumer holds enough. Default: none, as where
        ``capabilities.priority`` is not declared.
        """
        return []

    @abc.abstractmethod
    def acknowledge(self, records: Iterable[Record]) -> None:
        """Note that these records are settled, in any order; thread-safe and without I/O of its own
        unless documented.

        A crash at any moment re-delivers every record not acknowledged, and possibly some that
        were. A log transport commits the contiguous watermark of each partition from ``poll``; it
        never commits past a record that is not settled.
        """

    joins_transactions: bool = False
    """Whether ``acknowledge_in_transaction`` is part of the caller's database transaction."""

    def acknowledge_in_transaction(self, records: Iterable[Record]) -> None:
        """Settle these records inside the caller's open database transaction, on its connection.

        Where ``capabilities.transactional``, their outcome and their acknowledgement commit or roll
        back together; after a roll-back they are this consumer's still. Any thread may call it; it
        raises what the database raises. Elsewhere it is ``acknowledge``, so call it after the
        outcome is durable there. Default: that.
        """
        self.acknowledge(records)

    hears_publishers: bool = False
    """Whether ``wake`` is called for every publication to these topics, but for a call that gets
    lost now and then: an idle consumer may look less often then. Its consumer sets it."""

    supports_release: bool = False
    """Whether ``release`` gives records to others; else they are its consumer's until ``close``, as
    those of a log's partition are."""

    release_keeps_order: bool = False
    """Whether what was released of a key is delivered before anything later of that key."""

    def release(self, records: Iterable[Record]) -> None:
        """Give up records that were not begun: they are delivered again, to others at once. Called
        by the owner's thread. Default: they stay this consumer's."""
        return

    def holds(self, record: Record) -> bool:
        """Return whether a record that was handed out is still this consumer's by what its process
        knows, so that it may be run again here. Makes no I/O; thread-safe. Default: it is."""
        return True

    counts_deliveries: bool = False
    """Whether ``begin`` counts, see ``Capabilities``."""

    def count_deliveries(self, records: Sequence[Record]) -> list[int]:
        """Return for each of the records what ``begin`` would return now, and note nothing. Any
        thread may call it."""
        return [1] * len(records)

    def begin(self, records: Sequence[Record], worker: str) -> list[int]:
        """Note durably that these records are about to run, and return for each how often it was
        begun since its last durable outcome, this time included; 0 of one that is not this
        consumer's any more. Any thread may call it.

        A record that was begun here and has not ended is not counted once more. Default, where
        nothing is counted: 1 for each.

        :param worker: the token of the worker that runs them.
        """
        return [1] * len(records)

    def begin_at_once(self, worker: str, count_starts: Callable[[], int]) -> None:
        """Let ``poll`` begin what starts as soon as it is handed out, where that costs less than
        ``begin``. Default: nothing.

        :param worker: see ``begin``, which is called all the same.
        :param count_starts: returns how many records would start at once, as long as none of them
            has to wait for another one of its key.
        """
        return

    def ask_who_died(self, died: Callable[[Collection[str]], Collection[str]]) -> None:
        """Count only those deaths that are known: a consumer that could not renew its leases, as
        while its server was away, has not died for that. Default: nothing.

        :param died: is called with the tokens of workers, as ``begin`` had them, whose leases have
            run out, and returns those that have died.
        """
        return

    def end(self, records: Sequence[Record], deliveries: Sequence[int]) -> None:
        """Note that these records, which were begun, do not run and have no outcome yet. Any thread
        may call it. Default: nothing.

        :param deliveries: how often each counts as begun from now on.
        """
        return

    def has_lost(self, record: Record) -> bool:
        """Return whether another consumer has a record that was handed out here, by what this
        process knows. Makes no I/O. Default: where it may not be run again here."""
        return not self.holds(record)

    def limit(self, records: Mapping[str, int]) -> None:
        """Hand out no more than so many records of each of these topics in one poll, of others as
        many as the poll is for. Default: nothing; what is too much is released."""
        return

    @abc.abstractmethod
    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out nothing more of these partitions until resumed; survives rebalances for as long
        as the partition stays or comes back here. Partitions not assigned are remembered."""

    @abc.abstractmethod
    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Undo ``pause``; nothing was lost meanwhile."""

    def skip_keys(self, keys: Collection[TopicKey]) -> None:
        """Hand out no more records of these keys, and those of all other keys again; a skipped
        key's records keep their order. Default: nothing, as for a log, which is read in order."""
        return

    @abc.abstractmethod
    def assignment(self) -> list[TopicPartition]:
        """Return the partitions handed to this consumer now."""

    @abc.abstractmethod
    def close(self) -> None:
        """Flush acknowledgements, hand back what was not acknowledged, leave the group.

        Idempotent. Records handed out and not acknowledged are delivered again, to others at once.
        """

    def flush(self) -> None:
        """Make acknowledgements durable now, waiting for it. Default: nothing is buffered."""
        return

    def uncommitted(self) -> Mapping[TopicPartition, int]:
        """Return how many records a crash would deliver again, by partition, settled ones included:
        on a log, all that were handed out from the oldest unsettled one on. Default: none are, as
        where each record is acknowledged by itself."""
        return {}

    def wake(self) -> None:
        """Make a waiting ``poll`` return soon; thread-safe. Default: nothing waits long."""
        return

    last_error: str | None = None
    """The outage ``poll`` met last, None once it works again."""


class NoSubscription(Subscription):
    """The subscription of a record that none has handed out: it hands out nothing, and
    acknowledging is all there is to do."""

    def poll(self, max_records: int, timeout: float, max_bytes: int = ANY_SIZE) -> list[Record]:
        """Return nothing."""
        return []

    def acknowledge(self, records: Iterable[Record]) -> None:
        """Keep nothing."""

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Do nothing."""

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Do nothing."""

    def assignment(self) -> list[TopicPartition]:
        """Return nothing."""
        return []

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """The topic as it should be, see ``topic_options`` of a queue."""

    name: str
    partitions: int = 1
    replication_factor: int = 1
    config: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """The topic as it is. ``partitions`` is None when it does not exist."""

    name: str
    partitions: int | None
    replication_factor: int | None = None
    config: Mapping[str, str] = field(default_factory=dict)


class Transport(abc.ABC):
    """Publishes records and opens subscriptions. Thread-safe; one instance per process and alias.

    Made without I/O: nothing is connected before the first publish or subscribe.

    :param alias: its name in ``KJO["TRANSPORTS"]``, for error messages.
    :param options: the ``OPTIONS`` of its settings.
    :raises ImproperlyConfigured: an option is not known.
    """

    capabilities: ClassVar[Capabilities]
    known_options: ClassVar[frozenset[str] | None] = None
    """Names of its ``OPTIONS``, where others are a mistake; None where any may be passed on."""
    topic_name: ClassVar[re.Pattern[str] | None] = None
    """What the whole name of a topic must match; None where any text will do."""
    clock: Clock = CLOCK
    """The clock by which it waits and leases; a test may set another before the first use."""

    def __init__(self, alias: str, options: Mapping[str, Any]) -> None:
        self.alias = alias
        self.options = dict(options)
        if self.known_options is not None:
            where = f"KJO['TRANSPORTS'][{alias!r}]['OPTIONS']"
            if fault := unknown_key(self.options, sorted(self.known_options), where):
                raise ImproperlyConfigured(fault)

    @abc.abstractmethod
    def publish(self, records: Sequence[OutgoingRecord]) -> list[Published]:
        """Publish all records and wait until each is durably accepted or refused.

        Returns one outcome per record, in order. Records of one key keep their order. Raises
        ``PublishError`` only when nothing could be tried at all.
        """

    @abc.abstractmethod
    def subscribe(
        self,
        topics: Sequence[str],
        group: str,
        *,
        lease: timedelta = timedelta(seconds=30),
        on_revoked: RevokedCallback | None = None,
        on_assigned: AssignedCallback | None = None,
    ) -> Subscription:
        """Open a subscription of ``group`` to ``topics``.

        :param lease: how long a record handed out stays this consumer's without a sign of life,
            where the transport itself leases records.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Flush and release everything. Idempotent; the transport may be used again afterwards."""

    # --- Topics. The defaults suit a transport whose topics need no creation. ---------------------

    def ensure_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        """Create what is missing and grow partitions where fewer exist; never shrink.

        Returns a line for each change made.
        """
        return []

    def describe_topics(self, names: Sequence[str]) -> list[TopicDescription]:
        """Return each topic as it is."""
        return [TopicDescription(name, 1) for name in names]

    def lag(self, topics: Sequence[str], group: str) -> dict[TopicPartition, int]:
        """Return the group's records not yet acknowledged, by partition, without joining it."""
        return {}

    def offsets(self, topics: Sequence[str], group: str) -> dict[TopicPartition, GroupOffsets]:
        """Return where the group is in each partition, without joining it; no dearer than ``lag``,
        and it raises what that raises, within about five seconds: a page waits for the answer.
        Default: the lag, of what is no log."""
        return {where: GroupOffsets(lag) for where, lag in self.lag(topics, group).items()}

    def running(
        self, message_ids: Collection[str] | None = None, *, most: int | None = None
    ) -> dict[str, str]:
        """Return the ids of messages that workers have begun, each with the worker's token, where
        subscriptions count deliveries; none elsewhere. A worker that has died has its messages
        until their leases expire.

        :param message_ids: only of these.
        :param most: no more than so many.
        """
        return {}

    def probe(self, timeout: float) -> str:
        """Answer within ``timeout`` seconds with a short description of what was reached.

        Raises ``PublishError`` with the reason when it cannot be reached.
        """
        return _("in process")


def timestamp_of(milliseconds: int) -> datetime | None:
    """Return when a record was published, None for what no calendar, or not that of every time
    zone, holds: producers may send anything, and pages show it in the zone of their reader."""
    try:
        found = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return found if 1970 <= found.year < 9000 else None
