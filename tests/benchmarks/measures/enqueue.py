"""Storing jobs, beside Django storing the same rows."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from typing import Any

from django.db import transaction
from django.utils import timezone

from kjo_django.ids import uuid7
from kjo_django.models import Job
from tests.benchmarks.counters import Queries
from tests.benchmarks.measures.prepare import payloads
from tests.ledger.jobs import write
from tests.ledger.models import Entry

BLOCK = 50
"""Calls of one side before it is the other's turn, so that both meet the same disturbances."""

Payload = dict[str, Any]
Sides = dict[str, dict[str, float]]


def bare_row(payload: Payload) -> Job:
    """Return what `enqueue` stores, made without it."""
    now = timezone.now()
    return Job(
        id=uuid7(),
        queue="ledger",
        handler="ledger.write",
        max_attempts=5,
        payload=json.dumps(payload).encode(),
        available_at=now,
        created_at=now,
        result_ttl=3_600_000,
    )


def single(count: int) -> Sides:
    """One at a time, each in a transaction of its own."""
    return _in_turns(
        count,
        lambda payload: write.enqueue(**payload),
        lambda payload: bare_row(payload).save(force_insert=True),
    )


def in_transaction(count: int) -> Sides:
    """One at a time, each in a transaction with a row of the project's own."""

    def ours(payload: Payload) -> None:
        with transaction.atomic():
            Entry.objects.create(**payload)
            write.enqueue(**payload)

    def limit(payload: Payload) -> None:
        with transaction.atomic():
            Entry.objects.create(**payload)
            bare_row(payload).save(force_insert=True)

    return _in_turns(count, ours, limit)


def _in_turns(count: int, ours: Callable[[Payload], Any], limit: Callable[[Payload], Any]) -> Sides:
    sides = {"ours": ours, "limit": limit}
    for call in sides.values():
        for payload in payloads("insert", 20):
            call(payload)
    spent = dict.fromkeys(sides, 0.0)
    cpu = dict.fromkeys(sides, 0.0)
    asked = 0
    queries = _queries_from_now()
    wanted = payloads("insert", count)
    for start in range(0, count, BLOCK):
        for side, call in sides.items():
            before, began, began_cpu = queries.count, time.perf_counter(), time.process_time()
            for payload in wanted[start : start + BLOCK]:
                call(payload)
            spent[side] += time.perf_counter() - began
            cpu[side] += time.process_time() - began_cpu
            asked += queries.count - before if side == "ours" else 0
    figures = {side: _figures(count, spent[side], cpu[side]) for side in sides}
    figures["ours"]["queries_per_job"] = asked / count
    return figures


def many(count: int) -> Sides:
    """All at once. The limit stores the same rows with ``bulk_create``, or, where there is Kafka,
    with COPY and publishes their messages too, which ours leaves to the relay."""
    wanted = payloads("insert", count)
    write.enqueue_many(wanted[:20])
    # Queries are not counted: what counts them keeps enqueue_many() from using COPY.
    ours = _timed(count, lambda: write.enqueue_many(wanted))
    if not os.environ.get("KAFKA_BOOTSTRAP_SERVERS"):
        return {"ours": ours, "limit": _timed(count, lambda: _bulk_create(wanted))}
    from tests.benchmarks.limits.copying import Copier

    copier = Copier()
    copier.store(wanted[:20])
    limit = _timed(count, lambda: copier.store(wanted))
    copier.close()
    return {"ours": ours, "limit": limit}


def _bulk_create(wanted: list[Payload]) -> None:
    Job.objects.bulk_create([bare_row(payload) for payload in wanted], batch_size=1000)


def _queries_from_now() -> Queries:
    from django.db import connection

    connection.close()
    queries = Queries()
    connection.ensure_connection()
    return queries


def _timed(count: int, call: Callable[[], Any]) -> dict[str, float]:
    # Else what the start of the process or the other side has left is looked through at its cost.
    gc.collect()
    began, began_cpu = time.perf_counter(), time.process_time()
    call()
    return _figures(count, time.perf_counter() - began, time.process_time() - began_cpu)


def _figures(count: int, seconds: float, cpu_seconds: float) -> dict[str, float]:
    return {
        "jobs_per_second": count / seconds,
        "cpu_us_per_job": cpu_seconds / count * 1e6,
    }
