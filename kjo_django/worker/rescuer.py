"""Rescuing queued jobs whose message is gone, for as long as a worker lives."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta

from django.db import DatabaseError, InterfaceError, connections

from kjo_django.backends import get_coordination
from kjo_django.conf import get_settings
from kjo_django.consumer.connections import drop_broken_connections
from kjo_django.exceptions import CoordinationError, KjoError
from kjo_django.operations.rescue import rescue

logger = logging.getLogger("kjo_django")

LEASE = "RESCUE"
LONGEST_PAUSE = timedelta(minutes=1)


class Rescuer:
    """A thread of every worker; a lease keeps all but one of them from the work. Should two do it
    all the same, conditional updates let one of them win."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._stopping = threading.Event()

    def run(self) -> None:
        """Look every so often until ``stop``."""
        pause = min(LONGEST_PAUSE, get_settings().rescue_after / 3)
        try:
            while not self._stopping.wait(pause.total_seconds()):
                try:
                    if self._may_work(3 * pause):
                        rescue()
                except (KjoError, DatabaseError, InterfaceError, OSError) as error:
                    logger.error("Nothing could be rescued this time: %s", error)
                    drop_broken_connections()
        finally:
            self._let_go()
            connections.close_all()

    def _may_work(self, ttl: timedelta) -> bool:
        try:
            coordination = get_coordination()
            held = coordination.claim([LEASE], self._token, ttl)[0].acquired
            if held:
                coordination.renew([LEASE], self._token, ttl)
            return held
        except CoordinationError as error:
            logger.warning("Rescuing without a lease: %s", error)
            return True

    def _let_go(self) -> None:
        """Free the lease for the next worker."""
        try:
            get_coordination().release([LEASE], self._token)
        except CoordinationError as error:
            logger.warning("The rescuer's lease expires by itself: %s", error)

    def stop(self) -> None:
        """Make ``run`` return; asks nothing of the database, which may be away or busy."""
        self._stopping.set()
