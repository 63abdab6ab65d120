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
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured

from kjo_django import registry
from kjo_django.conf import declare_queue, get_settings
from kjo_django.patterns.items import item_options
from kjo_django.patterns.items.item_handler import ItemHandler
from kjo_django.patterns.items.item_route import ItemRoute
from kjo_django.patterns.items.wiring import above
from kjo_django.states import ItemState
from kjo_django.store.transactions import jobs_database
from kjo_django.values import flag, mapping, option, optional_duration, optional_text, text, whole

# ruff: noqa: RUF009 - option() declares a field, as dataclasses.field does.

MAX_CONCURRENCY = 3
"""Messages processed at once, unless the class or MAX_CONCURRENT_MESSAGES says otherwise."""
REQUIRED = ("topic", "consumer_group", "key_prefix")


def _optional_whole(value: Any) -> int | None:
    return None if value is None else whole(1)(value)


@dataclass(frozen=True)
class ConsumerOptions:
    """What a template consumer may be told; attributes of its class have these names."""

    topic: str = option(text, "", "Topic it reads.")
    consumer_group: str = option(text, "", "Its consumer group.")
    key_prefix: str = option(item_options.prefix, "", "PREFIX of its lease names.")
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
    of ``config``; ``ConsumerOptions`` has the rest. A concrete class that has them is known to
    workers from its definition on; ``class Base(AbstractConsumer, register=False)`` is not.

    One instance serves all threads of a worker: keep nothing of one message on it.

    :raises ImproperlyConfigured: at its definition, when an option is wrong, unknown or missing.
    """

    STATES: ClassVar[Any] = ItemState
    """The states of its items; processing is virtual: a lease, nothing stored (KJO-67)."""
    config: ClassVar[Mapping[str, Any]] = {}
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
        """Return the id of the item; called by the thread that polls, so without I/O."""

    @abc.abstractmethod
    def get_message_key(self, message: dict[str, Any]) -> Any:
        """Return what people know the item by; it appears in logs."""

    @abc.abstractmethod
    def process(self, message: dict[str, Any]) -> Any:
        """Do the work. What it returns, unless None, is given to ``handle_processing_result``."""

    @abc.abstractmethod
    def mark_item_as_completed(self, item_id: str) -> Any:
        """Set the item's state to COMPLETED."""

    @abc.abstractmethod
    def mark_item_as_failed(self, item_id: str) -> Any:
        """Set the item's state to FAILED: no attempt is left."""

    @abc.abstractmethod
    def is_item_completed(self, item_id: str) -> Any:
        """Return whether the item's state is COMPLETED. Asked under the lease: it alone decides
        whether a message is a duplicate."""

    # --- Hooks ------------------------------------------------------------------------------------

    def handle_processing_result(self, item_id: str, result: Any) -> Any:
        """Store what ``process`` returned; in the transaction that completes the item, so what this
        raises rolls the state back and the item is tried again."""
        return None

    def on_success(self, item_id: str) -> Any:
        """Called once the item is completed and committed; what it raises is logged."""
        return None

    def on_failed(self, item_id: str, error: BaseException | None) -> Any:
        """Called once the item has failed for good; what it raises is logged."""
        return None

    def get_database(self) -> str:
        """Return the alias of the database that holds the items."""
        return jobs_database()

    # --- Running it here --------------------------------------------------------------------------

    def connect(self) -> None:
        """Make a worker for its queue, and the topic if it is missing (KJO-93)."""
        if self._worker is not None:
            return
        handler = type(self)._handler
        assert handler is not None
        handler.use(self)
        queue = handler.options.queue
        wanted = self._concurrency or get_settings().queue(queue).concurrency
        worker = above.make_worker([queue], concurrency=wanted)
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
        """Let what runs end, hand the rest back, leave the group; False if ``timeout`` seconds were
        not enough. Call it from another thread than the one that works."""
        with self._changing:
            if not self._is_consuming:
                self._worker = None  # nothing has begun that would have to end
                return True
            self._worker.stop()
        return self._ended.wait(timeout)

    def set_max_concurrency(self, count: int) -> None:
        """Change how many messages are processed at once; what waits for a slot starts at once.

        :raises ValueError: not a whole number above 0.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"The concurrency must be a whole number above 0, not {count!r}")
        self._concurrency = count
        handler = type(self)._handler
        if self._worker is not None and handler is not None:
            self._worker.set_concurrency(handler.options.queue, count)

    def get_status(self) -> dict[str, Any]:
        """Return what the status report shows (KJO-57), and whether it is connected."""
        if self._worker is None:
            return {"is_connected": False}
        status: dict[str, Any] = above.status_of(self._worker)
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
    """Return what the class says, ``config`` before attributes."""
    where = cls.__name__
    declared = item_options.attributes(cls, ConsumerOptions)
    return {**declared, **item_options.flatten(cls.config, where)}


def options_of(cls: type[AbstractConsumer]) -> ConsumerOptions | None:
    """Return the options of a class, or None where it says nothing of what is required: a base.

    :raises ImproperlyConfigured: something is wrong, unknown, or missing beside the rest.
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
            item_options.snake(name): value for name, value in given["topic_options"].items()
        }
    return item_options.read(ConsumerOptions, given, cls.__name__)


def _concurrency_of_environment() -> int:
    """Return MAX_CONCURRENT_MESSAGES (KJO-55)."""
    found = os.environ.get("MAX_CONCURRENT_MESSAGES")
    if not found:
        return MAX_CONCURRENCY
    if not found.isdigit() or int(found) < 1:
        raise ImproperlyConfigured(
            f"MAX_CONCURRENT_MESSAGES must be a whole number above 0, not {found!r}."
        )
    return int(found)


def _register(cls: type[AbstractConsumer], options: ConsumerOptions) -> ItemHandler:
    """Make the class known as a queue, the handler of its items and the way to read them."""
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
            "them a queue of its own name."
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
