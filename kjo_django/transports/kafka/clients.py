"""Making librdkafka clients: their errors, their logs, and their life across a fork."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from confluent_kafka import KafkaError, KafkaException

from kjo_django.transports.kafka.options import KafkaOptions

logger = logging.getLogger("kjo_django.kafka")

C = TypeVar("C")


_TOOK = re.compile(r" \(after \d+ms in state \w+[^)]*\)")
REPEAT_AFTER = 60.0
"""Seconds until a client may say the same kind of thing again above DEBUG."""


class SafeLogger:
    """Passes a client's lines on to `logging`.

    The client calls it inside ``poll``, where an exception (a broken handler or filter of the
    project) would destroy fetched records; so nothing gets out. A broker that is down is mentioned
    ten times a second; so repetitions are for DEBUG.
    """

    def __init__(self) -> None:
        self._said: dict[Any, float] = {}

    def log(self, level: int, message: str, *arguments: Any) -> None:
        try:
            logger.log(self._level(level, arguments[:1]), message, *arguments)
        except Exception:  # noqa: S110 - logging itself is what failed
            pass

    def _level(self, level: int, kind: tuple[Any, ...]) -> int:
        now = time.monotonic()
        if now < self._said.get(kind, 0.0):
            return logging.DEBUG
        if level > logging.DEBUG:
            self._said[kind] = now + REPEAT_AFTER
        return level


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
        # How long a try took differs each time, which would make one error many.
        return f"{error.name()}: {_TOOK.sub('', error.str())}"
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


def keep_for_ever(client: Any) -> None:
    """Keep a client that must not be destroyed in this process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


def close_behind(consumer: Any) -> None:
    """Close a consumer without waiting: no broker answers, and it would wait for one."""
    keep_for_ever(consumer)
    threading.Thread(target=quiet(consumer.close), name="kjo-kafka-close", daemon=True).start()


class PerProcess(Generic[C]):
    """One client for all threads of a process, made at first use and again after a fork."""

    def __init__(self, create: Callable[[], C]) -> None:
        self._create = create
        self._lock = threading.Lock()
        self._client: C | None = None
        after_fork(self)

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

    def forget_the_parents(self) -> None:
        """Called in the child of a fork."""
        # Another thread of the parent may have held the lock at that moment.
        self._lock = threading.Lock()
        if self._client is not None:
            # Its threads did not survive the fork: to destroy it would wait for them, or abort.
            keep_for_ever(self._client)
            self._client = None


class Forkable(Protocol):
    def forget_the_parents(self) -> None: ...


_forkable: weakref.WeakSet[Forkable] = weakref.WeakSet()


def after_fork(owner: Forkable) -> None:
    """Call ``owner.forget_the_parents()`` in the child of every fork, while it exists."""
    _forkable.add(owner)


def _forget_the_parents() -> None:
    for owner in list(_forkable):
        owner.forget_the_parents()


os.register_at_fork(after_in_child=_forget_the_parents)
