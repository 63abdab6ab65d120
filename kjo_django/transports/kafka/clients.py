"""Making librdkafka clients: their errors, their logs, and their life across a fork."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from confluent_kafka import KafkaError, KafkaException

from kjo_django.transports.kafka.options import KafkaOptions

logger = logging.getLogger("kjo_django.kafka")

C = TypeVar("C")


class SafeLogger:
    """Passes librdkafka's lines on to `logging`.

    librdkafka calls it inside ``poll``, where an exception (a broken handler or filter of the
    project) would destroy fetched records; so nothing gets out.
    """

    def log(self, level: int, message: str, *arguments: Any) -> None:
        try:
            logger.log(level, message, *arguments)
        except Exception:  # noqa: S110 - logging itself is what failed
            pass


def quiet(callback: Callable[..., Any]) -> Callable[..., None]:
    """Wrap a callback of the project so that it cannot raise into librdkafka."""

    @functools.wraps(callback)
    def call(*arguments: Any) -> None:
        try:
            callback(*arguments)
        except Exception:
            logger.exception("A Kafka callback failed")

    return call


def error_of(exception: BaseException) -> KafkaError | None:
    """Return the KafkaError an exception carries."""
    first = exception.args[0] if exception.args else None
    return first if isinstance(first, KafkaError) else None


def describe(error: KafkaError | BaseException | None) -> str:
    """Return an error as people should read it: its name and its text."""
    if isinstance(error, KafkaException):
        error = error_of(error) or error
    if isinstance(error, KafkaError):
        return f"{error.name()}: {error.str()}"
    return str(error) or type(error).__name__


def make(kind: Callable[..., C], config: dict[str, Any], options: KafkaOptions) -> C:
    """Return a new client.

    :raises ImproperlyConfigured: for a configuration librdkafka refuses.
    """
    try:
        return kind(config, logger=SafeLogger())
    except KafkaException as error:
        # librdkafka names the property it refuses, and repeats no value of it.
        raise options.refuse("...", describe(error)) from None


class PerProcess(Generic[C]):
    """One client for all threads of a process, made at first use and again after a fork.

    The threads of a client do not survive a fork: the child would wait for them for ever.
    """

    _all: weakref.WeakSet[PerProcess[Any]] = weakref.WeakSet()

    def __init__(self, create: Callable[[], C]) -> None:
        self._create = create
        self._lock = threading.Lock()
        self._client: C | None = None
        # What the parent made is kept: to destroy it in the child would wait for its threads.
        self._inherited: list[C] = []
        self._all.add(self)

    def get(self) -> C:
        """Return the client."""
        client = self._client
        if client is not None:
            return client
        with self._lock:
            if self._client is None:
                self._client = self._create()
            return self._client

    def take(self) -> C | None:
        """Return the client, if there is one, and forget it."""
        with self._lock:
            client, self._client = self._client, None
            return client

    def discard(self, client: C) -> None:
        """Forget ``client`` if it is still the one in use."""
        with self._lock:
            if self._client is client:
                self._client = None

    def _forked(self) -> None:
        # Another thread of the parent may have held the lock at the fork.
        self._lock = threading.Lock()
        if self._client is not None:
            self._inherited.append(self._client)
            self._client = None

    @classmethod
    def after_fork(cls) -> None:
        """Called in the child."""
        for each in list(cls._all):
            each._forked()


os.register_at_fork(after_in_child=PerProcess.after_fork)
