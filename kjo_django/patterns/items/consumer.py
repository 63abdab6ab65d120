"""Template consumers: six methods about an item; the rest is the pipeline every job goes through.

    class EmailConsumer(ModelConsumer):
        topic = "email-queue"
        consumer_group = "email-processors"
        key_prefix = "EMAIL"
        model = Email

        def process(self, message):
            return send(message["data"])

Defining the class in an app's ``consumers.py`` is enough: it declares a queue named like its topic,
and ``manage.py kjo_consume email-queue`` works on it. `item_handler` draws the flow.
"""

from __future__ import annotations

import abc
import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar

from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

from kjo_django import registry
from kjo_django.conf import declare_queue, get_settings
from kjo_django.engine.attempt import Attempt, Ending
from kjo_django.engine.handler.context import JobContext, facts_of
from kjo_django.exceptions import MessageError
from kjo_django.logs import get_logger
from kjo_django.messages import headers as names
from kjo_django.messages.headers import MAX_ID_LENGTH, Message
from kjo_django.messages.serializers import JSON, storable_text
from kjo_django.models import Job
from kjo_django.patterns.items.options import (
    class_attributes,
    flatten,
    prefix_text,
    read_class_options,
    snake,
)
from kjo_django.patterns.items.producer import CONTENT_HASH
from kjo_django.registry import Handler, HandlerOptions, Route
from kjo_django.runtime import current_runtime, jobs_database
from kjo_django.states import ItemState
from kjo_django.transports.base import Record
from kjo_django.values import flag, mapping, option, optional_duration, optional_text, text, whole
from kjo_django.worker.process import Worker
from kjo_django.worker.report import status_of

# ruff: noqa: RUF009 - option() declares a field, as dataclasses.field does.

MAX_CONCURRENCY = 3
"""Messages processed at once, unless the class or MAX_CONCURRENT_MESSAGES says otherwise."""
REQUIRED = ("topic", "consumer_group", "key_prefix")


def _optional_whole(value: Any) -> int | None:
    return None if value is None else whole(1)(value)


@dataclass(frozen=True)
class ConsumerOptions:
    """The options of a template consumer. Class attributes have these names."""

    topic: str = option(text, "", "Topic it reads.")
    consumer_group: str = option(text, "", "Its consumer group.")
    key_prefix: str = option(prefix_text, "", "PREFIX of its lease names.")
    queue: str | None = option(optional_text, None, "Its queue's name; the topic if not given.")
    name: str | None = option(
        optional_text, None, "The handler's name; '<app label>.<class>' if not given."
    )
    transport: str = option(text, "default", "Alias in TRANSPORTS.")
    processing_ttl: timedelta | None = option(
        optional_duration, None, "How long its leases last; PROCESSING_TTL if not given."
    )
    sent_ttl: timedelta | None = option(
        optional_duration, None, "For producers that name its queue; it never looks at sent marks."
    )
    max_concurrency: int | None = option(
        _optional_whole, None, "Messages a worker processes at once."
    )
    max_attempts: int | None = option(_optional_whole, None, "Executions before a dead letter.")
    timeout: timedelta | None = option(optional_duration, None, "Longest run of one attempt.")
    atomic: bool = option(flag, True, "Process inside the transaction that completes the item.")
    topic_options: dict[str, Any] = option(mapping, {}, "See the reference of topics.")


class AbstractConsumer(abc.ABC):
    """Six methods to write, three hooks; any of them may be ``async def``.

    ``topic``, ``consumer_group`` and ``key_prefix`` are required, as class attributes or as entries
    of ``config``. A concrete class that has them is known to workers from its definition on;
    ``class Base(AbstractConsumer, register=False)`` is not.

    One instance serves all threads of a worker: keep nothing of one message on it.

    The arguments of its methods:

    :param message: ``{"id": …, "data": …, "type": …}``, as a producer has built it.
    :param item_id: what ``get_message_id`` has returned, as text.
    :raises ImproperlyConfigured: at its definition, when an option is wrong, unknown or missing.
    """

    STATES: ClassVar[Any] = ItemState
    """The states of its items. Processing is not among them: it is a lease, and nothing is stored.
    """
    config: ClassVar[Mapping[str, Any]] = {}
    """Options by name, where they are not attributes."""
    topic: str
    consumer_group: str
    key_prefix: str
    queue: str | None = None
    max_concurrency: int | None = None
    max_attempts: int | None = None
    atomic: bool = True

    _handler: ClassVar[ItemHandler | None] = None

    def __init_subclass__(cls, *, register: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._handler = None
        if register and not _is_abstract(cls) and (options := options_of(cls)) is not None:
            cls._handler = _register(cls, options)

    def __init__(self) -> None:
        if type(self)._handler is None:
            missing = ", ".join(name for name in REQUIRED if not _given(type(self)).get(name))
            raise ImproperlyConfigured(
                f"{type(self).__name__} needs {missing or 'to be defined with register=True'}."
            )
        self._worker: Any = None
        self._changing = threading.Lock()
        self._is_consuming = False
        self._ended = threading.Event()
        self._concurrency: int | None = None

    # --- To write ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def get_message_id(self, message: dict[str, Any]) -> Any:
        """Return the id of the item. The polling thread calls this, so do no I/O."""

    @abc.abstractmethod
    def get_message_key(self, message: dict[str, Any]) -> Any:
        """Return the item's name for logs."""

    @abc.abstractmethod
    def process(self, message: dict[str, Any]) -> Any:
        """Process the item. A result other than None is passed to ``handle_processing_result``. An
        exception fails the attempt: the item is tried again as long as attempts are left.
        """

    @abc.abstractmethod
    def mark_item_as_completed(self, item_id: str) -> Any:
        """Set the item's state to COMPLETED. With ``atomic``, it is called in the transaction in
        which the item was processed.
        """

    @abc.abstractmethod
    def mark_item_as_failed(self, item_id: str) -> Any:
        """Set the item's state to FAILED. It is called when no attempt is left, in the transaction
        of the dead letter.

        If it raises, that is logged, the dead letter stands and the item stays as it was: its
        producer sends it again, for all its attempts and another dead letter, for as long as this
        method raises.
        """

    @abc.abstractmethod
    def is_item_completed(self, item_id: str) -> Any:
        """Return whether the item's state is COMPLETED.

        It is called under the item's lease and alone decides whether a message is a duplicate.
        """

    # --- Hooks ------------------------------------------------------------------------------------

    def handle_processing_result(self, item_id: str, result: Any) -> Any:
        """Store the result of ``process``, in the transaction that completes the item.

        An exception rolls the state back, and the item is tried again.

        :param result: what ``process`` returned; never None.
        """
        return None

    def on_success(self, item_id: str) -> Any:
        """Called after the commit of a completed item. Exceptions are logged."""
        return None

    def on_failed(self, item_id: str, error: BaseException | None) -> Any:
        """Called after the commit of an item that has failed for good. Exceptions are logged.

        :param error: the error of the last attempt; None if it is not known.
        """
        return None

    def get_database(self) -> str:
        """Return the alias of the database that holds the items: that of the jobs, unless it is
        overridden.
        """
        return jobs_database()

    # --- Running it here --------------------------------------------------------------------------

    def connect(self) -> None:
        """Make a worker for its queue, and the topic if it is missing."""
        if self._worker is not None:
            return
        handler = type(self)._handler
        assert handler is not None
        handler.use(self)
        queue = handler.options.queue
        wanted = self._concurrency or get_settings().queue(queue).concurrency
        worker = Worker([queue], concurrency=wanted, install_signal_handlers=True)
        worker.ensure_topics()
        if self._concurrency is not None:
            worker.set_concurrency(queue, self._concurrency)
        self._worker = worker

    def start_consuming(self) -> int:
        """Work in this thread until ``disconnect``, or a signal where this is the main thread;
        return the exit code.

        :raises RuntimeError: ``connect`` was not called, or ``disconnect`` was called since.
        """
        with self._changing:
            worker = self._worker
            if worker is None:
                raise RuntimeError(f"{type(self).__name__} is not connected: call connect() first")
            self._is_consuming = True
            self._ended.clear()
        try:
            code: int = worker.run()
            return code
        finally:
            with self._changing:
                self._worker = None
                self._is_consuming = False
                self._ended.set()

    def disconnect(self, timeout: float | None = None) -> bool:
        """Let running items end, return the others and leave the group.

        Call it from another thread than the one that works. Returns False if ``timeout`` seconds
        were not enough.

        :param timeout: seconds to wait for the end; None: without limit.
        """
        with self._changing:
            if not self._is_consuming:
                self._worker = None  # nothing has begun that would have to end
                return True
            self._worker.stop()
        return self._ended.wait(timeout)

    def set_max_concurrency(self, count: int) -> None:
        """Change how many messages are processed at once. Waiting messages start at once if there
        is room.

        :param count: at least 1.
        :raises ValueError: not a whole number above 0.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"The concurrency must be a whole number above 0, not {count!r}")
        self._concurrency = count
        handler = type(self)._handler
        if self._worker is not None and handler is not None:
            self._worker.set_concurrency(handler.options.queue, count)

    def get_status(self) -> dict[str, Any]:
        """Return the figures of the status report, and whether the consumer is connected."""
        if self._worker is None:
            return {"is_connected": False}
        status: dict[str, Any] = status_of(self._worker)
        maximum, active = status["concurrency"], status["active"]
        return {
            "is_connected": True,
            "concurrency": {
                "max": maximum,
                "active": active,
                "queued": status["queue_length"],
                "available": max(0, maximum - active),
            },
            "performance": {
                "processed": status["processed"],
                "failed": status["failed"],
                "success_rate": status["success_percent"],
                "max_concurrent_reached": status["peak"],
            },
            "queue": {
                "length": status["queue_length"],
                "oldest_waiting_ms": status["oldest_waiting_ms"],
            },
            "report": status,
        }


# --- Definition -----------------------------------------------------------------------------------


def _is_abstract(cls: type[Any]) -> bool:
    # ``__abstractmethods__`` is set only after ``__init_subclass__`` has run.
    return any(
        getattr(getattr(cls, name, None), "__isabstractmethod__", False) for name in dir(cls)
    )


def _given(cls: type[AbstractConsumer]) -> dict[str, Any]:
    """Return the options given by the class; ``config`` takes precedence over attributes."""
    where = cls.__name__
    declared = class_attributes(cls, ConsumerOptions)
    return {**declared, **flatten(cls.config, where)}


def options_of(cls: type[AbstractConsumer]) -> ConsumerOptions | None:
    """Return the options of a class; None for a base class, which has none of the required options.

    :raises ImproperlyConfigured: an option is wrong or unknown, or a required one is missing.
    """
    given = _given(cls)
    missing = [name for name in REQUIRED if given.get(name) is None]
    if len(missing) == len(REQUIRED):
        return None
    if missing:
        raise ImproperlyConfigured(
            f"{cls.__name__} needs {', '.join(missing)}, as text that is not empty."
        )
    if given.get("max_concurrency") is None:
        given["max_concurrency"] = _concurrency_of_environment()
    if isinstance(given.get("topic_options"), Mapping):
        given["topic_options"] = {
            snake(name): value for name, value in given["topic_options"].items()
        }
    return read_class_options(ConsumerOptions, given, cls.__name__)


def _concurrency_of_environment() -> int:
    """Return MAX_CONCURRENT_MESSAGES."""
    found = os.environ.get("MAX_CONCURRENT_MESSAGES")
    if not found:
        return MAX_CONCURRENCY
    if not found.isdigit() or int(found) < 1:
        raise ImproperlyConfigured(
            f"MAX_CONCURRENT_MESSAGES must be a whole number above 0, not {found!r}."
        )
    return int(found)


def _register(cls: type[AbstractConsumer], options: ConsumerOptions) -> ItemHandler:
    """Register the class's queue, the handler of its items and its route."""
    queue = options.queue or options.topic
    present = registry.route_of(queue)
    handler = ItemHandler(
        cls,
        cls,
        registry.HandlerOptions(
            name=options.name or registry.default_name(cls),
            queue=queue,
            max_attempts=options.max_attempts,
            timeout=options.timeout,
            atomic=options.atomic,
            takes_context=True,
        ),
    )
    if isinstance(present, ItemRoute) and present.handler.name != handler.name:
        raise ImproperlyConfigured(
            f"{cls.__name__} and {present.handler.name} both read the queue {queue!r}; give one of "
            "them another queue."
        )
    registry.register(handler)
    declared = {
        "topic": options.topic,
        "consumer_group": options.consumer_group,
        "key_prefix": options.key_prefix,
        "transport": options.transport,
        "processing_ttl": options.processing_ttl,
        "sent_ttl": options.sent_ttl,
        "concurrency": options.max_concurrency,
        "topic_options": options.topic_options,
    }
    declare_queue(queue, **{name: value for name, value in declared.items() if value})
    registry.bind(queue, ItemRoute(handler))
    return handler


# --- The handler: one run of one item -------------------------------------------------------------


logger = get_logger("kjo_django.consumer")

SKIPPED_COMPLETED = "completed"
"""``Attempt.reason`` of a message whose item was completed before."""


class ItemHandler(Handler):
    """Calls the methods of one consumer class, whose instance is made with the first message."""

    judges_itself = True
    observes = True

    def __init__(
        self, make: Callable[[], AbstractConsumer], kind: type[Any], options: HandlerOptions
    ) -> None:
        def run(context: JobContext, message: dict[str, Any]) -> None:
            self.run(context, message)

        # Two classes of one name are told apart by this.
        run.__module__, run.__qualname__ = kind.__module__, kind.__qualname__
        super().__init__(run, options)
        self._make = make
        self._consumer: AbstractConsumer | None = None
        self._lock = threading.Lock()
        self._completed_before: set[str] = set()

    @property
    def consumer(self) -> AbstractConsumer:
        """The consumer. Every lane's thread calls its methods."""
        with self._lock:
            if self._consumer is None:
                self._consumer = self._make()
            return self._consumer

    def use(self, consumer: AbstractConsumer) -> None:
        """Use this consumer."""
        with self._lock:
            self._consumer = consumer

    def item_id_of(self, message: dict[str, Any]) -> str:
        """Return the id of the item a message is about."""
        found = _call(self.consumer.get_message_id, message)
        if found is None:
            raise ValueError("get_message_id returned None")
        return str(found)

    def arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the message unchanged."""
        if not isinstance(value, dict):
            raise MessageError(
                "invalid", f"The message must be an object, not {type(value).__name__}"
            )
        return (value,), {}

    def check_arguments(self, payload: dict[str, Any]) -> str | None:
        """Return None: ``process`` takes any message."""
        return None

    # --- One run ----------------------------------------------------------------------------------

    def run(self, context: JobContext, message: dict[str, Any]) -> None:
        """Process the item unless it is completed. Its lease is this worker's."""
        consumer, item_id = self.consumer, self.item_id_of(message)
        self._completed_before.discard(context.idempotency_key)
        key = _call(consumer.get_message_key, message)
        if _call(consumer.is_item_completed, item_id):
            logger.info("Nothing to do, completed already or gone: %s", key)
            self._completed_before.add(context.idempotency_key)
        elif self.options.atomic:
            logger.debug("New item to process: %s", key)
            with self._transaction(is_open=True):
                self._complete(item_id, _call(consumer.process, message))
        else:
            logger.debug("New item to process: %s", key)
            result = _call(consumer.process, message)
            with self._transaction(is_open=False):
                if consumer.get_database() == jobs_database():
                    # Reading first, it would be refused its first write on a busy SQLite.
                    current_runtime().store.take_write_lock()
                # A worker that was frozen past its lease comes late: the item is somebody else's.
                if not _call(consumer.is_item_completed, item_id):
                    self._complete(item_id, result)
        if job_id := context.headers.get(names.JOB_ID):
            _free_identity(job_id)

    def _complete(self, item_id: str, result: Any) -> None:
        _call(self.consumer.mark_item_as_completed, item_id)
        if result is not None:  # 0, "", False and [] are results too
            _call(self.consumer.handle_processing_result, item_id, result)

    def _transaction(self, *, is_open: bool) -> AbstractContextManager[Any]:
        """Return the transaction that completes the item: the engine's, if it is open and on the
        item's database, else a new one.
        """
        alias = self.consumer.get_database()
        if is_open and alias == jobs_database():
            return nullcontext()
        return transaction.atomic(using=alias)

    # --- Afterwards -------------------------------------------------------------------------------

    def on_failure(self, attempt: Attempt) -> None:
        """Mark the item as failed once no attempt is left."""
        message = attempt.delivery.message
        if attempt.ending is not Ending.DEAD:
            return
        if attempt.row is not None:
            _free_identity(attempt.row.id)
        try:
            with transaction.atomic(using=self.consumer.get_database()):
                _call(self.consumer.mark_item_as_failed, message.lease_id)
        except Exception:
            # The dead letter is written all the same, and the item found again by its producer.
            facts = facts_of(attempt.delivery, attempt.number)
            logger.exception("Item %s could not be marked as failed", message.lease_id, extra=facts)

    def on_settled(self, attempt: Attempt) -> None:
        """Call the hooks, after the commit."""
        message = attempt.delivery.message
        if attempt.ending is Ending.COMPLETED:
            was_before = message.id in self._completed_before
            self._completed_before.discard(message.id)
            if was_before and not attempt.is_confirmed:
                attempt.ending, attempt.reason = Ending.SKIPPED, SKIPPED_COMPLETED
            else:
                _call(self.consumer.on_success, message.lease_id)
        elif attempt.ending is Ending.DEAD:
            _call(self.consumer.on_failed, message.lease_id, attempt.error)


def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of a consumer, whether it is ``async def`` or not."""
    found = method(*arguments)
    if hasattr(found, "__await__"):
        return async_to_sync(_await)(found)
    return found


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _free_identity(job_id: Any) -> None:
    """Release the unique id of the job of an item's retries.

    The same content that is sent again after the item was set back or has failed is new work, not a
    copy of that job.
    """
    Job.objects.using(jobs_database()).filter(pk=job_id).update(unique_id=None)


# --- The route: records of template producers -----------------------------------------------------


class ItemRoute(Route):
    """Reads records about items. A retry has our envelope around the same value."""

    def __init__(self, handler: ItemHandler) -> None:
        self.handler = handler

    def read(self, record: Record, *, max_bytes: int) -> tuple[Message, Handler | None]:
        """Read a record. Its lease is that of its item, whichever message names the item.

        :raises MessageError: it is not a JSON object with an id, or is too large.
        """
        item_id = self._item_id(_object_of(record.value, max_bytes))
        if names.JOB_ID in record.headers:
            found = super().read(record, max_bytes=max_bytes)
            assert found is not None
            message, handler = found
            return replace(message, lease_id=item_id), handler
        assert record.value is not None
        content = names.text(record.headers, CONTENT_HASH) or _digest(record.value)
        message = Message(
            id=marker_of(item_id, content),
            type=self.handler.name,
            payload=record.value,
            content_type=JSON.content_type,
            replay_count=names.number(record.headers, names.REPLAY_COUNT, 0),
            timestamp=record.timestamp,
            lease_id=item_id,
        )
        return message, self.handler

    def _item_id(self, message: dict[str, Any]) -> str:
        try:
            item_id = self.handler.item_id_of(message)
        except Exception as error:
            # The thread that polls must outlive any message.
            raise MessageError("invalid", f"The message has no usable id: {error!r}") from error
        if not 0 < len(item_id) <= MAX_ID_LENGTH or storable_text(item_id) != item_id:
            raise MessageError(
                "invalid", f"The item's id must be text of 1 to {MAX_ID_LENGTH} characters"
            )
        return item_id


def marker_of(item_id: str, content: str) -> str:
    """Return a digest of an item's content. Two deliveries of one content have the same digest."""
    marker = f"{item_id}#{content}"
    # The content's hash may be whatever others wrote into a header.
    fits = len(marker) <= MAX_ID_LENGTH and "\x00" not in marker
    return marker if fits else _digest(marker.encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _object_of(value: bytes | None, max_bytes: int) -> dict[str, Any]:
    if not value:
        raise MessageError("invalid", "The message has no value")
    if len(value) > max_bytes:
        raise MessageError(
            "too_large", f"The message has {len(value)} bytes; the limit is {max_bytes}"
        )
    data = JSON.loads(value)
    if not isinstance(data, dict):
        raise MessageError("invalid", f"The message must be an object, not {type(data).__name__}")
    return data
