"""The Kafka transport: publishing, subscribing, topics, offsets and reachability.

Workers and web processes ask regularly, by way of consumers that never join anything. The admin
client only creates and grows topics and reads their configuration: when a broker goes down, an
answer to one of its requests that comes too late aborts the whole process (librdkafka#4605).
"""

from __future__ import annotations

import atexit
import re
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    NewTopic,
    ResourceType,
)
from django.utils.translation import gettext as _

from kjo_django.exceptions import PublishError
from kjo_django.transports.base import (
    AssignedCallback,
    Capabilities,
    GroupOffsets,
    OutgoingRecord,
    Published,
    RevokedCallback,
    TopicDescription,
    TopicPartition,
    TopicSpec,
    Transport,
)
from kjo_django.transports.kafka.clients import (
    SILENCE,
    KafkaOptions,
    Refusals,
    close_behind,
    describe,
    error_of,
    forkable,
    keep_for_ever,
    logger,
    make,
    quiet,
    watched,
)
from kjo_django.transports.kafka.publisher import Publisher
from kjo_django.transports.kafka.subscription import KafkaSubscription

CLOSE_TIMEOUT = 1.0
PATIENCE = 5.0
"""Seconds a broker gets for an answer about offsets: it has answered by then, or it is away."""
NOBODY = "kjo-django-asks"
"""The group of questions that are about no group. It has no members and commits nothing."""
VISIBLE_WITHIN = 15.0
"""Seconds until a topic just created is known to the broker we ask."""
INTERVAL = 0.1


class KafkaTransport(Transport):
    """OPTIONS are librdkafka's own keys, passed through untouched, and

    - ``producer``, ``consumer``: dicts of keys for one kind of client alone;
    - ``commit_interval``: how often acknowledgements are committed (timedelta, 0.5 s);
    - ``request_timeout``: patience with questions about topics and lag (timedelta, 30 s).
    """

    capabilities = Capabilities(ordering=True, delay=False, transactional=False, replay=True)
    topic_name = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")

    def __init__(self, alias: str, options: Mapping[str, Any]) -> None:
        super().__init__(alias, options)
        self._options = KafkaOptions(alias, options)
        self._timeout = self._options.request_timeout
        self._begin()
        _open.add(self)
        forkable.add(self)

    def _begin(self) -> None:
        """Be without clients; each is made when it is needed."""
        self._publisher = Publisher(self._options)
        self._refusals = Refusals(self._options)
        self._admin_client: AdminClient | None = None
        self._questions: dict[str, Questions] = {}

    def forget_the_parents(self) -> None:
        """In the child of a fork: be without clients, whose threads are the parent's."""
        keep_for_ever((self._publisher, self._admin_client, self._questions))
        self._begin()

    def publish(self, records: Sequence[OutgoingRecord]) -> list[Published]:
        """Publish ``records``. A record too large, or for a topic that does not exist, is an error
        of its own; a broker that is down shows after ``delivery.timeout.ms``."""
        return self._publisher.publish(records)

    def subscribe(
        self,
        topics: Sequence[str],
        group: str,
        *,
        lease: timedelta = timedelta(seconds=30),
        on_revoked: RevokedCallback | None = None,
        on_assigned: AssignedCallback | None = None,
    ) -> KafkaSubscription:
        """Join ``group``. ``lease`` has no meaning here: see ``session.timeout.ms`` and
        ``max.poll.interval.ms``."""
        return KafkaSubscription(self._options, topics, group, on_revoked, on_assigned)

    def close(self) -> None:
        self._publisher.close()
        self._admin_client = None
        for questions in list(self._questions.values()):
            questions.close()

    # --- Topics: each method raises PublishError with the reason when it fails --------------------

    def ensure_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        """Create what is missing, grow what is too small. Others may do the same meanwhile."""
        names = [spec.name for spec in specs]
        known = {topic.name: topic.partitions for topic in self.describe_topics(names)}
        missing = [spec for spec in specs if known[spec.name] is None]
        changes = self._create(missing)
        # Whoever else created them may have made them smaller.
        if missing:
            known.update(self._wait_for([spec.name for spec in missing], at_least={}))
        small = {s.name: s.partitions for s in specs if (known[s.name] or 0) < s.partitions}
        if small:
            changes += [
                f"grew {name} from {known[name]} to {small[name]} partitions"
                for name in self._grow(small)
            ]
        return changes

    def _grow(self, counts: Mapping[str, int]) -> list[str]:
        """Give topics so many partitions; return those of them that nobody else has grown first, at
        least as far."""
        new = [NewPartitions(name, count) for name, count in counts.items()]
        grown = self._admin().create_partitions(new, request_timeout=self._timeout)
        ours = [n for n in counts if self._done(grown[n], n, KafkaError.INVALID_PARTITIONS)]
        self._wait_for(list(counts), at_least=counts)
        return ours

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
        created = self._admin().create_topics(new, request_timeout=self._timeout)
        return [
            f"created {spec.name} with {spec.partitions} partitions"
            for spec in specs
            if self._done(created[spec.name], spec.name, KafkaError.TOPIC_ALREADY_EXISTS)
        ]

    def _done(self, future: Future[Any], name: str, tolerated: int) -> bool:
        """Wait; return False where the tolerated error says that others were first."""
        try:
            future.result(self._timeout)
        except KafkaException as error:
            code = error_of(error)
            if code is not None and code.code() == tolerated:
                return False
            raise PublishError(f"Kafka, {name}: {describe(error)}") from error
        except TimeoutError as error:
            raise PublishError(f"Kafka, {name}: no answer in time") from error
        return True

    def _wait_for(
        self, names: Sequence[str], *, at_least: Mapping[str, int]
    ) -> dict[str, int | None]:
        """Wait until topics are visible, so that the next publish does not miss them."""
        deadline = time.monotonic() + VISIBLE_WITHIN
        while True:
            topics = self._questions_of(NOBODY).topics(names)
            sizes = {name: len(t.partitions) if t else None for name, t in topics.items()}
            if all((size or 0) >= at_least.get(name, 1) for name, size in sizes.items()):
                return sizes
            if time.monotonic() > deadline:
                raise PublishError(f"Kafka topics {', '.join(names)} were not visible in time")
            time.sleep(INTERVAL)

    def describe_topics(self, names: Sequence[str]) -> list[TopicDescription]:
        """Return each topic, with the configuration that differs from the broker's defaults."""
        topics = self._questions_of(NOBODY).topics(names) if names else {}
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in topics if topics[name]]
        configs = {}
        if resources:
            answers = self._admin().describe_configs(resources, request_timeout=self._timeout)
            configs = {resource.name: self._own(future) for resource, future in answers.items()}
        found = []
        for name in names:
            if (topic := topics[name]) is None:
                found.append(TopicDescription(name, None))
                continue
            partitions = topic.partitions.values()
            replicas = min((len(each.replicas) for each in partitions), default=None)
            found.append(TopicDescription(name, len(partitions), replicas, configs.get(name, {})))
        return found

    def _own(self, answer: Future[Any]) -> dict[str, str]:
        """Return what of a topic's configuration is its own."""
        try:
            entries = answer.result(self._timeout)
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

    # --- Offsets and reachability -----------------------------------------------------------------

    def lag(self, topics: Sequence[str], group: str) -> dict[TopicPartition, int]:
        return {where: each.lag for where, each in self.offsets(topics, group).items()}

    def offsets(self, topics: Sequence[str], group: str) -> dict[TopicPartition, GroupOffsets]:
        """Return where a group is in each partition of these topics."""
        return self._questions_of(group).offsets(topics)

    def probe(self, timeout: float) -> str:
        """Name what answered."""
        try:
            metadata = self._refusals.list_topics(self._admin(), timeout)
        except KafkaException as error:
            # It may have forgotten its brokers (librdkafka#5301).
            self._admin_client = None
            met, text = self._refusals.last_error, describe(error)
            if met is None or met.startswith("_TIMED_OUT"):
                raise PublishError(f"Kafka does not answer: {text}") from TimeoutError(text)
            # Why a connection was refused or a name not resolved says more than that it failed.
            raise PublishError(f"Kafka does not answer: {text} ({met})") from error
        brokers = sorted(f"{each.host}:{each.port}" for each in metadata.brokers.values())
        text = _("Kafka, %(count)d broker(s): %(brokers)s")
        return text % {"count": len(brokers), "brokers": ", ".join(brokers)}

    def _admin(self) -> AdminClient:
        admin = self._admin_client
        if admin is None:  # two that are made at once cost no more than time
            config = watched(self._options.admin(), self._refusals.note)
            admin = self._admin_client = make(AdminClient, config, self._options)
        return admin

    def _questions_of(self, group: str) -> Questions:
        if group not in self._questions:
            self._questions.setdefault(group, Questions(self._options, group))
        return self._questions[group]


class Questions:
    """Questions about topics and about one group, which their client never joins. Thread-safe;
    every method raises ``PublishError``.

    A client that got no answer is replaced: it may have forgotten every broker (librdkafka#5301).
    """

    def __init__(self, options: KafkaOptions, group: str) -> None:
        self._options = options
        self._group = group
        self._consumer: Consumer | None = None
        self._refusals = Refusals(options)
        self._asking = threading.Lock()
        self._patience = min(options.request_timeout, PATIENCE)
        """Seconds for each question about offsets: a page waits for the answer."""

    def close(self) -> None:
        """Forget the client; it is made anew when needed."""
        consumer, self._consumer = self._consumer, None
        if consumer is None:
            return
        if not self._asking.acquire(timeout=CLOSE_TIMEOUT):
            keep_for_ever(consumer)  # somebody still asks, and no answer comes
            return
        try:
            quiet(consumer.close)()
        finally:
            self._asking.release()

    def topics(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the metadata of topics, None where one does not exist. Nobody creates it."""
        with self._asking:
            return self._topics(self._client(), names, self._options.request_timeout)

    def offsets(self, names: Iterable[str]) -> dict[TopicPartition, GroupOffsets]:
        """Return the committed and the end offset; the lag is what is between them, or after the
        earliest where nothing is committed, or where what was is no longer there."""
        with self._asking:
            consumer = self._client()
            topics = self._topics(consumer, names, self._patience)
            try:
                return self._offsets(consumer, topics)
            except KafkaException as error:
                raise self._failed(consumer, f"group {self._group}", error) from error

    def _client(self) -> Consumer:
        if self._consumer is None:
            config = {
                **self._options.admin(),
                "group.id": self._group,
                "enable.auto.commit": False,
                "allow.auto.create.topics": False,
            }
            self._consumer = make(Consumer, watched(config, self._refusals.note), self._options)
        self._consumer.poll(0)  # or what it logs would pile up
        return self._consumer

    def _failed(self, consumer: Consumer, what: str, error: KafkaException) -> PublishError:
        code = error_of(error)
        if code is None or code.code() in SILENCE:
            self._consumer = None
            close_behind(consumer)
        is_late = code is not None and code.code() == KafkaError._TIMED_OUT
        return PublishError(f"Kafka, {what}: {'no answer in time' if is_late else describe(error)}")

    def _topics(self, consumer: Consumer, names: Iterable[str], timeout: float) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in names:
            try:
                topic = self._refusals.list_topics(consumer, timeout, name).topics[name]
            except KafkaException as error:
                raise self._failed(consumer, name, error) from error
            problem = topic.error
            if problem is not None and problem.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise PublishError(f"Kafka, {name}: {describe(problem)}")
            found[name] = topic if problem is None else None
        return found

    def _offsets(
        self, consumer: Consumer, topics: Mapping[str, Any]
    ) -> dict[TopicPartition, GroupOffsets]:
        partitions = [
            KafkaPartition(name, number)
            for name, topic in topics.items()
            if topic is not None
            for number in sorted(topic.partitions)
        ]
        if not partitions:
            return {}
        committed = _by_partition(consumer.committed(partitions, timeout=self._patience))
        ends = self._edges(consumer, committed, OFFSET_END)
        # Where a group has committed nothing, or what retention has passed since, the first record
        # there is comes next. Of who is at the end nobody needs to ask.
        behind = [where for where, offset in committed.items() if offset < ends[where]]
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
        self, consumer: Consumer, partitions: Collection[TopicPartition], edge: int
    ) -> dict[TopicPartition, int]:
        """Return the first offsets, or those after the last: "as of" two special times."""
        if not partitions:
            return {}
        wanted = [KafkaPartition(*where, edge) for where in partitions]
        return _by_partition(consumer.offsets_for_times(wanted, timeout=self._patience))


def _by_partition(answers: Iterable[KafkaPartition]) -> dict[TopicPartition, int]:
    found = {}
    for answer in answers:
        if answer.error is not None:
            raise KafkaException(answer.error)
        found[TopicPartition(answer.topic, answer.partition)] = answer.offset
    return found


def text_of(value: Any) -> str:
    """Return a topic's setting as brokers read it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


_open: weakref.WeakSet[KafkaTransport] = weakref.WeakSet()


def close_all() -> None:
    """Close the clients before the interpreter ends."""
    for transport in list(_open):
        transport.close()


atexit.register(close_all)
