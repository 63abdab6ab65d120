"""Not measured: making the databases and topics that measurements start from."""

from __future__ import annotations

import os
from typing import Any

from django.core.management import call_command
from django.db import connection

from kjo_django.conf import get_settings
from kjo_django.models import Job
from kjo_django.producer.dispatch import record_of
from kjo_django.states import JobState
from tests.ledger import jobs as handlers

CHUNK = 1000


def migrate() -> None:
    """Make the tables."""
    call_command("migrate", verbosity=0)


def payloads(handler: str, count: int) -> list[dict[str, Any]]:
    """Return arguments for so many jobs."""
    return [{"job": f"job-{n}"} if handler == "write" else {} for n in range(count)]


def fill(handler: str, count: int, is_published: bool, topics: list[str]) -> None:
    """Store jobs, and on Kafka make the topics, each with all messages."""
    definition = getattr(handlers, handler)
    wanted = payloads(handler, count)
    if not os.environ.get("KAFKA_BOOTSTRAP_SERVERS"):
        for start in range(0, count, CHUNK):
            definition.enqueue_many(wanted[start : start + CHUNK])
        return
    jobs = [definition.build(payload) for payload in wanted]
    if is_published:
        for job in jobs:
            job.state, job.queued_at = JobState.QUEUED, job.created_at
    Job.objects.bulk_create(jobs, batch_size=CHUNK)
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("VACUUM ANALYZE")
    _make_topics(topics, jobs if is_published else [])


def _make_topics(topics: list[str], jobs: list[Job]) -> None:
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    servers = {"bootstrap.servers": os.environ["KAFKA_BOOTSTRAP_SERVERS"]}
    admin = AdminClient(servers)  # to be kept until it has answered
    for made in admin.create_topics([NewTopic(topic, 4, 1) for topic in topics]).values():
        made.result(30)
    queue = get_settings().queue("ledger")
    records = [record_of(job, queue) for job in jobs]
    producer = Producer({**servers, "acks": "all", "partitioner": "murmur2_random"})
    failures: list[Any] = []

    def note(error: Any, message: Any) -> None:
        if error is not None:
            failures.append(error)

    for topic in topics:
        for record in records:
            headers = dict(record.headers)
            producer.produce(topic, record.value, record.key, headers=headers, on_delivery=note)
        producer.flush(60)
    if failures:
        raise RuntimeError(f"{len(failures)} messages were not published: {failures[0]}")
