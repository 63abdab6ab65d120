"""Noting how far behind the queues of a worker are, for the charts."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone

from kjo_django.backends import get_transport
from kjo_django.conf import QueueConf, get_settings
from kjo_django.exceptions import PublishError
from kjo_django.models import MetricBucket, MetricRollup
from kjo_django.store.transactions import jobs_database
from kjo_django.worker.duty import Duty

logger = logging.getLogger("kjo_django")

SHARE = 20
"""Asking takes at most one part of so many of the time, however long the answer takes."""
_LEASE = "LAG:"
_NAMESPACE = uuid.UUID("5a0b0a52-6b1f-4b8e-9e55-2f1f3a8b9c11")


class LagWatch(Duty):
    """Writes each queue's lag, group-wide, into the aggregates of now.

    A thread of its own, since a broker that is away keeps an answer waiting: neither a poller nor a
    heartbeat may wait with it. For each queue one worker asks, and whoever does writes the same
    row, so that screens may add rows up.
    """

    name = "lag"

    def __init__(self, token: str, queues: Sequence[QueueConf]) -> None:
        super().__init__(token)
        self._queues = {_LEASE + queue.name: queue for queue in queues}
        self.leases = self._queues.keys()
        self._took = 0.0

    def pause(self) -> timedelta:
        """Three heartbeats, or longer where answers take long; to ask in vain loads nobody,
        and the lag after an outage is what everybody looks for."""
        return max(3 * get_settings().heartbeat_interval, timedelta(seconds=SHARE * self._took))

    def work(self, held: list[str]) -> None:
        """Ask for the lag of each queue and write it down."""
        self._took = 0.0
        away: set[str] = set()
        for name in held:
            queue = self._queues[name]
            if queue.transport in away or self._stopping.is_set():
                continue
            began = time.monotonic()
            try:
                lag = get_transport(queue.transport).lag([queue.topic], queue.consumer_group)
            except PublishError as error:
                away.add(queue.transport)
                logger.debug("The lag of %s is not known: %s", queue.name, error)
                continue
            note_lag(queue.name, sum(lag.values()))
            self._took += time.monotonic() - began


def note_lag(queue: str, lag: int) -> None:
    """Write a queue's lag into its minute, and into what the minute is part of."""
    using = jobs_database()
    minute = timezone.now().replace(second=0, microsecond=0)
    _set(MetricBucket.objects.using(using), lag, minute=minute, queue=queue)
    for minutes in MetricRollup.LENGTHS:
        start = minute.replace(minute=minute.minute // minutes * minutes)
        _set(MetricRollup.objects.using(using), lag, minutes=minutes, minute=start, queue=queue)


def _set(rows: QuerySet[Any], lag: int, **which: Any) -> None:
    which |= {"handler": "", "worker_id": uuid.uuid5(_NAMESPACE, which["queue"])}
    if not rows.filter(**which).update(lag=lag):
        # Of two who find no row one makes it, the other's figure is as good.
        rows.bulk_create([rows.model(**which, lag=lag)], ignore_conflicts=True)
