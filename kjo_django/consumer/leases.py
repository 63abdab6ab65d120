"""Names of leases, and keeping those of this process alive."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from uuid import UUID

from django.db import transaction
from django.utils import timezone

from kjo_django.backends import get_coordination
from kjo_django.conf import QueueConf
from kjo_django.coordination.base import Claim
from kjo_django.exceptions import CoordinationError
from kjo_django.models import Job
from kjo_django.producer.dispatch import jobs_database

logger = logging.getLogger("kjo_django")

COMPLAINT_INTERVAL = 10.0


def lease_name(queue: QueueConf, message_id: str) -> str:
    """Return ``CONS:PREFIX:id`` (KJO-60)."""
    return f"CONS:{queue.key_prefix}:{message_id}"


def alive_name(token: str) -> str:
    """Return the name under which a worker shows that it lives; absent, its leases are void."""
    return f"WORKER:{token}"


class LeaseBook:
    """The leases of one worker: claims in one round trip, renews in the background, releases.

    Every lease carries the worker's token. When coordination cannot be reached, claims succeed
    unproven and the worker goes on: the database decides anyway. What is lost meanwhile is the
    count of crashed deliveries.

    :param token: identifies the worker.
    :param ttl: how long a lease lasts without renewal; renewed every third of it (KJO-F11).
    :param alive_ttl: how long the worker counts as alive without a sign of life. Its leases are
        taken over after that, however long they would have lasted.
    """

    def __init__(self, token: str, ttl: timedelta, alive_ttl: timedelta) -> None:
        self.token = token
        self.ttl = ttl
        self.alive_ttl = alive_ttl
        self._held: set[str] = set()
        self._rows: set[UUID] = set()
        self._lock = threading.Lock()
        self._complain_at = 0.0

    def _complain(self, consequence: str, error: Exception) -> None:
        """Log an outage once in a while, not for every group it touches."""
        now = time.monotonic()
        if now >= self._complain_at:
            self._complain_at = now + COMPLAINT_INTERVAL
            logger.warning("%s: %s", consequence, error)

    def claim(self, names: list[str]) -> list[Claim]:
        """Claim all names, taking over those whose owner has vanished."""
        coordination = get_coordination()
        try:
            claims = coordination.claim(names, self.token, self.ttl)
            refused = [
                name for name, claim in zip(names, claims, strict=True) if not claim.acquired
            ]
            if refused and self._take_over(refused):
                again = dict(
                    zip(refused, coordination.claim(refused, self.token, self.ttl), strict=True)
                )
                claims = [again.get(n, c) for n, c in zip(names, claims, strict=True)]
        except CoordinationError as error:
            self._complain("Going on without leases, the database decides", error)
            return [Claim(True, 1)] * len(names)
        with self._lock:
            self._held.update(n for n, c in zip(names, claims, strict=True) if c.acquired)
        return claims

    def _take_over(self, names: list[str]) -> bool:
        """Void the leases of owners that show no sign of life; their deliveries stay counted."""
        coordination = get_coordination()
        owners = coordination.holders(names)
        living = coordination.holders([alive_name(token) for token in set(owners.values())])
        is_voided = False
        for token in set(owners.values()):
            if alive_name(token) in living or token == self.token:
                continue
            mine = [name for name, owner in owners.items() if owner == token]
            coordination.release(mine, token, count_delivery=True)
            is_voided = True
        return is_voided or len(owners) < len(names)

    def is_vanished(self, token: str) -> bool:
        """Return whether the worker with this token shows no sign of life any more.

        False when coordination cannot be reached: then its row leases have to expire.
        """
        name = alive_name(token)
        try:
            return name not in get_coordination().holders([name])
        except CoordinationError:
            return False

    def release(self, names: list[str]) -> None:
        """Give the leases back; the outcomes are durable, or nothing was begun."""
        with self._lock:
            self._held.difference_update(names)
        if not names:
            return
        try:
            get_coordination().release(names, self.token)
        except CoordinationError as error:
            self._complain("Leases not released, they expire by themselves", error)

    def hold_rows(self, ids: Iterable[UUID]) -> None:
        """Renew the row leases of these jobs too (``atomic=False``)."""
        with self._lock:
            self._rows.update(ids)

    def let_rows_go(self, ids: Iterable[UUID]) -> None:
        """Stop renewing."""
        with self._lock:
            self._rows.difference_update(ids)

    def show_alive(self) -> None:
        """Give the worker's sign of life; taken over again if it had been thought dead."""
        try:
            get_coordination().claim([alive_name(self.token)], self.token, self.alive_ttl)
            get_coordination().renew([alive_name(self.token)], self.token, self.alive_ttl)
        except CoordinationError as error:
            self._complain("No sign of life given", error)

    def say_goodbye(self) -> None:
        """Let others take over at once whatever is still held."""
        with self._lock:
            held = list(self._held)
        self.release([*held, alive_name(self.token)])

    def renew(self) -> None:
        """Extend everything held."""
        with self._lock:
            held, rows = list(self._held), list(self._rows)
        try:
            if held:
                get_coordination().renew(held, self.token, self.ttl)
        except CoordinationError as error:
            self._complain("Leases not renewed", error)
        if rows:
            using = jobs_database()
            with transaction.atomic(using=using):
                Job.objects.using(using).filter(pk__in=rows, lease_token=self.token).update(
                    lease_expires_at=timezone.now() + self.ttl
                )
