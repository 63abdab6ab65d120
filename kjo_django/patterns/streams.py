"""Template producers and consumers of tasks on a stream.

    class AnalyzeProducer(AbstractStreamProducer[Resume]):
        task_display_name = "resume analysis"
        stream_key = "resume:analyze:stream"

        def build_message(self, resume): return {"resumeId": str(resume.pk)}
        def payload_identifier(self, resume): return str(resume.pk)
        def on_send_failed(self, resume, error): resume.fail(error)

The entry is stored in the caller's transaction and sent once that commits, so a worker never finds
the task before its row, and a crash in between loses nothing. A consumer takes it through

    fields ─> parse_payload ─> should_skip? ─> mark_processing ─> process_business ─> mark_completed
                 │ None                              │ raised
            dead letter              attempts left: retry_message, due again with a growing delay
                                     none left: mark_failed and a dead letter

The steps run outside a transaction, so others see the task being processed (``atomic = False``). A
copy of a task that is completed does not run again. An error while its state is written fails the
attempt instead of acknowledging it. What a crashed consumer had comes to another one.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, Generic, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.utils.translation import gettext as _

from kjo_django import registry
from kjo_django.conf import declare_queue
from kjo_django.engine.attempt import Attempt, Ending
from kjo_django.engine.handler.context import JobContext
from kjo_django.enqueue.storing import carrier_of, outbox_of, store_record
from kjo_django.exceptions import MessageError
from kjo_django.failure_facts import error_text
from kjo_django.logs import get_logger
from kjo_django.messages import headers as names
from kjo_django.messages.headers import MAX_ID_LENGTH, Message
from kjo_django.messages.serializers import JSON, MAX_ERROR_LENGTH, loads_for_display, storable_text
from kjo_django.retries import Backoff
from kjo_django.transports.base import Record

producer_logger = get_logger("kjo_django.producer")
logger = get_logger("kjo_django.consumer")

T = TypeVar("T")
RETRY_COUNT = "retryCount"


def truncate_error(text: str | None) -> str | None:
    """Return at most 500 characters of an error, the prefix included; None stays None."""
    return None if text is None else storable_text(text, MAX_ERROR_LENGTH)


class AbstractStreamProducer(abc.ABC, Generic[T]):
    """Sends tasks to one stream.

    The argument of its methods:

    :param payload: what was given to ``send_task``.
    :raises TypeError: when it is made: ``task_display_name`` or ``stream_key`` is missing.
    """

    task_display_name: ClassVar[str]
    """The task's name in logs and errors."""
    stream_key: ClassVar[str]
    """The topic; by convention ``{domain}:{action}:stream``."""

    def __init__(self) -> None:
        for name in ("task_display_name", "stream_key"):
            if not getattr(self, name, ""):
                raise TypeError(f"{type(self).__name__} needs {name}")

    @abc.abstractmethod
    def build_message(self, payload: T) -> Mapping[str, Any]:
        """Return the entry's fields. Pass ids, not contents: fields are stored and shown."""

    @abc.abstractmethod
    def payload_identifier(self, payload: T) -> str:
        """Return the id of the task's subject. Tasks of one subject keep their order."""

    @abc.abstractmethod
    def on_send_failed(self, payload: T, error: str) -> None:
        """Called when the task could not be stored, so that it will never run.

        :param error: why, in at most 500 characters.
        """

    def send_task(self, payload: T) -> uuid.UUID | None:
        """Store the task, to be sent with the caller's transaction; return the id of its row.

        The row is ``completed`` once the task has been sent. Where its consumer is of this service
        and an attempt fails, the same row is the task's job from then on, with its attempts, its
        retries and its end.

        None: it could not be stored, ``on_send_failed`` was called, and the caller's transaction
        can go on.

        :param payload: what the task is about; passed to the other methods.
        """
        identifier = "?"
        try:
            identifier = self.payload_identifier(payload)
            fields = {**self.build_message(payload), RETRY_COUNT: "0"}
            with transaction.atomic(using=outbox_of(carrier_of(self.stream_key))):
                row = store_record(
                    self.stream_key,
                    value=JSON.dumps({name: str(value) for name, value in fields.items()}),
                    key=identifier.encode(),
                    headers={names.CONTENT_TYPE: JSON.content_type.encode()},
                    kind=self.task_display_name,
                    row_header=names.ID,
                )
        except Exception as error:
            producer_logger.exception("%s of %s was not queued", self.task_display_name, identifier)
            told = _("The task could not be queued: %(error)s") % {"error": error}
            self.on_send_failed(payload, truncate_error(told) or "")
            return None
        producer_logger.info(
            "%s queued for %s: %s", self.task_display_name, self.stream_key, identifier
        )
        return row.pk


# --- The consumer ---------------------------------------------------------------------------------


BACKOFF = Backoff(timedelta(seconds=1), timedelta(seconds=60), jitter=0.2, is_minimum=True)
"""min(1000 · 2^n, 60000) ms, and up to a fifth more, drawn at random."""


class AbstractStreamConsumer(abc.ABC, Generic[T]):
    """Runs the tasks of one stream. Defining a concrete class with its three names is enough;
    ``manage.py kjo_consume <stream_key>`` works on it.

    One instance serves all threads of a worker: keep nothing of one task on it. Its methods are
    called outside a transaction, unless they say otherwise.

    The argument of its methods:

    :param payload: what ``parse_payload`` has returned.
    :raises ImproperlyConfigured: at its definition: one of ``task_display_name``, ``stream_key``
        and ``group_name`` is missing.
    """

    task_display_name: ClassVar[str]
    """The task's name in logs and errors."""
    stream_key: ClassVar[str]
    """The topic, and the name of its queue."""
    group_name: ClassVar[str]
    """The consumer group."""
    transport: ClassVar[str] = "default"
    """Alias in ``KJO["TRANSPORTS"]``."""
    max_retry_count: ClassVar[int] = 3
    """Retries after the first execution: 3 are 4 executions."""
    timeout: ClassVar[timedelta | None] = None
    """Longest run of one attempt; ``KJO["TIMEOUT"]`` if not given."""

    def __init_subclass__(cls, *, register: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        given = [n for n in ("task_display_name", "stream_key", "group_name") if hasattr(cls, n)]
        is_abstract = any(
            getattr(getattr(cls, name, None), "__isabstractmethod__", False) for name in dir(cls)
        )
        if not register or is_abstract or not given:
            return
        if len(given) < 3:
            raise ImproperlyConfigured(
                f"{cls.__name__} needs task_display_name, stream_key and group_name."
            )
        _register(cls)

    @abc.abstractmethod
    def parse_payload(self, fields: dict[str, Any]) -> T | None:
        """Return the payload of an entry's fields. None, or an exception, makes a dead letter.

        :param fields: of the entry, by name; texts.
        """

    @abc.abstractmethod
    def payload_identifier(self, payload: T) -> str:
        """Return the id of the task's subject, for logs."""

    @abc.abstractmethod
    def mark_processing(self, payload: T) -> None:
        """Set the task's state to PROCESSING and clear its error."""

    @abc.abstractmethod
    def process_business(self, payload: T) -> None:
        """Process the task. Raise ``PermanentError`` when another attempt cannot help; any other
        exception fails the attempt.
        """

    @abc.abstractmethod
    def mark_completed(self, payload: T) -> None:
        """Set the task's state to COMPLETED and clear its error."""

    @abc.abstractmethod
    def mark_failed(self, payload: T, error: str) -> None:
        """Set the task's state to FAILED. Called in the transaction of its dead letter.

        :param error: of the last attempt, in at most 500 characters.
        """

    def should_skip(self, payload: T) -> bool:
        """Return whether there is nothing to do: the task is completed, or its subject is gone."""
        return False

    def retry_message(self, payload: T, retry_count: int) -> None:
        """Called in the transaction that schedules a retry.

        :param retry_count: the number of the retry, from 1.
        """


class _StreamHandler(registry.Handler):
    """Calls the methods of one consumer in their documented order."""

    observes = True

    def __init__(
        self, consumer: AbstractStreamConsumer[Any], options: registry.HandlerOptions
    ) -> None:
        def run(context: JobContext, fields: dict[str, Any]) -> None:
            self.run(context, fields)

        run.__module__, run.__qualname__ = type(consumer).__module__, type(consumer).__qualname__
        super().__init__(run, options)
        self.consumer = consumer

    def arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not isinstance(value, dict):
            raise MessageError("invalid", "The entry's fields must be an object")
        return (value,), {}

    def run(self, context: JobContext, fields: dict[str, Any]) -> None:
        consumer, name = self.consumer, self.consumer.task_display_name
        payload = self.parse(fields)
        who = consumer.payload_identifier(payload)
        if consumer.should_skip(payload):
            logger.warning("%s of %s skipped: nothing to do", name, who)
            return
        logger.info("%s of %s begins, retry %d", name, who, context.attempt - 1)
        consumer.mark_processing(payload)
        consumer.process_business(payload)
        consumer.mark_completed(payload)
        logger.info("%s of %s completed", name, who)

    def parse(self, fields: dict[str, Any]) -> Any:
        try:
            payload = self.consumer.parse_payload(fields)
        except Exception as error:
            raise MessageError("invalid", f"The entry cannot be parsed: {error!r}") from error
        if payload is None:
            raise MessageError("invalid", "The entry lacks a field of its task")
        return payload

    def on_failure(self, attempt: Attempt) -> None:
        message = attempt.delivery.message
        fields = loads_for_display(message.payload, message.content_type)
        if not isinstance(fields, dict) or isinstance(attempt.error, MessageError):
            return  # nobody knows whose task it was
        payload = self.parse(fields)
        if attempt.ending is Ending.RETRIED:
            self.consumer.retry_message(payload, attempt.number)
        elif attempt.ending is Ending.DEAD:
            told = _("%(task)s failed (retried %(count)d times): %(error)s") % {
                "task": self.consumer.task_display_name,
                "count": max(0, attempt.number - 1),
                "error": error_text(attempt.error),
            }
            self.consumer.mark_failed(payload, truncate_error(told) or "")


class StreamRoute(registry.Route):
    """Reads entries of a stream: fields as a JSON object, identified by our row or by their
    position.
    """

    def __init__(self, handler: _StreamHandler) -> None:
        self.handler = handler

    def read(
        self, record: Record, *, max_bytes: int
    ) -> tuple[Message, registry.Handler | None] | None:
        """Read an entry. A retry has our envelope around the same fields."""
        if names.JOB_ID in record.headers:
            return super().read(record, max_bytes=max_bytes)
        if not record.value:
            raise MessageError("invalid", "The entry has no fields")
        if len(record.value) > max_bytes:
            raise MessageError(
                "too_large", f"The entry has {len(record.value)} bytes; the limit is {max_bytes}"
            )
        place = f"{record.topic}:{record.partition}:{record.offset}"
        message = Message(
            id=storable_text(names.text(record.headers, names.ID) or place, MAX_ID_LENGTH),
            type=self.handler.name,
            payload=record.value,
            content_type=JSON.content_type,
            replay_count=names.number(record.headers, names.REPLAY_COUNT, 0),
            timestamp=record.timestamp,
        )
        return message, self.handler


def _register(cls: type[AbstractStreamConsumer[Any]]) -> None:
    handler = _StreamHandler(
        cls(),
        registry.HandlerOptions(
            name=registry.default_name(cls),
            queue=cls.stream_key,
            max_attempts=cls.max_retry_count + 1,
            timeout=cls.timeout,
            backoff=BACKOFF,
            atomic=False,
            takes_context=True,
        ),
    )
    registry.register(handler)
    declare_queue(
        cls.stream_key,
        topic=cls.stream_key,
        consumer_group=cls.group_name,
        transport=cls.transport,
    )
    registry.bind(cls.stream_key, StreamRoute(handler))
