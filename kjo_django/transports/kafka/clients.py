"""librdkafka clients: their configuration, how they are made, their errors, and a fork.

Any librdkafka key of OPTIONS passes through untouched. Keys only one kind of client knows go to
that kind; ``producer`` and ``consumer`` are nested dicts for what has to differ. Values are never
logged nor shown in errors: they hold passwords.

A broker that answers and does not let the client in (a wrong password, an authority nobody trusts)
looks like an outage: librdkafka tries on for ever, and a request to it ends with its timeout and an
error about the transport. Only the error callback, which is called in ``poll``, has the reason.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException
from django.core.exceptions import ImproperlyConfigured

from kjo_django.conf import Settings, get_settings
from kjo_django.logs import get_logger
from kjo_django.values import duration

logger = get_logger("kjo_django.kafka")

C = TypeVar("C")

# --- Configuration --------------------------------------------------------------------------------

GENERAL_DEFAULTS: dict[str, Any] = {
    "client.id": "kjo_django",
    # New partitions are found after this long; librdkafka's own five minutes is too long to wait
    # after ``kjo_topics`` grew a topic.
    "topic.metadata.refresh.interval.ms": 30_000,
}
PRODUCER_DEFAULTS: dict[str, Any] = {
    "enable.idempotence": True,
    "acks": "all",
    # The partitioner of Java clients: the same key lands in the same partition from both.
    "partitioner": "murmur2_random",
    "delivery.timeout.ms": 30_000,
    # A topic that does not exist is reported after this long, not after the delivery timeout.
    "topic.metadata.propagation.max.ms": 10_000,
}
CONSUMER_DEFAULTS: dict[str, Any] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "earliest",
    "allow.auto.create.topics": False,
    "partition.assignment.strategy": "cooperative-sticky",
    "session.timeout.ms": 30_000,
    "heartbeat.interval.ms": 3_000,
    "max.partition.fetch.bytes": 1_048_576,
    # A resumed partition joins the next fetch, so this is also the price of a resume.
    "fetch.wait.max.ms": 100,
    # Fetched ahead of each partition, half a second of work at full speed. librdkafka's own 100,000
    # fill 64 MB while there is a backlog; with less it must not rest for a second when it has them.
    "queued.min.messages": 10_000,
    "fetch.queue.backoff.ms": 100,
}
MOST_QUEUED_KBYTES, MOST_FETCHED_KBYTES = 2_147_483_647, 2_097_151
"""What librdkafka takes for the limits of its queues."""
CLASSIC_PROTOCOL_ONLY = frozenset(
    {"partition.assignment.strategy", "session.timeout.ms", "heartbeat.interval.ms"}
)

ALIASES: dict[str, str] = {
    "bootstrap.servers": "metadata.broker.list",
    "acks": "request.required.acks",
    "linger.ms": "queue.buffering.max.ms",
    "delivery.timeout.ms": "message.timeout.ms",
    "max.partition.fetch.bytes": "fetch.message.max.bytes",
}
"""Keys with a second name. A default under one must not fight a value under the other."""

PRODUCER_ONLY = frozenset(
    """
    acks batch.num.messages batch.size compression.codec compression.level compression.type
    delivery.timeout.ms dr_cb dr_msg_cb enable.gapless.guarantee enable.idempotence linger.ms
    message.send.max.retries message.timeout.ms on_delivery partitioner
    queue.buffering.backpressure.threshold queue.buffering.max.kbytes
    queue.buffering.max.messages queue.buffering.max.ms queuing.strategy request.required.acks
    request.timeout.ms retries sticky.partitioning.linger.ms transaction.timeout.ms
    """.split()  # noqa: SIM905 - a paragraph reads better than a line for each
)
CONSUMER_ONLY = frozenset(
    """
    allow.auto.create.topics auto.commit.interval.ms auto.offset.reset check.crcs
    consume.callback.max.messages coordinator.query.interval.ms enable.auto.commit
    enable.auto.offset.store enable.partition.eof fetch.error.backoff.ms fetch.max.bytes
    fetch.message.max.bytes fetch.min.bytes fetch.queue.backoff.ms fetch.wait.max.ms
    group.instance.id group.protocol group.protocol.type group.remote.assignor
    heartbeat.interval.ms isolation.level max.partition.fetch.bytes max.poll.interval.ms
    partition.assignment.strategy queued.max.messages.kbytes queued.min.messages
    session.timeout.ms
    """.split()  # noqa: SIM905 - a paragraph reads better than a line for each
)

OWNED: dict[str, tuple[Any, str]] = {
    "enable.auto.commit": (False, "offsets are committed when records are acknowledged"),
    "enable.auto.offset.store": (False, "offsets are committed when records are acknowledged"),
    "delivery.report.only.error": (False, "every record's delivery report is awaited"),
    "group.id": (None, "each subscription names its own group"),
    "transactional.id": (None, "Kafka transactions are not used"),
    "on_commit": (None, "the subscription watches its own commits"),
}
"""Keys that belong to the transport: the only value allowed, and the reason."""

CALLBACKS = frozenset({"error_cb", "stats_cb", "throttle_cb", "log_cb"})
"""Called by librdkafka inside ``poll``: one that raises would destroy a fetched batch."""


class KafkaOptions:
    """The OPTIONS of one transport, checked.

    :raises ImproperlyConfigured: naming the setting, never its value.
    """

    def __init__(self, alias: str, options: Mapping[str, Any]) -> None:
        self.setting = f"KJO['TRANSPORTS'][{alias!r}]['OPTIONS']"
        rest = dict(options)
        nested = {kind: rest.pop(kind, {}) for kind in ("producer", "consumer")}
        for kind, own in nested.items():
            if not isinstance(own, Mapping):
                raise self.refuse(kind, f"must be a dict of options for the {kind} alone")
        self.commit_interval = self._pop_duration(rest, "commit_interval", 0.5)
        self.request_timeout = self._pop_duration(rest, "request_timeout", 30)
        of_producers = {key: rest[key] for key in rest if key in PRODUCER_ONLY}
        of_consumers = {key: rest[key] for key in rest if key in CONSUMER_ONLY}
        of_all = {key: rest[key] for key in rest if key not in PRODUCER_ONLY | CONSUMER_ONLY}
        self._general = GENERAL_DEFAULTS | of_all
        self._producer = merge(PRODUCER_DEFAULTS, of_producers, nested["producer"])
        self._consumer = merge(CONSUMER_DEFAULTS, of_consumers, nested["consumer"])
        self._bound_queues(get_settings())
        self._check(rest, *nested.values())

    def _bound_queues(self, settings: Settings) -> None:
        """Bound what the clients hold beside us, where OPTIONS do not: librdkafka's own limit for a
        producer is a gigabyte. From the consumer's it takes that of one fetch too."""
        texts = [str(each.get("message.max.bytes")) for each in (self._general, self._producer)]
        largest = max(
            settings.relay_batch_bytes,
            settings.max_payload_bytes,
            *(int(text) for text in texts if text.isdigit()),
        )
        ahead = settings.max_outstanding_bytes // 4
        # Room for a batch with its headers, and for any one record.
        sent = min(2 * largest // 1024 + 1024, MOST_QUEUED_KBYTES)
        fetched = min(max(1, ahead // 1024), MOST_FETCHED_KBYTES)
        self._producer.setdefault("queue.buffering.max.kbytes", sent)
        self._consumer.setdefault("queued.max.messages.kbytes", fetched)

    def producer(self) -> dict[str, Any]:
        """Return the configuration of a producer."""
        return self._general | self._producer

    def consumer(self, group: str) -> dict[str, Any]:
        """Return the configuration of a consumer in ``group``."""
        config = {**self._general, **self._consumer, "group.id": group}
        if config.get("group.protocol") == "consumer":
            # The broker decides these under KIP-848; librdkafka refuses them.
            for key in CLASSIC_PROTOCOL_ONLY:
                config.pop(key, None)
        return config

    def admin(self) -> dict[str, Any]:
        """Return the configuration of an admin client."""
        return dict(self._general)

    @property
    def delivery_timeout(self) -> float:
        """Seconds until the fate of a record is known. librdkafka's 0 means never: a day here."""
        name = "delivery.timeout.ms"
        milliseconds = self._producer.get(name, self._producer.get(ALIASES[name], 0))
        return float(milliseconds) / 1000 or 86_400.0

    @property
    def starts_at_the_end(self) -> bool:
        """Whether a group without offsets begins with what comes next."""
        return str(self._consumer["auto.offset.reset"]) in ("latest", "largest", "end")

    def refuse(self, key: str, reason: str) -> ImproperlyConfigured:
        """Return the error for one key."""
        return ImproperlyConfigured(f"{self.setting}[{key!r}]: {reason}.")

    def _pop_duration(self, options: dict[str, Any], name: str, default: float) -> float:
        try:
            value = duration(options.pop(name, default))
        except ValueError as error:
            raise self.refuse(name, f"must be {error}") from None
        return value.total_seconds()

    def _check(self, *given: Mapping[str, Any]) -> None:
        for options in given:
            for key, (allowed, reason) in OWNED.items():
                if key in options and (allowed is None or is_true(options[key]) != allowed):
                    raise self.refuse(key, f"cannot be set here: {reason}")
        servers = "bootstrap.servers"
        if not (self._general.get(servers) or self._general.get(ALIASES[servers])):
            raise self.refuse(servers, "is required, as 'host:port,host:port'")
        key = "acks" if "acks" in self._producer else ALIASES["acks"]
        is_everyone = str(self._producer[key]).lower() in ("all", "-1")
        if is_true(self._producer["enable.idempotence"]) and not is_everyone:
            reason = "idempotence needs acks='all'; to accept losses set 'enable.idempotence' False"
            raise self.refuse(key, reason)


def is_true(value: Any) -> bool:
    """Read a boolean the way librdkafka does."""
    return str(value).lower() in ("true", "t", "1")


def merge(defaults: Mapping[str, Any], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Lay ``layers`` over ``defaults``; the last one wins under either name of a key."""
    merged = dict(defaults)
    for layer in layers:
        for key, other in ALIASES.items():
            if key in layer:
                merged.pop(other, None)
            elif other in layer:
                merged.pop(key, None)
        merged.update(layer)
    return merged


# --- Clients and their errors ---------------------------------------------------------------------

_TOOK = re.compile(r" \(after \d+ms in state \w+[^)]*\)")
REPEAT_AFTER = 60.0
"""Seconds until what a client repeats is logged again above DEBUG."""


class ClientLogger:
    """Passes a client's lines on to `logging`.

    The client calls it inside ``poll``, where an exception would destroy fetched records: the
    app's loggers raise none. A broker that is down is mentioned ten times a second; so repetitions
    are for DEBUG.
    """

    def __init__(self) -> None:
        self._said: dict[Any, float] = {}

    def log(self, level: int, message: str, *arguments: Any) -> None:
        logger.log(self._level(level, arguments[:1]), message, *arguments)

    def _level(self, level: int, kind: tuple[Any, ...]) -> int:
        now = time.monotonic()
        if now < self._said.get(kind, 0.0):
            return logging.DEBUG
        if level > logging.DEBUG:
            self._said[kind] = now + REPEAT_AFTER
        return level


def quiet(callback: Callable[..., Any]) -> Callable[..., None]:
    """Wrap a callback of the project so that it cannot raise into librdkafka."""

    @functools.wraps(callback)
    def call(*arguments: Any) -> None:
        try:
            callback(*arguments)
        except Exception:
            logger.exception("A Kafka callback failed")

    return call


def error_of(exception: BaseException) -> KafkaError | None:
    """Return the KafkaError an exception carries."""
    first = exception.args[0] if exception.args else None
    return first if isinstance(first, KafkaError) else None


def describe(error: KafkaError | BaseException | None) -> str:
    """Return an error as people should read it: its name and its text."""
    if isinstance(error, KafkaException):
        error = error_of(error) or error
    if isinstance(error, KafkaError):
        # How long a try took differs each time, which would make one error many.
        return f"{error.name()}: {_TOOK.sub('', error.str())}"
    return str(error) or type(error).__name__


def make(kind: Callable[..., C], config: dict[str, Any], options: KafkaOptions) -> C:
    """Return a new client.

    :raises ImproperlyConfigured: for a configuration librdkafka refuses.
    """
    try:
        return kind(config, logger=ClientLogger())
    except KafkaException as error:
        # librdkafka names the property it refuses, and repeats no value of it.
        raise options.refuse("...", describe(error)) from None


def keep_for_ever(client: Any) -> None:
    """Keep a client that must not be destroyed in this process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


def close_behind(consumer: Any) -> None:
    """Close a consumer without waiting: no broker answers, and it would wait for one."""
    keep_for_ever(consumer)
    threading.Thread(target=quiet(consumer.close), name="kjo-kafka-close", daemon=True).start()


# --- Forks ----------------------------------------------------------------------------------------


forkable: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects whose ``forget_the_parents`` is called in the child of every fork: a client's threads do
not survive it, and to destroy the client would wait for them, or abort."""


def _forget_the_parents() -> None:
    for owner in list(forkable):
        owner.forget_the_parents()


os.register_at_fork(after_in_child=_forget_the_parents)


# --- Refusals ---------------------------------------------------------------------------------

FIRST_WAIT = 1.0
"""Seconds; a refusal of a broker that is near takes a third of it."""

_SASL = ("sasl.username", "sasl.password", "sasl.mechanism")
SETTINGS = {
    KafkaError._AUTHENTICATION: _SASL,
    KafkaError.SASL_AUTHENTICATION_FAILED: _SASL,
    KafkaError.UNSUPPORTED_SASL_MECHANISM: ("sasl.mechanism",),
    KafkaError._SSL: ("security.protocol", "ssl.ca.location"),
}
"""What to look at, by the code of the refusal."""
SILENCE = frozenset({KafkaError._TRANSPORT, KafkaError._TIMED_OUT})


class Refusals:
    """The latest refusal that one client met, and its latest error. Thread-safe."""

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        self.forget()

    def forget(self) -> None:
        """All is well."""
        self.reason: str | None = None
        """Why the client is not let in, and the settings to look at; never a value of them."""
        self.last_error: str | None = None
        self._logged_at = 0.0

    def note(self, error: KafkaError) -> bool:
        """Remember an error; return whether it says that a broker does not let the client in. That
        is logged once a minute."""
        self.last_error = text = describe(error)
        keys = SETTINGS.get(error.code())
        if keys is None:
            return False
        self.reason = f"{text} (look at {', '.join(keys)} in {self._options.setting})"
        now = time.monotonic()
        if not self._logged_at or now > self._logged_at + REPEAT_AFTER:
            self._logged_at = now
            logger.error("A Kafka broker refuses this client: %s", self.reason)
        return True

    def list_topics(self, client: Any, timeout: float, *names: str) -> Any:
        """Ask for the cluster's metadata, or for that of a topic.

        Asked in waits that double, since the client learns of a refusal only between two.

        :param timeout: seconds.
        :raises KafkaException: with the refusal, as soon as it is known, or with what the client
            raises.
        """
        deadline, wait = time.monotonic() + timeout, FIRST_WAIT
        while True:
            left = deadline - time.monotonic()
            try:
                answer = client.list_topics(*names, timeout=min(wait, left))
            except KafkaException as error:
                client.poll(0)
                if self.reason is not None:
                    raise KafkaException(self.reason) from error
                code = error_of(error)
                if code is None or code.code() not in SILENCE or left <= wait:
                    raise
                wait *= 2
            else:
                self.forget()
                return answer


def watched(
    config: dict[str, Any],
    note: Callable[[KafkaError], object],
    guard: Callable[[Callable[..., Any]], Callable[..., Any]] = quiet,
) -> dict[str, Any]:
    """Return a configuration whose errors are noted, and passed on to the project's own callback.

    :param guard: wraps every callback: none may raise into the client.
    """
    config = {key: quiet(value) if key in CALLBACKS else value for key, value in config.items()}
    theirs = config.get("error_cb")

    def on_error(error: KafkaError) -> None:
        note(error)
        if theirs is not None:
            theirs(error)

    return {**config, "error_cb": guard(on_error)}
