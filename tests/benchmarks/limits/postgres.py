"""psycopg by hand on PostgreSQL alone: a batch of messages, a transaction, the pipeline's writes.

It makes the writes of the loop on Kafka, and deletes the messages in the same transaction.
"""

from __future__ import annotations

import json
from typing import Any

import psycopg

from kjo_django.messages.headers import from_json
from tests.benchmarks import completions
from tests.benchmarks.counters import Clock
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.limits.handlers import Handlers
from tests.benchmarks.limits.kafka_postgres import HANDLERS, ORM_HANDLERS, carry_out, opened

TAKE = """
SELECT id, value, headers::text FROM kjo_transport_message
ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED
"""
ACKNOWLEDGE = "DELETE FROM kjo_transport_message WHERE id = ANY(%s)"


def run(workload: str, count: int, batch: int, orm: bool = False) -> dict[str, float]:
    """Drain the table; the figures of `measures.drain`.

    :param orm: handlers use Django's ORM on the connection of the loop, without any savepoint.
    """
    clock = Clock()
    handlers = ORM_HANDLERS if orm else HANDLERS
    done = 0
    with opened(orm) as connection:
        while done < count:
            taken = settle(connection, batch, handlers)
            if not taken:
                raise BenchmarkError(f"The table gave {done} of {count} messages")
            done += taken
    return completions.figures(count, workload, clock)


def settle(connection: psycopg.Connection[Any], batch: int, handlers: Handlers) -> int:
    """Run the handlers of a batch and commit their effects."""
    with connection.cursor() as cursor:
        taken = cursor.execute(TAKE, [batch]).fetchall()
        received = [(from_json(json.loads(headers)), bytes(value)) for _, value, headers in taken]
        carry_out(cursor, received, handlers)
        cursor.execute(ACKNOWLEDGE, [[id for id, _, _ in taken]])
    connection.commit()
    return len(taken)
