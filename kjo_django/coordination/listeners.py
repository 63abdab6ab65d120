"""Listening without a server: a way to wake a waiting thread, and calls within one process."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import weakref
from collections.abc import Sequence

from kjo_django.coordination.base import Listener


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
