"""Rows for tests, one factory per model."""

from __future__ import annotations

import json
from datetime import timedelta

import factory
from django.utils import timezone

from kjo_django.messages import headers as names
from kjo_django.models import (
    DeadLetter,
    DeadLetterReason,
    DeadLetterState,
    Job,
    JobFailure,
    MetricBucket,
    ProcessedEvent,
    QueueControl,
    Worker,
    source_of_job,
)
from kjo_django.states import JobState


class JobFactory(factory.django.DjangoModelFactory):
    """A job that waits for the relay."""

    class Meta:
        model = Job

    class Params:
        queued = factory.Trait(state=JobState.QUEUED, queued_at=factory.LazyFunction(timezone.now))
        completed = factory.Trait(
            state=JobState.COMPLETED,
            attempts=1,
            finished_at=factory.LazyFunction(timezone.now),
            result=b'{"v":42}',
        )
        failed = factory.Trait(
            state=JobState.FAILED,
            attempts=5,
            finished_at=factory.LazyFunction(timezone.now),
            error="it broke",
        )
        cancelled = factory.Trait(
            state=JobState.CANCELLED, finished_at=factory.LazyFunction(timezone.now)
        )

    queue = "default"
    handler = "tests.add"
    max_attempts = 5
    payload = factory.LazyFunction(lambda: json.dumps({"a": 1}).encode())
    result_ttl = 3_600_000


class JobFailureFactory(factory.django.DjangoModelFactory):
    """The first attempt failed."""

    class Meta:
        model = JobFailure

    job = factory.SubFactory(JobFactory, failed=True)
    attempt = 1
    worker = "host-1"
    error_type = "ValueError"
    error = "it broke"
    traceback = "Traceback (most recent call last):\nValueError: it broke\n"


class DeadLetterFactory(factory.django.DjangoModelFactory):
    """The open dead letter of a message nobody enqueued here."""

    class Meta:
        model = DeadLetter

    class Params:
        of_job = factory.Trait(
            job=factory.SubFactory(JobFactory, failed=True),
            message_id=factory.LazyAttribute(lambda letter: letter.job.message_id),
        )
        discarded = factory.Trait(
            state=DeadLetterState.DISCARDED, closed_at=factory.LazyFunction(timezone.now)
        )

    reason = DeadLetterReason.EXHAUSTED
    source_id = factory.LazyAttributeSequence(
        lambda letter, n: (
            source_of_job(letter.job.pk, letter.job.generation)
            if letter.job is not None
            else f"source-{n:057d}"
        )
    )
    job = None
    message_id = factory.Sequence(lambda n: f"message-{n}")
    queue = "default"
    handler = "tests.add"
    key = b"key-1"
    value = b'{"a": 1}'
    headers = factory.LazyAttribute(
        lambda letter: names.to_json(
            {names.ID: letter.message_id.encode(), names.TYPE: letter.handler.encode()}
        )
    )
    content_type = "application/json"
    consumer_group = "django-group"
    topic = "default"
    partition = 0
    offset = factory.Sequence(lambda n: n)
    error_type = "ValueError"
    error = "it broke"
    traceback = "Traceback (most recent call last):\nValueError: it broke\n"
    fingerprint = "0123456789abcdef"
    attempts = 5


class ProcessedEventFactory(factory.django.DjangoModelFactory):
    """An event that took effect."""

    class Meta:
        model = ProcessedEvent

    event_id = factory.Sequence(lambda n: f"message-{n}")
    event_type = "tests.add"
    service_name = "django"


class QueueControlFactory(factory.django.DjangoModelFactory):
    """A queue somebody has touched."""

    class Meta:
        model = QueueControl

    queue = factory.Sequence(lambda n: f"queue-{n}")


class WorkerFactory(factory.django.DjangoModelFactory):
    """A live worker of every queue."""

    class Meta:
        model = Worker

    class Params:
        stale = factory.Trait(
            heartbeat_at=factory.LazyFunction(lambda: timezone.now() - timedelta(hours=1))
        )

    name = factory.Sequence(lambda n: f"host-{n}")
    hostname = "host"
    pid = factory.Sequence(lambda n: 1000 + n)
    queues = factory.LazyFunction(lambda: ["default"])


class MetricBucketFactory(factory.django.DjangoModelFactory):
    """What a worker did in this minute."""

    class Meta:
        model = MetricBucket

    minute = factory.LazyFunction(lambda: timezone.now().replace(second=0, microsecond=0))
    queue = "default"
    handler = "tests.add"
    worker_id = factory.LazyFunction(lambda: WorkerFactory().pk)
    completed_count = 10
