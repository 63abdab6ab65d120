"""The state of jobs, one file per model."""

from kjo_django.models.dashboard import Dashboard
from kjo_django.models.dead_letter import (
    DeadLetter,
    DeadLetterReason,
    DeadLetterState,
    fingerprint_of,
    source_of_job,
)
from kjo_django.models.embedded import Lease, Mark, TransportMessage, TransportSubscription
from kjo_django.models.job import Job, JobQuerySet, message_id, transition
from kjo_django.models.job_failure import JobFailure
from kjo_django.models.metric_bucket import MetricBucket, MetricRollup
from kjo_django.models.processed_event import EventKey, ProcessedEvent
from kjo_django.models.queue_control import QueueControl
from kjo_django.models.worker import Worker

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
    "message_id",
    "source_of_job",
    "transition",
]
