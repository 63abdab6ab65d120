"""The Kafka transport passes the suite of every transport, on a real Apache Kafka."""

from datetime import timedelta
from typing import Any, ClassVar

import pytest

from kjo_django.testing.conformance import TransportConformance
from kjo_django.transports.kafka import KafkaTransport


@pytest.mark.kafka
class TestKafka(TransportConformance):
    # An abandoned consumer leaves its group once it was not polled for so long.
    lease = timedelta(seconds=2)
    options: ClassVar[dict[str, object]] = {
        "session.timeout.ms": 1500,
        "heartbeat.interval.ms": 300,
        "max.poll.interval.ms": 2000,
    }

    @pytest.fixture(autouse=True)
    def _server(self, kafka_server: Any) -> None:
        self.server = kafka_server

    def make_transport(self) -> KafkaTransport:
        return KafkaTransport(
            "test", {"bootstrap.servers": self.server.bootstrap_servers, **self.options}
        )


@pytest.mark.large
@pytest.mark.kafka
class TestKafkaEager(TestKafka):
    """The older protocol, which takes every partition away at every rebalance."""

    options: ClassVar[dict[str, object]] = {
        **TestKafka.options,
        "partition.assignment.strategy": "range",
    }


@pytest.mark.large
@pytest.mark.kafka
class TestKafkaNextGeneration(TestKafka):
    """KIP-848: the broker decides the assignment."""

    options: ClassVar[dict[str, object]] = {
        "group.protocol": "consumer",
        "max.poll.interval.ms": 2000,
    }
