"""Running a dead message here and now, through the flow that every worker uses.

For an operator who wants to see what becomes of it, or has no worker for its queue. The same rules
hold as in a worker: markers, transactions, retries and dead letters.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from kjo_django import registry
from kjo_django.conf import QueueConf, default_worker_name, get_settings
from kjo_django.engine import queue_policies
from kjo_django.engine.attempt import Attempt, Delivery, Ending
from kjo_django.engine.group import Pipeline, notify_waiters, send_signals
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.leases import LeaseBook
from kjo_django.enqueue import dispatch
from kjo_django.exceptions import MessageError
from kjo_django.ids import uuid7
from kjo_django.models import Job, QueueControl
from kjo_django.runtime import current_runtime
from kjo_django.store.transactions import jobs_database
from kjo_django.transports.base import Record, Subscription, TopicPartition

NOWHERE = -1
"""The partition and offset of a message that comes from no topic."""
SKIPPED = Ending.SKIPPED.value
DEFERRED = Ending.DEFERRED.value
NOT_RUN = (DEFERRED, SKIPPED)
"""Endings without a run: a worker holds the message, or nobody here handles it."""


class Reprocessor:
    """Runs one message at a time. Use as a context manager."""

    def __init__(self) -> None:
        self._ended: list[Attempt] = []
        self._watch = TimeoutWatch()
        self._leases = LeaseBook(current_runtime(), uuid7().hex)
        self._pipeline = Pipeline(
            self._leases,
            self._watch,
            worker=f"replay on {socket.gethostname()} {default_worker_name()}"[:255],
            listeners=(notify_waiters, self._ended.extend, send_signals),
        )

    def __enter__(self) -> Reprocessor:
        queue_policies.join()
        queue_policies.learn(QueueControl.objects.using(jobs_database()))
        return self

    def __exit__(self, *error: object) -> None:
        queue_policies.leave()
        self._watch.stop()

    def run(self, record: Record, queue: QueueConf) -> str:
        """Run a record as one of the queue's; returns how it ended."""
        try:
            found = registry.route_of(queue.name).read(
                record, max_bytes=get_settings().max_payload_bytes
            )
        except MessageError as problem:
            delivery = Delivery(record, _NoSubscription(), queue, None, None, problem)
        else:
            if found is None:
                return SKIPPED
            delivery = Delivery(record, _NoSubscription(), queue, *found)
        self._leases.show_alive()
        self._ended.clear()
        self._pipeline.run([delivery], delivery.mode)
        ending = self._ended[-1].ending if self._ended else None
        return DEFERRED if ending is None else ending.value

    def run_job(self, job: Job) -> str:
        """Run the next attempt of a stored job, before its message reaches a worker."""
        queue = get_settings().queue(job.queue)
        sent = dispatch.record_of(job, queue)
        record = Record(
            sent.topic, NOWHERE, NOWHERE, key=sent.key, value=sent.value, headers=dict(sent.headers)
        )
        return self.run(record, queue)


class _NoSubscription(Subscription):
    """The subscription of a message that none has handed out."""

    def poll(self, max_records: int, timeout: float) -> list[Record]:
        return []

    def acknowledge(self, records: Iterable[Record]) -> None:
        return

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        return

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        return

    def assignment(self) -> list[TopicPartition]:
        return []

    def close(self) -> None:
        return
