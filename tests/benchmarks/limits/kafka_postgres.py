"""confluent-kafka and psycopg by hand: a batch, a transaction, an asynchronous offset commit.

It makes the writes the pipeline makes (the marker of every effect, the outcome in every job's row,
the handler's own), keeps the promise that each takes effect once, and nothing else: no retries, no
leases, no order of keys, no limits, no statistics.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import psycopg
from confluent_kafka import Consumer, Message

from kjo_django.ids import uuid7
from tests.benchmarks import completions
from tests.benchmarks.counters import Clock
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.limits.handlers import COMMON, Handlers, Payloads, create, loads

MARK = """
INSERT INTO processed_events
    (id, event_id, event_type, service_name, processed_at, created_at, updated_at)
SELECT v.id, v.event_id, v.event_type, 'benchmarks', %(now)s, %(now)s, %(now)s
FROM unnest(%(ids)s::uuid[], %(events)s::text[], %(types)s::text[]) AS v (id, event_id, event_type)
ON CONFLICT DO NOTHING RETURNING event_id
"""
COMPLETE = """
UPDATE kjo_job SET state = 'completed', attempts = 1, started_at = %(started)s,
    finished_at = %(now)s, result = NULL, error = '', lease_token = '', lease_expires_at = NULL,
    result_expires_at = %(now)s::timestamptz + kjo_job.result_ttl * interval '1 millisecond'
FROM unnest(%(ids)s::uuid[], %(generations)s::int[]) AS v (id, generation)
WHERE kjo_job.id = v.id AND kjo_job.generation = v.generation
    AND kjo_job.state IN ('pending', 'queued', 'failing')
"""
WRITE_ALL = """
INSERT INTO ledger_entry (job, note, created_at)
SELECT v.job, '', v.moment FROM (SELECT unnest(%s::text[]) AS job, %s AS moment) AS v
"""
WRITE = "INSERT INTO ledger_entry (job, note, created_at) VALUES (%s, '', %s) RETURNING id"


def write(cursor: psycopg.Cursor[Any], payloads: Payloads) -> None:
    """Add an entry for each, with a query of its own as a handler would."""
    for payload in payloads:
        cursor.execute(WRITE, [payload["job"], datetime.now(UTC)])


def write_batch(cursor: psycopg.Cursor[Any], payloads: Payloads) -> None:
    """Add all entries with one query."""
    cursor.execute(WRITE_ALL, [[payload["job"] for payload in payloads], datetime.now(UTC)])


HANDLERS: Handlers = {
    **COMMON,
    "ledger.write": write,
    "benchmarks.write_only": write,
    "benchmarks.write_batch": write_batch,
}
ORM_HANDLERS: Handlers = {**COMMON, "ledger.write": create, "benchmarks.write_only": create}

Received = tuple[dict[str, bytes], bytes]
"""Headers and value of a message."""


def run(workload: str, count: int, batch: int, orm: bool = False) -> dict[str, float]:
    """Drain the topic; the figures of `measures.drain`.

    :param orm: handlers use Django's ORM on the connection of the loop, without any savepoint.
    """
    topic = os.environ["KJO_BENCHMARK_TOPIC"]
    clock = Clock()
    consumer = Consumer(
        {
            "bootstrap.servers": os.environ["KAFKA_BOOTSTRAP_SERVERS"],
            "group.id": f"{topic}-group",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([topic])
    done = 0
    handlers = ORM_HANDLERS if orm else HANDLERS
    with opened(orm) as connection:
        while done < count:
            messages = consumer.consume(min(batch, count - done), 30.0)
            if not messages:
                raise BenchmarkError(f"The topic gave {done} of {count} messages")
            done += settle(connection, messages, handlers)
            consumer.commit(asynchronous=True)
    consumer.close()
    return completions.figures(count, workload, clock)


@contextmanager
def opened(orm: bool) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection whose transactions are ended by hand: a new one, or Django's own."""
    if not orm:
        with psycopg.connect(os.environ["DATABASE_URL"]) as own:
            yield own
        return
    from django.db import connection

    connection.set_autocommit(False)
    yield connection.connection
    connection.set_autocommit(True)


def settle(connection: psycopg.Connection[Any], messages: list[Message], handlers: Handlers) -> int:
    """Run the handlers of a batch and commit their effects."""
    received: list[Received] = []
    for message in messages:
        if message.error() is not None:
            raise BenchmarkError(str(message.error()))
        received.append((dict(message.headers()), message.value()))
    with connection.cursor() as cursor:
        carry_out(cursor, received, handlers)
    connection.commit()
    return len(messages)


def carry_out(cursor: psycopg.Cursor[Any], received: list[Received], handlers: Handlers) -> None:
    """Write the markers of a batch, run the handlers, write the outcomes."""
    by_id = {headers["kjo-id"].decode(): (headers, value) for headers, value in received}
    now = datetime.now(UTC)
    types = [headers["kjo-type"].decode() for headers, _ in by_id.values()]
    ids = [uuid7() for _ in by_id]
    marks = {"now": now, "ids": ids, "events": list(by_id), "types": types}
    cursor.execute(MARK, marks)
    fresh = [by_id[row[0]] for row in cursor.fetchall()]
    started = datetime.now(UTC)
    payloads: dict[str, Payloads] = {}
    for headers, value in fresh:
        payloads.setdefault(headers["kjo-type"].decode(), []).append(loads(value))
    for handler, those in payloads.items():
        handlers[handler](cursor, those)
    outcome = {
        "now": datetime.now(UTC),
        "started": started,
        "ids": [headers["kjo-job-id"].decode() for headers, _ in fresh],
        "generations": [int(headers["kjo-generation"]) for headers, _ in fresh],
    }
    cursor.execute(COMPLETE, outcome)
