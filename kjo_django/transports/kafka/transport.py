"""The Kafka transport: one producer per process, one consumer per subscription."""

from __future__ import annotations

import atexit
import re
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

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
from kjo_django.transports.kafka.client_config import KafkaOptions
from kjo_django.transports.kafka.publisher import Publisher
from kjo_django.transports.kafka.subscription import KafkaSubscription
from kjo_django.transports.kafka.topic_admin import Topics


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
        self._publisher = Publisher(self._options)
        self._topics = Topics(self._options)
        _open.add(self)

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
        self._topics.close()

    def ensure_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        return self._topics.ensure(specs)

    def describe_topics(self, names: Sequence[str]) -> list[TopicDescription]:
        return self._topics.describe(names)

    def lag(self, topics: Sequence[str], group: str) -> dict[TopicPartition, int]:
        return {where: each.lag for where, each in self.offsets(topics, group).items()}

    def offsets(self, topics: Sequence[str], group: str) -> dict[TopicPartition, GroupOffsets]:
        return self._topics.offsets(topics, group)

    def probe(self, timeout: float) -> str:
        return self._topics.probe(timeout)


_open: weakref.WeakSet[KafkaTransport] = weakref.WeakSet()


def close_all() -> None:
    """Flush the producers before the interpreter ends."""
    for transport in list(_open):
        transport.close()


atexit.register(close_all)
