"""The permits that one worker has of rates: which of its deliveries may start, and from when on.

Coordination is asked for all that wait in this worker together, in their order, by one thread at a
time. So a worker asks a few times a second at most, however far away coordination is and however
many lanes it has; and who waits for an answer that another thread gets asks for nothing.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kjo_django.clock import Clock
from kjo_django.coordination.starts import Ask, Pace, Permit, Used
from kjo_django.exceptions import CoordinationError

SHORTEST_LIFE = 0.1
"""Of the window of a rate, the part for which a permit is good at least; half a second at most."""
LONGEST_LIFE = 2.0
"""Seconds for which a permit is good at most, beside the time of a call of coordination."""
TO_THE_CALL = 0.05
"""Seconds that pass at most, nearly always, between the use of a permit and the handler's call."""
LEAST_AHEAD = 0.1
"""Seconds by which the moment of a permit may be ahead, at least where its rate allows for it."""
LONGEST_PREPARATION = 0.5
"""Seconds for which a lane waits for the moment of a permit at most."""
LONGEST_CALL = 2.0
"""Seconds that a call of coordination is expected to take at most."""
EARLY = 0.001
"""Seconds by which a wait may end before its time."""
MUCH_EARLIER = 0.01
"""Seconds by which a delivery comes up earlier for a permit, at least."""
MOST_ASKED = 300
"""Deliveries of one rate that are asked for at a time."""
MOST_CALLS = 10
"""How often in a row others are asked for where all of those got a permit: a burst."""
LATE = 0.5
"""Seconds after which a permit that became old is given back, unless its delivery asks again."""
FORGOTTEN_AFTER = 2.0
"""Seconds after the moment for which its own lane was told to come that a delivery is not waited
for any more."""


class Taken(NamedTuple):
    """A permit that a delivery has."""

    paces: Sequence[Pace]
    stamp: int
    begin: float
    """From when (monotonic) on the start may come."""
    end: float
    """Until when (monotonic) the call for it must be made."""


@dataclass(slots=True, eq=False)
class LimitState:
    """What a worker's limits know of one delivery. Nobody else writes it."""

    paces: Sequence[Pace] = ()
    """The rates that have to permit its start."""
    asked_at: float = 0.0
    """When (monotonic) a permit was asked for last."""
    permit: Taken | None = None
    """The permit that it has of its rates."""
    permit_from: float = 0.0
    """From when (monotonic) on it may start with that; without, when it might."""
    comes_by: float = 0.0
    """By when (monotonic) a lane has come for the permit, or nobody waits for it any more."""
    prepared_from: float = 0.0
    """When (monotonic) a lane began with the group of which it was the first; 0: it was not."""
    has_started: bool = False
    """Whether its handler was called since it asked last."""
    was_permitted: bool = False
    """Whether its limits have let it start: it comes before others of its key that wait."""
    asks_again: bool = False
    """Whether it waits in its worker: it comes before those that wait in line."""
    is_released: bool = False
    """Whether it waits in its worker because it was the next in line."""
    is_limited: bool = False
    """Whether it may start only as long as its permit, or its slot, is its own."""
    slot_until: float = 0.0
    """Until when (monotonic) the slot that was taken for it is surely no other worker's; 0: it has
    none."""


class Starting(Protocol):
    """What is asked of a delivery."""

    @property
    def is_in_transaction(self) -> bool: ...
    @property
    def limit_state(self) -> LimitState | None: ...
    @property
    def shard(self) -> object: ...


def limit_state_of(delivery: Starting) -> LimitState:
    """Return what is known of a delivery that has limits."""
    state = delivery.limit_state
    assert state is not None
    return state


class Permits:
    """See the module.

    :param permit: asks coordination; see ``Coordination.permit``.
    :param waits_in_transactions: whether lanes may wait for the moment of a permit in a
        transaction: nobody else waits for its end.
    :param on_earlier: is called with deliveries that may start earlier than they were told, and the
        moments (monotonic) at which a lane is to prepare their starts.
    :param on_unused: is called with a delivery for each permit with which it did not start in time.
    """

    def __init__(
        self,
        permit: Callable[[Sequence[Ask], Sequence[Used]], list[Permit]],
        clock: Clock,
        *,
        waits_in_transactions: bool = True,
        on_earlier: Callable[[Mapping[Any, float]], None] = lambda moments: None,
        on_unused: Callable[[Any], None] = lambda delivery: None,
    ) -> None:
        self._permit = permit
        self._on_earlier = on_earlier
        self._on_unused = on_unused
        self._clock = clock
        self._waits_in_transactions = waits_in_transactions
        self._calling = threading.Lock()
        """The thread that asks has it."""
        self._lock = threading.Lock()
        """Guards all of the following, and what the permits of deliveries are."""
        self._line: dict[int, Starting] = {}
        """The deliveries that wait for a permit, or have one and have not started, by their ids, in
        order."""
        self._asking: set[int] = set()
        """Those of them whose lanes wait for an answer."""
        self._used: list[tuple[Taken, float | None]] = []
        """Permits of which coordination does not know yet when (monotonic) their starts came, if
        they came."""
        self._delay = 0.0
        """Seconds from the moment of a permit to the start, as they were of late."""
        self._took, self._took_more = 0.01, 0.01
        """Seconds that it takes to prepare a start, and how much they differ."""
        self._call_took = 0.0
        """Seconds that a call of coordination takes at most, of late."""

    # --- Asking -----------------------------------------------------------------------------------

    def ask(self, deliveries: Sequence[Starting]) -> None:
        """Take permits for deliveries, as far as there are any. Each has its ``permit`` then, or
        only knows when it might get one: ``permit_from``.

        :raises CoordinationError: nobody knows.
        """
        since = self._clock.monotonic()
        with self._lock:
            for delivery in deliveries:
                state = limit_state_of(delivery)
                self._line[id(delivery)] = delivery
                self._asking.add(id(delivery))
                state.comes_by = max(state.comes_by, since + FORGOTTEN_AFTER)
                if state.permit is not None and state.permit.paces != state.paces:
                    self._return(delivery)
            if len(deliveries) > 1:
                self._order_keys(deliveries)
        try:
            with self._calling:
                known = map(limit_state_of, deliveries)
                if unanswered := [state for state in known if state.asked_at <= since]:
                    self._ask_for_all({pace.name for state in unanswered for pace in state.paces})
        finally:
            with self._lock:
                self._asking.difference_update(map(id, deliveries))
                for state in map(limit_state_of, deliveries):
                    state.comes_by = max(state.comes_by, state.permit_from + FORGOTTEN_AFTER)

    def _order_keys(self, deliveries: Sequence[Starting]) -> None:
        """Let deliveries of one key, which start in this order, wait in it: one that comes up again
        was in line before, and each permit would be that of another one that waits for it. The
        caller holds the lock."""
        by_key: defaultdict[object, list[Starting]] = defaultdict(list)
        for delivery in deliveries:
            by_key[delivery.shard].append(delivery)
        several = [alike for alike in by_key.values() if len(alike) > 1]
        if not several:
            return
        places, line = {key: n for n, key in enumerate(self._line)}, list(self._line.values())
        for alike in several:
            theirs = sorted(places[id(delivery)] for delivery in alike)
            for place, delivery in zip(theirs, alike, strict=True):
                line[place] = delivery
        self._line = {id(delivery): delivery for delivery in line}

    def _ask_for_all(self, names: Collection[str]) -> None:
        """Ask for every delivery here that waits for one of these rates."""
        for _ in range(MOST_CALLS):
            if not self._ask_for_first(names):
                return

    def _ask_for_first(self, names: Collection[str]) -> bool:
        """Ask for the first deliveries that wait for one of these rates; return whether others may
        have a permit, too."""
        began = self._clock.monotonic()
        with self._lock:
            self._forget(began)
            waiting = self._first_waiting(names, began)
            asks = [self._ask_of(limit_state_of(delivery)) for delivery in waiting]
            old = {each: taken for each in waiting if (taken := self._take_old(each)) is not None}
        try:
            answers, ended = self._call(asks)
        except Exception as error:
            with self._lock:
                self._put_back(old, error)
            raise
        for delivery in old:
            self._on_unused(delivery)
        earlier = dict[Starting, float]()
        with self._lock:
            for delivery, ask, answer in zip(waiting, asks, answers, strict=True):
                self._note(delivery, ask, answer, (began, ended), earlier)
        if earlier:
            self._on_earlier(earlier)
        return len(waiting) >= MOST_ASKED and all(answer.stamp for answer in answers)

    @staticmethod
    def _take_old(delivery: Starting) -> Taken | None:
        """Return the permit of a delivery that another one is asked for in place of, and has none
        any more: whoever gives back what it has meanwhile does not return this one, too. The caller
        holds the lock."""
        state = limit_state_of(delivery)
        taken, state.permit = state.permit, None
        return taken

    def _put_back(self, old: Mapping[Starting, Taken], error: Exception) -> None:
        """Give deliveries their permits back whose replacement has failed; the caller holds the
        lock. The permit of a delivery that has stopped waiting is returned, unless the failed call
        may have removed it: then it counts until its window is over."""
        has_no_effect = isinstance(error, CoordinationError) and not error.may_have_effect
        for delivery, taken in old.items():
            state = limit_state_of(delivery)
            if self._line.get(id(delivery)) is delivery and state.permit is None:
                state.permit = taken
                continue
            self._on_unused(delivery)
            if has_no_effect:
                self._used.append((taken, None))

    def _call(self, asks: Sequence[Ask]) -> tuple[list[Permit], float]:
        """Ask coordination, and tell it what was used; return its answers and when they came."""
        began = self._clock.monotonic()
        with self._lock:
            used, self._used = self._used, []
        told = [
            Used(taken.paces, taken.stamp, None if at is None else began - at) for taken, at in used
        ]
        try:
            answers = self._permit(asks, told)
        except CoordinationError as error:
            # Told twice, what another has counted since might count no longer.
            if not error.may_have_effect:
                with self._lock:
                    self._used[:0] = used
            raise
        finally:
            ended = self._clock.monotonic()
            # Quick to believe that it takes long, slower to believe that it does not.
            took = min(ended - began, LONGEST_CALL)
            self._call_took = max(took, 0.9 * self._call_took + 0.1 * took)
        return answers, ended

    def _note(
        self,
        delivery: Starting,
        ask: Ask,
        answer: Permit,
        call: tuple[float, float],
        earlier: dict[Starting, float],
    ) -> None:
        """Note what a call that began and ended then was answered; the caller holds the lock."""
        (began, ended), state = call, limit_state_of(delivery)
        moment, starts_no_more = ended + answer.wait, self._line.get(id(delivery)) is not delivery
        taken = None
        if answer.stamp:
            taken = Taken(
                ask.paces, answer.stamp, moment, began + answer.wait + ask.lasts - TO_THE_CALL
            )
        state.asked_at = began
        # Where the answer took too long, another one in its place would be given for now, which
        # its moment may lie behind. Who starts no more was found so meanwhile.
        if taken is not None and (taken.end < taken.begin or starts_no_more):
            self._used.append((taken, None))
            self._on_unused(delivery)
            taken = None
        if starts_no_more:
            return
        is_earlier = moment < state.permit_from - MUCH_EARLIER
        state.permit, state.permit_from = taken, moment
        if is_earlier:
            earlier[delivery] = moment - self.soon(delivery)
            state.comes_by = min(state.comes_by, moment + FORGOTTEN_AFTER)

    def _first_waiting(self, names: Collection[str], now: float) -> list[Starting]:
        """Return the deliveries to ask for, in order, and tell the last of very many when they
        start if all before them do so evenly; the caller holds the lock."""
        first: list[Starting] = []
        asked = Counter[str]()
        for key, delivery in self._line.items():
            state = limit_state_of(delivery)
            wanted = {pace.name for pace in state.paces}
            # Of one that is late, its own lane asks when it comes.
            is_late = key not in self._asking and now > state.permit_from
            if wanted.isdisjoint(names) or is_late or self._is_good(state, now):
                continue
            if any(asked[name] >= MOST_ASKED for name in wanted):
                wait = max(asked[pace.name] * pace.interval for pace in state.paces)
                state.asked_at, state.permit_from = now, now + wait
            else:
                first.append(delivery)
            asked.update(wanted)
        return first

    def _ask_of(self, state: LimitState) -> Ask:
        shortest = min(pace.seconds for pace in state.paces)
        lasts = max(min(SHORTEST_LIFE * shortest, 0.5), min(2.5 * self._delay, LONGEST_LIFE))
        lasts += TO_THE_CALL + 1.5 * self._call_took
        within = max(LEAST_AHEAD, 2 * self.preparation) + self._call_took
        stamp = state.permit.stamp if state.permit is not None else 0
        return Ask(state.paces, lasts, within, stamp)

    def _forget(self, now: float) -> None:
        """Return the permits that became old of deliveries that did not come for them, and forget
        those that do not come any more; the caller holds the lock."""
        for key, delivery in list(self._line.items()):
            state = limit_state_of(delivery)
            is_gone = now > state.comes_by
            if is_gone:
                del self._line[key]
            if is_gone or (state.permit is not None and now > state.permit.end + LATE):
                self._return(delivery)

    def _return(self, delivery: Starting) -> None:
        """Give back a permit that is not used; the caller holds the lock."""
        state = limit_state_of(delivery)
        if state.permit is not None:
            self._used.append((state.permit, None))
            self._on_unused(delivery)
            state.permit = None

    def report(self) -> None:
        """Tell coordination what it does not know yet of permits that were used, or not.

        :raises CoordinationError: it cannot be told.
        """
        with self._calling:
            with self._lock:
                self._forget(self._clock.monotonic())
                has_any = bool(self._used)
            if has_any:
                self._call([])

    # --- What was answered ------------------------------------------------------------------------

    @property
    def preparation(self) -> float:
        """Seconds that it takes at most, nearly always, until a start is prepared."""
        return min(self._took + 2 * self._took_more, LONGEST_PREPARATION)

    def soon(self, delivery: Starting) -> float:
        """Return how many seconds before its moment a lane is to prepare a start: so early that it
        nearly always is in time, or so late that it nearly never waits in a transaction that keeps
        others from writing."""
        before = self.preparation
        if delivery.is_in_transaction and not self._waits_in_transactions:
            before = min(max(0.0, self._took - 2 * self._took_more), LONGEST_PREPARATION)
        state = limit_state_of(delivery)
        if state.permit is None:
            before += self._call_took
        return min(before, min(pace.seconds for pace in state.paces) / 2)

    @staticmethod
    def _is_good(state: LimitState, now: float) -> bool:
        return state.permit is not None and now <= state.permit.end

    def has_permit(self, delivery: Starting) -> bool:
        """Return whether a delivery has a permit of its rates that is good now, or will be."""
        state = limit_state_of(delivery)
        with self._lock:
            taken = state.permit
            is_good = self._is_good(state, self._clock.monotonic())
            return is_good and taken is not None and taken.paces == state.paces

    def waiting_for(self, pace: Pace) -> list[LimitState]:
        """Return what is known of the deliveries that wait here for a rate."""
        now = self._clock.monotonic()
        with self._lock:
            known = map(limit_state_of, self._line.values())
            return [state for state in known if pace in state.paces and now <= state.comes_by]

    def end_of_line(self, pace: Pace) -> float:
        """Return in how many seconds the last delivery that waits here for a rate has started."""
        last = max((each.permit_from for each in self.waiting_for(pace)), default=0.0)
        return max(0.0, last + pace.interval - self._clock.monotonic())

    # --- Starting ---------------------------------------------------------------------------------

    def note_prepared(self, delivery: Starting) -> None:
        """Note that a start is ready now: how long that took, and how late it is."""
        now, state = self._clock.monotonic(), limit_state_of(delivery)
        if state.prepared_from:
            took, state.prepared_from = now - state.prepared_from, 0.0
            self._took_more += 0.25 * (abs(took - self._took) - self._took_more)
            self._took += 0.125 * (took - self._took)
        late = max(0.0, now - state.permit_from)
        # As of calls.
        self._delay += (0.7 if late > self._delay else 0.05) * (late - self._delay)

    def use(self, delivery: Starting) -> bool:
        """Use the permit of a delivery whose handler is called next; False: it has none any more.
        It counts as if the start came as late as it may, until ``note_start``."""
        with self._lock:
            taken, now = limit_state_of(delivery).permit, self._clock.monotonic()
            if taken is None or not taken.begin - EARLY <= now <= taken.end:
                return False
            self._line.pop(id(delivery), None)
            return True

    def note_start(self, delivery: Starting) -> None:
        """Note that the handler of a delivery is called now."""
        state = limit_state_of(delivery)
        with self._lock:
            taken, state.permit = state.permit, None
            if taken is not None:
                self._used.append((taken, self._clock.monotonic()))

    def give_back_all(self) -> None:
        """Give back the permits of all that wait here: the worker ends."""
        with self._lock:
            waiting, self._line = self._line, {}
            for delivery in waiting.values():
                self._return(delivery)

    def give_back(self, deliveries: Collection[Starting]) -> None:
        """Give back the permits of deliveries that do not start, if they have any."""
        with self._lock:
            for delivery in deliveries:
                self._line.pop(id(delivery), None)
                self._return(delivery)
