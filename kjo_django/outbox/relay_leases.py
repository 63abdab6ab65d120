"""The leases of relays: for each queue one relay publishes, the others stand by.

They only keep relays from doing the work twice. Without coordination every relay works.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from django.db import connections

from kjo_django.coordination.circuit_breaker import CircuitBreaker
from kjo_django.exceptions import CoordinationError, KjoError
from kjo_django.ids import uuid7
from kjo_django.runtime import Runtime

logger = logging.getLogger("kjo_django")

LEASE_TTL = timedelta(seconds=10)
LONGEST_BATCH = timedelta(minutes=2)
"""A relay that is busy with one batch for longer hangs: its leases are renewed no more."""


def lease_of(queue: str) -> str:
    """Return the lease a relay holds while it publishes a queue's jobs."""
    return f"RELAY:{queue}"


class RelayLeases:
    """The leases of one relay, one for each queue: relays that look after different queues must not
    wait for one another."""

    def __init__(self, runtime: Runtime) -> None:
        self._clock, self._coordination = runtime.clock, runtime.coordination
        self._token = uuid7().hex
        self._held: frozenset[str] = frozenset()
        self._sure_until = 0.0
        self._breaker = CircuitBreaker(self._clock)
        self._busy_since: float | None = None

    def take(self, queues: Sequence[str]) -> list[str]:
        """Take or renew the leases of these queues; return the queues the relay may publish now.

        One it has just taken is not asked for again for a third of its life.
        """
        if self._clock.monotonic() < self._sure_until and self._held.issuperset(queues):
            return list(queues)
        names = {lease_of(queue): queue for queue in queues}
        self._held = frozenset()
        if self._breaker.is_open():
            return list(queues)
        began = self._clock.monotonic()
        try:
            claims = self._coordination.claim(list(names), self._token, LEASE_TTL)
            held = [name for name, claim in zip(names, claims, strict=True) if claim.acquired]
            if held:
                self._coordination.renew(held, self._token, LEASE_TTL)
        except CoordinationError as error:
            self._breaker.record_failure(began)
            logger.warning("Relaying without a lease: %s", error)
            return list(queues)
        self._breaker.record_success()
        mine = [names[name] for name in held]
        self._held = frozenset(mine)
        self._sure_until = self._clock.monotonic() + LEASE_TTL.total_seconds() / 3
        return mine

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew what is held, by a thread of its own, whenever ``busy`` lasts.

        A broker that is slow keeps a batch for longer than a lease lives. Every other relay would
        take the queue then, and send the broker the same rows once more.
        """
        ended = threading.Event()
        thread = threading.Thread(
            target=self._renew_until, args=(ended,), name="kjo-relay-leases", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(1.0)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark what the relay does for its queues between two looks at its leases."""
        self._busy_since = self._clock.monotonic()
        try:
            yield
        finally:
            self._busy_since = None

    def release(self, queues: Collection[str]) -> None:
        """Give the leases of these queues back."""
        self._held, self._sure_until = frozenset(), 0.0
        try:
            self._coordination.release([lease_of(queue) for queue in queues], self._token)
        except KjoError as error:
            logger.warning("The relay's leases expire by themselves: %s", error)

    def _renew_until(self, ended: threading.Event) -> None:
        try:
            while not ended.wait(LEASE_TTL.total_seconds() / 3):
                self._renew()
        finally:
            connections.close_all()

    def _renew(self) -> None:
        since, held = self._busy_since, self._held
        if since is None or not held:
            return
        if self._clock.monotonic() - since > LONGEST_BATCH.total_seconds():
            return
        try:
            names = [lease_of(queue) for queue in held]
            self._coordination.renew(names, self._token, LEASE_TTL)
        except Exception as error:
            # Another relay may take them, and send what is sent here once more.
            logger.warning("The relay's leases could not be renewed: %s", error)
