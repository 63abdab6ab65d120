"""Handlers by hand: each gets the payloads of a whole batch, and a cursor or connection.

Time spent waiting is spent in threads or coroutines, as many as ours has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from tests.benchmarks.jobs import ASYNC_SECONDS, SLEEP_SECONDS

try:  # as ours does
    import orjson as _json
except ImportError:
    import json as _json  # type: ignore[no-redef]

loads = _json.loads

LANES = 4
"""Lanes of a worker by default."""

Payloads = list[dict[str, Any]]
Handlers = dict[str, Callable[[Any, Payloads], None]]


def no_op(database: Any, payloads: Payloads) -> None:
    """Call a function that does nothing for each."""
    for payload in payloads:
        _nothing(**payload)


def _nothing() -> None:
    pass


def sleep(database: Any, payloads: Payloads) -> None:
    """Sleep for each, as many at a time as there are lanes."""
    list(_threads().map(time.sleep, [SLEEP_SECONDS] * len(payloads)))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(LANES)


def sleep_async(database: Any, payloads: Payloads) -> None:
    """Wait for all at once."""
    asyncio.run(_wait(len(payloads)))


async def _wait(count: int) -> None:
    await asyncio.gather(*(asyncio.sleep(ASYNC_SECONDS) for _ in range(count)))


def create(database: Any, payloads: Payloads) -> None:
    """Add an entry through Django's ORM for each; in the transaction of the default connection."""
    from tests.ledger.models import Entry

    for payload in payloads:
        Entry.objects.create(**payload)


COMMON: Handlers = {
    "ledger.no_op": no_op,
    "benchmarks.no_op_outside": no_op,
    "benchmarks.sleep": sleep,
    "benchmarks.sleep_async": sleep_async,
}
