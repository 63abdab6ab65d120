"""Which deliveries of a group may start now, by the limits that hold over all workers together.

A permit of a rate may lie a moment ahead: then its delivery waits in the scheduler, which takes no
lane, and starts at that moment. What has to wait for longer is held: its job's row says so, and its
message is settled. Nothing is ever permitted without an answer of coordination: while that is away,
jobs with a limit wait.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from uuid import UUID

from django.db import DatabaseError, InterfaceError

from kjo_django import registry, states
from kjo_django.conf import QueueConf
from kjo_django.coordination.base import LONGEST_SLACK, Pace, slot_name
from kjo_django.enqueue import storing
from kjo_django.exceptions import CoordinationError
from kjo_django.limits import held
from kjo_django.limits.held import LEAD, Held, Place, Start
from kjo_django.limits.rules import Limit, is_limited, limits_of
from kjo_django.logs import get_logger
from kjo_django.messages.headers import Message
from kjo_django.models import NEVER, HeldJob, Job
from kjo_django.registry import Handler
from kjo_django.runtime import Runtime
from kjo_django.store.rows import JobRow
from kjo_django.store.servers import mend_connection

logger = get_logger("kjo_django")

AWAY = 1.0
"""Seconds until coordination that was away is asked again."""
UNRECORDED = 0.1
"""Seconds until a relay is expected to have recorded where it published a message."""
AT_ONCE = 0.0005
"""Seconds that are not worth waiting for."""
WRITING = 0.1
"""Seconds that a permit lies ahead at least while others wait in line: the line is written first,
and a start that is late by as much would have lost its permit."""
LONGEST_PREPARATION = 0.8 * LEAD
"""Seconds that are expected for the way to a start, at most."""
LOOKED_AFTER = 500
"""Limits for which jobs wait, looked after at a time."""
_AWAITING = frozenset(state.value for state in states.AWAITING_PUBLISH)


class Delivery(Protocol):
    """What is asked of a delivery of the engine's."""

    @property
    def handler(self) -> Handler | None: ...
    @property
    def message(self) -> Message | None: ...
    @property
    def queue(self) -> QueueConf: ...
    @property
    def shard(self) -> object: ...
    @property
    def lease(self) -> str: ...
    @property
    def deliveries(self) -> int: ...

    @property
    def paused_since(self) -> datetime | None: ...

    was_permitted: bool
    permit_since: float
    permitted_at: float
    permit_until: float
    slot_until: float
    is_limited: bool
    prepared_from: float
    held_until: float


D = TypeVar("D", bound=Delivery)


class Leases(Protocol):
    """What is asked of a worker's leases."""

    runtime: Runtime

    def reserve(
        self, asks: Sequence[Sequence[Pace]], within: float, after: float
    ) -> list[float]: ...

    alive_ttl: timedelta

    def claim_slots(self, asks: Sequence[tuple[str, str, int]], ttl: timedelta) -> list[bool]: ...
    def take_freed(self) -> Counter[str]: ...
    def release_abandoned(self, names: Sequence[str]) -> set[str]: ...


class Wait(NamedTuple):
    """What a delivery waits for: the limit, and the seconds; 0: it may start."""

    limit: Limit
    seconds: float


@dataclass(slots=True)
class Sorted(Generic[D]):
    """What becomes of a group's deliveries."""

    limits: Mapping[D, list[Limit]]
    may_run: list[D] = field(default_factory=list)
    deferred: list[D] = field(default_factory=list)
    """They come up again here, at their own moments."""
    held: list[tuple[D, Held]] = field(default_factory=list)
    repeated: list[tuple[D, JobRow]] = field(default_factory=list)
    """Second messages of jobs that are held."""
    places: dict[UUID, Place] = field(default_factory=dict)
    releases: dict[Limit, tuple[int, float]] = field(default_factory=dict)
    """How many jobs are to be released, and in how many seconds the first of them may start."""

    @property
    def settled(self) -> list[tuple[D, JobRow]]:
        """The deliveries whose jobs wait in line, as their rows say: their messages are over."""
        return [(delivery, one.row) for delivery, one in self.held] + self.repeated


class Limiter:
    """The limits of one worker's jobs.

    :param leases: this worker's, among them those that are slots.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._runtime = runtime = leases.runtime
        self.has_limited_queues = any(
            runtime.settings.queue(name).rate is not None for name in registry.queue_names()
        )
        self._looked_after = ""
        self._preparation = 0.05
        """Seconds that a job with a permit is expected to take from its lane's look at it to its
        start: leases, rows, a transaction."""
        self._lateness = 0.0
        """Seconds from the moment that a permit means to the start, as they were of late: the call
        that asks for it, and a thread that is woken late. A rate whose grace is shorter would never
        start anything, so its permits have slack."""

    def limits_of(self, deliveries: Sequence[D]) -> dict[D, list[Limit]]:
        """Return the limits of those of the deliveries that have any."""
        found: dict[D, list[Limit]] = {}
        for delivery in deliveries:
            handler, message, queue = delivery.handler, delivery.message, delivery.queue
            assert handler is not None
            assert message is not None
            if is_limited(self._runtime, handler, queue):
                limits = limits_of(
                    self._runtime, handler, queue, message.payload, message.content_type
                )
                if limits:
                    found[delivery] = limits
        return found

    def sort(
        self,
        deliveries: Sequence[D],
        limited: Mapping[D, list[Limit]],
        rows: Mapping[D, JobRow],
    ) -> Sorted[D]:
        """Ask for what the deliveries of a group need.

        :param deliveries: claimed, of one queue, in order.
        :param limited: the limits of those that have any.
        :param rows: their jobs' rows.
        """
        found: Sorted[D] = Sorted(limited)
        try:
            waits: dict[D, Wait] | None = self._ask(limited, rows, found)
        except CoordinationError:
            waits = None
        self._decide(deliveries, limited, rows, waits, found)
        return found

    # --- Asking -----------------------------------------------------------------------------------

    def _ask(
        self,
        limited: Mapping[D, list[Limit]],
        rows: Mapping[D, JobRow],
        found: Sorted[D],
    ) -> dict[D, Wait]:
        """Return for each delivery which of its limits it has to wait for, and how many seconds; 0
        seconds: it may start. Of several messages of one job only the first is asked for.

        :raises CoordinationError: nobody knows. Slots that were taken are given back with the
            leases of their deliveries.
        """
        runtime, now = self._runtime, self._runtime.clock.monotonic()
        soon = now + self._preparation
        found.places = held.places_of(runtime, [rows[d].id for d in limited if d in rows])
        first = {rows[d].id: d for d in reversed([*limited]) if d in rows}
        limited = {d: of for d, of in limited.items() if d not in rows or first[rows[d].id] is d}
        names = {limit.name for limits in limited.values() for limit in limits}
        crowded = held.lines(runtime, names)
        behind = self._behind(limited, rows, found) if crowded else {}
        waits: dict[D, Wait] = {}
        for delivery, limits in limited.items():
            line = next((limit for limit in limits if limit.name in crowded), None)
            delivery.prepared_from = delivery.prepared_from or now
            if delivery.permit_until < now:
                self._note_lateness(delivery, now)
            if delivery.permitted_at > soon:
                waits[delivery] = Wait(limits[-1], delivery.permitted_at - now)
            elif delivery in behind:
                waits[delivery] = Wait(behind[delivery], 2 * LEAD)
                delivery.permitted_at = delivery.permit_until = 0.0
            elif line is not None and not self._is_next(delivery, rows, found):
                waits[delivery] = Wait(line, 2 * LEAD)
        paced = {
            delivery: rates
            for delivery, limits in limited.items()
            if delivery not in waits
            and delivery.permit_until < now
            and (rates := [limit for limit in limits if limit.rate is not None])
        }
        self._ask_rates(paced, crowded, waits, found)
        starting = [d for d in limited if d not in waits or waits[d].seconds == 0.0]
        self._ask_slots([d for d in starting if limited[d][0].slots], limited, waits)
        for delivery in starting:
            waits.setdefault(delivery, Wait(limited[delivery][0], 0.0))
        return waits

    def _behind(
        self, limited: Mapping[D, list[Limit]], rows: Mapping[D, JobRow], found: Sorted[D]
    ) -> dict[D, Limit]:
        """Return the deliveries that would ask although an earlier one of their key waits for one
        of their limits, and that limit."""
        asking: dict[UUID, D] = {}
        for delivery in limited:
            row = rows.get(delivery)
            if row is None or delivery.deliveries > 1 or delivery.was_permitted:
                continue  # it is before those of its key that wait
            place = found.places.get(row.id)
            if place is None:
                is_asking = delivery.permit_until > 0.0
            else:
                is_asking = place.is_released and place.limit != held.PAUSED
            if is_asking:
                asking[row.id] = delivery
        firsts = held.first_of_keys(self._runtime, asking) if asking else {}
        behind: dict[D, Limit] = {}
        for id, (first, line) in firsts.items():
            delivery = asking[id]
            by_name = {limit.name: limit for limit in limited[delivery]}
            if line not in by_name:
                again = held.first_of_keys(self._runtime, [id], [*by_name])
                first, line = again.get(id, (id, ""))
            if first != id:
                behind[delivery] = by_name[line]
        return behind

    @staticmethod
    def _is_next(delivery: D, rows: Mapping[D, JobRow], found: Sorted[Any]) -> bool:
        """Return whether a delivery asks although others wait in line: it was released, it had
        started or had a permit before, or it cannot stand in line."""
        row = rows.get(delivery)
        if row is None or delivery.deliveries > 1:
            return True
        if delivery.permit_until or delivery.was_permitted:
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
        if not asking:
            return
        slack = {
            limit: min(1.5 * self._lateness - limit.rate.grace, LONGEST_SLACK)
            if self._lateness > limit.rate.grace
            else 0.0
            for rates in asking.values()
            for limit in rates
            if limit.rate is not None
        }
        asks = [
            [limit.pace._replace(slack=slack[limit]) for limit in rates]
            for rates in asking.values()
        ]
        clock = self._runtime.clock
        after = max(WRITING, self._preparation) if crowded else self._preparation
        began = clock.monotonic()
        answers = self._leases.reserve(asks, LEAD, after)
        ended = clock.monotonic()
        for (delivery, rates), seconds in zip(asking.items(), answers, strict=True):
            slowest = max(rates, key=lambda limit: limit.pace.interval)
            if seconds > LEAD:
                waits[delivery] = Wait(slowest, seconds)
                continue
            # The moment meant lies between these two: a start is neither early nor too late.
            grace = min(one.rate.grace + slack[one] for one in rates if one.rate is not None)
            delivery.permit_since = began + seconds
            delivery.permitted_at = ended + seconds
            delivery.permit_until = began + seconds + grace
            delivery.is_limited = True
            # What is to start by the time that it is prepared, is prepared now.
            is_soon = seconds <= self._preparation + AT_ONCE and not crowded
            waits[delivery] = Wait(slowest, 0.0 if is_soon else seconds)
            for limit in rates:
                if limit.name in crowded:
                    count = found.releases.get(limit, (0, 0.0))[0]
                    following = limit.pace.interval + slack[limit]
                    found.releases[limit] = count + 1, seconds + following

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
            delivery.slot_until = began + sure if is_taken else 0.0
            delivery.is_limited = True
            if not is_taken:
                waits[delivery] = Wait(limited[delivery][0], LEAD)
                delivery.permitted_at = delivery.permit_until = 0.0

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
        ahead: Counter[str] = Counter()
        for delivery in deliveries:
            if delivery.shard in held_back:
                found.deferred.append(delivery)
            elif delivery not in limited:
                found.may_run.append(delivery)
            elif waits is None or delivery not in waits:
                self._defer(delivery, now + AWAY, held_back, found)
            elif waits[delivery].seconds == 0.0:
                found.may_run.append(delivery)
            else:
                self._wait(delivery, rows.get(delivery), waits[delivery], ahead, held_back, found)

    def _wait(
        self,
        delivery: D,
        row: JobRow | None,
        wait: Wait,
        ahead: Counter[str],
        held_back: set[object],
        found: Sorted[D],
    ) -> None:
        """Defer a delivery that starts soon, or that cannot stand in line; hold any other.

        :param ahead: how many deliveries of the group wait here for each limit.
        """
        limit, now = wait.limit, self._runtime.clock.monotonic()
        if delivery.permitted_at > now:
            until = max(now, delivery.permitted_at - self._preparation)
            self._defer(delivery, until, held_back, found)
            delivery.prepared_from = until
        elif row is None or delivery.deliveries > 1 or delivery.permit_until:
            interval = limit.pace.interval if limit.rate is not None else 0.0
            until = now + wait.seconds + ahead[limit.name] * interval
            ahead[limit.name] += 1
            self._defer(delivery, until, held_back, found)
        elif (
            storing.is_transactional(delivery.queue)
            or row.state not in _AWAITING
            # It waits without a place: nobody would release it.
            or (row.available_at == NEVER and row.id not in found.places)
        ):
            one = Held(row, limit, wait.seconds, delivery.was_permitted)
            found.held.append((delivery, one))
        elif row.available_at == NEVER:
            found.repeated.append((delivery, row))
        else:
            # Its relay has yet to record that it was published, and would do so afterwards.
            self._defer(delivery, now + UNRECORDED, held_back, found)

    @staticmethod
    def _defer(delivery: D, until: float, held_back: set[object], found: Sorted[Any]) -> None:
        delivery.held_until = until
        held_back.add(delivery.shard)
        found.deferred.append(delivery)

    # --- Starting ---------------------------------------------------------------------------------

    def await_permit(self, delivery: Delivery) -> bool:
        """Wait for the moment at which a delivery that is prepared may start, which is near; return
        False where it has gone by, or where its slot may be another worker's by now. Then the
        delivery asks again, at once."""
        now = self._runtime.clock.monotonic()
        if 0.0 < delivery.slot_until < now:
            delivery.held_until, delivery.slot_until = now, 0.0
            return False
        if not delivery.permit_until:
            return True
        took, delivery.prepared_from = now - delivery.prepared_from, 0.0
        # Quick to believe that it takes long, slower to believe that it does not.
        weight = 0.7 if took > self._preparation else 0.05
        expected = self._preparation + weight * (1.5 * took - self._preparation)
        self._preparation = min(max(expected, 0.005), LONGEST_PREPARATION)
        if now < delivery.permitted_at:
            time.sleep(delivery.permitted_at - now)
            now = self._runtime.clock.monotonic()  # on a busy machine that took longer
        self._note_lateness(delivery, now)
        if now > delivery.permit_until:
            delivery.held_until = now
            delivery.permitted_at = 0.0
            return False
        return True

    def _note_lateness(self, delivery: Delivery, now: float) -> None:
        """Note once how late a delivery is for the moment that its permit means, if it has one; one
        that finds its permit lapsed, before it is prepared, is late as well."""
        if delivery.permit_since:
            late = min(now - delivery.permit_since, LONGEST_SLACK)
            self._lateness += 0.5 * (late - self._lateness)
            delivery.permit_since = 0.0

    # --- The line ---------------------------------------------------------------------------------

    def hold(self, found: Sorted[Any]) -> None:
        """Write what has to wait into its rows, inside the caller's transaction."""
        if found.held:
            queue = found.held[0][0].queue
            held.hold(self._runtime, [one for _, one in found.held], queue)

    def start(self, found: Sorted[Any]) -> None:
        """Take out of the line what starts now, and release those that come next."""
        runtime = self._runtime
        for delivery in found.may_run:
            delivery.was_permitted = delivery in found.limits
        if found.places:
            ids = {str(id): id for id in found.places}
            starting = [
                ids[d.message.job_id]
                for d in found.may_run
                if d.message is not None and d.message.job_id in ids
            ]
            held.leave(runtime, starting)
        for limit, (count, wait) in found.releases.items():
            interval = limit.pace.interval
            # Behind those that are on their way.
            wait = max(wait, held.released_count(runtime, limit.name) * interval)
            held.release(runtime, limit.name, count, wait, interval)
        first: dict[Limit, float] = {}
        for delivery, one in found.held:
            first.setdefault(one.limit, one.wait)
            if (place := found.places.get(one.row.id)) is not None:
                # In the line that it has left for another one, it was on its way.
                for limit in found.limits[delivery]:
                    if limit.name == place.limit:
                        first.setdefault(limit, 0.0)
        for limit, wait in first.items():
            self._fill(limit, wait)

    def _fill(self, limit: Limit, wait: float) -> None:
        """Release so many jobs that wait for a limit as may start soon, less those that are on
        their way."""
        count = held.most_released(limit) - held.released_count(self._runtime, limit.name)
        if limit.rate is None:
            names = [slot_name(limit.name, number) for number in range(1, limit.slots + 1)]
            try:
                count -= len(self._runtime.coordination.holders(names))
            except CoordinationError:
                return
        if count > 0:
            interval = limit.pace.interval if limit.rate is not None else 0.0
            held.release(self._runtime, limit.name, count, wait, interval)

    def keep_places(self, deliveries: Collection[Delivery]) -> None:
        """Keep the places of those of the deliveries that were permitted to start, should they come
        to another worker; raises nothing. This worker remembers by itself."""
        starts = [
            Start(UUID(message.job_id), message.generation, message.attempt)
            for delivery in deliveries
            if delivery.was_permitted
            # Who was late for its permit asks for another one at once.
            and (delivery.paused_since is not None or not delivery.permit_until)
            and (message := delivery.message) is not None
            and message.job_id is not None
            and message.service == self._runtime.service
        ]
        try:
            if starts:
                held.keep_places(self._runtime, starts)
        except (DatabaseError, InterfaceError) as error:
            logger.warning(
                "Should this worker end, %d jobs lose their place: %s", len(starts), error
            )
            mend_connection(self._runtime.database)

    def release_freed(self) -> None:
        """Release a job for each slot that was given back; raises nothing. What an outage keeps
        from being released is released by ``look_after``."""
        freed = self._leases.take_freed()
        try:
            for name in held.lines(self._runtime, list(freed), is_released=False):
                held.release(self._runtime, name, freed[name], 0.0, 0.0)
        except (DatabaseError, InterfaceError) as error:
            logger.warning("Jobs that wait for a slot are released later: %s", error)
            mend_connection(self._runtime.database)

    def has_waiting(self) -> bool:
        """Return whether any job waits in line."""
        return held.rows(self._runtime).exists()

    def look_after(self) -> None:
        """Release jobs that nobody has released: a worker died before it did, a released job was
        cancelled, slots have expired, or the limit is gone."""
        runtime = self._runtime
        heads = held.stalled(runtime, LOOKED_AFTER, self._looked_after)
        self._looked_after = heads[-1].limit if len(heads) == LOOKED_AFTER else ""
        jobs = Job.objects.using(runtime.database)
        rows = {job.pk: job for job in jobs.filter(pk__in=[head.job_id for head in heads])}
        limits = {
            head.limit: self._limit_of(head, job, handler)
            for head in heads
            if (job := rows.get(head.job_id)) is not None
            # Of a job whose handler is another worker's, nobody here knows the limits.
            and (handler := registry.find(job.handler)) is not None
        }
        slots = [
            slot_name(limit.name, number)
            for limit in limits.values()
            if limit is not None
            for number in range(1, limit.slots + 1)
        ]
        if slots:
            self._leases.release_abandoned(slots)
        for name, limit in limits.items():
            if limit is None:
                held.release(runtime, name, held.MOST_RELEASED, 0.0, 0.0)
            else:
                self._fill(limit, 0.0)
        for name in {head.limit for head in heads if head.job_id not in rows}:
            held.release(runtime, name, 1, 0.0, 0.0)

    def _limit_of(self, head: HeldJob, job: Job, handler: Handler) -> Limit | None:
        """Return the limit that a job waits for; None where nothing limits it so any more."""
        queue = self._runtime.settings.queue(job.queue)
        payload = bytes(job.payload)
        limits = limits_of(self._runtime, handler, queue, payload, job.content_type)
        return next((limit for limit in limits if limit.name == head.limit), None)
