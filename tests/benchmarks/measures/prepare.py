"""Not measured: making the databases and topics that measurements start from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management import call_command
from django.db import connection

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.enqueue.definition import JobDefinition, unsaved_job
from kjo_django.enqueue.storing import record_of
from kjo_django.models import Job
from kjo_django.states import JobState
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.workloads import WORKLOADS

CHUNK = 1000


def migrate() -> None:
    """Make the tables."""
    call_command("migrate", verbosity=0)


def seed(rows: int) -> None:
    """Fill the tables with rows of other queues."""
    from tests.benchmarks.seeding.filling import fill

    fill(rows, rows // 50, service="benchmarks")
    with connection.cursor() as cursor:
        cursor.execute("CHECKPOINT")


def payloads(workload: str, count: int, start: int = 0) -> list[dict[str, Any]]:
    """Return arguments for so many jobs."""
    payload = WORKLOADS[workload].payload
    return [payload(number) for number in range(start, start + count)]


def fill(workload: str, count: int, is_published: bool, partitions: int, topics: list[str]) -> None:
    """Store jobs, and on Kafka make the topics, each with all messages."""
    handler = registry.find(WORKLOADS[workload].handler)
    assert handler is not None
    definition = JobDefinition(handler)
    if os.environ.get("KAFKA_BOOTSTRAP_SERVERS"):
        with publishing(topics, partitions) as publish:
            for jobs in _stored(definition, workload, count, is_published):
                if is_published:
                    publish(jobs)
    else:
        for start in range(0, count, CHUNK):
            definition.enqueue_many(payloads(workload, min(CHUNK, count - start), start))
    if connection.vendor == "postgresql":
        _settle()


def _stored(
    definition: JobDefinition[..., Any], workload: str, count: int, is_published: bool
) -> Iterator[list[Job]]:
    """Store jobs without their messages; yield them, a chunk at a time."""
    for start in range(0, count, CHUNK):
        wanted = payloads(workload, min(CHUNK, count - start), start)
        jobs = [unsaved_job(definition, payload) for payload in wanted]
        if is_published:
            for job in jobs:
                job.state, job.queued_at = JobState.QUEUED, job.created_at
        Job.objects.bulk_create(jobs)
        yield jobs


def _settle() -> None:
    """Have PostgreSQL do now what it would else do some time in the measurement."""
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE kjo_job, kjo_transport_message")
        if "KJO_BENCHMARK_SINCE" not in os.environ:
            # Else the table is measured itself, and not a copy, whose pages are all newer than a
            # checkpoint. It alone would write every page it touches whole into the log once more.
            cursor.execute("CHECKPOINT")


@contextmanager
def publishing(topics: list[str], partitions: int) -> Iterator[Callable[[list[Job]], None]]:
    """Make the topics, and yield what puts the messages of jobs on each of them."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    servers = {"bootstrap.servers": os.environ["KAFKA_BOOTSTRAP_SERVERS"]}
    admin = AdminClient(servers)  # to be kept until it has answered
    wanted = [NewTopic(topic, partitions, 1) for topic in topics]
    for made in admin.create_topics(wanted).values():
        made.result(30)
    queue = get_settings().queue("ledger")
    producer = Producer({**servers, "acks": "all", "partitioner": "murmur2_random"})
    failures: list[Any] = []

    def note(error: Any, message: Any) -> None:
        if error is not None:
            failures.append(error)

    def publish(jobs: list[Job]) -> None:
        records = [record_of(job, queue) for job in jobs]
        for topic in topics:
            for record in records:
                headers = dict(record.headers)
                producer.produce(topic, record.value, record.key, headers=headers, on_delivery=note)
            # A full buffer refuses.
            producer.flush(60)

    yield publish
    if failures:
        raise BenchmarkError(f"{len(failures)} messages were not published: {failures[0]}")
