"""Publishing: produce everything, then wait for every delivery report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from kjo_django.transports.base import OutgoingRecord, Published
from kjo_django.transports.kafka.clients import PerProcess, describe, error_of, logger, make
from kjo_django.transports.kafka.options import KafkaOptions
from kjo_django.transports.kafka.refusals import Refusals, watched

SLICE = 0.01
"""Seconds of one wait. Another thread's poll may take our delivery report, and wake nobody."""

GRACE = 5.0
"""Seconds beyond the delivery timeout: librdkafka looks for expired records once a second."""

FULL_QUEUE_WAIT = 0.1

TOO_LARGE = KafkaError.MSG_SIZE_TOO_LARGE
FINAL = frozenset({TOO_LARGE, KafkaError.INVALID_RECORD})
"""Refusals that say something about the record, not about the moment."""

OF_THE_TOPIC = frozenset(
    {
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_EXCEPTION,
    }
)

CLOSE_WAIT = 1.0

REFUSED_WAIT = 3.0
"""Seconds of refusals after which a publish is given up, where no record of it was taken."""


class Publisher:
    """The one producer of a process. Thread-safe."""

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        self._producer = PerProcess(self._make)
        self._refusals = Refusals(options)
        self._last_error: str | None = None

    def publish(self, records: Sequence[OutgoingRecord]) -> list[Published]:
        """Return the outcome of each record, when all are known."""
        if not records:
            return []
        deadline = time.monotonic() + self._options.delivery_timeout + GRACE
        return self._publish(records, deadline)

    def _publish(self, records: Sequence[OutgoingRecord], deadline: float) -> list[Published]:
        outcomes, suspects = self._send(records, deadline)
        if len(suspects) > 1:
            # A broker refuses a batch as a whole: one record over the topic's max.message.bytes
            # would keep all others of its batch from ever going out, and so would a backlog that
            # fills batches larger than that.
            middle = len(suspects) // 2
            for part in (suspects[:middle], suspects[middle:]):
                again = self._publish([records[index] for index in part], deadline)
                for index, outcome in zip(part, again, strict=True):
                    outcomes[index] = outcome
        return outcomes

    def _send(
        self, records: Sequence[OutgoingRecord], deadline: float
    ) -> tuple[list[Published], list[int]]:
        """Return the outcomes, and the indices of records in batches the broker found too large."""
        producer = self._producer.get()
        outcomes = [Published(error="no delivery report arrived in time") for _ in records]
        reports: list[KafkaError | None] = []
        refused: set[int] = set()
        for index, (record, outcome) in enumerate(zip(records, outcomes, strict=True)):
            if not self._produce(producer, record, outcome, reports, deadline):
                refused.add(index)
        while len(reports) + len(refused) < len(records) and time.monotonic() < deadline:
            producer.flush(SLICE)  # unlike poll, does not linger
            if self._refusals.reason is not None and not reports:
                deadline = self._give_up(producer, deadline)
        self._learn(producer, outcomes, reports)
        if not any(error is not None and error.code() == TOO_LARGE for error in reports):
            return outcomes, []
        final = (index for index, outcome in enumerate(outcomes) if outcome.is_final)
        return outcomes, [index for index in final if index not in refused]

    def close(self) -> None:
        """Forget the producer; it is made anew when needed.

        ``publish`` waits for its own reports, so what is still on its way belongs to callers that
        have been given up: the rows of their jobs stay pending. A broker that is away must not keep
        the process from ending.
        """
        producer = self._producer.take()
        if producer is not None:
            left = producer.flush(CLOSE_WAIT)
            if left:
                logger.error("%d records were not delivered before the producer closed", left)

    def _make(self) -> Producer:
        def on_error(error: KafkaError) -> None:
            self._last_error = describe(error)
            self._refusals.note(error)

        return make(Producer, watched(self._options.producer(), on_error), self._options)

    def _produce(
        self,
        producer: Producer,
        record: OutgoingRecord,
        outcome: Published,
        reports: list[KafkaError | None],
        deadline: float,
    ) -> bool:
        """Hand one record to librdkafka; False when it was refused, and the outcome says why."""
        on_delivery = partial(report, outcome, reports)
        arguments: dict[str, Any] = {"value": record.value, "key": record.key}
        if record.headers:
            arguments["headers"] = dict(record.headers)
        if record.partition is not None:
            arguments["partition"] = record.partition
        while True:
            try:
                producer.produce(record.topic, on_delivery=on_delivery, **arguments)
                return True
            except BufferError:
                if time.monotonic() > deadline:
                    outcome.error = "the local queue stayed full"
                    return False
                producer.poll(FULL_QUEUE_WAIT)
            except KafkaException as error:
                self._discard_if_fatal(producer, error_of(error))
                refuse(outcome, error_of(error), describe(error))
                return False

    def _learn(
        self,
        producer: Producer,
        outcomes: Sequence[Published],
        reports: Sequence[KafkaError | None],
    ) -> None:
        """Say why records timed out, and give up a producer that cannot recover."""
        errors = [error for error in reports if error is not None]
        if not errors:
            self._last_error = None
            self._refusals.forget()
            return
        for error in errors:
            self._discard_if_fatal(producer, error)
        reason = self._refusals.reason or self._last_error
        purged = _texts(errors, KafkaError._PURGE_QUEUE)
        timed_out = _texts(errors, KafkaError._MSG_TIMED_OUT)
        for outcome in outcomes if reason else ():
            if outcome.error in purged:
                outcome.error = reason
            elif outcome.error in timed_out:
                outcome.error = f"{outcome.error} (last broker error: {reason})"

    def _give_up(self, producer: Producer, deadline: float) -> float:
        """No broker lets us in: hand back what has not been sent, whoever waits for it, once it has
        waited for a while; a broker that starts may refuse the first. Return the new deadline."""
        waited = time.monotonic() - deadline + self._options.delivery_timeout + GRACE
        if waited < REFUSED_WAIT:
            return deadline
        producer.purge(in_queue=True, in_flight=False)
        return min(deadline, time.monotonic() + GRACE)

    def _discard_if_fatal(self, producer: Producer, error: KafkaError | None) -> None:
        # After a fatal error an idempotent producer refuses everything for ever.
        if error is not None and (error.fatal() or error.code() == KafkaError._FATAL):
            logger.error("The Kafka producer failed for good and is replaced: %s", describe(error))
            self._producer.discard(producer)


def _texts(errors: Sequence[KafkaError], code: int) -> set[str]:
    return {describe(error) for error in errors if error.code() == code}


def report(
    outcome: Published, reports: list[KafkaError | None], error: KafkaError | None, message: Any
) -> None:
    """Note one delivery report. Runs in whichever thread polls; a list's append is atomic."""
    if error is None:
        outcome.error = None
        outcome.partition = message.partition()
        outcome.offset = message.offset()
    else:
        refuse(outcome, error, describe(error))
    reports.append(error)


def refuse(outcome: Published, error: KafkaError | None, text: str) -> None:
    """Note why a record was not taken."""
    outcome.error = text
    outcome.is_final = error is not None and error.code() in FINAL
    outcome.is_topics = error is not None and error.code() in OF_THE_TOPIC
