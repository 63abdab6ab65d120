"""Workers in threads of a test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from django.db import connection

from kjo_django.worker import Worker

WAIT = 60
"""Seconds a test waits for what takes none, on a machine that is busy elsewhere."""


class Running:
    """A worker in its thread; ``code`` is its exit code once it has ended."""

    def __init__(self, queues: Iterable[str] = ("ledger",), **options: Any) -> None:
        self.worker = Worker(list(queues), **options)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.code = self.worker.run()
        finally:
            connection.close()

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.worker.stop()
        self.join()

    def join(self) -> None:
        self._thread.join(WAIT)
        assert not self._thread.is_alive(), "the worker does not end"


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.01)
