"""The leases of this process: claiming, renewing and releasing them, and which delivery owns what.

A delivery that runs owns a lease of coordination, with the slots that belong to it, and, outside a
transaction, the lease in its job's row. Both are renewed as long as they are owned, so a lease that
nobody gives back would keep its job from running for ever. What is owned leaves when the outcome is
durable. All that is left when a run ends, however it ends, is given back by whoever ran it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import TypeVar
from uuid import UUID

from django.db import DatabaseError, InterfaceError, OperationalError, connections

from kjo_django.clock import CLOCK
from kjo_django.coordination.base import FIRST_CLAIM, CircuitBreaker, Claim, alive_name
from kjo_django.coordination.starts import Ask, Permit, Used
from kjo_django.engine.attempt import Delivery
from kjo_django.engine.handler.connections import drop_broken_connections, is_pristine
from kjo_django.exceptions import CoordinationError, CoordinationForgotError
from kjo_django.logs import get_logger
from kjo_django.runtime import Runtime
from kjo_django.store.rows import JobRow
from kjo_django.transports.base import Subscription

T = TypeVar("T")

logger = get_logger("kjo_django")

_lease_of = attrgetter("lease")
_has_own_lease = attrgetter("has_own_lease")
_NOBODYS = timedelta(), 0

WARNING_INTERVAL = 10.0
MAX_UNRELEASED = 10_000
"""Leases to be given back later; those beyond it expire by themselves."""
RELEASED_AT_ONCE = 500


@dataclass(slots=True)
class Owned:
    """What a delivery owns."""

    claims: int = 0
    """Number of claims of its lease since the last durable outcome; 0: it owns none."""
    row: UUID | None = None
    """The job whose row it has leased."""
    is_spent: bool = False
    """Whether its attempt counts although it has no ending."""


class LeaseBook:
    """The leases of one worker: claims in one round trip, renews in the background, releases.

    Every lease carries the worker's token. When coordination cannot be reached, claims succeed
    unproven and the worker goes on: the database decides anyway. What is lost meanwhile is the
    count of crashed deliveries. A server that does not answer is waited for once, not by every
    group. Leases that could not be released meanwhile are released when it answers.

    :param token: identifies the worker.
    :param ttl: how long a lease lasts without renewal, which comes every third of it; the setting
        if not given.
    :param alive_ttl: how long the worker counts as alive without a sign of life; three heartbeats
        if not given. Its leases are taken over after that, however long they would have lasted.
    """

    def __init__(
        self,
        runtime: Runtime,
        token: str,
        ttl: timedelta | None = None,
        alive_ttl: timedelta | None = None,
    ) -> None:
        self.runtime = runtime
        self._clock = runtime.clock
        self._coordination = runtime.coordination
        self._store = runtime.store
        self.token = token
        self.ttl = ttl or runtime.settings.processing_ttl
        self.alive_ttl = alive_ttl or 3 * runtime.settings.heartbeat_interval
        self._held: dict[str, tuple[timedelta, int]] = {}
        """How long each lease lasts, and how many deliveries of a group have it: messages of one
        item share a lease."""
        self._rows: set[UUID] = set()
        self.owned: dict[Delivery, Owned] = {}
        self._lock = threading.Lock()
        self._warn_at = 0.0
        self._has_shown = False
        self._shown_at = 0.0
        """When the sign of life was given last (monotonic)."""
        self._uncertain_until = 0.0
        self._breaker = CircuitBreaker(runtime.clock)
        self._unreleased: set[str] = set()
        self._leaving: set[str] = set()
        """Those of them that are released just now: who takes one anew would lose it."""
        self._slots: dict[str, list[str]] = {}
        """The slots that were taken for a delivery, by its lease. They are released with it."""
        self.freed: Counter[str] = Counter()
        """How many slots of each name were given back since ``take_freed``."""

    def _warn(self, consequence: str, error: Exception) -> None:
        """Log an outage once in a while, not for every group it touches."""
        now = self._clock.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARNING_INTERVAL
            logger.warning("%s: %s", consequence, error)

    # --- What deliveries own ----------------------------------------------------------------------

    def claim(self, deliveries: Sequence[Delivery], ttl: timedelta | None = None) -> list[Claim]:
        """Claim the leases of deliveries that are free; see ``release_abandoned`` for the rest. A
        delivery whose record has a lease of its own owns that one; ``begin`` notes that it runs.

        :param ttl: of leases of coordination, where their queue has its own.
        """
        if any(map(_has_own_lease, deliveries)):
            return self._claim_records(deliveries, ttl)
        ttl, names = ttl or self.ttl, [*map(_lease_of, deliveries)]
        if self._breaker.is_open():
            return self._own_unasked(deliveries)
        if self._unreleased or self._leaving:
            with self._lock:
                if not self._leaving.isdisjoint(names):
                    return [Claim(False, 0)] * len(names)
                self._unreleased.difference_update(names)
        began = self._clock.monotonic()
        try:
            claims = self._coordination.claim(names, self.token, ttl)
        except CoordinationError as error:
            self._breaker.record_failure(began)
            self._warn("Going on without leases, the database decides", error)
            # It may do yet what it was asked: then there is something to give back.
            claims = [FIRST_CLAIM] * len(names)
        else:
            self._breaker.record_success()
        each = zip(deliveries, claims, strict=True)
        acquired = {delivery: claim.deliveries for delivery, claim in each if claim.acquired}
        counts = Counter(map(_lease_of, acquired))
        with self._lock:
            self._held.update({name: (ttl, count) for name, count in counts.items()})
        # Not before: who settles one of them meanwhile would leave its lease without an owner.
        for delivery, count in acquired.items():
            owned = self.owned.get(delivery)
            if owned is None:
                self.owned[delivery] = Owned(count)
            else:
                # Not answered, it may be the second claim of a run that knew more.
                owned.claims = max(owned.claims, count)
        return claims

    def lease_rows(self, rows: Mapping[Delivery, JobRow]) -> set[Delivery]:
        """Lease the rows of jobs; return the deliveries whose rows are leased.

        A row is not leased that somebody has changed since it was read, or that another delivery of
        this worker has leased: of two records of one job the second has to wait.
        """
        first: dict[UUID, Delivery] = {}
        for delivery, row in rows.items():
            first.setdefault(row.id, delivery)
        new = self.hold_rows(first)
        leased: set[UUID] = set()
        now = CLOCK.now()
        try:
            leased = self._store.take_row_leases(
                [rows[delivery] for id, delivery in first.items() if id in new],
                self.token,
                now,
                now + self.ttl,
            )
        finally:
            self.let_rows_go(new - leased)
        for id in leased:
            self.owned.setdefault(first[id], Owned()).row = id
        return {first[id] for id in leased}

    def spend(self, deliveries: Iterable[Delivery]) -> None:
        """Let the attempts of deliveries count, should they be given back."""
        for delivery in deliveries:
            if owned := self.owned.get(delivery):
                owned.is_spent = True

    def settle(self, deliveries: Iterable[Delivery]) -> None:
        """Give up what deliveries own whose outcomes are durable."""
        left = self._take_out(deliveries)
        if rows := [owned.row for _, owned in left if owned.row]:
            self.let_rows_go(rows)
        if names := [each.lease for each, owned in left if owned.claims and self._has_lease(each)]:
            self.release(names)

    def _has_lease(self, delivery: Delivery) -> bool:
        """Return whether coordination may have a lease or a slot of this worker's for it."""
        return not delivery.has_own_lease or delivery.lease in self._slots

    def _own_unasked(self, deliveries: Sequence[Delivery]) -> list[Claim]:
        """Let deliveries have no leases, but the slots that may be taken for them when coordination
        answers again."""
        for delivery in deliveries:
            owned = self.owned.setdefault(delivery, Owned())
            owned.claims = owned.claims or 1
        return [FIRST_CLAIM] * len(deliveries)

    def settle_within(self, using: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Give leases up with the transaction of ``using`` that makes the outcomes durable, and
        return whose; ``forget`` them when it is committed. None where coordination cannot, and of
        deliveries with a slot none: what they do on commit is done in it.

        :raises OperationalError: that failed, and the transaction with it. SQLite undoes one by
            itself when a statement meets a full disk; what comes after it would be committed
            without what was before it.
        """
        if self._coordination.releases_within != using:
            return []
        began = self._clock.monotonic()
        # Steps that have joined the transaction were not claimed.
        with self._lock:
            settled = [
                each
                for each in deliveries
                if each in self.owned and each.lease in self._held and each.lease not in self._slots
            ]
        names = [delivery.lease for delivery in settled]
        try:
            if names:
                self._coordination.release(names, self.token)
        except CoordinationError as error:
            if not is_pristine(connections[using]):
                raise OperationalError(f"Leases cannot be released: {error}") from error
            self._not_released(names, began, error)
        return settled

    def forget(self, deliveries: Iterable[Delivery]) -> None:
        """Renew the leases of these deliveries no longer: they have been given up."""
        names = [each.lease for each in deliveries if self.owned.pop(each, None)]
        with self._lock:
            for name in names:
                self._held.pop(name, None)

    def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Give back all that deliveries still own, for others to have it. An outage is not raised.

        What dead workers have begun stays counted, unless the attempt has ended here.
        """
        known: list[str] = []
        counted: list[str] = []
        spent: list[str] = []
        begun: dict[Delivery, int] = {}
        """Those begun under leases of their records, and how often each stays counted."""
        left = self._take_out(deliveries)
        for delivery, owned in left:
            if not owned.claims:
                continue
            stays = _stays_counted(delivery, owned)
            if delivery.has_own_lease and not delivery.is_settled:
                begun[delivery] = stays
            if not self._has_lease(delivery):
                continue
            if not stays:
                known.append(delivery.lease)
            else:
                (spent if owned.is_spent else counted).append(delivery.lease)
        with ExitStack() as all_of_it:  # whatever one of them raises
            all_of_it.callback(self.release, spent, count_delivery=True)
            all_of_it.callback(self.release, counted, undo_claim=True)
            all_of_it.callback(self.release, known)
            all_of_it.callback(self._end, begun)
            self._give_back_rows([owned for _, owned in left])

    def give_back_rows(self, deliveries: Iterable[Delivery]) -> None:
        """Give back the leases in rows that deliveries still own. An outage is not raised."""
        self._give_back_rows([self.owned[each] for each in deliveries if each in self.owned])

    def _give_back_rows(self, left: Sequence[Owned]) -> None:
        ids = [owned.row for owned in left if owned.row]
        try:
            self._store.release_row_leases(ids, self.token)
        except (DatabaseError, InterfaceError, OSError) as error:
            logger.warning("Leases of %d jobs expire by themselves: %s", len(ids), error)
            drop_broken_connections()
        finally:
            for owned in left:
                owned.row = None
            # Not before: another lane might lease them meanwhile, under the same token.
            self.let_rows_go(ids)

    def _take_out(self, deliveries: Iterable[Delivery]) -> list[tuple[Delivery, Owned]]:
        take = self.owned.pop
        return [(each, owned) for each in deliveries if (owned := take(each, None)) is not None]

    # --- Leases of records ------------------------------------------------------------------------

    def _claim_records(self, deliveries: Sequence[Delivery], ttl: timedelta | None) -> list[Claim]:
        """Count deliveries whose records have leases, and claim the leases of the others."""
        others = [each for each in deliveries if not each.has_own_lease]
        claims = dict(zip(others, self.claim(others, ttl), strict=True)) if others else {}
        own = (each for each in deliveries if each.has_own_lease)
        for subscription, counted in _by_subscription(own).items():
            counts = subscription.count_deliveries([each.record for each in counted])
            for delivery, known in zip(counted, counts, strict=True):
                # Where its COMMIT was not answered, its record may have been settled with it: the
                # marker tells.
                count = known or int(delivery.attempt is not None)
                claims[delivery] = Claim(count > 0, count)
                if count:
                    self.owned.setdefault(delivery, Owned()).claims = count
        return [claims[each] for each in deliveries]

    def begin(self, deliveries: Sequence[Delivery]) -> Collection[Delivery]:
        """Note durably that claimed deliveries are about to run, so that the death of this worker
        counts for them; return those that are this worker's still. A lease of coordination counts
        from its claim on."""
        mine = {each for each in deliveries if not each.has_own_lease}
        own = (each for each in deliveries if each.has_own_lease)
        for subscription, begun in _by_subscription(own).items():
            counts = subscription.begin([each.record for each in begun], self.token)
            each_count = zip(begun, counts, strict=True)
            mine.update(each for each, count in each_count if count or each.attempt is not None)
        return mine

    def died_among(self, workers: Collection[str]) -> Collection[str]:
        """Return those of the workers that have died, whose records' leases have run out. None of
        them where coordination cannot say.

        A sign of life that may outlive such a lease says nothing: then all of them count as dead.
        """
        others = set(workers) - {self.token}
        # A lease that is renewed every third of it runs out two thirds after a death at least.
        if self.alive_ttl > 2 * self.runtime.settings.record_lease / 3:
            return others
        try:
            return self._dead(others)
        except CoordinationError as error:
            self._warn("Nobody knows which workers have died", error)
            return ()

    def _end(self, begun: Mapping[Delivery, int]) -> None:
        """Count how often deliveries were begun that run no longer. An outage is not raised."""
        for subscription, ended in _by_subscription(begun).items():
            try:
                subscription.end([each.record for each in ended], [begun[each] for each in ended])
            except (DatabaseError, InterfaceError, OSError) as error:
                logger.warning("%d records count as begun: %s", len(ended), error)
                drop_broken_connections()

    # --- Limits -----------------------------------------------------------------------------------

    def permit(self, asks: Sequence[Ask], used: Sequence[Used]) -> list[Permit]:
        """Take permits for starts that are about to come; see ``Coordination.permit``.

        :raises CoordinationError: nobody knows.
        """
        permit = self._coordination.permit
        return self._ask(lambda: permit(asks, self._sign(), used))

    def claim_slots(self, asks: Sequence[tuple[str, str, int]], ttl: timedelta) -> list[bool]:
        """Take a slot for each ask; return for which there was one. It is renewed and released
        with a lease.

        :param asks: that lease, and the name and the number of the slots.
        :raises CoordinationError: nobody knows.
        """
        claim, wanted = self._coordination.claim_slots, [(name, count) for _, name, count in asks]
        slots = self._ask(lambda: claim(wanted, self.token, ttl, self._sign()))
        with self._lock:
            # It may be about to be released, for a delivery that had it before.
            leaving = self._leaving.intersection(slots)
            slots = ["" if slot in leaving else slot for slot in slots]
            for (lease, _, _), slot in zip(asks, slots, strict=True):
                if slot:
                    if slot in self._held:
                        self._note_lost(slot)
                    self._held[slot] = (ttl, 1)
                    self._slots.setdefault(lease, []).append(slot)
            self._unreleased.difference_update(slots)
            self._unreleased |= leaving
        return [bool(slot) for slot in slots]

    def _note_lost(self, slot: str) -> None:
        """Note that a slot is no longer that of the delivery it was taken for: the worker was
        thought dead meanwhile. Who has it now must not lose it with the end of that delivery; the
        caller holds the lock."""
        self._held.pop(slot, None)
        for slots in self._slots.values():
            if slot in slots:
                slots.remove(slot)

    def _sign(self) -> tuple[str, str] | None:
        """Return what a server must know of this worker, unless it has lost its data."""
        return (alive_name(self.token), self.token) if self._has_shown else None

    def _ask(self, call: Callable[[], list[T]]) -> list[T]:
        """Return what coordination answers. After it has lost its data nothing is asked for as long
        as the other workers need to claim again what they hold."""
        if self._clock.monotonic() < self._uncertain_until:
            raise CoordinationForgotError("Coordination has lost its data a moment ago")
        if self._breaker.is_open():
            unasked = CoordinationError("Coordination does not answer")
            unasked.may_have_effect = False
            raise unasked
        began = self._clock.monotonic()
        try:
            answer = call()
        except CoordinationForgotError as error:
            self._on_own_sign_missing()
            self._warn("Jobs with a limit wait", error)
            raise
        except CoordinationError as error:
            self._breaker.record_failure(began)
            self._warn("Jobs with a limit wait", error)
            raise
        self._breaker.record_success()
        return answer

    def _slots_of(self, names: Iterable[str]) -> list[str]:
        """Return the slots that are released with these leases, and forget them; the caller holds
        the lock."""
        slots = [slot for name in names for slot in self._slots.pop(name, ())]
        self.freed.update(slot.rpartition(":")[0] for slot in slots)
        return slots

    def has_slot(self, lease: str) -> bool:
        """Return whether a slot was taken for the delivery with this lease."""
        return lease in self._slots

    def has_lost_slot(self, lease: str) -> bool:
        """Return whether the slot that was taken for a delivery is known to be another worker's."""
        return self._slots.get(lease) == []

    def take_freed(self) -> Counter[str]:
        """Return how many slots of each name were given back since the last call."""
        with self._lock:
            freed, self.freed = self.freed, Counter()
            return freed

    def note_freed(self, freed: Counter[str]) -> None:
        """Put back what was taken: nobody has been let start in its place."""
        with self._lock:
            self.freed.update(freed)

    # --- Leases of dead workers -------------------------------------------------------------------

    def release_abandoned(self, names: Sequence[str]) -> set[str]:
        """Release what workers hold of these names that show no sign of life, and return it; the
        deliveries they began stay counted."""
        released: set[str] = set()
        if not names:
            return released
        try:
            owners = self._coordination.holders(names)
            for dead in self._dead(set(owners.values()) - {self.token}):
                left = [name for name in names if owners.get(name) == dead]
                self._coordination.release(left, dead, count_delivery=True)
                released.update(left)
        except CoordinationError as error:
            self._warn("Leases of dead workers expire by themselves", error)
        return released

    def _dead(self, tokens: Collection[str]) -> set[str]:
        """Return those of the workers that show no sign of life.

        None of them while this worker's own sign is missing, or was a moment ago. Then coordination
        has been emptied, or could not be written for long, and the living workers need a moment to
        give their signs again.

        :raises CoordinationError: it cannot be reached.
        """
        if not tokens:
            return set()
        own = alive_name(self.token)
        living = self._coordination.holders([own, *map(alive_name, tokens)])
        if own not in living:
            self._on_own_sign_missing()
        if self._clock.monotonic() < self._uncertain_until:
            return set()
        return {token for token in tokens if alive_name(token) not in living}

    def _on_own_sign_missing(self) -> None:
        if self._has_shown:
            self._uncertain_until = self._clock.monotonic() + self.alive_ttl.total_seconds()

    def is_vanished(self, token: str) -> bool:
        """Return whether the worker with this token shows no sign of life any more.

        False when coordination cannot be reached: then its row leases have to expire.
        """
        if self._breaker.is_open():
            return False
        began = self._clock.monotonic()
        try:
            is_dead = bool(self._dead([token]))
        except CoordinationError:
            self._breaker.record_failure(began)
            return False
        self._breaker.record_success()
        return is_dead

    def release(
        self, names: list[str], *, count_delivery: bool = False, undo_claim: bool = False
    ) -> None:
        """Give back those of the leases that this worker has, now or when coordination answers; the
        outcomes are durable, or nothing was begun. A lease that was claimed for several deliveries
        of a group is kept until the last of them is released.

        :param count_delivery: the attempt was begun and has no outcome: it counts as spent.
        :param undo_claim: nothing was begun, and what a dead worker began stays counted.
        """
        with self._lock:
            mine = self._dropped(names)
            if mine and self._breaker.is_open():
                self._unreleased.update(mine[: MAX_UNRELEASED - len(self._unreleased)])
                return
        if mine:
            self._release_now(mine, count_delivery=count_delivery, undo_claim=undo_claim)

    def _dropped(self, names: Sequence[str]) -> list[str]:
        """Forget leases, and the slots of those that are given back; return what is to be given
        back. The caller holds the lock."""
        dropped = []
        for name in names:
            ttl, count = self._held.pop(name, _NOBODYS)
            if count > 1:
                self._held[name] = (ttl, count - 1)
            elif count:
                dropped.append(name)
        if self._slots:
            slots = self._slots_of(name for name in names if name not in self._held)
            for slot in slots:
                self._held.pop(slot, None)
            dropped += slots
        return dropped

    def _release_now(
        self, names: list[str], *, count_delivery: bool = False, undo_claim: bool = False
    ) -> None:
        began = self._clock.monotonic()
        try:
            self._coordination.release(
                names, self.token, count_delivery=count_delivery, undo_claim=undo_claim
            )
        except CoordinationError as error:
            self._not_released(names, began, error)
        else:
            self._breaker.record_success()

    def _not_released(self, names: list[str], began: float, error: CoordinationError) -> None:
        self._breaker.record_failure(began)
        self._warn("Leases not released yet, or they expire by themselves", error)
        with self._lock:
            self._unreleased.update(names[: MAX_UNRELEASED - len(self._unreleased)])

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

        Also while the breaker is open: this costs no lane its time, and notices an answer.
        """
        names, began = [alive_name(self.token)], self._clock.monotonic()
        try:
            if self._coordination.renew(names, self.token, self.alive_ttl) != [True]:
                self._on_own_sign_missing()
                self._coordination.claim(names, self.token, self.alive_ttl)
                self._has_shown = True
                self._claim_slots_again()
            self._shown_at = began
        except CoordinationError as error:
            self._breaker.record_failure(began)
            self._warn("The worker's heartbeat was not renewed", error)
            return
        if self._breaker.record_success():
            logger.info("Coordination answers again, leases are taken again")
        with self._lock:
            self._leaving, self._unreleased = self._unreleased, set()
        late = list(self._leaving)
        try:
            for start in range(0, len(late), RELEASED_AT_ONCE):
                self._release_now(late[start : start + RELEASED_AT_ONCE])
        finally:
            self._leaving = set()

    def show_alive_if_late(self) -> None:
        """Give the sign of life now if the thread that gives it is late, as on an SQLite that many
        write to: while it is missing, others take over at once what begins here."""
        due = self._shown_at + self.alive_ttl.total_seconds() / 2
        if self._has_shown and self._clock.monotonic() > due and not self._breaker.is_open():
            self.show_alive()

    def _claim_slots_again(self, missing: Collection[str] | None = None) -> None:
        """Tell coordination, which has lost its data or thought this worker dead, which slots are
        taken here, and note those that are another worker's by now.

        :param missing: leases that it does not know of; by default no slot is known.
        """
        with self._lock:
            slots = [slot for slot in self._taken_slots() if missing is None or slot in missing]
            lifetimes = [self._held[slot][0] for slot in slots if slot in self._held]
        ttl = max(lifetimes, default=self.ttl)
        claims = self._coordination.claim(slots, self.token, ttl) if slots else []
        with self._lock:
            taken = self._taken_slots()
            # Their deliveries have ended meanwhile.
            ended = [slot for slot in slots if slot not in taken]
            for slot, claim in zip(slots, claims, strict=True):
                if not claim.acquired:
                    self._note_lost(slot)
        if ended:
            self._coordination.release(ended, self.token)

    def _taken_slots(self) -> list[str]:
        return [slot for each in self._slots.values() for slot in each]

    def release_all(self) -> None:
        """Let others take over at once whatever this worker still has."""
        self._end({each: 0 for each in list(self.owned) if each.has_own_lease})
        with self._lock:
            mine = [*self._held, *self._unreleased, alive_name(self.token)]
            self._unreleased, self._held, self._slots = set(), {}, {}
        self._release_now(mine)

    def renew(self) -> bool:
        """Extend what coordination holds; see ``renew_rows`` for the rest. Returns whether
        coordination has answered: else it is to be asked again soon."""
        with self._lock:
            mine = dict(self._held)
        if not mine:
            return True
        if self._breaker.is_open():
            return False
        began, missing = self._clock.monotonic(), set[str]()
        try:
            for ttl in {ttl for ttl, _ in mine.values()}:
                names = [name for name, (lasts, _) in mine.items() if lasts == ttl]
                answers = self._coordination.renew(names, self.token, ttl)
                each = zip(names, answers, strict=True)
                missing.update(name for name, is_mine in each if not is_mine)
                self._breaker.record_success()
            if missing and self._slots:
                self._claim_slots_again(missing)
        except CoordinationError as error:
            self._breaker.record_failure(began)
            self._warn("Leases not renewed", error)
            return False
        return True

    def renew_rows(self) -> None:
        """Extend the leases in job rows."""
        ids = self.held_rows()
        if not ids:
            return
        self._store.renew_row_leases(ids, self.token, self._clock.now() + self.ttl)


def _by_subscription(deliveries: Iterable[Delivery]) -> dict[Subscription, list[Delivery]]:
    found: dict[Subscription, list[Delivery]] = {}
    for delivery in deliveries:
        found.setdefault(delivery.subscription, []).append(delivery)
    return found


def _stays_counted(delivery: Delivery, owned: Owned) -> int:
    """Return how often a delivery that is given back stays counted as begun."""
    if delivery.is_settled or ((attempt := delivery.attempt) and attempt.must_not_run):
        return 0
    if owned.is_spent:
        return owned.claims
    return 0 if delivery.attempt is not None else owned.claims - 1
