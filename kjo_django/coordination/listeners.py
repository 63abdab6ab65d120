"""A listener on a connection that is made again when it is lost."""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import random
import select
import socket
import time
from collections.abc import Iterable
from typing import ClassVar, Generic, TypeVar

from kjo_django.coordination.base import Listener

logger = logging.getLogger("kjo_django.coordination")

C = TypeVar("C")

_LONGEST_PAUSE = 5.0


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
        # A thread that waits for the connection's socket waits for this pair, too.
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        try:
            self._connection: C | None = self._connect()
        except BaseException:
            self._wakes.close()
            self._waker.close()
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
                return set(), self._is_woken_within(min(pause, timeout))
            self._connection = self._connect()
            self._failures = 0
            return set(self._channels), False
        # First what the client or TLS has read ahead: the socket is not readable for that.
        called = self._heard(connection)
        if called:
            return called, False
        # Both in one wait. Looking now and then would cost time, and CPU of a worker that is idle.
        descriptor = self._descriptor(connection)
        woken = self._is_woken_within(min(timeout, self.longest_sleep), descriptor)
        return self._heard(connection), woken

    def _is_woken_within(self, timeout: float, *descriptors: int) -> bool:
        """Wait for ``wake`` or for a file descriptor that becomes readable.

        :raises OSError: a descriptor is closed.
        :raises ValueError: likewise.
        """
        poller = select.poll()
        for descriptor in (self._wakes.fileno(), *descriptors):
            poller.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(max(0.0, timeout) * 1000)}
        if self._wakes.fileno() not in ready:
            return False
        with contextlib.suppress(BlockingIOError):
            while self._wakes.recv(4096):
                pass
        return True

    def _lose(self, error: Exception) -> None:
        if self._failures == 0:
            logger.warning("Lost the listening connection to %s: %s", self._server, error)
        self._drop_connection()
        pause = min(_LONGEST_PAUSE, 0.1 * 2.0**self._failures)
        self._failures += 1
        self._retry_at = time.monotonic() + pause * random.uniform(0.5, 1.0)  # noqa: S311

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._disconnect(connection)

    def wake(self) -> None:
        """Make ``wait`` return; never blocks. A full buffer means it is woken already."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def close(self) -> None:
        """Give the connection back; to be called by the owning thread."""
        if self._closed:
            return
        self._closed = True
        self._drop_connection()
        self._wakes.close()
        self._waker.close()
