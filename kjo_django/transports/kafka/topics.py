"""Topics, lag and reachability. The admin client is used for what nothing else can: creating,
growing and reading configurations (see `asking`)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from confluent_kafka import (
    KafkaError,
    KafkaException,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from kjo_django.exceptions import PublishError
from kjo_django.transports.base import (
    GroupOffsets,
    TopicDescription,
    TopicPartition,
    TopicSpec,
)
from kjo_django.transports.kafka.asking import Asker
from kjo_django.transports.kafka.clients import PerProcess, describe, error_of, logger, make
from kjo_django.transports.kafka.options import KafkaOptions
from kjo_django.transports.kafka.refusals import Refusals, watched

VISIBLE_WITHIN = 15.0
"""Seconds until a topic just created is known to the broker we ask."""

INTERVAL = 0.1


class Topics:
    """Thread-safe. Every method raises ``PublishError`` with the reason when it fails."""

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        self._admin = PerProcess(self._make)
        self._refusals = Refusals(options)
        self._asker = Asker(options)
        self._askers: dict[str, Asker] = {}

    def close(self) -> None:
        """Forget the clients; they are made anew when needed."""
        self._admin.take()
        for asker in (self._asker, *self._askers.values()):
            asker.close()

    def ensure(self, specs: Sequence[TopicSpec]) -> list[str]:
        """Create what is missing, grow what is too small. Others may do the same meanwhile."""
        known = {topic.name: topic.partitions for topic in self.describe([s.name for s in specs])}
        missing = [spec for spec in specs if known[spec.name] is None]
        changes = self._create(missing)
        # Whoever else created them may have made them smaller.
        if missing:
            known.update(self._wait_for([spec.name for spec in missing], at_least={}))
        small = {s.name: s.partitions for s in specs if (known[s.name] or 0) < s.partitions}
        changes += self._grow(small, known)
        if small:
            self._wait_for(list(small), at_least=small)
        return changes

    def describe(self, names: Sequence[str]) -> list[TopicDescription]:
        """Return each topic, with the configuration that differs from the broker's defaults."""
        if not names:
            return []
        topics = {name: self._topic(name) for name in dict.fromkeys(names)}
        found = [name for name, topic in topics.items() if topic is not None]
        configs = self._configs(found)
        return [self._description(name, topics[name], configs) for name in names]

    def offsets(self, names: Sequence[str], group: str) -> dict[TopicPartition, GroupOffsets]:
        """Return where a group is in each partition of these topics."""
        asker = self._askers.get(group)
        if asker is None:
            asker = self._askers.setdefault(group, Asker(self._options, group))
        return asker.offsets(names)

    def probe(self, timeout: float) -> str:
        """Name what answered."""
        try:
            metadata = self._refusals.list_topics(self._admin.get(), timeout)
        except KafkaException as error:
            raise PublishError(f"Kafka does not answer: {describe(error)}") from error
        brokers = sorted(f"{each.host}:{each.port}" for each in metadata.brokers.values())
        return f"Kafka, {len(brokers)} broker(s): {', '.join(brokers)}"

    def _make(self) -> AdminClient:
        config = watched(self._options.admin(), self._refusals.note)
        return make(AdminClient, config, self._options)

    # --- Creating and growing ---------------------------------------------------------------------

    def _create(self, specs: Sequence[TopicSpec]) -> list[str]:
        if not specs:
            return []
        new = [
            NewTopic(
                spec.name,
                num_partitions=spec.partitions,
                replication_factor=spec.replication_factor,
                config={name: text_of(value) for name, value in spec.config.items()},
            )
            for spec in specs
        ]
        futures = self._admin.get().create_topics(new, request_timeout=self._timeout)
        changes = []
        for spec in specs:
            if self._done(futures[spec.name], spec.name, KafkaError.TOPIC_ALREADY_EXISTS):
                changes.append(f"created {spec.name} with {spec.partitions} partitions")
        return changes

    def _grow(self, wanted: Mapping[str, int], known: Mapping[str, int | None]) -> list[str]:
        if not wanted:
            return []
        new = [NewPartitions(name, count) for name, count in wanted.items()]
        futures = self._admin.get().create_partitions(new, request_timeout=self._timeout)
        changes = []
        for name, count in wanted.items():
            # Refused as invalid: another process grew it first, at least as far.
            if self._done(futures[name], name, KafkaError.INVALID_PARTITIONS):
                changes.append(f"grew {name} from {known[name]} to {count} partitions")
        return changes

    def _wait_for(
        self, names: Sequence[str], *, at_least: Mapping[str, int]
    ) -> dict[str, int | None]:
        """Wait until topics are visible, so that the next publish does not miss them."""
        deadline = time.monotonic() + VISIBLE_WITHIN
        while True:
            topics = {name: self._topic(name) for name in names}
            sizes = {name: len(t.partitions) if t else None for name, t in topics.items()}
            if all((size or 0) >= at_least.get(name, 1) for name, size in sizes.items()):
                return sizes
            if time.monotonic() > deadline:
                raise PublishError(f"Kafka topics {', '.join(names)} did not appear in time")
            time.sleep(INTERVAL)

    # --- Asking -----------------------------------------------------------------------------------

    def _topic(self, name: str) -> Any:
        """Return the broker's description of a topic, None where it does not exist."""
        return self._asker.topic(name)

    def _description(
        self, name: str, topic: Any, configs: Mapping[str, Mapping[str, str]]
    ) -> TopicDescription:
        if topic is None:
            return TopicDescription(name, None)
        replicas = min((len(each.replicas) for each in topic.partitions.values()), default=None)
        return TopicDescription(name, len(topic.partitions), replicas, configs.get(name, {}))

    def _configs(self, names: Sequence[str]) -> dict[str, dict[str, str]]:
        if not names:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        futures = self._admin.get().describe_configs(resources, request_timeout=self._timeout)
        return {resource.name: self._overrides(future) for resource, future in futures.items()}

    def _overrides(self, future: Future[Any]) -> dict[str, str]:
        try:
            entries = future.result(self._timeout)
        except (KafkaException, TimeoutError) as error:
            # A right that is often withheld, and no reason to hide the rest.
            logger.info("The configuration of a topic could not be read: %s", describe(error))
            return {}
        own = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        return {
            name: entry.value
            for name, entry in entries.items()
            if entry.source == own and not entry.is_sensitive
        }

    # --- Answers ----------------------------------------------------------------------------------

    @property
    def _timeout(self) -> float:
        return self._options.request_timeout

    def _done(self, future: Future[Any], name: str, tolerated: int) -> bool:
        """Wait; return False where the tolerated error says that others were first."""
        try:
            future.result(self._timeout)
        except KafkaException as error:
            if has_code(error, tolerated):
                return False
            raise PublishError(f"Kafka, {name}: {describe(error)}") from error
        except TimeoutError as error:
            raise PublishError(f"Kafka, {name}: no answer in time") from error
        return True


def has_code(exception: BaseException | None, *codes: int | None) -> bool:
    error = error_of(exception) if exception is not None else None
    return error is not None and error.code() in codes


def text_of(value: Any) -> str:
    """Return a topic's setting as brokers read it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
