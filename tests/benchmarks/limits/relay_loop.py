"""psycopg and confluent-kafka by hand: read due rows, produce, await the reports, record them."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import psycopg
from confluent_kafka import Producer

from tests.benchmarks.errors import BenchmarkError

DUE = """
SELECT id::text, handler, key, generation, attempts, payload, content_type FROM kjo_job
WHERE state IN ('pending', 'failing') AND available_at <= now() AND queue = 'ledger'
ORDER BY available_at, id LIMIT %s
"""
RECORD = """
UPDATE kjo_job SET state = 'queued', topic = %s, partition = v.partition, "offset" = v.position,
    queued_at = now()
FROM unnest(%s::uuid[], %s::int[], %s::int[], %s::int[], %s::bigint[])
    AS v (id, generation, attempts, partition, position)
WHERE kjo_job.id = v.id AND kjo_job.generation = v.generation
    AND kjo_job.attempts = v.attempts AND kjo_job.state IN ('pending', 'failing')
"""


def run(count: int, batch: int) -> dict[str, float]:
    """Publish every pending row; the figures of `measures.relay`."""
    producer = Producer(
        {
            "bootstrap.servers": os.environ["KAFKA_BOOTSTRAP_SERVERS"],
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "linger.ms": 5,
        }
    )
    cpu = time.process_time()
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        first = relay(connection, producer, batch)
        start = time.perf_counter()
        done = first
        while published := relay(connection, producer, batch):
            done += published
        seconds = time.perf_counter() - start
    if done != count:
        raise BenchmarkError(f"{done} of {count} rows were published")
    return {
        "jobs_per_second": (count - first) / seconds,
        "cpu_us_per_job": (time.process_time() - cpu) / count * 1e6,
    }


def relay(connection: psycopg.Connection[Any], producer: Producer, batch: int) -> int:
    """Publish one batch."""
    topic = os.environ["KJO_BENCHMARK_TOPIC"]
    rows = connection.execute(DUE, [batch], binary=True).fetchall()
    if not rows:
        return 0
    sent: list[tuple[Any, ...]] = []
    for id, handler, key, generation, attempts, payload, content_type in rows:
        headers = [
            ("kjo-id", id if generation == 1 else f"{id}:{generation}"),
            ("kjo-type", handler),
            ("kjo-job-id", id),
            ("kjo-service", "benchmarks"),
            ("kjo-generation", str(generation)),
            ("kjo-attempt", str(attempts + 1)),
            ("content-type", content_type),
        ]
        told = partial(_note, sent, (id, generation, attempts))
        producer.produce(topic, payload, key or id, headers=headers, on_delivery=told)
    producer.flush(60)
    if len(sent) != len(rows):
        raise BenchmarkError(f"{len(sent)} of {len(rows)} messages were delivered")
    columns = [list(column) for column in zip(*sent, strict=True)]
    connection.execute(RECORD, [topic, *columns])
    return len(rows)


def _note(sent: list[tuple[Any, ...]], row: tuple[Any, ...], error: Any, message: Any) -> None:
    if error is None:
        sent.append((*row, message.partition(), message.offset()))
