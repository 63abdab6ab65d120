"""How a KDLQ consumer routes failed messages, and its listeners."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from kjo_django import signals
from kjo_django.exceptions import KDLQConfigurationException
from kjo_django.logs import get_logger
from kjo_django.transports.base import Record
from kjo_django.values import timedelta_of

logger = get_logger("kjo_django")


class KDLQMessageLifecycleListener:
    """Hooks that are called as a message is processed and routed: override those you need. What a
    hook raises is logged and changes nothing.

    Their arguments:

    :param consumer: the consumer's id.
    :param record: the ``Record`` that was processed.
    :param status: a ``ProcessingStatus``, as the processor returned it or its exception means it.
    :param error: what was raised; None if nothing was.
    """

    def on_message_processing(
        self, consumer: str, record: Record, status: Any, error: BaseException | None
    ) -> None:
        """The processor has returned, or raised ``error``."""

    def on_message_redelivery_success(self, consumer: str, record: Record) -> None:
        """The message is published again, or durably stored for that."""

    def on_message_redelivery_error(
        self, consumer: str, record: Record, error: BaseException
    ) -> None:
        """The message could not be redelivered; do not commit its offset."""

    def on_message_kill_success(self, consumer: str, record: Record) -> None:
        """The message is in the dead-letter topic."""

    def on_message_kill_error(self, consumer: str, record: Record, error: BaseException) -> None:
        """The message could not be sent to the dead-letter topic; do not commit its offset."""

    def on_message_skip(self, consumer: str, record: Record) -> None:
        """The message was killed too often and is recorded as discarded."""


_SIGNALS = {
    "on_message_processing": signals.message_processed,
    "on_message_redelivery_success": signals.message_redelivered,
    "on_message_redelivery_error": signals.message_redelivery_failed,
    "on_message_kill_success": signals.message_killed,
    "on_message_kill_error": signals.message_kill_failed,
    "on_message_skip": signals.message_skipped,
}


def call_listeners(
    listeners: Iterable[KDLQMessageLifecycleListener],
    hook: str,
    consumer: str,
    record: Record,
    **facts: Any,
) -> None:
    """Call a hook of every listener and send its signal; what one raises is logged."""
    for listener in listeners:
        try:
            getattr(listener, hook)(consumer, record, *facts.values())
        except Exception:
            logger.exception("%s of %r failed", hook, listener)
    _SIGNALS[hook].send_robust(sender=consumer, record=record, **facts)


# --- Configuration --------------------------------------------------------------------------------


DEFAULT_DELAY = timedelta(seconds=1)
MAX_ID_LENGTH = 100

PRODUCER_DEFAULTS: Mapping[str, Any] = {
    "acks": "all",
    "retries": 5,
    "linger.ms": 50,
    "delivery.timeout.ms": 120_000,
    "request.timeout.ms": 30_000,
    "client.id": "KDLQ",
}
"""Of a producer of its own. We wait for each delivery report, that is for at least the
delivery timeout: what counts as failed is never delivered later."""


class ProcessingStatus(enum.Enum):
    """What a processor answers."""

    OK = "OK"
    """The message is processed."""
    MUST_BE_REDELIVERED = "MUST_BE_REDELIVERED"
    """Deliver the message again, as often as ``max_redeliveries`` allows; then kill it."""
    ERROR = "ERROR"
    """Kill the message: to the dead-letter topic, as often as ``max_kills`` allows."""


class Status(enum.Enum):
    """What became of a message."""

    OK = "OK"
    """The message is processed."""
    ROUTED_TO_DLQ = "ROUTED_TO_DLQ"
    """The message is in the dead-letter topic, and a dead letter is recorded."""
    SKIPPED_DLQ_MAX_ATTEMPTS_REACHED = "SKIPPED_DLQ_MAX_ATTEMPTS_REACHED"
    """The message was killed too often: a discarded dead letter is recorded, nothing is sent."""
    REDELIVERED = "REDELIVERED"
    """The message is published again, or stored to be published after its delay."""


class Ordering(enum.StrEnum):
    """What a redelivery does to the order of a key."""

    NONE = "none"
    """A redelivered message comes after later ones of its key."""
    KEY = "key"
    """Later messages of its key wait for it; only in the pipeline, see ``kdlq_handler``."""


@dataclass(frozen=True)
class DlqConfig:
    """How a consumer routes failed messages. Immutable, and validated when it is made.

    :raises KDLQConfigurationException: naming the field at fault.
    """

    dlq_topic: str
    """Where killed messages go."""
    servers: Collection[str] | None = None
    """Brokers of a Kafka of its own, ``host:port``; else ``transport`` is used."""
    producer_properties: Mapping[str, Any] = field(default_factory=dict)
    """librdkafka's keys for the producer of ``servers``."""
    transport: str = "default"
    """Alias in ``KJO["TRANSPORTS"]``."""
    redelivery_topic: str | None = None
    """The topic the message came from, if not given."""
    max_redeliveries: int = -1
    """Redeliveries before a message is killed; negative: no end; 0: killed at once."""
    max_kills: int = -1
    """Times a message is sent to the dead-letter topic; then it is discarded and recorded.
    Negative: no end; 0: never sent."""
    listeners: Collection[KDLQMessageLifecycleListener] = ()
    """Called as messages are processed and routed."""
    informational_headers: bool = False
    """Add offset, partition and time of the original."""
    redelivery_delay: timedelta | float | None = None
    """The delay of the first redelivery, a timedelta or seconds.

    One second if not given. None with ``servers``: a delayed message waits in our database for the
    relay of our transport.
    """
    redelivery_multiplier: float = 1.5
    """By which each further redelivery's delay is longer; at least 1."""
    max_redelivery_delay: timedelta | float = timedelta(minutes=10)
    """The longest delay, a timedelta or seconds; positive."""
    default_on_exception: Literal["dlq", "redeliver"] = "dlq"
    """The meaning of other exceptions: ``dlq`` as in KDLQ 1, ``redeliver`` as in KDLQ 2."""
    ordering: Ordering | str = Ordering.NONE
    """What a redelivery does to the order of a key; ``key`` only with ``kdlq_handler``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "listeners", tuple(self.listeners))
        object.__setattr__(self, "producer_properties", dict(self.producer_properties))
        self._check_topics()
        self._check_servers()
        self._check_numbers()
        if self.default_on_exception not in ("dlq", "redeliver"):
            _refuse("default_on_exception", "'dlq' or 'redeliver'", self.default_on_exception)
        try:
            object.__setattr__(self, "ordering", Ordering(self.ordering))
        except ValueError:
            _refuse("ordering", "'none' or 'key'", self.ordering)

    def _check_topics(self) -> None:
        if not isinstance(self.dlq_topic, str) or not self.dlq_topic.strip():
            _refuse("dlq_topic", "the name of a topic", self.dlq_topic)
        topic = self.redelivery_topic
        if topic is not None and (not isinstance(topic, str) or not topic.strip()):
            _refuse("redelivery_topic", "the name of a topic, or None", topic)

    def _check_servers(self) -> None:
        if self.servers is None:
            if self.producer_properties:
                _refuse("producer_properties", "given with servers", "them without servers")
            return
        if isinstance(self.servers, str) or not self.servers:
            _refuse("servers", "a collection of host:port that is not empty", self.servers)
        if not all(isinstance(server, str) and server.strip() for server in self.servers):
            _refuse("servers", "a collection of host:port", self.servers)
        object.__setattr__(self, "servers", tuple(sorted(set(self.servers))))
        if self.redelivery_delay:
            _refuse("redelivery_delay", "left out with servers", self.redelivery_delay)

    def _check_numbers(self) -> None:
        for name in ("max_redeliveries", "max_kills"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                _refuse(name, "a whole number", value)
        self._check_delays()
        for listener in self.listeners:
            if not isinstance(listener, KDLQMessageLifecycleListener):
                _refuse("listeners", "lifecycle listeners", listener)

    def _check_delays(self) -> None:
        for name in ("redelivery_delay", "max_redelivery_delay"):
            with suppress(ValueError):
                object.__setattr__(self, name, timedelta_of(getattr(self, name)))
        delay, longest = self.redelivery_delay, self.max_redelivery_delay
        if delay is not None and (not isinstance(delay, timedelta) or delay < timedelta(0)):
            _refuse(
                "redelivery_delay", "a timedelta or number of seconds that is not negative", delay
            )
        # Zero would switch every delay off, which nobody means by a cap (a fault of KDLQ 2).
        if not isinstance(longest, timedelta) or longest <= timedelta(0):
            _refuse("max_redelivery_delay", "a positive timedelta or number of seconds", longest)
        multiplier = self.redelivery_multiplier
        if isinstance(multiplier, bool) or not isinstance(multiplier, int | float):
            _refuse("redelivery_multiplier", "a number", multiplier)
        if not 1 <= multiplier < float("inf"):
            _refuse("redelivery_multiplier", "a number of at least 1", multiplier)

    @property
    def id(self) -> str:
        """Equal for configurations that can share a producer."""
        if self.servers is None:
            return f"transport:{self.transport}"
        told = json.dumps([list(self.servers), self.producer_properties], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def delay_of(self, redelivered: int) -> timedelta:
        """Return the delay of the next redelivery after so many redeliveries.

        :param redelivered: redeliveries so far.
        """
        first: Any = self.redelivery_delay
        if first is None:
            first = timedelta(0) if self.servers is not None else DEFAULT_DELAY
        if not first:
            return timedelta(0)
        longest: float = timedelta_of(self.max_redelivery_delay).total_seconds()
        try:
            # The count comes with the message: a power of whole numbers might take hours.
            seconds = first.total_seconds() * float(self.redelivery_multiplier) ** redelivered
        except OverflowError:
            seconds = longest
        return timedelta(seconds=min(seconds, longest))


def _refuse(name: str, wanted: str, value: object) -> None:
    raise KDLQConfigurationException(f"DlqConfig: {name} must be {wanted}, not {value!r:.80}")
