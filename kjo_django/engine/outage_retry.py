"""Waiting for servers that are away, longer each time, and no longer than the worker lives."""

from __future__ import annotations

import enum
import logging
import threading

from django.db import DatabaseError, InterfaceError

from kjo_django.engine.handler.connections import answers, drop_broken_connections, is_busy
from kjo_django.exceptions import PublishError
from kjo_django.runtime import jobs_database

logger = logging.getLogger("kjo_django")

OUTAGES = (DatabaseError, InterfaceError, OSError, PublishError)
"""What is raised while a server is away; or refuses, which the database tells apart."""
REFUSALS = 3
"""Times a database that is there may refuse to record one outcome before that counts."""
DELAY_MIN = 0.2
DELAY_MAX = 30.0


class Patience:
    """Of one thing that is tried until it succeeds.

    :param stopping: set when the worker stops.
    """

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self._delay = DELAY_MIN
        self.count = 0
        """How often it has been waited."""

    def goes_on(self, what: str, error: Exception) -> bool:
        """Log what failed, wait, and return whether to try again; False: the worker stops."""
        logger.error("%s, trying again in %.1f s: %s", what, self._delay, error)
        delay, self._delay = self._delay, min(self._delay * 2, DELAY_MAX)
        self.count += 1
        return not self._stopping.wait(delay)


class Next(enum.Enum):
    """What to do after outcomes in hand could not be recorded."""

    AGAIN = "again"
    SPLIT = "split"
    """Record them one by one: the database is there and refuses something among them."""
    REFUSED = "refused"
    """This one can never be recorded as it is."""
    STOPPED = "stopped"
    """The worker stops, and the server is still away."""


class OutageRetry:
    """Decides whether to try again to record outcomes that are in hand.

    :param stopping: set when the worker stops; None: every error is raised.
    :param has_run: whether handlers have run, so that a worker that stops tries once more: a COMMIT
        without an answer may have taken effect, and nobody else would announce what it recorded.
    """

    def __init__(self, stopping: threading.Event | None, *, has_run: bool = False) -> None:
        self._patience = None if stopping is None else Patience(stopping)
        self._has_run = has_run
        self._refusals = 0

    def after(self, error: Exception, what: str, count: int) -> Next:
        """Return what to do after this error, having waited where that is to try again.

        :param what: what cannot be done, for the log.
        :param count: how many outcomes were to be recorded together.
        :raises Exception: the error itself, where outages are not waited out.
        """
        if self._patience is None:
            raise error
        is_outage = isinstance(error, OUTAGES)
        # Not what somebody else's lock was in the way of: that passes, like an outage.
        is_refused = not is_outage or (
            isinstance(error, DatabaseError) and not is_busy(error) and answers(jobs_database())
        )
        if is_refused and count > 1:
            logger.warning("%s, now one by one (%d of them): %s", what, count, error)
            return Next.SPLIT
        drop_broken_connections()
        self._refusals += is_refused
        if self._refusals > REFUSALS:
            logger.error("%s: refused %d times: %s", what, self._refusals, error)
            return Next.REFUSED
        if not is_outage:  # a bug: waiting does not make it pass
            logger.exception("%s", what)
            return Next.AGAIN
        goes_on = self._patience.goes_on(what, error)
        is_last_try = self._has_run and self._patience.count == 1
        return Next.AGAIN if goes_on or is_last_try else Next.STOPPED
