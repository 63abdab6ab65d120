"""Handing a job's message to its transport: the one place that builds it.

On a transactional transport the message is written with the row, in the caller's transaction. On
any other the row waits as ``pending`` (or ``failing``) for the relay.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.db import router

from kjo_django.backends import get_transport, transport_class
from kjo_django.conf import QueueConf, get_settings
from kjo_django.messages.envelope import job_headers
from kjo_django.models import Job
from kjo_django.producer.wakeups import RELAY_CHANNEL, after_commit, topic_channel
from kjo_django.states import JobState
from kjo_django.transports.base import OutgoingRecord


def jobs_database() -> str:
    """Return the alias of the database that holds the jobs."""
    return get_settings().database or router.db_for_write(Job)


def is_transactional(queue: QueueConf) -> bool:
    """Return whether the queue's transport publishes inside the caller's transaction."""
    return transport_class(queue.transport).capabilities.transactional


def channel_of(queue: QueueConf) -> str:
    """Return whom to wake for a job of this queue: its consumers, or the relay before them."""
    return topic_channel(queue.topic) if is_transactional(queue) else RELAY_CHANNEL


def record_of(job: Job, queue: QueueConf, available_at: datetime | None = None) -> OutgoingRecord:
    """Build the message of a job's next attempt."""
    return OutgoingRecord(
        topic=queue.topic,
        # Without a key of its own a job is its own key: partitions fill evenly, nothing waits.
        key=(job.key or str(job.pk)).encode(),
        value=bytes(job.payload),
        headers=job_headers(
            id=job.message_id,
            type=job.handler,
            job_id=str(job.pk),
            service=get_settings().service_name,
            generation=job.generation,
            attempt=job.attempts + 1,
            content_type=job.content_type,
            extra=job.headers,
        ),
        available_at=available_at,
    )


def initial_state(queue: QueueConf) -> JobState:
    """Return the state a job is stored in: on a transactional transport it is queued at once."""
    return JobState.QUEUED if is_transactional(queue) else JobState.PENDING


def hand_over(jobs: Sequence[Job], queue: QueueConf) -> None:
    """Send stored jobs of one queue on their way, inside the caller's transaction.

    Transactional transport: publish their messages now. Otherwise: wake the relay on commit.
    """
    if is_transactional(queue):
        get_transport(queue.transport).publish(
            [record_of(job, queue, job.available_at) for job in jobs]
        )
    after_commit(jobs_database(), channel_of(queue))
