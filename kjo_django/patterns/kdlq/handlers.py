"""``kdlq_handler``: KDLQ's rules in a worker.

The processor's effects, the marker and the redelivery or kill are one transaction: a redelivery or
a kill is a record in the outbox. It is published if and only if the offset may be committed, once
however often the worker dies, and after its delay without blocking a lane.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction

from kjo_django import conf, registry
from kjo_django.clock import CLOCK
from kjo_django.conf import get_settings
from kjo_django.engine.handler.connections import is_of_database, is_repeatable
from kjo_django.engine.handler.context import Abort, JobContext
from kjo_django.enqueue.storing import row_key, store_record
from kjo_django.exceptions import JobCancelledError, MessageError, PayloadError
from kjo_django.logs import get_logger
from kjo_django.messages import headers as names
from kjo_django.messages.headers import Message
from kjo_django.messages.serializers import register_serializer
from kjo_django.models import ORIGIN_ID
from kjo_django.patterns.kdlq import headers, letters, parking
from kjo_django.patterns.kdlq.config import (
    MAX_ID_LENGTH,
    DlqConfig,
    Ordering,
    ProcessingStatus,
    Status,
    call_listeners,
)
from kjo_django.patterns.kdlq.routing import Decision, Processor, Verdict, decide, judge
from kjo_django.registry import Handler, HandlerOptions, Route
from kjo_django.runtime import jobs_database
from kjo_django.transports.base import OutgoingRecord, Record

F = TypeVar("F", bound=Processor)

logger = get_logger("kjo_django")

MAX_MESSAGE_ID = 255
"""Of the column that keeps what has taken effect."""


class Raw:
    """A serializer that passes bytes unchanged; nothing is decoded for a processor."""

    content_type = "application/octet-stream"

    def dumps(self, value: Any) -> bytes:
        """Return the bytes unchanged; raises ``PayloadError`` for other types."""
        if not isinstance(value, bytes | bytearray | memoryview):
            raise PayloadError(f"The payload must be bytes, not {type(value).__name__}")
        return bytes(value)

    def loads(self, data: bytes) -> bytes:
        """Return the bytes unchanged."""
        return data


register_serializer(Raw())


class KdlqHandler(Handler):
    """A processor with its configuration and the current record."""

    def __init__(self, processor: Processor, options: HandlerOptions, config: DlqConfig) -> None:
        super().__init__(processor, replace(options, takes_context=True))
        self.processor = processor
        self.config = config
        self.function = self._run
        self.record: Record | None = None

    def of(self, record: Record) -> KdlqHandler:
        """Return a copy for one record. The processor gets its bytes, not a decoded payload."""
        bound = copy.copy(self)
        bound.record = record
        bound.function = bound._run
        return bound

    def arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Call the function with the context only."""
        return (), {}

    def _run(self, context: JobContext) -> None:
        record = self.record
        assert record is not None
        if letters.is_decided(record, self.name):
            logger.info(letters.DECIDED, letters.place_of(record))
            return
        line = None
        if self.config.ordering is Ordering.KEY and record.key:
            line = parking.line_of(record, self.options.queue, self.name, row_key(record.key))
            if line.is_stale:
                return
            if line.is_full:
                # Stays with the broker, its key with it, and is looked at again in a moment.
                context.abort(Abort.SHUTDOWN)
                raise JobCancelledError(f"{parking.LIMIT_OF_KEY} of its key wait already")
            if line.ahead_until is not None:
                parking.leave(line)
                self._park(record, line, max(line.ahead_until, CLOCK.now()))
                return
        self._process(record, line, context)

    def _process(self, record: Record, line: parking.Line | None, context: JobContext) -> None:
        def may_succeed_again(error: Exception) -> bool:
            """Others in its transaction may be why it failed, or the database chose it for the sake
            of others: the worker calls it again, as any handler."""
            if is_repeatable(error):
                return True
            return context.is_shared and is_of_database(error, connections[jobs_database()])

        def call() -> Any:
            with transaction.atomic(using=jobs_database()):
                answer = self.processor(record)
                if answer not in (None, ProcessingStatus.OK):
                    # What it wrote is undone with it, as it would be had it raised.
                    transaction.set_rollback(True, using=jobs_database())
                return answer

        verdict = judge(call, self.config, may_succeed_again)
        self._call_listeners_later(
            "on_message_processing", record, status=verdict.status, error=verdict.error
        )
        decision = decide(record, verdict, self.config, self.name)
        if line is not None:
            parking.leave(line)
        self._carry_out(record, decision, verdict, line)

    def _carry_out(
        self, record: Record, decision: Decision, verdict: Verdict, line: parking.Line | None
    ) -> None:
        if decision.status is Status.REDELIVERED:
            assert decision.outgoing is not None
            due = CLOCK.now() + decision.delay
            if line is not None:
                self._park(replace_headers(record, decision.outgoing), line, due)
            else:
                self._store(decision.outgoing, available_at=due, row_header=names.REDELIVERY)
            self._call_listeners_later("on_message_redelivery_success", record)
        elif decision.status is Status.ROUTED_TO_DLQ:
            assert decision.outgoing is not None
            place = letters.place_of(record).encode()
            told = {**_without_rows(decision.outgoing.headers), names.DLQ_MESSAGE_ID: place}
            self._store(replace(decision.outgoing, headers=told))
            is_exhausted = verdict.status is ProcessingStatus.MUST_BE_REDELIVERED
            self._write_letter(record, verdict, told, is_exhausted=is_exhausted)
            self._call_listeners_later("on_message_kill_success", record)
        elif decision.status is Status.SKIPPED_DLQ_MAX_ATTEMPTS_REACHED:
            self._write_letter(record, verdict, record.headers, is_skipped=True)
            self._call_listeners_later("on_message_skip", record)
        elif headers.counter(record.headers, headers.KILLS):
            letters.close_letter(record, self.name)

    def _park(self, record: Record, line: parking.Line, due: Any) -> None:
        outgoing = OutgoingRecord(
            topic=self.config.redelivery_topic or record.topic,
            key=record.key,
            value=record.value,
            headers={**record.headers, names.PARKED_PLACE: line.place.encode()},
        )
        self._store(outgoing, available_at=due, row_header=names.PARKED_ROW)

    def _store(
        self,
        outgoing: OutgoingRecord,
        *,
        available_at: Any = None,
        row_header: str | None = None,
    ) -> None:
        store_record(
            outgoing.topic,
            value=outgoing.value,
            key=outgoing.key,
            headers=outgoing.headers,
            kind=self.name,
            carrier=get_settings().queue(self.options.queue),
            available_at=available_at,
            row_header=row_header,
        )

    def _write_letter(self, record: Record, verdict: Verdict, told: Any, **how: bool) -> None:
        queue = get_settings().queue(self.options.queue)
        letters.record_letter(
            record,
            self.name,
            verdict.error,
            headers=told,
            queue=queue.name,
            group=queue.consumer_group,
            **how,
        )

    def _call_listeners_later(self, hook: str, record: Record, **facts: Any) -> None:
        listeners = self.config.listeners
        call = functools.partial(call_listeners, listeners, hook, self.name, record, **facts)
        transaction.on_commit(call, using=jobs_database())


def replace_headers(record: Record, outgoing: OutgoingRecord) -> Record:
    """Return the record with the headers it is sent with."""
    return replace(record, headers=dict(outgoing.headers))


def _without_rows(found: Any) -> dict[str, bytes]:
    return {
        name: value
        for name, value in found.items()
        if name not in (names.PARKED_PLACE, names.PARKED_ROW, names.REDELIVERY)
    }


class KdlqRoute(Route):
    """Reads each record of the topic for the one processor."""

    def __init__(self, handler: KdlqHandler) -> None:
        self.handler = handler

    def read(self, record: Record, *, max_bytes: int) -> tuple[Message, Handler | None]:
        """Return the record's id, made of its position: KDLQ's messages have no id.

        A redelivery of ours has its row's id, since the relay may publish it twice.
        """
        if len(record.value or b"") > max_bytes:
            raise MessageError("too_large", f"The message has {len(record.value or b'')} bytes")
        found = record.headers
        id = job_id = ""
        if names.text(found, names.SERVICE) == get_settings().service_name:
            # Its transaction failed before, and its row brought it back.
            id = names.identifier(found, names.ID, MAX_MESSAGE_ID)
            # Whoever wrote headers that are no ids, it was not us.
            job_id = names.identifier(found, names.JOB_ID, MAX_MESSAGE_ID) if id else ""
        original = _original_of(record) if job_id else record
        return (
            Message(
                id=id if job_id else letters.redelivery_of(record) or letters.place_of(record),
                type=self.handler.name,
                payload=record.value or b"",
                content_type=Raw.content_type,
                job_id=job_id or None,
                service=names.text(found, names.SERVICE) if job_id else "",
                generation=names.number(found, names.GENERATION, 1) if job_id else 1,
                attempt=names.number(found, names.ATTEMPT, 1) if job_id else 1,
                replay_count=names.number(found, names.REPLAY_COUNT, 0),
                timestamp=record.timestamp,
            ),
            self.handler.of(original),
        )


def _original_of(record: Record) -> Record:
    """Return the record as it was first read, before a failed transaction published it again."""
    found = record.headers
    theirs = names.without_envelope(found)
    theirs.pop(ORIGIN_ID, None)
    return replace(
        record,
        topic=names.text(found, names.DLQ_ORIGINAL_TOPIC) or record.topic,
        partition=names.number(found, names.DLQ_ORIGINAL_PARTITION, record.partition),
        offset=names.number(found, names.DLQ_ORIGINAL_OFFSET, record.offset, most=names.MAX_OFFSET),
        timestamp=names.moment(found, names.DLQ_ORIGINAL_TIMESTAMP) or record.timestamp,
        headers=theirs,
    )


def kdlq_handler(
    id: str,
    *,
    topic: str,
    config: DlqConfig | None = None,
    from_dlq: bool = False,
    **queue_options: Any,
) -> Callable[[F], F]:
    """Declare a function as the KDLQ processor of a topic.

    It takes a ``Record`` and returns a ``ProcessingStatus`` (None for OK), or raises.

    :param id: of the consumer, 1 to 100 characters; the marker in the messages' headers.
    :param topic: the topic to read.
    :param config: by default as many redeliveries as ``max_attempts`` allows, through a topic of
        this consumer, then ``<topic>-dlq``.
    :param from_dlq: also process the records of the dead-letter topic.
    :param queue_options: of the queue made for the topic, see ``KJO["QUEUES"]``.
    :raises ImproperlyConfigured: the id is not such a text, or the function is a coroutine
        function.
    :raises TypeError: there is no such option.
    """
    if not isinstance(id, str) or not 0 < len(id.strip()) <= MAX_ID_LENGTH:
        raise ImproperlyConfigured(f"kdlq_handler: id must have 1 to {MAX_ID_LENGTH} characters")
    conf.check_queue_options(queue_options, "kdlq_handler", "config", "from_dlq")

    def declare(processor: F) -> F:
        if inspect.iscoroutinefunction(processor):
            raise ImproperlyConfigured(f"{id}: a KDLQ processor cannot be a coroutine function")
        _declare(id, topic, processor, config, from_dlq=from_dlq, options=queue_options)
        return processor

    return declare


def _declare(
    id: str,
    topic: str,
    processor: Processor,
    config: DlqConfig | None,
    *,
    from_dlq: bool,
    options: dict[str, Any],
) -> None:
    own = f"{topic}-redelivery-{id}"
    if config is None:
        conf.declare_queue(topic, **options)
        attempts = conf.settings_as_read().queue(topic).max_attempts
        config = DlqConfig(f"{topic}-dlq", redelivery_topic=own, max_redeliveries=attempts - 1)
    if config.servers is not None:
        raise ImproperlyConfigured(f"{id}: in the pipeline KDLQ uses a transport, not servers")
    retry = f"{topic}-retry"
    common = {
        **options,
        "transport": config.transport,
        "dead_letter_topic": config.dlq_topic,
        "retry_queue": retry,
        "key_prefix": topic.upper(),
    }
    handler = KdlqHandler(processor, HandlerOptions(name=id, queue=topic), config)
    route = KdlqRoute(handler)
    places = {topic: topic, retry: f"{topic}-retry-{id}"}
    if config.redelivery_topic and config.redelivery_topic != topic:
        places[f"{topic}-redelivery"] = config.redelivery_topic
    if from_dlq:
        places[f"{topic}-from-dlq"] = config.dlq_topic
    for name, place in places.items():
        conf.declare_queue(name, **common, topic=place)
        registry.bind(name, route)
