"""Storing jobs, beside Django storing the same rows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from django.utils import timezone

from kjo_django.ids import uuid7
from kjo_django.models import Job
from tests.benchmarks.counters import Queries
from tests.benchmarks.measures.prepare import payloads
from tests.ledger.jobs import write

BLOCK = 50
"""Calls of one side before it is the other's turn, so that both meet the same disturbances."""

Sides = dict[str, dict[str, float]]


def bare_row(payload: dict[str, Any]) -> Job:
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
    sides: dict[str, Callable[[dict[str, Any]], Any]] = {
        "ours": lambda payload: write.enqueue(**payload),
        "limit": lambda payload: bare_row(payload).save(force_insert=True),
    }
    for call in sides.values():
        for payload in payloads("write", 20):
            call(payload)
    spent = dict.fromkeys(sides, 0.0)
    cpu = dict.fromkeys(sides, 0.0)
    asked = 0
    queries = _queries_from_now()
    wanted = payloads("write", count)
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
    """All at once."""
    wanted = payloads("write", count)
    write.enqueue_many(wanted[:20])
    queries = _queries_from_now()
    began, began_cpu = time.perf_counter(), time.process_time()
    write.enqueue_many(wanted)
    ours = _figures(count, time.perf_counter() - began, time.process_time() - began_cpu)
    ours["queries_per_job"] = queries.count / count
    began, began_cpu = time.perf_counter(), time.process_time()
    Job.objects.bulk_create([bare_row(payload) for payload in wanted], batch_size=1000)
    limit = _figures(count, time.perf_counter() - began, time.process_time() - began_cpu)
    return {"ours": ours, "limit": limit}


def _queries_from_now() -> Queries:
    from django.db import connection

    connection.close()
    queries = Queries()
    connection.ensure_connection()
    return queries


def _figures(count: int, seconds: float, cpu_seconds: float) -> dict[str, float]:
    return {
        "jobs_per_second": count / seconds,
        "cpu_us_per_job": cpu_seconds / count * 1e6,
    }
