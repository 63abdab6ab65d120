"""What child processes do that is no command of kjo_django."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from unittest.mock import patch

from django.db import connection
from django.db.models import F
from django.utils import timezone

from kjo_django import registry
from kjo_django.clock import Clock
from kjo_django.enqueue.definition import JobDefinition
from kjo_django.models import Job
from kjo_django.operations.maintenance.prune import Retention
from kjo_django.operations.maintenance.prune import prune as prune_rows
from kjo_django.operations.queues import paused_queues
from kjo_django.states import JobState
from tests.benchmarks.measures import prepare
from tests.benchmarks.workloads import WORKLOADS
from tests.ledger.jobs import no_op

CHUNK = 10_000


def fill(workload: str, count: int, is_published: bool, partitions: int, topics: list[str]) -> None:
    """Store jobs and, if asked, put their messages on each of the topics; as `prepare.fill`, at a
    tenth of its cost, since there are many jobs here."""
    handler = registry.find(WORKLOADS[workload].handler)
    assert handler is not None
    definition = JobDefinition(handler)
    with prepare.publishing(topics, partitions) as publish:
        for start in range(0, count, CHUNK):
            definition.enqueue_many(prepare.payloads(workload, min(CHUNK, count - start), start))
        if is_published:
            Job.objects.update(state=JobState.QUEUED, queued_at=F("created_at"))
            rows = Job.objects.order_by("pk").iterator(CHUNK)
            while jobs := list(itertools.islice(rows, CHUNK)):
                publish(jobs)
    with connection.cursor() as cursor:
        cursor.execute("VACUUM FULL ANALYZE kjo_job")
        cursor.execute("CHECKPOINT")


def enqueue(at_once: int) -> None:
    """Store jobs until killed, from the moment on in which no queue is paused."""
    while paused_queues():
        time.sleep(0.2)
    while True:
        if at_once == 1:
            no_op.enqueue()
        else:
            no_op.enqueue_many([{}] * at_once)


def prune() -> None:
    """Delete all jobs and markers, as `kjo_prune` does once they are old, and free their space."""
    kept = timedelta(days=1)
    later = timezone.now() + 2 * kept
    with patch.object(Clock, "now", staticmethod(lambda: later)):
        prune_rows(Retention(kept, kept, kept, kept))
    with connection.cursor() as cursor:
        for table in ("kjo_job", "processed_events"):
            cursor.execute(f"VACUUM {table}")
