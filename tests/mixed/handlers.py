"""What the workers of a mixed load run. Imported by its processes only (`tests.mixed.manage`).

Every handler adds one entry to the ledger, named after its piece of work, and otherwise behaves as
its payload says: ``fails`` begins go wrong in the manner of ``how``, then ``end`` decides.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from datetime import timedelta
from typing import Any

from django.db import OperationalError, connection
from django.dispatch import receiver

from kjo_django import (
    AbstractStreamConsumer,
    AbstractStreamProducer,
    BaseEvent,
    BatchItem,
    DlqConfig,
    ModelConsumer,
    ModelProducer,
    PermanentError,
    ProcessingStatus,
    Queue,
    Retry,
    event_handler,
    job,
    kdlq_handler,
    signals,
)
from kjo_django.exceptions import RateLimitExceededError
from tests.adversaries import CHANGES, SPOILS
from tests.items.models import Item
from tests.ledger.counting import counted_or_repeated
from tests.ledger.models import Entry
from tests.mixed.names import RUN, group, job_queue, topic
from tests.mixed.plan import FOREVER, RATE, SLOTS
from tests.mixed.trace import begun, identity_in, note

MANY = 60
"""Attempts of work that is to complete: workers killed under it spend some, not by its fault."""
run = os.environ[RUN]


# --- Behaviour ------------------------------------------------------------------------------------


def misbehave(how: str) -> None:
    """Fail in one of the ways a handler can."""
    if how == "error":
        raise RuntimeError("as asked")
    if how == "retry":
        raise Retry("as asked", delay=timedelta(seconds=0.1))
    if how == "pause":
        raise RateLimitExceededError("as asked")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "exit":
        raise SystemExit(3)
    if how == "locked":
        raise OperationalError("as asked")
    if how == "changes":
        change, _ = next(iter(CHANGES[connection.vendor].values()))
        return change()
    if how == "spoils":
        return SPOILS[connection.vendor]["temporary table"]()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # sleep: until the signal has come
    raise AssertionError(how)


def behave(name: str, fails: int = 0, how: str = "error", end: str = "complete") -> None:
    """Begin, and raise if this time is not the one that goes well."""
    if begun(name) <= fails:
        misbehave(how)
        if fails == FOREVER:  # its session is not all that goes wrong
            raise RuntimeError("as asked")
    if end == "refuse":
        raise PermanentError("as asked")


# --- Jobs -----------------------------------------------------------------------------------------


@job(queue=job_queue("work"), key="key", max_attempts=MANY)
def write(job: str, key: str = "", ms: float = 0, **how: Any) -> None:
    """The usual kind: within the transaction, in the order of its key if it has one."""
    Entry.objects.create(job=job, note=key)
    time.sleep(ms / 1000)  # sleep: as long as the plan says
    behave(job, **how)


@job(queue=job_queue("work"), database_only=True, max_attempts=MANY)
def write_only(job: str, **how: Any) -> None:
    """Without a savepoint."""
    Entry.objects.create(job=job)
    behave(job, **how)


@job(queue=job_queue("work"), atomic=False, max_attempts=MANY)
def write_outside(job: str, ms: float = 0, **how: Any) -> None:
    """Outside the transaction: its entry comes last, and again after a crash in between."""
    behave(job, **how)
    time.sleep(ms / 1000)  # sleep: as long as the plan says
    Entry.objects.create(job=job)


@job(queue=job_queue("work"), max_attempts=MANY)
async def write_async(job: str, **how: Any) -> None:
    """A coroutine within the transaction."""
    await Entry.objects.acreate(job=job)
    behave(job, **how)


@job(queue=job_queue("work"), atomic=False, max_attempts=MANY)
async def write_async_outside(job: str, ms: float = 0, **how: Any) -> None:
    """A coroutine outside it, beside others."""
    behave(job, **how)
    await asyncio.sleep(ms / 1000)
    await Entry.objects.acreate(job=job)


@job(queue=job_queue("work"), batch=8, max_attempts=MANY)
def write_batch(batch: list[BatchItem]) -> None:
    """Many in one call; each may fail for itself."""
    for item in batch:
        try:
            behave(item.payload["job"], **item.payload.get("given", {}))
        except Exception as error:
            item.fail(error)
        else:
            Entry.objects.create(job=item.payload["job"])


@job(queue=job_queue("slow"), atomic=False, max_attempts=MANY)
def write_slowly(job: str, ms: float = 0, **how: Any) -> None:
    """One of a backlog."""
    behave(job, **how)
    time.sleep(ms / 1000)  # sleep: as long as the plan says
    Entry.objects.create(job=job)


@job(queue=job_queue("hot"), key="key", atomic=False, max_attempts=MANY)
def write_hot(job: str, key: str, ms: float = 0, **how: Any) -> None:
    """One of many of the same key."""
    behave(job, **how)
    time.sleep(ms / 1000)  # sleep: as long as the plan says
    Entry.objects.create(job=job, note=key)


@job(queue=job_queue("long"), atomic=False, max_attempts=MANY)
def write_long(job: str, ms: float = 0, **how: Any) -> None:
    """Keeps a lane for seconds."""
    behave(job, **how)
    time.sleep(ms / 1000)  # sleep: as long as the plan says
    Entry.objects.create(job=job)


@job(queue=job_queue("uneven"), atomic=False, max_attempts=MANY)
def write_unevenly(job: str, ms: float = 0, **how: Any) -> None:
    """Quick, but for one of many, which takes a thousand times as long."""
    behave(job, **how)
    time.sleep(ms / 1000)  # sleep: as long as the plan says
    Entry.objects.create(job=job)


@job(queue=job_queue("idle"), max_attempts=MANY)
def probe(job: str, **how: Any) -> None:
    """The only job of its queue: it must start soon, whatever others do."""
    behave(job, **how)
    Entry.objects.create(job=job)


@job(queue=job_queue("paused"), max_attempts=MANY)
def write_paused(job: str, **how: Any) -> None:
    """Meets a limit that pauses its partition."""
    Entry.objects.create(job=job)
    behave(job, **how)


@job(queue=job_queue("killers"), max_attempts=MANY)
def write_or_kill(job: str, **how: Any) -> None:
    """Takes its worker down."""
    Entry.objects.create(job=job)
    behave(job, **how)


@job(queue=job_queue("large"), max_attempts=MANY)
def write_large(job: str, filling: str = "", **how: Any) -> None:
    """Some of these are more than their topic takes."""
    Entry.objects.create(job=job)
    behave(job, **how)


@job(queue=job_queue("limited"), rate=f"{RATE}/s", rate_key="key", max_attempts=MANY)
def write_rated(job: str, key: str, **how: Any) -> None:
    """One of more than may start."""
    if (moments := counted_or_repeated()) is not None:
        note("counted", job, *moments)
    else:
        note("repeated", job, time.monotonic())
    Entry.objects.create(job=job)
    behave(job, **how)


@job(queue=job_queue("slots"), concurrency=SLOTS, atomic=False, max_attempts=MANY)
def write_in_slot(job: str, ms: float = 0, **how: Any) -> None:
    """Notes when it begins and ends, or is interrupted."""
    try:
        behave(job, **how)
        time.sleep(ms / 1000)  # sleep: as long as the plan says
        Entry.objects.create(job=job)
    finally:
        note("ended", job)


@job(
    queue=job_queue("unique"),
    unique_for=timedelta(hours=1),
    unique_by=("job",),
    max_attempts=MANY,
)
def write_once(job: str, **how: Any) -> None:
    """Enqueued several times, to run once."""
    Entry.objects.create(job=job)
    behave(job, **how)


@job(queue=job_queue("flows"), max_attempts=MANY)
def write_step(job: str, **how: Any) -> None:
    """A step of a workflow."""
    Entry.objects.create(job=job)
    behave(job, **how)


tasks = Queue(job_queue("tasks"), max_attempts=MANY)


@tasks.handler
def write_task(given: Any) -> str:
    """A job of a reliable queue, once per id."""
    Entry.objects.create(job=given.payload["job"])
    behave(given.payload["job"], **given.payload.get("given", {}))
    return str(given.id)


# --- Messages of others ---------------------------------------------------------------------------

EVENTS = topic("events", run)


@event_handler("MIXED", topic=EVENTS, max_attempts=MANY)
def follow(event: BaseEvent) -> None:
    """An event, once."""
    Entry.objects.create(job=event.id)
    behave(event.id, **event.data.get("given", {}))


KDLQ = topic("kdlq", run)


@kdlq_handler(
    "mixed",
    topic=KDLQ,
    config=DlqConfig(
        f"{KDLQ}-dlq",
        max_redeliveries=MANY,
        max_kills=0,
        redelivery_delay=timedelta(milliseconds=200),
        max_redelivery_delay=timedelta(seconds=1),
        # One query may be broken, of a record that is alone in its transaction.
        default_on_exception="redeliver",
    ),
)
def process(record: Any) -> ProcessingStatus:
    """A record of a topic shared with KDLQ's Java library."""
    payload = json.loads(record.value)
    given = payload.get("given", {})
    Entry.objects.create(job=payload["job"])
    if begun(payload["job"]) <= given.get("fails", 0):
        return ProcessingStatus.MUST_BE_REDELIVERED
    return ProcessingStatus.ERROR if given.get("end") == "refuse" else ProcessingStatus.OK


STREAM = topic("stream", run)


class StreamProducer(AbstractStreamProducer[dict[str, Any]]):
    """Sends tasks whose fields are texts."""

    task_display_name = "mixed task"
    stream_key = STREAM

    def build_message(self, payload: dict[str, Any]) -> dict[str, Any]:
        return {"job": payload["job"], "given": json.dumps(payload.get("given", {}))}

    def payload_identifier(self, payload: dict[str, Any]) -> str:
        return str(payload["job"])

    def on_send_failed(self, payload: dict[str, Any], error: str) -> None:
        raise OperationalError(error)


class StreamConsumer(AbstractStreamConsumer[dict[str, Any]]):
    """Runs them."""

    task_display_name = "mixed task"
    stream_key = STREAM
    group_name = group(run)
    max_retry_count = MANY

    def parse_payload(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"job": fields["job"], "given": json.loads(fields["given"])}

    def payload_identifier(self, payload: dict[str, Any]) -> str:
        return str(payload["job"])

    def mark_processing(self, payload: dict[str, Any]) -> None:
        behave(payload["job"], **payload["given"])

    def process_business(self, payload: dict[str, Any]) -> None:
        Entry.objects.create(job=payload["job"])

    def mark_completed(self, payload: dict[str, Any]) -> None:
        """The ledger says it."""

    def mark_failed(self, payload: dict[str, Any], error: str) -> None:
        """So does the dead letter."""


ITEMS = topic("items", run)


class ItemProducer(ModelProducer):
    """Polls items."""

    model = Item
    queue = ITEMS
    hash_fields = ("email", "body")


class ItemConsumer(ModelConsumer):
    """Processes them; their own state says what is done."""

    topic = ITEMS
    consumer_group = group(run)
    key_prefix = "MIXEDITEM"
    model = Item
    key_field = "email"
    completed_at_field = "completed_at"
    failed_at_field = "failed_at"
    max_attempts = MANY

    def process(self, message: dict[str, Any]) -> None:
        name = message["data"]["email"]
        Entry.objects.create(job=name)
        behave(name, **json.loads(message["data"]["body"]))

    def on_success(self, item_id: str) -> None:
        note("completed", f"item:{item_id}")

    def on_failed(self, item_id: str, error: BaseException | None) -> None:
        note("failed", f"item:{item_id}")


# --- What signals tell ----------------------------------------------------------------------------


@receiver(signals.job_completed)
def on_completed(job_id: str | None, **facts: Any) -> None:
    note("completed", job_id)


@receiver(signals.job_failed)
def on_failed(job_id: str | None, **facts: Any) -> None:
    note("failed", job_id)


@receiver(signals.message_dead_lettered)
def on_dead_letter(dead_letter_id: Any, **facts: Any) -> None:
    note("dead", dead_letter_id)


@receiver(signals.job_cancelled)
def on_cancelled(job_id: str | None, **facts: Any) -> None:
    note("cancelled", job_id)


@receiver(signals.message_processed)
def on_processed(record: Any, **facts: Any) -> None:
    note("processed", identity_in(record.value))


@receiver(signals.message_skipped)
def on_skipped(record: Any, **facts: Any) -> None:
    note("processed", identity_in(record.value))
