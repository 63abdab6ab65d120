"""Jobs that are shown as running, without a worker."""

from __future__ import annotations

import json
from base64 import b64encode
from datetime import timedelta

from django.utils import timezone

from kjo_django.conf import get_settings
from kjo_django.coordination.base import alive_name, lease_name
from kjo_django.models import Job, TransportMessage, TransportRun
from kjo_django.runtime import get_coordination, transport_class

MINUTE = timedelta(minutes=1)


def let_run(*jobs: Job, worker: str = "worker", is_alive: bool = True) -> None:
    """Have a worker begin jobs, as its consumer notes it, or coordination.

    :param worker: its token.
    :param is_alive: whether it gives a sign of life.
    """
    now = timezone.now()
    for job in jobs:
        queue, using = get_settings().queue(job.queue), job._state.db
        if not transport_class(queue.transport).capabilities.counts_deliveries:
            get_coordination().claim([lease_name(queue, job.message_id)], worker, MINUTE)
            continue
        message = TransportMessage.objects.using(using).create(
            topic=queue.topic,
            consumer_group=queue.consumer_group,
            lease_token=f"consumer-{job.pk}",
            lease_expires_at=now + MINUTE,
        )
        TransportRun.objects.using(using).create(
            consumer=message.lease_token,
            number=0,
            worker=worker,
            messages=json.dumps({message.pk: b64encode(job.message_id.encode()).decode()}),
            begun_at=now,
        )
    if is_alive:
        get_coordination().claim([alive_name(worker)], worker, MINUTE)


def let_die(worker: str = "worker") -> None:
    """End a worker's sign of life."""
    get_coordination().release([alive_name(worker)], worker)
