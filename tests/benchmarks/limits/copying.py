"""COPY and produce by hand: rows stored and their messages published, nothing else."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import psycopg
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from kjo_django.ids import uuid7
from tests.benchmarks.errors import BenchmarkError

CHUNK = 1000
COPY = """
COPY kjo_job (id, queue, handler, key, state, generation, attempts, max_attempts, payload,
    content_type, available_at, created_at, lease_token, result_ttl, error, destination, topic)
FROM STDIN
"""
ROW_START = ("ledger", "ledger.write", "", "queued", 1, 0, 5)
ROW_MIDDLE = ("application/json",)
ROW_END = ("", 3_600_000, "", "")


class Copier:
    """Holds the connection and the producer, as a process that stores jobs would."""

    def __init__(self) -> None:
        servers = {"bootstrap.servers": os.environ["KAFKA_BOOTSTRAP_SERVERS"]}
        self._topic = os.environ["KJO_BENCHMARK_TOPIC"]
        admin = AdminClient(servers)  # to be kept until it has answered
        admin.create_topics([NewTopic(self._topic, 4, 1)])[self._topic].result(30)
        self._producer = Producer({**servers, "enable.idempotence": True, "linger.ms": 5})
        self._connection = psycopg.connect(os.environ["DATABASE_URL"])
        self._failed = 0

    def store(self, payloads: list[dict[str, Any]]) -> None:
        """Store and publish, a transaction for all; publishing comes after its commit."""
        published = []
        now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        with self._connection.cursor() as cursor, cursor.copy(COPY) as copy:
            for payload in payloads:
                id, value = str(uuid7()), json.dumps(payload).encode()
                copy.write_row(
                    (id, *ROW_START, value, *ROW_MIDDLE, now, now, *ROW_END, self._topic)
                )
                published.append((id, value))
        self._connection.commit()
        for start in range(0, len(published), CHUNK):
            for id, value in published[start : start + CHUNK]:
                self._producer.produce(
                    self._topic, value, id, headers=_headers(id), on_delivery=self._note
                )
            self._producer.poll(0)
        if self._producer.flush(60) or self._failed:
            raise BenchmarkError(f"{self._failed} messages were not delivered")

    def _note(self, error: Any, message: Any) -> None:
        self._failed += error is not None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _headers(id: str) -> list[tuple[str, str]]:
    return [
        ("kjo-id", id),
        ("kjo-type", "ledger.write"),
        ("kjo-job-id", id),
        ("kjo-service", "benchmarks"),
        ("kjo-generation", "1"),
        ("kjo-attempt", "1"),
        ("content-type", "application/json"),
    ]
