"""Names of leases, and keeping those of this process alive."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from uuid import UUID

from django.db import OperationalError, connections, transaction
from django.utils import timezone

from kjo_django.backends import get_coordination
from kjo_django.conf import QueueConf
from kjo_django.coordination.base import FIRST_CLAIM, Claim
from kjo_django.coordination.circuit_breaker import Silence
from kjo_django.engine.handler.connections import is_unusable
from kjo_django.exceptions import CoordinationError
from kjo_django.store import store_for
from kjo_django.store.transactions import jobs_database

logger = logging.getLogger("kjo_django")

COMPLAINT_INTERVAL = 10.0
MAX_OWED = 10_000
"""Leases to be given back later; those beyond it expire by themselves."""
PAID_AT_ONCE = 500
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
    count of crashed deliveries. One that does not answer is waited for once, not by every group;
    what it has not been told to release by then, it is told when it answers.

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
        self._silence = Silence()
        self._owed: set[str] = set()

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
        if self._silence.lasts():
            return [FIRST_CLAIM] * len(names)
        began = time.monotonic()
        try:
            claims = get_coordination().claim(names, self.token, ttl)
        except CoordinationError as error:
            self._silence.failed(began)
            self._complain("Going on without leases, the database decides", error)
            # It may do yet what it was asked: then there is something to give back.
            self._note_held(names, ttl)
            return [FIRST_CLAIM] * len(names)
        self._silence.answered()
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
        if self._silence.lasts():
            return [FIRST_CLAIM] * len(names)
        began = time.monotonic()
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
            self._silence.failed(began)
            self._complain("Going on without leases, the database decides", error)
            self._note_held(names, ttl)
            return [FIRST_CLAIM] * len(names)
        self._silence.answered()
        acquired = (name for name, claim in zip(names, claims, strict=True) if claim.acquired)
        self._note_held(acquired, ttl)
        return claims

    def _note_held(self, names: Iterable[str], ttl: timedelta) -> None:
        with self._lock:
            self._held.update(dict.fromkeys(names, ttl))
            if self._owed:
                self._owed.difference_update(self._held)

    def is_vanished(self, token: str) -> bool:
        """Return whether the worker with this token shows no sign of life any more.

        False when coordination cannot be reached: then its row leases have to expire.
        """
        if self._silence.lasts():
            return False
        began = time.monotonic()
        try:
            is_dead = bool(self._dead([token]))
        except CoordinationError:
            self._silence.failed(began)
            return False
        self._silence.answered()
        return is_dead

    def release(
        self, names: list[str], *, count_delivery: bool = False, undo_claim: bool = False
    ) -> None:
        """Give the leases back; the outcomes are durable, or nothing was begun.

        :param count_delivery: the attempt was begun and has no outcome: it counts as spent.
        :param undo_claim: nothing was begun, and what a dead worker began stays counted.
        """
        if names and self._silence.lasts():
            self._owe(names)
            return
        self._forget(names)
        if names:
            self._give_back(names, count_delivery=count_delivery, undo_claim=undo_claim)

    def can_release_within(self, using: str) -> bool:
        """Return whether leases can be given back with a transaction of ``using``."""
        return get_coordination().releases_within(using)

    def release_within(self, using: str, names: list[str]) -> None:
        """Give the leases back with the transaction of ``using`` that makes the outcomes durable;
        rolled back, they are still held.

        :raises OperationalError: that failed, and the transaction with it. SQLite undoes one by
            itself when a statement meets a full disk; what comes after it would be committed
            without what was before it.
        """
        began = time.monotonic()
        try:
            get_coordination().release(names, self.token)
        except CoordinationError as error:
            if is_unusable(connections[using]):
                raise OperationalError(f"Leases cannot be released: {error}") from error
            self._not_released(names, began, error)
        transaction.on_commit(lambda: self._forget(names), using=using)

    def _give_back(
        self, names: list[str], *, count_delivery: bool = False, undo_claim: bool = False
    ) -> None:
        began = time.monotonic()
        try:
            get_coordination().release(
                names, self.token, count_delivery=count_delivery, undo_claim=undo_claim
            )
        except CoordinationError as error:
            self._not_released(names, began, error)
        else:
            self._silence.answered()

    def _not_released(self, names: list[str], began: float, error: CoordinationError) -> None:
        self._silence.failed(began)
        self._complain("Leases not released yet, or they expire by themselves", error)
        with self._lock:
            self._owed.update(names[: MAX_OWED - len(self._owed)])

    def _owe(self, names: Collection[str]) -> None:
        """Forget leases that cannot be given back now, and give them back when that can be; those
        that were never claimed are nobody's."""
        with self._lock:
            held = [name for name in names if self._held.pop(name, None) is not None]
            self._owed.update(held[: MAX_OWED - len(self._owed)])

    def _pay(self) -> None:
        """Give back what is owed, to a coordination that has just answered."""
        with self._lock:
            owed, self._owed = list(self._owed), set()
        for start in range(0, len(owed), PAID_AT_ONCE):
            self._give_back(owed[start : start + PAID_AT_ONCE])

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

    def held_rows(self) -> list[UUID]:
        """Return the jobs whose row leases are renewed."""
        with self._lock:
            return list(self._rows)

    def let_rows_go(self, ids: Iterable[UUID]) -> None:
        """Stop renewing."""
        with self._lock:
            self._rows.difference_update(ids)

    def show_alive(self) -> None:
        """Give the worker's sign of life; taken over again if it had been thought dead.

        In a silence too: this costs no lane its time, and is how its end is noticed.
        """
        names, began = [alive_name(self.token)], time.monotonic()
        try:
            if get_coordination().renew(names, self.token, self.alive_ttl) != [True]:
                self._miss_own_sign()
                get_coordination().claim(names, self.token, self.alive_ttl)
                self._has_shown = True
        except CoordinationError as error:
            self._silence.failed(began)
            self._complain("No sign of life given", error)
            return
        if self._silence.answered():
            logger.info("Coordination answers again, leases are taken again")
        if self._owed:
            self._pay()

    def say_goodbye(self) -> None:
        """Let others take over at once whatever is still held."""
        with self._lock:
            held = [*self._held, *self._owed, alive_name(self.token)]
            self._owed = set()
        self._forget(held)
        self._give_back(held)

    def renew(self) -> None:
        """Extend what coordination holds; see ``renew_rows`` for the rest."""
        with self._lock:
            held = dict(self._held)
        if held and self._silence.lasts():
            held = {}
        began = time.monotonic()
        try:
            for ttl in set(held.values()):
                names = [name for name, lasts in held.items() if lasts == ttl]
                get_coordination().renew(names, self.token, ttl)
                self._silence.answered()
        except CoordinationError as error:
            self._silence.failed(began)
            self._complain("Leases not renewed", error)

    def renew_rows(self) -> None:
        """Extend the leases in job rows."""
        ids = self.held_rows()
        if not ids:
            return
        store_for(jobs_database()).renew_row_leases(ids, self.token, timezone.now() + self.ttl)
