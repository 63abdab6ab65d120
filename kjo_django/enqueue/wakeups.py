"""Waking relays and consumers once a transaction has committed: one call per transaction, not one
per job. Losing a call costs time only; every waiter polls slowly too."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from django.db import transaction

from kjo_django import signals
from kjo_django.coordination.base import Coordination
from kjo_django.exceptions import CoordinationError
from kjo_django.runtime import get_coordination

logger = logging.getLogger("kjo_django")

RELAY_CHANNEL = "kjo:relay"
REPLY_CHANNELS = "kjo:reply:"
"""Begins the names of the channels on which waiters are told that their job has ended."""
LISTEN_AGAIN = 10.0
"""Seconds until coordination that was away when it was to be listened to is asked again."""
LONGEST_BACKOFF = 30.0
"""Seconds without calls after one that was long in vain."""
MAX_REPLY_CHANNEL = 100
"""Ours are shorter; PostgreSQL refuses to be told thousands of characters."""


def topic_channel(topic: str) -> str:
    """Return the channel that tells of records a transactional transport got."""
    return f"kjo:topic:{topic}"


class _AfterCommit:
    """The wake-ups and signals of one transaction, made once it is committed."""

    def __init__(self) -> None:
        self.channels: set[str] = set()
        self.enqueued: list[dict[str, Any]] = []
        # Django logs a robust callback that failed by this name, and fails itself without it.
        self.__qualname__ = type(self).__qualname__

    def __call__(self) -> None:
        for channel in self.channels:
            wake(channel)
        for facts in self.enqueued:
            signals.send(signals.job_enqueued, sender=facts["handler"], **facts)


_unreachable: tuple[Coordination | None, float] = (None, 0.0)
"""The coordination that let a caller wait in vain, and until when it is left alone."""


def _notify(notify: Callable[[Coordination], None], consequence: str) -> None:
    """Call by the coordination; one that is out of reach is logged, no more.

    A call is worth little time, and a web request or a lane waits for it: where one failed after
    seconds, none is tried for ten times as long, half a minute at most.
    """
    global _unreachable
    coordination, began = get_coordination(), time.monotonic()
    if _unreachable[0] is coordination and began < _unreachable[1]:
        return
    try:
        notify(coordination)
    except CoordinationError as error:
        now = time.monotonic()
        _unreachable = coordination, now + min(LONGEST_BACKOFF, 10 * (now - began))
        logger.warning("%s by polling: %s", consequence, error)


def wake(channel: str) -> None:
    """Call whoever listens, now; an unreachable coordination backend is logged, no more."""
    _notify(lambda by: by.notify(channel), f"Could not wake {channel}, it will find out")


def notify_waiters(channels: Collection[str]) -> None:
    """Wake those who wait for jobs that have ended; a lost call costs them time only.

    A channel came in a message's header, where anybody may have written anything.
    """
    known = sorted(filter(_is_reply_channel, channels))
    if not known:
        return
    _notify(lambda by: by.notify_all(known), "Waiters not called, they find out")


def _is_reply_channel(name: str) -> bool:
    return len(name) <= MAX_REPLY_CHANNEL and name.startswith(REPLY_CHANNELS) and "\0" not in name


def after_commit(using: str, channel: str, enqueued: Iterable[dict[str, Any]] = ()) -> None:
    """Wake ``channel`` and send ``job_enqueued`` when the current transaction commits.

    Outside a transaction it happens at once; rolled back, it never happens.
    """
    connection = transaction.get_connection(using)
    after: Any = None
    if connection.in_atomic_block and connection.run_on_commit:
        savepoints, function, _robust = connection.run_on_commit[-1]
        # Only an entry of the same savepoints shares this job's fate.
        if isinstance(function, _AfterCommit) and savepoints == set(connection.savepoint_ids):
            after = function
    is_new = after is None
    if is_new:
        after = _AfterCommit()
    after.channels.add(channel)
    if signals.job_enqueued.receivers:
        after.enqueued.extend(enqueued)
    if is_new:
        transaction.on_commit(after, using=using, robust=True)
