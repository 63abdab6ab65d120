"""Hearing that a job has ended: one listener for all who wait in this process.

Each waiter has a channel, sent along with its job as the header ``kjo-reply-to``; the worker that
commits the job's end calls it. So a job nobody waits for costs nothing, and one that is awaited
costs one call. Calls may be lost: whoever waits reads the row, before and after, and polls slowly.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from django.db import connections

from kjo_django.backends import get_coordination
from kjo_django.coordination.base import Coordination, Listener
from kjo_django.enqueue.wakeups import REPLY_CHANNELS
from kjo_django.exceptions import CoordinationError
from kjo_django.ids import uuid7

logger = logging.getLogger("kjo_django")

CHANNELS = 64
"""Beyond so many waiters at once, some share a channel and are woken for one another."""
IDLE = 10.0
"""Seconds without a waiter after which the listener and its thread are given up."""
_WAIT = 1.0


class Reply:
    """A waiter's place: ``channel`` goes with the job, ``heard`` is called when it is called.

    ``heard`` runs in the listener's thread and must return at once.
    """

    def __init__(self, switchboard: Switchboard, number: int, heard: Callable[[], None]) -> None:
        self._switchboard = switchboard
        self.number = number
        self.heard = heard

    @property
    def channel(self) -> str:
        """Whom to call."""
        return self._switchboard.channels[self.number]

    def close(self) -> None:
        """Hear nothing more."""
        self._switchboard.leave(self)


class Switchboard:
    """The listener of this process and its thread, which exist while somebody waits."""

    def __init__(self, coordination: Coordination) -> None:
        self.coordination = coordination
        self.pid = os.getpid()
        name = uuid7().hex
        self.channels = [f"{REPLY_CHANNELS}{name}:{number}" for number in range(CHANNELS)]
        self._numbers = {channel: number for number, channel in enumerate(self.channels)}
        self._waiting: list[set[Reply]] = [set() for _ in range(CHANNELS)]
        self._lock = threading.Lock()
        self._listener: Listener | None = None
        self._idle_since = time.monotonic()

    @property
    def waiting_count(self) -> int:
        """How many wait now."""
        return sum(len(replies) for replies in self._waiting)

    def enter(self, heard: Callable[[], None]) -> Reply:
        """Open a place; calls made after this returned are heard.

        :raises CoordinationError: nobody can be heard now.
        """
        with self._lock:
            if self._listener is None:
                self._listener = self.coordination.listen(self.channels)
                thread = threading.Thread(
                    target=self._run, args=(self._listener,), name="kjo-replies", daemon=True
                )
                thread.start()
            number = min(range(CHANNELS), key=lambda n: len(self._waiting[n]))
            reply = Reply(self, number, heard)
            self._waiting[number].add(reply)
            return reply

    def leave(self, reply: Reply) -> None:
        """Close a place."""
        with self._lock:
            self._waiting[reply.number].discard(reply)
            self._idle_since = time.monotonic()

    def _run(self, listener: Listener) -> None:
        try:
            while not self._may_end(listener):
                for channel in listener.wait(_WAIT):
                    self._call(self._numbers[channel])
        except Exception:
            # Waiters poll; the next one opens a new listener.
            logger.exception("The listener for awaited jobs failed")
        finally:
            with self._lock:
                if self._listener is listener:
                    self._listener = None
            listener.close()
            connections.close_all()

    def _may_end(self, listener: Listener) -> bool:
        with self._lock:
            if self._listener is not listener:
                return True
            if self.waiting_count or time.monotonic() - self._idle_since < IDLE:
                return False
            self._listener = None
            return True

    def _call(self, number: int) -> None:
        with self._lock:
            replies = list(self._waiting[number])
        for reply in replies:
            reply.heard()

    def close(self) -> None:
        """End the thread soon."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.wake()


_switchboard: Switchboard | None = None
_lock = threading.Lock()


def listen_for_reply(heard: Callable[[], None]) -> Reply | None:
    """Open a place at this process' switchboard; None when nobody can be heard now."""
    global _switchboard
    try:
        coordination = get_coordination()
        with _lock:
            board = _switchboard
            if board is None or board.coordination is not coordination or board.pid != os.getpid():
                # Settings changed, or this is a forked child: the parent's is not ours to close.
                if board is not None and board.pid == os.getpid():
                    board.close()
                board = _switchboard = Switchboard(coordination)
        return board.enter(heard)
    except CoordinationError as error:
        logger.warning("Waiting by polling only: %s", error)
        return None


def switchboard() -> Switchboard | None:
    """Return this process' switchboard, if somebody has waited yet; for tests and diagnosis."""
    return _switchboard
