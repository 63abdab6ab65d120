"""What operators asked of this worker and of its queues. Read once a second, kept in memory, so
that no job costs a query for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kjo_django.conf import get_settings
from kjo_django.engine import queue_policies
from kjo_django.models import QueueControl
from kjo_django.models import Worker as WorkerRow
from kjo_django.store.transactions import jobs_database

if TYPE_CHECKING:
    from kjo_django.worker.process import Worker

logger = logging.getLogger("kjo_django")


class Controls:
    """The wishes of one worker; the heartbeat reads them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._limits: dict[str, int] = {}
        self._operators: dict[str, int] = {}
        self._asked_limits: dict[str, int] = {}
        self.is_quiet = False
        """Nothing more is started; what runs ends."""
        self.is_stopped = False
        """An operator asked it to stop."""

    def limit_of(self, queue: str) -> int:
        """Return how many groups of the queue this worker runs at once."""
        limit = self._limits.get(queue)
        if limit is None:
            # Without a limit of its own a queue may use every lane of this worker, however many
            # --concurrency gave it.
            limit = self._limits[queue] = self._own_limit(queue) or self._worker.concurrency
        return limit

    def flights_of(self, queue: str) -> int:
        """Return how many coroutines of the queue this worker has in flight at once: each counts as
        a group where the queue has a limit of its own."""
        own = self._operators.get(queue) or self._own_limit(queue)
        return own or get_settings().async_concurrency

    def _own_limit(self, queue: str) -> int | None:
        return self._asked_limits.get(queue) or get_settings().queue(queue).limit

    def ask_limit(self, queue: str, count: int) -> None:
        """Set the limit of a queue on which no operator has set one."""
        self._asked_limits[queue] = count
        self._limits.pop(queue, None)

    def read(self) -> bool:
        """Look at the rows and obey; returns whether the worker's own state is another now."""
        using = jobs_database()
        controls = list(QueueControl.objects.using(using))
        own = WorkerRow.objects.using(using).filter(pk=self._worker.id)
        # Its row is gone when somebody emptied the table; the next heartbeat writes it again.
        wish = own.values_list("wish", flat=True).first() or ""
        self._operators = {row.queue: row.concurrency for row in controls if row.concurrency}
        self._limits = dict(self._operators)
        queue_policies.learn(controls)
        has_changed = self._obey(wish)
        self._pause(frozenset(row.queue for row in controls if row.is_paused))
        self._worker.lanes.look_again()
        return has_changed

    def open(self) -> None:
        """The worker begins."""
        queue_policies.join()

    def close(self) -> None:
        """The worker has ended."""
        queue_policies.leave()

    def _obey(self, wish: str) -> bool:
        is_quiet = wish == WorkerRow.Wish.QUIET
        if wish == WorkerRow.Wish.STOP and not self.is_stopped:
            logger.info("An operator stops this worker: finishing what runs")
            self.is_stopped = True
            self._worker.stop()
            return True
        if is_quiet == self.is_quiet:
            return False
        logger.info("An operator wants this worker %s", "quiet" if is_quiet else "back at work")
        self.is_quiet = is_quiet
        return True

    def _pause(self, paused: frozenset[str]) -> None:
        every = frozenset(queue.name for queue in self._worker.queues)
        self._worker.lanes.set_paused(every if self.is_quiet else paused)
        for poller in self._worker.pollers:
            poller.set_paused(paused)
            if poller.is_quiet != self.is_quiet:
                poller.set_quiet(self.is_quiet)
