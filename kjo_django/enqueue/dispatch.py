"""Handing a job's message to its transport: the one place that builds it, and that publishes.

On a transactional transport the message is written with the row, in the caller's transaction. On
any other the row waits as ``pending`` (or ``failing``) for the relay.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.utils import timezone

from kjo_django import tracing
from kjo_django.conf import QueueConf, get_settings
from kjo_django.enqueue.wakeups import RELAY_CHANNEL, after_commit, topic_channel
from kjo_django.messages import headers as names
from kjo_django.messages.envelope import job_headers
from kjo_django.models import Job, transition
from kjo_django.models.job import message_id, origin_of
from kjo_django.runtime import get_transport, jobs_database, transport_class
from kjo_django.states import JobState
from kjo_django.store import Store, store_for
from kjo_django.store.rows import DueJob, Publication
from kjo_django.transports.base import OutgoingRecord, Published, Transport

OUTGOING = "outgoing"
"""The queue of records for topics that no queue is declared for, on the default transport."""


def is_transactional(queue: QueueConf) -> bool:
    """Return whether the queue's transport publishes inside the caller's transaction."""
    return transport_class(queue.transport).capabilities.transactional


def channel_of(queue: QueueConf) -> str:
    """Return whom to wake for a job of this queue: its consumers, or the relay before them."""
    return topic_channel(queue.topic) if is_transactional(queue) else RELAY_CHANNEL


def publish(transport: Transport, records: Sequence[OutgoingRecord]) -> list[Published]:
    """Publish records and return the transport's answers; a tracer gets a span around it.

    Whatever sends a record calls this. On a transactional transport the record is a row of the
    caller's transaction, and there is no span but the one of what stored it.
    """
    if tracing.tracer is None or transport.capabilities.transactional:
        return transport.publish(records)
    with tracing.tracer.publishing(transport.alias, records) as traced:
        return transport.publish(traced)


def record_of(
    job: Job | DueJob,
    queue: QueueConf,
    available_at: datetime | None = None,
    *,
    service: str | None = None,
) -> OutgoingRecord:
    """Return the message of a job's next attempt; of a record for others, that record.

    :param service: the name of this service; by default that of the settings.
    """
    if job.destination:
        headers = names.from_row(job.headers)
        raw_key = headers.pop(names.RAW_KEY, None)
        is_tombstone = headers.pop(names.NO_VALUE, None) is not None
        if names.REDELIVERY in headers:
            # A requeue is a wish to have it handled again.
            headers[names.REDELIVERY] = message_id(str(job.id), job.generation).encode()
        return OutgoingRecord(
            topic=job.destination,
            key=raw_key if raw_key is not None else job.key.encode() or None,
            value=None if is_tombstone else bytes(job.payload),
            headers=headers,
            available_at=available_at,
        )
    id = str(job.id)
    # Without a key of its own a job is its own key: partitions fill evenly, nothing waits.
    key: bytes | None = (job.key or id).encode()
    value: bytes | None = bytes(job.payload)
    headers = job_headers(
        id=message_id(origin_of(job.headers) or id, job.generation),
        type=job.handler,
        job_id=id,
        service=get_settings().service_name if service is None else service,
        generation=job.generation,
        attempt=job.attempts + 1,
        content_type=job.content_type,
        extra=job.headers,
    )
    if job.headers:
        # A message nobody enqueued here keeps the key it came with.
        key = headers.pop(names.RAW_KEY, key)
        key = key if headers.pop(names.NO_KEY, None) is None else None
        value = value if headers.pop(names.NO_VALUE, None) is None else None
    return OutgoingRecord(queue.topic, value, key, headers, available_at)


def initial_state(queue: QueueConf) -> JobState:
    """Return the state a job is stored in: on a transactional transport it is queued at once."""
    return JobState.QUEUED if is_transactional(queue) else JobState.PENDING


def dispatch_jobs(jobs: Sequence[Job], queue: QueueConf) -> None:
    """Send stored jobs of one queue on their way, inside the caller's transaction.

    Transactional transport: publish their messages now. Otherwise: wake the relay on commit.
    """
    using = jobs_database()
    if not is_transactional(queue):
        after_commit(using, RELAY_CHANNEL)
        return
    publish(
        get_transport(queue.transport), [record_of(job, queue, job.available_at) for job in jobs]
    )
    forwarded = [Publication(job, job.destination, None, None) for job in jobs if job.destination]
    if forwarded:
        record_forwarded(store_for(using), forwarded, timezone.now())
    for topic in {job.destination or queue.topic for job in jobs} or {queue.topic}:
        after_commit(using, topic_channel(topic))


def is_waited_for(job: Job | DueJob) -> bool:
    """Whether others of its key wait until a record has been handled; that completes its row."""
    return names.PARKED_ROW in (job.headers or {})


def record_forwarded(store: Store, published: Sequence[Publication], now: datetime) -> None:
    """Record that records for others have been published.

    That completes the row of a record; of a record that others of its key wait for, the row becomes
    queued instead.
    """
    store.complete_forwarded([one for one in published if not is_waited_for(one.job)], now)
    for job in [one.job for one in published if is_waited_for(one.job)]:
        rows = Job.objects.using(store.alias).at(job.id, job.generation).exclude(destination="")
        transition("publish", rows, topic=job.destination, queued_at=now)
