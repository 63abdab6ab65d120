"""Topics, offsets and reachability.

Workers and web processes ask regularly, by way of consumers that never join anything. The admin
client only creates and grows topics and reads their configuration: when a broker goes down, an
answer to one of its requests that comes too late aborts the whole process (librdkafka#4605).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
)
from confluent_kafka import TopicPartition as KafkaPartition
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
from kjo_django.transports.kafka.client_config import KafkaOptions
from kjo_django.transports.kafka.clients import (
    PerProcess,
    Refusals,
    after_fork,
    describe,
    error_of,
    keep_for_ever,
    logger,
    make,
    quiet,
    watched,
)

CLOSE_TIMEOUT = 1.0
PATIENCE = 5.0
"""Seconds a broker gets for an answer about offsets: it has answered by then, or it is away."""
NOBODY = "kjo-django-asks"
"""The group of questions that are about no group. It has no members and commits nothing."""


class Asker:
    """Questions about one group. Thread-safe; every method raises ``PublishError``."""

    def __init__(self, options: KafkaOptions, group: str = NOBODY) -> None:
        self._options = options
        self._group = group
        self._consumer = PerProcess(self._make)
        self._refusals = Refusals(options)
        self._asking = threading.Lock()
        after_fork(self)

    def close(self) -> None:
        """Forget the client; it is made anew when needed."""
        consumer = self._consumer.take()
        if consumer is None:
            return
        if not self._asking.acquire(timeout=CLOSE_TIMEOUT):
            keep_for_ever(consumer)  # somebody still asks, and no answer comes
            return
        try:
            quiet(consumer.close)()
        finally:
            self._asking.release()

    def forget_the_parents(self) -> None:
        """Called in the child of a fork: a thread of the parent may have been asking."""
        self._asking = threading.Lock()

    def topic(self, name: str) -> Any:
        """Return the metadata of a topic, None where it does not exist. Nobody creates it."""
        with self._asking:
            return self._topic(self._consumer.get(), name, self._options.request_timeout)

    def offsets(self, names: Iterable[str]) -> dict[TopicPartition, GroupOffsets]:
        """Return the committed and the end offset; the lag is what is between them, or after the
        earliest where nothing is committed, or where what was is no longer there."""
        with self._asking:
            consumer = self._consumer.get()
            try:
                return self._offsets(consumer, names)
            except KafkaException as error:
                raise PublishError(f"Kafka, group {self._group}: {_reason(error)}") from error
            finally:
                consumer.poll(0)  # or what it logs would pile up

    def _make(self) -> Consumer:
        config = {
            **self._options.admin(),
            "group.id": self._group,
            "enable.auto.commit": False,
            "allow.auto.create.topics": False,
        }
        return make(Consumer, watched(config, self._refusals.note), self._options)

    @property
    def _patience(self) -> float:
        """Seconds for each question about offsets: a page waits for the answer."""
        return min(self._options.request_timeout, PATIENCE)

    def _topic(self, consumer: Consumer, name: str, timeout: float) -> Any:
        try:
            topic = self._refusals.list_topics(consumer, timeout, name).topics[name]
        except KafkaException as error:
            raise PublishError(f"Kafka, {name}: {_reason(error)}") from error
        finally:
            consumer.poll(0)
        if topic.error is None:
            return topic
        if topic.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return None
        raise PublishError(f"Kafka, {name}: {describe(topic.error)}")

    def _offsets(
        self, consumer: Consumer, names: Iterable[str]
    ) -> dict[TopicPartition, GroupOffsets]:
        patience = self._patience
        topics = {name: self._topic(consumer, name, patience) for name in dict.fromkeys(names)}
        partitions = [
            KafkaPartition(name, number)
            for name, topic in topics.items()
            if topic is not None
            for number in sorted(topic.partitions)
        ]
        if not partitions:
            return {}
        committed = _offsets(consumer.committed(partitions, timeout=patience))
        ends = self._edges(consumer, partitions, OFFSET_END)
        # Where a group has committed nothing, or what retention has passed since, the first record
        # there is comes next. Of who is at the end nobody needs to ask.
        behind = [each for each in partitions if committed[_key(each)] < ends[_key(each)]]
        firsts = self._edges(consumer, behind, OFFSET_BEGINNING)
        nexts = {where: max(offset, firsts.get(where, 0)) for where, offset in committed.items()}
        return {
            where: GroupOffsets(
                lag=max(0, end - nexts[where]),
                committed=nexts[where] if committed[where] >= 0 else None,
                end=end,
            )
            for where, end in ends.items()
        }

    def _edges(
        self, consumer: Consumer, partitions: Sequence[KafkaPartition], edge: int
    ) -> dict[TopicPartition, int]:
        """Return the first offsets, or those after the last: "as of" two special times."""
        if not partitions:
            return {}
        wanted = [KafkaPartition(each.topic, each.partition, edge) for each in partitions]
        return _offsets(consumer.offsets_for_times(wanted, timeout=self._patience))


def _offsets(answers: Iterable[KafkaPartition]) -> dict[TopicPartition, int]:
    found = {}
    for answer in answers:
        if answer.error is not None:
            raise KafkaException(answer.error)
        found[_key(answer)] = answer.offset
    return found


def _key(partition: KafkaPartition) -> TopicPartition:
    return TopicPartition(partition.topic, partition.partition)


def _reason(error: KafkaException) -> str:
    code = error_of(error)
    if code is not None and code.code() == KafkaError._TIMED_OUT:
        return "no answer in time"
    return describe(error)


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
                raise PublishError(f"Kafka topics {', '.join(names)} were not visible in time")
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
