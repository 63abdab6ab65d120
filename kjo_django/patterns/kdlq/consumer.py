"""``KDLQMessageConsumer``: takes a record and returns how it was routed, as the Java library's
consumer does.

Use it in a poll loop of your own; ``kdlq_handler`` applies the same rules in a worker.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from threading import get_ident
from typing import Any

from django.db import DatabaseError, InterfaceError
from django.utils.module_loading import import_string

from kjo_django.clock import CLOCK
from kjo_django.enqueue.storing import carrier_of, check_payload_size, publish, store_record
from kjo_django.exceptions import (
    KDLQConfigurationException,
    KDLQException,
    KDLQLifecycleException,
    KjoError,
    PayloadError,
)
from kjo_django.logs import get_logger
from kjo_django.messages import headers as names
from kjo_django.patterns.kdlq import headers, letters
from kjo_django.patterns.kdlq.config import (
    MAX_ID_LENGTH,
    PRODUCER_DEFAULTS,
    DlqConfig,
    ProcessingStatus,
    Status,
    call_listeners,
)
from kjo_django.patterns.kdlq.letters import DECIDED
from kjo_django.patterns.kdlq.routing import Decision, Processor, Verdict, decide, judge
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord, Record, Transport, timestamp_of

logger = get_logger("kjo_django")

KAFKA = "kjo_django.transports.kafka.KafkaTransport"


class KDLQMessageConsumer:
    """Processes records and routes failed ones. Thread-safe. Close it, or use ``with``.

    :param id: 1 to 100 characters; marks the messages it has processed, in the header
        ``KDLQ_PrcMarker``.
    :param config: how failed messages are routed.
    :param processor: takes a ``Record`` and returns a ``ProcessingStatus`` (None for OK), or
        raises.
    :raises KDLQConfigurationException: ``id`` is not such a text, or ``config`` has
        ``ordering="key"``.
    """

    def __init__(self, id: str, config: DlqConfig, processor: Processor) -> None:
        if not isinstance(id, str) or not 0 < len(id.strip()) <= MAX_ID_LENGTH:
            raise KDLQConfigurationException(f"id must be text of 1 to {MAX_ID_LENGTH} characters")
        if config.ordering == "key":
            raise KDLQConfigurationException(
                "ordering='key' needs the worker's pipeline; declare it with kdlq_handler"
            )
        self.id: str = id
        """The consumer's id."""
        self.config: DlqConfig = config
        """How failed messages are routed."""
        self._processor = processor
        self._is_closed = self._is_released = False
        self._lock = threading.Condition()
        self._in_progress: Counter[int] = Counter()
        self._transport = _producers.take(config)

    def accept(self, message: Any) -> Status:
        """Process a message and return how it was routed; the result is durable then.

        A message from the dead-letter topic whose dead letter has been replayed or discarded is
        ``OK`` without being processed.

        :param message: a ``Record``, or a message of confluent-kafka.
        :raises KDLQException: it could not be routed; do not commit its offset.
        :raises KDLQLifecycleException: the consumer is closed.
        """
        with self._lock:
            if self._is_closed:
                raise KDLQLifecycleException(f"The consumer {self.id!r} is closed")
            self._in_progress[get_ident()] += 1
        try:
            return self._accept(as_record(message))
        finally:
            with self._lock:
                self._in_progress -= Counter([get_ident()])
                self._lock.notify_all()
            self._release_when_idle()

    def _accept(self, record: Record) -> Status:
        if headers.counter(record.headers, headers.KILLS) and self._is_decided(record):
            return Status.OK
        verdict = judge(lambda: self._processor(record), self.config)
        self._call_listeners(
            "on_message_processing", record, status=verdict.status, error=verdict.error
        )
        decision = decide(record, verdict, self.config, self.id)
        if decision.delay:
            try:
                check_payload_size(record.value or b"")
            except PayloadError as error:
                # It cannot wait in our table, however often it came again.
                verdict = Verdict(ProcessingStatus.ERROR, error)
                decision = decide(record, verdict, self.config, self.id)
        if decision.status is Status.REDELIVERED:
            self._redeliver(record, decision)
        elif decision.status is Status.ROUTED_TO_DLQ:
            self._kill(record, decision, verdict)
        elif decision.status is Status.SKIPPED_DLQ_MAX_ATTEMPTS_REACHED:
            self._skip(record, verdict)
        elif headers.counter(record.headers, headers.KILLS):
            self._in_database(lambda: letters.close_letter(record, self.id))
        return decision.status

    def _is_decided(self, record: Record) -> bool:
        found: list[bool] = []
        self._in_database(lambda: found.append(letters.is_decided(record, self.id)))
        if found[0]:
            logger.info(DECIDED, letters.place_of(record))
        return found[0]

    def close(self, timeout: float | None = None) -> None:
        """Accept no more messages, wait until those in progress have been routed, and release the
        producer. Idempotent.

        A call by a processor does not wait; the producer is released once all messages are routed.

        :param timeout: seconds to wait at most; None: without limit.
        """
        with self._lock:
            self._is_closed = True
            if get_ident() not in self._in_progress:
                self._lock.wait_for(lambda: not self._in_progress, timeout)
        self._release_when_idle()

    def _release_when_idle(self) -> None:
        with self._lock:
            if not self._is_closed or self._in_progress or self._is_released:
                return
            self._is_released = True
        _producers.give_back(self.config)

    def __enter__(self) -> KDLQMessageConsumer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _redeliver(self, record: Record, decision: Decision) -> None:
        assert decision.outgoing is not None
        try:
            if decision.delay:
                self._in_database(lambda: self._schedule(decision))
            else:
                self._publish(decision.outgoing)
        except KDLQException as error:
            self._call_listeners("on_message_redelivery_error", record, error=error)
            raise
        self._call_listeners("on_message_redelivery_success", record)

    def _schedule(self, decision: Decision) -> None:
        outgoing = decision.outgoing
        assert outgoing is not None
        store_record(
            outgoing.topic,
            value=outgoing.value,
            key=outgoing.key,
            headers=outgoing.headers,
            kind=self.id,
            carrier=carrier_of(outgoing.topic, self.config.transport),
            available_at=CLOCK.now() + decision.delay,
        )

    def _kill(self, record: Record, decision: Decision, verdict: Verdict) -> None:
        assert decision.outgoing is not None
        place = letters.place_of(record).encode()
        told = {**decision.outgoing.headers, names.DLQ_MESSAGE_ID: place}
        try:
            # The report first, then the row: a crash in between repeats a record, loses none.
            self._publish(replace(decision.outgoing, headers=told))
            self._in_database(
                lambda: letters.record_letter(record, self.id, verdict.error, headers=told)
            )
        except KDLQException as error:
            self._call_listeners("on_message_kill_error", record, error=error)
            raise
        self._call_listeners("on_message_kill_success", record)

    def _skip(self, record: Record, verdict: Verdict) -> None:
        self._in_database(
            lambda: letters.record_letter(
                record, self.id, verdict.error, headers=record.headers, is_skipped=True
            )
        )
        self._call_listeners("on_message_skip", record)

    def _publish(self, outgoing: OutgoingRecord) -> None:
        try:
            answer = publish(self._transport, [outgoing])[0]
        except KjoError as error:
            raise KDLQException(f"{outgoing.topic!r} cannot be published to: {error}") from error
        if answer.error is not None:
            raise KDLQException(f"{outgoing.topic!r} did not take the message: {answer.error}")

    def _in_database(self, write: Any) -> None:
        try:
            write()
        except (DatabaseError, InterfaceError) as error:
            raise KDLQException(f"The database did not take the message: {error}") from error

    def _call_listeners(self, hook: str, record: Record, **facts: Any) -> None:
        call_listeners(self.config.listeners, hook, self.id, record, **facts)


def as_record(message: Any) -> Record:
    """Return a message of confluent-kafka as a record."""
    if isinstance(message, Record):
        return message
    _kind, milliseconds = message.timestamp()
    stamp = timestamp_of(milliseconds) if milliseconds > 0 else None
    return Record(
        topic=message.topic(),
        partition=message.partition(),
        offset=message.offset(),
        key=message.key(),
        value=message.value(),
        headers=names.folded(message.headers() or ()),
        timestamp=stamp,
    )


class _Producers:
    """The producers in use, one for each configuration that can share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[str, tuple[Transport, int]] = {}

    def take(self, config: DlqConfig) -> Transport:
        if config.servers is None:
            return get_transport(config.transport)
        with self._lock:
            found, users = self._used.get(config.id, (None, 0))
            transport = found or _transport_of(config)
            self._used[config.id] = (transport, users + 1)
            return transport

    def give_back(self, config: DlqConfig) -> None:
        if config.servers is None:
            return  # everybody's, and closed by nobody here
        with self._lock:
            transport, users = self._used[config.id]
            if users > 1:
                self._used[config.id] = (transport, users - 1)
                return
            del self._used[config.id]
        transport.close()


def _transport_of(config: DlqConfig) -> Transport:
    transport: Transport = import_string(KAFKA)(
        f"kdlq {config.id}",
        {
            "bootstrap.servers": ",".join(config.servers or ()),
            "producer": {**PRODUCER_DEFAULTS, **config.producer_properties},
        },
    )
    return transport


_producers = _Producers()
