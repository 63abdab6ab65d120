"""librdkafka clients: how they are made, their errors and callbacks, and their life across a fork.

A broker that answers and does not let the client in (a wrong password, an authority nobody trusts)
looks like an outage: librdkafka tries on for ever, and a request to it ends with its timeout and an
error about the transport. Only the error callback, which is called in ``poll``, has the reason.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException

from kjo_django.transports.kafka.client_config import KafkaOptions, guarded

logger = logging.getLogger("kjo_django.kafka")

C = TypeVar("C")


_TOOK = re.compile(r" \(after \d+ms in state \w+[^)]*\)")
REPEAT_AFTER = 60.0
"""Seconds until what a client repeats is logged again above DEBUG."""


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


# --- Refusals ---------------------------------------------------------------------------------

FIRST_WAIT = 1.0
"""Seconds; a refusal of a broker that is near takes a third of it."""

_SASL = ("sasl.username", "sasl.password", "sasl.mechanism")
SETTINGS = {
    KafkaError._AUTHENTICATION: _SASL,
    KafkaError.SASL_AUTHENTICATION_FAILED: _SASL,
    KafkaError.UNSUPPORTED_SASL_MECHANISM: ("sasl.mechanism",),
    KafkaError._SSL: ("security.protocol", "ssl.ca.location"),
}
"""What to look at, by the code of the refusal."""
_SILENCE = frozenset({KafkaError._TRANSPORT, KafkaError._TIMED_OUT})


def is_refusal(error: object) -> bool:
    """Return whether an error of a client says that a broker does not let it in."""
    return isinstance(error, KafkaError) and error.code() in SETTINGS


class Refusals:
    """The latest refusal that one client met. Thread-safe: one reference is set."""

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        self._logged_at = 0.0
        self.reason: str | None = None
        """Why the client is not let in, and the settings to look at; never a value of them."""

    def note(self, error: KafkaError) -> None:
        """Remember a refusal, and log it once a minute; anything else says nothing about it."""
        if not is_refusal(error):
            return
        self.reason = self.explain(error)
        now = time.monotonic()
        if not self._logged_at or now > self._logged_at + REPEAT_AFTER:
            self._logged_at = now
            logger.error("A Kafka broker refuses this client: %s", self.reason)

    def explain(self, error: KafkaError) -> str:
        """Return an error as people should read it, and what to look at."""
        keys = ", ".join(SETTINGS.get(error.code(), ()))
        hint = f" (look at {keys} in {self._options.setting})" if keys else ""
        return f"{describe(error)}{hint}"

    def forget(self) -> None:
        """All is well."""
        self.reason = None
        self._logged_at = 0.0

    def list_topics(self, client: Any, timeout: float, *names: str) -> Any:
        """Ask for the cluster's metadata, or for that of a topic.

        Asked in waits that double, since the client learns of a refusal only between two.

        :param timeout: seconds.
        :raises KafkaException: with the refusal, as soon as it is known, or with what the client
            raises.
        """
        deadline, wait = time.monotonic() + timeout, FIRST_WAIT
        while True:
            left = deadline - time.monotonic()
            try:
                answer = client.list_topics(*names, timeout=min(wait, left))
            except KafkaException as error:
                client.poll(0)
                if self.reason is not None:
                    raise KafkaException(self.reason) from error
                code = error_of(error)
                if code is None or code.code() not in _SILENCE or left <= wait:
                    raise
                wait *= 2
            else:
                self.forget()
                return answer


def watched(
    config: dict[str, Any],
    note: Callable[[KafkaError], None],
    guard: Callable[[Callable[..., Any]], Callable[..., Any]] = quiet,
) -> dict[str, Any]:
    """Return a configuration whose errors are noted, and passed on to the project's own callback.

    :param guard: wraps every callback: none may raise into the client.
    """
    config = guarded(config, quiet)
    theirs = config.get("error_cb")

    def on_error(error: KafkaError) -> None:
        note(error)
        if theirs is not None:
            theirs(error)

    return {**config, "error_cb": guard(on_error)}


# --- What a consumer calls back, and how it is ---------------------------------------------------


class Callbacks:
    """Keeps exceptions of our callbacks out of the client.

    One that gets into ``consume`` destroys a batch whose position has already moved on. Belongs to
    the thread that polls, in which the client calls.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._interrupt: BaseException | None = None
        self.is_inside = False
        """Whether one runs just now: the client must not be polled again before it has returned."""

    def guard(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Wrap a callback: what it raises is logged, an interrupt waits for `raise_interrupt`."""

        def call(*arguments: Any) -> None:
            outer, self.is_inside = self.is_inside, True
            try:
                callback(*arguments)
            except Exception:
                logger.exception("Consumer group %s: a callback failed", self._group)
            except BaseException as interrupt:
                self._interrupt = interrupt
            finally:
                self.is_inside = outer

        return call

    def raise_interrupt(self) -> None:
        """Raise what interrupted a callback, if anything did; to be called outside the client."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt


CHECK_INTERVAL = 1.0
CHECK_TIMEOUT = 0.25
IDLE_CHECK_INTERVAL = 10.0
"""Seconds between checks of a member that has no partitions and met no error."""
LOST_AFTER = 10.0
"""Seconds without partitions and without an answer until another client is asked for the cluster.
"""
OTHER_TIMEOUT = 2.0
"""Seconds that client has for an answer."""

AWAY = frozenset({KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE})
"""Errors of one outage: the client reports each broker, and each try with its milliseconds."""


class Health:
    """The latest error of a group's client. Belongs to the thread that polls.

    The client reports errors and never that they are over, since it recovers itself; so while there
    is one, the cluster is asked now and then.

    A client can forget every broker, and then it connects to none any more and reports nothing: a
    broker that has just started answers with topics and without brokers (librdkafka#5301). So a
    member without partitions asks as well. When it gets no answer and another client does, it is
    to be replaced.

    :param topics: those that must exist; patterns (``^...``) need not.
    """

    def __init__(self, options: KafkaOptions, group: str, topics: Sequence[str]) -> None:
        self._options = options
        self._refusals = Refusals(options)
        self._group = group
        self._topics = [topic for topic in topics if not topic.startswith("^")]
        self._due = time.monotonic() + IDLE_CHECK_INTERVAL
        self._unanswered_since: float | None = None
        self.last_error: str | None = None
        """See `Subscription.last_error`."""
        self._is_away = False
        self.is_fatal = False
        """Whether the client failed for good: it answers nothing any more, and must be replaced."""
        self.is_unanswered = False
        """Whether it failed so that no broker answers it: to close it would wait for one."""

    def note(self, error: KafkaError | BaseException | None) -> None:
        """Remember an error the client gave us, in whatever way."""
        if isinstance(error, KafkaError):
            if error.code() == KafkaError._PARTITION_EOF:
                return
            self.is_fatal = self.is_fatal or error.fatal() or error.code() == KafkaError._FATAL
        is_away = isinstance(error, KafkaError) and error.code() in AWAY
        if is_away and self._refusals.reason is not None:
            return  # what follows from a refusal is no reason of its own
        if isinstance(error, KafkaError) and is_refusal(error):
            self._refusals.note(error)
            self.report(self._refusals.explain(error))
            return
        if is_away and self._is_away and self.last_error is not None:
            return  # an outage has one text, or it would be logged every second
        self._is_away = is_away
        text = describe(error)
        if text != self.last_error:
            logger.warning("Consumer group %s: %s", self._group, text)
        self.report(text)

    def report(self, text: str) -> None:
        """Show ``text`` until a check finds all well."""
        if self.last_error is None:
            self._due = time.monotonic() + CHECK_INTERVAL
        self.last_error = text

    def check_soon(self) -> None:
        """Ask at the next `check`: something has just gone well."""
        self._due = 0.0

    def check(self, consumer: Consumer, now: float, *, is_idle: bool) -> None:
        """Clear ``last_error`` once the cluster answers and has our topics, asking once a second.

        Asking for all topics also makes the client look at its subscription again, so a topic
        created late is found within a second and not at the next refresh.

        :param is_idle: whether the client has no partitions.
        """
        if self.last_error is None and not is_idle:
            self._due, self._unanswered_since = now + IDLE_CHECK_INTERVAL, None
            return
        if now < self._due:
            return
        self._due = now + (IDLE_CHECK_INTERVAL if self.last_error is None else CHECK_INTERVAL)
        cluster = _cluster_of(consumer, CHECK_TIMEOUT)
        if cluster is None:
            self._note_no_answer(now, is_idle)
            return
        self._unanswered_since = None
        self._refusals.forget()
        topics = cluster.topics
        missing = [
            topic
            for topic in self._topics
            if topic not in topics or topics[topic].error is not None
        ]
        self.last_error = f"topic {missing[0]!r} does not exist" if missing else None

    def _note_no_answer(self, now: float, is_idle: bool) -> None:
        self._due = now + CHECK_INTERVAL
        if self._unanswered_since is None:
            self._unanswered_since = now
        elif is_idle and now >= self._unanswered_since + LOST_AFTER:
            self._unanswered_since = None
            if self._is_answered_to_another():
                text = "Consumer group %s: the cluster answers another client and not this one"
                logger.warning(text, self._group)
                self.is_fatal = self.is_unanswered = True

    def _is_answered_to_another(self) -> bool:
        config = watched(self._options.consumer(self._group), lambda error: None)
        other = make(Consumer, config, self._options)
        try:
            return _cluster_of(other, OTHER_TIMEOUT) is not None
        finally:
            other.close()


def _cluster_of(consumer: Consumer, timeout: float) -> Any:
    """Return the cluster's metadata; None if no broker answers, or one that names no broker."""
    try:
        cluster = consumer.list_topics(timeout=timeout)
    except KafkaException:
        return None
    return cluster if cluster.brokers else None
