"""Steps that a worker releases and runs itself, without their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from kjo_django import registry
from kjo_django.conf import QueueConf
from kjo_django.enqueue.storing import is_transactional, record_of
from kjo_django.models import Job
from kjo_django.registry import Handler
from kjo_django.runtime import Runtime
from kjo_django.transports.base import NO_PARTITION, NoSubscription, Record, Subscription


class Reader(Protocol):
    """What makes deliveries of the records of some topics."""

    group: str
    topics: list[str]

    def read(self, record: Record, subscription: Subscription) -> Any:
        """Return the delivery of a record, None if it is not for this process."""


class Scheduler(Protocol):
    """What starts deliveries."""

    is_stopped: bool

    def put(self, deliveries: Iterable[Any]) -> None:
        """Add deliveries."""

    def would_start(self, queue: str, kind: str, count: int) -> bool:
        """Return whether so many jobs of a handler would start at once, and are quick."""


class StepTaker:
    """Decides which released steps a worker runs itself, and gives them to its lanes."""

    def __init__(self) -> None:
        self._readers: Sequence[Reader] = ()
        self._no_subscription = NoSubscription()

    def serve(
        self,
        runtime: Runtime,
        scheduler: Scheduler,
        readers: Sequence[Reader],
        is_limited: Callable[[Runtime, Handler, QueueConf], bool],
    ) -> None:
        """Work for a worker from now on; before, nothing is taken.

        :param is_limited: tells whether jobs of a handler in a queue may have a limit: such a job
            starts in the order of its limit's line.
        """
        self._runtime = runtime
        self._scheduler = scheduler
        self._readers = readers
        self._is_limited = is_limited

    def takes(self, queue: str, kind: str, count: int) -> bool:
        """Return whether so many steps of a queue and a handler may be run here at once.

        On a transactional transport a job is stored with its message.
        """
        if not self._readers:
            return False
        conf, handler = self._runtime.settings.queue(queue), registry.find(kind)
        return (
            handler is not None
            and self._reader_of(conf) is not None
            and not self._scheduler.is_stopped
            and self._scheduler.would_start(queue, kind, count)
            and not is_transactional(conf)
            and not self._is_limited(self._runtime, handler, conf)
        )

    def take(self, jobs: Iterable[Job]) -> None:
        """Start jobs as if their messages had been published and read. No subscription has handed
        them out, so nothing is left to acknowledge."""
        for job in jobs:
            queue = self._runtime.settings.queue(job.queue)
            sent = record_of(job, queue, service=self._runtime.service)
            headers = dict(sent.headers)
            record = Record(sent.topic, NO_PARTITION, 0, sent.key, sent.value, headers)
            reader = self._reader_of(queue)
            assert reader is not None
            delivery = reader.read(record, self._no_subscription)
            if delivery is not None:
                self._scheduler.put([delivery])

    def _reader_of(self, queue: QueueConf) -> Reader | None:
        """Return who reads the topic of a queue here."""
        for reader in self._readers:
            if queue.topic in reader.topics and queue.consumer_group == reader.group:
                return reader
        return None
