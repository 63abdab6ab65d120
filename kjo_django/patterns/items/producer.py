"""Template producers: poll a source of items and send those that are new or have changed.

    class EmailProducer(ModelProducer):
        model = Email
        queue = "email-queue"
        hash_fields = ("recipient", "subject", "body")

    EmailProducer().produce_messages({"state": 1}, limit=100)

The item's own table is the outbox: nothing is stored here but what may vanish. Losing it
sends items again; their consumers decide by the item's state.

    CONS:PREFIX:id   somebody processes the item          read
    PROD:PREFIX:id   some producer is sending the item    claimed before, released after
    PREFIX_SENT:id   content hash of what was sent        set once the transport has it
"""

from __future__ import annotations

import abc
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Literal, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, close_old_connections, transaction

from kjo_django import signals
from kjo_django.conf import declared_queues, get_settings, sent_ttl_for
from kjo_django.coordination.base import Claim
from kjo_django.enqueue.storing import publish, topic_channel, wake
from kjo_django.exceptions import (
    CoordinationError,
    KjoError,
    PayloadError,
    PublishError,
    text_of,
)
from kjo_django.logs import get_logger
from kjo_django.messages.serializers import JSON, one_line, storable_text
from kjo_django.operations.maintenance.topics import ensure_topics
from kjo_django.patterns.items.hashing import content_hash, partition_of
from kjo_django.patterns.items.options import (
    ProducerOptions,
    class_attributes,
    flatten,
    prefix_text,
    read_class_options,
)
from kjo_django.runtime import (
    current_runtime,
    database_of,
    database_of_transport,
    get_coordination,
    get_transport,
    transport_class,
    use_database,
)
from kjo_django.transports.base import OutgoingRecord, Published

MESSAGE_TYPE = "message-type"
ITEM_ID = "item-id"
CONTENT_HASH = "content-hash"
TIMESTAMP = "timestamp"
STABLE_KEY = "stable-key"
STRATEGY = "deduplication-strategy"

LARGEST_WINDOW = 5000
"""Most items asked of a source at once."""
PARTITIONS_KEPT = 30.0
"""Seconds the number of partitions is remembered, as the Kafka client itself does."""


@dataclass(frozen=True)
class ProduceResult:
    """The result of one call of ``produce_messages``."""

    batch_id: str
    """8 random bytes in hex."""
    total: int
    """Items looked at."""
    sent: int
    """Items the transport has accepted."""
    skipped: int
    """Items left out because the same content was sent recently, or another producer is sending it.
    """
    failed: int
    """Items that could not be serialized or that the transport refused."""
    item_ids: list[str] = field(default_factory=list)
    """Ids of the items sent."""
    reason: str | None = None
    """Why not all items were sent: the first error, why items were skipped, or that there was
    nothing to do.
    """

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Target:
    """The topic of a producer, and its names in coordination."""

    queue: str
    topic: str
    transport: str
    key_prefix: str
    sent_ttl: timedelta


class AbstractProducer(abc.ABC):
    """A producer: write three methods, and override the rest where needed.

    Options are class attributes, entries of ``config``, or entries of the dict given to the
    constructor. ``topic`` and ``key_prefix`` are required, or the ``queue`` that has them. Use an
    instance from one thread at a time.

    The arguments of its methods:

    :param item: a row, or what else ``get_next_processing_items`` returns.
    :param item_id: what ``get_item_id`` has returned.
    :raises ImproperlyConfigured: an option is wrong, unknown or missing.
    """

    queue: str | None = None
    topic: str | None = None
    transport: str | None = None
    key_prefix: str | None = None
    processing_ttl: timedelta | float | None = None
    sent_ttl: timedelta | float | None = None
    claim_ttl: timedelta | float = 60
    hash_algorithm: Literal["sha256", "md5"] = "sha256"
    hash_fields: Sequence[str] | None = None
    key_format: str = "{type}-{id}"
    dedup_across_ids: bool = False
    without_coordination: Literal["stop", "send"] = "stop"
    batch_size: int = 1000
    config: ClassVar[Mapping[str, Any]] = {}
    """Options by name, where they are not attributes."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        name = type(self).__name__
        given = flatten({**self.config, **(config or {})}, name)
        declared = class_attributes(type(self), ProducerOptions)
        self.options: ProducerOptions = read_class_options(
            ProducerOptions, {**declared, **given}, name
        )
        """All options as they are in effect."""
        _check_key_format(self.options.key_format, name)
        _ = self.target  # what is missing is said now
        self._is_connected = False
        self._partitions: tuple[float, int] = (0.0, 0)

    # --- To write ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def get_next_processing_items(
        self, criteria: dict[str, Any], limit: int, excluded_ids: Collection[str]
    ) -> Iterable[Any]:
        """Return at most ``limit`` items that match ``criteria`` and whose id is not excluded.

        It is called again, with the returned ids excluded, until enough items are found.
        ``excluded_ids`` may hold tens of thousands, more than an SQL statement takes; a
        ``ModelProducer`` compares them in Python. Excluded items that are returned are dropped.

        :param criteria: what was given to ``produce_messages``.
        :param limit: most items to return.
        :param excluded_ids: ids of items that are not wanted.
        """

    @abc.abstractmethod
    def get_item_id(self, item: Any) -> str:
        """Return the item's unique id as text."""

    @abc.abstractmethod
    def get_item_key(self, item: Any) -> str:
        """Return the item's name for logs."""

    # --- Hooks: what they raise is logged and changes nothing -------------------------------------

    def on_success(self, item_id: str) -> None:
        """Called for each item after the transport has accepted it and its mark is set."""
        return

    def on_failed(self, item_id: str, error: Exception) -> None:
        """Called for each item that could not be sent. It may be sent again.

        :param error: why: a ``PayloadError``, or what the transport said.
        """
        return

    # --- To override ------------------------------------------------------------------------------

    def serialize_item(self, item: Any) -> Any:
        """Return the value of ``data`` in the message; JSON must be able to hold it."""
        return item

    def get_hash_fields(self, item: Any) -> Any:
        """Return the values that the content hash is made of: ``hash_fields`` of the data, or all
        of it.

        Leave out values that change although the content does not, such as a counter or a time
        stamp: each change sends the item again.
        """
        data = self.serialize_item(item)
        if self.options.hash_fields is None:
            return data
        return {name: data[name] for name in self.options.hash_fields}

    def message_hash(self, item: Any) -> str:
        """Return the hash content is compared by."""
        return content_hash(self.get_hash_fields(item), self.options.hash_algorithm)

    def build_message(
        self, item: Any, message_type: str, message_hash: str | None = None
    ) -> OutgoingRecord:
        """Return the record of an item.

        :param message_type: what was given to ``produce_messages``.
        :param message_hash: the item's content hash; computed if not given.
        :raises PayloadError: the item cannot be written as JSON.
        """
        item_id = self.get_item_id(item)
        hash = message_hash or self.message_hash(item)
        key = self.options.key_format.format(type=message_type, id=item_id, hash=hash)
        value = {"id": item_id, "data": self.serialize_item(item), "type": message_type}
        headers = {
            MESSAGE_TYPE: message_type,
            ITEM_ID: item_id,
            CONTENT_HASH: hash,
            TIMESTAMP: str(time.time_ns() // 1_000_000),
            STABLE_KEY: key,
            STRATEGY: "hybrid",
        }
        return OutgoingRecord(
            topic=self.target.topic,
            key=key.encode(),
            value=JSON.dumps(value),
            headers={name: text.encode() for name, text in headers.items()},
            partition=self._partition_of(item_id),
        )

    def windows(
        self, criteria: dict[str, Any], limit: int, excluded_ids: Collection[str]
    ) -> Iterator[list[Any]]:
        """Yield items in portions until there are no more; the caller stops when it has enough.

        So a window full of items that were sent recently does not hide those behind it.

        :param criteria: what was given to ``produce_messages``.
        :param limit: items in the first portion; later ones may be larger.
        :param excluded_ids: ids of items that are not wanted.
        """
        seen = set(excluded_ids)
        size = limit
        while True:
            items = list(self.get_next_processing_items(criteria, size, seen))
            fresh = [item for item in items if self.get_item_id(item) not in seen]
            if fresh:
                seen.update(self.get_item_id(item) for item in fresh)
                yield fresh
            if not fresh or len(items) < size:
                return
            size = min(2 * size, max(limit, LARGEST_WINDOW))

    # --- Use --------------------------------------------------------------------------------------

    def produce_messages(
        self, criteria: dict[str, Any], limit: int, message_type: str = "new"
    ) -> ProduceResult:
        """Send at most ``limit`` items that match ``criteria``, are not being processed and were
        not sent recently with the same content.

        Items that the transport refuses are counted, passed to ``on_failed``, and may be sent
        again. An item that can never be sent, because it is too large or cannot be serialized, does
        not count against ``limit``.

        :param criteria: passed to ``get_next_processing_items``; of a ``ModelProducer``, lookups of
            its queryset.
        :param limit: most items to send, at least 1.
        :param message_type: the ``type`` of the messages.
        :raises CoordinationError: Redis is down, and ``without_coordination`` is "stop".
        :raises PublishError: the topic cannot be looked up or created.
        :raises TypeError: ``criteria`` is no mapping.
        :raises ValueError: ``limit`` is no whole number above 0, or ``message_type`` no text.
        """
        if not isinstance(criteria, Mapping):
            raise TypeError(f"criteria must be a dict, not {type(criteria).__name__}")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"limit must be a whole number above 0, not {limit!r}")
        if not isinstance(message_type, str) or not message_type:
            raise ValueError("message_type must be text that is not empty")
        self.connect()
        with self._its_database():
            return Sending(self, limit, message_type).run(dict(criteria))

    def connect(self) -> None:
        """Make sure that the topic exists; the first ``produce_messages`` does it too.

        :raises ImproperlyConfigured: it is missing and its ``auto_create`` is off.
        """
        if not self._is_connected:
            ensure_topics([self.target.queue])
            self._is_connected = True

    def disconnect(self) -> None:
        """Forget the topic's metadata. Connections belong to the process."""
        self._is_connected = False
        self._partitions = (0.0, 0)

    def _its_database(self) -> AbstractContextManager[object]:
        """Return a block that works with the database of the queue, whose consumers lease its
        items there."""
        return use_database(database_of(self.target.queue))

    # --- What was sent ----------------------------------------------------------------------------

    def get_processing_ids(self) -> set[str]:
        """Return the ids of the items that a consumer is processing now.

        :raises CoordinationError: the coordination cannot be reached.
        """
        name = processing_name(self.target, "")
        with self._its_database():
            return {found[len(name) :] for found in get_coordination().names(name)}

    def get_sent_hashes(self, item_ids: Iterable[str]) -> dict[str, str]:
        """Return the content hashes of those of the items that were sent recently, in one call.

        :param item_ids: of which items.
        """
        names = {sent_name(self.target, item_id): item_id for item_id in item_ids}
        with self._its_database():
            marks = get_coordination().get_marks(list(names))
        return {names[name]: hash for name, hash in marks.items()}

    def get_sent_hash(self, item_id: str) -> str | None:
        """Return the hash the item was sent with recently."""
        return self.get_sent_hashes([item_id]).get(item_id)

    def is_sent_recently(self, item_id: str, message_hash: str) -> bool:
        """Return whether the item was sent recently with this content.

        :param message_hash: the content hash to compare with, see ``message_hash()``.
        """
        return self.get_sent_hash(item_id) == message_hash

    # --- Inside -----------------------------------------------------------------------------------

    @property
    def target(self) -> Target:
        """The target. ``KJO["QUEUES"]`` may override the class of its consumer."""
        options, name = self.options, type(self).__name__
        if options.queue is None and options.topic is None:
            raise ImproperlyConfigured(f"{name} needs a topic, or the queue that has one.")
        queue = get_settings().queue(options.queue or self._queue_of_topic())
        key_prefix = options.key_prefix or (queue.key_prefix if options.queue else None)
        if key_prefix is None:
            raise ImproperlyConfigured(f"{name} needs a key_prefix, the PREFIX of its key names.")
        sent_ttl = options.sent_ttl
        if sent_ttl is None and options.processing_ttl is not None:
            sent_ttl = sent_ttl_for(options.processing_ttl)
        return Target(
            queue.name,
            options.topic or queue.topic,
            options.transport or queue.transport,
            prefix_text(key_prefix),
            sent_ttl or queue.sent_ttl,
        )

    def _queue_of_topic(self) -> str:
        """Return the queue of this project that consumes the topic, or None."""
        conf, topic = get_settings(), self.options.topic or ""
        names = [*conf.queues, *declared_queues()]
        return next((name for name in names if conf.queue(name).topic == topic), topic)

    def _partition_of(self, item_id: str) -> int | None:
        read_at, count = self._partitions
        if time.monotonic() - read_at > PARTITIONS_KEPT or not count:
            count = _partition_count(self.target)
            self._partitions = (time.monotonic(), count)
        return partition_of(item_id, count) if count > 1 else None


def processing_name(target: Target, item_id: str) -> str:
    """Return the name of the consumers' lease on an item."""
    return f"CONS:{target.key_prefix}:{item_id}"


def claim_name(target: Target, item_id: str) -> str:
    """Return the name a producer claims an item under while it sends."""
    return f"PROD:{target.key_prefix}:{item_id}"


def sent_name(target: Target, item_id: str) -> str:
    """Return the name of an item's sent mark."""
    return f"{target.key_prefix}_SENT:{item_id}"


def hash_name(target: Target, hash: str) -> str:
    """Return the name of the claim on content, whatever its item's id."""
    return f"{target.key_prefix}_HASH:{hash}"


def _partition_count(target: Target) -> int:
    try:
        (topic,) = get_transport(target.transport).describe_topics([target.topic])
    except PublishError:
        return 1  # publishing will say what is wrong
    return topic.partitions or 1


def _check_key_format(key_format: str, name: str) -> None:
    try:
        key_format.format(type="new", id="1", hash="0")
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ImproperlyConfigured(
            f"{name}.key_format {key_format!r} cannot be used: {error!r}. It may name {{type}}, "
            "{id} and {hash}, or {hash:.12} for its beginning."
        ) from None


# --- One run: what to send, claimed, sent, marked -------------------------------------------------


logger = get_logger("kjo_django.producer")

T = TypeVar("T")

UNSENDABLE_PER_ITEM = 10
LEAST_UNSENDABLE = 1_000
"""Items of a run that can never be sent: ten for each it may send, and at least a thousand. They
do not count against its limit, and it reads on behind them; but it does not read all of a table."""


@dataclass(slots=True, eq=False)
class _Candidate:
    """An item that may be sent."""

    item: Any
    id: str
    hash: str
    record: OutgoingRecord | None = None


class Sending:
    """One run of a producer. Its batch id is also the token of its claims."""

    def __init__(self, producer: AbstractProducer, limit: int, message_type: str) -> None:
        self._producer = producer
        self._options = producer.options
        self._target = producer.target
        self._limit = limit
        self._type = message_type
        self._batch_id = secrets.token_hex(8)
        self._hashes: set[str] = set()
        self._sent: list[str] = []
        self._total = self._failed = self._unsendable = 0
        self._skips: Counter[str] = Counter()
        self._reason: str | None = None

    def run(self, criteria: dict[str, Any]) -> ProduceResult:
        """Read windows of items until the limit is reached or none are left."""
        excluded: set[str] = self._ask(self._producer.get_processing_ids, set())
        for window in self._producer.windows(criteria, self._limit, excluded):
            candidates = self._unsent(self._read(window))
            while candidates and self._room > 0:
                size = min(self._room, self._options.batch_size)
                self._send(candidates[:size])
                del candidates[:size]
            if self._room <= 0:
                break
        if not self._total:
            self._reason = "no items"
        elif self._reason is None and self._skips:
            self._reason = "; ".join(f"{n:,} skipped: {why}" for why, n in self._skips.items())
        result = ProduceResult(
            self._batch_id,
            self._total,
            len(self._sent),
            self._skips.total(),
            self._failed,
            self._sent,
            self._reason,
        )
        logger.info("Sent %d of %d items to %s", result.sent, result.total, self._target.topic)
        return result

    @property
    def _room(self) -> int:
        """How many more items may be tried."""
        if self._unsendable >= max(UNSENDABLE_PER_ITEM * self._limit, LEAST_UNSENDABLE):
            return 0
        return self._limit - len(self._sent) - (self._failed - self._unsendable)

    # --- What to send -----------------------------------------------------------------------------

    def _read(self, window: Iterable[Any]) -> Iterator[_Candidate]:
        seen: set[str] = set()
        for item in window:
            item_id = str(self._producer.get_item_id(item))
            if item_id in seen:
                continue  # a join returns a row for each match
            seen.add(item_id)
            try:
                if storable_text(item_id) != item_id:
                    raise PayloadError("Its id holds a character no database keeps")
                yield _Candidate(item, item_id, self._producer.message_hash(item))
            except Exception as error:
                # One item that cannot be written down must not keep the others from going out.
                self._total += 1
                self._fail(item_id, error, is_final=True)

    def _unsent(self, read: Iterator[_Candidate]) -> list[_Candidate]:
        """Drop items that were sent recently with the same content, by one bulk look-up."""
        window = list(read)
        nothing: dict[str, str] = {}
        hashes = self._ask(lambda: self._producer.get_sent_hashes([c.id for c in window]), nothing)
        unsent = []
        for candidate in window:
            if hashes.get(candidate.id) == candidate.hash:
                seconds = self._target.sent_ttl.total_seconds()
                self._skip(candidate, f"this content was sent less than {seconds:g} s ago")
            else:
                unsent.append(candidate)
        return unsent

    def _skip(self, candidate: _Candidate, why: str) -> None:
        self._total += 1
        self._skips[why] += 1
        logger.debug(
            "Skipping duplicate message of %s: %s",
            self._producer.get_item_key(candidate.item),
            why,
        )

    # --- Sending ----------------------------------------------------------------------------------

    def _send(self, candidates: Sequence[_Candidate]) -> None:
        """Claim the items, look up their marks again, send, mark, and release the claims."""
        claimed = self._claim(candidates)
        try:
            # Another producer may have sent some between our first look and our claim.
            ready = self._new_content(self._unsent(iter(claimed)))
            self._publish(ready)
        finally:
            self._release([claim_name(self._target, c.id) for c in claimed])

    def _claim(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        names = [claim_name(self._target, c.id) for c in candidates]
        taken = self._taken(names)
        claimed = []
        for candidate, name in zip(candidates, names, strict=True):
            if name in taken:
                self._skip(candidate, "another producer is sending this item")
            else:
                claimed.append(candidate)
        return claimed

    def _taken(self, names: list[str]) -> set[str]:
        """Claim all names; return those that another run holds."""
        ttl, unproven = self._options.claim_ttl, [Claim(True, 1)] * len(names)
        claims = self._ask(lambda: get_coordination().claim(names, self._batch_id, ttl), unproven)
        return {name for name, claim in zip(names, claims, strict=True) if not claim.acquired}

    def _new_content(self, candidates: list[_Candidate]) -> list[_Candidate]:
        """Drop content that was sent under another id, if the options ask for it."""
        if not self._options.dedup_across_ids:
            return candidates
        first: dict[str, _Candidate] = {}
        for candidate in candidates:
            if candidate.hash in self._hashes or candidate.hash in first:
                self._skip(candidate, "this content was sent under another id")
            else:
                first[candidate.hash] = candidate
        taken = self._taken([hash_name(self._target, hash) for hash in first])
        fresh = []
        for candidate in first.values():
            if hash_name(self._target, candidate.hash) in taken:
                self._skip(candidate, "this content was sent under another id")
            else:
                fresh.append(candidate)
        return fresh

    def _publish(self, candidates: Iterable[_Candidate]) -> None:
        built = []
        for candidate in candidates:
            self._total += 1
            try:
                candidate.record = self._producer.build_message(
                    candidate.item, self._type, candidate.hash
                )
            except Exception as error:
                self._fail(candidate.id, error, is_final=True)
                self._forget_content([candidate])
            else:
                built.append(candidate)
        if not built:
            return
        answers = self._publish_all([c.record for c in built if c.record is not None])
        pairs = list(zip(built, answers, strict=True))
        self._note_sent([c for c, answer in pairs if answer.error is None])
        refused = [(c, answer) for c, answer in pairs if answer.error is not None]
        self._forget_content([c for c, _ in refused])
        for candidate, answer in refused:
            self._fail(candidate.id, PublishError(answer.error), is_final=answer.is_final)

    def _publish_all(self, records: Sequence[OutgoingRecord]) -> list[Published]:
        """Publish the records. If none could be tried, each gets that error."""
        transport = get_transport(self._target.transport)
        try:
            if not transport_class(self._target.transport).capabilities.transactional:
                return publish(transport, records)
            # Committed before they are marked as sent: inside somebody's transaction they might
            # never be. Durable makes Django refuse that.
            using = database_of_transport(self._target.transport)
            with transaction.atomic(using=using, durable=True):
                answers = publish(transport, records)
        except PublishError as error:
            return [Published(error=str(error)) for _ in records]
        wake(current_runtime(), topic_channel(self._target.topic))
        return answers

    def _note_sent(self, sent: Sequence[_Candidate]) -> None:
        """Mark the items that the transport accepted, then call the hooks."""
        marks = {sent_name(self._target, c.id): c.hash for c in sent}
        try:
            get_coordination().set_marks(marks, self._target.sent_ttl)
            if self._options.dedup_across_ids:
                names = [hash_name(self._target, c.hash) for c in sent]
                get_coordination().renew(names, self._batch_id, self._target.sent_ttl)
        except CoordinationError as error:
            # They are on their way; not knowing that costs duplicates, which consumers absorb.
            logger.error("%d items were sent and could not be marked: %s", len(sent), error)
            self._reason = self._reason or str(error)
        self._hashes.update(c.hash for c in sent)
        for candidate in sent:
            self._sent.append(candidate.id)
            self._call_hook(lambda c=candidate: self._producer.on_success(c.id))  # type: ignore[misc]
            signals.item_sent.send_robust(
                sender=type(self._producer).__name__,
                item_id=candidate.id,
                topic=self._target.topic,
                content_hash=candidate.hash,
                message_type=self._type,
                batch_id=self._batch_id,
            )

    def _fail(self, item_id: str, error: Exception, *, is_final: bool) -> None:
        """Count an item that was not sent, and call the hook.

        :param is_final: another attempt would fail as well.
        """
        self._failed += 1
        self._unsendable += is_final
        self._reason = self._reason or text_of(error)
        logger.error("Item %s was not sent: %s", one_line(item_id), one_line(text_of(error)))
        self._call_hook(lambda: self._producer.on_failed(item_id, error))
        signals.item_send_failed.send_robust(
            sender=type(self._producer).__name__,
            item_id=item_id,
            topic=self._target.topic,
            error=error,
            message_type=self._type,
            batch_id=self._batch_id,
        )

    def _call_hook(self, hook: Callable[[], None]) -> None:
        try:
            hook()
        except Exception:
            # The record is out, or is not: a hook changes neither.
            logger.exception("A hook of %s failed", type(self._producer).__name__)

    # --- Coordination -----------------------------------------------------------------------------

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        """Call coordination. When it is away, ``without_coordination`` decides."""
        try:
            return question()
        except CoordinationError as error:
            if self._options.without_coordination == "stop":
                raise
            logger.warning("Sending without de-duplication: %s", error)
            return otherwise

    def _forget_content(self, candidates: Sequence[_Candidate]) -> None:
        if self._options.dedup_across_ids and candidates:
            self._release([hash_name(self._target, c.hash) for c in candidates])

    def _release(self, names: list[str]) -> None:
        try:
            if names:
                get_coordination().release(names, self._batch_id)
        except KjoError as error:
            logger.warning("Claims not released, they expire by themselves: %s", error)


# --- At regular times -----------------------------------------------------------------------------


def produce_every(
    interval: float,
    producer: AbstractProducer,
    criteria: dict[str, Any],
    limit: int,
    message_type: str,
    *,
    stopping: threading.Event,
    on_result: Callable[[ProduceResult], None],
    on_error: Callable[[Exception], None],
) -> None:
    """Produce every ``interval`` seconds, counted from start to start, until stopped.

    An outage ends only the run that meets it; the next run tries again. After a run that takes
    longer than the interval the next one starts at once.
    """
    due = time.monotonic()
    while not stopping.is_set():
        try:
            on_result(producer.produce_messages(criteria, limit, message_type))
        except (KjoError, DatabaseError, InterfaceError, OSError) as error:
            on_error(error)
        close_old_connections()
        due = max(due + interval, time.monotonic())
        stopping.wait(due - time.monotonic())
