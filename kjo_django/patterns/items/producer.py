"""Template producers: poll a source of items and send those that are new or have changed (seed 1).

    class EmailProducer(ModelProducer):
        model = Email
        queue = "email-queue"
        hash_fields = ("recipient", "subject", "body")

    EmailProducer().produce_messages({"state": 1}, limit=100)

The item's own table is the outbox: nothing is stored here but what may vanish (key names as seed 1
prints them). Losing it sends items again; their consumers decide by the item's state.

    CONS:PREFIX:id   somebody processes the item          read
    PROD:PREFIX:id   some producer is sending the item    claimed before, released after
    PREFIX_SENT:id   content hash of what was sent        set once the transport has it
"""

from __future__ import annotations

import abc
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Literal

from django.core.exceptions import ImproperlyConfigured

from kjo_django.backends import get_coordination, get_transport
from kjo_django.conf import declared_queues, get_settings, sent_ttl_for
from kjo_django.exceptions import PublishError
from kjo_django.messages.serializers import JSON
from kjo_django.patterns.items import item_options
from kjo_django.patterns.items.content_hash import content_hash
from kjo_django.patterns.items.item_options import ProducerOptions
from kjo_django.patterns.items.partitioning import partition_of
from kjo_django.patterns.items.wiring import above
from kjo_django.transports.base import OutgoingRecord

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
    """What one call of ``produce_messages`` did (KJO-07, KJO-31)."""

    batch_id: str
    """8 random bytes in hex."""
    total: int
    """Items looked at."""
    sent: int
    skipped: int
    """Sent recently with the same content, or being sent by another producer just now."""
    failed: int
    item_ids: list[str] = field(default_factory=list)
    """Those sent."""
    reason: str | None = None
    """Why less than everything was sent: the first error, or why items were skipped, or that there
    was nothing to do."""

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Target:
    """Where a producer sends, and the names it coordinates under."""

    queue: str
    topic: str
    transport: str
    key_prefix: str
    sent_ttl: timedelta


class AbstractProducer(abc.ABC):
    """Three methods to write, two hooks, and the rest to override where needed.

    Options are class attributes, or entries of ``config``, or of the dict given to the constructor;
    see ``ProducerOptions``. ``topic`` and ``key_prefix`` are required, or the ``queue`` that has
    them. Instances are safe to use from one thread at a time.

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

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        name = type(self).__name__
        given = item_options.flatten({**self.config, **(config or {})}, name)
        declared = item_options.attributes(type(self), ProducerOptions)
        self.options = item_options.read(ProducerOptions, {**declared, **given}, name)
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

        Called again, with what it returned excluded, until enough is found that may be sent.
        ``excluded_ids`` may hold tens of thousands: more than an SQL statement takes. For querysets
        use ``windows.take``; what is returned in spite of being excluded is dropped.
        """

    @abc.abstractmethod
    def get_item_id(self, item: Any) -> str:
        """Return the item's unique id as text."""

    @abc.abstractmethod
    def get_item_key(self, item: Any) -> str:
        """Return what people know the item by; it appears in logs."""

    # --- Hooks: what they raise is logged and changes nothing -------------------------------------

    def on_success(self, item_id: str) -> None:
        """Called for each item once the transport has it and its mark is set."""
        return

    def on_failed(self, item_id: str, error: Exception) -> None:
        """Called for each item that could not be sent; it is free to be sent again."""
        return

    # --- To override ------------------------------------------------------------------------------

    def serialize_item(self, item: Any) -> Any:
        """Return what is sent as ``data``: anything JSON can write."""
        return item

    def get_hash_fields(self, item: Any) -> Any:
        """Return what the content hash is made of: ``hash_fields`` of what is sent, or all of it.

        Leave out what changes without the content changing, a counter or a time stamp, or every
        change of it sends the item again.
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
        """Return the record of an item (KJO-17 … 23)."""
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
        """Yield items in portions until there are no more: the caller stops when it has enough.

        A window full of items that were sent a moment ago must not hide those behind it (KJO-F9).
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

        What the transport refuses is counted, told to ``on_failed`` and free to be sent again. An
        item that can never be sent, being too large or one that cannot be written down, does not
        count against ``limit``: those behind it are sent.

        :raises CoordinationError: Redis is down, and ``without_coordination`` is "stop".
        :raises PublishError: the topic cannot be looked at or created.
        """
        from kjo_django.patterns.items.sending import Sending

        if not isinstance(criteria, Mapping):
            raise TypeError(f"criteria must be a dict, not {type(criteria).__name__}")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"limit must be a whole number above 0, not {limit!r}")
        if not isinstance(message_type, str) or not message_type:
            raise ValueError("message_type must be text that is not empty")
        self.connect()
        return Sending(self, limit, message_type).run(dict(criteria))

    def connect(self) -> None:
        """Make sure that the topic exists (KJO-93); the first ``produce_messages`` does it too.

        :raises ImproperlyConfigured: it is missing and its ``auto_create`` is off.
        """
        if not self._is_connected:
            above.ensure_topics([self.target.queue])
            self._is_connected = True

    def disconnect(self) -> None:
        """Forget what is known of the topic. Connections belong to the process."""
        self._is_connected = False
        self._partitions = (0.0, 0)

    # --- What was sent ----------------------------------------------------------------------------

    def get_processing_ids(self) -> set[str]:
        """Return the ids of the items somebody processes now (KJO-09)."""
        name = processing_name(self.target, "")
        return {found[len(name) :] for found in get_coordination().names(name)}

    def get_sent_hashes(self, item_ids: Iterable[str]) -> dict[str, str]:
        """Return the content hash of each of these items that was sent recently, in one call."""
        names = {sent_name(self.target, item_id): item_id for item_id in item_ids}
        marks = get_coordination().get_marks(list(names))
        return {names[name]: hash for name, hash in marks.items()}

    def get_sent_hash(self, item_id: str) -> str | None:
        """Return the hash the item was sent with recently (KJO-14)."""
        return self.get_sent_hashes([item_id]).get(item_id)

    def is_sent_recently(self, item_id: str, message_hash: str) -> bool:
        """Return whether the item was sent recently with this content (KJO-13)."""
        return self.get_sent_hash(item_id) == message_hash

    # --- Inside -----------------------------------------------------------------------------------

    @property
    def target(self) -> Target:
        """Where it sends; ``KJO["QUEUES"]`` may say otherwise than the class of its consumer."""
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
            item_options.prefix(key_prefix),
            sent_ttl or queue.sent_ttl,
        )

    def _queue_of_topic(self) -> str:
        """Return the queue that consumes the topic, where it is of this project."""
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
    """Return the name of the consumers' lease on an item (KJO-60)."""
    return f"CONS:{target.key_prefix}:{item_id}"


def claim_name(target: Target, item_id: str) -> str:
    """Return the name a producer claims an item under while it sends."""
    return f"PROD:{target.key_prefix}:{item_id}"


def sent_name(target: Target, item_id: str) -> str:
    """Return the name of an item's sent mark (KJO-28)."""
    return f"{target.key_prefix}_SENT:{item_id}"


def hash_name(target: Target, hash: str) -> str:
    """Return the name content is claimed under across ids (KJO-F6)."""
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
