"""Publishing: one call has a producer for itself, and waits for every delivery report."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence

from confluent_kafka import KafkaError, Producer

from kjo_django.transports.base import OutgoingRecord, Published
from kjo_django.transports.kafka.clients import PerProcess, after_fork, describe, logger, make
from kjo_django.transports.kafka.options import KafkaOptions, merge
from kjo_django.transports.kafka.ordered import (
    LINGER_MS,
    TIMEOUT_MARGIN_MS,
    BatchLimits,
    Client,
    OrderedSend,
)
from kjo_django.transports.kafka.refusals import Refusals, watched

MOST_PRODUCERS = 4
"""Calls that publish at a time. Each producer beyond the first is made when it is needed."""

CLOSE_WAIT = 1.0
MOST_MS = 2_147_483_647
"""What librdkafka takes for a time."""


class Publisher:
    """The producers of a process, each of them one call's at a time. Thread-safe."""

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        self._limits = BatchLimits.of(options)
        self._producers = [PerProcess(self._make) for _ in range(MOST_PRODUCERS)]
        self._free = self._all_free()
        self._refusals = Refusals(options)
        self._last_error: str | None = None
        after_fork(self)

    def publish(self, records: Sequence[OutgoingRecord]) -> list[Published]:
        """Return the outcome of each record, when all are known."""
        if not records:
            return []
        timeout = self._options.delivery_timeout
        free = self._free
        try:
            producer = free.get(timeout=timeout)
        except queue.Empty:
            return [Published(error="others were publishing all the time") for _ in records]
        try:
            client = producer.get()
            send = OrderedSend(
                client,
                records,
                limits=self._limits,
                timeout=timeout,
                refusals=self._refusals,
                last_error=lambda: self._last_error,
            )
            send.run()
            self._learn(producer, client, send.errors)
        finally:
            free.put(producer)
        return send.outcomes

    def close(self) -> None:
        """Forget the producers; they are made anew when needed.

        ``publish`` waits for its own reports, so what is still on its way belongs to callers that
        have been given up: the rows of their jobs stay pending. A broker that is away must not keep
        the process from ending.
        """
        deadline = time.monotonic() + CLOSE_WAIT
        for producer in self._producers:
            client = producer.take()
            if client is not None:
                left = client.producer.flush(max(0.0, deadline - time.monotonic()))
                if left:
                    logger.error("%d records were not delivered before the producer closed", left)

    def forget_the_parents(self) -> None:
        """Called in the child of a fork: threads of the parent may have been publishing."""
        self._free = self._all_free()

    def _all_free(self) -> queue.LifoQueue[PerProcess[Client]]:
        # The last in is the first out: one that is connected is used again.
        free: queue.LifoQueue[PerProcess[Client]] = queue.LifoQueue()
        for producer in reversed(self._producers):
            free.put(producer)
        return free

    def _make(self) -> Client:
        def on_error(error: KafkaError) -> None:
            self._last_error = describe(error)
            self._refusals.note(error)

        timeout_ms = int(self._options.delivery_timeout * 1000) + TIMEOUT_MARGIN_MS
        own = {"linger.ms": LINGER_MS, "delivery.timeout.ms": min(timeout_ms, MOST_MS)}
        config = watched(merge(self._options.producer(), own), on_error)
        return Client(make(Producer, config, self._options), set())

    def _learn(
        self, producer: PerProcess[Client], client: Client, errors: Sequence[KafkaError]
    ) -> None:
        """Forget errors that are over, and give up a producer that cannot recover."""
        if not errors:
            self._last_error = None
            self._refusals.forget()
        for error in errors:
            # After a fatal error an idempotent producer refuses everything for ever.
            if error.fatal() or error.code() == KafkaError._FATAL:
                text = "The Kafka producer failed for good and is replaced: %s"
                logger.error(text, describe(error))
                producer.discard(client)
                return
