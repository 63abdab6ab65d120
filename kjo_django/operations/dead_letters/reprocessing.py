"""Running a dead message here and now, through the pipeline every worker uses.

For an operator who wants to see what becomes of it, or has no worker for its queue. The same rules
hold as in a worker: markers, transactions, retries and dead letters.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

from django.db import connections

from kjo_django import registry
from kjo_django.conf import QueueConf, default_worker_name, get_settings
from kjo_django.engine import queue_policies
from kjo_django.engine.announcements import tell, tell_waiters
from kjo_django.engine.attempt import Delivery, Outcome, Result
from kjo_django.engine.group import Pipeline
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.leases import LeaseBook
from kjo_django.enqueue import dispatch
from kjo_django.exceptions import MessageError
from kjo_django.ids import uuid7
from kjo_django.models import Job, QueueControl
from kjo_django.store.transactions import jobs_database
from kjo_django.transports.base import OutgoingRecord, Record, Subscription, TopicPartition

NOWHERE = -1
"""The partition and offset of a message that comes from no topic."""


class Reprocessor:
    """Runs one message at a time. Use as a context manager."""

    def __init__(self) -> None:
        conf = get_settings()
        self._outcomes: list[Outcome] = []
        self._watch = TimeoutWatch()
        self._leases = LeaseBook(uuid7().hex, conf.processing_ttl, 3 * conf.heartbeat_interval)
        self._pipeline = Pipeline(
            self._leases,
            self._watch,
            worker=f"replay on {socket.gethostname()} {default_worker_name()}"[:255],
            on_outcomes=self._on_outcomes,
        )

    def _on_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        tell_waiters(outcomes)
        self._outcomes.extend(outcomes)
        tell(outcomes)

    def __enter__(self) -> Reprocessor:
        queue_policies.join()
        queue_policies.learn(QueueControl.objects.using(jobs_database()))
        return self

    def __exit__(self, *error: object) -> None:
        queue_policies.leave()
        self._watch.stop()

    def run(self, record: Record, queue: QueueConf) -> Result:
        """Run a record as one of the queue's; returns how it ended. ``DEFERRED``: a worker holds
        it. ``SKIPPED``: nobody here handles it."""
        try:
            found = registry.route_of(queue.name).read(
                record, max_bytes=get_settings().max_payload_bytes
            )
        except MessageError as problem:
            delivery = Delivery(record, _Nowhere(), queue, None, None, problem)
        else:
            if found is None:
                return Result.SKIPPED
            delivery = Delivery(record, _Nowhere(), queue, *found)
        self._leases.show_alive()
        self._outcomes.clear()
        self._pipeline.run([delivery], delivery.mode)
        return self._outcomes[-1].result if self._outcomes else Result.DEFERRED

    def run_job(self, job: Job) -> Result:
        """Run the next attempt of a stored job, before its message reaches a worker."""
        queue = get_settings().queue(job.queue)
        return self.run(arrived(dispatch.record_of(job, queue)), queue)


def arrived(outgoing: OutgoingRecord) -> Record:
    """Return a record as it would be read, had it been published."""
    return Record(
        topic=outgoing.topic,
        partition=NOWHERE,
        offset=NOWHERE,
        key=outgoing.key,
        value=outgoing.value,
        headers=dict(outgoing.headers),
    )


def is_in_transaction() -> bool:
    """Whether the caller's own transaction would hold what the pipeline wants to commit."""
    return connections[jobs_database()].in_atomic_block


class _Nowhere(Subscription):
    """What a message belongs to that no subscription has handed out."""

    def poll(self, max_records: int, timeout: float) -> list[Record]:
        """There is nothing."""
        return []

    def acknowledge(self, records: Iterable[Record]) -> None:
        """There is nothing to tell."""

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """There is nothing to pause."""

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """There is nothing to resume."""

    def assignment(self) -> Sequence[TopicPartition]:  # type: ignore[override]
        """There are no partitions."""
        return []

    def close(self) -> None:
        """There is nothing to close."""
