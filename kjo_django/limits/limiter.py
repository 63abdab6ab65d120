"""Which deliveries of a group may start now, by the limits that hold over all workers together.

A permit of a rate is taken when its handler is about to be called. A delivery that may start in a
moment waits in the scheduler, which takes no lane. What has to wait for longer gets in line: its
job's row says so, and its message is settled. Nothing is ever permitted without an answer of
coordination: while that is away, jobs with a limit wait.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from uuid import UUID

from django.db import DatabaseError, InterfaceError

from kjo_django import registry, states
from kjo_django.conf import QueueConf
from kjo_django.coordination.starts import Ask, Permit, Used
from kjo_django.enqueue import storing
from kjo_django.exceptions import CoordinationError
from kjo_django.limits import lines
from kjo_django.limits.lines import LEAD, Entry, Line, Place, Start
from kjo_django.limits.permits import (
    LONGEST_PREPARATION,
    LimitState,
    Permits,
    Starting,
    limit_state_of,
)
from kjo_django.limits.releasing import Releaser, SlotLeases
from kjo_django.limits.rules import Limit, is_limited, limits_of
from kjo_django.logs import get_logger
from kjo_django.messages.headers import Message
from kjo_django.models import NEVER
from kjo_django.registry import Handler
from kjo_django.store.rows import JobRow
from kjo_django.store.servers import mend_connection
from kjo_django.transports.base import Record

logger = get_logger("kjo_django")

AWAY = 1.0
"""Seconds until coordination that was away is asked again."""
UNRECORDED = 0.1
"""Seconds until a relay is expected to have recorded where it published a message."""
NEARLY_IDLE = 2.0
"""Seconds of starts that wait in a worker, below which it lets others start that it meets."""
MOMENT = 0.01
"""Seconds that a delivery waits at least."""
TRIES = 4
"""How often the permits of deliveries that start together are taken anew where one has become old
while they waited for another one."""
NEVER_HERE = 3 * lines.AHEAD
"""Seconds for which no delivery waits in its worker."""
_AWAITING = frozenset(state.value for state in states.AWAITING_PUBLISH)


class Delivery(Starting, Protocol):
    """What is asked of a delivery of the engine's."""

    @property
    def handler(self) -> Handler: ...
    @property
    def message(self) -> Message: ...
    @property
    def record(self) -> Record: ...
    @property
    def queue(self) -> QueueConf: ...
    @property
    def lease(self) -> str: ...
    @property
    def deliveries(self) -> int: ...
    @property
    def paused_since(self) -> datetime | None: ...

    limit_state: LimitState | None


D = TypeVar("D", bound=Delivery)


class Leases(SlotLeases, Protocol):
    """What is asked of a worker's leases."""

    alive_ttl: timedelta

    def permit(self, asks: Sequence[Ask], used: Sequence[Used]) -> list[Permit]: ...
    def claim_slots(self, asks: Sequence[tuple[str, str, int]], ttl: timedelta) -> list[bool]: ...
    def has_slot(self, lease: str) -> bool: ...
    def has_lost_slot(self, lease: str) -> bool: ...


class Wait(NamedTuple):
    """What a delivery waits for: the limit, and the seconds; 0: it may start."""

    limit: Limit
    seconds: float


@dataclass(slots=True)
class Sorted(Generic[D]):
    """What becomes of a group's deliveries."""

    limits: Mapping[D, list[Limit]]
    may_run: list[D] = field(default_factory=list)
    deferred: dict[D, float] = field(default_factory=dict)
    """They come up again here, at these moments (monotonic); 0: with the others of their key."""
    in_line: list[tuple[D, Entry]] = field(default_factory=list)
    repeated: list[tuple[D, JobRow]] = field(default_factory=list)
    """Second messages of jobs that stand in line."""
    places: dict[UUID, Place] = field(default_factory=dict)
    advanced: set[Limit] = field(default_factory=set)
    """The limits whose lines advance."""

    @property
    def settled(self) -> list[tuple[D, JobRow]]:
        """The deliveries whose jobs wait in line, as their rows say: their messages are over."""
        return [(delivery, one.row) for delivery, one in self.in_line] + self.repeated


class Limiter:
    """The limits of one worker's jobs.

    :param leases: this worker's, among them those that are slots.
    :param on_earlier: is called with the moments (monotonic) at which deliveries that are deferred
        are to come up, where those are earlier than before.
    :param on_put_off: is called with the moments (monotonic) at which deliveries that are about to
        be deferred are to come up.
    :param on_unused_permit: is called with a delivery for each permit with which it did not start
        in time.
    """

    def __init__(
        self,
        leases: Leases,
        on_earlier: Callable[[Mapping[Any, float]], None],
        on_put_off: Callable[[Mapping[Any, float]], None],
        on_unused_permit: Callable[[Any], None],
    ) -> None:
        self._leases = leases
        self._on_put_off = on_put_off
        self._runtime = runtime = leases.runtime
        self.has_limited_queues = any(
            runtime.settings.queue(name).rate is not None for name in registry.queue_names()
        )
        self._permits = Permits(
            leases.permit,
            runtime.clock,
            waits_in_transactions=runtime.coordination.permits_in_transactions,
            on_earlier=on_earlier,
            on_unused=on_unused_permit,
        )
        self.releaser = Releaser(leases, self._permits)

    def limits_of(self, deliveries: Sequence[D]) -> dict[D, list[Limit]]:
        """Return the limits of those of the deliveries that have any."""
        found: dict[D, list[Limit]] = {}
        for delivery in deliveries:
            handler, message, queue = delivery.handler, delivery.message, delivery.queue
            if is_limited(self._runtime, handler, queue):
                limits = limits_of(
                    self._runtime, handler, queue, message.payload, message.content_type
                )
                if limits:
                    found[delivery] = limits
                    if delivery.limit_state is None:
                        delivery.limit_state = LimitState()
        return found

    def is_ready(self, delivery: Delivery, limits: Sequence[Limit]) -> bool:
        """Return whether a delivery has waited here and got its permit, and nothing else is to be
        asked: it needs no slot, and no other job of its key can be before it."""
        message, now = delivery.message, self._runtime.clock.monotonic()
        state = limit_state_of(delivery)
        return (
            state.asks_again
            and delivery.paused_since is None
            and message.job_id is not None
            and not _has_key(delivery)
            and delivery.deliveries == 1
            and all(limit.rate is not None for limit in limits)
            and [limit.pace for limit in limits] == state.paces
            and self._permits.has_permit(delivery)
            and state.permit_from - now <= self._permits.soon(delivery)
        )

    def sort(
        self,
        deliveries: Sequence[D],
        limited: Mapping[D, list[Limit]],
        rows: Mapping[D, JobRow],
        line: Line,
        ready: Collection[D] = (),
    ) -> Sorted[D]:
        """Ask for what the deliveries of a group need.

        :param deliveries: claimed, of one queue, in order.
        :param limited: the limits of those that have any.
        :param rows: their jobs' rows.
        :param line: what was read of the line along with these.
        :param ready: those of them that are ready, which may have none.
        """
        found: Sorted[D] = Sorted(limited)
        asking = {delivery: of for delivery, of in limited.items() if delivery not in ready}
        try:
            waits: dict[D, Wait] | None = self._ask(asking, rows, line, found) if asking else {}
        except CoordinationError:
            waits = None
        self._decide(deliveries, asking, rows, waits, found)
        if moments := {delivery: at for delivery, at in found.deferred.items() if at}:
            self._on_put_off(moments)
        for delivery in set(ready).intersection(found.may_run):
            state = limit_state_of(delivery)
            state.has_started = False
            found.advanced.update(
                each
                for each in limited[delivery]
                if state.is_released or self.releaser.is_filling(each)
            )
        return found

    # --- Asking -----------------------------------------------------------------------------------

    def _ask(
        self,
        limited: Mapping[D, list[Limit]],
        rows: Mapping[D, JobRow],
        line: Line,
        found: Sorted[D],
    ) -> dict[D, Wait]:
        """Return for each delivery which of its limits it has to wait for, and how many seconds; 0
        seconds: it may start. Of several messages of one job only the first is asked for.

        :raises CoordinationError: nobody knows. Slots that were taken are given back with the
            leases of their deliveries.
        """
        line.read([rows[d].id for d in limited if d in rows])
        found.places = line.places
        limited = _first_of_each_job(limited, rows)
        names = {limit.name for limits in limited.values() for limit in limits}
        crowded = names.intersection(line.crowded)
        waits = self._in_line(limited, crowded, rows, found) if crowded else {}
        paced = {
            delivery: rates
            for delivery, limits in limited.items()
            if delivery not in waits
            and (rates := [limit for limit in limits if limit.rate is not None])
        }
        self._ask_rates(paced, crowded, waits, found)
        starting = [d for d in limited if d not in waits]
        slotted = [d for d in starting if limited[d][0].slots and not self._keeps_slot(d)]
        self._ask_slots(slotted, limited, waits)
        for delivery in starting:
            waits.setdefault(delivery, Wait(limited[delivery][0], 0.0))
        return waits

    def _in_line(
        self,
        limited: Mapping[D, list[Limit]],
        crowded: Collection[str],
        rows: Mapping[D, JobRow],
        found: Sorted[D],
    ) -> dict[D, Wait]:
        """Return the deliveries that are not to ask since others wait for their limits before them,
        and which limits these are.

        :param crowded: the names of the limits for which jobs wait in line.
        """
        invited = self._invited(limited, crowded, rows, found)
        behind = self._behind(limited, rows, found, invited)
        waits: dict[D, Wait] = {}
        for delivery, limits in limited.items():
            line = next((limit for limit in limits if limit.name in crowded), None)
            if delivery in behind:
                waits[delivery] = Wait(behind[delivery], NEVER_HERE)
            elif line is None or delivery in invited or self._is_next(delivery, rows, found):
                continue
            else:
                waits[delivery] = Wait(line, NEVER_HERE)
        return waits

    def _invited(
        self,
        limited: Mapping[D, list[Limit]],
        crowded: Collection[str],
        rows: Mapping[D, JobRow],
        found: Sorted[D],
    ) -> set[D]:
        """Return the deliveries that ask although others wait in line for their rates, since nobody
        who was released is here: those come behind everything else that their topic has."""
        invited: set[D] = set()
        room: dict[Limit, int] = {}
        for delivery, limits in limited.items():
            in_line = [limit for limit in limits if limit.name in crowded]
            if (
                in_line
                and all(limit.rate is not None for limit in in_line)
                and not self._is_next(delivery, rows, found)
                and rows[delivery].id not in found.places
                and self._take_room(in_line, room)
            ):
                invited.add(delivery)
        return invited

    def _take_room(self, rates: Sequence[Limit], room: dict[Limit, int]) -> bool:
        """Return whether one more job may ask beside those that wait in line for these rates.

        :param room: how many more may, of each rate that was asked for.
        """
        for limit in rates:
            if limit not in room:
                seconds = NEARLY_IDLE - self._permits.end_of_line(limit.pace)
                room[limit] = math.ceil(seconds / limit.pace.interval)
        if min(room[limit] for limit in rates) <= 0:
            return False
        room.update((limit, room[limit] - 1) for limit in rates)
        return True

    def _behind(
        self,
        limited: Mapping[D, list[Limit]],
        rows: Mapping[D, JobRow],
        found: Sorted[D],
        invited: Collection[D],
    ) -> dict[D, Limit]:
        """Return the deliveries that would ask although an earlier one of their key waits for one
        of their limits, and that limit.

        :param invited: those that ask although they are not the next in line.
        """
        asking = {
            rows[delivery].id: delivery
            for delivery in limited
            if delivery in rows
            and _has_key(delivery)
            and self._asks_by_its_key(delivery, found.places.get(rows[delivery].id), invited)
        }
        firsts = lines.first_of_keys(self._runtime, asking) if asking else {}
        behind: dict[D, Limit] = {}
        for id, (first, line) in firsts.items():
            delivery = asking[id]
            by_name = {limit.name: limit for limit in limited[delivery]}
            if line not in by_name:
                again = lines.first_of_keys(self._runtime, [id], [*by_name])
                first, line = again.get(id, (id, ""))
            if first != id:
                behind[delivery] = by_name[line]
        return behind

    @staticmethod
    def _asks_by_its_key(delivery: D, place: lines.Place | None, invited: Collection[D]) -> bool:
        """Return whether a delivery would ask, and others of its key may wait before it."""
        state = limit_state_of(delivery)
        if delivery.deliveries > 1 or state.was_permitted:
            return False  # it is before those of its key that wait
        if place is None:
            return state.asks_again or delivery in invited
        return place.is_released and place.limit != lines.PAUSED

    @staticmethod
    def _is_next(delivery: D, rows: Mapping[D, JobRow], found: Sorted[Any]) -> bool:
        """Return whether a delivery asks although others wait in line: it was released, it had
        started or was about to, or it cannot stand in line."""
        row = rows.get(delivery)
        if row is None or delivery.deliveries > 1:
            return True
        state = limit_state_of(delivery)
        if state.asks_again or state.was_permitted:
            return True
        place = found.places.get(row.id)
        return place is not None and place.is_released

    def _ask_rates(
        self,
        asking: Mapping[D, list[Limit]],
        crowded: Collection[str],
        waits: dict[D, Wait],
        found: Sorted[D],
    ) -> None:
        """Find out which are to start now, and when the others may."""
        if not asking:
            return
        for delivery, rates in asking.items():
            state = limit_state_of(delivery)
            state.paces, state.is_limited = [limit.pace for limit in rates], True
            state.has_started = False
        permits = self._permits
        if new := [delivery for delivery in asking if not permits.has_permit(delivery)]:
            permits.ask(new)
        now = self._runtime.clock.monotonic()
        for delivery, rates in asking.items():
            state = limit_state_of(delivery)
            seconds = max(0.0, state.permit_from - now)
            if state.permit is None or seconds > permits.soon(delivery):
                slowest = max(rates, key=lambda limit: limit.pace.interval)
                waits[delivery] = Wait(slowest, max(seconds, MOMENT))
                continue
            found.advanced.update(limit for limit in rates if limit.name in crowded)

    def _keeps_slot(self, delivery: Delivery) -> bool:
        """Return whether a delivery surely has a slot: its group begins anew after an outage."""
        is_sure = limit_state_of(delivery).slot_until > self._runtime.clock.monotonic()
        has_any = is_sure and self._leases.has_slot(delivery.lease)
        return has_any and not self._leases.has_lost_slot(delivery.lease)

    def _ask_slots(
        self,
        asking: Sequence[D],
        limited: Mapping[D, list[Limit]],
        waits: dict[D, Wait],
    ) -> None:
        if not asking:
            return
        asks = [(d.lease, limited[d][0].name, limited[d][0].slots) for d in asking]
        began, ttl = self._runtime.clock.monotonic(), asking[0].queue.processing_ttl
        taken = self._leases.claim_slots(asks, ttl)
        # A worker that is frozen loses its slots with its last sign of life, which may be older
        # than they are.
        sure = min(ttl, self._leases.alive_ttl).total_seconds() / 2
        for delivery, is_taken in zip(asking, taken, strict=True):
            state = limit_state_of(delivery)
            state.slot_until = began + sure if is_taken else 0.0
            state.is_limited = True
            if not is_taken:
                waits[delivery] = Wait(limited[delivery][0], NEVER_HERE)

    # --- Deciding ---------------------------------------------------------------------------------

    def _decide(
        self,
        deliveries: Sequence[D],
        limited: Mapping[D, list[Limit]],
        rows: Mapping[D, JobRow],
        waits: Mapping[D, Wait] | None,
        found: Sorted[D],
    ) -> None:
        """Sort the deliveries, given what each waits for; None: nobody knows."""
        held_back, now = set[object](), self._runtime.clock.monotonic()
        for delivery in deliveries:
            if delivery.shard in held_back:
                found.deferred[delivery] = 0.0
            elif delivery not in limited:
                found.may_run.append(delivery)
            elif waits is None or delivery not in waits:
                self._defer(delivery, now + AWAY, held_back, found)
            elif waits[delivery].seconds == 0.0:
                found.may_run.append(delivery)
            else:
                self._wait(delivery, rows.get(delivery), waits[delivery], held_back, found)

    def _wait(
        self,
        delivery: D,
        row: JobRow | None,
        wait: Wait,
        held_back: set[object],
        found: Sorted[D],
    ) -> None:
        """Defer a delivery that starts soon, or that cannot stand in line; queue any other."""
        now, state = self._runtime.clock.monotonic(), limit_state_of(delivery)
        state.is_limited = True
        place = found.places.get(row.id) if row is not None else None
        state.is_released = place is not None and place.is_released
        longest = 2 * lines.AHEAD if state.is_released else LEAD
        if wait.seconds <= longest or row is None or delivery.deliveries > 1:
            seconds = wait.seconds - (self._permits.soon(delivery) if state.paces else 0.0)
            self._defer(delivery, now + max(seconds, MOMENT), held_back, found)
            state.asks_again = True
        elif (
            storing.is_transactional(delivery.queue)
            or row.state not in _AWAITING
            # It waits without a place: nobody would release it.
            or (row.available_at == NEVER and row.id not in found.places)
        ):
            self._permits.give_back([delivery])
            is_first = state.was_permitted or state.asks_again
            found.in_line.append((delivery, Entry(row, wait.limit, is_first)))
        elif row.available_at == NEVER:
            found.repeated.append((delivery, row))
        else:
            # Its relay has yet to record that it was published, and would do so afterwards.
            self._defer(delivery, now + UNRECORDED, held_back, found)

    @staticmethod
    def _defer(delivery: D, until: float, held_back: set[object], found: Sorted[Any]) -> None:
        held_back.add(delivery.shard)
        found.deferred[delivery] = until

    # --- Starting ---------------------------------------------------------------------------------

    def take_permits(self, deliveries: Sequence[D]) -> list[D]:
        """Wait for the moments of deliveries whose handlers are about to be called together, and
        use their permits; return those that may start. Another one comes up again when it may."""
        return self.use_permits(self.await_permits(deliveries))

    def await_permits(self, deliveries: Sequence[D]) -> list[D]:
        """Wait for the moments of deliveries that start soon; return those that may, once their
        permits are used. Another one comes up again when it may."""
        return self._choose(deliveries, self._until_moments)

    def use_permits(self, deliveries: Sequence[D]) -> list[D]:
        """Use the permits of deliveries whose moments have come, and whose handlers are called
        next; return those that may start. Another one was kept too long from its start, and comes
        up again when it may."""
        return self._choose(deliveries, lambda paced: filter(self._permits.use, paced))

    def _choose(
        self, deliveries: Sequence[D], permitted: Callable[[list[D]], Iterable[D]]
    ) -> list[D]:
        """Return those of the deliveries that may start, and put the others off.

        :param permitted: returns which of those that need permits have got them.
        """
        refused = {delivery for delivery in deliveries if self._has_lost_slot(delivery)}
        paced = [
            each
            for each in deliveries
            if limit_state_of(each).paces and each not in refused and not self._starts_again(each)
        ]
        refused.update({*paced}.difference(permitted(paced)))
        if refused:
            self._put_off(refused)
        return [delivery for delivery in deliveries if delivery not in refused]

    def _until_moments(self, paced: list[D]) -> list[D]:
        """Wait for the moments of deliveries; return those that have a permit then."""
        permits, clock = self._permits, self._runtime.clock
        for delivery in paced:
            permits.note_prepared(delivery)
        for _ in range(TRIES):
            self._take_anew([each for each in paced if not permits.has_permit(each)])
            latest = clock.monotonic() + LONGEST_PREPARATION
            paced = [
                each
                for each in paced
                if permits.has_permit(each) and limit_state_of(each).permit_from <= latest
            ]
            moment = max([limit_state_of(each).permit_from for each in paced], default=0.0)
            if (seconds := moment - clock.monotonic()) > 0:
                clock.wait(threading.Event(), seconds)
            if all(map(permits.has_permit, paced)):
                break
        return paced

    def _put_off(self, refused: Collection[D]) -> None:
        moments = {}
        for delivery in refused:
            state = limit_state_of(delivery)
            state.asks_again = True
            moments[delivery] = max(state.permit_from, self._runtime.clock.monotonic() + MOMENT)
        self._on_put_off(moments)

    def _has_lost_slot(self, delivery: Delivery) -> bool:
        """Return whether the slot of a delivery may be another worker's by now."""
        state = limit_state_of(delivery)
        if not 0.0 < state.slot_until < self._runtime.clock.monotonic():
            return False
        state.slot_until = 0.0
        return True

    def _starts_again(self, delivery: Delivery) -> bool:
        """Return whether a delivery has started in this group, which was undone, and starts again
        without another permit: none can be taken here."""
        return limit_state_of(delivery).has_started and not self._takes_permits_for(delivery)

    def _takes_permits_for(self, delivery: Delivery) -> bool:
        coordination = self._runtime.coordination
        return not delivery.is_in_transaction or coordination.permits_in_transactions

    def _take_anew(self, late: Sequence[D]) -> None:
        """Take permits for deliveries whose own ones have become old, where that can be done here:
        one without comes up again."""
        if not late or not self._takes_permits_for(late[0]):
            return
        try:
            self._permits.ask(late)
        except CoordinationError:
            for delivery in late:
                limit_state_of(delivery).permit_from = self._runtime.clock.monotonic() + AWAY

    def note_prepared_from(self, delivery: Delivery, *, is_first: bool) -> None:
        """Note that a lane begins with the group of a delivery.

        :param is_first: whether it is the first of the group, by which the time until a start is
            prepared is measured.
        """
        if (state := limit_state_of(delivery)).paces:
            state.prepared_from = self._runtime.clock.monotonic() if is_first else 0.0

    def note_start(self, delivery: Delivery) -> None:
        """Note that the handler of a delivery is called now."""
        if delivery.limit_state is not None and delivery.limit_state.permit is not None:
            delivery.limit_state.has_started = True
            self._permits.note_start(delivery)

    def permit_again(self, delivery: Delivery) -> None:
        """Let a delivery run again in its attempt: its start was permitted and has been counted."""
        if delivery.limit_state is not None:
            delivery.limit_state.is_limited = False

    def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Give back the permits of those of the deliveries that have any: they do not start."""
        with_permit = [
            d for d in deliveries if d.limit_state is not None and d.limit_state.permit is not None
        ]
        if with_permit:
            self._permits.give_back(with_permit)

    def forget(self, deliveries: Sequence[Delivery]) -> None:
        """Give back the permits of deliveries that are not this worker's any more, and ask for none
        on their behalf."""
        if waiting := [d for d in deliveries if d.limit_state is not None and d.limit_state.paces]:
            self._permits.give_back(waiting)

    def close(self) -> None:
        """Give back what nobody starts any more; raises nothing."""
        self._permits.give_back_all()
        self.report_permits()

    def report_permits(self) -> None:
        """Tell coordination which permits were used, and which were not; raises nothing."""
        try:
            self._permits.report()
        except CoordinationError as error:
            logger.warning("Permits that were not used count all the same: %s", error)

    # --- The line ---------------------------------------------------------------------------------

    def enter_line(self, found: Sorted[Any]) -> None:
        """Write what has to wait into its rows, inside the caller's transaction."""
        if found.in_line:
            queue = found.in_line[0][0].queue
            self.releaser.keep(one.row.id for _, one in found.in_line)
            lines.enter(self._runtime, [one for _, one in found.in_line], queue)

    def start(self, found: Sorted[Any]) -> None:
        """Take out of the line what starts now, and let those be released that come next."""
        released, others = dict[UUID, int](), dict[UUID, int]()
        places = {str(id): place for id, place in found.places.items()}
        for delivery in found.may_run:
            if (state := delivery.limit_state) is None:
                continue
            state.was_permitted, state.asks_again = delivery in found.limits, False
            # The place of a job that does not run by this message is not its to give away.
            job_id = delivery.message.job_id if state.was_permitted else None
            place = places.get(job_id or "")
            if job_id is None or (place is None and not state.is_released):
                continue
            is_released = state.is_released if place is None else place.is_released
            # One that is not released would be while it runs.
            leaving = released if is_released else others
            leaving[UUID(job_id)] = delivery.message.generation
        lines.leave(self._runtime, others)
        self.releaser.note(released, found.advanced, self._lines_to_fill(found))

    def _lines_to_fill(self, found: Sorted[Any]) -> dict[Limit, float]:
        """Return the limits of which jobs have got in line, or left it for another one, and when
        (monotonic) the first of each may start at the earliest."""
        moments: dict[Limit, float] = {}
        for delivery, one in found.in_line:
            # Coordination said when it might start, so none of those behind it starts before.
            told = limit_state_of(delivery).permit_from
            moments[one.limit] = min(told, moments.get(one.limit, math.inf))
            if (place := found.places.get(one.row.id)) is not None:
                # In the line that it has left for another one, it was on its way.
                left = [each for each in found.limits[delivery] if each.name == place.limit]
                moments |= {each: 0.0 for each in left if each != one.limit}
        return moments

    def keep_places(self, deliveries: Collection[Delivery]) -> None:
        """Keep the places of those of the deliveries that were permitted to start, should they come
        to another worker; raises nothing. This worker remembers by itself."""
        starts = [
            Start(UUID(message.job_id), message.generation, message.attempt)
            for delivery in deliveries
            if (state := delivery.limit_state) is not None
            and state.was_permitted
            # Whose start was refused asks again soon.
            and (delivery.paused_since is not None or not state.asks_again)
            and (message := delivery.message).job_id is not None
            and message.service == self._runtime.service
        ]
        try:
            if starts:
                self.releaser.settle_starts()
                lines.keep_places(self._runtime, starts)
        except (DatabaseError, InterfaceError) as error:
            logger.warning(
                "Should this worker end, %d jobs lose their place: %s", len(starts), error
            )
            mend_connection(self._runtime.database)


def _first_of_each_job(
    limited: Mapping[D, list[Limit]], rows: Mapping[D, JobRow]
) -> dict[D, list[Limit]]:
    """Leave out second messages of one job."""
    first = {rows[d].id: d for d in reversed([*limited]) if d in rows}
    return {d: of for d, of in limited.items() if d not in rows or first[rows[d].id] is d}


def _has_key(delivery: Delivery) -> bool:
    """Return whether other jobs may have the same key. One without has its job's id, or none."""
    job_id = delivery.message.job_id
    return delivery.record.key not in {None, None if job_id is None else job_id.encode()}
