"""What operators asked of the retries of queues, as this process knows it.

Rows of ``QueueControl``, read by whoever runs jobs here (a worker's heartbeat, once a second) and
kept in memory: no job costs a query for it. Of the process, not of a worker: all of its workers
have the same queues in the same database.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from kjo_django.models import QueueControl


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """What is None is as configured."""

    max_attempts: int | None = None
    backoff_base: timedelta | None = None


AS_CONFIGURED = QueuePolicy()
_lock = threading.Lock()
_readers = 0
_policies: dict[str, QueuePolicy] = {}


def join() -> None:
    """Begin to keep them fresh with ``learn``; ``leave`` ends it."""
    global _readers
    with _lock:
        _readers += 1


def leave() -> None:
    """The last to leave forgets them: nobody would notice that they change."""
    global _readers, _policies
    with _lock:
        _readers -= 1
        if _readers == 0:
            _policies = {}


def learn(controls: Iterable[QueueControl]) -> None:
    """Take over what the rows say."""
    global _policies
    _policies = {
        row.queue: QueuePolicy(
            row.max_attempts,
            None if row.backoff_base is None else timedelta(seconds=row.backoff_base),
        )
        for row in controls
        if row.max_attempts is not None or row.backoff_base is not None
    }


def policy_of(queue: str) -> QueuePolicy:
    """Return what is asked of a queue."""
    return _policies.get(queue, AS_CONFIGURED)


def limit_of(queue: str, own: int, spent: int) -> int:
    """Return after how many attempts a job is dead-lettered.

    :param own: the limit it was enqueued with.
    :param spent: attempts whose outcome is recorded. One more has been promised: a limit lowered
        below them ends the job with its next failure, and never without a run.
    """
    asked = _policies.get(queue, AS_CONFIGURED).max_attempts
    return max(own if asked is None else asked, spent + 1)
