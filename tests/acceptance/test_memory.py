"""Workers, relays and bulk actions hold a bounded number of bytes (issue 19, item 1).

Each runs in a process whose address space may grow by so many megabytes after its imports, and is
given more than that to do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kjo_django.models import DeadLetter, DeadLetterState
from kjo_django.operations.bulk import start_bulk
from kjo_django.operations.dead_letters import DeadLetterFilter
from tests.acceptance.engine import ALIAS, Engine, Servers
from tests.acceptance.test_redis_streams import StreamEngine
from tests.factories import DeadLetterFactory
from tests.ledger import jobs

SHARE = 20
"""Rows that the test itself stores at once: MariaDB takes 16 MB in one statement, in which PyMySQL
writes each byte of a payload as two digits."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def streams(redis_server: Any, database_url: str, tmp_path: Path) -> Iterator[StreamEngine]:
    with StreamEngine(Servers(database_url, redis=redis_server.url), tmp_path) as engine:
        yield engine


@pytest.fixture(
    params=[
        "embedded",
        pytest.param("postgres", marks=pytest.mark.postgres),
        pytest.param("real", marks=[pytest.mark.kafka, pytest.mark.redis, pytest.mark.postgres]),
        pytest.param("streams", marks=[pytest.mark.redis, pytest.mark.postgres]),
    ]
)
def every_transport(request: pytest.FixtureRequest) -> Engine:
    """Each transport that keeps its records elsewhere than in memory."""
    return request.getfixturevalue(request.param)


def drain(engine: Engine, growth: int, timeout: float = 300) -> None:
    """Run a worker, and its relay, until nothing is left."""
    worker = engine.run(
        *("tests.acceptance.in_little_memory", str(growth)),
        *("kjo_consume", "ledger", "--status-interval", "0", "--drain"),
    )
    assert worker.wait(timeout) == 0, worker.log_tail()
    print(re.findall("address space.*", worker.log))
    assert "MemoryError" not in worker.log


@pytest.mark.parametrize(
    ("count", "size", "growth"),
    [
        (1_100, 200_000, 192),
        pytest.param(20_000, 200_000, 256, marks=pytest.mark.long),
        pytest.param(400, 899_000, 256, marks=pytest.mark.long),
    ],
)
def test_jobs_with_large_payloads_are_drained_in_little_memory(
    every_transport: Engine, count: int, size: int, growth: int
) -> None:
    # Given
    engine, content = every_transport, "x" * size
    engine.create_topics()
    names = [f"job-{number}" for number in range(count)]
    for start in range(0, count, SHARE):
        share = names[start : start + SHARE]
        jobs.weigh.enqueue_many({"job": name, "content": content} for name in share)
    # When
    drain(engine, growth, 300 if count < 10_000 else 3_000)
    # Then
    engine.assert_each_ran_once(names)
    assert set(engine.entries.values_list("note", flat=True)) == {str(size)}


@pytest.mark.parametrize("action", ["replay_letters", "discard_letters"])
@pytest.mark.parametrize(
    ("engine", "count", "growth"),
    [
        ("embedded", 700, 64),
        pytest.param("postgres", 100_000, 256, marks=[pytest.mark.long, pytest.mark.postgres]),
    ],
)
def test_many_large_dead_letters_are_dealt_with_in_little_memory(
    request: pytest.FixtureRequest, engine: str, count: int, growth: int, action: str
) -> None:
    # Given
    any_engine: Engine = request.getfixturevalue(engine)
    # By itself a worker may hold 64 MB of values, which it does if it is slower than the replay.
    share = growth * 1024**2 // 8
    any_engine.configure(
        OPERATIONS_QUEUE="ledger", MAX_OUTSTANDING_BYTES=share, RELAY_BATCH_BYTES=share // 2
    )
    content = "x" * 100_000
    for start in range(0, count, SHARE):
        letters = [
            DeadLetterFactory.build(
                queue="ledger",
                topic=any_engine.topic,
                handler=jobs.weigh.name,
                message_id=f"message-{number}",
                value=json.dumps({"job": f"job-{number}", "content": content}).encode(),
            )
            for number in range(start, min(count, start + SHARE))
        ]
        DeadLetter.objects.using(ALIAS).bulk_create(letters)
    # When
    inputs = {"note": "too large"} if action == "discard_letters" else {}
    start_bulk(action, DeadLetterFilter(queue="ledger"), actor="test", **inputs)
    drain(any_engine, growth, 300 if count < 10_000 else 3_000)
    # Then
    closed = DeadLetterState.REPLAYED if action == "replay_letters" else DeadLetterState.DISCARDED
    assert any_engine.dead_letters.filter(state=closed).count() == count
    if action == "replay_letters":
        any_engine.assert_each_ran_once(f"job-{number}" for number in range(count))
