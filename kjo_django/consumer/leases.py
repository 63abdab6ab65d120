"""Names of leases, and keeping those of this process alive."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from uuid import UUID

from django.db import connections, transaction
from django.utils import timezone

from kjo_django.backends import get_coordination
from kjo_django.conf import QueueConf
from kjo_django.coordination.base import FIRST_CLAIM, Claim
from kjo_django.exceptions import CoordinationError
from kjo_django.models import Job
from kjo_django.producer.dispatch import jobs_database

logger = logging.getLogger("kjo_django")

COMPLAINT_INTERVAL = 10.0
MAX_LEASED_ID = 210
"""Longer than every message id of ours; ids of others may have 255 characters."""


def lease_name(queue: QueueConf, message_id: str) -> str:
    """Return ``CONS:PREFIX:id`` (KJO-60); a digest stands for an id too long for a name."""
    if len(message_id) > MAX_LEASED_ID:
        message_id = hashlib.sha256(message_id.encode("utf-8", "replace")).hexdigest()
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
        self._held: dict[str, timedelta] = {}
        self._rows: set[UUID] = set()
        self._lock = threading.Lock()
        self._complain_at = 0.0
        self._has_shown = False
        self._unsure_until = 0.0

    def _complain(self, consequence: str, error: Exception) -> None:
        """Log an outage once in a while, not for every group it touches."""
        now = time.monotonic()
        if now >= self._complain_at:
            self._complain_at = now + COMPLAINT_INTERVAL
            logger.warning("%s: %s", consequence, error)

    def claim(self, names: list[str], ttl: timedelta | None = None) -> list[Claim]:
        """Claim all names that are free; see ``abandoned`` for the rest.

        :param ttl: of these leases, where their queue has its own.
        """
        ttl = ttl or self.ttl
        try:
            claims = get_coordination().claim(names, self.token, ttl)
        except CoordinationError as error:
            self._complain("Going on without leases, the database decides", error)
            return [FIRST_CLAIM] * len(names)
        acquired: Iterable[str] = names
        if claims.count(FIRST_CLAIM) != len(claims):
            acquired = (name for name, claim in zip(names, claims, strict=True) if claim.acquired)
        self._note_held(acquired, ttl)
        return claims

    def abandoned(self, names: Collection[str]) -> set[str]:
        """Return those of the refused names whose owner shows no sign of life, or let go since."""
        if not names:
            return set()
        coordination = get_coordination()
        try:
            owners = coordination.holders(list(names))
            dead = self._dead(set(owners.values()) - {self.token})
        except CoordinationError:
            return set()
        return {
            name
            for name in names
            if name not in owners or owners[name] == self.token or owners[name] in dead
        }

    def _dead(self, tokens: Collection[str]) -> set[str]:
        """Return those of the workers that show no sign of life.

        None of them where our own sign is gone, or was a moment ago: coordination has been emptied,
        or nobody could write to it for long, and who lives is about to say so.

        :raises CoordinationError: it cannot be reached.
        """
        if not tokens:
            return set()
        own = alive_name(self.token)
        living = get_coordination().holders([own, *map(alive_name, tokens)])
        if own not in living:
            self._miss_own_sign()
        if time.monotonic() < self._unsure_until:
            return set()
        return {token for token in tokens if alive_name(token) not in living}

    def _miss_own_sign(self) -> None:
        if self._has_shown:
            self._unsure_until = time.monotonic() + self.alive_ttl.total_seconds()

    def take_over(self, names: Sequence[str], ttl: timedelta | None = None) -> list[Claim]:
        """Claim abandoned names. That counts as a delivery, so do it when their run begins: what
        waits beside a job that kills the worker must not be counted with it."""
        coordination = get_coordination()
        ttl = ttl or self.ttl
        try:
            owners = coordination.holders(names)
            theirs = {name for name, owner in owners.items() if owner != self.token}
            left_by: dict[str, list[str]] = {}
            for name in self.abandoned(theirs):
                left_by.setdefault(owners[name], []).append(name)
            for owner, left in left_by.items():
                coordination.release(left, owner, count_delivery=True)
            claims = coordination.claim(names, self.token, ttl)
        except CoordinationError as error:
            self._complain("Going on without leases, the database decides", error)
            return [FIRST_CLAIM] * len(names)
        acquired = (name for name, claim in zip(names, claims, strict=True) if claim.acquired)
        self._note_held(acquired, ttl)
        return claims

    def _note_held(self, names: Iterable[str], ttl: timedelta) -> None:
        with self._lock:
            self._held.update(dict.fromkeys(names, ttl))

    def is_vanished(self, token: str) -> bool:
        """Return whether the worker with this token shows no sign of life any more.

        False when coordination cannot be reached: then its row leases have to expire.
        """
        try:
            return bool(self._dead([token]))
        except CoordinationError:
            return False

    def release(self, names: list[str]) -> None:
        """Give the leases back; the outcomes are durable, or nothing was begun."""
        self._forget(names)
        if names:
            self._give_back(names)

    def can_release_within(self, using: str) -> bool:
        """Return whether leases can be given back with a transaction of ``using``."""
        return get_coordination().releases_within(using)

    def release_within(self, using: str, names: list[str]) -> None:
        """Give the leases back with the transaction of ``using`` that makes the outcomes durable;
        rolled back, they are still held."""
        self._give_back(names)
        transaction.on_commit(lambda: self._forget(names), using=using)

    def _give_back(self, names: list[str]) -> None:
        try:
            get_coordination().release(names, self.token)
        except CoordinationError as error:
            self._complain("Leases not released, they expire by themselves", error)

    def _forget(self, names: list[str]) -> None:
        with self._lock:
            for name in names:
                self._held.pop(name, None)

    def hold_rows(self, ids: Iterable[UUID]) -> set[UUID]:
        """Renew the row leases of these jobs too (``atomic=False``); return those that nobody else
        of this worker holds."""
        with self._lock:
            free = set(ids) - self._rows
            self._rows |= free
            return free

    def let_rows_go(self, ids: Iterable[UUID]) -> None:
        """Stop renewing."""
        with self._lock:
            self._rows.difference_update(ids)

    def show_alive(self) -> None:
        """Give the worker's sign of life; taken over again if it had been thought dead."""
        names = [alive_name(self.token)]
        try:
            if get_coordination().renew(names, self.token, self.alive_ttl) == [True]:
                return
            self._miss_own_sign()
            get_coordination().claim(names, self.token, self.alive_ttl)
            self._has_shown = True
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
            held, rows = dict(self._held), list(self._rows)
        try:
            for ttl in set(held.values()):
                names = [name for name, lasts in held.items() if lasts == ttl]
                get_coordination().renew(names, self.token, ttl)
        except CoordinationError as error:
            self._complain("Leases not renewed", error)
        if rows:
            self._renew_rows(rows)

    def _renew_rows(self, ids: list[UUID]) -> None:
        using = jobs_database()
        features = connections[using].features
        with transaction.atomic(using=using):
            jobs = Job.objects.using(using).filter(pk__in=ids, lease_token=self.token)
            if features.has_select_for_update_skip_locked:
                # One that is being recorded needs no longer lease, and two statements that wait for
                # each other's rows would be a deadlock.
                free = jobs.select_for_update(
                    skip_locked=True, no_key=features.has_select_for_no_key_update
                )
                jobs = jobs.filter(pk__in=list(free.values_list("pk", flat=True)))
            jobs.update(lease_expires_at=timezone.now() + self.ttl)
