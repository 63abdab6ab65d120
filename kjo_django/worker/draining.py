"""Whether topics hold records nobody has settled, those of jobs that are due later left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from django.utils import timezone

from kjo_django import registry
from kjo_django.backends import get_transport
from kjo_django.conf import QueueConf
from kjo_django.models import Job
from kjo_django.store.transactions import jobs_database


def waiting_records(queues: Iterable[QueueConf]) -> Iterator[int]:
    """Yield for each queue how many records wait for it, as far as its due jobs do not tell."""
    for queue in queues:
        transport = get_transport(queue.transport)
        if not transport.capabilities.transactional:
            yield sum(transport.lag([queue.topic], queue.consumer_group).values())
        elif registry.route_of(queue.name) is not registry.JOBS:
            # Here each due job has its record in the table; the others are what nobody enqueued.
            records = sum(transport.lag([queue.topic], queue.consumer_group).values())
            jobs = Job.objects.using(jobs_database()).open()
            jobs = jobs.filter(queue=queue.name, available_at__lte=timezone.now())
            yield max(0, records - jobs.count()) if records else 0
