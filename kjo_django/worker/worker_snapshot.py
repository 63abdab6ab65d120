"""What a worker holds at this moment, for its row: asked with the heartbeat, never by a job."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from django.utils import timezone

from kjo_django.operations.workers import Assignment, RunningJob
from kjo_django.transports.base import TopicPartition

if TYPE_CHECKING:
    from kjo_django.worker.process import Worker

TOLD = 5
"""Running jobs that are named, those that have run longest."""


def held(worker: Worker) -> list[Assignment]:
    """Return the worker's partitions, in order."""
    now = timezone.now()
    running: dict[TopicPartition, list[RunningJob]] = {}
    for run in worker.running.longest(TOLD):
        place = TopicPartition(run.record.topic, run.record.partition)
        started_at = now - timedelta(seconds=run.seconds)
        running.setdefault(place, []).append(RunningJob(run.job_id, run.handler, started_at))
    found = []
    for poller in worker.pollers:
        resting = poller.resting()
        for place in poller.partitions:
            rest = resting.get(place)
            found.append(
                Assignment(
                    place.topic,
                    place.partition,
                    poller.group,
                    rebalanced_at=poller.rebalanced_at,
                    resting_until=None if rest is None else now + timedelta(seconds=rest),
                    running=tuple(running.get(place, ())),
                )
            )
    return sorted(found, key=lambda each: (each.group or "", each.topic, each.partition))
