"""Tasks of the tests. Imported while ``TASKS`` names our backend."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from kjo_django.contrib.tasks import task
from tests.ledger.models import Entry
from tests.waiting import PATIENCE

no_task = len
seen: list[Any] = []
may_end = threading.Event()


@task
def add(a: int, b: int = 1) -> int:
    return a + b


@task()
def write(job: str) -> None:
    Entry.objects.create(job=job)


@task(max_attempts=3)
def write_and_fail(job: str) -> None:
    Entry.objects.create(job=job)
    raise ValueError(f"no {job}")


@task
async def write_async(job: str) -> str:
    entry = await Entry.objects.acreate(job=job)
    return str(entry.job)


@task(takes_context=True)
def look(context: Any, *, fail_until: int = 1) -> list[Any]:
    if context.attempt < fail_until:
        raise RuntimeError("not yet")
    return [context.attempt, context.task_result.id, context.job.idempotency_key]


@task(max_attempts=1, timeout=0.05)
async def hang() -> None:
    import asyncio

    await asyncio.sleep(30)


@task
def wait() -> None:
    may_end.wait(PATIENCE)


@task(backend="plain")
def note(value: int) -> None:
    from django.db import connection

    seen.append((value, connection.in_atomic_block))


@task(queue_name="mails", key=lambda customer: f"c-{customer}", expires=timedelta(hours=1))
def mail(customer: int) -> int:
    return customer


@task(max_attempts=1)
def returns_what_is_no_json() -> object:
    return object()


@task(backend="immediate")
def elsewhere(number: int) -> int:
    return 2 * number


def was_a_task() -> None: ...
