"""What one worker does for all: a thread of each, and leases that say whose turn it is."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection
from datetime import timedelta

from django.db import DatabaseError, InterfaceError, connections

from kjo_django.backends import get_coordination
from kjo_django.engine.handler.connections import drop_broken_connections
from kjo_django.exceptions import CoordinationError, KjoError
from kjo_django.values import LONGEST

logger = logging.getLogger("kjo_django")

OUTAGES = (KjoError, DatabaseError, InterfaceError, OSError)


class Duty(ABC):
    """A thread of every worker; a lease keeps all but one of them from the work. Should two do it
    all the same, nothing breaks.

    :param token: the worker's.
    """

    name = ""
    """Of its thread."""
    leases: Collection[str] = ()

    def __init__(self, token: str) -> None:
        self._token = token
        self._stopping = threading.Event()

    @abstractmethod
    def pause(self) -> timedelta:
        """Return how long it rests after each turn, a century at most; asked every time."""

    @abstractmethod
    def work(self, held: list[str]) -> None:
        """Take a turn with those of the leases that are held; without coordination, with all."""

    def run(self) -> None:
        """Work every so often until ``stop``."""
        try:
            while not self._stopping.wait((pause := min(self.pause(), LONGEST)).total_seconds()):
                try:
                    held = self._take(3 * pause)
                    if held:
                        self.work(held)
                except Exception as error:
                    # Whatever it is: its lease keeps the others from the work as long as it lives.
                    message, is_outage = "%s has to wait: %s", isinstance(error, OUTAGES)
                    logger.error(message, type(self).__name__, error, exc_info=not is_outage)
                    drop_broken_connections()
        finally:
            self._let_go()
            connections.close_all()

    def _take(self, ttl: timedelta) -> list[str]:
        names = list(self.leases)
        try:
            coordination = get_coordination()
            claims = coordination.claim(names, self._token, ttl)
            held = [name for name, claim in zip(names, claims, strict=True) if claim.acquired]
            if held:
                coordination.renew(held, self._token, ttl)
            return held
        except CoordinationError as error:
            logger.warning("%s works without a lease: %s", type(self).__name__, error)
            return names

    def _let_go(self) -> None:
        """Free the leases for the next worker."""
        try:
            get_coordination().release(list(self.leases), self._token)
        except CoordinationError as error:
            logger.warning("Leases of %s expire by themselves: %s", type(self).__name__, error)

    def stop(self) -> None:
        """Make ``run`` return; asks nothing of the database, which may be away or busy."""
        self._stopping.set()
