"""Waking the pollers of transports that share the database when something was published."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from django.db import connections

from kjo_django.backends import get_coordination
from kjo_django.coordination.base import Listener
from kjo_django.engine.poller import Poller
from kjo_django.enqueue.wakeups import LISTEN_AGAIN, topic_channel

logger = logging.getLogger("kjo_django")

LONGEST = 60.0
"""Seconds of one wait; a call and ``stop`` end it at once."""


class PublishListener:
    """One thread's loop; ``stop`` ends it at once, so that no shutdown waits for its turn."""

    def __init__(self, pollers: Sequence[Poller]) -> None:
        self._pollers = [poller for poller in pollers if poller.is_called]
        self._stopping = threading.Event()
        self._listener: Listener | None = None
        self._has_told = False

    def run(self) -> None:
        """Listen until ``stop``."""
        channels = [topic_channel(topic) for poller in self._pollers for topic in poller.topics]
        if not channels:
            return
        try:
            while not self._stopping.is_set():
                listener = self._listener
                if listener is None:
                    if not self._listen(channels):
                        self._stopping.wait(LISTEN_AGAIN)
                elif listener.wait(LONGEST):
                    for poller in self._pollers:
                        poller.wake()
        finally:
            if self._listener is not None:
                self._listener.close()
            connections.close_all()

    def _listen(self, channels: Sequence[str]) -> bool:
        """Return False where coordination is away just now: the worker polls until it is back."""
        try:
            self._listener = get_coordination().listen(channels)
        except Exception as error:
            level = logging.DEBUG if self._has_told else logging.WARNING
            logger.log(level, "Nobody can wake this worker, it polls: %s", error)
            self._has_told = True
            return False
        return True

    def stop(self) -> None:
        """Make ``run`` return; thread-safe."""
        self._stopping.set()
        if self._listener is not None:
            self._listener.wake()
