"""Rescue of queued jobs whose message is gone.

A message is acknowledged after its job's outcome is durable. But topics are deleted, retentions
end, offsets are reset by hand and groups renamed. A job that has been queued for ``RESCUE_AFTER``,
that no worker holds and whose message the group has passed is published again, with its generation
and attempt. If the message was not gone, the second one is dropped as a duplicate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from django.db import transaction
from django.db.models import Q

from kjo_django import signals, states
from kjo_django.clock import CLOCK
from kjo_django.conf import QueueConf, get_settings
from kjo_django.enqueue import storing
from kjo_django.exceptions import PublishError
from kjo_django.ids import ago, uuid7_floor
from kjo_django.logs import get_logger
from kjo_django.models import Job, transition
from kjo_django.operations.audit import send_signals
from kjo_django.operations.jobs import lock_jobs, send
from kjo_django.operations.queues import paused_queues, queues_here
from kjo_django.operations.rows import chunks
from kjo_django.runtime import get_transport, jobs_database
from kjo_django.states import JobState

logger = get_logger("kjo_django")

PATIENCE = 10
"""If nobody knows whether a message still waits, a job is published again after so many times
``RESCUE_AFTER``. A shorter time would double a backlog."""


@dataclass(slots=True)
class RescueReport:
    """The counts of a rescue."""

    republished: int = 0
    busy: int = 0
    """Jobs that are being processed."""
    unreachable: dict[str, str] = field(default_factory=dict)
    """Queues whose transport could not be reached, and the errors."""


def rescue(queues: Iterable[str] | None = None, *, limit: int = 10_000) -> RescueReport:
    """Publish the queued jobs whose message is gone; paused queues are left out.

    :param limit: republish at most so many in one call.
    """
    report = RescueReport()
    names = queues_here() if queues is None else queues
    for name in sorted(set(names) - paused_queues()):
        queue = get_settings().queue(name)
        try:
            _rescue_queue(queue, limit, report)
        except PublishError as error:
            report.unreachable[name] = str(error)
    if report.republished:
        logger.warning("Rescued %d queued jobs whose message was gone", report.republished)
    return report


def _rescue_queue(queue: QueueConf, limit: int, report: RescueReport) -> None:
    conf, using, now = get_settings(), jobs_database(), CLOCK.now()
    cutoff = ago(now, conf.rescue_after)
    # A transactional transport stores a message with its job, and no relay publishes the job. But
    # the queue may have had another transport when the job was stored.
    unsent = states.AWAITING_PUBLISH if storing.is_transactional(queue) else ()
    stale = Job.objects.using(using).filter(
        Q(queued_at__lt=cutoff) | Q(queued_at=None),
        queue=queue.name,
        state__in=(JobState.QUEUED, *unsent),
        pk__lt=uuid7_floor(cutoff),
        available_at__lt=cutoff,
    )
    if not stale.exists():
        return  # the usual case; the transport is not asked
    gone = _gone(queue, now)
    for keys in chunks(stale.filter(gone)):
        if report.republished >= limit:
            return
        with transaction.atomic(using=using):
            free, busy, _ = lock_jobs(keys[: limit - report.republished])
            # Another worker may have rescued a job this moment: only stale ones count.
            rows = stale.filter(pk__in=[job.pk for job in free])
            ids = set(rows.values_list("pk", flat=True))
            count = transition(
                "republish",
                rows,
                state=storing.initial_state(queue),
                queued_at=now if storing.is_transactional(queue) else None,
                topic="",
                partition=None,
                offset=None,
            )
            if unsent:  # rows that are left; the others have been queued this moment
                count += transition("publish", rows, queued_at=now)
            if count:
                send(sorted(ids), queue)
        report.republished += count
        for job in free:
            if job.pk in ids:
                send_signals(signals.job_stalled, [job], attempt=job.attempts + 1)
        report.busy += len(busy)


def _gone(queue: QueueConf, now: datetime) -> Q:
    """Return the condition on stale jobs whose message no longer waits for the queue's group."""
    transport = get_transport(queue.transport)
    offsets = transport.offsets(queue.topics, queue.consumer_group)
    if not any(where.lag for where in offsets.values()):
        return Q(pk__isnull=False)  # nothing waits, or nobody knows: duplicates are dropped
    passed, ahead = Q(pk__in=()), Q(pk__in=())
    for partition, where in offsets.items():
        place = Q(topic=partition.topic, partition=partition.partition)
        if not where.lag:
            passed |= place
        elif where.committed is not None:
            passed |= place & Q(offset__lt=where.committed)
            if where.end is not None:
                ahead |= place & Q(offset__gte=where.committed, offset__lt=where.end)
    # Jobs that wait very long, also those without a recorded offset; not those whose message the
    # group has before it, or a backlog of this length would be doubled, and doubled again.
    long_ago = ago(now, PATIENCE * (now - ago(now, get_settings().rescue_after)))
    waited_long = Q(queued_at__lt=long_ago) | Q(queued_at=None)
    return passed | (waited_long & Q(available_at__lt=long_ago) & ~ahead)
