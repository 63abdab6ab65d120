"""Waking the pollers of transports that share the database when something was published."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from django.db import connections

from kjo_django.backends import get_coordination
from kjo_django.consumer.poller import Poller
from kjo_django.coordination.base import Listener
from kjo_django.producer.wakeups import topic_channel

logger = logging.getLogger("kjo_django")

LONGEST = 60.0
"""Seconds of one wait; a call and ``stop`` end it at once."""


class PublishListener:
    """One thread's loop; ``stop`` ends it at once, so that no shutdown waits for its turn."""

    def __init__(self, pollers: Sequence[Poller]) -> None:
        self._pollers = [poller for poller in pollers if poller.is_called]
        self._stopping = threading.Event()
        self._listener: Listener | None = None

    def run(self) -> None:
        """Listen until ``stop``."""
        channels = [topic_channel(topic) for poller in self._pollers for topic in poller.topics]
        if not channels:
            return
        try:
            listener = self._listener = get_coordination().listen(channels)
        except Exception as error:
            logger.warning("Nobody can wake this worker, it polls: %s", error)
            return
        try:
            while not self._stopping.is_set():
                if listener.wait(LONGEST):
                    for poller in self._pollers:
                        poller.wake()
        finally:
            listener.close()
            connections.close_all()

    def stop(self) -> None:
        """Make ``run`` return; thread-safe."""
        self._stopping.set()
        if self._listener is not None:
            self._listener.wake()
