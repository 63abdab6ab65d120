"""From OPTIONS to the configuration of each librdkafka client.

Any librdkafka key passes through untouched. Keys only one kind of client knows go to that kind;
``producer`` and ``consumer`` are nested dicts for what has to differ. Values are never logged nor
shown in errors: they hold passwords.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured

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


def is_true(value: Any) -> bool:
    """Read a boolean the way librdkafka does."""
    return str(value).lower() in ("true", "t", "1")


class KafkaOptions:
    """The OPTIONS of one transport, checked.

    :raises ImproperlyConfigured: naming the setting, never its value.
    """

    def __init__(self, alias: str, options: Mapping[str, Any]) -> None:
        self.setting = f"KJO['TRANSPORTS'][{alias!r}]['OPTIONS']"
        rest = dict(options)
        nested = {name: self._nested(name, rest.pop(name, {})) for name in ("producer", "consumer")}
        self.commit_interval = self._duration(
            "commit_interval", rest.pop("commit_interval", timedelta(seconds=0.5))
        )
        self.request_timeout = self._duration(
            "request_timeout", rest.pop("request_timeout", timedelta(seconds=30))
        )
        self._general = {**GENERAL_DEFAULTS, **without(rest, PRODUCER_ONLY | CONSUMER_ONLY)}
        self._producer = merge(PRODUCER_DEFAULTS, only(rest, PRODUCER_ONLY), nested["producer"])
        self._consumer = merge(CONSUMER_DEFAULTS, only(rest, CONSUMER_ONLY), nested["consumer"])
        self._check(rest, nested)

    def producer(self) -> dict[str, Any]:
        """Return the configuration of a producer."""
        return {**self._general, **self._producer}

    def consumer(self, group: str) -> dict[str, Any]:
        """Return the configuration of a consumer in ``group``."""
        config = {**self._general, **self._consumer, "group.id": group}
        if config.get("group.protocol") == "consumer":
            # The broker decides these under KIP-848; librdkafka refuses them.
            chosen = without(self._consumer, CONSUMER_DEFAULTS.keys())
            config = without(config, CLASSIC_PROTOCOL_ONLY - chosen.keys())
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

    def _nested(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self.refuse(name, f"must be a dict of options for the {name} alone")
        return dict(value)

    def _duration(self, name: str, value: Any) -> float:
        if not isinstance(value, timedelta) or value <= timedelta(0):
            raise self.refuse(name, "must be a timedelta above zero")
        return value.total_seconds()

    def _check(self, rest: Mapping[str, Any], nested: Mapping[str, Mapping[str, Any]]) -> None:
        for given in (rest, *nested.values()):
            for key, (allowed, reason) in OWNED.items():
                if key in given and (allowed is None or is_true(given[key]) != allowed):
                    raise self.refuse(key, f"cannot be set here: {reason}")
        if not any(self._general.get(key) for key in names_of("bootstrap.servers")):
            raise self.refuse("bootstrap.servers", "is required, as 'host:port,host:port'")
        self._check_acks()

    def _check_acks(self) -> None:
        key = next(key for key in names_of("acks") if key in self._producer)
        everyone = str(self._producer[key]).lower() in ("all", "-1")
        if is_true(self._producer["enable.idempotence"]) and not everyone:
            reason = "idempotence needs acks='all'; to accept losses set 'enable.idempotence' False"
            raise self.refuse(key, reason)


def names_of(key: str) -> tuple[str, ...]:
    """Return both names of a key."""
    return (ALIASES[key], key)


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


def only(options: Mapping[str, Any], keys: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key in keys}


def without(options: Mapping[str, Any], keys: Any) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in keys}


def guarded(config: dict[str, Any], guard: Callable[[Any], Any]) -> dict[str, Any]:
    """Return ``config`` with every callback the project passed wrapped by ``guard``."""
    return {key: guard(value) if key in CALLBACKS else value for key, value in config.items()}
