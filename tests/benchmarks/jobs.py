"""Handlers that are only measured; those of the ledger are measured too."""

from __future__ import annotations

import asyncio
import time

from kjo_django import BatchItem, job
from tests.ledger.models import Entry

SLEEP_SECONDS = 0.005
ASYNC_SECONDS = 0.1


@job(queue="ledger", atomic=False)
def no_op_outside() -> None:
    """Do nothing, outside the pipeline's transaction."""


@job(queue="ledger")
def sleep() -> None:
    """Take five milliseconds without using the processor."""
    time.sleep(SLEEP_SECONDS)


@job(queue="ledger", batch=500)
def write_batch(batch: list[BatchItem]) -> None:
    """Add an entry for each job with one INSERT."""
    Entry.objects.bulk_create([Entry(job=item.payload["job"]) for item in batch])


@job(queue="ledger", database_only=True)
def write_only(job: str) -> None:
    """Add an entry, and promise that this is all."""
    Entry.objects.create(job=job)


class Flight:
    """How many coroutines run at this moment, and the most there were."""

    now = 0
    peak = 0


@job(queue="ledger", atomic=False)
async def sleep_async() -> None:
    """Wait for a tenth of a second, as for an answer over HTTP."""
    Flight.now += 1
    Flight.peak = max(Flight.peak, Flight.now)
    try:
        await asyncio.sleep(ASYNC_SECONDS)
    finally:
        Flight.now -= 1
