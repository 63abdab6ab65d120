"""sqlite3 by hand: a batch of messages, a transaction, the writes of the pipeline.

The connection is the one Django opens, so that journal, synchronisation and time limits are equal;
only Django's own code is left out.
"""

from __future__ import annotations

import json
import sqlite3
from datetime import UTC, datetime, timedelta

from django.db import connection

from kjo_django.ids import uuid7
from kjo_django.messages.headers import from_json
from tests.benchmarks import completions
from tests.benchmarks.counters import Clock
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.limits.handlers import COMMON, Handlers, Payloads, loads

TAKE = "SELECT id, value, headers FROM kjo_transport_message ORDER BY id LIMIT ?"
MARK = """
INSERT INTO processed_events
    (id, event_id, event_type, service_name, processed_at, created_at, updated_at)
VALUES (?, ?, ?, 'benchmarks', ?, ?, ?) ON CONFLICT DO NOTHING
"""
COMPLETE = """
UPDATE kjo_job SET state = 'completed', attempts = 1, started_at = ?, finished_at = ?,
    result = NULL, result_expires_at = ?, error = '', lease_token = '', lease_expires_at = NULL
WHERE id = ? AND generation = ? AND state IN ('pending', 'queued', 'failing')
"""
ACKNOWLEDGE = "DELETE FROM kjo_transport_message WHERE id = ?"
WRITE = "INSERT INTO ledger_entry (job, note, created_at) VALUES (?, '', ?)"


def write(database: sqlite3.Connection, payloads: Payloads) -> None:
    """Add an entry for each."""
    for payload in payloads:
        database.execute(WRITE, (payload["job"], _text(datetime.now(UTC))))


def write_batch(database: sqlite3.Connection, payloads: Payloads) -> None:
    """Add all entries with one statement."""
    now = _text(datetime.now(UTC))
    database.executemany(WRITE, [(payload["job"], now) for payload in payloads])


HANDLERS: Handlers = {
    **COMMON,
    "ledger.write": write,
    "benchmarks.write_only": write,
    "benchmarks.write_batch": write_batch,
}


def run(workload: str, count: int, batch: int) -> dict[str, float]:
    """Drain the table; the figures of `measures.drain`."""
    clock = Clock()
    connection.ensure_connection()
    database: sqlite3.Connection = connection.connection
    done = 0
    while done < count:
        taken = settle(database, batch)
        if not taken:
            raise BenchmarkError(f"The table gave {done} of {count} messages")
        done += taken
    return completions.figures(count, workload, clock)


def settle(database: sqlite3.Connection, batch: int) -> int:
    """Run the handlers of a batch and commit their effects."""
    database.execute("BEGIN IMMEDIATE")
    messages = database.execute(TAKE, (batch,)).fetchall()
    read = [(id, bytes(value), from_json(json.loads(headers))) for id, value, headers in messages]
    now = _text(datetime.now(UTC))
    fresh = [message for message in read if _mark(database, message[2], now)]
    started = _text(datetime.now(UTC))
    payloads: dict[str, Payloads] = {}
    for _, value, headers in fresh:
        payloads.setdefault(headers["kjo-type"].decode(), []).append(loads(value))
    for handler, those in payloads.items():
        HANDLERS[handler](database, those)
    ended = datetime.now(UTC)
    expires = _text(ended + timedelta(hours=1))
    database.executemany(
        COMPLETE,
        [
            (
                started,
                _text(ended),
                expires,
                headers["kjo-job-id"].decode().replace("-", ""),
                int(headers["kjo-generation"]),
            )
            for _, _, headers in fresh
        ],
    )
    database.executemany(ACKNOWLEDGE, [(id,) for id, _, _ in read])
    database.commit()
    return len(messages)


def _mark(database: sqlite3.Connection, headers: dict[str, bytes], now: str) -> bool:
    names = (headers["kjo-id"].decode(), headers["kjo-type"].decode())
    return database.execute(MARK, (uuid7().hex, *names, now, now, now)).rowcount == 1


def _text(moment: datetime) -> str:
    """As Django stores it."""
    return moment.replace(tzinfo=None).isoformat(" ")
