"""Settling what has ended outside a transaction, while those who ran it go on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from django.db import connections

from kjo_django.engine.attempt import Attempt

logger = logging.getLogger("kjo_django")

KEPT_CONNECTED = 5.0
"""Seconds for which the recorder keeps its database connection when it has nothing to do."""


class EndedQueue:
    """Attempts that have ended and are not settled yet, in order.

    :param settle: settles attempts.
    :param patience: seconds from the begin of an attempt after which the recorder settles it, if
        the thread that has put it here has not.
    """

    def __init__(self, settle: Callable[[list[Attempt]], None], patience: float) -> None:
        self.patience = patience
        self._settle = settle
        self._ended: deque[tuple[float, Sequence[Attempt]]] = deque()
        self._settling = threading.Lock()

    def put(self, began: float, attempts: Sequence[Attempt]) -> None:
        """Add attempts that began then (monotonic)."""
        self._ended.append((began, attempts))

    def has_any_from_before(self, moment: float) -> bool:
        """Return whether an attempt waits here that began before then."""
        try:
            return self._ended[0][0] < moment
        except IndexError:
            return False

    def settle(self, others: Sequence[Attempt] = (), *, again: bool = False) -> None:
        """Settle what waits here; if another thread does, wait for it.

        :param others: are settled before these, together with them.
        :param again: what could not be settled is put back, for another thread.
        """
        with self._settling:
            taken = [self._ended.popleft() for _ in range(len(self._ended))]
            ended = [*others, *(attempt for _, attempts in taken for attempt in attempts)]
            if not ended:
                return
            try:
                self._settle(ended)
            except BaseException:
                if again:
                    self._ended.extendleft(reversed(taken))
                raise


class Recorder:
    """Settles what waits in queues for longer than it may. Its one thread starts with the first
    queue, and calls ``step`` again and again.

    :param on_thread: called first in that thread.
    """

    def __init__(self, on_thread: Callable[[], None]) -> None:
        self._on_thread = on_thread
        self._queues: set[EndedQueue] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def watch(self, queue: EndedQueue) -> None:
        """Settle what waits in this queue as soon as it has waited for its time."""
        with self._changed:
            if queue in self._queues:
                return
            self._queues.add(queue)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kjo-recorder", daemon=True)
                self._thread.start()
            if len(self._queues) == 1 or not queue.patience:
                self._changed.notify()

    def forget(self, queue: EndedQueue) -> None:
        """Leave a queue to the thread that fills it."""
        if queue in self._queues:
            with self._changed:
                self._queues.discard(queue)

    def step(self) -> float | None:
        """Settle what is due; return the seconds until something else may be, None where nothing
        is watched."""
        now = time.monotonic()
        with self._changed:
            due = [q for q in self._queues if q.has_any_from_before(now - q.patience)]
            # Until something new is put there, there is nothing more to settle.
            self._queues = {q for q in self._queues if q.patience and q not in due}
        for queue in due:
            try:
                queue.settle(again=queue.patience > 0)
            except Exception:
                logger.exception("Endings could not be settled while their lane was busy")
        with self._changed:
            return min((queue.patience for queue in self._queues), default=None)

    def close(self, timeout: float) -> None:
        """End the thread, waiting so many seconds for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout)

    def _has_work(self) -> bool:
        return bool(self._queues) or self._is_closed

    def _run(self) -> None:
        self._on_thread()
        try:
            while not self._is_closed:
                wait = self.step()
                with self._changed:
                    if wait is None:
                        is_idle = not self._changed.wait_for(self._has_work, KEPT_CONNECTED)
                    elif not self._is_closed:
                        self._changed.wait(wait)
                if wait is None and is_idle:
                    # A connection kept meanwhile would be one more for each worker.
                    connections.close_all()
                    with self._changed:
                        self._changed.wait_for(self._has_work)
        finally:
            connections.close_all()
