"""A queue's own worker: a thread of this process, for scripts, tests and small services."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from django.db import connections

from kjo_django.conf import get_settings
from kjo_django.worker import Worker

logger = logging.getLogger("kjo_django")

STOP_MARGIN = 20.0
"""Seconds beyond the grace period in which a worker leaves its groups and flushes."""


class LocalWorker:
    """Started once, stopped once.

    :param complain: told of outages and of the worker's failure.
    """

    def __init__(self, queue: str, name: str | None, complain: Callable[[Exception], None]) -> None:
        self._queue = queue
        self._complain = complain
        self._worker = Worker(
            [queue],
            name=name,
            # Others in this process enqueue and wait on the same transports.
            owns_process=False,
            on_error=lambda source, error: complain(RuntimeError(f"{source}: {error}")),
        )
        self._thread = threading.Thread(target=self._run, name=f"kjo-queue-{queue}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Let what runs end within ``SHUTDOWN_GRACE``, hand back the rest, wait for the end."""
        self._worker.stop()
        self._thread.join(get_settings().shutdown_grace.total_seconds() + STOP_MARGIN)

    def _run(self) -> None:
        try:
            self._worker.run()
        except Exception as error:
            logger.exception("The worker of queue %s failed", self._queue)
            self._complain(error)
        finally:
            connections.close_all()
