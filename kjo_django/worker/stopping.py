"""The signals that stop a worker: the first in order, the second at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from kjo_django.worker.supervisor import STOP_SIGNALS

logger = logging.getLogger("kjo_django")


def hear_stop_signals(stopping: threading.Event) -> Callable[[], None]:
    """Set ``stopping`` on the first of them, end the process on a second; in the main thread.

    :returns: what restores the handlers there were.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            logger.warning("Second signal: stopping at once")
            os._exit(128 + number)
        logger.info("%s: finishing what runs", signal.Signals(number).name)
        stopping.set()

    previous = {
        number: signal.signal(number, handle)
        for name in STOP_SIGNALS
        if (number := getattr(signal, name, None)) is not None
    }

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    return restore
