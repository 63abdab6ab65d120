"""A template producer at regular times (KJO-32)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from django.db import DatabaseError, InterfaceError, close_old_connections

from kjo_django.exceptions import KjoError
from kjo_django.patterns.items.producer import AbstractProducer, ProduceResult

logger = logging.getLogger("kjo_django.producer")


def produce_every(
    interval: float,
    producer: AbstractProducer,
    criteria: dict[str, Any],
    limit: int,
    message_type: str,
    *,
    stopping: threading.Event,
    on_result: Callable[[ProduceResult], None],
    on_error: Callable[[Exception], None],
) -> None:
    """Produce every ``interval`` seconds, counted from start to start, until told to stop.

    An outage stops nothing but the run it met: the next one tries again. A run that takes longer
    than the interval is followed by the next at once, never joined by it.
    """
    due = time.monotonic()
    while not stopping.is_set():
        try:
            on_result(producer.produce_messages(criteria, limit, message_type))
        except (KjoError, DatabaseError, InterfaceError, OSError) as error:
            on_error(error)
        close_old_connections()
        due = max(due + interval, time.monotonic())
        stopping.wait(due - time.monotonic())
