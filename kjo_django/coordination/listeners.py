"""Listeners: within one process, and on a connection that is made again when it is lost."""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import random
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import ClassVar, Generic, TypeVar

from kjo_django.coordination.base import Listener

logger = logging.getLogger("kjo_django.coordination")

C = TypeVar("C")

_LONGEST_PAUSE = 5.0


class Alarm:
    """Wakes a thread that waits for a socket, from any thread."""

    def __init__(self) -> None:
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)

    def ring(self) -> None:
        """Make ``wait`` return; never blocks. A full buffer means it rings already."""
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def wait(self, timeout: float, *others: int) -> bool:
        """Wait for the alarm or for one of the file descriptors; whether the alarm rang.

        Raises OSError or ValueError for a descriptor that is closed.
        """
        poller = select.poll()
        for descriptor in (self._ear.fileno(), *others):
            poller.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(max(0.0, timeout) * 1000)}
        if self._ear.fileno() not in ready:
            return False
        with contextlib.suppress(BlockingIOError):
            while self._ear.recv(4096):
                pass
        return True

    def close(self) -> None:
        """Give the sockets back."""
        self._ear.close()
        self._bell.close()


class LocalListener(Listener):
    """Hears the calls of its own process."""

    def __init__(self, space: str, channels: Sequence[str]) -> None:
        self._space = space
        self._channels = frozenset(channels)
        # Callers take the lock itself, not the condition: a handler's timeout that is raised within
        # the condition's own Python code would leave it locked for ever, and every caller waiting.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._called: set[str] = set()
        self._woken = False
        with _registry_lock:
            _listeners.add(self)

    def call(self, space: str, channel: str) -> None:
        """Note the call if it is for this listener."""
        if space == self._space and channel in self._channels:
            with self._lock:
                self._called.add(channel)
                self._condition.notify_all()

    def wait(self, timeout: float) -> set[str]:
        """Wait for a call or for ``wake``."""
        with self._condition:
            self._condition.wait_for(lambda: self._called or self._woken, timeout)
            called, self._called, self._woken = self._called, set(), False
        return called

    def wake(self) -> None:
        """Make ``wait`` return."""
        with self._lock:
            self._woken = True
            self._condition.notify_all()

    def close(self) -> None:
        """Hear nothing more."""
        with _registry_lock:
            _listeners.discard(self)
        self.wake()


_listeners: weakref.WeakSet[LocalListener] = weakref.WeakSet()
_registry_lock = threading.Lock()


def call_local_listeners(space: str, channel: str) -> None:
    """Wake the listeners of this process; ``space`` keeps databases apart."""
    with _registry_lock:
        listeners = list(_listeners)
    for listener in listeners:
        listener.call(space, channel)


class ReconnectingListener(Listener, Generic[C]):
    """Hears calls on a connection of its own, which the constructor makes: it raises what the
    client does. The thread that waits owns it; only ``wake`` is for others.

    :param server: what it listens to, for the log.
    """

    outages: ClassVar[tuple[type[Exception], ...]]
    """What is raised for a connection that is lost, or cannot be made just now: the client's own
    errors, and with them OSError and ValueError, of a descriptor that was closed meanwhile."""
    longest_sleep: ClassVar[float] = math.inf
    """Seconds until ``_heard`` is asked again although nothing arrived."""

    def __init__(self, server: str, channels: Iterable[str]) -> None:
        self._server = server
        self._channels = frozenset(channels)
        self._failures = 0
        self._retry_at = 0.0
        self._closed = False
        self._alarm = Alarm()
        try:
            self._connection: C | None = self._connect()
        except BaseException:
            self._alarm.close()
            raise

    @abc.abstractmethod
    def _connect(self) -> C:
        """Return a connection that hears whatever is called after this returned."""

    @abc.abstractmethod
    def _descriptor(self, connection: C) -> int:
        """Return the file descriptor that becomes readable with a call."""

    @abc.abstractmethod
    def _heard(self, connection: C) -> set[str]:
        """Read all that is there, without waiting, and return the channels called."""

    @abc.abstractmethod
    def _disconnect(self, connection: C) -> None:
        """Give back a connection, which may be broken; raises nothing."""

    def wait(self, timeout: float) -> set[str]:
        """Wait for calls. After an outage all channels count as called: nobody knows what was
        missed."""
        deadline = time.monotonic() + timeout
        while not self._closed:
            try:
                called, woken = self._listen(deadline - time.monotonic())
            except self.outages as error:
                self._lose(error)
                continue
            if called or woken or time.monotonic() >= deadline:
                return called
        return set()

    def _listen(self, timeout: float) -> tuple[set[str], bool]:
        connection = self._connection
        if connection is None:
            pause = self._retry_at - time.monotonic()
            if pause > 0:
                return set(), self._alarm.wait(min(pause, timeout))
            self._connection = self._connect()
            self._failures = 0
            return set(self._channels), False
        # First what the client or TLS has read ahead: the socket is not readable for that.
        called = self._heard(connection)
        if called:
            return called, False
        # Both in one wait. Looking now and then would cost time, and CPU of a worker that is idle.
        descriptor = self._descriptor(connection)
        woken = self._alarm.wait(min(timeout, self.longest_sleep), descriptor)
        return self._heard(connection), woken

    def _lose(self, error: Exception) -> None:
        if self._failures == 0:
            logger.warning("Lost the listening connection to %s: %s", self._server, error)
        self._let_go()
        pause = min(_LONGEST_PAUSE, 0.1 * 2.0**self._failures)
        self._failures += 1
        self._retry_at = time.monotonic() + pause * random.uniform(0.5, 1.0)  # noqa: S311

    def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._disconnect(connection)

    def wake(self) -> None:
        """Make ``wait`` return."""
        self._alarm.ring()

    def close(self) -> None:
        """Give the connection back; to be called by the owning thread."""
        if self._closed:
            return
        self._closed = True
        self._let_go()
        self._alarm.close()
