"""Coroutines that a synchronous handler runs, and what they ask of this package.

In the default tier: rules, each database once by ``real_database``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.db.transaction import TransactionManagementError

from kjo_django import EventIdempotencyService, Queue, chain
from kjo_django.enqueue.handle import JobHandle
from kjo_django.models import Job, JobFailure
from kjo_django.patterns.events.event import apublish_event
from kjo_django.workflows.workflow_handle import WorkflowHandle
from tests.ledger import jobs as ledger
from tests.unit.deliveries import as_job, entries
from tests.unit.engine.bench import both, settled

ID = "0199c2a4-0000-7000-8000-000000000001"
CALLS: dict[str, Callable[[], Awaitable[Any]]] = {
    "aenqueue": lambda: ledger.write.aenqueue(job="another"),
    "aenqueue of a workflow": lambda: chain(ledger.write.step(job="another")).aenqueue(),
    "astatus": lambda: JobHandle(ID).astatus(),
    "asnapshot of a workflow": lambda: WorkflowHandle(UUID(ID)).asnapshot(),
    "await_": lambda: JobHandle(ID).await_(timeout=1),
    "await_ of a workflow": lambda: WorkflowHandle(UUID(ID)).await_(timeout=1),
    "aenqueue of a queue": lambda: Queue("ledger").aenqueue("1", {}),
    "acancel of a queue": lambda: Queue("ledger").acancel("1"),
    "apublish_event": lambda: apublish_event("orders", {"event_type": "X"}),
    "amark_event_processed": lambda: EventIdempotencyService().amark_event_processed("1", "X"),
}
"""What coroutines ask of the database."""


@both
@pytest.mark.parametrize("fails", [False, True], ids=["that completes", "that fails"])
def test_what_a_coroutine_enqueues_is_part_of_the_handlers_transaction(bench, fails):
    """FINDINGS 2.10 g: by async_to_sync, which runs it in the handler's thread."""

    def work():
        async_to_sync(ledger.write.aenqueue)(job="another")
        assert Job.objects.count() == 2
        if fails:
            raise ValueError("undo it")

    as_job(work, max_attempts=1).enqueue()
    bench.run_until_done()
    assert entries() == ({} if fails else {"another": 1})
    assert Job.objects.count() == (1 if fails else 2)
    assert settled(bench)


@both
def test_a_loop_of_the_handlers_own_is_refused_before_anything_is_stored(bench):
    """FINDINGS 2.10 g: with asyncio.run the ORM's thread, and so its transaction, is another."""

    def work():
        asyncio.run(ledger.write.aenqueue(job="another"))

    as_job(work, max_attempts=1).enqueue()
    bench.run()
    failure = JobFailure.objects.get()
    assert failure.error_type.endswith("TransactionManagementError")
    assert "async_to_sync" in failure.error
    assert (Job.objects.count(), settled(bench)) == (1, True)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", CALLS)
def test_no_coroutine_asks_the_database_beside_the_transaction_of_its_thread(name):
    async def ask() -> Any:
        return await CALLS[name]()

    with (
        pytest.raises(TransactionManagementError, match="async_to_sync"),
        transaction.atomic(),
    ):
        asyncio.run(ask())
    assert not Job.objects.exists()


@pytest.mark.usefixtures("sqlite_file")
def test_a_transaction_without_atomic_is_one_too():
    transaction.set_autocommit(False)
    try:
        with pytest.raises(TransactionManagementError, match="async_to_sync"):
            asyncio.run(ledger.write.aenqueue(job="another"))
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


def test_a_handler_outside_a_transaction_may_run_a_loop_of_its_own(bench):
    def work():
        asyncio.run(ledger.write.aenqueue(job="another"))

    as_job(work, atomic=False).enqueue()
    bench.run_until_done()
    assert entries() == {"another": 1}
