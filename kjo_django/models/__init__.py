"""The tables: jobs and their failures, dead letters, markers, figures, workers."""

from kjo_django.models.control import Dashboard, QueueControl, Worker
from kjo_django.models.dead_letter import (
    DeadLetter,
    DeadLetterReason,
    DeadLetterState,
    fingerprint_of,
    source_of_job,
)
from kjo_django.models.embedded import Lease, Mark, TransportMessage, TransportSubscription
from kjo_django.models.job import Job, JobFailure, JobQuerySet, transition
from kjo_django.models.metric_bucket import MetricBucket, MetricRollup
from kjo_django.models.processed_event import EventKey, ProcessedEvent

__all__ = [
    "Dashboard",
    "DeadLetter",
    "DeadLetterReason",
    "DeadLetterState",
    "EventKey",
    "Job",
    "JobFailure",
    "JobQuerySet",
    "Lease",
    "Mark",
    "MetricBucket",
    "MetricRollup",
    "ProcessedEvent",
    "QueueControl",
    "TransportMessage",
    "TransportSubscription",
    "Worker",
    "fingerprint_of",
    "source_of_job",
    "transition",
]
